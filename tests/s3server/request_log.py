"""Every request, remembered, so that tests can say what was asked and what it did."""

import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field

# A request's entry takes about 1 KiB: 200 MiB at most, more than any test or benchmark sends.
MAX_ENTRIES = 200_000
MAX_OFFENCES = 100


@dataclass(slots=True)
class LogEntry:
    """One request. `status` is None until it was answered, 0 if the connection ended without an answer.

    time: seconds since 1970 at arrival; seconds: until the answer was sent. range: the header as sent.
    took_effect: for writes, whether the bucket changed; None for reads. fault: the scripted action it met.
    """

    number: int
    time: float
    operation: str
    method: str
    bucket: str
    key: str
    query: dict[str, str]
    headers: dict[str, str]
    connection: int
    access_key: str = ""
    status: int | None = None
    code: str = ""
    bytes_in: int = 0
    bytes_out: int = 0
    seconds: float = 0.0
    took_effect: bool | None = None
    fault: str = ""
    finished: bool = field(default=False)

    @property
    def range(self) -> str | None:
        """The Range header, None without one."""
        return self.headers.get("range")


class RequestLog:
    """The newest MAX_ENTRIES requests and a count of all. Safe to use from many threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._entries: deque[LogEntry] = deque(maxlen=MAX_ENTRIES)
        self._counts: Counter[str] = Counter()
        self._number = 0
        self._offences: list[str] = []

    def next_number(self) -> int:
        """Return the sequence number of the request that just arrived, from 1."""
        with self._changed:
            self._number += 1
            return self._number

    def add(self, entry: LogEntry) -> None:
        """Remember a request as in progress."""
        with self._changed:
            self._entries.append(entry)
            self._counts[entry.operation] += 1
            self._changed.notify_all()

    def note_offence(self, words: str) -> None:
        """Remember what a client should not have sent, for as long as the server runs; the first MAX_OFFENCES."""
        with self._changed:
            if len(self._offences) < MAX_OFFENCES:
                self._offences.append(words)

    def offences(self) -> list[str]:
        """Return what clients should not have sent."""
        with self._changed:
            return list(self._offences)

    def finish(self, entry: LogEntry) -> None:
        """Say that a request's answer, or its end without one, is complete."""
        with self._changed:
            entry.seconds = time.time() - entry.time
            entry.finished = True
            self._changed.notify_all()

    def select(self, operation: str | None = None, key: str | None = None) -> list[LogEntry]:
        """Return the entries of an operation and/or a key, oldest first."""
        with self._changed:
            return self._select(operation, key)

    def clear(self) -> None:
        """Forget all entries and counts; numbers go on."""
        with self._changed:
            self._entries.clear()
            self._counts.clear()

    def counts(self) -> dict[str, int]:
        """Return the number of requests per operation since the last `clear`."""
        with self._changed:
            return dict(self._counts)

    def wait(
        self, count: int, operation: str | None, key: str | None, *, finished: bool, timeout: float
    ) -> list[LogEntry]:
        """Block until `count` entries match. TimeoutError after `timeout` seconds."""

        def matching() -> list[LogEntry]:
            return [entry for entry in self._select(operation, key) if entry.finished or not finished]

        with self._changed:
            if not self._changed.wait_for(lambda: len(matching()) >= count, timeout):
                raise TimeoutError(f"{len(matching())} of {count} requests within {timeout} s")
            return matching()

    def _select(self, operation: str | None, key: str | None) -> list[LogEntry]:
        return [
            entry
            for entry in self._entries
            if (operation is None or entry.operation == operation) and (key is None or entry.key == key)
        ]
