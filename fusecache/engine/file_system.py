"""The engine as a whole: starts and stops its parts, and answers queries about them. `assembly.py` builds them.

`fs/` turns the kernel's requests into calls of `lookup`, `file_io`, `close_protocol` and `namespace_ops`. Nothing here
knows FUSE.
"""

import gc
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict
from typing import Any

import trio

from fusecache.engine.assembly import Tasks, build_names, build_services, build_write_back, open_storage
from fusecache.engine.durability.status import Pending
from fusecache.engine.durability.sync import Durability
from fusecache.engine.events import EngineEvents
from fusecache.engine.namespace.events import Events
from fusecache.engine.namespace.lookup import CachedNames
from fusecache.engine.namespace.nodes import FileHandle, Node, Operation, QueuedChange
from fusecache.engine.options import EngineOptions
from fusecache.engine.recovery.journal_replay import ReplayResult, nameless_files, rebuild_tree
from fusecache.engine.recovery.node_adoption import NodeAdoption
from fusecache.engine.runtime.offload import Offload
from fusecache.engine.runtime.supervisor import Supervisor, unwrap_single_error
from fusecache.model.errors import Refused, RemoteError, StateError
from fusecache.model.format_text import count_text, size_text
from fusecache.model.latency import LatencyHistogram
from fusecache.model.records import FileState
from fusecache.policy.name_patterns import PinnedKeys
from fusecache.remote.store import Store

log = logging.getLogger(__name__)


