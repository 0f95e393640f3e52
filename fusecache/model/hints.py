"""Hints: how a job tells the daemon its future reads. The wire format of plans and cursors; advice only.

The daemon and the loader both use this module. It needs only the standard library.

A plan is one line of JSON, then paths, then columns of numbers; a cursor is one line of JSON (`docs/hints.md`). The job
counts its steps over all epochs, so that a plan can reach past the end of an epoch. Plans come in numbered windows: a
plan replaces the job's earlier plans of its window number and of higher ones.
"""

import json
import re
import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final, NamedTuple

from fusecache.model.errors import FusecacheError

VERSION: Final = 1
# Limit of a whole message. A plan of 10**5 extents has about 4 MiB.
LONGEST_MESSAGE_BYTES: Final = 16 << 20
# The length of an extent that ends with its file, whatever the file's size.
TO_THE_END: Final = 1 << 62
# Folder and suffixes of the jobs' hint files in the control directory of a mount.
FOLDER: Final = "hints"
PLAN, CURSOR = ".plan", ".cursor"

_LONGEST_HEADER_BYTES = 4096
_NUMBER_BYTES = 8
_COLUMNS = 5
_MOST_STEPS = 1 << 53
_JOB = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")
# Forbidden with a slash on either side of each path: an empty part, `.`, `..`; the daemon's own folder.
_FORBIDDEN = ("//", "/./", "/../", "\0/.fusecache/")


class HintError(FusecacheError):
    """An invalid message; none of it is used."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The future reads of a job, in the order of their first steps.

    paths: below the mountpoint, sorted. Columns with one number per extent: path (index into paths), start and length
    (bytes), first (step of the first read; never decreases), span (steps from there to the last read). step: the job's
    current step. is_exact: small extents are the only reads nearby for now. No byte around them is to be fetched, and
    fetched bytes need not be cached.
    """

    window: int
    step: int
    paths: list[str]
    path: "array[int]"
    start: "array[int]"
    length: "array[int]"
    first: "array[int]"
    span: "array[int]"
    is_exact: bool = False

    def __len__(self) -> int:
        return len(self.path)


def is_job(text: str) -> bool:
    """Return whether a text can name a job: letters, digits, `.`, `_` and `-`, at most 100, no leading dot."""
    return _JOB.fullmatch(text) is not None


def encode_plan(  # noqa: PLR0913 -- the fields of the message, by name
    *,
    window: int,
    step: int,
    paths: Sequence[str],
    path: Iterable[int],
    start: Iterable[int],
    length: Iterable[int],
    first: Iterable[int],
    span: Iterable[int],
    is_exact: bool = False,
) -> bytes:
    """Return a plan as a message. The columns are those of `Plan`. Raises HintError if it breaks their rules."""
    steps = array("q", first)
    advance = array("q", (now - before for now, before in zip(steps, [0, *steps[:-1]], strict=False)))
    columns = [array("q", column) for column in (path, start, length, advance, span)]
    text = "\0".join(paths)
    _check(paths, text, columns)
    names = text.encode()
    header = {
        "fusecache": "plan",
        "version": VERSION,
        "window": window,
        "step": step,
        "exact": is_exact,
        "paths": len(paths),
        "path_bytes": len(names),
        "extents": len(columns[0]),
    }
    message = b"".join([_line(header), names, *map(_little_endian, columns)])
    if len(message) > LONGEST_MESSAGE_BYTES:
        raise HintError(
            f"the plan is longer than {LONGEST_MESSAGE_BYTES} bytes: {len(message)}; use more windows"
        )
    return message


