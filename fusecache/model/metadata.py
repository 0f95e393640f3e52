"""What fusecache writes into an object's user metadata, and reads from anyone's.

Names follow what rclone and s3fs write (`mode`, `uid`, `gid`, `mtime`), so that their files keep times and modes here.
"""

import stat
from collections.abc import Mapping

from fusecache.model.records import PosixAttributes

GENERATION = "fusecache-generation"
SYMLINK_TARGET = "symlink-target"


def content_metadata(uuid: str, attributes: PosixAttributes) -> dict[str, str]:
    """Return the metadata of a file's object."""
    return {
        GENERATION: uuid,
        "mode": f"{stat.S_IFREG | attributes.mode:o}",
        "uid": str(attributes.uid),
        "gid": str(attributes.gid),
        "mtime": f"{attributes.mtime_ns / 1e9:.9f}",
    }


def symlink_metadata(uuid: str, target: str, attributes: PosixAttributes) -> dict[str, str]:
    """Return the metadata of a symlink's zero-byte object."""
    return {**content_metadata(uuid, attributes), "mode": f"{stat.S_IFLNK | 0o777:o}", SYMLINK_TARGET: target}


def symlink_target(metadata: Mapping[str, str] | None) -> str:
    """Return where a symlink points, or "" if the object is none."""
    return (metadata or {}).get(SYMLINK_TARGET, "")


def attributes_from_metadata(
    metadata: Mapping[str, str], uid: int, gid: int, modified: float
) -> PosixAttributes | None:
    """Return mode and time that the metadata tells, or None if it tells no mode.

    The owner is the mount's, not the one of the node that wrote: user ids mean nothing from node to node.
    """
    try:
        mode = int(metadata["mode"], 8)
        mtime = float(metadata.get("mtime", modified))
        return PosixAttributes(stat.S_IMODE(mode), uid, gid, int(mtime * 1e9))
    except (KeyError, ValueError):
        return None
