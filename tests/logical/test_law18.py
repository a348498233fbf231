"""Law 18: with logical ranks every bit is a function of the program, and not of where it runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fzero
from tests.logical.programs import Place, Program, differs, trained


def windows(calls: int, *, split: bool) -> st.SearchStrategy[dict[str, Any]]:
    """A window, one of so many backwards, micro-batches, or none of these."""
    kinds: list[dict[str, Any]] = [{}, {"coalesce": 0}, {"coalesce": calls}]
    if split:
        kinds += [{"micro_batches": 2}, {"micro_batches": 3, "coalesce": 0}]
    return st.sampled_from(kinds)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Programs of 1 to 6 logical ranks."""
    logical = draw(st.integers(1, 6))
    calls = draw(st.sampled_from([1, 1, 2]))
    odd = draw(st.booleans())
    sizes = tuple(draw(st.lists(st.integers(1, 3), min_size=logical, max_size=logical)))
    window = draw(windows(calls, split=calls == 1 and not odd))
    weighted = draw(st.booleans())
    overflows = draw(st.sampled_from([None, (0, draw(st.integers(0, logical - 1)))]))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    options = draw(
        st.sampled_from(
            [{}, {"gradient_predivide_factor": 3.0}, {"accumulate_dtype": torch.float64}]
            + [{"reduce_op": "sum"}] * (not weighted)
        )
    )
    return Program(
        logical=logical,
        calls=calls,
        sizes=sizes if odd else (),
        weighted=weighted,
        dropout=draw(st.sampled_from([0.0, 0.4])),
        scale=draw(st.sampled_from([None, "dynamic"])) if overflows is None else "dynamic",
        overflows=overflows,
        dtype=dtype,
        autocast=draw(st.sampled_from([None, torch.bfloat16])) if dtype is torch.float32 else None,
        cast=draw(st.sampled_from([None, None, torch.bfloat16])),
        rule=draw(st.sampled_from(["sgd", "adamw"])),
        donate=draw(st.booleans()),
        offload=draw(st.sampled_from([False, False, True])),
        options=options,
        **window,
    )


@st.composite
def places(draw: st.DrawFn, logical: int) -> Place:
    """Where logical ranks can run."""
    ranks, stage = draw(st.integers(1, logical)), draw(st.integers(0, 3))
    options: dict[str, Any] = {}
    if stage == 3:
        options["reshard_after_forward"] = draw(st.sampled_from([True, False, "window"]))
        options["prefetch_numel"] = draw(st.sampled_from([0, 1, 100]))
    elif draw(st.booleans()):
        options["bucket_bytes"] = 1000
    mesh = draw(st.sampled_from([None, (2, 2), (4, 1)])) if ranks == 4 else None
    if mesh and stage:
        options["optimizer_over"] = draw(st.sampled_from(["shard", "all"]))
    return Place(ranks=ranks, stage=stage, mesh=mesh, options=options)


@given(st.data())
def test_bits_do_not_depend_on_where_a_program_runs(data: st.DataObject) -> None:
    program = data.draw(programs())
    alone = trained(program, Place(stage=data.draw(st.integers(0, 3))))
    place = data.draw(places(program.logical))
    assert differs(alone, trained(program, place)) == []


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("ranks", range(1, 6))
def test_each_number_of_ranks_at_each_stage(ranks: int, stage: int) -> None:
    program = Program(logical=5, dropout=0.4, sizes=(1, 3, 2, 1, 2))
    assert differs(trained(program, Place()), trained(program, Place(ranks, stage))) == []


def test_another_seed_and_another_number_of_logical_ranks_are_other_runs() -> None:
    program = Program(logical=4, dropout=0.4)
    one = trained(program, Place())
    assert differs(one, trained(Program(logical=4, dropout=0.4), Place())) == []
    more = Program(logical=2, dropout=0.4, sizes=(4, 4))
    assert differs(one["params"], trained(more, Place())["params"])


def test_without_logical_ranks_the_last_bits_depend_on_the_ranks() -> None:
    """What the law is about: the same program without the option."""

    def loss_fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        return (p * x).sin().mean()

    def grads(x: torch.Tensor) -> torch.Tensor:
        state = fzero.init(torch.full((64,), 0.3), fzero.optim.sgd(0.1), stage=0)
        return fzero.gradients(fzero.grad_and_reduce(loss_fn, state)(x)[0])

    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    alone = grads(x)
    three = fzero.simulate(grads, world_size=3)(x.unflatten(0, (3, 2)))[0]
    assert not torch.equal(alone, three)
    torch.testing.assert_close(alone, three)
