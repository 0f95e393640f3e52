"""Decides which symlinks are followed. Pure."""

from enum import Enum


class SymlinkRule(Enum):
    """Which symlinks the kernel may follow: the option `symlinks`."""

    INSIDE = "inside"
    ALL = "all"
    NONE = "none"


def is_followed(rule: SymlinkRule, target: str, *, depth: int) -> bool:
    """Return whether a symlink is followed. depth: how many directories of the mount the link lies below its root."""
    if rule is SymlinkRule.INSIDE:
        return _stays_inside(target, depth)
    return rule is SymlinkRule.ALL


def _stays_inside(target: str, depth: int) -> bool:
    """Return whether a target leads nowhere but into the mount, whatever other links are in the mount.

    `..` counts only at the start, where it leads through the link's own directories. After a name it may lead anywhere
    above: the name may be a link to the mount's root, and the kernel goes up from where that link leads.
    """
    if target.startswith("/"):
        return False
    parts = [part for part in target.split("/") if part not in ("", ".")]
    climbs = next((index for index, part in enumerate(parts) if part != ".."), len(parts))
    return climbs <= depth and ".." not in parts[climbs:]
