"""Programs that write: how they end, what they leave, and when it may be published."""

import ctypes
import errno
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy
import pytest

from tests.mount.conftest import Place
from tests.support.mounts import Mount, mounted_at, pattern, run, run_python, wait_until

MIB = 2**20
libc = ctypes.CDLL(None, use_errno=True)
WRITE_AND_WAIT = """
import os, sys
file = open(sys.argv[1], "wb")
file.write(b"h" * 3_000_000)
file.flush()
if sys.argv[2] == "fsync":
    os.fsync(file.fileno())
print("written", flush=True)
sys.stdin.read()
"""
WRITE_LARGE = """
import os, select, sys
from tests.support.mounts import pattern
data = pattern(512 * 2**20)
with open(sys.argv[1], "wb", buffering=0) as file:
    for start in range(0, len(data), 8 * 2**20):
        file.write(data[start : start + 8 * 2**20])
        os.fsync(file.fileno())
        if not start:
            print("written", flush=True)
        # By then parts are under way; the rest never comes, as the test ends this when it has seen enough.
        seconds = None if start >= 256 * 2**20 else 0.1
        if select.select([sys.stdin], [], [], seconds)[0] and sys.stdin.readline():
            break
"""


@contextmanager
def writer(program: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Run a program that says one line once it is where the test wants it; it is gone afterwards."""
    words = [sys.executable, "-c", program, *map(str, arguments)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline(), "the writer ended early"
            yield process
        finally:
            if process.poll() is None:
                process.kill()


@pytest.mark.s3server_only
@pytest.mark.parametrize("end", ["close", "kill"])
def test_parts_go_up_while_a_large_file_is_written_and_none_stays_of_a_killed_writer(
    place: Place, expect_log, end: str
):
    if end == "kill":
        expect_log("quarantined unfinished file")
    with writer(WRITE_LARGE, place.path / "model") as process:
        place.bucket.control.wait_requests(
            1, operation="UploadPart", key=place.bucket.prefix + "model", timeout=60
        )
        assert place.bucket.names() == []
        assert place.bucket.uploads() == ["model"]
        if end == "kill":
            process.kill()
            assert process.wait() == -signal.SIGKILL
            wait_until(lambda: place.bucket.uploads() == [], "the upload to be aborted")
        else:
            process.communicate("close")
            assert process.returncode == 0
            data = (place.path / "model").read_bytes()
    place.sync()
    assert place.bucket.uploads() == []
    if end == "kill":
        assert place.bucket.names() == []
    else:
        assert place.bucket.get("model") == data == pattern(len(data))


@pytest.mark.case(51)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=lambda how: how.name)
@pytest.mark.parametrize("synced", ["fsync", "buffered"])
def test_a_writer_that_is_killed_publishes_nothing(place: Place, expect_log, how, synced: str):
    expect_log("quarantined unfinished file")
    place.bucket.put("file", b"old")
    for name in ("file", "new"):
        with writer(WRITE_AND_WAIT, place.path / name, synced) as process:
            process.send_signal(how)
            assert process.wait() == -how
    wait_until(lambda: not (place.path / "new").exists(), "the unfinished file to go")
    wait_until(lambda: (place.path / "file").read_bytes() == b"old", "the published version to show again")
    (place.path / "after").write_bytes(b"1")
    place.sync()
    assert place.bucket.sizes() == {"after": 1, "file": 3}
    assert place.bucket.get("file") == b"old"


def test_a_writer_that_ends_without_closing_has_closed(place: Place):
    """exit(2) closes descriptors; so does an uncaught exception."""
    program = """
import os, sys
descriptor = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY)
os.write(descriptor, b"bytes")
raise SystemExit(0) if sys.argv[2] == "exit" else ValueError("uncaught")
"""
    for how in ("exit", "raise"):
        run_python(program, place.path / how, how, check=False)
    place.sync()
    assert place.bucket.sizes() == {"exit": 5, "raise": 5}


def test_a_thread_that_opened_a_file_and_ends_with_its_process_has_closed(place: Place, tmp_path):
    """At a normal exit the kernel ends the other threads by a signal; that is no kill."""
    source = tmp_path / "program.c"
    source.write_text(r"""
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <unistd.h>

