"""Writes down what an unfinished local conversion reads, so that another input cannot continue it.

A resumed conversion skips as many samples as its shards have. With other files, or in another order, it would skip the
wrong ones. Sizes are not compared, because a file with a bad row is mended before the conversion goes on.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from loader.clusters.conversion import described
from loader.errors import WriterError
from loader.writing.parallel_writer import OneFileSource

RECORD_NAME = "_inputs.json"


def check_inputs(root: Path, sources: Sequence[OneFileSource]) -> None:
    """Raise WriterError if the conversion in root began with other inputs, or in another order.

    Without a record, as an earlier version leaves it, nothing is known and nothing is refused.
    """
    record = root / RECORD_NAME
    try:
        before = json.loads(record.read_bytes())
    except FileNotFoundError:
        return
    except ValueError:
        raise WriterError(f"{record} is damaged: remove it if {root} began with these files") from None
    if before != described(sources):
        raise WriterError(
            f"{root} holds a conversion of other files or options, or in another order: name its files in their order, "
            f"or choose another directory. If the same files only moved, remove {record}"
        )


def record_inputs(root: Path, sources: Sequence[OneFileSource]) -> None:
    """Write the record of a conversion that begins or goes on."""
    root.mkdir(parents=True, exist_ok=True)
    temporary = root / f"{RECORD_NAME}.tmp"
    temporary.write_text(json.dumps(described(sources)))
    os.replace(temporary, root / RECORD_NAME)


def forget_inputs(root: Path) -> None:
    """Remove the record of a conversion that ended."""
    (root / RECORD_NAME).unlink(missing_ok=True)


def is_begun(root: Path) -> bool:
    """Return whether a directory has anything but a record."""
    return root.is_dir() and any(path.name != RECORD_NAME for path in root.iterdir())
