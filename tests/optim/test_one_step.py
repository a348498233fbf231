"""One update is one `step()` of a torch.optim optimizer, for hooks, schedulers and wrappers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import fzero
from fzero.errors import PhaseError
from fzero.optim import from_torch
from tests.descends import descends
from tests.optim.cases import trained
from tests.optim.torch_cases import GroupAdam, Lamb, by_torch, parameters
from tests.oracle import linear_loss
from tests.strategies import integers, same

XS = integers((3, 2), 7, torch.float32)
run = functools.partial(trained, loss=linear_loss)


class Cautious(torch.optim.AdamW):
    """A step that calls the step of its base, which has hooks as well."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


RULES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "by a base": Cautious,
    "adafactor": torch.optim.Adafactor,  # by owners
    "lamb": Lamb,
    "counts in its group": GroupAdam,
}


def watched(optimizer: torch.optim.Optimizer, seen: list[str], *, wrapped: bool) -> None:
    """Hooks of it, in the order of their calls; a scheduler, and a wrapper as of a profiler."""
    sizes = [p.shape for p in optimizer.param_groups[0]["params"]]

    def note(name: str, of: Any, *_: Any) -> None:
        assert [p.shape for p in of.param_groups[0]["params"]] == sizes
        seen.append(name)

    optimizer.register_step_pre_hook(functools.partial(note, "before"))
    optimizer.register_step_post_hook(functools.partial(note, "after"))
    if wrapped:
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
        own: Any = optimizer.step

        def step(*args: Any, **kwargs: Any) -> Any:
            seen.append("in")
            made = own(*args, **kwargs)
            seen.append("out")
            return made

        optimizer.step = step


STREAMED = {"state_dtype": torch.bfloat16}


@pytest.mark.parametrize(
    ("name", "stage", "options"),
    [
        ("adamw", 2, {}),
        ("adamw", 3, STREAMED),
        ("by a base", 0, {}),
        ("by a base", 2, STREAMED),
        ("adafactor", 0, {}),
        ("adafactor", 2, STREAMED),
        ("adafactor", 3, {}),
        ("lamb", 2, {}),
        ("counts in its group", 2, STREAMED),
    ],
)
def test_hooks_and_wrappers_run_once_around_an_update_and_see_whole_parameters(
    name: str, stage: int, options: dict[str, Any]
) -> None:
    """On two virtual ranks, which share the optimizer: it makes one step."""
    want, given = None, {"needs": "leaf"} if name == "lamb" else {}
    for wrapped in (False, True):
        params, seen = parameters(), list[str]()
        instance = RULES[name](list(params.values()), lr=0.05)
        begun = Cautious([torch.nn.Parameter(torch.ones(1))])  # AdamW.step is hooked from here on
        watched(instance, seen, wrapped=wrapped)
        watched(begun, seen, wrapped=False)
        calls: list[str] = []
        handles = [
            register_optimizer_step_pre_hook(lambda *_, calls=calls: calls.append("before")),
            register_optimizer_step_post_hook(lambda *_, calls=calls: calls.append("after")),
        ]
        try:
            got, _ = run(params, from_torch(instance, **given, **options), XS, stage=stage)
        finally:
            for handle in handles:
                handle.remove()
        one = ["in", "before", "after", "out"] if wrapped else ["before", "after"]
        assert seen == len(XS) * one
        assert calls == len(XS) * ["before", "after"]
        want = want or got
        same(got, want)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_scheduler_in_a_hook_is_one_step_ahead_of_no_rank(world_size: int) -> None:
    def made(of: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(list(of.values()), lr=0.5)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        optimizer.register_step_post_hook(lambda *_: scheduler.step())
        return optimizer

    xs = integers((3, world_size), 7, torch.float32)
    for stage in (0, 2):
        params = parameters()
        got, _ = run(params, from_torch(made(params)), xs, stage=stage)
        want: dict[str, Tensor] = by_torch(parameters(), xs.double().mean(1).float(), made)
        for path, value in want.items():
            torch.testing.assert_close(got[path], value.expand_as(got[path]))


@pytest.mark.parametrize(("times", "seen"), [(0, "did not call it"), (2, "called it twice")])
def test_a_wrapper_that_does_not_step_once_is_refused(times: int, seen: str) -> None:
    params = parameters()
    instance: Any = torch.optim.SGD(list(params.values()), lr=0.1)
    own = instance.step
    instance.step = lambda: [own() for _ in range(times)]
    state: Any = fzero.init(params, from_torch(instance), stage=0)
    state, _ = fzero.grad_and_reduce(linear_loss, state)(XS[0, 0])
    with pytest.raises(PhaseError, match=seen):
        fzero.apply_gradients(state)


def test_no_hook_of_all_optimizers_sees_a_trial() -> None:
    seen: list[None] = []
    handle = register_optimizer_step_pre_hook(lambda *_: seen.append(None))
    try:
        fzero.init(parameters(), from_torch(torch.optim.Adafactor), stage=0)
    finally:
        handle.remove()
    assert not seen


def test_a_wrapped_step_goes_with_a_loss_scale_that_the_kernel_divides_by() -> None:
    seen: list[list[float]] = []
    for scale in (None, 4.0):
        params = parameters()
        instance: Any = torch.optim.SGD(list(params.values()), lr=0.05)
        instance.step = functools.partial(instance.step)

        def step_fn(state: Any, x: Tensor, scale: Any = scale) -> Any:
            def grad(state: Any) -> Any:
                return fzero.apply_gradients(fzero.grad_and_reduce(linear_loss, state)(x)[0]), None

            return (grad if scale is None else fzero.scale_loss(grad, scale))(state)

        state: Any = fzero.shard(step_fn, stage=0).init(params, from_torch(instance))
        state, _ = step_fn(state, XS[0, 0])
        seen.append([float(p.sum()) for p in fzero.full_params(state).values()])
    assert seen[0] == seen[1]


def test_a_compiled_step_is_one_step() -> None:
    seen: list[None] = []
    params = parameters()
    instance: Any = torch.optim.SGD(list(params.values()), lr=0.05)
    instance.step = torch.compile(instance.step, backend="eager")
    instance.register_step_post_hook(lambda *_: seen.append(None))
    got, _ = run(params, from_torch(instance), XS, stage=2)
    want, _ = run(parameters(), fzero.optim.sgd(0.05), XS, stage=2)
    same(got, want)
    assert len(seen) == len(XS)


class Logged(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        logged.append(None)
        return super().step(closure)


logged: list[None] = []


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_step_of_a_class_runs_once_where_the_rule_is_computed_at_once(stage: int) -> None:
    """A scheduler notes each step, and warns where there was none."""
    params = parameters()
    instance = Logged(list(params.values()), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(instance, 1)
    step: Any = fzero.shard(descends(linear_loss), stage=stage)
    state = step.init(params, from_torch(instance))
    logged.clear()
    for x in XS[:, 0]:
        state, _ = step(state, x)
        scheduler.step()
    assert len(logged) == len(XS)
