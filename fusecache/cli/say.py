"""How commands print: one line for each call. Keys and paths may hold control characters, which show escaped."""

import sys

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
