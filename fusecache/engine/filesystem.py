"""The engine as one whole: wires the parts, starts and ends them, and answers what is asked about them.

`fs/` translates the kernel's requests into calls of `names`, `contents` and `changes`; nothing here knows FUSE.
"""

import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import trio

from fusecache.disk.staging import StagingDirectory
from fusecache.engine.cache import BlockCache, CacheOptions
from fusecache.engine.changes import Changes
from fusecache.engine.content import Contents
from fusecache.engine.inspecting import Inspector
from fusecache.engine.journaling import JournalWriter
from fusecache.engine.names import Names
from fusecache.engine.nodes import Generation, Item, Kind, Node
from fusecache.engine.offload import Offload
from fusecache.engine.operations import Publishing
from fusecache.engine.owed import Owed
from fusecache.engine.preparing import Preparer
from fusecache.engine.publisher import Publisher
from fusecache.engine.recovery import Recovered, Recovery, rebuild
from fusecache.engine.requests import Requests
from fusecache.engine.siblings import Siblings
from fusecache.engine.tree import Ownership, Tree
from fusecache.engine.warming import Warmer
from fusecache.index.cache_index import read_boot_id
from fusecache.index.journal import Journal
from fusecache.index.listings import Listings
from fusecache.model.errors import NotFound
from fusecache.model.names import unusable_name
from fusecache.model.states import FileState
from fusecache.remote.store import Store

log = logging.getLogger(__name__)

