"""Status of the write-back queue, for the whole mount and for one path.

It changes nothing and waits for nothing: the publisher sends, `sync.py` waits, `quarantine.py` restores or deletes.

Invariant: counting never blocks the loop, however long the queue is: long queues are counted with checkpoints.

Counts what the bucket does not have yet: changes, bytes, ages, uploads in flight, and failing changes.

Which objects of the bucket this mount still needs: open files, and names with changes that are not published yet.
"""

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import nlargest
from typing import Any, Self

import trio

from fusecache.engine.namespace.nodes import FileHandle, FileVersion, Kind, Node, QueuedChange, is_rename
from fusecache.engine.namespace.paths import Symlinks
from fusecache.engine.namespace.tree import Tree
from fusecache.engine.publish.publisher import Publisher
from fusecache.engine.runtime.metadata_client import MetadataClient
from fusecache.engine.write.parts import WriteParts
from fusecache.engine.writeback.conflict_log import ConflictLog
from fusecache.engine.writeback.queue import WritebackQueue
from fusecache.model.errors import NotFound, Throttled, Unavailable
from fusecache.model.format_text import (
    PERSONS,
    changes_text,
    code_of,
    count_text,
    left_text,
    remedy,
    seconds_text,
    size_text,
)
from fusecache.model.records import ConflictRecord, FileState
from fusecache.policy.checkpoints import checkpoint_folder
from fusecache.policy.rate_meter import RateMeter, seconds_left

# Names listed in an answer; the rest is only counted.
NAMED = 50
_CHECKPOINTS_NAMED = 20


@dataclass(frozen=True, slots=True)
class Pending:
    """What the bucket does not have yet.

    files: queued changes. Of these, contents are files with their bytes, and deferred are removals that wait on
    purpose, for deferred_seconds at most; the others change names. left_bytes: bytes not sent yet. oldest_seconds: age
    of the oldest change, deferred ones not counted. uploading: at most NAMED uploads; failing: at most NAMED changes
    that an error blocks.
    """

    files: int = 0
    contents: int = 0
    bytes: int = 0
    left_bytes: int = 0
    oldest_seconds: float = 0.0
    deferred: int = 0
    deferred_seconds: float = 0.0
    uploading: tuple[FileVersion, ...] = ()
    failing: tuple[QueuedChange, ...] = ()
    checkpoints: tuple["PendingCheckpoint", ...] = ()


@dataclass(slots=True)
class PendingCheckpoint:
    """The files of one checkpoint that the bucket does not have yet. folder: its key prefix."""

    folder: str
    files: int = 0
    bytes: int = 0
    sent: int = 0


