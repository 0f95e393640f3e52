"""What a bucket may show while a trace is carried out, and after any crash: the promise that matters.

1. An object holds bytes that a file held under its name when it was closed. (A file that stays open for a minute may
   be published as it is: then bytes that it held at some moment.)
2. From the first checkpoint on that the bucket has whole, the one that a trainer would pick there is whole: all its
   files, in the same version. It picks the newest that looks complete by its library's rule.
3. Once everything is published, the bucket shows the tree. After a crash it shows what was closed before.

The model is a local directory, on which the trace was carried out as well.
"""

import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import trio

from tests.support.node import files_in, folders_in
from tests.traces.replay import Directory, replay
from tests.traces.trace import Call, Mark, Trace

Files = Mapping[str, bytes]
# A file held open is published as it is after 60 s at the earliest; a little less, for clocks.
SNAPSHOT_SECONDS = 55.0


class Broken(AssertionError):
    """The bucket shows, or lacks, what it must not."""


@dataclass(frozen=True)
class Checkpoint:
    """One that was complete on the node. shows: the names by which its library takes it for complete."""

    name: str
    files: Files
    shows: tuple[str, ...]


@dataclass(frozen=True)
class Moment:
    """After some calls. files: what each name is promised to hold; others: what it may hold after a crash besides.

    links: `-> target`, as `Bucket` shows them.
    """

    files: Files = field(default_factory=dict)
    others: Mapping[str, frozenset[bytes]] = field(default_factory=dict)
    folders: frozenset[str] = frozenset()


@dataclass
class Past:
    """All of a trace on a local directory. moments: before the first line, and after each.

    closed: name -> what it ever held at a close, be it of a forked child; shown: name -> what it ever held;
    open_lines: name -> the most lines between an open and the last close.
    """

    trace: Trace
    moments: list[Moment]
    checkpoints: list[Checkpoint]
    closed: dict[str, set[bytes]]
    shown: dict[str, set[bytes]]
    open_lines: Counter[str]

    def allowed(self, key: str, seconds_a_line: float) -> set[bytes]:
        """Return what an object may ever hold."""
        if self.open_lines[key] * seconds_a_line > SNAPSHOT_SECONDS:
            return self.shown.get(key, set())
        return self.closed.get(key, set())


class Learner:
    """Carries a trace out on a local directory, and notes what it promises."""

    def __init__(self, trace: Trace, root: Path) -> None:
        self._root = root
        self._directory = Directory(root)
        self._inode_closed: dict[int, bytes] = {}
        self._writers: Counter[int] = Counter()
        self._opened: dict[int, tuple[int, set[str]]] = {}
        self.past = Past(trace, [Moment()], [], {}, {}, Counter())

    async def learn(self) -> Past:
        """Carry the trace out."""
        await replay(self.past.trace, self._directory, after=self._note)
        return self.past

    async def _note(self, number: int) -> None:
        line = self.past.trace.lines[number]
        last = self.past.moments[-1]
        if isinstance(line, Mark):
            files = {path: last.files[path] for path in line.files}
            self.past.checkpoints.append(Checkpoint(line.name, files, line.shows))
            self.past.moments.append(last)
            return
        contents, inodes, folders = self._look()
        flushed = self._note_close(line, contents, inodes)
        files, others = {}, {}
        for path, data in contents.items():
            inode = inodes.get(path)
            if inode is None:  # a symlink
                files[path] = data
            elif inode in self._inode_closed:
                files[path] = self._inode_closed[inode]
            elif path in last.files:  # never closed, and renamed over another
                files[path] = last.files[path]
            if inode is not None and self._writers[inode]:
                more = last.others.get(path, frozenset()) | ({data} if inode == flushed else set())
                others[path] = more
        for path, more in others.items():  # the daemon may be killed right after a forked child's close
            self.past.closed.setdefault(path, set()).update(more)
        self._remember(number, contents, inodes, files)
        self.past.moments.append(Moment(files, others, folders))

    def _look(self) -> tuple[dict[str, bytes], dict[str, int], frozenset[str]]:
        contents, inodes, folders = {}, {}, set()
        for path in self._root.rglob("*"):
            name = path.relative_to(self._root).as_posix()
            if path.is_symlink():
                contents[name] = f"-> {path.readlink()}".encode()
            elif path.is_dir():
                folders.add(name)
            else:
                contents[name], inodes[name] = path.read_bytes(), path.stat().st_ino
        gone = (
            self._inode_closed.keys()
            - set(inodes.values())
            - {key for key in self._writers if self._writers[key]}
        )
        for inode in gone:  # its number may be another file's soon
            del self._inode_closed[inode]
        return contents, inodes, frozenset(folders)

    def _note_close(self, call: Call, contents: Files, inodes: Mapping[str, int]) -> int | None:
        """Return the file that a call has flushed, which other descriptors still have open."""
        if call.name == "open":
            self._writers[self._directory.inodes[call.arguments[0]]] += 1
        if call.name == "truncate":
            inode = inodes[call.arguments[0]]
        elif call.name in ("flush", "close"):
            inode = self._directory.inodes[call.arguments[0]]
            self._writers[inode] -= call.name == "close"
        else:
            return None
        if self._writers[inode]:
            return inode
        for path, found in inodes.items():
            if found == inode:
                self._inode_closed[inode] = contents[path]
        return None

    def _remember(self, number: int, contents: Files, inodes: Mapping[str, int], files: Files) -> None:
        past, line = self.past, self.past.trace.lines[number]
        for path, data in contents.items():
            past.shown.setdefault(path, set()).add(data)
        for path, data in files.items():
            past.closed.setdefault(path, set()).add(data)
        assert isinstance(line, Call)
        if line.name == "open":
            self._opened[line.arguments[0]] = (number, set())
        for handle, (since, names) in self._opened.items():
            names |= {path for path, inode in inodes.items() if inode == self._directory.inodes[handle]}
            for path in names:
                past.open_lines[path] = max(past.open_lines[path], number - since)
        if line.name == "close":
            del self._opened[line.arguments[0]]


