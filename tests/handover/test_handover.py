"""What one daemon leaves to the next: short histories, with a death at every moment or at some of them."""

import random

import pytest

from tests.handover.histories import random_history, run_with_kills
from tests.handover.machine import Step

# Each went wrong once.
FOUND: dict[str, tuple[Step, ...]] = {
    "a copy that is to be changed is not quarantined": (("save", "b"), ("open", 1, "b", "r+"), ("write", 1)),
    "an open file that was replaced keeps its content, and the one with the name its own": (
        ("save", "a"),
        ("open", 0, "a", "r+"),
        ("save", "b"),
        ("rename", "b", "a"),
        ("write", 0),
    ),
    "a file opened again while its upload runs has the uploaded version as its base": (
        ("save", "a"),
        ("open", 0, "a", "r+"),
        ("write", 0),
        ("wait", 3.0),
        ("write", 0),
    ),
    "a removed file does not come back if the bucket shows an older version": (
        ("save", "a"),
        ("wait", 3.0),
        ("open", 3, "a", "w"),
        ("unlink", "a"),
    ),
    "a removed file is readable although its rename has not reached the bucket": (
        ("save", "b"),
        ("wait", 3.0),
        ("open", 1, "b", "r+"),
        ("rename", "b", "a"),
        ("unlink", "a"),
        ("save", "a"),
        ("wait", 3.0),
        ("write", 1),
    ),
    "what the bucket refused ends with the content that replaces it": (
        ("save", "a"),
        ("wait", 3.0),
        ("refuse",),
        ("save", "a"),
        ("wait", 5.0),
        ("open", 1, "a", "r+"),
        ("write", 1),
        ("wait", 1.2),
        ("accept",),
        ("close", 1),
    ),
    "a removed file is readable although the cache had not taken its bytes over": (
        ("look_away",),
        ("save", "a"),
        ("open", 2, "a", "r"),
        ("wait", 3.0),
        ("unlink", "a"),
        ("save", "a"),
        ("wait", 12.0),
    ),
    "a replaced file is readable although the file that replaced it was written, moved and removed": (
        ("look_away",),
        ("save", "b"),
        ("wait", 3.0),
        ("open", 3, "b", "r+"),
        ("open", 0, "a", "w"),
        ("rename", "a", "b"),
        ("rename", "b", "a"),
        ("save", "a"),
        ("unlink", "a"),
        ("wait", 5.0),
        ("write", 3),
    ),
    "a replaced file is readable although a successor uploaded it": (
        ("look_away",),
        ("save", "a"),
        ("open", 2, "a", "r"),
        ("wait", 3.0),
        ("save", "b"),
        ("rename", "b", "a"),
        ("wait", 3.0),
    ),
    "a directory is renamed under an open file": (
        ("mkdir", "x"),
        ("save", "x/a"),
        ("wait", 3.0),
        ("open", 0, "x/a", "r+"),
        ("write", 0),
        ("rename_folder", "x", "y"),
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_a_death_at_any_moment_changes_nothing(name: str) -> None:
    _, found = run_with_kills(FOUND[name], None, random.Random(1))
    assert found == []


@pytest.mark.parametrize("seed", range(4))
def test_a_death_changes_nothing_in_histories_at_random(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(4):
        _, found = run_with_kills(random_history(rng, 5), 6, rng)
        assert found == []
