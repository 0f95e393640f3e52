"""Tells the daemon of a mount which files, or parts of files, a job reads next: any format, any order.

    hints = FileHints([path for path, _ in folder.samples], sampler)       # torchvision's ImageFolder
    loader = DataLoader(folder, batch_size=64, sampler=hints, num_workers=8)

`FileHints` passes on what an order yields, and has looked ahead of it. A thread sends what it saw as plans
(`docs/hints.md`). The job itself says nothing of where it is: the daemon follows its reads. So it does not matter how
many workers read, or how far a DataLoader runs ahead.

Advice only. What is no file of a mount is left out; failures are logged once, and the job never waits for the daemon.

`DrawnItems` draws items from an order before the job asks for them. `FilePlaces` finds the mounts of files.
`MountPlans` holds the plans of one pass. Not here: how the mount of a directory is found (`mount_endpoint`).
"""

import errno
import json
import logging
import os
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from operator import length_hint
from typing import Any

from fusecache.model.hints import CURSOR, FOLDER, LONGEST_MESSAGE_BYTES, PLAN, TO_THE_END, HintError
from loader.base.mount_endpoint import MountEndpoint, find_endpoint
from loader.errors import ArgumentError
from loader.hints.job import HintJob, check_job, hold_name, hold_numbered
from loader.hints.plan_messages import EXTENT_BYTES, HEADER_BYTES, FileRow, path_on_mount, plan_message

log = logging.getLogger(__name__)

# How long an item that the job could have may wait for later ones.
DRAW_SECONDS = 0.1


class DrawnItems:
    """The items of an iterator that were drawn, and that the job does not have yet.

    samples: how many they stand for. has_ended: the iterator has no more for this pass.
    """

    def __init__(self, source: Iterator[Any]) -> None:
        self.items: deque[Any] = deque()
        self.samples = 0
        self.has_ended = False
        self._source = source
        self._problem: Exception | None = None

    def draw(self, samples: int) -> list[Any]:
        """Draw until there are this many samples, or for DRAW_SECONDS; return what is new."""
        new: list[Any] = []
        until = time.monotonic() + DRAW_SECONDS
        while self.samples < samples and not self.has_ended:
            try:
                item = next(self._source)
            except StopIteration:
                self.has_ended = True
                break
            except Exception as problem:  # noqa: BLE001  # the job gets it in its turn
                self.has_ended, self._problem = True, problem
                break
            new.append(item)
            self.items.append(item)
            self.samples += samples_of(item)
            if time.monotonic() >= until:
                break
        return new

    def take(self) -> Any:
        """Return the next item. Raises StopIteration if there is none, or the error that came in its place."""
        with suppress(IndexError):
            item = self.items.popleft()
            self.samples -= samples_of(item)
            return item
        self.samples = 0
        problem, self._problem = self._problem, None
        raise problem or StopIteration


def samples_of(item: Any) -> int:
    """Return how many samples an item stands for; an empty list counts too, as an order may have nothing else."""
    return max(1, len(item)) if isinstance(item, list) else 1


def is_same(left: list[Any], right: list[Any]) -> bool:
    """Return whether lists are surely equal: arrays as items may not tell."""
    try:
        return left == right
    except Exception:  # noqa: BLE001  # what comparing items raises is up to them
        return False


# Directories that are remembered: 600 bytes each, 60 MB. With more, all are looked at again: one lstat(2) each.
MOST_DIRECTORIES = 100_000
# Symbolic links from one file to the next, as in Linux.
_MOST_LINKS = 40


