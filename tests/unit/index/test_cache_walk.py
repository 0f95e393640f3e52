"""Walks through the cache index: every block of what is wanted once, in bounded pieces."""

from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from fusecache.index.cache_index import BlockRow, CacheIndex, ObjectChange, ScanCursor
from fusecache.model.objects import ObjectId

ROW = BlockRow(0b1, 1, 4096, bytes(128))
Contents = dict[str, set[int]]


def filled(directory: Path, contents: Contents) -> CacheIndex:
    index = CacheIndex(directory / "index", boot_id="boot-1")
    for number, (key, blocks) in enumerate(contents.items(), 1):
        index.apply(
            [ObjectChange(ObjectId(key, "etag"), number, 1 << 30, dict.fromkeys(blocks, ROW))], clock=1
        )
    return index


@settings(max_examples=50, deadline=None)
@given(
    contents=st.dictionaries(
        st.text("ab/", min_size=1, max_size=4), st.sets(st.integers(0, 9), min_size=1), max_size=12
    ),
    prefix=st.text("ab/", max_size=2),
    most_objects=st.integers(1, 5),
    most_blocks=st.integers(1, 7),
)
def test_a_walk_meets_every_block_of_wanted_keys_once_whatever_its_steps(
    tmp_path_factory, contents: Contents, prefix: str, most_objects: int, most_blocks: int
) -> None:
    index = filled(tmp_path_factory.mktemp("walk"), contents)
    met: list[tuple[str, int]] = []
    place: ScanCursor | None = ScanCursor()
    while place is not None:
        blocks, place = index.walk(
            place, lambda key: key.startswith(prefix), most_objects=most_objects, most_blocks=most_blocks
        )
        assert len(blocks) <= most_blocks
        met += [(each.object_id.key, each.block) for each in blocks]
    index.close()
    expected = [
        (key, block) for key, blocks in contents.items() if key.startswith(prefix) for block in blocks
    ]
    assert sorted(met) == sorted(expected)


def test_a_walk_goes_on_when_the_object_where_it_stopped_is_gone(tmp_path: Path) -> None:
    contents: Contents = {f"key{index}": {0, 1} for index in range(20)}
    index = filled(tmp_path, contents)
    met, place = index.walk(ScanCursor(), lambda _: True, most_objects=100, most_blocks=5)
    assert place is not None
    stopped_at = met[-1].object_id
    index.remove_object(stopped_at)
    rest, end = index.walk(place, lambda _: True, most_objects=100, most_blocks=100)
    assert end is None
    seen = {each.object_id.key for each in met + rest}
    assert seen == set(contents)
    assert len(rest) == 40 - 6
    index.close()


def test_sizes_are_those_of_blocks_that_are_there(tmp_path: Path) -> None:
    index = filled(tmp_path, {"a": {0, 3}})
    assert index.sizes([(1, 0), (1, 1), (2, 0), (1, 3)]) == {(1, 0): 4096, (1, 3): 4096}
    index.close()
