"""What a library delivers is compared with what was written."""

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.samples import CONTEXT, DeliveryError, check_count, check_delivery, make_value


def tokens(*numbers: int) -> NDArray[np.int32]:
    """Return a batch of samples with these numbers."""
    rng = np.random.default_rng(1)
    return np.stack([make_value("tokens", number, rng) for number in numbers])


def test_every_sample_once_in_any_order_is_accepted() -> None:
    check_delivery("tokens", [tokens(3, 1), tokens(0, 2)], 4, 2, with_values=True)


def test_an_incomplete_last_batch_may_be_missing_and_no_more() -> None:
    check_count(4, samples=5, batch=2)
    check_count(5, samples=5, batch=2)
    for count in (3, 6):
        with pytest.raises(DeliveryError, match=f"{count} samples of 5"):
            check_count(count, samples=5, batch=2)


@pytest.mark.parametrize("second", [(0, 1), (2, 4)])
def test_a_sample_twice_or_of_another_dataset_is_refused(second: tuple[int, int]) -> None:
    with pytest.raises(DeliveryError):
        check_delivery("tokens", [tokens(0, 1), tokens(*second)], 4, 2, with_values=True)


def test_a_sample_that_is_cut_off_is_refused() -> None:
    rng = np.random.default_rng(1)
    blobs = [make_value("blobs", number, rng) for number in range(2)]
    check_delivery("blobs", [blobs], 2, 2, with_values=True)
    with pytest.raises(DeliveryError, match="100 bytes"):
        check_delivery("blobs", [[blobs[0], blobs[1][:100]]], 2, 2, with_values=True)
    with pytest.raises(DeliveryError, match="shape"):
        check_delivery("tokens", [tokens(0, 1)[:, : CONTEXT - 1]], 2, 2, with_values=True)


def test_the_same_blob_twice_is_refused() -> None:
    blob = make_value("blobs", 0, np.random.default_rng(1))
    with pytest.raises(DeliveryError, match="only 1 different"):
        check_delivery("blobs", [[blob, blob]], 2, 2, with_values=True)
