"""The random numbers of a logical rank: what is drawn, also when recomputed, and put back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import fzero
from fzero.transforms.logical_ranks import generators_of

CPU = torch.device("cpu")


def drawn(seed: int, *place: int, device: torch.device = CPU) -> Tensor:
    with generators_of(seed, *place, device=device):
        return torch.rand(4, device=device)


def test_a_place_has_numbers_of_its_own() -> None:
    places = [(seed, u, c, r) for seed in (0, 1) for u in (0, 1) for c in (0, 1) for r in (0, 1)]
    found = {place: drawn(*place) for place in places}
    assert all(torch.equal(drawn(*place), value) for place, value in found.items())
    assert len({tuple(value.tolist()) for value in found.values()}) == len(places)


def test_they_are_those_of_manual_seed() -> None:
    seed = fzero.fold_in(5, 3, 0, 2)
    wanted = torch.rand(4, generator=torch.Generator().manual_seed(seed))
    with generators_of(5, 3, 0, 2, CPU):
        assert torch.initial_seed() == seed
    assert torch.equal(drawn(5, 3, 0, 2), wanted)


def test_the_generator_is_as_it_was_before() -> None:
    torch.manual_seed(7)
    torch.randn(3)  # leaves one normal number over
    before, state = torch.get_rng_state(), torch.get_rng_state()
    drawn(0, 1, 2, 3)
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(ZeroDivisionError), generators_of(0, 1, 2, 3, CPU):
        torch.manual_seed(1)
        torch.rand(1 // 0)
    assert torch.equal(torch.get_rng_state(), state)
    with (
        pytest.raises(fzero.LayoutError, match=r"numbers\[1\]=-1"),
        generators_of(0, 1, -1, 0, CPU),
    ):
        pass
    assert torch.equal(torch.get_rng_state(), state)


def test_a_block_within_a_block() -> None:
    with generators_of(0, 1, 0, 0, CPU):
        first = torch.rand(2)
        other = drawn(0, 1, 0, 1)
        second = torch.rand(2)
    assert torch.equal(torch.cat([first, second]), drawn(0, 1, 0, 0))
    assert torch.equal(other, drawn(0, 1, 0, 1))


def test_modes_of_torch_do_not_see_it() -> None:
    wanted = drawn(0, 1, 2, 3)
    with torch.device("meta"), generators_of(0, 1, 2, 3, CPU):
        assert torch.equal(torch.rand(4, device="cpu"), wanted)
    with FakeTensorMode():
        drawn(0, 1, 2, 3)

    def loss(x: Tensor) -> Tensor:
        return (x * drawn(0, 1, 2, 3)).sum()

    assert torch.equal(torch.func.grad(loss)(torch.ones(4)), wanted)
    vmapped = torch.func.vmap(torch.func.grad(loss), randomness="same")
    assert torch.equal(vmapped(torch.ones(2, 4)), wanted.expand(2, 4))
    with torch.inference_mode():
        assert torch.equal(drawn(0, 1, 2, 3), wanted)


RECOMPUTED: dict[str, Callable[..., Any]] = {
    "remat": lambda fn, x: fzero.remat(fn)(x),
    "checkpoint": lambda fn, x: checkpoint(fn, x, use_reentrant=False),
    "reentrant checkpoint": lambda fn, x: checkpoint(fn, x, use_reentrant=True),
}


def dropped(x: Tensor) -> Tensor:
    return F.dropout(x.sin(), 0.5) * torch.rand_like(x)


def gradient(run: Callable[..., Any], logical: int, *, inside: bool) -> tuple[Tensor, Tensor]:
    """Return the value and the gradient of two layers; the backward is in the block, or after."""
    x = torch.linspace(0, 1, 64).requires_grad_()
    with generators_of(3, 5, 0, logical, CPU):
        y = run(dropped, run(dropped, x)).sum()
        if inside:
            y.backward()
    if not inside:
        torch.rand(11)
        y.backward()
    assert x.grad is not None
    return y.detach(), x.grad


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "after"])
@pytest.mark.parametrize("name", RECOMPUTED)
def test_what_is_recomputed_draws_the_same_numbers(name: str, inside: bool) -> None:
    for logical in range(3):
        wanted = gradient(lambda fn, x: fn(x), logical, inside=True)
        before = torch.get_rng_state()
        found = gradient(RECOMPUTED[name], logical, inside=inside)
        assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])
        if inside:
            assert torch.equal(torch.get_rng_state(), before)


def test_virtual_ranks_that_take_turns_have_their_own_numbers() -> None:
    def run(x: Tensor) -> Tensor:
        torch.manual_seed(40 + fzero.axis_index())
        found = [torch.rand(4)]
        for logical in range(2):
            with generators_of(0, 1, 0, 2 * fzero.axis_index() + logical, CPU):
                first = torch.rand(2)
                fzero.psum(x)  # the other ranks run meanwhile
                found.append(torch.cat([first, torch.rand(2)]))
        fzero.psum(x)
        return torch.stack([*found, torch.rand(4)])

    before = torch.get_rng_state()
    found = fzero.simulate(run, world_size=3)(torch.ones(3))
    for rank in range(3):
        torch.manual_seed(40 + rank)
        around = torch.rand(8)
        inside = [drawn(0, 1, 0, 2 * rank + logical) for logical in range(2)]
        assert torch.equal(found[rank], torch.stack([around[:4], *inside, around[4:]]))
    torch.set_rng_state(before)


def test_a_virtual_rank_that_fails_in_a_block_leaves_the_callers_numbers() -> None:
    def run(x: Tensor) -> Tensor:
        with generators_of(0, 0, 0, fzero.axis_index(), CPU):
            x = fzero.psum(x)
            if fzero.axis_index() == 1:
                raise ZeroDivisionError
            return fzero.psum(x)

    before = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError):
        fzero.simulate(run, world_size=3)(torch.ones(3))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.gpu
def test_the_generator_of_a_gpu_is_set_and_put_back() -> None:
    gpu = torch.device("cuda")
    torch.rand(1, device=gpu)
    before = torch.cuda.get_rng_state(), torch.get_rng_state()
    with generators_of(3, 1, 2, 0, gpu):
        found = torch.rand(4, device=gpu)
    assert torch.equal(torch.cuda.get_rng_state(), before[0])
    assert torch.equal(torch.get_rng_state(), before[1])
    torch.cuda.manual_seed(fzero.fold_in(3, 1, 2, 0))
    assert torch.equal(torch.rand(4, device=gpu), found)

    def run(x: Tensor) -> Tensor:
        with generators_of(3, 1, 2, fzero.axis_index(), gpu):
            first = torch.rand(2, device=gpu)
            fzero.psum(x)
            return torch.cat([first, torch.rand(2, device=gpu)])

    both = fzero.simulate(run, world_size=2)(torch.ones(2, device=gpu))
    assert torch.equal(both, torch.stack([drawn(3, 1, 2, rank, device=gpu) for rank in range(2)]))
