"""`fusecache access`: what each key can do in each bucket, and that nothing is left behind."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.mount.conftest import as_new
from tests.s3server import Account, Fault, FaultAction, ServerProcess
from tests.support.mounts import FUSECACHE, run

pytestmark = pytest.mark.s3server_only

READ_ONLY = {"list", "get"}
ALL = {"list", "get", "put", "delete", "multipart", "conditional"}
FAMILIES = {"DATASET": "dataset", "GRADIENTS": "gradients"}


@dataclass(frozen=True)
class Store:
    """A server with a bucket, a key for reading and one for writing for each family."""

    server: ServerProcess

    def allow(self, access_key: str, bucket: str, **rights: Any) -> None:
        """Give a key other rights."""
        self.server.control.add_account(Account(access_key, "secret", buckets=(bucket,), **rights))

    def environment(self, **changes: str) -> dict[str, str]:
        """Return the variables of both families."""
        found = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        for family, bucket in FAMILIES.items():
            found |= {
                f"{family}_BUCKET_NAME": bucket,
                f"{family}_ENDPOINT_URL": self.server.endpoint_url,
                f"{family}_READ_ACCESS_KEY_ID": f"{bucket}-read",
                f"{family}_READ_SECRET_ACCESS_KEY": "secret",
                f"{family}_WRITE_ACCESS_KEY_ID": f"{bucket}-write",
                f"{family}_WRITE_SECRET_ACCESS_KEY": "secret",
            }
        return {**found, **changes}

    def test(self, *words: str, **changes: str) -> tuple[int, dict[tuple[str, str], dict[str, Any]]]:
        """Run the command; return its status, and the row of each (key, bucket)."""
        done = run(
            FUSECACHE, "access", "--json", *words, check=False, env=self.environment(**changes), seconds=120
        )
        rows = json.loads(done.stdout)["keys"]
        return done.returncode, {(row["key"], row["bucket"]): row for row in rows}

    def left(self) -> list[str]:
        """Return every object and upload, but the one that is there from the start."""
        control, found = self.server.control, []
        for bucket in FAMILIES.values():
            found += [key for key in control.objects(bucket=bucket) if key != "shard"]
            found += [upload.key for upload in control.uploads(bucket=bucket)]
        return found


BOTH = ("--credentials-from", "DATASET", "--credentials-from", "GRADIENTS")


def rights(row: dict[str, Any]) -> set[str]:
    return {right for right, answer in row["can"].items() if answer}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """A server with both buckets."""
    with ServerProcess() as server:
        for bucket in FAMILIES.values():
            server.control.add_bucket(bucket)
        yield server
        assert server.control.offences() == []


@pytest.fixture
def store(server: ServerProcess) -> Iterator[Store]:
    as_new(server)
    found = Store(server)
    for bucket in FAMILIES.values():
        server.control.put("shard", b"an object that was there before", bucket=bucket)
        found.allow(f"{bucket}-read", bucket, writable=False)
        found.allow(f"{bucket}-write", bucket)
    yield found
    server.control.clear_faults()
    server.control.close()


@pytest.mark.parametrize("words", [BOTH, ()], ids=["named", "found"])
def test_isolated_families_are_as_they_should(store: Store, words: tuple[str, ...]) -> None:
    """Also without an argument: the families of the environment are found."""
    status, rows = store.test(*words)
    assert status == 0
    assert {pair: rights(row) for pair, row in rows.items()} == {
        ("DATASET read", "dataset"): READ_ONLY,
        ("DATASET write", "dataset"): ALL,
        ("GRADIENTS read", "gradients"): READ_ONLY,
        ("GRADIENTS write", "gradients"): ALL,
        **{
            (f"{family} {role}", bucket): set()
            for family, bucket in (("DATASET", "gradients"), ("GRADIENTS", "dataset"))
            for role in ("read", "write")
        },
    }
    assert store.left() == []
    for bucket in FAMILIES.values():
        assert store.server.control.read("shard", bucket=bucket) == b"an object that was there before"


def test_bucket_that_is_named_twice_is_tested_once(store: Store) -> None:
    status, _ = store.test("--credentials-from", "DATASET", "--credentials-from", "DATASET")
    assert (status, store.server.control.counts()["ListObjectsV2"]) == (0, 4)  # one of each key


def test_key_that_opens_another_bucket_is_found(store: Store) -> None:
    store.server.control.add_account(
        Account("dataset-read", "secret", writable=False, buckets=("dataset", "gradients"))
    )
    status, rows = store.test(*BOTH)
    assert status == 1
    assert rows["DATASET read", "gradients"]["wrong"] == ["list", "get"]
    assert [pair for pair, row in rows.items() if row["wrong"]] == [("DATASET read", "gradients")]


def test_read_key_that_may_write_is_found(store: Store) -> None:
    store.allow("dataset-read", "dataset", denied=frozenset({"PutObject"}))
    status, rows = store.test("--credentials-from", "DATASET")
    assert status == 1
    assert rows["DATASET read", "dataset"]["wrong"] == ["delete", "multipart"]
    assert store.left() == []


@pytest.mark.parametrize(
    ("denied", "wrong"),
    [
        ({"PutObject"}, ["put", "conditional"]),
        ({"CreateMultipartUpload"}, ["multipart"]),
        ({"GetObject", "HeadObject"}, ["get", "conditional"]),
    ],
)
def test_write_key_that_cannot_work_is_found(store: Store, denied: set[str], wrong: list[str]) -> None:
    store.allow("dataset-write", "dataset", denied=frozenset(denied))
    status, rows = store.test("--credentials-from", "DATASET")
    assert (status, rows["DATASET write", "dataset"]["wrong"]) == (1, wrong)
    assert store.left() == []


def test_another_key_removes_what_the_writer_cannot(store: Store) -> None:
    store.allow("dataset-write", "dataset", denied=frozenset({"DeleteObject", "AbortMultipartUpload"}))
    store.server.control.add_account(Account("gradients-write", "secret"))  # for every bucket
    status, rows = store.test(*BOTH)
    assert status == 1
    assert rows["DATASET write", "dataset"]["wrong"] == ["delete", "multipart"]
    assert store.left() == []


def test_object_that_no_key_removes_is_named(store: Store) -> None:
    store.allow("dataset-write", "dataset", denied=frozenset({"DeleteObject"}))
    done = run(FUSECACHE, "access", "--credentials-from", "DATASET", check=False, env=store.environment())
    assert done.returncode == 1
    (left,) = store.left()
    assert f"the object s3://dataset/{left} remains" in done.stderr
    assert "fusecache clean s3://dataset --prefix .fusecache-probe- --even-recent --delete" in done.stderr
    assert "DATASET write: delete in s3://dataset: not allowed: DELETE" in done.stdout


@pytest.mark.parametrize("fault", ["503", "silent", "clock"])
def test_temporary_errors_are_unknown_not_denied(store: Store, fault: str) -> None:
    match fault:
        case "503":
            store.server.control.faults(Fault(FaultAction.ANSWER, operation="GetObject", status=503))
        case "silent":
            store.server.control.faults(Fault(FaultAction.DROP_BEFORE, operation="GetObject"))
        case _:
            store.server.control.set(clock_skew=3600)
    status, rows = store.test("--credentials-from", "DATASET")
    assert status == 2
    assert {row["can"]["get"] for row in rows.values()} == {None}
    assert not any(row["wrong"] for row in rows.values())
    assert store.left() == []


def test_what_was_refused_does_not_stay_behind(store: Store) -> None:
    """No key may remove anything, and nothing was written."""
    names = {"DATASET_WRITE_ACCESS_KEY_ID": "", "DATASET_WRITE_SECRET_ACCESS_KEY": ""}
    status, _ = store.test("--credentials-from", "DATASET", **names)
    assert status == 0


def test_a_single_temporary_error_is_asked_again(store: Store) -> None:
    store.server.control.faults(Fault(FaultAction.ANSWER, operation="ListObjectsV2", status=503, times=1))
    status, _ = store.test("--credentials-from", "DATASET")
    assert status == 0


def test_an_object_that_cannot_be_read_says_nothing_of_a_key(store: Store) -> None:
    """As one that is encrypted with its owner's key: what the test wrote itself is read instead."""
    store.server.control.faults(
        Fault(FaultAction.ANSWER, operation="GetObject", key="shard", status=400, code="InvalidRequest")
    )
    status, _ = store.test("--credentials-from", "DATASET")
    assert status == 0


