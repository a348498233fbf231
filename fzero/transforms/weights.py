"""Weighted gradients: sum(w g) / sum(w) over calls, micro-batches and ranks, divided once.

    call       w g in the accumulation dtype -> added up, or reduced as a sum; w -> `window.weight`
    update     total = sum over ranks of `window.weight` -> gradients / total -> the optimizer

Beside the sum of weights a rank counts how many of them are none: negative, infinite, NaN. Values
of tensors are read in the update alone, which reads the total anyway; it is NaN if there are any.

A state has weights from its first weighted call to its update (`Reduction.weighted`), and all calls
between are weighted. So no rank must know a count of tokens before it has computed its gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fzero.collectives import reduce_many
from fzero.context.here import has_no_values
from fzero.context.modes import holds, in_transform, is_recorded
from fzero.errors import LayoutError, PhaseError, explain
from fzero.state import Form, Placement, TrainState
from fzero.state.entry import Entry

WEIGHT = "weight"
"""The entry of a state that has the sum of the weights of this rank's gradients."""

Weight = float | Tensor
"""The weight of one call on one rank: a number of 0 or more, or a scalar tensor."""

_ADVANTAGE = (
    "A weight counts examples or tokens, and is 0 or more. What may be negative multiplies the "
    "loss: `loss = advantage * negative_log_likelihood` with weight=1, or the number of tokens"
)
_FIX = "give weight= to every call of an update, on every rank, or to none."


def require_weight(name: str, weight: Any) -> None:
    """Raise `LayoutError` for what is no weight. The values of a tensor are not read."""
    if isinstance(weight, Tensor):
        good = weight.dim() == 0 and not weight.is_complex() and weight.dtype != torch.bool
        seen = f"a tensor of {weight.dtype}, shape {[*weight.shape]}"
    else:
        number = isinstance(weight, int | float) and not isinstance(weight, bool)
        good = number and math.isfinite(weight) and weight >= 0
        seen = repr(weight)
    if not good:
        raise LayoutError(
            f"{name}: weight={seen}.",
            cause="weights of single examples or tokens, a mask, or a count that is negative.",
            fix="give the sum of the weights of this call: a finite number of 0 or more, or a "
            f"tensor without dims, e.g. weight=mask.sum(). {_ADVANTAGE}.",
        )


def with_weights(state: TrainState, name: str) -> TrainState:
    """Return a state that is about to get a weighted gradient.

    Raises `PhaseError` if it holds gradients without weights, and `LayoutError` for options that
    do not go with weights.
    """
    setup = state.setup
    if setup.reduction.weighted:
        return state
    if state.progress.backwards:
        raise PhaseError(
            f"{name}: a weight, and the state holds gradients of {state.progress.backwards} calls "
            "without one.",
            cause="weighted and unweighted calls between two updates.",
            fix=_FIX,
        )
    wires = {setup.communication_dtype(i) for i in setup.layout.trainable}
    crosses = setup.axis.size > 1
    if setup.reduction.reduce_op == "sum":
        raise _unfit(name, 'reduce_op="sum"', "leave it out: weights say what a sum is divided by")
    if setup.policy.averages:
        raise _unfit(name, "average_micro_batches=True", "leave it out: weights average exactly")
    if setup.remembers:
        raise LayoutError(
            f"{name}: a weight beside compress(gradients={setup.codec}), which has a memory.",
            cause="what a sum of w g has lost counts by the sum of w of its own update, which is "
            "known at its end, and would be divided by that of the next.",
            fix="use a codec without a memory: fzero.codecs.bf16(), or memory=False.",
        )
    if crosses and torch.float16 in wires:
        fix = "fzero.codecs.bf16(), or cast(torch.float32)"
        raise _unfit(name, "gradients that cross ranks in fp16", f"use {fix}: w g may overflow")
    return state.replace(setup=setup.with_weights(True))


def require_no_weights(state: TrainState, name: str) -> None:
    """Raise `PhaseError` for a gradient without a weight, where those before have one."""
    if state.setup.reduction.weighted:
        raise PhaseError(
            f"{name}: no weight, and the state holds gradients of {state.progress.backwards} "
            "calls with one.",
            cause="weighted and unweighted calls between two updates.",
            fix=_FIX,
        )


def _unfit(name: str, option: str, fix: str) -> LayoutError:
    return LayoutError(
        f"{name}: a weight beside {option}.",
        cause="two ways to say what a sum of gradients is divided by, or a wire too small for it.",
        fix=f"{fix}.",
    )


def times_weight(gradient: Tensor, weight: Weight, dtype: torch.dtype) -> Tensor:
    """w g in `dtype`, or wider; zeros where w is 0, also of a gradient that is NaN.

    A weight that is differentiated has the derivative g at 0 too, where g is finite.
    """
    wide = gradient.to(torch.promote_types(gradient.dtype, dtype))
    if not isinstance(weight, Tensor):
        return wide * weight if weight else torch.zeros_like(wide)
    by = weight.to(
        device=wide.device, dtype=wide.dtype if not wide.is_complex() else wide.real.dtype
    )
    selected = torch.where((by == 0) & ~torch.isfinite(wide), torch.zeros_like(wide), wide)
    return selected * by


def weighing(
    weight: Weight, look: Callable[[Tensor], object]
) -> Callable[[Tensor, torch.dtype], Tensor]:
    """Return what makes w g of a gradient, in a dtype; `look` sees the product."""

    def weighed(gradient: Tensor, dtype: torch.dtype) -> Tensor:
        product = times_weight(gradient, weight, dtype)
        look(product)
        return product

    return weighed


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
    before = state.window.weight
    total = own if before is None else before + own
    return state.replace(window=replace(state.window, weight=total))


def total_weight(state: TrainState) -> Tensor | None:
    """The sum of the weights of all calls on all ranks: [] fp64; None without. A collective.

    NaN if one of them is negative, infinite or NaN.
    """
    if not state.setup.reduction.weighted:
        return None
    own = state.window.weight
    if own is None:  # this rank made no call
        own = torch.zeros(2, dtype=torch.float64, device=state.device)
    both = reduce_many([own], state.setup.axis, ordered=state.setup.reduction.ordered)[0]
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
    own = state.window.weight
    mine = 0 if own is None or in_transform() else int(own[1])
    return LayoutError(
        "a weight since the last update is negative, infinite or NaN: "
        f"{mine} of those of this rank are. Nothing was updated.",
        cause="advantages or returns as weights, or a mean over no tokens.",
        fix=f"{_ADVANTAGE}. Throw these gradients away: engine.zero_grad(), or go on with the "
        "state from before them.",
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


NOTHING = explain(
    "the weights of all calls since the last update are 0 on every rank: the update is skipped. "
    "Parameters, optimizer, step and schedule are as they were.",
    cause="a batch in which every label is masked.",
    fix="leave such batches out, or go on: nothing was changed.",
)


def weight_entries(state: TrainState) -> list[Entry]:
    """Return the weights of a state's gradients as an entry, if they have some."""
    if state.window.weight is None:
        return []
    placed = {"placement": Placement.PARTIAL, "elsewhere": "sum"}
    form = Form(leaves="number", lifetime="update", **placed)
    return [Entry(name=WEIGHT, form=form, values={"": state.window.weight})]


def with_weight_entries(state: TrainState, entries: Sequence[Entry]) -> TrainState:
    """Return the state with these weights of its gradients."""
    (one,) = entries
    return state.replace(window=replace(state.window, weight=one.values[""]))
