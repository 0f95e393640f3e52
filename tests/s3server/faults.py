"""Scripted faults: which request they meet and what they do to it. Not the code that carries them out."""

import enum
import random
import threading
from dataclasses import dataclass
from fnmatch import fnmatchcase


class FaultAction(enum.Enum):
    """What a fault does; README.md has the table."""

    ANSWER = "answer"
    ANSWER_AFTER = "answer-after"
    ANSWER_MIDWAY = "answer-midway"
    DROP_BEFORE = "drop-before"
    DROP_AFTER = "drop-after"
    SILENT_AFTER = "silent-after"
    DELAY = "delay"
    HOLD = "hold"
    STALL = "stall"
    SHORT_BODY = "short-body"
    LONG_BODY = "long-body"
    WRONG_RANGE = "wrong-range"
    IGNORE_RANGE = "ignore-range"
    WRONG_ETAG = "wrong-etag"
    DECOMPRESS = "decompress"


@dataclass(frozen=True, slots=True)
class Fault:
    """One scripted fault. method, operation and key are shell globs; all three must match, and part if it is given.

    part: only requests with this part number.
    region: that an error answer names as the bucket's.
    nth: only the nth matching request, from 1. times: fires at most so often. probability: of firing, 0..1.
    """

    action: FaultAction
    method: str = "*"
    operation: str = "*"
    key: str = "*"
    part: int | None = None
    nth: int | None = None
    times: int | None = None
    probability: float = 1.0
    status: int = 503
    code: str = "ServiceUnavailable"
    seconds: float = 0.0
    after_bytes: int = 0
    extra_bytes: int = 1
    etag: str = "0" * 32
    region: str = ""

    def matches(self, method: str, operation: str, key: str, part: str = "") -> bool:
        """Return whether this fault speaks of such a request."""
        return (
            fnmatchcase(method, self.method)
            and fnmatchcase(operation, self.operation)
            and fnmatchcase(key, self.key)
            and (self.part is None or part == str(self.part))
        )


class Script:
    """The faults in force, in the order they were added. Safe to use from many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next_id = 1
        self._faults: dict[int, Fault] = {}
        self._seen: dict[int, int] = {}
        self._fired: dict[int, int] = {}
        self._released: dict[int, threading.Event] = {}
        self._random = random.Random(0)  # fixed, so that a run with probabilities can be repeated

    def add(self, faults: tuple[Fault, ...]) -> list[int]:
        """Add faults behind those in force; return their ids."""
        with self._lock:
            ids = list(range(self._next_id, self._next_id + len(faults)))
            self._next_id += len(faults)
            for number, fault in zip(ids, faults, strict=True):
                self._faults[number] = fault
                self._seen[number] = self._fired[number] = 0
                self._released[number] = threading.Event()
            return ids

    def clear(self, *numbers: int) -> None:
        """Remove these faults, or all if none is named, and let go what they hold."""
        with self._lock:
            for number in numbers or list(self._faults):
                del self._faults[number]
                self._released.pop(number).set()

    def choose(
        self, method: str, operation: str, key: str, part: str = ""
    ) -> tuple[Fault, threading.Event] | None:
        """Count the request; return the fault that meets it, and the event that `clear` will set.

        part: the part number as sent, empty without one.
        """
        chosen: tuple[Fault, threading.Event] | None = None
        with self._lock:
            for number, fault in self._faults.items():
                if not fault.matches(method, operation, key, part):
                    continue
                self._seen[number] += 1
                if chosen is None and self._fires(number, fault):
                    self._fired[number] += 1
                    chosen = fault, self._released[number]
            return chosen

    def _fires(self, number: int, fault: Fault) -> bool:
        if fault.nth is not None and self._seen[number] != fault.nth:
            return False
        if fault.times is not None and self._fired[number] >= fault.times:
            return False
        return fault.probability >= 1 or self._random.random() < fault.probability
