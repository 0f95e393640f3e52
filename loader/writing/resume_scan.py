"""Finds the complete shards that an unfinished writer left, by reading the shards themselves.

A shard is complete if three conditions hold: its header has the writer's settings; its offset table begins after the
header and ends at the end of the file; and a compressed shard decompresses fully. A killed process or a full disk
leaves a shorter file. So does a power cut on file systems that set a file's length after its data (ext4, XFS). Of the
last complete shard, each sample is decoded as well. The index entries are made from the files, so they match the files'
content.
"""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from loader.base.compression import decompress
from loader.errors import EncodingError, WriterError
from loader.mds.encodings import sample_decoder
from loader.writing.shard_packer import SHARD_FILE, ShardPacker


def make_directory(directory: Path) -> None:
    """Create a directory unless it exists. Raises WriterError."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise WriterError(
            f"the directory {directory} cannot be made: {problem.strerror}: {problem.filename}; choose another"
        ) from problem


def left_over_shards(directory: Path) -> list[str]:
    """Return the names of all shards in a directory, complete or not."""
    return sorted(path.name for path in directory.iterdir() if SHARD_FILE.fullmatch(path.name))


def check_no_shards(directory: Path) -> None:
    """Raise WriterError for a directory with shards, for what cannot be resumed."""
    left_over = left_over_shards(directory) if directory.is_dir() else []
    if left_over:
        raise WriterError(
            f"{directory} holds {left_over[0]}, which an unfinished run left: choose another directory, or remove it"
        )


def whole_shards(directory: Path, packer: ShardPacker) -> list[dict[str, Any]]:
    """Return the index entries of the complete shards, from number 0 to the last one before a gap or a damaged one.

    Raises WriterError if a shard has other settings, so that no shard is overwritten.
    """
    found: list[dict[str, Any]] = []
    while (entry := _entry(directory, packer, len(found))) is not None:
        found.append(entry)
    if found and not _decodes(directory, packer, len(found) - 1):
        found.pop()
    return found


def _entry(directory: Path, packer: ShardPacker, number: int) -> dict[str, Any] | None:
    path = directory / packer.file_name(number)
    if not path.exists():
        return None
    with open(path, "rb") as file:
        size = path.stat().st_size
        if packer.family or packer.has_hashes:
            stored = file.read()
            try:
                raw = decompress(packer.family, stored) if packer.family else stored
            except ValueError:  # it is incomplete
                return None
            count = _count(path, packer, raw, len(raw))
            return packer.entry(number, count, [raw], [stored] if packer.family else None) if count else None
        words = np.frombuffer(file.read(4), "<u4")
        count = int(words[0]) if words.size else 0
        head = words.tobytes() + file.read(4 * (count + 1) + len(packer.config(count)))
        count = _count(path, packer, head, size)
        return packer.entry(number, count, size, None) if count else None


def _count(path: Path, packer: ShardPacker, raw: bytes, size: int) -> int:
    """Return the sample count of a complete shard of `size` bytes that begins with `raw`; 0 if it is incomplete."""
    if len(raw) < 8:
        return 0
    count = int(np.frombuffer(raw, "<u4", 1)[0])
    start = 4 * (count + 2)
    expected = packer.config(count)
    config = raw[start : start + len(expected)]
    if len(config) < len(expected):
        return 0
    if config != expected:
        if config.startswith(b'{"column_encodings"'):
            raise WriterError(
                f"{path} was written with other settings than these, so it cannot be resumed: choose another "
                f"directory, the settings that it begins with ({_begin(raw[start:])}), or remove it"
            )
        return 0
    offsets = np.frombuffer(raw, "<u4", count + 1, 4)
    whole = (
        offsets[0] == start + len(expected) and offsets[-1] == size and (offsets[1:] >= offsets[:-1]).all()
    )
    return count if whole else 0


def _begin(config: bytes) -> str:
    """Return the settings that a shard contains, as far as they can be read."""
    try:
        text = config.decode(errors="replace")
        settings, _ = json.JSONDecoder().raw_decode(text)
        return json.dumps({name: settings[name] for name in sorted(settings) if name != "version"})
    except ValueError:
        return "they cannot be read"


def samples_of(shard: Path, packer: ShardPacker) -> list[bytes]:
    """Return the encoded samples of a complete shard."""
    raw = shard.read_bytes()
    if packer.family:
        raw = decompress(packer.family, raw)
    count = int(np.frombuffer(raw, "<u4", 1)[0])
    return [raw[start:stop] for start, stop in pairwise(np.frombuffer(raw, "<u4", count + 1, 4).tolist())]


def _decodes(directory: Path, packer: ShardPacker, number: int) -> bool:
    schema = packer.schema
    # A pickle could run code, so check only that its bytes are there.
    encodings = ["bytes" if encoding == "pkl" else encoding for encoding in schema.encodings]
    decode = sample_decoder(schema.names, encodings, schema.sizes, allow_pickle=False)
    try:
        for sample in samples_of(directory / packer.file_name(number), packer):
            decode(sample)
    except EncodingError:
        return False
    return True


def check_not_below(target: Path, source: str | Path) -> None:
    """Raise WriterError if a new dataset would lie in the one that it is made of."""
    if f"{target.resolve()}/".startswith(f"{Path(source).resolve()}/"):
        raise WriterError(f"{target} lies in {source}, which is not written to: choose another directory")
