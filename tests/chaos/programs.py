"""The programs of the load. `python -m tests.chaos.programs KIND ROOT NAME SEED`, with the mount as ROOT.

Each line on standard output is JSON. `{"will": {path: content or null}, "call": name}` comes before each call, then
`{"did": bytes}` or `{"failed": errno's name}`. `{"wrong": text}` names bytes that differ. A program ends when its
standard input closes, between two calls.

After a failed call a program leaves the files of that step alone, as their state is uncertain, and begins another.
"""

import errno
import json
import os
import posixpath
import random
import select
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from fusecache.model.errors import FusecacheError
from fusecache.mount.control_client import ask, find_mount
from loader import ElasticBatchSampler, Hints, MDSDataset, World
from loader.errors import LoaderError
from tests.chaos.contents import Content, bytes_of
from tests.s3server import synthetic_bytes

Result = TypeVar("Result")
KIB, MIB = 1 << 10, 1 << 20
CHUNK_BYTES = MIB
SHARD_BYTES = (20 * KIB, 12 * MIB)
KEPT_CHECKPOINTS = 2
FILES = [48 * MIB + 12_345] * 4 + [150_001] * 60  # of the read-only part, `data/f<number>`
READ_BYTES = (4096, 65_536, MIB)
RUNS = "runs"
DECOMPOSED = "e\u0301"  # as a Mac spells an accented letter
HELD_FILES = 220  # with what the daemon has open itself, about 60, more than 256
SAMPLES, BATCH = 20_000, 200  # of the loader's dataset
MOVED_BYTES = 200 * KIB  # at most in one write to a file whose name moves
LARGEST_MOVED = 64 * MIB
# Shorter and longer than the daemon waits before an upload, so that names move before, during and after it.
MOVE_PAUSES = (0.0, 0.0, 0.2, 0.6, 1.5)
PAUSE_AFTER_FAILURE_SECONDS = 0.5
STATUS_SECONDS = 30.0


class Failed(Exception):
    """A call failed; that is reported already."""


class Stopped(Exception):
    """Standard input is closed."""


class Program:
    """What all kinds share. root: the mount; name: the program's own directory there."""

    pause_seconds = 0.02

    def __init__(self, root: Path, name: str, seed: int) -> None:
        self.root, self.name, self.rng = root, name, random.Random(seed)

    def run(self) -> None:
        """Go on until standard input closes."""
        try:
            while True:
                try:
                    self.step()
                except Failed:
                    self.rest(PAUSE_AFTER_FAILURE_SECONDS)
        except Stopped:
            pass

    def step(self) -> None:
        """Do one unit of work, of many calls."""
        raise NotImplementedError

    def call(
        self,
        name: str,
        action: Callable[[], Result],
        changes: dict[str, Content | None] | None = None,
        on_failure: dict[str, Content | None] | None = None,
        file: "OpenFile | None" = None,
    ) -> Result:
        """Carry out one call, announced before and reported after. Raises Failed.

        on_failure: what else there may be if the call does not return 0. file: whose descriptor it uses: a fault since
        that was opened explains an error, and a file without a name may be gone from the bucket and the cache.
        """
        self.rest(self.pause_seconds)
        since = time.monotonic() if file is None else file.opened
        allowed = ["ESTALE"] if file is not None and not file.path else []
        say(
            {
                "will": changes or {},
                "call": name,
                "else": on_failure or {},
                "since": since,
                "allowed": allowed,
            }
        )
        try:
            result = action()
        except OSError as exc:
            path = exc.filename or next(iter(changes or {}), self.name)  # a descriptor has no name
            say({"failed": errno.errorcode.get(exc.errno or 0, str(exc)), "path": str(path)})
            raise Failed from exc
        say({"did": len(result) if isinstance(result, bytes) else 0})
        return result

    def mkdir(self, folder: str) -> None:
        """Make a directory."""
        self.call("mkdir", (self.root / folder).mkdir)

    def read_back(self, files: dict[str, Content]) -> None:
        """Read one of these files by its name."""
        path = self.rng.choice(sorted(files))
        if self.call("read", (self.root / path).read_bytes) != bytes_of(files[path]):
            say({"wrong": f"{path}: other bytes than were written"})

    def rest(self, seconds: float) -> None:
        """Pause. Raises Stopped."""
        if select.select([sys.stdin], [], [], seconds)[0]:
            raise Stopped


