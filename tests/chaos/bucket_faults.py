"""Faults of the bucket: what it answers, how it is reached, and who may."""

import os
import random
import threading
from pathlib import Path

from tests.chaos.programs import FILES
from tests.s3server import Account, Fault, FaultAction, ServerProcess

WRITES = (
    "PutObject",
    "UploadPart",
    "CompleteMultipartUpload",
    "CopyObject",
    "DeleteObject",
    "CreateMultipartUpload",
)

OTHER_SEED = 1000


class BucketFaults:
    """Begins and ends them. One of `ANSWERS` and one of `WAYS` may be in force at a time."""

    def __init__(self, server: ServerProcess, credentials: Path) -> None:
        self._server, self._credentials = server, credentials
        self._lock = threading.Lock()
        self._key_count = 0
        self.account = ""
        self._give_keys()

    def begin(self, kind: str, choice: int) -> None:
        """Begin a fault."""
        rng, control = random.Random(choice), self._server.control
        match kind:
            case "silent":
                control.pause("blackhole")
            case "refused":
                control.pause("refuse")
            case "slow":
                control.set(
                    latency=rng.choice([0.2, 1.0, 4.0]), jitter=0.5, bandwidth=rng.choice([50_000, 2_000_000])
                )
            case "keys revoked":
                control.revoke(self.account)
            case "clock jump":
                control.set(clock_skew=rng.choice([-7200.0, -1000.0, 1000.0, 86_400.0]))
            case "other bytes":
                for number, size in enumerate(FILES):
                    if rng.random() < 0.6:
                        control.add_synthetic(
                            f"data/f{number}", size - rng.choice([0, 0, 1]), OTHER_SEED + number
                        )
            case _:
                control.faults(*_answers(kind, rng))
                if kind == "resets":
                    control.drop_connections()

    def end(self, kind: str) -> None:
        """End it."""
        control = self._server.control
        match kind:
            case "silent" | "refused":
                control.resume()
            case "slow":
                control.set(latency=0.0, jitter=0.0, bandwidth=None)
            case "keys revoked":
                self._give_keys()
            case "clock jump":
                control.set(clock_skew=0.0)
            case "other bytes":
                for number, size in enumerate(FILES):
                    control.add_synthetic(f"data/f{number}", size, number)
            case _:
                control.clear_faults()

    def _give_keys(self) -> None:
        """Make new keys, and write them where the daemon reads them."""
        self._key_count += 1
        self.account = f"CHAOS{self._key_count:05}"
        secret = self.account * 4
        self._server.control.add_account(Account(self.account, secret))
        new = self._credentials.with_suffix(".new")
        new.touch(mode=0o600)
        new.write_text(f"AWS_ACCESS_KEY_ID={self.account}\nAWS_SECRET_ACCESS_KEY={secret}\n")
        os.replace(new, self._credentials)


def _answers(kind: str, rng: random.Random) -> list[Fault]:
    share = rng.choice([0.2, 0.6, 1.0])
    answer, after = FaultAction.ANSWER, FaultAction.ANSWER_AFTER
    operations = rng.choice([("*",), WRITES, ("GetObject", "HeadObject", "ListObjectsV2")])
    match kind:
        case "5xx":
            status, code = rng.choice([(503, "SlowDown"), (500, "InternalError"), (502, "BadGateway")])
            faults = [
                Fault(answer, operation=name, probability=share, status=status, code=code)
                for name in operations
            ]
        case "5xx after the effect":
            faults = [
                Fault(after, operation=name, probability=share, status=500, code="InternalError")
                for name in WRITES
            ]
        case "403":
            # All or none: a single name that stays refused for 90 s is rejected, as the contract says.
            faults = [Fault(answer, operation=name, status=403, code="AccessDenied") for name in operations]
        case "501":
            faults = [
                Fault(answer, operation=name, probability=share, status=501, code="NotImplemented")
                for name in operations
            ]
        case "resets":
            faults = [Fault(FaultAction.DROP_BEFORE, probability=share)]
        case "lost answers":
            faults = [
                Fault(rng.choice([FaultAction.DROP_AFTER, FaultAction.SILENT_AFTER]), operation=name,
                      probability=share, seconds=5.0)
                for name in WRITES
            ]  # fmt: skip
        case "short bodies":
            faults = [
                Fault(FaultAction.SHORT_BODY, operation="GetObject", probability=share, after_bytes=1000),
                Fault(
                    FaultAction.STALL, operation="GetObject", probability=0.3, after_bytes=1000, seconds=8.0
                ),
            ]
        case _:
            raise ValueError(f"no such fault: {kind}")
    return faults
