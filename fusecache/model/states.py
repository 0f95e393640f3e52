"""The life of one generation of a file's content on the node, from `create` until the bucket has it."""

from enum import Enum


class FileState(Enum):
    """What is true of one generation. OPEN, FLUSHED and LOCAL content may still be written in place."""

    OPEN = "open"  # being written; nothing is promised; after a crash it is an orphan
    FLUSHED = "flushed"  # a close returned 0 and is journaled (L1); a writer may still hold the file
    LOCAL = "local"  # closed under a name that is never published: kept, and changed in place
    SEALED = "sealed"  # closed by its last writer: immutable, waits for its turn
    PUBLISHING = "publishing"  # the request that makes it visible in the bucket may have been sent
    STORED = "stored"  # the bucket has it (L2); the local copy is cache
    DROPPED = "dropped"  # removed or replaced before it was published; nothing to keep
    ORPHAN = "orphan"  # its writer was killed, or it was never closed: kept aside, never published
    FAILED = "failed"  # a write of it failed: never published, the error is reported at fsync and close
    REJECTED = (
        "rejected"  # the bucket refused it for good, or it cannot be read back: bytes kept, alarm raised
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
    # PUBLISHING -> SEALED: the request certainly took no effect, and it will be sent again.
    FileState.PUBLISHING: frozenset(
        {FileState.PUBLISHING, FileState.SEALED, FileState.STORED, FileState.REJECTED, FileState.DROPPED}
    ),
    FileState.STORED: frozenset(),
    FileState.DROPPED: frozenset(),
    # A person may have its bytes begin a new life, or removed: engine/recovery/quarantine.py.
    FileState.ORPHAN: frozenset(),
    FileState.FAILED: frozenset({FileState.DROPPED, FileState.ORPHAN}),
    FileState.REJECTED: frozenset({FileState.DROPPED, FileState.SEALED}),
}

# Content in these states may be changed in place; in all others a writer gets a new generation.
MUTABLE = frozenset({FileState.OPEN, FileState.FLUSHED, FileState.LOCAL, FileState.FAILED})
# Content that the bucket is still owed.
OWED = frozenset({FileState.FLUSHED, FileState.SEALED, FileState.PUBLISHING})


def check_transition(old: FileState, new: FileState) -> None:
    """Raise ValueError if the life of a generation never goes from `old` to `new`."""
    if new not in TRANSITIONS[old]:
        raise ValueError(f"a generation never goes from {old.value} to {new.value}")
