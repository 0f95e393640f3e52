"""Several buckets of one command, each with a daemon of its own: contents, outages, crashes, commands, moves."""

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fusecache.mount.control_client import ask, find_mount
from loader import wait_for
from tests.mount.conftest import FLAGS, ExpectedLog, as_new
from tests.s3server import Account, Fault, FaultAction, ServerProcess
from tests.support.gcs_server import GcsServer
from tests.support.mounts import FUSECACHE, BucketMounts, Mount, mounted_at, pattern, refusal, run, wait_until
from tests.support.s3_buckets import Bucket, Service

pytestmark = pytest.mark.s3server_only

MIB = 1 << 20
FAMILIES = ("DATASET", "GRADIENTS")
# What a daemon says while a bucket is away, or refuses the keys.
AWAY = ("publish failed", "upload failed", "request failed call=", "credentials refused", "DEGRADED")


# The configuration says what is mounted, and no test here needs a client of it.
_NOWHERE = Bucket(Service("", "", "", ""), None, "")  # type: ignore[arg-type]


class _NoSource(Bucket):
    """What is mounted if the flags say so."""

    @property
    def source(self) -> str:
        """Nothing."""
        return ""


@dataclass
class Pair:
    """Two servers, each with a bucket, and mounts of both buckets."""

    dataset: ServerProcess
    gradients: ServerProcess
    mount: Callable[..., BucketMounts]
    folder: Path
    expect_log: ExpectedLog

    @property
    def tables(self) -> str:
        """The tables of both buckets, with their keys from the environment."""
        return "".join(
            f'[[bucket]]\nname = "{family.lower()}"\ncredentials_from = "{family}"\n' for family in FAMILIES
        )

    def config(self, text: str) -> Path:
        """Write a configuration file; return its path."""
        path = self.folder / "fusecache.toml"
        path.write_text(text)
        return path

    def mounted(self, *flags: str, tables: str = "", **where: Path) -> BucketMounts:
        """Mount both buckets."""
        path = self.config(tables or self.tables)
        return self.mount("--config", str(path), *flags, of=_NOWHERE, **where)

    def allow(self, made: BucketMounts, *words: str) -> None:
        """Accept lines of the log, if they came."""
        self.expect_log.patterns += [word for word in words if word in made.log()]


def row(made: BucketMounts, name: str) -> dict[str, Any]:
    """Return the status of one bucket."""
    return made.of[name].status()


@pytest.fixture(scope="module")
def whole_servers() -> Iterator[tuple[ServerProcess, ServerProcess]]:
    """Two servers of buckets of the same name."""
    with ServerProcess() as first, ServerProcess() as second:
        yield first, second
        for server in (first, second):
            assert server.control.offences() == []


@pytest.fixture
def two_servers(
    whole_servers: tuple[ServerProcess, ServerProcess],
) -> Iterator[tuple[ServerProcess, ServerProcess]]:
    """Two servers with empty buckets of the same name."""
    for server in whole_servers:
        as_new(server)
    yield whole_servers
    for server in whole_servers:
        server.control.clear_faults()
        server.control.close()


@pytest.fixture
def pair(
    mount_several: Callable[..., BucketMounts],
    tmp_path: Path,
    expect_log: ExpectedLog,
    monkeypatch: pytest.MonkeyPatch,
    two_servers: tuple[ServerProcess, ServerProcess],
) -> Pair:
    """Two servers with empty buckets, and the variables of a family for each."""
    for family, server in zip(FAMILIES, two_servers, strict=True):
        monkeypatch.setenv(f"{family}_ENDPOINT_URL", server.endpoint_url)
        monkeypatch.setenv(f"{family}_BUCKET_NAME", server.bucket)
        for role in ("READ", "WRITE"):
            monkeypatch.setenv(f"{family}_{role}_ACCESS_KEY_ID", server.access_key)
            monkeypatch.setenv(f"{family}_{role}_SECRET_ACCESS_KEY", server.secret_key)
    return Pair(*two_servers, mount_several, tmp_path, expect_log)


