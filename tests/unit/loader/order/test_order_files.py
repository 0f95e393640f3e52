"""Orders in a folder: written once on a machine, mapped by everybody, never in anybody's way."""

import os
import signal
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loader import ElasticBatchSampler, OrderError, World
from loader.order import EpochOrders, OrderFiles, OrderSpec, StreamTable
from loader.order.spec import Stored

SIZES = np.full(40, 25, np.int64)


def sampler(folder: Path | None, rank: int = 0, **options: Any) -> ElasticBatchSampler:
    settings: dict[str, Any] = {"global_batch_size": 40, "canonical_nodes": 4, "block_size": 100}
    return ElasticBatchSampler(SIZES, world=World(rank, 2, 2), cache_folder=folder, **settings | options)


def unwanted(_out: Stored) -> None:
    pytest.fail("the order is there already")


def fill(out: Stored) -> None:
    out[:] = np.arange(out.size)[::-1]


def test_all_ranks_read_from_one_file_what_they_would_have_computed(tmp_path: Path) -> None:
    folder = tmp_path / "orders"
    for rank in (0, 1):
        assert list(sampler(folder, rank)) == list(sampler(None, rank))
    (file,) = folder.iterdir()
    assert file.stat().st_size == 4 * 1000


def test_another_order_or_dataset_has_another_file(tmp_path: Path) -> None:
    for options in ({}, {"seed": 1}, {"order": "py1s"}, {"block_size": 50}, {"epoch_size": 500}):
        assert list(sampler(tmp_path, **options)) == list(sampler(None, **options))
    assert len(list(tmp_path.iterdir())) == 5


def test_the_files_of_epochs_long_past_are_removed_and_no_others(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    list(sampler(tmp_path, seed=1))
    other = set(tmp_path.iterdir())
    one = sampler(tmp_path)
    for _ in range(5):
        list(one)
    found = set(tmp_path.iterdir())
    assert other < found
    assert sorted(path.name.partition("-")[2] for path in found - other) == ["3-all.order", "4-all.order"]


def test_who_does_not_write_waits_for_the_file(tmp_path: Path) -> None:
    waiting = OrderFiles(tmp_path, "x", writes=False)
    found: list[Stored] = []
    thread = threading.Thread(target=lambda: found.append(waiting.get("0-all", 100, np.uint32, unwanted)))
    thread.start()
    OrderFiles(tmp_path, "x").get("0-all", 100, np.uint32, fill)
    thread.join(30)
    assert found[0].tolist() == list(range(100))[::-1]
    assert not found[0].flags.writeable


def test_who_waits_in_vain_makes_the_order_himself(tmp_path: Path) -> None:
    lonely = OrderFiles(tmp_path, "x", writes=False, wait_seconds=0.1)
    assert lonely.get("0-all", 10, np.uint32, fill).tolist() == list(range(10))[::-1]


def mapped_bytes(path: Path) -> int:
    """What this process has of a file in its own page table."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    at = next(number for number, line in enumerate(lines) if line.endswith(str(path)))
    return int(next(line for line in lines[at:] if line.startswith("Rss:")).split()[1]) * 1024


def test_who_maps_an_order_does_not_keep_what_was_read_of_it(tmp_path: Path) -> None:
    sizes = np.full(400, 20_000, np.int64)
    spec = OrderSpec("sequential", canonical_nodes=8)
    epoch_orders = EpochOrders(StreamTable.of(sizes, [sizes.size], spec), spec, OrderFiles(tmp_path, "x"))
    epoch_order = epoch_orders.get(0)
    (file,) = tmp_path.iterdir()
    most = 0
    for first in range(0, 8_000_000, 1 << 18):
        positions = np.arange(first, min(first + (1 << 18), 8_000_000))
        assert np.array_equal(epoch_order.at(positions), positions % 8 * 1_000_000 + positions // 8)
        most = max(most, mapped_bytes(file))
    assert file.stat().st_size == 32_000_000
    assert 0 < most < 16_000_000


@pytest.mark.parametrize("order", ["py1e", "py1br", "py1b", "py1s"])
def test_who_writes_an_order_has_little_of_it_at_a_time(tmp_path: Path, order: str) -> None:
    sizes = np.full(1600, 5000, np.int64)
    spec = OrderSpec(order, canonical_nodes=2, block_size=20_000)
    table = StreamTable.of(sizes, [sizes.size], spec)
    seen: list[int] = []

    class Looking(OrderFiles):
        """Looks, now and then, at how much of the file this process has in its page table."""

        def get(self, name: str, samples: int, dtype: Any, fill: Callable[[Stored], None]) -> Stored:
            done = threading.Event()

            def look() -> None:
                while not done.wait(0.01):
                    with suppress(StopIteration, ValueError):
                        (file,) = tmp_path.iterdir()
                        seen.append(mapped_bytes(file))

            with ThreadPoolExecutor(1) as looking:
                looking.submit(look)
                try:
                    return super().get(name, samples, dtype, fill)
                finally:
                    done.set()

    ids = EpochOrders(table, spec, Looking(tmp_path, "x")).get(0).at(np.arange(1000))
    assert np.array_equal(ids, EpochOrders(table, spec).get(0).at(np.arange(1000)))
    assert 0 < max(seen) < 16_000_000


def test_two_threads_of_a_process_make_an_order_once(tmp_path: Path) -> None:
    meeting = threading.Barrier(2)
    fills: list[None] = []

    def slow(out: Stored) -> None:
        fills.append(None)
        with suppress(threading.BrokenBarrierError):
            meeting.wait(0.5)  # of two that fill at a time
        fill(out)

    def ask(_: int) -> list[int]:
        return OrderFiles(tmp_path, "x").get("0-all", 1000, np.uint32, slow).tolist()

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(ask, range(2))) == [list(range(1000))[::-1]] * 2
    assert len(fills) == 1


def test_processes_of_the_same_number_do_not_write_into_each_others_file(tmp_path: Path) -> None:
    names: list[str] = []

    def look(out: Stored) -> None:
        (partial,) = tmp_path.iterdir()
        names.append(partial.name)
        fill(out)

    for _ in range(2):
        OrderFiles(tmp_path, "x").get("0-all", 10, np.uint32, look)
        (file,) = tmp_path.iterdir()
        file.unlink()
    assert names[0] != names[1]


def test_a_process_that_is_forked_while_an_order_is_made_does_not_wait_for_it(tmp_path: Path) -> None:
    cache = OrderFiles(tmp_path, "x")
    children: list[int] = []

    def forked(out: Stored) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # other tests' threads
            child = os.fork()
        if child == 0:
            signal.alarm(20)
            os._exit(int(cache.get("0-all", 10, np.uint32, fill).tolist() != list(range(10))[::-1]))
        children.append(os.waitpid(child, 0)[1])
        fill(out)

    assert cache.get("0-all", 10, np.uint32, forked).tolist() == list(range(10))[::-1]
    assert children == [0]


def test_a_file_that_was_cut_short_is_made_again(tmp_path: Path) -> None:
    cache = OrderFiles(tmp_path, "x")
    cache.get("0-all", 100, np.uint32, fill)
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:50])
    assert cache.get("0-all", 100, np.uint32, fill).tolist() == list(range(100))[::-1]


def test_an_order_that_fails_leaves_no_file(tmp_path: Path) -> None:
    few = sampler(tmp_path, canonical_nodes=2000, drop_last=False)
    with pytest.raises(OrderError, match="Lower canonical_nodes"):
        list(few)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OrderError, match=r"file/.*name another cache folder"):
        list(sampler(tmp_path / "file"))
