"""Passes over a folder: one `push`, or a `watch` until a signal.

A pass lists the folder, compares it with the state, and hands over what changed. It needs no events of the kernel, so
what was closed while no process watched is found in the same way.

Invariant: a pass takes only files that came to rest before it began. What is closed before a commit marker is then in
every pass that takes the marker.
"""

import signal
import time
from collections.abc import Callable
from functools import partial

import trio

from fusecache.engine.durability.sync import STALLED
from fusecache.engine.file_system import FileSystem
from fusecache.folder.local_folder import FolderScan, LocalFile, LocalFolder, scan
from fusecache.folder.publishing import FolderPublisher, PushReport
from fusecache.policy.name_patterns import matches_any

# Times of files have the resolution of the kernel's clock tick, on some file systems of a second.
REST_SECONDS = 1.0
# A change that lies further in the future comes from a clock that was set back.
_FUTURE_SECONDS = 60.0
# As on a mount: such a file is published if no rename comes.
_TEMPORARY_SECONDS = 60.0
# Passes of a push, a second apart: what still changes then is named.
_PASSES = 4
_PAUSE_SECONDS = 1.0
# A watch lists the folder for at most this share of the time.
_BUSY_SHARE = 0.1
_RECORD_SECONDS = 0.1

Show = Callable[[PushReport, int], None]


class FolderPasses:
    """Publishes a folder, pass by pass."""

    def __init__(
        self,
        folder: LocalFolder,
        filesystem: FileSystem,
        publisher: FolderPublisher,
        show: Show,
        *,
        prefix: str,
        removes: bool,
        temp_names: tuple[str, ...] = (),
    ) -> None:
        """show: called with the report and the number of files under way. temp_names: names that wait for a rename."""
        self._scan = partial(scan, folder, prefix)
        self._filesystem = filesystem
        self._publisher = publisher
        self._show = show
        self._removes = removes
        self._temp_names = temp_names

    async def push(self) -> None:
        """Publish everything that is closed; name the rest."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._record, name="record")
            await self._publisher.restore()
            await self._publish_all()
            nursery.cancel_scope.cancel()
        await self._name_missing()

    async def watch(self, deadline_seconds: float, ready: Callable[[], None]) -> None:
        """Publish what is closed until SIGTERM or SIGINT, then the rest within a time; name what is left."""
        stop = trio.Event()
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                await nursery.start(self._watch_signals, stop, scope, deadline_seconds)
                nursery.start_soon(self._record, name="record")
                await self._publisher.restore()
                ready()
                while not stop.is_set():
                    began = time.monotonic()
                    await self._pass()
                    pause = max(_PAUSE_SECONDS, (time.monotonic() - began) / _BUSY_SHARE)
                    with trio.move_on_after(pause):
                        await stop.wait()
                await self._publish_all()
                nursery.cancel_scope.cancel()
        await self._name_missing()

    async def _watch_signals(
        self,
        stop: trio.Event,
        scope: trio.CancelScope,
        seconds: float,
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            task_status.started()
            async for _ in signals:
                stop.set()
                scope.deadline = min(scope.deadline, trio.current_time() + seconds)

    async def _pass(self) -> bool:
        """Hand over what is at rest; return whether there are files that were not, and will be soon."""
        found = await trio.to_thread.run_sync(self._scan)
        changed = self._publisher.changed(found)
        ready = [file for file in changed if self._is_at_rest(file, found)]
        await self._publisher.take(ready)
        self._publisher.report.failed |= found.unusable
        if self._removes:
            await self._publisher.remove_missing(found)
        return len(ready) < len(changed) or self._publisher.has_moved

    def _is_at_rest(self, file: LocalFile, found: FolderScan) -> bool:
        age = (found.begun_ns - file.changed_ns) / 1e9
        is_temporary = matches_any(file.name.rpartition("/")[2], self._temp_names)
        return age > (_TEMPORARY_SECONDS if is_temporary else REST_SECONDS) or age < -_FUTURE_SECONDS

    async def _publish_all(self) -> None:
        for number in range(_PASSES):
            if number:
                await trio.sleep(_PAUSE_SECONDS)
            if not await self._pass():
                break
        ended = await self._filesystem.drain(until_empty=True)
        self._publisher.record()
        if ended.result == STALLED:
            self._publisher.report.failed |= dict.fromkeys(self._publisher.under_way, ended.message)

    async def _name_missing(self) -> None:
        """Name what the bucket does not have at the end."""
        self._publisher.record()
        report = self._publisher.report
        found = await trio.to_thread.run_sync(self._scan)
        for name in self._publisher.under_way:
            report.failed.setdefault(name, "not in the bucket yet: the next push or watch goes on with it")
        for file in self._publisher.changed(found):
            report.failed.setdefault(
                file.name, "not in the bucket: it is being written, or has changed just now; push again"
            )

    async def _record(self) -> None:
        """Record what the bucket accepts, and free the engine's copies: the folder has the content."""
        shown = -1
        while True:
            self._publisher.record()
            await self._publisher.drop_unfinished()
            self._show(self._publisher.report, len(self._publisher.under_way))
            done = self._publisher.report.published_files
            if done != shown and not self._publisher.under_way:
                await self._filesystem.publisher.retirement.wait_idle()
                await self._filesystem.inspector.evict([""])
                shown = done
            await trio.sleep(_RECORD_SECONDS)
