"""What the trainers consumed, as their step logs say, and whether it is what an uninterrupted run consumes.

A step counts as done when every rank of its phase has logged it: a killed node may leave its last one open.
"""

import json
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from loader import ElasticBatchSampler, MDSDataset, World

# One sample as consumed: its id and the CRC-32 of its tokens.
Sample = tuple[int, int]
# Gloo sums gradients in another order with another number of ranks; more than that is another state.
LOSS_TOLERANCE = 0.02


@dataclass(frozen=True, slots=True)
class Step:
    """One global batch as one phase consumed it."""

    samples: tuple[Sample, ...]  # of all ranks, sorted
    loss: float  # mean over ranks
    wait_seconds: float  # of the rank that waited longest
    step_seconds: float  # likewise, the wait included
    time: float  # when the last rank was done, seconds since the epoch


@dataclass(frozen=True, slots=True)
class Phase:
    """What one node did between start and end."""

    name: str
    ranks: int
    resumed_from: int  # steps done before this phase, 0 for a fresh start
    steps: dict[int, Step]
    checkpoints: dict[
        int, tuple[float, float]
    ]  # step -> (stall seconds of the slowest rank, time it was done)


def read_phase(folder: Path, name: str, ranks: int) -> Phase:
    """Read the step logs of one phase."""
    events = [event for rank in range(ranks) for event in read_log(folder / f"{name}-rank{rank}.jsonl")]
    by_step: dict[int, list[dict[str, Any]]] = {}
    checkpoints: dict[int, tuple[float, float]] = {}
    for event in events:
        if event["event"] == "step":
            by_step.setdefault(event["step"], []).append(event)
        elif event["event"] == "checkpoint":
            seconds, done = checkpoints.get(event["step"], (0.0, 0.0))
            checkpoints[event["step"]] = (max(seconds, event["seconds"]), max(done, event["time"]))
    steps = {number: _merge(rows) for number, rows in sorted(by_step.items()) if len(rows) == ranks}
    resumed_from = next(event["step"] for event in events if event["event"] == "start")
    return Phase(name, ranks, resumed_from, steps, checkpoints)


def read_log(path: Path) -> Iterator[dict[str, Any]]:
    """Yield a step log's events; a last line that a killed rank did not finish is left out."""
    for line in path.read_bytes().splitlines(keepends=True):
        if line.endswith(b"\n"):
            yield json.loads(line)


def uninterrupted(dataset_folder: Path, order: dict[str, Any]) -> dict[int, tuple[Sample, ...]]:
    """Return step -> samples, sorted, of one process that reads the epoch from start to end.

    order: the sampler's arguments. Reads a plain local copy; nothing is trained.
    """
    dataset = MDSDataset(dataset_folder)
    sampler = ElasticBatchSampler(dataset, world=World(), **order)
    return {
        number: tuple(
            sorted(
                (sample, zlib.crc32(tokens.numpy()))
                for sample, tokens in zip(batch["id"].tolist(), batch["tokens"], strict=True)
            )
        )
        for number, batch in enumerate(DataLoader(dataset, batch_sampler=sampler), start=1)
    }


def differing_steps(phases: list[Phase], reference: dict[int, tuple[Sample, ...]]) -> list[tuple[str, int]]:
    """Return (phase, step) of every global batch, redone ones too, that is not the uninterrupted run's."""
    return [
        (phase.name, number)
        for phase in phases
        for number, step in phase.steps.items()
        if step.samples != reference.get(number)
    ]


def effective_steps(phases: list[Phase]) -> dict[int, Step]:
    """Return the history that the final model is made of: each phase up to where the next one resumed."""
    history: dict[int, Step] = {}
    for phase, following in zip(phases, [*phases[1:], None], strict=True):
        stop = following.resumed_from if following is not None else max(phase.steps, default=0)
        history.update((n, step) for n, step in phase.steps.items() if phase.resumed_from < n <= stop)
    return history


def redone_steps(phases: list[Phase]) -> dict[int, float]:
    """Return the steps that two phases did, each with the difference of its two losses."""
    seen: dict[int, float] = {}
    redone: dict[int, float] = {}
    for phase in phases:
        for number, step in phase.steps.items():
            if number in seen:
                redone[number] = abs(seen[number] - step.loss)
            seen[number] = step.loss
    return redone


def waited_seconds(phase: Phase, last: int) -> float:
    """Return how long a phase waited for data up to a step, at each the rank that waited longest."""
    return sum(step.wait_seconds for number, step in phase.steps.items() if number <= last)


def durable_seconds(phase: Phase, phases: list[Phase], seen: dict[int, float]) -> dict[int, float]:
    """Return step -> seconds from the end of a checkpoint's writing until it was whole in the bucket.

    seen: step -> when its last object was first seen there. A checkpoint that a kill kept from the
    bucket, and that a later phase wrote again, counts for the later phase alone.
    """
    found: dict[int, float] = {}
    for step, (_, written) in phase.checkpoints.items():
        writers = [at for other in phases for _, at in (other.checkpoints.get(step, (0.0, math.inf)),)]
        last = max((at for at in writers if at <= seen.get(step, -math.inf)), default=None)
        if last == written:
            found[step] = seen[step] - written
    return found


def _merge(rows: list[dict[str, Any]]) -> Step:
    samples = sorted(pair for row in rows for pair in zip(row["ids"], row["crcs"], strict=True))
    return Step(
        samples=tuple(samples),
        loss=sum(row["loss"] for row in rows) / len(rows),
        wait_seconds=max(row["wait_seconds"] for row in rows),
        step_seconds=max(row["step_seconds"] for row in rows),
        time=max(row["time"] for row in rows),
    )
