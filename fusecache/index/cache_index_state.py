"""The state file beside the cache index: whether the last run closed the index cleanly, and in which boot it was open.

It decides, without opening the index, whether the index can be trusted.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fusecache.disk.native import replace_synced
from fusecache.model.errors import StateError

FORMAT = 2
STATE_NAME = "state.json"


@dataclass(frozen=True, slots=True)
class Opening:
    """How the index was found. discarded: folders to be deleted; unclean: unindexed cache files are possible."""

    discarded: tuple[Path, ...]
    unclean: bool


def write_state(path: Path, *, boot_id: str, clean: bool) -> None:
    """Replace the state file, synced: it must never say clean about rows that are not on disk."""
    replace_synced(path, (json.dumps({"format": FORMAT, "boot_id": boot_id, "clean": clean}),))


def prepare(directory: Path, boot_id: str, described: Sequence[Path]) -> Opening:
    """Judge what the last run left, without opening it; rename untrusted folders so that they can be deleted."""
    leftovers = [
        found
        for folder in (directory, *described)
        for found in folder.parent.glob(f"{folder.name}.discarded-*")
    ]
    state_path = directory / STATE_NAME
    try:
        state = json.loads(state_path.read_text())
        found_format, clean, same_boot = state["format"], state["clean"], state["boot_id"] == boot_id
    except FileNotFoundError:
        # No state file: never used, or a start that died at once. Rows without it are from an unknown boot.
        found_format, clean, same_boot = FORMAT, not (directory / "rows").exists(), False
    except (ValueError, KeyError, TypeError) as exc:
        raise StateError(
            f"{state_path} cannot be read ({exc}): move {directory} away to start with an empty cache"
        ) from exc
    if not isinstance(found_format, int) or found_format > FORMAT:
        raise StateError(
            f"{directory} has format {found_format}, but this fusecache supports {FORMAT}: use the newer fusecache"
        )
    if found_format == FORMAT and (clean or same_boot):
        return Opening(tuple(leftovers), unclean=not clean)
    for folder in (*described, directory):  # the index last: while it is there, its stop counts as unclean
        if folder.exists():
            discarded = folder.with_name(f"{folder.name}.discarded-{os.urandom(4).hex()}")
            folder.rename(discarded)
            leftovers.append(discarded)
    return Opening(tuple(leftovers), unclean=False)
