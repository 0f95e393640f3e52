"""Objects at the edges: sizes where something in the read path ends, five tebibytes, keys that name no path."""

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.mount.conftest import Place
from tests.s3server import synthetic_bytes
from tests.support.mounts import Mount
from tests.support.s3_buckets import Bucket

pytestmark = pytest.mark.s3server_only

KIB, MIB, TIB = 2**10, 2**20, 2**40
GRANULE, BLOCK, CHUNK = 64 * KIB, MIB, 8 * MIB
EDGES = [1, *(edge + step for edge in (4 * KIB, GRANULE, BLOCK, CHUNK) for step in (-1, 0, 1))]
HUGE = 5 * TIB
SEED = 11


def _drop_pages(path: Path) -> None:
    """Have the next read ask the daemon."""
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.mark.parametrize("size", EDGES)
def test_objects_end_where_they_end(place: Place, size: int):
    key = f"{place.bucket.prefix}edge"
    place.bucket.control.add_synthetic(key, size, SEED)
    path = place.path / "edge"
    expected = synthetic_bytes(SEED, 0, size)
    assert path.stat().st_size == size
    with open(path, "rb", buffering=0) as file:
        last = max(0, size - 10)
        assert os.pread(file.fileno(), 100, last) == expected[last:]
        assert os.pread(file.fileno(), 100, size) == b""
    assert path.read_bytes() == expected
    _drop_pages(path)
    assert path.read_bytes() == expected  # from the disk


def test_five_tebibytes_are_read_at_start_middle_and_end_for_the_price_of_what_is_read(
    mount: Callable[..., Mount], bucket: Bucket
):
    bucket.control.add_synthetic(f"{bucket.prefix}huge", HUGE, SEED)
    made = mount()
    memory = _memory_bytes(made.pid)
    path = made.path / "huge"
    assert path.stat().st_size == HUGE
    places = [0, HUGE // 2 - 7, HUGE - 1, HUGE - 100_000, CHUNK - 3, 3 * TIB + 12_345]
    for _ in range(2):
        with open(path, "rb", buffering=0) as file:
            for offset in places:
                size = min(70_000, HUGE - offset)
                assert os.pread(file.fileno(), 70_000, offset) == synthetic_bytes(SEED, offset, size)
            assert os.pread(file.fileno(), 10, HUGE) == b""
        _drop_pages(path)
    on_disk = int(subprocess.check_output(["du", "-s", "-B1", made.cache], text=True).split()[0])
    assert on_disk < 128 * MIB
    assert _memory_bytes(made.pid) - memory < 96 * MIB


def _memory_bytes(pid: int) -> int:
    rows = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(rows["RssAnon"].split()[0]) * KIB


# A key that no path names is hidden: `docs/semantics.md`.
HIDDEN = (
    "a//b",
    "//",
    "../escape",
    "x/../../escape",
    "./here",
    "y/./z",
    "z/..",
    f"long/{'n' * 256}",
    f"{'m' * 300}/below",
)
# Odd, and names all the same.
SHOWN = {
    "back\\slash": b"1",
    "line\nbreak": b"2",
    "tab\tand space ": b"3",
    "per%2fcent%00": b"4",
    "\\x00\\0": b"5",
    " ": b"6",
    "-rf": b"7",
    "...": b"8",
    f"{'n' * 255}": b"9",
    "\u007f\u0001": b"a",
    "😀/😀": b"b",
    "~": b"c",
    "*?[": b"d",
    "e\u0301": b"e",
    "\u00e9": b"f",
}


def test_keys_that_no_path_names_are_hidden_and_do_no_harm(mount: Callable[..., Mount], bucket: Bucket):
    for key in HIDDEN:
        bucket.put(key, b"hidden")
    for key, data in SHOWN.items():
        bucket.put(key, data)
    bucket.put("both", b"a file")
    bucket.put("both/below", b"in a directory")
    bucket.put("slash/", b"not empty, and ends with a slash")
    made = mount()
    outside = sorted(os.listdir(made.path.parent))
    found = {}
    for folder, _, names in os.walk(made.path):
        for name in names:
            path = Path(folder) / name
            found[str(path.relative_to(made.path))] = path.read_bytes()
    assert found == {**SHOWN, "both/below": b"in a directory"}
    assert (made.path / "slash").is_dir()
    assert os.listdir(made.path / "slash") == []
    assert sorted(os.listdir(made.path.parent)) == outside
    assert made.is_alive()


def test_an_archived_object_fails_at_once(mount, bucket: Bucket, expect_log):
    """The log names the object, its storage class, and the way out."""
    expect_log(r"/old: archived in storage class GLACIER; restore it")
    bucket.client.put_object(
        Bucket=bucket.service.bucket, Key=f"{bucket.prefix}old", Body=b"bytes", StorageClass="GLACIER"
    )
    one: Mount = mount()
    began = time.monotonic()
    with pytest.raises(OSError, match="Input/output error"):
        (one.path / "old").read_bytes()
    assert time.monotonic() - began < 3
