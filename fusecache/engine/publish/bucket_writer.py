"""Sends the requests that publish one change: blocking, run in a thread, idempotent after a lost answer.

It decides neither when to send nor when to retry: `publisher.py` does.

Every object that it writes carries a uuid of ours in its metadata. When a precondition fails, a HEAD decides: if the
object there carries our uuid, an earlier attempt took effect.

Cloudflare R2 takes two spellings of a name in Unicode for one object, and lists it as it was last written
(developers.cloudflare.com/r2/reference/unicode-interoperability). So a HEAD or DELETE of `é` may find what was written
under the other spelling of `é`. Only LIST tells. It is asked for names that are not ASCII, whatever the store.
"""

import hashlib
import time
from contextlib import suppress
from dataclasses import dataclass, replace

from fusecache.disk.staging import model_error
from fusecache.model.errors import AccessDenied, ObjectChanged, ObjectMissing, Refused, Throttled, UploadLost
from fusecache.model.objects import (
    GENERATION,
    RAW,
    RENAMED_FROM,
    STANDARD,
    ObjectId,
    ObjectInfo,
    carried_to_content,
    content_metadata,
    renamed_metadata,
    symlink_metadata,
    symlink_target,
)
from fusecache.model.records import FileRecord, OperationKind, OperationRecord, PosixAttributes
from fusecache.remote.store import Condition, FileSlice, Sent, Store

# Operations after which the bucket shows nothing under `key`, and operations that bring an object to their last key.
REMOVES = frozenset({OperationKind.DELETE, OperationKind.RMDIR, OperationKind.RENAME})
CREATES = frozenset({OperationKind.RENAME, OperationKind.SYMLINK})
MAKES = CREATES | {OperationKind.MKDIR}
_DEFAULT = PosixAttributes(0o644, 0, 0, 0)
_MD5_OF_NOTHING = "d41d8cd98f00b204e9800998ecf8427e"


@dataclass(frozen=True, slots=True)
class PublishResult:
    """What the bucket shows after an operation: the ETag per key (None: no object), and the node's version, if any.

    hidden: the file of another client that has the name of the directory just made.
    """

    shows: dict[str, str | None]
    version: ObjectInfo | None = None
    hidden: ObjectInfo | None = None


