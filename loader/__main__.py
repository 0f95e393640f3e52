"""Tools for datasets: `python -m loader ls DATASET`, `python -m loader verify DATASET`."""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm  # type: ignore[import-untyped]

from loader.compression import decompress
from loader.dataset import MDSDataset
from loader.errors import LoaderError
from loader.index import INDEX_NAME, Index, read_index
from loader.shard import VERIFY_HINT
from loader.writer import digest


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns 0 if all is well, 1 if the dataset is not, 2 for a wrong command line."""
    parser = argparse.ArgumentParser(prog="python -m loader", description="Look at MDS datasets.")
    commands = parser.add_subparsers(dest="command", required=True)
    shown = commands.add_parser("ls", help="columns, and the shards with their samples and bytes")
    checked = commands.add_parser(
        "verify", help="read every shard: sizes, hashes, offsets, every sample decoded"
    )
    checked.add_argument(
        "--allow-pickle", action="store_true", help="decode pickled columns; they can run code"
    )
    for command in (shown, checked):
        command.add_argument("dataset", type=Path, help="directory that holds index.json")
    options = parser.parse_args(arguments)
    try:
        if options.command == "ls":
            return list_shards(options.dataset)
        return verify(options.dataset, allow_pickle=options.allow_pickle)
    except LoaderError as problem:
        _say(str(problem), error=True)
        return 1


def list_shards(directory: Path) -> int:
    """Print what the index says."""
    index = read_index(directory)
    for schema in index.schemas:
        columns = zip(schema.names, schema.encodings, strict=True)
        _say("columns: " + ", ".join(f"{name} ({encoding})" for name, encoding in columns))
    for shard in range(index.shards):
        stored = index.zip_bytes[shard] if index.zip_names[shard] else index.raw_bytes[shard]
        name = index.zip_names[shard] or index.raw_names[shard]
        _say(f"{name}  {index.samples[shard]} samples  {stored} bytes")
    _say(f"{index.shards} shards, {index.samples.sum()} samples, {index.raw_bytes.sum()} bytes uncompressed")
    return 0


def verify(directory: Path, *, allow_pickle: bool) -> int:
    """Read everything, print each shard that is not as it should be, and go on to the next."""
    index = read_index(directory)
    dataset = MDSDataset(directory, allow_pickle=allow_pickle)
    hashes = _hashes(directory)
    damaged = 0
    first = 0
    with tqdm(total=index.shards, unit="shard", disable=not sys.stderr.isatty()) as progress:
        for shard, count in enumerate(index.samples.tolist()):
            try:
                for problem in _hash_problems(index, shard, hashes[shard]):
                    damaged += 1
                    _say(problem, error=True)
                for number in range(first, first + count):
                    _ = dataset[number]
            except LoaderError as problem:
                damaged += 1
                _say(str(problem).replace(VERIFY_HINT, ""), error=True)
            first += count
            progress.update()
    _say(
        f"{index.shards} shards, {len(dataset)} samples: "
        + (f"{damaged} problems" if damaged else "all is well")
    )
    return 1 if damaged else 0


def _hashes(directory: Path) -> list[tuple[dict[str, str], dict[str, str]]]:
    """(of the raw file, of the compressed one) of each shard."""
    shards: list[dict[str, Any]] = json.loads((directory / INDEX_NAME).read_bytes())["shards"]
    return [
        ((shard.get("raw_data") or {}).get("hashes") or {}, (shard.get("zip_data") or {}).get("hashes") or {})
        for shard in shards
    ]


def _hash_problems(index: Index, shard: int, hashes: tuple[dict[str, str], dict[str, str]]) -> Iterator[str]:
    if not any(hashes):
        return
    name = index.zip_names[shard] or index.raw_names[shard]
    try:
        data = Path(os.path.join(index.directory, name)).read_bytes()
    except OSError:
        return  # reading its samples says so, and better
    raw_hashes, zip_hashes = hashes
    checks = [(data, zip_hashes)] if index.zip_names[shard] else [(data, raw_hashes)]
    if index.zip_names[shard] and raw_hashes:
        with contextlib.suppress(ValueError):  # as above
            checks.append((decompress(index.compression(shard), data), raw_hashes))
    for content, expected in checks:
        for algorithm, value in expected.items():
            if digest(algorithm, content) != value:
                yield f"{name} (shard {shard}): its {algorithm} is not that of the index; restore the shard"


def _say(text: str, *, error: bool = False) -> None:
    tqdm.write(text, file=sys.stderr if error else sys.stdout)


if __name__ == "__main__":
    sys.exit(main())
