"""Starting and ending a mount: options that must show, and mistakes that must be told in one line."""

import io
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import replace
from pathlib import Path

import pytest

from fusecache.cli.main import main as fusecache_main
from tests.s3server import Account, Fault, FaultAction
from tests.support.mounts import (
    FUSECACHE,
    NEEDS_OWN_SESSION,
    Mount,
    mounted_at,
    open_to_other_users,
    run,
    run_python,
    tree_of,
    wait_until,
)
from tests.support.other_user import NOBODY, as_nobody, needs_root
from tests.support.s3_buckets import Bucket

Refused = Callable[..., str]


@pytest.fixture
def refused(bucket: Bucket, tmp_path: Path) -> Iterator[Refused]:
    """Mount in vain; return the one line that says why. Nothing is mounted, and no daemon is left."""
    point = tmp_path / "mnt"
    point.mkdir()

    def _daemons() -> set[str]:
        """Return the processes that mount this run's bucket."""
        return set(run("pgrep", "-f", f"fusecache mount .*{bucket.prefix[:32]}", check=False).stdout.split())

    def attempt(
        *flags: str,
        of: Bucket = bucket,
        path: Path = point,
        cache: Path = tmp_path / "cache",
        by: Sequence[str] = (),
        **environment: str,
    ) -> str:
        """by: what runs the command."""
        was_mounted, daemons = mounted_at(path), _daemons()
        done = run(
            *by,
            *Mount(of, path, cache).command(*flags),
            check=False,
            env={**of.service.environment(), **environment},
        )
        assert done.returncode == 1, done
        assert done.stdout == ""
        assert done.stderr.startswith("fusecache: error: "), done.stderr
        assert "Traceback" not in done.stderr
        assert done.stderr.count("\n") == 1, done.stderr
        assert mounted_at(path) == was_mounted
        assert _daemons() == daemons
        return done.stderr

    yield attempt
    if mounted_at(point):
        run("fusermount3", "-uz", point)


# ---- mistakes


@needs_root
@NEEDS_OWN_SESSION
@pytest.mark.parametrize("path", [os.environ["PATH"], "/no/programs"], ids=["fusermount3", "no fusermount3"])
def test_root_that_may_not_mount_hears_what_is_missing(refused: Refused, path: str) -> None:
    """As root of a container without privileges."""
    without = [str(shutil.which("setpriv")), "--bounding-set=-sys_admin", "--inh-caps=-sys_admin"]
    said = refused(by=without, PATH=path)
    assert "CAP_SYS_ADMIN is missing here; a container gets it with --cap-add SYS_ADMIN" in said


def test_a_bucket_that_is_not_there(refused, bucket):
    missing = replace(bucket, service=replace(bucket.service, bucket="no-such-bucket"))
    assert "no-such-bucket" in refused(of=missing)


def test_a_wrong_key(refused, bucket):
    wrong = replace(bucket, service=replace(bucket.service, secret_key="wrong" * 8))
    assert "403" in (said := refused(of=wrong)) or "denied" in said.lower()


def test_no_key_at_all(refused, bucket):
    said = refused(AWS_ACCESS_KEY_ID="", AWS_SECRET_ACCESS_KEY="")
    assert "credentials" in said.lower()


def test_an_endpoint_where_nobody_listens(refused, bucket):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        nobody = replace(bucket, service=replace(bucket.service, endpoint_url=url))
        said = refused(of=nobody)
        assert f"check the endpoint {url} (--endpoint-url" in said


def test_a_profile_that_is_not_there_is_named_with_those_that_are(refused, tmp_path):
    config = tmp_path / "config"
    config.write_text("[profile training]\nregion = auto\n")
    said = refused("--profile", "trainning", AWS_CONFIG_FILE=str(config))
    assert "profile = 'trainning'" in said
    assert "did you mean 'training'?" in said


def test_a_mountpoint_that_is_missing_a_file_or_not_empty(refused, tmp_path):
    assert "create it" in refused(path=tmp_path / "missing")
    (tmp_path / "file").write_bytes(b"")
    assert "not a directory" in refused(path=tmp_path / "file")
    full = tmp_path / "full"
    full.mkdir()
    (full / "something").write_bytes(b"")
    assert "not empty" in refused(path=full)
    assert (full / "something").exists()


