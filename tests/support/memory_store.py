"""A bucket in memory, with the contract and the strictest rules of the real one: for tests without a network.

Not a server: no latency, no HTTP. `faulty_store.py` adds scripted failures to any store.
"""

import hashlib
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from fusecache.model.errors import (
    ObjectChanged,
    ObjectMissing,
    PartsRefused,
    Refused,
    RemoteError,
    Unavailable,
    UploadLost,
)
from fusecache.model.objects import KIB, MIB, RAW, STANDARD, Extent, ObjectId, ObjectInfo, UnfinishedUpload
from fusecache.remote.http.put import SliceBody
from fusecache.remote.protocol.headers import encode_metadata, multipart_etag
from fusecache.remote.statistics import RequestCounter, StoreStatistics
from fusecache.remote.store import (
    Condition,
    FileSlice,
    Interruption,
    ListPage,
    ObjectContent,
    Store,
    UploadPage,
)

PIECE_BYTES = 256 * KIB
METADATA_BYTES = 8192
KEY_BYTES = 1024


@dataclass(frozen=True, slots=True)
class _Object:
    data: bytes
    info: ObjectInfo


@dataclass(slots=True)
class _Upload:
    key: str
    metadata: dict[str, str]
    begun: float
    parts: dict[int, bytes] = field(default_factory=dict)