def test_each_bucket_is_a_folder(pair: Pair) -> None:
    pair.dataset.control.put("train/shard", b"samples")
    pair.gradients.control.put("peer-1", b"gradient")
    made = pair.mounted()
    assert sorted(os.listdir(made.path)) == ["dataset", "gradients"]
    assert (made.path / "dataset/train/shard").read_bytes() == b"samples"
    assert (made.path / "gradients/peer-1").read_bytes() == b"gradient"
    (made.path / "dataset/new").write_bytes(b"to the data set")
    (made.path / "gradients/big").write_bytes(pattern(70 * MIB))
    made.sync()
    assert pair.dataset.control.read("new") == b"to the data set"
    assert pair.gradients.control.read("big") == pattern(70 * MIB)
    assert sorted(pair.dataset.control.objects()) == ["new", "train/shard"]
    assert sorted(pair.gradients.control.objects()) == ["big", "peer-1"]
    (made.path / "gradients/peer-1").rename(made.path / "gradients/peer-2")
    (made.path / "dataset/new").unlink()
    made.sync()
    assert sorted(pair.gradients.control.objects()) == ["big", "peer-2"]
    assert sorted(pair.dataset.control.objects()) == ["train/shard"]


# ---- an outage of one bucket


def _stop(server: ServerProcess) -> None:
    os.kill(server.pid, signal.SIGSTOP)


def _start_again(server: ServerProcess) -> None:
    os.kill(server.pid, signal.SIGCONT)


def _pause(server: ServerProcess) -> None:
    server.control.pause("refuse")


def _resume(server: ServerProcess) -> None:
    server.control.resume()


def _refuse(server: ServerProcess) -> None:
    server.control.revoke(server.access_key)


def _allow(server: ServerProcess) -> None:
    server.control.add_account(Account(server.access_key, server.secret_key))


def _throttle(server: ServerProcess) -> None:
    server.control.faults(Fault(FaultAction.ANSWER, status=503, code="SlowDown"))


def _clear(server: ServerProcess) -> None:
    server.control.clear_faults()


# Reads each file in a thread of its own.
READERS = """
import sys, threading
for name in sys.argv[1:]:
    threading.Thread(target=lambda name=name: open(name, "rb").read()).start()
"""
OUTAGES = [(_stop, _start_again), (_throttle, _clear)]


@pytest.mark.parametrize(("end", "heal"), OUTAGES, ids=["silent", "throttled"])
def test_an_outage_stays_in_its_bucket(
    pair: Pair, end: Callable[[ServerProcess], None], heal: Callable[[ServerProcess], None]
) -> None:
    """Readers, listings and uploads of one bucket hang; in the other each takes as long as ever."""
    for server in (pair.dataset, pair.gradients):
        for index in range(40):
            server.control.add_synthetic(f"in/{index}", MIB, index)
    made = pair.mounted()
    good, bad = made.path / "dataset", made.path / "gradients"
    assert len(os.listdir(good / "in")) == len(os.listdir(bad / "in")) == 40
    end(pair.gradients)
    words = [sys.executable, "-c", READERS, *(bad / f"in/{index}" for index in range(40))]
    hung = subprocess.Popen(words, stderr=subprocess.DEVNULL)
    try:
        for index in range(70):
            (bad / f"in/waits-{index}").write_bytes(b"x")
        (bad / "in/waits-large").write_bytes(pattern(80 * MIB))
        wait_until(lambda: row(made, "gradients")["pending_files"] == 71, "the pending files")
        time.sleep(3)  # the publisher tries: what hangs, hangs by now
        began = time.monotonic()
        for index in range(40):
            assert len((good / f"in/{index}").read_bytes()) == MIB
            os.listdir(good)
        (good / "new").write_bytes(b"published")
        (good / "large").write_bytes(pattern(80 * MIB))
        made.sync("dataset")
        (good / "in/0").unlink()
        (good / "large").rename(good / "moved")
        made.sync("dataset")
        seconds = time.monotonic() - began
        assert pair.dataset.control.read("new") == b"published"
        assert {"moved"} <= set(pair.dataset.control.objects())
        assert "in/0" not in pair.dataset.control.objects()
        assert seconds < 20, seconds
        ill, well = row(made, "gradients"), row(made, "dataset")
        assert (well["unanswered_seconds"], well["refused_seconds"], well["waiting_for"]) == (0, 0, "")
        assert ill["pending_files"] == 71
        assert made.of["dataset"].status("new")["state"] == "clean"
    finally:
        heal(pair.gradients)
        hung.kill()
        hung.wait()
    run(FUSECACHE, "sync", made.path, "--timeout", "90s", seconds=100)
    assert len(pair.gradients.control.objects()) == 40 + 71
    made.unmount()
    pair.allow(made, *AWAY)