def test_a_mountpoint_where_something_is_mounted_already(mount, refused, bucket, tmp_path):
    first: Mount = mount()
    assert "already" in refused(path=first.path)
    assert (first.path / ".fusecache").is_dir()


def test_a_mountpoint_of_a_dead_daemon_says_what_to_do_and_unmount_does_it(mount, refused, bucket):
    first: Mount = mount()
    os.kill(first.pid, 9)
    wait_until(lambda: not first.is_alive(), "the daemon's end")
    with pytest.raises(OSError, match=r"not connected|connection abort"):
        os.listdir(first.path)
    assert f"fusecache unmount {first.path}" in refused(path=first.path, cache=first.cache)
    run(FUSECACHE, "unmount", first.path)
    assert not mounted_at(first.path)
    first.start()
    assert os.listdir(first.path) == []


@pytest.mark.case(50)
def test_a_cache_directory_in_use(mount, refused, bucket):
    first: Mount = mount()
    said = refused(cache=first.cache)
    assert str(first.cache) in said
    assert "use" in said


def test_a_cache_limit_that_is_too_small(refused):
    assert "cache_size" in refused("--cache-size", "1MiB")


def test_a_cache_limit_that_the_disk_cannot_hold_is_told_once_with_what_will_be_used(mount, expect_log):
    expect_log("the cache may use 1024.0 TiB")
    one: Mount = mount()
    one.unmount()
    said = run(*one.command("--cache-size", "1024TiB"), env=one.bucket.service.environment())
    one.pid = one.status()["pid"]
    assert said.stderr.count("\n") == 2
    assert said.stderr.startswith(
        f"fusecache: the cache may use 1024.0 TiB, but the disk of {one.cache} has "
    )
    assert "the cache will use" in said.stderr
    (one.path / "file").write_bytes(b"1")
    one.sync()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk")
def test_a_disk_on_which_nothing_could_ever_be_written_is_refused(mount, refused, bucket, tmp_path):
    bucket.put("file", b"1")
    small = tmp_path / "small"
    small.mkdir()
    run("mount", "-t", "tmpfs", "-o", "size=300m", "tmpfs", small)
    try:
        said = refused("--cache-size", "256MiB", cache=small / "cache")
        assert "too small for writes: it has 300.0 MiB" in said
        assert "--cache-dir" in said
        reads: Mount = mount("--cache-size", "256MiB", "--read-only", cache=small / "cache")
        assert (reads.path / "file").read_bytes() == b"1"
        reads.unmount()
    finally:
        run("umount", small)


def test_a_misspelt_variable_and_a_misspelt_value(refused):
    assert "FUSECACHE_CACHE_SIZE" in refused(FUSECACHE_CACHE_SIZ="1GiB")
    assert "--settle-seconds" in refused("--settle-seconds", "soon")


@pytest.mark.case(31)
@pytest.mark.s3server_only
def test_a_key_that_may_only_read_is_refused_unless_the_mount_is_read_only(mount, refused, bucket):
    bucket.put("file", b"1")
    bucket.control.add_account(Account("reader", "reader-secret", writable=False))
    reader = replace(bucket, service=replace(bucket.service, access_key="reader", secret_key="reader-secret"))
    assert "--read-only" in refused(of=reader)
    assert bucket.names() == ["file"]
    assert bucket.uploads() == []
    seen: Mount = mount("--read-only", of=reader)
    assert (seen.path / "file").read_bytes() == b"1"


def test_sync_and_unmount_of_what_is_no_mount_are_errors(tmp_path):
    for command, status in (("sync", 2), ("status", 1), ("unmount", 1)):
        done = run(FUSECACHE, command, tmp_path, check=False)
        assert done.returncode == status
        assert done.stderr.startswith("fusecache: error: ")
        assert done.stderr.count("\n") == 1


# ---- options


