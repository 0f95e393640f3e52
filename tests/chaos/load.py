"""Starts the programs of the load, hears what they say, and knows what each file may hold."""

import itertools
import json
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.chaos.contents import Content
from tests.support import ROOT

# A call that lasts longer is a finding. Contract: reads 60 s after the bucket's last answer, a close 300 s.
BOUNDS_SECONDS = {"read": 120.0, "open": 120.0}
OTHER_BOUND_SECONDS = 310.0
# A file that stays open for 60 s is published as it is (contract: "Files that stay open").
STAYS_OPEN_SECONDS = 50.0
HISTORY_CALLS = 50_000

Report = Callable[[str, str], None]


class Ledger:
    """What each path may hold, from what the programs were promised. Safe for many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._allowed: dict[str, list[Content | None]] = {}
        self._uncertain: set[str] = set()
        self._partial: set[str] = set()
        self.closes = 0
        self.calls: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.read_bytes = 0
        self._history: deque[tuple[float, str]] = deque(maxlen=HISTORY_CALLS)

    def history(self, top: str) -> list[tuple[float, str]]:
        """Return the last calls that changed anything below `top`: seconds since 1970, and a line of text."""
        with self._lock:
            return [row for row in self._history if f" {top}" in row[1]]

    def _note(self, outcome: str, changes: dict[str, Content | None]) -> None:
        if changes:
            names = " ".join(f"{path}{'' if content else ' (gone)'}" for path, content in changes.items())
            now = time.time()
            self._history.append((now, f"{now:.3f} program {outcome} {names}"))

    def did(self, changes: dict[str, Content | None], call: str, count: int) -> None:
        """Note a call that returned."""
        with self._lock:
            self.calls[call] += 1
            self._note(call, changes)
            self.closes += call in {"write", "close"}
            self.read_bytes += count if call == "read" else 0
            for path, content in changes.items():
                self._allowed[path] = [content]
                self._uncertain.discard(path)
                self._partial.discard(path)

    def may_have(self, changes: dict[str, Content | None], seconds: float) -> None:
        """Note a call that failed, or whose program was killed, after that time."""
        with self._lock:
            self._note("perhaps", changes)
            for path, content in changes.items():
                self._allowed[path] = [*self._allowed.get(path, [None]), content]
                self._uncertain.add(path)
                if seconds > STAYS_OPEN_SECONDS:
                    self._partial.add(path)

    def failed(self, name: str) -> None:
        """Count an error."""
        with self._lock:
            self.errors[name] += 1

    def snapshot(self) -> dict[str, tuple[list[Content | None], bool]]:
        """Return for each path the contents that it may hold, and whether a part of the last is allowed too."""
        with self._lock:
            return {path: (list(found), path in self._partial) for path, found in self._allowed.items()}

    def certain(self) -> int:
        """Return how many files there must be."""
        with self._lock:
            return sum(None not in found for found in self._allowed.values())


class Running:
    """One program."""

    def __init__(self, words: list[str], ledger: Ledger, report: Report, is_excused: "Excuse") -> None:
        self.words = words
        self._ledger, self._report, self._is_excused = ledger, report, is_excused
        self._pending: dict[str, Any] | None = None
        self._is_late = False
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.programs", *words],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._thread = threading.Thread(target=self._hear)
        self._thread.start()

    def _hear(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for text in lines:
                if text.endswith("\n"):
                    self._take(json.loads(text))
        if self._pending is not None:
            self._may_have(self._pending, time.monotonic() - self._pending["at"])
            self._pending = None

    def _may_have(self, pending: dict[str, Any], seconds: float) -> None:
        self._ledger.may_have(pending["will"], seconds)
        self._ledger.may_have(pending["else"], seconds)

    def _take(self, line: dict[str, Any]) -> None:
        if "will" in line:
            self._pending, self._is_late = line, False
        elif "maybe" in line:
            self._ledger.may_have(line["maybe"], 0.0)
        elif "wrong" in line:
            self._report("wrong bytes", line["wrong"])
        elif self._pending is not None:
            call, began = self._pending["call"], self._pending["at"]
            if "did" in line:
                self._ledger.did(self._pending["will"], call, line["did"])
            else:
                self._may_have(self._pending, line["at"] - began)
                self._ledger.failed(line["failed"])
                since, is_allowed = self._pending["since"], line["failed"] in self._pending["allowed"]
                if not is_allowed and not self._is_excused(
                    self.words[0], call, line["failed"], since, line["at"]
                ):
                    self._report("error without a fault", f"{call}: {line['failed']} of {line['path']}")
            self._look(line["at"])
            self._pending = None

    def watch(self) -> None:
        """Report a call that is under way for too long."""
        self._look(time.monotonic())

    def _look(self, now: float) -> None:
        pending = self._pending
        if pending is None or self._is_late:
            return
        if now - pending["at"] > BOUNDS_SECONDS.get(pending["call"], OTHER_BOUND_SECONDS):
            self._is_late = True
            paths = ", ".join(pending["will"]) or self.words[2]
            self._report("slow call", f"{pending['call']} of {paths}: {now - pending['at']:.0f} s and more")

    def kill(self) -> None:
        """End it with SIGKILL."""
        self.process.kill()
        # The kernel lets it end only when the daemon has answered the call under way.
        self.wait(OTHER_BOUND_SECONDS)

    def stop(self) -> None:
        """Ask it to end after the call under way."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def wait(self, seconds: float) -> None:
        """Return when it has ended and all its lines are heard. Raises TimeoutExpired."""
        status = self.process.wait(seconds)
        self._thread.join(seconds)
        if self.process.stdin is not None:
            self.process.stdin.close()
        if status not in (0, -9):
            self._report("program", f"{self.words} ended with {status}")


