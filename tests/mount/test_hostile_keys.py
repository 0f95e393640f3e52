"""Keys with control characters: no command and no log prints them raw."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.mounts import FUSECACHE, Mount, run, run_python, wait_until

NAME = "\x1b[2J\rx\nWARNING \x9b31m\u202eforged"
SHOWN = r"\x1b[2J\rx\nWARNING \x9b31m\u202eforged"


def said(*words: str | Path) -> str:
    """Return all that a command prints, without its line ends."""
    done = run(FUSECACHE, *words, check=False)
    return "".join((done.stdout + done.stderr).split("\n"))


def leave_open(one: Mount, name: str) -> None:
    """Write a file and end without closing it, as a killed program does; return when its bytes lie aside."""
    run_python(
        "import os, sys; f = open(sys.argv[1], 'wb', 0); f.write(b'half'); os.kill(os.getpid(), 9)",
        one.path / name,
        check=False,
    )
    wait_until(lambda: one.status()["orphans"] == 1, "the orphan")


# Ceph answers 500 to a LIST with such a prefix.
@pytest.mark.s3server_only
def test_commands_and_log_escape_control_characters(
    mount: Callable[..., Mount], expect_log: Callable[[str], None]
) -> None:
    expect_log("quarantined unfinished file")
    one = mount("--settle-seconds", "3600", "--log-level", "debug")
    (one.path / "dir").mkdir()
    (one.path / "dir" / NAME).write_bytes(b"1")
    leave_open(one, NAME)
    texts = [
        said("status", one.path / "dir" / NAME),
        said("status", one.path),
        said("sync", one.path / "dir" / NAME, "--timeout", "1"),
        said("status", one.path / f"{NAME}-missing"),
        said("recover", one.path),
    ]
    assert [SHOWN in text for text in texts] == [True, False, True, True, True]
    assert all(text.isprintable() for text in texts)
    log = one.log()
    assert SHOWN in log
    assert not set("\x1b\r\x9b\u202e") & set(log)
    assert not [line for line in log.splitlines() if line.startswith("WARNING")]


def test_recovered_copies_are_private(
    mount: Callable[..., Mount], tmp_path: Path, expect_log: Callable[[str], None]
) -> None:
    """A copy of a 0600 file may be readable by this user alone, even with umask 0."""
    expect_log("quarantined unfinished file")
    one = mount()
    leave_open(one, "file")
    run(FUSECACHE, "recover", one.path, "--restore", "all", "--to", tmp_path, umask=0)
    (copy,) = (path for path in tmp_path.iterdir() if path.is_file())
    assert stat.S_IMODE(os.stat(copy).st_mode) == 0o600
