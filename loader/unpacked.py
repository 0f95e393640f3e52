"""A folder of decompressed shards that all processes of a machine share.

Each file appears whole, under its final name, by a rename; who opens it keeps it for as long as it is open,
also when another process makes room. No locks: two processes that miss the same shard at once both unpack
it, and the second rename changes nothing.
"""

import os
import threading
from collections.abc import Callable
from pathlib import Path

from loader.errors import LoaderError

ENDING = ".mds"


class UnpackedFolder:
    """Keeps what it is given until the folder holds more than `limit_bytes`; then the longest unused go.

    Raises LoaderError if the folder cannot be made.
    """

    def __init__(self, folder: str | Path, limit_bytes: int) -> None:
        self._folder = Path(folder)
        self._limit_bytes = limit_bytes
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise LoaderError(f"the cache folder {folder} cannot be made: {problem.strerror}") from problem

    def path(self, key: str, expected_bytes: int, unpack: Callable[[], bytes]) -> str:
        """Return the file that holds what `unpack` returns for this key, calling it only if there is none.

        key: of letters and digits, different for different content. expected_bytes: 0 if unknown; a file of
        another size (a disk that was full, a power cut) is made anew. Raises OSError if the folder is full or
        not writable, and what `unpack` raises.
        """
        path = self._folder / (key + ENDING)
        try:
            found_bytes = path.stat().st_size
            os.utime(path)  # it is in use: the last to be removed
        except FileNotFoundError:
            found_bytes = -1
        if found_bytes != (expected_bytes or max(found_bytes, 0)):
            data = unpack()
            self._make_room(len(data))
            temporary = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}.tmp")
            try:
                temporary.write_bytes(data)
                os.replace(temporary, path)
            finally:
                temporary.unlink(missing_ok=True)
        return str(path)

    def _make_room(self, needed: int) -> None:
        found: list[tuple[float, int, str]] = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if entry.name.endswith(ENDING):
                    try:
                        status = entry.stat()
                    except FileNotFoundError:
                        continue  # another process made room
                    found.append((status.st_mtime, status.st_size, entry.path))
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total + needed <= self._limit_bytes:
                return
            Path(path).unlink(missing_ok=True)
            total -= size
