"""FileHints yields what an order yields, wherever the files lie, and refuses what it cannot work with."""

import itertools
import logging
import pickle
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loader import FileHints
from loader.errors import ArgumentError
from loader.hints import file_hints
from tests.support.mounts import wait_until


class Epochs:
    """A sampler with epochs, one item at a time."""

    def __init__(self) -> None:
        self.epoch, self.drawn = 0, 0

    def __iter__(self) -> Any:
        for item in range(self.epoch, self.epoch + 10):
            self.drawn += 1
            yield item

    def __len__(self) -> int:
        return 10

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Items:
    """A sampler that is no sequence."""

    def __init__(self, items: Iterable[Any]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Files that are on no mount."""
    return [tmp_path / str(number) for number in range(20)]


def test_the_order_is_that_of_the_sampler_in_each_epoch(files: list[Path]) -> None:
    sampler = Epochs()
    with FileHints(files, sampler) as hints:
        assert len(hints) == 10
        assert sampler.drawn == 0  # nothing is drawn before the iteration: it may belong to another epoch
        assert list(hints) == list(range(10))
        hints.set_epoch(3)
        assert list(hints) == list(range(3, 13))


def test_no_more_is_drawn_than_asked_for(files: list[Path]) -> None:
    sampler = Epochs()
    with FileHints(files, sampler, ahead=4) as hints:
        order = iter(hints)
        drawn = [(next(order), sampler.drawn) for _ in range(10)]
        assert [item for item, _ in drawn] == list(range(10))
        assert all(item < count <= item + 4 for item, count in drawn)


def test_a_batch_counts_as_many_samples_as_it_has(files: list[Path]) -> None:
    drawn = 0

    def batches() -> Iterator[list[int]]:
        nonlocal drawn
        for batch in itertools.cycle([[1, 2, 3, 4, 5], [], [6, 7, 8, 9, 10]]):
            drawn += 1
            yield batch

    with FileHints(files, batches(), ahead=22) as hints:
        order = iter(hints)
        assert next(order) == [1, 2, 3, 4, 5]
        assert drawn == 6  # 5 + 1 + 5 + 5 + 1 + 5: an empty batch counts, too
        assert next(order) == []
        assert drawn <= 8
    drawn = 0
    with FileHints(files, batches(), ahead=1) as hints:
        assert next(iter(hints)) == [1, 2, 3, 4, 5]
        assert drawn == 1  # at least one


def test_of_a_sequence_of_batches_the_first_are_sent_once_and_all_come(files: list[Path]) -> None:
    batches = [[number] * 3 for number in range(20)]
    with FileHints(files, batches, ahead=7) as hints:
        assert list(hints) == batches
        assert list(hints) == batches


def test_threads_that_iterate_at_a_time_get_all_their_items(files: list[Path]) -> None:
    def senders() -> list[threading.Thread]:
        return [each for each in threading.enumerate() if each.name == "fusecache-file-hints"]

    before, interval = senders(), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(10):
            hints, start = FileHints(files, Items(range(2000)), ahead=50), threading.Barrier(2)
            seen: dict[int, list[int]] = {}

            def iterate(
                number: int, hints: FileHints, start: threading.Barrier, seen: dict[int, list[int]]
            ) -> None:
                start.wait()
                seen[number] = list(hints)

            threads = [
                threading.Thread(target=iterate, args=(number, hints, start, seen)) for number in range(2)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert seen == {number: list(range(2000)) for number in range(2)}
            hints.close()
            # None is left that would send until the process ends.
            assert [each for each in senders() if each not in before] == []
    finally:
        sys.setswitchinterval(interval)


def test_an_endless_order_and_a_pass_that_is_given_up(files: list[Path]) -> None:
    with FileHints(files, itertools.cycle([3, 1, 2]), ahead=5) as hints:
        assert list(itertools.islice(hints, 7)) == [3, 1, 2, 3, 1, 2, 3]
        assert len(list(itertools.islice(hints, 7))) == 7


class Broken(Items):
    """A sampler that fails after its items."""

    def __iter__(self) -> Iterator[Any]:
        yield from self.items
        raise RuntimeError("the sampler broke")


def test_an_order_that_fails_gives_its_items_first(files: list[Path]) -> None:
    with FileHints(files, Broken(range(10))) as hints:
        for _ in range(2):
            order = iter(hints)
            assert list(itertools.islice(order, 10)) == list(range(10))
            with pytest.raises(RuntimeError, match="the sampler broke"):
                next(order)


def test_an_iterator_as_order_loses_no_item_between_passes(files: list[Path]) -> None:
    with FileHints(files, iter(range(10))) as hints:
        assert [list(itertools.islice(hints, 4)) for _ in range(4)] == [
            [0, 1, 2, 3],
            [4, 5, 6, 7],
            [8, 9],
            [],
        ]


def test_an_order_that_is_slow_delays_no_item(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_hints, "DRAW_SECONDS", 0.0)  # any order is slow then
    sampler = Epochs()
    with FileHints(files, sampler) as hints:
        assert [(item, sampler.drawn) for item in hints] == [(item, item + 1) for item in range(10)]


def test_hints_follow_a_list_that_changes_before_the_first_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    for seconds in (0.0, 0.1):
        monkeypatch.setattr(file_hints, "DRAW_SECONDS", seconds)
        for change in (list.reverse, list.pop, lambda items: items.append(7), lambda _: None):
            order, seen = [5, 3, 4, 1], list[int]()
            with FileHints(seen.append, order) as hints:
                wait_until(lambda seen=seen: seen, "the first look")  # type: ignore[misc]
                change(order)
                assert list(hints) == order
                count = len(order)
                wait_until(lambda: seen[-count:] == order, "the new order")  # noqa: B023


def test_a_list_that_does_not_change_is_looked_at_once_for_the_first_pass() -> None:
    order, seen = [[5, 3], [4], [1]], list[int]()
    with FileHints(seen.append, order) as hints:
        wait_until(lambda: len(seen) == 4, "the first look")
        assert list(hints) == order
        assert list(hints) == order
        wait_until(lambda: len(seen) >= 8, "the second pass")
        assert seen == [5, 3, 4, 1, 5, 3, 4, 1]


def test_a_pass_after_other_items_is_looked_at_again() -> None:
    seen = list[int]()
    with FileHints(seen.append, [1, 2, 3]) as hints:
        wait_until(lambda: seen == [1, 2, 3], "the order")
        assert list(hints.follow([7, 8])) == [7, 8]
        wait_until(lambda: seen == [1, 2, 3, 7, 8], "the other items")
        assert list(hints) == [1, 2, 3]
        wait_until(lambda: seen == [1, 2, 3, 7, 8, 1, 2, 3], "the order, again")


def test_files_that_are_added_come_in_the_next_pass(files: list[Path]) -> None:
    with FileHints(files) as hints:
        assert list(hints) == list(range(20))
        files.append(files[0])
        assert len(hints) == 21
        assert list(hints) == list(range(21))


def test_an_item_beyond_the_files_is_named_with_their_number(
    files: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "loader.hints.file_hints")
    words = (
        "no hint for item 25 of the order: `files` has no path for it (IndexError: list index out of range)"
    )
    for each, more in ((files, "; it has 20 entries"), (files.__getitem__, "")):
        caplog.clear()
        with FileHints(each, [25]) as hints:  # type: ignore[arg-type]
            assert list(hints) == [25]
            wait_until(lambda: caplog.records, "the words")
        assert [record.getMessage() for record in caplog.records] == [words + more]


def test_arrays_as_items_pass_through(files: list[Path]) -> None:
    order = np.arange(6).reshape(3, 2)  # its rows cannot be compared
    with FileHints(lambda _: None, order) as hints:  # type: ignore[arg-type]
        assert [row.tolist() for row in hints] == order.tolist()


def test_items_of_any_kind_pass_through(files: list[Path]) -> None:
    batches = [[0, 1], [2, 19], []]
    with FileHints(files, batches) as hints:
        assert list(hints) == batches
        assert list(hints) == batches
    with FileHints(str) as hints:
        assert list(hints.follow(files)) == files
        assert list(hints.follow(iter(files))) == files
        with pytest.raises(ArgumentError, match=r"follow\(items\)"):
            iter(hints)
    with FileHints({"a": files[0], "b": None}) as hints:
        assert list(hints) == ["a", "b"]
    with FileHints(files) as hints:
        assert list(hints) == list(range(20))


def test_it_pickles_without_its_thread(files: list[Path]) -> None:
    with FileHints(files, [5, 6]) as hints:
        with pickle.loads(pickle.dumps(hints)) as copy:
            assert list(copy) == [5, 6]
        assert list(hints) == [5, 6]


def test_its_thread_ends_with_the_last_reference(files: list[Path]) -> None:
    def threads() -> list[threading.Thread]:
        return [each for each in threading.enumerate() if each.name == "fusecache-file-hints"]

    before = len(threads())
    hints = FileHints(files, [1])
    assert len(threads()) == before + 1
    (thread,) = threads()[before:]
    del hints
    thread.join(20)
    assert not thread.is_alive()


class Loads:
    """A data set: its items are samples, not paths."""

    def __getitem__(self, index: int) -> bytes:
        raise AssertionError("a sample was loaded")

    def __len__(self) -> int:
        return 3


class Saving(Epochs):
    """A sampler that saves its position."""

    def state_dict(self) -> dict[str, int]:
        return {}


def test_what_cannot_work_is_refused(files: list[Path]) -> None:
    for wrong in ("/data/train", Loads(), 3):
        with pytest.raises(ArgumentError, match="give a sequence, a mapping, or a function"):
            FileHints(wrong)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"Saving.*Give the rest of its order as a list"):
        FileHints(files, Saving())
    with pytest.raises(ArgumentError, match="ahead is 0"):
        FileHints(files, ahead=0)
    for name in ("", "../../evil", "my run", "a/b", ".a", "a" * 96):
        with pytest.raises(ArgumentError, match=r"job is .*: use 1 to 95 letters"):
            FileHints(files, job=name)
