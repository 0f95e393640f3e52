"""Implements `fusecache dataset` ls, head, stats and verify, which print information on a dataset and write nothing."""

import contextlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm  # type: ignore[import-untyped]

from loader.base.compression import decompress, mismatch
from loader.errors import LoaderError, ShardError
from loader.mds.dataset import MDSDataset
from loader.mds.encodings import head_text
from loader.mds.index import Index, read_index
from loader.mds.shard_reader import VERIFY_HINT, ShardReader

LONGEST_TEXT = 200  # characters of a value that `head` prints
STATS_SAMPLES = 1000  # enough for a mean within a few per cent; takes seconds on a cold mount
VERIFY_SAMPLES = 256  # samples decoded at a time


def say(text: str, *, error: bool = False) -> None:
    """Print a line, above the progress bar if there is one."""
    tqdm.write(text, file=sys.stderr if error else sys.stdout)


def progress_bar(total: int | None, unit: str) -> Any:
    """Return a progress bar on stderr; it stays hidden unless stderr is a terminal."""
    return tqdm(total=total, unit=unit, disable=not sys.stderr.isatty(), unit_scale=total is None)


def count_text(count: int, noun: str) -> str:
    """Return `1 shard` or `3 shards`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def list_shards(directory: Path) -> int:
    """Print columns, shards and totals as the index gives them."""
    index = read_index(directory)
    for schema in index.schemas:
        columns = zip(schema.names, schema.encodings, strict=True)
        say("columns: " + ", ".join(f"{name} ({encoding})" for name, encoding in columns))
    stored = _stored_bytes(index)
    for shard in range(index.shards):
        name = index.zip_names[shard] or index.raw_names[shard]
        say(f"{name}  {count_text(index.samples[shard], 'sample')}  {count_text(stored[shard], 'byte')}")
    raw = count_text(index.raw_bytes.sum(), "byte")
    say(f"{_totals_text(index)}, {raw} uncompressed")
    return 0


def show_samples(directory: Path, count: int, *, allow_pickle: bool) -> int:
    """Print the first samples, one line a column."""
    if count < 0:
        raise LoaderError(f"--samples {count} is negative: give the number of samples to show")
    dataset = MDSDataset(directory, allow_pickle=allow_pickle)
    for number in range(min(count, len(dataset))):
        say(f"sample {number}")
        for name, value in dataset[number].items():
            say(f"  {name}: {describe_value(value)}")
    say(f"{min(count, len(dataset))} of {count_text(len(dataset), 'sample')}")
    return 0


def describe_value(value: Any) -> str:
    """Return a value as one line: arrays and images as type and shape, long text truncated."""
    if isinstance(value, np.ndarray):
        values = np.array2string(value.reshape(-1)[:8], separator=", ", threshold=8)
        more = ", ..." if value.size > 8 else ""
        return f"{value.dtype.name} {value.shape} {values[:-1]}{more}]"
    if isinstance(value, list) and value and hasattr(value[0], "mode"):
        return f"{len(value)} images, the first {describe_value(value[0])}"
    if hasattr(value, "mode") and hasattr(value, "size"):
        return f"image {getattr(value, 'format', None) or ''} {value.mode} {value.size[0]}x{value.size[1]}"
    text = repr(value)
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}... ({len(value)} long)"


def show_stats(directory: Path) -> int:
    """Print how samples and bytes spread over shards, and the bytes of each column, measured on some samples."""
    index = read_index(directory)
    stored = _stored_bytes(index)
    say(_totals_text(index))
    raw, on_disk = int(index.raw_bytes.sum()), int(stored.sum())
    say(
        f"bytes: {raw} uncompressed, {on_disk} stored ({on_disk / raw:.0%})"
        if raw
        else "bytes: not in the index"
    )
    families = sorted({index.compressions[number] or "none" for number in np.unique(index.compression_of)})
    say(f"compression: {', '.join(families) or 'none'}")
    for what, numbers in (("samples a shard", index.samples), ("stored bytes a shard", stored)):
        if numbers.size:
            say(f"{what}: {numbers.min()} to {numbers.max()}, median {int(np.median(numbers))}")
    total = int(index.samples.sum())
    chosen = np.unique(np.linspace(0, total - 1, min(total, STATS_SAMPLES)).astype(np.int64))
    for name, encoding, sizes in _column_bytes(index, chosen):
        say(
            f"column {name} ({encoding}): {min(sizes)} to {max(sizes)} bytes, mean {sum(sizes) / len(sizes):.1f}"
        )
    say(f"columns measured on {count_text(chosen.size, 'sample')}")
    return 0


def verify(directory: Path, *, allow_pickle: bool, quick: bool) -> int:
    """Read everything, print the first problem of each damaged shard, and continue with the next shard.

    quick: check only that each file exists and has the size that the index gives.
    """
    dataset = MDSDataset(directory, allow_pickle=allow_pickle)
    index = read_index(directory, with_hashes=not quick)
    reader = ShardReader(index)
    damaged = 0
    first = 0
    with progress_bar(index.shards, "shard") as progress:
        for shard, count in enumerate(index.samples.tolist()):
            samples = range(0) if quick else range(first, first + count)
            problem = _problem_of(shard, reader, index, dataset, samples)
            if problem:
                damaged += 1
                say(problem, error=True)
            first += count
            progress.update()
    prefix = "the sizes of " if quick else ""
    unknown = 0 if quick else sum(not any(index.hashes_of(shard)) for shard in range(index.shards))
    found = f"{damaged} damaged" if damaged else "structure is well" if unknown else "all is well"
    if unknown:
        whose = "contents" if unknown == index.shards else f"contents of {count_text(unknown, 'shard')}"
        found += f"; {whose} not checked: the index has no hash. `fusecache dataset convert recompress` stores hashes"
    say(f"{prefix}{_totals_text(index)}: {found}")
    return 1 if damaged else 0


def _problem_of(shard: int, reader: ShardReader, index: Index, dataset: MDSDataset, samples: range) -> str:
    """Return the first problem of a shard, "" if it has none. Sizes first: a truncated file has wrong hashes too."""
    try:
        reader.files.check_size(shard)
        wrong = next(_hash_problems(index, shard, reader.files.path(shard)), "")
        if wrong:
            return wrong
        for start in range(samples.start, samples.stop, VERIFY_SAMPLES):
            _ = dataset[start : min(start + VERIFY_SAMPLES, samples.stop)]
    except LoaderError as problem:
        return str(problem).replace(VERIFY_HINT, "")
    return ""


def _totals_text(index: Index) -> str:
    return f"{count_text(index.shards, 'shard')}, {count_text(index.samples.sum(), 'sample')}"


def _stored_bytes(index: Index) -> NDArray[np.int64]:
    packed = np.array([bool(family) for family in index.compressions] or [False])[index.compression_of]
    return np.where(packed, index.zip_bytes, index.raw_bytes)


def _column_bytes(index: Index, samples: NDArray[np.int64]) -> Iterator[tuple[str, str, list[int]]]:
    """Yield (column, encoding, bytes of its values in these samples) for each column of each schema."""
    reader = ShardReader(index)
    ends = np.cumsum(index.samples)
    found: dict[tuple[str, str], list[int]] = {}
    with progress_bar(samples.size, "sample") as progress:
        for number in samples.tolist():
            shard = int(np.searchsorted(ends, number, side="right"))
            schema = index.schema(shard)
            [data] = reader.read_many(shard, [number - int(ends[shard] - index.samples[shard])])
            varying = schema.sizes.count(0)
            if len(data) < 4 * varying:
                raise ShardError(
                    f"{reader.files.path(shard)} (shard {shard}): sample {number}: "
                    f"{head_text(len(data), 4 * varying)}. Restore the shard{VERIFY_HINT}."
                )
            variable = iter(np.frombuffer(data, "<u4", varying).tolist())
            for name, encoding, size in zip(schema.names, schema.encodings, schema.sizes, strict=True):
                found.setdefault((name, encoding), []).append(size or next(variable))
            progress.update()
    for (name, encoding), sizes in found.items():
        yield name, encoding, sizes


def _hash_problems(index: Index, shard: int, path: str) -> Iterator[str]:
    raw_hashes, zip_hashes = index.hashes_of(shard)
    if not raw_hashes and not zip_hashes:
        return
    packed = bool(index.zip_names[shard])
    try:
        data = Path(path).read_bytes()
    except OSError:
        return  # reading the samples reports it, with a better message
    checks: list[tuple[bytes, Mapping[str, str]]] = [(data, zip_hashes if packed else raw_hashes)]
    if packed and raw_hashes:
        with contextlib.suppress(ValueError):  # see above
            raw = decompress(index.compression(shard), data, int(index.raw_bytes[shard]))
            checks.append((raw, raw_hashes))
    for content, hashes in checks:
        try:
            wrong = mismatch(dict(hashes), content)
        except LoaderError as problem:
            yield (
                f"{path} (shard {shard}): the index has a hash that cannot be checked: {problem}; write the dataset "
                f"again, or check only sizes with --quick"
            )
            continue
        if wrong:
            yield f"{path} (shard {shard}): its {wrong} is not that of the index; restore the shard"
