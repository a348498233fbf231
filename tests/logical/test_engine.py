"""An engine's logical ranks: `engine.parts`, the bits of the functional driver, buffers, misuse."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import fzero
from fzero.adapter import Engine
from fzero.errors import PhaseError
from tests.logical.programs import (
    FEATURES,
    Place,
    Program,
    differs,
    run_engine,
    trained,
)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Programs without micro-batches, which an engine counts by itself."""
    logical = draw(st.integers(1, 5))
    odd = draw(st.booleans())
    sizes = tuple(draw(st.lists(st.integers(1, 3), min_size=logical, max_size=logical)))
    scaled = draw(st.booleans())
    return Program(
        logical=logical,
        calls=draw(st.sampled_from([1, 1, 2])),
        sizes=sizes if odd else (),
        coalesce=draw(st.sampled_from([None, 0])),
        weighted=draw(st.booleans()),
        dropout=draw(st.sampled_from([0.0, 0.4])),
        scale="dynamic" if scaled else None,
        overflows=(0, draw(st.integers(0, logical - 1))) if scaled else None,
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
        rule=draw(st.sampled_from(["sgd", "adamw"])),
        offload=draw(st.sampled_from([False, False, True])),
    )


@given(st.data())
def test_an_engine_has_the_bits_of_a_step(data: st.DataObject) -> None:
    program = data.draw(programs())
    ranks, stage = data.draw(st.integers(1, program.logical)), data.draw(st.integers(0, 3))
    step = trained(program, Place(stage=data.draw(st.integers(0, 3))))
    assert differs(step, trained(program, Place(ranks, stage), run_engine)) == []


# Buffers.


class Normed(nn.Module):
    """A module with buffers that change, one that counts, and one that stays."""

    constant: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(FEATURES, 7), nn.BatchNorm1d(7)
        self.register_buffer("constant", torch.tensor([0.1, 0.7, 1 / 3]))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.first(x)).sin() * self.constant.sum()


def normed(ranks: int, stage: int, logical: int = 5, loops: int = 2) -> dict[str, Any]:
    """A training of `Normed` with BatchNorm over each logical rank, several loops an update."""

    def run() -> dict[str, Any]:
        module = Normed()
        engine = Engine(module, fzero.optim.adamw(1e-2), stage=stage, logical_ranks=logical, seed=1)
        mine = engine.state.setup.carried(engine.axis.rank)
        generator = torch.Generator().manual_seed(3)
        data = torch.randn(3, loops, logical, 4, FEATURES, generator=generator)
        seen = []
        for update in data:
            for batch in update:
                rows = batch[mine.start : mine.stop].flatten(0, 1)
                losses = []
                for part in engine.parts(rows):
                    loss = engine(part).square().mean()
                    engine.backward(loss)
                    losses.append(loss.detach())
                seen.append(fzero.logical_mean(torch.stack(losses), engine.state))
            engine.step()
        found = {
            "params": fzero.full_params(engine.state),
            "buffers": {path: x.clone() for path, x in module.named_buffers()},
            "losses": torch.stack(seen),
        }
        engine.close()
        return found

    if ranks == 1:
        return run()
    every: Any = fzero.simulate(run, world_size=ranks)()
    torch.testing.assert_close(every["buffers"]["norm.running_mean"][0].shape, (7,))
    first: Any = optree.tree_map(lambda x: x[0], every, namespace="fzero")
    return first


@pytest.mark.parametrize(("ranks", "stage"), [(1, 3), (2, 0), (3, 2), (4, 3), (5, 0), (5, 3)])
def test_buffers_become_the_mean_over_logical_ranks(ranks: int, stage: int) -> None:
    assert differs(normed(1, 0), normed(ranks, stage)) == []


def test_buffers_by_hand() -> None:
    """The running mean after one update is the mean of those of the logical ranks."""
    module: Any = Normed()
    reference: Any = Normed()
    logical = 3
    engine = Engine(module, fzero.optim.sgd(0.0), stage=2, logical_ranks=logical)
    x = torch.randn(logical, 4, FEATURES)
    means = []
    for row in x:
        alone = Normed()
        alone(row)
        means.append(alone.norm.running_mean)
    for part in engine.parts(x.flatten(0, 1)):
        torch.testing.assert_close(module.norm.running_mean, reference.norm.running_mean)
        engine.backward(engine(part).sum())
    assert torch.equal(module.norm.running_mean, reference.norm.running_mean)  # until the update
    engine.step()
    torch.testing.assert_close(module.norm.running_mean, torch.stack(means).mean(0))
    assert module.norm.num_batches_tracked.item() == 1
    assert torch.equal(module.constant, reference.constant)
    engine.close()


