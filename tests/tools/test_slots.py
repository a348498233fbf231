"""Slots of any form are counted, planned, drawn, digested and compared: no tool names them."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
from fzero.adapter import Engine
from fzero.errors import MismatchError
from fzero.state import Buffers
from fzero.tools.record.digests import digested_leaves, digests_of, of_leaves, places_of, words

PARTIAL, REPLICATED = fzero.Placement.PARTIAL, fzero.Placement.REPLICATED
PARAMS = {"w": torch.arange(15.0).view(3, 5) / 8, "b": torch.ones(3), "s": torch.tensor(2.0)}
FORMS = {
    "mean": fzero.Form(),
    "seen": fzero.Form(leaves="number"),
    "all": fzero.Form(leaves="all", placement=REPLICATED),
    "summed": fzero.Form(placement=PARTIAL, elsewhere="sum"),
    "own": fzero.Form(leaves="number", placement=PARTIAL, elsewhere="own"),
    "named": fzero.Form(leaves="named"),
}


def begin(params: dict[str, Tensor], ctx: fzero.Context) -> dict[str, Any]:
    means = {path: p.clone() for path, p in params.items()}
    named = {"x": torch.zeros(3), "y": torch.ones(2, 2)}
    return {"mean": means, "seen": 0, "all": 1.0, "summed": 0.0, "own": 0.0, "named": named}


def follow(slots: dict[str, Any], params: dict[str, Tensor], ctx: fzero.Context) -> Any:
    mean = {path: m.lerp(params[path], 0.5) for path, m in slots["mean"].items()}
    named = {**slots["named"], "x": slots["named"]["x"] + 1}
    return {**slots, "mean": mean, "seen": slots["seen"] + 1, "named": named}, params


def keep(slots: dict[str, Any], g: Tensor, ctx: fzero.Context) -> Any:
    return {**slots, "summed": slots["summed"] + g, "own": slots["own"] + g.sum()}, g


KEEPS = fzero.transform(name="keeps", slots=FORMS, init=begin, updated=follow, local=keep)
WHOLE = fzero.transform(
    name="whole",
    init=lambda params, ctx: {"sizes": {path: p.norm() for path, p in params.items()}},
    reduced=lambda slots, grads, ctx: (
        {"sizes": {path: g.norm() for path, g in grads.items()}},
        grads,
    ),
    needs="matrix",
)


def step_fn(state: Any, x: Tensor) -> tuple[Any, Tensor]:
    def loss(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return (p["w"] @ x).sum() * p["s"] + p["b"].sum()

    state, value = fzero.grad_and_reduce(loss, state)(x)
    return fzero.apply_gradients(state), value


def trained(stage: int, world: int, data: Tensor) -> Any:
    """The stacked state after a step for each row of [N, 4, 5], of which each rank has a part."""
    step = fzero.simulate(fzero.shard(WHOLE(KEEPS(step_fn)), stage=stage), world_size=world)
    state = step.init(PARAMS, fzero.optim.sgd(0.5))
    for x in data:
        state, _ = step(state, x.view(world, -1, 5).mean(1))
    return state


DATA = torch.randint(-4, 5, (2, 4, 5), generator=torch.Generator().manual_seed(0)).double().float()


def digests(state: Any, world: int) -> dict[str, int]:
    """The digest of each leaf of a stacked state."""
    held = [fzero.checkpoint.elements.state_of_rank(state, rank) for rank in range(world)]
    rows = torch.stack([digests_of(x, places_of(x, r), words) for r, x in enumerate(held)])
    leaves = digested_leaves(held[0])
    found = of_leaves(leaves, rows, world).tolist()
    return dict(zip([leaf.name for leaf in leaves], found, strict=True))


@pytest.mark.parametrize("stage, world", [(0, 2), (1, 2), (2, 4), (3, 4), (3, 1)])
def test_a_slot_has_one_digest_at_every_stage_and_number_of_ranks(stage: int, world: int) -> None:
    one, found = digests(trained(0, 1, DATA), 1), digests(trained(stage, world, DATA), world)
    assert one.keys() == found.keys()
    assert {"keeps/mean w", "keeps/seen", "keeps/named x", "whole/sizes w"} <= one.keys()
    for name, value in one.items():
        if "summed" not in name and "own" not in name:  # of which each rank has a summand
            assert found[name] == value, name


@pytest.mark.parametrize("stage, world", [(0, 2), (2, 3), (3, 2)])
def test_a_plan_has_the_bytes_of_slots(stage: int, world: int) -> None:
    inner = fzero.shard(WHOLE(KEEPS(step_fn)), stage=stage)
    plan = fzero.plan.of_step(inner, PARAMS, fzero.optim.sgd(0.5), torch.zeros(5), world=world)

    def counted(x: Tensor) -> Tensor:
        state = inner.init(PARAMS, fzero.optim.sgd(0.5))
        return torch.tensor(fzero.state_bytes(inner(state, x)[0])["slots"])

    real = fzero.simulate(counted, world_size=world)(torch.ones(world, 5))
    assert plan.bytes["slots"] == real[0]


def test_a_slot_is_drawn_and_named_in_the_state() -> None:
    state = trained(3, 2, DATA)
    kinds = {kind for kind, _ in fzero.plot.partition_map(state).kinds}
    assert {"keeps/mean", "keeps/summed", "keeps/all"} <= kinds
    assert "slots" in repr(state) and "keeps, whole" in repr(state)


@pytest.mark.parametrize("stage, world", [(0, 2), (3, 3)])
def test_a_slot_that_differs_between_ranks_is_found(stage: int, world: int) -> None:
    def ranks_part(x: Tensor) -> None:
        state = fzero.init(PARAMS, fzero.optim.sgd(0.1), stage=stage, transforms=[KEEPS])
        fzero.check_replicas(state)
        slot = state.slots["keeps/all"].value
        assert isinstance(slot, Buffers)
        slot.flats[0].data.add_(x)
        fzero.check_replicas(state)

    with pytest.raises(MismatchError, match="the slot keeps/all"):
        fzero.simulate(ranks_part, world_size=world)(torch.arange(float(world)))


def test_a_recording_with_slots_is_replayed() -> None:
    step = fzero.simulate(fzero.shard(KEEPS(step_fn), stage=2), world_size=2)
    recorder = fzero.record(step, every=1)
    state = step.init(PARAMS, fzero.optim.sgd(0.5))
    for x in DATA:
        state, _ = recorder(state, x.view(2, -1, 5).mean(1))
    again = fzero.replay(recorder.recording, step=2)
    assert again.same
    found = fzero.simulate(lambda s: fzero.slots(s, "keeps")["mean"]["w"], world_size=2)
    assert torch.equal(found(again.after), found(state))


def engine_part(x: Tensor, *, stage: int) -> Tensor:
    model = nn.Linear(5, 1)
    engine = Engine(
        model, torch.optim.SGD(model.parameters(), 0.1), stage=stage, transforms=[KEEPS]
    )
    engine(x).sum().backward()
    engine.step()
    report, seen = engine.memory_report(), fzero.slots(engine.state, "keeps")["seen"]
    held = fzero.state_bytes(engine.state)["slots"]
    engine.state = engine.state  # a state with slots is taken as it is
    assert sum(report.slots.values()) == held
    engine.close()
    return seen


@pytest.mark.parametrize("stage", [0, 3])
def test_an_engine_reports_slots(stage: int) -> None:
    seen = fzero.simulate(partial(engine_part, stage=stage), world_size=2)(torch.ones(2, 3, 5))
    assert seen.tolist() == [1, 1]
