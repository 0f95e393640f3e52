"""The mounts of `tests/mount`; at the end of the run, the table of what the libraries did."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
from tests.support import ROOT
from tests.support.marks import mark_all

ENVIRONMENT = os.environ.get("FUSECACHE_TEST_SERVING", "")
WITHOUT = pytest.mark.skipif(not ENVIRONMENT, reason="needs the libraries: make test-serving")
HEADER = ("library", "version", "MB", "local disk (s)", "mount, cold (s)", "mount, warm (s)")
ROWS: list[tuple[object, ...]] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder needs FUSE, and the libraries."""
    marks = (pytest.mark.fuse, pytest.mark.s3server_only, pytest.mark.timeout(1800), WITHOUT)
    mark_all(items, __file__, *marks)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the table, and keep it in build/."""
    if ROWS:
        lines = [HEADER, ("---",) * len(HEADER), *ROWS]
        table = "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)
        (ROOT / "build").mkdir(exist_ok=True)
        (ROOT / "build" / "serving.md").write_text(table)
        terminalreporter.write_sep("-", "serving (build/serving.md)")
        terminalreporter.write(table)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> None:
    """Do not compare: a launcher's ranks may be collected a moment after their test."""


@pytest.fixture
def job() -> Callable[..., dict[str, Any]]:
    """Return a function that runs a module in the libraries' environment, and returns what it printed as JSON."""

    def run(module: str, *words: object) -> dict[str, Any]:
        done = subprocess.run(
            [f"{ENVIRONMENT}/bin/python", "-m", module, *map(str, words)],
            cwd=ROOT,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    return run
