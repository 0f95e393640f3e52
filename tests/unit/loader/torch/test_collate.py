"""Batches: one block of memory from a worker, a plain dict of tensors in the loop."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from loader import LoaderError, MDSDataset, MDSWriter
from loader.torch.collate import Ragged, collate

COLUMNS = {
    "id": "int",
    "score": "float32",
    "tokens": "ndarray:int32:16",
    "free": "ndarray:uint16",
    "frames": "ndarray",
    "text": "str",
    "image": "png",
}


def sample(number: int) -> dict[str, Any]:
    return {
        "id": number,
        "score": number / 2,
        "tokens": np.arange(number, number + 16, dtype=np.int32),
        "free": np.arange(1 + number % 4, dtype=np.uint16),
        "frames": np.full((1 + number % 3, 2, 2), number, np.float64),
        "text": "x" * number,
        "image": Image.new("RGB", (3, 2), (number, 0, 0)),
    }


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("data")
    with MDSWriter(out, COLUMNS, size_limit=8192) as writer:
        for number in range(40):
            writer.write(sample(number))
    return out


@pytest.fixture
def dataset(directory: Path) -> MDSDataset:
    return MDSDataset(directory)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_is_a_dict_of_views_into_one_block(dataset: MDSDataset, workers: int) -> None:
    numbers = 0
    for batch in DataLoader(dataset, batch_size=8, num_workers=workers, collate_fn=collate):
        assert type(batch) is dict
        expected = [sample(number) for number in range(numbers, numbers + 8)]
        assert batch["id"].tolist() == [one["id"] for one in expected]
        assert batch["score"].dtype == torch.float32
        assert batch["tokens"].dtype == torch.int32
        assert np.array_equal(batch["tokens"].numpy(), np.stack([one["tokens"] for one in expected]))
        assert isinstance(batch["free"], Ragged)
        assert all(
            np.array_equal(row.numpy(), one["free"])
            for row, one in zip(batch["free"].rows(), expected, strict=True)
        )
        assert [tuple(row.shape) for row in batch["frames"].rows()] == [
            one["frames"].shape for one in expected
        ]
        assert batch["text"] == [one["text"] for one in expected]
        assert [image.getpixel((0, 0))[0] for image in batch["image"]] == [one["id"] for one in expected]
        tensors = [batch["id"], batch["score"], batch["tokens"], *batch["free"], *batch["frames"]]
        assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
        assert all(tensor.data_ptr() % tensor.element_size() == 0 for tensor in tensors)
        batch["tokens"][0, 0] = -1  # writable
        numbers += 8
    assert numbers == 40


def test_ragged_arrays_are_padded_at_the_end() -> None:
    batch = collate([{"x": np.array([1, 2, 3])}, {"x": np.array([4])}])
    assert batch["x"].offsets.tolist() == [0, 3, 4]
    assert batch["x"].padded(-1).tolist() == [[1, 2, 3], [4, -1, -1]]


def test_what_does_not_stack_is_a_list() -> None:
    batch = collate(
        [{"x": np.zeros(2), "y": [1, 2], "z": b"a"}, {"x": np.zeros(2, np.int8), "y": [], "z": b"b"}]
    )
    assert [array.dtype.name for array in batch["x"]] == ["float64", "int8"]
    assert batch["y"] == [[1, 2], []]
    assert batch["z"] == [b"a", b"b"]


def test_integers_too_large_for_a_tensor_are_a_list() -> None:
    assert collate([{"x": 10**30}, {"x": 1}])["x"] == [10**30, 1]


@pytest.mark.parametrize("kind", [int, np.uint64])
def test_integers_are_never_rounded(kind: type) -> None:
    mixed: list[Any] = [kind(2**63 + 1), -7 if kind is int else np.int64(-7)]
    for values in (mixed, mixed[::-1]):
        batch = collate([{"x": value} for value in values])
        assert batch["x"] == values
        assert [type(value) for value in batch["x"]] == [type(value) for value in values]
    large = [kind(2**63 + 1), kind(7)]
    found = collate([{"x": value} for value in large])["x"]
    assert (found if kind is int else found.numpy().tolist()) == [2**63 + 1, 7]
    exact = collate([{"x": 2**53 + 1}, {"x": -(2**63)}])["x"]
    assert (exact.dtype, exact.tolist()) == (torch.int64, [2**53 + 1, -(2**63)])
    assert collate([{"x": 1}, {"x": 0.5}])["x"].tolist() == [1, 0.5]


def test_samples_of_different_columns_are_an_error() -> None:
    with pytest.raises(LoaderError, match="the columns x and with y"):
        collate([{"x": 1}, {"y": 1}])


def test_no_sample_is_an_empty_batch() -> None:
    assert collate([]) == {}


def test_images_are_decoded_when_they_are_used(dataset: MDSDataset) -> None:
    image = dataset[3]["image"]
    assert image.size == (3, 2)
    assert not hasattr(image, "_im") or image._im is None  # nothing is decoded yet
    assert image.getpixel((0, 0)) == (3, 0, 0)
