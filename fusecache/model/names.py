"""Converts between keys and file names.

A key is UTF-8, at most 1 024 bytes, its parts separated by `/`. A name is one part. Names are compared byte by byte:
two spellings of one text in Unicode are two files. A key that cannot be a path on the mount is *hidden*: never shown,
never a way out of the mount, and counted as unusable.

Pipes, sockets and device nodes: names of one node, which no bucket stores.

The mode of such a file holds its type, which other modes leave out, and from bit 16 its device number. So it needs no
field of its own in the journal.
"""

from fusecache.model.errors import InvalidName, NameTooLong

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


# Cloudflare R2's limit on a key, and Linux's NAME_MAX on one part of it.
KEY_BYTES_MAX = 1024
NAME_BYTES_MAX = 255
# The name of the control directory in the mount's root.
CONTROL_NAME = ".fusecache"


def decode_name(raw: bytes) -> str:
    """Return the name that the kernel sent. Raises InvalidName or NameTooLong."""
    try:
        name = raw.decode("utf-8")
    except UnicodeDecodeError as exc:
        raise InvalidName(f"{raw!r}: a name in the bucket must be UTF-8") from exc
    if len(name.encode()) > NAME_BYTES_MAX:
        raise NameTooLong(f"{name[:80]}…: longer than {NAME_BYTES_MAX} bytes")
    reason = unusable_name(name)
    if reason:
        raise InvalidName(f"{name!r}: {reason}")
    return name


def unusable_name(name: str) -> str | None:
    """Return why `name` cannot be a file name on the mount, or None if it can."""
    if name == "":
        return "an empty part of a path (two slashes in a row)"
    if name in {".", ".."}:
        return "'.' and '..' are not usable as names"
    if "\0" in name or "/" in name:
        return "a name must not contain NUL or '/'"
    if name.isascii() and len(name) <= NAME_BYTES_MAX:
        return None  # the usual case: listings check each of their names
    try:
        size = len(name.encode("utf-8"))
    except UnicodeEncodeError:
        return "not valid Unicode"
    return f"longer than {NAME_BYTES_MAX} bytes" if size > NAME_BYTES_MAX else None


def marked_name(name: str, mark: str) -> str:
    """Return `name` with a mark at its end; a long name is shortened to make room."""
    return name.encode()[: NAME_BYTES_MAX - len(mark.encode())].decode(errors="ignore") + mark


def check_key(key: str) -> str:
    """Return `key`. Raises NameTooLong if it exceeds the bucket's limit."""
    if len(key.encode("utf-8")) > KEY_BYTES_MAX:
        raise NameTooLong(f"{key[:80]}…: the path makes a key longer than {KEY_BYTES_MAX} bytes; shorten it")
    return key


def parent_prefix(key: str) -> str:
    """Return a key's directory with a trailing slash; empty for a key without a slash."""
    return key[: key.rfind("/") + 1]


def parent_path(key: str) -> str:
    """Return a key's directory without a trailing slash; empty for a key without a slash."""
    return key.rpartition("/")[0]


def is_at_or_below(key: str, prefix: str) -> bool:
    """Return whether a key is `prefix` or lies below it; "" and a prefix ending in '/' match all keys below."""
    if not prefix or prefix.endswith("/"):
        return key.startswith(prefix)
    return key == prefix or key.startswith(prefix + "/")