# Writes files until it gets an error, and closes them once its standard input ends: a close of many waits for uploads.
FILLER = """
import os, sys
held = []
try:
    while len(held) < 100:
        held.append(open(f"{sys.argv[1]}/{len(held)}", "wb", buffering=0))
        held[-1].write(bytes(4 << 20))
        os.fsync(held[-1].fileno())
except OSError as exc:
    print(exc.errno, len(held), flush=True)
sys.stdin.read()
"""


def test_an_outage_leaves_disk_space_to_the_other_bucket(pair: Pair) -> None:
    """Files of one bucket fill its share of the cache; the other one is written as ever, and large files, too."""
    made = pair.mounted("--cache-size", "400MiB", "--attribute-seconds", "600")
    good, bad = made.path / "dataset", made.path / "gradients"
    assert [row(made, each)["cache"]["limit_bytes"] for each in made.of] == [200 * MIB] * 2
    assert os.listdir(good) == os.listdir(bad) == []
    _pause(pair.gradients)
    words = ["python3", "-c", FILLER, bad]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as filler:
        assert filler.stdout is not None
        try:
            code, count = map(int, filler.stdout.readline().split())
            assert code == errno.ENOSPC
            for number in range(8):
                (good / f"large-{number}").write_bytes(pattern(20 * MIB))
                made.sync("dataset")
        finally:
            _resume(pair.gradients)
    run(FUSECACHE, "sync", made.path, "--timeout", "90s", seconds=100)
    assert len(pair.gradients.control.objects()) == count
    assert pair.dataset.control.read("large-7") == pattern(20 * MIB)
    made.unmount()
    pair.allow(made, *AWAY)


def test_status_and_health_of_the_folder_have_each_mount(pair: Pair) -> None:
    made = pair.mounted()
    text = run(FUSECACHE, "status", made.path).stdout
    assert [f"{made.path}/{name}: OK" in text for name in ("dataset", "gradients")] == [True, True]
    lines = run(FUSECACHE, "health", made.path).stdout.splitlines()
    assert lines == [f"{made.path}/dataset: OK", f"{made.path}/gradients: OK"]
    _refuse(pair.gradients)
    with pytest.raises(PermissionError):
        os.listdir(made.path / "gradients")
    assert (row(made, "dataset")["verdict"], row(made, "gradients")["verdict"]) == ("OK", "DEGRADED")
    done = run(FUSECACHE, "health", made.path, check=False)
    assert done.returncode == 1
    assert done.stdout.startswith(
        f"{made.path}/dataset: OK\n{made.path}/gradients: DEGRADED: the bucket has refused"
    )
    found = json.loads(run(FUSECACHE, "status", "--json", made.path).stdout)
    assert [each["mountpoint"] for each in found] == [f"{made.path}/{name}" for name in made.of]
    assert "GRADIENTS_" in run(FUSECACHE, "status", made.path).stdout
    (made.path / "dataset/file").write_bytes(b"x")
    made.of["dataset"].sync("file")
    assert "refuse" not in run(FUSECACHE, "status", made.path / "dataset/file").stdout
    _allow(pair.gradients)
    # Refused until the daemon tries the keys again.
    wait_until(
        lambda: refusal(lambda: os.listdir(made.path / "gradients")) is None, "the healed bucket", seconds=40
    )
    made.unmount()
    pair.allow(made, *AWAY)


