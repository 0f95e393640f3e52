"""What a training process does with a dataset: `python -m benchmarks.loading '{"task": …}'` prints one JSON object.

CPU is user and system time of this process and its threads, and of the processes that a library starts. DataLoaders
have no workers here.
"""

import json
import logging
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.loading_peers import READERS, WRITERS, Epoch, Reader, cleanups
from benchmarks.processes import DescendantsWatch, drop_files, drop_pages, tree
from benchmarks.samples import CONTEXT, DeliveryError, check_count, check_delivery, make_value
from loader import ElasticBatchSampler, MDSDataset, MDSWriter, World
from loader.order import EpochOrders, OrderSpec, StreamTable, batch_plan

CANONICAL_NODES = 8
# Samples of a block of the shuffle where the cache is small: 8 blocks at a time are an eighth of the shards. The usual
# block of 2**18 would be all of so small a dataset, and each batch would read from all shards.
STEADY_BLOCK = 1024
# They read as many bytes, and make no samples of them.
COUNTED_ONLY = ("raw", "raw-dataloader")


def write(library: str, kind: str, path: str, samples: int, shard_bytes: int) -> dict[str, Any]:
    """Write a dataset of tokens or of blobs: as MDS, which serves StreamingDataset too, or for another library."""
    rng = np.random.default_rng(1)
    if library in WRITERS:
        WRITERS[library](
            kind, path, (make_value(kind, number, rng) for number in range(samples)), shard_bytes
        )
        return {}
    columns = {"tokens": {"tokens": f"ndarray:int32:{CONTEXT}"}, "blobs": {"image": "bytes"}}[kind]
    with MDSWriter(path, columns, size_limit=shard_bytes) as writer:
        for number in range(samples):
            name, value = next(iter(columns)), make_value(kind, number, rng)
            writer.write({name: value})
    return {}


def speed(library: str, kind: str, path: str, batch: int, passes: int, samples: int) -> dict[str, Any]:
    """Go through all samples in shuffled order, several times; the first pass is checked instead of counted.

    cpu_us: CPU microseconds a sample, of this process and of all that it started. Raises DeliveryError.
    """
    import torch

    torch.set_num_threads(1)
    epoch = LIBRARIES[library](kind, path, batch)
    check_delivery(kind, epoch(0), samples, batch, with_values=library not in COUNTED_ONLY)
    others = DescendantsWatch(os.getpid()) if len(tree(os.getpid())) > 1 else None
    cpu, rates = [], []
    for number in range(1, passes + 1):
        began, used, count = time.perf_counter(), _cpu_seconds(others), 0
        for values in epoch(number):
            count += len(values)
        cpu.append((_cpu_seconds(others) - used) / count * 1e6)
        rates.append(count / (time.perf_counter() - began))
        check_count(count, samples, batch)
    if others is None and len(tree(os.getpid())) > 1:
        raise DeliveryError(
            f"{library} started processes, whose CPU was not counted: add it to WITH_PROCESSES"
        )
    return {"cpu_us": statistics.median(cpu), "samples_per_second": statistics.median(rates)}


def _cpu_seconds(others: DescendantsWatch | None) -> float:
    return time.process_time() + (others.seconds() if others is not None else 0.0)


def _ours(
    path: str, batch: int, world: World | None = None, *, block: int = 0
) -> tuple[MDSDataset, ElasticBatchSampler]:
    dataset = MDSDataset(path)
    sampler = ElasticBatchSampler(
        dataset,
        global_batch_size=batch,
        world=world or World(),
        canonical_nodes=CANONICAL_NODES,
        block_size=block,
    )
    return dataset, sampler


def _fusecache(kind: str, path: str, batch: int) -> Epoch:
    from torch.utils.data import DataLoader

    from loader.torch.collate import collate

    dataset, sampler = _ours(path, batch)
    batches: DataLoader[Any] = DataLoader(
        dataset,  # type: ignore[arg-type]  # a map-style data set, without torch as its base
        batch_sampler=sampler,
        collate_fn=collate,
    )

    def epoch(number: int) -> Iterable[Any]:
        sampler.set_epoch(number)
        for found in batches:
            yield next(iter(found.values()))

    return epoch


def _fusecache_loader(kind: str, path: str, batch: int) -> Epoch:
    from loader.fast import Loader

    batches = Loader(*_ours(path, batch))

    def epoch(number: int) -> Iterable[Any]:
        batches.set_epoch(number)
        for found in batches:
            yield next(iter(found.values()))

    return epoch