class FileSystem:
    """The mounted bucket. Create it on the loop's thread; `running` is its lifetime."""

    def __init__(
        self,
        store: Store,
        offload: Offload,
        options: EngineOptions,
        supervisor: Supervisor,
        kernel: Events | None = None,
    ) -> None:
        """Open the cache directory (blocking). Raises StateError, LocalDiskError.

        kernel: hears what the kernel must forget.
        """
        self.options = options
        events = EngineEvents(kernel or Events())
        pinned = PinnedKeys(options.pin, options.prefix)
        self._tasks = tasks = Tasks(supervisor)
        self._storage = storage = open_storage(store, offload, options, pinned, supervisor)
        self._names = names = build_names(storage, options, events, tasks)
        self._write_back = write_back = build_write_back(storage, names, options, events, tasks.clients)
        self._services = services = build_services(
            storage, names, write_back, options, pinned, events, tasks.clients
        )
        self.cache, self.journal = storage.cache, storage.journal
        self.tree, self.queue, self.lookup, self.hints = names.tree, names.queue, names.lookup, names.hints
        self.symlinks, self.paths = names.symlinks, names.paths
        self.kernel_pages = events.model_loads.pages
        self.file_io, self.close_protocol = write_back.write.file_io, write_back.write.close_protocol
        self.publisher = write_back.publisher
        self.namespace_ops = write_back.namespace_ops
        self.warmup, self.inspector = services.warmup, services.inspector
        self.uploads, self.served = services.uploads, services.served
        self.status, self.quarantine = services.status, services.quarantine
        self.replayed = ReplayResult()
        self._started = trio.current_time()
        # Of the calls of programs, counted by the caller.
        self.call_times = {"open": LatencyHistogram(), "close": LatencyHistogram()}

    def end_waiting(self) -> None:
        """The mount is about to end: answer every close and fsync that waits."""
        self._write_back.remote_fsync.end_waiting()
        self._write_back.backpressure.end_waiting()

    def on_unmounted(self) -> None:
        """The kernel has let go of the mount: what programs have closed is final."""
        self._write_back.write.states.seal_acknowledged()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Replay the journal, then run all tasks while the body runs. At the end everything is journaled and closed."""
        try:
            with (
                _pause_garbage_collection(),
                nameless_files(self.options.predecessor, self.tree),
            ):
                self.replayed = await self._storage.offload.rows(self._read_journal)
                for nbytes in self.replayed.staged_bytes():
                    self.cache.restore_staging(nbytes)
                rebuild_tree(self.replayed, self.tree, self.queue, trio.current_time())
                self._adopt()
            self._write_back.write.states.adopt_local_only(self.replayed.local)
            self.quarantine.restore_rows(self.replayed)
            self._write_back.conflict_log.restore(self._storage.journal_rows.conflicts())
            self._check_publishable()
            self.publisher.rejections.restore(self._rejected(), publishes=not self.options.read_only)
            # Tasks that look names up end before the lookup itself: else their last requests would get no answer.
            async with trio.open_nursery() as services:
                journal = self._tasks.supervisor.run_service
                await services.start(journal, "journal", self.journal.run, name="journal")
                await services.start(self.cache.run, name="cache")
                await services.start(self._tasks.names.run, name="names")
                self.lookup.start()
                with unwrap_single_error():
                    async with trio.open_nursery() as clients:
                        await clients.start(self._tasks.clients.run, name="clients")
                        self._start_clients()
                        retirement = self.publisher.retirement
                        for version in self.replayed.stored.values():
                            retirement.take_over(version)
                        await retirement.wait_idle()
                        yield
                        await retirement.wait_idle()
                        clients.cancel_scope.cancel()
                services.cancel_scope.cancel()
        finally:
            self._storage.opened.close()

    def _read_journal(self) -> ReplayResult:
        return self._services.replay.read(self.options.predecessor)

    def _adopt(self) -> None:
        """Take over the inodes and the open content of a daemon whose mount outlived it."""
        left = self.options.predecessor
        if left is None:
            return
        with self.tree.freeze_forgets():  # until the handles are counted, nothing holds the nodes
            for version in NodeAdoption(left, self.replayed, self.tree, self.queue).run():
                self._write_back.write.states.adopt_open(version)
            for each in left.handles:
                node = None if each.is_directory else self.tree.nodes.get(each.inode)
                if node is not None:
                    handle = FileHandle(node, each.writable, each.pid, each.process, each.appends)
                    self.replayed.handles[each.number] = self.file_io.adopt(node, handle)
                    # A close that was acknowledged since, of another program, counts.
                    if each.was_killed and node.version and node.version.state is FileState.OPEN:
                        node.version.close_state.killed_writer = handle

    def _rejected(self) -> list[QueuedChange]:
        """Return what the bucket rejected before this start. A read-only mount repeats no change of names."""
        operations = [] if self.options.read_only else self.replayed.rejected_operations
        names = [Operation(each, None, error=Refused(each.error)) for each in operations]
        return [*self.replayed.rejected, *names]

    def _start_clients(self) -> None:
        write_back, services = self._write_back, self._services
        self.hints.start()
        write_back.preparer.start()
        for key, upload_id in self.replayed.uploads:
            write_back.uploader.abort(key, upload_id)
        write_back.publisher.start()
        services.pinned.start()
        self._tasks.clients.keep(
            {
                "snapshots": write_back.snapshots.run,
                "journal-watch": self.journal.watch,
                "upload-rate": services.status.run,
                "rates": services.rates.run,
            }
        )

    def _check_publishable(self) -> None:
        """Raise StateError if changes are pending and this read-only mount may not upload them."""
        if not self.options.read_only or not len(self.queue):
            return
        pending = self.status.pending()
        raise StateError(
            f"{self.options.directory} holds {count_text(pending.files, 'change')}, {size_text(pending.bytes)}, "
            f"that the bucket does not have yet, and a read-only mount may not upload them: mount it read-write once "
            f"(`fusecache unmount` waits for the uploads), copy files out with `fusecache recover "
            f"{self.options.directory}`, or mount with another --cache-dir"
        )

    async def start_without_bucket(self, error: RemoteError) -> None:
        """Serve names from the disk cache and the journal until `on_bucket_answered`. error: why the bucket is away."""
        await self.know_cached_names()
        self._names.client.start_unanswered(error)

    async def know_cached_names(self) -> None:
        """Know the names of what the disk cache has, to serve them while the bucket is away."""
        self.lookup.cached_names = CachedNames(await self.cache.cached_objects(), trio.current_time())

    def on_bucket_answered(self) -> None:
        """The bucket answers for the first time: from now on it alone says which names there are."""
        self.lookup.cached_names = CachedNames()
        for node in self.tree.nodes.values():
            if node.object is not None and not node.object.modified and not node.local_refs:
                node.verified = float("-inf")  # also of an immutable name: its time is unknown

    async def ask_bucket(self) -> None:
        """Send one request, to find out whether the bucket answers and accepts the keys."""
        await self._names.client.try_credentials()

    async def try_again(self) -> None:
        """Test whether the bucket accepts the keys, which may be new, and retry everything that waits at once."""
        await self.ask_bucket()
        self.publisher.end_pauses()

    # ---- queries

    async def resolve(self, path: str, *, timeout_seconds: float = float("inf")) -> Node:
        """Return the node at a path, as `Paths.resolve` does."""
        return await self.paths.resolve(path, timeout_seconds=timeout_seconds)

    async def wait_durable(self, path: str, timeout_seconds: float | None) -> Durability:
        """Return once the bucket has everything that was closed at or below a path before the call.

        What only this node keeps, such as a changed mode, is on its disk then. Raises what keeps it from there.
        """
        began = trio.current_time()
        ended = await self._services.sync.wait_durable(path, timeout_seconds)
        if ended.result != "durable":
            return ended
        left = float("inf") if timeout_seconds is None else began + timeout_seconds - trio.current_time()
        with trio.move_on_after(max(0.0, left)):
            await self.journal.wait_committed()
            return ended
        return Durability("timeout", "the disk of the cache directory has not taken the last changes")

    async def drain(self, timeout_seconds: float | None = None, *, until_empty: bool) -> Durability:
        """Publish everything before the mount ends, as `Drain.run` does."""
        return await self._services.drain.run(timeout_seconds, until_empty=until_empty)

    async def fsync(self, handle: FileHandle) -> None:
        """Sync a file, as `RemoteFsync.fsync` does."""
        await self._write_back.remote_fsync.fsync(handle)

    def count_read(self, node: Node, nbytes: int) -> None:
        """A program has read bytes of a file."""
        self._services.rates.files.count(node.number, nbytes)

    def statistics(self, pending: Pending | None = None) -> dict[str, Any]:
        """Return ENGINE_FACTS as plain values. Lists are cut to the newest NAMED entries, with their full length.

        pending: the pending changes, if the caller has just counted them.
        """
        read, made = self.cache.statistics(), self._storage.store.statistics()
        cache, calls = read.as_dict(), {"read": read.latency}
        calls |= {call: each.latency() for call, each in self.call_times.items()}
        cache["wait_seconds"]["metadata"] = self.lookup.waited_seconds
        cache["limit_bytes"] = self.cache.usable_bytes()
        return {
            "uptime_seconds": round(trio.current_time() - self._started, 1),
            **self.status.statistics(self.status.pending() if pending is None else pending),
            **self.quarantine.statistics(),
            "call_times": {call: asdict(each) for call, each in calls.items()},
            "in_memory": {
                "inodes": len(self.tree.nodes),
                "listing_bytes": self._storage.listings.memory_bytes,
            },
            "hidden_keys": self.lookup.lister.hidden_keys,
            "read_directly": {
                "kernel": self.cache.maintenance.passed_through_opens,
                "loader": self.cache.maintenance.handed_out_files,
            },
            "journal_error": str(self.journal.refusal or ""),
            "cache": cache,
            "reads_waiting": {"reads": read.waiting_reads, "seconds": read.longest_wait_seconds},
            "requests": made.by_kind(),
            "request_errors": made.errors,
            "received_bytes": made.bytes_read,
            "written_bytes": made.bytes_written,
            "served_bytes": {
                "peers": self.cache.pieces.served_bytes[True],
                "programs": self.cache.pieces.served_bytes[False],
            },
            "costs": self._services.rates.costs(),
            "warming": [job.as_dict() for job in self.warmup.jobs()],
            "hints": self.hints.statistics(),
            **self._services.rates.statistics(),
            "closes_waiting": self._write_back.backpressure.facts(self.tree.path),
            **self._answer_facts(),
        }

    def _answer_facts(self) -> dict[str, Any]:
        health = self._names.client.health
        refused_seconds = health.refused_seconds(has_writes=len(self.queue) > 0)
        return {
            "unanswered_seconds": round(health.silent_seconds, 1),
            "refused_seconds": round(refused_seconds, 1),
        }


@contextmanager
def _pause_garbage_collection() -> Iterator[None]:
    """Switch garbage collection off while thousands of rows are made that all stay: it makes that take 1.5 times."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
