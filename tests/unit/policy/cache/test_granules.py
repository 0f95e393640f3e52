"""Chunks, blocks and granules add up."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from fusecache.model.objects import GRANULE_BYTES, GRANULES_PER_BLOCK, Extent
from fusecache.policy.cache.granules import (
    CHUNK_BYTES,
    GRANULES_PER_CHUNK,
    PAGE_BYTES,
    blocks_of,
    chunk_size,
    disk_bytes,
    full_mask,
    mask_between,
    mask_bytes,
    mask_of_bytes,
    pieces,
    received_mask,
    runs,
    split_by_chunk,
)

masks = st.integers(0, (1 << GRANULES_PER_CHUNK) - 1)


@given(masks)
def test_runs_cover_the_mask_and_never_touch(mask: int) -> None:
    found = list(runs(mask))
    total = 0
    for first, stop in found:
        assert first < stop
        total |= mask_between(first, stop)
    assert total == mask
    assert all(before[1] < after[0] for before, after in itertools.pairwise(found))


@given(st.integers(0, 1 << 40), st.integers(1, 1 << 28))
def test_pieces_of_an_extent_are_adjacent_and_complete(start: int, size: int) -> None:
    position = start
    for chunk, first, stop in split_by_chunk(Extent(start, start + size)):
        assert 0 <= first < stop <= CHUNK_BYTES
        assert chunk * CHUNK_BYTES + first == position
        position += stop - first
    assert position == start + size


@given(st.integers(0, 1 << 43))
def test_the_chunks_of_an_object_add_up_to_its_size(size: int) -> None:
    last = size // CHUNK_BYTES
    assert last * CHUNK_BYTES + chunk_size(size, last) == size
    assert chunk_size(size, last + 1) == 0


@given(st.integers(1, CHUNK_BYTES), masks)
def test_bytes_of_a_mask_are_those_of_its_granules(size: int, mask: int) -> None:
    mask &= full_mask(size)
    expected = sum(
        min(size, (granule + 1) * GRANULE_BYTES) - granule * GRANULE_BYTES
        for granule in range(GRANULES_PER_CHUNK)
        if mask >> granule & 1
    )
    assert mask_bytes(mask, size) == expected
    assert mask_bytes(full_mask(size), size) == size


@given(st.integers(0, CHUNK_BYTES - 1), st.integers(1, CHUNK_BYTES))
def test_the_mask_of_bytes_is_the_smallest_that_holds_them(start: int, size: int) -> None:
    stop = min(start + size, CHUNK_BYTES)
    ((first, end),) = runs(mask_of_bytes(start, stop))
    assert first * GRANULE_BYTES <= start < (first + 1) * GRANULE_BYTES
    assert (end - 1) * GRANULE_BYTES < stop <= end * GRANULE_BYTES


@given(st.integers(0, 127), st.integers(1, 128), st.integers(0, CHUNK_BYTES))
def test_received_granules_are_whole_and_within_the_request(first: int, length: int, received: int) -> None:
    stop = min(first + length, GRANULES_PER_CHUNK)
    mask = received_mask(first, stop, received)
    assert not mask & ~mask_between(first, stop)
    assert mask.bit_count() == min(stop - first, received // GRANULE_BYTES)


@given(masks)
def test_blocks_of_a_mask_are_those_with_a_granule(mask: int) -> None:
    granules = [granule for granule in range(GRANULES_PER_CHUNK) if mask >> granule & 1]
    assert list(blocks_of(mask)) == sorted({granule // GRANULES_PER_BLOCK for granule in granules})


@given(st.integers(1, CHUNK_BYTES), masks)
def test_bytes_on_the_disk_are_whole_pages_and_add_up(size: int, mask: int) -> None:
    mask &= full_mask(size)
    taken = disk_bytes(mask, size)
    assert taken % PAGE_BYTES == 0
    assert mask_bytes(mask, size) <= taken < mask_bytes(mask, size) + PAGE_BYTES
    assert taken == sum(
        disk_bytes(1 << granule, size) for granule in range(GRANULES_PER_CHUNK) if mask >> granule & 1
    )


@given(masks, st.integers(1, GRANULES_PER_CHUNK))
def test_pieces_of_a_mask_are_its_granules_in_order_none_too_long(mask: int, most: int) -> None:
    found = list(pieces(mask, most))
    assert all(0 < stop - first <= most for first, stop in found)
    assert [granule for piece in found for granule in range(*piece)] == [
        granule for granule in range(GRANULES_PER_CHUNK) if mask >> granule & 1
    ]


@given(masks)
def test_pieces_of_a_mask_are_as_few_as_the_longest_allows(mask: int) -> None:
    assert list(pieces(mask, GRANULES_PER_CHUNK)) == list(runs(mask))
