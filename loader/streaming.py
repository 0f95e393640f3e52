"""StreamingDataset's face: the same arguments, the same ids in the same order for each rank and worker.

    from loader.streaming import StreamingDataset, StreamingDataLoader

    dataset = StreamingDataset(local="/data/train", shuffle=True, batch_size=8)
    loader = StreamingDataLoader(dataset, batch_size=8, num_workers=2)

For code that is written for MosaicML streaming 0.13; its state dicts go both ways. `local` is a directory that has
everything, such as a mount: what downloads, and says how, is not this class's business, and is accepted and
ignored. Processes of a rank agree on the epoch by a piece of shared memory without a name; ranks need not agree, as
each counts its own iterations.
"""

import fcntl
import math
import mmap
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from loader import stream
from loader.course import Course
from loader.dataset import MDSDataset
from loader.errors import LoaderError
from loader.hints import Hints
from loader.order import DEFAULT_SEED, SEQUENTIAL, OrderSpec
from loader.sampler import ElasticBatchSampler
from loader.shard import DECOMPRESSED_CACHE_BYTES
from loader.table import Sample
from loader.world import World

_IGNORED = {
    "download_retry", "download_timeout", "keep_zip", "predownload", "cache_limit", "stream_name", "stream_config",
}  # fmt: skip
_SUFFIXES = {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


def Stream(
    *,
    local: str,
    remote: str | None = None,
    split: str | None = None,
    proportion: float | None = None,
    repeat: float | None = None,
    choose: int | None = None,
    **ignored: Any,
) -> stream.Stream:
    """Return a stream by StreamingDataset's names. Raises LoaderError for one that would have to be downloaded."""
    _check_ignored(ignored)
    _check_remote(remote, local)
    return stream.Stream(local, split, proportion, repeat, choose)


class StreamingDataset(IterableDataset[Sample]):
    """Iterates over this rank's and worker's samples; each iteration is an epoch.

    Arguments as in StreamingDataset 0.13. streams: made by `Stream` above, or loader.Stream. Unlike there, an epoch
    is resumed between two global batches only; a shard that cannot be read is an error at once. hints: as in
    loader.fast.Loader; the process that made the dataset gives them, not its workers. decompressed_cache_bytes: as in
    MDSDataset. cache_folder: for unpacked shards as there, and for stored orders as in ElasticBatchSampler.
    Raises LoaderError for what this class does not do, OrderError for settings that cannot work.
    """

    def __init__(  # noqa: PLR0913 -- StreamingDataset's, by name
        self,
        *,
        streams: Sequence[stream.Stream] | None = None,
        remote: str | None = None,
        local: str | None = None,
        split: str | None = None,
        validate_hash: str | None = None,
        epoch_size: int | str | None = None,
        sampling_method: str = "balanced",
        sampling_granularity: int = 1,
        partition_algo: str = "relaxed",
        num_canonical_nodes: int | None = None,
        batch_size: int | None = None,
        shuffle: bool = False,
        shuffle_algo: str = "py1e",
        shuffle_seed: int = DEFAULT_SEED,
        shuffle_block_size: int | None = None,
        batching_method: str = "random",
        allow_unsafe_types: bool = False,
        replication: int | None = None,
        hints: bool = True,
        decompressed_cache_bytes: int = DECOMPRESSED_CACHE_BYTES,
        cache_folder: str | Path | None = None,
        **ignored: Any,
    ) -> None:
        _check_ignored(ignored)
        _check_remote(remote, local)
        if partition_algo != "relaxed":
            raise LoaderError(f"partition_algo {partition_algo!r} is not there; the default is relaxed")
        if shuffle_algo == "native":
            # Nor would ranks agree on an epoch's end, which it does not fill up.
            raise LoaderError(
                "shuffle_algo 'native' is none of StreamingDataset's, whose states could not tell it from these: use "
                "it with MDSDataset and ElasticBatchSampler"
            )
        if not streams and local is None:
            raise LoaderError("give local, a directory with the dataset, or streams")
        self.batch_size = batch_size or 1
        self.replication = replication
        self.num_canonical_nodes = num_canonical_nodes
        self.shuffle_seed = shuffle_seed
        self.initial_physical_nodes: int | None = None
        self._samples = MDSDataset(
            list(streams) if streams else str(local),
            split,
            allow_pickle=allow_unsafe_types,
            check_hashes=validate_hash is not None,
            decompressed_cache_bytes=decompressed_cache_bytes,
            cache_folder=cache_folder,
        )
        self._cache_folder = cache_folder
        self._world = World.detect(replication=replication or 1)
        self._order: dict[str, Any] = {
            "order": shuffle_algo if shuffle else SEQUENTIAL,
            "block_size": shuffle_block_size or 0,
            "epoch_size": _number(epoch_size),
            "batching": batching_method,
            "sampling": sampling_method,
            "granularity": sampling_granularity,
            "tail_layout": (self._world.nodes, self._world.ranks_per_node),
        }
        self._spreads = shuffle_algo in ("py1s", "py2s")
        self._epochs = _Epochs()
        self._sampler()  # what cannot work is an error here, not in a worker
        self._hints: Hints | None = None
        self._gives_hints = hints and get_worker_info() is None
        self._give_hints()

    def __iter__(self) -> Iterator[Sample]:
        worker = get_worker_info()
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        generation = None if worker is None else worker.seed - worker.id
        epoch, position = self._epochs.begin(number, generation)
        self._adopt(position)
        sampler = self._sampler()
        sampler.set_epoch(epoch)
        if position is not None and position.epoch == epoch and position.samples:
            sampler.load_state_dict(self._as_state(epoch, position.samples))
            if sampler.epoch != epoch:
                return  # it was saved at the end of its epoch
        self._epochs.tell(number, *sampler.place)
        for batch, ids in enumerate(sampler):
            if batch % workers == number:
                self._epochs.tell(number, *sampler.place)
                yield from self._samples.__getitems__(ids)
        self._epochs.tell(number, *sampler.place)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_hints": None, "_gives_hints": False}

    def __len__(self) -> int:
        """Samples of an epoch that each rank reads."""
        return math.ceil(self._sampler().course.tracks.samples() / self._world.ranks)

    @property
    def size(self) -> int:
        """Samples of the dataset."""
        return len(self._samples)

    @property
    def num_samples(self) -> int:
        """Samples of the dataset."""
        return len(self._samples)

    @property
    def next_epoch(self) -> int:
        """The epoch of the next iteration."""
        return self._epochs.next

    @next_epoch.setter
    def next_epoch(self, epoch: int) -> None:
        self._epochs.move(_Position(epoch, 0, self._rows, self.shuffle_seed, self.initial_physical_nodes))

    def __getitem__(self, which: int) -> Any:
        """Return a sample of the dataset, or several for a slice, a list or an array."""
        return self._samples[which]

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, Any]:  # noqa: FBT001 -- theirs
        """Return StreamingDataset's state. num_samples: that all ranks have consumed.

        from_beginning: counted from the epoch's beginning, not from where this run resumed it.
        """
        epoch, position = self._epochs.next - 1, self._epochs.position()
        self._adopt(position)
        offset = 0
        if position is not None and position.epoch >= epoch:
            epoch, offset = position.epoch, position.samples
        nodes = self._world.nodes if self.initial_physical_nodes is None else self.initial_physical_nodes
        return {
            **self._as_state(epoch, num_samples if from_beginning else offset + num_samples),
            "initial_physical_nodes": nodes,
        }

    def load_state_dict(self, obj: Mapping[str, Any]) -> None:
        """Continue where a state was taken, here or by StreamingDataset, with its seed and canonical nodes.

        Raises StateError if the state does not fit, and OrderError; the dataset stays where it was.
        """
        was = self.num_canonical_nodes, self.shuffle_seed, self.initial_physical_nodes
        order = self._rows, self.shuffle_seed
        try:
            position = _Position(
                obj["epoch"], obj["sample_in_epoch"], obj["num_canonical_nodes"], obj["shuffle_seed"],
                obj.get("initial_physical_nodes"),
            )  # fmt: skip
            self._adopt(position)
            self._sampler().load_state_dict(self._as_state(position.epoch, position.samples))
        except KeyError as missing:
            raise LoaderError(f"this is no state of a StreamingDataset: it lacks {missing}") from None
        except LoaderError:
            self.num_canonical_nodes, self.shuffle_seed, self.initial_physical_nodes = was
            raise
        self._epochs.move(replace(position, epoch=max(position.epoch, 0)))  # -1: none has begun
        if (self._rows, self.shuffle_seed) != order:
            self._give_hints()

    def _give_hints(self) -> None:
        """Give hints by the order as it is now."""
        if self._hints is not None:
            self._hints.close()
        if self._gives_hints:
            progress = _Progress(self._sampler().course, self._epochs)
            self._hints = Hints(self._samples, progress)
            weakref.finalize(self, self._hints.close)

    @property
    def _rows(self) -> int:
        return self.num_canonical_nodes or self._world.nodes * (64 if self._spreads else 1)

    def _as_state(self, epoch: int, samples: int) -> dict[str, Any]:
        return {
            "epoch": epoch,
            "sample_in_epoch": samples,
            "num_canonical_nodes": self._rows,
            "shuffle_seed": self.shuffle_seed,
        }

    def _adopt(self, position: "_Position | None") -> None:
        if position is not None:
            self.num_canonical_nodes, self.shuffle_seed = position.canonical_nodes, position.seed
            self.initial_physical_nodes = position.initial_nodes

    def _sampler(self) -> ElasticBatchSampler:
        spec = OrderSpec(seed=self.shuffle_seed, canonical_nodes=self._rows, **self._order)
        return ElasticBatchSampler(
            self._samples,
            global_batch_size=self.batch_size * self._world.ranks,
            order=spec,
            world=self._world,
            drop_last=spec.batching != "random",
            cache_folder=self._cache_folder,
        )


