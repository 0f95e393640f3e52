"""Rounds of a real daemon, a real mount and a real kill -9: what was closed is there afterwards, also in the bucket.

In each round two writers change files of their own; soon after a close the daemon is killed, while the bucket
is slow to take anything. Then another daemon starts, shows, and drains.
"""

import hashlib
import json
import random
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from fusecache.model.objects import SYMLINK_TARGET
from tests.s3server import Fault, FaultAction, ServerProcess
from tests.support import ROOT
from tests.support.daemons import Daemon
from tests.support.mounts import wait_until

WRITERS = 2
CLOSES = 25  # at most so many, before the time begins after which the daemon is killed
KILL_SECONDS = 1.1  # at most, from that close to the kill
PUBLISH_SECONDS = 0.8  # that each publishing request takes
SYNC_SECONDS = 120.0


@dataclass
class Findings:
    """What all rounds found. closed, found: files; wrong: what was other than promised."""

    rounds: int = 0
    closed: int = 0
    found: int = 0
    unpublished: int = 0
    wrong: list[str] = field(default_factory=list)

    def text(self) -> str:
        """Return it in one line."""
        share = self.unpublished / self.closed if self.closed else 0.0
        return (
            f"rounds {self.rounds}, files closed / found / wrong = {self.closed} / {self.found} / {len(self.wrong)}, "
            f"unpublished at the kill {share:.0%}"
        )


class Promises:
    """What a writer was promised, read from its lines as they come."""

    def __init__(self, lines: IO[str]) -> None:
        self.kept: dict[str, str] = {}
        self.pending: dict[str, str | None] | None = None
        self.count = 0
        self.ended, self.ended_at = "", 0.0
        self._lines = lines

    def read(self) -> None:
        """Read until the writer has ended."""
        with self._lines:
            for text in self._lines:
                line = json.loads(text)
                if "will" in line:
                    self.pending = line["will"]
                elif "ended" in line:
                    self.ended, self.ended_at = line["ended"], time.monotonic()
                elif self.pending is not None:
                    self.kept = _after(self.kept, self.pending)
                    self.pending = None
                    self.count += 1

    def allowed(self) -> list[dict[str, str]]:
        """Return what may be shown: with the call that was under way, or without it."""
        return [self.kept] if self.pending is None else [self.kept, _after(self.kept, self.pending)]


