"""`fold_in`: known answers, the law of composition, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fzero
from fzero.state.logical import philox

INT63 = st.integers(0, 2**63 - 1)
ONES = 2**64 - 1


@pytest.mark.parametrize(
    ("first", "second", "key", "words"),
    [  # kat_vectors of Random123, philox2x64 with 10 rounds
        (0, 0, 0, (0xCA00A0459843D731, 0x66C24222C9A845B5)),
        (ONES, ONES, ONES, (0x65B021D60CD8310F, 0x4D02F3222F86DF20)),
        (
            0x243F6A8885A308D3,
            0x13198A2E03707344,
            0xA4093822299F31D0,
            (0x0A5E742C2997341C, 0xB0F883D38000DE5D),
        ),
    ],
)
def test_the_hash_gives_the_known_answers(
    first: int, second: int, key: int, words: tuple[int, int]
) -> None:
    assert philox(first, second, key) == words


def test_these_numbers_stay_as_they_are() -> None:
    """A run that goes on with another version of the library draws the same numbers."""
    assert fzero.fold_in(0, 0) == 0xCA00A0459843D731 >> 1
    assert fzero.fold_in(0, 1) == 1388665867456719915
    assert fzero.fold_in(3, 1, 4, 1, 5) == 6496332093717543222
    assert fzero.fold_in(2**63 - 1, 2**63 - 1) == 8162584780079147772


@given(INT63, st.lists(INT63, max_size=3), st.lists(INT63, max_size=3))
def test_it_is_in_range_and_composes(seed: int, before: list[int], after: list[int]) -> None:
    found = fzero.fold_in(seed, *before, *after)
    assert 0 <= found < 2**63
    assert found == fzero.fold_in(fzero.fold_in(seed, *before), *after)
    assert fzero.fold_in(seed) == seed
    torch.manual_seed(found)
    assert torch.tensor(found).item() == found


def test_neighbours_have_seeds_of_their_own_in_all_bits() -> None:
    places = [(seed, a, b) for seed in range(10) for a in range(30) for b in range(30)]
    found = [fzero.fold_in(*place) for place in places]
    assert len({value & 0xFFFFFFFF for value in found}) >= len(found) - 2  # 0.01 of a pair expected
    for bit in range(63):
        ones = sum(value >> bit & 1 for value in found)
        assert abs(ones - len(found) / 2) < 5 * len(found) ** 0.5 / 2
    assert fzero.fold_in(0, 1, 2) != fzero.fold_in(0, 2, 1)


@pytest.mark.parametrize(
    ("seed", "numbers", "named"),
    [
        (True, (), r"fold_in: seed=True\."),
        (0.0, (1,), r"fold_in: seed=0\.0\."),
        (-1, (1,), r"fold_in: seed=-1\."),
        (2**63, (1,), r"fold_in: seed=9223372036854775808\."),
        (0, (1, -1), r"fold_in: numbers\[1\]=-1\."),
        (0, (2**63,), r"fold_in: numbers\[0\]=9223372036854775808\."),
        (0, (False,), r"fold_in: numbers\[0\]=False\."),
        (0, (1.0,), r"fold_in: numbers\[0\]=1\.0\."),
        (0, ("1",), r"fold_in: numbers\[0\]='1'\."),
        (0, (torch.tensor(1),), r"fold_in: numbers\[0\]=tensor\(1\)\."),
    ],
)
def test_what_is_no_number_of_a_place_is_refused(
    seed: Any, numbers: tuple[Any, ...], named: str
) -> None:
    with pytest.raises(fzero.LayoutError, match=named + r"\n(.*)\nFix: give an int of 0 to"):
        fzero.fold_in(seed, *numbers)
