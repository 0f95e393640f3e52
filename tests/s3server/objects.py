"""One bucket: objects on disk, their index in memory. Not the requests, not uploads in progress.

Directory: `bodies/<n>` holds bytes, `objects/<n>.json` one object's facts. Invariants:
1. An object exists exactly while its sidecar does; the sidecar is renamed into place, and the newest wins.
2. Keys are kept sorted as Python strings: by code point, which is the order of their UTF-8 bytes.
3. A body without a sidecar is rubbish of a killed process, removed at the next start.
"""

import bisect
import itertools
import json
import os
import threading
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.s3server.bodies import (
    FileSegment,
    OpenBody,
    Segment,
    Segments,
    segments_from_json,
    segments_to_json,
)
from tests.s3server.errors import S3Error
from tests.s3server.rules import Rules

CONDITION_FAILED = "At least one of the preconditions you specified did not hold."


class Clock:
    """The bucket's clock: ours plus what tests added."""

    def __init__(self) -> None:
        self._ahead_seconds = 0.0

    def now(self) -> float:
        """Return seconds since 1970."""
        return time.time() + self._ahead_seconds

    def advance(self, seconds: float) -> None:
        """Move the clock."""
        self._ahead_seconds += seconds

    def reset(self) -> None:
        """Show our own time again."""
        self._ahead_seconds = 0.0


@dataclass(frozen=True, slots=True)
class Condition:
    """If-Match and If-None-Match as sent; None where not sent."""

    match: str | None = None
    none_match: str | None = None

    def holds(self, etag: str | None) -> bool:
        """Return whether both hold for an object with that ETag; None: there is no object."""
        if self.match is not None and not _names(self.match, etag):
            return False
        return self.none_match is None or not _names(self.none_match, etag)


def _names(header: str, etag: str | None) -> bool:
    if etag is None:
        return False
    tags = [tag.strip().removeprefix("W/").strip('"') for tag in header.split(",")]
    return "*" in tags or etag in tags


@dataclass(frozen=True, slots=True)
class ObjectRecord:
    """One object. `headers` are the stored ones, such as content-type; `number` names the sidecar, 0: it has none."""

    key: str
    size: int
    etag: str
    segments: Segments
    metadata: dict[str, str] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    last_modified: float = 0.0
    number: int = 0


@dataclass(frozen=True, slots=True)
class Listing:
    """One page: objects and common prefixes; `next_after` is where the next begins, None at the end."""

    objects: list[ObjectRecord]
    prefixes: list[str]
    next_after: str | None


