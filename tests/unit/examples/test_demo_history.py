"""The demo's comparison can fail: each way in which a resumed run may go wrong shows in one of its answers."""

import json
import zlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from examples.demo import history
from examples.demo.history import Phase, Sample, Step
from loader import MDSWriter

BATCH = 4
STEPS = 10
REFERENCE: dict[int, tuple[Sample, ...]] = {
    step: tuple((step * BATCH + place, 1000 + step * BATCH + place) for place in range(BATCH))
    for step in range(1, STEPS + 1)
}


def phase(name: str, first: int, last: int, loss: float = 0.5) -> Phase:
    """Steps first..last, as the uninterrupted run has them."""
    steps = {
        number: Step(REFERENCE[number], loss, 0.0, 0.1, 100.0 + number) for number in range(first, last + 1)
    }
    return Phase(name, 2, first - 1, steps, {})


def with_samples(found: Phase, step: int, samples: Iterable[Sample]) -> Phase:
    steps = found.steps | {step: replace(found.steps[step], samples=tuple(samples))}
    return replace(found, steps=steps)


def write_log(folder: Path, name: str, rank: int, events: list[dict[str, Any]], tail: str = "") -> None:
    lines = "".join(json.dumps(event) + "\n" for event in events)
    (folder / f"{name}-rank{rank}.jsonl").write_text(lines + tail)


def step_event(step: int, ids: list[int], loss: float = 0.5, wait: float = 0.0) -> dict[str, Any]:
    return {
        "event": "step",
        "step": step,
        "ids": ids,
        "crcs": [1000 + number for number in ids],
        "loss": loss,
        "wait_seconds": wait,
        "step_seconds": 1.0 + wait,
        "time": 100.0 + step + wait,
    }


# The comparison


def test_a_run_that_lost_and_redid_steps_is_the_uninterrupted_one() -> None:
    phases = [phase("A", 1, 6), phase("B", 5, 10)]
    assert history.differing_steps(phases, REFERENCE) == []
    assert list(history.effective_steps(phases)) == list(REFERENCE)
    assert history.redone_steps(phases) == {5: 0.0, 6: 0.0}


def test_a_swapped_id_between_two_steps_differs_in_both() -> None:
    first, second = [list(REFERENCE[step]) for step in (3, 4)]
    first[0], second[0] = second[0], first[0]
    swapped = with_samples(with_samples(phase("A", 1, 10), 3, sorted(first)), 4, sorted(second))
    assert history.differing_steps([swapped], REFERENCE) == [("A", 3), ("A", 4)]


def test_other_bytes_under_the_same_id_differ() -> None:
    changed = [(REFERENCE[7][0][0], 1), *REFERENCE[7][1:]]
    assert history.differing_steps([with_samples(phase("A", 1, 10), 7, changed)], REFERENCE) == [("A", 7)]


def test_a_sample_too_many_or_too_few_differs() -> None:
    for samples in (REFERENCE[2][:-1], (*REFERENCE[2], REFERENCE[2][-1])):
        assert history.differing_steps([with_samples(phase("A", 1, 10), 2, samples)], REFERENCE) == [("A", 2)]


def test_a_redone_step_that_differs_is_found_in_the_phase_that_differs() -> None:
    lost, redone = phase("A", 1, 6), phase("B", 5, 10)
    other = [(999, 999), *REFERENCE[5][1:]]
    assert history.differing_steps([lost, with_samples(redone, 5, other)], REFERENCE) == [("B", 5)]
    # the lost one, too, though the final model is not made of it
    assert history.differing_steps([with_samples(lost, 5, other), redone], REFERENCE) == [("A", 5)]


def test_a_step_that_the_uninterrupted_run_has_not_differs() -> None:
    shorter = {number: samples for number, samples in REFERENCE.items() if number < STEPS}
    assert history.differing_steps([phase("A", 1, 10)], shorter) == [("A", STEPS)]


