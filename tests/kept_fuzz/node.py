"""The mount under test, with a keeper, and the server behind it; for the self-test a plain directory in its place."""

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from fusecache import __version__
from fusecache.model.errors import MountError
from fusecache.model.objects import symlink_target
from fusecache.mount.control_client import Mount as ControlMount
from fusecache.mount.control_client import ask, find_mount
from fusecache.mount.launch import replace_daemon
from tests.kept_fuzz.pair import Tree, origin_of
from tests.s3server import Fault, FaultAction, ServerProcess
from tests.support.mounts import Mount, is_running, wait_until
from tests.support.s3_buckets import Bucket, Service

_PREFIX = "kept/"
# A death sooner after the start of service counts for the keeper's limit of deaths in a row.
_SERVICE_SECONDS = 1.1
_NEXT_SECONDS = 60.0
_SYNC_SECONDS = 60.0
_POLL_SECONDS = 0.002
# Where the daemon puts files that it cannot publish.
_ASIDE = ("orphans", "suspect")


class NodeGone(Exception):
    """The mount does not answer any more, and no history can go on in it."""


class Node:
    """Where histories run: one directory each below `path`. kills, upgrades: how many there were."""

    def __init__(self, path: Path, settle_seconds: float = 0.0) -> None:
        self.path, self.settle_seconds = path, settle_seconds
        self.kills = self.upgrades = 0
        # When what happened to the daemon.
        self.moments: list[tuple[float, str]] = []

    def meet(self, kind: str, *values: float) -> None:
        """Do what histories meet for. Raises NodeGone."""

    def published(self, path: str) -> bytes | None:
        """Return what the bucket shows of a path, None if nothing."""
        with suppress(OSError):
            return (self.path / path).read_bytes()
        return None

    def sync(self, name: str) -> str:
        """Wait until the bucket has everything below a directory; return what went wrong."""
        return ""

    def trees(self) -> dict[str, Tree]:
        """Return what the bucket shows, by the directories of the histories."""
        return {}

    def put_aside(self) -> dict[str, str]:
        """Return files that were put aside since the last call: their places, and the histories that wrote them."""
        return {}

    def alarms(self) -> list[str]:
        """Return tracebacks in the log since the last call."""
        return []

    def abandon(self) -> None:
        """End everything at once, so that no system call waits any more."""

    def close(self) -> None:
        """Leave nothing behind."""


