"""A mount that starts without its bucket: from the cache and the journal, and whole again once the bucket answers."""

import errno
import os
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.s3server import Account
from tests.support.mounts import FUSECACHE, Mount, mounted_at, pattern, refusal, run, wait_until

pytestmark = pytest.mark.s3server_only

MIB = 1 << 20
DATA = pattern(3 * MIB)
STARTED = "DEGRADED: started without the bucket"
READS_ONLY = "DEGRADED: the keys may not write"
# Lines of an outage that are no fault; at least one of them comes.
ON_THE_WAY = (
    "stopped with pending uploads|recovered files=|will retry|request failed|credentials refused|waiting for"
)


def _used(mount, bucket) -> Mount:
    """Return an ended mount whose cache holds `data/a.bin`, and whose journal holds `new`; the bucket refuses."""
    bucket.put("data/a.bin", DATA)
    bucket.put("other", b"never read")
    bucket.put("other folder/file", b"never read")
    made: Mount = mount("--settle-seconds", "600")
    assert (made.path / "data" / "a.bin").read_bytes() == DATA
    (made.path / "new").write_bytes(b"pending")
    (made.path / "data" / "run").mkdir()
    (made.path / "data" / "run" / "deep").write_bytes(b"deep")
    (made.path / "other folder" / "deep").write_bytes(b"other")
    made.unmount("--force")
    bucket.control.pause("refuse")
    return made


def test_a_mount_starts_without_its_bucket(mount, bucket, expect_log):
    """It says so, serves pending files and cached objects by name, and heals without a remount."""
    expect_log(STARTED)
    expect_log(ON_THE_WAY)
    used = _used(mount, bucket)
    again: Mount = mount(cache=used.cache)
    assert STARTED in again.log()
    assert (again.path / "new").read_bytes() == b"pending"
    assert (again.path / "data" / "a.bin").read_bytes() == DATA
    assert (again.path / "data" / "run" / "deep").read_bytes() == b"deep"
    assert (again.path / "other folder" / "deep").read_bytes() == b"other"
    assert again.status()["start_failure"]
    bucket.control.resume()
    again.sync()
    assert bucket.get("new") == b"pending"
    wait_until(lambda: not again.status()["start_failure"], "the end of the degraded state")
    assert sorted(os.listdir(again.path)) == ["data", "new", "other", "other folder"]
    assert (again.path / "other").read_bytes() == b"never read"
    assert (again.path / "data" / "a.bin").read_bytes() == DATA
    # The cache does not know when a file changed; the bucket does.
    wait_until(lambda: (again.path / "data" / "a.bin").stat().st_mtime > 1e9, "the bucket's time")


def test_an_unknown_name_is_no_missing_file(mount, bucket, expect_log):
    """With refused keys, a name that the cache does not know gives EACCES, never ENOENT."""
    expect_log(STARTED)
    expect_log(ON_THE_WAY)
    used = _used(mount, bucket)
    bucket.control.resume()
    wrong = replace(bucket, service=replace(bucket.service, secret_key="wrong" * 8))
    again: Mount = mount(cache=used.cache, of=wrong)
    with pytest.raises(PermissionError):
        (again.path / "other").stat()
    assert (again.path / "data" / "a.bin").read_bytes() == DATA
    again.unmount("--force")


def test_keys_refused_at_the_start_are_renewed(mount, bucket, expect_log, tmp_path):
    """New keys in `credentials_file` heal a mount that started with wrong ones."""
    expect_log(STARTED)
    expect_log(ON_THE_WAY)
    used = _used(mount, bucket)
    bucket.control.resume()
    keys = tmp_path / "keys"

    def write(secret: str) -> None:
        keys.write_text(f"AWS_ACCESS_KEY_ID={bucket.service.access_key}\nAWS_SECRET_ACCESS_KEY={secret}\n")
        keys.chmod(0o600)

    write("wrong" * 8)
    again: Mount = mount("--credentials-file", str(keys), cache=used.cache)
    assert (again.path / "new").read_bytes() == b"pending"
    write(bucket.service.secret_key)
    again.sync()
    wait_until(lambda: not again.status()["start_failure"], "the end of the degraded state", seconds=40)
    assert bucket.get("new") == b"pending"


