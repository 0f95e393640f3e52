"""Which samples a caller means."""

import numpy as np
import pytest

from loader.base.argument_checks import checked_ids


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int64, np.uint64])
def test_ids_of_any_kind_of_number_are_counted_from_the_beginning(kind: type) -> None:
    assert checked_ids(np.array([0, 9, 3], kind), 10, "here").tolist() == [0, 9, 3]


def test_ids_from_the_end_are_resolved_beside_others() -> None:
    assert checked_ids([3, -1, 0, -10], 10, "here").tolist() == [3, 9, 0, 0]


@pytest.mark.parametrize("wrong", [10, -11, 2**62])
def test_an_id_out_of_range_is_named(wrong: int) -> None:
    with pytest.raises(IndexError, match=f"sample {wrong} is not among the 10 of here"):
        checked_ids([0, wrong, 9], 10, "here")


def test_a_mask_is_refused() -> None:
    with pytest.raises(IndexError, match="not an array of bool"):
        checked_ids([True, False], 2, "here")  # type: ignore[list-item, unused-ignore]


def test_an_unsigned_number_is_never_taken_for_one_from_the_end() -> None:
    with pytest.raises(IndexError, match="sample 18446744073709551615 is not among the 10 of here"):
        checked_ids(np.array([2**64 - 1], np.uint64), 10, "here")