def test_what_stays_behind_is_no_success(store: Store) -> None:
    # Requests: one of the key for writing that tests the right, then the removal of what it wrote.
    store.server.control.faults(Fault(FaultAction.ANSWER, operation="DeleteObject", nth=3, status=500))
    done = run(
        FUSECACHE, "access", "--credentials-from", "DATASET", "--json", check=False, env=store.environment()
    )
    (left,) = store.left()
    found = json.loads(done.stdout)
    assert (done.returncode, found["result"]) == (2, "unknown")
    assert f"the object s3://dataset/{left} remains: " in found["left"][0]


def test_a_silent_bucket_gets_one_request_of_each_key(store: Store) -> None:
    store.server.control.faults(Fault(FaultAction.DROP_BEFORE, operation="ListObjectsV2"))
    status, _ = store.test("--credentials-from", "DATASET")
    assert (status, store.server.control.counts()) == (2, {"ListObjectsV2": 2})


def test_silence_after_the_write_leaves_nothing(store: Store) -> None:
    store.server.control.faults(
        Fault(FaultAction.DROP_AFTER, operation="PutObject", times=1),
        Fault(FaultAction.DROP_BEFORE, operation="PutObject"),  # it is sent again on a new connection
    )
    status, rows = store.test("--credentials-from", "DATASET")
    assert (status, rows["DATASET write", "dataset"]["can"]["put"]) == (2, None)
    store.server.control.wait_requests(1, "DeleteObject")
    assert store.left() == []


