"""Keyed permutations of 0..n-1 that are computed value by value: nothing is stored, any n, and an inverse.

A Feistel network over the pairs (left, right) of a rectangle just large enough for n values (Black and Rogaway,
"Ciphers with arbitrary finite domains", 2002): each round adds to one half a hash of the other, which can be
subtracted again. The few pairs of the rectangle that are no value are walked past: the network is applied once
more until a value comes out. Good enough to mix samples with; not a cipher. Everything is integer arithmetic
modulo 2**64, so all machines agree.
"""

import hashlib

import numpy as np
from numpy.typing import NDArray

from loader.order.radix import order_of_keys
from loader.order.spec import Ids

Keys = NDArray[np.uint64]

ROUNDS = 6
# Permutations of fewer values get three times the rounds: with 6, how often two values came
# to any two places differed by a quarter (root mean square over 20 000 keys, 8 values).
FEW = 4096
# Odd constants with well-mixed bits: of splitmix64 (Steele, Lea, Flood, 2014) and of the golden ratio.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_HALF = np.uint64(32)
_SHIFT = np.uint64(29)


def key_of(*parts: int | str) -> int:
    """Return 64 bits that any change of any part changes."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "little")


def subkeys(key: int, *numbers: Ids) -> Keys:
    """Return a key for each tuple of numbers: arrays of one shape, values >= 0."""
    found = np.full(numbers[0].shape, key, np.uint64)
    for number in numbers:
        found += _GOLDEN
        found ^= number.astype(np.uint64) * _MIX[0]
        found = _mixed(found)
    return found


def keyed_order(count: int, key: int) -> Ids:
    """Return 0..count-1 in the order that belongs to the key: for what is few enough to be stored.

    Sorted by 32 bits of a hash, equal ones by number.
    """
    bits = np.arange(count, dtype=np.uint64)
    bits *= _GOLDEN
    bits ^= np.uint64(key)
    return order_of_keys((_mixed(bits) >> _HALF).astype(np.uint32))


def permuted(values: Ids, sizes: Ids, keys: Keys) -> Ids:
    """Return what each value becomes in the permutation of 0..size-1 that belongs to its key.

    values: 0 <= value < size < 2**62. The three have one shape, or broadcast to that of values.
    """
    return _again_if_few(_walk(values, sizes, keys, range(ROUNDS), 1), sizes, keys, range(ROUNDS), 1)


def restored(values: Ids, sizes: Ids, keys: Keys) -> Ids:
    """Return the values that `permuted` made these of."""
    rounds = range(ROUNDS - 1, -1, -1)
    return _walk(_again_if_few(values.copy(), sizes, keys, rounds, -1), sizes, keys, rounds, -1)


def _again_if_few(values: Ids, sizes: Ids, keys: Keys, rounds: range, sign: int) -> Ids:
    """Apply two more networks, in place, to values of small sizes: their short halves hide little of each other."""
    few = np.flatnonzero(np.broadcast_to(np.asarray(sizes) < FEW, values.shape))
    if few.size:
        sizes = np.broadcast_to(np.asarray(sizes, np.int64), values.shape)[few]
        keys = np.broadcast_to(np.asarray(keys, np.uint64), values.shape)[few]
        for factor in _MIX[::sign]:
            values[few] = _walk(values[few], sizes, keys * factor, rounds, sign)
    return values


def _walk(values: Ids, sizes: Ids, keys: Keys, rounds: range, sign: int) -> Ids:
    sizes = np.broadcast_to(np.asarray(sizes, np.int64), values.shape)
    keys = np.broadcast_to(np.asarray(keys, np.uint64), values.shape)
    rows, columns = _rectangle(sizes)
    found = _network(values, rows, columns, keys, rounds, sign)
    outside = np.flatnonzero(found >= sizes)
    while outside.size:
        again = _network(found[outside], rows[outside], columns[outside], keys[outside], rounds, sign)
        found[outside] = again
        outside = outside[again >= sizes[outside]]
    return found


def _rectangle(sizes: Ids) -> tuple[Ids, Ids]:
    """Sides, nearly equal, of a rectangle with at least `sizes` fields: less than a column more, if 4 or more."""
    # Square roots are correctly rounded by IEEE 754, so these are the same everywhere; being one off is no harm.
    rows = np.maximum(np.sqrt(sizes.astype(np.float64)).astype(np.int64), 2)
    return rows, -(-sizes // rows)


def _network(values: Ids, rows: Ids, columns: Ids, keys: Keys, rounds: range, sign: int) -> Ids:
    left, right = np.divmod(values, columns)
    for number in rounds:
        if number % 2:
            _add(right, _hash(left, keys, number, columns), columns, sign)
        else:
            _add(left, _hash(right, keys, number, rows), rows, sign)
    left *= columns
    left += right
    return left


def _add(half: Ids, shift: Ids, modulus: Ids, sign: int) -> None:
    """Add to `half`, modulo `modulus`, in place."""
    if sign > 0:
        half += shift
        half -= modulus * (half >= modulus)
    else:
        half -= shift
        half += modulus * (half < 0)


def _hash(half: Ids, keys: Keys, number: int, below: Ids) -> Ids:
    """A number in 0..below-1 that depends on half, key and round. below < 2**32."""
    bits = half.astype(np.uint64)
    # Above the half, so that no round hashes what another does.
    bits |= np.uint64(number + 1 << 32)
    bits *= _GOLDEN
    bits ^= keys
    bits = _mixed(bits)
    bits >>= _HALF
    bits *= below.astype(np.uint64)
    bits >>= _HALF
    return bits.astype(np.int64)


def _mixed(bits: Keys) -> Keys:
    """Spread each bit over all, in place."""
    for factor in _MIX:
        bits ^= bits >> _SHIFT
        bits *= factor
    bits ^= bits >> _HALF
    return bits