# Misuse.


def engine_of(**options: Any) -> Engine:
    module = nn.Linear(2, 1)
    given: dict[str, Any] = {"stage": 2, "logical_ranks": 4, **options}
    return Engine(module, fzero.optim.sgd(0.1), **given)


def test_what_is_made_once_for_all_is_refused_in_a_loop() -> None:
    engine = engine_of()
    calls: dict[str, Any] = {
        "step": engine.step,
        "zero_grad": engine.zero_grad,
        "parts": lambda: [*engine.parts(torch.ones(4, 2))],
        "coalesce": lambda: engine.coalesce().__enter__(),
        "full_gradients": engine.full_gradients,
    }
    for part in engine.parts(torch.ones(4, 2)):
        for name, call in calls.items():
            with pytest.raises(PhaseError, match=r"inside of a loop over engine.parts\(\)"):
                call()
                pytest.fail(name)
        engine.backward(engine(part).sum())
    assert engine.step()
    engine.close()


def test_a_backward_outside_of_a_loop_is_refused() -> None:
    engine = engine_of()
    with pytest.raises(PhaseError, match=r"a backward outside of engine.parts\(\)"):
        engine.backward(engine(torch.ones(4, 2)).sum())
    with torch.no_grad():
        assert engine(torch.ones(4, 2)).shape == (4, 1)
    for part in engine.parts(torch.ones(4, 2)):
        engine.backward(engine(part).sum())
    assert engine.step()
    engine.close()


@pytest.mark.parametrize("logical", [1, 4])
def test_a_loop_that_is_left_brings_nothing(logical: int) -> None:
    engine = engine_of(logical_ranks=logical)
    module: Any = engine.module
    before = module.weight.detach().clone()
    for part in engine.parts(torch.ones(4, 2)):
        engine.backward(engine(part).sum())
        break
    calls: list[Any] = [engine.step, lambda: [*engine.parts(torch.ones(4, 2))]]
    for call in calls:
        with pytest.raises(PhaseError, match="was left before its end"):
            call()
    assert torch.equal(module.weight, before)
    engine.zero_grad()
    for part in engine.parts(torch.ones(4, 2)):
        engine.backward(engine(part).sum())
    assert engine.step()
    assert not torch.equal(module.weight, before)
    engine.close()


def test_an_error_in_a_part_is_everybodys() -> None:
    def run() -> Tensor:
        engine = engine_of(stage=3, logical_ranks=5)
        rows = torch.ones(len(engine.state.setup.carried(engine.axis.rank)), 2)
        with pytest.raises(Exception, match=r"no such row|the step raised on rank"):
            for part in engine.parts(rows):
                loss = engine(part).sum()
                if fzero.axis_index() == 3:
                    raise RuntimeError("no such row")
                engine.backward(loss)
        engine.zero_grad()
        for part in engine.parts(rows):
            engine.backward(engine(part).sum())
        engine.step()
        weight = engine.full_parameter("weight")
        engine.close()
        return weight

    alone = run()
    for ranks in (2, 5):
        found: Any = fzero.simulate(run, world_size=ranks)()
        assert found[0].shape == alone.shape


def test_a_part_without_a_backward_counts_as_zero() -> None:
    def run() -> Tensor:
        torch.manual_seed(0)
        engine = engine_of(logical_ranks=4)
        rows = torch.arange(8.0).view(4, 2)
        mine = engine.state.setup.carried(engine.axis.rank)
        for part in engine.parts(rows[mine.start : mine.stop]):
            loss = engine(part).sum()
            if fzero.axis_index() != 1:
                engine.backward(loss)
        gradient = engine.full_gradient("weight")
        engine.step()
        engine.close()
        assert gradient is not None
        return gradient

    wanted = torch.arange(8.0).view(4, 2)[[0, 2, 3]].sum(0) / 4
    assert torch.equal(run()[0], wanted)
    for ranks in (2, 3, 4):
        found: Any = fzero.simulate(run, world_size=ranks)()
        assert torch.equal(found[0][0], wanted)


def test_without_logical_ranks_a_batch_is_the_one_part() -> None:
    engine = engine_of(logical_ranks=None)
    batch = torch.ones(4, 2)
    assert [part is batch for part in engine.parts(batch)] == [True]
    engine.close()