# Says whether a fault explains an error: kind of program, call, error's name, begin and end of the call.
Excuse = Callable[[str, str, str, float, float], bool]


class Load:
    """All programs, with one that takes the place of each that was killed."""

    def __init__(self, root: Path, seed: int, report: Report, is_excused: Excuse) -> None:
        self.ledger = Ledger()
        self._root, self._seed, self._report, self._is_excused = root, seed, report, is_excused
        self._numbers = itertools.count()
        self._running: dict[str, Running] = {}
        self._lock = threading.Lock()

    def start(self, kinds: list[str]) -> None:
        """Start a program of each kind; a kind may be there several times."""
        with self._lock:
            for kind in kinds:
                self._start(kind)

    def _start(self, kind: str) -> None:
        number = next(self._numbers)
        name = f"{kind}-{number}"
        words = [kind, str(self._root), name, str(self._seed * 1000 + number)]
        self._running[name] = Running(words, self.ledger, self._report, self._is_excused)

    def kill_one(self, choice: int) -> None:
        """Kill a trainer, and start another."""
        with self._lock:
            names = [name for name in self._running if name.startswith("trainer")]
            if not names:
                return
            name = names[choice % len(names)]
            killed = self._running.pop(name)
            self._start("trainer")
        killed.kill()

    def watch(self) -> None:
        """Look at every program."""
        with self._lock:
            for name, each in list(self._running.items()):
                each.watch()
                if each.process.poll() is not None:
                    self._report("program", f"{name} ended by itself with {each.process.returncode}")
                    del self._running[name]
                    each.wait(10)

    def stop(self, seconds: float) -> None:
        """End all; what does not end in time is a finding."""
        with self._lock:
            for each in self._running.values():
                each.stop()
            deadline = time.monotonic() + seconds
            for name, each in self._running.items():
                try:
                    each.wait(max(0.1, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    self._report("slow call", f"{name} has not ended {seconds:.0f} s after it was asked to")
                    each.kill()
            self._running.clear()
