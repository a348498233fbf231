"""`simulate`: stacked in, stacked out; any Python; errors and random numbers of each rank."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call

import fzero
from fzero.errors import LayoutError, MismatchError, PhaseError
from tests.strategies import Block, Pair, everywhere, on_rank, same, seeds, trees, worlds


@given(tree=trees(max_leaves=4), ranks=worlds)
def test_every_tensor_has_a_leading_rank_dim_in_and_out(tree: Any, ranks: int) -> None:
    stacked = fzero.simulate(lambda: tree, world_size=ranks)()
    everywhere(stacked, tree, ranks)
    back = fzero.simulate(lambda t, *, kw: Pair(t, kw), world_size=ranks)(stacked, kw=stacked)
    same(back, Pair(stacked, stacked))


def test_numbers_become_tensors_and_other_leaves_come_back_as_they_are() -> None:
    def body(word: str) -> Any:
        rank, size = fzero.axis_index(), fzero.axis_size()
        block = Block(weight=torch.tensor(rank), bias=None, name=word)
        return {
            "int": rank,
            "float": rank / size + 0.1,
            "bool": rank > 0,
            "word": word,
            "block": block,
        }

    got = fzero.simulate(body, world_size=2)("w")
    assert got["int"].tolist() == [0, 1] and got["int"].dtype is torch.int64
    assert got["float"].tolist() == [0.1, 0.6]  # no bit is lost
    assert got["bool"].tolist() == [False, True]
    assert got["word"] == "w"
    assert (got["block"].name, got["block"].weight.tolist()) == ("w", [0, 1])


@given(ranks=worlds, draws=st.integers(0, 3), seed=seeds)
def test_every_rank_draws_what_a_process_with_this_seed_draws(
    ranks: int, draws: int, seed: int
) -> None:
    def body() -> Tensor:
        rows = []
        for _ in range(draws):
            rows.append(torch.rand(2))
            fzero.psum(torch.ones(1))  # the baton goes round between the draws
        return torch.stack([*rows, torch.rand(2)])

    torch.manual_seed(seed)
    got = fzero.simulate(body, world_size=ranks)()
    after = torch.rand(2)
    torch.manual_seed(seed)
    want = torch.stack([torch.rand(2) for _ in range(draws + 1)])
    everywhere(got, want, ranks)
    same(after, torch.rand(2))


def test_ranks_can_have_random_numbers_of_their_own() -> None:
    def body() -> Tensor:
        torch.manual_seed(fzero.axis_index())
        fzero.psum(torch.ones(1))
        return torch.rand(2)

    got = fzero.simulate(body, world_size=3)()
    for rank in range(3):
        torch.manual_seed(rank)
        same(on_rank(got, rank), torch.rand(2))


@given(ranks=worlds, odd=st.integers(0, 3), before=st.integers(0, 2))
def test_an_error_on_one_rank_is_raised_with_its_rank(ranks: int, odd: int, before: int) -> None:
    odd, threads = odd % ranks, threading.active_count()

    def body() -> Tensor:
        for _ in range(before):
            fzero.psum(torch.ones(1))
        if fzero.axis_index() == odd:
            raise KeyError("mine")
        return fzero.psum(torch.ones(1))

    with pytest.raises(KeyError, match="mine") as caught:
        fzero.simulate(body, world_size=ranks)()
    assert f"(raised on virtual rank {odd} of {ranks})" in caught.value.__notes__
    after = fzero.simulate(lambda: fzero.psum(1.0), world_size=ranks)()
    same(after, torch.full((ranks,), float(ranks)))
    assert threading.active_count() == threads


def test_ranks_may_take_different_ways_between_collectives() -> None:
    def body(x: Tensor) -> Tensor:
        for _ in range(fzero.axis_index()):
            x = torch.func.grad(lambda x: x**3)(x)
        return fzero.psum(x)

    assert fzero.simulate(body, world_size=2)(torch.tensor([1.0, 2.0])).tolist() == [13.0, 13.0]


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap])
def test_inside_another_simulate_or_a_transform_it_is_refused(transform: Any) -> None:
    run = fzero.simulate(lambda x: x, world_size=2)
    message = r"inside another simulate, a torch.func transform[\s\S]*Fix: put it inside"
    with pytest.raises(PhaseError, match=message):
        transform(lambda x: run(x).sum())(torch.ones(2, 2))
    with pytest.raises(PhaseError, match=message):
        fzero.simulate(lambda x: run(x), world_size=2)(torch.ones(2, 2))


@pytest.mark.parametrize("x", [torch.ones(3), torch.ones(3, 2), torch.tensor(1.0)])
def test_a_tensor_without_the_rank_dim_is_named(x: Tensor) -> None:
    message = r"\['x'\].* has shape .*; dim 0 must be the 2 ranks[\s\S]*Fix: stack one for each"
    with pytest.raises(LayoutError, match=message):
        fzero.simulate(lambda d: d, world_size=2)({"x": x})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([torch.ones(1), torch.ones(2)], r"tensors .*\(1,\), \(2,\)[\s\S]*Fix: pad it"),
        ([torch.ones(1), "text"], r"or no tensor[\s\S]*Fix: "),
        (["a", "b"], r"different values: \['a', 'b'\][\s\S]*Fix: return tensors"),
        ([{"a": 1}, {"b": 1}], r"rank 1 returned .*rank 0[\s\S]*Fix: return the same structure"),
    ],
)
def test_results_that_cannot_be_stacked_are_refused(values: list[Any], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        fzero.simulate(lambda: values[fzero.axis_index()], world_size=2)()


@pytest.mark.parametrize("world_size", [0, -1, 1.5, True, "2"])
def test_a_world_that_cannot_be_is_refused(world_size: Any) -> None:
    with pytest.raises(LayoutError, match=r"world_size=[\s\S]*Fix: give at least 1"):
        fzero.simulate(lambda: 1, world_size=world_size)


def _own_schedule() -> Any:
    return fzero.init(torch.ones(2), fzero.optim.sgd(lambda step: 0.5), stage=2)


def _gradient_on_one_rank_only() -> Any:
    state = fzero.init(torch.ones(2), fzero.optim.sgd(0.5), stage=0, mesh=fzero.Axis(size=1))
    gradient = fzero.grad_and_reduce(lambda p: p.sum(), state)
    return {"a": [state if fzero.axis_index() else gradient()[0]]}


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (_own_schedule, r"setup.optimizer.options\[0\]\[1\] = <function .*, rank 0 one with <func"),
        (_gradient_on_one_rank_only, r"gradients.flats = \(\), rank 0 one with \(0,\)"),
    ],
)
def test_states_that_differ_are_refused_by_the_fact_in_which_they_do(make: Any, name: str) -> None:
    with pytest.raises(LayoutError, match=rf"rank 1 returned a state with {name}") as caught:
        fzero.simulate(make, world_size=2)()
    seen, cause, fix = str(caught.value).splitlines()
    assert len(seen) < 300 and "schedule of its lr" in cause
    assert fix.startswith("Fix: make schedules and optimizers once, outside")


def test_one_module_for_all_ranks_gives_no_rank_the_parameters_of_another() -> None:
    """At stage 3 a rank pauses in a forward, while another one puts its own into the module."""
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    x = torch.randn(2, 5, 3)

    def trained(of_a_call: Any) -> Tensor:
        def loss_fn(p: Any, x: Tensor) -> Tensor:
            return functional_call(of_a_call(), p, (x,)).square().mean()

        def step_fn(state: Any, x: Tensor) -> Any:
            state = fzero.apply_gradients(fzero.grad_and_reduce(loss_fn, state)(x)[0])
            return state, fzero.full_params(state)["2.weight"]

        step = fzero.simulate(fzero.shard(step_fn, stage=3), world_size=2)
        return step(step.init(dict(module.named_parameters()), fzero.optim.sgd(0.5)), x)[1][0]

    shared = copy.deepcopy(module)
    with pytest.raises(PhaseError, match=r"of virtual rank 1 is read on virtual rank 0") as caught:
        trained(lambda: shared)
    assert "fzero.functionalize(module)" in str(caught.value)

    torch.stack([module(part).square().mean() for part in x]).mean().backward()
    weight: Any = module[2].weight
    got = trained(lambda: copy.deepcopy(module))
    torch.testing.assert_close(got, weight.detach() - 0.5 * weight.grad)


def test_threads_that_simulate_wait_for_each_other() -> None:
    found: dict[int, Tensor] = {}

    def run(number: int) -> None:
        def body(x: Tensor) -> Tensor:
            for _ in range(20):
                x = fzero.pmean(x)
            return x

        found[number] = fzero.simulate(body, world_size=2)(torch.tensor([number, number + 2.0]))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {number: x.tolist() for number, x in found.items()} == {
        number: [number + 1.0] * 2 for number in range(3)
    }


@pytest.mark.parametrize("stage", range(3))
def test_a_map_on_one_rank_is_told_where_the_run_ends(stage: int) -> None:
    def half(state: Any, on: int) -> Any:
        state = fzero.map_params(lambda p: p / 2, state)  # alike: fn is tested in it
        return fzero.map_params(torch.neg, state) if fzero.axis_index() == on else state

    step = fzero.simulate(half, world_size=2)
    state = fzero.simulate(fzero.shard(lambda s: (s, None), stage=stage), world_size=2).init(
        {"w": torch.ones(3)}, fzero.optim.sgd(1.0)
    )
    step(state, 2)
    with pytest.raises(MismatchError, match=r"rank 1 the end .* before: 2, the last map_params"):
        step(state, 1)