class StreamingDataLoader(DataLoader[Any]):
    """A DataLoader that counts what it has delivered, as StreamingDataset's own does, for its state."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_samples_yielded = 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # a generator is what it returns
        self.num_samples_yielded = 0
        for batch in super().__iter__():
            self.num_samples_yielded += _samples_in(batch)
            yield batch

    def state_dict(self) -> dict[str, Any] | None:
        """Return the dataset's state after what this loader has delivered; None for another dataset."""
        dataset = self.dataset
        if not isinstance(dataset, StreamingDataset):
            return None
        ranks = World.detect(replication=dataset.replication or 1).ranks
        return dataset.state_dict(self.num_samples_yielded * ranks, from_beginning=False)

    def load_state_dict(self, obj: Mapping[str, Any]) -> None:
        """Continue where a state was taken."""
        if isinstance(self.dataset, StreamingDataset):
            self.dataset.load_state_dict(obj)
            self.num_samples_yielded = 0


@dataclass(frozen=True, slots=True)
class _Position:
    """A state that was loaded."""

    epoch: int
    samples: int
    canonical_nodes: int
    seed: int
    initial_nodes: int | None


@dataclass(frozen=True, slots=True)
class _Progress:
    """How far the workers of a rank are: what Hints asks a sampler."""

    course: Course
    epochs: "_Epochs"

    @property
    def place(self) -> tuple[int, int]:
        """(epoch, batches of it that were begun)."""
        told, loaded = self.epochs.told(), self.epochs.position()
        if told is not None:
            return told
        return (loaded.epoch, loaded.samples // self.course.global_batch_size) if loaded else (0, 0)


class _Epochs:
    """Which epoch an iteration is, for all worker processes of a rank alike.

    Memory that they share, by fork or by a descriptor handed over. Numbers in it: the next epoch; how often a state
    was loaded; the state, of which an epoch of -1 stands for none; then for each worker the generation that it is of
    (the seed that a DataLoader gives its workers together), the count of states loaded then, the first epoch of the
    two, the iterations since, and 1 more than epoch * 2^32 + the batch that it is at (0: it has not begun).
    """

    _HEAD, _SLOT, _WORKERS = 8, 5, 1024

    def __init__(self) -> None:
        self._open(os.memfd_create("loader-epochs"))
        self._numbers[0], self._numbers[2] = 0, -1

    def _open(self, descriptor: int) -> None:
        size = 8 * (self._HEAD + self._SLOT * self._WORKERS)
        if os.fstat(descriptor).st_size < size:
            os.ftruncate(descriptor, size)
        self._descriptor = descriptor
        self._numbers = np.frombuffer(mmap.mmap(descriptor, size), np.int64)

    def __del__(self) -> None:
        os.close(self._descriptor)

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is not None:
            return {"shared": DupFd(self._descriptor)}
        return {"copied": self._numbers.tobytes()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "shared" in state:
            self._open(state["shared"].detach())
        else:
            self._open(os.memfd_create("loader-epochs"))
            self._numbers[:] = np.frombuffer(state["copied"], np.int64)

    @property
    def next(self) -> int:
        """The epoch of the next iteration."""
        return int(self._numbers[0])

    def position(self) -> _Position | None:
        """The state that was loaded last."""
        epoch, samples, nodes, seed, initial = self._numbers[2:7].tolist()
        return None if epoch < 0 else _Position(epoch, samples, nodes, seed, initial or None)

    def move(self, position: _Position) -> None:
        """Go on at a position."""
        with self._locked():
            self._numbers[0] = position.epoch
            self._numbers[1] += 1
            self._numbers[2:7] = (
                position.epoch, position.samples, position.canonical_nodes, position.seed, position.initial_nodes or 0,
            )  # fmt: skip
            self._slots[:, 4] = 0

    def tell(self, worker: int, epoch: int, batch: int) -> None:
        """Say which batch a worker begins."""
        self._slots[worker, 4] = (epoch << 32) + batch + 1

    def told(self) -> tuple[int, int] | None:
        """Return the (epoch, batch) of the worker that is farthest, None if none has begun since a state was loaded."""
        farthest = int(self._slots[:, 4].max())
        return divmod(farthest - 1, 1 << 32) if farthest else None

    def begin(self, worker: int, generation: int | None) -> tuple[int, _Position | None]:
        """Begin an iteration; return its epoch, and the state loaded last. generation: None without workers."""
        if worker >= self._WORKERS:
            raise LoaderError(f"a DataLoader of more than {self._WORKERS} workers is not foreseen")
        with self._locked():
            epoch = self.next
            if generation is not None:
                slots = self._slots
                now = generation & (1 << 62) - 1 | 1 << 61, int(self._numbers[1])  # a slot never used has 0
                peers = slots[(slots[:, 0] == now[0]) & (slots[:, 1] == now[1])]
                first = int(peers[0, 2]) if len(peers) else epoch
                mine = slots[worker]
                iterations = int(mine[3]) if (mine[:2] == now).all() else 0
                epoch = first + iterations
                mine[:4] = (*now, first, iterations + 1)
            self._numbers[0] = max(self.next, epoch + 1)
            return epoch, self.position()

    @property
    def _slots(self) -> NDArray[np.int64]:
        """(workers, numbers) of each worker."""
        return self._numbers[self._HEAD :].reshape(self._WORKERS, self._SLOT)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.lockf(self._descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN)


def _check_remote(remote: str | None, local: str | None) -> None:
    if remote is not None and remote != local:
        raise LoaderError(
            f"remote {remote!r}: nothing is downloaded here. Mount the bucket, and give its directory as local"
        )


def _check_ignored(ignored: Mapping[str, Any]) -> None:
    unknown = sorted(set(ignored) - _IGNORED)
    if unknown:
        raise LoaderError(f"unknown arguments: {', '.join(unknown)}")


def _number(text: int | str | None) -> int | None:
    """100_000, "100k" and "1.5m" are numbers of samples."""
    if not isinstance(text, str):
        return text or None
    digits, factor = text.strip().lower().replace(",", ""), 1
    if digits and digits[-1] in _SUFFIXES:
        digits, factor = digits[:-1], _SUFFIXES[digits[-1]]
    try:
        return int(float(digits) * factor)
    except ValueError:
        raise LoaderError(f"epoch_size {text!r} is no number") from None


def _samples_in(batch: Any) -> int:
    if isinstance(batch, Mapping):
        return len(next(iter(batch.values())))
    return len(batch) if hasattr(batch, "shape") else len(batch[0])
