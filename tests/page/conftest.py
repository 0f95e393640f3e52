"""The mounts of `tests/mount`, and a browser. Needs Chromium: `make test-page`."""

from collections.abc import Iterator

import pytest

from tests.mount.conftest import (
    bucket,
    closed_connections,
    expect_log,
    free_port,
    mount,
    mounts,
    quiet_daemons,
    service,
    whole_bucket,
)
from tests.support.browser import Browser, browsing


@pytest.fixture
def browser() -> Iterator[Browser]:
    """A window. Its console may not complain: of a script's error, or of what the page's policy refused."""
    with browsing() as found:
        yield found
        # A refused fetch is what a stopped daemon causes.
        complaints = [each for each in found.complaints() if "ERR_CONNECTION_REFUSED" not in each]
        assert complaints == []