def test_a_read_only_mount_refuses_every_change_with_erofs(mount, bucket):
    bucket.put("file", b"bytes")
    bucket.put("dir/")
    seen: Mount = mount("--read-only")
    assert tree_of(seen.path) == {"file": b"bytes", "dir": None}
    changes: list[Callable[[], object]] = [
        lambda: (seen.path / "new").write_bytes(b""),
        lambda: (seen.path / "file").write_bytes(b""),
        lambda: (seen.path / "file").open("ab"),
        lambda: os.truncate(seen.path / "file", 1),
        lambda: (seen.path / "file").unlink(),
        lambda: (seen.path / "file").rename(seen.path / "other"),
        lambda: (seen.path / "file").chmod(0o600),
        lambda: os.utime(seen.path / "file"),
        lambda: (seen.path / "sub").mkdir(),
        lambda: (seen.path / "dir").rmdir(),
        lambda: (seen.path / "link").symlink_to("file"),
    ]
    for change in changes:
        with pytest.raises(OSError, match="Read-only file system"):
            change()
    assert tree_of(seen.path) == {"file": b"bytes", "dir": None}
    assert bucket.sizes() == {"dir/": 0, "file": 5}


def test_umask_and_owner_are_those_of_the_options(mount, bucket):
    bucket.put("far/file", b"1")
    one: Mount = mount("--umask", "027", "--uid", "1234", "--gid", "2345")
    far = (one.path / "far" / "file").stat()
    assert (far.st_mode & 0o777, far.st_uid, far.st_gid) == (0o640, 1234, 2345)
    assert (one.path / "far").stat().st_mode & 0o777 == 0o750


def test_a_new_file_belongs_to_its_maker_and_obeys_its_umask(mount, bucket):
    program = """
import os, sys
os.umask(0o077)
open(sys.argv[1] + "/file", "w").close()
os.mkdir(sys.argv[1] + "/dir")
"""
    one: Mount = mount()
    run_python(program, one.path)
    assert (one.path / "file").stat().st_mode & 0o777 == 0o600
    assert (one.path / "dir").stat().st_mode & 0o777 == 0o700
    assert (one.path / "file").stat().st_uid == os.getuid()


@needs_root
def test_what_another_user_makes_is_that_users(mount):
    """A shared mount: a directory is of use to the user who made it, and its files are."""

    def make(point: Path) -> list[int]:
        os.umask(0o022)
        (point / "run").mkdir()
        (point / "run" / "final.pt").write_bytes(b"1")
        (point / "run" / "final.pt").write_bytes(b"12")
        (point / "run").chmod(0o700)
        return [os.stat(path).st_uid for path in (point / "run", point / "run" / "final.pt")]

    shared: Mount = mount("--allow-other", "--umask", "000")
    open_to_other_users(shared.path)
    assert as_nobody(lambda: make(shared.path)) == [NOBODY, NOBODY]
    shared.unmount()
    again: Mount = mount("--allow-other", "--umask", "000", cache=shared.cache)
    open_to_other_users(again.path)
    assert (again.path / "run").stat().st_uid == NOBODY
    as_nobody(lambda: (again.path / "run" / "more.pt").write_bytes(b"1"))
    shared = again
    (shared.path / "of_root").mkdir()
    assert (shared.path / "of_root").stat().st_uid == shared.path.stat().st_uid


@needs_root
def test_option_uid_holds_for_files_of_all_users(mount):
    one: Mount = mount("--allow-other", "--umask", "000", "--uid", "1234")
    open_to_other_users(one.path)
    as_nobody((one.path / "run").mkdir)
    assert (one.path / "run").stat().st_uid == 1234


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_other_users_see_the_mount_with_allow_other_only(mount, bucket):
    bucket.put("file", b"1")
    closed: Mount = mount()
    opened: Mount = mount("--allow-other")
    open_to_other_users(opened.path)
    open_to_other_users(closed.path)
    nobody = {"user": 65534, "group": 65534, "extra_groups": []}
    assert run("cat", opened.path / "file", **nobody).stdout == "1"
    assert run("cat", closed.path / "file", check=False, **nobody).returncode != 0


