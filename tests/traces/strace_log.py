"""Reads what `strace -ff -ttt -y` wrote of a program: the calls that change files below one directory.

Descriptors are followed through dup, fork and exec, and file positions through lseek, read and write, so that a trace
names open files and offsets. Calls that failed changed nothing and are left out.
"""

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.traces.trace import MARK, Call

# What strace watches. Those of the last two lines change no file: they move descriptors, positions and processes.
WATCHED = (
    "open,openat,creat,close,close_range,write,pwrite64,writev,pwritev,pwritev2,sendfile,copy_file_range,"
    "truncate,ftruncate,fallocate,fsync,fdatasync,rename,renameat,renameat2,symlink,symlinkat,link,linkat,"
    "unlink,unlinkat,mkdir,mkdirat,rmdir,chmod,fchmod,fchmodat,utime,utimes,utimensat,futimesat,mmap,"
    "read,readv,lseek,dup,dup2,dup3,fcntl,chdir,fchdir,"
    "fork,vfork,clone,clone3,execve,stat,newfstatat,statx"
)
_LINE = re.compile(r"(\d+\.\d+) (?:(\w+)\((.*)\)\s+= (-?\w+)|\+\+\+ )")
_ARGUMENT = re.compile(r'\s*((?:"(?:[^"\\]|\\.)*"|\[[^\]]*\]|\{[^}]*\}|<[^>]*>|[^,"\[{<])+)')
_FLAGS = (
    ("O_CREAT", "c"),
    ("O_EXCL", "x"),
    ("O_TRUNC", "t"),
    ("O_APPEND", "a"),
    ("O_RDWR", "r"),
    ("SYNC", "s"),
)


@dataclass(eq=False)
class _OpenFile:
    """An open file description. number: its own; users: descriptors that lead to it."""

    number: int
    appends: bool
    position: int = 0
    users: int = 0


