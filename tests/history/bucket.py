"""A bucket in memory that shows every change to the rules, and fails or ends the node where it is told to."""

from typing import Any

from fusecache.model.errors import Refused, Unavailable
from fusecache.model.objects import SYMLINK_TARGET
from tests.history.crashes import REQUEST, Reaper
from tests.history.past import Link, Value
from tests.history.rules import Effect, Rules, Violation
from tests.support.memory_store import MemoryStore
from tests.support.node import PUBLISHING, WRITING

KIB = 1 << 10
# More than this is cut into parts of this, here.
PART_BYTES = 64 * KIB


class WatchedBucket:
    """A `Store`. takes_nothing: reads are answered, writes are not. refuses: writes are, for good.

    failing: (number, when) of writes that fail.
    """

    def __init__(self, reaper: Reaper) -> None:
        self.memory = MemoryStore(part_minimum_bytes=PART_BYTES)
        self.rules: Rules | None = None
        self.takes_nothing = False
        self.refuses = False
        self.failing: dict[int, str] = {}
        self.violation: Violation | None = None
        # Uploads whose answer was lost: nobody but the bucket's own expiry can end them.
        self._unanswered: set[str] = set()
        self._begun: dict[str, int] = {}  # in which life
        self.requests = 0
        self._reaper = reaper

    def shows(self) -> dict[str, Value]:
        """Return what lies in the bucket; markers have keys that end with '/'."""
        return {key: self._value(key) for key in self.memory.contents()}

    def statistics(self) -> Any:
        """Return how many requests were answered."""
        return self.memory.statistics()

    def uploads_left(self) -> list[str]:
        """Return the keys of uploads that the node knew of and neither completed nor aborted.

        A node that ended before it journaled an id has left nobody who knows it: the bucket drops such an upload after
        a week.
        """
        return [
            key
            for upload_id, key in self.memory.open_uploads().items()
            if upload_id not in self._unanswered
            and (upload_id in self._reaper.journaled or self._begun.get(upload_id) == self._reaper.lives)
        ]

    def __getattr__(self, name: str) -> Any:
        call = getattr(self.memory, name)
        if name not in WRITING:
            return call

        def write(key: Any, *args: Any, **options: Any) -> Any:
            return self._write(name, args[0] if name == "copy" else key, lambda: call(key, *args, **options))

        return write

    def _write(self, name: str, key: str, call: Any) -> Any:
        if self.takes_nothing:
            raise Unavailable("the bucket takes nothing")
        if self.refuses:
            raise Refused(f"{key}: refused by policy")
        fails = self.failing.pop(self.requests, "")
        self.requests += 1
        if fails == "before":
            raise Unavailable("no answer, no effect")
        before = set(self.memory.open_uploads())
        try:
            result = self._reaper.passing(REQUEST, name, lambda: self._take_effect(name, key, call))
            if fails:
                raise Unavailable("the answer was lost")
        finally:
            for upload_id in set(self.memory.open_uploads()) - before:
                self._begun[upload_id] = self._reaper.lives
                if fails or self._reaper.is_dead:
                    self._unanswered.add(upload_id)
        return result

    def _take_effect(self, name: str, key: str, call: Any) -> Any:
        result = call()
        if name in PUBLISHING and self.rules is not None:
            try:
                self.rules.see(Effect(name, key, self._value(key)))
            except Violation as violation:
                self.violation = self.violation or violation
                raise
        return result

    def _value(self, key: str) -> Value:
        data = self.memory.contents().get(key)
        if data is None:
            return None
        target = (self.memory.head(key).metadata or {}).get(SYMLINK_TARGET)
        return Link(target) if target else data
