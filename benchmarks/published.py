"""When the bucket had something, by the request log of the test server: no client's word is taken for it."""

import time
from collections.abc import Callable, Sequence

from benchmarks.processes import BenchmarkError, TooSlow
from benchmarks.writers import expected_etag
from tests.s3server import Control, LogEntry

POLL_SECONDS = 0.02
SLOW_POLL_SECONDS = 0.25


def answered(entry: LogEntry) -> float:
    """Return when a request was answered, in seconds since 1970."""
    return entry.time + entry.seconds


def published_at(entries: Sequence[LogEntry], size: int) -> float | None:
    """Return when one of these requests had published an object of `size` bytes; None: none has yet."""
    for entry in entries:
        if not entry.finished or not entry.took_effect:
            continue
        whole = entry.operation == "PutObject" and entry.bytes_in == size
        if whole or entry.operation == "CompleteMultipartUpload":
            return answered(entry)
    return None


def wait_published(control: Control, key: str, size: int, *, seconds: float) -> float:
    """Return when an object of that size was published under a key. Raises TooSlow."""

    def look() -> float | None:
        puts = control.log("PutObject", key)
        return published_at([*puts, *control.log("CompleteMultipartUpload", key)], size)

    return _poll(look, seconds, POLL_SECONDS)


def puts_answered(entries: Sequence[LogEntry], size: int) -> list[float]:
    """Return when each key was first stored with `size` bytes, in order of time."""
    first: dict[str, float] = {}
    for entry in entries:
        if entry.finished and entry.took_effect and entry.bytes_in == size and entry.key not in first:
            first[entry.key] = answered(entry)
    return sorted(first.values())


def wait_files(control: Control, count: int, size: int, *, seconds: float) -> list[float]:
    """Return when each of `count` small files was stored; fewer of them if that takes longer than `seconds`."""
    deadline = time.monotonic() + seconds
    asked = -1
    stored: list[float] = []
    while time.monotonic() < deadline:
        # The count costs nothing, and the log of thousands of requests half a second of the server's time.
        requests = control.counts().get("PutObject", 0)
        if requests >= count and requests == asked:
            stored = puts_answered(control.log("PutObject"), size)
            if len(stored) >= count:
                return stored
        asked = requests
        time.sleep(SLOW_POLL_SECONDS)
    return puts_answered(control.log("PutObject"), size)


def part_sizes(entries: Sequence[LogEntry]) -> list[int]:
    """Return the sizes of the parts that were stored, in the order of their numbers."""
    sizes = {int(entry.query["partNumber"]): entry.bytes_in for entry in entries if entry.took_effect}
    return [sizes[number] for number in sorted(sizes)]


def check_object(control: Control, bucket: str, key: str, size: int) -> None:
    """Raise BenchmarkError unless the object holds what `writers` wrote."""
    view = control.objects(bucket=bucket)[key]
    parts = part_sizes(control.log("UploadPart", key))
    if view.size != size or view.etag != expected_etag(size, parts):
        raise BenchmarkError(f"{key}: wrong bytes in the bucket: {view.size} of {size}, ETag {view.etag}")


def _poll(look: Callable[[], float | None], seconds: float, pause: float) -> float:
    deadline = time.monotonic() + seconds
    while (found := look()) is None:
        if time.monotonic() > deadline:
            raise TooSlow(seconds)
        time.sleep(pause)
    return found
