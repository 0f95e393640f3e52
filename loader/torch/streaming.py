"""Compatible API of MosaicML's StreamingDataset: the same arguments, and the same ids for each rank and worker.

    from loader.streaming import StreamingDataset, StreamingDataLoader

    dataset = StreamingDataset(local="/data/train", shuffle=True, batch_size=8)
    loader = StreamingDataLoader(dataset, batch_size=8, num_workers=2)

For code written for MosaicML streaming 0.13. State dicts can be exchanged in both directions. `local` is a directory
that contains the whole dataset, such as a mount. `remote` may be a directory, or a URL that a mount of this node shows;
the dataset is then read there. Arguments about downloading are accepted and ignored. A subclass may define `get_item`
or `__getitem__`, as with StreamingDataset; samples are then read one by one.

Attributes of StreamingDataset for trainers and subclasses that read them: arguments, shards, streams.

The streams of StreamingDataset, by its argument names: where they lie, and their share of an epoch.
"""

import math
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from loader.base.argument_checks import optional_whole, sample_count, whole_number
from loader.base.paths import mounted_path
from loader.errors import (
    ArgumentError,
    DatasetError,
    LoaderError,
    OrderError,
    StateError,
    UnknownArgumentError,
)
from loader.hints.client import Hints
from loader.mds import dataset
from loader.mds.dataset import MDSDataset
from loader.mds.record_table import Sample
from loader.mds.shard_reader import DECOMPRESSED_CACHE_BYTES
from loader.order import DEFAULT_SEED, SEQUENTIAL, OrderSpec
from loader.order.spec import check_is_state, count_of
from loader.order.streams import StreamTable
from loader.sampling.sampler import ElasticBatchSampler
from loader.sampling.worker_epochs import WorkerEpochs, WorkerPosition, WorkerProgress
from loader.world import World


class StreamingAttributes:
    """Counts and offsets of the dataset `_samples`, whose streams are `streams`. All arrays are int64."""

    _samples: MDSDataset
    streams: Sequence[object]

    def keep_arguments(
        self,
        *,
        sampling_method: str,
        sampling_granularity: int,
        batching_method: str,
        partition_algo: str,
        allow_unsafe_types: bool,
        cache_limit: int | str | None,
        predownload: int,
    ) -> None:
        """Keep the checked arguments as attributes."""
        self.sampling_method, self.sampling_granularity = sampling_method, sampling_granularity
        self.batching_method, self.partition_algo = batching_method, partition_algo
        self.allow_unsafe_types = allow_unsafe_types
        self.cache_limit, self.predownload = cache_limit, predownload

    @property
    def size(self) -> int:
        """Number of samples in the dataset."""
        return len(self._samples)

    @property
    def num_samples(self) -> int:
        """Number of samples in the dataset."""
        return len(self._samples)

    @property
    def num_shards(self) -> int:
        """Number of shards in the dataset."""
        return int(self.samples_per_shard.size)

    @property
    def num_streams(self) -> int:
        """Number of streams in the dataset."""
        return len(self.streams)

    @property
    def samples_per_shard(self) -> NDArray[np.int64]:
        """(shards,) number of samples in each shard."""
        return self._samples.shard_sizes

    @property
    def sample_offset_per_shard(self) -> NDArray[np.int64]:
        """(shards,) id of the first sample of each shard."""
        return _before_each(self.samples_per_shard)

    @property
    def shards_per_stream(self) -> NDArray[np.int64]:
        """(streams,) number of shards in each stream."""
        return np.array(self._samples.shards_per_stream, np.int64)

    @property
    def shard_offset_per_stream(self) -> NDArray[np.int64]:
        """(streams,) number of the first shard of each stream."""
        return _before_each(self.shards_per_stream)

    @property
    def samples_per_stream(self) -> NDArray[np.int64]:
        """(streams,) number of samples in each stream."""
        parts = np.split(self.samples_per_shard, self.shard_offset_per_stream[1:])
        return np.array([part.sum() for part in parts], np.int64)

    @property
    def sample_offset_per_stream(self) -> NDArray[np.int64]:
        """(streams,) id of the first sample of each stream."""
        return _before_each(self.samples_per_stream)

    @property
    def stream_per_shard(self) -> NDArray[np.int64]:
        """(shards,) the stream that each shard belongs to."""
        return np.repeat(np.arange(self.num_streams, dtype=np.int64), self.shards_per_stream)