def test_unanswered_upload_leaves_nothing(store: Store) -> None:
    store.server.control.faults(Fault(FaultAction.DROP_AFTER, operation="CreateMultipartUpload"))
    status, _ = store.test("--credentials-from", "DATASET")
    assert status == 2
    assert store.left() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("operation", ["PutObject", "UploadPart"])
def test_interrupted_test_leaves_nothing(store: Store, number: signal.Signals, operation: str) -> None:
    count = 2 if operation == "PutObject" else 1  # the first PUT is that of the key for reading
    store.server.control.faults(Fault(FaultAction.HOLD, operation=operation, nth=count))
    command = [FUSECACHE, "access", "--credentials-from", "DATASET"]
    with subprocess.Popen(command, env=store.environment(), stdout=subprocess.PIPE) as process:
        store.server.control.wait_requests(count, operation, finished=False)
        process.send_signal(number)
        store.server.control.clear_faults()
        process.communicate(timeout=60)
    assert process.returncode == 130
    assert store.server.control.log(operation)[-1].took_effect
    assert store.left() == []


@pytest.mark.parametrize("conditions", ["ignored", "refused", "never-holds"])
def test_store_without_conditions_is_found(store: Store, conditions: str) -> None:
    store.server.control.set_rules(conditional_writes=conditions)
    status, rows = store.test("--credentials-from", "DATASET")
    assert (status, rows["DATASET write", "dataset"]["wrong"]) == (1, ["conditional"])
    assert store.left() == []


def test_missing_variables_are_named(store: Store) -> None:
    names = {"DATASET_READ_SECRET_ACCESS_KEY": "", "DATASET_WRITE_ACCESS_KEY_ID": ""}
    done = run(
        FUSECACHE, "access", "--credentials-from", "DATASET", check=False, env=store.environment(**names)
    )
    assert done.returncode == 2
    assert "DATASET_READ_SECRET_ACCESS_KEY, DATASET_WRITE_ACCESS_KEY_ID" in done.stderr


def test_source_is_probed_below_its_prefix(store: Store, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(
        "".join(
            f"[{role}]\naws_access_key_id = dataset-{role}\naws_secret_access_key = secret\n"
            for role in ("read", "write")
        )
    )
    keys.chmod(0o600)
    words = ["s3://dataset/run", "--endpoint-url", store.server.endpoint_url, "--credentials-file", str(keys)]
    status, rows = store.test(*words, "--profile", "read", "--write-profile", "write")
    assert status == 0
    assert [rights(row) for row in rows.values()] == [READ_ONLY, ALL]
    keys_sent = {entry.key for entry in store.server.control.log() if entry.key}
    assert all(key.startswith("run/.fusecache-probe-") for key in keys_sent), keys_sent
    assert store.left() == []


def test_unreachable_bucket_ends_with_status_2(store: Store) -> None:
    status, rows = store.test("--credentials-from", "DATASET", DATASET_ENDPOINT_URL="http://127.0.0.1:1")
    assert status == 2
    assert not any(rights(row) or row["wrong"] for row in rows.values())


def test_usage_without_a_bucket_is_refused() -> None:
    done = run(FUSECACHE, "access", check=False)
    assert (done.returncode, "--credentials-from" in done.stderr) == (2, True)
