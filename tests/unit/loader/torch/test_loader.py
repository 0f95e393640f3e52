"""The fast path: batches in order whoever reads them, exact states, errors where they belong, nothing left behind."""

import contextlib
import copy
import gc
import json
import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from loader import ElasticBatchSampler, LoaderError, MDSDataset, MDSWriter, ShardError, StateError, World
from loader.fast import Loader
from loader.torch.collate import collate

COUNT = 500
BATCH = 32


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("data"))


def write(out: Path) -> Path:
    with MDSWriter(out, {"id": "int", "tokens": "ndarray:int32:64"}, size_limit=8192) as writer:
        for number in range(COUNT):
            writer.write({"id": number, "tokens": np.full(64, number, np.int32)})
    return out


def sampler_of(dataset: MDSDataset, **options: Any) -> ElasticBatchSampler:
    settings: dict[str, Any] = {"global_batch_size": BATCH, "canonical_nodes": 4, "drop_last": False}
    return ElasticBatchSampler(dataset, world=World(), **settings | options)


def loader_of(directory: Path, **options: Any) -> Loader:
    dataset = MDSDataset(directory)
    return Loader(dataset, sampler_of(dataset), **options)


def ids_of(loader: Any) -> list[list[int]]:
    found = []
    for batch in loader:
        assert (batch["tokens"] == batch["id"][:, None]).all()
        found.append(batch["id"].tolist())
    return found


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("loader-")]


def wait_until_no_thread_is_left() -> None:
    deadline = time.monotonic() + 20
    while threads():
        assert time.monotonic() < deadline, threads()
        time.sleep(0.01)


class Counting(MDSDataset):
    """Counts the samples asked for."""

    asked = 0

    def __getitems__(self, which: Any) -> Any:
        self.asked += len(which)
        return super().__getitems__(which)


class Far(MDSDataset):
    """Answers only once so many threads ask at a time."""

    barrier = threading.Barrier(4)

    def __getitems__(self, which: Any) -> Any:
        self.barrier.wait(20)
        return super().__getitems__(which)


@pytest.mark.parametrize(("many", "ahead"), [(1, 1), (3, 2), (16, 4)])
def test_batches_come_in_the_samplers_order_epoch_after_epoch(directory: Path, many: int, ahead: int) -> None:
    loader = loader_of(directory, threads=many, ahead=ahead)
    sampler = sampler_of(MDSDataset(directory))
    assert len(loader) == len(sampler)
    for epoch in range(3):
        assert loader.epoch == epoch - (epoch > 0)
        assert ids_of(loader) == list(sampler)
    wait_until_no_thread_is_left()


def test_a_state_counts_the_batches_that_the_loop_was_given(directory: Path) -> None:
    whole = ids_of(loader_of(directory))
    loader = loader_of(directory)
    states = [loader.state_dict()]
    for _ in loader:
        states.append(json.loads(json.dumps(loader.state_dict())))
    for given in (0, 1, 7, len(whole) - 1):
        resumed = loader_of(directory)
        resumed.load_state_dict(states[given])
        assert ids_of(resumed) == whole[given:]
    assert (states[-1]["epoch"], states[-1]["samples"]) == (1, 0)
    elastic = sampler_of(MDSDataset(directory))
    elastic.load_state_dict(states[7])
    assert list(elastic) == whole[7:]


def test_an_epoch_before_the_loaded_one_is_refused_until_an_iteration_has_begun(directory: Path) -> None:
    sampler = sampler_of(MDSDataset(directory))
    sampler.set_epoch(3)
    next(iter(sampler))
    state = sampler.state_dict(batches_consumed=1)
    resumed = loader_of(directory)
    resumed.load_state_dict(state)
    with pytest.raises(StateError, match="epoch 0 comes before the loaded position, in epoch 3"):
        resumed.set_epoch(0)
    resumed.set_epoch(3)
    assert ids_of(resumed) == list(sampler)[1:]
    resumed.set_epoch(0)
    assert resumed.epoch == 0


def test_an_iteration_broken_off_ends_and_the_next_one_begins_where_it_began(directory: Path) -> None:
    loader = loader_of(directory)
    whole = ids_of(loader_of(directory))
    for number, _ in enumerate(loader):
        if number == 4:
            break
    first = iter(loader)
    assert next(first)["id"].tolist() == whole[0]
    assert ids_of(loader) == whole
    with pytest.raises(LoaderError, match="ended by another one"):
        next(first)
    loader.set_epoch(0)
    assert ids_of(loader) == whole
    del first
    wait_until_no_thread_is_left()


