"""Mode, time and owner in metadata of objects: fusecache's own come back exactly, those of others where they can."""

import pytest

from fusecache.model.objects import attributes_from_metadata, content_metadata, symlink_metadata
from fusecache.model.records import PosixAttributes

DEFAULT = PosixAttributes(0o644, 500, 501, 1_600_000_000_000_000_000)


@pytest.mark.parametrize("mtime_ns", [0, 1, 1_763_764_212_123_456_789, -1, -1_500_000_000, 2**62])
@pytest.mark.parametrize("mode", [0, 0o600, 0o755, 0o1777])
def test_what_is_written_comes_back_to_the_nanosecond(mode: int, mtime_ns: int) -> None:
    written = PosixAttributes(mode, 1000, 1001, mtime_ns)
    metadata = content_metadata("some", written)
    assert attributes_from_metadata(metadata, DEFAULT, with_owner=True) == written
    assert attributes_from_metadata(metadata, DEFAULT) == PosixAttributes(mode, 500, 501, mtime_ns)


@pytest.mark.parametrize("mode", ["104755", "102755", "6755", "36333"])
def test_set_id_bits_of_objects_are_dropped(mode: str) -> None:
    """The last one is s3fs's decimal spelling of 0106755."""
    found = attributes_from_metadata({"mode": mode}, DEFAULT)
    assert found is not None
    assert found.mode == 0o755


def test_a_symlink_keeps_its_time() -> None:
    metadata = symlink_metadata("some", "there", PosixAttributes(0o777, 1, 2, 3))
    assert attributes_from_metadata(metadata, DEFAULT, with_owner=True) == PosixAttributes(0o777, 1, 2, 3)


@pytest.mark.parametrize(
    ("metadata", "mode", "mtime_ns"),
    [
        pytest.param({"mtime": "1700000000.5"}, 0o644, 1_700_000_000_500_000_000, id="rclone"),
        pytest.param(
            {"mode": "100755", "mtime": "1700000000.123456789", "uid": "0"},
            0o755,
            1_700_000_000_123_456_789,
            id="rclone with metadata",
        ),
        pytest.param({"mode": "0100755"}, 0o755, DEFAULT.mtime_ns, id="leading zero"),
        pytest.param({"mode": "33188", "mtime": "1700000000"}, 0o644, 1_700_000_000 * 10**9, id="s3fs 644"),
        pytest.param({"mode": "33204"}, 0o664, DEFAULT.mtime_ns, id="s3fs whose digits are octal, too"),
        pytest.param({"mode": "600"}, 0o600, DEFAULT.mtime_ns, id="permissions alone"),
    ],
)
def test_what_other_programs_write_is_read(metadata: dict[str, str], mode: int, mtime_ns: int) -> None:
    assert attributes_from_metadata(metadata, DEFAULT) == PosixAttributes(mode, 500, 501, mtime_ns)


@pytest.mark.parametrize(
    "time", ["1e300", "-1e300", "1e999999999", "9223372037", "nan", "inf", "sNaN", "", "now"]
)
def test_a_time_that_no_file_can_have_is_none(time: str) -> None:
    assert attributes_from_metadata({"mtime": time}, DEFAULT) is None
    assert attributes_from_metadata({"mtime": time, "mode": "100600"}, DEFAULT) == PosixAttributes(
        0o600, 500, 501, DEFAULT.mtime_ns
    )


@pytest.mark.parametrize("mode", ["", "rw", "-100644", "-1", "40755", "9" * 30, "7" * 30, "16877", "10000"])
def test_a_mode_that_no_file_can_have_is_none(mode: str) -> None:
    assert attributes_from_metadata({"mode": mode}, DEFAULT) is None


@pytest.mark.parametrize("owner", ["-1", "4294967295", "root", "", "1e3"])
def test_an_owner_that_nobody_can_be_is_the_mounts(owner: str) -> None:
    metadata = {"mode": "100644", "uid": owner, "gid": owner}
    assert attributes_from_metadata(metadata, DEFAULT, with_owner=True) == DEFAULT


def test_metadata_without_a_word_of_these_tells_nothing() -> None:
    assert attributes_from_metadata({"color": "blue"}, DEFAULT, with_owner=True) is None
