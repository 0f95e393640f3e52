"""The fetch queue against a sorted list."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from fusecache.policy.cache.fetch_order import Cause, FetchQueue

causes = st.sampled_from(list(Cause))


class QueueMachine(RuleBasedStateMachine):
    """Every order of pushes, moves, removals and pops."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: FetchQueue[list[int]] = FetchQueue()
        self.items = [[number] for number in range(8)]
        self.model: dict[int, tuple[int, int, int]] = {}
        self.pushes = 0

    @rule(number=st.integers(0, 7), cause=causes, depth=st.integers(0, 3))
    def push(self, number: int, cause: Cause, depth: int) -> None:
        self.queue.push(self.items[number], cause, depth)
        self.model[number] = (cause, depth, self.pushes)
        self.pushes += 1

    @rule(number=st.integers(0, 7))
    def remove(self, number: int) -> None:
        self.queue.remove(self.items[number])
        self.model.pop(number, None)

    @rule()
    def pop(self) -> None:
        if self.model:
            number = min(self.model, key=self.model.__getitem__)
            assert self.queue.pop() is self.items[number]
            del self.model[number]

    @invariant()
    def agrees_with_the_model(self) -> None:
        assert len(self.queue) == len(self.model)
        assert all((self.items[number] in self.queue) == (number in self.model) for number in range(8))
        head = self.queue.peek()
        if self.model:
            assert head is self.items[min(self.model, key=self.model.__getitem__)]
        else:
            assert head is None


TestQueue = QueueMachine.TestCase


def test_demand_goes_before_hints_and_hints_before_read_ahead() -> None:
    queue: FetchQueue[str] = FetchQueue()
    queue.push("ahead", Cause.READAHEAD)
    queue.push("hint", Cause.HINT)
    queue.push("demand", Cause.DEMAND)
    assert [queue.pop() for _ in range(3)] == ["demand", "hint", "ahead"]


def test_a_reader_that_joins_a_read_ahead_moves_it_to_the_front() -> None:
    queue: FetchQueue[str] = FetchQueue()
    items = [f"chunk {number}" for number in range(100)]
    for depth, item in enumerate(items):
        queue.push(item, Cause.READAHEAD, depth)
    queue.push(items[70], Cause.DEMAND)
    assert [queue.pop(), queue.pop()] == [items[70], items[0]]
    assert len(queue) == 98
