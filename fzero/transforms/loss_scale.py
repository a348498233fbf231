"""`scale_loss`: losses are multiplied before their backward, for gradients that fp16 can hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, overload

import torch
from torch import Tensor

from fzero.collectives import reduce_many
from fzero.errors import PhaseError
from fzero.errors.check import called_as
from fzero.errors.json_form import DictForm, integer
from fzero.machine.offload import to_device
from fzero.machine.packing import over_places
from fzero.optim import unscaled
from fzero.optim.recorded import lacks_value
from fzero.options import Scale
from fzero.state import Buffers, Form, Placement, TrainState, scale
from fzero.state.buffers import SIXTEEN_BIT
from fzero.state.entry import Entry
from fzero.state.points import At, Builtin
from fzero.state.scale import ExternalScale, LossScale, ScalePolicy, as_policy
from fzero.transforms.leaf_slices import Prepared, left_to_rule, multiplied
from fzero.transforms.models import map_states
from fzero.transforms.pipeline import P, R, Step, Transform, entering, transform
from fzero.transforms.points import Running, transforms_of

# What a loss scale does in a step: losses times it, gradients by it, nothing from an overflow.
#
#     grad_and_reduce   loss x scale -> backward -> gradients x scale, which the state holds
#     decides           found_inf(gradients) -> the next scale; no update, if found
#     units             gradients / scale, or left to the rule
#
# Here is the one place that multiplies by the scale of a state, and divides by it.

SCALE_ENTRY = "scale"
"""The entry of a state that has what its gradients were multiplied by."""

SCALE_NUMBERS = DictForm(
    may={
        "scale": lambda x: type(x) is float and 0 < x < 3.5e38,  # as fp32 holds it
        "good_updates": integer(0, 2**31),
        "hysteresis_left": integer(0, 2**31),
        "hysteresis": integer(1, 2**31),
    }
)
"""What `as_numbers` gives, as a file has it."""

_NUMBERS = ("scale", "good_updates", "hysteresis_left", "overflowed")


def scale_entries(state: TrainState) -> list[Entry]:
    """Return what the gradients of a state were multiplied by, as an entry, if there are any."""
    held = state.scale
    if held is None or not (state.gradients.held or state.window.pending.held):
        return []
    values = {name: getattr(held, name) for name in _NUMBERS}
    form = Form(leaves="named", placement=Placement.REPLICATED, lifetime="update")
    return [Entry(name=SCALE_ENTRY, form=form, values=values)]


def with_scale_entries(state: TrainState, entries: Sequence[Entry]) -> TrainState:
    """Return the state with the scale that its gradients were multiplied by."""
    (one,), held = entries, state.scale
    if held is None:
        return state
    numbers = {name: one.values[name] for name in _NUMBERS}
    return _scaled_by(state, dataclasses.replace(held, is_read=True, **numbers))


def with_policy(state: TrainState, policy: ScalePolicy | None) -> TrainState:
    """Return a state whose losses are scaled so; as it is if that is so already, or for None.

    Raises `PhaseError` if it holds gradients that were made with another scale, or without one.
    """
    held = state.scale
    if policy is None or (held is not None and held.policy == policy):
        return state
    if state.progress.backwards:
        before = "without a scale" if held is None else f"with {held.policy}"
        raise PhaseError(
            f"scale_loss: the state holds gradients of {state.progress.backwards} backwards "
            f"that were made {before}; now it is {policy}.",
            cause="scale_loss around a part of a step, or two of them between two updates.",
            fix="put one fzero.scale_loss around the whole step.",
        )
    return _scaled_by(state, scale.begin(policy, state.device))


def _with_value(state: TrainState) -> TrainState:
    """Return a state whose scale is known: the user's was read, if it had to be."""
    held = state.scale
    if held is None or held.is_read:
        return state
    return _scaled_by(state, scale.read_external(held))


def next_scale(state: TrainState) -> float:
    """Return the scale of the next loss; 1.0 without one. The host waits for the device."""
    held = state.scale
    return 1.0 if held is None else float(scale.read_external(held).scale)


def _forgotten(state: TrainState) -> TrainState:
    """Return the state after its gradients were thrown away: a scale of the user's is read anew."""
    held = state.scale
    return state if held is None else _scaled_by(state, scale.forget(held))


def _scaled_by(state: TrainState, held: LossScale | None) -> TrainState:
    return state.replace(slots=scale.with_slot(state.slots, held))


def without_scale(state: TrainState, flat: Tensor) -> Tensor:
    """Return a gradient that a state holds divided by its scale; in fp32 for one of 16 bits."""
    here, held = to_device(flat, state.device), scale.multiplier(state.scale)
    return here if held is None else unscaled(here, held.scale)


def found_inf(state: TrainState, gradients: Buffers, held: LossScale) -> Tensor:
    """Return 1 if any rank's reduced gradients have an infinity or a NaN, else 0: [] fp32.

    A scale that is zero or not finite counts as one. A collective where gradients are sharded.
    """
    flats = [flat.detach() for flat in gradients.flats if flat.numel()]
    device = held.scale.device
    here = (to_device(flat, state.device) for flat in flats)  # one at a time
    sizes = [torch.linalg.vector_norm(flat, ord=float("inf")) for flat in here]
    good = [torch.isfinite(size).to(device) for size in [*sizes, 1 / held.scale]]
    found = (~torch.stack(good).all()).to(torch.float32)
    # Whole gradients are the same on every rank; a scale of the user's need not be.
    if gradients.placement is not Placement.REPLICATED or isinstance(held.policy, ExternalScale):
        ordered = state.setup.reduction.ordered
        found = reduce_many([found], state.setup.axis, ordered=ordered)[0].clamp(max=1)
    return over_places(state.setup, found).clamp(max=1)


