"""A trainer that is saving a checkpoint, so slowly that there is time to kill it in the middle.

    python -m examples.demo.torn_writer FILE...

Writes all FILEs at once with torch.save, replacing what is there, and is not meant to finish.
"""

import sys
import threading
import time
from pathlib import Path

import torch

TENSOR_BYTES = 64 * 2**20
PIECE_BYTES = 256 * 2**10
PAUSE_SECONDS = 0.05  # 5 MiB/s a file: 13 s for the whole


class SlowFile:
    """A file for torch.save that takes its time."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=0)

    def write(self, data: bytes) -> int:
        """Write `data` in small pieces, with a pause after each."""
        view = memoryview(data).cast("B")
        for offset in range(0, len(view), PIECE_BYTES):
            self._file.write(view[offset : offset + PIECE_BYTES])
            time.sleep(PAUSE_SECONDS)
        return len(view)

    def flush(self) -> None:
        """Do nothing: every piece is written as it comes."""


def main() -> None:
    """Write until killed."""
    tensor = torch.arange(TENSOR_BYTES // 8)
    for name in sys.argv[1:]:
        threading.Thread(target=torch.save, args=({"weights": tensor}, SlowFile(Path(name)))).start()


if __name__ == "__main__":
    main()
