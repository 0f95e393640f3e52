"""Which directories of a bucket are checkpoints, which of them are whole, and which ones are removed. Pure.

A checkpoint is a directory with a step-like name: `step-1000`, `checkpoint-500`, `global_step1000`, `ep0-ba1000`, or a
number alone in a directory of checkpoints. Checkpoints whose names differ only in numbers are one series.

A checkpoint is whole if it has every commit marker that any checkpoint of its series has. One is not enough: some are
written early, such as `model.safetensors.index.json` of Transformers, which writes `trainer_state.json` last.

Which objects of a bucket `fusecache clean` removes, by name and age, and what that saves. Pure.
"""

import enum
import re
from collections import defaultdict
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from fusecache.model.objects import ObjectInfo
from fusecache.policy.name_patterns import matches_any

# Younger objects may be part of something that is being written on another node.
RECENT_SECONDS = 3600.0
# The listing and the server's clock may be a second apart: some stores round both down.
_ROUNDING_SECONDS = 1.0
# Cloudflare R2's price, before its free tier. A gigabyte is 10^9 bytes.
R2_DOLLARS_PER_GB_MONTH = 0.015


@dataclass(frozen=True, slots=True)
class Selection:
    """Objects by name and age. prefix, suffix, pattern: of the name below the source; "" selects all names."""

    older_than_seconds: float = 0.0
    prefix: str = ""
    suffix: str = ""
    pattern: str = ""
    even_recent: bool = False

    @property
    def has_names(self) -> bool:
        """Whether it selects by name."""
        return bool(self.prefix or self.suffix or self.pattern)

    def newest_seconds(self, now: float) -> float:
        """Return the latest modification time of an object that may go. now: the store's clock at the start.

        Whatever was written after the start is younger.
        """
        return now - max(self.older_than_seconds, _ROUNDING_SECONDS if self.even_recent else RECENT_SECONDS)

    def has_name(self, name: str) -> bool:
        """Return whether a name below the source is selected."""
        if not (name.startswith(self.prefix) and name.endswith(self.suffix)):
            return False
        # As for the options of a mount: without a '/' the pattern is for the last part of the name.
        part = name if "/" in self.pattern else name.rpartition("/")[2]
        return not self.pattern or fnmatchcase(part, self.pattern)


@dataclass(slots=True)
class Amount:
    """A number of objects and their bytes."""

    objects: int = 0
    bytes: int = 0

    def add(self, info: ObjectInfo) -> None:
        """Count an object."""
        self.objects += 1
        self.bytes += info.size


def dollars_a_month(nbytes: int, *, is_r2: bool, dollars_per_gb: float | None) -> float | None:
    """Return what storing some bytes costs; None if the price is unknown. dollars_per_gb: the price, if given."""
    price = dollars_per_gb if dollars_per_gb is not None else R2_DOLLARS_PER_GB_MONTH if is_r2 else None
    return None if price is None else nbytes / 1e9 * price


_STEP_LIKE = re.compile(
    r"(.*[-_=.])?(global_?)?(steps?|checkpoint|ckpt|iter|iteration|epoch|ep|ba)[-_=]?\d.*", re.IGNORECASE
)
_OF_CHECKPOINTS = re.compile(r"checkpoint|ckpt", re.IGNORECASE)
_NUMBER = re.compile(r"\d+")


class Fate(enum.Enum):
    """What happens to a checkpoint, and why."""

    REMOVED = "removed"
    KEPT = "one of the newest"
    BEING_WRITTEN = "incomplete and newer than the newest whole one: probably being written"
    INCOMPLETE = "incomplete: add --incomplete to remove it"
    RECENT = "not old enough: an object in it is too young"


