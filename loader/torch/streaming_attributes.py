"""Attributes of StreamingDataset for trainers and subclasses that read them: arguments, shards, streams."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from loader.mds.dataset import MDSDataset


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
