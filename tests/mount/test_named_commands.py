"""A message that names a command is tested by running that command: from another directory, as it is written.

Each situation is made on a real mount; its messages are those of `health`, `status`, `sync` and `recover`.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fusecache.model.objects import MIB
from tests.s3server import Fault, FaultAction
from tests.support.mounts import FUSECACHE, Mount, run, wait_until
from tests.support.s3_buckets import Bucket

COMMAND = re.compile(r"`(fusecache [^`]+)`")


def words_of(*command: object) -> str:
    done = run(FUSECACHE, *command, check=False)
    return str(done.stdout + done.stderr)


def messages(mount: Mount) -> Iterator[str]:
    """Yield the texts in which a user looks for the cause of a problem."""
    yield words_of("health", mount.path)
    yield words_of("status", mount.path)
    yield words_of("sync", mount.path, "--timeout", 10)
    yield words_of("recover", mount.path)
    yield words_of("recover", mount.path, "--delete", 999_999, "--yes")
    for each in mount.status()["rejected"]:
        yield words_of("status", mount.path / each["path"])


def run_named_commands(mount: Mount, texts: Iterator[str], end_cause: Callable[[], None]) -> set[str]:
    """Run each command that the texts name, and return the commands. `recover` must list something.

    end_cause: called before the first command that changes something. A rename whose cause is gone heals by itself, and
    is listed no more.
    """
    has_rejected = mount.status()["rejected_files"] > 0
    named = {command for text in texts for command in COMMAND.findall(text)}
    for command in sorted(named, key=lambda each: "--" in each):  # commands that change nothing come first
        words = shlex.split(command)
        if "--" in command:
            end_cause()
        assert not any(word.isupper() for word in words), f"{command}: a placeholder is no command"
        done = run(FUSECACHE, *words[1:], cwd="/", check=False)
        # Perhaps it has healed before the command that would repeat it.
        is_healed = has_rejected and "--restore" in words and not mount.status()["rejected_files"]
        assert done.returncode == 0 or is_healed, (command, done.stdout, done.stderr)
        if words[1] == "recover" and len(words) == 3:
            assert done.stdout != "nothing to recover\n", f"{command} leads nowhere"
    return named


def rejected_file(mount: Mount, bucket: Bucket) -> None:
    bucket.control.faults(Fault(FaultAction.ANSWER, operation="PutObject", status=422, code="Bad"))
    (mount.path / "model").write_bytes(b"1")
    wait_until(lambda: mount.status()["rejected_files"], "the rejection")
    bucket.control.clear_faults()


def rejected_rename(mount: Mount, bucket: Bucket) -> None:
    (mount.path / "old").write_bytes(b"1")
    mount.sync()
    bucket.control.faults(
        Fault(FaultAction.ANSWER, operation="CopyObject", status=403, code="InvalidObjectState")
    )
    (mount.path / "old").rename(mount.path / "new")
    wait_until(lambda: mount.status()["rejected_files"], "the rejection")


def rejected_removal(mount: Mount, bucket: Bucket) -> None:
    (mount.path / "old").write_bytes(b"1")
    mount.sync()
    bucket.control.faults(Fault(FaultAction.ANSWER, operation="DeleteObject", status=422, code="Locked"))
    (mount.path / "old").unlink()
    wait_until(lambda: mount.status()["rejected_files"], "the rejection")
    bucket.control.clear_faults()


def conflict(mount: Mount, bucket: Bucket) -> None:
    for name in ("a", "b"):
        (mount.path / name).write_bytes(b"old")
    mount.sync()
    for name in ("a", "b"):
        bucket.put(name, b"theirs")
        (mount.path / name).write_bytes(b"ours")
    wait_until(lambda: mount.status()["conflict_files"] == 2, "the conflicts")


def dropped_change(mount: Mount, bucket: Bucket) -> None:
    (mount.path / "a").write_bytes(b"old")
    mount.sync()
    bucket.put("a", b"theirs")
    (mount.path / "a").unlink()
    wait_until(lambda: mount.status()["conflict_files"], "the conflict")


def killed_writers(mount: Mount, bucket: Bucket) -> None:
    for name in ("one", "two"):
        program = (
            f"import os; f = open({str(mount.path / name)!r}, 'wb'); f.write(bytes({12 * MIB})); f.flush(); "
            f"os.fsync(f.fileno()); os.kill(os.getpid(), {int(signal.SIGKILL)})"
        )
        assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -9
    wait_until(lambda: mount.status()["orphans"] == 2, "the quarantine")


def no_space(mount: Mount, bucket: Bucket) -> None:
    killed_writers(mount, bucket)
    with pytest.raises(OSError, match="No space left"):
        (mount.path / "large").write_bytes(bytes(40 * MIB))
    wait_until(lambda: not os.path.lexists(mount.path / "large"), "the end of what found no space")


SITUATIONS = (
    rejected_file,
    rejected_rename,
    rejected_removal,
    conflict,
    dropped_change,
    killed_writers,
    no_space,
)


@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda each: each.__name__)
def test_each_command_that_a_message_names_leads_somewhere(
    mount: Callable[..., Mount],
    bucket: Bucket,
    expect_log: Any,
    situation: Callable[[Mount, Bucket], None],
) -> None:
    expect_log("rejected|conflict|quarantined|write failed")
    for line in ("removed unfinished", "dropped", "rejected"):
        expect_log.patterns.append(f"{line}|rejected|conflict|quarantined|write failed")
    mount()  # a second mount of the node, so that a command must say which one it means
    one = mount("--cache-size", "64MiB", "--memory", "64MiB")
    try:
        situation(one, bucket)
        texts = list(messages(one))
        named = run_named_commands(one, iter(texts), bucket.control.clear_faults)
    finally:
        bucket.control.clear_faults()
    assert named, texts
    run(FUSECACHE, "recover", one.path, "--delete", "all", "--yes", check=False)