class KeptNode(Node):
    """A mount that outlives its daemon."""

    def __init__(self, directory: Path, settle_seconds: float) -> None:
        super().__init__(directory / "mnt", settle_seconds)
        self.path.mkdir()
        self._server = ServerProcess(directory / "bucket").start()
        control = self._server.control
        service = Service(
            self._server.endpoint_url,
            self._server.access_key,
            self._server.secret_key,
            self._server.bucket,
            control,
            self._server.ca_path,
        )
        self._control = control
        self._mount = Mount(Bucket(service, service.client(), _PREFIX), self.path, directory / "cache")
        self._mount.start(
            "--keep-mounted", "--settle-seconds", str(settle_seconds), "--cache-size", "4GiB",
            "--memory", "64MiB", "--log-level", "info",
        )  # fmt: skip
        self._keeper = self._mount.keeper()
        self._pid = self._mount.pid
        self._served_since = time.monotonic()
        # Threads that a meeting left behind, and what went wrong in them.
        self._busy: list[threading.Thread] = []
        self._problem = ""
        self._seen: set[str] = set()
        self._alarms: list[str] = []

    # ---- the bucket

    def published(self, path: str) -> bytes | None:
        try:
            return self._control.read(_PREFIX + path)
        except KeyError:
            return None

    def sync(self, name: str) -> str:
        for each in tuple(self._busy):
            each.join()
        try:
            answer = ask(self._find(), "sync", name, timeout_seconds=_SYNC_SECONDS)
        except (MountError, OSError) as exc:
            return f"sync fails: {exc}"
        return "" if answer.result == "durable" else f"sync says {answer.result}: {answer.message}"

    def trees(self) -> dict[str, Tree]:
        found: dict[str, Tree] = {}
        for key, view in self._control.objects().items():
            name, _, path = key.removeprefix(_PREFIX).partition("/")
            if not key.startswith(_PREFIX) or not path:
                continue
            target = symlink_target(view.metadata)
            tree = found.setdefault(name, {})
            if path.endswith("/"):
                tree[path.rstrip("/")] = "directory"
            elif target:
                tree[path] = f"symlink to {target}"
            else:
                # It may be removed in the meantime, by a history that goes on although it failed.
                with suppress(KeyError):
                    tree[path] = self._control.read(key)
        return found

    def put_aside(self) -> dict[str, str]:
        found = {}
        for folder in _ASIDE:
            for path in (self._mount.cache / folder).iterdir():
                if path.as_posix() not in self._seen:
                    self._seen.add(path.as_posix())
                    found[f"{folder}/{path.name}"] = origin_of(path.read_bytes()) or ""
        return found

    def alarms(self) -> list[str]:
        return [line for line in self._mount.new_alarms() if line.startswith("Traceback")]

    # ---- kills and upgrades

    def meet(self, kind: str, *values: float) -> None:
        match kind:
            case "bucket":
                self._make_slow(*values)
            case "gather":
                self._settle()
            case "kill":
                self._kill()
            case "kill-in":
                self._begin(lambda: self._kill(values[0] / 1000))
            case "kill-twice":
                self._kill()
                self._begin(lambda: self._kill_next(values[0] / 1000))
            case "upgrade":
                self._upgrade()
            case "upgrade-in":
                self._begin(self._upgrade)
        if self._problem:
            raise NodeGone(self._problem)

    def _make_slow(self, latency: float, delay: float) -> None:
        self._control.clear_faults()
        self._control.set(latency=latency, jitter=0.5)
        if delay:
            self._control.faults(
                Fault(FaultAction.DELAY, operation="PutObject", seconds=delay, probability=0.5)
            )

    def _begin(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=self._guarded, args=(work,), daemon=True)
        self._busy.append(thread)
        thread.start()

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except (AssertionError, MountError, OSError) as exc:
            self._problem = self._problem or f"{exc}\n{self._tail()}"

    def _settle(self) -> None:
        """Return when a daemon has served for long enough."""
        for each in self._busy:
            each.join()
        self._busy.clear()
        if not is_running(self._pid):
            try:
                self._pid = wait_until(self._next_pid, "the next daemon", _NEXT_SECONDS)
            except (AssertionError, MountError, OSError) as exc:
                raise NodeGone(f"{exc}\n{self._tail()}") from exc
            self._served_since = time.monotonic()
        time.sleep(max(0.0, self._served_since + _SERVICE_SECONDS - time.monotonic()))

    def _next_pid(self) -> int:
        pid: int = ask(self._find(), "status").status["pid"]
        return pid if is_running(pid) else 0

    def _find(self) -> ControlMount:
        return find_mount(self.path, os.environ)[0]

    def _kill(self, seconds: float = 0.0) -> None:
        time.sleep(seconds)
        with suppress(ProcessLookupError):  # it has just ended, for an upgrade
            os.kill(self._pid, signal.SIGKILL)
            self._note("the daemon is killed")
            self.kills += 1

    def _kill_next(self, seconds: float) -> None:
        """Kill the process that becomes the next daemon: the standby, if there was one."""
        pid = wait_until(self._other_child, "the next daemon's process", _NEXT_SECONDS)
        time.sleep(seconds)
        os.kill(pid, signal.SIGKILL)
        self._note("its successor is killed")
        self.kills += 1

    def _other_child(self) -> int:
        children = Path(f"/proc/{self._keeper}/task/{self._keeper}/children").read_text().split()
        return next((int(each) for each in children if int(each) != self._pid and is_running(int(each))), 0)

    def _upgrade(self) -> None:
        self._note("the upgrade begins")
        try:
            replace_daemon(self.path, __version__)
        except (MountError, OSError) as exc:
            self._problem = f"upgrade fails: {exc}\n{self._tail()}"
            return
        self.upgrades += 1
        self._note("the upgrade has ended")
        self._pid = self._next_pid()
        self._served_since = time.monotonic()

    def _note(self, what: str) -> None:
        self.moments.append((time.monotonic(), what))

    def _tail(self) -> str:
        return self._mount.log()[-1500:]

    # ---- the end

    def abandon(self) -> None:
        children = Path(f"/proc/{self._keeper}/task/{self._keeper}/children")
        pids = [self._keeper]
        with suppress(OSError):
            pids += [int(word) for word in children.read_text().split()]
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in pids:
            wait_until(lambda pid=pid: not is_running(pid), f"the end of process {pid}")  # type: ignore[misc]
        self._mount.detach()

    def close(self) -> None:
        try:
            self.abandon()
            for each in self._busy:
                each.join()
        finally:
            self._mount.bucket.client.close()
            self._server.close()