class Bucket:
    """The objects of one bucket. For many threads; every read sees the newest write."""

    def __init__(self, name: str, directory: Path, clock: Clock, rules: Callable[[], Rules]) -> None:
        self.name = name
        self.clock = clock
        self.rules = rules
        self.lock = threading.RLock()
        self.created = clock.now()
        self.directory = directory
        self._bodies = directory / "bodies"
        self._sidecars = directory / "objects"
        for path in (self._bodies, self._sidecars):
            path.mkdir(parents=True, exist_ok=True)
        self._by_key: dict[str, ObjectRecord] = {}
        self._keys: list[str] = []
        self._last_write: dict[str, float] = {}
        self._numbers = itertools.count(self._load() + 1)

    def remove_rubbish(self, owned: set[str]) -> None:
        """Unlink bodies that neither an object nor `owned` names."""
        with self.lock:
            owned = owned | self.owned_bodies()
            for path in self._bodies.iterdir():
                if path.name not in owned:
                    path.unlink()

    def owned_bodies(self) -> set[str]:
        """Return the names of the files that objects consist of."""
        return {
            part.name
            for record in self._by_key.values()
            for part in record.segments
            if isinstance(part, FileSegment)
        }

    def next_number(self) -> int:
        """Return a number that names nothing yet."""
        return next(self._numbers)

    def new_body(self) -> tuple[str, Path]:
        """Return name and path of a body to be written."""
        name = str(self.next_number())
        return name, self._bodies / name

    def body_from_bytes(self, data: bytes) -> Segments:
        """Store bytes as a body."""
        if not data:
            return ()
        name, path = self.new_body()
        path.write_bytes(data)
        return (FileSegment(name, 0, len(data)),)

    def link_segments(self, segments: Segments, source: "Bucket") -> Segments:
        """Return segments with the same bytes as those of bucket `source`, belonging to nobody yet."""
        linked: list[Segment] = []
        with source.lock:
            for part in segments:
                if isinstance(part, FileSegment):
                    name, path = self.new_body()
                    os.link(source.body_path(part.name), path)
                    linked.append(FileSegment(name, part.offset, part.size))
                else:
                    linked.append(part)
        return tuple(linked)

    def body_path(self, name: str) -> Path:
        """Return where a body lies."""
        return self._bodies / name

    def unlink_segments(self, segments: Segments) -> None:
        """Remove the files of segments that no sidecar names any more."""
        for name in {part.name for part in segments if isinstance(part, FileSegment)}:
            (self._bodies / name).unlink(missing_ok=True)

    def records(self) -> list[ObjectRecord]:
        """Return all objects in key order."""
        with self.lock:
            return [self._by_key[key] for key in self._keys]

    def find(self, key: str) -> ObjectRecord | None:
        """Return an object's record, or None."""
        with self.lock:
            return self._by_key.get(self._spelling(key))

    def _spelling(self, key: str) -> str:
        """Return the key as the bucket lists the object that it names; as it is if there is none."""
        if key in self._by_key or key.isascii() or not self.rules().normalise_keys:
            return key
        name = unicodedata.normalize("NFC", key)
        return next((each for each in self._keys if unicodedata.normalize("NFC", each) == name), key)

    def get(self, key: str) -> ObjectRecord:
        """Return an object's record. S3Error NoSuchKey."""
        record = self.find(key)
        if record is None:
            raise S3Error("NoSuchKey", "The specified key does not exist.")
        return record

    def open(self, key: str) -> tuple[ObjectRecord, OpenBody]:
        """Return an object and its bytes, opened together. S3Error NoSuchKey."""
        with self.lock:
            record = self.get(key)
            return record, self.open_segments(record.segments)

    def open_segments(self, segments: Segments) -> OpenBody:
        """Return the bytes of segments, opened."""
        return OpenBody(self._bodies, segments)

    def check_spacing(self, key: str) -> None:
        """Raise S3Error TooManyRequests if `key` was written less than the rules' interval ago."""
        interval = self.rules().write_interval_seconds
        if self.rules().spares_probes and ".fusecache-probe-" in key:
            interval = 0
        with self.lock:
            if interval > 0 and self.clock.now() - self._last_write.get(key, float("-inf")) < interval:
                raise S3Error("TooManyRequests", "Reduce your concurrent request rate for the same object.")

    def check_condition(self, key: str, condition: Condition) -> None:
        """Raise S3Error PreconditionFailed if the condition does not hold for the object at `key` now."""
        with self.lock:
            present = self.find(key)
            if not condition.holds(None if present is None else present.etag):
                raise S3Error("PreconditionFailed", CONDITION_FAILED)

    def publish(self, record: ObjectRecord, condition: Condition) -> ObjectRecord:
        """Make a client's object visible if spacing and condition allow; return it dated and numbered."""
        with self.lock:
            self.check_spacing(record.key)
            self.check_condition(record.key, condition)
            self._last_write[record.key] = self.clock.now()
            return self.replace(record)

    def replace(self, record: ObjectRecord) -> ObjectRecord:
        """Make an object visible, whatever was there; return it dated and numbered."""
        with self.lock:
            record = replace(record, last_modified=self.clock.now(), number=self.next_number())
            write_json(self._sidecar(record), _to_json(record))
            if (other := self._spelling(record.key)) != record.key:
                self.delete(other)
            old = self._by_key.get(record.key)
            if old is None:
                bisect.insort(self._keys, record.key)
            self._by_key[record.key] = record
            if old is not None:
                self._remove_files(old)
            return record

    def add_volatile(self, records: Iterable[ObjectRecord]) -> None:
        """Make many objects visible that no file of the directory speaks of: they are gone when the process ends."""
        with self.lock:
            now = self.clock.now()
            for record in records:
                old = self._by_key.get(record.key)
                self._by_key[record.key] = replace(record, last_modified=now, number=0)
                if old is not None:
                    self._remove_files(old)
            self._keys = sorted(self._by_key)

    def delete(self, key: str) -> bool:
        """Delete an object; return whether there was one."""
        with self.lock:
            key = self._spelling(key)
            record = self._by_key.pop(key, None)
            if record is None:
                return False
            del self._keys[bisect.bisect_left(self._keys, key)]
            self._remove_files(record)
            return True

    def clear(self) -> None:
        """Delete all objects and forget when keys were written."""
        with self.lock:
            for key in list(self._by_key):
                self.delete(key)
            self._last_write.clear()

    def list(self, *, prefix: str, delimiter: str, after: str, limit: int) -> Listing:
        """Return at most `limit` objects and common prefixes of keys under `prefix`, behind `after`.

        If `after` is itself a common prefix, nothing below it is returned.
        """
        objects: list[ObjectRecord] = []
        prefixes: list[str] = []
        last = after
        if limit == 0:
            return Listing(objects, prefixes, None)
        with self.lock:
            for key, common in self._walk(prefix, delimiter, after):
                if len(objects) + len(prefixes) == limit:
                    return Listing(objects, prefixes, last)
                if common:
                    prefixes.append(key)
                else:
                    objects.append(self._by_key[key])
                last = key
        return Listing(objects, prefixes, None)

    def _walk(self, prefix: str, delimiter: str, after: str) -> Iterator[tuple[str, bool]]:
        """Yield (key, False) and (common prefix, True) in order."""
        if after < prefix:
            at = bisect.bisect_left(self._keys, prefix)
        else:
            common = common_prefix(after, prefix, delimiter)
            at = self._past(after) if common == after else bisect.bisect_right(self._keys, after)
        while at < len(self._keys):
            key = self._keys[at]
            if not key.startswith(prefix):
                return
            common = common_prefix(key, prefix, delimiter)
            if common is None:
                yield key, False
                at += 1
            else:
                yield common, True
                at = self._past(common)

    def _past(self, common: str) -> int:
        """Return the index of the first key that sorts behind all that start with `common`."""
        return bisect.bisect_left(self._keys, common[:-1] + chr(ord(common[-1]) + 1))

    def _sidecar(self, record: ObjectRecord) -> Path:
        return self._sidecars / f"{record.number}.json"

    def _remove_files(self, record: ObjectRecord) -> None:
        if record.number:
            self._sidecar(record).unlink()
        self.unlink_segments(record.segments)

    def _load(self) -> int:
        """Read all sidecars; return the highest number in use."""
        highest = max((int(path.name) for path in self._bodies.iterdir()), default=0)
        for path in self._sidecars.iterdir():
            if path.suffix != ".json":  # never renamed into place
                path.unlink()
                continue
            record = _from_json(json.loads(path.read_text()))
            highest = max(highest, record.number)
            other = self._by_key.get(record.key)
            if other is None or other.number < record.number:
                self._by_key[record.key] = record
            older = other if other is None or other.number < record.number else record
            if older is not None:
                self._sidecar(older).unlink()
        self._keys = sorted(self._by_key)
        return highest


