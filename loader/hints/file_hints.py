"""Tells the daemon of a mount which files, or parts of files, a job reads next: any format, any order.

    hints = FileHints([path for path, _ in folder.samples], sampler)       # torchvision's ImageFolder
    loader = DataLoader(folder, batch_size=64, sampler=hints, num_workers=8)

`FileHints` passes on what an order yields, and has looked ahead of it. A thread sends what it saw as plans
(`docs/hints.md`). The job itself says nothing of where it is: the daemon follows its reads. So it does not matter how
many workers read, or how far a DataLoader runs ahead.

Advice only. What is no file of a mount is left out; failures are logged once, and the job never waits for the daemon.
"""

import atexit
import errno
import json
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from fusecache.model.hints import CURSOR, FOLDER, PLAN, TO_THE_END, HintError, encode_cursor, encode_plan
from loader.errors import ArgumentError
from loader.hints.job_name import hold_name, release_name
from loader.hints.mount_endpoint import MountEndpoint, find_endpoint
from loader.hints.plan_messages import path_on_mount

log = logging.getLogger(__name__)

# Items looked at ahead of the job: for files of 100 KB, 6 GB. All jobs of a mount may name a million files at a time.
AHEAD_ITEMS = 1 << 16
# A plan has at most so many files, or parts of files: a message of some MiB.
PLAN_EXTENTS = 1 << 14
# How often the daemon is asked whether it still knows the job; also the pause after a failure.
CHECK_SECONDS = 10.0
# The daemon forgets a job after ten minutes without a message.
KEEPALIVE_SECONDS = 60.0
# Retry after EPERM: other jobs use up the daemon's limits.
LIMIT_RETRY_SECONDS = 60.0
# Time to withdraw the plans at exit: a mount that does not answer must not block the exit.
_CLOSE_SECONDS = 2.0

Files = Sequence[Any] | Mapping[Any, Any] | Callable[[Any], Any]