class _RawReads:
    """Nothing but pread, as many bytes as the samples have: what the kernel's copying costs here and now.

    As a dataset for torch's DataLoader, it makes a batch of its reads. batches: the ids of each batch of an epoch.
    """

    def __init__(self, path: str, batch: int) -> None:
        dataset, sampler = _ours(path, batch)
        index = dataset.index
        self.batches = list(sampler)
        self._files = [os.open(f"{index.directory(0)}/{name}", os.O_RDONLY) for name in index.raw_names]
        self._size = int(index.raw_bytes.sum() / index.samples.sum())
        self._samples, self._ends = index.samples, np.cumsum(index.samples)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitems__(self, ids: list[int]) -> list[bytes]:
        shards = np.searchsorted(self._ends, ids, side="right")
        places = (np.asarray(ids) - self._ends[shards] + self._samples[shards]) * self._size
        files, size = self._files, self._size
        return [
            os.pread(files[shard], size, place)
            for shard, place in zip(shards.tolist(), places.tolist(), strict=True)
        ]


def _raw(kind: str, path: str, batch: int) -> Epoch:
    reads = _RawReads(path, batch)
    return lambda number: map(reads.__getitems__, reads.batches)


def _raw_dataloader(kind: str, path: str, batch: int) -> Epoch:
    """The same reads in torch's DataLoader: beside `raw`, what torch itself costs."""
    from torch.utils.data import DataLoader

    reads = _RawReads(path, batch)
    batches: DataLoader[Any] = DataLoader(
        reads,  # type: ignore[arg-type]  # a dataset by its methods
        batch_sampler=reads.batches,
        collate_fn=lambda found: found,
    )
    return lambda number: batches


def _streaming(kind: str, path: str, batch: int) -> Epoch:
    from torch.utils.data import DataLoader

    dataset = _streaming_dataset(local=path, batch_size=batch)
    batches: DataLoader[Any] = DataLoader(dataset, batch_size=batch)

    def epoch(number: int) -> Iterable[Any]:
        for found in batches:
            yield next(iter(found.values()))

    return epoch


def _streaming_dataset(**options: Any) -> Any:
    from tests.support.real_streaming import import_streaming

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    streaming = import_streaming()
    return streaming.StreamingDataset(shuffle=True, num_canonical_nodes=CANONICAL_NODES, **options)


LIBRARIES: dict[str, Reader] = {
    "fusecache": _fusecache,
    "fusecache-loader": _fusecache_loader,
    "streaming": _streaming,
    "raw": _raw,
    "raw-dataloader": _raw_dataloader,
    **READERS,
}


def cold(library: str, path: str, batch: int, steps: int, step_seconds: float, remote: str) -> dict[str, Any]:
    """Train for some steps on a dataset that this machine has nothing of. A step is a pause.

    library: fusecache (with hints), no-hints, streaming (which downloads from `remote` into `path`), or whole: the
    shards of these steps downloaded whole, eight at a time. waited_seconds: for data, from the loop's beginning on.
    """
    if library == "whole":
        return _whole_shards(path, batch, steps)
    if library == "streaming":
        from torch.utils.data import DataLoader

        dataset = _streaming_dataset(remote=remote, local=path, batch_size=batch)
        batches: Iterable[Any] = DataLoader(dataset, batch_size=batch)
        began = time.time()
    else:
        from loader.fast import Loader

        dataset, sampler = _ours(path, batch)
        began = time.time()
        batches = Loader(dataset, sampler, hints=library == "fusecache")
    first, waited, asked = 0.0, 0.0, began
    iterator = iter(batches)
    for number in range(steps):
        next(iterator)
        now = time.time()
        waited += now - asked
        first = first or now
        if number + 1 < steps:
            time.sleep(step_seconds)
        asked = time.time()
    return {"began": began, "first": first, "first_seconds": first - began, "waited_seconds": waited}


def _whole_shards(path: str, batch: int, steps: int) -> dict[str, Any]:
    dataset, sampler = _ours(path, batch)
    ids = np.concatenate([np.asarray(ids) for _, ids in zip(range(steps), sampler, strict=False)])
    ends = np.cumsum(dataset.shard_sizes)
    shards = np.unique(np.searchsorted(ends, ids, side="right")).tolist()

    def read(shard: int) -> int:
        with open(f"{path}/{dataset.index.raw_names[shard]}", "rb", buffering=0) as file:
            buffer, total = bytearray(1 << 20), 0
            while got := file.readinto(buffer):
                total += got
        return total

    began = time.time()
    with ThreadPoolExecutor(8) as pool:
        total = sum(pool.map(read, shards))
    return {"seconds": time.time() - began, "bytes": total, "shards": len(shards)}