class BucketWriter:
    """Sends publishing requests to a store. `empty_file` is the path of a local file without bytes."""

    def __init__(self, store: Store, empty_file: str) -> None:
        self._store = store
        self._empty_file = empty_file

    def publish_file(self, record: FileRecord, path: str, sent: Sent | None = None) -> ObjectInfo:
        """Make a file's content visible under its key; return the version. sent: records the request's progress.

        Raises ObjectChanged if the key shows neither the base nor our own object, and the store's errors.
        """
        metadata = content_metadata(record.uuid, record.attributes)
        condition = Condition(record.base_etag)
        taken_over: dict[str, str] | None = None

        def put() -> str:
            nonlocal taken_over
            taken_over = carried_by(self._store, record)
            body = FileSlice(str(path), 0, record.size, sent=sent)
            return self._store.put(record.key, body, metadata={**taken_over, **metadata}, condition=condition)

        def complete() -> str:
            self._check_base(record.key, record.base_etag)
            return self._store.complete_multipart(
                record.key, record.upload_id, record.part_etags, condition=condition
            )

        try:
            etag = complete() if record.upload_id else put()
        except (ObjectChanged, UploadLost, Refused) as exc:
            return self._resolve_lost_answer(record, path, exc)
        return ObjectInfo(record.key, etag, record.size, time.time(), metadata, taken_over)

    def current_etag(self, key: str) -> str | None:
        """Return the ETag that the bucket shows under a key now; None: no object."""
        there = self._head(key)
        return None if there is None else there.etag

    def publish_operation(self, record: OperationRecord, *, may_hide: bool = False) -> PublishResult:
        """Carry out one operation. Raises ObjectChanged if another client changed its object first.

        may_hide: a directory may hide a file of its name that no change here removes.
        """
        match record.kind:
            case OperationKind.DELETE:
                return self._delete(record)
            case OperationKind.RMDIR:
                self._remove(record.key)
                return PublishResult({record.key: None})
            case OperationKind.MKDIR:
                etag = self._make_marker(record)
                # Behind the directory: a file that another node publishes from now on finds that.
                hidden = self._head(record.key.rstrip("/")) if may_hide else None
                return PublishResult({record.key: etag}, hidden=hidden)
            case OperationKind.SYMLINK:
                return self._symlink(record)
            case OperationKind.RENAME:
                return self._rename(record)

    def _resolve_lost_answer(
        self, record: FileRecord, path: str, error: ObjectChanged | UploadLost | Refused
    ) -> ObjectInfo:
        """Return what the bucket has if an earlier attempt took effect, or another node did the same; else raise.

        An upload is also unknown after it was completed.
        """
        try:
            there = self._head(record.key)
        except AccessDenied:
            if isinstance(error, Refused):
                raise error from None  # this key may be neither written nor read
            raise
        if there is None:
            raise error
        is_ours = _uuid(there) == record.uuid
        if not is_ours and (isinstance(error, Refused) or not self._is_same_content(there, record, path)):
            raise error
        if record.upload_id:
            # Also succeeds if the upload is unknown because it was completed.
            self._store.abort_multipart(record.key, record.upload_id)
        if not is_ours and not record.key.isascii() and self._listed(record.key) is None:
            # The same bytes under the other spelling: from now on the store lists ours.
            metadata = content_metadata(record.uuid, record.attributes)
            version = ObjectId(record.key, there.etag)
            etag = self._store.copy(version, record.key, condition=Condition(there.etag), metadata=metadata)
            return ObjectInfo(record.key, etag, record.size, time.time(), metadata)
        return there

    def _check_base(self, key: str, base_etag: str | None) -> None:
        """HEAD before Complete: a precondition that fails at Complete would discard all parts."""
        there = self._head(key)
        if (there.etag if there is not None else None) != base_etag:
            raise ObjectChanged(f"{key}: another client changed it while this node uploaded")

    def _is_same_content(self, there: ObjectInfo, record: FileRecord, path: str) -> bool:
        """Return whether the object holds exactly the file's bytes, judged by its ETag.

        Without '-' an ETag is the MD5 of the content. With '-' it is the MD5 of the parts' MD5s, so it matches only
        if both were cut into the same parts.
        """
        if there.size != record.size or symlink_target(there.metadata):
            return False
        if record.upload_id:
            digests = b"".join(bytes.fromhex(etag) for etag in record.part_etags if _is_md5(etag))
            joined = hashlib.md5(digests, usedforsecurity=False).hexdigest()
            return f"{joined}-{len(record.part_etags)}" in _etags(there)
        try:
            with open(path, "rb") as file:
                return hashlib.file_digest(file, _md5).hexdigest() in _etags(there)
        except OSError as exc:
            raise model_error(exc, path) from exc

    def _delete(self, record: OperationRecord) -> PublishResult:
        # DELETE takes no precondition: HEAD first, so that another client's newer object survives.
        there = self._head(record.key) if record.key.isascii() else self._listed(record.key)
        if there is not None:
            if there.etag != record.base_etag:
                raise ObjectChanged(f"{record.key}: another client replaced it; it was not deleted")
            self._store.delete(record.key)
        return PublishResult({record.key: None})

    def _make_marker(self, record: OperationRecord) -> str:
        """Put a directory marker, unless there is one, which may have content; return its ETag.

        Several nodes may make the same directory at once, and R2 takes one write a second of a key: what another node
        put there is as good.
        """
        try:
            return self._store.put(
                record.key, self._empty_body(), metadata={GENERATION: record.uuid}, condition=Condition(None)
            )
        except (ObjectChanged, Throttled):
            there = self._head(record.key)
            if there is None:
                raise
            return there.etag

    def _symlink(self, record: OperationRecord) -> PublishResult:
        metadata = symlink_metadata(record.uuid, record.target, record.attributes or _DEFAULT)
        try:
            etag = self._store.put(
                record.key, self._empty_body(), metadata=metadata, condition=Condition(record.base_etag)
            )
        except (ObjectChanged, Refused) as exc:
            there = self._head(record.key)
            if there is None or (
                _uuid(there) != record.uuid
                and (isinstance(exc, Refused) or symlink_target(there.metadata) != record.target)
            ):
                raise
            return PublishResult({record.key: there.etag}, there)
        return PublishResult({record.key: etag}, ObjectInfo(record.key, etag, 0, time.time(), metadata))

    def _rename(self, record: OperationRecord) -> PublishResult:
        """Copy, then delete: at every moment at least one of the two keys has the object."""
        shown: str | None = None
        try:
            copy = self._copy(record)
        except (ObjectChanged, ObjectMissing) as exc:
            source, there = self._head(record.key), self._head(record.target)
            if (
                source is not None
                and not record.key.isascii()
                and there == replace(source, key=record.target)
            ):
                there = self._respell(record, source)
            elif there is None or not _is_renamed(record, source, there):
                if source is None:
                    raise ObjectChanged(
                        f"{record.key}: another client removed it before it was renamed"
                    ) from exc
                if record.source_etag and source.etag != record.source_etag:
                    raise ObjectChanged(
                        f"{record.key}: another client replaced it before it was renamed"
                    ) from exc
                raise
            copy = there
            if source is not None and record.source_etag not in {"", source.etag}:
                shown = source.etag  # replaced by another client since: it stays
        if shown is None:
            self._remove(record.key)
        return PublishResult({record.key: shown, record.target: copy.etag}, copy)

    def _copy(self, record: OperationRecord) -> ObjectInfo:
        """Copy a rename's object as it is. If its ETag would not tell the copy from others, the copy gets our uuid.

        It would not if the object at the target has the same ETag, as all symlinks have.
        """
        condition, source = Condition(record.base_etag), ObjectId(record.key, record.source_etag)
        # The size of a version that a newer local one replaces may be unknown, which is 0, too.
        is_size_known = (record.size > 0) == (source.etag != _MD5_OF_NOTHING)
        if _is_md5(source.etag) and source.etag != record.base_etag and is_size_known:
            etag = self._store.copy(source, record.target, condition=condition, size=record.size)
            attributes = record.attributes or _DEFAULT
            metadata = symlink_metadata(record.uuid, record.link, attributes) if record.link else None
            return ObjectInfo(record.target, etag, record.size, time.time(), metadata)
        found = self._store.head(record.key)
        metadata = renamed_metadata(found, record.uuid, record.link)
        source = ObjectId(record.key, record.source_etag or found.etag)
        etag = self._store.copy(source, record.target, condition=condition, metadata=metadata)
        shown = {
            **(found.metadata or {}),
            **{name: value for name, value in metadata.items() if name[0] not in (RAW, STANDARD)},
        }
        return ObjectInfo(record.target, etag, found.size, time.time(), shown)

    def _respell(self, record: OperationRecord, source: ObjectInfo) -> ObjectInfo:
        """Have a store that takes both names of a rename for one object list the new one."""
        metadata = {**(source.metadata or {}), GENERATION: record.uuid}
        version = ObjectId(record.key, source.etag)
        etag = self._store.copy(version, record.target, condition=Condition(source.etag), metadata=metadata)
        return ObjectInfo(record.target, etag, source.size, time.time(), metadata)

    def _remove(self, key: str) -> None:
        """Delete an object, unless only the other spelling of its name is there."""
        if key.isascii() or self._listed(key) is not None:
            self._store.delete(key)

    def _listed(self, key: str) -> ObjectInfo | None:
        """Return the object that LIST shows under a key, in this very spelling."""
        return next((info for info in self._store.list_page(key, limit=1).objects if info.key == key), None)

    def _head(self, key: str) -> ObjectInfo | None:
        try:
            return self._store.head(key)
        except ObjectMissing:
            return None

    def _empty_body(self) -> FileSlice:
        return FileSlice(self._empty_file, 0, 0)


