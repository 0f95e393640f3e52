"""The life cycle of one version of a file's content on the node, from `create` until the bucket has it."""

from enum import Enum


class FileState(Enum):
    """The state of one version. OPEN, FLUSHED and LOCAL content may still be written in place."""

    OPEN = "open"  # being written; nothing is acknowledged; after a crash it is an orphan
    FLUSHED = "flushed"  # a close returned 0 and is journaled (L1); a writer may still hold the file
    LOCAL = "local"  # closed under a local-only name: kept, and changed in place
    SEALED = "sealed"  # closed by its last writer: immutable, queued for upload
    PUBLISHING = "publishing"  # the request that makes it visible in the bucket may have been sent
    STORED = "stored"  # the bucket has it (L2); the local copy is cache
    DROPPED = "dropped"  # removed or replaced before it was published; nothing to keep
    ORPHAN = "orphan"  # its writer was killed, or it was never closed: quarantined, never published
    FAILED = "failed"  # a write to it failed: never published, the error is reported at fsync and close
    REJECTED = (
        "rejected"  # the bucket rejected it permanently, or it cannot be read back: bytes kept, alarm raised
    )


TRANSITIONS: dict[FileState, frozenset[FileState]] = {
    FileState.OPEN: frozenset(
        {
            FileState.OPEN,
            FileState.FLUSHED,
            FileState.LOCAL,
            FileState.DROPPED,
            FileState.ORPHAN,
            FileState.FAILED,
        }
    ),
    FileState.FLUSHED: frozenset(
        {
            FileState.FLUSHED,
            FileState.OPEN,
            FileState.SEALED,
            FileState.DROPPED,
            FileState.ORPHAN,
            FileState.FAILED,
        }
    ),
    # LOCAL -> OPEN, FLUSHED: it was renamed to a name that is published.
    FileState.LOCAL: frozenset(
        {FileState.LOCAL, FileState.OPEN, FileState.FLUSHED, FileState.DROPPED, FileState.FAILED}
    ),
    FileState.SEALED: frozenset(
        {FileState.SEALED, FileState.PUBLISHING, FileState.DROPPED, FileState.REJECTED}
    ),
    # PUBLISHING -> SEALED: the request certainly had no effect, and will be sent again.
    FileState.PUBLISHING: frozenset(
        {FileState.PUBLISHING, FileState.SEALED, FileState.STORED, FileState.REJECTED, FileState.DROPPED}
    ),
    FileState.STORED: frozenset(),
    FileState.DROPPED: frozenset(),
    # The operator may restore its bytes as a new version, or discard them: engine/recovery/quarantine.py.
    FileState.ORPHAN: frozenset(),
    FileState.FAILED: frozenset({FileState.DROPPED, FileState.ORPHAN}),
    FileState.REJECTED: frozenset({FileState.DROPPED, FileState.SEALED}),
}

# Content in these states may be changed in place. In all others a writer gets a new version.
MUTABLE = frozenset({FileState.OPEN, FileState.FLUSHED, FileState.LOCAL, FileState.FAILED})
# Content that is queued for the bucket.
OWED = frozenset({FileState.FLUSHED, FileState.SEALED, FileState.PUBLISHING})


def check_transition(old: FileState, new: FileState) -> None:
    """Raise ValueError if a version cannot go from `old` to `new`."""
    if new not in TRANSITIONS[old]:
        raise ValueError(f"a file version cannot go from {old.value} to {new.value}")
