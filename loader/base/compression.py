"""Compresses and decompresses whole shards, one frame a shard, in the five compression families of MDS.

gzip and bz2 come with Python. zstandard, brotli and python-snappy are imported when a shard needs them.
"""

import bz2
import gzip
import importlib
import zlib
from typing import Any

from loader.errors import LoaderError, cause_text

# family -> (lowest level, highest level, default level); None: no levels. A family's name is also the file extension.
LEVELS: dict[str, tuple[int, int, int] | None] = {
    "br": (0, 11, 11),
    "bz2": (1, 9, 9),
    "gz": (0, 9, 9),
    "snappy": None,
    "zstd": (1, 22, 3),
}
_WHEELS = {
    "br": ("brotli", "brotli"),
    "snappy": ("snappy", "python-snappy"),
    "zstd": ("zstandard", "zstandard"),
}
_ERRORS = {"br": "error", "snappy": "UncompressError", "zstd": "ZstdError"}


def family_of(compression: object) -> str:
    """Return the family of "zstd:7" or "gz", "" for None or "". Raises LoaderError for anything unknown."""
    return split(compression)[0]


def split(compression: object) -> tuple[str, int]:
    """Return (family, level) of "zstd:7", with the family's default level if none is given; ("", 0) for none.

    Raises LoaderError for an unknown family or level.
    """
    if compression is None or compression == "":
        return "", 0
    if not isinstance(compression, str):
        raise LoaderError(f"compression {compression!r} is not a name")
    family, colon, level = compression.partition(":")
    if family not in LEVELS or (colon and not level):
        raise LoaderError(f"compression {compression!r} is unknown: choose one of {', '.join(LEVELS)}")
    limits = LEVELS[family]
    if limits is None:
        if level:
            raise LoaderError(f"compression {compression!r}: {family} has no levels")
        return family, 0
    if not level:
        return family, limits[2]
    if not level.isdecimal() or level != str(int(level)) or not limits[0] <= int(level) <= limits[1]:
        raise LoaderError(
            f"compression {compression!r}: the levels of {family} are {limits[0]} to {limits[1]}"
        )
    return family, int(level)


def compress(compression: str, data: bytes) -> bytes:
    """Return data as one frame. Raises LoaderError if the family's package is not installed."""
    family, level = split(compression)
    if family == "gz":
        return gzip.compress(data, level, mtime=0)  # no timestamp: the same samples make the same file
    if family == "bz2":
        return bz2.compress(data, level)
    wheel = _wheel(family)
    if family == "br":
        return bytes(wheel.compress(data, quality=level))
    if family == "snappy":
        return bytes(wheel.compress(data))
    return bytes(wheel.ZstdCompressor(level=level).compress(data))


def decompress(family: str, data: bytes, expected_bytes: int = 0) -> bytes:
    """Return the content of a frame.

    expected_bytes: its size, 0 if unknown. It limits the memory that a damaged frame can take, but is not enforced:
    callers that need exactly this size check it. Raises ValueError, always with a cause, for a damaged frame, and
    LoaderError if the family's package is not installed.
    """
    wheel = _wheel(family) if family in _WHEELS else None
    broken = (getattr(wheel, _ERRORS[family]),) if wheel else (OSError, EOFError, zlib.error)
    try:
        if family == "zstd":
            return _unpack_zstd(wheel, data)
        if family == "snappy":
            _check_snappy_head(data, expected_bytes)
        if wheel:
            return bytes(wheel.decompress(data))
        return gzip.decompress(data) if family == "gz" else bz2.decompress(data)
    except (*broken, MemoryError) as problem:
        raise ValueError(cause_text(problem)) from None


def _unpack_zstd(wheel: Any, data: bytes) -> bytes:
    # Not the library's one-call form: it allocates whatever size the frame's header claims.
    parts: list[bytes] = []
    while data:  # some tools write several frames in a row
        reader = wheel.ZstdDecompressor().decompressobj()
        parts.append(reader.decompress(data))
        if not reader.eof:
            raise ValueError("the frame ends early")
        data = reader.unused_data
    return b"".join(parts)


def _check_snappy_head(data: bytes, expected_bytes: int) -> None:
    """Raise ValueError for a frame whose header claims an impossible size.

    The library allocates the claimed size at once. If memory does not suffice, it kills the process, no exception.
    A frame begins with its size as a varint of at most 32 bits. An element takes at least 3 bytes for 64 bytes of
    content (github.com/google/snappy, format_description.txt).
    """
    end = next((place for place, byte in enumerate(data[:5]) if byte < 0x80), None)
    if end is None:
        raise ValueError("its header is damaged")
    claimed = sum((byte & 0x7F) << 7 * place for place, byte in enumerate(data[: end + 1]))
    if expected_bytes and claimed != expected_bytes:
        raise ValueError(f"its header claims {claimed} bytes, not {expected_bytes}")
    if claimed * 3 > len(data) * 64:
        raise ValueError(f"its header claims {claimed} bytes, more than {len(data)} bytes can contain")


def _wheel(family: str) -> Any:
    module, wheel = _WHEELS[family]
    try:
        return importlib.import_module(module)
    except ImportError:
        raise LoaderError(f"{family} shards need the package {wheel}: pip install {wheel}") from None