class FileHints:
    """Yields the items of an order, and tells the daemon which files they stand for, before they are read.

    files: what an item stands for: a sequence or mapping that has the item as an index or key, or a function of it. The
    result is a path, or a (path, offset, length) in bytes, or a list of those; None: no file. A function is called on
    a thread. order: the items: a sampler, a batch sampler (a list stands for all its items), or any iterable, which may
    be endless; default: all of `files`, in their order. ahead: how many items are drawn from it in advance.
    job: a name in `fusecache status`; default: derived from the run.

    A sequence as order is sent at once, so that files come before the first iteration, or without any. Each iteration
    begins a new pass over the order. Pickles, and works in forked and spawned workers, which send for themselves.
    Raises ArgumentError for arguments of the wrong kind.
    """

    def __init__(
        self,
        files: Files,
        order: Iterable[Any] | None = None,
        *,
        ahead: int = AHEAD_ITEMS,
        job: str | None = None,
    ) -> None:
        is_table = isinstance(files, (Sequence, Mapping)) or hasattr(files, "dtype")
        if isinstance(files, (str, bytes)) or not (is_table or callable(files)):
            # Not every object with items: a data set of torch would load its samples.
            raise ArgumentError(
                f"files is {type(files).__name__}: give a sequence, a mapping, or a function from an item to a path"
            )
        if order is None and is_table:
            order = list(files) if isinstance(files, Mapping) else range(len(files))  # type: ignore[arg-type]
        if hasattr(order, "state_dict"):
            raise ArgumentError(
                f"order is {type(order).__name__}, which saves its position: FileHints would draw items in advance, "
                "and the saved position would be wrong. Give the rest of its order as a list"
            )
        if ahead < 1:
            raise ArgumentError(f"ahead is {ahead}: at least 1 item is looked at in advance")
        self._files, self._order, self._ahead, self._job = files, order, ahead, job
        self._sender: _Sender | None = None
        if order is not None and hasattr(order, "__getitem__") and hasattr(order, "__len__"):
            self._sender = _Sender(files, job, islice(iter(order), ahead))

    def __iter__(self) -> Iterator[Any]:
        if self._order is None:
            raise ArgumentError(
                "this FileHints has no order to iterate over: give one, or call follow(items)"
            )
        return self._pass_on(self._order, is_order=True)

    def __len__(self) -> int:
        return len(self._order)  # type: ignore[arg-type]  # TypeError, as for any iterable without a length

    def set_epoch(self, epoch: int) -> None:
        """Pass an epoch on to the order, if that has epochs."""
        set_epoch = getattr(self._order, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)

    def follow(self, items: Iterable[Any]) -> Iterator[Any]:
        """Yield items, and send the files of those ahead. A stage of a pipeline, such as WebDataset's shard lists."""
        return self._pass_on(items, is_order=False)

    def _pass_on(self, items: Iterable[Any], *, is_order: bool) -> Iterator[Any]:
        sender = self._sender
        if sender is None or sender.process != os.getpid():  # a forked child has none yet
            sender = self._sender = _Sender(self._files, self._job)
        is_known = is_order and sender.takes_first_pass()  # the constructor has sent it
        turn = 0 if is_known else sender.begin()
        source, drawn = iter(items), deque[Any]()
        refill = max(1, self._ahead // 4)
        while True:
            if len(drawn) <= self._ahead - refill:
                new = list(islice(source, self._ahead - len(drawn)))
                drawn.extend(new)
                if not is_known:
                    sender.add(new, turn)
                is_known = False
            if not drawn:
                return
            yield drawn.popleft()

    def close(self) -> None:
        """Withdraw the hints: now, or when the mount answers again."""
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.close()

    def __enter__(self) -> "FileHints":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_sender": None}

    def __del__(self) -> None:
        sender = getattr(self, "_sender", None)
        if sender is not None:
            sender.stop()


class _Row(NamedTuple):
    """Bytes of a file that one item stands for. path: below the root of its mount."""

    path: str
    start: int
    length: int
    step: int


class _Sender:
    """A job of one process: a thread turns items into plans, and sends them to each mount that has files of them."""

    def __init__(self, files: Files, job: str | None, items: Iterable[Any] | None = None) -> None:
        """items: the first ones of pass 0, before any iteration."""
        self.process = os.getpid()
        self._files = files if callable(files) else files.__getitem__
        self._job = job or hold_name("files", 0, "")
        self._is_held = not job
        self._places = _Places()
        self._lock = threading.Lock()
        self._new: deque[Any] = deque(items or ())
        self._is_primed = items is not None
        self._turn = 0  # of the pass whose items are taken
        self._sent_turn = 0
        self._step = 0
        # Plans that were sent, or are to be, in the order of their windows; on each mount its own.
        self._plans: dict[MountEndpoint, deque[tuple[int, list[_Row]]]] = {}
        self._unsent: deque[tuple[MountEndpoint, int, list[_Row]]] = deque()
        self._window = 0
        self._warned: set[str] = set()
        self._woken, self._stopped = threading.Event(), threading.Event()
        self._woken.set()
        self._thread = threading.Thread(target=self._run, name="fusecache-file-hints", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def takes_first_pass(self) -> bool:
        """Return True once, if the constructor of FileHints has sent the first items."""
        with self._lock:
            is_first, self._is_primed = self._is_primed, False
            return is_first

    def begin(self) -> int:
        """Begin a pass: what was sent of the one before is replaced. Return its number, for `add`."""
        with self._lock:
            self._turn += 1
            self._new.clear()
            return self._turn

    def add(self, items: Iterable[Any], turn: int) -> None:
        """Take the next items of a pass; those of an abandoned pass are left out."""
        with self._lock:
            if turn == self._turn:
                self._new.extend(items)
        self._woken.set()

    def stop(self) -> None:
        """Let the thread withdraw the plans, and end."""
        if self.process == os.getpid():
            self._stopped.set()
            self._woken.set()
            atexit.unregister(self.close)

    def close(self) -> None:
        """Stop, and wait a moment for it."""
        self.stop()
        if self.process == os.getpid() and self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_SECONDS)

    # ---- the thread

    def _run(self) -> None:
        try:
            pause, quiet = CHECK_SECONDS, 0.0
            while not self._stopped.is_set():
                is_new = self._woken.wait(pause)
                self._woken.clear()
                quiet = 0.0 if is_new else quiet + pause
                pause = self._try_to_send(is_due=not is_new, is_silent=quiet >= KEEPALIVE_SECONDS)
                quiet = 0.0 if quiet >= KEEPALIVE_SECONDS else quiet
        finally:
            for endpoint in self._plans:
                self._try(lambda endpoint=endpoint: endpoint.send(self._job + PLAN, b""))  # type: ignore[misc]
            if self._is_held:
                release_name(self._job)

    def _try_to_send(self, *, is_due: bool, is_silent: bool) -> float:
        """Send what is new; return the seconds until the next look."""
        try:
            self._take()
            if is_due:
                self._look_after(is_silent=is_silent)
            while self._unsent and not self._stopped.is_set():
                self._send(*self._unsent[0])
                self._unsent.popleft()
        except (OSError, HintError, ValueError, KeyError) as problem:
            self._say("refused", "the daemon takes no hints; reading continues without them: %s", problem)
            return LIMIT_RETRY_SECONDS if getattr(problem, "errno", None) == errno.EPERM else CHECK_SECONDS
        return CHECK_SECONDS

    def _take(self) -> None:
        """Turn new items into plans."""
        with self._lock:
            items, turn = list(self._new), self._turn
            self._new.clear()
        if turn != self._sent_turn:
            self._sent_turn, self._step, self._window = turn, 0, 0
            self._unsent.clear()
            for plans in self._plans.values():
                plans.clear()
        rows: dict[MountEndpoint, list[_Row]] = {}
        for item in items:
            for endpoint, row in self._rows(item, self._step):
                rows.setdefault(endpoint, []).append(row)
            self._step += 1
        for endpoint, all_rows in rows.items():
            for first in range(0, len(all_rows), PLAN_EXTENTS):
                plan = (self._window, all_rows[first : first + PLAN_EXTENTS])
                self._plans.setdefault(endpoint, deque()).append(plan)
                self._unsent.append((endpoint, *plan))
                self._window += 1

    def _rows(self, item: Any, step: int) -> Iterator[tuple[MountEndpoint, _Row]]:
        """Yield the mount and the bytes of each file of an item."""
        for each in item if isinstance(item, list) else [item]:
            try:
                found = self._files(each)
                for file in found if isinstance(found, list) else [found]:
                    path, start, length = file if isinstance(file, tuple) else (file, 0, TO_THE_END)
                    place = None if path is None else self._places.find(os.fspath(path))
                    if place is not None:
                        yield place[0], _Row(place[1], int(start), int(length), step)
            except Exception as problem:  # noqa: BLE001  # the caller's function: its errors must not end the hints
                self._say("files", "no hint for %r: %s: %s", each, type(problem).__name__, problem)

    def _send(self, endpoint: MountEndpoint, window: int, rows: list[_Row]) -> None:
        at = self._position(endpoint) or 0
        paths = sorted({row.path for row in rows})
        number = {path: place for place, path in enumerate(paths)}
        message = encode_plan(
            window=window,
            step=0 if window == 0 else at,
            paths=paths,
            path=[number[row.path] for row in rows],
            start=[row.start for row in rows],
            length=[row.length for row in rows],
            first=[row.step for row in rows],
            span=[0] * len(rows),
        )
        endpoint.send(self._job + PLAN, message)
        endpoint.send(self._job + CURSOR, encode_cursor(0 if window == 0 else at, by_reads=True))

    def _position(self, endpoint: MountEndpoint) -> int | None:
        """Return the step that the daemon assumes; None if it does not know the job. A pull into a folder has none."""
        if endpoint.is_folder:
            return 0
        try:
            return int(
                json.loads((endpoint.root / ".fusecache" / FOLDER / (self._job + CURSOR)).read_bytes())[
                    "step"
                ]
            )
        except FileNotFoundError:
            return None

    def _look_after(self, *, is_silent: bool) -> None:
        """Send lost plans again, drop finished ones, and report what the daemon could not use."""
        for endpoint, plans in self._plans.items():
            at = self._position(endpoint)
            while plans and at is not None and plans[0][1][-1].step < at:
                plans.popleft()
            if at is None:
                waiting = {(each, number) for each, number, _ in self._unsent}
                self._unsent.extend((endpoint, *plan) for plan in plans if (endpoint, plan[0]) not in waiting)
                continue
            if is_silent:
                endpoint.send(self._job + CURSOR, encode_cursor(at, by_reads=True))
            if endpoint.is_folder:
                continue
            report = json.loads((endpoint.root / ".fusecache" / FOLDER / (self._job + PLAN)).read_bytes())
            if report.get("skipped"):
                self._say(
                    "skipped",
                    "hints name files that cannot be fetched: %s of them, such as %s",
                    report["skipped"],
                    report.get("skipped_path"),
                )
            if report.get("is_astray"):
                self._say(
                    "astray", "hints name files that are not read, and others are: the daemon fetches no more"
                )

    def _try(self, call: Callable[[], None]) -> None:
        try:
            call()
        except OSError as problem:
            log.debug("hints not withdrawn: %s", problem)

    def _say(self, what: str, text: str, *values: object) -> None:
        """Log the first problem of a kind at INFO, later ones at DEBUG."""
        log.log(logging.DEBUG if what in self._warned else logging.INFO, text, *values)
        self._warned.add(what)


class _Places:
    """Finds the mounts of files; remembers that of each directory."""

    def __init__(self) -> None:
        self._of: dict[str, tuple[MountEndpoint, str] | None] = {}

    def find(self, path: str) -> tuple[MountEndpoint, str] | None:
        """Return the mount of a file, and its path there; None if no plan can name it."""
        folder, name = os.path.split(path.removeprefix("file://").removeprefix("file:"))
        if folder not in self._of:
            self._of[folder] = self._look(os.path.abspath(folder))
        place = self._of[folder]
        inner = None if place is None else path_on_mount(place[1] + name)
        return None if place is None or inner is None else (place[0], inner)

    def _look(self, folder: str) -> tuple[MountEndpoint, str] | None:
        """Look for a directory's mount; below one that is known, without a look at the disk."""
        for endpoint in {place[0] for place in self._of.values() if place is not None}:
            root = os.fspath(endpoint.root)
            if folder.startswith(root + "/"):
                return endpoint, folder[len(root) + 1 :] + "/"
        return find_endpoint(folder)
