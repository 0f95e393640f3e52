"""What is given wrong is refused at once, by name and with what was given; what is meant well is taken."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from loader import (
    ElasticBatchSampler,
    EncodingError,
    Hints,
    LoaderError,
    MDSDataset,
    MDSWriter,
    OrderError,
    ShardError,
    StateError,
    Stream,
    World,
    WriterError,
    merge,
)
from loader.__main__ import main
from loader.errors import ArgumentError
from loader.mds.encodings import encoder
from loader.order import OrderSpec, Weight
from loader.streaming import StreamingDataset
from loader.tools.row_sources import value_converter

COUNT = 203


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("data") / "whole", COUNT, compression="zstd")


def write(out: Path, count: int, **options: Any) -> Path:
    with MDSWriter(out, {"id": "int"}, **{"size_limit": 512, **options}) as writer:
        for number in range(count):
            writer.write({"id": number})
    return out


def broken_off(out: Path) -> Path:
    """A folder as a killed writer leaves it."""
    writer = MDSWriter(out, {"id": "int"}, size_limit=512)
    for number in range(COUNT):
        writer.write({"id": number})
    return out


def sampler_of(**options: Any) -> ElasticBatchSampler:
    how: dict[str, Any] = {"global_batch_size": 8, "canonical_nodes": 1, "world": World(), **options}
    return ElasticBatchSampler([50, 50, 50, 53], **how)


def state(samples: int, **changes: Any) -> dict[str, Any]:
    """What StreamingDataset.state_dict() returns."""
    return {
        "epoch": 0,
        "sample_in_epoch": samples,
        "num_canonical_nodes": 1,
        "shuffle_seed": 9176,
        "initial_physical_nodes": 1,
    } | changes


# States of the library


@pytest.mark.parametrize("samples", [211, 216, 5000])
def test_a_librarys_state_beyond_the_epoch_is_refused_and_the_position_stays(
    directory: Path, samples: int
) -> None:
    sampler, dataset = sampler_of(), StreamingDataset(local=str(directory), shuffle=True, batch_size=8)
    for one in (sampler, dataset):
        with pytest.raises(StateError, match=rf"sample {samples} is beyond the epoch's 203.*epoch_size"):
            one.load_state_dict(state(samples))
    assert (sampler.epoch, sampler.remaining_batches) == (0, len(sampler))
    assert len(list(dataset)) == COUNT


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_a_librarys_end_of_an_epoch_on_any_ranks_is_the_end(directory: Path, ranks: int) -> None:
    end = -(-COUNT // ranks) * ranks
    sampler, dataset = sampler_of(), StreamingDataset(local=str(directory), shuffle=True, batch_size=8)
    sampler.load_state_dict(state(end))
    dataset.load_state_dict(state(end))
    assert (sampler.epoch, sampler.remaining_batches) == (1, len(sampler))
    assert (len(list(dataset)), len(list(dataset))) == (0, COUNT)


@pytest.mark.parametrize("name", ["shuffle_seed", "num_canonical_nodes"])
@pytest.mark.parametrize("value", [None, "4"])
def test_a_librarys_state_with_a_wrong_value_is_refused_by_its_name(
    directory: Path, name: str, value: Any
) -> None:
    dataset = StreamingDataset(local=str(directory), batch_size=8)
    with pytest.raises(StateError, match=f"{name} of the saved state is {value!r}"):
        dataset.load_state_dict(state(8, **{name: value}))


# StreamingDataset's face


@pytest.mark.parametrize("given", [{}, {"batch_size": None}, {"batch_size": 0}])
def test_an_iteration_without_a_batch_size_is_an_error_and_single_samples_are_read(
    directory: Path, given: dict[str, Any]
) -> None:
    dataset = StreamingDataset(local=str(directory), shuffle=True, **given)
    assert dataset[3] == {"id": 3}
    assert len(dataset) == COUNT
    with pytest.raises(ValueError, match="batch_size is missing: pass"):
        iter(dataset)


# Writers


@pytest.mark.parametrize("again", [{}, {"compression": "zstd"}, {"compression": "zstd", "resume": True}])
def test_a_writers_left_over_shards_are_not_written_over_or_left_beside(
    tmp_path: Path, again: dict[str, Any]
) -> None:
    out = broken_off(tmp_path / "out")
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(WriterError, match=r"holds shard\.00000\.mds, .*resum.*another directory, or remove"):
        MDSWriter(out, {"id": "int"}, size_limit=512, **again)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    with MDSWriter(out, {"id": "int"}, size_limit=512, resume=True) as writer:
        assert writer.samples > 100


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WriterError, match=rf"{tmp_path}/file/x cannot be made: Not a directory"):
        MDSWriter(tmp_path / "file" / "x", {"id": "int"})


def test_a_writer_without_a_block_is_finished_by_the_librarys_name_for_it(tmp_path: Path) -> None:
    writer = MDSWriter(tmp_path, {"id": "int"})
    writer.write({"id": 7})
    writer.finish()
    assert MDSDataset(tmp_path)[0] == {"id": 7}


def test_one_hash_is_a_hash_and_an_unknown_one_is_answered_with_those_there_are(tmp_path: Path) -> None:
    write(tmp_path / "out", 3, hashes="xxh64")
    (entry,) = json.loads((tmp_path / "out" / "index.json").read_text())["shards"]
    assert entry["hashes"] == ["xxh64"]
    with pytest.raises(WriterError, match=r"'xxh65' is unknown: choose one of md5, sha1"):
        write(tmp_path / "none", 3, hashes="xxh65")


# Numbers


@pytest.mark.parametrize("size", ["1kb", "1 KiB", 1000.0, np.int64(1000)])
def test_a_bound_of_unpacked_shards_may_be_text_as_sizes_elsewhere(
    directory: Path, tmp_path: Path, size: Any
) -> None:
    for folder in (None, tmp_path):
        dataset = MDSDataset(directory, decompressed_cache_bytes=size, cache_folder=folder)
        assert [dataset[number]["id"] for number in range(0, COUNT, 40)] == list(range(0, COUNT, 40))
    assert len(list(tmp_path.glob("*.mds"))) < 4


@pytest.mark.parametrize("size", ["much", None, math.nan])
def test_a_bound_that_is_no_size_is_refused_at_once(directory: Path, size: Any) -> None:
    with pytest.raises(ArgumentError, match="decompressed_cache_bytes"):
        MDSDataset(directory, decompressed_cache_bytes=size)


def test_a_seed_may_be_longer_than_any_float() -> None:
    assert OrderSpec(seed=1 << 1100).seed == 1 << 1100


def test_a_state_that_was_saved_with_numbers_of_numpy_is_loaded() -> None:
    saved = sampler_of().state_dict()
    sampler = sampler_of()
    sampler.load_state_dict({**saved, "samples": np.int64(16), "epoch": np.int64(1)})
    assert json.loads(json.dumps(sampler.state_dict())) == {**saved, "samples": 16, "epoch": 1}


def test_numbers_of_numpy_are_plain_in_states(directory: Path) -> None:
    number: Any = np.int64
    real: Any = np.float64
    spec = OrderSpec(
        seed=number(3),
        canonical_nodes=number(2),
        epoch_size=number(100),
        weights=(Weight(real(1)),),
    )
    plain = OrderSpec(seed=3, canonical_nodes=2, epoch_size=100, weights=(Weight(1.0),))
    world = World(number(0), number(1), number(1))
    states = []
    for size, order, step in ((number(16), spec, number(1)), (16, plain, 1)):
        sampler = sampler_of(global_batch_size=size, canonical_nodes=None, order=order, world=world)
        sampler.set_epoch(step)
        next(iter(sampler))
        states += [sampler.state_dict(batches_consumed=step)]
        sampler.record_step(step)
        states += [sampler.state_dict()]
    assert len({json.dumps(each) for each in states}) == 1
    dataset = StreamingDataset(
        local=str(directory),
        batch_size=number(8),
        num_canonical_nodes=number(2),
        shuffle_seed=number(3),
    )
    assert json.dumps(dataset.state_dict(number(8))) == json.dumps(dataset.state_dict(8))
    json.dumps(dataset.state_dict())


@pytest.mark.parametrize(("given", "samples"), [("100", 100), ("0.1k", 100), (1e2, 100), (None, COUNT)])
def test_an_epochs_size_is_a_number_or_its_short_form_for_samplers_too(given: Any, samples: int) -> None:
    assert sampler_of(epoch_size=given).state_dict()["settings"]["epoch_size"] == samples
    assert sampler_of(global_batch_size=16.0).batch_size == 16


@pytest.mark.parametrize(
    ("make", "given", "told"),
    [
        (sampler_of, {"global_batch_size": "16"}, "batch_size must be a whole number of samples, not '16' (str)"),
        (sampler_of, {"global_batch_size": 1.5}, "batch_size must be a whole number of samples, not 1.5 (float)"),
        (sampler_of, {"seed": "17"}, "seed must be a whole number, not '17' (str)"),
        (sampler_of, {"canonical_nodes": "4"}, "canonical_nodes must be a whole number, not '4' (str)"),
        (sampler_of, {"epoch_size": "many"}, "epoch_size 'many' is not a number of samples: write"),
        (sampler_of, {"epoch_size": "1e999"}, "epoch_size '1e999' is not a number of samples: write"),
        (World, {"rank": "0", "ranks": "2"}, "rank must be a whole number, not '0' (str)"),
        (World.detect, {"dp_rank": 0, "dp_size": "1"}, "dp_size must be a whole number, not '1' (str)"),
        (Stream, {"path": "x", "proportion": "0.5"}, "proportion must be a number, not '0.5' (str)"),
    ],
)  # fmt: skip
def test_a_setting_of_a_wrong_type_is_named_with_what_was_given(
    make: Callable[..., Any], given: dict[str, Any], told: str
) -> None:
    with pytest.raises(OrderError, match=re.escape(told)):
        make(**given)


@pytest.mark.parametrize(
    "given",
    [
        {"batch_size": "8"},
        {"num_canonical_nodes": "4"},
        {"shuffle_seed": "x"},
        {"shuffle_block_size": "64"},
        {"sampling_granularity": "2"},
    ],
)
def test_the_faces_settings_are_told_by_its_names(directory: Path, given: dict[str, Any]) -> None:
    ((name, value),) = given.items()
    with pytest.raises(OrderError, match=rf"{name} must be a whole number.*, not '{value}' \(str\)"):
        StreamingDataset(**{"local": str(directory), "shuffle": True, "batch_size": 8, **given})


def test_what_is_no_path_no_sample_or_no_dataset_is_named(directory: Path, tmp_path: Path) -> None:
    five: Any = 5
    with pytest.raises(ArgumentError, match=r"path of a directory is needed, not 5 \(int\)"):
        MDSDataset(five)
    with MDSWriter(tmp_path, {"id": "int"}) as writer:
        with pytest.raises(EncodingError, match=r"'a' \(str\)"):
            writer.write("a")  # type: ignore[arg-type]
        writer.write({"id": 1})
    dataset = MDSDataset(directory)
    sampler: Any = sampler_of()
    with pytest.raises(ArgumentError, match="in this order, not ElasticBatchSampler and MDSDataset"):
        Hints(sampler, dataset)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "variables",
    [
        {"RANK": "0", "WORLD_SIZE": "0"},
        {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "0"},
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "0"},
        {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "-1"},
    ],
)
def test_an_environment_of_no_ranks_is_an_error_that_names_the_variable(variables: dict[str, str]) -> None:
    name = list(variables)[-1]
    with pytest.raises(OrderError, match=f"{name}='{variables[name]}' in the environment is less than 1"):
        World.detect(environment=variables)


# Tools


def test_parts_may_stand_behind_an_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("0", "1", "2"):
        write(tmp_path / name, 3)
    merge(tmp_path)
    assert main(["merge", str(tmp_path), "2", "--replace", "0"]) == 0
    names = [
        one["raw_data"]["basename"] for one in json.loads((tmp_path / "index.json").read_text())["shards"]
    ]
    assert names == ["2/shard.00000.mds", "0/shard.00000.mds"]
    for wrong in (["merge", str(tmp_path), "--replce"], ["ls", str(tmp_path), "more"]):
        with pytest.raises(SystemExit):
            main(wrong)
        assert f"unrecognized arguments: {wrong[-1]}" in capsys.readouterr().err


def test_a_part_that_is_not_there_is_said_not_to_be(tmp_path: Path) -> None:
    write(tmp_path / "0", 3)
    with pytest.raises(WriterError, match=rf"there is no folder {tmp_path}/nosuch"):
        merge(tmp_path, ["0", "nosuch"])


def test_a_conversion_counts_rows_of_parquet_from_1_in_every_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for values, encoding in (([1, 2, None], "int"), ([1, 2, 300], "uint8")):
        pq.write_table(pa.table({"id": values}), tmp_path / "rows.parquet")
        command = [
            "convert",
            "parquet",
            "--columns",
            f"id:{encoding}",
            f"{tmp_path}/rows.parquet",
            f"{tmp_path}/out",
        ]
        assert main(command) == 1
        assert re.search(r"rows\.parquet, row 3: ", capsys.readouterr().err)


# Values


@pytest.mark.parametrize(
    ("encoding", "value", "told"),
    [
        ("int8", 128, "128 is out of range for int8, which is -128 to 127"),
        ("uint16", -1, "-1 is out of range for uint16, which is 0 to 65535"),
        ("int", 1 << 63, f"{1 << 63} is out of range for int, which is {-(1 << 63)} to {(1 << 63) - 1}"),
    ],
)
def test_a_number_out_of_range_is_told_with_the_range(encoding: str, value: int, told: str) -> None:
    with pytest.raises(EncodingError, match=re.escape(told)):
        encoder(encoding)(value)


def test_rows_of_another_shape_are_told_with_a_way_out() -> None:
    with pytest.raises(LoaderError, match=r"8 numbers do not fill the shape 9: name .*\(ndarray:int32\)"):
        value_converter("ndarray:int32:9")(list(range(8)))


def test_a_value_whose_sizes_point_outside_its_sample_is_told_so(tmp_path: Path) -> None:
    image = Image.new("L", (3, 3))
    with MDSWriter(tmp_path, {"a": "png", "b": "png"}) as writer:
        writer.write({"a": image, "b": image})
    (shard,) = tmp_path.glob("shard.*")
    data = bytearray(shard.read_bytes())
    first = int.from_bytes(data[4:8], "little")
    data[first : first + 4] = (64512).to_bytes(4, "little")
    shard.write_bytes(data)
    with pytest.raises(ShardError, match=r"column 'b' does not decode: .* outside the sample's"):
        MDSDataset(tmp_path)[0]
