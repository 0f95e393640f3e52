"""What a bucket may show, and when: the order rules of the contract, held against what the tree was promised.

1. A name shows what the tree held under it, never something older than it showed before.
2. Ordering points (an overwrite, a rename, a symlink, a name that is published last) come after everything with a
   smaller sequence in their directory's subtree, removals left out; a rename counts in both parents' subtrees. The
   renames of one directory go side by side. Its files with content are like new ones.
3. A removed file's object goes after every earlier write of the whole mount. It may go late, as may what a renamed
   file showed under its old name, with two exceptions: a commit marker's goes before ordering points in its directory's
   subtree, and that of any file before the marker of its directory.
4. A rename never leaves neither name; of what a directory's rename moves, what names others appears after these.
5. A file under a temporary name stays away for 60 seconds after its close, unless it is renamed meanwhile.
6. From the first checkpoint on, the bucket always has one (`checkpoints.py`).
7. A version that was written over need not show if an older file beside it or below was removed and never showed.
New files that are none of these may come in any order. The position of an overwrite is that of the oldest change of
its name that the bucket lacks, as newer content takes the place of the older. That may be a snapshot of an open file,
which is queued at any time.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fusecache.config.option_groups import ORDER_LAST, TEMP_NAMES
from fusecache.policy.name_patterns import matches_any
from tests.history.checkpoints import Checkpoints
from tests.history.past import NOTHING, RENAMES, Cause, Entry, Link, Past, Value

TEMPORARY_SECONDS = 60.0


class Violation(BaseException):
    """The bucket shows, or lacks, what it must not. No Exception: the engine must not take it for its own."""


@dataclass(frozen=True, slots=True)
class Effect:
    """One request that changed the bucket. method: of the store; value: what `key` shows from now on."""

    method: str
    key: str
    value: Value


class Rules:
    """Holds every effect against the past. Raises Violation."""

    def __init__(self, past: Past, now: Callable[[], float], checkpoints: Checkpoints | None = None) -> None:
        self._past = past
        self._now = now
        self._checkpoints = checkpoints or Checkpoints()
        self.shown: dict[str, Value] = {}
        self._matched: dict[str, int] = {}
        # Of each name, the entries that the bucket has shown.
        self._seen: dict[str, set[int]] = {}

    def see(self, effect: Effect) -> None:
        """The bucket changed: is it a state that it may show?"""
        self._see(effect)
        if why := self._checkpoints.objection(self.shown):
            raise Violation(f"{_words(effect)}: {why}")

    def _see(self, effect: Effect) -> None:
        if effect.key.endswith("/"):
            self._see_marker(effect)
            return
        before = self.shown.get(effect.key)
        if effect.value == before:
            return
        found = list(self._candidates(effect))
        if not found:
            raise Violation(f"{_words(effect)}: its name never held that, or only before what it showed last")
        reasons = []
        for index, entry in found:
            reason = self._objection(effect, before, index, entry)
            if not reason:
                self._matched[effect.key] = index
                self._seen.setdefault(effect.key, set()).add(index)
                self.shown[effect.key] = effect.value
                return
            reasons.append(reason)
        raise Violation(f"{_words(effect)}: {reasons[0]}")

    def _candidates(self, effect: Effect) -> Iterator[tuple[int, Entry]]:
        entries = self._past.files.get(effect.key, [])
        for index in range(self._matched.get(effect.key, 0), len(entries)):
            if effect.value in entries[index].values:
                yield index, entries[index]

    def _objection(self, effect: Effect, before: Value, index: int, entry: Entry) -> str:
        """Return what forbids the effect, if it is that of this entry; "": nothing."""
        key, value, folder = effect.key, effect.value, _folder(effect.key)
        if value is None:
            return self._objection_to_removal(key, entry)
        if effect.method == "copy":
            if entry.cause is Cause.FOLDER_RENAME and _is_one_of_many(key, value):
                return ""
            is_one_of_many = entry.cause is Cause.FOLDER_RENAME and not _is_marker(key)
            folders = (folder, _folder(entry.other))
            return self._before(entry.step, folders, {key, entry.other}, side_by_side=is_one_of_many)
        if isinstance(value, bytes) and before is None and _is_temporary(key):
            if any(each.cause in RENAMES for each in self._past.files[key][index + 1 :]):
                return ""
            age = self._now() - entry.closed_at
            return f"a temporary name, closed {age:.1f} s ago" if age < TEMPORARY_SECONDS - 0.001 else ""
        if isinstance(value, Link) or _is_marker(key):
            return self._before(entry.step, (folder,), {key}) or self._moved_after(key, entry)
        if before is not None:
            return self._before(self._oldest_missing(key, before, index), (folder,), {key})
        return ""

    def _oldest_missing(self, key: str, shown: Value, index: int) -> int:
        """Return the promise of the oldest change of a name that the bucket lacks; of a snapshot, the first possible.

        index: of the newest such change.
        """
        entries, matched = self._past.files[key], self._matched.get(key, 0)
        snapshots = entries[matched].late.difference({shown}, *(each.values for each in entries[:matched]))
        if index > matched and snapshots:
            return entries[matched].step + 1
        return entries[min(index, matched + 1)].step

    def _objection_to_removal(self, key: str, entry: Entry) -> str:
        if entry.cause in RENAMES and entry.other:
            if missing := self._past.missing(entry.other, entry.step, self.shown):
                return f"its content was moved to {missing}, which does not show it yet"
            if entry.cause is Cause.FOLDER_RENAME and _is_one_of_many(key, self.shown.get(key)):
                return ""
            is_one_of_many = entry.cause is Cause.FOLDER_RENAME and not _is_marker(key)
            folders = (_folder(key), _folder(entry.other))
            return self._before(entry.step, folders, {key, entry.other}, side_by_side=is_one_of_many)
        return self._before(entry.step, (_folder(key),), {key}) or self._before(
            entry.step, ("",), {key}, writes_only=True
        )

    def _is_skipped(self, path: str, step: int) -> bool:
        """Say whether what a name held need never show: it was written again, and may speak of what was removed since.

        That is a file beside it or below, older, that the bucket never showed.
        """
        held, newer = self._past.entry(path, step), self._past.next_entry(path, step)
        if newer is None or newer.values == NOTHING:
            return False
        for other, entries in self._past.files.items():
            if other == path or not other.startswith(_folder(path)):
                continue
            unseen = entries[self._matched.get(other, 0) + 1 :]
            was_written = any(entry.values != NOTHING and entry.step < held.step for entry in unseen)
            if was_written and any(entry.values == NOTHING and newer.step < entry.step for entry in unseen):
                return True
        return False

    def _before(
        self,
        step: int,
        folders: tuple[str, ...],
        exempt: set[str],
        *,
        writes_only: bool = False,
        side_by_side: bool = False,
        emptied: str = "",
    ) -> str:
        """Return which name below the folders is older than right before the promise; "": none.

        emptied: the directory below which removals count, too.
        """
        for path in sorted(self._past.files):
            if path in exempt or _is_temporary(path) or not path.startswith(folders):
                continue
            held, since = self._past.at(path, step - 1), self._past.since(path, step - 1)
            if writes_only and None in held:
                continue
            cause = self._past.entry(path, step - 1).cause
            if side_by_side and cause is Cause.FOLDER_RENAME and not _is_marker(path):
                continue
            counts = _is_marker(path) and any(each.startswith(_folder(path)) for each in folders)
            is_gone = cause is Cause.UNLINK or (cause in RENAMES and held == NOTHING)
            if is_gone and not counts and not (emptied and path.startswith(emptied)):
                continue
            if None in since and since != NOTHING:
                # Removed since: what it held is dropped, and its DELETE has a place of its own. Or made again since:
                # its DELETE collapses into the request that puts the new content in its place.
                continue
            if self.shown.get(path) in since:
                continue
            if not self._is_skipped(path, step - 1):
                return f"promise {step}, but {path} still shows what it held before"
        return ""

    def _moved_after(self, key: str, entry: Entry) -> str:
        """Return what a directory's rename moved with `key`, was older, and is not there yet; "": nothing."""
        if entry.cause is not Cause.FOLDER_RENAME:
            return ""
        for path, entries in sorted(self._past.files.items()):
            if path == key or not path.startswith(_folder(key)) or _is_temporary(path):
                continue
            for other in entries:
                if other.step != entry.step or other.values == NOTHING or other.origin >= entry.origin:
                    continue
                if self.shown.get(path) not in self._past.since(path, entry.step):
                    return f"it was moved with {path}, which is older and not there yet"
        return ""

    def _see_marker(self, effect: Effect) -> None:
        path = effect.key.rstrip("/")
        entries = self._past.folders.get(path, [])
        if effect.value is not None:
            self.shown[effect.key] = effect.value
            if not any(is_there for _, is_there, _ in entries):
                raise Violation(f"{_words(effect)}: there never was such a directory")
        elif self.shown.pop(effect.key, None) is not None:
            reasons = [
                # A directory renamed onto an empty one: that one's marker goes before the other's comes.
                self._before(step, (_folder(path),), set(), emptied="" if entries[-1][1] else effect.key)
                for step, is_there, cause in entries
                if step and (not is_there or cause is Cause.FOLDER_RENAME)
            ]
            if not reasons:
                raise Violation(f"{_words(effect)}: the directory was never removed")
            if all(reasons):
                raise Violation(f"{_words(effect)}: {reasons[0]}")


def _folder(key: str) -> str:
    folder, slash, _ = key.rpartition("/")
    return folder + slash


def _is_temporary(key: str) -> bool:
    return matches_any(key.rpartition("/")[2], TEMP_NAMES)


def _words(effect: Effect) -> str:
    value = effect.value
    shown = (
        "nothing"
        if value is None
        else f"{len(value)} bytes {value[:24]!r}"
        if isinstance(value, bytes)
        else value
    )
    return f"{effect.method} {effect.key} = {shown}"


def _is_marker(key: str) -> bool:
    return matches_any(key.rpartition("/")[2], ORDER_LAST)


def _is_one_of_many(key: str, value: Value) -> bool:
    """Return whether what a directory's rename moves is like a new file: nothing says that it stands for others."""
    return isinstance(value, bytes) and bool(value) and not _is_marker(key)
