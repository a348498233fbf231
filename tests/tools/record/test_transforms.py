"""What transforms and `fzero.init` ask of a state, a replay has, too: no sound run is accused."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
from tests.tools.record.runs import batch

CODECS = fzero.codecs
TRANSFORMS: dict[str, Any] = {  # the innermost first
    "accumulate": fzero.accumulate(micro_batches=2),
    "coalesce": fzero.coalesce,
    "clip": fzero.clip(max_norm=0.05, max_value=0.02),
    "check_finite": fzero.check_finite,
    "scale_loss": fzero.scale_loss(scale="dynamic"),
    "autocast": fzero.autocast(dtype=torch.bfloat16),
    "compress": fzero.compress(gradients=CODECS.int8()),
    "offload": fzero.offload(optimizer="cpu"),
    "local": fzero.local(every=2),
}
INIT: dict[str, dict[str, Any]] = {
    "autocast": {"autocast": torch.bfloat16},
    "autocast of some": {"autocast": fzero.Autocast(lower_precision_safe_modules=[nn.Tanh])},
    "sum": {"reduce_op": "sum", "ordered": True},
    "compress": {"compress": fzero.Compress(gradients=CODECS.powersgd(rank=1))},
    "local": {"local": fzero.Local(every=2)},
    "local, late": {"local": fzero.Local(every=2, fragments=2, delay=1, mixing=0.5)},
    "trainable": {"trainable": lambda path: "weight" in path, "units": lambda path: "one"},
}


def steps(remat: bool = False) -> tuple[Any, Any]:
    torch.manual_seed(0)
    apply, params = fzero.functionalize(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))
    run = fzero.remat(apply) if remat else apply

    def step_fn(state: Any, x: Tensor) -> Any:
        state, loss = fzero.grad_and_reduce(lambda p, x: run(p, x).float().square().mean(), state)(
            x
        )
        return fzero.apply_gradients(state), loss

    return step_fn, params


def recorded(step: Any, state: Any) -> fzero.tools.Recording:
    step = fzero.record(step, every=2, keep=None)
    for number in range(3):
        state, _ = step(state, batch(number).float())
    return step.recording


def same(step: Any, state: Any) -> None:
    recording = recorded(step, state)
    assert fzero.bisect(recording) is None
    assert fzero.replay(recording, step=recording.updates).same


PAIRS = [(), *((name,) for name in TRANSFORMS), *itertools.combinations(TRANSFORMS, 2)]


@pytest.mark.parametrize("names", [*PAIRS, tuple(TRANSFORMS)], ids="+".join)
def test_a_sound_run_under_transforms_is_not_accused(names: tuple[str, ...]) -> None:
    step, params = steps()
    for name in names:
        step = TRANSFORMS[name](step)
        if name == "compress" and "local" in names:
            codec = CODECS.int8(memory=False)
            step = fzero.compress(step.inner, gradients=codec, over="replicas")
    step = fzero.simulate(fzero.shard(step, stage=2, donate=len(names) == 1), world_size=2)
    same(step, step.init(params, fzero.optim.adamw(0.1)))


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_at_other_stages(stage: int, dtype: torch.dtype) -> None:
    step, params = steps(remat=True)
    step = fzero.shard(fzero.clip(fzero.autocast(step, dtype=dtype), max_norm=0.1), stage=stage)
    step = fzero.simulate(step, world_size=2)
    same(step, step.init(params, fzero.optim.adamw(0.1)))


@pytest.mark.parametrize("name", INIT)
def test_a_state_that_was_made_elsewhere_keeps_its_options(name: str) -> None:
    step, params = steps()
    rule = fzero.optim.adamw(0.1)
    made = fzero.simulate(lambda: fzero.init(params, rule, stage=2, **INIT[name]), world_size=2)()
    same(fzero.simulate(fzero.shard(step, stage=2), world_size=2), made)
    plain = recorded(fzero.simulate(step, world_size=2), made)  # its step says nothing of a stage
    assert fzero.bisect(plain, fzero.shard(step, stage=2)) is None


def test_a_step_of_other_options_makes_states_of_its_own() -> None:
    step, params = steps()
    rule = fzero.optim.adamw(0.1)
    plain = fzero.simulate(fzero.shard(step, stage=2), world_size=2)
    low = fzero.simulate(fzero.shard(fzero.autocast(step), stage=2), world_size=2)
    recordings = [recorded(one, one.init(params, rule)) for one in (plain, low)]
    for recording, other in zip(recordings, (low, plain), strict=True):
        parting = fzero.bisect(recording, other)
        assert parting is not None and parting.update == 1
    # The bits of the other run: in which dtype gradients cross ranks is known of a plain one, too.
    again = fzero.replay(recordings[0], step=1, step_fn=low)
    wanted = fzero.replay(recordings[1], step=1)
    for mine, theirs in zip(again.after.params.flats, wanted.after.params.flats, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("stage, world", [(0, 2), (3, 3)])
def test_what_owners_keep_of_a_transform_is_the_same_in_a_replay(stage: int, world: int) -> None:
    def keep(slots: Any, grads: Any, ctx: fzero.Context) -> Any:
        return {"last": dict(grads)}, grads

    last = fzero.transform(
        name="last",
        init=lambda params, ctx: {"last": {path: 0 * p for path, p in params.items()}},
        reduced=keep,
        needs="matrix",
    )
    step, params = steps()
    step = fzero.simulate(fzero.shard(last(step), stage=stage), world_size=world)
    state = step.init(params, fzero.optim.sgd(0.1))
    recorder, x = fzero.record(step, every=2, keep=None), torch.randn(world, 2, 3)
    for number in range(3):
        state, _ = recorder(state, x + number)
    assert fzero.replay(recorder.recording, step=3).same
    assert fzero.bisect(recorder.recording) is None
