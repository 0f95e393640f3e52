"""`fusecache run`: a command beside a mount, with its files in the bucket at the end, also after a notice."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from fusecache.mount.control_client import ask, find_mount
from tests.mount.conftest import FLAGS
from tests.s3server import Fault, FaultAction
from tests.support.mounts import FUSECACHE, NEEDS_OWN_SESSION, mounted_at, run, wait_until
from tests.support.s3_buckets import Bucket

pytestmark = pytest.mark.usefixtures("closed_connections")
# A trainer that saves on SIGTERM. argv: its checkpoint, its exit status.
SAVER = """
import signal, sys, time
def save(number, frame):
    open(sys.argv[1], "wb").write(b"weights")
    sys.exit(int(sys.argv[2]))
signal.signal(signal.SIGTERM, save)
open(sys.argv[1] + ".started", "wb").close()
time.sleep(600)
"""
# Hears no SIGTERM, holds a file of the mount open, and so does a child in a session of its own.
DEAF = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
held = open(sys.argv[1] + str(os.getpid()), "wb")
open(sys.argv[1] + ".started", "wb").close()
time.sleep(600)
"""


class Site:
    """Where `run` mounts: a directory, and a cache directory."""

    def __init__(self, folder: Path, bucket: Bucket, *, is_kept: bool) -> None:
        self.path, self.cache, self._bucket = folder / "mnt", folder / "cache", bucket
        self.is_kept = is_kept

    def start(self, *command: str | Path, flags: tuple[str, ...] = ()) -> "subprocess.Popen[str]":
        """Start `fusecache run` with a command."""
        bucket = self._bucket
        words = [
            FUSECACHE, "run", "--mount", bucket.source, self.path, "--cache-dir", self.cache,
            "--endpoint-url", bucket.service.endpoint_url, *FLAGS, *flags,
            "--keep-mounted" if self.is_kept else "--no-keep-mounted", "--", *command,
        ]  # fmt: skip
        return subprocess.Popen(
            [str(word) for word in words],
            env=bucket.service.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *command: str | Path, flags: tuple[str, ...] = ()) -> tuple[int, str]:
        """Return the exit status, and the messages."""
        return ended(self.start(*command, flags=flags))

    def daemon(self) -> int:
        """Return the process that serves the mount."""
        return int(ask(find_mount(self.path, {})[0], "status").status["pid"])


def ended(process: "subprocess.Popen[str]") -> tuple[int, str]:
    messages = process.communicate(timeout=60)[1]
    return process.returncode, messages


def processes_naming(folder: Path) -> list[str]:
    """Return the command lines of all processes of this machine that name a folder."""
    lines = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            lines.append(file.read_text(errors="replace").replace("\0", " "))
    return [line for line in lines if str(folder) in line]


@pytest.fixture(
    params=[pytest.param(False, id="alone"), pytest.param(True, id="kept", marks=NEEDS_OWN_SESSION)]
)
def site(tmp_path: Path, bucket: Bucket, request: pytest.FixtureRequest) -> Iterator[Site]:
    """Where `run` mounts, once with a daemon alone and once with a keeper."""
    made = Site(tmp_path, bucket, is_kept=request.param)
    yield made
    assert not mounted_at(made.path)
    assert processes_naming(tmp_path) == []


def shell(site: Site, text: str) -> list[str]:
    return ["sh", "-c", text.replace("MNT", str(site.path))]


def test_what_the_command_wrote_is_in_the_bucket(site: Site, bucket: Bucket) -> None:
    bucket.put("given", b"words")
    status, messages = site.run(*shell(site, "cat MNT/given > MNT/copy"), flags=("--read-only",))
    assert status == 2  # of the shell
    assert "Read-only file system" in messages  # so the flags are the mount's
    assert site.run(*shell(site, "cat MNT/given > MNT/copy"))[0] == 0
    assert bucket.get("copy") == b"words"


def test_the_words_may_stand_as_those_of_mount_do(bucket: Bucket, tmp_path: Path) -> None:
    bucket.put("given", b"words")
    point, flags = tmp_path / "mnt", ("--endpoint-url", bucket.service.endpoint_url, "--cache-size", "1GiB")
    words = [FUSECACHE, "run", bucket.source, point, "--cache-dir", tmp_path / "cache", *flags]
    done = run(*words, "--", "ls", "-a", "--", point, env=bucket.service.environment())
    assert "given" in done.stdout
    assert not mounted_at(point)
    config = tmp_path / "mount.toml"
    config.write_text(f'source = "{bucket.source}"\nendpoint_url = "{bucket.service.endpoint_url}"\n')
    words = [FUSECACHE, "run", point, "--config", config, "--cache-dir", tmp_path / "cache"]
    assert "given" in run(*words, "--", "ls", point, env=bucket.service.environment()).stdout


@pytest.mark.parametrize("words", [("true",), ("--mount", "s3://b", "mnt", "true"), ("--",), ()])
def test_a_command_line_without_a_command_is_told_how_to_write_it(words: tuple[str, ...]) -> None:
    done = run(FUSECACHE, "run", "s3://b", "mnt", *words, check=False)
    assert done.returncode == 2
    assert "fusecache run SOURCE DIRECTORY [options] -- COMMAND" in done.stderr


def test_the_status_is_that_of_the_command(site: Site) -> None:
    assert site.run(*shell(site, "exit 7"))[0] == 7
    assert site.run(*shell(site, "kill -9 $$"))[0] == 128 + 9
    status, messages = site.run("/no/such/program")
    assert status == 127
    assert messages.startswith("fusecache: error: cannot start /no/such/program: No such file or directory\n")


