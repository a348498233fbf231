"""The loss scale goes into a checkpoint, and on in a state of another stage and number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fzero
from fzero.checkpoint import load, save
from fzero.state import DynamicScale
from tests.descends import descends
from tests.strategies import same

POLICY = DynamicScale(init_scale=256.0, growth_interval=3, hysteresis=2)
INF = float("inf")
SCHEDULE = (1.0, INF, INF, 2.0, 1.0, 3.0, 2.0, INF)


step_fn = descends(lambda p, x: (p["w"] * x).sum() + p["s"])


def step_of(stage: int, ranks: int, scale: Any = POLICY) -> Any:
    step = fzero.shard(fzero.scale_loss(step_fn, scale), stage=stage)
    return fzero.simulate(step, world_size=ranks) if ranks > 1 else step


def fresh(step: Any) -> Any:
    return step.init({"w": torch.ones(5), "s": torch.ones(())}, fzero.optim.adamw(0.5))


def after(step: Any, state: Any, xs: tuple[float, ...], ranks: int) -> Any:
    for x in xs:
        state, _ = step(state, torch.full((ranks,), x) if ranks > 1 else torch.tensor(x))
    return state


def facts(state: Any) -> list[float]:
    """What goes on in a scale, and the updates made; the same on every rank."""
    held = state.scale
    every = (held.scale, held.good_updates, held.hysteresis_left, state.step, state.optimizer.count)
    return [x.unique().item() for x in every]


def params(state: Any, ranks: int) -> Any:
    if ranks == 1:
        return fzero.full_params(state)
    whole = fzero.simulate(fzero.full_params, world_size=ranks)(state)
    return {name: x[0] for name, x in whole.items()}


@pytest.mark.parametrize("at", [1, 2, 4, 7])
@pytest.mark.parametrize(("then", "before"), [((0, 1), (2, 2)), ((3, 3), (0, 1)), ((1, 2), (3, 3))])
def test_training_goes_on_as_if_it_had_not_stopped(
    tmp_path: Path, at: int, then: tuple[int, int], before: tuple[int, int]
) -> None:
    (stage, ranks), (old_stage, old_ranks) = then, before
    old, new = step_of(old_stage, old_ranks), step_of(stage, ranks)
    state = after(old, fresh(old), SCHEDULE[:at], old_ranks)
    save(tmp_path, state)
    loaded = load(tmp_path, fresh(new))
    assert facts(loaded) == facts(state)
    got = after(new, loaded, SCHEDULE[at:], ranks)
    want = after(old, state, SCHEDULE[at:], old_ranks)
    assert facts(got) == facts(want)
    same(params(got, ranks), params(want, old_ranks))


def test_a_checkpoint_without_a_scale_gives_a_new_one_and_the_other_way_round_none(
    tmp_path: Path,
) -> None:
    plain, scaled = step_of(1, 1, None), step_of(2, 1)
    with_scale = after(scaled, fresh(scaled), SCHEDULE, 1)
    save(tmp_path / "plain", fresh(plain))
    save(tmp_path / "scaled", with_scale)
    assert facts(load(tmp_path / "plain", with_scale))[:3] == [256.0, 0, 2]
    loaded = load(tmp_path / "scaled", fresh(plain))
    assert loaded.scale is None and int(loaded.step) == int(with_scale.step)
    static = load(tmp_path / "scaled", fresh(step_of(0, 1, 8.0)))
    assert static.scale is not None and static.scale.scale.item() == 8.0
