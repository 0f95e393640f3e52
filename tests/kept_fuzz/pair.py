"""One history on two sides: a directory of the mount, and a plain one, which is the model of what must be seen.

Everything that a step returns is compared at once, errors too. At the end both trees are, and then the bucket.
"""

import errno
import os
import re
import stat
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.kept_fuzz.steps import Step

PUBLISHED_SECONDS = 1.0
_OF_DESCRIPTORS = frozenset({"close", "write", "append", "read", "fstat", "fsync", "ftruncate"})
_FLAGS = {
    "r": os.O_RDONLY,
    "r+": os.O_RDWR,
    "r+t": os.O_RDWR | os.O_TRUNC,
    "w": os.O_WRONLY | os.O_CREAT | os.O_TRUNC,
    "w+": os.O_RDWR | os.O_CREAT | os.O_TRUNC,
    "a": os.O_WRONLY | os.O_CREAT | os.O_APPEND,
    "a+": os.O_RDWR | os.O_CREAT | os.O_APPEND,
    "x": os.O_RDWR | os.O_CREAT | os.O_EXCL,
}
_TOKEN = re.compile(rb"(w\d+)/(\w+)\|")
# Of a write that is shorter than that.
_BEGINNING = re.compile(rb"(w\d+)(?:/[a-vx-z0-9]*)?")
_MOST_PIECES = 12

CONFLICT = ".conflict-"
# The gravest first.
_KINDS = ("listed wrongly", "wrong bytes", "lost", "came back")

# What a name is: bytes of a file, or words for anything else.
Tree = dict[str, bytes | str]


@dataclass(frozen=True)
class Finding:
    """What differed. kind: where; text: what was there, and what should be."""

    kind: str
    text: str