@pytest.mark.s3server_only
def test_immutable_names_are_not_asked_for_again(mount, bucket):
    bucket.put("shards/0.mds", b"x" * 100)
    one: Mount = mount("--immutable", "shards/")
    assert (one.path / "shards" / "0.mds").read_bytes() == b"x" * 100
    asked = len(bucket.requests())
    program = """
import os, sys, time
end = time.monotonic() + 2.5
while time.monotonic() < end:
    assert os.stat(sys.argv[1]).st_size == 100
    assert len(open(sys.argv[1], "rb").read()) == 100
"""
    run_python(program, one.path / "shards" / "0.mds")
    later = {(entry.operation, entry.query.get("prefix")) for entry in bucket.requests()[asked:]}
    # The root, which holds `shards`, is not immutable.
    assert later <= {("ListObjectsV2", f"{bucket.prefix}shards")}


def test_the_command_line_waits_and_tells(mount, bucket):
    """`sync` with its exit status, `status` as a table and as JSON, `unmount` that drains."""
    one: Mount = mount("--settle-seconds", "3600")
    (one.path / "file").write_bytes(b"x" * 1000)
    late = run(FUSECACHE, "sync", one.path, "--timeout", "0.2", check=False)
    assert late.returncode == 1
    assert "1 file" in late.stderr or "timeout" in late.stderr
    assert "queued" in run(FUSECACHE, "status", one.path / "file").stdout
    assert '"pending_files": 1' in run(FUSECACHE, "status", one.path, "--json").stdout
    one.unmount()
    assert bucket.get("file") == b"x" * 1000
    # A bucket takes one write a second to a key, and the next daemon does not know of the last one's.
    one.start("--settle-seconds", "1")
    (one.path / "file").write_bytes(b"y" * 1000)
    run(FUSECACHE, "sync", one.path / "file")
    assert bucket.get("file") == b"y" * 1000
    assert "clean" in run(FUSECACHE, "status", one.path / "file").stdout


@pytest.mark.s3server_only
def test_waits_that_time_out_name_what_the_bucket_lacks(mount, bucket):
    one: Mount = mount()
    bucket.control.faults(Fault(FaultAction.HOLD, method="P*", key=f"{bucket.prefix}*"))
    (one.path / "run").mkdir()
    for number in range(52):
        (one.path / "run" / f"{number:02}.pt").write_bytes(b"x" * (1000 + number))
    (one.path / "other").write_bytes(b"x" * 9000)
    # A daemon hears of a file's release a moment after close(2), and sends it from then on.
    wait_until(lambda: one.status()["pending_files"] == 54, "the last release")
    largest = "fusecache: not in the bucket: run/51.pt, 1.0 KiB\n"
    synced = run(FUSECACHE, "sync", one.path / "run", "--timeout", "0.2", check=False)
    assert synced.returncode == 1
    assert largest in synced.stderr
    assert "other" not in synced.stderr
    assert synced.stderr.endswith("not in the bucket: 3 more changes\n")  # 52 files and their directory
    unmounted = run(FUSECACHE, "unmount", one.path, "--timeout", "0.2", check=False)
    assert unmounted.returncode == 1
    assert "stays mounted" in unmounted.stderr
    assert "  not in the bucket: other, 8.8 KiB\n" in unmounted.stderr
    bucket.control.clear_faults()
    run(FUSECACHE, "sync", one.path)
    assert "run/51.pt" in bucket.names()


def test_a_mount_in_use_is_not_unmounted(mount, bucket):
    bucket.put("file", b"1")
    one: Mount = mount()
    with open(one.path / "file"):
        done = run(FUSECACHE, "unmount", one.path, check=False)
        assert done.returncode == 1
        assert "busy" in done.stderr
        assert f"(pid {os.getpid()}, has open {one.path}/file)" in done.stderr
    with subprocess.Popen(["sleep", "60"], cwd=one.path) as process:
        done = run(FUSECACHE, "unmount", one.path, check=False)
        process.kill()
    assert f"in use by sleep (pid {process.pid}, works in {one.path})" in done.stderr
    assert (one.path / "file").read_bytes() == b"1"


@needs_root
@pytest.mark.parametrize("flags", [(), ("--allow-other",)])
@pytest.mark.parametrize("force", [(), ("--force",)])
def test_a_user_who_unmounts_the_mount_of_root_is_told_so(mount, flags, force):
    one: Mount = mount(*flags)
    open_to_other_users(one.path)

    def unmount() -> tuple[int, str]:
        with redirect_stderr(io.StringIO()) as words:
            return fusecache_main(["unmount", *force, str(one.path)]), words.getvalue()

    code, words = as_nobody(unmount)
    assert code == 1
    assert "mount of user root, not yours: only root may unmount it" in words
    assert f"sudo fusecache unmount {one.path}" in words
    assert one.status()["mountpoint"] == str(one.path)


