"""Loading weights: once a program reads a model out of order, the rest comes by itself, each byte once."""

import errno
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import pytest
from safetensors import safe_open
from safetensors.numpy import save

from fusecache.engine.prefetch import page_reader
from tests.mount.conftest import Place
from tests.s3server import Control
from tests.support.mounts import FUSECACHE, Mount, pattern, run, wait_until
from tests.support.s3_buckets import Bucket

MIB = 2**20
TENSORS, TENSOR_BYTES = 24, 4 * MIB
# Of tensors far apart, so that each is a jump.
FAR_APART = ("03", "20", "11", "07", "16")


def model(seed: int = 1, tensors: int = TENSORS) -> dict[str, Any]:
    """Return the tensors of a model by name."""
    size = TENSOR_BYTES // 4
    return {
        f"{number:02}": numpy.frombuffer(pattern(TENSOR_BYTES, seed * 100 + number), "u4", size)
        for number in range(tensors)
    }


def equal(path: Path, tensors: dict[str, Any], names: list[str] | tuple[str, ...]) -> bool:
    """Load tensors of a file as a program does, by a mapping; return whether they are as they should be."""
    with safe_open(path, framework="numpy") as file:
        return all(numpy.array_equal(file.get_tensor(name), tensors[name]) for name in names)


def shuffled(tensors: dict[str, Any]) -> list[str]:
    return random.Random(5).sample(sorted(tensors), len(tensors))


def fetched(mount: Mount) -> int:
    """Return how many bytes the daemon asked the bucket for."""
    return int(sum(mount.status()["cache"]["bytes_by_cause"].values()))


def control_of(bucket: Bucket) -> Control:
    """Return the hand behind the test server, which counts bytes by key. Skips where there is none."""
    if bucket.service.control is None:
        pytest.skip("needs the project's own server")
    return bucket.service.control


def sent(bucket: Bucket, name: str) -> int:
    """Return how many bytes of an object the bucket has sent."""
    log = control_of(bucket).log("GetObject", bucket.prefix + name)
    return sum(entry.bytes_out for entry in log)


def test_tensors_in_any_order_are_right_and_each_byte_comes_once(place: Place) -> None:
    tensors = model()
    data = save(tensors)
    place.bucket.put("model.safetensors", data)
    before = fetched(place.first_mount)
    assert equal(place.path / "model.safetensors", tensors, shuffled(tensors))
    assert fetched(place.first_mount) - before <= 1.02 * len(data)


@pytest.mark.parametrize("name", ["model.safetensors", "5f1c09a2"])
def test_all_of_a_model_comes_once_tensors_are_read_out_of_order(place: Place, name: str) -> None:
    """A file of a hub's cache is named by a hash: its header tells what it is."""
    tensors = model()
    data = save(tensors)
    place.bucket.put(name, data)
    with safe_open(place.path / name, framework="numpy") as file:
        for each in FAR_APART:
            assert numpy.array_equal(file.get_tensor(each), tensors[each])
        wait_until(lambda: sent(place.bucket, name) >= len(data), "the rest of the model")
        assert sent(place.bucket, name) <= 1.02 * len(data)
        control_of(place.bucket).clear_log()
        for each in shuffled(tensors):
            assert numpy.array_equal(file.get_tensor(each), tensors[each])
    assert sent(place.bucket, name) == 0, "what had come was asked for again"


def test_a_load_goes_on_without_its_page_reader(mount: Callable[..., Mount], bucket: Bucket) -> None:
    """It may get no processor time, in a group that is frozen or throttled."""
    data = save(model(tensors=120))
    bucket.put("model.safetensors", data)
    one, control = mount(), control_of(bucket)
    control.set(total_bandwidth=60e6)
    try:
        with safe_open(one.path / "model.safetensors", framework="numpy") as file:
            for each in ("70", "50"):
                file.get_tensor(each)
            (reader,) = wait_until(lambda: one.helpers(page_reader), "a page reader")
            os.kill(reader, signal.SIGSTOP)
            control.set(total_bandwidth=None)
            for each in ("80", "40", "90", "30"):  # 24 MiB in all: 512 MiB may be fetched
                file.get_tensor(each)
            wait_until(lambda: sent(bucket, "model.safetensors") >= len(data), "all of the model")
    finally:
        control.set(total_bandwidth=None)


def test_a_reader_of_headers_fetches_no_more(place: Place) -> None:
    tensors = model()
    for name in ("peeked.safetensors", "loaded.safetensors"):
        place.bucket.put(name, save(tensors))
    with safe_open(place.path / "peeked.safetensors", framework="numpy") as file:
        assert sorted(file.keys()) == sorted(tensors)
        # By the time that a whole other model is there, this one would have come, too.
        assert equal(place.path / "loaded.safetensors", tensors, shuffled(tensors))
    assert sent(place.bucket, "peeked.safetensors") <= 4 * MIB


