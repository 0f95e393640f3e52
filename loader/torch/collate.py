"""Collates samples into a batch whose numbers share one block of memory, however many columns there are.

`collate` is a DataLoader's `collate_fn`. A worker process sends one tensor with a short description. The training
process maps its shared memory once, and gets a plain dict of views into it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import get_worker_info

from loader.errors import LoaderError
from loader.mds.record_table import RecordTable

# Columns begin at multiples of a cache line, which also aligns every dtype.
ALIGN_BYTES = 64


class Ragged(NamedTuple):
    """Arrays of different lengths, concatenated.

    values: (sum of the lengths, ...). offsets: (samples + 1,) int64. Sample i is values[offsets[i] : offsets[i + 1]].
    """

    values: torch.Tensor
    offsets: torch.Tensor

    def rows(self) -> list[torch.Tensor]:
        """Return the array of each sample, as views."""
        return list(torch.split(self.values, torch.diff(self.offsets).tolist()))

    def padded(self, fill: float = 0) -> torch.Tensor:
        """Return (samples, longest, ...); each sample is padded at its end with `fill`."""
        return torch.nn.utils.rnn.pad_sequence(self.rows(), batch_first=True, padding_value=fill)


class _ColumnSlot(NamedTuple):
    """The location of an array in the block."""

    start: int
    dtype: str
    shape: tuple[int, ...]


class _RaggedSlot(NamedTuple):
    values: _ColumnSlot
    offsets: _ColumnSlot


class _WorkerBatch:
    """The result of a worker process: pickles as one tensor, and arrives as a dict."""

    def __init__(self, block: torch.Tensor, layout: dict[str, Any]) -> None:
        self._block, self._layout = block, layout

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpack, (self._block, self._layout)


class _Block:
    """Assigns offsets to arrays, then copies the arrays into one buffer."""

    def __init__(self) -> None:
        self._arrays: list[tuple[_ColumnSlot, list[NDArray[Any]]]] = []
        self._bytes = 0

    @property
    def is_empty(self) -> bool:
        """Whether it has no array."""
        return not self._arrays

    def reserve(self, arrays: list[NDArray[Any]], shape: tuple[int, ...]) -> _ColumnSlot:
        """Reserve space for the arrays, one after the other, as a single array of this shape."""
        slot = _ColumnSlot(self._bytes, arrays[0].dtype.name, shape)
        self._arrays.append((slot, arrays))
        size = arrays[0].itemsize * int(np.prod(shape))
        self._bytes += -(-size // ALIGN_BYTES) * ALIGN_BYTES
        return slot

    def filled(self) -> torch.Tensor:
        """Return the buffer with every array in it."""
        buffer = np.empty(self._bytes, np.uint8)
        for slot, arrays in self._arrays:
            count = int(np.prod(slot.shape))
            target = buffer[slot.start : slot.start + count * np.dtype(slot.dtype).itemsize].view(slot.dtype)
            np.concatenate([array.reshape(-1) for array in arrays], out=target)
        return torch.from_numpy(buffer)


def collate(samples: Sequence[dict[str, Any]]) -> Any:
    """Collate samples into a dict of columns; usable as a DataLoader's `collate_fn`.

    Numbers become a tensor (samples,). Arrays of one shape become a tensor (samples, ...). Arrays that differ only in
    the length of their first axis become a Ragged. Everything else becomes a list: text, bytes, JSON, images, arrays
    of different kinds, and integers that no single integer tensor can hold. Raises LoaderError if samples differ in
    their columns.
    """
    if not samples:
        return {}
    if isinstance(samples, RecordTable) and get_worker_info() is None:
        return {name: torch.from_numpy(column) for name, column in samples.columns.items()}
    block = _Block()
    layout: dict[str, Any] = {}
    if isinstance(samples, RecordTable):
        for name, column in samples.columns.items():
            layout[name] = block.reserve([column], column.shape)
        return _WorkerBatch(block.filled(), layout)
    names = samples[0].keys()
    for sample in samples:
        if sample.keys() != names:
            raise LoaderError(
                f"a batch has samples with the columns {', '.join(names)} and with {', '.join(sample)}: take "
                f"them from one stream at a time, or collate them yourself"
            )
    for name in names:
        layout[name] = _column([sample[name] for sample in samples], block)
    if block.is_empty:
        return layout
    buffer = block.filled()
    return _unpack(buffer, layout) if get_worker_info() is None else _WorkerBatch(buffer, layout)


def _column(values: list[Any], block: _Block) -> Any:
    first = values[0]
    if isinstance(first, (int, float, np.number, np.bool_)):
        column = np.array(values)
        if column.dtype.kind == "f" and all(isinstance(value, (int, np.integer)) for value in values):
            return values  # numpy converts integers that fit no integer type to float, which rounds
        return block.reserve([column], column.shape) if column.dtype.kind in "iufb" else values
    if not isinstance(first, np.ndarray) or not all(
        isinstance(value, np.ndarray) and value.dtype == first.dtype and value.shape[1:] == first.shape[1:]
        for value in values
    ):
        return values
    lengths = [len(value) for value in values]
    if len(set(lengths)) == 1:
        return block.reserve(values, (len(values), *first.shape))
    offsets = np.cumsum([0, *lengths], dtype=np.int64)
    shape = (int(offsets[-1]), *first.shape[1:])
    return _RaggedSlot(block.reserve(values, shape), block.reserve([offsets], offsets.shape))


def _unpack(block: torch.Tensor, layout: dict[str, Any]) -> dict[str, Any]:
    def view(slot: _ColumnSlot) -> torch.Tensor:
        dtype: torch.dtype = getattr(torch, slot.dtype)
        stop = slot.start + dtype.itemsize * int(np.prod(slot.shape))
        return block[slot.start : stop].view(dtype).view(slot.shape)

    batch: dict[str, Any] = {}
    for name, found in layout.items():
        if isinstance(found, _RaggedSlot):
            batch[name] = Ragged(view(found.values), view(found.offsets))
        else:
            batch[name] = view(found) if isinstance(found, _ColumnSlot) else found
    return batch
