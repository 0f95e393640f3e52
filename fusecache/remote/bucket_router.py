"""Several buckets as one store: the first part of a key, up to the slash, is the name of its bucket's folder.

Invariants:
1. A request goes to the bucket of its key alone, without that part, and with the prefix of the bucket's source.
2. Names of the top level are the buckets' folders. They cost no request.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from fusecache.model.errors import ObjectMissing
from fusecache.model.objects import Extent, ObjectId, ObjectInfo
from fusecache.remote.statistics import StoreStatistics
from fusecache.remote.store import (
    Condition,
    FileSlice,
    Interruption,
    ListPage,
    Store,
    UploadPage,
    primary_of,
)


@dataclass(frozen=True, slots=True)
class RoutedBucket:
    """A bucket of a mount. prefix: of its source, empty or ending in '/'."""

    store: Store
    prefix: str = ""


class BucketRouter:
    """A `Store` over several buckets, by the name of each one's folder."""

    def __init__(self, buckets: Mapping[str, RoutedBucket]) -> None:
        self._buckets = {name: buckets[name] for name in sorted(buckets)}

    def primary(self) -> Store:
        """Return the same store, whose reads only the endpoints that take the writes answer."""
        return BucketRouter(
            {name: replace(each, store=primary_of(each.store)) for name, each in self._buckets.items()}
        )

    def statistics(self) -> StoreStatistics:
        """Return the summed request counts of all buckets."""
        return sum((each.store.statistics() for each in self._buckets.values()), StoreStatistics())

    def statistics_of(self, key: str) -> StoreStatistics:
        """Return the request counts of a key's bucket."""
        return self._route(key)[1].store.statistics()

    def list_page(
        self,
        prefix: str,
        *,
        delimiter: str = "",
        token: str | None = None,
        start_after: str = "",
        limit: int = 1000,
    ) -> ListPage:
        """Return one page of a bucket, or the buckets' folders whose names begin with `prefix`."""
        if "/" not in prefix:
            folders = (f"{name}/" for name in self._buckets)
            return ListPage((), tuple(each for each in folders if each.startswith(prefix)), None)
        name, bucket, inner = self._route(prefix)
        after = self._route(start_after)[2] if start_after else ""
        page = bucket.store.list_page(inner, delimiter=delimiter, token=token, start_after=after, limit=limit)
        here, cut = f"{name}/", len(bucket.prefix)
        return ListPage(
            tuple(replace(info, key=here + info.key[cut:]) for info in page.objects),
            tuple(here + each[cut:] for each in page.prefixes),
            page.next_token,
        )

    def list_uploads(self, prefix: str, *, token: str | None = None) -> UploadPage:
        """Return one page of a bucket's unfinished uploads."""
        name, bucket, inner = self._route(prefix)
        page = bucket.store.list_uploads(inner, token=token)
        here, cut = f"{name}/", len(bucket.prefix)
        return replace(page, uploads=tuple(replace(each, key=here + each.key[cut:]) for each in page.uploads))

    def head(self, key: str) -> ObjectInfo:
        """Return an object's properties."""
        _, bucket, inner = self._route(key)
        return replace(bucket.store.head(inner), key=key)

    def get_into(
        self,
        object_id: ObjectId,
        extent: Extent,
        buffer: memoryview,
        progress: Callable[[int], None],
        interruption: Interruption | None = None,
    ) -> None:
        """Fill the buffer."""
        _, bucket, inner = self._route(object_id.key)
        bucket.store.get_into(ObjectId(inner, object_id.etag), extent, buffer, progress, interruption)

    def put(
        self, key: str, body: FileSlice, *, metadata: Mapping[str, str], condition: Condition | None = None
    ) -> str:
        """Store a whole object."""
        _, bucket, inner = self._route(key)
        return bucket.store.put(inner, body, metadata=metadata, condition=condition)

    def create_multipart(self, key: str, *, metadata: Mapping[str, str]) -> str:
        """Begin a multipart upload."""
        _, bucket, inner = self._route(key)
        return bucket.store.create_multipart(inner, metadata=metadata)

    def upload_part(self, key: str, upload_id: str, number: int, body: FileSlice) -> str:
        """Store a part."""
        _, bucket, inner = self._route(key)
        return bucket.store.upload_part(inner, upload_id, number, body)

    def complete_multipart(
        self, key: str, upload_id: str, part_etags: Sequence[str], *, condition: Condition | None = None
    ) -> str:
        """Complete a multipart upload."""
        _, bucket, inner = self._route(key)
        return bucket.store.complete_multipart(inner, upload_id, part_etags, condition=condition)

    def abort_multipart(self, key: str, upload_id: str) -> None:
        """Abort a multipart upload."""
        _, bucket, inner = self._route(key)
        bucket.store.abort_multipart(inner, upload_id)

    def copy(
        self,
        source: ObjectId,
        key: str,
        *,
        condition: Condition | None = None,
        metadata: Mapping[str, str] | None = None,
        size: int | None = None,
    ) -> str:
        """Copy inside one bucket. Raises ValueError for keys of two."""
        name, bucket, inner = self._route(key)
        source_name, _, source_key = self._route(source.key)
        if name != source_name:
            raise ValueError(f"a copy from {source.key} to {key} crosses buckets")
        return bucket.store.copy(
            ObjectId(source_key, source.etag), inner, condition=condition, metadata=metadata, size=size
        )

    def delete(self, key: str) -> None:
        """Delete an object."""
        _, bucket, inner = self._route(key)
        bucket.store.delete(inner)

    def probe_write(self, prefix: str) -> None:
        """Check that writing is allowed."""
        _, bucket, inner = self._route(prefix)
        bucket.store.probe_write(inner)

    def _route(self, key: str) -> tuple[str, RoutedBucket, str]:
        """Return the name, the bucket and the key in it. Raises ObjectMissing for a key in no bucket."""
        name, slash, inner = key.partition("/")
        bucket = self._buckets.get(name)
        if bucket is None or not slash:
            raise ObjectMissing(f"{key}: is in none of the mount's buckets")
        return name, bucket, bucket.prefix + inner