@pytest.mark.parametrize("name", ["tokens.bin", "embeddings.safetensors"])
def test_a_data_set_whose_bytes_are_read_at_random_is_not_taken_for_weights(place: Place, name: str) -> None:
    data = save({"rows": numpy.frombuffer(pattern(96 * MIB), "u1", 96 * MIB)})
    place.bucket.put(name, data)
    chance = random.Random(3)
    with open(place.path / name, "rb", buffering=0) as file:
        os.pread(file.fileno(), 4096, 0)
        for _ in range(60):
            offset = chance.randrange(MIB, len(data) - 4096)
            assert os.pread(file.fileno(), 4096, offset) == data[offset : offset + 4096]
    assert sent(place.bucket, name) <= 60 * 2 * 65536 + MIB


def test_names_of_weights_are_the_users(mount: Callable[..., Mount], bucket: Bucket) -> None:
    """Without any, no header is looked at either."""
    tensors = model()
    data = save(tensors)
    names = ("weights.mine", "weights.safetensors")
    for name in names:
        bucket.put(name, data)
    mine, none = mount("--whole-files", "*.mine"), mount("--whole-files", "")
    for name in names:
        with safe_open(mine.path / name, framework="numpy") as file:
            assert numpy.array_equal(file.get_tensor("20"), tensors["20"])
            assert numpy.array_equal(file.get_tensor("03"), tensors["03"])
            wait_until(lambda name=name: sent(bucket, name) >= len(data), f"the rest of {name}")
        control_of(bucket).clear_log()
    for name in names:
        assert equal(none.path / name, tensors, ["20", "03"])
        assert sent(bucket, name) <= len(data) // 2


def test_ranks_that_load_a_part_of_each_tensor_share_each_byte(place: Place) -> None:
    tensors = model()
    data = save(tensors)
    place.bucket.put("model.safetensors", data)
    program = """
import hashlib, sys
from safetensors import safe_open
path, rank, digest = sys.argv[1], int(sys.argv[2]), hashlib.sha256()
with safe_open(path, framework="numpy") as file:
    for name in sorted(file.keys()):
        part = file.get_slice(name)
        size = part.get_shape()[0] // 4
        digest.update(part[rank * size : (rank + 1) * size].tobytes())
print(digest.hexdigest())
"""
    words = [sys.executable, "-c", program, str(place.path / "model.safetensors")]
    ranks = [subprocess.Popen([*words, str(rank)], stdout=subprocess.PIPE, text=True) for rank in range(4)]
    for rank, process in enumerate(ranks):
        expected = hashlib.sha256()
        for name in sorted(tensors):
            expected.update(numpy.split(tensors[name], 4)[rank].tobytes())
        assert process.communicate(timeout=60)[0].strip() == expected.hexdigest()
    assert sent(place.bucket, "model.safetensors") <= 1.02 * len(data)


def put_shards(bucket: Bucket, order: list[int], **more: str) -> dict[str, Any]:
    """Put a model of three shards, and an index that names them in an order; return the tensors of each shard."""
    tensors = model()
    names = [f"model-{number:05}-of-00003.safetensors" for number in (1, 2, 3)]
    for name in names:
        bucket.put(name, save(tensors))
    weights = {f"{number}": names[number - 1] for number in order} | more
    bucket.put("model.safetensors.index.json", json.dumps({"weight_map": weights}).encode())
    return tensors


def test_the_other_shards_come_next_in_the_order_of_the_index(place: Place) -> None:
    """Names of the index that lead nowhere are skipped."""
    tensors = put_shards(place.bucket, [3, 1, 2], lost="model-00004-of-00003.safetensors", out="../secret")
    size = len(save(tensors))
    with safe_open(place.path / "model-00001-of-00003.safetensors", framework="numpy") as file:
        for each in FAR_APART:
            file.get_tensor(each)
        for number in (3, 2):
            name = f"model-{number:05}-of-00003.safetensors"
            wait_until(lambda name=name: sent(place.bucket, name) >= size, f"all of {name}")
    log = control_of(place.bucket).log("GetObject")
    keys = [
        entry.key.removeprefix(place.bucket.prefix) for entry in log if entry.key.endswith(".safetensors")
    ]
    assert [name[10] for name in dict.fromkeys(keys)] == ["1", "3", "2"]
    for number in (1, 2, 3):
        path = place.path / f"model-{number:05}-of-00003.safetensors"
        assert equal(path, tensors, shuffled(tensors))
        assert sent(place.bucket, path.name) <= 1.02 * size


@pytest.mark.parametrize("index", [b'{"weight_map": ', b"[" * 200_000])
def test_a_damaged_index_leaves_the_shard_that_is_read(place: Place, index: bytes) -> None:
    tensors = put_shards(place.bucket, [1, 2, 3])
    place.bucket.put("model.safetensors.index.json", index)
    path = place.path / "model-00001-of-00003.safetensors"
    with safe_open(path, framework="numpy") as file:
        for each in FAR_APART:
            assert numpy.array_equal(file.get_tensor(each), tensors[each])
        wait_until(lambda: sent(place.bucket, path.name) >= len(save(tensors)), "all of the shard")
    assert sent(place.bucket, "model-00002-of-00003.safetensors") == 0


