"""Which short histories are run, and at which moments the first daemon dies in them."""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tests.handover.machine import History, Step, Wrong
from tests.history.programs import every_moment

# Two names and a directory; `a` has been published, or is about to be.
BEGINNINGS: tuple[tuple[Step, ...], ...] = (
    (("save", "a"), ("wait", 3.0)),
    (("save", "a"),),
    (("save", "a"), ("save", "b"), ("wait", 3.0)),
    (("mkdir", "x"), ("save", "x/a"), ("wait", 3.0), ("save", "b")),
)
STEPS: tuple[Step, ...] = (
    ("save", "a"),
    ("save", "b"),
    ("open", 0, "a", "r+"),
    ("open", 1, "b", "r+"),
    ("open", 2, "a", "r"),
    ("write", 0),
    ("write", 1),
    ("close", 0),
    ("rename", "a", "b"),
    ("rename", "b", "a"),
    ("unlink", "a"),
    ("unlink", "b"),
    ("unlink", "x/a"),
    ("wait", 1.2),
    ("wait", 3.0),
    ("open", 0, "x/a", "r+"),
    ("open", 3, "a", "w"),
    ("write", 3),
    ("rename", "b", "x/a"),
    ("rename", "x/a", "b"),
    ("rename_folder", "x", "y"),
)


@dataclass(frozen=True)
class Finding:
    """A history that went wrong: what was done, when the daemon died, the seed of the order of tasks, what was seen."""

    steps: tuple[Step, ...]
    moment: str
    why: str


def run_with_kills(
    steps: tuple[Step, ...], moments: int | None, rng: random.Random
) -> tuple[int, list[Finding]]:
    """Run a history without a kill, then with a kill at each moment. moments: at how many random ones; None: at all.

    Returns how many runs it were, and what went wrong.
    """
    seed = rng.randrange(1 << 30)
    whole = History(steps, seed=seed)
    try:
        whole.run()
    except Wrong as exc:
        return 1, [Finding(steps, "never", str(exc))]
    kills = [History(steps, kill_before=index, seed=seed) for index in range(1, len(steps))]
    kills += [History(steps, moment, seed=seed) for moment in every_moment(whole.counts)]
    for each in kills:
        each.dies_again = rng.random() < 0.5
    chosen = kills if moments is None else rng.sample(kills, min(moments, len(kills)))
    found = []
    for each in chosen:
        try:
            each.run()
        except Exception as exc:  # noqa: BLE001  # each is a finding
            leaves = _first_of(exc)
            moment = each.moment or f"before step {each.kill_before}"
            found.append(Finding(steps, f"{moment}, seed {seed}", leaves))
    return 1 + len(chosen), found


def all_histories(length: int) -> Iterator[tuple[Step, ...]]:
    """Yield every order of so many steps after each beginning."""
    for beginning in BEGINNINGS:
        for steps in itertools.product(STEPS, repeat=length):
            yield (*beginning, *steps)


def random_history(rng: random.Random, length: int) -> tuple[Step, ...]:
    """Return a longer history."""
    return (*rng.choice(BEGINNINGS), *rng.choices(STEPS, k=length))


def shortest(finding: Finding, rng: random.Random) -> Finding:
    """Return a history with fewer steps in which some kill goes wrong too."""
    steps: Sequence[Step] = finding.steps
    index = 0
    while index < len(steps):
        shorter = (*steps[:index], *steps[index + 1 :])
        _, found = run_with_kills(shorter, None, rng)
        if found:
            steps, finding = shorter, found[0]
        else:
            index += 1
    return finding


def _first_of(exc: BaseException) -> str:
    while isinstance(exc, BaseExceptionGroup):
        exc = exc.exceptions[0]
    return f"{type(exc).__name__}: {exc}"
