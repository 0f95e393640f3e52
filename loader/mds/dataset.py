"""A map-style dataset over MDS shards: ids in, samples out.

It reads a plain directory and a mounted bucket in the same way. It keeps no state between samples except caches, and
starts no process, no thread and no lock file. Order, epochs and ranks belong to the sampler.

One of the streams that a dataset consists of: its directory, and its share of an epoch.
"""

import operator
import os
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from loader.base.argument_checks import byte_count, checked_ids, several
from loader.errors import DatasetError, EncodingError, ShardError, UnmetNeedError
from loader.mds.encodings import BlobDecoder, SampleDecoder, blob_decoder, sample_decoder
from loader.mds.index import INDEX_NAME, Index, join_indices, read_index
from loader.mds.record_table import RecordTable, Sample, TableSchema
from loader.mds.shard_reader import DECOMPRESSED_CACHE_BYTES, ReadOptions, ShardReader, dataset_directory
from loader.order.spec import Weight


@dataclass(frozen=True, slots=True)
class Stream:
    """A directory with an index.json (or with one subdirectory a split), and at most one weight.

    proportion: of the epoch; set it for all streams or for none. Only the ratios count. repeat: times its samples.
    choose: number of samples an epoch. check_hashes: as in MDSDataset, for this stream only. Raises OrderError for two
    weights, or negative ones.
    """

    path: str | Path
    split: str | None = None
    proportion: float | None = None
    repeat: float | None = None
    choose: int | None = None
    check_hashes: bool = False
    weight: Weight = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "weight", Weight(self.proportion, self.repeat, self.choose))


Where = str | Path | Stream


