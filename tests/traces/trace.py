"""The format of a trace: what one program did to files below one directory, one JSON line a call.

The first line says what was run. Then `[milliseconds, process, call, argument…]`, or a mark: a checkpoint is complete
on the node. The last line is the tree at the end, by which a replay is checked.

| call | arguments |
|---|---|
| `open` | open file's number, path, letters: `c`reate, e`x`clusive, `t`runcate, `a`ppend, `r`ead too, `s`ync |
| `write` | open file, offset (null: at the end), bytes; consecutive ones are one |
| `ftruncate`, `allocate` | open file, size |
| `fsync` | open file; `fsync_name`: a directory's path, or that of a file open for reading |
| `flush`, `close` | open file; `close` is the last descriptor of it |
| `rename` | old and new path; `symlink`: path, target; `truncate`: path, size |
| `unlink`, `mkdir`, `rmdir`, `utimes`, `chmod` | path; `chmod`: mode |
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

MARK = "MARK:"
RECORDED = Path(__file__).parent / "recorded"


@dataclass(frozen=True)
class Call:
    """What one process did. milliseconds: since the first call."""

    milliseconds: int
    process: int
    name: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class Mark:
    """A checkpoint is complete. files: its own; shows: those by which the library takes it for complete."""

    milliseconds: int
    name: str
    files: tuple[str, ...]
    shows: tuple[str, ...]


@dataclass(frozen=True)
class Trace:
    """name: of the program. versions: of its libraries. end: path -> size of files, `-> target` of links, None."""

    name: str
    versions: str
    lines: tuple[Call | Mark, ...]
    end: Mapping[str, int | str | None]

    @property
    def marks(self) -> list[Mark]:
        """The checkpoints, in the order in which they became complete."""
        return [line for line in self.lines if isinstance(line, Mark)]


@cache
def payload(line: int, size: int) -> bytes:
    """Return what a write of a trace's line writes: no other line writes the same, and no two places are alike."""
    words = b"".join(b"%04d:%010d\n" % (line, index) for index in range(size // 16 + 1))
    return words[:size]


def dump(trace: Trace, path: Path) -> None:
    """Write a trace."""
    lines: list[Any] = [{"trace": trace.name, "versions": trace.versions}]
    for line in trace.lines:
        if isinstance(line, Mark):
            lines.append(
                {"mark": line.name, "ms": line.milliseconds, "files": line.files, "shows": line.shows}
            )
        else:
            lines.append([line.milliseconds, line.process, line.name, *line.arguments])
    lines.append({"end": dict(trace.end)})
    text = [json.dumps(line, separators=(",", ":"), ensure_ascii=False) for line in lines]
    path.write_text("\n".join(text) + "\n")


def load(name: str, folder: Path = RECORDED) -> Trace:
    """Read a trace."""
    head, *rows, tail = (json.loads(row) for row in (folder / f"{name}.jsonl").read_text().splitlines())
    return Trace(head["trace"], head["versions"], tuple(map(_line, rows)), tail["end"])


def recorded() -> Sequence[str]:
    """Return the names of all traces."""
    return sorted(path.stem for path in RECORDED.glob("*.jsonl"))


def _line(row: Any) -> Call | Mark:
    if isinstance(row, dict):
        return Mark(row["ms"], row["mark"], tuple(row["files"]), tuple(row["shows"]))
    milliseconds, process, name, *arguments = row
    return Call(milliseconds, process, name, tuple(arguments))
