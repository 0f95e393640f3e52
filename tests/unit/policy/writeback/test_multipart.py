"""How files are cut for upload: within the bucket's limits, from nothing to the largest object."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusecache.model.errors import TooLarge
from fusecache.model.objects import GIB, MIB, TIB
from fusecache.policy.writeback.multipart import OBJECT_BYTES_MAX, PARTS_MAX, choose_part_bytes, part_extents

# Cloudflare R2's limits of one part.
SMALLEST = 5 * MIB
LARGEST = 5 * GIB - 5 * MIB


@pytest.mark.parametrize("size", [0, 1, 5 * MIB - 1, 64 * MIB])
def test_a_small_file_is_one_request(size: int) -> None:
    assert choose_part_bytes(size) == 0


@pytest.mark.case(19)
@pytest.mark.parametrize(
    ("size", "count", "part_bytes"),
    [
        (64 * MIB + 1, 2, 64 * MIB),
        (GIB, 16, 64 * MIB),
        (562 * GIB, 8_992, 64 * MIB),
        (TIB, 8_192, 128 * MIB),
        (OBJECT_BYTES_MAX, 8_848, 592 * MIB),
    ],
)
def test_a_large_file_is_cut_into_equal_parts(size: int, count: int, part_bytes: int) -> None:
    assert choose_part_bytes(size) == part_bytes
    assert len(part_extents(size, part_bytes)) == count


@pytest.mark.case(20)
@pytest.mark.parametrize("size", [OBJECT_BYTES_MAX + 1, 5 * TIB])
def test_a_file_larger_than_the_largest_object_is_refused(size: int) -> None:
    with pytest.raises(TooLarge):
        choose_part_bytes(size)


@pytest.mark.case(19)
@given(st.integers(64 * MIB + 1, OBJECT_BYTES_MAX))
def test_every_cut_keeps_the_buckets_rules(size: int) -> None:
    extents = part_extents(size, choose_part_bytes(size))
    sizes = [length for _, length in extents]
    assert 2 <= len(extents) <= PARTS_MAX
    assert len(set(sizes[:-1])) == 1
    assert SMALLEST <= sizes[0] <= LARGEST
    assert 0 < sizes[-1] <= sizes[0]
    assert [offset for offset, _ in extents] == [index * sizes[0] for index in range(len(extents))]
    assert sum(sizes) == size
