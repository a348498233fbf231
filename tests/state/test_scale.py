"""The loss scale as a record: torch.amp.GradScaler's automaton, hysteresis, what may be given."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import Tensor, nn

import fzero
from fzero.errors import LayoutError
from fzero.state import DynamicScale, scale
from fzero.state.scale import ExternalScale, LossScale, StaticScale

CPU = torch.device("cpu")
FINITE, INFINITE = torch.tensor(0.0), torch.tensor(1.0)

policies = st.builds(
    DynamicScale,
    init_scale=st.sampled_from([1.0, 3.0, 2.0**16, 2.0**126, 3e38]),
    growth_factor=st.sampled_from([2.0, 1.1, 1000.0]),
    backoff_factor=st.sampled_from([0.5, 0.3, 0.999]),
    growth_interval=st.integers(1, 4),
)


class AsGradScaler(RuleBasedStateMachine):
    """With hysteresis 1, scale and growth tracker are those of a GradScaler after every update."""

    @initialize(policy=policies)
    def start(self, policy: DynamicScale) -> None:
        self.mine = scale.begin(policy, CPU)
        self.theirs = torch.amp.GradScaler(
            "cpu",
            init_scale=policy.init_scale,
            growth_factor=policy.growth_factor,
            backoff_factor=policy.backoff_factor,
            growth_interval=policy.growth_interval,
        )
        self.theirs.scale(torch.zeros(()))  # which makes its tensors
        self.weight = nn.Parameter(torch.zeros(2))
        self.optimizer = torch.optim.SGD([self.weight], lr=0.0)

    @rule(gradient=st.sampled_from([0.0, 1.0, 1.0, 1.0, float("inf"), float("nan")]))
    def update(self, gradient: float) -> None:
        self.weight.grad = torch.tensor([1.0, gradient])
        bad = not torch.isfinite(self.weight.grad).all()
        self.theirs.step(self.optimizer)
        self.theirs.update()
        self.mine = scale.after_update(self.mine, torch.tensor(float(bad)))

    @invariant()
    def agrees(self) -> None:
        theirs: Any = self.theirs
        assert torch.equal(self.mine.scale, theirs._scale)
        assert torch.equal(self.mine.good_updates, theirs._growth_tracker)


TestAsGradScaler = AsGradScaler.TestCase


def by_counting(policy: DynamicScale, bads: list[bool]) -> tuple[float, int, int]:
    """The same automaton with Python numbers, as DeepSpeed and Megatron have it."""
    value, good, left = policy.init_scale, 0, policy.hysteresis
    for bad in bads:
        if bad:
            good = 0
            if left == 1:
                value = max(value * policy.backoff_factor, policy.min_scale)
            else:
                left -= 1
        else:
            good += 1
            if good == policy.growth_interval:
                value, good, left = value * policy.growth_factor, 0, policy.hysteresis
    return value, good, left


@given(
    bads=st.lists(st.booleans(), max_size=30),
    interval=st.integers(1, 4),
    hysteresis=st.integers(1, 4),
    least=st.sampled_from([0.0, 1.0, 64.0]),
)
def test_hysteresis_counts_down_and_fills_up_when_the_scale_grows(
    bads: list[bool], interval: int, hysteresis: int, least: float
) -> None:
    policy = DynamicScale(
        init_scale=64.0, growth_interval=interval, hysteresis=hysteresis, min_scale=least
    )
    held = scale.begin(policy, CPU)
    for bad in bads:
        held = scale.after_update(held, INFINITE if bad else FINITE)
        assert held.overflowed.item() is bad
    found = (held.scale.item(), held.good_updates.item(), held.hysteresis_left.item())
    assert found == by_counting(policy, bads)


def test_a_static_scale_stays_and_tells_of_an_overflow() -> None:
    held = scale.begin(StaticScale(8.0), CPU)
    for found, said in ((INFINITE, True), (FINITE, False)):
        held = scale.after_update(held, found)
        assert (held.scale.item(), held.overflowed.item()) == (8.0, said)


@pytest.mark.parametrize("kind", ["tensor", "one element", "number", "function of a tensor"])
def test_an_external_scale_is_read_once_between_two_updates(kind: str) -> None:
    own = torch.tensor([4.0] if kind == "one element" else 4.0, dtype=torch.float64)
    source: Any = {
        "tensor": own,
        "one element": own,
        "number": lambda: own.item(),
        "function of a tensor": lambda: own,
    }[kind]
    policy = scale.as_policy("scale", source)
    assert policy == ExternalScale(source) and policy is not None
    held = scale.read_external(scale.begin(policy, CPU))
    own.fill_(32.0)
    held = scale.read_external(held)
    assert held.scale.dtype is torch.float32 and held.scale.shape == ()
    assert held.scale.item() == 4.0, "it was read again before the update"
    held = scale.read_external(scale.after_update(held, FINITE))
    assert held.scale.item() == 32.0


@pytest.mark.parametrize("given", [0, -1.0, float("inf"), None, "2", True, torch.ones(2)])
def test_what_an_external_function_must_give(given: Any) -> None:
    held = scale.begin(ExternalScale(lambda: given), CPU)
    with pytest.raises(LayoutError, match=r"external loss scale gave[\s\S]*Fix: return"):
        scale.read_external(held)


class Scaler:
    def value(self) -> float:
        return 2.0


def test_external_scales_are_equal_if_they_are_one() -> None:
    a, b, scaler = torch.ones(()), torch.ones(()), Scaler()
    assert ExternalScale(a) == ExternalScale(a) != ExternalScale(b)
    assert ExternalScale(scaler.value) == ExternalScale(scaler.value)
    assert hash(ExternalScale(scaler.value)) == hash(ExternalScale(scaler.value))
    assert ExternalScale(a) != StaticScale(1.0)
    assert repr(ExternalScale(a)) == repr(ExternalScale(scaler.value))  # no address


def test_what_stands_for_a_scale() -> None:
    assert scale.as_policy("scale", "dynamic") == fzero.DynamicScale()
    assert fzero.DynamicScale is fzero.adapter.DynamicScale is DynamicScale
    assert scale.as_policy("scale", 3) == StaticScale(3.0)
    assert scale.as_policy("scale", 1.0) is scale.as_policy("scale", None) is None
    own = DynamicScale(init_scale=1.0)  # it is dynamic, and happens to be 1
    assert scale.as_policy("scale", own) is own


WRONG = [
    *(0, -2.0, float("inf"), float("nan"), 1e39, 1e-46, 10**400, True, "static", {}, (2.0,)),
    *(torch.ones(2), torch.ones((), dtype=torch.int64), float, LossScale),
]


@pytest.mark.parametrize("wrong", WRONG, ids=repr)
def test_what_is_no_scale_is_refused(wrong: Any) -> None:
    with pytest.raises(LayoutError, match=r"loss_scale=[\s\S]*Fix: give a positive number"):
        scale.as_policy("loss_scale", wrong)
    with pytest.raises(LayoutError, match="scale_loss: scale="):
        fzero.scale_loss(lambda state: (state, None), wrong)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        *(("init_scale", x) for x in (0, -1.0, float("inf"), 1e39, "2", True, None)),
        *(("growth_factor", x) for x in (1.0, 0.5, float("nan"), float("inf"), "2")),
        *(("backoff_factor", x) for x in (0.0, 1.0, -0.5, float("nan"), True)),
        *(("growth_interval", x) for x in (0, -1, 1.5, True, 2**31)),
        *(("hysteresis", x) for x in (0, -1, 2.0, False)),
        *(("min_scale", x) for x in (-1.0, 2.0**17, float("nan"), "0")),
    ],
)
def test_a_number_out_of_its_range_is_refused_by_name(name: str, wrong: Any) -> None:
    with pytest.raises(LayoutError, match=rf"DynamicScale: {name}=[\s\S]*Fix: give "):
        DynamicScale(**{name: wrong})


def numbers(held: LossScale | None) -> Any:
    assert held is not None
    return held.scale.item(), held.good_updates.item(), held.hysteresis_left.item()


def used(policy: DynamicScale) -> LossScale:
    """A scale after a good update, an overflow and two good ones."""
    held = scale.begin(policy, CPU)
    for found in (FINITE, INFINITE, FINITE, FINITE):
        held = scale.after_update(held, found)
    return held


def both_ways(own: LossScale, saved: LossScale) -> list[LossScale]:
    """A scale that takes the numbers of another one: from a checkpoint, and from a state."""
    found = scale.from_numbers(own, scale.as_numbers(saved)), scale.carried(own, saved)
    return [one for one in found if one is not None]


def test_the_numbers_of_a_dynamic_scale_come_back_under_the_policy_of_the_state() -> None:
    saved = used(DynamicScale(init_scale=64.0, hysteresis=2, growth_interval=4))
    own = scale.begin(DynamicScale(init_scale=2.0, hysteresis=2, growth_interval=3), CPU)
    for loaded in both_ways(own, saved):
        assert loaded.policy is own.policy
        assert numbers(loaded) == numbers(saved) == (64.0, 2, 1)
        assert loaded.scale.dtype is torch.float32 and loaded.good_updates.dtype is torch.int32
        after = scale.after_update(loaded, FINITE)
        assert numbers(after) == (128.0, 0, 2)


@pytest.mark.parametrize(
    ("before", "overflows", "now", "left"),
    [(4, 0, 1, 1), (4, 0, 2, 2), (4, 3, 2, 1), (4, 1, 3, 2), (1, 0, 4, 4), (2, 1, 4, 3)],
)
def test_the_overflow_that_lowers_a_loaded_scale_is_that_of_its_own_policy(
    before: int, overflows: int, now: int, left: int
) -> None:
    saved = scale.begin(DynamicScale(init_scale=64.0, hysteresis=before), CPU)
    for _ in range(overflows):
        saved = scale.after_update(saved, INFINITE)
    own = scale.begin(DynamicScale(init_scale=64.0, hysteresis=now), CPU)
    for loaded in both_ways(own, saved):
        for _ in range(left):
            assert loaded.scale.item() == 64.0
            loaded = scale.after_update(loaded, INFINITE)
        assert loaded.scale.item() == 32.0


def test_a_loaded_scale_is_within_the_bounds_of_its_own_policy() -> None:
    saved = used(DynamicScale(init_scale=4.0, growth_interval=9))  # lowered to 2, then 2 good ones
    own = scale.begin(DynamicScale(init_scale=64.0, growth_interval=2, min_scale=16.0), CPU)
    for loaded in both_ways(own, saved):
        assert numbers(loaded) == (16.0, 1, 1)  # one more good update, and it grows
        assert numbers(scale.after_update(loaded, INFINITE)) == (16.0, 0, 1)
        assert numbers(scale.after_update(loaded, FINITE)) == (32.0, 0, 1)


def test_of_a_checkpoint_that_does_not_say_the_hysteresis_no_more_is_left_than_the_policy_has() -> (
    None
):
    own = scale.begin(DynamicScale(init_scale=64.0, hysteresis=2), CPU)
    old = {"scale": 64.0, "good_updates": 0, "hysteresis_left": 4}
    assert numbers(scale.from_numbers(own, old)) == (64.0, 0, 2)


@pytest.mark.parametrize("other", [None, StaticScale(2.0)])
def test_without_saved_numbers_a_scale_begins_anew(other: StaticScale | None) -> None:
    own = used(DynamicScale(init_scale=64.0, growth_interval=9))
    theirs = other and scale.begin(other, CPU)
    for loaded in (scale.from_numbers(own, scale.as_numbers(theirs)), scale.carried(own, theirs)):
        assert numbers(loaded) == (64.0, 0, 1)
    assert scale.carried(None, own) is None and scale.from_numbers(None, {"scale": 2.0}) is None


def test_a_static_scale_is_that_of_the_state_it_is_loaded_into() -> None:
    own = scale.begin(StaticScale(4.0), CPU)
    dynamic = used(DynamicScale(init_scale=64.0))
    for loaded in (scale.from_numbers(own, scale.as_numbers(dynamic)), scale.carried(own, dynamic)):
        assert loaded is not None and loaded.scale.item() == 4.0
    kept = scale.carried(own, own)
    assert kept is not None and kept.scale is own.scale


def test_the_record_is_a_pytree_and_a_transition_leaves_the_old_one() -> None:
    held = used(DynamicScale(init_scale=64.0))
    before = [getattr(held, f.name) for f in dataclasses.fields(held)]
    copies = [x.clone() if isinstance(x, Tensor) else x for x in before]
    scale.after_update(held, INFINITE)
    assert all(torch.equal(a, b) for a, b in zip(before[:4], copies[:4], strict=True))
    with pytest.raises(AttributeError):
        held.scale = torch.ones(())
