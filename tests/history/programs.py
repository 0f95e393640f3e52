"""Random programs: what several processes do with a tree, and at which moments their node ends.

A step is a tuple that `machine.py` carries out; one that cannot be done as things are is skipped, so that any part of
a program is a program too.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tests.history.crashes import KINDS, WHENS, Moment

Step = tuple[object, ...]
FOLDERS = ("d", "e", "d/f")
NAMES = ("a", "b", "c.tmp", ".metadata", "latest")
PATHS = tuple(f"{folder}/{name}".strip("/") for folder in ("", *FOLDERS) for name in NAMES)
SLOTS = 4
# Bytes; beyond 64 KiB a file is sent in parts.
SIZES = (0, 1, 7, 100, 5000, 150_000)
WAITS = (0.05, 0.3, 0.7, 1.2, 3.0, 10.0, 65.0)
# Steps that `runs.py` carries out: the node stops in order, or is killed, and starts again on what it left. Its queue
# is not empty.
STOP: Step = ("stop",)
KILL: Step = ("kill",)


@dataclass(frozen=True)
class Program:
    """Steps, and the moment at which each life of the node ends; the life after the last of them ends in order.

    slow_threads: what the engine does in threads takes time, and goes on when nobody wants it any more.
    """

    seed: int
    steps: tuple[Step, ...]
    moments: tuple[Moment, ...] = ()
    slow_threads: bool = False

    def text(self) -> str:
        """Return it as it is given to `--replay`."""
        moments = [(moment.kind, moment.number, moment.when) for moment in self.moments]
        return repr((self.seed, list(self.steps), moments, self.slow_threads))


def parse_program(text: str) -> Program:
    """Return the program that `Program.text` gave. Raises ValueError."""
    import ast

    seed, steps, moments, slow_threads = ast.literal_eval(text)
    return Program(seed, tuple(steps), tuple(Moment(*moment) for moment in moments), slow_threads)


def make_program(seed: int, *, slow_threads: bool = False) -> Program:
    """Return a program without crashes."""
    rng = random.Random(seed)
    steps: list[Step] = [("mkdir", folder) for folder in FOLDERS if rng.random() < 0.7]
    if rng.random() < 0.6:
        for path in rng.sample(PATHS, 3):
            steps.append(("save", path, rng.choice(SIZES)))
        steps.append(("drain",))
    kinds, weights = zip(*_STEPS, strict=True)
    others = [make(rng) for make in rng.choices(kinds, weights, k=rng.randrange(3, 16))]
    if rng.random() < 0.5:
        trains = _training(rng)
        places = sorted(rng.randrange(len(trains) + 1) for _ in others)
        for place, other in reversed(list(zip(places, others, strict=True))):
            trains.insert(place, other)
        others = trains
    return Program(seed, (*steps, *others), slow_threads=slow_threads)


def _training(rng: random.Random) -> list[Step]:
    folder = rng.choice(("", "", "d/", "e/"))
    steps: list[Step] = [("mkdir", folder.rstrip("/"))] if folder else []
    replaces, size = rng.choice(list(REPLACES.values())), rng.choice((100, 5000, 150_000))
    return [*steps, *training(replaces, folder, rng.randrange(2, 5), size, is_drained=rng.random() < 0.8)]


def training(
    replaces: "Replaces", folder: str, rounds: int, size: int, *, is_drained: bool = True
) -> list[Step]:
    """Return a run that keeps one checkpoint. replaces: how; is_drained: the bucket has the first one at once."""
    steps: list[Step] = []
    for number in range(1, rounds + 1):
        steps += replaces(folder, number, size)
        if number == 1 and is_drained:
            steps.append(("drain",))
    return steps


def _saved(size: int, *paths: str) -> list[Step]:
    return [*(("save", path, size) for path in paths), ("complete", *paths)]


def _by_new_name(folder: str, number: int, size: int) -> list[Step]:
    return [*_saved(size, f"{folder}s{number}"), ("unlink", f"{folder}s{number - 1}")]


def _delete_before_rename(suffix: str) -> "Replaces":
    def replaces(folder: str, number: int, size: int) -> list[Step]:
        new, old = f"{folder}s{number}", f"{folder}s{number - 1}"
        return [*_saved(size, new + suffix), ("unlink", old), ("rename", new + suffix, new)]

    return replaces


def _delete_after_rename(folder: str, number: int, size: int) -> list[Step]:
    new, old = f"{folder}s{number}", f"{folder}s{number - 1}"
    return [*_saved(size, f"{new}.tmp"), ("rename", f"{new}.tmp", new), ("unlink", old)]


def _same_name(name: str) -> "Replaces":
    def replaces(folder: str, _number: int, size: int) -> list[Step]:
        path = folder + name
        return [*_saved(size, f"{path}.tmp"), ("unlink", path), ("rename", f"{path}.tmp", path)]

    return replaces


def _over(folder: str, _number: int, size: int) -> list[Step]:
    return [*_saved(size, f"{folder}ckpt.tmp"), ("rename", f"{folder}ckpt.tmp", f"{folder}ckpt")]


def _with_backup(folder: str, _number: int, size: int) -> list[Step]:
    path = f"{folder}ckpt"
    moves: list[Step] = [
        ("rename", path, f"{path}.old"),
        ("rename", f"{path}.tmp", path),
        ("unlink", f"{path}.old"),
    ]
    return [*_saved(size, f"{path}.tmp"), *moves]


def _rewritten(folder: str, number: int, size: int) -> list[Step]:
    path = f"{folder}ckpt"
    moves: list[Step] = [("rename", path, f"{folder}s{number}.tmp"), ("unlink", f"{folder}s{number - 1}")]
    return [
        *_saved(size, path),
        *moves,
        ("rename", f"{folder}s{number}.tmp", f"{folder}s{number}"),
        ("save", path, 7),
    ]


def _by_folder(folder: str, number: int, size: int) -> list[Step]:
    new, old = f"{folder}w{number}", f"{folder}s{number - 1}"
    steps: list[Step] = [("mkdir", new), *_saved(size, f"{new}/x", f"{new}/y")]
    return [*steps, ("remove_all", old), ("rename_folder", new, f"{folder}s{number}")]


def _over_folder(folder: str, _number: int, size: int) -> list[Step]:
    new, old = f"{folder}w", f"{folder}s"
    steps: list[Step] = [("mkdir", new), *_saved(size, f"{new}/x", f"{new}/.metadata")]
    return [*steps, ("remove_all", old), ("rename_folder", new, old)]


def _several_ranks(folder: str, number: int, size: int) -> list[Step]:
    ranks = [f"{folder}r{rank}-" for rank in range(3)]
    deletes: list[Step] = [("unlink", f"{rank}{number - 1}") for rank in ranks]
    renames: list[Step] = [("rename", f"{rank}{number}.tmp", f"{rank}{number}") for rank in ranks]
    return [*_saved(size, *(f"{rank}{number}.tmp" for rank in ranks)), *deletes, *renames]


def _tried_twice(folder: str, number: int, size: int) -> list[Step]:
    new, first, second = (f"{folder}s{number}{suffix}" for suffix in ("", ".1.tmp", ".2.tmp"))
    steps: list[Step] = [*_saved(size, first), ("unlink", f"{folder}s{number - 1}"), *_saved(size, second)]
    return [*steps, ("unlink", first), ("rename", second, new)]


# Steps by which a trainer replaces its checkpoint: in a folder, by one of a number, with files of a size.
Replaces = Callable[[str, int, int], list[Step]]
REPLACES: dict[str, Replaces] = {
    "a new name": _by_new_name,
    "a delete before the rename": _delete_before_rename(".tmp"),
    "a delete before the rename of a name that is not temporary": _delete_before_rename(".new"),
    "a delete after the rename": _delete_after_rename,
    "the same name": _same_name("ckpt"),
    "the same name, a commit marker's": _same_name("last.ckpt"),
    "a rename over it": _over,
    "a backup": _with_backup,
    "rewritten, then renamed twice": _rewritten,
    "a folder": _by_folder,
    "a folder of the same name": _over_folder,
    "several ranks": _several_ranks,
    "a second try": _tried_twice,
}


def choose_moments(rng: random.Random, counts: dict[str, int]) -> tuple[Moment, ...]:
    """Return one to three moments, if there are any; counts: of each kind, in the program's first life without one."""
    if not any(counts.values()):
        return ()
    moments = [_moment(rng, counts)]
    while len(moments) < 3 and rng.random() < 0.35:
        # Recovery's own commits and requests are few, and the first ones.
        moments.append(_moment(rng, {kind: min(count, 12) for kind, count in counts.items()}))
    return tuple(moments)


