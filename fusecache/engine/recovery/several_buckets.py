"""The common cache directory that several buckets of one mount had in an earlier version."""

import shutil
from pathlib import Path

from fusecache.engine.recovery.offline import OfflineCache
from fusecache.model.errors import StateError
from fusecache.model.format_text import count_text

# The last one says that the others are there.
_CACHED = ("staging", "orphans", "suspect", "cache", "names", "journal", "empty", "fusecache.json")


def remove_common_cache(directory: Path) -> None:
    """Remove a common cache directory of several buckets, whose names would be in the way of each bucket's own.

    Only if all in it is cached: raises StateError if the bucket may lack something, or if it is another mount's.
    """
    with OfflineCache(directory) as cache:
        if "=" not in cache.identity.partition(" ")[0]:  # of several buckets: NAME=ENDPOINT SOURCE
            raise StateError(
                f"the cache directory {directory} belongs to {cache.identity or 'another mount'}, and several buckets "
                "need one of their own; choose another with --cache-dir"
            )
        left = cache.listing()["count"] + cache.pending_changes()
        if left:
            raise StateError(
                f"the cache directory {directory} is of an earlier version, in which several buckets shared one, and "
                f"has {count_text(left, 'change')} that the buckets may lack. Nothing was changed. Mount once with the "
                "earlier version, run `fusecache sync` and `fusecache recover`, and unmount; or choose another "
                "--cache-dir, and keep this one"
            )
        for name in _CACHED:
            path = directory / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
