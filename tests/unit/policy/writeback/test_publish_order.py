"""Whatever is queued, replaced, failing or deferred: nothing overtakes what it must not, and all is published."""

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fusecache.policy.writeback.publish_order import (
    OrderedChange,
    PublishOrder,
    Role,
    SequenceBarrier,
)

KEYS = ("a", "b", "d/a", "d/b", "d/e/a", "d/e/b", "f/a", "f/g/a", "d/", "d/e/", "f/", "f/g/")


# ---- the rules again, one pair at a time


@dataclass
class Queued:
    """One change as the reference knows it."""

    change: OrderedChange
    deferred: bool = False


@dataclass
class Reference:
    """The rules as sentences about two changes; slow, and small enough to be read."""

    queued: dict[int, Queued] = field(default_factory=dict)

    def holds(self, older: Queued, younger: Queued) -> bool:
        """Return whether the older change must be published before the younger one."""
        first, second = older.change, younger.change
        if {key.rstrip("/") for key in first.keys} & {key.rstrip("/") for key in second.keys}:
            return True
        if second.role is Role.REMOVAL and first.role in {Role.NEW, Role.ORDERED}:
            if not older.deferred:
                return True
            if _folders(second) & _folders(first)[:1]:
                return True
        if second.role is Role.MARKER_DELETE and first.role in {Role.REMOVAL, Role.MARKER_DELETE}:
            own = second.keys[0].rstrip("/")
            if not self._is_wanted_after(second) and self._lies_in(first, _Folders([own])):
                return True
        if older.deferred:
            return self._must_go_before(first, second)
        if first.role in {Role.REMOVAL, Role.MARKER_DELETE}:
            return first.is_commit_marker and self._lies_in(second, _folders(first))
        are_together = first.side_by_side and second.side_by_side
        if second.role is not Role.NEW and not are_together and self._lies_in(first, _folders(second)):
            return True
        return first.role is not Role.NEW and not are_together and self._lies_in(second, _folders(first))

    def _must_go_before(self, first: OrderedChange, second: OrderedChange) -> bool:
        """Return whether a removal says that what is written anew beside it was there."""
        is_told = (
            first.role is Role.REMOVAL and first.is_commit_marker and second.role in {Role.NEW, Role.ORDERED}
        )
        is_file = not second.keys[-1].endswith("/")
        return is_told and is_file and _folders(second)[-1] == _folders(first)[0]

    def _is_wanted_after(self, end: OrderedChange) -> bool:
        """Return whether something else is to have the name that a MARKER_DELETE gives up."""
        name = end.keys[0].rstrip("/")
        return any(
            number > end.sequence and name in {key.rstrip("/") for key in each.change.keys}
            for number, each in self.queued.items()
        )

    def _lies_in(self, change: OrderedChange, folders: "_Folders") -> bool:
        return any(_is_in(folder, above) for folder in _folders(change) for above in folders)

    def blockers(self, sequence: int) -> list[int]:
        """Return what stands before a change."""
        younger = self.queued[sequence]
        return [
            number
            for number, older in self.queued.items()
            if number < sequence and self.holds(older, younger)
        ]

    def free(self) -> set[int]:
        """Return what may be published."""
        return {
            number for number, each in self.queued.items() if not each.deferred and not self.blockers(number)
        }


class _Folders(list[str]):
    def __and__(self, other: list[str]) -> set[str]:
        return set(self) & set(other)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        found = super().__getitem__(index)
        return _Folders(found) if isinstance(index, slice) else found


def _folders(change: OrderedChange) -> _Folders:
    return _Folders(key.rstrip("/").rpartition("/")[0] for key in change.keys)


def _is_in(folder: str, above: str) -> bool:
    return not above or folder == above or folder.startswith(above + "/")


@st.composite
def changes(draw: st.DrawFn, sequence: int) -> OrderedChange:
    """Any change, as the queue makes them: only renames have two keys, only markers end in '/'."""
    role = draw(
        st.sampled_from([Role.NEW, Role.NEW, Role.NEW, Role.ORDERED, Role.REMOVAL, Role.MARKER_DELETE])
    )
    files = [key for key in KEYS if not key.endswith("/")]
    if role is Role.MARKER_DELETE:
        return OrderedChange(
            sequence, (draw(st.sampled_from([key for key in KEYS if key.endswith("/")])),), role
        )
    if role is Role.REMOVAL:
        is_marker = draw(st.booleans())
        return OrderedChange(sequence, (draw(st.sampled_from(files)),), role, is_marker)
    if role in {Role.NEW, Role.ORDERED} and draw(st.booleans()):
        old, new = draw(st.lists(st.sampled_from(files), min_size=2, max_size=2, unique=True))
        if role is Role.NEW:
            return OrderedChange(sequence, (old, new), role)
        return OrderedChange(sequence, (old, new), role, side_by_side=draw(st.booleans()))
    key = draw(st.sampled_from(KEYS if role is Role.NEW else files))
    return OrderedChange(sequence, (key,), role)