def _emptied(mount, bucket) -> Mount:
    """Return an ended mount whose cache directory has no file that waits for upload."""
    bucket.put("a.bin", DATA)
    made: Mount = mount()
    assert (made.path / "a.bin").read_bytes() == DATA
    made.unmount()
    return made


def _without_keys(bucket, tmp_path) -> dict[str, str]:
    known = bucket.service.environment()
    kept = {name: value for name, value in known.items() if not name.startswith("AWS_")}
    return {**kept, "HOME": str(tmp_path), "AWS_EC2_METADATA_DISABLED": "true"}


@pytest.mark.parametrize(("keys", "told"), [("refused", "SignatureDoesNotMatch"), ("missing", "credentials")])
def test_refused_or_missing_keys_end_a_start(mount, bucket, tmp_path, keys, told):
    """Also with a cache directory that was used before: nothing in it waits for upload."""
    used = _emptied(mount, bucket)
    wrong = {**bucket.service.environment(), "AWS_SECRET_ACCESS_KEY": "wrong" * 8}
    done = run(
        *used.command(), check=False, env=wrong if keys == "refused" else _without_keys(bucket, tmp_path)
    )
    assert (done.returncode, mounted_at(used.path)) == (1, False)
    assert told in done.stderr
    assert "DEGRADED" not in done.stderr


def test_keys_refused_by_all_of_several_buckets_end_a_start(bucket, tmp_path):
    point = tmp_path / "mnt"
    point.mkdir()
    buckets = [word for name in ("one", "two") for word in ("--bucket", f"{name}={bucket.source}{name}")]
    words = [FUSECACHE, "mount", point, *buckets, "--endpoint-url", bucket.service.endpoint_url]
    words += ["--cache-dir", tmp_path / "cache", "--cache-size", "1GiB"]
    right = bucket.service.environment()
    run(*words, env=right)
    run(FUSECACHE, "unmount", point)
    done = run(*words, check=False, env={**right, "AWS_SECRET_ACCESS_KEY": "wrong" * 8})
    assert done.returncode == 1
    assert not any(mounted_at(point / name) for name in ("one", "two"))
    assert "bucket one: " in done.stderr
    assert "bucket two: " in done.stderr


def test_a_service_starts_without_keys_and_promises_no_more_than_it_keeps(mount, bucket, expect_log):
    """What it says helps: keys of the environment are not renewed without a remount, and no new file can be made."""
    expect_log(STARTED)
    expect_log(ON_THE_WAY)
    used = _emptied(mount, bucket)
    wrong = replace(bucket, service=replace(bucket.service, secret_key="wrong" * 8))
    again: Mount = mount("--start-without", "keys", cache=used.cache, of=wrong)
    assert (again.path / "a.bin").read_bytes() == DATA
    assert f"run `fusecache unmount {again.path} --force`, then mount with new keys" in again.log()
    assert "heals by itself" not in again.log()
    assert refusal(lambda: (again.path / "new").write_bytes(b"x")) == errno.EACCES
    ended = run(FUSECACHE, "sync", again.path, check=False)
    assert ended.returncode == 2
    assert "nothing can be uploaded" in ended.stderr
    assert "SignatureDoesNotMatch" in ended.stderr
    assert "writes continue" not in run(FUSECACHE, "status", again.path).stdout
    again.unmount("--force")


def test_the_unit_asks_for_a_start_without_keys():
    unit = Path(__file__).parents[2] / "systemd" / "fusecache@.service"
    (line,) = [line for line in unit.read_text().splitlines() if line.startswith("ExecStart=")]
    assert " --start-without keys " in line


@pytest.mark.parametrize(("flags", "status"), [((), 2), (("--read-only",), 0)])
def test_sync_is_an_error_while_a_mount_started_without_its_bucket(mount, bucket, expect_log, flags, status):
    expect_log(STARTED)
    expect_log(ON_THE_WAY)
    used = _emptied(mount, bucket)
    bucket.control.pause("refuse")
    again: Mount = mount(*flags, cache=used.cache)
    assert "until the bucket answers; then the mount heals by itself" in again.log()
    assert run(FUSECACHE, "sync", again.path, check=False).returncode == status
    bucket.control.resume()
    wait_until(lambda: not again.status()["start_failure"], "the end of the degraded state")
    again.sync()


