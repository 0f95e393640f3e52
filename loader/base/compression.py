"""Compresses and decompresses whole shards, one frame a shard, in the five compression families of MDS.

gzip and bz2 come with Python. zstandard, brotli and python-snappy are imported when a shard needs them.

Computes the hashes that an index may contain: those of hashlib and of xxhash.
"""

import bz2
import gzip
import hashlib
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

from loader.base.packages import optional_module
from loader.errors import LoaderError, cause_text

XXHASHES = frozenset(["xxh32", "xxh64", "xxh128", "xxh3_64", "xxh3_128"])


def digest(name: str, *pieces: bytes | bytearray) -> str:
    """Return the hex digest of data that comes in pieces. Raises LoaderError for an unknown hash."""
    if name in XXHASHES:
        xxhash = optional_module("xxhash", why=f"the hash {name}")
        return str(_over(getattr(xxhash, name)(), pieces))
    try:
        if name in hashlib.algorithms_available:
            return str(_over(hashlib.new(name), pieces))
    except (ValueError, TypeError):  # this OpenSSL lacks it, or it needs a digest length
        pass
    some = ", ".join(["md5", "sha1", "sha256", *sorted(XXHASHES)])
    raise LoaderError(f"the hash {name!r} is unknown: choose one of {some}, or another of hashlib's")


def _over(state: Any, pieces: Iterable[bytes | bytearray]) -> Any:
    for piece in pieces:
        state.update(piece)
    return state.hexdigest()


def mismatch(hashes: dict[str, str], data: bytes) -> str:
    """Return the name of the first hash that does not match data, "" if all match."""
    return next((name for name, value in hashes.items() if digest(name, data) != value), "")


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
# Content is decompressed in pieces of this size, so that a frame with too much is noticed.
_PIECE_BYTES = 4 << 20
# Above any shard, which has at most 4 GiB.
_UNLIMITED = 1 << 62
# Input given to older versions of brotli at once: a few bytes can stand for 16 MiB.
_BROTLI_BYTES = 64
_GZIP_WBITS = 31
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
    """Return the content of a frame, or of several in a row.

    expected_bytes: its size, 0 if unknown. Decompression stops as soon as there is more: a small file can hold a
    thousand times its size. Callers check whether there is less. Raises ValueError, always with a cause, for a damaged
    or too large frame, and LoaderError if the family's package is not installed.
    """
    wheel = _wheel(family) if family in _WHEELS else None
    broken = (getattr(wheel, _ERRORS[family]),) if wheel else (OSError, EOFError, zlib.error)
    try:
        if family == "snappy":
            _check_snappy_head(data, expected_bytes)
            return bytes(_wheel(family).decompress(data))
        # One byte more than expected tells that there is more.
        limit = expected_bytes + 1 if expected_bytes else _UNLIMITED
        return _limited(family, wheel, data, limit, expected_bytes)
    except (*broken, MemoryError) as problem:
        raise ValueError(cause_text(problem)) from None


def _limited(family: str, wheel: Any, data: bytes, limit: int, expected_bytes: int) -> bytes:
    if family == "zstd":
        pieces = _zstd_pieces(wheel, data, limit) if expected_bytes else _zstd_frames(wheel, data)
    elif family == "br":
        pieces = _brotli_pieces(wheel, data, limit)
    else:
        pieces = _stream_pieces(family, data, limit)
    parts: list[bytes] = []
    count = 0
    for piece in pieces:
        parts.append(piece)
        count += len(piece)
        if count >= limit:
            raise ValueError(f"it holds more than the {expected_bytes} bytes that the index declares")
    return b"".join(parts)


def _zstd_pieces(wheel: Any, data: bytes, limit: int) -> Iterator[bytes]:
    # Not the library's one-call form: it allocates whatever size the frame's header claims.
    with wheel.ZstdDecompressor().stream_reader(data, read_across_frames=True) as reader:
        while piece := reader.read(min(limit, _PIECE_BYTES)):
            yield piece


def _zstd_frames(wheel: Any, data: bytes) -> Iterator[bytes]:
    while data:  # some tools write several frames in a row
        frame = wheel.ZstdDecompressor().decompressobj()
        yield frame.decompress(data)
        if not frame.eof:
            raise ValueError("the frame ends early")
        data = frame.unused_data


def _stream_pieces(family: str, data: bytes, limit: int) -> Iterator[bytes]:
    """Yield the content of gzip members or bz2 streams."""
    while data:
        stream: Any = bz2.BZ2Decompressor() if family == "bz2" else zlib.decompressobj(wbits=_GZIP_WBITS)
        rest = data
        while not stream.eof:
            piece = stream.decompress(rest, min(limit, _PIECE_BYTES))
            rest = b"" if family == "bz2" else stream.unconsumed_tail
            if not piece and not rest and not stream.eof:
                raise ValueError("the frame ends early")
            yield piece
        # gzip files may be padded with zeros.
        data = stream.unused_data.lstrip(b"\0") if family == "gz" else stream.unused_data


def _brotli_pieces(wheel: Any, data: bytes, limit: int) -> Iterator[bytes]:
    reader = wheel.Decompressor()
    if not hasattr(reader, "can_accept_more_data"):
        # Before brotli 1.2: a few bytes of input bound the output.
        for start in range(0, len(data), _BROTLI_BYTES):
            yield reader.process(data[start : start + _BROTLI_BYTES])
    else:
        yield reader.process(data, output_buffer_limit=min(limit, _PIECE_BYTES))
        while not reader.is_finished() and not reader.can_accept_more_data():
            yield reader.process(b"", output_buffer_limit=min(limit, _PIECE_BYTES))
    if not reader.is_finished():
        raise ValueError("the frame ends early")


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
    module, package = _WHEELS[family]
    return optional_module(module, why=f"the compression {family}", package=package)
