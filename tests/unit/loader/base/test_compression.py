"""Decompression stops at the declared size, in every family."""

import tracemalloc

import pytest

from loader.base.compression import LEVELS, compress, decompress

# 40 MB of one byte take some kilobytes in all families but snappy, whose header says the size.
BOMB_BYTES = 40_000_000


@pytest.mark.parametrize("family", sorted(LEVELS))
def test_a_bomb_stops_at_the_declared_size(family: str) -> None:
    """A frame that holds far more than the index says is refused before that is in memory."""
    packed = compress(f"{family}:1" if LEVELS[family] else family, bytes(BOMB_BYTES))
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"more than the 1258 bytes|claims 40000000 bytes, not 1258"):
            decompress(family, packed, 1258)
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("family", sorted(set(LEVELS) - {"snappy"}))
def test_frames_are_read_whole_or_refused(family: str) -> None:
    data = bytes(range(256)) * 20_000  # more than a piece
    packed = compress(family, data)
    assert decompress(family, packed, len(data)) == decompress(family, packed) == data
    with pytest.raises(ValueError, match="ends early"):
        decompress(family, packed[: len(packed) // 2])


@pytest.mark.parametrize("family", ["gz", "bz2", "zstd"])
def test_frames_in_a_row_are_one_content(family: str) -> None:
    packed = compress(family, b"first ") + compress(family, b"second")
    assert decompress(family, packed, 12) == decompress(family, packed) == b"first second"
