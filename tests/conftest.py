"""Where pytest keeps files, and how it reports, in all tests."""

import gc
import os
from collections.abc import Generator

import pytest

# On a disk, as the caches of real mounts are: /tmp is often a tmpfs, which is small and refuses direct reads.
# pytest reads this variable when a test first asks for a folder.
os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/var/tmp")


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
