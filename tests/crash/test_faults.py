"""What a bad day does: outages, storms, revoked keys, other clients, a full disk. Nothing is lost, order is kept."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from tests.crash.test_kill import published, shows
from tests.s3server import Account, Fault, FaultAction, ServerProcess
from tests.support.daemons import MIB, Daemon, some_bytes
from tests.support.frozen import frozen
from tests.support.mounts import wait_until

# Nothing settles while a test is at work: what is owed goes when the daemon drains.
NEVER_SETTLES = ("--settle-seconds", "3600")


def refusals(server: ServerProcess, status: int) -> list[str]:
    return [entry.key for entry in server.control.log() if entry.status == status]


def drain(daemon: Daemon) -> None:
    """End the daemon in peace: it publishes everything first."""
    daemon.signal(signal.SIGTERM)
    assert daemon.wait() == 0


def revoke_before_it_is_published(server: ServerProcess, path: Path, data: bytes) -> float:
    """Write a file, revoke the server's own key, and only then let the upload arrive; return when it was revoked."""
    server.control.faults(Fault(FaultAction.HOLD, operation="PutObject"))
    path.write_bytes(data)
    server.control.wait_requests(1, "PutObject", path.name, finished=False)
    server.control.revoke(server.access_key)
    revoked_at = time.monotonic()
    server.control.clear_faults()
    wait_until(lambda: refusals(server, 403), "a refusal")
    return revoked_at


# ---- order


def test_a_checkpoint_is_published_in_the_order_it_was_written(server: ServerProcess, daemon: Daemon) -> None:
    first, second = daemon.path / "step-1", daemon.path / "step-2"
    for folder in (first, second):
        folder.mkdir()
        for rank in range(3):
            (folder / f"shard-{rank}").write_bytes(some_bytes((66 if rank == 1 else 1) * MIB, rank))
        (folder / ".metadata.tmp").write_bytes(b"index")
        (folder / ".metadata.tmp").rename(folder / ".metadata")
        (daemon.path / "latest").write_text(folder.name)
    for path in sorted(first.iterdir()):
        path.unlink()
    first.rmdir()
    assert daemon.sync() == 0
    log = published(server)
    order = [key for operation, key in log if operation != "DeleteObject"]
    for step in ("step-1", "step-2"):
        mine = [key for key in order if key.startswith(step)]
        if mine:  # what was removed before its turn is never sent
            assert mine[-1] == f"{step}/.metadata" or f"{step}/.metadata" not in mine
    last_of_second = max(index for index, (_, key) in enumerate(log) if key.startswith("step-2/"))
    assert max(index for index, (_, key) in enumerate(log) if key == "latest") > last_of_second
    for index, (operation, key) in enumerate(log):
        if operation == "DeleteObject" and not key.endswith("/"):
            assert index > last_of_second
    wanted = {f"step-2/{name}" for name in ("", "shard-0", "shard-1", "shard-2", ".metadata")}
    assert set(shows(server)) == {"latest", *wanted}
    assert not [entry for entry in server.control.log() if ".tmp" in entry.key and entry.took_effect]


def test_replacing_the_metadata_of_a_checkpoint_never_deletes_it(
    server: ServerProcess, make_daemon: Callable[..., Daemon]
) -> None:
    server.control.put(".metadata", b"1")
    daemon = make_daemon(*NEVER_SETTLES)
    for number in range(2, 4):
        daemon.mount()
        (daemon.path / "shard").write_bytes(b"%d" % number)
        (daemon.path / ".metadata.tmp").write_bytes(b"%d" % number)
        (daemon.path / ".metadata").unlink()
        (daemon.path / ".metadata.tmp").rename(daemon.path / ".metadata")
        drain(daemon)
    assert server.control.log("DeleteObject") == []
    assert shows(server) == {"shard": b"3", ".metadata": b"3"}


def test_a_key_is_written_at_most_once_a_second(server: ServerProcess, daemon: Daemon) -> None:
    server.control.clear_log()
    for number in range(4):
        (daemon.path / "log").write_bytes(b"%d" % number)
        (daemon.path / f"other-{number}").write_bytes(b"-")
        if number % 2:
            (daemon.path / "log").unlink()
        server.control.wait_requests(number + 1, "PutObject")
    (daemon.path / "log").write_bytes(b"last")
    assert daemon.sync() == 0
    assert refusals(server, 429) == []
    assert shows(server)["log"] == b"last"