class Trainer(Program):
    """Checkpoints with their marker last and rotation, logs, and directories that are renamed."""

    def __init__(self, root: Path, name: str, seed: int) -> None:
        # Below a directory that is in the bucket alone: without a mount, nothing can be written beside it.
        super().__init__(root, f"{RUNS}/{name}-{DECOMPOSED}", seed)
        self._count = 0
        self._is_made = False
        self._checkpoints: list[tuple[str, dict[str, Content]]] = []

    def step(self) -> None:
        """Save, append or rename; then read something back."""
        if not self._is_made:
            self.call("mkdir", lambda: (self.root / self.name).mkdir())
            self._is_made = True
        self._count += 1
        kinds = [self._checkpoint, self._log, self._renamed_directory, self._replace_open]
        self.rng.choices(kinds, [6, 2, 2, 1])[0](f"{self._count:05}")

    # ---- units

    def _checkpoint(self, number: str) -> None:
        folder = f"{self.name}/step-{number}"
        self.mkdir(folder)
        files: dict[str, Content] = {}
        for index in range(self.rng.randint(1, 4)):
            path, content = f"{folder}/shard-{index}", self._content()
            if self.rng.random() < 0.3:
                self._write_beside(path, content)
            else:
                self._write(path, content, is_synced=self.rng.random() < 0.3)
            files[path] = content
        marker: Content = [json.dumps(files)]
        self._write(f"{folder}/.metadata", marker)
        self._write_beside(f"{self.name}/latest", [f"step-{number}"])
        self._checkpoints.append((folder, {f"{folder}/.metadata": marker, **files}))
        self.read_back(self.rng.choice(self._checkpoints)[1])
        if len(self._checkpoints) > KEPT_CHECKPOINTS:
            old, names = self._checkpoints.pop(0)
            for path in names:  # the marker is the first
                self.call("unlink", (self.root / path).unlink, {path: None})
            self.call("rmdir", (self.root / old).rmdir)

    def _log(self, number: str) -> None:
        path = f"{self.name}/log-{number}"
        content: Content = []
        for _ in range(self.rng.randint(2, 6)):
            piece: Content = [[self.rng.getrandbits(30), self.rng.randint(1, 20_000)]]
            self._write(path, piece, content)
            content = content + piece
        self.read_back({path: content})

    def _renamed_directory(self, number: str) -> None:
        folder, moved = f"{self.name}/work-{number}", f"{self.name}/final-{number}"
        self.mkdir(folder)
        files = {f"file-{index}": self._content(MIB) for index in range(self.rng.randint(1, 5))}
        for name, content in files.items():
            self._write(f"{folder}/{name}", content)
        self.call(
            "rename",
            lambda: (self.root / folder).rename(self.root / moved),
            {**{f"{folder}/{name}": None for name in files}, **{f"{moved}/{n}": c for n, c in files.items()}},
        )
        self.read_back({f"{moved}/{name}": content for name, content in files.items()})

    def _replace_open(self, number: str) -> None:
        """Rename a file while it is open, as safetensors does."""
        path, content = f"{self.name}/model-{number}", self._content()
        beside = f"{self.name}/.tmpmodel-{number}"

        def save() -> None:
            with (self.root / beside).open("wb", buffering=0) as file:
                _write_all(file.fileno(), bytes_of(content))
                (self.root / beside).rename(self.root / path)

        self.call("write", save, {path: content, beside: None}, {beside: content})
        self.read_back({path: content})

    # ---- calls

    def _write(
        self, path: str, content: Content, before: Content | None = None, *, is_synced: bool = False
    ) -> None:
        """Write a file whole; with `before`, append to what is there."""

        def save() -> None:
            with (self.root / path).open("ab" if before else "wb", buffering=0) as file:
                _write_all(file.fileno(), bytes_of(content))
                if is_synced:
                    os.fsync(file.fileno())

        self.call("write", save, {path: (before or []) + content})

    def _write_beside(self, path: str, content: Content) -> None:
        beside = f"{path}.tmp"
        self._write(beside, content, is_synced=True)
        self.call(
            "rename",
            lambda: (self.root / beside).rename(self.root / path),
            {beside: None, path: content},
        )

    def _content(self, largest: int = SHARD_BYTES[1]) -> Content:
        size = int(SHARD_BYTES[0] * (largest / SHARD_BYTES[0]) ** self.rng.random())
        return [[self.rng.getrandbits(30), size]]


