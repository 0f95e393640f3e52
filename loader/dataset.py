"""A map-style dataset over MDS shards: ids in, samples out.

It reads a plain directory and a mounted bucket alike, keeps no state between samples but caches, and starts
no process, thread or lock file. Order, epochs and ranks are the batch sampler's business.
"""

import operator
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from loader.encodings import SampleDecoder, sample_decoder
from loader.errors import DatasetError, EncodingError, ShardError
from loader.index import INDEX_NAME, read_index
from loader.shard import DECOMPRESSED_CACHE_BYTES, ShardReader, dataset_directory

Sample = dict[str, Any]


class MDSDataset:
    """The samples of an MDS dataset, counted through its shards in the order of its index.

    path: directory with index.json, or with one directory a split. allow_pickle: columns of encoding `pkl`
    run code that comes with the dataset. decompressed_cache_bytes: bound, per process, for compressed shards.
    Each sample has its own memory: its arrays are views into it, and may be written to.
    Raises DatasetError if the index is missing or damaged. Pickles (for DataLoader workers) without its
    caches.
    """

    def __init__(
        self,
        path: str | Path,
        split: str | None = None,
        *,
        allow_pickle: bool = False,
        decompressed_cache_bytes: int = DECOMPRESSED_CACHE_BYTES,
    ) -> None:
        self._index = read_index(dataset_directory(path, split))
        self._allow_pickle = allow_pickle
        self._reader = ShardReader(self._index, decompressed_cache_bytes=decompressed_cache_bytes)
        self._prepare()

    def _prepare(self) -> None:
        # Lists for single ids (bisect is much faster than searchsorted there), the array for many.
        self._ends = np.cumsum(self._index.samples)
        self._end_list: list[int] = self._ends.tolist()
        self._schema_of: list[int] = self._index.schema_of.tolist()
        self._decoders: list[SampleDecoder] = []
        for schema in self._index.schemas:
            try:
                decode = sample_decoder(
                    schema.names, schema.encodings, schema.sizes, allow_pickle=self._allow_pickle
                )
            except EncodingError as problem:
                raise DatasetError(f"{self._index.directory}/{INDEX_NAME}: {problem}") from None
            self._decoders.append(decode)

    def __getstate__(self) -> dict[str, Any]:
        return {"_index": self._index, "_allow_pickle": self._allow_pickle, "_reader": self._reader}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._prepare()

    def __len__(self) -> int:
        return self._end_list[-1] if self._end_list else 0

    def __repr__(self) -> str:
        return f"MDSDataset({self._index.directory!r}: {len(self)} samples in {self._index.shards} shards)"

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
        if isinstance(which, slice):
            return self.__getitems__(range(*which.indices(len(self))))
        if isinstance(which, (list, tuple, range)) or (isinstance(which, np.ndarray) and which.ndim):
            return self.__getitems__(which)
        number = operator.index(which)  # type: ignore[arg-type]  # TypeError is the answer to anything else
        if not -len(self) <= number < len(self):
            raise IndexError(f"sample {number} is not among the {len(self)} of {self._index.directory}")
        return self._sample(number % len(self))

    def __getitems__(self, which: Sequence[int] | NDArray[np.integer[Any]]) -> list[Sample]:
        """Return many samples, in the order asked for; each shard is visited once. DataLoader calls this."""
        ids = np.asarray(which)
        if ids.size == 0:
            return []
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise IndexError(f"ids are a list of numbers, not an array of {ids.dtype} with {ids.ndim} axes")
        total = len(self)
        ids = ids.astype(np.int64, copy=False)
        if int(ids.min()) < -total or int(ids.max()) >= total:
            wrong = ids[(ids < -total) | (ids >= total)][0]
            raise IndexError(f"sample {wrong} is not among the {total} of {self._index.directory}")
        ids = np.where(ids < 0, ids + total, ids)
        shards = np.searchsorted(self._ends, ids, side="right")
        visits = np.argsort(shards, kind="stable")
        borders = np.flatnonzero(np.diff(shards[visits], prepend=-1, append=-1))
        found: list[Sample] = [{}] * ids.size
        for first, stop in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True):
            places = visits[first:stop]
            shard = int(shards[places[0]])
            numbers = (ids[places] - (self._ends[shard] - self._index.samples[shard])).tolist()
            decode = self._decoders[self._schema_of[shard]]
            for place, number, data in zip(
                places.tolist(), numbers, self._reader.read_many(shard, numbers), strict=True
            ):
                try:
                    found[place] = decode(data)
                except EncodingError as problem:
                    raise self._undecodable(shard, number, problem) from problem
        return found

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
    def fingerprint(self) -> str:
        """32 hex digits that tell this dataset from another: shard names, counts, sizes and columns."""
        return self._index.fingerprint()

    def _sample(self, number: int) -> Sample:
        shard = bisect_right(self._end_list, number)
        within = number - (self._end_list[shard - 1] if shard else 0)
        data = self._reader.read(shard, within)
        try:
            return self._decoders[self._schema_of[shard]](data)
        except EncodingError as problem:
            raise self._undecodable(shard, within, problem) from problem

    def _undecodable(self, shard: int, within: int, problem: EncodingError) -> ShardError:
        first = self._end_list[shard - 1] if shard else 0
        return ShardError(
            f"{self._reader.path(shard)} (shard {shard}): sample {first + within}, number {within} of "
            f"the shard: {problem}. The shard is damaged, or its index belongs to another."
        )
