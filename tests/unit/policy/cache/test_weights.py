"""Which files are weights, and which reads of them mean that all is read."""

import json
import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusecache.config.option_groups import WHOLE_FILES
from fusecache.model.objects import GIB, MIB
from fusecache.policy.cache.weights import (
    RUN_BYTES,
    allowed_bytes,
    header_bytes,
    index_names,
    is_load,
    load_begins_at,
    shards_in_order,
    tensor_ends,
)


def safetensors(header_bytes: int) -> bytes:
    """Return the first bytes of a safetensors file."""
    return struct.pack("<Q", header_bytes) + b'{"layer"'


@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("model-00001-of-00002.safetensors", b""),
        ("model-00001-of-00002.safetensors", safetensors(5000)),
        ("9b1d5c", safetensors(5000)),  # a blob of a hub's cache
        ("9b1d5c", b"GGUF\x03\x00\x00\x00"),
        ("llama.gguf", b""),
        ("pytorch_model-00001-of-00002.bin", b""),
        ("consolidated.00.pth", b""),
        ("__0_0.distcp", b""),
        ("mp_rank_00_model_states.pt", b""),
    ],
)
def test_weights_are_known_by_name_or_header(name: str, start: bytes) -> None:
    begins_at = load_begins_at(name, GIB, start, WHOLE_FILES)
    assert is_load(begins_at, GIB, GIB // 2, RUN_BYTES)
    assert not is_load(begins_at, GIB, 0, RUN_BYTES)
    assert load_begins_at(name, GIB, start, ()) == math.inf, "turned off"


@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("tokens.bin", b""),  # Megatron
        ("tokens.bin", bytes(16)),
        ("data-00000-of-00010.arrow", b"ARROW1\0\0"),
        ("train.parquet", b"PAR1"),
        ("shard.00000.mds", struct.pack("<Q", 5000) + b"\x00" * 8),
        ("sample.pt", b"PK\x03\x04"),
        ("damaged", safetensors(2 * GIB)),  # a header longer than the file
        ("damaged", safetensors(GIB - 7)),  # or longer with its length, which comes before it
    ],
)
def test_data_sets_are_no_weights(name: str, start: bytes) -> None:
    assert load_begins_at(name, GIB, start, WHOLE_FILES) == math.inf


def test_a_reader_of_the_header_alone_loads_nothing() -> None:
    """The kernel reads up to a MiB ahead of it."""
    begins_at = load_begins_at("a.safetensors", GIB, safetensors(3 * MIB), WHOLE_FILES)
    assert not any(is_load(begins_at, GIB, offset, RUN_BYTES) for offset in range(0, 4 * MIB, MIB))
    assert is_load(begins_at, GIB, 5 * MIB, RUN_BYTES)


def test_single_reads_load_nothing() -> None:
    """A data set whose samples are read at random may have a header of safetensors."""
    begins_at = load_begins_at("a.safetensors", GIB, safetensors(3 * MIB), WHOLE_FILES)
    assert not is_load(begins_at, GIB, GIB // 2, RUN_BYTES - 1)


def test_a_reader_of_an_archives_directory_loads_nothing() -> None:
    """torch.load reads the end of the file first."""
    begins_at = load_begins_at("pytorch_model.bin", GIB, b"PK\x03\x04", WHOLE_FILES)
    assert not is_load(begins_at, GIB, GIB - 65_536, RUN_BYTES)


def test_small_files_are_left_to_read_ahead() -> None:
    assert load_begins_at("a.safetensors", 15 * MIB, safetensors(100), WHOLE_FILES) == math.inf


@given(st.integers(0, 1 << 40), st.integers(0, 1 << 40))
def test_what_may_be_fetched_grows_with_what_is_read(less: int, more: int) -> None:
    less, more = sorted((less, more))
    assert less < allowed_bytes(less) <= allowed_bytes(more)
    assert allowed_bytes(0) <= 128 * MIB


@pytest.mark.parametrize(
    ("shard", "index"),
    [
        ("model-00001-of-00008.safetensors", "model.safetensors.index.json"),
        ("pytorch_model-00002-of-00003.bin", "pytorch_model.bin.index.json"),
        (
            "diffusion_pytorch_model-00001-of-00002.safetensors",
            "diffusion_pytorch_model.safetensors.index.json",
        ),
        ("model.fp16-00001-of-00002.safetensors", "model.safetensors.index.fp16.json"),
        ("model.fp16-00001-of-00002.safetensors", "model.fp16.safetensors.index.json"),
    ],
)
def test_an_index_lies_beside_its_shards(shard: str, index: str) -> None:
    assert index in index_names(shard)


@pytest.mark.parametrize("name", ["model.safetensors", "9b1d5c", "-00001-of-00002.safetensors"])
def test_what_is_no_shard_has_no_index(name: str) -> None:
    assert index_names(name) == ()


def test_shards_come_in_the_order_of_the_map() -> None:
    weights = {"a": "2.safetensors", "b": "1.safetensors", "c": "2.safetensors", "d": "../other", "e": 7}
    index = json.dumps({"metadata": {}, "weight_map": weights}).encode()
    assert shards_in_order(index) == ["2.safetensors", "1.safetensors"]


@pytest.mark.parametrize(
    "index", [b"", b"{", b"[]", b"{}", b'{"weight_map": []}', b"\xff\xfe", b"[" * 200_000]
)
def test_a_damaged_index_is_none(index: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # of json, or our own
        shards_in_order(index)


@given(st.dictionaries(st.text(), st.text() | st.integers() | st.lists(st.text())))
def test_any_map_is_read(weights: dict[str, object]) -> None:
    try:
        shards = shards_in_order(json.dumps({"weight_map": weights}).encode())
    except ValueError:
        return
    assert len(shards) == len(set(shards))


def test_the_ends_of_tensors_are_read_from_the_header() -> None:
    places = {
        "b": {"data_offsets": [10, 30]},
        "__metadata__": {"format": "pt"},
        "a": {"data_offsets": [0, 10]},
    }
    text = json.dumps(places).encode()
    header = struct.pack("<Q", len(text)) + text
    begins_at = load_begins_at("model.safetensors", GIB, header[:16], WHOLE_FILES)
    assert header_bytes(begins_at) == len(header)
    assert tensor_ends(header) == [len(header) + 10, len(header) + 30]


def test_a_header_that_ends_beyond_the_file_is_not_read() -> None:
    begins_at = load_begins_at("a.safetensors", 20 * MIB, safetensors(20 * MIB - 7), WHOLE_FILES)
    assert header_bytes(begins_at) == 0
    whole = load_begins_at("a.safetensors", 20 * MIB, safetensors(20 * MIB - 8), WHOLE_FILES)
    assert header_bytes(whole) == 20 * MIB


@pytest.mark.parametrize(
    ("name", "start"), [("model.gguf", b"GGUF\x03\x00\x00\x00"), ("notes.txt", b"not a model at all")]
)
def test_other_formats_have_no_such_header(name: str, start: bytes) -> None:
    assert header_bytes(load_begins_at(name, GIB, start, WHOLE_FILES)) == 0


@pytest.mark.parametrize(
    "text",
    [
        b"[1, 2]",
        b'{"a": 5}',
        b'{"a": {"data_offsets": []}}',
        b'{"a": {"data_offsets": [0, 1.0]}}',
        b'{"a": {"data_offsets": [0, 1e999]}}',
        b"{",
        b"[" * 100_000,
    ],
)
def test_a_damaged_header_is_a_value_error(text: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        tensor_ends(bytes(8) + text)