class Holder(Program):
    """Has many files open at once, more than a daemon with few descriptors can."""

    def __init__(self, root: Path, name: str, seed: int) -> None:
        super().__init__(root, f"{RUNS}/{name}-{DECOMPOSED}", seed)
        self._count = 0

    def step(self) -> None:
        """Create files until one is refused, then write and close each, and remove them."""
        self._count += 1
        folder = f"{self.name}-{self._count:05}"
        self.call("mkdir", (self.root / folder).mkdir)
        files: dict[str, int] = {}
        closed: list[str] = []
        try:
            with suppress(Failed):
                for index in range(HELD_FILES):
                    path = f"{folder}/{index}"
                    # Until it is closed it may be there, empty, or not.
                    files[path] = self.call("create", lambda: self._create(path), None, {path: []})  # noqa: B023
                    say({"maybe": {path: []}})
            for path in list(files):
                content: Content = [[self.rng.getrandbits(30), self.rng.randint(1, 5000)]]
                self.call("write", lambda: _fill(files.pop(path), content), {path: content})  # noqa: B023
                closed.append(path)
        finally:
            for descriptor in files.values():
                with suppress(OSError):
                    os.close(descriptor)
        for path in closed:
            self.call("unlink", (self.root / path).unlink, {path: None})

    def _create(self, path: str) -> int:
        return os.open(self.root / path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)


@dataclass
class OpenFile:
    """A file that stays open. path: its name, empty once it has none. content: what each descriptor must read."""

    path: str
    flags: int
    content: Content
    descriptors: list[int]  # the first one writes, the others read
    opened: float = field(default_factory=time.monotonic)  # by its writer