class FilePlaces:
    """Finds the mount of each file, and its path there; remembers that of each directory.

    A data set may have a million files. So a file costs a look into a dictionary, and a new directory one lstat(2).
    Outside all mounts, a directory's first file tells whether its files are symbolic links, and only then each is read.
    has_missing: whether a file was in no mount. A mount may come later: see `forget`.
    """

    def __init__(self) -> None:
        self.has_missing = False
        self._places: dict[str, tuple[MountEndpoint, str] | None] = {}
        # Directories in no mount whose files are symbolic links.
        self._linked: set[str] = set()
        # Of absolute directories: the real one, and its device.
        self._real: dict[str, tuple[str, int]] = {}
        # The known mounts, each with its device. A mount below another has another device.
        self._devices: dict[MountEndpoint, int] = {}

    def find(self, path: str) -> tuple[MountEndpoint, str] | None:
        """Return the mount of a file, and its path there; None if no plan can name it."""
        path = path.removeprefix("file://").removeprefix("file:")
        for _ in range(_MOST_LINKS):
            folder, name = os.path.split(path)
            if folder not in self._places:
                self._add(folder, path)
            place = self._places[folder]
            if place is not None:
                inner = path_on_mount(place[1] + name)
                return None if inner is None else (place[0], inner)
            if folder not in self._linked:
                break
            try:
                path = os.path.join(folder, os.readlink(path))
            except OSError:  # an ordinary file, or none
                break
        self.has_missing = True
        return None

    def forget(self) -> None:
        """Look at all directories again."""
        self.has_missing = False
        for memory in (self._places, self._linked, self._real):
            memory.clear()

    def _add(self, folder: str, file: str) -> None:
        """Look at a directory; file: one in it."""
        if len(self._places) >= MOST_DIRECTORIES:
            has_missing = self.has_missing
            self.forget()
            self.has_missing = has_missing
        place = self._places[folder] = self._look(os.path.abspath(folder))
        if place is None and os.path.islink(file):
            self._linked.add(folder)

    def _look(self, folder: str) -> tuple[MountEndpoint, str] | None:
        """Return the mount of a directory, and its path there with a slash at the end; None if it is on no mount."""
        real, device = self._resolve(folder)
        for endpoint, its_device in self._devices.items():
            root = os.fspath(endpoint.root)
            if device == its_device and real.startswith(root + "/"):
                return endpoint, real[len(root) + 1 :] + "/"
        place = find_endpoint(real)
        if place is not None:
            self._devices[place[0]] = device
        return place

    def _resolve(self, folder: str) -> tuple[str, int]:
        """Return a directory without symbolic links, and its device. One that is missing is on that of its parent."""
        if folder in self._real:
            return self._real[folder]
        above, name = os.path.split(folder)
        if not name:
            found = folder, os.lstat(folder).st_dev
        else:
            parent, device = self._resolve(above)
            real = os.path.join(parent, name)
            try:
                status = os.lstat(real)
                if stat.S_ISLNK(status.st_mode):
                    found = self._resolve(os.path.realpath(real, strict=True))
                else:
                    found = real, status.st_dev
            except OSError:  # it is missing, or a link that leads nowhere
                found = real, device
        self._real[folder] = found
        return found


# A plan has at most so many files, or parts of files: a message of some MiB.
PLAN_EXTENTS = 1 << 14


@dataclass(eq=False, slots=True)
class MountPlans:
    """The plans of the present pass for one mount, in the order of their steps.

    sent: the daemon has them. unsent: it does not have them. window: the number of the next one to be sent.
    """

    sent: deque[list[FileRow]] = field(default_factory=deque)
    unsent: deque[list[FileRow]] = field(default_factory=deque)
    window: int = 0

    def send_again(self) -> None:
        """The daemon has none of them: it was started again, or has forgotten the job."""
        self.unsent.extendleft(reversed(self.sent))
        self.sent.clear()
        self.window = 0

    def drop_before(self, step: int) -> None:
        """Drop plans all of whose items come before a step."""
        for plans in (self.sent, self.unsent):
            while plans and plans[0][-1].step < step:
                plans.popleft()


class RecentSteps:
    """The steps of the last parts of a pass, as many parts as have a number of samples together."""

    def __init__(self, samples: int) -> None:
        self._enough, self._samples = samples, 0
        self._parts: deque[tuple[int, int]] = deque()  # the first step of each, and its samples

    @property
    def first(self) -> int:
        """Return the first of them; 0 before the first part."""
        return self._parts[0][0] if self._parts else 0

    def add(self, step: int, samples: int) -> None:
        """Add a part that begins with a step."""
        if not samples:
            return
        self._parts.append((step, samples))
        self._samples += samples
        while self._samples - self._parts[0][1] >= self._enough:
            self._samples -= self._parts.popleft()[1]

    def clear(self) -> None:
        """Begin a pass."""
        self._parts.clear()
        self._samples = 0


