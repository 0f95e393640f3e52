"""The loader's order and state under accelerate and Lightning are those of the sampler."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loader import MDSWriter
from tests.trainers.workers import Worker

SAMPLES = 120  # seven batches of 16 an epoch


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """A process with both trainers in it."""
    with Worker("jobs_loader", tmp_path_factory.mktemp("trainer")) as worker:
        yield worker


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small dataset."""
    out = tmp_path_factory.mktemp("data")
    with MDSWriter(out, {"id": "int", "x": "ndarray:float32:8"}, size_limit=1024) as writer:
        for number in range(SAMPLES):
            writer.write({"id": number, "x": np.full(8, number / SAMPLES, np.float32)})
    return out


@pytest.mark.parametrize(
    ("function", "options"),
    [
        ("accelerate", {"workers": 0}),
        ("accelerate", {"workers": 2}),
        ("lightning", {"kind": "DataLoader"}),
        ("lightning", {"kind": "Loader"}),
    ],
)
def test_a_run_stopped_in_its_second_epoch_continues_as_if_it_had_not_been(
    trainer: Worker, directory: Path, function: str, options: dict[str, Any]
) -> None:
    expected = trainer.call("order", directory=str(directory), epochs=3)
    begun, state = trainer.call(function, directory=str(directory), steps=10, state=None, **options)
    assert begun == expected[:10]
    assert (state["epoch"], state["samples"]) == (1, 48)
    rest, state = trainer.call(function, directory=str(directory), steps=8, state=state, **options)
    assert rest == expected[10:18]
    assert (state["epoch"], state["samples"]) == (2, 64)
