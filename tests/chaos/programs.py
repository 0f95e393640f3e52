"""The programs of the load. `python -m tests.chaos.programs KIND ROOT NAME SEED`, with the mount as ROOT.

Each line on standard output is JSON. `{"will": {path: content or null}, "call": name}` comes before each call, then
`{"did": bytes}` or `{"failed": errno's name}`. `{"wrong": text}` names bytes that differ. A program ends when its
standard input closes, between two calls.

After a failed call a program leaves the files of that step alone, as their state is uncertain, and begins another.
"""

import errno
import json
import os
import random
import select
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

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
HELD_FILES = 220  # with what the daemon has open itself, about 60, more than 256
SAMPLES, BATCH = 20_000, 200  # of the loader's dataset
PAUSE_AFTER_FAILURE_SECONDS = 0.5


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
    ) -> Result:
        """Carry out one call, announced before and reported after. Raises Failed.

        on_failure: what else there may be if the call does not return 0.
        """
        self.rest(self.pause_seconds)
        say({"will": changes or {}, "call": name, "else": on_failure or {}})
        try:
            result = action()
        except OSError as exc:
            say({"failed": errno.errorcode.get(exc.errno or 0, str(exc)), "path": str(exc.filename)})
            raise Failed from exc
        say({"did": len(result) if isinstance(result, bytes) else 0})
        return result

    def rest(self, seconds: float) -> None:
        """Pause. Raises Stopped."""
        if select.select([sys.stdin], [], [], seconds)[0]:
            raise Stopped


class Trainer(Program):
    """Checkpoints with their marker last and rotation, logs, and directories that are renamed."""

    def __init__(self, root: Path, name: str, seed: int) -> None:
        # Below a directory that is in the bucket alone: without a mount, nothing can be written beside it.
        super().__init__(root, f"{RUNS}/{name}", seed)
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
        self._mkdir(folder)
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
        self._read_back(self.rng.choice(self._checkpoints)[1])
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
        self._read_back({path: content})

    def _renamed_directory(self, number: str) -> None:
        folder, moved = f"{self.name}/work-{number}", f"{self.name}/final-{number}"
        self._mkdir(folder)
        files = {f"file-{index}": self._content(MIB) for index in range(self.rng.randint(1, 5))}
        for name, content in files.items():
            self._write(f"{folder}/{name}", content)
        self.call(
            "rename",
            lambda: (self.root / folder).rename(self.root / moved),
            {**{f"{folder}/{name}": None for name in files}, **{f"{moved}/{n}": c for n, c in files.items()}},
        )
        self._read_back({f"{moved}/{name}": content for name, content in files.items()})

    def _replace_open(self, number: str) -> None:
        """Rename a file while it is open, as safetensors does."""
        path, content = f"{self.name}/model-{number}", self._content()
        beside = f"{self.name}/.tmpmodel-{number}"

        def save() -> None:
            with (self.root / beside).open("wb", buffering=0) as file:
                _write_all(file.fileno(), bytes_of(content))
                (self.root / beside).rename(self.root / path)

        self.call("write", save, {path: content, beside: None}, {beside: content})
        self._read_back({path: content})

    # ---- calls

    def _mkdir(self, folder: str) -> None:
        self.call("mkdir", (self.root / folder).mkdir)

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

    def _read_back(self, files: dict[str, Content]) -> None:
        path = self.rng.choice(sorted(files))
        if self.call("read", (self.root / path).read_bytes) != bytes_of(files[path]):
            say({"wrong": f"{path}: other bytes than were written"})

    def _content(self, largest: int = SHARD_BYTES[1]) -> Content:
        size = int(SHARD_BYTES[0] * (largest / SHARD_BYTES[0]) ** self.rng.random())
        return [[self.rng.getrandbits(30), size]]


class Holder(Program):
    """Has many files open at once, more than a daemon with few descriptors can."""

    def __init__(self, root: Path, name: str, seed: int) -> None:
        super().__init__(root, f"{RUNS}/{name}", seed)
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


KINDS: dict[str, type[Program]] = {"trainer": Trainer, "holder": Holder, "reader": Reader, "job": Job}


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