@pytest.mark.parametrize("cause", ["refused", "closed", "missing"])
def test_a_mount_starts_without_one_of_its_buckets(
    pair: Pair, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.dataset.control.put("file", b"here")
    if cause == "refused":
        monkeypatch.setenv("GRADIENTS_READ_ACCESS_KEY_ID", "of-another-bucket")
        monkeypatch.setenv("GRADIENTS_WRITE_ACCESS_KEY_ID", "of-another-bucket")
    elif cause == "closed":
        _pause(pair.gradients)
    else:
        monkeypatch.setenv("GRADIENTS_BUCKET_NAME", "none")
    made = pair.mounted()
    pair.expect_log("DEGRADED: started without the bucket")
    assert (made.path / "dataset/file").read_bytes() == b"here"
    (made.path / "dataset/new").write_bytes(b"x")
    made.sync("dataset")
    assert row(made, "dataset")["reasons"] == []
    assert "started without the bucket" in row(made, "gradients")["reasons"][0]
    assert sorted(os.listdir(made.path)) == ["dataset", "gradients"]
    if cause == "closed":
        _resume(pair.gradients)
        pair.gradients.control.put("late", b"healed")
        wait_until(lambda: not row(made, "gradients")["reasons"], "the healed bucket")
        assert (made.path / "gradients/late").read_bytes() == b"healed"
    made.unmount()
    pair.allow(made, "request failed call=", "credentials refused")


def test_a_mount_without_any_of_its_buckets_fails(pair: Pair, tmp_path: Path) -> None:
    _pause(pair.dataset)
    _pause(pair.gradients)
    path = tmp_path / "mnt"
    config = pair.config(pair.tables)
    done = run(FUSECACHE, "mount", "--config", config, path, "--cache-dir", tmp_path / "c", check=False)
    assert done.returncode == 1
    assert "error: bucket dataset: " in done.stderr
    assert "error: bucket gradients: " in done.stderr
    assert not path.exists()


@pytest.mark.parametrize("made_by_user", [(), ("mnt",), ("mnt", "mnt/dataset", "mnt/gradients")])
def test_a_bucket_that_is_not_mounted_makes_commands_for_the_folder_fail(
    pair: Pair, tmp_path: Path, made_by_user: tuple[str, ...]
) -> None:
    path = tmp_path / "mnt"
    (tmp_path / "file").touch()
    for folder in made_by_user:
        (tmp_path / folder).mkdir()
    config = pair.config(f"{pair.tables}cache_dir = '{tmp_path}/file/cache'\ncache_size = '1GiB'\n")
    words = ["--config", config, path, "--cache-dir", tmp_path / "c", *FLAGS]
    assert run(FUSECACHE, "mount", *words, check=False).returncode == 1
    try:
        assert (mounted_at(path / "dataset"), mounted_at(path / "gradients")) == (True, False)
        synced = run(FUSECACHE, "sync", path, check=False)
        assert (synced.returncode, f"{path}/gradients is not in a fusecache mount" in synced.stderr) == (
            2,
            True,
        )
        health = run(FUSECACHE, "health", path, check=False)
        assert (health.returncode, f"{path}/gradients: ACTION" in health.stdout) == (2, True)
        status = run(FUSECACHE, "status", "--json", path, check=False)
        assert (status.returncode, [each["mountpoint"] for each in json.loads(status.stdout)]) == (
            1, [f"{path}/dataset"],
        )  # fmt: skip
    finally:
        run(FUSECACHE, "unmount", path)
    assert path.exists() == bool(made_by_user)
    if made_by_user:
        assert run(FUSECACHE, "health", path, check=False).stdout.startswith(f"ACTION: {path} is not in a")


def test_a_bucket_that_cannot_be_mounted_is_named_and_the_others_are(pair: Pair, tmp_path: Path) -> None:
    path = tmp_path / "mnt"
    (path / "gradients").mkdir(parents=True)
    (path / "gradients/in-the-way").touch()
    words = ["--config", pair.config(pair.tables), path, "--cache-dir", tmp_path / "c", *FLAGS]
    done = run(FUSECACHE, "mount", *words, check=False)
    try:
        assert done.returncode == 1
        mounted, failed = done.stderr.splitlines()
        assert mounted.startswith(f"fusecache: s3://bucket is at {path}/dataset; cache {tmp_path}/c/dataset")
        assert failed == (
            f"fusecache: error: bucket gradients: {path}/gradients is not empty: a mount would hide its contents; "
            "choose an empty directory"
        )
        assert (mounted_at(path / "dataset"), mounted_at(path / "gradients")) == (True, False)
    finally:
        run(FUSECACHE, "unmount", path)
    assert os.listdir(path) == ["dataset", "gradients"] or os.listdir(path) == ["gradients", "dataset"]


# ---- crashes, and another set of buckets


def test_pending_files_of_both_buckets_outlive_a_kill(pair: Pair) -> None:
    made = pair.mounted("--settle-seconds", "60s")
    for name in made.of:
        (made.path / name / "small").write_bytes(name.encode())
        (made.path / name / "large").write_bytes(pattern(70 * MIB))
        (made.path / name / "folder").mkdir()
        assert row(made, name)["pending_files"] == 3
    for each in made.of.values():
        each.kill()
    pair.expect_log("recovered files=2 changes=1")
    again = pair.mounted(cache=made.cache, path=made.path)
    again.sync()
    for name, server in (("dataset", pair.dataset), ("gradients", pair.gradients)):
        assert server.control.read("small") == name.encode()
        assert server.control.read("large") == pattern(70 * MIB)
        assert "folder/" in server.control.objects()
        assert (made.path / name / "small").read_bytes() == name.encode()


def test_a_crash_touches_no_other_bucket(pair: Pair) -> None:
    made = pair.mounted()
    with open(made.path / "dataset/open", "wb") as file:
        made.of["gradients"].kill()
        file.write(b"goes on")
    made.sync("dataset")
    assert pair.dataset.control.read("open") == b"goes on"


def test_buckets_may_be_added_and_taken_away(pair: Pair) -> None:
    one = '[[bucket]]\nname = "dataset"\ncredentials_from = "DATASET"\n'
    made = pair.mounted(tables=one)
    (made.path / "dataset/file").write_bytes(b"kept")
    made.unmount()
    again = pair.mounted(cache=made.cache, path=made.path)
    assert (again.path / "dataset/file").read_bytes() == b"kept"
    assert os.listdir(again.path / "gradients") == []
    again.unmount()
    last = pair.mounted(cache=made.cache, path=made.path, tables=one)
    assert os.listdir(last.path) == ["dataset"]
    assert (last.path / "dataset/file").read_bytes() == b"kept"


def test_the_cache_directory_of_one_mount_is_not_that_of_several(pair: Pair, tmp_path: Path) -> None:
    cache, path = tmp_path / "cache", tmp_path / "mnt"
    cache.mkdir()
    (cache / "fusecache.json").write_text("{}")
    done = run(
        FUSECACHE, "mount", "--config", pair.config(pair.tables), path, "--cache-dir", cache, check=False
    )
    assert done.returncode == 1
    assert f"{cache} is the cache directory of one mount" in done.stderr
    assert (os.listdir(cache), path.exists()) == (["fusecache.json"], False)


# ---- a service: one process in front of the daemons


@pytest.fixture
def in_front(pair: Pair, tmp_path: Path) -> Iterator[tuple["subprocess.Popen[str]", socket.socket, Path]]:
    """`fusecache mount --foreground`, the socket of its service manager, and the folder of the buckets."""
    path = tmp_path / "mnt"
    config = pair.config(f'mountpoint = "{path}"\ncache_dir = "{tmp_path}/cache"\n{pair.tables}')
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(30)
        environment = {
            **os.environ,
            "NOTIFY_SOCKET": str(tmp_path / "notify"),
            "FUSECACHE_KEEP_MOUNTED": "no",
        }
        words = [FUSECACHE, "mount", "--foreground", "--config", config, *FLAGS]
        with subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True) as process:
            try:
                yield process, manager, path
            finally:
                process.terminate()
                process.communicate(timeout=60)
                assert not any(mounted_at(path / name) for name in ("dataset", "gradients"))