def _facts(state: TrainState, at: At) -> list[str]:
    """Return the policy; of the user's own scale at an update its value, where no device is read.

    Of any other scale all ranks have found the same.
    """
    held = state.scale
    lines = [f"loss scale {held and held.policy}"]
    if at == "update" and held is not None and isinstance(held.policy, ExternalScale):
        lines += [] if lacks_value(held.scale) else [f"the loss scale is {float(held.scale)}"]
    return lines


def _decides(running: Running, means: Buffers) -> None:
    """Look for an overflow: it is no update, and in any case the scale goes on."""
    held = running.old.scale
    assert held is not None
    found = found_inf(running.old, means, held)
    running.put(_scaled_by(running.state, scale.after_update(held, found)))
    running.leave_out(found, overflows=True)


def _units(running: Running, ready: Prepared) -> Prepared:
    """g / scale. Left to a rule that looks for the overflow, if nobody has to see them before."""
    state = running.old
    by = scale.multiplier(state.scale)
    if by is None:
        return ready
    if running.by_rule and not transforms_of(state.setup, "reduced"):
        return left_to_rule(state, ready, by.scale)
    if all(x.dtype not in SIXTEEN_BIT for x in ready.gradients.flats):
        return multiplied(state, ready, by.scale.double().reciprocal())
    # 16 bits may not hold them without the scale
    flats = tuple(without_scale(state, flat) for flat in ready.gradients.flats)
    return ready._replace(gradients=Buffers(flats=flats, placement=ready.gradients.placement))


SCALE = Builtin(
    name="scale_loss",
    slots=(("scale", scale.FORM),),
    acts=lambda state: scale.SLOT in state.slots,
    facts=_facts,
    factor=lambda state: scale.factor_in(state.slots),
    forgets=_forgotten,
    begins=_with_value,
    decides=_decides,
    units=_units,
)
"""A loss scale, at the points of a step."""


@overload
def scale_loss(fn: Callable[P, R], /, scale: Scale = "dynamic") -> Step[P, R]: ...
@overload
def scale_loss(*, scale: Scale = "dynamic") -> Transform: ...
@called_as("scale_loss(step, 1024.0)")
def scale_loss(
    fn: Callable[..., Any] | None = None, /, scale: Scale = "dynamic"
) -> Step[..., Any] | Transform:
    """Let `grad_and_reduce` in `fn(state, *args)` differentiate s L, and the update divide by s.

    g = (1 / s) d(s L)/dp: small gradients do not become zero in 16 bits. The value that
    `grad_and_reduce` returns is L; `fzero.gradients` and `fzero.global_norm` give g. What is
    divided by is the s that the gradients were made with, also where the scale then changes.

    An infinity or a NaN in the gradients of any rank skips the update on every rank: parameters,
    optimizer and `state.step` stay as they are, and `state.scale.overflowed` is true. The scale
    is `state.scale.scale`; it goes with the state, also into a checkpoint. The host does not wait
    for the device, except for optimizers without a fused kernel (Lion, foreign pairs).

    A scale of 1, or None, is the identity, and looks for no overflow. A power of two that neither
    overflows nor underflows changes no bit.

    Args:
        fn: the step. If its state is a pytree of states, each has a scale of its own, and is
            skipped by its own gradients.
        scale: a positive number, which stays; "dynamic", for `fzero.DynamicScale()`; a
            `fzero.DynamicScale(init_scale=..., ...)`; a tensor of one element, or a function
            without arguments that gives a number or such a tensor: the user's own scale, the same
            on every rank, read when the first gradient after an update is made.

    Returns:
        A step that is called as `fn` is; its `init` gives states with the scale. Without `fn`, a
        decorator.

    Raises:
        LayoutError: for another scale, and for scale_loss around scale_loss.
        PhaseError: in a call, for a state with gradients that were made with another scale.
        MismatchError: in a call, on every rank, when the ranks scale in other ways.

    Source: Micikevicius et al., "Mixed Precision Training", arXiv 1710.03740, section 3.2.

    Example:
        >>> import torch, fzero
        >>> def step_fn(state, x):
        ...     state, loss = fzero.grad_and_reduce(lambda p, x: (p * x).sum(), state)(x)
        ...     return fzero.apply_gradients(state), loss
        >>> step = fzero.shard(fzero.scale_loss(step_fn, "dynamic"), stage=2)
        >>> state = step.init(torch.ones(2), fzero.optim.sgd(1.0))
        >>> state, loss = step(state, 0.5)
        >>> loss, fzero.full_params(state), state.scale.scale
        (tensor(1.), tensor([0.5000, 0.5000]), tensor(65536.))
        >>> state, loss = step(state, float("inf"))
        >>> fzero.full_params(state), state.scale.scale, state.scale.overflowed
        (tensor([0.5000, 0.5000]), tensor(32768.), tensor(True))
    """
    policy = as_policy("scale_loss: scale", scale)

    def prepare(state: Any) -> Any:
        return map_states("scale_loss", lambda one: with_policy(one, policy), state)

    return transform(
        "scale_loss",
        fn,
        entering("scale_loss", prepare),
        never_around=("scale_loss", "simulate"),
        right="fzero.simulate(fzero.scale_loss(step, ...), world_size=...), with one scale",
        options={"scale": scale if isinstance(scale, str) or policy is None else policy},
        prepare=prepare,
    )
