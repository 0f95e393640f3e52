"""Where pytest keeps files, and how it reports, in all tests."""

import gc
import importlib.util
import inspect
import os
import re
import signal
import tempfile
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from tests.support.left_behind import kept_by_the_session, nothing_left_behind
from tests.support.marks import is_below

__all__ = ["kept_by_the_session", "nothing_left_behind"]

# On a disk, as the caches of real mounts are: /tmp is often a tmpfs, which refuses direct reads, is too small for the
# buckets of the tests' servers, and may be mounted without devices. Processes that tests start inherit it.
os.environ.setdefault("TMPDIR", "/var/tmp")
tempfile.tempdir = None  # pytest has asked for the folder before, and Python remembers the answer

# A shell's background jobs ignore SIGINT, and so would all that a test starts, and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# FUSECACHE_TEST_FUSE_LIBRARY=pyfuse3 runs every mount of the tests on that library.
if os.environ.get("FUSECACHE_TEST_FUSE_LIBRARY"):
    os.environ["FUSECACHE_FUSE_LIBRARY"] = os.environ["FUSECACHE_TEST_FUSE_LIBRARY"]

# Their coroutines run in virtual time, unless they are marked `real_time`.
VIRTUAL_TIME = [Path(__file__).parent / folder for folder in ("cases", "engine", "reference")]

HAS_TORCH = importlib.util.find_spec("torch") is not None
NEEDS_TORCH = re.compile(
    r"^(import|from) (torch|torchdata|streaming|loader\.(torch|fast|streaming)|examples\.demo\.\w+"
    r"|tests\.support\.(real_)?streaming\w*)\b",
    re.MULTILINE,
)


def pytest_report_header() -> str | None:
    """Say why there are fewer tests than usual."""
    return None if HAS_TORCH else "torch is not installed: the files of tests that import it are left out"


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out what cannot be imported without torch. None: pytest decides."""
    if HAS_TORCH or collection_path.suffix != ".py":
        return None
    return True if NEEDS_TORCH.search(collection_path.read_text()) else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the 800 000 objects of the collected modules out of every collection of garbage.

    Each took half a second: a quarter of the CPU time of collecting tests, and again in each look for what a test left.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests of some folders on a clock that jumps to the next deadline as soon as all tasks wait."""
    for item in items:
        if (
            inspect.iscoroutinefunction(getattr(item, "obj", None))
            and not item.get_closest_marker("real_time")
            and any(is_below(item, folder) for folder in VIRTUAL_TIME)
        ):
            item.add_marker(pytest.mark.trio(run=_run_in_virtual_time), append=False)


def _run_in_virtual_time(
    test: Callable[[], Any], *, clock: trio.abc.Clock | None, instruments: Sequence[trio.abc.Instrument]
) -> Any:
    """clock: if the test has one as an argument."""
    return trio.run(test, clock=clock or MockClock(autojump_threshold=0), instruments=instruments)


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Name bytes by their parameter alone: each worker must collect the same names, and gzip's bytes hold the time."""
    return argname if isinstance(val, bytes) else None


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Collect no garbage while pytest parses sources to show a failure.

    Python 3.11.2, which Debian 12 has, loses count if a finalizer parses anything meanwhile, and ends the whole run
    with "SystemError: AST constructor recursion depth mismatch". A ResourceWarning's traceback is enough for that.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
