"""`make fuzz-kept`: random histories on a mount whose daemon is killed and upgraded, compared with a plain directory.

`python -m tests.kept_fuzz --operations 20000 --kills 200 --upgrades 100 --seed 1`; `--replay FILE` runs the
history that a finding printed. Exits with 1 on any finding.
"""

import argparse
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.kept_fuzz.node import KeptNode, Node, NodeGone
from tests.kept_fuzz.pair import Finding, Side, compare
from tests.kept_fuzz.reduce import Reduction
from tests.kept_fuzz.rounds import Outcome, draw_round, run_round
from tests.kept_fuzz.steps import MEETINGS, parse

WIDTH = 12
# Operations of a history: those of a round have the same. Short ones are soon reduced.
LENGTHS = (12, 40, 20, 30)
# Of the mounts in turns: with the longer one more is pending at a kill, with the shorter one more is published.
SETTLE_SECONDS = (1.0, 0.2)
_ROUNDS_OF_A_NODE = 4
_REPLAYS = 8


class Fuzz:
    """One run."""

    def __init__(self, directory: Path, seed: int) -> None:
        self._directory, self.seed = directory, seed
        self._models = directory / "models"
        self._models.mkdir()
        self._node: Node | None = None
        self._nodes = 0
        self.failed: list[Outcome] = []
        # The node's option, by the origin of a history.
        self._settle: dict[str, float] = {}
        # Histories of the present node without a finding.
        self._clean: list[Outcome] = []
        self.operations = self.histories = self.kills = self.upgrades = 0
        self.began = time.monotonic()

    def node(self, settle_seconds: float) -> Node:
        """Return a node with this option, a new one after `drop`, and if the last one had another."""
        if self._node is not None and self._node.settle_seconds != settle_seconds:
            self.drop()
        if self._node is None:
            self._nodes += 1
            place = self._directory / f"node{self._nodes}"
            place.mkdir()
            self._node = KeptNode(place, settle_seconds)
        return self._node

    def look_again(self) -> None:
        """Compare all histories of the node that had no finding: a name may come back with a later daemon."""
        node, self._clean, clean = self._node, [], self._clean
        if node is None or not clean:
            return
        try:
            node.meet("gather")
            node.meet("kill")
            node.meet("gather")
        except NodeGone as exc:
            self._note(clean[0], Finding("mount gone", str(exc)))
            return
        trees = node.trees()
        for each in clean:
            wanted = Side(self._models / each.name, each.name).tree()
            found = compare("later, bucket", trees.get(each.name, {}), wanted)
            found = found or compare("later, mount", Side(node.path / each.name, each.name).tree(), wanted)
            if found is not None:
                self._note(each, found)

    def drop(self) -> None:
        """End the node."""
        self.look_again()
        if self._node is not None:
            self.kills += self._node.kills
            self.upgrades += self._node.upgrades
            self._node.close()
            self._node = None

    def round(self, outcomes: list[Outcome], settle_seconds: float) -> None:
        """Run one round, and note what it found."""
        node = self.node(settle_seconds)
        try:
            run_round(node, outcomes, self._models)
        except NodeGone as exc:
            outcomes[0].finding = Finding("mount gone", str(exc))
        for text in node.alarms():
            outcomes[0].finding = outcomes[0].finding or Finding("log", text)
        gone = [each for each in outcomes if each.finding and each.finding.kind in ("mount gone", "hang")]
        if gone:
            # All histories of the round end then; one of them is enough.
            for each in gone[1:]:
                each.finding = None
            self._clean.clear()
            self.drop()
        self.histories += len(outcomes)
        self.operations += sum(
            done.step[0] not in (*MEETINGS, "pause", "until", "published") and done.answer != "skipped"
            for each in outcomes
            for done in each.done
        )
        for each in outcomes:
            self._settle[each.origin] = settle_seconds
            if each.finding is not None:
                self._note(each, each.finding)
            elif not gone:
                self._clean.append(each)

    def _note(self, outcome: Outcome, finding: Finding) -> None:
        outcome.finding = finding
        self.failed.append(outcome)
        self.say(f"FINDING {finding.kind}: {outcome.origin}: {finding.text}")

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.began:7.1f} s  {text}", flush=True)  # noqa: T201

    def reduce(self, seconds: float, most: int) -> None:
        """Print the findings, each kind's first ones reduced."""
        counts: Counter[str] = Counter()
        for failed in self.failed:
            assert failed.finding is not None
            kind = failed.finding.kind
            counts[kind] += 1
            if counts[kind] > most or kind in ("mount gone", "hang", "log"):
                self._print(failed, "as it happened, not reduced")
                continue
            settle_seconds = self._settle[failed.origin]
            reduction = Reduction(lambda: self._usable_node(settle_seconds), self._models, seconds)  # noqa: B023
            shortest, rate = reduction.shorten(failed)
            note = f"reduced from {len(failed.done)} steps, {reduction.runs} runs"
            self._print(shortest, f"{note}; the whole history failed again in {rate} runs", failed.origin)

    def _usable_node(self, settle_seconds: float) -> Node:
        node = self.node(settle_seconds)
        try:
            node.meet("gather")
        except NodeGone:
            self.drop()
        return self.node(settle_seconds)

    def _print(self, outcome: Outcome, note: str, origin: str = "") -> None:
        assert outcome.finding is not None
        print(  # noqa: T201
            f"\n==== {outcome.finding.kind}: {origin or outcome.origin} ({note})\n"
            f"# --settle {self._settle[origin or outcome.origin]:g}\n{outcome.text()}\n"
            f"---- {outcome.finding.text}",
            flush=True,
        )

    def close(self) -> None:
        self.drop()


