"""The demo's outcome: a table to read, `report.json` to keep, `loss.png` to look at."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from examples.demo.history import Phase
from examples.demo.nodes import Counters

COLOURS = ("tab:blue", "tab:orange", "tab:green")
REPORT_VERSION = 1


class Check(StrEnum):
    """What the demo promises; all of it must hold."""

    DATASET = "the dataset in the bucket is what was tokenised and written"
    STREAMING = "mosaicml-streaming reads the same dataset, or is not installed"
    LOST_WORK = "node A's kill lost steps, and node B redid them"
    RESUME = "every resume came from the newest whole checkpoint in the bucket"
    TORN = "a trainer killed while overwriting a checkpoint changed nothing in the bucket"
    ORDER = "every global batch is the uninterrupted run's, redone ones too"
    EPOCH = "the epoch is complete: every sample exactly once"
    LOSS = "redone steps have the same loss"
    CHECKPOINTS = "every checkpoint object in the bucket is what was written"
    NOTHING_ELSE = "the bucket holds nothing else"


@dataclass
class Report:
    """Everything that was measured and checked; a check that was never made is a check that failed."""

    checks: dict[Check, bool] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)

    def check(self, name: Check, *, held: bool) -> None:
        """Record whether `name` held; once false, it stays false."""
        self.checks[name] = held and self.checks.get(name, True)

    def held(self) -> bool:
        """Return whether every expected check was made and held."""
        return all(self.checks.get(name, False) for name in Check)


@dataclass(frozen=True, slots=True)
class PhaseRow:
    """One line of the table; seconds are wall-clock, `wait` and `stall` of the slowest rank at each step."""

    phase: str
    ranks: int
    first_step: int
    last_step: int
    redone_steps: int
    samples_per_second: float
    cache_hits: int
    fetched_bytes: int
    first_wait_seconds: float  # of data_wait_seconds, the first batch's
    data_wait_seconds: float
    checkpoints: int
    checkpoint_stall_seconds: float  # sum
    durable_seconds: (
        float | None
    )  # from a checkpoint's last close to its `.metadata` in the bucket; the median


def phase_row(
    phase: Phase,
    earlier_steps: set[int],
    counters: Counters,
    durable_seconds: dict[int, float],
    batch_size: int,
) -> PhaseRow:
    """Summarise one phase. earlier_steps: done by an earlier phase; durable_seconds: by checkpoint's step."""
    busy = sum(step.step_seconds for step in phase.steps.values())
    delays = sorted(durable_seconds[step] for step in phase.checkpoints if step in durable_seconds)
    return PhaseRow(
        phase=phase.name,
        ranks=phase.ranks,
        first_step=min(phase.steps),
        last_step=max(phase.steps),
        redone_steps=len(earlier_steps & phase.steps.keys()),
        samples_per_second=len(phase.steps) * batch_size / busy,
        cache_hits=counters.cache_hits,
        fetched_bytes=counters.fetched_bytes,
        first_wait_seconds=phase.steps[min(phase.steps)].wait_seconds,
        data_wait_seconds=sum(step.wait_seconds for step in phase.steps.values()),
        checkpoints=len(phase.checkpoints),
        checkpoint_stall_seconds=sum(seconds for seconds, _ in phase.checkpoints.values()),
        durable_seconds=delays[len(delays) // 2] if delays else None,
    )


COLUMNS: dict[str, Callable[[PhaseRow], str]] = {
    "phase": lambda row: row.phase,
    "ranks": lambda row: str(row.ranks),
    "steps": lambda row: f"{row.first_step}-{row.last_step}",
    "redone": lambda row: str(row.redone_steps),
    "samples/s": lambda row: f"{row.samples_per_second:.0f}",
    "cache hits": lambda row: str(row.cache_hits),
    "fetched MB": lambda row: f"{row.fetched_bytes / 1e6:.1f}",
    "first batch s": lambda row: f"{row.first_wait_seconds:.2f}",
    "data wait s": lambda row: f"{row.data_wait_seconds:.2f}",
    "checkpoints": lambda row: str(row.checkpoints),
    "stall s": lambda row: f"{row.checkpoint_stall_seconds:.2f}",
    "durable s": lambda row: "-" if row.durable_seconds is None else f"{row.durable_seconds:.2f}",
}


def table(rows: list[PhaseRow]) -> str:
    """Return the phases as lines of aligned columns."""
    cells = [list(COLUMNS), *([show(row) for show in COLUMNS.values()] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(COLUMNS))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells
    )


def write_report(path: Path, report: Report, rows: list[PhaseRow], phases: list[Phase]) -> None:
    """Write everything as JSON."""
    document = {
        "version": REPORT_VERSION,
        "held": report.held(),
        "checks": {name: report.checks.get(name, False) for name in Check},
        "notes": report.notes,
        "phases": [asdict(row) for row in rows],
        "losses": {
            phase.name: {number: step.loss for number, step in phase.steps.items()} for phase in phases
        },
    }
    path.write_text(json.dumps(document, indent=2) + "\n")


def plot_losses(path: Path, phases: list[Phase], ends: dict[str, str]) -> None:
    """Draw the loss over steps, a colour a node, what a kill undid faint. ends: phase -> what ended it."""
    import matplotlib  # a second to import, and of no use before the end

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(10, 5))
    for phase, colour, following in zip(phases, COLOURS, [*phases[1:], None], strict=True):
        kept_until = following.resumed_from if following is not None else max(phase.steps)
        kept = [number for number in phase.steps if number <= kept_until]
        lost = [number for number in phase.steps if number >= kept_until]
        label = f"node {phase.name}, {phase.ranks} rank{'s' if phase.ranks > 1 else ''}"
        axes.plot(kept, [phase.steps[n].loss for n in kept], color=colour, label=label)
        last = max(phase.steps)
        if len(lost) > 1:
            losses = [phase.steps[n].loss for n in lost]
            axes.plot(
                lost, losses, color=colour, linewidth=4, alpha=0.35, label=f"{phase.name}: lost and redone"
            )
            axes.axvspan(kept_until, last, color="tab:red", alpha=0.1)
        if phase.name in ends:
            axes.axvline(last, color="tab:red", linestyle="--", linewidth=1)
            note = f" {phase.name}: {ends[phase.name]}"
            axes.text(
                last, axes.get_ylim()[1], note, rotation=90, va="top", ha="right", fontsize=8, color="tab:red"
            )
    axes.set(xlabel="global batch", ylabel="loss (nats a byte)", title="One epoch, three nodes")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
