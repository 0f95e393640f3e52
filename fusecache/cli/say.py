"""How commands print: one line for each call. Keys and paths may hold control characters, which show escaped.

Besides, how they write a result to a file.
"""

import os
import sys
from pathlib import Path
from tempfile import NamedTemporaryFile

from fusecache.model.format_text import printable


def print_line(text: str) -> None:
    """Print a line of a command's result."""
    sys.stdout.write(printable(text) + "\n")


def say(text: str) -> None:
    """Print a message for the user on stderr."""
    sys.stderr.write(f"fusecache: {printable(text)}\n")


def say_error(error: object) -> None:
    """Print an error on stderr. The notes of an exception follow, one line each."""
    say(f"error: {error}")
    for note in getattr(error, "__notes__", ()):
        sys.stderr.write(f"  {printable(note)}\n")


def write_whole(path: Path, content: bytes) -> None:
    """Replace a file by a rename, so that it is whole at any moment; all users may read it. Raises OSError."""
    with NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as new:
        try:
            new.write(content)
            new.flush()
            os.fchmod(new.fileno(), 0o644)
            os.replace(new.name, path)
        except BaseException:
            os.unlink(new.name)
            raise
