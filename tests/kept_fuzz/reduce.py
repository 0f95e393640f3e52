"""Makes a history that failed shorter, as long as it fails in the same way.

Each candidate runs in a directory of its own, several at once under the same kills. One that depends on chance runs
more than once.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.kept_fuzz.node import Node, NodeGone
from tests.kept_fuzz.rounds import Outcome, run_round
from tests.kept_fuzz.steps import EVENTS, MEETINGS, Step, Steps, meetings_of

WIDTH = 16
_FIRST_RUNS = 12
_MOST_COPIES = 6
_PLAIN_SIZE = 12
# Of a history, at first: so many candidates run at once.
_FIRST_PARTS = 12
_numbers = itertools.count(1)


class Reduction:
    """One history's reduction. make_node: returns the node to run in, a new one if the last is gone."""

    def __init__(self, make_node: Callable[[], Node], models: Path, seconds: float) -> None:
        self._make_node, self._models = make_node, models
        self._deadline = time.monotonic() + seconds
        self._kind = ""
        self._copies = 1
        self._best: Outcome | None = None
        self.runs = 0

    def shorten(self, failed: Outcome) -> tuple[Outcome, str]:
        """Return the shortest run that failed in the same way, and how often the whole history did."""
        assert failed.finding is not None
        self._kind = failed.finding.kind
        happened = failed.as_happened()
        # With what is simpler first.
        for steps in (_without_waits(happened), happened, failed.at_its_times()):
            outcomes = self._run([steps] * _FIRST_RUNS)
            again = [each for each in outcomes if self._is_same(each)]
            if again:
                self._best = again[0]
                self._copies = min(_MOST_COPIES, -(-2 * len(outcomes) // len(again)) - 1)
                break
        rate = f"{len(again)} of {len(outcomes)}"
        if self._best is None:
            return failed, rate
        self._with_few_kills()
        length = 0
        while len(self._best.steps) != length and time.monotonic() < self._deadline:
            length = len(self._best.steps)
            self._without_events()
            self._without_operations()
        for index in range(len(self._best.steps)):
            self._accept(_simpler(self._best.steps, index))
        return self._best, rate

    def _with_few_kills(self) -> None:
        """Most faults need one kill or two: try each alone, and as a plain kill, so that all can run together."""
        assert self._best is not None
        steps = self._best.steps
        events = [index for index, step in enumerate(steps) if step[0] in EVENTS]
        for count in range(min(3, len(events))):
            kept = itertools.combinations(events, count)
            if self._accept([_only_kills(steps, set(each)) for each in itertools.islice(kept, WIDTH)]):
                return

    def _without_events(self) -> None:
        """Leave out kills and upgrades, one after the other, as only histories with the same ones can run together."""
        assert self._best is not None
        steps = self._best.steps
        for index in reversed([index for index, step in enumerate(steps) if step[0] == "gather"]):
            steps = self._best.steps
            event = next((it for it in range(index + 1, len(steps)) if steps[it][0] in MEETINGS), index)
            self._accept([_left_out(steps, {index, event}), _left_out(steps, {index})])

    def _without_operations(self) -> None:
        """Leave out all parts that the failure does not need, first large ones."""
        assert self._best is not None
        size = max(1, len(self._best.steps) // _FIRST_PARTS)
        while size > 0 and time.monotonic() < self._deadline:
            steps = self._best.steps
            places = [index for index, step in enumerate(steps) if step[0] not in MEETINGS]
            parts = [set(places[begin : begin + size]) for begin in range(0, len(places), size)]
            spare = [
                part
                for part, outcome in zip(
                    parts, self._try([_left_out(steps, it) for it in parts]), strict=True
                )
                if outcome is not None
            ]
            # Parts that can be spared one by one mostly can be spared together.
            while len(spare) > 1 and not self._accept([_left_out(steps, set().union(*spare))]):
                spare = spare[: len(spare) // 2]
            if not spare:
                size //= 2

    def _accept(self, candidates: Sequence[Steps]) -> bool:
        """Return whether a candidate failed: the first such is the best run then."""
        return any(outcome is not None for outcome in self._try(candidates))

    def _try(self, candidates: Sequence[Steps]) -> list[Outcome | None]:
        """Return a failed run of each candidate, None if there was none. The shortest is the best run from now on."""
        found: dict[Steps, Outcome] = {}
        by_meetings: dict[object, list[Steps]] = {}
        for steps in candidates:
            by_meetings.setdefault(meetings_of(steps), []).append(steps)
        for group in by_meetings.values():
            for part in _batches(group, max(1, WIDTH // self._copies)):
                if time.monotonic() < self._deadline:
                    runs = self._run(part * max(self._copies, WIDTH // 4 // len(part)))
                    found |= {each.steps: each for each in runs if self._is_same(each)}
        for outcome in found.values():
            assert self._best is not None
            if len(outcome.steps) <= len(self._best.steps):
                self._best = outcome
        return [found.get(steps) for steps in candidates]

    def _is_same(self, outcome: Outcome) -> bool:
        return outcome.finding is not None and outcome.finding.kind == self._kind

    def _run(self, programs: Sequence[Steps]) -> list[Outcome]:
        outcomes = [Outcome(f"t{next(_numbers)}", "", steps) for steps in programs]
        self.runs += len(outcomes)
        try:
            run_round(self._make_node(), outcomes, self._models)
        except NodeGone:
            return []
        return outcomes


def _only_kills(steps: Steps, kept: set[int]) -> Steps:
    """Return the history with a plain kill, and a meeting before it, at these places, and no other event."""
    found: list[Step] = []
    gathered: Step | None = None
    begin = 0
    for index, step in enumerate(steps):
        if step[0] == "gather":
            gathered, begin = step, len(found)
        elif step[0] not in EVENTS:
            found.append(step)
        elif index in kept:
            found.insert(begin if gathered else len(found), ("gather", 0.0))
            found.append(("kill", 0.0))
            gathered = None
    return tuple(found)


def _batches(group: list[Steps], size: int) -> Iterator[list[Steps]]:
    for begin in range(0, len(group), size):
        yield group[begin : begin + size]


def _left_out(steps: Steps, places: set[int]) -> Steps:
    return tuple(step for index, step in enumerate(steps) if index not in places)


def _simpler(steps: Steps, index: int) -> list[Steps]:
    """Return the history with a plainer step at one place, if there is one."""
    step = steps[index]
    plain: Step = step
    match step:
        case ("kill-in" | "kill-twice" | "upgrade" | "upgrade-in", *_):
            plain = ("kill", 0.0)
        case ("write", slot, _, tag, _):
            plain = ("write", slot, 0, tag, _PLAIN_SIZE)
        case ("append", slot, tag, _):
            plain = ("append", slot, tag, _PLAIN_SIZE)
        case ("save", path, tag, _):
            plain = ("save", path, tag, _PLAIN_SIZE)
        case ("open", slot, path, "w+" | "a+" | "r+t" as mode):
            plain = ("open", slot, path, mode[0] if mode != "r+t" else "w")
        case ("bucket", *_):
            plain = ("bucket", 0.0, 0.0, 0.0)
    return [] if plain == step else [(*steps[:index], plain, *steps[index + 1 :])]


def _without_waits(steps: Steps) -> Steps:
    return tuple((step[0], 0.0, *step[2:]) if step[0] in MEETINGS else step for step in steps)
