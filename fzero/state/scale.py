"""The loss scale: by what losses are multiplied before a backward, and how that changes.

    loss x scale -> backward -> gradients x scale -> / scale -> update
    after_update(scale, found_inf)      the next scale: smaller after an overflow, larger after
                                        `growth_interval` updates without one

Transitions are tensor arithmetic on the device of the parameters: the host reads nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fzero.errors import LayoutError
from fzero.errors.check import is_count, is_number, require
from fzero.state.buffers import Placement, record, static
from fzero.state.slots import Form, Slot


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicScale:
    """A scale that falls after an overflow, and rises after a number of updates without one.

    An overflow takes one from `hysteresis`, and multiplies by `backoff_factor` if none is left;
    `growth_interval` updates in a row without an overflow multiply by `growth_factor`, if the
    product is finite, and fill `hysteresis` up again. With hysteresis=1 it is
    `torch.amp.GradScaler`.

    Args:
        init_scale: the first scale.
        growth_factor: more than 1.
        backoff_factor: between 0 and 1.
        growth_interval: updates without an overflow from one growth to the next.
        hysteresis: the first overflow that lowers the scale: 1 for every overflow.
        min_scale: the scale does not fall below it; 0 for no bound.

    Raises:
        LayoutError: for a number out of its range.

    Source: Micikevicius et al., "Mixed Precision Training", arXiv 1710.03740, section 3.2.

    Example:
        >>> DynamicScale(init_scale=1024.0, growth_interval=100).backoff_factor
        0.5
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    min_scale: float = 0.0

    def __post_init__(self) -> None:
        _require(self, "init_scale", is_scale, "a positive number that fp32 holds")
        _require(self, "growth_factor", lambda x: is_scale(x) and x > 1, "a number above 1")
        _require(self, "backoff_factor", lambda x: is_number(x) and 0 < x < 1, "one of (0, 1)")
        _require(self, "growth_interval", _is_count, "an int of 1 or more, below 2**31")
        _require(self, "hysteresis", _is_count, "an int of 1 or more")
        bound = f"a number from 0 to init_scale={self.init_scale}"
        _require(self, "min_scale", lambda x: is_number(x) and 0 <= x <= self.init_scale, bound)


@dataclass(frozen=True, slots=True)
class StaticScale:
    """A constant scale. An overflow is skipped all the same; that is all that a scale of 1 does."""

    value: float


@dataclass(frozen=True, slots=True, eq=False)
class ExternalScale:
    """A scale that the user keeps: a tensor of one element, or a function that gives the scale.

    It is read when the first loss after an update, or after a `zero_grad()`, is scaled; the update
    divides by that value.
    """

    source: Tensor | Callable[[], Any]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ExternalScale):
            return NotImplemented
        mine, theirs = self.source, other.source
        if isinstance(mine, Tensor) or isinstance(theirs, Tensor):
            return mine is theirs
        return mine == theirs  # a bound method is another object at each access

    def __hash__(self) -> int:
        return id(self.source) if isinstance(self.source, Tensor) else hash(self.source)

    def __repr__(self) -> str:  # alike on every rank
        return "ExternalScale"


SLOT = "scale_loss/scale"
"""The slot of a state that has its loss scale: the numbers, and as its note (policy, is_read)."""

FORM = Form(leaves="named", placement=Placement.REPLICATED, kind="numbers")
"""Its form: the same numbers on every rank."""

_NUMBERS = ("scale", "good_updates", "hysteresis_left", "overflowed")
_SAVED = ("scale", "good_updates", "hysteresis_left")
_HYSTERESIS = "hysteresis"  # of the policy that `hysteresis_left` was counted under

ScalePolicy = DynamicScale | StaticScale | ExternalScale


@record
class LossScale:
    """The loss scale of a state, on the device of its parameters.

    `scale` is what the gradients that are held were multiplied by, until an update divides by it.
    """

    scale: Tensor  # [] fp32
    good_updates: Tensor  # [] int32: in a row, since the last overflow or growth
    hysteresis_left: Tensor  # [] int32: the overflow that lowers the scale, from now
    overflowed: Tensor  # [] bool: the last update found one, and was skipped
    policy: ScalePolicy = static()
    is_read: bool = static(default=True)  # of an external scale: since the last update


def in_slots(slots: Mapping[str, Slot]) -> LossScale | None:
    """Return the loss scale among the slots of a state; None if losses are not scaled."""
    slot = slots.get(SLOT)
    if slot is None:
        return None
    policy, is_read = slot.note
    return LossScale(**slot.value, policy=policy, is_read=is_read)


