"""Makes the objects of a bucket files of a folder: several pieces at a time, and again only what is missing.

An object is fetched into a part file, and gets its name when it is complete. So a file is never half there.

Invariants:
1. A file that was changed here, or that no pull wrote, is never replaced, unless the user asks for that.
2. All pieces of a file are of one version: every GET carries If-Match.
3. Nothing is removed from the folder.

Objects that are being fetched: their pieces come in any order, and an interrupted pull goes on with the rest.

A part file has the bytes of its object, then the id of the boot, then one byte for each piece: 1 if it is there. Pieces
are not synced one by one. After a power cut the boot id differs, and the pieces do not count.

Lists a bucket, and says which of its keys cannot be files of a folder.
"""

import errno
import hashlib
import logging
import os
import random
import shutil
import stat
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import trio

from fusecache.folder.fetch_order import FetchOrder
from fusecache.folder.local_folder import LocalFolder
from fusecache.folder.state import Row, Stamp
from fusecache.model.errors import (
    FolderError,
    FusecacheError,
    ObjectChanged,
    ObjectMissing,
    Unavailable,
    Untrusted,
)
from fusecache.model.format_text import count_text, size_text
from fusecache.model.names import CONTROL_NAME
from fusecache.model.objects import MIB, Extent, ObjectId, ObjectInfo, symlink_target
from fusecache.policy.backoff import backoff_seconds
from fusecache.policy.name_patterns import SymlinkRule, UnusableKeys, is_followed, matches_any
from fusecache.remote.store import ReadStore

log = logging.getLogger(__name__)
T = TypeVar("T")


class Patience:
    """Counts all requests of a command together: one that succeeds shows that the bucket answers. Thread-safe."""

    def __init__(self, seconds: float) -> None:
        """seconds: a bucket that has answered nothing for so long ends the command."""
        self._seconds = seconds
        self._last_success = time.monotonic()

    def call(self, request: Callable[[], T]) -> T:
        """Make a request, again and again while that may help. Raises its error."""
        attempt = 0
        while True:
            try:
                answer = request()
            except Untrusted:
                raise
            except Unavailable as exc:
                attempt += 1
                if time.monotonic() - self._last_success > self._seconds:
                    raise
                log.info("retrying attempt=%d error=%s", attempt, exc)
                time.sleep(exc.retry_after_seconds or backoff_seconds(attempt, random.random()))
            else:
                self._last_success = time.monotonic()
                return answer


# Large enough for a high rate on a far connection; small enough that an interruption costs little.
PIECE_BYTES = 8 * MIB
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_BOOT_ID_BYTES = 36