def test_a_missing_step_is_missing_from_the_effective_history() -> None:
    whole = phase("A", 1, 10)
    holed = replace(whole, steps={number: step for number, step in whole.steps.items() if number != 4})
    assert list(history.effective_steps([holed])) == [1, 2, 3, *range(5, 11)]
    # resumed one step too late: nobody did step 7
    assert 7 not in history.effective_steps([phase("A", 1, 6), phase("B", 8, 10)])
    # stopped too early
    assert list(history.effective_steps([phase("A", 1, 9)])) != list(REFERENCE)


def test_the_effective_history_is_of_whoever_the_final_model_comes_from() -> None:
    phases = [phase("A", 1, 6, loss=1.0), phase("B", 5, 8, loss=2.0), phase("C", 9, 10, loss=3.0)]
    losses = [step.loss for step in history.effective_steps(phases).values()]
    assert losses == [1.0] * 4 + [2.0] * 4 + [3.0] * 2


def test_a_redone_step_tells_how_far_its_losses_are_apart() -> None:
    redone = history.redone_steps([phase("A", 1, 6, loss=1.0), phase("B", 6, 10, loss=1.25)])
    assert redone == {6: 0.25}
    assert redone[6] > history.LOSS_TOLERANCE
    assert history.redone_steps([phase("A", 1, 5), phase("B", 6, 10)]) == {}


def test_waits_are_counted_up_to_the_step_that_two_runs_have_in_common() -> None:
    run = phase("A", 1, 10)
    waits = {number: replace(step, wait_seconds=2.0**-number) for number, step in run.steps.items()}
    assert history.waited_seconds(replace(run, steps=waits), 1) == 0.5
    assert history.waited_seconds(replace(run, steps=waits), 3) == 0.875


# Reading the logs


def test_a_phase_is_what_all_its_ranks_logged(tmp_path: Path) -> None:
    start = {"event": "start", "step": 3}
    saved = {"event": "checkpoint", "step": 4, "seconds": 0.5, "time": 200.0}
    write_log(tmp_path, "A", 0, [start, step_event(4, [9, 1], 0.25), saved, step_event(5, [2, 3])])
    late = saved | {"seconds": 0.75, "time": 199.0}
    torn = json.dumps(step_event(5, [4, 5]))[:-9]  # killed while it wrote
    write_log(tmp_path, "A", 1, [start, step_event(4, [5, 0], 0.75, wait=0.5), late], torn)
    found = history.read_phase(tmp_path, "A", 2)
    assert found.resumed_from == 3
    assert list(found.steps) == [4]  # step 5 is not done: one rank has not logged it
    assert found.steps[4] == Step(((0, 1000), (1, 1001), (5, 1005), (9, 1009)), 0.5, 0.5, 1.5, 104.5)
    assert found.checkpoints == {4: (0.75, 200.0)}


def test_the_uninterrupted_run_is_every_sample_once_with_its_checksum(tmp_path: Path) -> None:
    rows = [np.arange(number, number + 8, dtype=np.int32) for number in range(32)]
    with MDSWriter(tmp_path, {"tokens": "ndarray:int32:8", "id": "int"}, size_limit=512) as writer:
        for number, tokens in enumerate(rows):
            writer.write({"tokens": tokens, "id": number})
    order: dict[str, Any] = {"global_batch_size": BATCH, "seed": 17, "order": "py1e", "canonical_nodes": 4}
    found = history.uninterrupted(tmp_path, order)
    assert list(found) == list(range(1, 9))
    samples = [pair for step in found.values() for pair in step]
    assert sorted(samples) == [(number, zlib.crc32(rows[number].tobytes())) for number in range(32)]
    assert all(list(step) == sorted(step) for step in found.values())
    assert history.uninterrupted(tmp_path, order | {"seed": 18}) != found


def test_a_checkpoint_is_durable_for_the_phase_that_wrote_what_was_seen() -> None:
    lost = replace(phase("A", 1, 6), checkpoints={4: (0.1, 100.0), 6: (0.1, 110.0)})
    redone = replace(phase("B", 5, 10), checkpoints={6: (0.1, 150.0), 9: (0.1, 160.0)})
    seen = {4: 101.5, 6: 152.0}
    assert history.durable_seconds(lost, [lost, redone], seen) == {4: 1.5}
    assert history.durable_seconds(redone, [lost, redone], seen) == {6: 2.0}  # 9 was never seen whole
