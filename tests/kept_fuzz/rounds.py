"""Several histories at once, each in its own directory and thread, under the same kills and upgrades."""

import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.kept_fuzz.node import Node, NodeGone
from tests.kept_fuzz.pair import CONFLICT, Finding, Pair, compare
from tests.kept_fuzz.steps import MEETINGS, Step, Steps, draw_events, draw_history

# A call that takes longer waits for ever: a daemon starts within a second, and the bucket is never away.
HANG_SECONDS = 120.0
_NOTABLE_SECONDS = 0.03


@dataclass
class Done:
    """A step as it was carried out. began: seconds on the clock of `time.monotonic`; answer: what the mount said."""

    step: Step
    began: float
    answer: str = ""


@dataclass
class Outcome:
    """One history as it happened. name: of its directory; origin: the seed, round and place that it was drawn from."""

    name: str
    origin: str
    steps: Steps
    done: list[Done] = field(default_factory=list)
    # Kills and upgrades, at the moments at which they happened.
    moments: list[tuple[float, str]] = field(default_factory=list)
    finding: Finding | None = None

    def as_happened(self) -> Steps:
        """Return the steps with the waits that they had at meetings."""
        return tuple(each.step for each in self.done)

    def at_its_times(self) -> Steps:
        """Return the steps, each not earlier than it was: on a slow machine much can happen between two of them."""
        steps: list[Step] = []
        last = met = self.done[0].began if self.done else 0.0
        for done in self.done:
            if done.began - last > _NOTABLE_SECONDS and done.step[0] not in MEETINGS:
                steps.append(("until", round(done.began - met, 3)))
            last = done.began
            if done.step[0] in MEETINGS:
                last = met = done.began + float(done.step[1])
            steps.append(done.step)
        return tuple(steps)

    def text(self) -> str:
        """Return the history with what was answered, and where the kills fell, as a text that can be replayed."""
        if not self.done:
            return ""
        start = self.done[0].began
        lines = [(each.began, _line(each, start)) for each in self.done]
        lines += [(at, f"{'':34}# {at - start:7.3f} s  {what}") for at, what in self.moments]
        return "\n".join(line for _, line in sorted(lines, key=lambda pair: pair[0]))


def _line(done: Done, start: float) -> str:
    words = " ".join(map(str, done.step))
    return f"{words:34}# {done.began - start:7.3f} s  {done.answer}".rstrip()


class Meeting:
    """Where the histories of a round wait for each other, so that a kill meets all of them."""

    def __init__(self, node: Node, parties: int) -> None:
        self._node = node
        self._parties = parties
        self._arrived = 0
        self._number = 0
        self._changed = threading.Condition()
        self.gone = ""

    def arrive(self, step: Step) -> float:
        """Wait for all others, and until what they meet for is done; return the seconds waited. Raises NodeGone."""
        time.sleep(float(step[1]))
        began = time.monotonic()
        with self._changed:
            self._arrived += 1
            number, waited = self._number, None
            while number == self._number and not self.gone:
                if self._arrived == self._parties:
                    waited = time.monotonic() - began
                    self._meet(step)
                else:
                    self._changed.wait()
            if self.gone:
                raise NodeGone(self.gone)
        return float(step[1]) + (waited if waited is not None else time.monotonic() - began)

    def leave(self) -> None:
        """The others need not wait for this one any more."""
        with self._changed:
            self._parties -= 1
            self._changed.notify_all()

    def _meet(self, step: Step) -> None:
        try:
            self._node.meet(str(step[0]), *map(float, step[2:]))
        except Exception as exc:  # noqa: BLE001  # the others would wait for ever
            self.gone = str(exc) if isinstance(exc, NodeGone) else repr(exc)
        self._arrived = 0
        self._number += 1
        self._changed.notify_all()