def _waits_for(order: PublishOrder, sequence: int) -> int | None:
    """Return the oldest change that stands before one; None: it is free, or deferred."""
    entry = order._entries[sequence]
    if entry.is_deferred:
        return None
    if not order._is_first(entry):
        return min(order._names[name][0] for name in entry.names)
    barrier = order._barrier_before(entry)
    return None if barrier is None else int(barrier.lowest)


class Queue(RuleBasedStateMachine):
    """Random life of a queue; after each step what is free is what the reference says."""

    def __init__(self) -> None:
        super().__init__()
        self.order = PublishOrder("p/")
        self.reference = Reference()
        self.given: set[int] = set()
        self.next = 0

    @initialize()
    def begin(self) -> None:
        self.next = 0

    @rule(data=st.data(), deferred=st.sampled_from([False, False, False, True]))
    def add(self, data: st.DataObject, *, deferred: bool) -> None:
        self.next += 1
        self._add(data.draw(changes(self.next)), deferred=deferred)

    def _add(self, change: OrderedChange, *, deferred: bool) -> None:
        keys = tuple("p/" + key for key in change.keys)
        self.reference.queued[change.sequence] = Queued(change, deferred=deferred)
        self.order.add(replace(change, keys=keys), deferred=deferred)

    @precondition(lambda self: self.reference.queued)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        self._take_all()
        free = sorted(self.reference.free())
        if free:
            self._remove(data.draw(st.sampled_from(free)))

    @precondition(lambda self: self.reference.queued)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        """It was removed, or refused, before its turn came."""
        self._remove(data.draw(st.sampled_from(sorted(self.reference.queued))))

    @precondition(lambda self: self.reference.queued)
    @rule(data=st.data())
    def replace(self, data: st.DataObject) -> None:
        """Newer content takes the place of older."""
        sequence = data.draw(st.sampled_from(sorted(self.reference.queued)))
        change = data.draw(changes(sequence))
        self._remove(sequence)
        self._add(change, deferred=False)

    def _remove(self, sequence: int) -> None:
        del self.reference.queued[sequence]
        self.given.discard(sequence)
        self.order.remove(sequence)

    @precondition(lambda self: any(each.deferred for each in self.reference.queued.values()))
    @rule(data=st.data())
    def bring_back(self, data: st.DataObject) -> None:
        deferred = [number for number, each in self.reference.queued.items() if each.deferred]
        sequence = data.draw(st.sampled_from(sorted(deferred)))
        self.reference.queued[sequence].deferred = False
        self.order.undefer(sequence)

    @precondition(lambda self: self.given)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(sorted(self.given)))
        self.given.discard(sequence)
        self.order.give_back(sequence)

    @invariant()
    def what_is_free_is_given_out_once(self) -> None:
        self._take_all()
        assert self.reference.free() <= self.given

    def _take_all(self) -> None:
        while (sequence := self.order.next_free()) is not None:
            assert sequence not in self.given
            assert sequence in self.reference.free()
            self.given.add(sequence)

    @invariant()
    def what_stands_before_a_change_is_older(self) -> None:
        for sequence, queued in self.reference.queued.items():
            blockers = self.reference.blockers(sequence)
            assert self.order.is_free(sequence) == (not blockers and not queued.deferred)
            first = _waits_for(self.order, sequence)
            assert first is None or first in blockers
            assert (first is None) == (not blockers or queued.deferred)

    def teardown(self) -> None:
        """All is published in the end."""
        for sequence in sorted(self.reference.queued):
            if self.reference.queued[sequence].deferred:
                self.reference.queued[sequence].deferred = False
                self.order.undefer(sequence)
        for _ in range(len(self.reference.queued)):
            while self.order.next_free() is not None:
                pass
            free = self.reference.free()
            assert free
            self._remove(max(free))
        assert len(self.order) == 0


TestQueue = Queue.TestCase


# ---- what is stuck


def _published(order: PublishOrder) -> list[int]:
    found = []
    while (sequence := order.next_free()) is not None:
        found.append(sequence)
    return found


