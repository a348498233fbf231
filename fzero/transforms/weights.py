"""Weighted gradients: sum(w g) / sum(w) over calls, micro-batches and ranks, divided once.

    call       w g in the accumulation dtype -> added up, or reduced as a sum; w -> the slot `SLOT`
    update     total = sum over ranks of it -> gradients / total -> the optimizer

A loss that calls a collective is multiplied itself: its backward sends gradients to other ranks,
which have weights of their own, and gets theirs, so g has parts of the losses of several ranks.

Beside the sum of weights a rank counts how many of them are none: negative, infinite, NaN. Values
of tensors are read in the update alone, which reads the total anyway; it is NaN if there are any.

A state has weights from its first weighted call to its update (`Reduction.weighted`), and all calls
between are weighted. So no rank must know a count of tokens before it has computed its gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fzero.collectives import fold_rows, gather_rows, reduce_many
from fzero.context.current_rank import has_no_values
from fzero.context.modes import holds, in_transform, is_recorded
from fzero.errors import LayoutError, MismatchError, PhaseError, explain
from fzero.machine.offload import to_device
from fzero.state import Buffers, Form, Placement, Setup, Slot, TrainState
from fzero.state.points import At, Builtin, Excludes, Flag
from fzero.state.train_state import ADVANTAGE, GivenCall, Weighed, Weight
from fzero.transforms.points import CallPart, Changed, Running
from fzero.transforms.prepare import Prepared, divided_by
from fzero.transforms.together import require_together

SLOT = "weights/total"
"""The slot of a state that has the sum of the weights of this rank's gradients since the update,
and how many of them are none: [2] fp64. A state without weights has none."""

FORM = Form(
    leaves="number",
    placement=Placement.PARTIAL,
    lifetime="update",
    elsewhere="sum",
    kind="window",
)
"""Its form: each rank has the weights of its own calls."""

_FIX = "give weight= to every call of an update, on every rank, or to none."


def _called(state: TrainState, call: GivenCall) -> TrainState:
    """Return a state that is about to get the gradient of a call, with a weight or without one.

    Raises `PhaseError` if it holds gradients of the other kind, and `LayoutError` for options that
    do not go with weights.
    """
    setup, before = state.setup, state.progress.backwards
    if call.weight is None:
        return _without_weight(state, call.name)
    if setup.reduction.weighted:
        return state
    if before:
        raise PhaseError(
            f"{call.name}: a weight, and the state holds gradients of {before} calls without one.",
            cause="weighted and unweighted calls between two updates.",
            fix=_FIX,
        )
    require_together((WEIGHTS,), "call", setup, f"{call.name}: ")
    return _weighted(state)


def _without_weight(state: TrainState, name: str) -> TrainState:
    """Return the state; raise `PhaseError` where gradients before this one have a weight."""
    if state.setup.reduction.weighted:
        raise PhaseError(
            f"{name}: no weight, and the state holds gradients of {state.progress.backwards} "
            "calls with one.",
            cause="weighted and unweighted calls between two updates.",
            fix=_FIX,
        )
    return state


def _weighted(state: TrainState) -> TrainState:
    return state.replace(setup=state.setup.with_weights(True))


def _facts(state: TrainState, at: At) -> list[str]:
    """Return how a backward is reduced: at an update, a rank may hold nothing."""
    weighted = state.setup.reduction.weighted
    return [f"gradients {'with' if weighted else 'without'} weights"] if at == "pass" else []


def by_some(have: int | str, lack: int | str) -> MismatchError:
    """Return the error of weights that some ranks have given, by their numbers or names."""
    first, second = (f"rank {one}" if isinstance(one, int) else one for one in (have, lack))
    return MismatchError(
        f"{first} holds gradients with weights, and {second} holds gradients without.",
        cause="weight= on some ranks only.",
        fix="give weight= to every call of an update, on every rank, or to none (0 is one).",
    )


def times_weight(gradient: Tensor, weighed: Weighed, dtype: torch.dtype) -> Tensor:
    """w g in `dtype`, or wider; zeros where w is 0, also of a gradient that is NaN.

    A weight that is differentiated has the derivative g at 0 too, where g is finite.
    """
    wide = gradient.to(torch.promote_types(gradient.dtype, dtype))
    weight, in_loss = weighed
    if in_loss:
        return wide
    if not isinstance(weight, Tensor):
        return wide * weight if weight else torch.zeros_like(wide)
    by = weight.to(
        device=wide.device, dtype=wide.dtype if not wide.is_complex() else wide.real.dtype
    )
    selected = torch.where((by == 0) & ~torch.isfinite(wide), torch.zeros_like(wide), wide)
    return selected * by


class _Weighing(CallPart):
    """Makes w g of the gradients of a backward that has a weight, and counts w."""

    def __init__(self, states: Sequence[TrainState], reducer: Any) -> None:
        self._weighed: Weighed | None = None

    def begins(self, number: int, state: TrainState, weighed: Weighed | None) -> TrainState:
        """A backward of this weight begins."""
        self._weighed = weighed
        return state

    def change(self, number: int) -> Changed | None:
        """Return what makes w g of a gradient, in the dtype in which gradients add up."""
        weighed = self._weighed
        if weighed is None:
            return None
        return lambda leaf, gradient, dtype: times_weight(gradient, weighed, dtype)

    def ends(self, number: int, state: TrainState) -> TrainState:
        """The state has the gradients: count their weight."""
        return counted(state, self._weighed and self._weighed.weight)

    def put_aside(self, number: int, state: TrainState) -> TrainState:
        """Raise `PhaseError` where those before have a weight."""
        return _without_weight(state, "a backward inside of a forward")


def counted_loss(loss: Tensor, weight: Weight | None) -> Tensor:
    """Return a loss as a check of its values sees it: 0 where the call has weight 0."""
    if weight is None:
        return loss
    loss = loss.detach()
    if isinstance(weight, Tensor):
        return torch.where(weight.detach().to(loss.device) == 0, torch.zeros_like(loss), loss)
    return loss if weight else torch.zeros_like(loss)


def counted(state: TrainState, weight: Weight | None) -> TrainState:
    """Return the state after a call of this weight."""
    if weight is None:
        return state
    own = torch.as_tensor(weight, dtype=torch.float64, device=state.device)
    own = torch.stack([own, (~(own.detach() >= 0) | own.detach().isinf()).to(own.dtype)])
    before = own_weight(state)
    slot = Slot(value=own if before is None else before + own, form=FORM)
    return state.replace(slots={**state.slots, SLOT: slot})


def own_weight(state: TrainState) -> Tensor | None:
    """Return the weights of this rank's calls; None if it made none with a weight."""
    slot = state.slots.get(SLOT)
    return None if slot is None else to_device(slot.value, state.device)