class Mover(Program):
    """Keeps files open while their names move, writes and reads them on. Each step has a directory of its own.

    What is written after a file has lost its name must be read through its descriptors, and appear nowhere else.
    """

    def __init__(self, root: Path, name: str, seed: int) -> None:
        super().__init__(root, f"{RUNS}/{name}-{DECOMPOSED}", seed)
        self._count = 0
        self._folder = ""
        self._open: list[OpenFile] = []
        # The file of each name, and all that names of this step were to hold.
        self._files: dict[str, OpenFile] = {}
        self._announced: list[dict[str, Content | None]] = []

    def step(self) -> None:
        """Move names in one way, with files open; then close these."""
        self._count += 1
        self._folder = f"{self.name}-{self._count:05}"
        self._open, self._files, self._announced = [], {}, []
        self.mkdir(self._folder)
        kinds = [self._rotated_log, self._replaced, self._moved_directory, self._removed, self._rewritten]
        try:
            self.rng.choice(kinds)()
            for file in self._open:
                self._look(file)
            for file in self._open:
                while file.descriptors:
                    self._close(file)
        except Failed:
            self._give_up()
            raise
        finally:
            left = [descriptor for file in self._open for descriptor in file.descriptors]
            if not all(
                [_is_closed(descriptor) for descriptor in left]
            ):  # the daemon has ended since the last call
                self._give_up()

    def _give_up(self) -> None:
        """Say that each name of this step may be gone, or hold whatever was to be in any file of it."""
        names = {path for changes in self._announced for path in changes}
        contents = [content for changes in self._announced for content in changes.values()]
        for content in (None, *contents):
            say({"maybe": dict.fromkeys(names, content)})

    # ---- units

    def _rotated_log(self) -> None:
        """Rotate a log, and write on to all of its files, also to those that have been removed."""
        names = [f"{self._folder}/log", f"{self._folder}/log.1", f"{self._folder}/log.2"]
        for _ in range(self.rng.randint(3, 6)):
            self._make(names[0], os.O_APPEND)
            self._go_on()
            for old, new in ((names[1], names[2]), (names[0], names[1])):
                if old in self._files:
                    self._rename(old, new)
            self._go_on()

    def _replaced(self) -> None:
        """Replace a file by rename while others read and write it."""
        path = f"{self._folder}/model"
        for _ in range(self.rng.randint(2, 5)):
            self._make(f"{path}.new")
            self._go_on()
            self._rename(f"{path}.new", path)
            self._go_on()

    def _moved_directory(self) -> None:
        """Rename a directory with open files in it, and files into it."""
        where = f"{self._folder}/work"
        self.mkdir(where)
        for number in range(self.rng.randint(2, 4)):
            self._make(f"{where}/{number}")
            self._make(f"{self._folder}/beside")
            self._go_on()
            moved = f"{self._folder}/work-{number}"
            inside = {
                path: path.replace(where, moved, 1) for path in self._files if path.startswith(f"{where}/")
            }
            self._renamed(inside, lambda: (self.root / where).rename(self.root / moved))  # noqa: B023 (called at once)
            where = moved
            self._rename(f"{self._folder}/beside", f"{where}/{self.rng.choice((str(number), 'other'))}")
            self._go_on()

    def _removed(self) -> None:
        """Remove a file while it is open, and make it again."""
        path = f"{self._folder}/file"
        for _ in range(self.rng.randint(2, 4)):
            self._make(path)
            self._go_on()
            file = self._files[path]
            self._do("unlink", (self.root / path).unlink, {path: None})
            file.path = ""
            del self._files[path]
            self._go_on()

    def _rewritten(self) -> None:
        """Close a file, open it again and write on, while what was closed is uploaded."""
        file = self._make(f"{self._folder}/last.ckpt")
        for _ in range(self.rng.randint(4, 10)):
            self._write(file)
            self._open_again(file)
            self.rest(self.rng.choice(MOVE_PAUSES))

    # ---- calls

    def _do(
        self,
        name: str,
        action: Callable[[], Result],
        changes: dict[str, Content | None],
        file: OpenFile | None = None,
    ) -> Result:
        self._announced.append(changes)
        return self.call(name, action, changes, file=file)

    def _make(self, path: str, flags: int = 0) -> OpenFile:
        flags |= os.O_RDWR
        descriptor = self._do(
            "open", lambda: os.open(self.root / path, flags | os.O_CREAT | os.O_EXCL), {path: []}
        )
        file = self._files[path] = OpenFile(path, flags, [], [descriptor])
        self._open.append(file)
        self._write(file)
        return file

    def _go_on(self) -> None:
        """Write to files that are open, open some of them once more, and look at one; then wait for a while."""
        for file in self._open:
            if self.rng.random() < 0.6:
                self._write(file)
            if file.path and self.rng.random() < 0.4:
                self._open_again(file)
        self._look(self.rng.choice(self._open))
        self.rest(self.rng.choice(MOVE_PAUSES))

    def _write(self, file: OpenFile) -> None:
        """Write a new piece behind the others, or in the place of one."""
        place = len(file.content)
        if not file.flags & os.O_APPEND and self.rng.random() < 0.5:
            place = self.rng.randint(0, place)
        before, old, after = file.content[:place], file.content[place : place + 1], file.content[place + 1 :]
        size = len(bytes_of(old)) or self.rng.randint(1, MOVED_BYTES)
        piece: Content = [[self.rng.getrandbits(30), size]]
        content = before + piece + after

        def write() -> None:
            os.lseek(file.descriptors[0], len(bytes_of(before)), os.SEEK_SET)
            _write_all(file.descriptors[0], bytes_of(piece))
            if self.rng.random() < 0.3:
                os.fsync(file.descriptors[0])

        self._do("pwrite", write, {file.path: content} if file.path else {}, file)
        file.content = content

    def _open_again(self, file: OpenFile) -> None:
        """Open a file for another reader, or close it whole and open it for writing again."""
        if self.rng.random() < 0.5 and len(file.descriptors) < 4:
            reader = self.call("open", lambda: os.open(self.root / file.path, os.O_RDONLY))
            file.descriptors.append(reader)
            return
        while file.descriptors:
            self._close(file)
        file.descriptors.append(self.call("open", lambda: os.open(self.root / file.path, file.flags)))
        file.opened = time.monotonic()

    def _close(self, file: OpenFile) -> None:
        changes: dict[str, Content | None] = {file.path: file.content} if file.path else {}
        self._do("close", lambda: os.close(file.descriptors.pop()), changes, file)

    def _rename(self, old: str, new: str) -> None:
        self._renamed({old: new}, lambda: (self.root / old).rename(self.root / new))

    def _renamed(self, names: dict[str, str], action: Callable[[], object]) -> None:
        """Rename files, as new name by old name."""
        changes: dict[str, Content | None] = dict.fromkeys(names)
        self._do("rename", action, changes | {new: self._files[old].content for old, new in names.items()})
        for old, new in names.items():
            if new in self._files:
                self._files[new].path = ""
            self._files[new] = self._files.pop(old)
            self._files[new].path = new

    def _look(self, file: OpenFile) -> None:
        """Compare what is read through each descriptor of a file and by a name, and which names there are."""
        for descriptor in file.descriptors:
            data = self.call("read", lambda: _read_all(descriptor, 0, LARGEST_MOVED), file=file)  # noqa: B023 (called at once)
            if data != bytes_of(file.content):
                say(
                    {
                        "wrong": f"{self._folder}: other bytes through a descriptor of {file.path or 'a lost name'}"
                    }
                )
        if file.path:
            self.read_back({file.path: file.content})
        found = self.call("list", lambda: _names_below(self.root, self._folder))
        expected = self._files.keys() | {f"{posixpath.dirname(path)}/" for path in self._files} - {
            f"{self._folder}/"
        }
        if found != expected:
            say({"wrong": f"{self._folder}: the names are {sorted(found)}, not {sorted(expected)}"})


