"""What the service promises, tried on a booted machine as root; prints a PASS or FAIL line for each promise.

Run by checks.service. Beside the daemon it needs nothing but a bucket, which the project's own test server
plays. The checks go in order: each begins where the one before left the service.
"""

import errno
import json
import os
import secrets
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from fusecache.config.options import load_options
from tests.s3server import ServerProcess

UNIT = "fusecache@demo.service"
CONFIG = Path("/etc/fusecache/demo.toml")
KEYS = Path("/etc/fusecache/demo.env")
MOUNT = Path("/srv/demo")
CACHE = Path("/var/lib/fusecache/demo")
PATIENCE_SECONDS = 60.0
POLL_SECONDS = 0.1
MIB = 1 << 20
# Of systemd-analyze, in tenths of its score: 5.0.
MOST_EXPOSURE = 50

Check = Callable[[ServerProcess], None]


class CheckError(Exception):
    """The service did not do what it promises."""


def expect(held: bool, otherwise: str) -> None:  # noqa: FBT001 — reads as an assertion, and is one
    """Raise CheckError unless the promise held."""
    if not held:
        raise CheckError(otherwise)


def wait_until(what: str, holds: Callable[[], bool], patience_seconds: float = PATIENCE_SECONDS) -> None:
    """Wait for something that the service does by itself. Raises CheckError when patience ends."""
    deadline = time.monotonic() + patience_seconds
    while not holds():
        expect(time.monotonic() < deadline, f"not within {patience_seconds:.0f} s: {what}")
        time.sleep(POLL_SECONDS)


def systemctl(*words: str) -> str:
    """Run systemctl and return what it prints. Raises CheckError with its complaint."""
    ended = subprocess.run(["systemctl", *words], capture_output=True, text=True, check=False)
    expect(ended.returncode == 0, f"systemctl {' '.join(words)}: {ended.stderr.strip()}")
    return ended.stdout


def shown(name: str) -> str:
    """One property of the unit, as systemd keeps it."""
    return systemctl("show", "--value", "--property", name, UNIT).strip()


def another_is_active(killed: str) -> bool:
    """Whether a daemon with another process id than `killed` is ready."""
    # In this order: just after a kill the unit still counts as active, with no process (0) or the killed one.
    return shown("MainPID") not in {killed, "0"} and shown("ActiveState") == "active"


def daemon() -> int:
    """Return the process that serves the mount, which a keeper may have started."""
    return int(json.loads((MOUNT / ".fusecache" / "stats.json").read_text())["pid"])


def write_keys(access_key: str, secret_key: str) -> None:
    """Give the service these credentials, from its next start on."""
    KEYS.touch(mode=0o600)
    KEYS.write_text(f"AWS_ACCESS_KEY_ID={access_key}\nAWS_SECRET_ACCESS_KEY={secret_key}\n")


def in_bucket(server: ServerProcess, key: str, data: bytes) -> bool:
    """Whether the bucket has exactly these bytes under this key."""
    return key in server.control.objects() and server.control.read(key) == data


# ---- the checks, in order

FIRST = secrets.token_bytes(3 * MIB + 17)


def unit_has_no_complaints(_: ServerProcess) -> None:
    ended = subprocess.run(
        ["systemd-analyze", "verify", f"/etc/systemd/system/{UNIT.replace('demo', '')}"],
        capture_output=True,
        text=True,
        check=False,
    )
    expect(ended.returncode == 0 and not ended.stderr.strip(), ended.stderr.strip())


def the_unit_is_confined(_: ServerProcess) -> None:
    words = ["systemd-analyze", "security", "--no-pager", f"--threshold={MOST_EXPOSURE}", UNIT]
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    expect(ended.returncode == 0, ended.stdout[-300:] + ended.stderr)


def the_daemon_leaves_no_core_dump(_: ServerProcess) -> None:
    limits = Path(f"/proc/{shown('MainPID')}/limits").read_text().splitlines()
    (line,) = [each for each in limits if each.startswith("Max core file size")]
    expect(line.split()[4:6] == ["0", "0"], line)


def another_user_reaches_neither_socket_nor_cache(_: ServerProcess) -> None:
    path = (MOUNT / ".fusecache" / "socket").read_text().strip()
    program = "import socket, sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1])"
    for words in ([sys.executable, "-c", program, path], ["ls", CACHE]):
        refused = subprocess.run(
            words, user=65534, group=65534, extra_groups=[], capture_output=True, text=True, check=False
        )
        expect("ermission" in refused.stderr, f"user 65534 got through: {words} {refused.stderr}")


def the_example_is_a_config(_: ServerProcess) -> None:
    options = load_options({}, {}, config_path=Path("/etc/fusecache/example.toml.sample"))
    expect(options.mountpoint == Path("/srv/my-bucket"), f"it mounts at {options.mountpoint}")