# Names in answers; more are counted.
NAMED = 50


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What the engine needs to be told. prefix: of every key, empty or ending in '/'; sizes in bytes."""

    directory: Path
    prefix: str
    ownership: Ownership
    cache_bytes: int
    buffer_bytes: int
    settle_seconds: float = 1.0
    fresh_seconds: float = 1.0
    immutable: tuple[str, ...] = ()
    temp_names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Pending:
    """What the bucket does not have yet. oldest_seconds: since the oldest of it was closed."""

    files: int
    bytes: int
    oldest_seconds: float
    uploading: tuple[dict[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Durability:
    """How waiting ended: `durable`, `timeout`, `error` or `conflict`, and why."""

    result: str
    message: str = ""


class FileSystem:
    """One mounted bucket. Made on the loop's thread; `running` is its life."""

    def __init__(self, store: Store, offload: Offload, options: EngineOptions) -> None:
        """Open the cache directory (blocking). Raises StateError, LocalDiskError."""
        boot_id = read_boot_id()
        directory = options.directory
        self.options = options
        self.cache = BlockCache(
            store,
            offload,
            CacheOptions(
                directory=directory / "cache",
                limit_bytes=options.cache_bytes,
                buffer_bytes=options.buffer_bytes,
            ),
        )
        self._journal_rows = Journal(directory / "journal")
        self._staging = StagingDirectory(directory)
        self._listings = Listings(directory / "names")
        empty_file = directory / "empty"
        empty_file.touch()
        self.journal = JournalWriter(
            self._journal_rows, offload, highest_in_use=self._staging.highest_number()
        )
        self.owed = Owed()
        self.tree = Tree(options.prefix, options.ownership)
        requests = Requests(store, offload, self.cache.limit)
        self.names = Names(
            self.tree, self._listings, requests, self._journal_rows, fresh_seconds=options.fresh_seconds
        )
        self.names.immutable = options.immutable
        self.contents = Contents(
            self.tree, self.cache, self._staging, self.journal, self.owed, offload, boot_id
        )
        self.contents.on_read = Siblings(self.tree, self.names, self.cache).note_read
        self._preparer = Preparer(store, self.cache, self.journal, offload)
        self.contents.on_dropped = self._preparer.dropped
        self.contents.on_key_changed = self._preparer.restart
        self.publisher = Publisher(
            self.tree,
            self.names,
            self.contents,
            self.owed,
            self.journal,
            self._preparer,
            Publishing(store, str(empty_file)),
            offload,
            settle_seconds=options.settle_seconds,
            temp_names=options.temp_names,
        )
        self.warmer = Warmer(self.tree, requests, self.cache, self.resolve)
        self.inspector = Inspector(self.tree, requests, self.cache, self.resolve)
        self._store = store
        self.changes = Changes(self.tree, self.names, self.contents, self.owed, self.journal, requests)
        self._offload = offload
        self._recovery = Recovery(self._journal_rows, self._staging, boot_id)
        self.recovered = Recovered()
        self._started = trio.current_time()

    def on_name_lost(self, call: Callable[[Node, str], None]) -> None:
        """Have `call(parent, name)` told when a name no longer means the inode that the kernel knows."""
        self.contents.on_name_lost = call
        self.publisher.on_name_lost = call

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Recover, then run all tasks while the body runs; ends with everything journaled and closed."""
        try:
            self.recovered = await self._offload.rows(self._recovery.read)
            self.cache.restore_staging(self.recovered.staged_bytes)
            rebuild(self.recovered, self.tree, self.owed, trio.current_time())
            self.publisher.rejected += self.recovered.rejected
            async with trio.open_nursery() as nursery:
                await nursery.start(self.journal.run, name="journal")
                await nursery.start(self.cache.run, name="cache")
                await nursery.start(self.names.run, name="names")
                await nursery.start(self.warmer.run, name="warm")
                await nursery.start(self._preparer.run, name="prepare")
                await nursery.start(self.publisher.run, name="publish")
                yield
                nursery.cancel_scope.cancel()
        finally:
            self._journal_rows.close()
            self._listings.close()

    # ---- looking

    async def resolve(self, path: str) -> Node:
        """Return the node at a path below the mountpoint ("" is its root). Raises NotFound."""
        node = self.tree.root
        held: list[Node] = []
        try:
            for part in filter(None, path.split("/")):
                if node.kind is not Kind.DIRECTORY:
                    raise NotFound(f"{path}: no such file or directory")
                # A child that was replaced takes a parent with it that nobody holds.
                node.handles += 1
                held.append(node)
                if unusable_name(part) is not None:
                    raise NotFound(f"{path!r}: no such file or directory")
                node = await self.names.lookup(node, part)
        except NotFound as exc:
            raise NotFound(f"{path}: no such file or directory") from exc
        finally:
            for each in held:
                each.handles -= 1
        return node

    def pending(self, path: str = "") -> Pending:
        """Return what at or below a path is not in the bucket yet."""
        # One pass without detours: 100 000 of them must not hold the loop.
        count = nbytes = 0
        now = oldest = trio.current_time()
        uploading: list[Generation] = []
        for item in self._items_at(path):
            count += 1
            if isinstance(item, Generation):
                nbytes += item.size
                oldest = min(oldest, item.flushed_at, item.sealed_at)
                if item.prepared is not None or item.record.state is FileState.PUBLISHING:
                    uploading.append(item)
            elif item.queued_at < oldest:
                oldest = item.queued_at
        facts = tuple(
            {"path": self.tree.relative(item.record.key), "bytes": item.size, "sent": item.sent_bytes}
            for item in uploading
        )
        return Pending(count, nbytes, now - oldest, facts)

    async def wait_durable(self, path: str, timeout_seconds: float | None) -> Durability:
        """Return when the bucket has everything that was closed at or below a path before the call."""
        before = len(self.publisher.conflicts)
        waiting = deque(self._items_at(path))
        last = max((item.sequence for item in waiting), default=0)
        with trio.move_on_after(float("inf") if timeout_seconds is None else timeout_seconds) as scope:
            # A renamed item keeps waiting elsewhere; newer content of the same name takes the place of the older.
            while True:
                while waiting and waiting[0] not in self.owed:
                    waiting.popleft()
                if not waiting and not any(item.sequence <= last for item in self._items_at(path)):
                    break
                await self.publisher.wait_progress()
        if scope.cancelled_caught:
            return Durability("timeout", self._reason_for_waiting(path))
        key = self.options.prefix + path
        rejected = [
            item
            for item in self.publisher.rejected
            if any(_key_is_at(changed, key) for changed in item.changed_keys())
        ]
        if rejected:
            return Durability("error", f"{rejected[0].changed_keys()[-1]}: {rejected[0].error}")
        conflicts = [name for name in self.publisher.conflicts[before:] if _key_is_at(name, key)]
        if conflicts:
            return Durability("conflict", self._words_of_conflict(conflicts[0]))
        still_open = self._open_files(path)
        if still_open:
            return Durability("durable", f"not covered, as it is still open: {', '.join(still_open[:3])}")
        return Durability("durable")

    def _reason_for_waiting(self, path: str) -> str:
        if self.publisher.failure is not None:
            return str(self.publisher.failure)
        temporary = [
            item.changed_keys()[0] for item in self._items_at(path) if self.publisher.is_temporary(item)
        ]
        if temporary:
            return f"{self.tree.relative(temporary[0])} has a temporary name: it is published 60 s after its close"
        return "uploads are still under way"

    def _words_of_conflict(self, key: str) -> str:
        name, copy = self.tree.relative(key), self.publisher.kept_as.get(key)
        if copy is None:
            return f"{name}: another client changed it first; this change was given up"
        return f"{name}: another client changed it first; our version is kept as {self.tree.relative(copy)}"

    def _open_files(self, path: str) -> list[str]:
        """Return the paths of files at or below `path` that are written right now."""
        key = self.options.prefix + path
        nodes = (node for node in self.tree.nodes.values() if node.writers and self.tree.is_linked(node))
        return [self.tree.path(node) for node in nodes if _key_is_at(self.tree.key(node), key)]

    async def path_state(self, path: str) -> str:
        """Return `clean`, `dirty`, `queued`, `uploading:<sent>/<size>` or `error:<why>` of one file."""
        node = await self.resolve(path)
        items = self._items_at(path)
        if node.kind is Kind.DIRECTORY:
            return "queued" if items else "clean"
        generation = node.generation
        if generation is None:
            return "queued" if items else "clean"
        if generation.error is not None or generation.state is FileState.REJECTED:
            return f"error:{generation.error or generation.record.error}"
        if generation.is_mutable and generation.state is not FileState.FLUSHED:
            return "dirty"
        if generation.prepared is not None:
            return f"uploading:{generation.sent_bytes}/{generation.size}"
        return "queued"

    def statistics(self) -> dict[str, Any]:
        """Return counters of everything, as plain values; of lists the newest NAMED, and how many there are."""
        pending = self.pending()
        cache = asdict(self.cache.statistics())
        cache["wait_seconds"]["metadata"] = self.names.waited_seconds
        requests = self._store.statistics()
        rejected, conflicts = self.publisher.rejected, self.publisher.conflicts
        return {
            "uptime_seconds": round(trio.current_time() - self._started, 1),
            "pending_files": pending.files,
            "pending_bytes": pending.bytes,
            "oldest_pending_seconds": round(pending.oldest_seconds, 3),
            "uploading": list(pending.uploading[:NAMED]),
            "waiting_for": str(self.publisher.failure) if self.publisher.failure else "",
            "rejected": [item.changed_keys()[-1] for item in rejected[-NAMED:]],
            "rejected_files": len(rejected),
            "conflicts": [
                {
                    "path": self.tree.relative(key),
                    "kept_as": self.tree.relative(self.publisher.kept_as.get(key, "")),
                }
                for key in conflicts[-NAMED:]
            ],
            "conflict_files": len(conflicts),
            "orphans": self.recovered.orphans,
            "suspects": self.recovered.suspects,
            "inodes": len(self.tree.nodes),
            "cache": cache,
            "requests": {**asdict(requests), "class_a": requests.class_a, "class_b": requests.class_b},
            "warming": [job.facts() for job in self.warmer.jobs()],
        }

    def _items_at(self, path: str) -> list[Item]:
        key = (self.options.prefix + path).rstrip("/")
        if not path:
            return self.owed.items()
        return [item for item in self.owed.items() if _is_at(item, key, key + "/")]


def _is_at(item: Item, key: str, below: str) -> bool:
    """Say whether an item changes a key, or one below it. key: without a slash at its end; below: with it."""
    for changed in item.changed_keys():  # noqa: SIM110  # a loop: any() costs thrice as much, and there are many
        if changed == key or changed.startswith(below):
            return True
    return False


def _key_is_at(changed: str, key: str) -> bool:
    return not key or changed.rstrip("/") == key.rstrip("/") or changed.startswith(key.rstrip("/") + "/")
