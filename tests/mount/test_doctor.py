"""`fusecache doctor` on this machine and the test server: what is fine, what is not, and what helps."""

import os
import re
import resource
from pathlib import Path

import pytest

from tests.support.mounts import FUSECACHE, run
from tests.support.s3_buckets import Bucket

pytestmark = pytest.mark.s3server_only
LINE = re.compile(r"(ok|warning|action) +([a-z0-9 ]+): (.+)")
NODE = ["kernel", "fuse", "fusermount3", "open files"]
DISK = ["cache disk", "cache size", "memory", "disk speed"]
BUCKET = ["clock", "endpoint", "keys", "round trip", "bandwidth"]

Lines = dict[str, tuple[str, str]]


def doctor(*words: str | Path, **more) -> tuple[int, Lines]:
    """Return the exit status, and level and text of each line by its subject, in order."""
    ended = run(FUSECACHE, "doctor", *words, check=False, **more)
    assert not ended.stderr
    found = [LINE.fullmatch(line) for line in ended.stdout.splitlines()]
    return ended.returncode, {match[2]: (match[1], match[3]) for match in found if match}


@pytest.fixture
def asks(bucket: Bucket, tmp_path: Path):
    """Ask the doctor about a mount of this bucket."""

    def ask(*flags: str | Path, **variables: str) -> tuple[int, Lines]:
        words = ["--endpoint-url", bucket.service.endpoint_url, "--cache-dir", tmp_path / "cache", *flags]
        mountpoint = tmp_path / "mnt"
        mountpoint.mkdir(exist_ok=True)
        environment = {**bucket.service.environment(), **variables}
        return doctor(bucket.source, mountpoint, *words, env=environment)

    yield ask
    bucket.service.control.set(clock_skew=0.0)


def test_healthy_bucket_and_disk_are_ok(asks, bucket: Bucket, tmp_path: Path) -> None:
    bucket.put("model", bytes(9 << 20))
    before = bucket.names()
    status, lines = asks()
    assert list(lines) == [*NODE, "mountpoint", *DISK, *BUCKET]
    assert status == max({"ok": 0, "warning": 1, "action": 2}[level] for level, _ in lines.values())
    assert {subject for subject in ("fuse", "mountpoint", *BUCKET) if lines[subject][0] != "ok"} == set()
    assert "reading 8.0 MiB" in lines["bandwidth"][1]
    assert bucket.names() == before
    assert [path.name for path in tmp_path.iterdir()] == ["mnt"]


def test_empty_bucket_states_what_was_not_measured(asks) -> None:
    _, lines = asks()
    assert lines["bandwidth"] == ("ok", "not measured: the first 1 000 keys have no object with content")


def test_a_prefix_without_objects_is_asked_about(asks, bucket: Bucket) -> None:
    status, lines = asks()
    assert status >= 1
    assert lines["prefix"][0] == "warning"
    assert lines["prefix"][1].endswith("has no objects yet: is the prefix right?")


@pytest.mark.parametrize("is_used", [False, True])
def test_a_cache_larger_than_its_disk_is_a_warning(asks, tmp_path: Path, *, is_used: bool) -> None:
    if is_used:
        (tmp_path / "cache").mkdir()
    status, lines = asks("--cache-size", "1024TiB")
    assert status >= 1
    assert lines["cache size"][0] == "warning"
    assert "the cache will use" in lines["cache size"][1]


def test_wrong_clock_is_named(asks, bucket: Bucket) -> None:
    bucket.service.control.set(clock_skew=-1200.0)
    status, lines = asks()
    assert status == 2
    assert lines["clock"][0] == "action"
    assert re.match(r"(19|20) min ahead of .*: the bucket refuses every request; set it", lines["clock"][1])


def test_wrong_keys_need_action(asks) -> None:
    status, lines = asks(AWS_SECRET_ACCESS_KEY="wrong")
    assert (status, lines["keys"][0], lines["clock"][0]) == (2, "action", "ok")
    assert "SignatureDoesNotMatch" in lines["keys"][1]


def test_silent_endpoint_needs_action(asks) -> None:
    status, lines = asks("--endpoint-url", "http://127.0.0.1:9")
    assert (status, lines["endpoint"][0]) == (2, "action")
    assert "check the URL, the network, proxy and firewall" in lines["endpoint"][1]


def test_cache_in_memory_is_a_warning(asks) -> None:
    status, lines = asks("--cache-dir", "/dev/shm/fusecache-not-made")
    assert status >= 1
    assert lines["risk"][0] == "warning"
    assert "in memory" in lines["risk"][1]


def test_full_mountpoint_needs_action(asks, tmp_path: Path) -> None:
    (tmp_path / "mnt").mkdir()
    (tmp_path / "mnt" / "file").touch()
    status, lines = asks()
    assert (status, lines["mountpoint"][0]) == (2, "action")
    assert "is not empty" in lines["mountpoint"][1]


def test_node_alone_needs_no_bucket(tmp_path: Path) -> None:
    limit = 512
    status, lines = doctor(
        env={**os.environ, "PATH": str(tmp_path)},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit)),
    )
    assert (status, list(lines)) == (2, NODE)
    assert lines["fusermount3"] == ("action", "not found: install it, as root: apt-get install fuse3")
    assert lines["open files"][0] == "warning"


def test_the_size_of_a_cache_is_judged_without_a_bucket(tmp_path: Path) -> None:
    status, lines = doctor("--cache-size", "1024TiB", "--cache-dir", tmp_path / "cache")
    assert status >= 1
    assert list(lines) == [*NODE, *DISK]
    assert lines["cache size"][0] == "warning"


def test_bad_option_is_one_line() -> None:
    ended = run(FUSECACHE, "doctor", "s3://b", "--cache-size", "much", check=False)
    assert ended.returncode == 2
    assert re.fullmatch(r"fusecache: error: --cache-size = .*\n", ended.stderr)
