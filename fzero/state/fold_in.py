"""`fold_in`: a seed for each place of a program, by a counter-based hash. Pure."""

from __future__ import annotations

from typing import Any

from fzero.errors import check

_WORD = 2**64 - 1
_MULTIPLIER = 0xD2B74407B1CE6E93
_WEYL = 0x9E3779B97F4A7C15  # what the key grows by from round to round
_ROUNDS = 10


def fold_in(seed: int, *numbers: int) -> int:
    """Return a seed of its own for each sequence of numbers, as `jax.random.fold_in` does for keys.

    s_0 = seed and s_i = floor(x_i / 2), where x_i is the first of the two words of Philox2x64-10
    with the counter (n_i, 0) and the key s_{i-1}; the last s_i is returned. So it is a pure
    function of its arguments, the same on every machine; the order of the numbers matters; and
    fold_in(fold_in(seed, a), b) == fold_in(seed, a, b). Without numbers it is the seed itself.

    It is for random numbers, and no secret: who knows the seed can compute all that follows.

    Args:
        seed: of the program, an int of 0 to 2**63 - 1.
        numbers: what tells one place from others (an update, a rank, a row), any count of ints of
            0 to 2**63 - 1.

    Returns:
        An int of 0 to 2**63 - 1, which an int64 holds and `torch.manual_seed` takes. The CPU's
        generator looks at the lower 32 bits of what `torch.manual_seed` is given, that of CUDA at
        all of them.

    Raises:
        LayoutError: for a bool, a float or another thing that is no int, and for an int out of
            range.

    Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011.

    Example:
        >>> import torch, fzero
        >>> update, row = 7, 3
        >>> fzero.fold_in(0, update, row)
        4445324743741337287
        >>> generator = torch.Generator().manual_seed(fzero.fold_in(0, update, row))
        >>> torch.rand(2, generator=generator)
        tensor([0.6540, 0.8295])
    """
    _require("seed", seed)
    for place, number in enumerate(numbers):
        _require(f"numbers[{place}]", number)
        seed = philox(number, 0, seed)[0] >> 1
    return seed


def philox(first: int, second: int, key: int) -> tuple[int, int]:
    """Return the two words of Philox2x64-10 for a counter of two words and a key of one."""
    for _ in range(_ROUNDS):
        product = _MULTIPLIER * first
        first, second = product >> 64 ^ key ^ second, product & _WORD
        key = key + _WEYL & _WORD
    return first, second


def _require(name: str, value: Any) -> None:
    if type(value) is int and 0 <= value < 2**63:  # of each logical rank in each batch
        return
    check.require(
        f"fold_in: {name}",
        value,
        lambda x: check.is_count(x, least=0) and x < 2**63,
        "an int of 0 to 2**63 - 1; int(x) of a tensor or an array, x % 2**63 of one out of range",
        cause="a number that is negative or too large, or a float, a bool or a tensor.",
    )