def total_weight(state: TrainState) -> Tensor | None:
    """The sum of the weights of all calls on all ranks: [] fp64; None without. A collective.

    NaN if one of them is negative, infinite or NaN.
    """
    if not state.setup.reduction.weighted:
        return None
    own = own_weight(state)
    setup = state.setup
    if own is None:  # this rank made no call
        own = torch.zeros(2, dtype=torch.float64, device=state.device)
    over = setup.axis.mesh or setup.axis  # the mean of a loss is over all of a mesh
    if setup.logical is not None:
        rows = own.expand(len(setup.carried(setup.axis.rank)), 2)
        both = fold_rows(gather_rows(rows, setup.axis, setup.logical.ranks))
        return torch.where(both[1] > 0, torch.nan, both[0])
    both = reduce_many([own], over, ordered=setup.reduction.ordered)[0]
    return torch.where(both[1] > 0, torch.nan, both[0])


def is_nothing(state: TrainState, total: Tensor | None, *, general: bool) -> bool:
    """Whether an update is to be skipped, for all its weights are 0. The host reads one number.

    general: whether it is differentiated, mapped or traced; such a one is never skipped so.

    Raises `LayoutError`, on every rank, if a weight is none. In a trace nothing can be read: there
    all that is divided by the total becomes NaN.
    """
    if total is None or has_no_values(total) or is_recorded([total]):
        return False
    value = None if general else float(total)
    if not holds(total == total) if value is None else math.isnan(value):
        raise _no_weight(state)
    return value == 0


def _no_weight(state: TrainState) -> LayoutError:
    own = own_weight(state)
    mine = 0 if own is None or in_transform() else int(own[..., 1].sum())
    return LayoutError(
        "a weight since the last update is negative, infinite or NaN, or 0 where the loss called a "
        f"collective and is not finite: {mine} of those of this rank are. Nothing was updated.",
        cause="advantages or returns as weights; or a mean over no tokens, total / count, whose "
        "NaN the backward of a collective takes to other ranks.",
        fix=f"{ADVANTAGE}. Divide by count.clamp(min=1). Throw these gradients away: "
        "engine.zero_grad(), or go on with the state from before them.",
    )


def divided(x: Tensor, total: Tensor | None) -> Tensor:
    """Return the mean of a sum of w g by its total weight, 0 / 0 being 0; x itself for None."""
    return x if total is None else x / divisor_of(total, x)