def _told(manager: socket.socket, fact: str) -> str:
    """Return the message that has a fact, once it has come."""
    while fact not in (message := manager.recv(8192).decode()):
        pass
    return message


def test_a_service_is_ready_with_all_and_starts_again_what_dies(
    in_front: tuple["subprocess.Popen[str]", socket.socket, Path], pair: Pair
) -> None:
    process, manager, path = in_front
    _told(manager, "READY=1")
    assert [mounted_at(path / name) for name in ("dataset", "gradients")] == [True, True]
    _told(manager, f"STATUS=dataset: mounted at {path}/dataset; gradients: ")
    (path / "gradients/file").write_bytes(b"x")
    dataset, gradients = (find_mount(path / name, os.environ)[0] for name in ("dataset", "gradients"))
    pids = [ask(each, "status").status["pid"] for each in (dataset, gradients)]
    os.kill(pids[0], signal.SIGKILL)
    _told(manager, "dataset: ended with status 137; gradients: ")
    _told(manager, f"dataset: mounted at {path}/dataset")
    assert ask(gradients, "status").status["pid"] == pids[1]
    (path / "dataset/file").write_bytes(b"y")
    process.terminate()
    _told(manager, "STOPPING=1")
    assert process.wait(60) == 0
    assert pair.dataset.control.read("file") == b"y"
    assert pair.gradients.control.read("file") == b"x"


def test_a_service_is_ready_without_a_bucket_that_is_away_and_ends_with_its_last_mount(
    pair: Pair, request: pytest.FixtureRequest
) -> None:
    _pause(pair.gradients)
    process, manager, path = request.getfixturevalue("in_front")
    _told(manager, "READY=1")
    assert [mounted_at(path / name) for name in ("dataset", "gradients")] == [True, True]
    _told(manager, "gradients: DEGRADED: started without the bucket")
    run(FUSECACHE, "unmount", path / "dataset")
    _resume(pair.gradients)
    run(FUSECACHE, "unmount", path)
    assert process.wait(60) == 0


