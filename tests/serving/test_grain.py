"""A Grain pipeline over the loader's batches: its state continues the run, also on another number of ranks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loader import MDSWriter
from tests.support.mounts import Mount

SAMPLES, GLOBAL_BATCH, STEPS = 96, 8, 24


def write_numbers(folder: Path) -> None:
    with MDSWriter(folder, {"id": "int", "tokens": "ndarray:int32:9"}, size_limit=4096) as writer:
        for number in range(SAMPLES):
            writer.write({"id": number, "tokens": np.arange(number, number + 9, dtype=np.int32)})


@pytest.mark.parametrize("workers", [0, 2])
def test_a_grain_pipeline_continues_on_another_number_of_ranks(
    mount: Callable[..., Mount], job: Callable[..., dict[str, Any]], tmp_path: Path, workers: int
) -> None:
    one = mount()
    write_numbers(one.path / "data")

    def steps(ranks: int, state: str = "", take: int = STEPS) -> tuple[list[set[int]], str]:
        """Return the samples of each step over all ranks, and the state of rank 0 after them."""
        words = [one.path / "data", GLOBAL_BATCH, workers, take, state or "-", ranks]
        found = [job("tests.serving.grain_rank", *words, rank) for rank in range(ranks)]
        batches = zip(*(each["batches"] for each in found), strict=True)
        return [set().union(*batch) for batch in batches], found[0]["state"]

    whole, _ = steps(2)
    assert len(whole) == STEPS
    assert all(set().union(*whole[epoch : epoch + 12]) == set(range(SAMPLES)) for epoch in (0, 12))
    begun, state = steps(2, take=5)
    rest, _ = steps(4, state, take=STEPS - 5)
    assert begun + rest == whole
