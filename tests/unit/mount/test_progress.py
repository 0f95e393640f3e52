"""How far long commands are, as text."""

from typing import Any

import pytest

from fusecache.model.objects import GIB, MIB
from fusecache.mount.progress import warm_text

RUNNING: dict[str, Any] = {
    "state": "running",
    "files_done": 3,
    "files_total": 10,
    "files_failed": 0,
    "bytes_done": GIB,
    "bytes_total": 4 * GIB,
    "seconds": 2.0,
}


def test_a_warm_up_shows_its_rate_and_the_time_left() -> None:
    assert warm_text(RUNNING) == "3 of 10 files, 1.0 GiB of 4.0 GiB, 512.0 MiB/s, about 6.0 s left"


@pytest.mark.parametrize(
    "change",
    [{"bytes_done": 0}, {"seconds": 0.0}, {"state": "done"}, {"state": "counting"}],
)
def test_without_a_rate_it_shows_none(change: dict[str, Any]) -> None:
    facts = {**RUNNING, "bytes_done": 100 * MIB, **change}
    assert " left" not in warm_text(facts)


def test_failed_files_are_named_last() -> None:
    assert warm_text({**RUNNING, "files_failed": 2}).endswith(" left, 2 failed")
