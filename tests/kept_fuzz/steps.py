"""Histories: what one program does with a few names, and when the daemon is killed or upgraded.

A step is a tuple of words; in a text it is a line. A step that cannot be done as things are is skipped, or fails in
the same way on both sides. So any part of a history is a history too.

    mkdir x                      open 1 a r+           write 1 0 w7 40      (descriptor, offset, tag, bytes)
    save a w1 12                 dup 1 2               append 1 w8 40       (at the descriptor's position)
    rename x/a b                 close 1               read 1 0 100000      (descriptor, offset, bytes)
    truncate a 5                 ftruncate 1 5         fsync 1
    cat a; stat a; ls x          unlink a; rmdir x     symlink a x/b        (target, name)
    published a                  waits until the bucket shows a's present content, 1 s at most
    pause 0.1; until 1.3         (seconds since the last meeting, where a text to be replayed has it)

The histories of a round meet at these steps. WAIT is what the others took, in seconds; a text to be replayed has it.

    bucket WAIT SECONDS MORE     so long an answer of the bucket takes from now on, and so much more every second upload
    gather WAIT                  and wait until the daemon has served for a while
    kill WAIT                    once all steps before it have returned
    kill-in WAIT MS              so many milliseconds later, while the next steps are under way
    kill-twice WAIT MS           and its successor so many milliseconds after that
    upgrade WAIT                 returns when the next daemon serves
    upgrade-in WAIT              while the next steps are under way
"""

import random
from collections.abc import Iterator, Sequence

Step = tuple[str | int | float, ...]
Steps = tuple[Step, ...]

EVENTS = ("kill", "kill-in", "kill-twice", "upgrade", "upgrade-in")
MEETINGS = ("bucket", "gather", *EVENTS)
FOLDERS = ("x", "y", "z")
FILES = ("a", "b", "x/a", "x/b", "y/a")
# Few names, so that they meet. These two only come to be by a rename of x.
ALL_FILES = (*FILES, "z/a", "z/b")
SLOTS = (1, 2, 3, 4)
MODES = ("r", "r", "r", "r+", "r+", "r+", "w", "w", "w+", "a", "a", "a+", "x", "r+t")
SIZES = (4, 12, 12, 12, 40, 40, 300, 5000, 70_000)
OFFSETS = (0, 0, 0, 3, 10, 50, 4096)
PAUSES = (0.02, 0.1, 0.3)


def text_of(steps: Sequence[Step]) -> str:
    """Return steps as lines, as `parse` takes them."""
    return "".join(" ".join(map(str, step)) + "\n" for step in steps)


def parse(text: str) -> Steps:
    """Return the steps of a text. Whatever stands behind a '#' is left out."""
    lines = [line.partition("#")[0].split() for line in text.splitlines()]
    return tuple((words[0], *map(_value, words[1:])) for words in lines if words)


def _value(word: str) -> str | int | float:
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word


def meetings_of(steps: Sequence[Step]) -> tuple[tuple[object, ...], ...]:
    """Return where a history meets others: only those with the same meetings can share a round."""
    return tuple((step[0], *step[2:]) for step in steps if step[0] in MEETINGS)


# How slow the bucket is in a round, as in the step `bucket`.
_SLOW = ((0.0, 0.0), (0.0, 0.5), (0.05, 0.0), (0.05, 0.5))


def draw_events(rng: random.Random, kills: int, upgrades: int) -> list[Step]:
    """Return how slow the bucket is in a round, then its kills and upgrades in the order in which they come."""
    events: list[Step] = []
    while kills > 0:
        kind = rng.choices(("kill", "kill-in", "kill-twice"), (6, 4, 2 if kills > 1 else 0))[0]
        kills -= 2 if kind == "kill-twice" else 1
        if kind == "kill":
            events.append((kind, 0.0))
        else:
            events.append((kind, 0.0, rng.choice((0, 1, 3, 10, 30, 100, 300))))
    events += [(rng.choice(("upgrade", "upgrade-in")), 0.0) for _ in range(upgrades)]
    rng.shuffle(events)
    return [("bucket", 0.0, *rng.choice(_SLOW)), *events]


