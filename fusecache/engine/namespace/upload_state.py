"""Work on one file version before it is published: its preparation and its multipart upload."""

from dataclasses import dataclass, field

import trio

from fusecache.model.errors import FusecacheError
from fusecache.model.records import PosixAttributes
from fusecache.policy.writeback.multipart import PartTable, first_ready_at
from fusecache.remote.store import Sent


@dataclass(eq=False, slots=True)
class Preparation:
    """Work that may run before a version's slot in the publish order: sync, checksums, parts. done: set at its end."""

    done: trio.Event
    scope: trio.CancelScope
    failure: FusecacheError | None = None


@dataclass(eq=False, slots=True)
class MultipartUpload:
    """The multipart upload of one version, possibly started before the version is sealed.

    key: the key it was started under. upload_id: "" until the bucket has answered. is_known: the journal has the
    upload_id. is_asked: the creation request or that journal write is in flight. ready: how many parts, from the first,
    may be sent. attributes: what its object's metadata will contain. attempts: creation and part requests in flight.
    sending: progress of each part's request, by part number. failures: pauses since the last success. quiet_until: loop
    time at which the current pause ends. failure: why it cannot continue. stopped: set when the upload is no longer
    needed. changed: set, then replaced by a new event, whenever an attempt ends.
    """

    key: str
    parts: PartTable
    attributes: PosixAttributes
    upload_id: str = ""
    is_known: bool = False
    is_asked: bool = False
    is_sealed: bool = False
    ready: int = 0
    attempts: int = 0
    sending: dict[int, Sent] = field(default_factory=dict)
    failures: int = 0
    quiet_until: float = float("-inf")
    failure: FusecacheError | None = None
    stopped: trio.Event = field(default_factory=trio.Event)
    changed: trio.Event = field(default_factory=trio.Event)

    def announce(self) -> None:
        """Wake the tasks that wait for the end of an attempt."""
        self.changed.set()
        self.changed = trio.Event()

    def stop(self) -> None:
        """The upload is no longer needed: start no further attempt and wake all waiters."""
        self.stopped.set()
        self.announce()


@dataclass(eq=False, slots=True)
class UploadState:
    """How far one version's way to the bucket is. Times are loop times, sizes are in bytes.

    key: the one under which a multipart upload was started; a rename changes the row's key, never this. multipart: the
    multipart upload of this run. sent_bytes: of parts that the bucket holds. request: the one in flight that uploads
    the version whole, or completes its multipart upload. preparation: None until it begins. written_bytes: written so
    far, counting rewrites; when they pass `grows_at`, the next part may be uploaded. growing_since: when the first part
    was ready.
    """

    key: str = ""
    multipart: MultipartUpload | None = None
    sent_bytes: int = 0
    request: Sent | None = None
    preparation: Preparation | None = None
    written_bytes: int = 0
    grows_at: int = field(default_factory=first_ready_at)
    growing_since: float = float("inf")

    @property
    def requests(self) -> tuple[Sent, ...]:
        """Progress of each unanswered request that uploads a part of the version, or publishes it."""
        parts = () if self.multipart is None else tuple(self.multipart.sending.values())
        return parts if self.request is None else (*parts, self.request)

    def on_written(self, nbytes: int, stop: int) -> bool:
        """Record a write of `nbytes` that ends at offset `stop`; return whether another part may be uploaded now."""
        self.written_bytes += nbytes
        return self.written_bytes >= self.grows_at and stop >= self.grows_at
