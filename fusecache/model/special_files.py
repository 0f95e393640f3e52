"""Pipes, sockets and device nodes: names of one node, which no bucket stores.

The mode of such a file holds its type, which other modes leave out, and from bit 16 its device number. So it needs no
field of its own in the journal.
"""

_TYPE_BITS = 0o170000
_DEVICE_SHIFT = 16


def special_mode(mode: int, device: int) -> int:
    """Return the mode of a special file. mode: type and permissions; device: as the kernel encodes it, or 0."""
    return mode | device << _DEVICE_SHIFT


def is_special(mode: int) -> bool:
    """Return whether this is a special file's mode."""
    return bool(mode & _TYPE_BITS)


def type_and_permissions(mode: int) -> int:
    """Return a special file's mode as stat(2) shows it."""
    return mode & ((1 << _DEVICE_SHIFT) - 1)


def device_of(mode: int) -> int:
    """Return the device number of a special file's mode; 0 for all others."""
    return mode >> _DEVICE_SHIFT
