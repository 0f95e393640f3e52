"""The loader's order and state under accelerate and Lightning, on one rank and on two, are those of the sampler."""

from collections.abc import Iterator
from itertools import chain
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
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """The same in two processes under torchrun."""
    launcher = ("torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2", "-m")
    with Worker("jobs_loader_ranks", tmp_path_factory.mktemp("ranks"), launcher=launcher) as worker:
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


def dealt_out(answers: list[Any]) -> tuple[list[list[int]], dict[str, Any]]:
    """The sorted union over ranks of each step, of which each has half, and the state, which all agree on."""
    seen, states = zip(*answers, strict=True)
    assert all(state == states[0] for state in states)
    assert {len(ids) for ids in chain.from_iterable(seen)} == {8}
    return [sorted(chain.from_iterable(parts)) for parts in zip(*seen, strict=True)], states[0]


@pytest.mark.parametrize(
    ("function", "options"),
    [
        ("accelerate", {"workers": 0, "kind": "left out"}),
        ("accelerate", {"workers": 2, "kind": "left out"}),
        ("accelerate", {"workers": 0, "kind": "Loader"}),
        ("lightning", {"kind": "DataLoader", "ranks": 2}),
        ("lightning", {"kind": "Loader", "ranks": 2}),
    ],
)
def test_two_ranks_share_each_global_batch_and_continue_in_the_second_epoch_and_on_one_rank(
    trainer: Worker, ranks: Worker, directory: Path, function: str, options: dict[str, Any]
) -> None:
    expected = [sorted(ids) for ids in trainer.call("order", directory=str(directory), epochs=3)]
    arguments = {"directory": str(directory), **options}
    begun, state = dealt_out(ranks.call(function, steps=10, state=None, **arguments))
    assert begun == expected[:10]
    assert (state["epoch"], state["samples"]) == (1, 48)
    rest, state = dealt_out(ranks.call(function, steps=8, state=state, **arguments))
    assert rest == expected[10:18]
    assert (state["epoch"], state["samples"]) == (2, 64)
    alone, _ = trainer.call("accelerate", directory=str(directory), workers=0, steps=3, state=state)
    assert [sorted(ids) for ids in alone] == expected[18:21]


@pytest.mark.parametrize("workers", [0, 2])
def test_streamings_face_moves_between_one_rank_and_two_in_an_epoch_and_at_its_end(
    trainer: Worker, ranks: Worker, directory: Path, workers: int
) -> None:
    arguments = {"directory": str(directory), "workers": workers}
    whole, end = trainer.call("streaming", steps=None, state=None, **arguments)
    expected = [sorted(ids) for ids in whole]
    begun, state = dealt_out(ranks.call("streaming", steps=3, state=None, **arguments))
    middle, state = trainer.call("streaming", steps=2, state=state, **arguments)
    answers = ranks.call("streaming", steps=None, state=state, **arguments)
    rest = [sorted(chain.from_iterable(parts)) for parts in zip(*(seen for seen, _ in answers), strict=True)]
    assert begun + [sorted(ids) for ids in middle] + rest == expected
    assert [state for _, state in answers] == [end] * 2
    after, state = trainer.call("streaming", steps=None, state=end, **arguments)
    assert (after, state) == ([], end)  # as there: the iteration that a state ends with is over


def test_trainers_that_would_deal_out_a_ranks_samples_once_more_are_refused(
    ranks: Worker, directory: Path
) -> None:
    """Each rank would skip every second of its own batches, and nobody would read those."""
    arguments = {"directory": str(directory), "steps": 3, "state": None}
    for answer in ranks.call("refusal", trainer="accelerate", workers=0, kind="prepared", **arguments):
        assert answer.startswith("OrderError: accelerate's prepare would deal out"), answer
        assert "leave the DataLoader out of prepare" in answer
    for answer in ranks.call(
        "refusal", trainer="lightning", kind="DataLoader", ranks=2, deals=True, **arguments
    ):
        assert answer.startswith("TypeError: "), answer
        assert "use_distributed_sampler=False" in answer


@pytest.mark.parametrize(("dp", "tp"), [(1, 2), (2, 1)])
def test_ranks_of_a_device_mesh_read_as_their_part_of_it_says(
    trainer: Worker, ranks: Worker, directory: Path, dp: int, tp: int
) -> None:
    expected = trainer.call("order", directory=str(directory), epochs=1)
    first, second = ranks.call("peers", directory=str(directory), dp=dp, tp=tp)
    if tp == 2:
        assert first == second == expected
    else:
        assert [sorted(a + b) for a, b in zip(first, second, strict=True)] == [
            sorted(ids) for ids in expected
        ]