class MDSDataset:
    """The samples of one or several MDS datasets, numbered through their shards in the order of the indices.

    path: a directory with index.json, or with one subdirectory a split; or a list of directories or Streams. Streams
    carry weights for the sample order. allow_pickle: decode columns of encoding `pkl`, which can run code that comes
    with the dataset.
    check_hashes: before the first sample of a shard is read, compare the shard with the hashes in its index.
    decompressed_cache_bytes: limit in bytes (or as "200GB") for decompressed shards, in the memory of each process, or
    in cache_folder, which all processes of a machine share. The dataset's own directory is never written to.
    The arrays of a sample are writable views into its own memory, or into memory shared with the samples that were
    requested together with it.
    Raises DatasetError if an index is missing or damaged, or has no hashes for check_hashes. Raises ArgumentError for
    a URL, and LoaderError if cache_folder lies in the dataset. Pickles (for DataLoader workers) without its caches.
    """

    def __init__(
        self,
        path: Where | Sequence[Where],
        split: str | None = None,
        *,
        allow_pickle: bool = False,
        check_hashes: bool = False,
        decompressed_cache_bytes: int | str = DECOMPRESSED_CACHE_BYTES,
        cache_folder: str | Path | None = None,
    ) -> None:
        streams = _streams(path, split)
        parts = [
            read_index(
                dataset_directory(stream.path, stream.split), with_hashes=check_hashes or stream.check_hashes
            )
            for stream in streams
        ]
        for part in parts:
            if part.hashes is not None:
                _require_hashes(part)
        self._index = join_indices(parts)
        self._weights = tuple(stream.weight for stream in streams)
        self._fingerprint = ""
        self._allow_pickle = allow_pickle
        options = ReadOptions(
            decompressed_cache_bytes=byte_count(decompressed_cache_bytes, "decompressed_cache_bytes"),
            cache_folder=None if cache_folder is None else os.fspath(cache_folder),
            check_hashes=self._index.hashes is not None,
        )
        self._reader = ShardReader(self._index, options)
        self._prepare()

    def _prepare(self) -> None:
        # For single ids, bisect on plain ints is much faster than searchsorted; `array` stores 10**6 ids in 8 MB.
        self._ends = np.cumsum(self._index.samples)
        self._firsts = self._ends - self._index.samples
        self._end_list = array("q", self._ends.astype("=i8").tobytes())
        self._decoders: list[SampleDecoder] = []
        self._blobs: list[BlobDecoder | None] = []
        self._tables: list[TableSchema | None] = []
        for number, schema in enumerate(self._index.schemas):
            try:
                decode = sample_decoder(
                    schema.names, schema.encodings, schema.sizes, allow_pickle=self._allow_pickle
                )
                blobs = blob_decoder(
                    schema.names, schema.encodings, schema.sizes, allow_pickle=self._allow_pickle
                )
            except EncodingError as problem:
                shard = int(np.flatnonzero(self._index.schema_of == number)[0])
                raise DatasetError(f"{self._index.directory(shard)}/{INDEX_NAME}: {problem}") from None
            self._decoders.append(decode)
            self._blobs.append(blobs)
            self._tables.append(TableSchema.of(schema))

    def __getstate__(self) -> dict[str, Any]:
        kept = ("_index", "_weights", "_fingerprint", "_allow_pickle", "_reader")
        return {name: self.__dict__[name] for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._prepare()

    def reopen_files(self) -> None:
        """Open each shard's file again when it is read next.

        On a read-only mount the kernel reads a file by itself if it was whole in the cache when it was opened. `Loader`
        calls this at the beginning of each epoch.
        """
        self._reader.files.reopen()

    def __len__(self) -> int:
        return self._end_list[-1] if self._end_list else 0

    def __repr__(self) -> str:
        return f"MDSDataset({self._where!r}: {len(self)} samples in {self._index.shards} shards)"

    def __iter__(self) -> Iterator[Sample]:
        """Iterate over all samples in the order of the index."""
        return (self._sample(number) for number in range(len(self)))

    @overload
    def __getitem__(self, which: int | np.integer[Any]) -> Sample: ...
    @overload
    def __getitem__(self, which: slice | Sequence[int] | NDArray[np.integer[Any]]) -> list[Sample]: ...

    def __getitem__(
        self, which: int | np.integer[Any] | slice | Sequence[int] | NDArray[np.integer[Any]]
    ) -> Sample | list[Sample]:
        """Return one sample, or a list of them for a slice, a list or an array of ids. Negative ids count
        from the end.

        Raises IndexError for an id out of range, ShardError for bytes that cannot be read or decoded.
        """
        ids = several(which, len(self))
        if ids is not None:
            return list(self.__getitems__(ids))
        number = operator.index(which)  # type: ignore[arg-type]  # raises TypeError for every other type
        if not -len(self) <= number < len(self):
            raise IndexError(f"sample {number} is not among the {len(self)} of {self._where}")
        return self._sample(number % len(self))

    def __getitems__(self, which: Sequence[int] | NDArray[np.integer[Any]]) -> Sequence[Sample]:
        """Return many samples, in the requested order. DataLoader calls this.

        If every sample consists of numbers of fixed shapes, the result is a RecordTable: one shared block of memory,
        which `loader.fast.collate` turns into a batch without touching single samples.
        """
        ids = checked_ids(which, len(self), self._where)
        if ids.size == 0:
            return []
        shards = self._ends.searchsorted(ids, "right")
        within = ids - self._firsts[shards]
        schema = self._schema_of(shards)
        table = None if schema is None else self._tables[schema]
        if table is not None:
            block = np.empty((ids.size, table.record_bytes), np.uint8)
            if self._reader.read_records(shards, within, block):
                return RecordTable(table.columns_of(block), ids.size, table.plain)
        return self._samples(schema, shards.tolist(), within.tolist())

    def _schema_of(self, shards: NDArray[np.int64]) -> int | None:
        """Return the number of the schema of these shards, None if they have different schemas."""
        if len(self._tables) == 1:
            return 0
        schemas = np.unique(self._index.schema_of[shards])
        return int(schemas[0]) if schemas.size == 1 else None

    def _samples(self, schema: int | None, shards: list[int], numbers: list[int]) -> list[Sample]:
        """Return samples by shard and number within the shard."""
        samples = None if schema is None else self._read_blobs(schema, shards, numbers)
        if samples is None:
            samples = [{}] * len(shards)
            visits = sorted(range(len(shards)), key=shards.__getitem__)
            for shard, visit in groupby(visits, shards.__getitem__):
                places = list(visit)
                for place, sample in zip(
                    places, self._read(shard, [numbers[place] for place in places]), strict=True
                ):
                    samples[place] = sample
        return samples

    def _read_blobs(self, schema: int, shards: list[int], numbers: list[int]) -> list[Sample] | None:
        """Like `_samples`, for schemas with one value of variable size. None: another schema, or `_read` must check."""
        if (blobs := self._blobs[schema]) is None:
            return None
        head, tail, decode = blobs
        found = self._reader.read_blobs(shards, numbers, head, tail)
        if found is None:
            return None
        samples: list[Sample] = []
        try:
            for sample in decode(found):
                samples.append(sample)
        except EncodingError as problem:
            raise self._undecodable(shards[len(samples)], numbers[len(samples)], problem) from problem
        return samples

    def _read(self, shard: int, numbers: list[int]) -> list[Sample]:
        """Return samples of one shard, by their numbers within it."""
        decode = self._decoders[self._index.schema_number(shard)]
        samples: list[Sample] = []
        try:
            for data in self._reader.read_many(shard, numbers):
                samples.append(decode(data))
        except EncodingError as problem:
            raise self._undecodable(shard, numbers[len(samples)], problem) from problem
        return samples

    @property
    def column_names(self) -> tuple[str, ...]:
        """The columns of the first shard, in stored order; shards may have different schemas."""
        return self._index.schemas[0].names if self._index.schemas else ()

    @property
    def encodings(self) -> dict[str, str]:
        """Column name -> encoding, of the first shard."""
        return (
            dict(zip(self.column_names, self._index.schemas[0].encodings, strict=True))
            if self.column_names
            else {}
        )

    @property
    def shard_sizes(self) -> NDArray[np.int64]:
        """(shards,) int64, number of samples in each shard; the input of a sample order."""
        return self._index.samples

    @property
    def shards_per_stream(self) -> list[int]:
        """(streams,) number of shards in each stream."""
        return [stop - start for start, stop in pairwise(self._index.borders)]

    @property
    def weights(self) -> tuple[Weight, ...]:
        """(streams,) the weight of each stream in an epoch; Weight() if it was given none."""
        return self._weights

    @property
    def index(self) -> Index:
        """The joined index of all streams: where each shard lies, and what it contains."""
        return self._index

    @property
    def fingerprint(self) -> str:
        """32 hex digits that identify the dataset: a hash of shard names, sample counts, sizes and columns."""
        if not self._fingerprint:
            self._fingerprint = self._index.fingerprint()
        return self._fingerprint

    @property
    def _where(self) -> str:
        return ", ".join(self._index.directories)

    def _sample(self, number: int) -> Sample:
        shard = bisect_right(self._end_list, number)
        within = number - (self._end_list[shard - 1] if shard else 0)
        return self._samples(self._index.schema_number(shard), [shard], [within])[0]

    def _undecodable(self, shard: int, within: int, problem: EncodingError) -> ShardError:
        first = self._end_list[shard - 1] if shard else 0
        sound = isinstance(problem, UnmetNeedError)
        return ShardError(
            f"{self._reader.files.path(shard)} (shard {shard}): sample {first + within}, number {within} of "
            f"the shard: {problem}.{'' if sound else ' The shard is damaged, or its index belongs to another.'}"
        )


def _streams(path: Where | Sequence[Where], split: str | None) -> list[Stream]:
    """Return the streams; a stream's own split takes precedence over the common one."""
    several = path if isinstance(path, Sequence) and not isinstance(path, str) else [path]
    if not several:
        raise DatasetError("no path was given: a dataset has at least one stream")
    streams = [one if isinstance(one, Stream) else Stream(one) for one in several]
    return [replace(one, split=one.split or split) for one in streams]


def _require_hashes(index: Index) -> None:
    for shard in range(index.shards):
        if not any(index.hashes_of(shard)):
            raise DatasetError(
                f"{index.directory(shard)}/{INDEX_NAME} has no hash of shard {shard}, which check_hashes needs: "
                f"write the dataset with hashes, or do not pass check_hashes"
            )
