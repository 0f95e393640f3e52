"""MDSDataset and MDSWriter: what is written comes back, and what cannot be read is said, by name."""

import json
import logging
import os
import pickle
import resource
import shutil
import struct
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import sleep
from typing import Any

import numpy as np
import pytest

from loader import DatasetError, EncodingError, MDSDataset, MDSWriter, ShardError, WriterError
from loader.base.compression import compress, decompress
from loader.mds import shard_files
from loader.mds.index import read_index
from loader.mds.shard_reader import ReadOptions, ShardReader

COLUMNS = {"id": "int", "text": "str", "tokens": "ndarray:int32:16"}
FIXED = {"id": "int", "tokens": "ndarray:int32:16"}
TEXT = {"text": "str"}
COUNT = 200


def sample(number: int) -> dict[str, Any]:
    return {
        "id": number,
        "text": "x" * (number % 7),
        "tokens": np.arange(number, number + 16, dtype=np.int32),
    }


def write(out: Path, columns: dict[str, str] = COLUMNS, count: int = COUNT, **options: Any) -> Path:
    with MDSWriter(out, columns, **{"size_limit": 2048, **options}) as writer:
        for number in range(count):
            writer.write({name: value for name, value in sample(number).items() if name in columns})
    return out


def assert_same(found: dict[str, Any], number: int) -> None:
    expected = sample(number)
    assert found["id"] == number
    assert np.array_equal(found["tokens"], expected["tokens"])
    assert found.get("text", expected["text"]) == expected["text"]


@pytest.mark.parametrize("compression", [None, "zstd", "zstd:19", "gz", "bz2:1", "br:1", "snappy"])
@pytest.mark.parametrize("columns", [COLUMNS, FIXED])
def test_what_is_written_comes_back(tmp_path: Path, compression: str | None, columns: dict[str, str]) -> None:
    dataset = MDSDataset(write(tmp_path, columns, compression=compression))
    assert len(dataset) == COUNT
    assert dataset.shard_sizes.size > 3
    for number, found in enumerate(dataset):
        assert_same(found, number)
    rest = {path.name.split(".", 2)[2] for path in tmp_path.glob("shard.*")}
    assert rest == {"mds" if compression is None else f"mds.{compression.partition(':')[0]}"}


def test_samples_are_found_by_every_kind_of_id(tmp_path: Path) -> None:
    dataset = MDSDataset(write(tmp_path))
    assert [found["id"] for found in dataset[5:60:9]] == list(range(5, 60, 9))
    assert [found["id"] for found in dataset[-3:]] == [197, 198, 199]
    for ids in ([3, 199, 3, -1, 60], np.array([3, 199, 3, -1, 60], np.int32), (3, 199, 3, -1, 60)):
        assert [found["id"] for found in dataset[ids]] == [3, 199, 3, 199, 60]
    assert dataset[np.int64(7)]["id"] == dataset[np.array(7)]["id"] == 7
    assert dataset[-COUNT]["id"] == 0
    assert dataset[[]] == []
    assert dataset.__getitems__([1])[0]["id"] == 1


@pytest.mark.parametrize("ids", [COUNT, -COUNT - 1, [0, COUNT], np.array([[1]]), [1.5], np.array([True])])
def test_an_id_out_of_range_is_an_index_error(tmp_path: Path, ids: Any) -> None:
    with pytest.raises(IndexError):
        MDSDataset(write(tmp_path))[ids]


