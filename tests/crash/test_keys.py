"""Access keys that are renewed, refused or broken while the daemon runs: the mount stays, and takes new keys."""

import errno
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.s3server import Account, Fault, FaultAction, ServerProcess
from tests.support.daemons import Daemon
from tests.support.mounts import wait_until

# A daemon that looks at its keys ten times a second.
IMPATIENT = (
    "import sys, fusecache.daemon.bucket_link as credentials; credentials.CHECK_SECONDS = 0.1;"
    "import fusecache.remote.read_write_split as keys; keys.KEY_REFUSED_SECONDS = 2.0; keys.PROOF_SECONDS = 0.5;"
    "credentials.RELOAD_SECONDS = 0.5;"
    "from fusecache.cli.main import main; sys.exit(main())"
)
FAILED = "refused credentials could not be reloaded"


class KeyedDaemon(Daemon):
    """A daemon whose keys do not come from the environment. variables: what its environment has instead."""

    variables: dict[str, str]

    def _environment(self) -> dict[str, str]:
        found = super()._environment()
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            del found[name]
        return {**found, "AWS_EC2_METADATA_DISABLED": "true", **self.variables}


@pytest.fixture
def keyed(server: ServerProcess, tmp_path: Path) -> Iterator[Callable[..., KeyedDaemon]]:
    """Make daemons, not mounted yet: `keyed(*flags, **variables)`."""
    made: list[KeyedDaemon] = []

    def make(*flags: str, **variables: str) -> KeyedDaemon:
        daemon = KeyedDaemon(server, tmp_path / f"daemon-{len(made)}", *flags)
        daemon.program = [sys.executable, "-c", IMPATIENT]
        daemon.variables = {"AWS_CONFIG_FILE": os.devnull, **variables}
        made.append(daemon)
        return daemon

    yield make
    for daemon in made:
        daemon.clean_up()


def grant(server: ServerProcess, *names: str) -> None:
    for name in names:
        server.control.add_account(Account(name, name * 10))


def section(name: str, title: str = "run") -> str:
    return f"[{title}]\naws_access_key_id = {name}\naws_secret_access_key = {name * 10}\n"


def replace_text(path: Path, text: str) -> None:
    """Write a file at once: half of it would be a cause of its own, and the daemon may look at any moment."""
    fresh = path.with_name(f"{path.name}.new")
    fresh.write_text(text)
    fresh.chmod(0o700)
    fresh.replace(path)


def can_list(path: Path) -> bool:
    try:
        os.listdir(path)
    except OSError as exc:
        if exc.errno not in (errno.EACCES, errno.EIO):
            raise
        return False
    return True


def verdict(daemon: Daemon) -> str:
    return daemon.command("health", daemon.path).stdout


@pytest.mark.parametrize("fault", ["emptied", "half-written", "exits 1", "is missing"])
def test_a_failed_reload_keeps_the_mount(
    server: ServerProcess, keyed: Callable[..., KeyedDaemon], tmp_path: Path, fault: str
) -> None:
    """The cause is logged once, the old keys stay, and keys that appear later are taken."""
    grant(server, "one")
    keys, config, program = tmp_path / "credentials", tmp_path / "config", tmp_path / "program"
    uses_program = fault in ("exits 1", "is missing")
    answer = {"Version": 1, "AccessKeyId": "one", "SecretAccessKey": "one" * 10}
    program.write_text(f"#!/bin/sh\necho '{json.dumps(answer)}'\n")
    program.chmod(0o700)
    config.write_text(f"[profile run]\ncredential_process = {program}\n" if uses_program else "")
    keys.write_text("" if uses_program else section("one"))
    for name in ("seen/file", "unseen/file"):
        server.control.put(name, b"1")
    daemon = keyed("--profile", "run", AWS_SHARED_CREDENTIALS_FILE=str(keys), AWS_CONFIG_FILE=str(config))
    daemon.mount()
    assert os.listdir(daemon.path / "seen") == ["file"]
    match fault:
        case "emptied":
            keys.write_text("")
        case "half-written":
            keys.write_text(section("two")[:-40])
        case "exits 1":
            program.write_text("#!/bin/sh\necho the vault is sealed >&2\nexit 1\n")
        case "is missing":
            program.unlink()
    server.control.revoke("one")
    assert not can_list(daemon.path / "unseen")
    wait_until(lambda: FAILED in daemon.log(), "the failed reload")
    wait_until(lambda: daemon.status()["keys_error"], "the cause in the status")
    (daemon.path / "seen" / "new").write_bytes(b"2")
    grant(server, "two")
    replace_text(keys, "" if uses_program else section("two"))
    replace_text(program, f"#!/bin/sh\necho '{json.dumps(answer)}'\n".replace("one", "two"))
    wait_until(lambda: can_list(daemon.path / "unseen"), "the new keys to be taken")
    assert daemon.sync() == 0
    assert daemon.is_running()
    assert daemon.log().count(FAILED) == 1, daemon.log()
    assert "Traceback" not in daemon.log()
    assert daemon.status()["keys_error"] == ""


