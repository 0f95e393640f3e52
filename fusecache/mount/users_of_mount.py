"""Names the processes that use a mount, for the message that it is busy. Asks /proc alone, never the mount."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

# Processes that a message names.
_NAMED = 5


def users_text(mountpoint: str) -> str:
    """Return which processes use a mount, and how, as far as this user may see them; "" if none is seen."""
    found = []
    for process in sorted(Path("/proc").glob("[0-9]*"), key=lambda each: int(each.name)):
        with suppress(OSError):  # it has ended, or is another user's
            use = next(_uses(process, mountpoint), "")
            if use:
                name = (process / "comm").read_text().strip()
                found.append(f"{name} (pid {process.name}, {use})")
    more = [f"and {len(found) - _NAMED} more"] if len(found) > _NAMED else []
    return ", ".join([*found[:_NAMED], *more])


def _uses(process: Path, mountpoint: str) -> Iterator[str]:
    """Yield how a process uses a mount. Raises OSError."""
    links = [(process / "cwd", "works in"), (process / "root", "has as its root")]
    links += [(each, "has open") for each in (process / "fd").iterdir()]
    for link, verb in links:
        with suppress(FileNotFoundError):  # it has just been closed
            path = os.readlink(link)
            if f"{path}/".startswith(f"{mountpoint}/"):
                yield f"{verb} {path}"
    for line in (process / "maps").read_text(errors="surrogateescape").splitlines():
        path = line.partition("/")[2]
        if path and f"/{path}/".startswith(f"{mountpoint}/"):
            yield f"maps /{path}"