def test_an_id_that_is_no_number_is_a_type_error(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        MDSDataset(write(tmp_path))["text"]  # type: ignore[call-overload]


def test_two_samples_share_no_memory(tmp_path: Path) -> None:
    dataset = MDSDataset(write(tmp_path, FIXED))
    first, second = dataset[[4, 4]]
    first["tokens"][:] = -1
    assert_same(second, 4)
    assert_same(dataset[4], 4)


@pytest.mark.parametrize("align", [1, 64, 512])
def test_aligned_samples_begin_at_multiples(tmp_path: Path, align: int) -> None:
    dataset = MDSDataset(write(tmp_path, align=align))
    for path in tmp_path.glob("shard.*"):
        count, first = struct.unpack_from("<II", path.read_bytes())
        assert first % align == 0
        assert count
        assert path.stat().st_size <= 2048
    assert [found["id"] for found in dataset] == list(range(COUNT))


def test_the_dataset_pickles_small_and_works_on(tmp_path: Path) -> None:
    dataset = MDSDataset(write(tmp_path))
    _ = dataset[:]
    data = pickle.dumps(dataset)
    assert len(data) < 10_000
    copy = pickle.loads(data)
    assert_same(copy[17], 17)
    assert copy.fingerprint == dataset.fingerprint


def test_columns_and_encodings_are_told(tmp_path: Path) -> None:
    dataset = MDSDataset(write(tmp_path))
    assert dataset.column_names == ("id", "text", "tokens")
    assert dataset.encodings == COLUMNS


def test_shards_of_different_columns_live_in_one_dataset(tmp_path: Path) -> None:
    write(tmp_path / "a", COLUMNS, 10)
    write(tmp_path / "b", FIXED, 10, compression="gz")
    shards = []
    for part in "ab":
        for shard in json.loads((tmp_path / part / "index.json").read_text())["shards"]:
            for which in ("raw_data", "zip_data"):
                if shard[which]:
                    shard[which]["basename"] = f"{part}/{shard[which]['basename']}"
            shards.append(shard)
    (tmp_path / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))
    dataset = MDSDataset(tmp_path)
    assert [found["id"] for found in dataset] == [*range(10), *range(10)]
    assert set(dataset[0]) - set(dataset[10]) == {"text"}


def test_few_open_files_and_little_memory_are_enough(tmp_path: Path) -> None:
    for compression in (None, "zstd"):
        directory = write(tmp_path / str(compression), compression=compression)
        index = read_index(directory)
        reader = ShardReader(index, ReadOptions(2, 100, 3000))
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(2):
            for shard in range(index.shards):
                assert len(reader.read_many(shard, [0])[0]) > 0
        assert len(os.listdir("/proc/self/fd")) <= before + 2