def test_only_a_command_that_fails_is_asked_about_a_prefix_without_objects(
    site: Site, bucket: Bucket
) -> None:
    """A job that writes the first objects of a prefix is the usual case."""
    question = f"fusecache: {bucket.source.rstrip('/')}/ has no objects yet: is the prefix right?\n"
    status, messages = site.run("ls", site.path)
    assert (status, question in messages) == (0, False)
    status, messages = site.run(*shell(site, "cat MNT/given"))
    assert (status, f"No such file or directory\n{question}" in messages) == (1, True)
    bucket.put("other", b"words")
    assert question not in site.run(*shell(site, "cat MNT/given"))[1]


def test_a_notice_leaves_time_to_save(site: Site, bucket: Bucket) -> None:
    running = site.start(sys.executable, "-c", SAVER, site.path / "final.pt", "3")
    wait_until(lambda: "final.pt.started" in bucket.names(), "the start of the trainer")
    running.send_signal(signal.SIGTERM)
    assert ended(running)[0] == 3
    assert bucket.get("final.pt") == b"weights"


@pytest.mark.s3server_only
def test_what_missed_the_deadline_is_named_and_kept(site: Site, bucket: Bucket) -> None:
    running = site.start(
        sys.executable, "-c", SAVER, site.path / "final.pt", "0", flags=("--sync-deadline", "4s")
    )
    wait_until(lambda: "final.pt.started" in bucket.names(), "the start of the trainer")
    bucket.control.faults(Fault(FaultAction.HOLD, method="P*", key=f"{bucket.prefix}*"))
    began = time.monotonic()
    running.send_signal(signal.SIGTERM)
    status, messages = ended(running)
    assert status == 1
    assert time.monotonic() - began < 4 + 10 + 5  # the daemon's end, and what a busy machine adds
    assert "not in the bucket: final.pt, 7 B" in messages
    assert f"the next mount with --cache-dir {site.cache} uploads the rest" in messages
    bucket.control.clear_faults()
    assert site.run("true")[0] == 0
    assert bucket.get("final.pt") == b"weights"


@pytest.mark.s3server_only
def test_the_last_uploads_go_on_in_the_next_daemon(site: Site, bucket: Bucket) -> None:
    if not site.is_kept:
        pytest.skip("without a keeper there is no next daemon")
    running = site.start(
        sys.executable, "-c", SAVER, site.path / "final.pt", "0", flags=("--sync-deadline", "60s")
    )
    wait_until(lambda: "final.pt.started" in bucket.names(), "the start of the trainer")
    hold = Fault(FaultAction.HOLD, operation="PutObject", key=f"{bucket.prefix}final.pt", times=1)
    bucket.control.clear_log()
    bucket.control.faults(hold)
    daemon = site.daemon()
    running.send_signal(signal.SIGTERM)
    bucket.control.wait_requests(1, operation="PutObject", finished=False)
    assert running.stderr is not None
    assert "uploading: 1 change" in running.stderr.readline()
    os.kill(daemon, signal.SIGKILL)
    status, messages = ended(running)
    bucket.control.clear_faults()
    assert (status, "not in the bucket" in messages) == (0, False), messages
    assert bucket.get("final.pt") == b"weights"


@pytest.mark.s3server_only
def test_a_daemon_that_dies_is_followed_by_another_or_leaves_its_files_to_the_next_mount(
    site: Site, bucket: Bucket, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    words = (
        f"until [ -e {go} ]; do sleep 0.1; done; echo x > MNT/x; "
        f"while cat MNT/x && [ -e {go} ]; do sleep 0.1; done; exit 0"
    )
    running = site.start(*shell(site, words))
    wait_until(lambda: mounted_at(site.path), "the mount")
    bucket.control.faults(Fault(FaultAction.HOLD, method="P*", key=f"{bucket.prefix}*"))
    go.touch()
    # Before it is closed, it has its bytes already, and its death would leave nothing to upload.
    bucket.control.wait_requests(1, "PutObject", f"{bucket.prefix}x", finished=False)
    assert (site.path / "x").read_bytes() == b"x\n"
    daemon = site.daemon()
    os.kill(daemon, signal.SIGKILL)
    if site.is_kept:
        wait_until(lambda: site.daemon() != daemon, "the next daemon")
        assert (site.path / "x").read_bytes() == b"x\n"
        bucket.control.clear_faults()
        go.unlink()
        assert ended(running)[0] == 0
        assert bucket.get("x") == b"x\n"
        return
    status, messages = ended(running)
    assert (status, mounted_at(site.path)) == (1, False), messages
    assert f"{site.path}: the daemon has died, see {site.cache}/fusecache.log" in messages
    assert "not in the bucket: x, 2 B" in messages
    bucket.control.clear_faults()
    assert site.run("true")[0] == 0
    assert bucket.get("x") == b"x\n"


def test_a_deaf_command_is_killed_with_its_children(site: Site, bucket: Bucket) -> None:
    running = site.start(sys.executable, "-c", DEAF, site.path / "x", flags=("--sync-deadline", "3s"))
    wait_until(lambda: "x.started" in bucket.names(), "the start of both processes")
    running.send_signal(signal.SIGTERM)
    status, messages = ended(running)
    assert status == 128 + 9, messages


def test_processes_left_behind_end_with_the_command(site: Site) -> None:
    assert site.run(*shell(site, "sleep 600 > MNT/log & exit 0"))[0] == 0


def test_without_a_mount_nothing_runs(site: Site, tmp_path: Path) -> None:
    status, messages = site.run("touch", tmp_path / "ran", flags=("--cache-size", "many"))
    assert status != 0
    assert "many" in messages
    status, _ = site.run("touch", tmp_path / "ran", flags=("--sync-deadline", "soon"))
    assert status == 2
    assert not (tmp_path / "ran").exists()