@pytest.mark.parametrize("is_held", [False, True])
def test_wherever_an_epoch_is_broken_off_it_begins_again_and_only_a_whole_one_is_over(
    directory: Path,
    is_held: bool,  # noqa: FBT001 -- pytest passes it
) -> None:
    dataset = MDSDataset(directory)
    sampler = sampler_of(dataset)
    whole = [list(sampler), list(sampler)]
    sampler.set_epoch(0)
    next(iter(sampler))
    resumed = len(whole[0]) - 8
    state = sampler.state_dict(batches_consumed=0) | {"samples": resumed * BATCH}
    for given in range(1, 9):
        loader = Loader(dataset, sampler_of(dataset))
        for chooses in (False, True):
            loader.load_state_dict(state)
            iterator = iter(loader)
            taken = [next(iterator)["id"].tolist() for _ in range(given)]
            assert taken == whole[0][resumed:][:given]
            if not is_held:
                del iterator
            if chooses:
                (loader if is_held else loader.batch_sampler).set_epoch(0)  # trainers reach for either
            if given < 8:
                assert ids_of(loader) == whole[0][resumed:]
            else:
                assert ids_of(loader) == whole[0 if chooses else 1]


def test_a_copy_of_a_loader_that_reads_ahead_begins_the_epoch_again(directory: Path) -> None:
    loader = loader_of(directory)
    iterator = iter(loader)
    whole = [next(iterator)["id"].tolist() for _ in range(len(loader) - 2)]
    twin = copy.deepcopy(loader)
    whole += [batch["id"].tolist() for batch in iterator]
    assert ids_of(twin) == whole


def test_no_more_is_read_than_the_batches_ahead(directory: Path) -> None:
    dataset = Counting(directory)
    loader = Loader(dataset, sampler_of(dataset), threads=4, ahead=3)
    iterator = iter(loader)
    for given in range(1, 6):
        next(iterator)
        assert dataset.asked <= (given + 3) * BATCH
    del iterator


def test_a_far_batch_is_shared_out_to_all_threads(directory: Path) -> None:
    dataset = Far(directory)
    loader = Loader(dataset, sampler_of(dataset), threads=4, ahead=1)
    assert next(iter(loader))["id"].tolist() == next(iter(sampler_of(dataset)))


