"""Rows of listings in blocks: what was written is read back in the bucket's order, whatever block it lies in."""

import errno
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fusecache.index import listings as module
from fusecache.index.listings import ListedEntry, Listings, StoredPack, joined, page_fields
from fusecache.model.errors import ListingLost, LocalDiskError


@pytest.fixture
def listings(tmp_path: Path) -> Iterator[Listings]:
    """Listings without a row."""
    opened = Listings(tmp_path / "names")
    yield opened
    opened.close()


def file(name: str, etag: str = "e", number: int = 0) -> ListedEntry:
    """Return a file's row."""
    return ListedEntry(name, is_directory=False, size=1, etag=etag, modified=1.5, number=number)


def empty(name: str, metadata: dict[str, str], number: int) -> ListedEntry:
    """Return the row of a zero-byte object, of which a HEAD told the metadata."""
    return ListedEntry(name, is_directory=False, etag="e0", modified=0.25, metadata=metadata, number=number)


def test_a_row_comes_back_as_it_was_written(listings: Listings) -> None:
    rows = [
        ListedEntry("dir", is_directory=True, number=7),
        empty("empty", {}, 8),
        empty("link\n日本", {"symlink-target": "a\0b"}, 9),
        file("log", "e2", 10)._replace(size=5 << 40, modified=1763719200.123),
    ]
    for row in rows:
        listings.put(1, 1, [row])
    assert listings.scan(1, 1, "", 10) == rows
    assert [listings.get(1, 1, row.sort_name) for row in rows] == rows
    assert listings.get(1, 1, "dir") is None
    assert listings.scan(1, 2, "", 10) == listings.scan(2, 1, "", 10) == []


def test_versions_that_stayed_keep_their_numbers_in_the_next_generation(listings: Listings) -> None:
    listings.put_page(1, 1, [file(f"{index:04}") for index in range(1000)], 0, 5000)
    listings.put_page(1, 1, [file(f"{index:04}") for index in range(1000, 1500)], 0, 9000)
    later = [
        file(f"{index:04}", "new" if index == 700 else "e") for index in range(500, 1400) if index != 600
    ]
    numbers = listings.put_page(1, 2, later, 1, 20000)
    found = {row.name: row.number for row in listings.iterate(1, 2)}
    assert found["0500"] == 5500
    assert found["1399"] == 9399
    assert found["0700"] == 20000 + 199  # the 200th of its page
    assert numbers == set(found.values())
    assert listings.find_number(1, 2, 9399, "1000", "1499") == file("1399", number=9399)
    assert listings.find_number(1, 2, 5700, "0000", "0999") is None