static sem_t written;

static void *write_and_wait(void *path)
{
    int descriptor = open(path, O_CREAT | O_WRONLY, 0644);
    if (write(descriptor, "bytes", 5) != 5)
        abort();
    sem_post(&written);
    for (;;)
        pause();
}

int main(int count, char **words)
{
    pthread_t thread;
    sem_init(&written, 0, 0);
    if (count != 2 || pthread_create(&thread, NULL, write_and_wait, words[1]))
        abort();
    sem_wait(&written);
    exit(0);
}
""")
    run("gcc", "-pthread", "-o", tmp_path / "program", source)
    run(tmp_path / "program", place.path / "file")
    place.sync()
    assert place.bucket.get("file") == b"bytes"


@pytest.mark.case(17)
def test_a_forked_childs_close_publishes_nothing(place: Place):
    program = """
import os, sys
file = open(sys.argv[1], "wb", buffering=0)
file.write(b"first ")
child = os.fork()
if child == 0:
    os._exit(0)
os.waitpid(child, 0)
print("closed by the child", flush=True)
sys.stdin.readline()
file.write(b"second")
"""
    with writer(program, place.path / "file") as process:
        other = place.path / "other"
        other.write_bytes(b"1")
        # The other file was closed later and settles later: when it is there, this one would be.
        wait_until(lambda: "other" in place.bucket.names(), "the other file")
        assert place.bucket.names() == ["other"]
        process.communicate("\n")
    place.sync()
    assert place.bucket.get("file") == b"first second"


def test_a_log_appended_line_by_line_is_whole(place: Place):
    lines = [f"line {index}\n" for index in range(300)]
    with open(place.path / "log", "a", buffering=1) as log:
        log.writelines(lines)
        assert (place.path / "log").read_text() == "".join(lines)
    for line in lines[:5]:
        with open(place.path / "log", "a") as log:
            log.write(line)
    place.sync()
    assert place.bucket.get("log").decode() == "".join(lines + lines[:5])


def test_two_processes_append_to_one_log_and_no_line_is_lost(place: Place):
    program = """
import os, sys
log = os.open(sys.argv[1], os.O_APPEND | os.O_WRONLY | os.O_CREAT)
print("open", flush=True)
for index in range(100):
    os.write(log, f"{sys.argv[2]} {index}\\n".encode())
"""
    with writer(program, place.path / "log", "a") as one, writer(program, place.path / "log", "b") as two:
        assert (one.wait(), two.wait()) == (0, 0)
    place.sync()
    lines = place.bucket.get("log").decode().splitlines()
    for who in "ab":
        assert [line for line in lines if line.startswith(who)] == [f"{who} {index}" for index in range(100)]


@pytest.mark.case(16)
def test_np_save_and_savez_are_one_upload_each(place: Place):
    array = numpy.arange(500_000).reshape(1000, 500)
    numpy.save(place.path / "one.npy", array)
    numpy.savez(place.path / "two.npz", a=array, b=array[:10])
    assert numpy.array_equal(numpy.load(place.path / "one.npy"), array)
    place.sync()
    assert numpy.array_equal(numpy.load(place.second / "one.npy"), array)
    with numpy.load(place.second / "two.npz") as arrays:
        assert numpy.array_equal(arrays["b"], array[:10])
    if place.bucket.service.control is not None:
        assert sorted(place.bucket.published()) == [("PutObject", "one.npy"), ("PutObject", "two.npz")]


@pytest.mark.case(15)
def test_pages_of_a_np_memmap_that_are_dirtied_late_are_in_the_bucket(place: Place):
    program = """
import sys, numpy
view = numpy.memmap(sys.argv[1], dtype="u1", mode="w+", shape=(3_000_000,))
view[:] = 1
view.flush()
view[1_000_000:1_000_010] = 7
print("dirty", flush=True)
sys.stdin.readline()
view[2_000_000] = 9
"""
    with writer(program, place.path / "mapped") as process:
        process.communicate("\n")
    expected = bytearray(b"\1" * 3_000_000)
    expected[1_000_000:1_000_010] = b"\7" * 10
    expected[2_000_000] = 9
    assert (place.path / "mapped").read_bytes() == expected
    place.sync()
    assert place.bucket.get("mapped") == expected


MAP_AND_CLOSE = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
descriptor = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
if sys.argv[2] == "new":
    os.write(descriptor, b"." * 20_000)
address = libc.mmap(None, 20_000, 3, 1, descriptor, 0)  # PROT_READ | PROT_WRITE, MAP_SHARED
os.close(descriptor)
print("closed", flush=True)
sys.stdin.readline()
ctypes.memmove(address + 10_000, b"late", 4)
print("dirty", flush=True)
sys.stdin.readline()
"""


