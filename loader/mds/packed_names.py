"""A list of file names in one buffer: 10**6 names take 24 MB, where a list of str takes 80."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Self, overload

import numpy as np
from numpy.typing import NDArray

BLOCK_NAMES = 1 << 16


class PackedNames(Sequence[str]):
    """An immutable list of names; each str is made on access.

    text: all names, concatenated, in UTF-8. ends: (names,) int64, the end of each name in it.
    """

    __slots__ = ("_ends", "_text")

    def __init__(self, text: bytes | bytearray, ends: NDArray[np.int64]) -> None:
        self._text, self._ends = text, ends

    @classmethod
    def of(cls, names: Iterable[str]) -> Self:
        """Pack names. Raises UnicodeEncodeError for an unpaired surrogate, which no file name contains."""
        packer = NamePacker()
        packer.add(list(names))
        return cls(*packer.packed())

    @classmethod
    def joined(cls, parts: Sequence["PackedNames"]) -> Self:
        """Return several lists as one."""
        lengths = [np.diff(part._ends, prepend=0) for part in parts]
        ends = np.cumsum(np.concatenate(lengths)) if lengths else np.zeros(0, np.int64)
        return cls(b"".join(part._text for part in parts), ends)

    def zero_separated(self) -> Iterator[bytes]:
        """Yield all names, separated by zero bytes, in pieces of some ten thousand names."""
        text = np.frombuffer(self._text, np.uint8)
        for first in range(0, len(self), BLOCK_NAMES):
            ends = self._ends[first : first + BLOCK_NAMES]
            start = int(self._ends[first - 1]) if first else 0
            led = int(first > 0)  # a separator precedes the block
            block = np.zeros(int(ends[-1]) - start + ends.size - 1 + led, np.uint8)
            is_text = np.ones(block.size, bool)
            is_text[ends[:-1] - start + np.arange(led, ends.size - 1 + led)] = False
            is_text[:led] = False
            block[is_text] = text[start : int(ends[-1])]
            yield block.tobytes()

    def __len__(self) -> int:
        return int(self._ends.size)

    @overload
    def __getitem__(self, which: int) -> str: ...
    @overload
    def __getitem__(self, which: slice) -> "PackedNames": ...

    def __getitem__(self, which: "int | slice") -> "str | PackedNames":
        """Return one name, or a copy of several."""
        if isinstance(which, slice):
            return PackedNames.of([self[number] for number in range(*which.indices(len(self)))])
        number = which + len(self) if which < 0 else which
        if not 0 <= number < len(self):
            raise IndexError(f"name {which} is not among {len(self)}")
        start = int(self._ends[number - 1]) if number else 0
        return self._text[start : int(self._ends[number])].decode()


class NamePacker:
    """Collects names for PackedNames, which takes over its buffers without a copy."""

    def __init__(self) -> None:
        self._text = bytearray()
        self._ends = bytearray()

    def add(self, names: Sequence[str]) -> None:
        """Add names. Raises UnicodeEncodeError, with nothing added, for an unpaired surrogate."""
        text = "".join(names)
        encoded = text.encode()
        # An ASCII name has as many bytes as characters.
        sized: Sequence[str | bytes] = names if text.isascii() else [name.encode() for name in names]
        lengths = np.fromiter(map(len, sized), np.int64, len(names))
        self._ends += (np.cumsum(lengths) + len(self._text)).tobytes()
        self._text += encoded

    def packed(self) -> tuple[bytearray, NDArray[np.int64]]:
        """Return the buffers; add nothing afterwards."""
        return self._text, np.frombuffer(self._ends, np.int64)