def twin_of(root: Path) -> Path:
    """Return where the other node has its mount of the same bucket."""
    return root.parent.parent / "twin" / root.name


def _is_published(root: Path, path: str) -> bool:
    """Return whether the bucket has a file as this node has it."""
    try:
        mount, inner = find_mount(root / path, os.environ, follows=False)
        return bool(ask(mount, "status", inner, timeout_seconds=STATUS_SECONDS).status["state"] == "clean")
    except (FusecacheError, OSError, KeyError):
        return False


class Twin(Program):
    """Makes each name on two nodes, one soon after the other, as two ranks do. No node may report a conflict."""

    def __init__(self, root: Path, name: str, seed: int) -> None:
        super().__init__(root, f"{RUNS}/{name}-{DECOMPOSED}", seed)
        self._roots = [root, twin_of(root)]
        self._count = 0
        self._made: dict[str, Content] = {}

    def step(self) -> None:
        """Make one file, link or directory on both, or remove one from both."""
        self._count += 1
        self.rng.shuffle(self._roots)
        ways = [self._written, self._renamed, self._link, self._removed]
        self.rng.choice(ways)(f"{self.name}/{self._count:05}")

    def _on_both(
        self,
        name: str,
        action: Callable[[Path], object],
        changes: dict[str, Content | None],
        on_failure: dict[str, Content | None] | None = None,
    ) -> None:
        for root in self._roots:
            self.call(name, lambda root=root: action(root), changes, on_failure)

    def _make_folder(self, root: Path) -> None:
        # Not its parents: without a mount, these are not there.
        (root / self.name).mkdir(exist_ok=True)

    def _written(self, path: str) -> None:
        content: Content = [[self.rng.getrandbits(30), self.rng.randint(1, MIB)]]
        inner = f"{path}/file"

        def write(root: Path) -> None:
            self._make_folder(root)
            (root / path).mkdir(exist_ok=True)
            (root / inner).write_bytes(bytes_of(content))

        self._on_both("write", write, {inner: content})
        self._made[inner] = content

    def _renamed(self, path: str) -> None:
        beside = f"{path}.tmp"
        content: Content = [[self.rng.getrandbits(30), self.rng.randint(1, MIB)]]

        def write(root: Path) -> None:
            self._make_folder(root)
            (root / beside).write_bytes(bytes_of(content))
            (root / beside).rename(root / path)

        self._on_both("write", write, {beside: None, path: content}, {beside: content, path: None})
        self._made[path] = content

    def _link(self, path: str) -> None:
        def link(root: Path) -> None:
            self._make_folder(root)
            with suppress(FileExistsError):  # the other node's is here already
                (root / path).symlink_to("target")

        self._on_both("symlink", link, {path: []})
        self._made[path] = []

    def _removed(self, _: str) -> None:
        if self._made:
            path = self.rng.choice(list(self._made))
            # Else one node's delete can come between the other's write and delete, which is a conflict.
            if not all(_is_published(root, path) for root in self._roots):
                return
            content = self._made.pop(path)
            self._on_both("unlink", lambda root: self._remove(root, path), {path: None}, {path: content})

    def _remove(self, root: Path, path: str) -> None:
        # Without a mount this folder is not there, so a name that is absent was removed by the other node.
        folder = os.open(root / self.name, os.O_RDONLY)
        try:
            with suppress(FileNotFoundError):
                os.unlink(posixpath.relpath(path, self.name), dir_fd=folder)
        finally:
            os.close(folder)


