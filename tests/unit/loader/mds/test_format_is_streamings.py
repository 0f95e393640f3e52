"""Every encoding, compression and hash of the real library, in both directions, byte for byte."""

import json
import shutil
import warnings
from collections.abc import Iterator
from decimal import Decimal
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from loader import MDSDataset, MDSWriter, merge
from loader.base.compression import XXHASHES, digest, split
from loader.mds.encodings import NAMES, SCALARS, column_bytes
from tests.support.real_streaming import import_streaming

PIXELS = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)
COMPRESSIONS = ["br", "br:0", "bz2", "bz2:1", "gz", "gz:0", "snappy", "zstd", "zstd:1", "zstd:22"]


def encoded_image(kind: str) -> bytes:
    out = BytesIO()
    Image.fromarray(PIXELS).save(out, format=kind)
    return out.getvalue()


def a_sample(number: int) -> dict[str, Any]:
    """A value for a column of every encoding; the column's name says which."""
    image = Image.fromarray(PIXELS + np.uint8(number))
    values: dict[str, Any] = {
        "bytes": bytes(range(number % 9)),
        "str": "Zoë 🜚" * (number % 3),
        "json": {"number": number, "list": [1.5, None, "ü", float(number)]},
        "int": number - 7,
        "str_int": 10**30 + number,
        "str_float": number / 7,
        "str_decimal": Decimal(f"{number}.10"),
        "pkl": {"number": number, "set": {1, 2}},
        "pil": image,
        "png": image,
        "jpeg": encoded_image("JPEG"),
        "jpeg_array": [encoded_image("JPEG")] * (1 + number % 3),
        "jpegarray": [encoded_image("JPEG")],
        "list[pil]": [image] * (number % 3),
        "list[png]": [image] * (number % 2),
        "list[jpeg]": [image],
        "ndarray": np.full((1 + number % 3, 300), number, np.float16),
        "ndarray:int32": np.arange(1 + number, dtype=np.int32),
        "ndarray:uint8:2,3": np.full((2, 3), number, np.uint8),
    }
    for bits in (8, 16, 32, 64):
        values[f"uint{bits}"] = (1 << bits) - 1 - number
        values[f"int{bits}"] = number - (1 << (bits - 1))
        if bits > 8:
            values[f"float{bits}"] = number / 3
    return values


COLUMNS = {name: name for name in a_sample(0)}


def read_back(sample: dict[str, Any]) -> dict[str, Any]:
    """The sample as a reader returns it: scalars of their type, encoded images decoded."""

    def opened(blobs: list[bytes]) -> list[Any]:
        return [Image.open(BytesIO(blob)) for blob in blobs]

    scalars = {name: np.dtype(name).type(value) for name, value in sample.items() if name in SCALARS}
    images = {name: opened(sample[name]) for name in ("jpeg_array", "jpegarray")}
    return sample | scalars | images | {"jpeg": opened([sample["jpeg"]])[0], "list[jpeg]": None}


def comparable(sample: dict[str, Any]) -> dict[str, Any]:
    """The same with images and arrays as things that compare, and say of what kind they are."""

    def plain(value: Any) -> Any:
        if isinstance(value, list) and value and hasattr(value[0], "mode"):
            return [plain(one) for one in value]
        if hasattr(value, "mode"):
            return value.mode, value.size, value.tobytes()
        if isinstance(value, np.ndarray):
            return value.dtype.name, value.shape, value.tobytes()
        return (type(value).__name__, value.item()) if isinstance(value, np.generic) else value

    return {name: plain(value) for name, value in sample.items()}


def write_ours(out: Path, count: int = 40, **options: Any) -> Path:
    with MDSWriter(out, COLUMNS, **{"size_limit": 30_000, **options}) as writer:
        for number in range(count):
            writer.write(a_sample(number))
    return out


def write_theirs(out: Path, count: int = 40, **options: Any) -> Path:
    streaming = import_streaming()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer = streaming.MDSWriter(out=str(out), columns=COLUMNS, **{"size_limit": 30_000, **options})
        with writer:
            for number in range(count):
                writer.write(a_sample(number))
    return out


def read_theirs(directory: Path, scratch: Path) -> Iterator[dict[str, Any]]:
    """What the library's own reader finds in our shards, unpacked by the library."""
    import_streaming()
    from streaming.base.compression import decompress
    from streaming.base.format import reader_from_json

    for shard in json.loads((directory / "index.json").read_text())["shards"]:
        raw = scratch / shard["raw_data"]["basename"]
        raw.parent.mkdir(parents=True, exist_ok=True)
        stored = directory / (shard["zip_data"] or shard["raw_data"])["basename"]
        raw.write_bytes(decompress(shard["compression"], stored.read_bytes()))
        assert raw.stat().st_size == shard["raw_data"]["bytes"]
        reader = reader_from_json(str(scratch), None, shard)
        yield from (reader.get_item(number) for number in range(shard["samples"]))


