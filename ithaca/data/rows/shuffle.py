"""Hashes of numbers: they decide which documents are held back, and the order of documents and rows.

The hash (splitmix64) is written out, so that a run resumed under another version of numpy gets the same rows.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def hashes(numbers: Ints, *key: int) -> NDArray[np.uint64]:
    """Return 64 bits for each number; another key gives other bits."""
    mixed = np.zeros(1, np.uint64)
    for part in key:
        mixed = _mix(mixed ^ np.uint64(part))
    return _mix(mixed + numbers.astype(np.uint64))


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix with splitmix64: flipping one input bit flips half the output bits."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * _MIX[0]
    values = (values ^ (values >> np.uint64(27))) * _MIX[1]
    return values ^ (values >> np.uint64(31))


def shuffle(count: int, *key: int) -> Ints:
    """Return a permutation that depends on the key alone."""
    # Stable, so that equal hashes too have one order on every machine.
    return np.argsort(hashes(np.arange(count), *key), kind="stable").astype(np.int64)


def held_back(documents: Ints, seed: int, source: int, share: float) -> NDArray[np.bool_]:
    """True for about `share` of the documents with these numbers, whatever other documents there are."""
    # The upper 53 bits as a number in [0, 1). The 2 in the key differs from `shuffle`'s keys in PackedRows, 0 and 1.
    return (hashes(documents, seed, source, 2) >> np.uint64(11)).astype(np.float64) * 2.0**-53 < share
