"""The hand behind the server: what tests see and change from aside. README.md lists the calls.

`Control` acts on a server in this process; `process.RemoteControl` has the same methods, each carried out by
the `Control` of the server's process. So arguments and results are values that pickle.
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, Unpack

from tests.s3server.accounts import Account
from tests.s3server.bodies import SyntheticSegment
from tests.s3server.errors import S3Error
from tests.s3server.faults import Fault
from tests.s3server.objects import Bucket, ObjectRecord
from tests.s3server.request_log import LogEntry
from tests.s3server.rules import TIB, RulesChange, SettingsChange
from tests.s3server.state import State
from tests.s3server.synthetic import synthetic_etag
from tests.s3server.uploads import Uploads

# The two objects of `fusecache.remote.s3.condition_probe`.
_PROBE = re.compile(r"\.fusecache-probe-[0-9a-f]{32}-[12]$")

OutageKind = Literal["refuse", "blackhole"]


class Reachable(Protocol):
    """What can be cut off: the server's sockets."""

    def pause(self, outage: OutageKind) -> None:
        """Begin an outage."""
        ...

    def resume(self) -> None:
        """End it."""
        ...

    def drop_connections(self) -> None:
        """End every open connection."""
        ...


@dataclass(frozen=True, slots=True)
class ObjectView:
    """One object as it lies in the bucket. headers: stored ones, such as content-type."""

    size: int
    etag: str
    metadata: dict[str, str]
    headers: dict[str, str]
    last_modified: float


@dataclass(frozen=True, slots=True)
class UploadView:
    """One upload in progress. parts: number -> size in bytes; created: seconds since 1970."""

    upload_id: str
    key: str
    created: float
    metadata: dict[str, str]
    parts: dict[int, int]