def _order(*queued: OrderedChange) -> PublishOrder:
    order = PublishOrder()
    for change in queued:
        order.add(change)
    return order


def test_a_removal_waits_for_every_older_write_and_holds_nothing_back() -> None:
    order = _order(
        OrderedChange(1, ("other/stuck",), Role.NEW),
        OrderedChange(2, ("run/old",), Role.REMOVAL),
        OrderedChange(3, ("run/model",), Role.ORDERED),
        OrderedChange(4, ("run/new",), Role.NEW),
    )
    assert _published(order) == [1, 3]
    order.remove(3)
    assert _published(order) == [4]
    assert _waits_for(order, 2) == 1
    order.remove(1)
    assert _published(order) == [2]


def test_the_removal_of_a_commit_marker_holds_back_what_is_written_in_its_directory() -> None:
    order = _order(
        OrderedChange(1, ("other/stuck",), Role.NEW),
        OrderedChange(2, ("jobs/run/.metadata",), Role.REMOVAL, is_commit_marker=True),
        OrderedChange(3, ("jobs/latest",), Role.ORDERED),
        OrderedChange(4, ("jobs/run/shard",), Role.ORDERED),
        OrderedChange(5, ("jobs/run/deep/shard",), Role.NEW),
    )
    assert _published(order) == [1, 3]
    order.remove(3)
    assert _published(order) == []
    order.remove(1)
    assert _published(order) == [2]
    order.remove(2)
    assert _published(order) == [4]


def test_a_stuck_write_holds_its_own_subtree_alone() -> None:
    order = _order(
        OrderedChange(1, ("a/d/stuck",), Role.NEW),
        OrderedChange(2, ("a/latest",), Role.ORDERED),
        OrderedChange(3, ("b/latest",), Role.ORDERED),
        OrderedChange(4, ("a/x/latest",), Role.ORDERED),
    )
    assert _published(order) == [1, 3]
    assert _waits_for(order, 2) == 1
    assert _waits_for(order, 4) == 2


def test_ten_thousand_small_files_do_not_wait_for_each_other() -> None:
    order = _order(*(OrderedChange(number, (f"d/{number}",), Role.NEW) for number in range(10_000)))
    assert len(_published(order)) == 10_000


def test_one_sequence_is_queued_once() -> None:
    order = _order(OrderedChange(1, ("a",), Role.NEW))
    with pytest.raises(ValueError, match="twice"):
        order.add(OrderedChange(1, ("b",), Role.NEW))


# ---- what it costs


@pytest.mark.parametrize("role", [Role.NEW, Role.ORDERED, Role.REMOVAL, Role.MARKER_DELETE])
@pytest.mark.parametrize("behind", [0, 1], ids=["alone", "behind a stuck one"])
def test_each_event_looks_at_few_changes_however_many_there_are(
    monkeypatch: pytest.MonkeyPatch, role: Role, behind: int
) -> None:
    looks = 0
    look = PublishOrder._barrier_before

    def counted(self: PublishOrder, entry: object) -> SequenceBarrier | None:
        nonlocal looks
        looks += 1
        return look(self, entry)  # type: ignore[arg-type]

    monkeypatch.setattr(PublishOrder, "_barrier_before", counted)
    number = 3000
    order = PublishOrder()
    if behind:
        order.add(OrderedChange(0, ("d/first",), Role.ORDERED))
    for sequence in range(1, number + 1):
        key = f"d/{sequence % 7}/{sequence}" + ("/" if role is Role.MARKER_DELETE else "")
        order.add(OrderedChange(sequence, (key,), role))
    if behind:
        assert order.next_free() == 0
        order.remove(0)
    published = 0
    while (free := order.next_free()) is not None:
        order.remove(free)
        published += 1
    assert published == number
    assert looks <= 6 * number


@given(st.lists(st.tuples(st.sampled_from(["add", "discard", "wait"]), st.integers(0, 20)), max_size=200))
def test_a_gate_frees_each_waiter_when_nothing_smaller_is_left(events: list[tuple[str, int]]) -> None:
    barrier, members, waiting = SequenceBarrier(), set[int](), list[int]()
    for word, number in events:
        if word == "add":
            barrier.add(number)
            members.add(number)
        elif word == "discard":
            barrier.discard(number)
            members.discard(number)
        else:
            barrier.wait(number, range(21), 1000)
            waiting.append(number)
        assert barrier.lowest == min(members, default=float("inf"))
        freed = [each for each in waiting if each <= min(members, default=float("inf"))]
        assert sorted(barrier.on_freed()) == sorted(freed)
        waiting = [each for each in waiting if each not in freed]
