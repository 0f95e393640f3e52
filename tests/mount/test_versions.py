"""Objects that another client replaces or removes: an open file reads one version, the next open the newest."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.mount.conftest import Place
from tests.s3server import Fault, FaultAction
from tests.support import ROOT
from tests.support.mounts import FUSECACHE, Mount, pattern, read_newest, run, wait_until
from tests.support.s3_buckets import Bucket

MIB = 2**20


@contextmanager
def suppress_stale() -> Iterator[None]:
    """Let a read of an open file say that its version is gone."""
    try:
        yield
    except OSError as exc:
        if exc.errno != errno.ESTALE:
            raise


def read_in_steps(path: Path, between: object) -> tuple[bytes, OSError | None]:
    """Read a file, calling `between` once after the first MiB; return the bytes until the end or the error."""
    pieces = []
    with open(path, "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead: each read asks
        try:
            while piece := file.read(MIB):
                pieces.append(piece)
                if len(pieces) == 1:
                    between()  # type: ignore[operator]
        except OSError as exc:
            return b"".join(pieces), exc
    return b"".join(pieces), None


@pytest.mark.case(43)
def test_a_file_replaced_while_it_is_read_gives_old_bytes_or_estale_never_a_mixture(place: Place):
    old, new = pattern(40 * MIB, seed=1), pattern(40 * MIB, seed=2)
    place.bucket.put("file", old)
    got, error = read_in_steps(place.path / "file", lambda: place.bucket.put("file", new))
    assert got == old[: len(got)]
    if error is None:
        assert len(got) == len(old)
    else:
        assert error.errno == errno.ESTALE
        assert (place.path / "file").read_bytes() == new
    wait_until(lambda: read_newest(place.path / "file") == new, "the new version")


def test_a_mapping_of_a_replaced_file_never_shows_the_new_bytes(place: Place):
    old, new = b"o" * 8192, b"n" * 8192
    place.bucket.put("file", old)
    with open(place.path / "file", "rb") as file:
        assert os.pread(file.fileno(), 4096, 0) == old[:4096]
        place.bucket.put("file", new)
        wait_until(lambda: read_newest(place.path / "file") == new, "the new version")
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        seen = None
        with suppress_stale():
            seen = os.pread(file.fileno(), 8192, 0)
        assert seen in (None, old)


@pytest.mark.case(43)
def test_the_next_open_sees_another_size_and_other_bytes(place: Place):
    place.bucket.put("file", b"short")
    assert (place.path / "file").read_bytes() == b"short"
    for turn in range(3):
        data = pattern(1000 * (turn + 1), seed=turn)
        place.bucket.put("file", data)
        wait_until(lambda data=data: read_newest(place.path / "file") == data, "the new bytes")
        assert (place.path / "file").stat().st_size == len(data)


def test_a_file_removed_elsewhere_is_gone_after_a_second(place: Place):
    place.bucket.put("file", b"bytes")
    assert (place.path / "file").read_bytes() == b"bytes"
    place.bucket.delete("file")
    wait_until(lambda: not (place.path / "file").exists(), "the name to go")
    wait_until(lambda: os.listdir(place.path) == [], "the entry to go")


def test_what_one_node_closed_and_synced_another_node_opens(place: Place):
    """Close-to-open: also when the other node has read the file before, or has looked for it in vain."""
    assert not (place.second / "file").exists()
    for turn in range(3):
        data = pattern(50_000 + turn, seed=turn)
        (place.path / "file").write_bytes(data)
        place.sync("file")
        wait_until(lambda: (place.second / "file").exists(), "the name on the other node")
        wait_until(
            lambda data=data: read_newest(place.second / "file") == data, "the bytes on the other node"
        )


def test_another_node_reads_the_old_file_whole_until_the_new_one_is_there(place: Place):
    old, new = b"old" * 100_000, b"new" * 100_000
    (place.path / "file").write_bytes(old)
    place.sync()
    wait_until(lambda: (place.second / "file").exists(), "the file")
    with open(place.path / "file", "wb") as file:
        file.write(new[:100_000])
        file.flush()
        os.fsync(file.fileno())
        assert (place.second / "file").read_bytes() == old
        file.write(new[100_000:])
    place.sync()
    wait_until(lambda: read_newest(place.second / "file") == new, "the new bytes")


@pytest.mark.case(41, 43)
def test_two_nodes_that_write_one_name_both_keep_their_bytes(place: Place, expect_log):
    expect_log("conflict key=")
    place.bucket.put("file", b"base")
    assert (place.path / "file").read_bytes() == b"base"
    with open(place.path / "file", "wb") as file:
        file.write(b"ours")
        file.flush()
        os.fsync(file.fileno())
        place.bucket.put("file", b"theirs")
    name = wait_until(
        lambda: next((name for name in place.bucket.names() if ".conflict-" in name), None), "our copy"
    )
    assert place.bucket.get(name) == b"ours"
    assert place.bucket.get("file") == b"theirs"
    wait_until(lambda: read_newest(place.path / "file") == b"theirs", "theirs here")
    wait_until(lambda: read_newest(place.path / name) == b"ours", "ours here")
    inner = f"{place.name}/file"
    (said,) = [each for each in place.first_mount.status()["conflicts"] if each["path"] == inner]
    assert said["kept_as"] == f"{place.name}/{name}"
    shown = run(FUSECACHE, "status", place.first_mount.path).stdout
    assert f"{inner}: another client changed it first; our version is {place.name}/{name}" in shown
    (place.path / name).unlink()  # seen to: every sync of this mount would say it


@pytest.mark.s3server_only
def test_a_lookup_that_fails_is_an_error_and_not_a_missing_file(mount: Callable[..., Mount], bucket: Bucket):
    bucket.put("file", b"bytes")
    fresh = mount()  # that knows no name yet, so that none can be believed missing
    bucket.control.faults(
        Fault(FaultAction.ANSWER, operation="ListObjectsV2", status=403, code="AccessDenied")
    )
    with pytest.raises(PermissionError):
        os.stat(fresh.path / "file")


def test_a_log_of_another_node_is_followed_as_the_page_says(place: Place):
    """`tail -f` keeps the version that it opened; the page's program prints each line once."""
    page = (ROOT / "docs/how-to/logs-and-databases.md").read_text()
    program = page.split("```python\n")[1].split("```")[0]
    log = place.path / "train.log"
    program = program.replace("/data/runs/7/train.log", str(place.second / "train.log")).replace(
        "sleep(5)", "sleep(0.2)"
    )
    lines = [f"step {number}\n" for number in range(4)]
    log.write_text(lines[0])
    place.sync()
    wait_until(lambda: (place.second / "train.log").exists(), "the log on the other node")
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as follower:
        assert follower.stdout is not None
        try:
            seen = [follower.stdout.readline()]
            for line in lines[1:]:
                with open(log, "a") as file:
                    file.write(line)
                place.sync()
                seen.append(follower.stdout.readline())
        finally:
            follower.kill()
    assert seen == lines
