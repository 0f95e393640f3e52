"""Progress of long commands, a bar on a terminal, log lines elsewhere; and what the bucket lacks at their end."""

import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self, TextIO

from fusecache.model.format_text import changes_text, count_text, printable, seconds_text, size_text
from fusecache.mount.control_client import Answer, ServerProgress

LINE_INTERVAL_SECONDS = 5.0  # often enough to show progress in a log file; the daemon reports twice a second


def pending_text(progress: ServerProgress) -> str:
    """Return the pending changes as text: `3 changes, 1.2 GiB`."""
    return changes_text(progress.pending_files, progress.pending_contents, progress.pending_bytes)


def awaited_text(progress: ServerProgress) -> str:
    """Return the pending changes without deferred deletions, which no command waits for; "" if there are none."""
    changes = _changes(progress)
    return changes_text(changes, progress.pending_contents, progress.pending_bytes) if changes else ""


def _changes(progress: ServerProgress) -> int:
    return progress.pending_files - progress.deferred_files


class StepView:
    """Shows the progress of one command: a bar of bytes on a terminal, lines elsewhere. Use it in a `with` block."""

    def __init__(self, stream: TextIO, *, verb: str) -> None:
        self._stream = stream
        self._verb = verb
        self._bar: Any = None
        self._last_printed: tuple[float, str] | None = None

    def __enter__(self) -> Self:
        """Return the view."""
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the bar from the terminal."""
        if self._bar is not None:
            self._bar.close()

    def show(self, done_bytes: int, total_bytes: int | None, beside: str, line: str) -> None:
        """Show one step. beside: text next to the bar; line: text instead of the bar; total_bytes: None if unknown."""
        if self._stream.isatty():
            self._draw_bar(done_bytes, total_bytes, beside)
        else:
            self._print(printable(line))

    def _draw_bar(self, done_bytes: int, total_bytes: int | None, beside: str) -> None:
        if self._bar is None:
            # A fifth of what the command line imports, so only for a bar.
            from tqdm import tqdm  # type: ignore[import-untyped]

            self._bar = tqdm(
                file=self._stream, desc=self._verb, unit="B", unit_scale=True, unit_divisor=1024, leave=False
            )
        self._bar.total = total_bytes
        self._bar.n = done_bytes
        self._bar.set_postfix_str(beside, refresh=False)
        self._bar.refresh()

    def _print(self, line: str) -> None:
        now = time.monotonic()
        if self._last_printed is not None:
            then, said = self._last_printed
            if said == line or now - then < LINE_INTERVAL_SECONDS:
                return
        self._last_printed = (now, line)
        self._stream.write(f"fusecache: {self._verb}: {line}\n")
        self._stream.flush()


class ProgressView(StepView):
    """Shows how much is still to upload. Use it in a `with` block."""

    _upload_bytes = 0

    def show_upload(self, progress: ServerProgress) -> None:
        """Show one report."""
        left = awaited_text(progress)
        if not left and not progress.waiting_for:
            return
        left_bytes = progress.pending_bytes if progress.left_bytes is None else progress.left_bytes
        # New writes raise the total; bytes already uploaded stay counted as done.
        self._upload_bytes = max(self._upload_bytes, left_bytes)
        line = f"{left or 'nothing'} left"
        if progress.seconds_left is not None and progress.seconds_left >= 1:
            line += f", about {seconds_text(progress.seconds_left)}"
        if progress.waiting_for:
            line += f"; waiting: {progress.waiting_for}"
        beside = f"{count_text(_changes(progress), 'change')} left" + (
            ", waiting" if progress.waiting_for else ""
        )
        self.show(self._upload_bytes - left_bytes, self._upload_bytes, beside, line)


def show_warm_up(view: StepView, facts: Mapping[str, Any]) -> None:
    """Show the progress of a warm-up."""
    files, nbytes = facts["files_total"], facts["bytes_total"]
    if facts["state"] == "counting":
        words = f"counting, {count_text(files, 'file')}"
        view.show(0, None, words, words)
        return
    beside = f"{facts['files_done']} of {count_text(files, 'file')}"
    view.show(facts["bytes_done"], nbytes, beside, warm_text(facts))


def warm_text(facts: Mapping[str, Any]) -> str:
    """Return the progress of a warm-up: `3 of 10 files, 1.0 GiB of 4.0 GiB, 512.0 MiB/s, about 6 s left`."""
    done, total = facts["bytes_done"], facts["bytes_total"]
    words = f"{facts['files_done']} of {count_text(facts['files_total'], 'file')}, "
    words += f"{size_text(done)} of {size_text(total)}"
    seconds = facts.get("seconds", 0.0)  # a daemon of an earlier version does not say it
    if facts["state"] == "running" and done and seconds >= 1:
        rate = done / seconds
        words += f", {size_text(rate)}/s, about {seconds_text((total - done) / rate)} left"
    return words + (f", {facts['files_failed']} failed" if facts["files_failed"] else "")


def show_check(view: StepView, facts: Mapping[str, Any], cached_bytes: int | None) -> None:
    """Show the progress of a check. cached_bytes: how many bytes it will read, None if unknown."""
    if not facts["blocks"] and not facts["keys"]:
        return
    found = f"{facts['damaged_files']} damaged"
    if facts["keys"]:
        found += f", {count_text(facts['keys'], 'key')}"
    view.show(facts["bytes"], cached_bytes, found, f"{size_text(facts['bytes'])} read, {found}")


def found_text(mountpoint: Path, *, changes: int, orphans: int, suspects: int) -> str:
    """Return what the daemon found of the last run at start, "" if nothing. orphans, suspects: newly quarantined."""
    words = []
    if changes:
        verb = "is" if changes == 1 else "are"
        words.append(f"{count_text(changes, 'change')} of the last run {verb} pending and will be uploaded")
    quarantined = _quarantined_text(orphans, suspects)
    if quarantined:
        words.append(f"{quarantined} in quarantine: fusecache recover {shlex.quote(str(mountpoint))}")
    return "; ".join(words)


def unsent_text(answer: Answer) -> str:
    """Return how much a mount that ends now leaves to the next one. answer: its last status."""
    cache_dir = answer.status.get("options", {}).get("cache_dir") or "CACHE_DIR"
    return (
        f"not in the bucket: {pending_text(answer.progress)}; "
        f"the next mount with --cache-dir {cache_dir} uploads the rest"
    )


def left_texts(status: Mapping[str, Any]) -> list[str]:
    """Return lines about local data of an unmounted mount that no later mount uploads by itself.

    status: the daemon's last status before it exits.
    """
    cache_dir = status.get("options", {}).get("cache_dir") or "CACHE_DIR"
    lines = []
    quarantined = _quarantined_text(status.get("orphans", 0), status.get("suspects", 0))
    if quarantined:
        size = size_text(status.get("aside_bytes", 0))
        lines.append(f"{quarantined} in quarantine, {size}: fusecache recover {shlex.quote(cache_dir)}")
    local = status.get("local_only_files", 0)
    if local:
        verb = "exists" if local == 1 else "exist"
        lines.append(
            f"{count_text(local, 'local-only file')}, {size_text(status['local_only_bytes'])}, {verb} only in "
            f"{cache_dir}: the next mount with this cache directory shows {'it' if local == 1 else 'them'} again"
        )
    return lines


def missing_texts(answer: Answer) -> list[str]:
    """Return lines that name what the bucket lacks after `sync` or `drain`: the largest files first."""
    names = [f"not in the bucket: {name}" for name in answer.missing]
    more = answer.progress.pending_files - answer.progress.deferred_files - len(names)
    return [*names, f"not in the bucket: {count_text(more, 'more change')}"] if names and more > 0 else names


def _quarantined_text(orphans: int, suspects: int) -> str:
    """Return `7 unfinished files and 1 suspect file are`, "" for none."""
    counts = [(orphans, "unfinished file"), (suspects, "suspect file")]
    words = " and ".join(count_text(count, noun) for count, noun in counts if count)
    return f"{words} {'is' if orphans + suspects == 1 else 'are'}" if words else ""