def decode_plan(message: bytes | bytearray | memoryview) -> Plan:
    """Return the plan in a message, validated. Raises HintError."""
    view = memoryview(message)
    if len(view) > LONGEST_MESSAGE_BYTES:
        raise HintError(
            f"the plan is longer than {LONGEST_MESSAGE_BYTES} bytes: {len(view)}; use more windows"
        )
    head = bytes(view[:_LONGEST_HEADER_BYTES])
    end = head.find(b"\n") + 1
    header = _header(head[:end], "plan")
    count, names_bytes, extents = (_count(header, name) for name in ("paths", "path_bytes", "extents"))
    column_bytes = extents * _NUMBER_BYTES
    if len(view) != end + names_bytes + _COLUMNS * column_bytes:
        raise HintError(
            f"the plan should have {end + names_bytes + _COLUMNS * column_bytes} bytes, not {len(view)}"
        )
    try:
        text = bytes(view[end : end + names_bytes]).decode()
    except UnicodeDecodeError as exc:
        raise HintError(f"paths must be UTF-8: {exc}") from exc
    paths = text.split("\0") if names_bytes else []
    if len(paths) != count:
        raise HintError(f"the plan should have {count} paths, not {len(paths)}")
    columns = []
    for number in range(_COLUMNS):
        begin = end + names_bytes + number * column_bytes
        column = array("q")
        column.frombytes(view[begin : begin + column_bytes])
        if sys.byteorder == "big":
            column.byteswap()
        columns.append(column)
    _check(paths, text, columns)
    path, start, length, advance, span = columns
    first = array("q", accumulate(advance))
    is_exact = header.get("exact")
    if not isinstance(is_exact, bool):
        raise HintError(f"exact is {is_exact!r}, must be true or false")
    window, step = _count(header, "window"), _count(header, "step")
    return Plan(window, step, paths, path, start, length, first, span, is_exact)


class Cursor(NamedTuple):
    """Where a job is: all steps before `step` are done. by_reads: unknown to it; the daemon follows its reads."""

    step: int
    by_reads: bool = False


def encode_cursor(step: int, *, by_reads: bool = False) -> bytes:
    """Return the message that a job has reached a step: all steps before it are done.

    by_reads: only a sign of life; the daemon knows the step from the job's reads.
    """
    return _line(
        {"fusecache": "cursor", "version": VERSION, "step": step} | ({"by_reads": True} if by_reads else {})
    )


def decode_cursor(message: bytes | bytearray | memoryview) -> Cursor:
    """Return a cursor. Raises HintError."""
    if len(message) > _LONGEST_HEADER_BYTES:
        raise HintError(f"the cursor is longer than {_LONGEST_HEADER_BYTES} bytes: {len(message)}")
    header = _header(bytes(message), "cursor")
    by_reads = header.get("by_reads", False)
    if not isinstance(by_reads, bool):
        raise HintError(f"by_reads is {by_reads!r}, must be true or false")
    return Cursor(_count(header, "step"), by_reads)


def _check(paths: Sequence[str], text: str, columns: Sequence["array[int]"]) -> None:
    """Raise HintError unless the parts form a valid Plan. text: the paths joined with zero bytes."""
    _check_paths(paths, text)
    path, start, length, advance, span = columns
    if len({len(column) for column in columns}) != 1:
        raise HintError("the columns differ in length")
    if not path:
        return
    if min(path) < 0 or max(path) >= len(paths):
        raise HintError(f"an extent refers to a path index outside the list of {len(paths)} paths")
    if min(start) < 0 or max(start) > TO_THE_END or min(length) < 1 or max(length) > TO_THE_END:
        raise HintError("an extent is empty, or has a start or length out of range")
    if min(advance) < 0 or min(span) < 0 or max(span) > _MOST_STEPS or sum(advance) > _MOST_STEPS:
        raise HintError("extents must be sorted by first step, and no last step may precede its first step")


def _check_paths(paths: Sequence[str], text: str) -> None:
    if paths:
        fenced = "\0/" + text.replace("\0", "/\0/") + "/"
        for forbidden in _FORBIDDEN:
            if (place := fenced.find(forbidden)) >= 0:
                raise HintError(
                    f"a path leaves the mount or is invalid: …{fenced[max(0, place - 40) : place + 20]!r}"
                )
    if sorted(paths) != list(paths):
        raise HintError("paths must be sorted")


def _header(line: bytes, kind: str) -> dict[str, Any]:
    if line.count(b"\n") != 1 or not line.endswith(b"\n"):
        raise HintError(f"a {kind} must begin with a line of JSON")
    try:
        header = json.loads(line)
    except (ValueError, RecursionError) as exc:
        raise HintError(f"the first line of a {kind} must be JSON: {exc}") from exc
    if not isinstance(header, dict) or header.get("fusecache") != kind:
        raise HintError(f"this message is not a {kind}")
    if header.get("version") != VERSION:
        raise HintError(f"version {header.get('version')!r} of a {kind} is not supported, only {VERSION}")
    return header


def _count(header: dict[str, Any], name: str) -> int:
    value = header.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MOST_STEPS:
        raise HintError(f"{name} is {value!r}, not a count")
    return value


def _line(header: dict[str, Any]) -> bytes:
    return json.dumps(header).encode() + b"\n"


def _little_endian(column: "array[int]") -> bytes:
    if sys.byteorder == "big":
        column.byteswap()
    return column.tobytes()