class Runner:
    """Carries out one history."""

    def __init__(self, node: Node, meeting: Meeting, outcome: Outcome, models: Path) -> None:
        self._node, self._meeting, self.outcome = node, meeting, outcome
        name = outcome.name
        model = models / name
        model.mkdir()
        (node.path / name).mkdir()
        self.pair = Pair(node.path / name, model, name, lambda path: node.published(f"{name}/{path}"))
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._left = False
        self._met = time.monotonic()
        self.error: BaseException | None = None

    def start(self) -> None:
        self._thread.start()

    def join(self, seconds: float) -> bool:
        """Return whether it has ended."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def seconds_in_step(self) -> float:
        """Return how long the present step has taken; a meeting does not count."""
        done = self.outcome.done[-1:]
        if not done or done[0].step[0] in MEETINGS:
            return 0.0
        return time.monotonic() - done[0].began

    def _run(self) -> None:
        try:
            self._carry_out()
        except NodeGone as exc:
            self.outcome.finding = Finding("mount gone", str(exc))
        except BaseException as exc:  # noqa: BLE001  # raised by the main thread
            self.error = exc
        finally:
            self._leave()
            self.pair.mounted.close_all()
            self.pair.model.close_all()

    def _leave(self) -> None:
        if not self._left:
            self._left = True
            self._meeting.leave()

    def _carry_out(self) -> None:
        outcome = self.outcome
        for step in outcome.steps:
            if self._fails(step):
                return
        self._leave()
        for slot in sorted(self.pair.model.open):
            if self._fails(("close", slot)):
                return
        outcome.done.append(Done(("ls", "."), time.monotonic(), "the whole tree is compared"))
        outcome.finding = self.pair.compare_trees()
        if outcome.finding is None:
            problem = self._node.sync(outcome.name)
            kind = "conflict" if CONFLICT in problem else "sync"
            outcome.finding = Finding(kind, problem) if problem else None

    def _fails(self, step: Step) -> bool:
        done = Done(step, time.monotonic())
        self.outcome.done.append(done)
        if step[0] == "until":
            time.sleep(max(0.0, self._met + float(step[1]) - time.monotonic()))
            return False
        if step[0] in MEETINGS:
            waited = self._meeting.arrive(step)
            self._met = time.monotonic()
            done.step = (step[0], round(waited, 3), *step[2:])
            return False
        done.answer, finding = self.pair.carry_out(step)
        if finding is not None:
            self.outcome.finding = Finding(finding.kind, f"{' '.join(map(str, step))}: {finding.text}")
        return finding is not None


def run_round(node: Node, outcomes: Sequence[Outcome], models: Path) -> None:
    """Run histories with the same meetings; what is wrong is in `finding` afterwards. Raises NodeGone."""
    meeting = Meeting(node, len(outcomes))
    try:
        runners = [Runner(node, meeting, each, models) for each in outcomes]
    except OSError as exc:
        raise NodeGone(f"mkdir in the root: {exc}") from exc
    began = time.monotonic()
    for each in runners:
        each.start()
    _watch(node, runners)
    for each in runners:
        if each.error is not None:
            raise each.error
    _compare_at_the_end(node, runners)
    for outcome in outcomes:
        outcome.moments = [(at, what) for at, what in node.moments if at >= began]


def _watch(node: Node, runners: Sequence[Runner]) -> None:
    """Return when all have ended; end the mount if a call in it does not return."""
    waiting = list(runners)
    while waiting:
        waiting = [each for each in waiting if not each.join(0.2)]
        for each in waiting:
            if each.seconds_in_step() > HANG_SECONDS and each.outcome.finding is None:
                step = " ".join(map(str, each.outcome.done[-1].step))
                each.outcome.finding = Finding("hang", f"{step}: no answer in {HANG_SECONDS:g} s")
                node.abandon()


def _compare_at_the_end(node: Node, runners: Sequence[Runner]) -> None:
    """Compare the bucket, and the mount once more, as names that come back do so only when they have been published."""
    trees = node.trees()
    aside = node.put_aside()
    for each in runners:
        outcome = each.outcome
        left = [place for place, name in aside.items() if name == outcome.name]
        if outcome.finding is None:
            outcome.finding = compare("bucket", trees.get(outcome.name, {}), each.pair.model.tree())
        if outcome.finding is None:
            outcome.finding = each.pair.compare_trees()
        if outcome.finding is None and left:
            outcome.finding = Finding("put aside", ", ".join(left))
    strangers = [
        place for place, name in aside.items() if name not in {each.outcome.name for each in runners}
    ]
    if strangers:
        first = runners[0].outcome
        first.finding = first.finding or Finding(
            "put aside", f"{', '.join(strangers)}, of no history of this round"
        )


def draw_round(seed: int, number: int, width: int, length: int, kills: int, upgrades: int) -> list[Outcome]:
    """Return the histories of a round, which a seed and the round's number determine."""
    events = draw_events(random.Random(f"{seed} {number}"), kills, upgrades)
    return [
        Outcome(
            f"r{number}h{index}",
            f"seed {seed}, round {number}, history {index}",
            draw_history(random.Random(f"{seed} {number} {index}"), events, length),
        )
        for index in range(width)
    ]