def _before_each(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    found: NDArray[np.int64] = np.cumsum(counts) - counts
    return found


_IGNORED = {
    "download_retry", "download_timeout", "keep_zip", "predownload", "cache_limit", "stream_name", "stream_config",
}  # fmt: skip


class StreamingStream:
    """A stream with StreamingDataset's arguments and attributes: local, remote, split, proportion, repeat, choose.

    remote: a directory, or a URL that a mount of this node shows, such as `s3://bucket/data`; the stream is read there,
    and `local` may be missing. A dataset fills in proportion, repeat and choose when it is made. source: what is read,
    with the weight that was asked for.
    Raises ArgumentError without local and remote, and if the stream would have to be downloaded.
    """

    def __init__(
        self,
        *,
        local: str | None = None,
        remote: str | None = None,
        split: str | None = None,
        proportion: float | None = None,
        repeat: float | None = None,
        choose: int | None = None,
        validate_hash: str | None = None,
        **ignored: Any,
    ) -> None:
        check_ignored(ignored)
        self.local, self.remote, self.split = _directory(local, remote), remote, split or ""
        self.proportion, self.repeat, self.choose = proportion, repeat, choose
        self.validate_hash = validate_hash
        self.source = dataset.Stream(
            self.local, split, proportion, repeat, choose, check_hashes=validate_hash is not None
        )


def _directory(local: str | None, remote: str | None) -> str:
    """Return the directory that a stream is read in."""
    if remote is None or remote == local:
        if not local:
            raise ArgumentError("a stream needs local, a directory with the dataset, or remote")
        return str(local)
    if "://" not in str(remote):
        return os.fspath(remote)
    path = mounted_path(remote)
    if path is None:
        raise ArgumentError(
            f"remote {remote!r}: the loader downloads nothing, and no mount of this node shows it. Mount it with "
            f"`fusecache mount {remote} DIRECTORY`, or give its directory as local"
        )
    return path


def only_stream(options: Mapping[str, Any], **place: str | None) -> StreamingStream:
    """Return the stream of a dataset that has local, remote and split itself; stream_config may have more arguments.

    Raises ArgumentError for a stream_name: StreamingDataset would look up a class of that name in its registry.
    """
    name = options.get("stream_name", "stream")
    if name != "stream":
        raise ArgumentError(
            f"stream_name {name!r}: the loader has no registry of stream classes: pass streams=[...] made by your class"
        )
    return StreamingStream(**{**(options.get("stream_config") or {}), **place})


def check_ignored(ignored: Mapping[str, Any]) -> None:
    """Raise UnknownArgumentError for arguments that StreamingDataset does not have either."""
    unknown = sorted(set(ignored) - _IGNORED)
    if unknown:
        raise UnknownArgumentError(f"unknown arguments: {', '.join(unknown)}")


# StreamingDataset's names. Both deal samples alike; orig refuses numbers of nodes that do not fit.
_PARTITION_ALGOS = ("relaxed", "orig")


class StreamingDataset(StreamingAttributes, IterableDataset[Sample]):
    """Iterates over the samples of this rank and worker; each iteration is one epoch.

    Arguments as in StreamingDataset 0.13. streams: made by `Stream` above, or loader.Stream. Differences: an epoch
    resumes only between two global batches; a shard that cannot be read raises at once; and device_per_stream ends
    when no batch is left for one of the ranks. hints: as in loader.fast.Loader; sent by the process that made the
    dataset, not by its workers. decompressed_cache_bytes, cache_folder: as in MDSDataset. batch_size:
    without it, indexing works, but an iteration raises ArgumentError, as in StreamingDataset.
    Raises LoaderError for what this class does not support, and OrderError for settings that cannot work. Raises
    ArgumentError (a ValueError, as in StreamingDataset) for streams together with local or remote, or neither.
    """

    def __init__(  # noqa: PLR0913 -- StreamingDataset's arguments, by name
        self,
        *,
        streams: Sequence[StreamingStream | dataset.Stream] | None = None,
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
        decompressed_cache_bytes: int | str = DECOMPRESSED_CACHE_BYTES,
        cache_folder: str | Path | None = None,
        **ignored: Any,
    ) -> None:
        check_ignored(ignored)
        if bool(streams) == (bool(remote) or bool(local)):
            raise ArgumentError("give either local, a directory with the dataset, or streams")
        if partition_algo not in _PARTITION_ALGOS:
            raise OrderError(
                f"partition_algo {partition_algo!r} is unknown: choose one of {', '.join(_PARTITION_ALGOS)}"
            )
        if shuffle_algo == "native":
            # Ranks would also disagree on an epoch's end, which the native order does not pad.
            raise LoaderError(
                "shuffle_algo 'native' is not one of StreamingDataset's, and its states could not name it: use "
                "it with MDSDataset and ElasticBatchSampler"
            )
        self.batch_size = optional_whole(batch_size, "batch_size", "samples")
        self.replication = replication
        self.num_canonical_nodes = optional_whole(num_canonical_nodes, "num_canonical_nodes")
        self.shuffle, self.shuffle_algo = shuffle, shuffle_algo
        self.shuffle_seed = whole_number(shuffle_seed, "shuffle_seed")
        self.keep_arguments(
            sampling_method=sampling_method,
            sampling_granularity=whole_number(sampling_granularity, "sampling_granularity"),
            batching_method=batching_method,
            partition_algo=partition_algo,
            allow_unsafe_types=allow_unsafe_types,
            cache_limit=ignored.get("cache_limit"),
            predownload=ignored.get("predownload") or (8 * self.batch_size if self.batch_size else 64),
        )
        self.epoch_seed_change = shuffle and sampling_method == "balanced"
        self.initial_physical_nodes: int | None = None
        self.streams: list[StreamingStream | dataset.Stream] = (
            list(streams) if streams else [only_stream(ignored, local=local, remote=remote, split=split)]
        )
        self._samples = MDSDataset(
            [each.source if isinstance(each, StreamingStream) else each for each in self.streams],
            split,
            allow_pickle=allow_unsafe_types,
            check_hashes=validate_hash is not None,
            decompressed_cache_bytes=decompressed_cache_bytes,
            cache_folder=cache_folder,
        )
        if not self.size:
            raise DatasetError("there are no samples: the dataset is empty")
        self._world = _world(replication)
        self._order: dict[str, Any] = {
            "order": shuffle_algo if shuffle else SEQUENTIAL,
            "block_size": optional_whole(shuffle_block_size, "shuffle_block_size", "samples") or 0,
            "epoch_size": sample_count(epoch_size or None, "epoch_size"),
            "batching": batching_method,
            "sampling": sampling_method,
            "granularity": self.sampling_granularity,
        }
        self._spreads = shuffle_algo in ("py1s", "py2s")
        self._epochs = WorkerEpochs()
        self._reading: _Reading | None = None  # the iteration of this process, once it has begun
        self._resumed: _Reading | None = None  # the position from this process's own state, until it begins
        self._has_read = False
        # Fail here rather than in a worker if the settings cannot work.
        orders = self._sampler().step_plan.epoch_orders
        self.epoch_size = orders.samples()
        self._fill_streams(orders.table)
        self.length = math.ceil(self.epoch_size / self._world.ranks)
        self._hints: Hints | None = None
        self._gives_hints = hints and get_worker_info() is None
        self._give_hints()

    def _fill_streams(self, table: StreamTable) -> None:
        """Let each stream say its share of an epoch in all three ways, as StreamingDataset does."""
        shares = zip(
            self.streams, self.samples_per_stream.tolist(), table.choose, table.proportions, strict=True
        )
        for each, size, choose, proportion in shares:
            if isinstance(each, StreamingStream):
                each.proportion, each.repeat, each.choose = proportion, choose / size, choose

    def __iter__(self) -> Iterator[Sample]:
        if not self.batch_size:
            raise ArgumentError(
                "batch_size is missing: pass StreamingDataset the samples that a rank takes a step, as many as its "
                "DataLoader's batch_size; the order of samples depends on it"
            )
        self._reading = None
        return self._iterate()

    def _iterate(self) -> Iterator[Sample]:
        number, workers, generation = _worker()
        resumed, self._resumed = self._resumed, None
        again = None if resumed is None else resumed.epoch
        epoch, position = self._epochs.begin(number, generation, again=again)
        self._adopt(position)
        self.num_canonical_nodes = self._rows
        sampler = self._sampler()
        sampler.set_epoch(epoch)
        start = position.samples if position is not None and position.epoch == epoch else 0
        self._reading = reading = resumed or _Reading(epoch, start)
        self._has_read = True
        if start:
            sampler.load_state_dict(self._as_state(epoch, start))
            if sampler.epoch != epoch:
                return  # the state was saved at the end of its epoch
        self._epochs.record(number, *sampler.position)
        known = reading.handed_out
        for batch, ids in enumerate(sampler):
            if batch % workers != number:
                continue
            if known >= len(ids):
                known -= len(ids)
                continue
            self._epochs.record(number, *sampler.position)
            for sample in self._read(ids[known:]):
                reading.handed_out += 1
                yield sample
            known = 0
        self._epochs.record(number, *sampler.position)
        reading.is_over = True

    def _read(self, ids: list[int]) -> Iterable[Sample]:
        if self._reads_batches:
            return self._samples.__getitems__(ids)
        return map(self.__getitem__, ids)

    @property
    def _reads_batches(self) -> bool:
        """Whether samples are made without a subclass's own code."""
        mine, base = type(self), StreamingDataset
        return mine.__getitem__ is base.__getitem__ and mine.get_item is base.get_item

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_hints": None, "_gives_hints": False}

    def __len__(self) -> int:
        """The number of samples of an epoch that each rank reads."""
        return self.length

    @property
    def shuffle_block_size(self) -> int:
        """The distance in samples that the shuffle moves samples: as given, or derived from the canonical nodes."""
        return self._spec.block_size

    @property
    def next_epoch(self) -> int:
        """The epoch of the next iteration."""
        return self._epochs.next

    @next_epoch.setter
    def next_epoch(self, epoch: int) -> None:
        self._epochs.move(
            WorkerPosition(epoch, 0, self._rows, self.shuffle_seed, self.initial_physical_nodes)
        )
        self._reading = self._resumed = None

    def get_item(self, sample_id: int, retry: int = 0) -> Any:
        """Return a sample, 0 <= sample_id < size; override this to change how every sample is made."""
        return self._samples[sample_id]

    def __getitem__(self, which: Any) -> Any:
        """Return a sample of the dataset, or several for a slice, a list or an array. Negative ids count from the end.

        Raises IndexError for an id out of range.
        """
        if isinstance(which, slice) and self._reads_batches:
            return self._samples[which]
        if isinstance(which, slice):
            return [self.get_item(number) for number in range(*which.indices(self.size))]
        if isinstance(which, list) or (isinstance(which, np.ndarray) and which.ndim):
            return [self[each] for each in which]
        return self.get_item(which + self.size if -self.size <= which < 0 else which)

    def state_dict(self, num_samples: int | None = None, from_beginning: bool = True) -> dict[str, Any]:  # noqa: FBT001, FBT002 -- theirs
        """Return StreamingDataset's state. num_samples: samples that all ranks have consumed; None: see below.

        from_beginning: num_samples counts from the epoch's beginning, not from where this run resumed it. None is for
        loaders that ask for the state where samples are read (torchdata's StatefulDataLoader): the state counts what
        this process handed out, and continues only with the same numbers of ranks and workers. Raises StateError if
        the workers of another DataLoader read.
        """
        if num_samples is None:
            return self._own_state()
        num_samples = whole_number(num_samples, "num_samples")
        epoch, position = self._epochs.next - 1, self._epochs.position()
        self._adopt(position)
        offset = 0
        if position is not None and position.epoch >= epoch:
            epoch, offset = position.epoch, position.samples
        return self._full_state(epoch, num_samples if from_beginning else offset + num_samples)

    def _own_state(self) -> dict[str, Any]:
        """Return the position of this process's iteration, or where its next one begins."""
        number, workers, generation = _worker()
        reading = self._reading or self._resumed
        if reading is None or (reading.is_over and generation is None):
            if generation is None and not self._has_read and self._epochs.farthest() is not None:
                raise StateError(
                    "the workers of a DataLoader read, and how much of it the loop has consumed is not known here: "
                    "pass num_samples, ask a StreamingDataLoader, or torchdata's StatefulDataLoader"
                )
            position = self._epochs.position()
            self._adopt(position)
            epoch = self._epochs.upcoming(number, generation)
            start = position.samples if position is not None and position.epoch == epoch else 0
            reading = _Reading(epoch, start)
        layout = [number, workers, self._world.ranks, self.batch_size]
        return {
            **self._full_state(reading.epoch, reading.start),
            "handed_out": reading.handed_out,
            "handed_out_by": layout,
        }

    def load_state_dict(self, obj: Mapping[str, Any]) -> None:
        """Continue where a state was taken, by this class or by StreamingDataset, with its seed and canonical nodes.

        Raises StateError or OrderError if the state does not fit; the dataset then keeps its position.
        """
        check_is_state(obj, "StreamingDataset")
        number, workers, generation = _worker()
        handed_out = obj.get("handed_out", 0)
        layout = [number, workers, self._world.ranks, self.batch_size]
        if handed_out and obj.get("handed_out_by") != layout:
            raise StateError(
                f"the state counts {handed_out} samples that worker, workers, ranks, batch_size = "
                f"{obj.get('handed_out_by')} handed out, and cannot continue with {layout}: restore these numbers, or "
                f"use a state of StreamingDataLoader"
            )
        was = self.num_canonical_nodes, self.shuffle_seed, self.initial_physical_nodes
        order = self._rows, self.shuffle_seed
        try:
            nodes = count_of(obj, "initial_physical_nodes") if obj.get("initial_physical_nodes") else None
            position = WorkerPosition(
                obj["epoch"], obj["sample_in_epoch"], _count_in(obj, "num_canonical_nodes"),
                _count_in(obj, "shuffle_seed"), nodes,
            )  # fmt: skip
            self._adopt(position)
            self._sampler().load_state_dict(self._as_state(position.epoch, position.samples))
        except KeyError as missing:
            raise StateError(f"this is not a state of a StreamingDataset: it lacks {missing}") from None
        except LoaderError:
            self.num_canonical_nodes, self.shuffle_seed, self.initial_physical_nodes = was
            raise
        position = replace(position, epoch=max(position.epoch, 0))  # -1 means that no epoch has begun
        if generation is None:
            self._epochs.move(position)
        else:
            self._epochs.join(position)
        self._reading = None
        self._resumed = (
            _Reading(position.epoch, position.samples, handed_out) if "handed_out" in obj else None
        )
        if (self._rows, self.shuffle_seed) != order:
            self._give_hints()

    def _give_hints(self) -> None:
        """Start hints for the current order."""
        if self._hints is not None:
            self._hints.close()
        if self._gives_hints and self.batch_size and get_worker_info() is None:
            progress = WorkerProgress(self._sampler().step_plan, self._epochs)
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

    def _full_state(self, epoch: int, samples: int) -> dict[str, Any]:
        nodes = self._world.nodes if self.initial_physical_nodes is None else self.initial_physical_nodes
        return {**self._as_state(epoch, samples), "initial_physical_nodes": nodes}

    def _adopt(self, position: WorkerPosition | None) -> None:
        if position is not None:
            self.num_canonical_nodes, self.shuffle_seed = position.canonical_nodes, position.seed
            self.initial_physical_nodes = position.initial_nodes

    @property
    def _spec(self) -> OrderSpec:
        rows = self._rows
        # StreamingDataset deals the batches of the first run's nodes to a number that does not fit its rows.
        known = (self._world.nodes, self.initial_physical_nodes or 1, 1)
        nodes = next(each for each in known if not max(rows, each) % min(rows, each))
        layout = (nodes, self._world.ranks_per_node)
        return OrderSpec(seed=self.shuffle_seed, canonical_nodes=rows, tail_layout=layout, **self._order)

    def _sampler(self) -> ElasticBatchSampler:
        spec, nodes = self._spec, self._world.nodes
        if self.partition_algo == "orig" and max(spec.rows, nodes) % min(spec.rows, nodes):
            raise OrderError(
                f"partition_algo 'orig' needs that {spec.rows} canonical nodes and {nodes} nodes divide each other: "
                f"use relaxed, or another num_canonical_nodes"
            )
        return _Sampler(
            self._samples,
            global_batch_size=(self.batch_size or 1) * self._world.ranks,
            order=spec,
            world=self._world,
            drop_last=spec.batching != "random",
        )


class _Sampler(ElasticBatchSampler):
    """One whose epochs may be empty, as StreamingDataset's are: stratified, with less than a global batch."""

    def _refuse_empty(self, samples: int) -> None:
        if self._epoch_orders.spec.batching != "stratified":
            super()._refuse_empty(samples)


class StreamingDataLoader(DataLoader[Any]):
    """A DataLoader that counts the samples that it has delivered, as StreamingDataset's own does, for its state."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_samples_yielded = 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # a generator is what it returns
        self.num_samples_yielded = 0
        for batch in super().__iter__():
            self.num_samples_yielded += _samples_in(batch)
            yield batch

    def state_dict(self) -> dict[str, Any] | None:
        """Return the dataset's state after the delivered samples; None if it is not a StreamingDataset."""
        dataset = self.dataset
        if not isinstance(dataset, StreamingDataset):
            return None
        ranks = _world(dataset.replication).ranks
        return dataset.state_dict(self.num_samples_yielded * ranks, from_beginning=False)

    def load_state_dict(self, obj: Mapping[str, Any]) -> None:
        """Continue where a state was taken."""
        if isinstance(self.dataset, StreamingDataset):
            self.dataset.load_state_dict(obj)
            self.num_samples_yielded = 0


@dataclass(slots=True)
class _Reading:
    """An iteration of one process. start: samples of the epoch before it, of all ranks; handed_out: by this process."""

    epoch: int
    start: int
    handed_out: int = 0
    is_over: bool = False


def _worker() -> tuple[int, int, int | None]:
    """Return (worker number, workers, their common seed); (0, 1, None) outside of workers."""
    info = get_worker_info()
    return (0, 1, None) if info is None else (info.id, info.num_workers, info.seed - info.id)


def _world(replication: int | None) -> World:
    return World.detect(replication=1 if replication is None else replication)


def _count_in(state: Mapping[str, Any], name: str) -> int:
    """Return a count of a state. Raises KeyError if it is missing, and StateError if it is not a count."""
    return count_of({name: state[name]}, name)


def _samples_in(batch: Any) -> int:
    if isinstance(batch, Mapping):
        return len(next(iter(batch.values())))
    return len(batch) if hasattr(batch, "shape") else len(batch[0])
