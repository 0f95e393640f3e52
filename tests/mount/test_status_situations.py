"""The text of `fusecache status` in five situations, captured on real mounts: the lines that matter, numbers masked."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.s3server import Fault, FaultAction
from tests.support.mounts import FUSECACHE, Mount, run, wait_until
from tests.support.s3_buckets import Bucket

MIB = 2**20
pytestmark = pytest.mark.s3server_only
# A number with its unit, as `format_text` writes it.
NUMBER = re.compile(r"\d+(\.\d+)?( (B|[KMGT]iB|µs|ms|s|min)\b)?")


def capture(path: Path) -> tuple[str, dict[str, list[str]]]:
    """Return the verdict, and the lines of each group in the order of the groups.

    Leaves out what the kernel refused: that is the machine's, such as a read-only /sys.
    """
    verdict, *lines = run(FUSECACHE, "status", path).stdout.splitlines()
    groups: dict[str, list[str]] = {}
    name = ""
    for line in lines:
        found = re.match(r"(.*?)  +(.*)", line)
        assert found is not None, line
        name = NUMBER.sub("N", found[1]) or name
        group = groups.setdefault(name, [])
        if not found[2].startswith("the kernel refused "):
            group.append(found[2])
    if not groups.get("problems", True):
        del groups["problems"]
    return verdict, groups


def masked(text: str) -> str:
    return NUMBER.sub("N", text)


@contextmanager
def written(path: Path) -> Iterator[None]:
    """Have a process write 10 bytes to a new file, and keep it open.

    A process of its own: each program that this one starts inherits its files, and closes them, which queues them. The
    name is a temporary one: any other file that stays open is queued as it is after a minute.
    """
    code = (
        "import os, sys; log = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY); os.write(log, b'not closed'); "
    )
    code += "os.fsync(log); print('written', flush=True); sys.stdin.read()"  # the kernel has given it to the daemon
    with subprocess.Popen(
        [sys.executable, "-c", code, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "written\n"
        yield


SET_UP = ["mount", "daemon", "if it dies", "log", "options", "cache"]


def test_idle(mount, bucket: Bucket):
    bucket.put("data", bytes(3 * MIB))
    one: Mount = mount()
    assert (one.path / "data").read_bytes() == bytes(3 * MIB)
    (one.path / "result").write_bytes(b"done")
    one.sync()
    wait_until(lambda: "no reads" not in capture(one.path)[1]["last N"], "the read in the rates")
    verdict, groups = capture(one.path)
    assert verdict == "OK"
    assert list(groups) == ["only here", "last N", *SET_UP, "since start"]
    assert groups["only here"] == ["nothing: the bucket has every closed file"]
    read, traffic = groups["last N"]
    assert re.match(r"read \S+ [KM]iB/s, (from memory .*)?from bucket \S+ [KM]iB/s$", read)
    assert masked(traffic) in (
        "downloads N/s, uploads N/s, N requests/s",
        "downloads N/s, uploads N/s, N requests a minute",
    )
    assert masked(groups["since start"][0]) == "N reads, N; hits N%; pN N, pN N"
    # The test server's prices are unknown.
    assert not any("$" in line for lines in groups.values() for line in lines)


def test_prices_are_those_of_r2_on_r2(mount, bucket: Bucket):
    bucket.put("data", b"1")
    one: Mount = mount(of=bucket.as_r2())
    (one.path / "data").read_bytes()
    (line,) = [line for line in capture(one.path)[1]["since start"] if "$" in line]
    assert line.endswith(": about $0.0000; R2's prices, before its free tier") or "LIST" in line
    status = one.status()
    made = status["requests"]
    class_b = made["heads"] + made["gets"]
    class_a = sum(made.values()) - class_b - made["deletes"] - made["aborts"]
    cost = class_a * 4.50e-6 + class_b * 0.36e-6
    assert status["costs"]["dollars"] == pytest.approx(cost, abs=1e-6)


def test_uploading(mount, bucket: Bucket):
    one: Mount = mount()
    bucket.control.set(upload_bandwidth=MIB // 32)  # minutes: longer than the processes below take to start
    try:
        (one.path / "model").write_bytes(bytes(6 * MIB))
        with written(one.path / "log.tmp"):
            wait_until(lambda: one.status()["uploading"], "an upload under way")
            verdict, groups = capture(one.path)
    finally:
        bucket.control.set(upload_bandwidth=None)
    assert verdict == "OK, uploading 1 change, 6.0 MiB"
    assert list(groups) == ["only here", "last N", *SET_UP, "since start"]
    lost, pending, dirty, flying, *rest = groups["only here"]
    assert lost == "6.0 MiB would be lost with this node"
    assert masked(pending) == "N change, N not in the bucket yet, the oldest for N"
    assert dirty == "1 file, 10 B being written"
    assert masked(flying) == "of these N file, N in flight, the oldest request for N"
    assert re.match(r"model: \S+ \S+ of 6.0 MiB sent", rest[-1])


def test_degraded(mount, bucket: Bucket, expect_log):
    expect_log("publish failed, will retry")
    one: Mount = mount()
    bucket.put("file", b"here")
    assert (one.path / "file").read_bytes() == b"here"
    bucket.control.faults(Fault(FaultAction.ANSWER, operation="PutObject", status=503))
    (one.path / "model").write_bytes(b"kept here")
    bucket.control.pause("refuse")
    try:
        wait_until(
            lambda: (one.path / "file").stat() and one.status()["unanswered_seconds"], "the silent bucket"
        )
        wait_until(lambda: one.status()["waiting"], "an upload that failed")
        verdict, groups = capture(one.path)
    finally:
        bucket.control.clear_faults()
        bucket.control.resume()
    assert masked(verdict) == "DEGRADED: the bucket has not answered for N"
    assert list(groups) == ["only here", "last N", "problems", *SET_UP, "since start"]
    assert groups["only here"][0] == "9 B would be lost with this node"
    silent, waits, *_ = groups["problems"]
    assert masked(silent) == (
        "the bucket has not answered for N: the mount shows cached names and sizes; no data is lost"
    )
    assert waits.startswith("model waits: ")
    assert waits.endswith("no action needed if the bucket comes back: requests are retried until it answers")


def test_a_rejected_file(mount, bucket: Bucket, expect_log):
    expect_log("rejected")
    one: Mount = mount()
    bucket.control.faults(
        Fault(FaultAction.ANSWER, operation="PutObject", status=422, code="UnprocessableEntity")
    )
    (one.path / "model").write_bytes(b"refused")
    wait_until(lambda: one.status()["rejected_files"], "the rejection")
    verdict, groups = capture(one.path)
    assert verdict == f"ACTION: the bucket rejected 1 change: see `fusecache recover {one.path}`"
    assert list(groups) == ["only here", "last N", "to do", *SET_UP, "since start"]
    assert groups["only here"] == ["7 B would be lost with this node", "1 change rejected by the bucket"]
    assert groups["to do"] == [
        f"model was not uploaded, and is not tried again: see `fusecache recover {one.path}`"
    ]
    bucket.control.clear_faults()
    run(FUSECACHE, "recover", one.path, "--restore", "all")
    wait_until(lambda: capture(one.path)[0] == "OK", "the end of it")
    one.sync()


def test_a_full_disk(mount, bucket: Bucket, expect_log):
    expect_log("write failed")
    expect_log("removed unfinished file after ENOSPC")
    one: Mount = mount("--cache-size", "64MiB", "--memory", "64MiB")
    model = one.path / "model"
    with pytest.raises(OSError, match="No space left"):
        model.write_bytes(bytes(120 * MIB))
    wait_until(lambda: not model.exists(), "the end of what found no room")
    verdict, groups = capture(one.path)
    assert verdict == "ACTION: no space for 1 write: raise --cache-size, or wait for uploads"
    assert list(groups)[:3] == ["only here", "last N", "to do"]
    assert groups["only here"] == ["nothing: the bucket has every closed file"]
    (line,) = groups["to do"]
    assert masked(line).startswith(
        "N write failed with ENOSPC, the last model (N), N ago: raise --cache-size"
    )
    assert one.status("model")["state"] == "error:no-space"