def test_a_silent_bucket_delays_a_start_by_seconds(mount, bucket, expect_log):
    expect_log(STARTED)
    expect_log(ON_THE_WAY)
    used = _used(mount, bucket)
    bucket.control.resume()
    bucket.control.pause("blackhole")
    began = time.monotonic()
    again: Mount = mount(cache=used.cache)
    assert time.monotonic() - began < 25
    assert (again.path / "new").read_bytes() == b"pending"
    bucket.control.resume()
    again.sync()


@pytest.mark.parametrize(("kind", "verb"), [("refused", "refuses"), ("ignored", "ignores")])
def test_a_store_without_conditions_gets_no_write_after_such_a_start(mount, bucket, expect_log, kind, verb):
    """What a start refuses with the bucket there is not written to it later; with the named option it is."""
    expect_log(STARTED)
    expect_log(ON_THE_WAY)
    expect_log("a check of the start failed|stopped with pending uploads")
    expect_log(f"the store {verb} If-Match")
    used = _used(mount, bucket)
    again: Mount = mount(cache=used.cache)
    bucket.control.set_rules(conditional_writes=kind)
    try:
        bucket.control.resume()
        wait_until(lambda: not again.status()["start_failure"], "the bucket's answer")
        (again.path / "late").write_bytes(b"ours")
        bucket.put("late", b"of another client")
        assert run(FUSECACHE, "sync", again.path, "--timeout", "3", check=False).returncode
        health = run(FUSECACHE, "health", again.path, check=False)
        assert health.returncode == 2
        assert health.stdout.startswith("ACTION: nothing is uploaded")
        assert "--conflict last-wins" in health.stdout
        assert "new" not in bucket.names()
        assert bucket.get("late") == b"of another client"
        again.unmount("--force")
        last: Mount = mount("--conflict", "last-wins", cache=used.cache)
        last.sync()
        assert bucket.get("new") == b"pending"
        last.unmount()
    finally:
        bucket.control.set_rules(conditional_writes="kept")


def test_a_bucket_that_is_gone_still_refuses_a_start(mount, bucket, expect_log):
    """No waiting heals a wrong name."""
    made: Mount = mount()
    made.unmount()
    gone = replace(bucket, service=replace(bucket.service, bucket="no-such-bucket"))
    done = run(*Mount(gone, made.path, made.cache).command(), check=False, env=bucket.service.environment())
    assert done.returncode == 1
    assert "no-such-bucket" in done.stderr


@pytest.mark.parametrize("pending", [False, True])
def test_keys_that_may_not_write_start_with_pending_files(mount, bucket, expect_log, pending):
    """A read-write mount whose keys may not write is refused, unless files wait for upload."""
    used: Mount = mount("--settle-seconds", "600")
    if pending:
        expect_log(READS_ONLY)
        expect_log(ON_THE_WAY)
        (used.path / "new").write_bytes(b"pending")
    used.unmount("--force")
    bucket.control.add_account(Account("reader", "reading" * 5, writable=False))
    reader = replace(bucket, service=replace(bucket.service, access_key="reader", secret_key="reading" * 5))
    if pending:
        again: Mount = mount(cache=used.cache, of=reader)
        assert (again.path / "new").read_bytes() == b"pending"
        again.unmount("--force")
        return
    done = run(*Mount(reader, used.path, used.cache).command(), check=False, env=reader.service.environment())
    assert done.returncode == 1
    assert "allow reads but not writes" in done.stderr


def test_a_mount_that_starts_without_nothing_waits(mount, bucket, expect_log):
    """With the option, `mount` returns only when the bucket has answered."""
    used = _used(mount, bucket)
    words = [str(word) for word in used.command("--start-without", "nothing")]
    with subprocess.Popen(
        words, env=bucket.service.environment(), stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            wait_until(lambda: "waiting for the bucket" in used.log(), "the line that it waits")
            assert process.poll() is None
            expect_log("waiting for the bucket|" + ON_THE_WAY)
            bucket.control.resume()
            assert process.wait(60) == 0
        finally:
            process.kill()
    used.pid = used.status()["pid"]
    used.sync()
    assert bucket.get("new") == b"pending"
    run(FUSECACHE, "unmount", used.path)
