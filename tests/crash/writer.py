"""A program that changes files on a mount for as long as there is one, and says before and after what each call does.

`python -m tests.crash.writer DIRECTORY SEED LARGEST`, where DIRECTORY is its own. Each line is JSON: `{"will": {path:
digest or null}}` before a call, `{"did": true}` once it returned; a digest is SHA-256 of the content, or `-> target`.
"""

import hashlib
import json
import os
import random
import sys
from pathlib import Path

NAMES = ("shard-0", "shard-1", "config.json", ".metadata", "latest", "log")
FOLDERS = ("", "a", "b", "a/c")
SMALLEST = 200


class Writer:
    """Random changes in one directory. shown: what each path holds, by its digest."""

    def __init__(self, top: Path, seed: int, largest: int) -> None:
        self._top = top
        self._rng = random.Random(seed)
        self._largest = largest
        self._count = 0
        self._shown: dict[str, str] = {}
        self._folders = {""}

    def run(self) -> None:
        """Go on until the mount is gone."""
        changes = [
            (self._write, 10), (self._write_beside, 4), (self._append, 3), (self._rename_open, 2), (self._unlink, 3),
            (self._rename, 3), (self._symlink, 1), (self._mkdir, 3), (self._rename_folder, 1),
        ]  # fmt: skip
        kinds, weights = zip(*changes, strict=True)
        while True:
            self._rng.choices(kinds, weights)[0]()

    # ---- changes

    def _write(self) -> None:
        path, data = self._new_path(), self._bytes()
        if path in self._shown and self._shown[path].startswith("-> "):
            return
        self._will({path: _digest(data)})
        self._fill(path, data, sync=self._rng.random() < 0.2)
        self._did()

    def _write_beside(self) -> None:
        path, data = self._new_path(), self._bytes()
        beside = f"{path}.tmp"
        self._will({beside: _digest(data)})
        self._fill(beside, data, sync=True)
        self._did()
        self._will({beside: None, path: _digest(data)})
        (self._top / beside).rename(self._top / path)
        self._did()

    def _rename_open(self) -> None:
        """As safetensors does."""
        path, data = self._new_path(), self._bytes()
        folder, slash, name = path.rpartition("/")
        beside = self._top / f"{folder}{slash}.tmp{name}"
        self._will({path: _digest(data)})
        with beside.open("wb") as file:
            file.truncate(len(data))
            file.write(data)
            beside.rename(self._top / path)
        self._did()

    def _append(self) -> None:
        path = self._old_path()
        if path is None:
            return
        data = (self._top / path).read_bytes()
        added = self._bytes()[:5000]
        self._will({path: _digest(data + added)})
        with (self._top / path).open("ab") as file:
            file.write(added)
        self._did()

    def _unlink(self) -> None:
        path = self._old_path()
        if path is not None:
            self._will({path: None})
            (self._top / path).unlink()
            self._did()

    def _rename(self) -> None:
        old, new = self._old_path(), self._new_path()
        if old is not None and old != new:
            self._will({old: None, new: self._shown[old]})
            (self._top / old).rename(self._top / new)
            self._did()

    def _symlink(self) -> None:
        path = self._new_path()
        if path not in self._shown:
            self._will({path: "-> shard-0"})
            (self._top / path).symlink_to("shard-0")
            self._did()

    def _mkdir(self) -> None:
        for folder in FOLDERS[1:]:
            if folder not in self._folders and folder.rpartition("/")[0] in self._folders:
                self._will({})
                (self._top / folder).mkdir()
                self._did()
                self._folders.add(folder)
                return

    def _rename_folder(self) -> None:
        if "a" not in self._folders or "b" in self._folders:
            return
        moved = {path: digest for path, digest in self._shown.items() if path.startswith("a/")}
        self._will({**dict.fromkeys(moved), **{"b" + path[1:]: digest for path, digest in moved.items()}})
        (self._top / "a").rename(self._top / "b")
        self._did()
        self._folders = {folder for folder in self._folders if not folder.startswith("a")} | {"b"}

    # ---- inside

    def _fill(self, path: str, data: bytes, *, sync: bool) -> None:
        with (self._top / path).open("wb") as file:
            for start in range(0, len(data), 1 << 20):
                file.write(data[start : start + (1 << 20)])
            if sync:
                file.flush()
                os.fsync(file.fileno())

    def _new_path(self) -> str:
        folder = self._rng.choice([folder for folder in FOLDERS if folder in self._folders])
        # Few names are written again, most are new: a checkpoint's files.
        self._count += 1
        name = self._rng.choice(NAMES) if self._rng.random() < 0.3 else f"file-{self._count}"
        return f"{folder}/{name}".strip("/")

    def _old_path(self) -> str | None:
        files = [path for path, digest in self._shown.items() if not digest.startswith("-> ")]
        return self._rng.choice(sorted(files)) if files else None

    def _bytes(self) -> bytes:
        size = int(SMALLEST * (self._largest / SMALLEST) ** self._rng.random())
        return self._rng.randbytes(size)

    def _will(self, changes: dict[str, str | None]) -> None:
        self._next = changes
        _say({"will": changes})

    def _did(self) -> None:
        for path, digest in self._next.items():
            self._shown.pop(path, None)
            if digest is not None:
                self._shown[path] = digest
        _say({"did": True})


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _say(line: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    try:
        Writer(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])).run()
    except OSError as gone:
        _say({"ended": str(gone)})
