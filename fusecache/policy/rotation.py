"""What is removed because something newer is there: which queued writes such removals rely on. Pure.

A run that keeps its last checkpoints removes an old one as soon as a newer one is closed. Where that is faster than the
uplink, the newer one is removed, too, before it is in the bucket. If it was just dropped, the removal of the old one
would have nothing to wait for any more, and the bucket would hold neither; and if each was dropped, none would ever
arrive. So what the oldest such removal waits for is published although it was removed, and the other removals come
after all that was written by then. Once nothing newer was written since, all of it is simply to go.
"""

from bisect import bisect_left, bisect_right, insort

from fusecache.policy.publish_order import Gate

_NEVER = float("inf")


class _Beside:
    """What is queued beside one directory. newest: of negative sequences: its lowest is that of the newest write."""

    __slots__ = ("newest", "removals")

    def __init__(self) -> None:
        self.newest = Gate()
        self.removals: list[int] = []

    @property
    def newest_write(self) -> float:
        return -self.newest.lowest


class Rotation:
    """The queued writes of files and removals of published ones, by the directory beside which they lie.

    prefix: of all keys, empty or ending in '/'. Files of one directory lie beside each other, and those of directories
    that lie in one directory, the root apart.
    """

    def __init__(self, prefix: str = "") -> None:
        self._prefix = prefix
        self._besides: dict[str, _Beside] = {}
        # Of negative sequences: what was written right in a directory.
        self._newest: dict[str, Gate] = {}

    def add_write(self, sequence: int, key: str) -> None:
        """A write of `key` is queued."""
        beside = self._besides.setdefault(self._path(key), _Beside())
        beside.newest.add(-sequence)
        self._newest.setdefault(_folder(key), Gate()).add(-sequence)

    def add_removal(self, sequence: int, key: str) -> None:
        """A removal of `key` is queued."""
        insort(self._besides.setdefault(self._path(key), _Beside()).removals, sequence)

    def remove(self, sequence: int, key: str) -> None:
        """It is queued no longer. Nothing happens to what is neither a write nor a removal."""
        path = self._path(key)
        beside = self._besides.get(path)
        if beside is None:
            return
        index = bisect_left(beside.removals, sequence)
        if beside.removals[index : index + 1] == [sequence]:
            del beside.removals[index]
        else:
            beside.newest.discard(-sequence)
            newest = self._newest.get(_folder(key))
            if newest is not None:
                newest.discard(-sequence)
                if newest.lowest == _NEVER:
                    del self._newest[_folder(key)]
        if not beside.removals and beside.newest.lowest == _NEVER:
            del self._besides[path]

    def is_relied_on(self, sequence: int, key: str) -> bool:
        """Return whether the oldest removal beside a write waits for it, and something was written since."""
        beside = self._besides.get(self._path(key))
        return (
            beside is not None
            and bool(beside.removals)
            and sequence < beside.removals[0] < beside.newest_write
        )

    def relying_on(self, sequence: int, key: str) -> list[int]:
        """Return the removals beside a write that wait for it, unless all of them wait for all that came since."""
        beside = self._besides.get(self._path(key))
        if beside is None:
            return []
        removals = beside.removals[bisect_right(beside.removals, sequence) :]
        return removals if removals and removals[0] < beside.newest_write else []

    def is_oldest_removal(self, sequence: int, key: str) -> bool:
        """Return whether a removal of `key` is the oldest beside it."""
        return self._besides[self._path(key)].removals[0] == sequence

    def is_written_since(self, sequence: int, key: str) -> bool:
        """Return whether something right in the directory of `key` was written after a change of it."""
        newest = self._newest.get(_folder(key))
        return newest is not None and sequence < -newest.lowest

    def _path(self, key: str) -> str:
        folder = _folder(key.removeprefix(self._prefix))
        return _folder(folder) or folder


def _folder(key: str) -> str:
    return key.rpartition("/")[0]