def active_means_the_mount_answers(server: ServerProcess) -> None:
    server.control.put("already/there", b"bytes of another client")
    systemctl("start", UNIT)
    expect(shown("ActiveState") == "active", f"it is {shown('ActiveState')}")
    expect(os.path.ismount(MOUNT), "active, and nothing is mounted")
    expect(
        (MOUNT / "already/there").read_bytes() == b"bytes of another client", "other bytes than the bucket's"
    )


def a_written_file_is_read_back_and_reaches_the_bucket(server: ServerProcess) -> None:
    (MOUNT / "first").write_bytes(FIRST)
    expect((MOUNT / "first").read_bytes() == FIRST, "read other bytes than were written")
    wait_until("the file is in the bucket", lambda: in_bucket(server, "first", FIRST))


def a_service_that_is_killed_comes_back_with_the_file(_: ServerProcess) -> None:
    killed = shown("MainPID")
    systemctl("kill", "--signal=KILL", "--kill-whom=main", UNIT)
    wait_until("another daemon is active", lambda: another_is_active(killed))
    expect((MOUNT / "first").read_bytes() == FIRST, "the file is not what it was")


def a_service_killed_with_uploads_pending_uploads_them_afterwards(server: ServerProcess) -> None:
    data = secrets.token_bytes(8 * MIB)
    server.control.set(upload_bandwidth=1 * MIB)
    (MOUNT / "pending").write_bytes(data)
    expect("pending" not in server.control.objects(), "the upload was over before the kill: nothing is shown")
    killed = shown("MainPID")
    systemctl("kill", "--signal=KILL", "--kill-whom=main", UNIT)
    server.control.set(upload_bandwidth=None)
    wait_until("another daemon is active", lambda: another_is_active(killed))
    wait_until("the file is in the bucket", lambda: in_bucket(server, "pending", data))


def a_killed_daemon_is_no_end_of_the_mount(server: ServerProcess) -> None:
    keeper, restarts = shown("MainPID"), shown("NRestarts")
    with open(MOUNT / "kept", "wb", buffering=0) as file:
        file.write(FIRST)
        killed = daemon()
        os.kill(killed, signal.SIGKILL)
        file.write(b"the rest")
        second = daemon()
        expect(second != killed, "the daemon was not killed")
        upgrade = ["/opt/fusecache/venv/bin/fusecache", "upgrade", str(MOUNT)]
        ended = subprocess.run(upgrade, capture_output=True, text=True, check=False)
        expect(ended.returncode == 0 and daemon() != second, ended.stderr)
        file.write(b" of it")
    wait_until("the file is in the bucket", lambda: in_bucket(server, "kept", FIRST + b"the rest of it"))
    expect((shown("MainPID"), shown("NRestarts")) == (keeper, restarts), "systemd started the service again")


def without_a_keeper_the_service_starts_the_daemon_again(server: ServerProcess) -> None:
    config = CONFIG.read_text()
    CONFIG.write_text(f"{config}keep_mounted = false\n")
    systemctl("restart", UNIT)
    expect(shown("MainPID") == str(daemon()), "there is a keeper")
    killed = shown("MainPID")
    os.kill(int(killed), signal.SIGKILL)
    wait_until("another daemon is active", lambda: another_is_active(killed))
    expect(in_bucket(server, "kept", (MOUNT / "kept").read_bytes()), "the file is not what it was")
    CONFIG.write_text(config)
    systemctl("restart", UNIT)


def stopping_waits_until_the_bucket_has_every_byte(server: ServerProcess) -> None:
    files = {f"last/{number}": secrets.token_bytes(4 * MIB + number) for number in range(4)}
    server.control.set(upload_bandwidth=1 * MIB)
    (MOUNT / "last").mkdir()
    for name, data in files.items():
        (MOUNT / name).write_bytes(data)
    expect(
        not files.keys() <= server.control.objects().keys(),
        "all was uploaded before the stop: nothing is shown",
    )
    systemctl("stop", UNIT)
    missing = [name for name, data in files.items() if not in_bucket(server, name, data)]
    server.control.set(upload_bandwidth=None)
    expect(not missing, f"stopped, and the bucket lacks {missing}")
    expect(shown("Result") == "success", f"the stop's result is {shown('Result')}")
    expect(not os.path.ismount(MOUNT), "stopped, and still mounted")


def nothing_can_be_saved_beneath_a_stopped_mount(_: ServerProcess) -> None:
    try:
        (MOUNT / "lost").write_bytes(b"")
    except OSError as error:
        expect(error.errno == errno.EPERM, f"refused, but with {error.strerror}")
    else:
        raise CheckError("a file was saved on the node's own disk")