def files(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in sorted(directory.rglob("*.*"))}


def test_both_know_the_same_names() -> None:
    import_streaming()
    from streaming.base.compression import get_compressions
    from streaming.base.format.mds.encodings import get_mds_encoded_size, get_mds_encodings
    from streaming.base.hashing import get_hash, get_hashes

    assert set(NAMES) == get_mds_encodings()
    assert set(NAMES) <= set(COLUMNS) | {"ndarray"}
    for name in (*COLUMNS, "ndarray:"):
        assert column_bytes(name) == (get_mds_encoded_size(name) or 0)
    for name in get_compressions():
        assert split(name)[0] == name.partition(":")[0]
    assert get_hashes() >= XXHASHES
    for name in get_hashes():
        assert digest(name, b"some bytes") == get_hash(name, b"some bytes")


@pytest.mark.parametrize("compression", [None, *COMPRESSIONS])
def test_every_encoding_and_compression_goes_both_ways(tmp_path: Path, compression: str | None) -> None:
    count = 8 if compression in ("br", "zstd:22") else 40
    options = {"compression": compression, "hashes": ["sha1", "xxh3_128"]}
    ours = write_ours(tmp_path / "ours", count, **options)
    theirs = write_theirs(tmp_path / "theirs", count, **options)
    expected = [comparable(read_back(a_sample(number))) for number in range(count)]
    found = [comparable(sample) for sample in MDSDataset(theirs, allow_pickle=True, check_hashes=True)]
    read = [comparable(sample) for sample in read_theirs(ours, tmp_path / "scratch")]
    assert found == read
    assert [sample | {"list[jpeg]": None} for sample in found] == expected  # it is lossy
    if not (compression or "").startswith("gz"):  # their gzip files hold the time of day
        assert files(ours) == files(theirs)


def test_aligned_shards_are_read_by_the_library(tmp_path: Path) -> None:
    ours = write_ours(tmp_path / "ours", align=64)
    read = [comparable(sample) for sample in read_theirs(ours, tmp_path / "scratch")]
    assert read == [comparable(sample) for sample in MDSDataset(ours, allow_pickle=True)]


@pytest.mark.parametrize("size_limit", [None, "9kb", "0.03mb", "30000b", "30000"])
def test_a_size_limit_is_written_as_the_library_takes_it(tmp_path: Path, size_limit: str | None) -> None:
    ours = write_ours(tmp_path / "ours", 20, size_limit=size_limit)
    assert files(ours) == files(write_theirs(tmp_path / "theirs", 20, size_limit=size_limit))


def test_a_merge_of_nested_parts_and_schemas_is_read_by_both(tmp_path: Path) -> None:
    write_ours(tmp_path / "all" / "10", 6)
    write_theirs(tmp_path / "all" / "2" / "b", 6, compression="zstd")
    with MDSWriter(tmp_path / "all" / "2" / "a", {"other": "str"}) as writer:
        writer.write({"other": "only this"})
    assert merge(tmp_path / "all") >= 3
    dataset = MDSDataset(tmp_path / "all", allow_pickle=True)
    assert dataset[0] == {"other": "only this"}
    found = [comparable(sample) for sample in dataset]
    assert found == [comparable(sample) for sample in read_theirs(tmp_path / "all", tmp_path / "scratch")]
    assert [sample["int"] for sample in found[1:]] == [*range(-7, -1)] * 2


def test_an_index_merged_by_the_library_is_read(tmp_path: Path) -> None:
    streaming = import_streaming()
    for part in ("0", "1"):
        write_theirs(tmp_path / "all" / part, 5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        streaming.base.util.merge_index(str(tmp_path / "all"))
    dataset = MDSDataset(tmp_path / "all", allow_pickle=True)
    assert [sample["int"] for sample in dataset] == [*range(-7, -2)] * 2


def test_a_local_directory_of_the_library_that_keeps_unpacked_shards_alone_is_read(tmp_path: Path) -> None:
    directory = write_theirs(tmp_path / "theirs", 10, compression="zstd", hashes=["sha1"])
    list(read_theirs(directory, tmp_path / "local"))
    shutil.copy(directory / "index.json", tmp_path / "local")
    dataset = MDSDataset(tmp_path / "local", allow_pickle=True, check_hashes=True)
    assert [sample["int"] for sample in dataset] == [*range(-7, 3)]