class Lane:
    """One daemon after the other on one cache directory, round after round."""

    def __init__(self, directory: Path, seed: int, largest: int = 300_000) -> None:
        self._server = ServerProcess()
        self._daemon = Daemon(self._server, directory)
        self._rng = random.Random(seed)
        self._largest = largest

    def __enter__(self) -> "Lane":
        self._server.__enter__()
        self._daemon.mount()
        return self

    def __exit__(self, *_: object) -> None:
        self._daemon.clean_up()
        self._server.__exit__(None, None, None)

    def run(self, name: str, findings: Findings, lock: threading.Lock) -> None:
        """One round, in a directory of that name."""
        top = self._daemon.path / name
        top.mkdir()
        for operation in ("PutObject", "CompleteMultipartUpload", "CopyObject", "DeleteObject"):
            self._server.control.faults(
                Fault(FaultAction.DELAY, operation=operation, seconds=PUBLISH_SECONDS)
            )
        writers = [self._start_writer(top / str(number)) for number in range(WRITERS)]
        killed_at = self._kill_after_a_close([promises for _, promises, _ in writers])
        for process, promises, reader in writers:
            process.wait(30)
            reader.join(30)
            if promises.ended_at < killed_at:
                raise AssertionError(f"a writer ended before the kill: {promises.ended}")
        in_bucket = self._digests_in_bucket(name)
        self._server.control.clear_faults()
        self._daemon.mount()
        kept, wrong = {}, []
        for number, (_, promises, _) in enumerate(writers):
            folder = f"{name}/{number}"
            shown = _digests_below(self._daemon.path / folder)
            wanted = _nearest(promises.allowed(), shown)
            kept |= {f"{folder}/{path}": digest for path, digest in wanted.items()}
            wrong += _differences(f"mount {folder}", wanted, shown)
        with lock:
            findings.closed += len(kept)
            findings.unpublished += sum(in_bucket.get(path) != digest for path, digest in kept.items())
        # They would be published after 60 seconds only; whether they are there has been seen.
        for path in [path for path in kept if path.endswith(".tmp")]:
            (self._daemon.path / path).unlink()
            del kept[path]
            with lock:
                findings.found += 1
        if self._daemon.sync(timeout=SYNC_SECONDS) != 0:
            wrong.append(f"{name}: the sync after the restart failed")
        shown = self._digests_in_bucket(name)
        wrong += _differences("bucket", kept, shown)
        if uploads := self._server.control.uploads():
            wrong.append(f"{name}: uploads left behind {[upload.key for upload in uploads]}")
        with lock:
            findings.rounds += 1
            findings.found += sum(shown.get(path) == digest for path, digest in kept.items())
            findings.wrong += wrong

    def _start_writer(self, top: Path) -> "tuple[subprocess.Popen[str], Promises, threading.Thread]":
        top.mkdir()
        words = [top, str(self._rng.randrange(1 << 30)), str(self._largest)]
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.crash.writer", *words], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        promises = Promises(process.stdout)
        reader = threading.Thread(target=promises.read)
        reader.start()
        return process, promises, reader

    def _kill_after_a_close(self, promises: list[Promises]) -> float:
        wanted = self._rng.randint(1, CLOSES)
        wait_until(lambda: sum(each.count for each in promises) >= wanted, f"{wanted} closes", 60)
        threading.Event().wait(self._rng.uniform(0, KILL_SECONDS))
        killed_at = time.monotonic()
        self._daemon.kill()
        return killed_at

    def _digests_in_bucket(self, name: str) -> dict[str, str]:
        control = self._server.control
        found = {}
        for key, view in control.objects().items():
            if key.startswith(f"{name}/") and not key.endswith("/"):
                target = view.metadata.get(SYMLINK_TARGET)
                found[key] = f"-> {target}" if target else hashlib.sha256(control.read(key)).hexdigest()
        return found


def run_rounds(
    directory: Path, rounds: int, seed: int, *, lanes: int = 3, largest: int = 300_000
) -> Findings:
    """Run rounds, several daemons side by side. Raises what a lane raised."""
    findings, lock = Findings(), threading.Lock()
    numbers = iter(range(rounds))

    def work(lane_number: int) -> None:
        with Lane(directory / f"lane-{lane_number}", seed * 1000 + lane_number, largest) as lane:
            while True:
                with lock:
                    number = next(numbers, None)
                if number is None:
                    return
                lane.run(f"round-{number}", findings, lock)

    with ThreadPoolExecutor(lanes) as pool:
        for ended in [pool.submit(work, number) for number in range(lanes)]:
            ended.result()
    return findings


def _after(kept: dict[str, str], changes: dict[str, str | None]) -> dict[str, str]:
    after = {path: digest for path, digest in kept.items() if path not in changes}
    return {**after, **{path: digest for path, digest in changes.items() if digest is not None}}


def _nearest(allowed: list[dict[str, str]], shown: dict[str, str]) -> dict[str, str]:
    return next((each for each in allowed if each == shown), allowed[0])


def _digests_below(top: Path) -> dict[str, str]:
    found = {}
    for path in sorted(top.rglob("*")):
        if path.is_symlink():
            found[str(path.relative_to(top))] = f"-> {path.readlink()}"
        elif path.is_file():
            found[str(path.relative_to(top))] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def _differences(where: str, wanted: dict[str, str], shown: dict[str, str]) -> list[str]:
    return [
        f"{where}: {path} is {str(shown.get(path))[:12]}, not {str(wanted.get(path))[:12]}"
        for path in sorted(wanted.keys() | shown.keys())
        if wanted.get(path) != shown.get(path)
    ]
