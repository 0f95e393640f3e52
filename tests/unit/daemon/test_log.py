"""What a daemon's log tells, and what it is silent about."""

import errno
import logging
import os
from collections.abc import Iterator

import pytest

from fusecache.daemon import main


@pytest.fixture(autouse=True)
def begun() -> Iterator[None]:
    libraries = [logging.getLogger(name) for name in ("boto3", "botocore", "urllib3", "pyfuse3")]
    levels = [library.level for library in libraries]
    main._begin_log("INFO")
    yield
    for library, level in zip(libraries, levels, strict=True):
        library.setLevel(level)
        library.removeFilter(main._is_relevant)


@pytest.mark.parametrize(("number", "lines"), [(errno.ENOENT, 0), (errno.EINVAL, 1)])
def test_an_answer_that_the_kernel_awaits_no_longer_is_not_news(
    caplog: pytest.LogCaptureFixture, number: int, lines: int
) -> None:
    # pyfuse3's words when the mount is taken away between a release and its answer.
    logging.getLogger("pyfuse3").error("fuse_release(): fuse_reply_* failed with %s", os.strerror(number))
    assert len(caplog.records) == lines
