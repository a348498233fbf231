"""A buffer of a state that was written in place is noticed at the next call."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import fzero
from fzero.errors import PhaseError
from tests.descends import descends

PARAMS = {"w": torch.arange(4.0), "b": torch.ones(2)}
RULE = fzero.optim.adamw(0.5)


def loss_fn(p: Any, x: Tensor) -> Tensor:
    return (p["w"] * x).square().sum() + p["b"].sum()


def adds(state: Any, x: Tensor) -> Any:
    return fzero.grad_and_reduce(loss_fn, state)(x)


STEP = descends(loss_fn)
WRITES: dict[str, Callable[[Any], Any]] = {
    "a method": lambda s: s.params.flats[0].zero_(),
    "a view": lambda s: s.params.flats[0].view(-1)[:1].fill_(9.0),
    "+=": lambda s: s.params.flats[0].add_(1.0),
    "out=": lambda s: torch.clamp(s.params.flats[0], -1, 1, out=s.params.flats[0]),
    "foreach": lambda s: torch._foreach_mul_([*s.params.flats], 0.5),
    "a gradient": lambda s: s.gradients.flats[0].mul_(2.0),
    "a moment": lambda s: s.optimizer.moments[0][0].zero_(),
}
CALLS: dict[str, Callable[[Any, Tensor], Any]] = {
    "grad_and_reduce": lambda s, x: fzero.grad_and_reduce(loss_fn, s)(x),
    "apply_gradients": lambda s, x: fzero.apply_gradients(s),
    "evaluate": lambda s, x: fzero.evaluate(loss_fn, s)(x),
    "gradients": lambda s, x: fzero.gradients(s),
    "global_norm": lambda s, x: fzero.global_norm(s),
    "add_gradients": lambda s, x: fzero.add_gradients(s, PARAMS),
    "a step": lambda s, x: fzero.shard(STEP, stage=s.stage)(s, x),
}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("name", WRITES)
def test_every_call_notices_a_write(name: str, stage: int, ranks: int) -> None:
    def body(x: Tensor) -> Tensor:
        for call in CALLS.values():
            state = fzero.init(PARAMS, RULE, stage=stage)
            state, _ = adds(fzero.apply_gradients(adds(state, x)[0]), x)
            WRITES[name](state)
            if name == "a moment" and call not in (CALLS["apply_gradients"], CALLS["a step"]):
                continue
            with pytest.raises(PhaseError, match=r"state\.\S+ was written in place"):
                call(state, x)
            fzero.full_params(state)  # shows what is there
        return x

    fzero.simulate(body, world_size=ranks)(torch.ones(ranks, 4))


@pytest.mark.parametrize("stage", [0, 3])
def test_a_stacked_state_is_watched_too(stage: int) -> None:
    step = fzero.simulate(fzero.shard(STEP, stage=stage), world_size=2)
    x = torch.ones(2, 4)
    for state in (step.init(PARAMS, RULE), step(step.init(PARAMS, RULE), x)[0]):
        step(state, x)
        state.params.flats[0][1].zero_()
        with pytest.raises(PhaseError, match=r"state\.params\.flats\[0\] was written in place"):
            step(state, x)


@pytest.mark.parametrize("ranks", [[1], [0, 1, 2]])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_virtual_rank_that_writes_in_its_step_is_noticed(stage: int, ranks: list[int]) -> None:
    def writes(state: Any, x: Tensor) -> Any:
        state, loss = fzero.grad_and_reduce(loss_fn, state)(x)
        if fzero.axis_index() in ranks:
            state.params.flats[0].mul_(1.5)
        return fzero.apply_gradients(state), loss

    step = fzero.simulate(fzero.shard(writes, stage=stage), world_size=3)
    with pytest.raises(PhaseError, match="was written in place"):
        step(step.init(PARAMS, RULE), torch.ones(3, 4))


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("stage", range(4))
def test_steps_do_not_take_their_own_writes_for_the_users(stage: int, donate: bool) -> None:
    step = fzero.shard(fzero.coalesce(STEP), stage=stage, donate=donate)
    run = fzero.simulate(step, world_size=2)
    x = torch.ones(4)
    state, both = step.init(PARAMS, RULE), run.init(PARAMS, RULE)
    for _ in range(3):
        state, _ = step(state, x)
        both, _ = run(both, x.expand(2, 4))
    assert torch.allclose(fzero.full_params(state)["w"], step_by_torch(3))

    def raises(state: Any, x: Tensor) -> Any:
        return fzero.grad_and_reduce(lambda p, x: p["w"].sum() / 0, state)(x)[0]["no item"]

    with pytest.raises(fzero.FzeroError):
        fzero.shard(raises, stage=stage, donate=donate)(state, x)
    step(state, x)  # it is whole


def step_by_torch(steps: int) -> Tensor:
    params = {k: torch.nn.Parameter(v.clone()) for k, v in PARAMS.items()}
    rule = torch.optim.AdamW(params.values(), lr=0.5)
    for _ in range(steps):
        rule.zero_grad()
        loss_fn(params, torch.ones(4)).backward()
        rule.step()
    return params["w"].detach()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_copies_are_the_users_to_write_to(stage: int) -> None:
    """An average of parameters, a copy by hand, a state that was loaded, and new tensors."""
    state = fzero.init(PARAMS, RULE, stage=stage)
    state, _ = STEP(state, torch.ones(4))
    tree: Any = state
    twins: list[Any] = [optree.tree_map(torch.clone, tree, namespace="fzero"), copy.deepcopy(state)]
    for twin in twins:
        twin.params.flats[0].mul_(0.5)
        fzero.evaluate(loss_fn, twin)(torch.ones(4))
        STEP(twin, torch.ones(4))
    clipped = tuple(flat.clamp(-1, 1) for flat in state.params.flats)
    other = state.replace(params=dataclasses.replace(state.params, flats=clipped))
    assert float(fzero.full_params(STEP(other, torch.ones(4))[0])["w"].max()) < 1.0
    given = fzero.full_params(state)
    given["w"].zero_()  # what a reader returns is a copy
    STEP(state, torch.ones(4))


def test_inference_tensors_have_no_count_and_the_treespec_does_not_change() -> None:
    state: Any = fzero.init(PARAMS, RULE, stage=0)
    with torch.inference_mode():
        twin: Any = optree.tree_map(lambda x: x * 1, state, namespace="fzero")
        twin.params.flats[0].zero_()
        fzero.evaluate(loss_fn, twin)(torch.ones(4))
    new, _ = STEP(state, torch.ones(4))
    newer, _ = STEP(new, torch.ones(4))
    assert len({optree.tree_structure(x, namespace="fzero") for x in (new, newer)}) == 1


def test_a_state_that_was_loaded_or_moved_is_watched(tmp_path: Any) -> None:
    state = fzero.init(PARAMS, RULE, stage=2)
    fzero.checkpoint.save(tmp_path, state)
    for made in (fzero.checkpoint.load(tmp_path, state), fzero.reshard(state, stage=3)):
        STEP(made, torch.ones(4))
        assert made is not None
        made.params.flats[0].zero_()
        with pytest.raises(PhaseError, match="was written in place"):
            STEP(made, torch.ones(4))


def test_who_looks_for_changed_bits_is_not_stopped() -> None:
    """A fault is planted by a write: the recorder finds it, and `check_replicas`."""
    step = fzero.simulate(fzero.shard(STEP, stage=0), world_size=2)
    run, x = fzero.record(step, every=1, parted="warn"), torch.ones(2, 4)
    state, _ = run(run.init(PARAMS, RULE), x)
    state.params.flats[0][1].view(torch.int32)[1] ^= 1 << 20
    with pytest.warns(UserWarning, match="rank 1 wrong first"):
        run(state, x)
    with pytest.raises(PhaseError, match="was written in place"):
        step(state, x)

    def body(rank: Tensor) -> Any:
        state = fzero.init(PARAMS, RULE, stage=0)
        state.params.flats[0].add_(rank)
        return fzero.check_replicas(state)

    with pytest.raises(fzero.FzeroError, match=r"other values|differ"):
        fzero.simulate(body, world_size=2)(torch.arange(2.0))