def divisor_of(total: Tensor, like: Tensor) -> Tensor:
    """The total weight as a divisor of gradients like this one; 1 for 0."""
    dtype = like.real.dtype if like.is_complex() else like.dtype
    return torch.where(total == 0, torch.ones_like(total), total).to(like.device, dtype)


def averaged(state: TrainState, x: Tensor) -> Tensor:
    """Return a sum of gradients, or its norm, as an update averages it.

    It is divided by the total weight after weighted calls, for which all ranks are asked.
    """
    total = total_weight(state)
    return x * share(state) if total is None else divided(x, total)


def unaveraged(state: TrainState, x: Tensor) -> Tensor:
    """Return what `averaged` makes x of."""
    total = total_weight(state)
    return x * (1 / share(state)) if total is None else x * divisor_of(total, x)


def share(state: TrainState) -> float:
    """What an update multiplies gradients by: 1 / backwards, if it averages."""
    return 1 / max(state.progress.backwards, 1) if state.setup.policy.averages else 1.0


def _decides(running: Running, means: Buffers) -> None:
    """Find the total weight: where it is 0 nothing is updated, and nothing else changes."""
    state = running.old
    running.total = total = total_weight(state)
    empty: Any = is_nothing(state, total, general=running.general)
    if running.general and total is not None:
        empty = (total == 0).to(state.device, torch.float32)
    running.leave_out(empty, says=_NOTHING)


def _units(running: Running, ready: Prepared) -> Prepared:
    """sum(w g) / sum(w)."""
    total = running.total
    assert total is not None
    return divided_by(running.old, ready, total, partial(divisor_of, total))


def _averages(running: Running, ready: Prepared) -> Prepared:
    """g / backwards."""
    return ready._replace(rest=ready.rest * share(running.old))


_NOTHING = explain(
    "the weights of all calls since the last update are 0 on every rank: the update is skipped. "
    "Parameters, optimizer, step and schedule are as they were.",
    cause="a batch in which every label is masked.",
    fix="leave such batches out, or go on: nothing was changed.",
)

_TWO_DIVISORS = "two ways to say what a sum of gradients is divided by, or a wire too small for it."


def _crosses_in_fp16(setup: Setup) -> str:
    crosses = setup.axis.size > 1
    wires = {setup.communication_dtype(i) for i in setup.layout.trainable}
    small = crosses and torch.float16 in wires
    return "a weight beside gradients that cross ranks in fp16." if small else ""


def _remembers(setup: Setup) -> str:
    held = f"a weight beside compress(gradients={setup.codec}), which has a memory."
    return held if setup.remembers else ""


def _averages_too(setup: Setup) -> str:
    return "a weight beside average_micro_batches=True." if setup.policy.averages else ""


def _sums(setup: Setup) -> str:
    return 'a weight beside reduce_op="sum".' if setup.reduction.reduce_op == "sum" else ""


_EXCLUDES = (
    Excludes(
        beside='reduce_op="sum"',
        when="call",
        seen=_sums,
        cause=_TWO_DIVISORS,
        fix="leave it out: weights say what a sum is divided by.",
    ),
    Excludes(
        beside="average_micro_batches=True",
        when="call",
        seen=_averages_too,
        cause=_TWO_DIVISORS,
        fix="leave it out: weights average exactly.",
    ),
    Excludes(
        beside="a codec of gradients with a memory",
        when="call",
        seen=_remembers,
        cause="what a sum of w g has lost counts by the sum of w of its own update, which is "
        "known at its end, and would be divided by that of the next.",
        fix="use a codec without a memory: fzero.codecs.bf16(), or memory=False.",
    ),
    Excludes(
        beside="gradients that cross ranks in fp16",
        when="call",
        seen=_crosses_in_fp16,
        cause=_TWO_DIVISORS,
        fix="use fzero.codecs.bf16(), or cast(torch.float32): w g may overflow.",
    ),
)

WEIGHTS = Builtin(
    name="weights",
    slots=(("total", FORM),),
    acts=lambda state: state.setup.reduction.weighted,
    facts=_facts,
    flag=Flag(of=lambda state: state.setup.reduction.weighted, unlike=by_some, heard=_weighted),
    called=_called,
    calls=_Weighing,
    decides=_decides,
    units=_units,
    excludes=_EXCLUDES,
)
"""Weights of calls, at the points of a step."""

AVERAGE = Builtin(
    name="average_micro_batches",
    acts=lambda state: state.setup.policy.averages,
    units=_averages,
)
"""The mean over backwards of an update, at the points of a step."""