class Reader(Program):
    """Reads what was in the bucket before, at random and in sequence."""

    def step(self) -> None:
        """Open one file and read parts of it."""
        number = self.rng.randrange(len(FILES)) if self.rng.random() < 0.5 else self.rng.randrange(4)
        path, size = self.root / "data" / f"f{number}", FILES[number]
        descriptor = self.call("open", lambda: os.open(path, os.O_RDONLY))
        try:
            offset, length = self.rng.randrange(size), self.rng.choice(READ_BYTES)
            for _ in range(16):
                at = offset
                data = self.call("read", lambda: _read_all(descriptor, at, length))  # noqa: B023 (called at once)
                if data != synthetic_bytes(number, offset, max(0, min(length, size - offset))):
                    say({"wrong": f"data/f{number}: {len(data)} other bytes at {offset}"})
                offset = offset + length if self.rng.random() < 0.8 else self.rng.randrange(size)
        finally:
            with suppress(OSError):  # of a daemon that was killed
                os.close(descriptor)


class Job(Program):
    """Reads an MDS dataset through the loader, with hints, and resumes after a failure."""

    def __init__(self, root: Path, name: str, seed: int) -> None:
        super().__init__(root, name, seed)
        self._state: dict[str, object] | None = None

    def step(self) -> None:
        """Read batches until one fails."""
        dataset = self.call("open", lambda: _plain(lambda: MDSDataset(self.root / "samples")))
        sampler = ElasticBatchSampler(dataset, global_batch_size=BATCH, world=World(), seed=7)
        if self._state is not None:
            sampler.load_state_dict(self._state)
        with Hints(dataset, sampler):
            for batch in sampler:
                self.rest(0.1)
                # Called at once, so the names still mean what they meant.
                read = self.call("read", lambda: _plain(lambda: [dataset[i]["number"] for i in batch]))  # noqa: B023
                if [int(number) for number in read] != [int(index) for index in batch]:
                    say({"wrong": f"samples: a batch holds other samples than {list(batch)[:3]}…"})
                sampler.record_step()
                self._state = sampler.state_dict()


KINDS: dict[str, type[Program]] = {
    "trainer": Trainer,
    "holder": Holder,
    "mover": Mover,
    "twin": Twin,
    "reader": Reader,
    "job": Job,
}


def _plain(action: Callable[[], Result]) -> Result:
    """Carry out an action of the loader; raise the OSError that is the cause of the loader's error."""
    try:
        return action()
    except LoaderError as exc:
        cause: BaseException | None = exc
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__cause__ or cause.__context__
        if cause is None:
            raise
        raise cause from exc


def _read_all(descriptor: int, offset: int, length: int) -> bytes:
    """Read up to the end of the file. The kernel answers with the pages before one that it could not read."""
    found = b""
    while len(found) < length:
        data = os.pread(descriptor, length - len(found), offset + len(found))
        if not data:
            break
        found += data
    return found


def _names_below(root: Path, folder: str) -> set[str]:
    """Return all below a directory, with a slash behind directories. Raises OSError if one cannot be listed."""
    found = set()
    with os.scandir(root / folder) as entries:
        for entry in entries:
            path = f"{folder}/{entry.name}"
            found |= {f"{path}/"} | _names_below(root, path) if entry.is_dir() else {path}
    return found


def _is_closed(descriptor: int) -> bool:
    """Close a descriptor; return whether the close returned 0."""
    try:
        os.close(descriptor)
    except OSError:
        return False
    return True


def _fill(descriptor: int, content: Content) -> None:
    try:
        _write_all(descriptor, bytes_of(content))
    except OSError:
        with suppress(OSError):
            os.close(descriptor)
        raise
    os.close(descriptor)


def _write_all(descriptor: int, data: bytes) -> None:
    start = 0
    while start < len(data):
        start += os.write(descriptor, data[start : start + CHUNK_BYTES])


def say(line: dict[str, object]) -> None:
    """Print one line of JSON, with the time."""
    sys.stdout.write(json.dumps({**line, "at": time.monotonic()}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    KINDS[sys.argv[1]](Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])).run()