def common_prefix(key: str, prefix: str, delimiter: str) -> str | None:
    """Return the part of `key` up to the first delimiter behind `prefix`, or None if there is none."""
    if not delimiter or not key.startswith(prefix):
        return None
    at = key.find(delimiter, len(prefix))
    return None if at < 0 else key[: at + len(delimiter)]


def write_json(path: Path, value: object) -> None:
    """Write a file that is there whole or not at all."""
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps(value))
    temporary.replace(path)


@contextmanager
def discarding(bucket: Bucket, segments: Segments) -> Iterator[None]:
    """Remove `segments` if the block raises: nobody took them over."""
    try:
        yield
    except BaseException:
        bucket.unlink_segments(segments)
        raise


def _to_json(record: ObjectRecord) -> dict[str, object]:
    return {
        "key": record.key,
        "size": record.size,
        "etag": record.etag,
        "segments": segments_to_json(record.segments),
        "metadata": record.metadata,
        "headers": record.headers,
        "last_modified": record.last_modified,
        "number": record.number,
    }


def _from_json(row: dict[str, object]) -> ObjectRecord:
    fields = {**row, "segments": segments_from_json(row["segments"])}  # type: ignore[arg-type]  # our own file
    return ObjectRecord(**fields)  # type: ignore[arg-type]  # our own file