# ---- other clients


def test_what_another_client_wrote_meanwhile_is_not_deleted(
    server: ServerProcess, make_daemon: Callable[..., Daemon]
) -> None:
    daemon = make_daemon(
        "--attribute-seconds", "5"
    )  # so that the unlink itself asks for nothing that is held
    daemon.mount()
    (daemon.path / "file").write_bytes(b"ours")
    assert daemon.sync() == 0
    server.control.faults(Fault(FaultAction.HOLD, operation="HeadObject", key="file"))
    (daemon.path / "file").unlink()
    server.control.put("file", b"theirs")
    server.control.clear_faults()
    assert daemon.sync() == 3
    assert shows(server) == {"file": b"theirs"}
    assert server.control.log("DeleteObject", "file") == []
    wait_until(lambda: (daemon.path / "file").exists(), "the other client's file")
    assert (daemon.path / "file").read_bytes() == b"theirs"


# ---- the bucket


@pytest.mark.case(30)
def test_revoked_keys_that_come_back_cost_nothing(server: ServerProcess, daemon: Daemon) -> None:
    (daemon.path / "before").write_bytes(b"0")
    assert daemon.sync() == 0
    server.control.clear_log()
    revoke_before_it_is_published(server, daemon.path / "file", b"1")
    assert daemon.sync(timeout=1) == 1
    server.control.add_account(Account(server.access_key, server.secret_key))
    assert daemon.sync() == 0
    assert shows(server) == {"before": b"0", "file": b"1"}


@pytest.mark.case(30)
def test_keys_that_were_replaced_are_read_again(
    server: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = tmp_path / "keys"

    def write_keys(name: str, secret: str) -> None:
        keys.write_text(f"[writer]\naws_access_key_id = {name}\naws_secret_access_key = {secret}\n")

    write_keys(server.access_key, server.secret_key)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(keys))
    daemon = Daemon(server, tmp_path / "node", "--profile", "writer")
    try:
        daemon.mount()
        server.control.add_account(Account("renewed", "secret-of-renewed"))
        revoke_before_it_is_published(server, daemon.path / "file", b"1")
        write_keys("renewed", "secret-of-renewed")
        assert daemon.sync() == 0
        assert shows(server) == {"file": b"1"}
    finally:
        daemon.clean_up()
        server.control.add_account(Account(server.access_key, server.secret_key))


# A daemon with little patience: what it does each few seconds comes at once, what it says after 90 s after 2.
AUTH_FAILED_SECONDS = 2.0
IMPATIENT = (
    "import sys, fusecache.daemon.bucket_link as credentials; credentials.CHECK_SECONDS = 0.1;"
    "credentials.RELOAD_SECONDS = 0.5;"
    f"credentials.AUTH_FAILED_SECONDS = {AUTH_FAILED_SECONDS}; from fusecache.cli.main import main; sys.exit(main())"
)


@pytest.mark.case(30)
def test_keys_that_are_refused_for_long_are_said_to_have_failed_until_they_are_granted_again(
    server: ServerProcess, make_daemon: Callable[..., Daemon]
) -> None:
    daemon = make_daemon()
    daemon.program = [sys.executable, "-c", IMPATIENT]
    daemon.mount()

    def state() -> str:
        return json.loads((daemon.path / ".fusecache" / "stats.json").read_text())["state"]

    try:
        assert os.listdir(daemon.path) == []
        revoked_at = revoke_before_it_is_published(server, daemon.path / "file", b"1")
        seen = state()
        assert seen == "ok" or time.monotonic() >= revoked_at + AUTH_FAILED_SECONDS
        wait_until(lambda: state() == "auth-failed", "the state auth-failed")
        assert "the bucket has refused the keys" in daemon.command("status", daemon.path).stdout
        status = json.loads(daemon.command("status", daemon.path / "file", "--json").stdout)
        assert status["state"] == "error:auth-failed", status
        assert (daemon.path / "file").read_bytes() == b"1"
        (daemon.path / "file").write_bytes(b"2")  # writers go on
        (daemon.path / "new").write_bytes(b"3")
        (daemon.path / "step").mkdir()
        (daemon.path / "step" / "model").write_bytes(b"4")
        assert "the keys come from the daemon's environment" in daemon.command("status", daemon.path).stdout
    finally:
        server.control.add_account(Account(server.access_key, server.secret_key))
    assert daemon.sync() == 0
    wait_until(lambda: state() == "ok", "the state ok")
    assert shows(server) == {"file": b"2", "new": b"3", "step/": b"", "step/model": b"4"}