def learn(trace: Trace) -> Past:
    """Return what a trace does to a local directory, and so promises."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        return trio.run(Learner(trace, Path(name)).learn)


class Oracle:
    """Looks at what a bucket shows after each of its requests, of one run of a trace. Raises Broken."""

    def __init__(self, past: Past, *, seconds_a_line: float = 0.0) -> None:
        self._past = past
        self._seconds_a_line = seconds_a_line
        self._has_begun = False
        order = {checkpoint.name: index for index, checkpoint in enumerate(past.checkpoints)}
        shows = {checkpoint.name: checkpoint.shows for checkpoint in past.checkpoints}
        self._newest_first = [(name, shows[name]) for name in sorted(order, key=lambda name: -order[name])]

    def copy(self) -> "Oracle":
        """Return one that has seen the same: for the lives after a crash."""
        other = Oracle(self._past, seconds_a_line=self._seconds_a_line)
        other._has_begun = self._has_begun
        return other

    def see(self, bucket: Files) -> None:
        """Look at one state of the bucket."""
        shown = files_in(dict(bucket))
        for key, data in shown.items():
            if data not in self._past.allowed(key, self._seconds_a_line):
                raise Broken(f"{key} shows {_short(data)}, which no file held under that name at a close")
        self._see_checkpoints(shown)

    def _see_checkpoints(self, shown: Files) -> None:
        wholes = {checkpoint.name for checkpoint in self._past.checkpoints if is_whole(checkpoint, shown)}
        self._has_begun = self._has_begun or bool(wholes)
        if not self._has_begun:
            return
        picked = next(
            (name for name, shows in self._newest_first if all(path in shown for path in shows)), None
        )
        if picked not in wholes:
            what = (
                f"{picked} looks complete and is not" if picked else "no checkpoint looks complete any more"
            )
            raise Broken(f"{what}: {sorted(shown)}")

    def see_end(self, bucket: Files, moments: list[Moment]) -> None:
        """Everything is published: it must be the tree of one of these moments, name by name."""
        shown = files_in(dict(bucket))
        names = shown.keys() | {name for moment in moments for name in moment.files}
        for name in sorted(names):
            allowed = {moment.files.get(name) for moment in moments}
            allowed |= {data for moment in moments for data in moment.others.get(name, ())}
            if shown.get(name) not in allowed:
                raise Broken(
                    f"at the end {name} shows {_short(shown.get(name))}, not {' or '.join(map(_short, allowed))}"
                )
        folders = folders_in(dict(bucket))
        must = frozenset.intersection(*(moment.folders for moment in moments))
        may = frozenset.union(*(moment.folders for moment in moments))
        if not must <= folders <= may:
            raise Broken(
                f"at the end the directories are {sorted(folders)}, not {sorted(must)} to {sorted(may)}"
            )


def is_whole(checkpoint: Checkpoint, shown: Files) -> bool:
    """Say whether all files are there, in this version."""
    return all(shown.get(path) == data for path, data in checkpoint.files.items())


def _short(data: bytes | None) -> str:
    return "nothing" if data is None else f"{len(data)} bytes {data[:16]!r}…{data[-16:]!r}"