def a_wrong_key_is_named_in_the_status(server: ServerProcess) -> None:
    write_keys(server.access_key, "not-the-secret")
    systemctl("start", "--no-block", UNIT)
    words = ("credential", "denied", "refused", "signature", "key")
    # Longer than one attempt and the pause after it: systemd forgets the line when the next attempt begins.
    wait_until(
        "the status line names the key",
        lambda: any(word in shown("StatusText").lower() for word in words),
        patience_seconds=20.0,
    )


def the_right_key_mends_it(server: ServerProcess) -> None:
    write_keys(server.access_key, server.secret_key)
    systemctl("restart", UNIT)
    expect((MOUNT / "first").read_bytes() == FIRST, "the file is not what it was")


def a_line_of_fstab_is_a_unit_that_mounts(server: ServerProcess) -> None:
    lazy = Path("/srv/lazy")
    lazy.mkdir(exist_ok=True)  # the tree is kept for the next run
    options = f"_netdev,noauto,x-systemd.automount,endpoint_url={server.endpoint_url},credentials_file={KEYS}"
    Path("/etc/fstab").write_text(
        f"s3://{server.bucket} {lazy} fusecache {options},cache_dir=/var/lib/fusecache/lazy 0 0\n"
    )
    systemctl("daemon-reload")
    # A container has no autofs, so what the .automount unit does at the first use is done by hand.
    systemctl("cat", "srv-lazy.automount")
    systemctl("start", "srv-lazy.mount")
    expect((lazy / "first").read_bytes() == FIRST, "other bytes than the bucket's")
    (lazy / "late").write_bytes(b"late")
    systemctl("stop", "srv-lazy.mount")
    wait_until("the file is in the bucket", lambda: in_bucket(server, "late", b"late"))
    Path("/etc/fstab").write_text("")
    systemctl("daemon-reload")


def uninstalling_leaves_what_is_not_its_own(_: ServerProcess) -> None:
    make = ["make", "--no-print-directory", "uninstall"]
    refused = subprocess.run(make, capture_output=True, text=True, check=False)
    expect(refused.returncode != 0 and "still runs" in refused.stderr, "uninstalled under a running daemon")
    manual = Path("/usr/local/share/man/man1/fusecache.1")
    completions = Path("/usr/local/share/bash-completion/completions/fusecache")
    expect(
        "doctor" in manual.read_text() and "doctor" in completions.read_text(), "no manual, or no completions"
    )
    systemctl("stop", UNIT)
    subprocess.run(make, check=True)
    expect(not Path("/opt/fusecache").exists(), "/opt/fusecache is still there")
    expect(not manual.exists() and not completions.exists(), "the manual or the completions are still there")
    expect(not Path("/usr/sbin/mount.fusecache").is_symlink(), "mount.fusecache is still there")
    expect(CONFIG.exists() and KEYS.exists() and any(CACHE.iterdir()), "a config or the cache is gone")


CHECKS: list[Check] = [
    unit_has_no_complaints,
    the_unit_is_confined,
    the_example_is_a_config,
    active_means_the_mount_answers,
    the_daemon_leaves_no_core_dump,
    another_user_reaches_neither_socket_nor_cache,
    a_written_file_is_read_back_and_reaches_the_bucket,
    a_service_that_is_killed_comes_back_with_the_file,
    a_service_killed_with_uploads_pending_uploads_them_afterwards,
    a_killed_daemon_is_no_end_of_the_mount,
    without_a_keeper_the_service_starts_the_daemon_again,
    stopping_waits_until_the_bucket_has_every_byte,
    nothing_can_be_saved_beneath_a_stopped_mount,
    a_wrong_key_is_named_in_the_status,
    the_right_key_mends_it,
    a_line_of_fstab_is_a_unit_that_mounts,
    uninstalling_leaves_what_is_not_its_own,
]


def passes(check: Check, server: ServerProcess) -> bool:
    """Run one check and print its line."""
    title = check.__name__.replace("_", " ")
    began = time.monotonic()
    try:
        check(server)
    except (CheckError, OSError) as error:
        sys.stdout.write(f"FAIL  {title}: {error}\n")
        return False
    except Exception:  # noqa: BLE001 — the other checks shall run, and the report shall say what happened
        sys.stdout.write(f"FAIL  {title}:\n{traceback.format_exc()}")
        return False
    finally:
        sys.stdout.flush()
    sys.stdout.write(f"PASS  {title} ({time.monotonic() - began:.1f} s)\n")
    return True


def main() -> int:
    """Run all checks; 0 if all passed."""
    with ServerProcess() as server:
        CONFIG.write_text(
            f'source = "s3://{server.bucket}"\n'
            f'endpoint_url = "{server.endpoint_url}"\n'
            f'mountpoint = "{MOUNT}"\n'
            f'cache_dir = "{CACHE}"\n'
        )
        write_keys(server.access_key, server.secret_key)
        outcomes = [passes(check, server) for check in CHECKS]
    sys.stdout.write(f"{outcomes.count(True)} passed, {outcomes.count(False)} failed\n")
    return 0 if all(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
