"""The settings of the engine."""

from dataclasses import dataclass
from pathlib import Path

from fusecache.disk.cache_files import Carry
from fusecache.engine.namespace.tree import Ownership
from fusecache.model.predecessor import Predecessor
from fusecache.model.prices import Prices
from fusecache.policy.backoff import PATIENCE_SECONDS
from fusecache.policy.bucket_health import BucketHealth
from fusecache.policy.name_patterns import SymlinkRule
from fusecache.remote.store import Peers


@dataclass(frozen=True, slots=True)
class BucketAccess:
    """How the bucket is reached.

    keys_from: where the writer's credentials come from, as for `model/error_text.renewal_text`. writes_by_other_keys:
    the writer's credentials differ from the reader's. health: what the bucket's store records; None if it records none.
    """

    keys_from: str = ""
    writes_by_other_keys: bool = False
    health: BucketHealth | None = None


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Settings of the engine. prefix: of every key, empty or ending in '/'; sizes in bytes.

    are_buffers_shared: other processes copy replies out of the buffers. carry: may have them store these.
    symlinks: the value of a SymlinkRule. prices: None if unknown.
    whole_files: names of weights.
    peers: None if there are none.
    download_rate: bytes a second of all reads; None: no limit. patience_seconds: of a reader, and of a lookup.
    """

    directory: Path
    prefix: str
    ownership: Ownership
    cache_bytes: int
    buffer_bytes: int
    are_buffers_shared: bool = False
    carry: Carry = lambda *_: None
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
    whole_files: tuple[str, ...] = ()
    symlinks: str = SymlinkRule.INSIDE.value
    read_only: bool = False
    drain_seconds: float = 300.0
    prices: Prices | None = None
    download_rate: float | None = None
    patience_seconds: float = PATIENCE_SECONDS
    # The daemon that served the mount before this one, if the mount outlived it.
    predecessor: Predecessor | None = None
    access: BucketAccess = BucketAccess()
    peers: Peers | None = None
