"""Other libraries in the loader's benchmark: how each writes the samples, and reads them in shuffled order.

A reader takes (kind, path, batch) and returns an epoch: called with a number, it yields batches of values. These are
a tensor (samples, CONTEXT) of int32 or a list of bytes. Each library is used as its own documentation advises for the
least CPU, without worker processes of a DataLoader.
"""

import contextlib
import io
import logging
import os
import tarfile
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.samples import CONTEXT

# WebDataset's and Energon's samples pass through a buffer of this many, as in WebDataset's own examples.
SHUFFLE_SAMPLES = 1000
# A row group of Parquet is what Ray reads at once: 4 MiB of tokens.
GROUP_BYTES = 4 << 20
# Ray's default would be 30 % of the machine's memory, or of /dev/shm. One data set has 512 MiB.
RAY_STORE_BYTES = 1 << 30

Values = Iterable[Any]
Epoch = Callable[[int], Iterable[Any]]
Reader = Callable[[str, str, int], Epoch]
# What must run before the process ends, which it does without the interpreter's own end.
cleanups: list[Callable[[], None]] = []


def _bytes_of(value: NDArray[np.int32] | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.tobytes()


# ---- LitData


def write_litdata(kind: str, path: str, values: Values, shard_bytes: int) -> None:
    """Write chunks."""
    import torch
    from litdata.streaming.item_loader import TokensLoader
    from litdata.streaming.writer import BinaryWriter

    items = TokensLoader(block_size=CONTEXT) if kind == "tokens" else None
    writer = BinaryWriter(path, chunk_bytes=shard_bytes, item_loader=items)
    for number, value in enumerate(values):
        writer[number] = torch.from_numpy(value) if kind == "tokens" else {"image": value}
    writer.done()
    writer.merge()


def litdata(kind: str, path: str, batch: int) -> Epoch:
    """Tokens by TokensLoader, which maps the chunks; blobs by the default, which reads single items."""
    warnings.simplefilter("ignore")
    import litdata as library
    from litdata.streaming.item_loader import TokensLoader

    options = {"item_loader": TokensLoader(block_size=CONTEXT)} if kind == "tokens" else {}
    dataset = library.StreamingDataset(path, shuffle=True, **options)
    batches = library.StreamingDataLoader(dataset, batch_size=batch)

    def epoch(number: int) -> Iterator[Any]:
        for found in batches:
            yield found if kind == "tokens" else found["image"]

    return epoch


# ---- WebDataset


def write_tars(kind: str, path: str, values: Values, shard_bytes: int) -> None:
    """Write tar shards of one file a sample."""
    os.makedirs(path)
    with contextlib.ExitStack() as stack:
        size, shards, tar = shard_bytes, 0, None
        for number, value in enumerate(values):
            data = _bytes_of(value)
            if tar is None or size + len(data) > shard_bytes:
                stack.close()
                tar = stack.enter_context(tarfile.open(f"{path}/shard-{shards:05}.tar", "w"))
                size, shards = 0, shards + 1
            member = tarfile.TarInfo(f"{number:08}.bin")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
            size += len(data)


def webdataset(kind: str, path: str, batch: int) -> Epoch:
    """Tar shards in shuffled order, then a shuffle buffer. The pipeline batches, as its documentation advises."""
    import webdataset as library

    shards = [str(file) for file in sorted(Path(path).glob("*.tar"))]
    dataset = library.WebDataset(shards, shardshuffle=len(shards), empty_check=False)
    batches = dataset.shuffle(SHUFFLE_SAMPLES).batched(batch, collation_fn=_collated(kind, "bin"))

    def epoch(number: int) -> Iterator[Any]:
        yield from batches

    return epoch


def _collated(kind: str, key: str) -> Callable[[list[Any]], Any]:
    """Return what makes values of samples that have their bytes under `key`."""
    import torch

    def tokens(samples: list[Any]) -> Any:
        data = bytearray().join([sample[key] for sample in samples])
        return torch.frombuffer(data, dtype=torch.int32).view(len(samples), CONTEXT)

    return tokens if kind == "tokens" else lambda samples: [sample[key] for sample in samples]


# ---- Megatron-Energon


def write_energon(kind: str, path: str, values: Values, shard_bytes: int) -> None:
    """Write the same tar shards, with Energon's index and description."""
    from megatron.energon.flavors.webdataset import BaseWebdatasetFactory

    write_tars(kind, path, values, shard_bytes)
    shards = sorted(file.name for file in Path(path).glob("*.tar"))
    BaseWebdatasetFactory.prepare_dataset(path, shards, split_parts_ratio=[("train", 1.0)], workers=1)
    (Path(path) / ".nv-meta" / "dataset.yaml").write_text(
        "__module__: megatron.energon\n__class__: CrudeWebdataset\n"
    )


def energon(kind: str, path: str, batch: int) -> Epoch:
    """Its training set with a task encoder that only makes batches, without workers; one pass is one iteration."""
    from megatron.energon import (
        Cooker,
        DefaultTaskEncoder,
        WorkerConfig,
        get_loader,
        get_train_dataset,
        stateless,
    )

    collated = _collated(kind, "bin")

    @stateless
    def as_it_is(sample: Any) -> Any:
        return sample

    class Encoder(DefaultTaskEncoder):  # type: ignore[misc, type-arg, unused-ignore]  # untyped where it is absent
        """Leaves the bytes of a sample as they are."""

        decoder = None
        cookers = (Cooker(as_it_is),)

        @stateless
        def batch(self, samples: list[Any]) -> Any:
            return collated(samples)

        @stateless
        def encode_batch(self, batch: Any) -> Any:
            return batch

    dataset = get_train_dataset(
        path,
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
        batch_size=batch,
        shuffle_buffer_size=SHUFFLE_SAMPLES,
        max_samples_per_sequence=None,
        task_encoder=Encoder(),
        repeat=False,
    )
    batches = get_loader(dataset)

    def epoch(number: int) -> Iterator[Any]:
        yield from batches

    return epoch


# ---- Hugging Face datasets


def write_arrow(kind: str, path: str, values: Values, shard_bytes: int) -> None:
    """Write Arrow files, as `save_to_disk` does."""
    import datasets

    feature: Any = datasets.Value("binary")
    if kind == "tokens":
        feature = datasets.List(datasets.Value("int32"), length=CONTEXT)
    with tempfile.TemporaryDirectory(dir=Path(path).parent) as cache:
        made = datasets.Dataset.from_generator(
            lambda: ({"value": value} for value in values),
            features=datasets.Features({"value": feature}),
            cache_dir=cache,
            fingerprint="benchmark",
        )
        made.save_to_disk(path, max_shard_size=shard_bytes)


def hf_datasets(kind: str, path: str, batch: int) -> Epoch:
    """Map style in torch's format; a batch sampler as sampler, so that a batch is one look-up."""
    import datasets
    import torch
    from torch.utils.data import BatchSampler, DataLoader, RandomSampler

    # Without a dtype, integers become int64: twice the bytes.
    options = {"dtype": torch.int32} if kind == "tokens" else {}
    dataset = datasets.load_from_disk(path).with_format("torch", **options)
    sampler = BatchSampler(RandomSampler(dataset), batch, drop_last=True)
    batches: DataLoader[Any] = DataLoader(dataset, sampler=sampler, batch_size=None)

    def epoch(number: int) -> Iterator[Any]:
        for found in batches:
            yield found["value"]

    return epoch


# ---- Ray Data


def write_parquet(kind: str, path: str, values: Values, shard_bytes: int) -> None:
    """Write Parquet with Ray's tensor type for tokens, uncompressed, in files of `shard_bytes`."""
    import pyarrow as pa  # type: ignore[import-untyped]
    import pyarrow.parquet as pq  # type: ignore[import-untyped]
    from ray.data.extensions import ArrowTensorArray

    os.makedirs(path)
    taken: list[Any] = []
    groups, writer = 0, None
    for value in _with_end(values):
        if value is not None:
            taken.append(value)
        if taken and (value is None or sum(len(_bytes_of(one)) for one in taken) >= GROUP_BYTES):
            column = (
                ArrowTensorArray.from_numpy(np.stack(taken))
                if kind == "tokens"
                else pa.array(taken, pa.binary())
            )
            table = pa.table({"value": column})
            if groups * GROUP_BYTES % shard_bytes == 0:
                if writer is not None:
                    writer.close()
                name = f"{path}/part-{groups * GROUP_BYTES // shard_bytes:05}.parquet"
                writer = pq.ParquetWriter(name, table.schema, compression="none", use_dictionary=False)
            assert writer is not None
            writer.write_table(table)
            groups, taken = groups + 1, []
    if writer is not None:
        writer.close()


def _with_end(values: Values) -> Iterator[Any]:
    yield from values
    yield None


def ray(kind: str, path: str, batch: int) -> Epoch:
    """A local cluster of this machine's cores; files in shuffled order, then a shuffle buffer of some batches."""
    warnings.simplefilter("ignore")
    import ray as library

    # Ray puts sockets there. unix(7) limits their paths to 107 bytes, so the name is short.
    folder = str(Path(path).parent / "r")
    cleanups.append(library.shutdown)
    logging.disable(logging.WARNING)
    library.init(
        num_cpus=os.cpu_count(), include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False,
        object_store_memory=RAY_STORE_BYTES, _temp_dir=folder,
    )  # fmt: skip
    library.data.DataContext.get_current().enable_progress_bars = False
    dataset = library.data.read_parquet(path, shuffle="files")
    options: dict[str, Any] = {
        "batch_size": batch,
        "local_shuffle_buffer_size": 4 * batch,
        "drop_last": False,
    }

    def epoch(number: int) -> Iterator[Any]:
        if kind == "tokens":
            for found in dataset.iter_torch_batches(**options):
                yield found["value"]
        else:
            for found in dataset.iter_batches(batch_format="numpy", **options):
                yield found["value"]

    return epoch


# By the name of the format on the disk.
WRITERS: dict[str, Callable[[str, str, Values, int], None]] = {
    "litdata": write_litdata,
    "webdataset": write_tars,
    "energon": write_energon,
    "datasets": write_arrow,
    "ray": write_parquet,
}
READERS: dict[str, Reader] = {
    "litdata": litdata,
    "webdataset": webdataset,
    "energon": energon,
    "datasets": hf_datasets,
    "ray": ray,
}