def steady(
    library: str, path: str, batch: int, epochs: int, step_seconds: float, ranks: int = 1
) -> dict[str, Any]:
    """Go through a dataset that does not fit into the daemon's cache. times: seconds since 1970, one a border.

    ranks: of this node, each with a loader of its own in this process; they take their steps together, as a training
    job's do.
    """
    from loader.fast import Loader

    hints = library == "fusecache"
    loaders = [
        Loader(
            *_ours(path, batch, World(rank, ranks), block=STEADY_BLOCK),
            hints=hints,
            threads=max(2, 16 // ranks),
        )
        for rank in range(ranks)
    ]
    times = [time.time()]
    for number in range(epochs):
        drop_pages()  # pages of the kernel would hide the cache behind them: a real dataset is larger than memory
        for batches in loaders:
            batches.set_epoch(number)
        for _ in zip(*loaders, strict=True):
            time.sleep(step_seconds)
        times.append(time.time())
    return {"times": times}


def share(path: str, batch: int, epochs: int, node: int, nodes: int) -> dict[str, Any]:
    """Go through what one of some nodes reads, in the elastic order. times: as of `steady`."""
    from loader.fast import Loader

    loader = Loader(*_ours(path, batch, World(node, nodes, 1)))
    times = [time.time()]
    for number in range(epochs):
        drop_files(Path(path))  # pages of the mount would hide the cache behind them
        loader.set_epoch(number)
        for _ in loader:
            pass
        times.append(time.time())
    return {"times": times}


def policies(path: str, batch: int, epochs: int, share: float) -> dict[str, Any]:
    """Count what caches of whole shards fetch on demand: one keeps those used last, the other those used soonest.

    share: of the shards that there is room for. lru, ideal: share of the shards fetched an epoch, from the second on.
    """
    dataset, sampler = _ours(path, batch, block=STEADY_BLOCK)
    ends = np.cumsum(dataset.index.samples)
    steps: list[list[int]] = []
    borders = []
    for number in range(epochs):
        sampler.set_epoch(number)
        steps += [np.unique(np.searchsorted(ends, ids, side="right")).tolist() for ids in sampler]
        borders.append(len(steps))
    room = int(len(ends) * share)
    found = {}
    for name, useful in (("lru", _past(steps)), ("ideal", _future(steps))):
        fetched = _fetched(useful, room)
        counts = [sum(fetched[first:stop]) for first, stop in pairwise(borders)]
        found[name] = statistics.fmean(counts) / len(ends)
    return found


def _past(steps: list[list[int]]) -> list[dict[int, int]]:
    """Return how useful the shards of each step are after it: the more so the later it was."""
    return [dict.fromkeys(shards, number) for number, shards in enumerate(steps)]


def _future(steps: list[list[int]]) -> list[dict[int, int]]:
    """Return how useful the shards of each step are after it: the more so the sooner they are used again."""
    following: dict[int, int] = {}
    found: list[dict[int, int]] = []
    for number in reversed(range(len(steps))):
        found.append({shard: -following.get(shard, len(steps)) for shard in steps[number]})
        following.update(dict.fromkeys(steps[number], number))
    return found[::-1]


def _fetched(steps: list[dict[int, int]], room: int) -> list[int]:
    """Return how many shards are fetched at each step, where the least useful ones go."""
    kept: dict[int, int] = {}
    counts = []
    for shards in steps:
        counts.append(sum(shard not in kept for shard in shards))
        kept.update(shards)
        for shard in sorted(kept, key=kept.__getitem__)[: max(0, len(kept) - room)]:
            del kept[shard]
    return counts


def order(name: str, samples: int, shard_samples: int) -> dict[str, Any]:
    """Make an epoch's order, up to the first batch."""
    sizes = np.full(samples // shard_samples, shard_samples, np.int64)
    spec = OrderSpec(name)
    before, used = _peak_bytes(), time.process_time()
    table = StreamTable.of(sizes, [sizes.size], spec)
    plan = batch_plan(EpochOrders(table, spec), World(), 512, drop_last=True)
    first = plan.batch(0, 0, 0)
    seconds = time.process_time() - used
    again = time.process_time()
    plan.batch(1, 0, 0)
    return {
        "seconds": seconds,
        "batch_seconds": time.process_time() - again,
        "memory_bytes": _peak_bytes() - before,
        "ids": int(first.size),
    }


def _peak_bytes() -> int:
    # Not ru_maxrss, which begins with what the process had that started this one.
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))) * 1024


def open_index(path: str) -> dict[str, Any]:
    """Open a dataset of many shards. memory_bytes: of the whole process, as a rank has it."""
    used = time.process_time()
    dataset = MDSDataset(path)
    seconds = time.process_time() - used
    return {"seconds": seconds, "memory_bytes": _peak_bytes(), "samples": len(dataset)}


TASKS: dict[str, Callable[..., dict[str, Any]]] = {
    "write": write,
    "speed": speed,
    "cold": cold,
    "steady": steady,
    "share": share,
    "policies": policies,
    "order": order,
    "index": open_index,
}


def main() -> None:
    """Do the one task of the command line. What libraries print goes to standard error."""
    request = json.loads(sys.argv[1])
    answers, sys.stdout = sys.stdout, sys.stderr
    try:
        answer = TASKS[request.pop("task")](**request)
    finally:
        for cleanup in cleanups:
            cleanup()
    answers.write(json.dumps(answer))
    answers.flush()
    sys.stderr.flush()
    # StreamingDataset's threads may not end by themselves.
    os._exit(0)


if __name__ == "__main__":
    main()
