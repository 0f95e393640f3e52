"""Decides which files are the weights of a model, and when a read means that all of them are read. Pure.

A header alone decides nothing: many tools read only that. A load begins with a run of reads beyond it.
"""

import json
import math
import operator
import re

from fusecache.model.objects import MIB
from fusecache.policy.cache.granules import CHUNK_BYTES
from fusecache.policy.cache.readahead import FIRST_WINDOW_BYTES
from fusecache.policy.name_patterns import matches_any

# Programs load a tensor as a whole: a run of reads beyond the one that jumped to it. The kernel's read-ahead around a
# random read is no longer than this, nor are most samples of a data set.
RUN_BYTES = MIB
# So many bytes of a file say whether it is safetensors or GGUF.
START_BYTES = 16
# Smaller files are not worth it: ordinary read-ahead fetches them in a few requests.
_LEAST_BYTES = 2 * CHUNK_BYTES
# What safetensors itself accepts.
_LARGEST_HEADER = 100 * MIB
# The header of another format is not parsed. The vocabulary in that of GGUF takes up to some 10 MiB.
_OTHER_HEADER = 16 * MIB
# torch.load reads the directory of its archive from the end of the file first.
_END_BYTES = MIB
# What may be fetched once a run was read: as many chunks as are fetched at once. Then so many times what is read.
_FIRST_BYTES = 16 * CHUNK_BYTES
_FACTOR = 16
_LARGEST_INDEX = 64 * MIB
# A model has fewer shards.
_SHARDS_MAX = 1000
_SHARD = re.compile(r"(?P<stem>.+?)(?P<variant>\.[^.]+)?-\d+-of-\d+(?P<format>\.\w+)")


def load_begins_at(name: str, size: int, start: bytes, patterns: tuple[str, ...]) -> float:
    """Return from which offset on a read of a file means that all of it is read; infinity if none does.

    start: its first START_BYTES, empty if unknown. patterns: of the names of weights. Files that begin as safetensors
    or GGUF count besides: a hub's cache names them by hashes. Without a pattern, no file counts.
    """
    if not patterns or size < _LEAST_BYTES:
        return math.inf
    length = int.from_bytes(start[:8], "little")
    if start[8:9] == b"{" and 8 + length <= size and length <= _LARGEST_HEADER:
        return 8 + length + FIRST_WINDOW_BYTES  # the kernel's read-ahead goes beyond the header
    return _OTHER_HEADER if start[:4] == b"GGUF" or matches_any(name, patterns) else math.inf


def header_bytes(begins_at: float) -> int:
    """Return the size of a safetensors header by what `load_begins_at` returned; 0 for other formats."""
    return 0 if begins_at in (_OTHER_HEADER, math.inf) else int(begins_at) - FIRST_WINDOW_BYTES


def tensor_ends(header: bytes) -> list[int]:
    """Return where the tensors of a safetensors file end, ascending. Raises ValueError if the header is damaged."""
    try:
        ends = [
            each["data_offsets"][1] for name, each in json.loads(header[8:]).items() if name != "__metadata__"
        ]
        return sorted(len(header) + operator.index(end) for end in ends)
    except (AttributeError, IndexError, KeyError, RecursionError, TypeError) as exc:
        raise ValueError(f"it is no table of tensors: {exc}") from exc


def is_load(begins_at: float, size: int, offset: int, run_bytes: int) -> bool:
    """Return whether a read at `offset` means that all of the file is read. run_bytes: of the run that it ends."""
    return begins_at <= offset < size - _END_BYTES and run_bytes >= RUN_BYTES


def allowed_bytes(read_bytes: int) -> int:
    """Return how many bytes of a model may be fetched for a program that has read `read_bytes`."""
    return _FIRST_BYTES + _FACTOR * read_bytes


def index_names(name: str) -> tuple[str, ...]:
    """Return under which names the index of a model may lie beside a shard of it; none for what is no shard."""
    found = _SHARD.fullmatch(name)
    if found is None:
        return ()
    stem, variant, suffix = found["stem"], found["variant"] or "", found["format"]
    plain = f"{stem}{variant}{suffix}.index.json"
    return (f"{stem}{suffix}.index{variant}.json", plain) if variant else (plain,)


def is_index_size(size: int) -> bool:
    """Return whether an index has a size that is worth reading."""
    return 0 < size <= _LARGEST_INDEX


def shards_in_order(index: bytes) -> list[str]:
    """Return the files that the index of a model names, in the order of its map. Raises ValueError if it is none."""
    try:
        content = json.loads(index)
    except RecursionError as exc:
        raise ValueError("it is nested too deeply") from exc
    shards = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(shards, dict):
        raise ValueError("it has no weight_map")
    names = [name for name in shards.values() if isinstance(name, str) and "/" not in name]
    return list(dict.fromkeys(names))[:_SHARDS_MAX]