def content(tag: str, name: str, size: int) -> bytes:
    """Return the bytes of one write: each history's and each write's are its own."""
    token = f"{tag}/{name}|".encode()
    return (token * (size // len(token) + 1))[:size]


def origin_of(data: bytes) -> str | None:
    """Return the name of the history that wrote these bytes."""
    found = _TOKEN.search(data)
    return None if found is None else found[2].decode()


def describe(value: object) -> str:
    """Return bytes by the tags of their writes, anything else as it is."""
    if not isinstance(value, bytes):
        return str(value)
    if not value:
        return "empty"
    words: list[str] = []
    at = 0
    while at < len(value) and len(words) < _MOST_PIECES:
        word, length = _piece(value, at)
        if words and word.startswith("'") and words[-1].startswith("'"):
            words[-1] = words[-1][:-1] + word[1:]
        else:
            words.append(word)
        at += length
    return f"{len(value)} bytes {' '.join(words)}{' …' if at < len(value) else ''}"


def _piece(value: bytes, at: int) -> tuple[str, int]:
    """Return what begins at a place, in words, and how many bytes it has."""
    found = _TOKEN.match(value, at) or _BEGINNING.match(value, at)
    if found is None:
        zeros = len(value) - at - len(value[at:].lstrip(b"\0"))
        return (f"zeros*{zeros}", zeros) if zeros else (f"'{chr(value[at])}'", 1)
    token, length = found[0], 0
    while value.startswith(token, at + length):
        length += len(token)
    following = _BEGINNING.match(value, at + length)
    if found.re is _TOKEN and (following is None or following[1] == found[1]):
        # The write ends within its token.
        begin = at + length
        while value[begin : begin + 1] == token[begin - at - length : begin - at - length + 1] != b"":
            begin += 1
        length = begin - at
    return f"{found[1].decode()}*{length}", length


class Side:
    """One of the two directories, and what a history has open there."""

    def __init__(self, root: Path, name: str) -> None:
        self.root = root
        self.name = name
        self.open: dict[int, int] = {}

    def do(self, step: Step) -> object:
        """Carry out a step; return what a program would see."""
        try:
            done = getattr(self, f"_{step[0]}")(*step[1:])
        except OSError as exc:
            return f"error {errno.errorcode.get(exc.errno or 0, exc.errno)}"
        return "ok" if done is None else done

    def close_all(self) -> None:
        """Let go what is open, whatever that says."""
        for fd in self.open.values():
            try:
                os.close(fd)
            except OSError:
                continue
        self.open.clear()

    def tree(self) -> Tree:
        """Return everything below the directory."""
        found: Tree = {}
        waiting = [""]
        while waiting:
            folder = waiting.pop()
            try:
                listed = Counter(os.listdir(self.root / folder))
            except OSError as exc:
                found[folder or "."] = f"directory, listing fails: {_code(exc)}"
                continue
            for name, count in listed.items():
                path = f"{folder}/{name}" if folder else name
                found[path] = f"listed {count} times" if count > 1 else self._what(path)
                if found[path] == "directory":
                    waiting.append(path)
        return found

    def _what(self, path: str) -> bytes | str:
        full = self.root / path
        try:
            mode = os.lstat(full).st_mode
            if stat.S_ISLNK(mode):
                return f"symlink to {os.readlink(full)}"
            return "directory" if stat.S_ISDIR(mode) else full.read_bytes()
        except OSError as exc:
            return f"listed, but {_code(exc)}"

    # ---- steps

    def _open(self, slot: int, path: str, mode: str) -> None:
        self.open[slot] = os.open(self.root / path, _FLAGS[mode] | os.O_CLOEXEC, 0o666)

    def _dup(self, slot: int, other: int) -> None:
        self.open[other] = os.dup(self.open[slot])

    def _close(self, slot: int) -> None:
        os.close(self.open.pop(slot))

    def _write(self, slot: int, offset: int, tag: str, size: int) -> int:
        return os.pwrite(self.open[slot], content(tag, self.name, size), offset)

    def _append(self, slot: int, tag: str, size: int) -> int:
        return os.write(self.open[slot], content(tag, self.name, size))

    def _read(self, slot: int, offset: int, size: int) -> bytes:
        return os.pread(self.open[slot], size, offset)

    def _fstat(self, slot: int) -> str:
        return f"{os.fstat(self.open[slot]).st_size} bytes"

    def _fsync(self, slot: int) -> None:
        os.fsync(self.open[slot])

    def _ftruncate(self, slot: int, size: int) -> None:
        os.ftruncate(self.open[slot], size)

    def _truncate(self, path: str, size: int) -> None:
        os.truncate(self.root / path, size)

    def _save(self, path: str, tag: str, size: int) -> None:
        with open(self.root / path, "wb", buffering=0) as file:
            file.write(content(tag, self.name, size))

    def _rename(self, source: str, target: str) -> None:
        os.rename(self.root / source, self.root / target)

    def _unlink(self, path: str) -> None:
        os.unlink(self.root / path)

    def _mkdir(self, path: str) -> None:
        os.mkdir(self.root / path)

    def _rmdir(self, path: str) -> None:
        os.rmdir(self.root / path)

    def _symlink(self, target: str, path: str) -> None:
        os.symlink(target, self.root / path)

    def _cat(self, path: str) -> bytes:
        return (self.root / path).read_bytes()

    def _stat(self, path: str) -> str:
        status = os.lstat(self.root / path)
        if stat.S_ISLNK(status.st_mode):
            return f"symlink to {os.readlink(self.root / path)}"
        return "directory" if stat.S_ISDIR(status.st_mode) else f"file of {status.st_size} bytes"

    def _ls(self, path: str) -> str:
        return " ".join(sorted(os.listdir(self.root / path)))


class Pair:
    """A history's two sides. bucket: what the bucket shows of one path now, None if nothing."""

    def __init__(self, mounted: Path, model: Path, name: str, bucket: Callable[[str], bytes | None]) -> None:
        self.mounted = Side(mounted, name)
        self.model = Side(model, name)
        self._bucket = bucket

    def carry_out(self, step: Step) -> tuple[str, Finding | None]:
        """Carry out one step on both sides; return what the mount answered, and what is wrong with that."""
        kind = step[0]
        if kind == "pause":
            time.sleep(float(step[1]))
            return "", None
        if kind == "published":
            return self._await_published(str(step[1])), None
        if not self._can_be_done(step):
            return "skipped", None
        seen, wanted = self.mounted.do(step), self.model.do(step)
        if seen == wanted:
            return "" if seen == "ok" or isinstance(seen, int) else describe(seen), None
        if seen == "error ESTALE" and kind in _OF_DESCRIPTORS and self._lost_its_name(step):
            self._close_all_of(int(step[1]))
            return "error ESTALE, and is closed: it lost its name", None
        return describe(seen), Finding(
            _kind_of_step(step, seen, wanted), f"{describe(seen)}; want {describe(wanted)}"
        )

    def compare_trees(self) -> Finding | None:
        """Compare the mount with the model."""
        return compare("mount", self.mounted.tree(), self.model.tree())

    def _can_be_done(self, step: Step) -> bool:
        used = self.model.open
        match step[0]:
            case "open":
                return step[1] not in used
            case "dup":
                return step[1] in used and step[2] not in used
        return step[0] not in _OF_DESCRIPTORS or step[1] in used

    def _lost_its_name(self, step: Step) -> bool:
        """Return whether a descriptor is of a removed file: its published bytes may go when its name has newer ones."""
        fd = self.model.open.get(int(step[1]))
        return fd is not None and os.fstat(fd).st_nlink == 0

    def _close_all_of(self, slot: int) -> None:
        number = os.fstat(self.model.open[slot]).st_ino
        for each in [each for each, fd in self.model.open.items() if os.fstat(fd).st_ino == number]:
            self.mounted.do(("close", each))
            self.model.do(("close", each))

    def _await_published(self, path: str) -> str:
        deadline = time.monotonic() + PUBLISHED_SECONDS
        wanted = self.model.do(("cat", path))
        while isinstance(wanted, bytes) and time.monotonic() < deadline:
            if self._bucket(path) == wanted:
                return "yes"
            time.sleep(0.03)
        return "no"


def compare(where: str, seen: Tree, wanted: Tree) -> Finding | None:
    """Return how a tree differs from what it should be, name by name."""
    paths = [path for path in sorted({*seen, *wanted}) if seen.get(path) != wanted.get(path)]
    lines = [
        f"{where} {path}: {describe(seen.get(path, 'not there'))}; want {describe(wanted.get(path, 'not there'))}"
        for path in paths
    ]
    if not lines:
        return None
    if any(CONFLICT in path for path in paths):
        return Finding("conflict", "\n".join(lines))
    kinds = {_kind_of(seen.get(path), wanted.get(path)) for path in paths}
    return Finding(next(kind for kind in _KINDS if kind in kinds), "\n".join(lines))


def _kind_of(seen: bytes | str | None, wanted: bytes | str | None) -> str:
    if isinstance(seen, str) and seen.startswith("listed"):
        return _KINDS[0]
    if seen is not None and wanted is not None:
        return _KINDS[1]
    return _KINDS[2] if seen is None else _KINDS[3]


def _kind_of_step(step: Step, seen: object, wanted: object) -> str:
    if _is_error(seen) and not _is_error(wanted):
        return f"error of {step[0]}" if seen != "error ENOENT" else _KINDS[2]
    if _is_error(wanted):
        return _KINDS[3]
    if step[0] == "ls":
        names, wanted_names = str(seen).split(), str(wanted).split()
        if len(names) > len(set(names)):
            return _KINDS[0]
        return _KINDS[2] if set(wanted_names) - set(names) else _KINDS[3]
    return f"descriptor: {_KINDS[1]}" if step[0] in ("read", "fstat", "write", "append") else _KINDS[1]


def _is_error(value: object) -> bool:
    return isinstance(value, str) and value.startswith("error")


def _code(exc: OSError) -> str:
    return str(errno.errorcode.get(exc.errno or 0, exc.errno))
