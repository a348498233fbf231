"""A permutation of range(n) for any n, computed for the elements that are asked for. Pure."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

import numpy as np

from fzero.state.fold_in import fold_in

_30, _27, _31 = (np.uint64(shift) for shift in (30, 27, 31))
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_ROUNDS = 8
_LEAST_SIDE = 16  # with 2 or 3, not all permutations of a few numbers would come equally often
_ORDER = int.from_bytes(b"order")  # so that other users of the seed have other numbers


@functools.lru_cache(maxsize=8)
def keys_of(seed: int, epoch: int) -> tuple[int, ...]:
    """Return the keys of an epoch's permutation, one for each round."""
    return tuple(fold_in(seed, _ORDER, epoch, number) for number in range(_ROUNDS))


def permuted(places: Sequence[range], length: int, keys: tuple[int, ...]) -> list[list[int]]:
    """Return where a permutation of range(length) takes each number of some runs.

    index = a s + b with s = max(16, ceil(sqrt(length))), and each round (a Feistel network) is
    (a, b) -> (b, (a + f(b + key)) mod s), with the finalizer f of SplitMix64. That permutes
    range(s s); as long as the result is `length` or more, it is taken there again (cycle walking).

    Sources: Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002; Steele, Lea
    and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014.

    Example:
        >>> permuted([range(3), range(3, 5)], 5, keys_of(0, epoch=0))
        [[4, 0, 3], [1, 2]]
    """
    side = np.uint64(max(math.isqrt(length - 1) + 1, _LEAST_SIDE))
    found = np.array([index for run in places for index in run], np.uint64)
    left = np.arange(len(found))  # those that are not below `length` yet
    while len(left):
        a, b = np.divmod(found[left], side)
        for key in keys:
            x = b + np.uint64(key)  # of 64 bits, as all that follows
            x = (x ^ x >> _30) * _FIRST
            x = (x ^ x >> _27) * _SECOND
            a, b = b, (a + (x ^ x >> _31) % side) % side
        found[left] = a * side + b
        left = left[found[left] >= length]
    rest = iter(found.tolist())
    return [[*itertools.islice(rest, len(run))] for run in places]