def test_a_shard_that_cannot_be_read_is_an_error_at_its_batch_after_all_before_it(tmp_path: Path) -> None:
    write(tmp_path)
    dataset = MDSDataset(tmp_path)
    order = list(sampler_of(dataset, order="sequential", canonical_nodes=1))
    loader = Loader(dataset, sampler_of(dataset, order="sequential", canonical_nodes=1))
    broken = int(dataset.shard_sizes[:3].sum())  # the first sample of the fourth shard
    os.truncate(tmp_path / "shard.00003.mds", 2000)
    given: list[list[int]] = []
    with pytest.raises(ShardError, match=r"shard\.00003\.mds.*truncated"):
        given.extend(batch["id"].tolist() for batch in loader)
    assert given == order[: broken // BATCH]
    assert loader.state_dict()["samples"] == len(given) * BATCH
    wait_until_no_thread_is_left()


def open_files(directory: Path) -> list[str]:
    """The files below a directory that this process has open."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return [path for path in found if path.startswith(f"{directory}/")]


class Interrupting(MDSDataset):
    """Has the main thread interrupted as it waits for what begins at sample 160, and answers once that is over."""

    is_over = threading.Event()

    def __getitems__(self, which: Any) -> Any:
        if which[0] == 160:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            assert self.is_over.wait(20)
        return super().__getitems__(which)


@pytest.mark.parametrize("where", ["a shard", "the loop", "an interrupt while it waits"])
def test_a_loader_that_failed_has_closed_its_shards_once_it_is_let_go_of(tmp_path: Path, where: str) -> None:
    """By reference counts alone: a garbage collection comes much later, and a mount with open files stays busy."""
    write(tmp_path)

    def fail() -> None:
        if where == "a shard":
            os.truncate(tmp_path / "shard.00003.mds", 2000)
        dataset = Interrupting(tmp_path) if where == "an interrupt while it waits" else MDSDataset(tmp_path)
        loader = Loader(dataset, sampler_of(dataset, order="sequential", canonical_nodes=1))
        try:
            for number, _ in enumerate(loader):
                if number == 2:
                    assert open_files(tmp_path)
                    if where == "the loop":
                        raise ShardError("truncated")
        finally:
            Interrupting.is_over.set()

    expected = KeyboardInterrupt if where == "an interrupt while it waits" else ShardError
    Interrupting.is_over.clear()
    handler = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # who runs in the background ignores it
    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(expected):
            fail()
            raise AssertionError("nothing was raised")
        wait_until_no_thread_is_left()
        assert not open_files(tmp_path)
    finally:
        gc.enable()
        signal.signal(signal.SIGINT, handler)


def test_a_shard_that_shrinks_while_it_is_open_is_an_error_and_not_a_signal(tmp_path: Path) -> None:
    write(tmp_path)
    dataset = MDSDataset(tmp_path)
    assert len(dataset[list(range(COUNT))]) == COUNT
    os.truncate(tmp_path / "shard.00003.mds", 2000)
    with pytest.raises(ShardError, match=r"shard\.00003\.mds.*the file ends at 2000; it was truncated"):
        dataset.__getitems__(list(range(COUNT)))


def test_on_a_plain_directory_there_is_nobody_to_tell_and_nothing_to_end(directory: Path) -> None:
    loader = loader_of(directory)
    assert not any(thread.name.startswith("fusecache-") for thread in threading.enumerate())
    iterator = iter(loader)
    next(iterator)
    loader.close()
    with pytest.raises(LoaderError, match="the loader was closed"):
        list(iterator)
    assert ids_of(loader) == list(sampler_of(MDSDataset(directory)))
    wait_until_no_thread_is_left()


def test_a_copy_of_a_loader_reads_by_itself(directory: Path) -> None:
    loader = loader_of(directory)
    given = [next(iter(loader))["id"].tolist()]
    twin = copy.deepcopy(loader)
    assert ids_of(twin)[:1] == given
    assert twin.state_dict()["epoch"] == 1
    assert loader.state_dict()["samples"] == BATCH


def test_threads_and_batches_are_at_least_one(directory: Path) -> None:
    for wrong in ({"threads": 0}, {"ahead": 0}):
        with pytest.raises(LoaderError, match="at least 1"):
            loader_of(directory, **wrong)


def test_samples_of_all_kinds_come_through_a_collate_of_the_callers(tmp_path: Path) -> None:
    with MDSWriter(tmp_path, {"id": "int", "image": "bytes", "text": "str"}) as writer:
        for number in range(100):
            writer.write({"id": number, "image": bytes([number]) * number, "text": str(number)})
    dataset = MDSDataset(tmp_path)

    def keep(samples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        return list(samples)

    loader = Loader(dataset, sampler_of(dataset), collate_fn=keep)
    found = [sample for batch in loader for sample in batch]
    assert sorted(sample["id"] for sample in found) == sorted(
        number for ids in sampler_of(dataset) for number in ids
    )
    assert all(
        sample == {"id": number, "image": bytes([number]) * number, "text": str(number)}
        for sample in found
        for number in [sample["id"]]
    )


def test_an_iteration_that_goes_on_in_a_forked_process_is_an_error_and_a_new_one_there_is_none(
    directory: Path, tmp_path: Path
) -> None:
    loader = loader_of(directory)
    batches = iter(loader)
    given = [next(batches)["id"].tolist() for _ in range(3)]
    told = tmp_path / "told"
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(30)  # the threads that it would wait for are its parent's
            with contextlib.suppress(StopIteration):
                try:
                    next(batches)
                except LoaderError as problem:
                    told.write_text(json.dumps([str(problem), ids_of(loader)]))
                    status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    message, again = json.loads(told.read_text())
    assert f"belongs to process {os.getpid()}" in message
    assert f"process {child} was forked" in message
    whole = list(sampler_of(MDSDataset(directory)))
    assert again == whole  # as an iteration does that is begun instead of another one
    assert given + [batch["id"].tolist() for batch in batches] == whole


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("collate_fn", [None, collate])
def test_a_data_loader_profits_without_a_word(directory: Path, workers: int, collate_fn: Any) -> None:
    dataset = MDSDataset(directory)
    loader: DataLoader[Any] = DataLoader(
        dataset, batch_sampler=sampler_of(dataset), num_workers=workers, collate_fn=collate_fn
    )
    assert ids_of(loader) == list(sampler_of(dataset))


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 calls it, torch 2.13 warns
@pytest.mark.parametrize("workers", [0, 2])
def test_torchdatas_stateful_loader_resumes_by_the_samplers_state(directory: Path, workers: int) -> None:
    def make() -> StatefulDataLoader[Any]:
        dataset = MDSDataset(directory)
        return StatefulDataLoader(
            dataset,
            batch_sampler=sampler_of(dataset, consumed_when_yielded=True),
            num_workers=workers,
            collate_fn=collate,
        )

    whole = ids_of(make())
    assert whole == list(sampler_of(MDSDataset(directory)))
    loader = make()
    state: dict[str, Any] = {}
    for number, _ in enumerate(loader):
        if number == 4:
            state = loader.state_dict()
            break
    resumed = make()
    resumed.load_state_dict(state)
    assert ids_of(resumed) == whole[5:]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="pinned memory needs CUDA")
def test_batches_lie_in_pinned_memory_where_cuda_is(directory: Path) -> None:
    assert all(batch["tokens"].is_pinned() for batch in loader_of(directory))