# A daemon that takes a bucket for silent after half a second.
HASTY = (
    "import sys, fusecache.engine.runtime.metadata_client as requests; requests.SILENT_SECONDS = 0.5;"
    "from fusecache.cli.main import main; sys.exit(main())"
)
# Finds the mount of a path as a command does, but for its patience; says what is left of the path, and the seconds.
FIND_SOON = (
    "import os, sys, time, fusecache.mount.mount_table as mount_table; mount_table.NAME_SECONDS = 0.3;"
    "from fusecache.mount.control_client import find_mount; began = time.monotonic();"
    "print(find_mount(sys.argv[1], os.environ)[1], time.monotonic() - began)"
)


def test_of_a_bucket_that_takes_requests_and_says_nothing_a_name_never_seen_is_an_error_in_time(
    server: ServerProcess, make_daemon: Callable[..., Daemon]
) -> None:
    server.control.put("seen", b"1")
    daemon = make_daemon("--read-timeout=2s")
    daemon.program = [sys.executable, "-c", HASTY]
    daemon.mount()
    assert is_there(daemon.path / "seen")  # of the directory nothing else is known
    with frozen(server.pid):
        began = time.monotonic()
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            os.stat(daemon.path / "dir")
        assert 1.3 < time.monotonic() - began < 10
        assert (daemon.path / "seen").stat().st_size == 1
        began = time.monotonic()
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            (daemon.path / "seen").read_bytes()
        assert 1.3 < time.monotonic() - began < 30
        status = daemon.command("status", daemon.path / "other")
        assert status.returncode == 1
        assert "other: not known locally, and the bucket has not answered for" in status.stderr
        # Nor does a command itself wait for the name longer than it takes to hear of one that is known.
        found = subprocess.run(
            [sys.executable, "-c", FIND_SOON, daemon.path / "more" / "deep"], capture_output=True, check=True
        )
        inner, seconds = found.stdout.split()
        assert inner == b"more/deep"
        assert 0.3 <= float(seconds) < 8
    assert not is_there(daemon.path / "dir")


def is_there(path: Path) -> bool:
    """Return what the bucket says of a name: asked again while it is taken for silent, as on a busy machine, too."""
    said: list[bool] = []

    def is_answered() -> bool:
        with suppress(OSError):
            said.append(path.exists())
        return bool(said)

    wait_until(is_answered, f"an answer of the bucket for {path.name}")
    return said[0]


# ---- the end of a daemon


@pytest.mark.case(47)
def test_a_stopped_daemon_publishes_what_is_left_first(
    server: ServerProcess, make_daemon: Callable[..., Daemon]
) -> None:
    daemon = make_daemon("--settle-seconds", "600")
    daemon.mount()
    files = {"large": some_bytes(66 * MIB, 1), "small": b"2"}
    for name, data in files.items():
        (daemon.path / name).write_bytes(data)
    daemon.signal(signal.SIGTERM)
    assert daemon.wait() == 0
    assert shows(server) == files
    assert not os.path.ismount(daemon.path)


def test_a_file_that_is_closed_while_the_daemon_drains_is_published_too(
    server: ServerProcess, daemon: Daemon
) -> None:
    server.control.faults(Fault(FaultAction.HOLD, operation="PutObject", key="first"))
    (daemon.path / "first").write_bytes(b"1")
    daemon.signal(signal.SIGTERM)
    server.control.wait_requests(1, "PutObject", "first", finished=False)
    (daemon.path / "late").write_bytes(b"2")
    server.control.clear_faults()
    assert daemon.wait() == 0
    assert shows(server) == {"first": b"1", "late": b"2"}