def test_a_changed_credentials_file_needs_no_restart(
    server: ServerProcess, keyed: Callable[..., KeyedDaemon], tmp_path: Path
) -> None:
    """Keys that were replaced in the file are taken, though pending files wait for them."""
    grant(server, "one")
    keys = tmp_path / "keys"
    keys.touch(mode=0o600)
    keys.write_text("AWS_ACCESS_KEY_ID=one\nAWS_SECRET_ACCESS_KEY=oneoneoneoneoneoneoneoneoneone\n")
    daemon = keyed("--credentials-file", str(keys))
    daemon.mount()
    assert daemon.status()["keys_from"] == str(keys)
    assert os.listdir(daemon.path) == []
    server.control.revoke("one")
    (daemon.path / "file").write_bytes(b"1")
    server.control.wait_requests(1, "PutObject", "file")
    assert str(keys) in daemon.command("status", daemon.path / "file").stdout
    grant(server, "two")
    keys.write_text("AWS_ACCESS_KEY_ID=two\nAWS_SECRET_ACCESS_KEY=twotwotwotwotwotwotwotwotwotwo\n")
    assert daemon.sync() == 0
    assert server.control.read("file") == b"1"


@pytest.fixture
def split_keys(server: ServerProcess, keyed: Callable[..., KeyedDaemon], tmp_path: Path) -> KeyedDaemon:
    """A mount whose key `reads` may not write; `writes` is for changes. Both are in one file."""
    server.control.add_account(Account("reads", "reads" * 10, writable=False))
    grant(server, "writes")
    keys = tmp_path / "credentials"
    keys.write_text(section("reads", "reader") + section("writes", "writer"))
    for name in ("seen/file", "unseen/file"):
        server.control.put(name, b"1")
    daemon = keyed("--profile", "reader", "--write-profile", "writer", AWS_SHARED_CREDENTIALS_FILE=str(keys))
    daemon.mount()
    assert os.listdir(daemon.path / "seen") == ["file"]
    return daemon


def test_reads_go_on_while_write_keys_are_refused(server: ServerProcess, split_keys: KeyedDaemon) -> None:
    """A closed file waits for the keys, and needs no remount."""
    server.control.revoke("writes")
    (split_keys.path / "seen" / "new").write_bytes(b"2")
    wait_until(lambda: "refused" in verdict(split_keys), "the refusal in the verdict")
    assert os.listdir(split_keys.path / "unseen") == ["file"]
    assert (split_keys.path / "unseen" / "file").read_bytes() == b"1"
    grant(server, "writes")
    assert split_keys.sync() == 0
    assert server.control.read("seen/new") == b"2"


def test_uploads_go_on_while_read_keys_are_refused(server: ServerProcess, split_keys: KeyedDaemon) -> None:
    """Files of directories that are known are written and published."""
    server.control.revoke("reads")
    (split_keys.path / "seen" / "new").write_bytes(b"2")
    assert not can_list(split_keys.path / "unseen")
    assert split_keys.sync() == 0
    assert server.control.read("seen/new") == b"2"
    server.control.add_account(Account("reads", "reads" * 10, writable=False))
    wait_until(lambda: can_list(split_keys.path / "unseen"), "the read keys to be taken")


def test_a_mount_refuses_an_open_credentials_file(
    server: ServerProcess, keyed: Callable[..., KeyedDaemon], tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.touch(mode=0o644)
    daemon = keyed("--credentials-file", str(keys))
    with pytest.raises(AssertionError, match=f"chmod 600 {keys}"):
        daemon.mount()


@pytest.mark.parametrize("size", [1, 70 << 20], ids=["whole", "parts"])
def test_one_refused_file_holds_nothing_else(
    server: ServerProcess, keyed: Callable[..., KeyedDaemon], tmp_path: Path, size: int
) -> None:
    """It is rejected, removals elsewhere go on, and the daemon's end does not wait for it."""
    server.control.put("old", b"0")
    daemon = keyed(AWS_ACCESS_KEY_ID=server.access_key, AWS_SECRET_ACCESS_KEY=server.secret_key)
    daemon.mount()
    server.control.faults(
        *(
            Fault(FaultAction.ANSWER, method=method, key="stray/*", status=403, code="AccessDenied")
            for method in ("PUT", "POST")
        )
    )
    (daemon.path / "stray").mkdir()
    (daemon.path / "stray" / "file").write_bytes(b"1" * size)
    (daemon.path / "old").unlink()
    wait_until(lambda: "old" not in server.control.objects(), "the removal", seconds=60)
    wait_until(lambda: daemon.status()["rejected_files"] == 2, "the rejection", seconds=60)
    assert daemon.status()["state"] == "ok"
    assert daemon.status()["pending_files"] == 0
    said = daemon.command("recover", daemon.path).stdout
    assert "stray/file" in said
    assert "may write other keys, but not this one" in said
    daemon.signal(signal.SIGTERM)
    assert daemon.wait() == 0