def test_a_mount_says_what_is_where_and_status_names_its_log(mount, bucket):
    bucket.put("there", b"1")
    one: Mount = mount()
    one.unmount()
    said = run(*one.command("--cache-size", "3GiB"), env=one.bucket.service.environment())
    one.pid = one.status()["pid"]
    log = f"{one.cache}/fusecache.log"
    assert (
        said.stderr
        == f"fusecache: {bucket.source} is at {one.path}; cache {one.cache}, up to 3.0 GiB; log {log}\n"
    )
    assert re.search(rf"^log +{re.escape(log)}$", run(FUSECACHE, "status", one.path).stdout, re.MULTILINE)
    with open(one.path / "model.pt", "wb") as file:
        file.write(b"1" * 3_000_000)
        file.flush()
        assert [each["path"] for each in one.status()["writing"]] == ["model.pt"]
    synced = run(FUSECACHE, "sync", one.path)
    again = run(FUSECACHE, "sync", one.path)
    assert "0 changes" not in synced.stderr + again.stderr
    run(FUSECACHE, "umount", one.path)
    assert not mounted_at(one.path)


def test_a_prefix_without_objects_is_asked_about(mount, bucket, whole_bucket, tmp_path):
    question = f"{bucket.source.rstrip('/')}/ has no objects yet: is the prefix right?"
    one: Mount = mount()
    one.unmount()
    url, env = ("--endpoint-url", bucket.service.endpoint_url), bucket.service.environment()
    words = (bucket.source, one.path, "--cache-dir", one.cache, "--cache-size", "1GiB", *url)
    assert question in run(FUSECACHE, "mount", *words, env=env).stderr
    run(FUSECACHE, "unmount", one.path)
    bucket.put("there", b"1")
    assert "has no objects" not in run(FUSECACHE, "mount", *words, env=env).stderr
    run(FUSECACHE, "unmount", one.path)


def test_a_status_counts_on_the_space_that_there_is(mount, expect_log):
    """The cache may be larger than its disk: what is shown, and judged by, is what can be used."""
    expect_log("the cache may use 1024.0 TiB")
    one: Mount = mount("--cache-size", "1024TiB")
    status = one.status()
    free = shutil.disk_usage(one.cache).free
    assert status["options"]["cache_size"] == 1024 << 40
    assert 0 < status["cache"]["limit_bytes"] <= free
    shown = run(FUSECACHE, "status", one.path).stdout
    assert re.search(r"cache +0 B of [\d.]+ [MGT]iB \(0%\); its disk has no space for the 1024.0 TiB", shown)