class PendingCounter:
    """Adds up queued changes in one pass, fast enough for very long queues."""

    def __init__(self, deferred_seconds: Callable[[QueuedChange], float], below: str) -> None:
        """deferred_seconds: for how long a change stays deferred, 0 if it is not. below: the mount's key prefix."""
        self._deferred_seconds = deferred_seconds
        self._below = below
        # By directory, as most files share theirs; None: it is in no checkpoint.
        self._checkpoint_of: dict[str, PendingCheckpoint | None] = {}
        self._checkpoints: dict[str, PendingCheckpoint] = {}
        self._files = self._contents = self._bytes = self._sent = self._deferred = 0
        self._oldest = self._longest_deferred = 0.0
        self._now, self._wall = trio.current_time(), time.time()
        self._uploading: list[FileVersion] = []
        self._failing: list[QueuedChange] = []

    def add(self, items: Iterable[QueuedChange]) -> Self:
        """Add more changes."""
        for item in items:
            self._files += 1
            if isinstance(item, FileVersion):
                self._contents += 1
                self._bytes += item.size
                self._sent += item.moved_bytes
                self._add_to_checkpoint(item)
                age = _age(item, self._now, self._wall)
                if (item.in_flight or item.record.upload_id) and len(self._uploading) < NAMED:
                    self._uploading.append(item)
            elif (seconds := self._deferred_seconds(item)) > 0:
                self._deferred += 1
                self._longest_deferred = max(self._longest_deferred, seconds)
                continue
            else:
                age = self._now - item.queued_at
            self._oldest = max(self._oldest, age)
            if item.error is not None and len(self._failing) < NAMED:
                self._failing.append(item)
        return self

    def _add_to_checkpoint(self, item: FileVersion) -> None:
        directory = item.record.key.rpartition("/")[0]
        if directory not in self._checkpoint_of:
            folder = checkpoint_folder(item.record.key, self._below)
            self._checkpoint_of[directory] = (
                None if folder is None else self._checkpoints.setdefault(folder, PendingCheckpoint(folder))
            )
        if (found := self._checkpoint_of[directory]) is not None:
            found.files += 1
            found.bytes += item.size
            found.sent += item.moved_bytes

    def pending(self) -> Pending:
        """Return the sums."""
        return Pending(
            files=self._files,
            contents=self._contents,
            bytes=self._bytes,
            left_bytes=self._bytes - self._sent,
            oldest_seconds=self._oldest,
            deferred=self._deferred,
            deferred_seconds=self._longest_deferred,
            uploading=tuple(self._uploading),
            failing=tuple(self._failing),
            checkpoints=tuple(
                nlargest(_CHECKPOINTS_NAMED, self._checkpoints.values(), key=lambda each: each.bytes)
            ),
        )


def _age(item: FileVersion, now: float, wall: float) -> float:
    """Return the seconds since content was closed, under this daemon or an earlier one."""
    since = min(item.waiting_since, item.sealed_at)
    if item.waiting_since == float("inf") and item.record.moment:
        return max(wall - item.record.moment, now - since)
    return now - since


OPEN, PENDING = "is open on this node", "has a change that is not uploaded yet"
# Nodes or changes looked at between two checkpoints: a few milliseconds.
_BATCH = 5000


class KeysInUse:
    """Answers for keys, and for all keys below a prefix."""

    def __init__(self, tree: Tree, queue: WritebackQueue) -> None:
        self._tree = tree
        self._queue = queue

    async def find(self, keys: Sequence[str]) -> dict[str, str]:
        """Return which of these keys the mount needs, and why. An empty key, or one with '/' at its end, stands for all
        keys below it.
        """
        found = {key: f"it {why}" for key in keys if (why := self._reason(key))}
        folders = tuple(key for key in keys if not key or key.endswith("/"))
        if not folders:
            return found
        for index, needed in enumerate(self._all()):
            if needed is not None and needed[0].startswith(folders):
                found |= {each: " ".join(needed) for each in folders if needed[0].startswith(each)}
            if index % _BATCH == 0:
                await trio.lowlevel.checkpoint()
        return found

    def _reason(self, key: str) -> str:
        if self._queue.for_key(key):
            return PENDING
        node = self._tree.find(key)
        return "" if node is None else _reason_of(node)

    def _all(self) -> Iterator[tuple[str, str] | None]:
        """Yield each needed key and why; None for each node that is not."""
        for item in self._queue.unordered():
            yield from ((key, PENDING) for key in item.changed_keys())
        for node in list(self._tree.nodes.values()):
            why = _reason_of(node)
            yield (self._tree.key(node), why) if why and self._tree.is_linked(node) else None


def _reason_of(node: Node) -> str:
    if node.kind is not Kind.FILE:
        return ""  # a directory counts the changes of all files below it
    return OPEN if node.handles else PENDING if node.local_refs else ""


# Changes counted between two checkpoints: 1 or 2 ms.
_BATCH_CHANGES = 1000
_SAMPLE_SECONDS = 1.0
_FRESH_SAMPLE_SECONDS = 0.25
# Bytes a second. Below this nothing moves: these are the last bytes of a request that waits for its answer.
_RATE_FLOOR_BYTES_PER_SECOND = 1024.0
# A queue longer than _BATCH_CHANGES is not counted for each status request, but at this interval.
_COUNT_SECONDS = 5.0

