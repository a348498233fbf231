"""The maps themselves: what they compute, that they are adjoint, and their vmap rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fzero
from fzero.collectives import gather_many, reduce_many, scatter_many
from fzero.errors import AxisError, LayoutError
from tests.collectives.maps import MAPS, gathered, reduced, scattered, simulated
from tests.strategies import EVERY_DTYPE, integers, same, seeds, shapes, worlds

names = st.sampled_from(sorted(MAPS))
dtypes = st.sampled_from([d for d in EVERY_DTYPE if d is not torch.bool])


@given(name=names, ranks=worlds, rows=st.integers(0, 3), shape=shapes, dtype=dtypes, seed=seeds)
def test_each_map_is_its_formula(
    name: str, ranks: int, rows: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int
) -> None:
    xs = integers((ranks, ranks * rows, *shape), seed, dtype)
    same(simulated(MAPS[name].run, xs), MAPS[name].formula(xs).to(dtype))


@given(name=names, ranks=worlds, rows=st.integers(0, 3), width=st.integers(0, 2), seed=seeds)
def test_each_map_is_the_exact_adjoint_of_its_partner(
    name: str, ranks: int, rows: int, width: int, seed: int
) -> None:
    xs = integers((ranks, ranks * rows, width), seed)
    ax = simulated(MAPS[name].run, xs)
    ys = integers(ax.shape, seed + 1)
    aty = simulated(MAPS[MAPS[name].adjoint].run, ys)
    same((ax * ys).sum(), (xs * aty).sum())


@given(name=names, ranks=worlds, batch=st.integers(1, 3), at=st.integers(0, 2), seed=seeds)
def test_under_vmap_each_sample_goes_through_by_itself(
    name: str, ranks: int, batch: int, at: int, seed: int
) -> None:
    run, formula, _ = MAPS[name]
    xs = integers((ranks, batch, 2 * ranks, 3), seed)
    want = torch.stack([formula(xs[:, b]) for b in range(batch)], dim=1)
    mapped = torch.func.vmap(run, in_dims=at)
    same(simulated(mapped, xs.movedim(1, at + 1)), want)
    nested = torch.func.vmap(torch.func.vmap(run), in_dims=at)  # the trailing dim is sample too
    same(simulated(nested, xs.movedim(-1, 1).movedim(2, at + 1)), want.movedim(-1, 2))


@given(ranks=worlds, batch=st.integers(1, 3), seed=seeds)
def test_a_scalar_of_each_sample_can_be_summed(ranks: int, batch: int, seed: int) -> None:
    xs = integers((ranks, batch), seed)
    same(simulated(torch.func.vmap(fzero.psum), xs), reduced(xs))
    grads = torch.func.vmap(torch.func.grad(lambda x: fzero.psum(x) ** 2 / 2))
    same(simulated(grads, xs), ranks * reduced(xs))


@given(ranks=worlds, before=st.integers(0, 2), dim=st.integers(-3, 2), seed=seeds)
def test_any_dim_can_be_gathered_and_scattered(
    ranks: int, before: int, dim: int, seed: int
) -> None:
    shape = [2 + before, 2, 3]
    shape[dim] *= ranks
    xs = integers((ranks, *shape), seed)
    front = xs.movedim(dim if dim < 0 else dim + 1, 1)
    for fn, formula in [(fzero.all_gather, gathered), (fzero.reduce_scatter, scattered)]:
        want = formula(front).movedim(1, dim if dim < 0 else dim + 1)
        same(simulated(lambda x, fn=fn: fn(x, dim=dim), xs), want)


@given(ranks=worlds, sizes=st.lists(st.integers(0, 4), max_size=4), seed=seeds)
def test_many_buffers_in_one_call_are_as_many_calls(
    ranks: int, sizes: list[int], seed: int
) -> None:
    buffers = [integers((ranks, ranks * n), seed + i) for i, n in enumerate(sizes)]
    for many, formula in [
        (gather_many, gathered),
        (scatter_many, scattered),
        (reduce_many, reduced),
    ]:

        def run(*xs: Tensor, many: Any = many) -> tuple[Tensor, ...]:
            return tuple(many(xs, fzero.world()))

        got = fzero.simulate(run, world_size=ranks)(*buffers)
        same(got, tuple(formula(x) for x in buffers))


def test_the_aliases() -> None:
    xs = torch.tensor([[1.0, 2.0], [3.0, 5.0]])
    assert fzero.psum is fzero.all_reduce
    assert fzero.psum_scatter is fzero.reduce_scatter
    same(simulated(fzero.pmean, xs), torch.tensor([[2.0, 3.5]] * 2))
    same(
        fzero.simulate(lambda: fzero.pmean(fzero.axis_index()), world_size=2)(),
        torch.full((2,), 0.5),
    )


COLLECTIVES: list[Callable[..., Tensor]] = [
    fzero.all_reduce,
    fzero.pmean,
    fzero.all_gather,
    fzero.reduce_scatter,
]


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_the_axis_is_given_as_nothing_as_its_name_or_as_itself(
    collective: Callable[..., Tensor],
) -> None:
    xs = torch.arange(8.0).view(2, 4)
    want = simulated(collective, xs)
    same(simulated(lambda x: collective(x, "dp"), xs), want)
    same(simulated(lambda x: collective(x, axis=fzero.world()), xs), want)
    wrong: list[Any] = ["tp", 0, "", object()]
    for axis in wrong:
        with pytest.raises(AxisError, match=r"axis=.*, and the axis here is axis 'dp' \(local, 1"):
            collective(torch.ones(2), axis)


def test_in_a_loss_the_axis_is_that_of_the_state() -> None:
    mesh = fzero.Axis(name="shard", size=1)
    state = fzero.init({"w": torch.ones(2)}, fzero.optim.sgd(1.0), stage=2, mesh=mesh)

    def gradient(name: str) -> Tensor:
        new, _ = fzero.grad_and_reduce(lambda p: fzero.psum(p["w"].sum(), name), state)()
        return fzero.gradients(new)["w"]

    assert gradient("shard").tolist() == [1.0, 1.0]
    with pytest.raises(AxisError, match=r"axis='dp', and the axis here is axis 'shard'"):
        gradient("dp")


def test_on_one_rank_nothing_is_needed_and_everything_is_the_identity() -> None:
    assert not torch.distributed.is_initialized()
    x = torch.tensor([1.0, 2.0])
    for map_ in MAPS.values():
        same(map_.run(x), x)
        same(torch.func.grad(lambda x, run=map_.run: (run(x) ** 2).sum())(x), 2 * x)
    same(fzero.pmean(x), x)
    assert (fzero.axis_index(), fzero.axis_size()) == (0, 1)
    with fzero.count_collectives() as log:
        fzero.psum(x)
    assert log.events == []


def test_a_dim_that_the_ranks_do_not_divide_is_refused() -> None:
    message = r"dim 1 of shape \(2, 3\) does not divide by the 2 ranks[\s\S]*Fix: pad the dim"
    with pytest.raises(LayoutError, match=message):
        simulated(lambda x: fzero.reduce_scatter(x, dim=1), torch.ones(2, 2, 3))


@pytest.mark.parametrize("fn", [fzero.all_gather, fzero.reduce_scatter])
def test_a_scalar_is_no_vector(fn: Callable[..., Tensor]) -> None:
    with pytest.raises(
        LayoutError, match=rf"{fn.__name__} got a scalar[\s\S]*Fix: use x.reshape\(1\)"
    ):
        simulated(fn, torch.ones(2))
