"""`fusecache clean`: removes objects of a bucket page by page, after a survey of what there is.

Invariants:
1. A page is deleted right after it was listed. What was written after the start is younger than the limit, and stays.
2. All commit markers go before any other file: a directory that is half removed never looks complete.
3. Before a page is deleted, every mount of this node on the bucket says which of its keys it needs.
4. Memory grows with the number of checkpoints, not with that of objects.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fusecache.model.errors import AccessDenied, ConfigError, RemoteError
from fusecache.model.format_text import seconds_text
from fusecache.model.names import parent_prefix
from fusecache.model.objects import ObjectInfo
from fusecache.policy.checkpoints import (
    Amount,
    CheckpointSummary,
    CheckpointSurvey,
    Fate,
    Selection,
    checkpoint_folder,
    is_commit_marker,
)
from fusecache.remote.s3.store import S3Store

# A larger difference of clocks is an error of one of them. Below it, the store's clock counts.
CLOCKS_DIFFER_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class CleaningPlan:
    """What to remove. below: a key prefix, empty or ending in '/'. order_last: name patterns of commit markers.

    keep_checkpoints: checkpoints only, all but the newest whole ones; None: objects, but a checkpoint only as a whole.
    removes_incomplete: also incomplete checkpoints that are older than a whole one. removes_directories: also keys that
    end in '/', outside of checkpoints. removes: not only a list.
    """

    below: str
    selection: Selection
    order_last: tuple[str, ...]
    keep_checkpoints: int | None = None
    removes_incomplete: bool = False
    removes_directories: bool = False
    removes: bool = False


class CleaningListener(Protocol):
    """Hears what happens to objects and checkpoints."""

    def on_object(self, info: ObjectInfo, error: RemoteError | None) -> None:
        """An object was removed, or would be; or its removal failed."""
        ...

    def on_checkpoint(self, checkpoint: CheckpointSummary, fate: Fate) -> None:
        """A checkpoint is about to be removed, or stays."""
        ...

    def on_kept(self, name: str, why: str) -> None:
        """A selected object or checkpoint stays."""
        ...


@dataclass(slots=True)
class CleaningSurvey:
    """What the first pass found. loose: selected objects outside of checkpoints; recent: too young ones of them."""

    checkpoints: list[tuple[CheckpointSummary, Fate]] = field(default_factory=list)
    loose: Amount = field(default_factory=Amount)
    recent: int = 0
    has_loose_markers: bool = False

    @property
    def selected(self) -> Amount:
        """All that would go."""
        doomed = [each for each, fate in self.checkpoints if fate is Fate.REMOVED]
        return Amount(
            self.loose.objects + sum(each.objects for each in doomed),
            self.loose.bytes + sum(each.bytes for each in doomed),
        )


def server_now(store: S3Store, below: str) -> float:
    """Return the store's clock. Raises ConfigError if it and this machine's differ much: ages would mean nothing."""
    before = time.time()
    there = store.server_time(below)
    # Between both, the answer was dated.
    ahead = max(before - there, 0.0) or min(time.time() - there, 0.0)
    if abs(ahead) > CLOCKS_DIFFER_SECONDS:
        raise ConfigError(
            f"the clock of this machine is {seconds_text(abs(ahead))} {'ahead of' if ahead > 0 else 'behind'} the "
            "store's, so nothing is removed: set the clock (`timedatectl set-ntp true`), then try again"
        )
    return there


@dataclass(eq=False, repr=False)
class Cleaner:
    """Surveys a prefix, then removes what the plan selects.

    now: the store's clock at the start. find_in_use: returns which of some keys a mount needs, and why.
    """

    _store: S3Store
    _plan: CleaningPlan
    _now: float
    _find_in_use: Callable[[Sequence[str]], dict[str, str]]
    _listener: CleaningListener

    def __post_init__(self) -> None:
        self._newest_seconds = self._plan.selection.newest_seconds(self._now)
        # Directories whose commit marker stays, although it was to go.
        self._marked: set[str] = set()

    def survey(self) -> CleaningSurvey:
        """List everything once; return what would go."""
        plan, found = self._plan, CleaningSurvey()
        checkpoints = CheckpointSurvey(plan.below, plan.order_last)
        for info in (each for page in self._pages(plan.below) for each in page):
            if not plan.selection.has_names and checkpoints.add(info):
                continue
            if plan.keep_checkpoints is not None or not self._is_named(info):
                continue
            if info.modified > self._newest_seconds:
                found.recent += 1
                continue
            found.loose.add(info)
            found.has_loose_markers |= self._is_marker(info)
        found.checkpoints = checkpoints.fates(
            keep=plan.keep_checkpoints,
            removes_incomplete=plan.removes_incomplete,
            newest_seconds=self._newest_seconds,
        )
        return found

    def remove(self, survey: CleaningSurvey) -> None:
        """Remove what a survey found; without `removes` in the plan only report it. Raises RemoteError."""
        for checkpoint, fate in survey.checkpoints:
            if fate is Fate.REMOVED:
                self._remove_checkpoint(checkpoint)
            else:
                self._listener.on_checkpoint(checkpoint, fate)
        if not survey.loose.objects:
            return
        for markers in (True, False) if survey.has_loose_markers else (False,):
            for page in self._pages(self._plan.below):
                self._remove_page([each for each in page if self._is_loose(each, markers=markers)])

    # ---- private

    def _pages(self, below: str) -> Iterator[Sequence[ObjectInfo]]:
        token: str | None = None
        while True:
            page = self._store.list_page(below, token=token)
            yield page.objects
            token = page.next_token
            if token is None:
                return

    def _remove_checkpoint(self, checkpoint: CheckpointSummary) -> None:
        """Remove a checkpoint, its commit markers first, unless it is needed or has changed."""
        folder = checkpoint.folder
        needed = self._find_in_use([folder])
        if needed:
            self._listener.on_kept(folder, needed[folder])
            return
        self._listener.on_checkpoint(checkpoint, Fate.REMOVED)
        if not self._plan.removes:
            return
        if any(each.modified > self._newest_seconds for page in self._pages(folder) for each in page):
            self._listener.on_kept(folder, "it changed after the listing")
            return
        for markers in (True, False):
            for page in self._pages(folder):
                batch = [each for each in page if self._is_marker(each) is markers]
                if not self._remove_page(batch) and markers:
                    self._listener.on_kept(folder, "its commit marker stays, so its other files stay too")
                    return

    def _remove_page(self, page: Sequence[ObjectInfo]) -> bool:
        """Remove objects that were just listed; return whether all are gone."""
        needed = self._find_in_use([each.key for each in page]) if page else {}
        doomed = []
        for info in page:
            why = needed.get(info.key, "")
            if not why and info.modified > self._newest_seconds:
                why = "it changed after the listing"
            if not why and parent_prefix(info.key) in self._marked:
                why = "the commit marker of its directory stays"
            if not why:
                doomed.append(info)
                continue
            self._listener.on_kept(info.key, why)
            self._on_stays(info)
        errors = self._store.delete_all(doomed) if doomed and self._plan.removes else {}
        for info in doomed:
            self._listener.on_object(info, errors.get(info.key))
            if info.key in errors:
                self._on_stays(info)
        if errors and len(errors) == len(doomed) and isinstance(error := errors[doomed[0].key], AccessDenied):
            raise error  # the keys may not delete: the next page would fail like this one
        return len(doomed) == len(page) and not errors

    def _on_stays(self, info: ObjectInfo) -> None:
        if self._is_marker(info):
            self._marked.add(parent_prefix(info.key))

    def _is_marker(self, info: ObjectInfo) -> bool:
        return is_commit_marker(info.key, self._plan.order_last)

    def _is_named(self, info: ObjectInfo) -> bool:
        """Return whether an object's name is selected. A directory's marker costs nothing, and keeps it on mounts."""
        if info.key.endswith("/") and not self._plan.removes_directories:
            return False
        return self._plan.selection.has_name(info.key.removeprefix(self._plan.below))

    def _is_loose(self, info: ObjectInfo, *, markers: bool) -> bool:
        """Return whether an object goes by itself, in the pass over commit markers or in the one over the rest."""
        return (
            self._is_marker(info) is markers
            and self._is_named(info)
            and info.modified <= self._newest_seconds
            and (self._plan.selection.has_names or checkpoint_folder(info.key, self._plan.below) is None)
        )
