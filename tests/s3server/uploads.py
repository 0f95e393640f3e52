"""Multipart uploads in progress: `uploads/<id>.json` beside the objects. Parts become segments of the object.

Invariants:
1. A part's file is named by its upload until Complete writes the object's sidecar; if both name it after a
   crash, the object wins and the upload is dropped.
2. An upload older than the rules' lifetime is gone at the next look.
"""

import hashlib
import itertools
import json
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from tests.s3server.bodies import FileSegment, Segments, segments_from_json, segments_to_json
from tests.s3server.errors import S3Error
from tests.s3server.objects import Bucket, Condition, ObjectRecord, discarding, write_json


@dataclass(frozen=True, slots=True)
class Part:
    """One part that arrived whole. etag: MD5 of its bytes."""

    number: int
    size: int
    etag: str
    segments: Segments
    last_modified: float


@dataclass(slots=True)
class Upload:
    """One upload in progress."""

    upload_id: str
    key: str
    created: float
    metadata: dict[str, str]
    headers: dict[str, str]
    condition: Condition
    parts: dict[int, Part] = field(default_factory=dict)


class Uploads:
    """The uploads of one bucket, under the bucket's lock."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._directory = bucket.directory / "uploads"
        self._directory.mkdir(exist_ok=True)
        self._by_id: dict[str, Upload] = {}
        self._load()

    def create(
        self, key: str, metadata: dict[str, str], headers: dict[str, str], condition: Condition
    ) -> Upload:
        """Begin an upload. S3Error PreconditionFailed if the condition does not hold now."""
        with self._bucket.lock:
            self._bucket.check_condition(key, condition)
            upload_id, now = secrets.token_urlsafe(48), self._bucket.clock.now()
            upload = Upload(upload_id, key, now, metadata, headers, condition)
            self._by_id[upload.upload_id] = upload
            self._save(upload)
            return upload

    def find(self, upload_id: str, key: str) -> Upload:
        """Return an upload. S3Error NoSuchUpload."""
        with self._bucket.lock:
            self._expire()
            upload = self._by_id.get(upload_id)
            if upload is None or upload.key != key:
                raise S3Error("NoSuchUpload", "The specified multipart upload does not exist.")
            return upload

    def all(self) -> list[Upload]:
        """Return the uploads in progress, by key and id."""
        with self._bucket.lock:
            self._expire()
            return sorted(self._by_id.values(), key=lambda upload: (upload.key, upload.upload_id))

    def begin_part(self, upload_id: str, key: str, number: int) -> None:
        """Say that a part's bytes begin to arrive. By R2's rule this ends an earlier part of that number."""
        with self._bucket.lock:
            upload = self.find(upload_id, key)
            if self._bucket.rules().reupload_destroys_part and number in upload.parts:
                self._drop_parts(upload, [number])
                self._save(upload)

    def put_part(self, upload_id: str, key: str, part: Part) -> None:
        """Add a part. S3Error NoSuchUpload; its files are then removed."""
        with self._bucket.lock, discarding(self._bucket, part.segments):
            upload = self.find(upload_id, key)
            if part.number in upload.parts:
                self._drop_parts(upload, [part.number])
            upload.parts[part.number] = part
            self._save(upload)

    def complete(
        self, upload_id: str, key: str, chosen: Sequence[tuple[int, str]], condition: Condition
    ) -> ObjectRecord:
        """Publish the object made of `chosen` (number, etag) pairs; return it.

        Raises S3Error: NoSuchUpload, InvalidPartOrder, InvalidPart, EntityTooSmall, EntityTooLarge,
        TooManyRequests (the upload stays), PreconditionFailed (by R2's rule the upload is gone).
        """
        with self._bucket.lock:
            upload = self.find(upload_id, key)
            parts = self._choose(upload, chosen)
            self._bucket.check_spacing(key)
            try:
                self._bucket.check_condition(key, upload.condition)
                self._bucket.check_condition(key, condition)
            except S3Error:
                if self._bucket.rules().failed_condition_discards_parts:
                    self._remove(upload, keep=set())
                raise
            md5s = b"".join(bytes.fromhex(part.etag) for part in parts)
            record = self._bucket.publish(
                ObjectRecord(
                    key=key,
                    size=sum(part.size for part in parts),
                    etag=f"{hashlib.md5(md5s, usedforsecurity=False).hexdigest()}-{len(parts)}",
                    segments=tuple(itertools.chain.from_iterable(part.segments for part in parts)),
                    metadata=upload.metadata,
                    headers=upload.headers,
                ),
                condition,
            )
            self._remove(upload, keep={part.number for part in parts})
            return record

    def abort(self, upload_id: str, key: str) -> None:
        """Drop an upload and its parts. S3Error NoSuchUpload."""
        with self._bucket.lock:
            self._remove(self.find(upload_id, key), keep=set())

    def abort_by_id(self, upload_id: str) -> None:
        """Drop an upload of any key. KeyError if there is none."""
        with self._bucket.lock:
            self._remove(self._by_id[upload_id], keep=set())

    def owned_bodies(self) -> set[str]:
        """Return the names of the files that parts consist of."""
        return {name for upload in self._by_id.values() for name in _bodies(upload)}

    def _choose(self, upload: Upload, chosen: Sequence[tuple[int, str]]) -> list[Part]:
        rules = self._bucket.rules()
        numbers = [number for number, _ in chosen]
        if not chosen:
            raise S3Error("MalformedXML", "You must specify at least one part")
        if any(a >= b for a, b in itertools.pairwise(numbers)):
            raise S3Error("InvalidPartOrder", "The list of parts was not in ascending order.")
        parts = []
        for number, etag in chosen:
            part = upload.parts.get(number)
            if part is None or part.etag != etag:
                raise S3Error("InvalidPart", f"Part {number} could not be found, or its ETag is another.")
            parts.append(part)
        sizes = [part.size for part in parts]
        if any(size < rules.min_part_bytes for size in sizes[:-1]):
            raise S3Error("EntityTooSmall", "A part but the last is smaller than the minimum.")
        if rules.equal_parts and (len(set(sizes[:-1])) > 1 or sizes[-1] > sizes[0]):
            raise S3Error("InvalidPart", "All non-trailing parts must have the same length.")
        if sum(sizes) > rules.max_object_bytes:
            raise S3Error("EntityTooLarge", "Your proposed upload exceeds the maximum allowed object size.")
        return parts

    def _expire(self) -> None:
        oldest = self._bucket.clock.now() - self._bucket.rules().upload_lifetime_seconds
        for upload in [upload for upload in self._by_id.values() if upload.created < oldest]:
            self._remove(upload, keep=set())

    def _drop_parts(self, upload: Upload, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._bucket.unlink_segments(upload.parts.pop(number).segments)

    def _remove(self, upload: Upload, *, keep: set[int]) -> None:
        """Forget an upload; the files of the parts in `keep` now belong to an object."""
        del self._by_id[upload.upload_id]
        (self._directory / f"{upload.upload_id}.json").unlink()
        self._drop_parts(upload, [number for number in upload.parts if number not in keep])

    def _save(self, upload: Upload) -> None:
        row = {
            "upload_id": upload.upload_id,
            "key": upload.key,
            "created": upload.created,
            "metadata": upload.metadata,
            "headers": upload.headers,
            "condition": asdict(upload.condition),
            "parts": [
                [part.number, part.size, part.etag, segments_to_json(part.segments), part.last_modified]
                for part in upload.parts.values()
            ],
        }
        write_json(self._directory / f"{upload.upload_id}.json", row)

    def _load(self) -> None:
        in_objects = self._bucket.owned_bodies()
        for path in self._directory.iterdir():
            if path.suffix != ".json":
                path.unlink()
                continue
            row = json.loads(path.read_text())
            parts = {
                number: Part(number, size, etag, segments_from_json(segments), last_modified)
                for number, size, etag, segments, last_modified in row.pop("parts")
            }
            upload = Upload(**{**row, "condition": Condition(**row["condition"]), "parts": parts})
            if _bodies(upload) & in_objects:  # killed inside Complete: the object is there
                path.unlink()
            else:
                self._by_id[upload.upload_id] = upload


def _bodies(upload: Upload) -> set[str]:
    return {
        segment.name
        for part in upload.parts.values()
        for segment in part.segments
        if isinstance(segment, FileSegment)
    }