class Control:
    """Inspection and mischief, for tests. Every call returns when its effect is there."""

    def __init__(self, state: State, server: Reachable, bucket: str) -> None:
        self._state = state
        self._server = server
        self._bucket_name = bucket

    def objects(self, *, bucket: str | None = None) -> dict[str, ObjectView]:
        """Return all objects in key order."""
        records = self._bucket(bucket)[0].records()
        return {
            record.key: ObjectView(
                record.size, record.etag, record.metadata, record.headers, record.last_modified
            )
            for record in records
        }

    def read(self, key: str, offset: int = 0, size: int | None = None, *, bucket: str | None = None) -> bytes:
        """Return an object's bytes from `offset` on. KeyError if there is no such object."""
        try:
            record, body = self._bucket(bucket)[0].open(key)
        except S3Error as exc:
            raise KeyError(key) from exc
        try:
            count = record.size - offset if size is None else size
            return b"".join(body.chunks(offset, count))
        finally:
            body.close()

    def put(
        self,
        key: str,
        data: bytes,
        metadata: Mapping[str, str] | None = None,
        *,
        bucket: str | None = None,
        part_bytes: int | None = None,
    ) -> str:
        """Store an object as another client would, exempt from every rule; return its ETag.

        part_bytes: the ETag is that of an upload in such parts.
        """
        found, _ = self._bucket(bucket)
        segments = found.body_from_bytes(data)
        body = found.open_segments(segments)
        try:
            etag = body.etag()
        finally:
            body.close()
        if part_bytes is not None:
            parts = [data[start : start + part_bytes] for start in range(0, len(data), part_bytes)]
            md5s = b"".join(hashlib.md5(part, usedforsecurity=False).digest() for part in parts)
            etag = f"{hashlib.md5(md5s, usedforsecurity=False).hexdigest()}-{len(parts)}"
        return found.replace(ObjectRecord(key, len(data), etag, segments, dict(metadata or {}))).etag

    def add_synthetic(self, key: str, size: int, seed: int, *, bucket: str | None = None) -> str:
        """Store an object of `size` bytes of the stream `seed` (up to 5 TiB); return its ETag."""
        if not 0 < size <= 5 * TIB:
            raise ValueError(f"size {size} out of range")
        record = ObjectRecord(key, size, synthetic_etag(seed, 0, size), (SyntheticSegment(seed, 0, size),))
        return self._bucket(bucket)[0].replace(record).etag

    def add_many(self, pattern: str, count: int, size: int = 1, *, bucket: str | None = None) -> None:
        """Store `count` synthetic objects `pattern.format(0)` … in memory only: gone with the process."""
        none: dict[str, str] = {}
        self._bucket(bucket)[0].add_volatile(
            ObjectRecord(
                pattern.format(index),
                size,
                synthetic_etag(index, 0, size),
                (SyntheticSegment(index, 0, size),) if size else (),
                none,
                none,
            )
            for index in range(count)
        )

    def delete(self, key: str, *, bucket: str | None = None) -> None:
        """Delete an object as another client would. KeyError if there is none."""
        if not self._bucket(bucket)[0].delete(key):
            raise KeyError(key)

    def uploads(self, *, bucket: str | None = None) -> list[UploadView]:
        """Return the uploads in progress, by key."""
        return [
            UploadView(
                upload.upload_id,
                upload.key,
                upload.created,
                upload.metadata,
                {number: upload.parts[number].size for number in sorted(upload.parts)},
            )
            for upload in self._bucket(bucket)[1].all()
        ]

    def abort_upload(self, upload_id: str, *, bucket: str | None = None) -> None:
        """Make an upload vanish. KeyError if there is none."""
        self._bucket(bucket)[1].abort_by_id(upload_id)

    def set(self, **changes: Unpack[SettingsChange]) -> None:
        """Change latency, jitter, bandwidth, upload_bandwidth or clock_skew; transfers in progress see it."""
        self._state.change_settings(**changes)

    def set_rules(self, **changes: Unpack[RulesChange]) -> None:
        """Change fields of `Rules`."""
        self._state.change_rules(**changes)

    def add_bucket(self, name: str) -> None:
        """Make a bucket, unless it is there."""
        if name not in {bucket.name for bucket in self._state.buckets()}:
            self._state.add_bucket(name)

    def add_account(self, account: Account) -> None:
        """Make an access key valid, or replace it."""
        self._state.accounts.add(account)

    def revoke(self, access_key: str) -> None:
        """Make an access key unknown. KeyError if it already is."""
        self._state.accounts.revoke(access_key)

    def faults(self, *faults: Fault) -> list[int]:
        """Add faults behind those in force; return their ids."""
        return self._state.script.add(faults)

    def clear_faults(self, *numbers: int) -> None:
        """Remove the faults with these ids, or all if none is named, and let go what they hold."""
        self._state.script.clear(*numbers)

    def log(
        self, operation: str | None = None, key: str | None = None, *, probes: bool = False
    ) -> list[LogEntry]:
        """Return the requests of an operation and/or a key, oldest first.

        probes: also those with which a start finds out what the store does with the conditions of writes.
        """
        found = self._state.log.select(operation, key)
        return found if probes else [entry for entry in found if not _PROBE.search(entry.key or "")]

    def clear_log(self) -> None:
        """Forget all requests and counts."""
        self._state.log.clear()

    def offences(self) -> list[str]:
        """Return what the client under test sent since the start and never should: R2 refuses it, or stumbles."""
        return self._state.log.offences()

    def counts(self) -> dict[str, int]:
        """Return the number of requests per operation since the last `clear_log`."""
        return self._state.log.counts()

    def wait_requests(
        self,
        count: int,
        operation: str | None = None,
        key: str | None = None,
        *,
        finished: bool = True,
        timeout: float = 60.0,
    ) -> list[LogEntry]:
        """Block until `count` matching requests are in the log; return them all. TimeoutError."""
        return self._state.log.wait(count, operation, key, finished=finished, timeout=timeout)

    def pause(self, outage: OutageKind = "refuse") -> None:
        """Begin an outage."""
        self._server.pause(outage)

    def resume(self) -> None:
        """End an outage."""
        self._server.resume()

    def drop_connections(self) -> None:
        """Reset every open connection."""
        self._server.drop_connections()

    def advance_clock(self, seconds: float) -> None:
        """Move the bucket's clock."""
        self._state.clock.advance(seconds)

    def reset(self) -> None:
        """Go back to the start: no outage, faults, log, objects, uploads; first rules, settings, accounts."""
        self._server.resume()
        self._state.reset()

    def _bucket(self, name: str | None) -> tuple[Bucket, Uploads]:
        try:
            return self._state.find_bucket(self._bucket_name if name is None else name)
        except S3Error as exc:
            raise KeyError(name) from exc