def carried_by(store: Store, record: FileRecord) -> dict[str, str]:
    """Return the headers and foreign metadata that new content takes over, by a HEAD unless the file is new. Blocking.

    The object may have been renamed since: then it is under the name that is replaced.
    """
    replaced = record.key if record.base_etag is not None else record.carries
    for key in dict.fromkeys((record.carries, replaced)) if record.carries else ():
        with suppress(ObjectMissing):
            return carried_to_content(store.head(key).carried or {})
    return {}


def _is_renamed(record: OperationRecord, source: ObjectInfo | None, there: ObjectInfo | None) -> bool:
    """Return whether the new name has what the rename brings there: by an earlier attempt, or by another node."""
    if there is None or _uuid(there) == record.uuid:
        return there is not None
    etag = record.source_etag or (source.etag if source is not None else "")
    size = source.size if source is not None else record.size or there.size
    is_same = etag in _etags(there) and there.size == size and symlink_target(there.metadata) == record.link
    return is_same and there.etag != record.base_etag


def _etags(there: ObjectInfo) -> set[str]:
    """Return the ETags of an object's bytes: its own, and the one that it had before it was renamed."""
    return {there.etag, (there.metadata or {}).get(RENAMED_FROM, there.etag)}


def _md5() -> "hashlib._Hash":
    return hashlib.md5(usedforsecurity=False)


def _is_md5(etag: str) -> bool:
    return len(etag) == 32 and all(letter in "0123456789abcdef" for letter in etag)


def _uuid(info: ObjectInfo) -> str:
    return (info.metadata or {}).get(GENERATION, "")
