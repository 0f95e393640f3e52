"""On a real mount: histories that once failed, and a short run of new ones."""

from pathlib import Path

import pytest

from tests.kept_fuzz.node import KeptNode
from tests.kept_fuzz.rounds import Outcome, run_round
from tests.kept_fuzz.steps import meetings_of, parse
from tests.support.mounts import NEEDS_OWN_SESSION

pytestmark = [pytest.mark.fuse, pytest.mark.s3server_only, NEEDS_OWN_SESSION]

# Nothing is published before the kill, unless a history waits for that.
PENDING_SECONDS = 1.0
PENDING = {
    "two replaced files are written": """
        gather 0; save a w1 12; open 1 a r+; save b w2 12; rename b a; append 1 w3 40; open 2 a r+; save b w4 12
        rename b a; append 2 w5 40; fsync 2; kill 0; close 1; close 2""",
    "two replaced files, one is written": """
        gather 0; save a w1 12; open 1 a r+; save b w2 12; rename b a; append 1 w3 40; open 2 a r+; save b w4 12
        rename b a; kill 0; close 1; close 2""",
    "a file replaced twice": """
        gather 0; save a w1 12; open 1 a r+; save b w2 12; rename b a; append 1 w3 40; save b w4 12; rename b a
        kill 0; close 1""",
    "a log moved away twice": """
        gather 0; save a w1 12; open 1 a a; rename a b; save a w2 12; open 2 a a; rename a b; save a w3 12
        kill 0; append 1 w4 40; append 2 w5 40; close 1; close 2""",
    "a log moved away twice, and an upgrade": """
        gather 0; save a w1 12; open 1 a a; rename a b; save a w2 12; open 2 a a; rename a b; save a w3 12
        upgrade 0; append 1 w4 40; append 2 w5 40; close 1; close 2""",
    "a file that waits is truncated": "gather 0; save a w1 40; open 1 a r+t; fsync 1; kill 0; close 1",
    "a file that waits is written, and published meanwhile": """
        gather 0; save a w1 40; open 1 a r+; append 1 w2 12; fsync 1; pause 1.3; kill 0; close 1""",
    "a removed file with two versions": """
        mkdir y; gather 0; save y/a w1 40; open 1 y/a r+; append 1 w2 12; save y/a w3 12; kill 0; unlink y/a
        close 1; rmdir y""",
}
# What is closed is published at once.
PUBLISHED_SECONDS = 0.2
PUBLISHED = {
    "a removed name": "save a w1 12; open 1 a w; published a; pause 0.3; gather 0; kill 0; unlink a",
    "a removed name, after an upgrade": """
        save a w1 12; published a; open 1 a w; gather 0; upgrade 0; unlink a; close 1""",
    "the directory of a removed name": """
        mkdir y; save y/a w1 40; open 1 y/a w; gather 0; kill 0; unlink y/a; rmdir y; close 1""",
    "bytes of a replaced file": """
        save a w1 12; open 1 a r+; save b w2 12; rename b a; gather 0; kill 0; append 1 w3 40; close 1""",
    "an open file moved over a pending one": """
        mkdir x; save x/b w1 12; open 1 b a; rename b x/b; gather 0; kill 0; rename x/b a; append 1 w2 12; close 1""",
    "the directory of an open file is renamed": """
        mkdir x; save x/a w1 12; open 1 x/a w; published x/a; gather 0; kill 0; rename x z; append 1 w2 12
        gather 0; kill 0; close 1""",
    "written again while its upload ends": """
        bucket 0 0.3 0.0; open 1 a w; append 1 w1 12; close 1; pause 0.35; open 1 a r+; append 1 w2 12
        pause 0.6; gather 0; kill 0; append 1 w3 12; close 1""",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "node").mkdir()
    (tmp_path / "models").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("settle_seconds", "histories"),
    [
        pytest.param(PENDING_SECONDS, PENDING, id="pending"),
        pytest.param(PUBLISHED_SECONDS, PUBLISHED, id="published"),
    ],
)
def test_histories_that_once_failed(folder: Path, settle_seconds: float, histories: dict[str, str]) -> None:
    outcomes = [
        Outcome(f"h{number}", what, parse(text.replace(";", "\n")))
        for number, (what, text) in enumerate(histories.items())
    ]
    node = KeptNode(folder / "node", settle_seconds)
    try:
        for meetings in {meetings_of(each.steps) for each in outcomes}:
            run_round(
                node, [each for each in outcomes if meetings_of(each.steps) == meetings], folder / "models"
            )
    finally:
        node.close()
    wrong = [f"{each.origin}: {each.finding.text}" for each in outcomes if each.finding]
    assert not wrong, "\n".join(wrong)
