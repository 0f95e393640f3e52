"""The rows of the kernel's mount table, proc_pid_mountinfo(5).

Not here: the reading of the table, and what a fusecache mount is.
"""

import re
from dataclasses import dataclass

_ESCAPED = re.compile(rb"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class MountRow:
    """One mount of the table, its words unescaped. mount_id, parent_id: of this mount, and of the one below it.

    root: the directory of the file system that shows at `point`. kind: the type of the file system. source: what is
    mounted. options: those of the file system, with commas between them.
    """

    mount_id: str
    parent_id: str
    device: str
    root: str
    point: str
    kind: str
    source: str
    options: str


def mount_rows(table: bytes) -> list[MountRow]:
    """Return the rows of a table in its order. If mounts are stacked on one path, the top one is the last."""
    # No splitlines(): the kernel escapes line feeds, but no carriage returns.
    return [_row(line) for line in table.split(b"\n") if line]


def _row(line: bytes) -> MountRow:
    head, _, rest = line.partition(b" - ")
    mount_id, parent_id, device, root, point = map(_text, head.split(b" ")[:5])
    kind, source, options = map(_text, [*rest.split(b" "), b"", b""][:3])
    return MountRow(mount_id, parent_id, device, root, point, kind, source, options)


def _text(word: bytes) -> str:
    """Return a word as Python's functions on paths take it. The kernel writes blanks, for one, in octal."""
    plain = _ESCAPED.sub(lambda found: bytes([int(found[1], 8)]), word)
    return plain.decode("utf-8", "surrogateescape")