def main() -> int:
    """Run; return 1 if anything differed."""
    parser = argparse.ArgumentParser(prog="tests.kept_fuzz", description=__doc__)
    parser.add_argument("--operations", type=int, default=20_000)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--upgrades", type=int, default=100)
    parser.add_argument("--seed", type=int, default=None, help="[the clock]")
    parser.add_argument("--minutes", type=float, default=None, help="end sooner, but for the reduction")
    parser.add_argument("--reduce", type=int, default=3, help="so many findings of each kind")
    parser.add_argument("--reduce-seconds", type=float, default=90.0, help="for each of them")
    parser.add_argument("--directory", type=Path, default=None, help="on a disk, for caches [TMPDIR]")
    parser.add_argument("--replay", type=Path, help="a file with the history that a finding printed")
    parser.add_argument(
        "--settle", type=float, default=1.0, help="of the mount for --replay; the finding says it"
    )
    options = parser.parse_args()
    seed = int(time.time()) % 1_000_000 if options.seed is None else options.seed
    # Else a mount and its daemons would be left behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    directory = Path(tempfile.mkdtemp(prefix="fusecache-kept-fuzz-", dir=options.directory))
    fuzz = Fuzz(directory, seed)
    try:
        if options.replay is not None:
            steps = parse(options.replay.read_text())
            runs = [Outcome(f"p{number}", f"run {number}", steps) for number in range(_REPLAYS)]
            fuzz.round(runs, options.settle)
            fuzz.reduce(0, 0)
        else:
            fuzz.say(f"seed {seed}")
            _run(fuzz, options)
            fuzz.look_again()
            fuzz.reduce(options.reduce_seconds, options.reduce)
    finally:
        fuzz.close()
        shutil.rmtree(directory, ignore_errors=True)
    kinds = Counter(each.finding.kind for each in fuzz.failed if each.finding)
    print(  # noqa: T201
        f"\nseed {seed}, operations {fuzz.operations}, kills {fuzz.kills}, upgrades {fuzz.upgrades}, "
        f"histories {fuzz.histories}, findings {len(fuzz.failed)} {dict(kinds)}, "
        f"seconds {time.monotonic() - fuzz.began:.0f}"
    )
    return 1 if fuzz.failed else 0


def _run(fuzz: Fuzz, options: argparse.Namespace) -> None:
    """Run rounds until there were enough operations, kills and upgrades in the same measure."""
    deadline = fuzz.began + (options.minutes * 60 if options.minutes else float("inf"))
    drawn = kills = upgrades = number = 0
    while drawn < options.operations and time.monotonic() < deadline:
        length = LENGTHS[number % len(LENGTHS)]
        drawn += length * WIDTH
        share = min(1.0, drawn / options.operations)
        more_kills, more_upgrades = (
            int(options.kills * share) - kills,
            int(options.upgrades * share) - upgrades,
        )
        kills, upgrades = kills + more_kills, upgrades + more_upgrades
        outcomes = draw_round(fuzz.seed, number, WIDTH, length, more_kills, more_upgrades)
        fuzz.round(outcomes, SETTLE_SECONDS[number // _ROUNDS_OF_A_NODE % len(SETTLE_SECONDS)])
        number += 1


if __name__ == "__main__":
    sys.exit(main())