def factor_in(slots: Mapping[str, Slot]) -> Tensor | None:
    """Return what losses are multiplied by, []; None for 1."""
    slot = slots.get(SLOT)
    return None if slot is None or slot.note[0] == StaticScale(1.0) else slot.value["scale"]


def with_slot(slots: Mapping[str, Slot], scale: LossScale | None) -> dict[str, Slot]:
    """Return slots with this loss scale; without any for None.

    Example:
        >>> first = begin(StaticScale(8.0), torch.device("cpu"))
        >>> in_slots(with_slot({}, first)).scale, with_slot(with_slot({}, first), None)
        (tensor(8.), {})
    """
    others = {name: slot for name, slot in slots.items() if name != SLOT}
    if scale is None:
        return others
    values = {name: getattr(scale, name) for name in _NUMBERS}
    return {**others, SLOT: Slot(value=values, form=FORM, note=(scale.policy, scale.is_read))}


def as_policy(name: str, scale: Any) -> ScalePolicy | None:
    """Return what a user means by a scale; None if losses are not scaled: for 1 and None.

    Args:
        name: of the call or option, for the error.
        scale: a number, "dynamic", a `DynamicScale`, a `StaticScale`, a tensor of one element or
            a function without arguments.

    Raises:
        LayoutError: for anything else.

    Example:
        >>> as_policy("loss_scale", 1) is None, as_policy("loss_scale", 128)
        (True, StaticScale(value=128.0))
    """
    if scale is None or isinstance(scale, DynamicScale | StaticScale):
        return scale
    if isinstance(scale, str) and scale == "dynamic":
        return DynamicScale()
    if is_scale(scale):
        return None if scale == 1 else StaticScale(float(scale))
    if isinstance(scale, Tensor) and scale.numel() == 1 and scale.is_floating_point():
        return ExternalScale(scale)
    if callable(scale) and not isinstance(scale, type | Tensor):
        return ExternalScale(scale)
    seen = f"a tensor {tuple(scale.shape)} {scale.dtype}" if isinstance(scale, Tensor) else scale
    raise LayoutError(
        f"{name}={seen!r}.",
        cause="a word, a dict, or a number that is not positive, not finite, or beyond fp32.",
        fix='give a positive number, "dynamic", a fzero.DynamicScale(init_scale=..., ...), a '
        "floating tensor of one element, or a function without arguments; 1 for no scale.",
    )


def begin(policy: ScalePolicy, device: torch.device) -> LossScale:
    """Return the scale before the first update.

    Example:
        >>> begin(DynamicScale(init_scale=8.0), torch.device("cpu")).scale
        tensor(8.)
    """
    first, left = 1.0, 1
    if isinstance(policy, DynamicScale):
        first, left = policy.init_scale, policy.hysteresis
    elif isinstance(policy, StaticScale):
        first = policy.value
    return LossScale(
        scale=torch.full((), first, dtype=torch.float32, device=device),
        good_updates=torch.zeros((), dtype=torch.int32, device=device),
        hysteresis_left=torch.full((), left, dtype=torch.int32, device=device),
        overflowed=torch.zeros((), dtype=torch.bool, device=device),
        policy=policy,
        is_read=not isinstance(policy, ExternalScale),
    )


def multiplier(scale: LossScale | None) -> LossScale | None:
    """Return the scale if losses are multiplied by it, and gradients divided; None if by 1."""
    return None if scale is None or scale.policy == StaticScale(1.0) else scale


def read_external(scale: LossScale) -> LossScale:
    """Return the scale with the value that the user's has now, unless it was read already.

    Raises `LayoutError` if the user's function gives no positive number. What a tensor holds is
    not looked at: with a scale that is zero or not finite, the update is skipped.
    """
    if scale.is_read or not isinstance(scale.policy, ExternalScale):
        return scale
    source = scale.policy.source
    given = source if isinstance(source, Tensor) else source()
    if isinstance(given, Tensor) and given.numel() == 1:
        # A copy: the user may write to it before the update.
        value = given.detach().reshape(()).to(scale.scale, copy=True)
    elif is_scale(given):
        value = torch.full_like(scale.scale, float(given))
    else:
        raise LayoutError(
            f"the external loss scale gave {given!r:.100}.",
            cause="a function that returns nothing, or a scale that fell to zero.",
            fix="return a positive finite number, or a tensor of one element.",
        )
    return dataclasses.replace(scale, scale=value, is_read=True)


def forget(scale: LossScale) -> LossScale:
    """Return the scale after all gradients were thrown away: the user's is read anew.

    Else ranks could differ: one whose forward raised has not read what the others have.
    """
    if isinstance(scale.policy, ExternalScale):
        return dataclasses.replace(scale, is_read=False)
    return scale