def test_a_service_none_of_whose_buckets_answers_ends(pair: Pair, request: pytest.FixtureRequest) -> None:
    _pause(pair.dataset)
    _pause(pair.gradients)
    process, _, _ = request.getfixturevalue("in_front")
    assert process.wait(60) == 1
    said = process.stderr.read()
    assert "error: bucket dataset: " in said
    assert "error: bucket gradients: " in said


# ---- what each bucket allows


def _failure(call: Callable[..., object], *args: object, **options: object) -> int:
    with pytest.raises(OSError, match=r".") as caught:
        call(*args, **options)
    return caught.value.errno or 0


def test_moves_between_buckets_are_copies(pair: Pair) -> None:
    made = pair.mounted()
    one, other = made.path / "dataset", made.path / "gradients"
    (one / "file").write_bytes(b"moved")
    (one / "folder").mkdir()
    assert _failure(os.rename, one / "file", other / "file") == errno.EXDEV
    assert _failure(os.rename, one / "folder", other / "folder") == errno.EXDEV
    assert _failure(os.link, one / "file", other / "file") == errno.EXDEV
    run("mv", one / "file", other / "file")
    made.sync()
    assert pair.gradients.control.read("file") == b"moved"
    assert list(pair.dataset.control.objects()) == ["folder/"]


def test_the_folder_that_the_mount_makes_takes_no_files_and_goes_with_it(pair: Pair) -> None:
    made = pair.mounted()
    assert made.path.stat().st_mode & 0o222 == 0
    if os.geteuid():
        assert _failure((made.path / "new").write_bytes, b"x") == errno.EACCES
    assert _failure((made.path / "dataset").rmdir) == errno.EBUSY
    assert _failure((made.path / "dataset").rename, made.path / "gradients/x") in (errno.EBUSY, errno.EXDEV)
    run(FUSECACHE, "unmount", made.path / "dataset")
    assert os.listdir(made.path) == ["gradients"]
    assert run(FUSECACHE, "health", made.path).stdout.startswith("OK")
    left = json.loads(run(FUSECACHE, "status", "--json", made.path).stdout)
    assert [each["mountpoint"] for each in left] == [f"{made.path}/gradients"]
    run(FUSECACHE, "unmount", made.path)
    assert not made.path.exists()


def test_a_bucket_may_be_read_only(pair: Pair) -> None:
    pair.dataset.control.put("file", b"read")
    made = pair.mounted(tables=pair.tables.replace('"DATASET"\n', '"DATASET"\nread_only = true\n'))
    file = made.path / "dataset/file"
    assert file.read_bytes() == b"read"
    assert _failure(file.write_bytes, b"x") == errno.EROFS
    assert _failure(file.unlink) == errno.EROFS
    assert _failure(os.truncate, file, 0) == errno.EROFS
    assert _failure((made.path / "dataset/new").write_bytes, b"x") == errno.EROFS
    assert _failure((made.path / "dataset/new").mkdir) == errno.EROFS
    (made.path / "gradients/new").write_bytes(b"x")
    made.sync()
    assert set(pair.dataset.control.counts()) <= {"ListObjectsV2", "GetObject", "HeadObject"}
    assert row(made, "dataset")["options"]["read_only"]


# ---- keys


def test_flags_name_buckets_and_families(pair: Pair) -> None:
    pair.dataset.control.put("train/file", b"below a prefix")
    made = pair.mounted(
        *("--bucket", "d=s3://bucket/train", "--credentials-from", "d=DATASET"),
        *("--credentials-from", "g=GRADIENTS"),
        tables="# none\n",
    )
    assert sorted(os.listdir(made.path)) == ["d", "g"]
    assert (made.path / "d/file").read_bytes() == b"below a prefix"
    (made.path / "d/new").write_bytes(b"x")
    made.sync()
    assert pair.dataset.control.read("train/new") == b"x"


def test_one_family_is_a_mount_of_its_bucket(pair: Pair, mount: Callable[..., Mount]) -> None:
    pair.dataset.control.put("file", b"alone")
    made: Mount = mount("--credentials-from", "DATASET", of=_NoSource(_NOWHERE.service, _NOWHERE.client, ""))
    assert (made.path / "file").read_bytes() == b"alone"
    (made.path / "new").write_bytes(b"x")
    made.sync()
    assert pair.dataset.control.read("new") == b"x"
    assert made.status()["source"] == "s3://bucket"


