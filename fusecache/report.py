"""What the command line shows: progress on the terminal or as lines, and a mount's status as a table."""

import time
from collections.abc import Iterator, Mapping
from typing import Any, Self, TextIO

from tqdm import tqdm  # type: ignore[import-untyped]

from fusecache.control_client import Progress

LINE_INTERVAL_SECONDS = 5.0  # a log file wants to see that it goes on, not each half second
BYTES_SUFFIX = "_bytes"


def size_text(count: float) -> str:
    """Return bytes for people: 512 B, 3.4 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def pending_text(progress: Progress) -> str:
    """Return `3 files, 1.2 GiB`."""
    noun = "file" if progress.pending_files == 1 else "files"
    return f"{progress.pending_files} {noun}, {size_text(progress.pending_bytes)}"


class ProgressView:
    """Shows how much is still to upload: a bar on a terminal, lines elsewhere. Use it in a `with` block."""

    def __init__(self, stream: TextIO, *, verb: str) -> None:
        self._stream = stream
        self._verb = verb
        self._bar: Any = None
        self._most_bytes = 0
        self._spoken: tuple[float, Progress] | None = None

    def __enter__(self) -> Self:
        """Return the view."""
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the terminal as it was."""
        if self._bar is not None:
            self._bar.close()

    def show(self, progress: Progress) -> None:
        """Show one report."""
        if self._stream.isatty():
            self._draw(progress)
        else:
            self._speak(progress)

    def _draw(self, progress: Progress) -> None:
        self._most_bytes = max(self._most_bytes, progress.pending_bytes)
        if self._bar is None:
            self._bar = tqdm(
                file=self._stream, desc=self._verb, unit="B", unit_scale=True, unit_divisor=1024, leave=False
            )
        # What is written meanwhile adds to the total; what was there stays done.
        self._bar.total = self._most_bytes
        self._bar.n = self._most_bytes - progress.pending_bytes
        self._bar.set_postfix_str(f"{progress.pending_files} files left", refresh=False)
        self._bar.refresh()

    def _speak(self, progress: Progress) -> None:
        now = time.monotonic()
        if self._spoken is not None:
            spoken_at, spoken = self._spoken
            if progress == spoken or now - spoken_at < LINE_INTERVAL_SECONDS:
                return
        self._spoken = (now, progress)
        self._stream.write(f"fusecache: {self._verb}: {pending_text(progress)} left\n")
        self._stream.flush()


def status_table(status: Mapping[str, Any]) -> str:
    """Return a status as aligned lines, nested values as `outer.inner`; bytes are shown for people."""
    rows = list(_rows("", status))
    width = max((len(name) for name, _ in rows), default=0)
    return "".join(f"{name:<{width}}  {text}\n" for name, text in rows)


def _rows(outer: str, values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        label = f"{outer}{name}"
        if isinstance(value, Mapping):
            yield from _rows(f"{label}.", value)
        elif isinstance(value, list | tuple):
            yield label.replace("_", " "), str(len(value)) if value else "none"
            yield from (("", f"  {_item(each)}") for each in value)
        elif name.endswith(BYTES_SUFFIX) and isinstance(value, int | float):
            yield label.removesuffix(BYTES_SUFFIX).replace("_", " "), size_text(value)
        else:
            yield label.replace("_", " "), _plain(value)


def _item(value: object) -> str:
    if isinstance(value, Mapping):
        return " ".join(
            f"{name}={size_text(each) if name.endswith(BYTES_SUFFIX) else _plain(each)}"
            for name, each in value.items()
        )
    return _plain(value)


def _plain(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "-"
    return f"{value:.1f}" if isinstance(value, float) else str(value)