def test_a_generation_is_dropped_in_portions_and_no_other_is_touched(
    listings: Listings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PACKS_DROPPED_AT_ONCE", 2)
    for page in range(5):
        listings.put_page(1, 1, [file(f"{page}{index}") for index in range(3)], 0, 100)
    listings.put_page(1, 2, [file("kept")], 0, 200)
    listings.put_page(2, 1, [file("kept")], 0, 200)
    assert [listings.drop(1, 1) for _ in range(3)] == [True, True, False]
    assert listings.scan(1, 1, "", 10) == []
    assert listings.get(1, 2, "kept") == listings.get(2, 1, "kept") == file("kept", number=200)


def test_single_rows_are_read_before_and_after_they_are_written(
    listings: Listings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LATE_ROWS", 100)
    listings.put_page(1, 1, [file(f"{index:04}", number=index) for index in range(0, 500, 2)], 0, 0)
    for index in range(1, 500, 2):
        listings.put(1, 1, [file(f"{index:04}", number=5000 + index)])
        assert listings.find_number(1, 1, 5000 + index, "", "9") == file(f"{index:04}", number=5000 + index)
    listings.put(1, 1, [file("0100", "newer", 7)])
    assert listings.find_number(1, 1, 7, "", "9") == file("0100", "newer", 7)
    assert listings.find_number(1, 1, 50, "", "9") is None  # the number that the version before it had
    assert [row.name for row in listings.iterate(1, 1, 30)] == [f"{index:04}" for index in range(500)]
    listings.drop(1, 1)
    assert listings.scan(1, 1, "", 1000) == []


def test_rows_of_many_directories_do_not_fill_the_memory(
    listings: Listings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LATE_ROWS_IN_ALL", 50)
    for index in range(300):
        listings.put(index % 30, 1, [file(f"{index:04}")])
        assert sum(len(each.late) for each in listings._listings.values()) <= 50
    assert sum(len(listings.scan(directory, 1, "", 100)) for directory in range(30)) == 300


NAMES = st.text(alphabet="ab-/\x01é\U0001f389", min_size=1, max_size=4).filter(lambda name: name.strip("/"))
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), NAMES),
        st.tuples(st.just("remove"), NAMES),
        st.tuples(st.just("page"), st.sets(NAMES, max_size=12)),
        st.tuples(st.just("replace"), st.tuples(NAMES, NAMES, st.sets(NAMES, max_size=12))),
    ),
    max_size=40,
)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
def test_rows_are_those_of_a_sorted_dictionary(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, steps: list[tuple[str, object]]
) -> None:
    monkeypatch.setattr(module, "PACK_ROWS_MAX", 6)
    monkeypatch.setattr(module, "LATE_ROWS", 4)
    listings = Listings(tmp_path_factory.mktemp("rows") / "names")
    try:
        model: dict[str, ListedEntry] = {}
        for number, (step, value) in enumerate(steps, 1):
            if step == "page":
                assert isinstance(value, set)
                last = max(model, default="")
                page = sorted(
                    {
                        _row(name).sort_name: _row(name) for name in value if _row(name).sort_name > last
                    }.items()
                )
                listings.put_page(3, 4, [row for _, row in page], 0, number * 1000)
                model |= {
                    name: row._replace(number=number * 1000 + place) for place, (name, row) in enumerate(page)
                }
                continue
            if step == "replace":
                assert isinstance(value, tuple)
                after, end = sorted(value[:2])
                old = {name: model.pop(name) for name in list(model) if after < name <= end}
                page = {
                    _row(name).sort_name: _row(name)
                    for name in value[2]
                    if after < _row(name).sort_name <= end
                }
                rows = [page[name] for name in sorted(page)]
                numbers = listings.replace(3, 4, after, end, rows, number * 1000)
                for place, row in enumerate(rows):
                    new = old[row.sort_name].number if row.sort_name in old else number * 1000 + place
                    model[row.sort_name] = row._replace(number=new)
                assert numbers == {model[name].number for name in page}
                continue
            assert isinstance(value, str)
            row = _row(value)._replace(number=number)
            if step == "put":
                listings.put(3, 4, [row])
                model[row.sort_name] = row
            else:
                listings.remove(3, 4, row.sort_name)
                model.pop(row.sort_name, None)
            assert listings.get(3, 4, row.sort_name) == model.get(row.sort_name)
        expected = [model[name] for name in sorted(model)]
        assert listings.scan(3, 4, "", 1000) == expected
        assert list(listings.iterate(3, 4, 3)) == expected
        for index, row in enumerate(expected):
            assert listings.scan(3, 4, row.sort_name, 2) == expected[index + 1 : index + 3]
    finally:
        listings.close()


def _row(name: str) -> ListedEntry:
    bare = name.replace("/", "")
    return ListedEntry(bare, is_directory=True) if name.endswith("/") else file(bare)