def test_a_load_ends_soon_after_its_reader(mount: Callable[..., Mount], bucket: Bucket) -> None:
    tensors = model(tensors=96)
    data = save(tensors)
    bucket.put("model.safetensors", data)
    one, control = mount(), control_of(bucket)
    control.set(total_bandwidth=60e6)
    try:
        assert equal(one.path / "model.safetensors", tensors, FAR_APART)
        at_close = sent(bucket, "model.safetensors")

        def is_quiet() -> bool:
            return all(entry.finished for entry in control.log("GetObject"))

        wait_until(is_quiet, "the last request")
    finally:
        control.set(total_bandwidth=None)
    # What was on its way, at most 16 chunks.
    assert sent(bucket, "model.safetensors") - at_close <= 16 * 8 * MIB
    assert sent(bucket, "model.safetensors") < len(data)


def test_a_model_larger_than_the_cache_is_streamed_and_that_is_said_once(
    mount: Callable[..., Mount], bucket: Bucket
) -> None:
    one = mount("--cache-size", "128MiB")
    tensors = model(tensors=48)
    data = save(tensors)
    for name in ("a.safetensors", "b.safetensors"):
        bucket.put(name, data)
        assert equal(one.path / name, tensors, shuffled(tensors))
        # No further than to the end of a tensor: what lies beyond may be evicted before it is read.
        assert sent(bucket, name) <= 1.2 * len(data)
    assert one.log().count("a model does not fit into the cache") == 1


def test_two_models_at_once_on_a_small_cache_both_come(mount: Callable[..., Mount], bucket: Bucket) -> None:
    one = mount("--cache-size", "160MiB")
    tensors = model()
    size = len(save(tensors))
    names = ("a.safetensors", "b.safetensors")
    for name in names:
        bucket.put(name, save(tensors))
    program = """
import sys
from safetensors import safe_open
with safe_open(sys.argv[1], framework="numpy") as file:
    for name in sys.argv[2:]:
        file.get_tensor(name)
"""
    loads = [
        subprocess.Popen([sys.executable, "-c", program, str(one.path / name), *shuffled(tensors)])
        for name in names
    ]
    assert [load.wait(60) for load in loads] == [0, 0]
    for name in names:
        assert sent(bucket, name) <= 2 * size
        assert equal(one.path / name, tensors, shuffled(tensors))


def test_a_pinned_model_stays_cached_through_a_restart_and_other_reads(
    mount: Callable[..., Mount], bucket: Bucket
) -> None:
    flags = ("--pin", "llama/", "--cache-size", "128MiB", "--memory", "64MiB")
    tensors = model(tensors=8)
    bucket.put("llama/model.safetensors", save(tensors))
    bucket.put("other", pattern(160 * MIB))
    one = mount(*flags)
    run(FUSECACHE, "warm", "--wait", one.path / "llama")
    one.unmount()
    one.start(*flags)
    assert (one.path / "other").stat().st_size == len((one.path / "other").read_bytes())
    control_of(bucket).clear_log()
    assert equal(one.path / "llama" / "model.safetensors", tensors, shuffled(tensors))
    assert sent(bucket, "llama/model.safetensors") == 0


@contextmanager
def suppress_stale() -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        if exc.errno != errno.ESTALE:
            raise


def test_a_model_that_is_replaced_in_the_middle_stays_the_old_one_or_fails(
    mount: Callable[..., Mount], bucket: Bucket
) -> None:
    old, new = save(model(1)), save(model(2))
    bucket.put("model.safetensors", old)
    one, control = mount(), control_of(bucket)
    control.set(total_bandwidth=100e6)
    try:
        with open(one.path / "model.safetensors", "rb", buffering=0) as file:
            os.pread(file.fileno(), 4096, 0)
            places = random.Random(4).sample(range(0, len(old) - MIB, MIB), 80)
            for number, offset in enumerate(places):
                if number == 10:
                    bucket.put("model.safetensors", new)
                with suppress_stale():
                    assert os.pread(file.fileno(), MIB, offset) == old[offset : offset + MIB]
    finally:
        control.set(total_bandwidth=None)
    wait_until(lambda: (one.path / "model.safetensors").read_bytes()[-8:] == new[-8:], "the new model")
    assert (one.path / "model.safetensors").read_bytes() == new


def test_a_model_that_is_changed_while_it_is_loaded_keeps_the_change(
    mount: Callable[..., Mount], bucket: Bucket
) -> None:
    one = mount()
    for turn in range(3):
        name = f"model-{turn}.safetensors"
        data = bytearray(save(model()))
        bucket.put(name, bytes(data))
        with open(one.path / name, "rb", buffering=0) as reader:
            for offset in (0, 80 * MIB, 10 * MIB, 50 * MIB):
                os.pread(reader.fileno(), MIB, offset)
            with open(one.path / name, "r+b", buffering=0) as writer:
                for offset in range(turn * 1000, len(data), 7 * MIB):
                    data[offset : offset + 5000] = b"c" * 5000
                    assert os.pwrite(writer.fileno(), b"c" * 5000, offset) == 5000
                assert os.pread(writer.fileno(), len(data), 0) == bytes(data)
        assert (one.path / name).read_bytes() == bytes(data)
        one.sync()
        assert bucket.get(name) == bytes(data)
