"""Bytes that need no storage."""

import hashlib
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tests.s3server import S3Server
from tests.s3server.synthetic import GRANULE_BYTES, PERIOD_BYTES, synthetic_bytes, synthetic_etag

seeds = st.integers(0, 2**32)
offsets = st.one_of(
    st.integers(0, 5 * 2**40),
    st.builds(
        lambda granule, near: max(0, granule * GRANULE_BYTES + near),
        st.integers(0, 2**26),
        st.integers(-9, 9),
    ),
)


@given(seed=seeds, offset=offsets, size=st.integers(0, 200_000), cut=st.integers(0, 200_000))
def test_any_piece_is_the_same_bytes_however_it_is_cut(seed: int, offset: int, size: int, cut: int) -> None:
    whole = synthetic_bytes(seed, offset, size)
    cut = min(cut, size)
    assert len(whole) == size
    assert synthetic_bytes(seed, offset, cut) + synthetic_bytes(seed, offset + cut, size - cut) == whole


@given(seed=seeds, offset=offsets, shift=st.integers(1, 2**30))
def test_bytes_moved_by_anything_differ(seed: int, offset: int, shift: int) -> None:
    size = GRANULE_BYTES + 8  # a whole stamp, wherever the piece begins
    here = synthetic_bytes(seed, offset, size)
    assert synthetic_bytes(seed, offset + shift, size) != here
    assert synthetic_bytes(seed, offset + PERIOD_BYTES, size) != here
    assert synthetic_bytes(seed + 1, offset, size) != here


def test_the_bytes_are_the_same_in_every_version_of_python() -> None:
    digest = hashlib.sha256(synthetic_bytes(7, 65_530, 5_000_000)).hexdigest()
    assert digest == "127c524e0ff796b6f377129658c281aec4717415b2af4072631db119aa3cc080"
    assert synthetic_etag(7, 0, 10) == "fa6a2a7e8a9901d5c66b6bd8e2744b44"


def test_many_objects_are_listed_and_read_like_others_and_leave_no_file(tmp_path: Path) -> None:
    with S3Server(tmp_path) as server:
        server.control.add_many("many/{:04d}", 1500, 100)
        server.control.put("many/0003", b"replaced")
        server.control.delete("many/0004")
        objects = server.control.objects()
        assert list(objects) == [f"many/{index:04d}" for index in range(1500) if index != 4]
        assert server.control.read("many/0003") == b"replaced"
        assert server.control.read("many/0005") == synthetic_bytes(5, 0, 100)
        assert sum(1 for path in tmp_path.rglob("*") if path.is_file()) < 10
