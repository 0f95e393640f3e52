"""Which samples a caller means."""

import numpy as np
import pytest

from loader.base.sample_ids import checked_ids


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int64, np.uint64])
def test_ids_of_any_kind_of_number_are_counted_from_the_beginning(kind: type) -> None:
    assert checked_ids(np.array([0, 9, 3], kind), 10, "here").tolist() == [0, 9, 3]


def test_an_unsigned_number_is_never_taken_for_one_from_the_end() -> None:
    with pytest.raises(IndexError, match="sample 18446744073709551615 is not among the 10 of here"):
        checked_ids(np.array([2**64 - 1], np.uint64), 10, "here")