def split_rows(rows: list[FileRow]) -> Iterator[list[FileRow]]:
    """Split rows into plans, each with at most PLAN_EXTENTS of them, and short enough for a message."""
    room, paths, first = 0, set[str](), 0
    for number, row in enumerate(rows):
        nbytes = EXTENT_BYTES + (0 if row.path in paths else len(row.path.encode()) + 1)
        if number and (room < nbytes or number - first == PLAN_EXTENTS):
            yield rows[first:number]
            first = number
        if number == first:
            room, paths = LONGEST_MESSAGE_BYTES - HEADER_BYTES, set()
            nbytes = EXTENT_BYTES + len(row.path.encode()) + 1
        room -= nbytes
        paths.add(row.path)
    yield rows[first:]


# Samples looked at ahead of the job: of 100 KB each, 6 GB. All jobs of a mount may name a million files at a time.
AHEAD_SAMPLES = 1 << 16
# The first plan of a pass has few samples, so that the daemon begins at once: 65 536 take half a second of CPU.
FIRST_SAMPLES = 512
# How often the daemon is asked whether it still knows the job, however fast items come; also the pause after a failure.
CHECK_SECONDS = 10.0

Files = Sequence[Any] | Mapping[Any, Any] | Callable[[Any], Any]


class FileHints:
    """Yields the items of an order, and tells the daemon which files they stand for, before they are read.

    files: what an item stands for: a sequence or mapping that has the item as an index or key, or a function of it. The
    result is a path, or a (path, offset, length) in bytes, or a list of those; None: no file. A function is called on
    a thread. order: the items: a sampler, a batch sampler (a list stands for all its items), or any iterable, which may
    be endless; default: all of `files`, in their order. ahead: how many samples are drawn from it in advance, and at
    least one item; a list counts as many as it has. job: a name in `fusecache status`, to which each process adds a
    number; default: derived from the run.

    A sequence as order is sent at once, so that files come before the first iteration, or without any. Each iteration
    begins a new pass over the order. Several threads may iterate at a time: each gets all its items, and the hints are
    those of the pass that began last. Pickles, and works in forked and spawned workers, which send for themselves.
    Raises ArgumentError for arguments of the wrong kind.
    """

    def __init__(
        self,
        files: Files,
        order: Iterable[Any] | None = None,
        *,
        ahead: int = AHEAD_SAMPLES,
        job: str | None = None,
    ) -> None:
        if isinstance(files, (str, bytes)) or not (_is_table(files) or callable(files)):
            # Not every object with items: a data set of torch would load its samples.
            raise ArgumentError(
                f"files is {type(files).__name__}: give a sequence, a mapping, or a function from an item to a path"
            )
        if hasattr(order, "state_dict"):
            raise ArgumentError(
                f"order is {type(order).__name__}, which saves its position: FileHints would draw items in advance, "
                "and the saved position would be wrong. Give the rest of its order as a list"
            )
        if order is not None and not hasattr(order, "__iter__") and not hasattr(order, "__getitem__"):
            raise ArgumentError(
                f"order is {type(order).__name__}, which has no items: give the items in the order of their reads, or "
                "a sampler"
            )
        if ahead < 1:
            raise ArgumentError(f"ahead is {ahead}: at least 1 sample is looked at in advance")
        check_job(job)
        self._files, self._order, self._ahead, self._job = files, order, ahead, job
        # By process: a forked child has none yet.
        self._senders: dict[int, _Sender] = {}
        # What earlier passes drew from an order that is an iterator: it gives each item once.
        self._left: DrawnItems | None = None
        order = self._present_order()
        if hasattr(order, "__getitem__") and hasattr(order, "__len__"):
            self._senders[os.getpid()] = _Sender(files, job, ahead, DrawnItems(iter(order)).draw(ahead))

    def _present_order(self) -> Any:
        """Return the order, by default that of the files, which may have become more; None if there is none."""
        files: Any = self._files
        if self._order is not None or not _is_table(files):
            return self._order
        return list(files) if isinstance(files, Mapping) else range(len(files))

    def __iter__(self) -> Iterator[Any]:
        order = self._present_order()
        if order is None:
            raise ArgumentError(
                "this FileHints has no order to iterate over: give one, or call follow(items)"
            )
        return self._pass_on(order, is_order=True)

    def __len__(self) -> int:
        return len(self._present_order())  # TypeError, as for any iterable without a length

    def set_epoch(self, epoch: int) -> None:
        """Pass an epoch on to the order, if that has epochs."""
        set_epoch = getattr(self._order, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)

    def follow(self, items: Iterable[Any]) -> Iterator[Any]:
        """Yield items, and send the files of those ahead. A stage of a pipeline, such as WebDataset's shard lists."""
        return self._pass_on(items, is_order=False)

    def _pass_on(self, items: Iterable[Any], *, is_order: bool) -> Iterator[Any]:
        sender, source = self._own_sender(), iter(items)
        if is_order and source is items:
            drawn = self._left = self._left or DrawnItems(source)
            drawn.has_ended = False
        else:
            drawn = DrawnItems(source)
        known = sender.known_items() if is_order else []
        turn = 0 if known else sender.begin()
        waiting, sent = list(drawn.items), sum(map(samples_of, known))
        refill = max(1, self._ahead // 4)
        while True:
            if drawn.samples <= self._ahead - refill:
                new = drawn.draw(self._ahead)
                is_shorter = drawn.has_ended and len(known) > len(new)
                if is_same(new[: len(known)], known[: len(new)]) and not is_shorter:
                    new, known = new[len(known) :], known[len(new) :]
                else:  # the constructor has sent another order
                    new, known, sent, turn = list(drawn.items), [], 0, sender.begin()
                waiting += new
                # A slow order gives few at a time, and a daemon takes few plans: send as many as before, or more.
                samples = sum(map(samples_of, waiting))
                if waiting and (drawn.has_ended or samples >= min(refill, sent)):
                    sender.add(waiting, turn)
                    waiting, sent = [], sent + samples
            try:
                item = drawn.take()
            except StopIteration:
                return
            yield item

    def _own_sender(self) -> "_Sender":
        """Return this process's sender; begin one if it has none."""
        process = os.getpid()
        sender = self._senders.get(process)
        if sender is None:
            new = _Sender(self._files, self._job, self._ahead)
            sender = self._senders.setdefault(process, new)
            if sender is not new:  # another thread was faster
                new.close()
        return sender

    def close(self) -> None:
        """Withdraw the hints: now, or when the mount answers again."""
        sender = self._senders.pop(os.getpid(), None)
        if sender is not None:
            sender.close()

    def __enter__(self) -> "FileHints":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_senders": {}}

    def __del__(self) -> None:
        for sender in getattr(self, "_senders", {}).values():
            sender.stop()


def _is_table(files: Files) -> bool:
    """Return whether the files are all there, so that their order can be the default."""
    return isinstance(files, (Sequence, Mapping)) or hasattr(files, "dtype")


class _Sender:
    """A job of one process: a thread turns items into plans, and sends them to each mount that has files of them.

    Memory is bounded here and in the daemon: both drop the plan of an item at the latest when half as many samples
    again as `ahead` were drawn after it. For the daemon's part a plan has a step: reads that the kernel answers do not
    move the job.
    """

    def __init__(self, files: Files, job: str | None, ahead: int, items: Sequence[Any] = ()) -> None:
        """items: the first ones of pass 0, before any iteration."""
        self._files = files if callable(files) else files.__getitem__
        self._table = None if callable(files) else files
        self._job = HintJob(hold_name("files", 0, "") if job is None else hold_numbered(job), log)
        self.stop, self.close = self._job.stop, self._job.close
        self._ahead = ahead
        self._places = FilePlaces()
        self._lock = threading.Lock()
        self._new: deque[Any] = deque(items)
        self._new_samples = sum(map(samples_of, self._new))
        self._passed_over = 0  # items that came before those of `_new`, and were left out
        self._known = list(items)
        self._turn = 0  # of the pass whose items are taken
        self._sent_turn = 0
        self._step = 0
        self._recent = RecentSteps(ahead + ahead // 2)
        self._plans: dict[MountEndpoint, MountPlans] = {}
        self._job.start(self._turns(), "fusecache-file-hints")

    def known_items(self) -> list[Any]:
        """Return, once, what the constructor of FileHints has sent; nothing if some of it is on no mount."""
        with self._lock:
            known, self._known = self._known, []
            return [] if self._places.has_missing else known

    def begin(self) -> int:
        """Begin a pass: what was sent of the one before is replaced. Return its number, for `add`."""
        with self._lock:
            self._turn += 1
            self._known = []
            self._new.clear()
            self._new_samples = self._passed_over = 0
            return self._turn

    def add(self, items: Iterable[Any], turn: int) -> None:
        """Take the next items of a pass; those of an abandoned pass are left out."""
        with self._lock:
            if turn == self._turn:
                for item in items:
                    self._new.append(item)
                    self._new_samples += samples_of(item)
            # The job has the first of them already if `ahead` samples come before the last.
            while self._new and self._new_samples - samples_of(self._new[-1]) >= self._ahead:
                self._new_samples -= samples_of(self._new.popleft())
                self._passed_over += 1
        self._job.wake()

    # ---- the thread

    def _turns(self) -> Generator[float]:
        due_at = time.monotonic() + CHECK_SECONDS
        while True:
            is_due = time.monotonic() >= due_at
            pause = self._try_to_send(is_due=is_due)
            if is_due:
                due_at = time.monotonic() + pause
            yield max(0.0, due_at - time.monotonic())

    def _try_to_send(self, *, is_due: bool) -> float:
        """Send what is new; return the seconds until the next look at the mounts."""
        if self._take():
            self._job.wake()
        pauses = []
        for endpoint, plans in self._plans.items():
            pauses.append(CHECK_SECONDS)
            try:  # a mount that refuses costs its own hints only
                if is_due:
                    self._look_after(endpoint, plans)
                while plans.unsent and not self._job.stopped.is_set():
                    self._send(endpoint, plans)
            except (OSError, HintError, ValueError, KeyError) as problem:
                pauses[-1] = self._job.refused(problem, endpoint)
        return min(pauses, default=CHECK_SECONDS)

    def _take(self) -> bool:
        """Turn some of the new items into plans; return whether there are more."""
        with self._lock:
            turn = self._turn
            is_new_pass = turn != self._sent_turn
            passed_over, self._passed_over = self._passed_over, 0
            room = FIRST_SAMPLES if is_new_pass or not self._step else PLAN_EXTENTS
            items, samples = [], 0
            while self._new and samples < room:
                items.append(self._new.popleft())
                samples += samples_of(items[-1])
            has_more = bool(self._new)
            self._new_samples = self._new_samples - samples if has_more else 0
        if is_new_pass:
            self._sent_turn, self._step = turn, 0
            if self._places.has_missing:  # their mount may be there now
                self._places.forget()
            for plans in self._plans.values():
                plans.sent.clear()
                plans.unsent.clear()
                plans.window = 0
            self._recent.clear()
        self._recent.add(self._step, passed_over)
        self._step += passed_over
        self._recent.add(self._step, samples)
        rows: dict[MountEndpoint, list[FileRow]] = {}
        for item in items:
            for endpoint, row in self._rows(item, self._step):
                rows.setdefault(endpoint, []).append(row)
            self._step += 1
        for endpoint, all_rows in rows.items():
            self._plans.setdefault(endpoint, MountPlans()).unsent.extend(split_rows(all_rows))
        for plans in self._plans.values():
            plans.drop_before(self._recent.first)
        return has_more

    def _rows(self, item: Any, step: int) -> Iterator[tuple[MountEndpoint, FileRow]]:
        """Yield the mount and the bytes of each file of an item."""
        for each in item if isinstance(item, list) else [item]:
            try:
                found = self._files(each)
                for file in found if isinstance(found, list) else [found]:
                    path, start, length = file if isinstance(file, tuple) else (file, 0, TO_THE_END)
                    if path is None:
                        continue
                    place = self._places.find(os.fspath(path))
                    if place is None:
                        self._job.say(
                            "place",
                            "no hint for %s: it is in no mount of fusecache, so nothing fetches it in advance. Compare "
                            "the path with `fusecache status`",
                            path,
                        )
                        continue
                    start, length = int(start), int(length)
                    if 0 <= start <= TO_THE_END and 0 < length <= TO_THE_END:
                        yield place[0], FileRow(place[1], start, length, step)
                    else:
                        self._job.say(
                            "range",
                            "no hint for %r: offset %d and length %d name no bytes of %s: give an offset of 0 or more "
                            "and a length of 1 or more, or None for no file",
                            *(each, start, length, path),
                        )
            except Exception as problem:  # noqa: BLE001  # the caller's function: its errors must not end the hints
                is_beyond = isinstance(problem, IndexError) and self._table is not None
                count = f"; it has {length_hint(self._table)} entries" if is_beyond else ""
                self._job.say(
                    "files",
                    "no hint for item %r of the order: `files` has no path for it (%s: %s)%s",
                    *(each, type(problem).__name__, problem, count),
                )

    def _send(self, endpoint: MountEndpoint, plans: MountPlans) -> None:
        """Send a mount its next plan. One that is refused for what it contains is dropped: later ones may be taken."""
        at = self._position(endpoint)
        if at is None:
            plans.send_again()
        step = max(at or 0 if plans.window else 0, self._recent.first)
        try:
            self._job.plan(endpoint, plan_message(plans.unsent[0], plans.window, step))
        except (OSError, HintError) as problem:
            if isinstance(problem, OSError) and problem.errno != errno.EINVAL:
                raise
            rows = plans.unsent.popleft()
            self._job.say(
                "plan",
                "the hints of items %d to %d are left out; reading continues without them: %s",
                *(rows[0].step, rows[-1].step, problem),
            )
            return
        plans.sent.append(plans.unsent.popleft())
        plans.window += 1
        self._job.move(endpoint, step, by_reads=True)

    def _position(self, endpoint: MountEndpoint) -> int | None:
        """Return the step that the daemon assumes; None if it does not know the job. A pull into a folder has none."""
        if endpoint.is_folder:
            return 0
        try:
            return int(
                json.loads((endpoint.root / ".fusecache" / FOLDER / (self._job.name + CURSOR)).read_bytes())[
                    "step"
                ]
            )
        except FileNotFoundError:
            return None

    def _look_after(self, endpoint: MountEndpoint, plans: MountPlans) -> None:
        """Have lost plans sent again, drop finished ones, and report what the daemon could not use."""
        at = self._position(endpoint)
        if at is None:
            plans.send_again()
            return
        if plans.sent:  # else it is the step of the pass before
            plans.drop_before(at)
        if self._job.is_quiet(endpoint):
            self._job.move(endpoint, at, by_reads=True)
        if endpoint.is_folder:
            return
        report = json.loads((endpoint.root / ".fusecache" / FOLDER / (self._job.name + PLAN)).read_bytes())
        if report.get("skipped"):
            self._job.say(
                "skipped",
                "hints name files that cannot be fetched: %s of them, such as %s",
                report["skipped"],
                report.get("skipped_path"),
            )
        if report.get("is_astray"):
            self._job.say(
                "astray",
                "only files that no hint names are read: the daemon fetches no more until a named one is read. "
                "This is right while a checkpoint or a validation set is read; else compare the order with "
                "what is read",
            )
