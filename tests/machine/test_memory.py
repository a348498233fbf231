"""Which tensors have elements in common: exactly, by comparison with the sets of their bytes."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fzero
from fzero.errors import LayoutError
from fzero.machine.partition import HeldTensor, Holder, identity, require_apart

BASE = torch.arange(60.0)


@st.composite
def views(draw: st.DrawFn) -> Tensor:
    """A view of `BASE` of any shape and strides, expanded and empty ones and bytes, too."""
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    strides = [draw(st.integers(0, 6)) for _ in shape]
    start = draw(st.integers(0, 5))
    x = torch.as_strided(BASE, shape, strides, start)
    if draw(st.booleans()) and x.ndim and x.stride(-1) == 1:  # half of each element
        return x.view(torch.int16)[..., draw(st.integers(0, 1)) :: 2]
    return x


def bytes_of(x: Tensor) -> set[int]:
    """The addresses of all bytes of all elements."""
    size, ranges = x.element_size(), [range(n) for n in x.shape]
    starts = (
        x.data_ptr() + size * sum(i * s for i, s in zip(index, x.stride(), strict=True))
        for index in product(*ranges)
    )
    return {start + i for start in starts for i in range(size)}


@given(one=views(), other=views())
def test_tensors_are_apart_exactly_if_no_byte_is_of_both(one: Tensor, other: Tensor) -> None:
    common = bool(bytes_of(one) & bytes_of(other))
    held = [HeldTensor("one", one, Holder.BUFFER), HeldTensor("other", other, Holder.BUFFER)]
    if common and one is not other:
        with pytest.raises(LayoutError, match=r"one and other \(a buffer\) have elements"):
            require_apart(held, buffers=True)
    else:
        require_apart(held, buffers=True)
    require_apart(held)  # no parameter is among them


def test_a_tie_is_one_memory_seen_in_one_way() -> None:
    x = torch.randn(3, 5, dtype=torch.complex64)
    assert identity(x) == identity(x.detach()) == identity(x.view(3, 5))
    for other in (x.clone(), x.conj(), x[:2], x.real, torch.view_as_real(x)):
        assert identity(x) != identity(other)
    row = torch.randn(1, 5)
    assert identity(row) == identity(torch.as_strided(row, (1, 5), (17, 1)))


def overlapping() -> dict[str, Any]:
    square, flat, array = torch.randn(3, 3), torch.randn(12), np.ones((3, 3), np.float32)
    wave = torch.randn(3, dtype=torch.complex64)
    return {
        "turned": (square, square.t()),
        "a slice": (square, square[1]),
        "a part of both": (flat[:8], flat[4:]),
        "every second": (flat[::2], flat[4:5]),
        "the memory of numpy, twice": (torch.from_numpy(array), torch.from_numpy(array.T)),
        "a real view": (torch.view_as_real(wave), torch.view_as_real(wave)[:, 0]),
        "another dtype": (square, square.view(torch.int32)),
        "frozen": (nn.Parameter(square, False), nn.Parameter(square.t(), False)),
    }


def apart() -> dict[str, Any]:
    wide, pair = torch.randn(3, 8), torch.view_as_real(torch.randn(3, dtype=torch.complex64))
    meta, empty = torch.empty(3, 3, device="meta"), torch.empty(0, 3)
    with FakeTensorMode():
        fake = torch.empty(3, 3)
    return {
        "columns": (wide[:, :3], wide[:, 3:]),
        "even and odd": (wide[:, ::2], wide[:, 1::2]),
        "parts": tuple(wide.flatten().split(7)),
        "real and imaginary": (pair[:, 0], pair[:, 1]),
        "without elements": (empty, empty[:0], empty.t()),
        "meta": (meta, meta.t()),
        "fake": (fake, fake.t()),
        "the same view": (wide, wide.detach(), nn.Parameter(wide)),
    }


@pytest.mark.parametrize("name", overlapping())
def test_overlapping_parameters_are_refused_by_init_with_both_paths(name: str) -> None:
    one, other = overlapping()[name]
    params = {"z": torch.ones(2), "deep": {"b": one}, "list": [other]}
    for size in (1, 2):
        seen = r"deep\.b and list\.0 have elements in common(.|\n)*Fix: assign"
        with pytest.raises(LayoutError, match=seen):
            run(lambda: fzero.init(params, fzero.optim.sgd(0.1), stage=2), size)


def run(make: Any, size: int) -> Any:
    if size == 1:
        return make()

    def on_rank() -> int:
        make()
        return 1

    return fzero.simulate(on_rank, world_size=size)()


@pytest.mark.parametrize("name", apart())
def test_parameters_without_a_common_element_are_taken_and_ties_stay_ties(name: str) -> None:
    require_apart([HeldTensor(str(i), x) for i, x in enumerate(apart()[name])])


def test_columns_of_one_matrix_are_parameters_of_their_own() -> None:
    wide = torch.arange(12.0).view(3, 4)
    params = {"a": wide[:, :2], "b": wide[:, 2:], "tied": wide[:, :2]}
    state = fzero.init(params, fzero.optim.sgd(0.5), stage=0)
    state, _ = fzero.grad_and_reduce(lambda p: p["a"].sum() + 2 * p["tied"].sum(), state)()
    new = fzero.full_params(fzero.apply_gradients(state))
    assert torch.equal(new["a"], wide[:, :2] - 1.5) and torch.equal(new["b"], wide[:, 2:])
    assert torch.equal(new["tied"], new["a"])


def test_the_first_pair_in_the_order_of_the_tree_is_named_wherever_it_lies() -> None:
    memory = torch.zeros(9)
    held = [HeldTensor("a", memory[6:]), HeldTensor("b", memory[7:]), HeldTensor("c", memory[:3])]
    with pytest.raises(LayoutError, match="a and b have"):
        require_apart([*held, HeldTensor("d", memory[:2])])