@pytest.mark.case(52)
@pytest.mark.parametrize("before", ["new", "published"])
def test_a_mapping_dirtied_after_the_close_is_published_with_its_bytes(place: Place, before: str):
    """Python's mmap dups the descriptor; mmap(2) itself does not, so the pages come after the last close."""
    if before == "published":
        place.bucket.put("mapped", b"." * 20_000)
    with writer(MAP_AND_CLOSE, place.path / "mapped", before) as process:
        process.communicate("\n\n")
    expected = b"." * 10_000 + b"late" + b"." * 9_996
    assert (place.path / "mapped").read_bytes() == expected
    place.sync()
    assert place.bucket.get("mapped") == expected


@pytest.mark.case(51, 52)
def test_late_pages_of_a_process_that_is_killed_are_not_published(place: Place, expect_log):
    expect_log("quarantined unfinished file")
    place.bucket.put("mapped", b"." * 20_000)
    with writer(MAP_AND_CLOSE, place.path / "mapped", "published") as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "dirty\n"
        process.kill()
        assert process.wait() == -signal.SIGKILL
    wait_until(
        lambda: (place.path / "mapped").read_bytes() == b"." * 20_000, "the published version to show again"
    )
    place.sync()
    assert place.bucket.get("mapped") == b"." * 20_000


@pytest.mark.case(14)
@pytest.mark.parametrize("journal", ["delete", "wal"])
def test_sqlite_works_and_its_file_is_whole_on_another_node(place: Place, journal: str):
    with sqlite3.connect(place.path / "data.db") as database:
        database.execute(f"pragma journal_mode={journal}")
        database.execute("create table numbers (n integer, square integer)")
        for start in range(0, 1000, 100):
            rows = [(n, n * n) for n in range(start, start + 100)]
            database.executemany("insert into numbers values (?, ?)", rows)
            database.commit()
        database.execute("update numbers set square = -1 where n % 10 = 0")
    database.close()
    place.sync()
    (copy := place.first_mount.cache.parent / f"{place.name}-{journal}.db").write_bytes(
        place.bucket.get("data.db")
    )
    found = sqlite3.connect(copy)
    assert found.execute("select count(*), sum(square = -1) from numbers").fetchone() == (1000, 100)
    assert found.execute("pragma integrity_check").fetchone() == ("ok",)
    found.close()
    assert not [name for name in place.bucket.names() if name != "data.db"]