def test_a_missing_variable_is_named_by_bucket(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GRADIENTS_WRITE_SECRET_ACCESS_KEY")
    config = pair.config(pair.tables)
    done = run(FUSECACHE, "mount", "--config", config, tmp_path / "mnt", check=False)
    assert done.returncode == 1
    alone = run(
        FUSECACHE,
        "mount",
        "--foreground",
        "--only=gradients",
        "--config",
        config,
        tmp_path / "mnt",
        check=False,
    )
    assert (done.returncode, alone.returncode) == (1, 1)
    for text in (done.stderr, alone.stderr):
        assert text.count("bucket gradients: ") == 1
        assert "GRADIENTS_WRITE_SECRET_ACCESS_KEY" in text
        assert "read_only = true" in text


def test_a_bucket_may_have_several_endpoints(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list names the data set's endpoints; the gradients lie elsewhere, in the first server's second bucket."""
    control = pair.dataset.control
    control.add_bucket("more")
    for index in range(60):
        for server in (pair.dataset, pair.gradients):
            server.control.add_synthetic(f"a/{index}", MIB // 4, index)
    keys = {"access_key_id": pair.dataset.access_key, "secret_access_key": pair.dataset.secret_key}
    buckets = [
        {"endpoint_url": server.endpoint_url, "name": "bucket", "credentials": {"read": keys, "write": keys}}
        for server in (pair.dataset, pair.gradients)
    ]
    monkeypatch.setenv("DATASET_BUCKET_LIST", json.dumps(buckets))
    monkeypatch.setenv("GRADIENTS_ENDPOINT_URL", pair.dataset.endpoint_url)
    monkeypatch.setenv("GRADIENTS_BUCKET_NAME", "more")
    made = pair.mounted()
    for index in range(60):
        assert len((made.path / f"dataset/a/{index}").read_bytes()) == MIB // 4
    assert min(len(server.control.log("GetObject")) for server in (pair.dataset, pair.gradients)) >= 8
    (made.path / "gradients/new").write_bytes(b"x")
    made.sync()
    assert control.read("new", bucket="more") == b"x"
    assert [len(row(made, each)["endpoints"]) for each in made.of] == [2, 0]


def test_a_bucket_may_lie_in_another_cloud(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """One folder is Google's; where it is away, the other is written as ever."""
    with GcsServer() as google:
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(google.key_file(pair.folder / "key.json")))
        pair.expect_log("Google Cloud Storage takes no precondition for a file over 64 MiB")
        made = pair.mounted(
            tables='[[bucket]]\nname = "archive"\nsource = "gs://bucket/run"\n'
            f'endpoint_url = "{google.endpoint_url}"\n'
            '[[bucket]]\nname = "gradients"\ncredentials_from = "GRADIENTS"\n'
        )
        for name in ("archive", "gradients"):
            (made.path / name / "large").write_bytes(pattern(70 * MIB))
            (made.path / name / "old").write_bytes(name.encode())
        made.sync()
        (made.path / "archive/old").rename(made.path / "archive/new")
        made.sync("archive")
        assert {"run/large", "run/new"} == set(google.objects)
        assert google.objects["run/large"].data == pattern(70 * MIB)
        assert pair.gradients.control.read("old") == b"gradients"
        assert [row(made, name)["source"] for name in ("archive", "gradients")] == [
            "gs://bucket/run",
            "s3://bucket",
        ]
        assert row(made, "archive")["conditional_writes"] == "not-of-parts"
        google.refuses_writes = True
        for name in ("archive", "gradients"):
            (made.path / name / "more").write_bytes(name.encode())
        made.sync("gradients")
        assert pair.gradients.control.read("more") == b"gradients"
        wait_until(
            lambda: row(made, "archive")["reasons"],
            "the reason",
        )
        google.refuses_writes = False
        wait_until(lambda: "run/more" in google.objects, "the healed bucket", seconds=60)
        made.unmount()
        pair.allow(made, *AWAY)
        assert google.offences == []


# ---- commands


def test_run_mounts_every_bucket_of_a_config(pair: Pair, tmp_path: Path) -> None:
    pair.dataset.control.put("given", b"words")
    config = pair.config(f'mountpoint = "{tmp_path}/mnt"\ncache_dir = "{tmp_path}/cache"\n{pair.tables}')
    copy = ["sh", "-c", f"cp {tmp_path}/mnt/dataset/given {tmp_path}/mnt/gradients/copy"]
    run(FUSECACHE, "run", "--config", config, *FLAGS, "--", *copy)
    assert pair.gradients.control.read("copy") == b"words"
    assert not (tmp_path / "mnt").exists()


def test_commands_take_paths_in_any_bucket(pair: Pair) -> None:
    for server in (pair.dataset, pair.gradients):
        server.control.put("run/old", b"1" * MIB)
        server.control.put("run/new", b"2")
    made = pair.mounted()
    run(FUSECACHE, "warm", "--wait", made.path)
    assert all(row(made, each)["cache"]["used_bytes"] > MIB for each in made.of)
    run(FUSECACHE, "evict", made.path / "dataset")
    assert row(made, "dataset")["cache"]["used_bytes"] < MIB < row(made, "gradients")["cache"]["used_bytes"]
    (made.path / "gradients/run/late").write_bytes(b"3")
    run(FUSECACHE, "sync", made.path / "gradients")
    assert run(FUSECACHE, "status", made.path / "gradients/run/late").stdout.startswith("run/late  clean")
    assert wait_for(str(made.path / "gradients/run/l*"), timeout=10) == [
        str(made.path / "gradients/run/late")
    ]


def test_clean_works_in_one_of_the_buckets(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    # Of a new name: mounts on a bucket of the same name are asked, and those of other tests may be dead or hang.
    own = f"own-{uuid.uuid4().hex}"
    pair.gradients.control.add_bucket(own)
    monkeypatch.setenv("GRADIENTS_BUCKET_NAME", own)
    for server, name in ((pair.dataset, "bucket"), (pair.gradients, own)):
        server.control.advance_clock(-600)
        server.control.put("run/old", b"1", bucket=name)
        server.control.advance_clock(600)
    made = pair.mounted()
    done = run(FUSECACHE, "clean", made.path, "--glob", "old", check=False)
    assert done.returncode == 1
    assert f"name one of them: {made.path}/dataset, {made.path}/gradients" in done.stderr
    with open(made.path / "gradients/run/old", "rb"):
        kept = run(
            FUSECACHE,
            "clean",
            made.path / "gradients/run",
            "--glob",
            "old",
            "--delete",
            "--even-recent",
            check=False,
        )
        assert (kept.returncode, "is open on this node" in kept.stderr) == (1, True), kept.stderr
    words = (FUSECACHE, "clean", made.path / "gradients/run", "--glob", "old", "--delete", "--even-recent")
    # A daemon hears of a close a moment later, and until then the file is open.
    wait_until(lambda: run(*words, check=False).returncode == 0, "release")
    assert "run/old" in pair.dataset.control.objects()
    assert pair.gradients.control.objects(bucket=own) == {}


def test_access_tests_every_bucket_of_a_config(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = pair.dataset.control
    for name in ("dataset", "gradients"):
        control.add_bucket(name)
        control.put("shard", b"an object", bucket=name)
        for role in ("read", "write"):
            key = f"{name}-{role}"
            control.add_account(Account(key, "secret", buckets=(name,), writable=role == "write"))
            monkeypatch.setenv(f"{name.upper()}_{role.upper()}_ACCESS_KEY_ID", key)
            monkeypatch.setenv(f"{name.upper()}_{role.upper()}_SECRET_ACCESS_KEY", "secret")
        monkeypatch.setenv(f"{name.upper()}_BUCKET_NAME", name)
        monkeypatch.setenv(f"{name.upper()}_ENDPOINT_URL", pair.dataset.endpoint_url)
    config = pair.config(f'{pair.tables}cache_size = "2TiB"\n')
    done = run(FUSECACHE, "access", "--json", "--config", config, check=False, seconds=120)
    found = {(each["key"], each["bucket"]): each for each in json.loads(done.stdout)["keys"]}
    assert done.returncode == 0, done.stdout
    assert set(found) == {
        (f"{name} {role}", bucket)
        for name in ("dataset", "gradients")
        for role in ("read", "write")
        for bucket in ("dataset", "gradients")
    }
    control.add_account(Account("dataset-read", "secret", buckets=("dataset", "gradients"), writable=False))
    done = run(FUSECACHE, "access", "--config", config, check=False, seconds=120)
    assert done.returncode == 1
    assert "wrong: dataset read: list, get in s3://gradients" in done.stdout