def after_update(scale: LossScale, found_inf: Tensor) -> LossScale:
    """Return the scale after an update that found an overflow (`found_inf` is not 0), or none.

    Args:
        scale: the one by which the update divides.
        found_inf: [], the same on every rank.

    Example:
        >>> old = begin(DynamicScale(init_scale=8.0, growth_interval=1), torch.device("cpu"))
        >>> after_update(old, torch.tensor(1.0)).scale, after_update(old, torch.tensor(0.0)).scale
        (tensor(4.), tensor(16.))
    """
    bad = found_inf != 0
    if isinstance(scale.policy, ExternalScale):
        return dataclasses.replace(scale, overflowed=bad, is_read=False)
    if isinstance(scale.policy, StaticScale):
        return dataclasses.replace(scale, overflowed=bad)
    return _adapted(scale, scale.policy, bad)


def carried(own: LossScale | None, other: LossScale | None) -> LossScale | None:
    """Return the scale of a state that takes the values of another one.

    Its policy is its own. If both are dynamic, or have one policy, the numbers are the other's,
    kept within the own policy as in `from_numbers`; else it begins anew.
    """
    if own is None or other is None:
        return own and begin(own.policy, own.scale.device)
    if other.policy == own.policy:
        return dataclasses.replace(other, policy=own.policy)
    if isinstance(own.policy, DynamicScale) and isinstance(other.policy, DynamicScale):
        return _under(own.policy, other, other.policy.hysteresis)
    return begin(own.policy, own.scale.device)


def as_numbers(scale: LossScale | None) -> dict[str, float]:
    """Return what a checkpoint keeps of a scale: nothing of one that does not adapt itself."""
    if scale is None or not isinstance(scale.policy, DynamicScale):
        return {}
    numbers = {name: getattr(scale, name).item() for name in _SAVED}
    return {**numbers, _HYSTERESIS: scale.policy.hysteresis}


def from_numbers(own: LossScale | None, numbers: Mapping[str, float]) -> LossScale | None:
    """Return the scale of a state that is loaded: of its own policy, with the saved numbers.

    What was counted goes on, as far as that policy has it: the overflows since the last growth are
    taken from its `hysteresis`, the good updates end below its `growth_interval`, the scale is its
    `min_scale` at least. Without numbers, and for one that does not adapt itself, it begins anew.
    """
    if own is None:
        return None
    new = begin(own.policy, own.scale.device)
    if not isinstance(own.policy, DynamicScale):
        return new
    known = {
        name: torch.full_like(getattr(new, name), numbers[name])
        for name in _SAVED
        if name in numbers
    }
    saved = dataclasses.replace(new, **known)
    return _under(own.policy, saved, numbers.get(_HYSTERESIS))


def _under(policy: DynamicScale, scale: LossScale, hysteresis: float | None) -> LossScale:
    """Return a scale that was counted under a policy with that `hysteresis`; None: not known."""
    left = scale.hysteresis_left
    if hysteresis is not None:
        left = left + (policy.hysteresis - int(hysteresis))
    return dataclasses.replace(
        scale,
        scale=scale.scale.clamp(min=policy.min_scale),
        good_updates=scale.good_updates.clamp(max=policy.growth_interval - 1),
        hysteresis_left=left.clamp(min=1, max=policy.hysteresis),
        policy=policy,
    )


def _adapted(scale: LossScale, policy: DynamicScale, bad: Tensor) -> LossScale:
    old, left = scale.scale, scale.hysteresis_left
    # In fp64 and rounded once, as torch's kernel does it: any factor gives its bits.
    wide = old.double()
    lower = (wide * policy.backoff_factor).to(old.dtype).clamp(min=policy.min_scale)
    higher = (wide * policy.growth_factor).to(old.dtype)
    higher = torch.where(torch.isfinite(higher), higher, old)
    good = scale.good_updates + 1
    grows = good >= policy.growth_interval
    return dataclasses.replace(
        scale,
        scale=torch.where(bad, torch.where(left <= 1, lower, old), torch.where(grows, higher, old)),
        good_updates=torch.where(bad | grows, torch.zeros_like(good), good),
        hysteresis_left=torch.where(
            bad,
            (left - 1).clamp(min=1),
            torch.where(grows, torch.full_like(left, policy.hysteresis), left),
        ),
        overflowed=bad,
    )


def is_scale(value: Any) -> bool:
    """Whether it is a positive number that fp32 holds."""
    fp32 = torch.finfo(torch.float32)
    return is_number(value) and fp32.tiny <= value <= fp32.max


def _is_count(value: Any) -> bool:
    return is_count(value) and value < 2**31


def _require(policy: DynamicScale, name: str, good: Callable[[Any], bool], wanted: str) -> None:
    require(f"DynamicScale: {name}", getattr(policy, name), good, wanted)