@dataclass(slots=True)
class CheckpointSummary:
    """One checkpoint. folder: its key prefix, with a slash at its end; newest: the latest modification in it.

    markers: the paths of its commit markers inside it, each number as `#`.
    """

    folder: str
    objects: int = 0
    bytes: int = 0
    newest: float = float("-inf")
    markers: set[str] = field(default_factory=set)

    @property
    def steps(self) -> tuple[int, ...]:
        """The numbers in its name, by which a series is ordered."""
        return tuple(map(int, _NUMBER.findall(self.folder.rstrip("/").rpartition("/")[2])))

    @property
    def series(self) -> tuple[str, str]:
        """What all checkpoints of one run have in common: the directory, and the name without its numbers."""
        parent, _, name = self.folder.rstrip("/").rpartition("/")
        return parent, _NUMBER.sub("#", name)


class CheckpointSurvey:
    """The checkpoints below a prefix. Its memory grows with their number, not with that of objects."""

    def __init__(self, below: str, order_last: tuple[str, ...]) -> None:
        """below: a key prefix, empty or ending in '/'. order_last: name patterns of commit markers."""
        self._below = below
        self._order_last = order_last
        self._checkpoints: dict[str, CheckpointSummary] = {}

    def add(self, info: ObjectInfo) -> bool:
        """Count an object; return whether it lies in a checkpoint."""
        folder = checkpoint_folder(info.key, self._below)
        if folder is None:
            return False
        found = self._checkpoints.setdefault(folder, CheckpointSummary(folder))
        found.objects += 1
        found.bytes += info.size
        found.newest = max(found.newest, info.modified)
        if is_commit_marker(info.key, self._order_last):
            found.markers.add(_NUMBER.sub("#", info.key.removeprefix(folder)))
        return True

    def fates(
        self, *, keep: int | None, removes_incomplete: bool, newest_seconds: float
    ) -> list[tuple[CheckpointSummary, Fate]]:
        """Return what happens to each checkpoint, in key order.

        keep: how many whole ones each series keeps; None: none, and whole or not does not matter. Those of the highest
        steps and those of the latest times are kept: they differ after a run went back to an earlier step.
        newest_seconds: a checkpoint with a younger object is not removed.
        """
        series: dict[tuple[str, str], list[CheckpointSummary]] = defaultdict(list)
        for each in self._checkpoints.values():
            series[each.series].append(each)
        found = []
        for members in series.values():
            fates = [Fate.REMOVED] * len(members)
            if keep is not None:
                fates = _fates_of_series(members, keep, removes_incomplete=removes_incomplete)
            for each, fate in zip(members, fates, strict=True):
                is_young = fate is Fate.REMOVED and each.newest > newest_seconds
                found.append((each, Fate.RECENT if is_young else fate))
        return sorted(found, key=lambda each: each[0].folder)


def checkpoint_folder(key: str, below: str) -> str | None:
    """Return the outermost checkpoint below a prefix that holds a key; None if there is none."""
    parents = below.rstrip("/").split("/")
    parts = key.removeprefix(below).split("/")
    for index, part in enumerate(parts[:-1]):
        above = parts[index - 1] if index else parents[-1]
        if _STEP_LIKE.fullmatch(part) or (part.isdecimal() and _OF_CHECKPOINTS.search(above)):
            return below + "/".join(parts[: index + 1]) + "/"
    return None


def is_commit_marker(key: str, order_last: tuple[str, ...]) -> bool:
    """Return whether a key's name says that other files are complete."""
    return matches_any(key.rpartition("/")[2], order_last)


def _fates_of_series(members: list[CheckpointSummary], keep: int, *, removes_incomplete: bool) -> list[Fate]:
    needed = set().union(*(each.markers for each in members))
    whole = [each for each in members if needed and each.markers >= needed]
    by_step = sorted(whole, key=lambda each: (each.steps, each.newest))
    by_time = sorted(whole, key=lambda each: (each.newest, each.steps))
    kept = {each.folder for each in (*by_step[-keep:], *by_time[-keep:])}
    whole_folders = {each.folder for each in whole}

    def fate(each: CheckpointSummary) -> Fate:
        if each.folder in whole_folders:
            return Fate.KEPT if each.folder in kept else Fate.REMOVED
        if not whole or each.steps > by_step[-1].steps or each.newest > by_time[-1].newest:
            return Fate.BEING_WRITTEN
        return Fate.REMOVED if removes_incomplete else Fate.INCOMPLETE

    return [fate(each) for each in members]
