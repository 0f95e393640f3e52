"""Whether a file may be uploaded before it is sealed, and whether such an upload can still become its object."""

import time

from fusecache.engine.namespace.nodes import FileVersion
from fusecache.engine.namespace.tree import Tree
from fusecache.engine.namespace.upload_state import MultipartUpload
from fusecache.model.records import PosixAttributes
from fusecache.model.states import FileState
from fusecache.policy.name_patterns import matches_any
from fusecache.policy.writeback.multipart import PARTS_MAX, choose_part_bytes

# A program set an mtime that is in the future, or further than this before the upload began: the object must carry it.
_MTIME_SLACK_NS = 60 * 1_000_000_000


def may_upload_early(version: FileVersion, tree: Tree, temp_names: tuple[str, ...]) -> bool:
    """Return whether a file that is being written will probably be published as it is, under its present name."""
    node = version.node
    if node is None or not tree.is_linked(node) or version.close_state.killed_writer is not None:
        return False
    if version.state not in {FileState.OPEN, FileState.FLUSHED}:
        return False
    if version.upload.multipart is not None and not version.upload.multipart.parts.is_worth_it:
        return False
    name = version.record.key.rpartition("/")[2]
    # rsync and other programs write under a hidden name first, then rename.
    return not name.startswith(".") and not matches_any(name, temp_names)


def can_become_object(version: FileVersion, upload: MultipartUpload) -> bool:
    """Return whether an upload that began before the file's final size and attributes can become its object."""
    part_bytes = upload.parts.part_bytes
    return (
        upload.key == version.record.key
        and choose_part_bytes(version.size) > 0
        and version.size <= part_bytes * PARTS_MAX
        and _metadata_still_valid(upload.attributes, version.record.attributes)
    )


def _metadata_still_valid(then: PosixAttributes, now: PosixAttributes) -> bool:
    """Return whether the metadata given at an upload's begin still holds: mode, owner, and mtime.

    The mtime may have moved on: from _MTIME_SLACK_NS before its first value to _MTIME_SLACK_NS after now.
    """
    if (then.mode, then.uid, then.gid) != (now.mode, now.uid, now.gid):
        return False
    return now.mtime_ns == then.mtime_ns or (
        then.mtime_ns - _MTIME_SLACK_NS <= now.mtime_ns <= time.time_ns() + _MTIME_SLACK_NS
    )