class RefusingDisk:
    """A disk that refuses writes, or loses what was written, while it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.refuses = False
        self.loses = False
        self._write, self._read = os.pwrite, os.pread
        monkeypatch.setattr(module.os, "pwrite", self.pwrite)
        monkeypatch.setattr(module.os, "pread", self.pread)
        monkeypatch.setattr(module, "RETRY_SECONDS", 0.0)

    def pwrite(self, descriptor: int, data: memoryview, offset: int) -> int:
        if self.refuses:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self._write(descriptor, data, offset)

    def pread(self, descriptor: int, count: int, offset: int) -> bytes:
        data = self._read(descriptor, count, offset)
        return bytes(len(data)) if self.loses else data


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> RefusingDisk:
    return RefusingDisk(monkeypatch)


def page(number: int) -> list[ListedEntry]:
    return [file(f"{number:02}-{index:04}") for index in range(1000)]


def test_refused_rows_wait_in_memory_for_the_disk(
    listings: Listings, disk: RefusingDisk, caplog: pytest.LogCaptureFixture
) -> None:
    disk.refuses = True
    for number in range(3):
        listings.put_page(1, 1, page(number), 0, 1000 * number)
    assert len(listings.scan(1, 1, "", 5000)) == 3000
    assert listings.memory_bytes > 50_000
    assert len(caplog.records) == 1
    disk.refuses = False
    listings.put_page(1, 1, page(3), 0, 9000)
    assert listings.memory_bytes == 0
    assert len(listings.scan(1, 1, "", 5000)) == 4000


def test_at_the_bound_the_oldest_listing_is_dropped(
    listings: Listings, disk: RefusingDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MEMORY_BYTES", 150_000)
    lost: list[tuple[int, int]] = []
    listings.watch_lost(lambda directory, epoch: lost.append((directory, epoch)))
    disk.refuses = True
    for directory in range(1, 10):
        listings.put_page(directory, 1, page(0), 0, 1000)
        assert listings.get(directory, 1, "00-0000") is not None
        assert listings.memory_bytes <= 150_000
    dropped = 9 - 150_000 // len(joined_page(0))
    for directory in range(1, dropped + 1):
        with pytest.raises(ListingLost):
            listings.get(directory, 1, "00-0000")
    assert lost == [(directory, 1) for directory in range(1, dropped + 1)]
    assert listings.get(dropped + 1, 1, "00-0000") is not None


def joined_page(number: int) -> bytes:
    fields = page_fields(page(number), {}, 1000)
    return joined(fields)


def test_a_directory_above_the_bound_is_refused_alone(
    listings: Listings, disk: RefusingDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MEMORY_BYTES", len(joined_page(0)) * 3 // 2)
    disk.refuses = True
    listings.put_page(1, 1, page(0), 0, 1000)
    with pytest.raises(LocalDiskError, match="too many names"):
        listings.put_page(1, 1, page(1), 0, 1000)
    listings.put_page(2, 1, page(0), 0, 1000)
    assert len(listings.scan(2, 1, "", 5000)) == 1000
    assert not listings.drop(1, 1)


def test_rows_that_the_disk_lost_are_an_error(listings: Listings, disk: RefusingDisk) -> None:
    for number in range(20):  # more than are kept decoded
        listings.put_page(1, 1, page(number), 0, 1000)
    disk.loses = True
    with pytest.raises(ListingLost):
        listings.scan(1, 1, "", 30_000)
    with pytest.raises(ListingLost):
        listings.put(1, 1, page(0))
    assert listings.scan(2, 1, "", 10) == []


def test_space_of_dropped_listings_is_used_again(listings: Listings, tmp_path: Path) -> None:
    for epoch in range(1, 30):
        for number in range(5):
            listings.put_page(1, epoch, page(number), epoch - 1, 1000)
        while listings.drop(1, epoch - 1):
            pass
    assert (tmp_path / "names" / "rows").stat().st_size < 3 * 5 * 100_000


@pytest.mark.parametrize("change", ["put", "remove", "replace"])
def test_a_version_keeps_its_number_if_its_older_row_is_written_anew_at_that_moment(
    listings: Listings, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """A thread stores a newer listing, while the loop has taken rows out of the older one to write them again."""
    rows = [file(f"{index:04}") for index in range(100)]
    listings.put_page(1, 1, rows, 0, 5000)
    store, newer = listings._file.store, []

    def store_with_another_listing(data: bytes) -> StoredPack:
        monkeypatch.setattr(listings._file, "store", store)
        newer.append(thread.submit(listings.put_page, 1, 2, rows, 1, 9000))
        wait(newer, timeout=0.2)  # it ends here, or waits for this thread
        return store(data)

    with ThreadPoolExecutor(1) as thread:
        monkeypatch.setattr(listings._file, "store", store_with_another_listing)
        if change == "put":
            listings.put(1, 1, [file(f"{index:04}-new") for index in range(300)])
        elif change == "remove":
            listings.remove(1, 1, "0099")
        else:
            listings.replace(1, 1, "0098", "0099", [file("0099", "other")], 7000)
        numbers = newer[0].result()
    assert {number for number in numbers if number < 5100} >= {*range(5000, 5099)}
