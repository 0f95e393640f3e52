"""What the bucket is believed to hold of a file is what the file holds, whatever is written, cut and sent when."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fusecache.policy.writeback.multipart import (
    OBJECT_BYTES_MAX,
    PARTS_MAX,
    DigestAttempt,
    Digests,
    PartTable,
    choose_growing_part_bytes,
    choose_part_bytes,
    first_ready_at,
    ready_parts,
)

MIB = 2**20
GIB = 2**30
PART = 4
FILE_MAX = 24


class Sending(RuleBasedStateMachine):
    """A file of a few bytes, a bucket that keeps what an attempt read when it began or when it ended."""

    def __init__(self) -> None:
        super().__init__()
        self.table = PartTable(PART)
        self.file = bytearray()
        self.under_way: dict[int, tuple[DigestAttempt, bytes]] = {}
        self.bucket: dict[int, bytes] = {}
        self.version = 0

    @rule(start=st.integers(0, FILE_MAX - 1), size=st.integers(1, 9))
    def write(self, start: int, size: int) -> None:
        """Write other bytes than there ever were."""
        stop = min(start + size, FILE_MAX)
        self.version += 1
        if stop > len(self.file):
            self.table.change(
                len(self.file), stop
            )  # as the engine does not have to: nothing is sent behind the end
            self.file.extend(bytes(stop - len(self.file)))
        self.file[start:stop] = bytes([self.version % 251 + 1]) * (stop - start)
        self.table.change(start, stop)

    @rule(size=st.integers(0, FILE_MAX))
    def truncate(self, size: int) -> None:
        """Cut, or extend with zeros."""
        old = len(self.file)
        del self.file[size:]
        self.file.extend(bytes(size - len(self.file)))
        self.table.change(min(old, size), max(old, size))

    @precondition(lambda self: self.table.next_unsent(len(self.file) // PART) is not None)
    @rule()
    def begin(self) -> None:
        """Send the next whole part."""
        index = self.table.next_unsent(len(self.file) // PART)
        assert index is not None
        assert index not in self.under_way
        attempt = self.table.begin(index, len(self.file))
        assert attempt.size == PART
        self.under_way[index] = attempt, bytes(self.file[attempt.offset : attempt.offset + attempt.size])

    @precondition(lambda self: self.under_way)
    @rule(data=st.data(), outcome=st.sampled_from(["early", "late", "failed"]))
    def end(self, data: st.DataObject, outcome: str) -> None:
        """The attempt ends: with the bytes of its begin, those of its end, or none, which destroys what was there."""
        index = data.draw(st.sampled_from(sorted(self.under_way)))
        attempt, early = self.under_way.pop(index)
        if outcome == "failed":
            self.bucket.pop(index, None)
            assert not self.table.end(attempt)
            return
        late = bytes(self.file[attempt.offset : attempt.offset + attempt.size])
        self.bucket[index] = early if outcome == "early" else late
        self.table.end(attempt, self.bucket[index].hex() or "empty")

    @invariant()
    def what_counts_is_in_the_bucket_and_as_the_file_is(self) -> None:
        """Of parts that lie in the file."""
        for index, etag in enumerate(self.table.etags()):
            there = bytes(self.file[index * PART : (index + 1) * PART])
            if etag:
                assert self.bucket[index] == there
                assert etag == there.hex()

    @invariant()
    def held_bytes_are_those_of_the_parts_that_count(self) -> None:
        """In whole parts here."""
        assert self.table.held_bytes(len(self.file)) == PART * sum(map(bool, self.table.etags()))


TestSending = Sending.TestCase
TestSending.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


def test_a_file_is_complete_when_all_its_parts_are_held() -> None:
    table = PartTable(PART)
    for index in range(3):
        assert not table.is_complete(2 * PART + 1)
        attempt = table.begin(index, 2 * PART + 1)
        table.record_digests(attempt, Digests(b"md5", b"sums"))
        assert table.end(attempt, "etag")
    assert table.is_complete(2 * PART + 1)
    assert table.held_bytes(2 * PART + 1) == 2 * PART + 1
    assert table.digests(2) == Digests(b"md5", b"sums")
    table.change(0, 1)
    assert not table.is_complete(2 * PART + 1)
    assert table.digests(0) is None


def test_digests_are_known_until_the_part_changes_however_its_attempt_ends() -> None:
    table = PartTable(PART)
    first, second = table.begin(0, 2 * PART), table.begin(1, 2 * PART)
    table.record_digests(first, Digests(b"md5", b"sums"))
    table.change(PART, PART + 1)
    table.record_digests(second, Digests(b"of bytes", b"that are others now"))
    assert not table.end(first)
    assert not table.end(second, "etag")
    assert table.digests(0) == Digests(b"md5", b"sums")
    assert table.digests(1) is table.digests(2) is None
    assert table.next_unsent(3) == 0
    assert [table.needs_reading(index) for index in range(3)] == [False, True, True]
    table.doubt(first)
    assert table.needs_reading(0)
    table.record_digests(first, Digests(b"md5", b"sums"))
    assert not table.needs_reading(0)


def test_a_restored_table_goes_on_where_the_earlier_one_was() -> None:
    table = PartTable(PART)
    table.restore(("one", "", "three"))
    assert table.next_unsent(4) == 1
    assert table.etags(4) == ("one", "", "three", "")


def test_a_writer_who_comes_back_often_is_not_worth_sending_ahead() -> None:
    table = PartTable(PART)
    for number in range(2):
        assert table.is_worth_it
        table.end(table.begin(0, PART), f"etag-{number}")
        table.change(0, 1)
    assert not table.is_worth_it


def test_parts_behind_the_writer_are_ready_and_the_one_it_may_come_back_to_is_not() -> None:
    assert ready_parts(0, 64 * MIB) == 0
    assert ready_parts(64 * MIB, 64 * MIB) == 0
    assert ready_parts(first_ready_at(), 64 * MIB) == 1
    assert ready_parts(10 * 64 * MIB, 64 * MIB) == 9


def test_a_growing_file_begins_anew_twice_at_most_and_never_has_too_many_parts() -> None:
    sizes = [choose_growing_part_bytes(size) for size in range(64 * MIB, OBJECT_BYTES_MAX, 7 * GIB)]
    assert sizes == sorted(sizes)
    assert len(set(sizes)) <= 3
    assert sizes[0] == 64 * MIB
    for size in (64 * MIB, 562 * GIB, 563 * GIB, 4_400 * GIB, OBJECT_BYTES_MAX):
        part_bytes = choose_growing_part_bytes(size)
        assert part_bytes >= choose_part_bytes(size)
        assert -(-size // part_bytes) <= PARTS_MAX
