"""The promise that matters most: at every moment the bucket alone can resume from a checkpoint of the node.

A checkpoint is what some files held when a program called it complete. It is whole while each of these contents shows
under some name: programs rename their files, and a directory's files move one by one.
"""

from collections.abc import Iterable, Mapping

from tests.history.past import Value, Values


class Checkpoints:
    """The checkpoints of one history. They span restarts, as the bucket does."""

    def __init__(self) -> None:
        self._complete: list[tuple[int, Values]] = []
        # The last promise after which the node may have had none.
        self._without = 0
        # Whether the bucket has had one that is newer than that.
        self._has_begun = False

    def complete(self, step: int, contents: Values) -> None:
        """A program calls these contents a checkpoint, after the promise of that number and before the next one."""
        self._complete.append((step + 1, contents))

    def see_node(self, step: int, tree: Iterable[Values]) -> None:
        """A promise makes this tree: what each of its names may hold."""
        certain = {value for values in tree if len(values) == 1 for value in values}
        if not any(contents <= certain for _, contents in self._complete):
            self._without, self._has_begun = step, False

    def objection(self, shown: Mapping[str, Value]) -> str:
        """Return what is wrong with a state of the bucket; "": nothing."""
        there = set(shown.values())
        whole = [step for step, contents in self._complete if contents <= there]
        if any(step > self._without for step in whole):
            self._has_begun = True
        if self._has_begun and not whole:
            return (
                f"no checkpoint is whole any more: {sorted(key for key in shown if shown[key] is not None)}"
            )
        return ""
