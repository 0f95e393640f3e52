"""Reads MDS shards in a deterministic, elastic sample order, from a local directory or a mounted bucket.

    from torch.utils.data import DataLoader
    from loader import ElasticBatchSampler, MDSDataset, MDSWriter

    with MDSWriter("data/train", {"tokens": "ndarray:int32:2048"}, compression="zstd:3") as writer:
        writer.write({"tokens": tokens})                      # a numpy array of 2048 int32

    dataset = MDSDataset("data", split="train")               # len(dataset), dataset[7], dataset[-3:]
    sampler = ElasticBatchSampler(dataset, global_batch_size=512)         # ranks: World.detect()
    if checkpoint:
        sampler.load_state_dict(checkpoint["sampler"])        # on any number of ranks that divides 512
    loader = DataLoader(dataset, batch_sampler=sampler, num_workers=2)
    for epoch in range(sampler.epoch, epochs):
        sampler.set_epoch(epoch)
        for batch in loader:
            ...                                               # one training step
            sampler.record_step()
            checkpoint["sampler"] = sampler.state_dict()      # < 1 KB of JSON, the same on every rank

The batch of step k is the same set of samples on any number of ranks. All of it works without torch too:
`for ids in sampler: samples = dataset[ids]`. On a mount of `fusecache`, call `hints = Hints(dataset, sampler)` before
you build the model. The daemon then fetches the first batches while the model loads, and prefetches the later ones.
"""

import loader.base.packages  # noqa: F401  # before anything that needs them
from fusecache import __version__
from loader.checkpoints import latest_checkpoint
from loader.errors import (
    DatasetError,
    EncodingError,
    FilesMissingError,
    LoaderError,
    OrderError,
    ShardError,
    StateError,
    WriterError,
)
from loader.hints.client import Hints
from loader.hints.file_hints import FileHints
from loader.mds.dataset import MDSDataset, Stream
from loader.parquet.dataset import ParquetDataset
from loader.parquet.templar import TemplarDataset
from loader.sampling.sampler import ElasticBatchSampler
from loader.tools.convert import convert
from loader.tools.tokens import TokenOptions
from loader.waiting import wait_for
from loader.world import World
from loader.writing.merge import merge
from loader.writing.parallel_writer import write_parallel
from loader.writing.writer import MDSWriter

__all__ = [
    "DatasetError",
    "ElasticBatchSampler",
    "EncodingError",
    "FileHints",
    "FilesMissingError",
    "Hints",
    "LoaderError",
    "MDSDataset",
    "MDSWriter",
    "OrderError",
    "ParquetDataset",
    "ShardError",
    "StateError",
    "Stream",
    "TemplarDataset",
    "TokenOptions",
    "World",
    "WriterError",
    "__version__",
    "convert",
    "latest_checkpoint",
    "merge",
    "wait_for",
    "write_parallel",
]
