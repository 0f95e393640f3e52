"""Whole shards are read into the kernel's pages when the daemon says that it has them, and only then."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from loader.hints.page_warmer import POLL_SECONDS, PageWarmer
from tests.support.mounts import wait_until

SHARD_BYTES = 10_000


class Job:
    """A warmer of shards that lie in a folder, and what the daemon says of them. asked: shards, as it came to them."""

    def __init__(self, folder: Path, *, limit_bytes: int | None = None) -> None:
        self.folder, self.asked = folder, list[int]()
        self.facts = folder / "job.plan"
        self.warmer = PageWarmer(self.facts, self.file_of, limit_bytes=limit_bytes)

    def file_of(self, shard: int) -> str | None:
        self.asked.append(shard)
        return None if shard == 99 else str(self.folder / f"{shard}.mds")

    def plan(self, shards: list[int], last: list[int], number: int = 1) -> None:
        self.warmer.plan(number, np.array(shards, np.int64), np.array(last, np.int64))

    def has(self, fetched: int, number: int = 1) -> None:
        """Have the daemon say that it has so many shards of a window."""
        unfinished = self.facts.with_suffix(".part")
        unfinished.write_text(json.dumps({"windows": [0, number], "fetched": [7, fetched]}))
        unfinished.replace(self.facts)

    def comes_to(self, *asked: int) -> None:
        wait_until(lambda: self.asked == list(asked), f"{asked} to be read")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    for shard in range(8):
        (tmp_path / f"{shard}.mds").write_bytes(bytes(SHARD_BYTES))
    yield tmp_path
    assert not [thread for thread in threading.enumerate() if thread.name == "fusecache-pages"]


def test_shards_are_read_in_the_plans_order_as_far_as_the_daemon_has_them(folder: Path) -> None:
    job = Job(folder)
    job.plan([4, 2, 0, 1], [9, 9, 9, 9])
    job.has(2)
    job.comes_to(4, 2)
    job.has(3)
    job.comes_to(4, 2, 0)
    job.warmer.close()


def test_what_is_still_needed_takes_no_more_than_its_room(folder: Path) -> None:
    job = Job(folder, limit_bytes=2 * SHARD_BYTES)
    job.plan([0, 1, 2, 3, 4], [5, 6, 7, 8, 9])
    job.has(5)
    job.comes_to(0, 1)
    job.warmer.move(6)  # the first one is done with
    job.comes_to(0, 1, 2)
    job.warmer.move(8)
    job.comes_to(0, 1, 2, 3, 4)
    job.warmer.close()


def test_what_is_done_with_is_not_read(folder: Path) -> None:
    job = Job(folder)
    job.warmer.move(5)
    job.plan([0, 1, 2], [4, 5, 4])
    job.has(3)
    job.comes_to(1)
    job.warmer.close()


def test_a_plan_takes_the_place_of_those_with_its_number_and_higher_ones(folder: Path) -> None:
    job = Job(folder)
    job.plan([0, 1], [9, 9], number=2)
    job.plan([2, 3], [9, 9], number=1)
    job.has(2, number=2)
    job.has(2, number=1)
    job.comes_to(2, 3)
    job.warmer.close()


def test_files_that_cannot_be_read_and_words_that_make_no_sense_stop_nothing(folder: Path) -> None:
    job = Job(folder)
    (folder / "1.mds").unlink()
    job.plan([0, 1, 99, 2], [9, 9, 9, 9])
    for nonsense in (b"", b"{", b"[]", b'{"windows": [1]}', b'{"windows": [1], "fetched": ["x"]}'):
        job.facts.write_bytes(nonsense)
    job.has(4)
    job.comes_to(0, 1, 99, 2)
    job.warmer.close()


@pytest.mark.parametrize(("seconds", "rested"), [(0.01, []), (0.2, [0.2, 0.2]), (300, [1, 1])])
def test_a_slow_disk_is_left_to_others_for_as_long_as_it_was_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, rested: list[float]
) -> None:
    job = Job(folder)
    now, rests = 0.0, list[float]()

    def read(*_: int) -> int:
        nonlocal now
        now += seconds
        return 0

    class Stopped(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            if timeout != POLL_SECONDS and timeout is not None:
                rests.append(timeout)
                return False
            return super().wait(timeout)

    monkeypatch.setattr("loader.hints.page_warmer.os.sendfile", read)
    monkeypatch.setattr("loader.hints.page_warmer.time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(job.warmer, "_stopped", Stopped())
    job.plan([0, 1], [9, 9])
    job.has(2)
    job.comes_to(0, 1)
    wait_until(lambda: len(rests) == len(rested), "the rests")
    job.warmer.close()
    assert rests == pytest.approx(rested)