def test_a_stop_does_not_wait_for_answers_that_nobody_wants(server: ServerProcess, daemon: Daemon) -> None:
    server.control.put("file", some_bytes(20 * MIB, 1))
    with (daemon.path / "file").open("rb") as file:
        assert len(file.read(100)) == 100
    server.control.set(bandwidth=1000)
    reader = subprocess.Popen(
        ["cat", daemon.path / "file"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        server.control.wait_requests(2, "GetObject", "file", finished=False)
        daemon.signal(signal.SIGTERM)
        assert daemon.wait() == 0
    finally:
        reader.kill()
        reader.wait()


@pytest.mark.case(47)
def test_a_second_signal_leaves_the_rest_to_the_next_mount(server: ServerProcess, daemon: Daemon) -> None:
    server.control.faults(
        Fault(FaultAction.ANSWER, operation="PutObject", key="stuck", status=503, code="SlowDown")
    )
    (daemon.path / "first").write_bytes(b"1")
    (daemon.path / "stuck").write_bytes(b"2")
    (daemon.path / "third").write_bytes(b"3")
    daemon.signal(signal.SIGTERM)
    server.control.wait_requests(1, "PutObject", "stuck")
    wait_until(lambda: "draining" in daemon.log(), "the drain")
    wait_until(lambda: shows(server) == {"first": b"1", "third": b"3"}, "what is not stuck")
    assert daemon.is_running()
    daemon.signal(signal.SIGTERM)
    assert daemon.wait() == 1  # the bucket does not have everything
    server.control.clear_faults()
    daemon.mount()
    assert daemon.sync() == 0
    assert sorted(key for _, key in published(server)) == ["first", "stuck", "third"]


# ---- the node's disk


def test_a_full_cache_says_so_at_once_and_recovers(
    server: ServerProcess, make_daemon: Callable[..., Daemon]
) -> None:
    daemon = make_daemon("--cache-size", "64MiB")
    daemon.mount()
    server.control.faults(Fault(FaultAction.HOLD, operation="PutObject"))
    kept = {f"kept-{number}": some_bytes(20 * MIB, number) for number in range(2)}
    (daemon.path / "kept-0").write_bytes(kept["kept-0"])
    slow = threading.Thread(target=(daemon.path / "kept-1").write_bytes, args=(kept["kept-1"],))
    slow.start()
    free = os.statvfs(daemon.path).f_bavail
    wait_until(lambda: os.statvfs(daemon.path).f_bavail * 4096 < MIB, f"the end of the room, {free} blocks")
    with pytest.raises(OSError, match="No space") as refused:
        (daemon.path / "more").write_bytes(b"1")
    assert refused.value.errno == errno.ENOSPC
    assert slow.is_alive()  # its close waits for uploads, as the disk is nearly full
    server.control.clear_faults()
    slow.join(30)
    assert daemon.sync() == 0
    assert shows(server) == kept
    (daemon.path / "later").write_bytes(some_bytes(20 * MIB, 9))
    assert daemon.sync() == 0


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


@pytest.mark.case(55)
def test_a_file_whose_write_found_no_room_is_never_published(
    server: ServerProcess, make_daemon: Callable[..., Daemon]
) -> None:
    daemon = make_daemon("--cache-size", "64MiB")
    daemon.mount()
    (daemon.path / "file").write_bytes(b"old")
    assert daemon.sync() == 0
    first = os.open(daemon.path / "file", os.O_WRONLY | os.O_TRUNC)
    second = os.dup(first)
    errors = []
    write = partial(_write_all, first, some_bytes(100 * MIB, 1))
    for call in (write, partial(os.close, second), partial(os.close, first)):
        try:
            call()
        except OSError as exc:
            errors.append(exc.errno)
    assert errno.ENOSPC in errors
    wait_until(lambda: os.statvfs(daemon.path).f_bavail > 40_000_000 // 4096, "its room")
    (daemon.path / "next").write_bytes(some_bytes(20 * MIB, 2))
    assert daemon.sync() == 0
    assert set(shows(server)) == {"file", "next"}
    assert shows(server)["file"] == b"old"
    wait_until(lambda: (daemon.path / "file").read_bytes() == b"old", "the published version")