@needs_root
@pytest.mark.parametrize("library", ["own", "pyfuse3"])
def test_a_copy_of_the_mount_in_another_namespace_does_not_keep_the_daemon(mount, bucket, library):
    """Such as of a container that began after the mount."""
    bucket.put("file", b"1")
    one: Mount = mount("--fuse-library", library)
    words = ["unshare", "--mount", "--propagation", "private", "sh", "-c", "echo copied; exec cat"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "copied\n"
        (one.path / "new").write_bytes(b"2")
        one.unmount()
        assert bucket.get("new") == b"2"
        assert holder.poll() is None
        holder.communicate()


def test_a_mount_in_use_that_was_to_end_at_once_uploads_all_at_its_end(mount, bucket):
    one: Mount = mount("--settle-seconds", "30")
    (one.path / "written").write_bytes(b"1")
    with open(one.path / "written"):
        done = run(FUSECACHE, "unmount", "--force", one.path, check=False)
        assert "busy" in done.stderr
    os.kill(one.pid, signal.SIGTERM)
    wait_until(lambda: not one.is_alive(), "the end of the daemon")
    assert bucket.get("written") == b"1"


def test_in_the_foreground_it_ends_with_a_signal(bucket, tmp_path):
    point = tmp_path / "mnt"
    point.mkdir()
    words = Mount(bucket, point, tmp_path / "cache").command("--foreground")
    with subprocess.Popen(
        words, env=bucket.service.environment(), stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        wait_until(lambda: mounted_at(point), "the mount")
        wait_until(lambda: (point / ".fusecache").is_dir(), "its answer")
        (point / "file").write_bytes(b"1")
        process.terminate()
        _, log = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "Traceback" not in log
    assert not mounted_at(point)
    assert bucket.get("file") == b"1"


READ_WITHOUT_END = """
import os, sys
file = os.open(sys.argv[1], os.O_RDONLY)
print("at it", flush=True)
for index in range(10_000):
    os.pread(file, 1 << 17, index * 7919 * 4096 % os.fstat(file).st_size)
"""
WRITE_WITHOUT_END = """
import os, sys
file = os.open(sys.argv[1], os.O_CREAT | os.O_RDWR)
data = bytes(1 << 20)
for turn in range(1_000_000):
    for index in range(4):
        os.pwrite(file, data, index << 20)
    os.fsync(file)
    if turn == 1:
        print("at it", flush=True)
"""


@contextmanager
def programs(commands: list[tuple[str, Path]]) -> Iterator[None]:
    """Run programs with one path each; once all say that they are at it, the block runs. They are gone afterwards."""
    started = []
    try:
        for text, path in commands:
            words = [sys.executable, "-c", text, str(path)]
            started.append(subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL))
        for each in started:
            assert each.stdout is not None
            assert each.stdout.readline() == b"at it\n"
        yield
    finally:
        for each in started:
            each.kill()
            each.communicate()


@pytest.mark.s3server_only
def test_it_ends_in_order_under_programs_that_read_and_write(bucket, tmp_path):
    """Requests in threads, and those that wait for a slow bucket, are not answered through a closed session."""
    point = tmp_path / "mnt"
    point.mkdir()
    bucket.put("large", bytes(48 << 20))
    bucket.control.set(bandwidth=200_000)
    words = Mount(bucket, point, tmp_path / "cache").command("--foreground")
    try:
        with subprocess.Popen(
            words,
            env=bucket.service.environment(),
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                wait_until(lambda: mounted_at(point), "the mount")
                wait_until(lambda: (point / ".fusecache").is_dir(), "its answer")
                readers = [(READ_WITHOUT_END, point / "large")] * 3
                writers = [(WRITE_WITHOUT_END, point / f"{index}") for index in range(5)]
                with programs([*readers, *writers]):
                    wait_until(lambda: bucket.requests("GetObject"), "a read that waits")
                    process.terminate()
                    _, log = process.communicate(timeout=120)
            finally:
                if process.poll() is None:
                    process.kill()
    finally:
        bucket.control.set(bandwidth=None)
        if mounted_at(point):
            run("fusermount3", "-u", "-z", point)
    assert process.returncode == 0, log
    assert "Traceback" not in log
    assert bucket.names() == ["large"]  # nobody closed what was written


def test_commands_ask_the_mount_below_another_mount(mount: Callable[..., Mount], bucket: Bucket):
    bucket.put("outer/place/", b"")
    bucket.put("inner/file", b"1")
    outer = mount(of=bucket.below("outer"))
    inner = mount(of=bucket.below("inner"), path=outer.path / "place")
    assert inner.status()["pid"] == inner.pid != outer.pid
    (inner.path / "new").write_bytes(b"2")
    run(FUSECACHE, "sync", inner.path / "new")
    assert bucket.get("inner/new") == b"2"
    run(FUSECACHE, "unmount", inner.path)
    assert not mounted_at(inner.path)
    assert mounted_at(outer.path)


def test_a_daemon_that_hangs_is_named_though_the_path_leads_into_a_mount_below(
    mount: Callable[..., Mount], bucket: Bucket
):
    bucket.put("outer/place/", b"")
    outer = mount(of=bucket.below("outer"))
    inner = mount(of=bucket.below("inner"), path=outer.path / "place")
    os.kill(outer.pid, signal.SIGSTOP)
    try:
        said = run(FUSECACHE, "status", inner.path, check=False).stderr
    finally:
        os.kill(outer.pid, signal.SIGCONT)
    assert f"{outer.path}: the daemon has not answered for 10 s" in said
    inner.unmount()