_BEING_WRITTEN = frozenset({FileState.OPEN, FileState.FLUSHED, FileState.FAILED})


class QueueStatus:
    """Reports what is pending, dirty, failing, in conflict and local-only."""

    def __init__(  # noqa: PLR0913  # each part knows a piece of the status
        self,
        tree: Tree,
        queue: WritebackQueue,
        write: WriteParts,
        publisher: Publisher,
        conflict_log: ConflictLog,
        resolve: Callable[[str], Awaitable[Node]],
        symlinks: Symlinks,
        client: MetadataClient,
        *,
        keys_from: str,
    ) -> None:
        """keys_from: where the write credentials are read from, as `error_text.renewal_text` takes it."""
        self._tree = tree
        self._client = client
        self._keys_from = keys_from
        self._queue = queue
        self._file_io = write.file_io
        self._local_only = write.local_only
        self._enospc_log = write.enospc_log
        self._publisher = publisher
        self._conflict_log = conflict_log
        self._store = client.store
        self._resolve = resolve
        self._symlinks = symlinks
        self._rate = RateMeter()
        self._sampled, self._sent = float("-inf"), 0
        self._counted = Pending()

    async def run(self) -> None:
        """Sample the upload rate until cancelled, and count a long queue every _COUNT_SECONDS."""
        counted = float("-inf")
        while True:
            self._sample(now := trio.current_time())
            if len(self._queue) > _BATCH_CHANGES and now >= counted + _COUNT_SECONDS:
                counted = now
                self._counted = await self.count()
            await trio.sleep(_SAMPLE_SECONDS)

    def _sample(self, now: float) -> None:
        sent, is_still = self._store.statistics().bytes_sent, self._rate.per_second() == 0
        if is_still and sent <= self._sent:
            self._rate.reset(now, sent)  # idle time before an upload is no part of its rate
        else:
            self._rate.record(now, sent)
        self._sampled, self._sent = now, sent

    def _rate_of(self) -> float:
        """Return the upload rate now in bytes a second, fresh for uploads that just began; 0 if nothing moves."""
        if (now := trio.current_time()) >= self._sampled + _FRESH_SAMPLE_SECONDS:
            self._sample(now)
        pace = self._rate.per_second()
        return pace if pace >= _RATE_FLOOR_BYTES_PER_SECOND else 0.0

    # ---- the queue

    def pending(self) -> Pending:
        """Return what is pending in the whole mount, without waiting; for a long queue some seconds old."""
        if len(self._queue) <= _BATCH_CHANGES:
            return self._counter().add(self._queue.unordered()).pending()
        return replace(self._counted, files=len(self._queue))

    async def count(self, path: str = "") -> Pending:
        """Return what is pending at or below a path."""
        counter = self._counter()
        async for items in self._batches_at(path):
            counter.add(items)
        return counter.pending()

    def _counter(self) -> PendingCounter:
        return PendingCounter(self._publisher.deferred_seconds, self._tree.key_of_path(""))

    def statistics(self, pending: Pending) -> dict[str, Any]:
        """Return the numbers of the whole mount as plain values."""
        dirty = self._dirty("")
        dirty_bytes = sum(version.size for version in dirty)
        rejected = self._publisher.rejections.rejected
        rejected_bytes = sum(item.size for item in rejected if isinstance(item, FileVersion))
        rate = self._rate_of()
        left = None if self._publisher.failure is not None else seconds_left(pending.left_bytes, rate)
        conflicts = list(self._conflict_log.open())
        local = self._local_at("")
        local_bytes = sum(version.size for version in local)
        return {
            **self._details(pending),
            "pending_checkpoints": [
                {
                    "path": self._tree.relative(each.folder),
                    "files": each.files,
                    "bytes": each.bytes,
                    "sent": each.sent,
                }
                for each in pending.checkpoints
            ],
            "writing": [{"path": self._name_of(each), "bytes": each.size} for each in dirty[:NAMED]],
            "dirty_files": len(dirty),
            "dirty_bytes": dirty_bytes,
            # Bytes that only this node holds, for whatever reason; quarantined bytes are counted apart.
            "exposed_bytes": pending.bytes + dirty_bytes + rejected_bytes + local_bytes,
            "upload_bytes_per_second": round(rate),
            "seconds_left": None if left is None else round(left, 1),
            "local_only_files": len(local),
            "local_only_bytes": local_bytes,
            "waiting_for": str(self._publisher.failure) if self._publisher.failure else "",
            "waiting_code": code_of(self._publisher.failure) if self._publisher.failure else "",
            "rejected": [self._error_details(item) for item in rejected[-NAMED:]],
            "rejected_files": len(rejected),
            "conflicts": [self._conflict_details(each) for each in conflicts[-NAMED:]],
            "conflict_files": len(conflicts),
            "shortages": self._enospc_log.facts(),
        }

    def progress(self, pending: Pending) -> dict[str, Any]:
        """Return one progress report for a caller that waits for `pending`."""
        # Throttling is not reported: the publisher slows down, and the rest goes on.
        errors = (item.error for item in pending.failing if not isinstance(item.error, Throttled))
        failing = next(errors, self._publisher.failure)
        left = None if failing is not None else seconds_left(pending.left_bytes, self._rate_of())
        return {
            **_counts(pending),
            "left_bytes": pending.left_bytes,
            "seconds_left": left,
            "waiting_for": str(failing) if failing is not None and pending.files else "",
            "uploading": [
                f"{self._name_of(item)} {item.moved_bytes}/{item.size}" for item in pending.uploading
            ],
        }

    def line(self, pending: Pending) -> str:
        """Return the queue in one line."""
        failure = self._publisher.failure
        waiting = f", waiting: {failure}" if failure is not None else ""
        if not pending.files:
            return "everything is in the bucket" + waiting
        rate = self._rate_of()
        left = seconds_left(pending.left_bytes, rate)
        pace = f", {size_text(rate)}/s" if rate else ""
        pace += left_text(left) if failure is None else ""
        deferred = f"{count_text(pending.deferred, 'removal')} deferred" if pending.deferred else ""
        if pending.files == pending.deferred:
            return deferred
        return (
            f"{changes_text(pending.files - pending.deferred, pending.contents, pending.bytes)} not in the bucket yet, "
            f"oldest {seconds_text(pending.oldest_seconds)}{pace}{waiting}{', and ' * bool(deferred)}{deferred}"
        )

    # ---- one path

    async def path_status(self, path: str) -> dict[str, Any]:
        """Return the state of a file or directory in one word, with its details. Raises NotFound.

        The word: `clean`, `dirty`, `queued`, `uploading:<sent>/<size>`, `error:<code>`, `conflict`, or `local-only`
        for a file that is never published. A directory has the most severe state of what it contains.
        """
        key = self._tree.key_of_path(path)
        conflicts = self.conflicts_at(key)
        shortages = self._enospc_log.facts(path)
        node = None
        if not any(record.key.rstrip("/") == key for record in conflicts):
            try:
                node = await self._resolve(path)
            except NotFound:
                if shortages.get("path") != path and not self.rejected_at(key):
                    raise
        if node is not None and node.version is not None and self._local_only.covers(node):
            return {"path": path, "state": "local-only", **self._details(Pending()), "shortages": shortages}
        pending = await self.count(path)
        local = self._local_at(key)
        dirty = self._dirty(path)
        failed = [*self.rejected_at(key), *(item for item in dirty if item.error is not None)]
        state = self._state_word(key, pending, dirty, failed, conflicts, is_local=bool(local))
        if state == "clean" and node is None and not conflicts:
            state = "error:no-space"  # a write failed with ENOSPC, and nothing else has that name
        link: dict[str, Any] = {}
        if node is not None and node.kind is Kind.SYMLINK:
            link = {"link_to": node.target, "link_followed": self._symlinks.follows(key, node.target)}
        return {
            "path": path,
            "state": state,
            **link,
            **self._details(pending),
            "dirty_files": len(dirty),
            "dirty_bytes": sum(version.size for version in dirty),
            "failed_files": len(failed),
            "failed": [self._error_details(item) for item in failed[-NAMED:]],
            "conflict_files": len(conflicts),
            "conflicts": [self._conflict_details(each) for each in conflicts[-NAMED:]],
            "local_only_files": len(local),
            "local_only_bytes": sum(version.size for version in local),
            "shortages": shortages,
        }

    async def path_state(self, path: str) -> str:
        """Return the state of a file or directory in one word. Raises NotFound."""
        return str((await self.path_status(path))["state"])

    def _state_word(
        self,
        key: str,
        pending: Pending,
        dirty: list[FileVersion],
        failed: list[QueuedChange],
        conflicts: list[ConflictRecord],
        *,
        is_local: bool,
    ) -> str:
        if conflicts:
            return "conflict"
        errors = [item.error for item in (*failed, *pending.failing) if item.error is not None]
        code = next((code_of(error) for error in errors if code_of(error) in PERSONS), "")
        blocking = self._publisher.blocking_error if pending.files > pending.deferred else None
        if not code and not failed and blocking is not None and code_of(blocking) in PERSONS:
            code = code_of(blocking)  # it blocks every change, also one that was not tried yet
        if code or failed:
            return f"error:{code or 'failed'}"
        if dirty:
            return "dirty"
        if pending.uploading:
            return f"uploading:{pending.bytes - pending.left_bytes}/{pending.bytes}"
        if pending.files:
            return "queued"
        return "local-only" if is_local else "clean"

    def _details(self, pending: Pending) -> dict[str, Any]:
        return {
            **_counts(pending),
            "oldest_pending_seconds": round(pending.oldest_seconds, 3),
            "uploading": [self._upload_details(item) for item in pending.uploading],
            "waiting": [self._error_details(item) for item in pending.failing],
        }

    def _upload_details(self, item: FileVersion) -> dict[str, Any]:
        now = trio.current_time()
        oldest = min((each.since for each in item.upload.requests), default=now)
        return {
            "path": self._name_of(item),
            "bytes": item.size,
            "sent": item.moved_bytes,
            "under_way": item.bytes_under_way,
            "request_seconds": round(now - oldest, 3),
        }

    def _error_details(self, item: QueuedChange) -> dict[str, str]:
        error = item.error
        if isinstance(error, Unavailable):
            # An upload can take minutes until it learns that the keys are refused after an outage.
            error = self._client.refusal_of_writes or error
        text = "" if error is None else remedy(error, self._keys_from)
        number = item.record.generation if isinstance(item, FileVersion) else item.sequence
        text = text.replace("--restore ID", f"--restore {number}")
        code = "" if error is None else code_of(error)
        return {"path": self._name_of(item), "cause": str(error or ""), "code": code, "remedy": text}

    def _conflict_details(self, record: ConflictRecord) -> dict[str, str]:
        return {"path": self._tree.relative(record.key), "kept_as": self._tree.relative(record.kept_as)}

    # ---- what is at a path

    async def items_at(self, path: str) -> list[QueuedChange]:
        """Return the queued changes at or below a path."""
        return [item async for items in self._batches_at(path) for item in items]

    async def _batches_at(self, path: str) -> AsyncIterator[list[QueuedChange]]:
        """Yield the changes at or below a path in batches, with a checkpoint after each."""
        items = self._queue.unordered()
        key = self._tree.key_of_path(path)
        below = key + "/"
        # A version in flight keeps its key and is renamed in the bucket after that: count it where it will be.
        arriving: set[Node] = set()
        for start in range(0, len(items), _BATCH_CHANGES):
            batch = items[start : start + _BATCH_CHANGES]
            if path:
                batch = [item for item in batch if _is_at(item, key, below)]
                arriving |= {item.node for item in batch if item.node is not None and is_rename(item)}
            yield batch
            await trio.lowlevel.checkpoint()
        for start in range(0, len(items) if arriving else 0, _BATCH_CHANGES):
            batch = items[start : start + _BATCH_CHANGES]
            yield [item for item in batch if item.node in arriving and not _is_at(item, key, below)]
            await trio.lowlevel.checkpoint()

    async def missing_at(self, path: str) -> list[dict[str, Any]]:
        """Return `path` and `bytes` of changes at or below a path that the bucket lacks: NAMED at most, largest first.

        bytes: None for a change of names. Deferred removals are left out.
        """
        items = [item for item in await self.items_at(path) if not self._publisher.is_deferred(item)]
        sizes = [(item, item.size if isinstance(item, FileVersion) else None) for item in items]
        sizes.sort(key=lambda pair: -1 if pair[1] is None else pair[1], reverse=True)
        return [{"path": self._name_of(item), "bytes": size} for item, size in sizes[:NAMED]]

    def writers_at(self, path: str) -> list[FileHandle]:
        """Return the handles for writing of the files at or below a path."""
        key = self._tree.key_of_path(path)
        linked = (
            each
            for each in self._file_io.writing
            if self._tree.is_linked(each.node) and not self._local_only.covers(each.node)
        )
        return [each for each in linked if _key_is_at(self._tree.key(each.node), key)]

    def written_at(self, path: str) -> list[Node]:
        """Return the files at or below a path that are open for writing."""
        return list(dict.fromkeys(each.node for each in self.writers_at(path)))

    def _dirty(self, path: str) -> list[FileVersion]:
        """Return the content at or below a path that was written and not closed since."""
        contents = (node.version for node in self.written_at(path))
        return [each for each in contents if each is not None and each.state in _BEING_WRITTEN]

    def _local_at(self, key: str) -> list[FileVersion]:
        """Return the content at or below a key that is never published, also while it is being written."""
        nodes = {each.node for each in self._file_io.writing}
        written = (node.version for node in nodes if self._local_only.covers(node))
        found = {*self._local_only, *(each for each in written if each is not None)}
        return [each for each in found if _key_is_at(each.record.key, key)]

    def rejected_at(self, key: str) -> list[QueuedChange]:
        """Return the rejected changes at or below a key."""
        return [
            item
            for item in self._publisher.rejections.rejected
            if any(_key_is_at(changed, key) for changed in item.changed_keys())
        ]

    def conflicts_at(self, key: str) -> list[ConflictRecord]:
        """Return the conflicts at or below a key that no person has resolved."""
        return [record for record in self._conflict_log.open() if _key_is_at(record.key, key)]

    def path_of(self, item: QueuedChange) -> str:
        """Return the path that a change will have once it is published."""
        return self._tree.relative(item.changed_keys()[-1])

    def _name_of(self, item: QueuedChange) -> str:
        """Return the path that a change's file has now: in the bucket a queued rename may still bring it there."""
        node = item.node
        if isinstance(item, FileVersion) and node is not None and self._tree.is_linked(node):
            return self._tree.path(node)
        return self.path_of(item)


def _counts(pending: Pending) -> dict[str, Any]:
    return {
        "pending_files": pending.files,
        "pending_contents": pending.contents,
        "pending_bytes": pending.bytes,
        "deferred_files": pending.deferred,
        "deferred_seconds": round(pending.deferred_seconds, 1),
    }


def _is_at(item: QueuedChange, key: str, below: str) -> bool:
    """Return whether a change concerns a key, or one below it. key: without a slash at its end; below: with it."""
    for changed in item.changed_keys():  # noqa: SIM110  # a loop: any() is three times slower, and queues are long
        if changed == key or changed.startswith(below):
            return True
    return False


def _key_is_at(changed: str, key: str) -> bool:
    return not key or changed.rstrip("/") == key.rstrip("/") or changed.startswith(key.rstrip("/") + "/")