def every_moment(counts: dict[str, int], kinds: Sequence[str] = KINDS) -> list[Moment]:
    """Return all moments of a life."""
    return [
        Moment(kind, number, when)
        for kind in kinds
        for number in range(counts.get(kind, 0))
        for when in WHENS
    ]


def shrink(program: Program, fails: Callable[[Program], bool], tries: int = 400) -> Program:
    """Return a shorter program that fails too: fewer lives, then fewer steps, at whatever moment."""
    left = tries

    def still_fails(candidate: Program) -> bool:
        nonlocal left
        left -= 1
        return left > 0 and fails(candidate)

    for index in reversed(range(len(program.moments))):
        candidate = replace(program, moments=program.moments[:index] + program.moments[index + 1 :])
        if still_fails(candidate):
            program = candidate
    length = max(1, len(program.steps) // 2)
    while left > 0:
        index, shorter = 0, False
        while index < len(program.steps) and left > 0:
            steps = program.steps[:index] + program.steps[index + length :]
            found = next((it for it in _nearby(replace(program, steps=steps)) if still_fails(it)), None)
            if found is None:
                index += length
            else:
                program, shorter = found, True
        if length == 1 and not shorter:
            break
        length = max(1, length // 2)
    return program


def _nearby(program: Program) -> list[Program]:
    """Return the program with its first life's end where it is, and a little earlier, as steps before it are gone."""
    if not program.moments:
        return [program]
    first, rest = program.moments[0], program.moments[1:]
    numbers = [first.number - back for back in range(12) if first.number >= back]
    return [replace(program, moments=(replace(first, number=number), *rest)) for number in numbers]


def _moment(rng: random.Random, counts: dict[str, int]) -> Moment:
    kind = rng.choice([kind for kind in KINDS if counts.get(kind)])
    return Moment(kind, rng.randrange(counts[kind]), rng.choice(WHENS))


def _slot(rng: random.Random) -> int:
    return rng.randrange(SLOTS)


def _path(rng: random.Random) -> str:
    # Few names, so that they meet.
    return rng.choice(PATHS[:8]) if rng.random() < 0.7 else rng.choice(PATHS)


_STEPS: list[tuple[Callable[[random.Random], Step], int]] = [
    (lambda rng: ("save", _path(rng), rng.choice(SIZES)), 14),
    (lambda rng: ("save_by_rename", _path(rng), rng.choice(SIZES)), 5),
    (lambda rng: ("replace", _path(rng), rng.choice(SIZES)), 4),
    (lambda rng: ("safetensors", _path(rng), rng.choice(SIZES)), 4),
    (lambda rng: ("checkpoint", rng.choice(FOLDERS), rng.choice(SIZES)), 5),
    (lambda rng: ("remove_all", rng.choice(FOLDERS)), 4),
    (lambda rng: ("open", _slot(rng), _path(rng), rng.choice(("keep", "truncate"))), 10),
    (
        lambda rng: ("write", _slot(rng), rng.choice(("end", "start", "middle", "hole")), rng.choice(SIZES)),
        12,
    ),
    (lambda rng: ("flush", _slot(rng)), 5),
    (lambda rng: ("close", _slot(rng)), 10),
    (lambda rng: ("late", _slot(rng), rng.choice((0.0, 0.5, 2.0))), 2),
    (lambda rng: ("fsync", _slot(rng)), 3),
    (lambda rng: ("truncate", _path(rng), rng.choice(SIZES)), 3),
    (lambda rng: ("chmod", _path(rng)), 2),
    (lambda rng: ("unlink", _path(rng)), 8),
    (lambda rng: ("rename", _path(rng), _path(rng)), 12),
    (lambda rng: ("rename_folder", rng.choice(FOLDERS), rng.choice(FOLDERS)), 5),
    (lambda rng: ("symlink", _path(rng), rng.choice(("a", "../x"))), 5),
    (lambda rng: ("mkdir", rng.choice(FOLDERS)), 4),
    (lambda rng: ("rmdir", rng.choice(FOLDERS)), 3),
    (lambda rng: ("wait", rng.choice(WAITS)), 16),
    (lambda rng: ("drain",), 3),
    (lambda rng: STOP, 5),
    (lambda rng: KILL, 5),
    (lambda rng: ("outage",), 3),
    (lambda rng: ("fail", rng.randrange(4), rng.choice(WHENS)), 4),
    (lambda rng: ("look",), 4),
]
