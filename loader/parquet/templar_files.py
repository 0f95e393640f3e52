"""Reads the two files beside the shards of a Templar-style dataset, and checks them against each other."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from loader.base.optional_imports import optional_module
from loader.errors import DatasetError

METADATA_NAME = "_metadata.yaml"
SIZES_NAME = "_shard_sizes.json"
# The config that stands for all others.
_DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class TemplarConfig:
    """A named part of the dataset. ends: (shards,) one past the last row of each. bytes: of each, 0 if unknown."""

    name: str
    shards: tuple[str, ...]
    ends: tuple[int, ...]
    bytes: tuple[int, ...]


def read_configs(root: str) -> tuple[TemplarConfig, ...]:
    """Return the configs that have shards, sorted by name. Raises DatasetError, naming file and cause."""
    sizes_path, metadata_path = os.path.join(root, SIZES_NAME), os.path.join(root, METADATA_NAME)
    yaml = optional_module("yaml", why=METADATA_NAME, package="pyyaml")
    try:
        sizes = json.loads(_text(sizes_path))
    except ValueError as problem:
        raise DatasetError(f"{sizes_path} is not JSON: {problem}") from None
    try:
        metadata = yaml.safe_load(_text(metadata_path))
    except (yaml.YAMLError, ValueError) as problem:
        raise DatasetError(f"{metadata_path} is not YAML: {problem}") from None
    names = _names(metadata, metadata_path)
    if not isinstance(sizes, dict):
        raise DatasetError(f"{sizes_path} is not a JSON object of configs")
    entries = {name: _entries(sizes[name], name, sizes_path) for name in names if name in sizes}
    entries = {name: found for name, found in sorted(entries.items()) if found}
    if not entries:
        raise DatasetError(
            f"{sizes_path} has no shards of the configs that {metadata_path} names: {', '.join(names)}"
        )
    prefix = _prefix(root, [found[0][0] for found in entries.values()])
    configs = []
    for name, found in entries.items():
        for path, _, _ in found:
            if not path.startswith(prefix):
                raise DatasetError(
                    f"{sizes_path}, config {name}: {path} lies outside of {prefix}, as the others do not"
                )
        configs.append(
            TemplarConfig(
                name,
                tuple(path[len(prefix) :] for path, _, _ in found),
                tuple(accumulate(rows for _, rows, _ in found)),
                tuple(size for _, _, size in found),
            )
        )
    return tuple(configs)


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DatasetError(f"{path} does not exist: a Templar dataset has it beside its shards") from None
    except OSError as problem:
        raise DatasetError(f"{path} cannot be read: {problem.strerror}") from problem


def _names(metadata: Any, path: str) -> list[str]:
    configs = metadata.get("configs") if isinstance(metadata, dict) else None
    if not isinstance(configs, list) or not all(
        isinstance(config, dict) and isinstance(config.get("config_name"), str) for config in configs
    ):
        raise DatasetError(f"{path} has no list `configs`, each with a `config_name`")
    return [config["config_name"] for config in configs if config["config_name"] != _DEFAULT]


def _entries(config: Any, name: str, path: str) -> list[tuple[str, int, int]]:
    """Return (path, rows, bytes or 0) of each shard of a config that has rows."""
    shards = config.get("shards") if isinstance(config, dict) else None
    if not isinstance(shards, list):
        raise DatasetError(f"{path}, config {name}: it has no list `shards`")
    found = []
    for number, shard in enumerate(shards):
        entry = shard if isinstance(shard, dict) else {}
        file, rows, size = entry.get("path"), entry.get("num_rows"), entry.get("byte_size") or 0
        if not isinstance(file, str) or type(rows) is not int or rows < 0 or type(size) is not int:
            raise DatasetError(f"{path}, config {name}, shard {number}: it has no `path` and `num_rows`")
        if file.startswith("/") or ".." in file.split("/"):
            raise DatasetError(f"{path}, config {name}, shard {number}: {file} leaves the dataset")
        found.append((file, rows, size))
    total = config.get("total_rows")
    if total and total != sum(rows for _, rows, _ in found):
        raise DatasetError(
            f"{path}, config {name}: total_rows is {total}, its shards have {sum(rows for _, rows, _ in found)}"
        )
    return [entry for entry in found if entry[1]]


def _prefix(root: str, shards: Sequence[str]) -> str:
    """Return the prefix of shard paths that are relative to the bucket or a parent folder, not to the dataset."""
    for shard in shards:
        parts = shard.split("/")
        for number in range(len(parts)):
            if os.path.isfile(os.path.join(root, *parts[number:])):
                return "".join(f"{part}/" for part in parts[:number])
    raise DatasetError(
        f"{root} has none of the first shards that {SIZES_NAME} names, such as {shards[0]}, nor the ends of their paths"
    )
