"""Twelve rounds of kill -9 while two programs write; `make kill-rounds` is for more."""

import os
from pathlib import Path

from tests.crash.rounds import run_rounds

ROUNDS = int(os.environ.get("FUSECACHE_TEST_KILL_ROUNDS", "12"))


def test_nothing_closed_is_lost_by_any_kill(tmp_path: Path) -> None:
    findings = run_rounds(tmp_path, ROUNDS, seed=1)
    assert findings.wrong == []
    assert findings.rounds == ROUNDS
    assert findings.found == findings.closed > 0
    # Half of them and more; fewer where the machine stands still between a close and the kill.
    assert findings.unpublished >= findings.closed / 5, findings.text()