def draw_history(rng: random.Random, events: Sequence[Step], length: int) -> Steps:
    """Return a history of about so many operations, with the round's events at places of its own."""
    draw = _Draw(rng)
    first, *events = events
    steps: list[Step] = [first, ("mkdir", "x"), ("mkdir", "y")]
    weights = [rng.uniform(0.3, 1.0) for _ in range(len(events) + 1)]
    counts = [round(length * weight / sum(weights)) for weight in weights]
    for count, event in zip(counts[:-1], events, strict=True):
        # What is done right before the event, or while it happens, is done without a wait for the other histories.
        burst = min(count, rng.choice((1, 2, 3, 5, 8, 12)))
        steps += draw.steps(count - burst)
        steps.append(("gather", 0.0))
        quick = draw.steps(burst, quick=True)
        steps += [event, *quick] if event[0] in ("kill-in", "upgrade-in") else [*quick, event]
    steps += draw.steps(counts[-1])
    return tuple(steps)


class _Draw:
    """Draws steps that mostly can be done. It knows what should be there, roughly."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._files: set[str] = set()
        self._folders = {"x", "y"}
        self._open: dict[int, str] = {}
        self._tags = 0
        self._waiting: list[Step] = []

    def steps(self, count: int, *, quick: bool = False) -> list[Step]:
        """Return so many steps. quick: without those that wait."""
        found: list[Step] = []
        makers, weights = zip(*_KINDS.items(), strict=True)
        while len(found) < count:
            if not self._waiting:
                self._waiting += getattr(self, f"_{self._rng.choices(makers, weights)[0]}")()
            step = self._waiting.pop(0) if self._waiting else None
            if step is None or (quick and step[0] in ("pause", "published")):
                continue
            found.append(step)
        return found

    # ---- what to choose from

    def _tag(self) -> str:
        self._tags += 1
        return f"w{self._tags}"

    def _path(self) -> str:
        if self._files and self._rng.random() < 0.8:
            return self._rng.choice(sorted(self._files))
        return self._rng.choice(ALL_FILES)

    def _place(self) -> str:
        places = [path for path in ALL_FILES if "/" not in path or path[0] in self._folders]
        return self._rng.choice(places)

    def _slot(self) -> int:
        return self._rng.choice(sorted(self._open) or SLOTS)

    def _size(self) -> int:
        return self._rng.choice(SIZES)

    def _free(self) -> int | None:
        free = [slot for slot in SLOTS if slot not in self._open]
        return self._rng.choice(free) if free else None

    # ---- one step, or a few that belong together

    def _opened(self, slot: int, path: str, mode: str) -> Step:
        if mode[0] in "wax":
            self._files.add(path)
        self._open[slot] = path
        return ("open", slot, path, mode)

    def _do_open(self) -> Iterator[Step]:
        slot = self._free()
        if slot is None:
            yield from self._do_close()
            return
        mode = self._rng.choice(MODES)
        yield self._opened(slot, self._place() if mode[0] in "wx" else self._path(), mode)

    def _do_close(self) -> Iterator[Step]:
        slot = self._slot()
        self._open.pop(slot, None)
        yield ("close", slot)

    def _do_dup(self) -> Iterator[Step]:
        slot = self._free()
        if slot is not None and self._open:
            source = self._slot()
            self._open[slot] = self._open[source]
            yield ("dup", source, slot)

    def _do_write(self) -> Iterator[Step]:
        if self._open:
            yield ("write", self._slot(), self._rng.choice(OFFSETS), self._tag(), self._size())

    def _do_append(self) -> Iterator[Step]:
        if self._open:
            yield ("append", self._slot(), self._tag(), self._size())

    def _do_read(self) -> Iterator[Step]:
        if self._open:
            yield ("read", self._slot(), *self._rng.choice(((0, 100_000), (0, 100_000), (5, 20))))

    def _do_fstat(self) -> Iterator[Step]:
        if self._open:
            yield ("fstat", self._slot())

    def _do_fsync(self) -> Iterator[Step]:
        if self._open:
            yield ("fsync", self._slot())

    def _do_ftruncate(self) -> Iterator[Step]:
        if self._open:
            yield ("ftruncate", self._slot(), self._rng.choice((0, 5, 100)))

    def _do_truncate(self) -> Iterator[Step]:
        yield ("truncate", self._path(), self._rng.choice((0, 5, 100)))

    def _saved(self, path: str) -> Step:
        self._files.add(path)
        return ("save", path, self._tag(), self._size())

    def _do_save(self) -> Iterator[Step]:
        yield self._saved(self._place())

    def _renamed(self, source: str, target: str) -> Step:
        if source in self._files:
            self._files.discard(source)
            self._files.add(target)
        return ("rename", source, target)

    def _do_rename(self) -> Iterator[Step]:
        yield self._renamed(self._path(), self._place())

    def _do_rename_folder(self) -> Iterator[Step]:
        source = self._rng.choice(sorted(self._folders) or FOLDERS)
        target = self._rng.choice(FOLDERS)
        if target not in self._folders:
            self._folders.discard(source)
            self._folders.add(target)
            moved = {path for path in self._files if path.startswith(f"{source}/")}
            self._files = (self._files - moved) | {target + path[1:] for path in moved}
        yield ("rename", source, target)

    def _do_unlink(self) -> Iterator[Step]:
        path = self._path()
        self._files.discard(path)
        yield ("unlink", path)

    def _do_mkdir(self) -> Iterator[Step]:
        path = self._rng.choice(FOLDERS[:2])
        self._folders.add(path)
        yield ("mkdir", path)

    def _do_rmdir(self) -> Iterator[Step]:
        path = self._rng.choice(FOLDERS)
        below = [each for each in self._files if each.startswith(f"{path}/")]
        if len(below) == 1 or not below:
            for each in below:
                self._files.discard(each)
                yield ("unlink", each)
            self._folders.discard(path)
        yield ("rmdir", path)

    def _do_symlink(self) -> Iterator[Step]:
        place = self._place()
        self._files.add(place)
        yield ("symlink", self._rng.choice(("a", "b")), place)

    def _do_cat(self) -> Iterator[Step]:
        yield ("cat", self._path())

    def _do_stat(self) -> Iterator[Step]:
        yield ("stat", self._path())

    def _do_ls(self) -> Iterator[Step]:
        yield ("ls", self._rng.choice((".", ".", *FOLDERS)))

    def _do_published(self) -> Iterator[Step]:
        yield ("published", self._path())

    def _do_pause(self) -> Iterator[Step]:
        yield ("pause", self._rng.choice(PAUSES))

    def _do_replace(self) -> Iterator[Step]:
        """An editor's way to save, of a file that may be open."""
        target, source = self._path(), self._place()
        if source != target:
            yield self._saved(source)
            yield self._renamed(source, target)

    def _do_rotate(self) -> Iterator[Step]:
        """A log that is moved away, while a program may still write to it, and made anew."""
        source, target = self._path(), self._place()
        if source != target:
            yield self._renamed(source, target)
            yield self._saved(source)

    def _do_reopen(self) -> Iterator[Step]:
        """A file that is written again while its last content is on the way."""
        slot = self._free()
        if slot is not None:
            path = self._place()
            yield self._saved(path)
            yield self._opened(slot, path, self._rng.choice(("r+", "a", "w")))
            if self._rng.random() < 0.4:
                yield ("append", slot, self._tag(), self._size())
            yield from self._rng.choice([[("published", path)], [("pause", 0.3)], []])


_KINDS: dict[str, int] = {
    "do_open": 14, "do_close": 9, "do_dup": 2, "do_write": 11, "do_append": 6, "do_read": 6, "do_fstat": 2,
    "do_fsync": 3, "do_ftruncate": 2, "do_truncate": 2, "do_save": 8, "do_rename": 11, "do_rename_folder": 5,
    "do_unlink": 7, "do_mkdir": 2, "do_rmdir": 2, "do_symlink": 2, "do_cat": 4, "do_stat": 3, "do_ls": 3,
    "do_published": 4, "do_pause": 4, "do_replace": 4, "do_rotate": 3, "do_reopen": 4,
}  # fmt: skip
