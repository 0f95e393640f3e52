"""The fuzzer itself: a plain directory has no finding, and each kind of fault is found and shortened."""

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kept_fuzz.node import Node
from tests.kept_fuzz.pair import Side, Tree, content, describe
from tests.kept_fuzz.reduce import Reduction
from tests.kept_fuzz.rounds import Outcome, draw_round, run_round
from tests.kept_fuzz.steps import MEETINGS, draw_events, draw_history, parse, text_of

Mischief = Callable[[Path], object]


class PlainNode(Node):
    """A directory instead of a mount. mischief: what a kill does to the directory of each history."""

    def __init__(self, path: Path, mischief: Mischief | None = None) -> None:
        super().__init__(path)
        self._mischief = mischief
        self.aside: dict[str, str] = {}

    def meet(self, kind: str, *_: float) -> None:
        if kind.startswith("kill") and self._mischief is not None:
            for each in self.path.iterdir():
                self._mischief(each)

    def trees(self) -> dict[str, Tree]:
        return {each.name: Side(each, each.name).tree() for each in self.path.iterdir()}

    def put_aside(self) -> dict[str, str]:
        return self.aside


class Places:
    """The two directories that rounds need."""

    def __init__(self, folder: Path) -> None:
        self.mounted, self.models = folder / "mounted", folder / "models"
        self.mounted.mkdir()
        self.models.mkdir()


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return Places(tmp_path)


@pytest.mark.parametrize("seed", range(4))
def test_a_plain_directory_has_no_finding(places: Places, seed: int) -> None:
    """The two sides differ in nothing but the directory, so each difference would be the fuzzer's own."""
    outcomes = draw_round(seed, 0, width=24, length=40, kills=3, upgrades=2)
    run_round(PlainNode(places.mounted), outcomes, places.models)
    assert [(each.text(), each.finding) for each in outcomes if each.finding] == []
    steps = [done for each in outcomes for done in each.done if done.step[0] not in MEETINGS]
    refused = [done for done in steps if done.answer.startswith(("error", "skipped"))]
    assert len(refused) < len(steps) / 3, "most steps are to do something"


def test_a_seed_draws_one_history() -> None:
    """The same seed gives the same steps, another one others, and all histories of a round have the same meetings."""
    first, again, other = (draw_round(seed, 3, 4, 30, 3, 1) for seed in (1, 1, 2))
    assert [each.steps for each in first] == [each.steps for each in again]
    assert [each.steps for each in first] != [each.steps for each in other]
    assert len({tuple(step for step in each.steps if step[0] in MEETINGS) for each in first}) == 1
    assert len({each.steps for each in first}) == 4


def test_a_text_is_its_history(places: Places) -> None:
    """What a finding prints can be replayed: times and answers are behind a '#'."""
    rng = random.Random(1)
    steps = draw_history(rng, draw_events(rng, 3, 2), 60)
    assert parse(text_of(steps)) == steps
    outcome = Outcome("h", "", parse("mkdir x\nsave x/a w1 12\nopen 1 x/a r\nread 1 0 9\ncat b"))
    run_round(PlainNode(places.mounted), [outcome], places.models)
    assert parse(outcome.text())[:5] == outcome.steps
    assert "ENOENT" in outcome.text()


def test_bytes_are_told_by_their_writes() -> None:
    first, second = content("w1", "h", 40), content("w2", "h", 10)
    assert describe(first + bytes(3) + second) == "53 bytes w1*40 zeros*3 w2*10"
    assert describe(first + content("w3", "h", 4) + b"!?") == "46 bytes w1*40 w3*4 '!?'"
    assert describe(b"") == "empty"


@pytest.mark.parametrize(
    ("mischief", "kind"),
    [
        pytest.param(
            lambda path: (path / "a").write_bytes(b"other"), "wrong bytes", id="bytes of another file"
        ),
        pytest.param(lambda path: (path / "a").unlink(), "lost", id="a file is lost"),
        pytest.param(
            lambda path: (path / "b").write_bytes(b"old"), "came back", id="a removed name comes back"
        ),
        pytest.param(lambda path: (path / "a.conflict-node-1").touch(), "conflict", id="a conflict"),
        pytest.param(lambda path: (path / "x").touch(), "error of mkdir", id="a call that fails"),
    ],
)
def test_each_kind_of_fault_is_found(places: Places, mischief: Mischief, kind: str) -> None:
    outcome = Outcome("h", "", parse("save a w1 12\nsave b w2 12\nunlink b\ngather 0\nkill 0\nmkdir x"))
    run_round(PlainNode(places.mounted, mischief), [outcome], places.models)
    assert outcome.finding is not None
    assert outcome.finding.kind == kind


def test_a_descriptor_that_shows_another_file_is_found(places: Places) -> None:
    """The fault that a look at names cannot find: the file that has the name is right."""

    def swap(path: Path) -> None:
        os.truncate(path / "b", 5)

    outcome = Outcome("h", "", parse("save b w1 12\nopen 1 b r\ngather 0\nkill 0\nread 1 0 100"))
    run_round(PlainNode(places.mounted, swap), [outcome], places.models)
    assert outcome.finding is not None
    assert outcome.finding.kind == "descriptor: wrong bytes"
    assert outcome.finding.text == "read 1 0 100: 5 bytes w1*5; want 12 bytes w1*12"


def test_files_put_aside_are_told_by_their_history(places: Places) -> None:
    node = PlainNode(places.mounted)
    node.aside = {"orphans/7": "second"}
    outcomes = [Outcome(name, "", parse("save a w1 12")) for name in ("first", "second")]
    run_round(node, outcomes, places.models)
    assert [each.finding.kind if each.finding else "" for each in outcomes] == ["", "put aside"]


def test_what_failed_is_shortened_to_what_is_needed(tmp_path: Path) -> None:
    """The fault: whenever the daemon is killed, a file named b that is not empty becomes empty."""

    def empty(path: Path) -> None:
        if (path / "b").is_file():
            os.truncate(path / "b", 0)

    node = PlainNode(tmp_path / "mounted", empty)
    places = Places(tmp_path)
    rng = random.Random(5)
    noise = draw_history(rng, draw_events(rng, 2, 1), 40)
    failed = Outcome("h", "", (*noise, *parse("save b w99 300\ngather 0\nkill 0\nstat b")))
    run_round(node, [failed], places.models)
    assert failed.finding is not None
    shortest, rate = Reduction(lambda: node, places.models, 60).shorten(failed)
    assert rate == "12 of 12"
    kept = [step[0] for step in shortest.steps]
    assert len(kept) <= 4, shortest.text()
    assert kept[-1].startswith("kill") or kept[-2].startswith("kill"), shortest.text()