class PartFile:
    """One object's part file. Blocking.

    missing: the numbers of pieces that no request was made for. in_flight: requests for others; the caller counts.
    """

    def __init__(self, folder: Path, object_id: ObjectId, size: int) -> None:
        self.path = folder / part_name(object_id)
        self._size = size
        self._map_at = size + _BOOT_ID_BYTES
        count = -(-size // PIECE_BYTES)
        boot_id = _BOOT_ID.read_bytes()[:_BOOT_ID_BYTES]
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file = os.open(self.path, flags, 0o666)
        there = b""
        try:
            if os.fstat(self._file).st_size == self._map_at + count:
                found = os.pread(self._file, _BOOT_ID_BYTES + count, size)
                there = found[_BOOT_ID_BYTES:] if found[:_BOOT_ID_BYTES] == boot_id else b""
            if len(there) != count or not count:
                os.ftruncate(self._file, 0)
                os.ftruncate(self._file, self._map_at + count)
                os.pwrite(self._file, boot_id, size)
                there = bytes(count)
        except OSError:
            self.close()
            raise
        self.missing = deque(number for number, mark in enumerate(there) if not mark)
        self.in_flight = 0

    def extent(self, piece: int) -> Extent:
        """Return the bytes of a piece."""
        return Extent(piece * PIECE_BYTES, min((piece + 1) * PIECE_BYTES, self._size))

    def write(self, piece: int, data: memoryview) -> None:
        """Store a piece."""
        offset = piece * PIECE_BYTES
        while data:
            count = os.pwrite(self._file, data, offset)
            data, offset = data[count:], offset + count
        os.pwrite(self._file, b"\1", self._map_at + piece)

    def finish(self, mtime_ns: int) -> int:
        """Make it the object, on the disk, with a time; return the time as the file system keeps it. Then close it."""
        os.ftruncate(self._file, self._size)
        os.utime(self._file, ns=(mtime_ns, mtime_ns))
        os.fdatasync(self._file)
        found = os.fstat(self._file).st_mtime_ns
        self.close()
        return found

    def close(self) -> None:
        """Close it; what is there stays."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def part_name(object_id: ObjectId) -> str:
    """Return the name of an object's part file: another version of the object has another."""
    return hashlib.blake2b(f"{object_id.key}\0{object_id.etag}".encode(), digest_size=16).hexdigest()


def held_bytes(folder: Path, object_id: ObjectId) -> int:
    """Return the disk space that a part file takes already."""
    try:
        return (folder / part_name(object_id)).stat().st_blocks * 512
    except FileNotFoundError:
        return 0


def remove_stale(folder: Path, wanted: Iterable[ObjectId]) -> None:
    """Remove the part files of other objects."""
    names = set(map(part_name, wanted))
    for path in folder.iterdir():
        if path.name not in names:
            path.unlink()


@dataclass(slots=True)
class BucketListing:
    """The objects below a prefix, by name: the key without the prefix.

    directories: names that end in "/", of directory markers. unusable: why a key has no file.
    """

    objects: dict[str, ObjectInfo] = field(default_factory=dict)
    directories: list[str] = field(default_factory=list)
    unusable: dict[str, str] = field(default_factory=dict)


def list_bucket(store: ReadStore, prefix: str, patience: Patience) -> BucketListing:
    """List everything below a prefix. Raises RemoteError."""
    found, checker, token = BucketListing(), UnusableKeys(), None
    while True:
        page = patience.call(lambda token=token: store.list_page(prefix, token=token))  # type: ignore[misc]
        for info in page.objects:
            name = info.key[len(prefix) :]
            found.unusable.update(checker.see(name))
            if name.endswith("/"):
                found.directories.append(name)
            elif name:
                found.objects[name] = info
        token = page.next_token
        if token is None:
            break
    for name in found.unusable:
        found.objects.pop(name, None)
    found.directories = [name for name in found.directories if name not in found.unusable]
    return found


# Requests in flight. Each holds a buffer of PIECE_BYTES.
WORKERS = 16
# Stays free on the disk.
_RESERVE_BYTES = 64 * MIB
# A store keeps times in milliseconds at best.
_SAME_TIME_NS = 1_000_000


@dataclass(eq=False, slots=True)
class PulledObject:
    """One object on its way. before: what was under its name when the pull began (None: nothing)."""

    name: str
    info: ObjectInfo
    before: Stamp | None
    part: PartFile | None = None
    done: trio.Event = field(default_factory=trio.Event)


@dataclass(slots=True)
class PullReport:
    """What a pull found and did. skipped, failed: reasons by name. there_*: what needed no request for bytes."""

    files: int = 0
    bytes: int = 0
    there_files: int = 0
    there_bytes: int = 0
    fetched_files: int = 0
    fetched_bytes: int = 0
    changed_here: int = 0
    skipped: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def line(self) -> str:
        """Return it as a line for people."""
        fetched = f"{count_text(self.fetched_files, 'file')}, {size_text(self.fetched_bytes)} fetched"
        there = f"{count_text(self.there_files, 'file')}, {size_text(self.there_bytes)} there already"
        changed = f"; {count_text(self.changed_here, 'file')} changed here since" if self.changed_here else ""
        return f"{fetched}; {there}{changed}"


class Pull:
    """One pull into one folder."""

    def __init__(
        self,
        folder: LocalFolder,
        store: ReadStore,
        listing: BucketListing,
        patience: Patience,
        *,
        order_last: tuple[str, ...] = (),
        is_forced: bool = False,
    ) -> None:
        """Compare the folder with the listing (blocking). order_last: names that are fetched last without hints.

        is_forced: replace files that were changed here. Raises FolderError, also if the disk is too small.
        """
        self._folder = folder
        self._store = store
        self._patience = patience
        self._parts = folder.own / "parts"
        self._is_forced = is_forced
        self._listing = listing
        self.report = PullReport(skipped=dict(listing.unusable))
        self.objects: dict[str, PulledObject] = {}
        self._parts.mkdir(mode=0o700, exist_ok=True)
        for name, info in listing.objects.items():
            self._compare(name, info)
        remove_stale(self._parts, (each.info.object_id for each in self.objects.values()))
        self._check_space()
        for name in (*listing.directories, *self.objects):
            self._make_parent(name)
        late = [name for name in self.objects if matches_any(name.rpartition("/")[2], order_last)]
        late.sort(key=lambda name: -name.count("/"))
        self._awaited: set[str] = set()
        self._asked = trio.Event()
        self.order = FetchOrder([name for name in self.objects if name not in set(late)], late)
        self._active: deque[PulledObject] = deque()

    # ---- before the first request

    def _compare(self, name: str, info: ObjectInfo) -> None:
        """Decide whether an object is fetched."""
        report, row = self.report, self._folder.state.rows.get(name)
        report.files += 1
        report.bytes += info.size
        found = self._folder.stat(name)
        stamp = None if found is None else Stamp.of(found)
        if found is not None and stat.S_ISDIR(found.st_mode):
            report.skipped[name] = "a folder here has this name: rename or remove it"
        elif stamp is None or (row is not None and row.stamp == stamp and row.etag != info.etag):
            self.objects[name] = PulledObject(name, info, stamp)
        elif row is not None and row.stamp == stamp:
            self._count_there(info)
        elif self._is_same(name, found, info):
            self._folder.state.have(name, Row(stamp, info.etag))
            self._count_there(info)
        elif self._is_forced:
            self.objects[name] = PulledObject(name, info, stamp)
        elif row is not None and row.etag == info.etag:
            report.changed_here += 1
        else:
            why = (
                "it was changed here, and in the bucket too" if row is not None else "no pull wrote this file"
            )
            report.skipped[name] = f"{why}: rename it, or replace it with --force"

    def _count_there(self, info: ObjectInfo) -> None:
        self.report.there_files += 1
        self.report.there_bytes += info.size

    def _is_same(self, name: str, found: os.stat_result | None, info: ObjectInfo) -> bool:
        """Return whether a file that has no row, or another one, has the object's content."""
        if found is None or not stat.S_ISREG(found.st_mode) or found.st_size != info.size:
            return False
        if abs(found.st_mtime_ns - _time_ns(info)) < _SAME_TIME_NS:
            return True  # as a pull leaves it
        if len(info.etag) != 32:
            return False
        with open(self._folder.open(name), "rb") as file:
            return (
                hashlib.file_digest(file, partial(hashlib.md5, usedforsecurity=False)).hexdigest()
                == info.etag
            )

    def _check_space(self) -> None:
        """Raise FolderError unless the disk has space for what is fetched."""
        needed = sum(
            max(0, each.info.size - held_bytes(self._parts, each.info.object_id))
            for each in self.objects.values()
        )
        free = shutil.disk_usage(self._folder.root).free
        if needed and needed + _RESERVE_BYTES > free:
            raise FolderError(
                f"{self._folder.root}: {size_text(needed)} are to be fetched, and the disk has {size_text(free)} free; "
                f"free {size_text(needed + _RESERVE_BYTES - free)} there, choose a folder on another disk, or pull a "
                "part of the bucket: s3://BUCKET/PREFIX"
            )

    def _make_parent(self, name: str) -> None:
        try:
            self._folder.make_parent(name)
        except FolderError as exc:
            self.report.skipped[name] = str(exc)
            self.objects.pop(name, None)

    # ---- fetching

    @property
    def left_bytes(self) -> int:
        """The bytes of the objects that are not there yet."""
        return sum(each.info.size for each in self.objects.values() if not each.done.is_set())

    async def run(self, show: Callable[[PullReport], None]) -> None:
        """Fetch everything, commit markers when what they stand for is there. show: called after each step."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._fetch_awaited, show, name="pull-awaited")
            await self._fetch_in_order(show)
            nursery.cancel_scope.cancel()

    async def _fetch_awaited(self, show: Callable[[PullReport], None]) -> None:
        """Fetch what readers wait for at once, even if all workers have large pieces in flight."""
        while True:
            await self._asked.wait()
            self._asked = trio.Event()
            await self._work(show, only_awaited=True)

    async def _fetch_in_order(self, show: Callable[[PullReport], None]) -> None:
        await self._fetch_all(show)
        failed = list(self.report.failed)
        for name in self.order.release_late():
            below = name[: name.rfind("/") + 1]
            missing = next((each for each in failed if each.startswith(below)), None)
            if missing is not None:
                self.order.drop(name)
                self._fail(self.objects[name], None, FolderError(f"it may stand for {missing}, which failed"))
        await self._fetch_all(show)

    async def _fetch_all(self, show: Callable[[PullReport], None]) -> None:
        async with trio.open_nursery() as nursery:
            for number in range(WORKERS):
                nursery.start_soon(self._work, show, name=f"pull-{number}")

    async def wait_for(self, name: str) -> str:
        """Fetch an object next, and return when it is there. Return why it will not be; "" if it is."""
        if name in self.report.skipped:
            return self.report.skipped[name]
        if name not in self._listing.objects:
            return "the bucket had no such object when the pull began"
        pulled = self.objects.get(name)
        if pulled is not None and not pulled.done.is_set():
            self.order.ask(name)
            if pulled in self._active:
                self._active.remove(pulled)
                self._active.appendleft(pulled)
            self._awaited.add(name)
            self._asked.set()
            await pulled.done.wait()
        return self.report.failed.get(name) or self.report.skipped.get(name, "")

    async def _work(self, show: Callable[[PullReport], None], *, only_awaited: bool = False) -> None:
        buffer = memoryview(bytearray(PIECE_BYTES))
        limiter = trio.CapacityLimiter(1)  # this worker's own: trio's default is shared with other work
        # Ctrl-C waits for no request. Like a kill, it may come between two steps of a thread.
        run = partial(trio.to_thread.run_sync, limiter=limiter, abandon_on_cancel=True)
        while (pulled := self._next(only_awaited=only_awaited)) is not None:
            part = pulled.part
            assert part is not None
            try:
                if part.missing:
                    piece = part.missing.popleft()
                    part.in_flight += 1
                    try:
                        await run(self._fetch, pulled, part, piece, buffer)
                    finally:
                        part.in_flight -= 1
                    self.report.fetched_bytes += part.extent(piece).size
                if (
                    not part.missing
                    and not part.in_flight
                    and pulled.part is part
                    and not pulled.done.is_set()
                ):
                    self._stop(pulled)
                    await run(self._finish, pulled, part)
                    self.report.fetched_files += 1
                    pulled.done.set()
            except (ObjectChanged, ObjectMissing) as exc:
                await self._start_again(pulled, part, exc)
            except (FusecacheError, OSError) as exc:
                self._fail(pulled, part, exc)
            if not part.in_flight and (pulled.part is not part or pulled.done.is_set()):
                part.close()  # given up; else it is closed already
            show(self.report)

    def _next(self, *, only_awaited: bool) -> PulledObject | None:
        """Return an object with a piece to fetch, or without any piece. The ones begun first come first."""
        if not self.order.is_asked:
            for pulled in self._active:
                is_wanted = pulled.name in self._awaited or not only_awaited
                if is_wanted and pulled.part is not None and pulled.part.missing:
                    return pulled
        while self.order.is_asked or not only_awaited:
            name = self.order.next()
            if name is None:
                return None
            pulled = self.objects[name]
            try:
                pulled.part = PartFile(self._parts, pulled.info.object_id, pulled.info.size)
            except OSError as exc:
                self._fail(pulled, None, exc)
                continue
            self._active.append(pulled)
            return pulled
        return None

    def _fetch(self, pulled: PulledObject, part: PartFile, piece: int, buffer: memoryview) -> None:
        """Fetch one piece (blocking). Raises RemoteError, OSError."""
        extent = part.extent(piece)
        object_id = pulled.info.object_id
        self._patience.call(lambda: self._store.get_into(object_id, extent, buffer, lambda _: None))
        part.write(piece, buffer[: extent.size])

    def _finish(self, pulled: PulledObject, part: PartFile) -> None:
        """Give a complete object its name (blocking). Raises FolderError, OSError, RemoteError."""
        name, info, target = pulled.name, pulled.info, ""
        if not info.size:  # a symlink is an object without bytes, whose metadata a LIST does not show
            target = symlink_target(self._patience.call(lambda: self._store.head(info.key)).metadata)
        stamp = Stamp(info.size, part.finish(_time_ns(info)))
        found = self._folder.stat(name)
        if (None if found is None else Stamp.of(found)) != pulled.before:
            raise FolderError("it was changed here during the pull: rename it, or replace it with --force")
        if target:
            is_own = CONTROL_NAME in target.lower().split("/")
            if is_own or not is_followed(SymlinkRule.INSIDE, target, depth=name.count("/")):
                place = f"into {CONTROL_NAME}" if is_own else "out of the folder"
                raise FolderError(f"it is a symlink to {target}, which may lead {place}")
            part.path.unlink()
            os.symlink(target, part.path)
            stamp = Stamp.of(os.lstat(part.path))
        with self._folder.directory_of(name) as (held, last):
            self._folder.state.have(name, Row(stamp, info.etag))
            os.replace(part.path, last, dst_dir_fd=held)

    async def _start_again(self, pulled: PulledObject, part: PartFile, cause: FusecacheError) -> None:
        """Another client changed the object during its fetch: go on with the new version."""
        if pulled.part is not part:
            return  # another worker has done so
        self._stop(pulled)
        pulled.part = None
        part.missing.clear()
        head = partial(self._patience.call, partial(self._store.head, pulled.info.key))
        try:
            pulled.info = await trio.to_thread.run_sync(head, abandon_on_cancel=True)
            part.path.unlink(missing_ok=True)
            pulled.part = PartFile(self._parts, pulled.info.object_id, pulled.info.size)
        except (FusecacheError, OSError) as exc:
            pulled.part = part
            is_gone = isinstance(exc, ObjectMissing)
            gone = FolderError("another client removed it during the pull")
            return self._fail(pulled, part, gone if is_gone else exc)
        self._active.appendleft(pulled)
        return None

    def _stop(self, pulled: PulledObject) -> None:
        if pulled in self._active:
            self._active.remove(pulled)

    def _fail(self, pulled: PulledObject, part: PartFile | None, exc: Exception) -> None:
        """Leave out an object, and say why."""
        if pulled.part is not part or pulled.done.is_set():
            return
        self._stop(pulled)
        if part is not None:
            part.missing.clear()
        text = str(exc)
        if isinstance(exc, OSError):
            text = exc.strerror or text
            if exc.errno == errno.EXDEV:
                text = f"its directory is on another disk than {self._folder.own}: pull into that directory"
            elif exc.errno in (errno.ENOSPC, errno.EDQUOT):
                text = f"the disk of {self._folder.root} is full: free space there, and pull again"
        skipped = isinstance(exc, FolderError)
        (self.report.skipped if skipped else self.report.failed)[pulled.name] = text
        pulled.done.set()


def _time_ns(info: ObjectInfo) -> int:
    return round(info.modified * 1000) * 1_000_000
