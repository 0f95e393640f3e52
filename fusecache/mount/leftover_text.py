"""Messages about the state that a run leaves behind: pending changes, quarantined and local-only files.

The mount and unmount commands print them. A count of zero prints nothing.
"""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fusecache.model.format_text import count_text, size_text
from fusecache.mount.control_client import Answer
from fusecache.mount.progress import pending_text


def found_text(mountpoint: Path, *, changes: int, orphans: int, suspects: int) -> str:
    """Return what the daemon found of the last run at start, "" if nothing. orphans, suspects: newly quarantined."""
    words = []
    if changes:
        verb = "is" if changes == 1 else "are"
        words.append(f"{count_text(changes, 'change')} of the last run {verb} pending and will be uploaded")
    quarantined = _quarantined_text(orphans, suspects)
    if quarantined:
        words.append(f"{quarantined} in quarantine: fusecache recover {shlex.quote(str(mountpoint))}")
    return "; ".join(words)


def unsent_text(answer: Answer) -> str:
    """Return how much a mount that ends now leaves to the next one. answer: its last status."""
    cache_dir = answer.status.get("options", {}).get("cache_dir") or "CACHE_DIR"
    return (
        f"not in the bucket: {pending_text(answer.progress)}; "
        f"the next mount with --cache-dir {cache_dir} uploads the rest"
    )


def left_texts(status: Mapping[str, Any]) -> list[str]:
    """Return lines about local data of an unmounted mount that no later mount uploads by itself.

    status: the daemon's last status before it exits.
    """
    cache_dir = status.get("options", {}).get("cache_dir") or "CACHE_DIR"
    lines = []
    quarantined = _quarantined_text(status.get("orphans", 0), status.get("suspects", 0))
    if quarantined:
        size = size_text(status.get("aside_bytes", 0))
        lines.append(f"{quarantined} in quarantine, {size}: fusecache recover {shlex.quote(cache_dir)}")
    local = status.get("local_only_files", 0)
    if local:
        verb = "exists" if local == 1 else "exist"
        lines.append(
            f"{count_text(local, 'local-only file')}, {size_text(status['local_only_bytes'])}, {verb} only in "
            f"{cache_dir}: the next mount with this cache directory shows {'it' if local == 1 else 'them'} again"
        )
    return lines


def missing_texts(answer: Answer) -> list[str]:
    """Return lines that name what the bucket lacks after `sync` or `drain`: the largest files first."""
    names = [f"not in the bucket: {name}" for name in answer.missing]
    more = answer.progress.pending_files - answer.progress.deferred_files - len(names)
    return [*names, f"not in the bucket: {count_text(more, 'more change')}"] if names and more > 0 else names


def _quarantined_text(orphans: int, suspects: int) -> str:
    """Return `7 unfinished files and 1 suspect file are`, "" for none."""
    counts = [(orphans, "unfinished file"), (suspects, "suspect file")]
    words = " and ".join(count_text(count, noun) for count, noun in counts if count)
    return f"{words} {'is' if orphans + suspects == 1 else 'are'}" if words else ""
