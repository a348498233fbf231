"""A permutation of range(n) that is computed element by element, for any n. Pure."""

from __future__ import annotations

import functools
import math

from fzero.state.fold_in import fold_in

_WORD = 2**64 - 1
_ROUNDS = 8
_LEAST_SIDE = 16  # with 2 or 3, not all permutations of a few numbers would come equally often
_ORDER = int.from_bytes(b"order")  # so that other users of the seed have other numbers


@functools.lru_cache(maxsize=8)
def keys_of(seed: int, epoch: int) -> tuple[int, ...]:
    """Return the keys of an epoch's permutation, one for each round."""
    return tuple(fold_in(seed, _ORDER, epoch, number) for number in range(_ROUNDS))


def permuted(index: int, length: int, keys: tuple[int, ...]) -> int:
    """Return where a permutation of range(length) takes `index`.

    index = a s + b with s = max(16, ceil(sqrt(length))), and each round (a Feistel network) is
    (a, b) -> (b, (a + f(b + key)) mod s), with the finalizer f of SplitMix64. That permutes
    range(s s); as long as the result is `length` or more, it is taken there again (cycle walking).

    Sources: Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002; Steele, Lea
    and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014.

    Example:
        >>> [permuted(index, 5, keys_of(0, epoch=0)) for index in range(5)]
        [4, 0, 3, 1, 2]
    """
    side = max(math.isqrt(length - 1) + 1, _LEAST_SIDE)
    while True:
        a, b = divmod(index, side)
        for key in keys:
            x = b + key & _WORD
            x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _WORD
            x = (x ^ x >> 27) * 0x94D049BB133111EB & _WORD
            a, b = b, (a + (x ^ x >> 31)) % side
        index = a * side + b
        if index < length:
            return index
