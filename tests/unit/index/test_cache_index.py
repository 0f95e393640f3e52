"""The cache index: its rows, its account, and what it believes after a stop."""

import random
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from fusecache.index import cache_index
from fusecache.index.cache_index import BlockRow, CacheIndex, ObjectChange
from fusecache.model.errors import StateError
from fusecache.model.objects import ObjectId

SIZE = 20 << 20
LONG_KEY = "k" * 1024  # longer than an LMDB key may be


def _row(size: int = 10, stamp: int = 1) -> BlockRow:
    return BlockRow(0b101, stamp, size, bytes(range(128)))


def _change(name: str, number: int, rows: dict[int, BlockRow | None]) -> ObjectChange:
    return ObjectChange(ObjectId(name, "etag"), number, SIZE, rows)


def _open(directory: Path, boot_id: str = "boot-1") -> CacheIndex:
    return CacheIndex(directory / "index", boot_id=boot_id, described=[directory / "files"])


def test_rows_come_back_as_written_also_after_a_stop(tmp_path: Path) -> None:
    index = _open(tmp_path)
    index.apply([_change(LONG_KEY, 7, {0: _row(), 5: _row(20)})], clock=33)
    index.close()
    index = _open(tmp_path)
    found = index.find(ObjectId(LONG_KEY, "etag"))
    assert found is not None
    assert (found.number, found.size, found.blocks, found.object_id.key) == (7, SIZE, 2, LONG_KEY)
    assert index.block_rows(7, 0, 8) == {0: _row(), 5: _row(20)}
    assert index.block_rows(7, 1, 5) == {}
    assert (index.used_bytes(), index.clock()) == (30, 33)
    assert index.find(ObjectId(LONG_KEY, "other")) is None
    index.close()


def test_numbers_are_never_given_out_twice(tmp_path: Path) -> None:
    index = _open(tmp_path)
    first = index.lease_numbers(10)
    assert index.lease_numbers(5) == first + 10
    index.close()
    index = _open(tmp_path)
    assert index.lease_numbers(1) == first + 15
    index.close()


def test_of_many_keys_the_ones_cached_last_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_index, "NAMES_MAX", 100)
    index = _open(tmp_path)
    changes = [_change(f"key-{number}", number, {0: _row()}) for number in range(1, 1001)]
    newer = [
        ObjectChange(ObjectId(f"key-{number}", "newer"), 1000 + number, SIZE, {0: _row()})
        for number in range(1, 51)
    ]
    index.apply([*changes, *newer], clock=0)
    named = {key: row.number for key, row in index.newest_objects().items()}
    assert sorted(named.values()) == list(range(951, 1051))
    assert all(named[f"key-{number}"] == 1000 + number for number in range(1, 51))
    index.close()


def test_an_object_goes_with_its_last_block(tmp_path: Path) -> None:
    index = _open(tmp_path)
    index.apply([_change("a", 1, {0: _row(), 1: _row()}), _change("b", 2, {0: _row()})], clock=0)
    assert index.evict([(1, 0), (1, 99), (2, 0)]).emptied == (2,)
    assert index.find(ObjectId("b", "etag")) is None
    assert index.without_rows([2]) == [2]
    gone = index.remove_object(ObjectId("a", "etag"))
    assert (gone.size, gone.emptied, index.used_bytes()) == (10, (1,), 0)
    index.close()


def test_a_sample_meets_every_block_sooner_or_later(tmp_path: Path) -> None:
    index = _open(tmp_path)
    index.apply([_change("a", 3, dict.fromkeys(range(20), _row()))], clock=0)
    index.apply([_change("b", 900, dict.fromkeys(range(3), _row()))], clock=0)
    rng = random.Random(1)
    everything = {(3, block) for block in range(20)} | {(900, block) for block in range(3)}
    assert index.sample(rng, 0, 4) == []
    for run in (1, 2, 8):
        met = {(number, block) for _ in range(100) for number, block, _ in index.sample(rng, 4, run)}
        assert met == everything
    index.close()


def test_samples_are_fair_to_blocks_whatever_the_size_of_their_object(tmp_path: Path) -> None:
    """Else one large object would hardly ever lose a block to thousands of small ones."""
    index = _open(tmp_path)
    index.apply([_change("large", 1, dict.fromkeys(range(2000), _row()))], clock=0)
    index.apply([_change(f"s{number}", number, {0: _row()}) for number in range(2, 2002)], clock=0)
    rng = random.Random(1)
    for run in (1, 8):
        met = [number for _ in range(200) for number, _, _ in index.sample(rng, 16, run)]
        assert len(met) > 2000
        # Half of all blocks are the large object's. Gaps between hashes are uneven, so it is not exactly a half.
        assert 0.35 < met.count(1) / len(met) < 0.65
    index.close()


