"""Writes docs/how-to/read-the-status.md: `status` and `top` in five situations of a real mount, captured by tmux.

`python -m scripts.situations`, with tmux and FUSE. Only the folder's name is replaced.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.s3server import ServerProcess
from tests.support import ROOT
from tests.support.daemons import MIB, Daemon, wait_until

PAGE = ROOT / "docs" / "how-to" / "read-the-status.md"
COLUMNS, ROWS = 100, 45
HEAD = """\
# Read the status in five situations

The first line says whether you must act; `only here` says what would be lost with this node. Below each `status` is
what `fusecache top` shows. `python -m scripts.situations` captured all of it from a mount of the test server.
"""


def screen(mount: Daemon, command: str) -> str:
    """Return what a command leaves on a terminal, once it has had time for a second view."""
    # A server of its own: the last one may still be ending.
    tmux = ("tmux", "-L", f"fusecache-{command}-{time.monotonic_ns()}", "-f", "/dev/null")
    words = f"{mount.program[0]} {command} {mount.path}; sleep 60"
    subprocess.run(
        [*tmux, "new-session", "-d", "-x", str(COLUMNS), "-y", str(ROWS), "sh", "-c", words], check=True
    )
    capture = [*tmux, "capture-pane", "-p", "-J"]

    def text() -> str:
        return subprocess.run(capture, capture_output=True, text=True, check=True).stdout

    try:
        wait_until(lambda: text().strip(), command, seconds=120)
        time.sleep(5)
        lines = [line.rstrip() for line in text().splitlines()]
    finally:
        subprocess.run([*tmux, "kill-server"], check=True)
    found = "\n".join(lines).rstrip()
    found = found.replace(str(mount.log_path), "/nvme/fusecache/fusecache.log")
    return found.replace(str(mount.path), "/data").replace(str(mount.cache), "/nvme/fusecache")


def situations(server: ServerProcess, mount: Daemon) -> Iterator[tuple[str, str, str]]:
    """Bring the mount into one situation after the other: title, what happened, how the verdict begins."""
    control = server.control
    data = bytes(range(256)) * (MIB // 256)
    for number in range(8):
        control.put(f"dataset/shard.{number:05d}.mds", data * 4)
    mount.mount()
    for path in sorted((mount.path / "dataset").iterdir()):
        path.read_bytes()
    yield "All is well", "A trainer has read its dataset. Nothing is pending.", "OK"
    control.set(upload_bandwidth=MIB // 2)
    (mount.path / "checkpoints").mkdir()
    (mount.path / "checkpoints" / "step-1000.pt").write_bytes(data * 64)
    yield "A checkpoint is on its way", "The uplink is slow. Wait before you give the node back.", "OK"
    control.pause()
    (mount.path / "checkpoints" / "step-1001.pt").write_bytes(data)
    yield "The bucket is away", "Nothing to do: the daemon tries again, and closes go on.", "DEGRADED"
    control.resume()
    control.revoke(server.access_key)
    yield (
        "The keys are refused",
        "An administrator replaced the keys. Pending files wait for new ones.",
        "ACTION",
    )
    daemon = mount.status()["pid"]
    mount.signal(signal.SIGKILL)
    mount.wait()
    os.kill(daemon, signal.SIGKILL)
    yield (
        "The daemon was killed",
        "Its keeper was killed, too. What was not uploaded is in the cache directory.",
        "",
    )


def main() -> int:
    """Capture, and write the page."""
    parts = [HEAD]
    os.environ["FUSECACHE_KEEP_MOUNTED"] = "yes"  # as users have it
    with tempfile.TemporaryDirectory() as name, ServerProcess() as server:
        mount = Daemon(server, Path(name))
        try:
            for title, what, verdict in situations(server, mount):
                wait_until(
                    lambda verdict=verdict: mount.command("status", mount.path).stdout.startswith(verdict),
                    title,
                    seconds=120,
                )
                status, top = screen(mount, "status"), screen(mount, "top")
                parts.append(f"\n## {title}\n\n{what}\n\n```\n{status}\n```\n\n```\n{top}\n```\n")
        finally:
            mount.clean_up()
    PAGE.write_text("".join(parts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
