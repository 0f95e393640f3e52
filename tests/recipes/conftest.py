"""The mounts of `tests/mount`; at the end of the run, the table of what the recipes did."""

import os
from pathlib import Path

import pytest

from tests.mount.conftest import (
    bucket,
    expect_log,
    mount,
    mounts,
    quiet_daemons,
    service,
    whole_bucket,
)
from tests.recipes.table import ROWS, render
from tests.support import ROOT
from tests.support.marks import mark_all

WITHOUT = pytest.mark.skipif(
    not os.environ.get("FUSECACHE_TEST_RECIPES"), reason="needs the trainers: make test-recipes"
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder needs FUSE, the trainers, and faults of the project's own server."""
    marks = (pytest.mark.fuse, pytest.mark.s3server_only, pytest.mark.timeout(3600), WITHOUT)
    mark_all(items, __file__, *marks)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the table, and keep it in build/."""
    if ROWS:
        (ROOT / "build").mkdir(exist_ok=True)
        (ROOT / "build" / "recipes.md").write_text(render(ROWS))
        terminalreporter.write_sep("-", "recipes (build/recipes.md)")
        terminalreporter.write(render(ROWS))


@pytest.fixture(autouse=True)
def nothing_left_behind() -> None:
    """Do not compare: a launcher's ranks may be collected a moment after their test."""