def test_what_is_evicted_is_sampled_no_more(tmp_path: Path) -> None:
    index = _open(tmp_path)
    index.apply([_change("a", 1, dict.fromkeys(range(20), _row()))], clock=0)
    rng = random.Random(1)
    index.evict([(1, block) for block in range(20) if block != 9])
    assert {block for _, block, _ in index.sample(rng, 50, 8)} == {9}
    index.evict([(1, 9)])
    assert index.sample(rng, 50, 8) == []
    index.close()


def test_an_index_of_an_older_format_is_discarded(tmp_path: Path) -> None:
    index = _open(tmp_path)
    index.apply([_change("a", 1, {0: _row()})], clock=0)
    index.close()
    state = tmp_path / "index" / "state.json"
    state.write_text(state.read_text().replace('"format": 2', '"format": 1'))
    index = _open(tmp_path)
    assert index.used_bytes() == 0
    assert [folder.name.split(".")[0] for folder in index.opening.discarded] == ["index"]
    index.close()


def test_after_an_unclean_stop_the_same_boot_keeps_the_rows(tmp_path: Path) -> None:
    index = _open(tmp_path)
    index.apply([_change("a", 1, {0: _row()})], clock=0)
    index.close(clean=False)
    index = _open(tmp_path)
    assert index.opening.unclean
    assert index.used_bytes() == 10
    index.close()


def test_after_an_unclean_stop_an_opening_in_the_same_boot_writes_no_new_file(tmp_path: Path) -> None:
    """The disk may be full: what the state file is to say, it says."""
    _open(tmp_path).close(clean=False)
    state = tmp_path / "index" / "state.json"
    before = state.stat().st_ino
    _open(tmp_path).close(clean=False)
    assert state.stat().st_ino == before
    index = _open(tmp_path)
    assert index.opening.unclean
    index.close()


def test_after_an_unclean_stop_another_boot_discards_rows_and_files_unopened(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "1").write_bytes(b"x")
    index = _open(tmp_path)
    index.apply([_change("a", 1, {0: _row()})], clock=0)
    index.close(clean=False)
    # Torn rows could crash the process that opens them.
    (tmp_path / "index" / "rows" / "data.mdb").write_bytes(b"torn" * 5000)
    index = _open(tmp_path, "boot-2")
    assert index.used_bytes() == 0
    assert len(index.opening.discarded) == 2
    assert not (tmp_path / "files").exists()
    index.close()
    assert len(_open(tmp_path, "boot-2").opening.discarded) == 2  # still to be deleted


def test_after_a_clean_stop_another_boot_keeps_the_rows(tmp_path: Path) -> None:
    index = _open(tmp_path)
    index.apply([_change("a", 1, {0: _row()})], clock=0)
    index.close()
    index = _open(tmp_path, "boot-2")
    assert (index.used_bytes(), index.opening.unclean) == (10, False)
    index.close()


@pytest.mark.parametrize("text", ['{"format": 3, "boot_id": "boot-1", "clean": true}', "{}", "rubbish"])
def test_a_newer_or_unreadable_state_is_refused_and_left_alone(tmp_path: Path, text: str) -> None:
    _open(tmp_path).close()
    state = tmp_path / "index" / "state.json"
    state.write_text(text)
    with pytest.raises(StateError):
        _open(tmp_path)
    assert state.read_text() == text


class IndexMachine(RuleBasedStateMachine):
    """The index against a dict."""

    def __init__(self) -> None:
        super().__init__()
        import tempfile

        self.folder = tempfile.TemporaryDirectory()
        self.index = _open(Path(self.folder.name))
        self.model: dict[tuple[int, int], BlockRow] = {}

    @rule(
        number=st.integers(1, 3),
        blocks=st.dictionaries(st.integers(0, 5), st.none() | st.integers(1, 99), min_size=1),
    )
    def apply(self, number: int, blocks: dict[int, int | None]) -> None:
        rows = {block: None if size is None else _row(size) for block, size in blocks.items()}
        self.index.apply([_change(f"o{number}", number, rows)], clock=0)
        for block, row in rows.items():
            self.model.pop((number, block), None)
            if row is not None:
                self.model[number, block] = row

    @rule(pairs=st.lists(st.tuples(st.integers(1, 3), st.integers(0, 5)), unique=True))
    def evict(self, pairs: list[tuple[int, int]]) -> None:
        gone = self.index.evict(pairs)
        assert gone.size == sum(row.size for pair in pairs if (row := self.model.pop(pair, None)))

    @rule()
    def restart(self) -> None:
        self.index.close()
        self.index = _open(Path(self.folder.name))

    @invariant()
    def agrees_with_the_model(self) -> None:
        assert self.index.used_bytes() == sum(row.size for row in self.model.values())
        for number in range(1, 4):
            rows = {block: row for (n, block), row in self.model.items() if n == number}
            assert self.index.block_rows(number, 0, 100) == rows
            found = self.index.find(ObjectId(f"o{number}", "etag"))
            assert (found.blocks if found is not None else 0) == len(rows)

    def teardown(self) -> None:
        self.index.close()
        self.folder.cleanup()


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
