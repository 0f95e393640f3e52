"""The settings of the engine."""

from dataclasses import dataclass
from pathlib import Path

from fusecache.engine.namespace.tree import Ownership
from fusecache.policy.symlink_targets import SymlinkRule


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Settings of the engine. prefix: of every key, empty or ending in '/'; sizes in bytes.

    keys_from: where the writer's credentials come from, as for `model/error_text.renewal_text`. writes_by_other_keys:
    the writer's credentials differ from the reader's. symlinks: the value of a SymlinkRule.
    """

    directory: Path
    prefix: str
    ownership: Ownership
    cache_bytes: int
    buffer_bytes: int
    settle_seconds: float = 1.0
    fresh_seconds: float = 1.0
    immutable: tuple[str, ...] = ()
    posix_metadata: bool = False
    temp_names: tuple[str, ...] = ()
    order_last: tuple[str, ...] = ()
    delete_delay: float = 0.0
    last_wins: bool = False
    fsync_is_remote: bool = False
    snapshot_seconds: float = 60.0
    local_only: tuple[str, ...] = ()
    pin: tuple[str, ...] = ()
    symlinks: str = SymlinkRule.INSIDE.value
    read_only: bool = False
    drain_seconds: float = 300.0
    keys_from: str = ""
    writes_by_other_keys: bool = False