@dataclass
class _Process:
    """number: its own. files: descriptor -> open file, and whether exec closes it."""

    number: int
    folder: str
    files: dict[int, tuple[_OpenFile, bool]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Event:
    """One call of one thread. name: "": the thread ended."""

    seconds: float
    thread: int
    name: str
    arguments: list[str]
    result: int


def read_calls(logs: Path, root: Path) -> list[Call]:
    """Return the calls of all processes in the order of their begin; logs: the folder with strace's files."""
    reader = _Reader(os.fspath(root))
    for event in sorted(_events(logs), key=lambda event: event.seconds):
        reader.take(event)
    return reader.calls


def _events(logs: Path) -> Iterator[_Event]:
    for path in logs.iterdir():
        thread = int(path.suffix[1:])
        for line in path.read_text(errors="surrogateescape").splitlines():
            if (found := _LINE.match(line)) is None:
                continue  # a signal, or a call that never returned
            seconds, name, arguments, result = found.groups()
            if name and not result.lstrip("-").isdigit() and not result.startswith("0x"):
                continue
            yield _Event(
                float(seconds), thread, name or "",
                [each.strip() for each in _ARGUMENT.findall(arguments or "")], int(result or "0", 0),
            )  # fmt: skip


class _Reader:
    """Follows processes and descriptors, and keeps the calls that matter."""

    def __init__(self, root: str) -> None:
        self.calls: list[Call] = []
        self._root = root
        self._begin = 0.0
        self._opened = 0
        self._processes: dict[int, _Process] = {}  # by thread
        self._numbers: dict[int, int] = {}  # of those processes that have a call in the trace
        self._leaders: set[int] = set()

    def take(self, event: _Event) -> None:
        process = self._processes.get(event.thread)
        if process is None:
            process = self._processes[event.thread] = _Process(event.thread, os.getcwd())
            self._leaders.add(event.thread)
        if not event.name:
            if event.thread in self._leaders:
                self._close_all(event, process, lambda _cloexec: True)
            return
        if event.result >= 0 or event.name in ("stat", "newfstatat", "statx"):
            handler: Callable[[_Event, _Process], None] | None = getattr(self, f"_on_{event.name}", None)
            if handler is None:
                raise ValueError(f"{event.name} is watched, and nothing reads it")
            handler(event, process)

    # ---- descriptors

    def _open(self, event: _Event, process: _Process, path: str | None, flags: str) -> None:
        writes = any(word in flags for word in ("O_WRONLY", "O_RDWR"))
        if path is None or not writes or "O_TMPFILE" in flags:  # a file without a name, which a mount refuses
            return
        self._opened += 1
        letters = "".join(letter for word, letter in _FLAGS if word in flags)
        file = _OpenFile(self._opened, "a" in letters, users=1)
        process.files[event.result] = (file, "O_CLOEXEC" in flags)
        self._add(event, process, "open", file.number, path, letters)

    def _on_open(self, event: _Event, process: _Process) -> None:
        self._open(event, process, self._path(process, event.arguments[0]), event.arguments[1])

    def _on_openat(self, event: _Event, process: _Process) -> None:
        path = self._path(process, event.arguments[1], event.arguments[0])
        self._open(event, process, path, event.arguments[2])

    def _on_creat(self, event: _Event, process: _Process) -> None:
        path = self._path(process, event.arguments[0])
        self._open(event, process, path, "O_WRONLY|O_CREAT|O_TRUNC")

    def _close(self, event: _Event, process: _Process, descriptor: int) -> None:
        found = process.files.pop(descriptor, None)
        if found is not None:
            found[0].users -= 1
            self._add(event, process, "close" if found[0].users == 0 else "flush", found[0].number)

    def _close_all(self, event: _Event, process: _Process, which: Callable[[bool], bool]) -> None:
        for descriptor in [number for number, (_, cloexec) in process.files.items() if which(cloexec)]:
            self._close(event, process, descriptor)

    def _on_close(self, event: _Event, process: _Process) -> None:
        self._close(event, process, _number(event.arguments[0]))

    def _on_close_range(self, event: _Event, process: _Process) -> None:
        first, last = (_number(word) for word in event.arguments[:2])
        for descriptor in [number for number in process.files if first <= number <= last]:
            self._close(event, process, descriptor)

    def _on_dup(self, event: _Event, process: _Process) -> None:
        source = process.files.get(_number(event.arguments[0]))
        if event.name != "dup" and event.result != _number(event.arguments[0]):
            self._close(event, process, event.result)
        if source is not None:
            source[0].users += 1
            process.files[event.result] = (source[0], "CLOEXEC" in " ".join(event.arguments[1:]))

    _on_dup2 = _on_dup3 = _on_dup

    def _on_fcntl(self, event: _Event, process: _Process) -> None:
        if "F_DUPFD" in event.arguments[1]:
            self._on_dup(replace(event, name="dup"), process)

    # ---- processes

    def _on_fork(self, event: _Event, process: _Process) -> None:
        if "CLONE_THREAD" in " ".join(event.arguments):
            self._processes[event.result] = process
            return
        child = _Process(event.result, process.folder, dict(process.files))
        for file, _ in child.files.values():
            file.users += 1
        self._processes[event.result] = child
        self._leaders.add(event.result)

    _on_vfork = _on_clone = _on_clone3 = _on_fork

    def _on_execve(self, event: _Event, process: _Process) -> None:
        self._close_all(event, process, lambda cloexec: cloexec)

    def _on_chdir(self, event: _Event, process: _Process) -> None:
        process.folder = os.path.join(process.folder, _text(event.arguments[0]))

    def _on_fchdir(self, event: _Event, process: _Process) -> None:
        process.folder = _path_of(event.arguments[0])

    # ---- content

    def _written(self, event: _Event, process: _Process, descriptor: str, offset: str | None = None) -> None:
        found = process.files.get(_number(descriptor))
        if found is None or event.result == 0:
            return
        file = found[0]
        start = None if file.appends else file.position if offset is None else _number(offset)
        if offset is None:
            file.position += event.result
        self._add(event, process, "write", file.number, start, event.result)

    def _on_write(self, event: _Event, process: _Process) -> None:
        self._written(event, process, event.arguments[0])

    def _on_pwrite64(self, event: _Event, process: _Process) -> None:
        self._written(event, process, event.arguments[0], event.arguments[3])

    _on_writev = _on_sendfile = _on_write
    _on_pwritev = _on_pwritev2 = _on_pwrite64

    def _on_copy_file_range(self, event: _Event, process: _Process) -> None:
        offset = event.arguments[3]
        self._written(event, process, event.arguments[2], None if offset == "NULL" else offset.strip("[]"))

    def _on_read(self, event: _Event, process: _Process) -> None:
        if (found := process.files.get(_number(event.arguments[0]))) is not None:
            found[0].position += event.result

    _on_readv = _on_read

    def _on_lseek(self, event: _Event, process: _Process) -> None:
        if (found := process.files.get(_number(event.arguments[0]))) is not None:
            found[0].position = event.result

    def _on_ftruncate(self, event: _Event, process: _Process) -> None:
        if (found := process.files.get(_number(event.arguments[0]))) is not None:
            self._add(event, process, "ftruncate", found[0].number, _number(event.arguments[1]))

    def _on_truncate(self, event: _Event, process: _Process) -> None:
        self._add_named(event, process, "truncate", event.arguments[0], more=(_number(event.arguments[1]),))

    def _on_fallocate(self, event: _Event, process: _Process) -> None:
        if (found := process.files.get(_number(event.arguments[0]))) is not None:
            if event.arguments[1] != "0":
                raise ValueError(f"fallocate with {event.arguments[1]}: no trace can say that")
            stop = _number(event.arguments[2]) + _number(event.arguments[3])
            self._add(event, process, "allocate", found[0].number, stop)

    def _on_fsync(self, event: _Event, process: _Process) -> None:
        found = process.files.get(_number(event.arguments[0]))
        path = self._inside(_path_of(event.arguments[0]))
        if found is not None:
            self._add(event, process, "fsync", found[0].number)
        elif path is not None:
            self._add(event, process, "fsync_name", path)

    _on_fdatasync = _on_fsync

    def _on_mmap(self, event: _Event, process: _Process) -> None:
        found = process.files.get(_number(event.arguments[4]))
        if found is not None and "MAP_SHARED" in event.arguments[3] and "PROT_WRITE" in event.arguments[2]:
            raise ValueError("a file is written through a mapping: no trace can say that")

    # ---- names

    def _on_rename(self, event: _Event, process: _Process) -> None:
        at = event.name != "rename"
        old, new = event.arguments[1:4:2] if at else event.arguments[:2]
        folders = event.arguments[0:4:2] if at else (None, None)
        paths = self._path(process, old, folders[0]), self._path(process, new, folders[1])
        if None in paths:
            if any(paths):
                raise ValueError(f"renamed into or out of the directory: {old} {new}")
            return
        self._add(event, process, "rename", *paths)

    _on_renameat = _on_renameat2 = _on_rename

    def _on_symlink(self, event: _Event, process: _Process) -> None:
        target = _text(event.arguments[0])
        if target.startswith("/"):  # a mount refuses it
            return
        self._add_named(event, process, "symlink", event.arguments[-1], event.arguments[-2], more=(target,))

    _on_symlinkat = _on_symlink

    def _on_link(self, event: _Event, process: _Process) -> None:
        if self._path(process, event.arguments[-2 if event.name == "link" else 1]) is not None:
            raise ValueError("a hard link was made, which a mount refuses")

    _on_linkat = _on_link

    def _on_unlink(self, event: _Event, process: _Process) -> None:
        self._add_named(event, process, "unlink", event.arguments[0])

    def _on_unlinkat(self, event: _Event, process: _Process) -> None:
        name = "rmdir" if "AT_REMOVEDIR" in event.arguments[2] else "unlink"
        self._add_named(event, process, name, event.arguments[1], event.arguments[0])

    def _on_mkdir(self, event: _Event, process: _Process) -> None:
        self._add_named(event, process, "mkdir", event.arguments[0])

    def _on_mkdirat(self, event: _Event, process: _Process) -> None:
        self._add_named(event, process, "mkdir", event.arguments[1], event.arguments[0])

    def _on_rmdir(self, event: _Event, process: _Process) -> None:
        self._add_named(event, process, "rmdir", event.arguments[0])

    # ---- attributes, and marks

    def _on_chmod(self, event: _Event, process: _Process) -> None:
        self._add_named(event, process, "chmod", event.arguments[0], more=(_mode(event.arguments[1]),))

    def _on_fchmodat(self, event: _Event, process: _Process) -> None:
        mode = _mode(event.arguments[2])
        self._add_named(event, process, "chmod", event.arguments[1], event.arguments[0], more=(mode,))

    def _on_fchmod(self, event: _Event, process: _Process) -> None:
        if (path := self._inside(_path_of(event.arguments[0]))) is not None:
            self._add(event, process, "chmod", path, _mode(event.arguments[1]))

    def _on_utimensat(self, event: _Event, process: _Process) -> None:
        if event.arguments[1] != "NULL":
            self._add_named(event, process, "utimes", event.arguments[1], event.arguments[0])
        elif (path := self._inside(_path_of(event.arguments[0]))) is not None:
            self._add(event, process, "utimes", path)

    def _on_utime(self, event: _Event, process: _Process) -> None:
        self._add_named(event, process, "utimes", event.arguments[0])

    _on_utimes = _on_utime

    def _on_stat(self, event: _Event, process: _Process) -> None:
        path = _text(event.arguments[0 if event.name == "stat" else 1])
        if path.startswith(MARK):
            self._add(event, process, "mark", path.removeprefix(MARK))

    _on_newfstatat = _on_statx = _on_stat

    # ---- inside

    def _add_named(
        self, event: _Event, process: _Process, name: str, path: str, at: str | None = None, more: Any = ()
    ) -> None:
        at = at if at is not None and at.startswith(("AT_FDCWD", *"0123456789")) else None
        if (found := self._path(process, path, at)) is not None:
            self._add(event, process, name, found, *more)

    def _add(self, event: _Event, process: _Process, name: str, *arguments: Any) -> None:
        self._begin = self._begin or event.seconds
        number = self._numbers.setdefault(process.number, len(self._numbers))
        call = Call(round(1000 * (event.seconds - self._begin)), number, name, arguments)
        if name == "write" and self.calls and (merged := _merged(self.calls, call)) is not None:
            index, longer = merged
            self.calls[index] = longer
            return
        self.calls.append(call)

    def _path(self, process: _Process, word: str, at: str | None = None) -> str | None:
        """Return where a path lies below the directory; None: elsewhere."""
        folder = process.folder if at is None or at.startswith("AT_FDCWD") else _path_of(at)
        return self._inside(os.path.normpath(os.path.join(process.folder, folder, _text(word))))

    def _inside(self, path: str) -> str | None:
        return path[len(self._root) + 1 :] if path.startswith(f"{self._root}/") else None


def _merged(calls: list[Call], write: Call) -> tuple[int, Call] | None:
    """Return an earlier write that this one goes on, and both as one; nothing but writes may lie between."""
    for index in range(len(calls) - 1, -1, -1):
        last = calls[index]
        if last.name != "write":
            return None
        number, offset, size = last.arguments
        if number == write.arguments[0] and last.process == write.process:
            if write.arguments[1] != (None if offset is None else offset + size):
                return None
            return index, replace(last, arguments=(number, offset, size + write.arguments[2]))
    return None


def _number(word: str) -> int:
    """Return a descriptor or a number; -1 for names, such as AT_FDCWD."""
    found = re.match(r"~?\d+", word)
    return int(found[0]) if found and word[0] != "~" else 2**32 if word.startswith("~") else -1


def _mode(word: str) -> int:
    """Return the permissions of a chmod, without a file's type."""
    return int(re.sub(r"S_IF\w+\|", "", word), 8) & 0o7777


def _path_of(word: str) -> str:
    """Return the path that strace shows behind a descriptor; "": none."""
    found = re.search(r"<(/[^>]*)>", word)
    return found[1].removesuffix(" (deleted)") if found else ""


def _text(word: str) -> str:
    """Return a string as the program gave it."""
    inner = word.strip().removesuffix("...")
    if not inner.startswith('"'):
        return ""
    return (
        inner[1:-1]
        .encode("latin-1")
        .decode("unicode_escape")
        .encode("latin-1")
        .decode(errors="surrogateescape")
    )
