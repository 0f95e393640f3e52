"""A map-style dataset over MDS shards: ids in, samples out.

It reads a plain directory and a mounted bucket alike, keeps no state between samples but caches, and starts
no process, thread or lock file. Order, epochs and ranks are the batch sampler's business.
"""

import operator
import os
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from loader.base.argument_checks import byte_count
from loader.base.sample_ids import checked_ids, several
from loader.errors import DatasetError, EncodingError, ShardError, UnmetNeedError
from loader.mds.encodings import BlobDecoder, SampleDecoder, blob_decoder, sample_decoder
from loader.mds.index import INDEX_NAME, Index, join_indices, read_index
from loader.mds.record_table import RecordTable, Sample, TableSchema
from loader.mds.shard_reader import DECOMPRESSED_CACHE_BYTES, ReadOptions, ShardReader, dataset_directory
from loader.mds.stream import Stream
from loader.mds.watchdog import STALL_SECONDS
from loader.order.spec import Weight

Where = str | Path | Stream


class MDSDataset:
    """The samples of an MDS dataset, or of several in a row, counted through the shards in the indices' order.

    path: directory with index.json, or with one directory a split; or a list of those, or of Streams,
    which have weights for the sample order. allow_pickle: columns of encoding `pkl` run code that comes with
    the dataset.
    check_hashes: compare each shard with the hashes that its index holds before its first sample is read.
    decompressed_cache_bytes: bound for compressed shards (or as "200GB"), in the memory of each process, or in
    cache_folder, which a machine's processes share; the dataset's own directory is not written to. stall_seconds:
    log a warning when a read lasts longer.
    Each sample has its own memory, or shares that of the samples that were asked for with it: its arrays are views
    into it, and may be written to.
    Raises DatasetError if an index is missing or damaged, or check_hashes finds none. Pickles (for DataLoader
    workers) without its caches.
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
        stall_seconds: float = STALL_SECONDS,
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
            stall_seconds=stall_seconds,
        )
        self._reader = ShardReader(self._index, options)
        self._prepare()

    def _prepare(self) -> None:
        # Single ids: bisect in plain numbers is much faster than searchsorted, and array holds 10**6 in 8 MB.
        self._ends = np.cumsum(self._index.samples)
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

    def __len__(self) -> int:
        return self._end_list[-1] if self._end_list else 0

    def __repr__(self) -> str:
        return f"MDSDataset({self._where!r}: {len(self)} samples in {self._index.shards} shards)"

    def __iter__(self) -> Iterator[Sample]:
        """Go through all samples in the order of the index."""
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

        Raises IndexError for an id out of range, ShardError or EncodingError for what cannot be read.
        """
        ids = several(which, len(self))
        if ids is not None:
            return list(self.__getitems__(ids))
        number = operator.index(which)  # type: ignore[arg-type]  # TypeError is the answer to anything else
        if not -len(self) <= number < len(self):
            raise IndexError(f"sample {number} is not among the {len(self)} of {self._where}")
        return self._sample(number % len(self))

    def __getitems__(self, which: Sequence[int] | NDArray[np.integer[Any]]) -> Sequence[Sample]:
        """Return many samples, in the order asked for; each shard is visited once. DataLoader calls this.

        Where each sample is numbers of fixed shapes, they are a Table: read into one block of memory, which they
        share, and `loader.fast.collate` makes a batch of it without looking at any one.
        """
        ids = checked_ids(which, len(self), self._where)
        if ids.size == 0:
            return []
        shards = np.searchsorted(self._ends, ids, side="right")
        within = ids - (self._ends[shards] - self._index.samples[shards])
        schema = self._schema_of(shards)
        table = None if schema is None else self._tables[schema]
        if table is not None:
            block = np.empty((ids.size, table.record_bytes), np.uint8)
            if self._reader.read_records(shards, within, block):
                return RecordTable(table.columns_of(block), ids.size, table.plain)
        visits = np.argsort(shards, kind="stable")
        found: list[Sample] = [{}] * ids.size
        samples = self._visit(schema, shards[visits].tolist(), within[visits].tolist())
        for place, sample in zip(visits.tolist(), samples, strict=True):
            found[place] = sample
        return found

    def _schema_of(self, shards: NDArray[np.int64]) -> int | None:
        """The number of the schema that these shards have, None if they have several."""
        if len(self._tables) == 1:
            return 0
        schemas = np.unique(self._index.schema_of[shards])
        return int(schemas[0]) if schemas.size == 1 else None

    def _visit(self, schema: int | None, shards: list[int], numbers: list[int]) -> list[Sample]:
        """Samples by their shards and their numbers in these; those of one shard come in a row."""
        samples = None if schema is None else self._read_blobs(schema, shards, numbers)
        if samples is None:
            samples = []
            for shard, visit in groupby(zip(shards, numbers, strict=True), itemgetter(0)):
                samples += self._read(shard, [number for _, number in visit])
        return samples

    def _read_blobs(self, schema: int, shards: list[int], numbers: list[int]) -> list[Sample] | None:
        """The same for samples with one value that varies in size; None if these are none, or `_read` has to look."""
        if (blobs := self._blobs[schema]) is None:
            return None
        head, tail, decode = blobs
        found = self._reader.read_blobs(shards, numbers, head, tail)
        if found is None:
            return None
        samples: list[Sample] = []
        try:
            for value, rest in found:
                samples.append(decode(value, rest))
        except EncodingError as problem:
            raise self._undecodable(shards[len(samples)], numbers[len(samples)], problem) from problem
        return samples

    def _read(self, shard: int, numbers: list[int]) -> list[Sample]:
        """Samples of one shard, by their numbers in it."""
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
        """The columns of the first shard, in stored order; schemas may differ between shards."""
        return self._index.schemas[0].names if self._index.schemas else ()

    @property
    def encodings(self) -> dict[str, str]:
        """The encoding of each column of the first shard."""
        return (
            dict(zip(self.column_names, self._index.schemas[0].encodings, strict=True))
            if self.column_names
            else {}
        )

    @property
    def shard_sizes(self) -> NDArray[np.int64]:
        """(shards,) samples of each shard; a sample order is made of these."""
        return self._index.samples

    @property
    def stream_borders(self) -> tuple[int, ...]:
        """(streams + 1,) stream i has the shards from border i to border i + 1: one stream for one path."""
        return self._index.borders

    @property
    def shards_per_stream(self) -> list[int]:
        """(streams,) how many shards each has."""
        return [stop - start for start, stop in pairwise(self._index.borders)]

    @property
    def weights(self) -> tuple[Weight, ...]:
        """(streams,) how much of an epoch each is; Weight() for what came without."""
        return self._weights

    @property
    def index(self) -> Index:
        """The index of all streams in a row: where which shard lies, and what it holds."""
        return self._index

    @property
    def fingerprint(self) -> str:
        """32 hex digits that tell this dataset from another: shard names, counts, sizes and columns."""
        if not self._fingerprint:
            self._fingerprint = self._index.fingerprint()
        return self._fingerprint

    @property
    def _where(self) -> str:
        return ", ".join(self._index.directories)

    def _sample(self, number: int) -> Sample:
        shard = bisect_right(self._end_list, number)
        within = number - (self._end_list[shard - 1] if shard else 0)
        return self._visit(self._index.schema_number(shard), [shard], [within])[0]

    def _undecodable(self, shard: int, within: int, problem: EncodingError) -> ShardError:
        first = self._end_list[shard - 1] if shard else 0
        sound = isinstance(problem, UnmetNeedError)
        return ShardError(
            f"{self._reader.path(shard)} (shard {shard}): sample {first + within}, number {within} of "
            f"the shard: {problem}.{'' if sound else ' The shard is damaged, or its index belongs to another.'}"
        )


def _streams(path: Where | Sequence[Where], split: str | None) -> list[Stream]:
    """The streams; one's own split goes before the one that is given for all."""
    several = path if isinstance(path, Sequence) and not isinstance(path, str) else [path]
    if not several:
        raise DatasetError("no path was given: a dataset has at least one stream")
    streams = [one if isinstance(one, Stream) else Stream(one) for one in several]
    return [replace(one, split=one.split or split) for one in streams]


def _require_hashes(index: Index) -> None:
    for shard in range(index.shards):
        if not any(index.hashes_of(shard)):
            raise DatasetError(
                f"{index.directory(shard)}/{INDEX_NAME} holds no hash of shard {shard}, and check_hashes asks "
                f"for one: write the dataset with hashes, or leave check_hashes away"
            )