def test_threads_read_the_same_dataset(tmp_path: Path) -> None:
    index = read_index(write(tmp_path, count=1000))
    reader = ShardReader(index, ReadOptions(open_files=1, offset_cache_bytes=1))
    expected = [bytes(reader.read_many(shard, [0])[0]) for shard in range(index.shards)]
    wrong: list[object] = []

    def read_all(seed: int) -> None:
        try:
            for shard in np.random.default_rng(seed).integers(0, index.shards, 300).tolist():
                if reader.read_many(shard, [0])[0] != expected[shard]:
                    wrong.append(shard)
        except Exception as problem:  # noqa: BLE001 -- whatever it is, it is the failure of this test
            wrong.append(problem)

    threads = [threading.Thread(target=read_all, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def in_threads(count: int, work: Any) -> list[Any]:
    """What the calls return, or raise, of as many threads that begin together."""
    together = threading.Barrier(count)
    found: list[Any] = []

    def run() -> None:
        together.wait()
        try:
            found.append(work())
        except Exception as problem:  # noqa: BLE001 -- whatever it is, the test looks at it
            found.append(problem)

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.fixture
def unpacked(monkeypatch: pytest.MonkeyPatch) -> Counter[bytes]:
    """How often each shard's bytes were unpacked; each time takes as long as that of a large one."""
    counted: Counter[bytes] = Counter()
    real = shard_files.decompress

    def decompress(name: str, data: bytes, expected_bytes: int) -> bytes:
        counted[data] += 1
        sleep(0.05)
        return real(name, data, expected_bytes)

    monkeypatch.setattr(shard_files, "decompress", decompress)
    return counted


@pytest.mark.parametrize("in_folder", [False, True])
def test_of_the_threads_that_want_a_compressed_shard_one_unpacks_it(
    tmp_path: Path, unpacked: Counter[bytes], *, in_folder: bool
) -> None:
    directory = write(tmp_path / "data", compression="zstd")
    dataset = MDSDataset(directory, cache_folder=tmp_path / "unpacked" if in_folder else None)
    sizes = dataset.shard_sizes.tolist()
    ids = [0, sizes[0], sizes[0] + sizes[1]]
    found = in_threads(8, lambda: [sample["id"] for sample in dataset[ids]])
    assert found == [ids] * 8
    assert list(unpacked.values()) == [1, 1, 1]


def test_threads_that_wait_for_a_shard_that_cannot_be_unpacked_all_raise(
    tmp_path: Path, unpacked: Counter[bytes]
) -> None:
    dataset = MDSDataset(write(tmp_path, compression="zstd"))
    path = tmp_path / "shard.00000.mds.zstd"
    good = path.read_bytes()
    path.write_bytes(os.urandom(len(good)))
    found = in_threads(4, lambda: dataset[0])
    assert [type(problem) for problem in found] == [ShardError] * 4
    path.write_bytes(good)
    assert dataset[0]["id"] == 0
    assert unpacked[good] == 1


def test_a_fork_while_a_shard_is_being_unpacked_does_not_wait_for_it(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORK_WHILE_UNPACKING, write(tmp_path, compression="zstd")],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


FORK_WHILE_UNPACKING = """
import os, signal, sys, threading
from loader import MDSDataset
from loader.mds import shard_files

dataset, real = MDSDataset(sys.argv[1]), shard_files.decompress
begun, end = threading.Event(), threading.Event()

def decompress(name, data, expected_bytes):
    begun.set()
    end.wait()
    return real(name, data, expected_bytes)

shard_files.decompress = decompress
thread = threading.Thread(target=dataset.__getitem__, args=(0,))
thread.start()
begun.wait()
child = os.fork()
if not child:
    signal.alarm(10)
    shard_files.decompress = real
    os._exit(int(dataset[0]["id"] != 0))
status = os.waitpid(child, 0)[1]
end.set()
thread.join()
sys.exit(os.waitstatus_to_exitcode(status) != 0)
"""


@pytest.mark.parametrize("columns", [COLUMNS, FIXED])
def test_an_order_that_the_memory_for_unpacked_shards_is_too_small_for_is_told_of_once(
    tmp_path: Path, columns: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, columns, compression="zstd", size_limit=4096)
    fits = MDSDataset(tmp_path)
    small = MDSDataset(tmp_path, decompressed_cache_bytes=0)
    assert 3 < small.shard_sizes.size <= 8
    rng = np.random.default_rng(0)
    with caplog.at_level(logging.WARNING, "loader"):
        for _ in range(400):
            _ = fits[rng.integers(0, COUNT, 2)]
        for _ in range(40):  # each shard is unpacked once a pass, as in a good order
            for first in range(0, COUNT, 8):
                _ = small[first : first + 8]
        assert caplog.messages == []
        for _ in range(400):
            _ = small[rng.integers(0, COUNT, 2)]
    (message,) = caplog.messages
    assert "unpacked again and again" in message
    assert "decompressed_cache_bytes (0)" in message
    assert "cache_folder" in message


@pytest.mark.parametrize("columns", [FIXED, TEXT, COLUMNS])
def test_an_order_that_the_folder_of_unpacked_shards_is_too_small_for_is_told_of_once(
    tmp_path: Path, columns: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path / "data", columns, compression="zstd", size_limit=4096 if columns is not TEXT else 300)
    dataset = MDSDataset(tmp_path / "data")
    options = ReadOptions(open_files=1, decompressed_cache_bytes=0, cache_folder=str(tmp_path / "unpacked"))
    dataset._reader = ShardReader(dataset.index, options)
    rng = np.random.default_rng(0)
    with caplog.at_level(logging.WARNING, "loader"):
        for _ in range(20):
            for first in range(0, COUNT, 8):
                _ = dataset[first : first + 8]
        assert caplog.messages == []
        for _ in range(200):
            _ = dataset[rng.integers(0, COUNT, 2)]
    assert ["unpacked again and again" in message for message in caplog.messages] == [True]


@contextmanager
def few_free_descriptors(free: int) -> Iterator[None]:
    """A limit of open files that leaves the process so many more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = {int(name) for name in os.listdir("/proc/self/fd")}
    limit = next(number for number in range(soft) if number - sum(fd < number for fd in taken) == free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_few_open_files_are_enough_for_records_over_more_shards(tmp_path: Path) -> None:
    index = read_index(write(tmp_path, FIXED, size_limit=1024))
    reader = ShardReader(index, ReadOptions(open_files=3))
    assert index.shards > 16
    shards = np.repeat(np.arange(index.shards), index.samples)
    samples = np.concatenate([np.arange(count) for count in index.samples])
    order = np.random.default_rng(0).permutation(COUNT)
    block = np.zeros((COUNT, index.schema(0).record_bytes or 0), np.uint8)
    with few_free_descriptors(8):
        assert reader.read_records(shards[order], samples[order], block)
    expected = [bytes(reader.read_many(shards[row], [samples[row]])[0]) for row in order.tolist()]
    assert [row.tobytes() for row in block] == expected


def test_a_limit_of_open_files_is_said_to_be_one(tmp_path: Path) -> None:
    dataset = MDSDataset(write(tmp_path))
    with few_free_descriptors(0), pytest.raises(ShardError, match=r"shard\.00000\.mds.*ulimit -n") as caught:
        _ = dataset[0]
    assert "Restore" not in str(caught.value)
    assert_same(dataset[0], 0)


# Shards that cannot be read


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def replace_by_a_longer_one(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"more")


def remove(path: Path) -> None:
    path.unlink()


def make_a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("columns", [COLUMNS, FIXED])
@pytest.mark.parametrize("harm", [truncate, replace_by_a_longer_one, remove, make_a_directory])
def test_a_harmed_shard_is_named_with_its_samples(
    tmp_path: Path, harm: Any, columns: dict[str, str], compression: str | None
) -> None:
    dataset = MDSDataset(write(tmp_path, columns, compression=compression))
    sizes = dataset.shard_sizes.tolist()
    harm(next(tmp_path.glob("shard.00001.*")))
    assert_same(dataset[0], 0)
    for read in (lambda: dataset[sizes[0]], lambda: dataset[[0, sizes[0]]]):
        with pytest.raises(
            ShardError, match=rf"shard\.00001\.mds.*samples {sizes[0]} to {sum(sizes[:2]) - 1}"
        ):
            read()


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (truncate, "it was truncated"),
        (replace_by_a_longer_one, "it was replaced"),
        (remove, "the file is missing"),
        (make_a_directory, "this is a directory, not a file"),
    ],
)
def test_a_harmed_shards_error_is_one_tidy_sentence(
    tmp_path: Path, harm: Any, told: str, compression: str | None
) -> None:
    dataset = MDSDataset(write(tmp_path, compression=compression))
    path = next(tmp_path.glob("shard.00000.*"))
    harm(path)
    with pytest.raises(ShardError) as caught:
        dataset[0]
    text = str(caught.value)
    assert text.count(str(path)) == 1
    assert text.endswith(f"{told}. Restore the shard, or check the dataset with `fusecache dataset verify`.")
    assert "Errno" not in text
    assert ("truncated" in text) == (harm is truncate)


@pytest.mark.parametrize("compression", [None, "zstd", "gz", "bz2", "br", "snappy"])
def test_garbage_of_the_right_size_is_an_error(tmp_path: Path, compression: str | None) -> None:
    dataset = MDSDataset(write(tmp_path, compression=compression))
    path = next(tmp_path.glob("shard.00001.*"))
    path.write_bytes(b"\xff" * path.stat().st_size)
    with pytest.raises(ShardError, match=r"shard\.00001") as caught:
        dataset[int(dataset.shard_sizes[0])]
    assert ": ." not in str(caught.value)  # a cause is given


@pytest.mark.parametrize("expected_bytes", [1000, 0, 2**32 - 1])
@pytest.mark.parametrize("head", [b"\xff\xff\xff\xff\x0f", b"\xff\xff\xff\x0f", b"\xff\xff\xff\xff\x7f", b""])
def test_a_snappy_shard_that_claims_too_much_is_refused_before_there_is_memory_for_it(
    head: bytes, expected_bytes: int
) -> None:
    """Its library takes what the first bytes claim, and ends the process where there is not so much."""
    good = compress("snappy", os.urandom(1000))
    assert len(decompress("snappy", good, 1000)) == len(decompress("snappy", good, 0)) == 1000
    with pytest.raises(ValueError, match=r"its header (claims \d+ bytes|is damaged)"):
        decompress("snappy", head + good[5:] if head else b"", expected_bytes)


def test_a_shard_truncated_while_open_is_an_error(tmp_path: Path) -> None:
    dataset = MDSDataset(write(tmp_path))
    last = int(dataset.shard_sizes[0]) - 1
    assert_same(dataset[0], 0)
    truncate(tmp_path / "shard.00000.mds")
    with pytest.raises(ShardError, match=f"sample {last}: .*truncated"):
        dataset[last]


@pytest.mark.parametrize("at", [4, 8, 40])
def test_a_damaged_table_of_offsets_is_an_error(tmp_path: Path, at: int) -> None:
    dataset = MDSDataset(write(tmp_path))
    with open(tmp_path / "shard.00000.mds", "r+b") as file:
        file.seek(at)
        file.write(struct.pack("<I", 3))
    with pytest.raises(ShardError, match="damaged"):
        dataset[0]


def test_a_sample_count_that_contradicts_the_index_is_an_error(tmp_path: Path) -> None:
    dataset = MDSDataset(write(tmp_path))
    with open(tmp_path / "shard.00000.mds", "r+b") as file:
        file.write(struct.pack("<I", 3))
    with pytest.raises(ShardError, match="holds 3 samples"):
        dataset[0]


def test_bytes_that_do_not_decode_name_shard_sample_and_column(tmp_path: Path) -> None:
    dataset = MDSDataset(write(tmp_path))
    path = tmp_path / "shard.00000.mds"
    data = bytearray(path.read_bytes())
    start = struct.unpack_from("<I", data, 4 + 4 * 6)[0]
    data[start + 12] = 0xFF  # after the size of the text and the id
    path.write_bytes(data)
    with pytest.raises(ShardError, match=r"shard\.00000.*sample 6.*'text'"):
        dataset[6]
    with pytest.raises(ShardError, match=r"shard\.00000.*sample 6.*'text'"):
        dataset[[1, 6]]


def test_an_index_without_byte_counts_is_read_and_checked_by_the_shards_header(tmp_path: Path) -> None:
    write(tmp_path, FIXED)
    document = json.loads((tmp_path / "index.json").read_text())
    needed = ("samples", "column_names", "column_encodings", "column_sizes")
    document["shards"] = [
        {name: shard[name] for name in needed} | {"raw_data": {"basename": shard["raw_data"]["basename"]}}
        for shard in document["shards"]
    ]
    (tmp_path / "index.json").write_text(json.dumps(document))
    dataset = MDSDataset(tmp_path)
    assert [found["id"] for found in dataset] == list(range(COUNT))
    os.truncate(tmp_path / "shard.00000.mds", 10)
    with pytest.raises(ShardError, match="within its header"):
        MDSDataset(tmp_path)[0]


# Writing


def test_an_exception_in_the_block_leaves_no_index(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), MDSWriter(tmp_path, FIXED) as writer:  # noqa: PT012 -- it is the block
        writer.write({"id": 1, "tokens": sample(1)["tokens"]})
        raise RuntimeError
    with pytest.raises(DatasetError):
        MDSDataset(tmp_path)
    write(tmp_path, FIXED)
    assert len(MDSDataset(tmp_path)) == COUNT


def test_an_existing_dataset_is_not_written_over(tmp_path: Path) -> None:
    with pytest.raises(WriterError, match="holds a dataset already"):
        MDSWriter(write(tmp_path), COLUMNS)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"columns": {}}, "column"),
        ({"columns": {"x": "int7"}}, "int7"),
        ({"compression": "lzma"}, "lzma"),
        ({"compression": "gz:12"}, "levels"),
        ({"compression": "snappy:1"}, "levels"),
        ({"hashes": ["md0"]}, "md0"),
        ({"hashes": ["shake_128"]}, "shake"),
        ({"size_limit": 1 << 32}, "32 bits"),
        ({"size_limit": 0}, "size_limit"),
        ({"align": 48}, "align"),
    ],
)
def test_settings_that_cannot_work_are_errors(tmp_path: Path, options: dict[str, Any], told: str) -> None:
    with pytest.raises(WriterError, match=told):
        MDSWriter(**({"out": tmp_path / "new", "columns": FIXED} | options))
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ({"id": 1}, "no value for column 'tokens'"),
        ({"id": "x", "tokens": sample(1)["tokens"]}, "column 'id'"),
        ({"id": 1, "tokens": np.zeros(3, np.int32)}, "column 'tokens'"),
        ({"id": b"123", "tokens": sample(1)["tokens"]}, "3 bytes, but each value has 8"),
        ({"id": 1, "tokens": sample(1)["tokens"], "more": 1}, "no column: more"),
    ],
)
def test_a_sample_that_does_not_fit_is_named_and_left_out(
    tmp_path: Path, value: dict[str, Any], told: str
) -> None:
    with MDSWriter(tmp_path, FIXED) as writer:
        with pytest.raises(EncodingError, match=told):
            writer.write(value)
        writer.write({"id": 1, "tokens": sample(1)["tokens"]})
    assert len(MDSDataset(tmp_path)) == 1


def test_a_sample_larger_than_the_limit_gets_its_own_shard(tmp_path: Path) -> None:
    with MDSWriter(tmp_path, {"data": "bytes"}, size_limit=1000) as writer:
        for size in (10, 5000, 10, 10):
            writer.write({"data": bytes(size)})
    assert MDSDataset(tmp_path).shard_sizes.tolist() == [1, 1, 2]


def test_offsets_beyond_32_bits_are_an_error(tmp_path: Path) -> None:
    class Huge(bytes):
        """Says that it is 4 GiB long, so that the test need not be."""

        def __len__(self) -> int:
            return (1 << 32) - 100

    writer = MDSWriter(tmp_path, {"data": "bytes"})
    writer._encode = lambda sample: [sample["data"]]  # type: ignore[method-assign]
    with pytest.raises(WriterError, match="32 bits"):
        writer.write({"data": Huge()})
    assert not (tmp_path / "index.json").exists()


def test_a_closed_writer_takes_nothing(tmp_path: Path) -> None:
    with MDSWriter(tmp_path, FIXED) as writer:
        pass
    with pytest.raises(WriterError, match="closed"):
        writer.write(sample(1))
    assert len(MDSDataset(tmp_path)) == 0


def test_hashes_are_those_of_the_files(tmp_path: Path) -> None:
    import hashlib

    write(tmp_path, compression="zstd", hashes=["sha1", "xxh64", "xxh3_128"])
    shard = json.loads((tmp_path / "index.json").read_text())["shards"][0]
    data = (tmp_path / "shard.00000.mds.zstd").read_bytes()
    assert shard["zip_data"]["hashes"]["sha1"] == hashlib.sha1(data).hexdigest()
    assert set(shard["raw_data"]["hashes"]) == {"sha1", "xxh64", "xxh3_128"}


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_hash_of_which_nothing_is_known_names_the_shard(tmp_path: Path, compression: str | None) -> None:
    write(tmp_path, compression=compression, hashes=["sha1"])
    index = (tmp_path / "index.json").read_text()
    (tmp_path / "index.json").write_text(index.replace('"sha1": ', '"no_such": '))
    with pytest.raises(ShardError, match=r"shard\.00000.*'no_such' is unknown.*without check_hashes"):
        MDSDataset(tmp_path, check_hashes=True)[0]


@pytest.mark.parametrize("name", ["no_such", "shake_128", ""])
def test_a_writer_refuses_a_hash_that_it_does_not_know(tmp_path: Path, name: str) -> None:
    with pytest.raises(WriterError, match=rf"the hash '{name}' is unknown: choose one of .*sha256.*xxh64"):
        MDSWriter(tmp_path, FIXED, hashes=[name])


def test_importing_the_loader_needs_no_torch() -> None:
    code = "import loader, sys; assert not {'torch', 'PIL'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_nothing_is_written_beside_the_dataset(tmp_path: Path) -> None:
    directory = write(tmp_path / "data", compression="zstd")
    before = sorted(directory.iterdir())
    read_only = shutil.copytree(directory, tmp_path / "copy")
    assert len(MDSDataset(read_only)[:]) == COUNT
    assert sorted(path.name for path in read_only.iterdir()) == [path.name for path in before]


def test_a_hostile_sample_count_is_named_at_once(tmp_path: Path) -> None:
    """The error of a damaged shard names its samples without walking through all that the index claims."""
    reader = ShardReader(read_index(write(tmp_path)), ReadOptions())
    files = reader.files
    assert "samples 0 to 1125899906842623" in str(files.failed(0, 0, 1, range(1 << 50), "damaged"))
    assert "samples 2 to 7" in str(files.failed(0, 0, 1, [7, 2, 5], "damaged"))