class MemoryStore(Store):
    """A `Store` in a dict. Safe for many threads.

    part_minimum_bytes: the smallest part that is not the last. now: seconds since 1970.
    """

    def __init__(self, *, part_minimum_bytes: int = 5 * MIB, now: Callable[[], float] = time.time) -> None:
        self._part_minimum_bytes = part_minimum_bytes
        self._now = now
        self._lock = threading.Lock()
        self._objects: dict[str, _Object] = {}
        self._uploads: dict[str, _Upload] = {}
        self._counter = RequestCounter()

    # ---- for tests: what the bucket holds, and another client's hand

    def statistics(self) -> StoreStatistics:
        """Return how many requests were made."""
        return self._counter.statistics()

    def contents(self) -> dict[str, bytes]:
        """Return every object's bytes by key."""
        with self._lock:
            return {key: item.data for key, item in sorted(self._objects.items())}

    def uploads(self) -> tuple[str, ...]:
        """Return the keys of the multipart uploads that were neither completed nor aborted."""
        with self._lock:
            return tuple(sorted(upload.key for upload in self._uploads.values()))

    def open_uploads(self) -> dict[str, str]:
        """Return the key of each multipart upload that was neither completed nor aborted, by its UploadId."""
        with self._lock:
            return {upload_id: upload.key for upload_id, upload in self._uploads.items()}

    def put_bytes(
        self, key: str, data: bytes, *, metadata: Mapping[str, str] | None = None, etag: str = ""
    ) -> str:
        """Store an object as another client would: not counted, no condition; return its ETag.

        etag: as an upload in parts has it, instead of the MD5.
        """
        with self._lock:
            etag = etag or hashlib.md5(data, usedforsecurity=False).hexdigest()
            return self._store(key, data, etag, metadata or {})

    def remove(self, key: str) -> None:
        """Delete an object as another client would: not counted."""
        with self._lock:
            self._objects.pop(key, None)

    def duplicate(self) -> "MemoryStore":
        """Return another bucket with the same objects and uploads: what happens there does not happen here."""
        other = MemoryStore(part_minimum_bytes=self._part_minimum_bytes, now=self._now)
        with self._lock:
            other._objects = dict(self._objects)
            other._uploads = {
                key: replace(upload, parts=dict(upload.parts)) for key, upload in self._uploads.items()
            }
        return other

    def lose_uploads(self) -> None:
        """Forget every multipart upload, as a bucket does after a week."""
        with self._lock:
            self._uploads.clear()

    # ---- the contract

    def list_page(
        self,
        prefix: str,
        *,
        delimiter: str = "",
        token: str | None = None,
        start_after: str = "",
        limit: int = 1000,
    ) -> ListPage:
        """Return one page of the objects whose keys start with `prefix`."""
        with self._request("lists"):
            after = token if token is not None else start_after
            objects: list[ObjectInfo] = []
            prefixes: list[str] = []
            last = ""
            for key in sorted(self._objects, key=lambda name: name.encode()):
                if not key.startswith(prefix):
                    continue
                group = _group(key, prefix, delimiter)
                # UTF-8 order is the order of code points, so strings compare as the bucket's keys do.
                if (group or key) <= after or (group is not None and group == last):
                    continue
                if len(objects) + len(prefixes) == min(limit, 1000):
                    return ListPage(tuple(objects), tuple(prefixes), last)
                last = group or key
                if group is not None:
                    prefixes.append(group)
                else:
                    objects.append(replace(self._objects[key].info, metadata=None))
            return ListPage(tuple(objects), tuple(prefixes), None)

    def head(self, key: str) -> ObjectInfo:
        """Return an object's facts with metadata."""
        with self._request("heads"):
            return self._find(key).info

    def content(self, key: str) -> ObjectContent:
        """Return size and checksums of an object."""
        with self._request("heads"):
            found = self._find(key)
            digest = hashlib.sha256(found.data).hexdigest()
            info = found.info
            return ObjectContent(info.etag, info.size, info.modified, {"sha256": digest})

    def get_into(
        self,
        object_id: ObjectId,
        extent: Extent,
        buffer: memoryview,
        progress: Callable[[int], None],
        interruption: Interruption | None = None,
    ) -> None:
        """Fill `buffer[:extent.size]`, in pieces."""
        if buffer.nbytes < extent.size:
            raise ValueError(f"a buffer of {buffer.nbytes} bytes cannot take {extent.size}")
        with self._request("gets"):
            found = self._find(object_id.key)
            if found.info.etag != object_id.etag or extent.stop > found.info.size:
                raise ObjectChanged(f"{object_id.key} is now version {found.info.etag}, not {object_id.etag}")
        for start in range(0, extent.size, PIECE_BYTES):
            if interruption is not None and interruption.is_asked:
                raise Unavailable(f"{object_id.key}: ended by its reader after {start} bytes")
            stop = min(start + PIECE_BYTES, extent.size)
            buffer[start:stop] = found.data[extent.start + start : extent.start + stop]
            self._counter.add("bytes_read", stop - start)
            progress(stop)

    def put(
        self, key: str, body: FileSlice, *, metadata: Mapping[str, str], condition: Condition | None = None
    ) -> str:
        """Store a whole object; return its ETag."""
        data = _read(body)
        with self._request("puts"):
            self._check(key, condition)
            self._counter.add("bytes_written", body.size)
            self._counter.add("bytes_sent", body.size)
            return self._store(key, data, hashlib.md5(data, usedforsecurity=False).hexdigest(), metadata)

    def create_multipart(self, key: str, *, metadata: Mapping[str, str]) -> str:
        """Begin a multipart upload; return its UploadId."""
        with self._request("creates"):
            _check_names(key, metadata)
            upload_id = uuid.uuid4().hex
            self._uploads[upload_id] = _Upload(key, dict(metadata), self._now())
            return upload_id

    def upload_part(self, key: str, upload_id: str, number: int, body: FileSlice) -> str:
        """Store part `number` (from 1); return its ETag."""
        data = _read(body)
        with self._request("parts"):
            if not 1 <= number <= 10_000:
                raise Refused(f"part {number} of {key} is not within 1..10 000")
            self._find_upload(key, upload_id).parts[number] = data
            self._counter.add("bytes_written", body.size)
            self._counter.add("bytes_sent", body.size)
            return hashlib.md5(data, usedforsecurity=False).hexdigest()

    def complete_multipart(
        self, key: str, upload_id: str, part_etags: Sequence[str], *, condition: Condition | None = None
    ) -> str:
        """Publish parts 1..n; a failed condition throws the parts away, as R2 does."""
        with self._request("completes"):
            upload = self._find_upload(key, upload_id)
            for number, etag in enumerate(part_etags, 1):
                digest = hashlib.md5(upload.parts.get(number, b""), usedforsecurity=False)
                if number not in upload.parts or digest.hexdigest() != etag:
                    raise PartsRefused(f"InvalidPart: part {number} of {key} is not {etag}")
            self._check_part_sizes(
                key, [len(upload.parts[number]) for number in range(1, len(part_etags) + 1)]
            )
            del self._uploads[upload_id]
            self._check(key, condition)
            data = b"".join(upload.parts[number] for number in range(1, len(part_etags) + 1))
            return self._store(key, data, multipart_etag(part_etags), upload.metadata)

    def abort_multipart(self, key: str, upload_id: str) -> None:
        """Drop an upload and its parts. An unknown upload is success."""
        with self._request("aborts"):
            self._uploads.pop(upload_id, None)

    def list_uploads(self, prefix: str, *, token: str | None = None) -> UploadPage:
        """Return all unfinished uploads whose keys start with `prefix`, in one page."""
        with self._request("lists"):
            found = [
                UnfinishedUpload(upload.key, upload_id, upload.begun)
                for upload_id, upload in self._uploads.items()
                if upload.key.startswith(prefix)
            ]
        return UploadPage(tuple(sorted(found, key=lambda each: (each.key, each.upload_id))), None)

    def copy(
        self,
        source: ObjectId,
        key: str,
        *,
        condition: Condition | None = None,
        metadata: Mapping[str, str] | None = None,
        size: int | None = None,
    ) -> str:
        """Copy inside the bucket if the source is still that version; return the new ETag."""
        with self._request("copies"):
            found = self._find(source.key)
            if found.info.etag != source.etag:
                raise ObjectChanged(f"{source.key} is now version {found.info.etag}, not {source.etag}")
            self._check(key, condition)
            kept = found.info.metadata or {}
            return self._store(key, found.data, found.info.etag, kept if metadata is None else metadata)

    def delete(self, key: str) -> None:
        """Delete an object. A missing one is success."""
        with self._request("deletes"):
            self._objects.pop(key, None)

    def probe_write(self, prefix: str) -> None:
        """Show that writing is allowed; here it always is."""
        self.abort_multipart(prefix, self.create_multipart(f"{prefix}.fusecache-probe", metadata={}))

    # ---- private: called with the lock held

    @contextmanager
    def _request(self, name: str) -> Iterator[None]:
        self._counter.add(name)
        try:
            with self._lock:
                yield
        except RemoteError:
            self._counter.add("errors")
            raise

    def _find(self, key: str) -> _Object:
        try:
            return self._objects[key]
        except KeyError:
            raise ObjectMissing(f"there is no object {key}") from None

    def _find_upload(self, key: str, upload_id: str) -> _Upload:
        upload = self._uploads.get(upload_id)
        if upload is None or upload.key != key:
            raise UploadLost(f"NoSuchUpload: there is no upload {upload_id} of {key}")
        return upload

    def _check(self, key: str, condition: Condition | None) -> None:
        if condition is None:
            return
        found = self._objects.get(key)
        if (found.info.etag if found else None) != condition.etag:
            raise ObjectChanged(
                f"{key} is now {found.info.etag if found else 'missing'}, not {condition.etag}"
            )

    def _check_part_sizes(self, key: str, sizes: list[int]) -> None:
        if not sizes:
            raise Refused(f"an upload of {key} needs at least one part")
        if any(size < self._part_minimum_bytes for size in sizes[:-1]):
            raise PartsRefused(f"EntityTooSmall: a part of {key} is below {self._part_minimum_bytes} bytes")
        if len(set(sizes[:-1])) > 1 or sizes[-1] > sizes[0]:
            raise PartsRefused(
                f"InvalidPart: all parts of {key} but the last must be equal, the last not larger"
            )

    def _store(self, key: str, data: bytes, etag: str, metadata: Mapping[str, str]) -> str:
        _check_names(key, metadata)
        shown = {each.removeprefix(RAW): value for each, value in metadata.items() if each[0] != STANDARD}
        kept = {(each if each[0] in (STANDARD, RAW) else RAW + each): v for each, v in metadata.items()}
        info = ObjectInfo(key, etag, len(data), self._now(), shown, kept)
        self._objects[key] = _Object(data, info)
        return etag


def _group(key: str, prefix: str, delimiter: str) -> str | None:
    """Return the common prefix that hides this key, or None if the key itself is listed."""
    if not delimiter:
        return None
    head, found, _ = key[len(prefix) :].partition(delimiter)
    return prefix + head + found if found else None


def _read(body: FileSlice) -> bytes:
    with SliceBody(body) as stream:
        return stream.whole()


def _check_names(key: str, metadata: Mapping[str, str]) -> None:
    if len(key.encode()) > KEY_BYTES:
        raise Refused(f"KeyTooLongError: {key[:80]}… is longer than {KEY_BYTES} bytes")
    size = sum(len(name) + len(value) for name, value in encode_metadata(metadata).items())
    if size > METADATA_BYTES:
        raise Refused(f"MetadataTooLarge: {size} of {METADATA_BYTES} bytes on {key}")