def test_fsync_returns_at_once_and_publishes_nothing(place: Place):
    with open(place.path / "file", "wb") as file:
        for _ in range(3):
            file.write(b"x" * MIB)
            file.flush()
            os.fsync(file.fileno())
            os.fdatasync(file.fileno())
        assert place.bucket.names() == []
        directory = os.open(place.path, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    place.sync()
    assert place.bucket.sizes() == {"file": 3 * MIB}


def test_copies_and_seeks_inside_files_work(place: Place):
    data = pattern(3 * MIB)
    (place.path / "source").write_bytes(data)
    with open(place.path / "source", "rb") as source, open(place.path / "copy", "wb") as copy:
        left = len(data)
        while left:
            left -= os.sendfile(copy.fileno(), source.fileno(), None, left)
    assert (place.path / "copy").read_bytes() == data
    with open(place.path / "fallocated", "wb") as file:
        assert libc.fallocate(file.fileno(), 0, ctypes.c_long(0), ctypes.c_long(100_000)) == -1
        assert ctypes.get_errno() == errno.EOPNOTSUPP  # programs fall back
        file.write(b"x")
    place.sync()
    assert place.bucket.get("copy") == data


def test_locks_hold_on_one_node(place: Place):
    program = """
import fcntl, sys
file = open(sys.argv[1], "r+b")
try:
    (fcntl.flock if sys.argv[2] == "flock" else fcntl.lockf)(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    print("taken")
except BlockingIOError:
    print("busy")
"""
    import fcntl

    for kind, lock in (("flock", fcntl.flock), ("lockf", fcntl.lockf)):
        with open(place.path / kind, "w+b") as file:
            lock(file, fcntl.LOCK_EX)
            assert run_python(program, place.path / kind, kind).stdout == "busy\n"
            lock(file, fcntl.LOCK_UN)
            assert run_python(program, place.path / kind, kind).stdout == "taken\n"


def test_a_daemon_that_is_killed_loses_nothing_that_was_closed(mount, bucket, expect_log):
    expect_log("recovered files=")
    expect_log("quarantined key=.*(open reason=was not closed| reason=an unfinished file)")
    first: Mount = mount("--settle-seconds", "3600")
    (first.path / "closed").write_bytes(b"closed")
    (first.path / "moved").write_bytes(b"moved")
    (first.path / "dir").mkdir()
    (first.path / "moved").rename(first.path / "dir" / "moved")
    os.symlink("closed", first.path / "link")
    descriptor = os.open(first.path / "open", os.O_CREAT | os.O_WRONLY)
    os.write(descriptor, b"never closed")
    first.kill()
    with pytest.raises(OSError, match=r"Transport endpoint|Software caused"):
        os.close(descriptor)
    again: Mount = mount(cache=first.cache)
    assert (again.path / "closed").read_bytes() == b"closed"
    assert os.readlink(again.path / "link") == "closed"
    again.sync()
    assert bucket.get("closed") == b"closed"
    assert bucket.get("dir/moved") == b"moved"
    assert set(bucket.names()) == {"closed", "dir/", "dir/moved", "link"}


def test_unmounting_uploads_what_is_left(mount, bucket):
    one: Mount = mount("--settle-seconds", "3600")
    (one.path / "file").write_bytes(b"1")
    (one.path / ".tmpfile").write_bytes(b"2")
    one.unmount()
    assert bucket.sizes() == {".tmpfile": 1, "file": 1}


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT], ids=lambda how: how.name)
def test_a_signal_to_the_daemon_uploads_what_is_left_and_unmounts(mount, bucket, how):
    one: Mount = mount("--settle-seconds", "3600")
    (one.path / "file").write_bytes(b"1")
    pid = one.pid
    os.kill(pid, how)
    wait_until(lambda: not one.is_alive(), "the daemon's end")
    assert not mounted_at(one.path)
    assert bucket.get("file") == b"1"


def test_chmod_and_times_of_a_clean_file_stay_on_the_node_across_a_remount(mount, bucket):
    bucket.put("file", b"bytes")
    first: Mount = mount()
    (first.path / "file").chmod(0o600)
    os.utime(first.path / "file", (1e9, 1.1e9))
    first.unmount()
    again: Mount = mount(cache=first.cache)
    seen = (again.path / "file").stat()
    assert (seen.st_mode & 0o7777, seen.st_mtime) == (0o600, 1.1e9)


def test_files_written_here_keep_mode_time_and_links_across_a_remount_with_another_cache(mount, bucket):
    first: Mount = mount()
    (first.path / "file").write_bytes(b"x")
    (first.path / "empty").write_bytes(b"")
    (first.path / "empty").chmod(0o755)
    os.symlink("file", first.path / "link")
    first.unmount()
    other: Mount = mount()
    assert os.readlink(other.path / "link") == "file"
    assert (other.path / "link").read_bytes() == b"x"
    assert (other.path / "empty").stat().st_mode & 0o7777 == 0o755
    assert (other.path / "empty").read_bytes() == b""


@pytest.mark.s3server_only
def test_what_was_written_is_warm_after_a_remount_with_the_same_cache(mount, bucket):
    data = pattern(2 * MIB)
    first: Mount = mount()
    (first.path / "file").write_bytes(data)
    first.sync()
    first.unmount()
    again: Mount = mount(cache=first.cache)
    assert (again.path / "file").read_bytes() == data
    assert not bucket.requests("GetObject")
