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

import optree
import torch
from torch import Tensor

from fzero.collectives import fold_rows, gather_rows, performer_of, reduce_many
from fzero.context.current_rank import has_no_values
from fzero.context.modes import holds, in_transform, is_recorded, needs_func
from fzero.errors import LayoutError, NonFiniteError, PhaseError, explain
from fzero.machine.offload import to_device
from fzero.ranks.mesh import world
from fzero.state import Buffers, Form, Placement, Slot, TrainState, progress
from fzero.state.points import At, Builtin, Excludes, Flag, Mean
from fzero.state.progress import NonFinite
from fzero.state.train_state import (
    ADVANTAGE,
    GivenCall,
    Weighed,
    Weight,
    weighted_by_some,
)
from fzero.transforms.leaf_slices import Prepared, divided_by
from fzero.transforms.observe import tell
from fzero.transforms.points import CallPart, Changed, Running
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


def divisor_of(total: Tensor, like: Tensor) -> Tensor:
    """The total weight as a divisor of gradients like this one; 1 for 0."""
    dtype = like.real.dtype if like.is_complex() else like.dtype
    return torch.where(total == 0, torch.ones_like(total), total).to(like.device, dtype)


def _by_weight(state: TrainState) -> Mean:
    """sum(w g) / sum(w), for which all ranks are asked once."""
    total = total_weight(state)
    assert total is not None
    return Mean(lambda x: x / divisor_of(total, x), lambda x: x * divisor_of(total, x))


def _share(state: TrainState) -> float:
    return 1 / max(state.progress.backwards, 1)


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


_NOTHING = explain(
    "the weights of all calls since the last update are 0 on every rank: the update is skipped. "
    "Parameters, optimizer, step and schedule are as they were.",
    cause="a batch in which every label is masked.",
    fix="leave such batches out, or go on: nothing was changed.",
)

_TWO_DIVISORS = "two ways to say what a sum of gradients is divided by, or a wire too small for it."


_EXCLUDES = (
    Excludes(
        beside='reduce_op="sum"',
        when="call",
        seen=lambda setup: (
            'a weight beside reduce_op="sum".' * (setup.reduction.reduce_op == "sum")
        ),
        cause=_TWO_DIVISORS,
        fix="leave it out: weights say what a sum is divided by.",
    ),
    Excludes(
        beside="average_micro_batches=True",
        when="call",
        seen=lambda setup: "a weight beside average_micro_batches=True." * setup.policy.averages,
        cause=_TWO_DIVISORS,
        fix="leave it out: weights average exactly.",
    ),
    Excludes(
        beside="a codec of gradients with a memory",
        when="call",
        seen=lambda setup: (
            f"a weight beside compress(gradients={setup.codec}), which has a memory."
            * setup.remembers
        ),
        cause="what a sum of w g has lost counts by the sum of w of its own update, which is "
        "known at its end, and would be divided by that of the next.",
        fix="use a codec without a memory: fzero.codecs.bf16(), or memory=False.",
    ),
    Excludes(
        beside="gradients that cross ranks in fp16",
        when="call",
        seen=lambda setup: (
            "a weight beside gradients that cross ranks in fp16."
            * (setup.axis.size > 1)
            * any(setup.communication_dtype(i) is torch.float16 for i in setup.layout.trainable)
        ),
        cause=_TWO_DIVISORS,
        fix="use fzero.codecs.bf16(), or cast(torch.float32): w g may overflow.",
    ),
)

WEIGHTS = Builtin(
    name="weights",
    slots=(("total", FORM),),
    acts=lambda state: state.setup.reduction.weighted,
    facts=_facts,
    flag=Flag(
        of=lambda state: state.setup.reduction.weighted, unlike=weighted_by_some, heard=_weighted
    ),
    called=_called,
    calls=_Weighing,
    decides=_decides,
    units=_units,
    mean=_by_weight,
    excludes=_EXCLUDES,
)
"""Weights of calls, at the points of a step."""

AVERAGE = Builtin(
    name="average_micro_batches",
    acts=lambda state: state.setup.policy.averages,
    units=lambda running, ready: ready._replace(rest=ready.rest * _share(running.old)),
    mean=lambda state: Mean(lambda x: x * _share(state), lambda x: x * (1 / _share(state))),
)
"""The mean over backwards of an update, at the points of a step."""


# Find non-finite losses and gradients on each rank; report them on all ranks at the update.
#
#     a gradient is made     its smallest and its largest element stay on the device
#     the backward is over   the host reads them, once; `state.progress` has the first that is bad
#     the update             each rank says whether it has one, in a round that is made anyway; if
#                            any has, ranks tell each other which, and all raise the same
#
# Gradients are looked at before they are reduced: afterwards every rank has the NaN of any.


class FiniteCheck(CallPart):
    """What one backward after another brings to some states, if their policy is to look at it.

    The gradients of a state with a loss scale are not looked at: there an overflow is a step that
    is skipped, and nothing to raise.
    """

    looks = True

    def __init__(self, states: Sequence[TrainState]) -> None:
        self._wanted = [state.setup.policy.check_finite for state in states]
        self._whole = [
            wanted and state.scale is None
            for wanted, state in zip(self._wanted, states, strict=True)
        ]
        self._observed = {i: s for i, s in enumerate(states) if s.setup.policy.observer}
        self._losses: list[Tensor] = []  # [2] each: smallest, largest
        self._gradients: list[tuple[int, int, Tensor]] = []  # (state, leaf, [2]) as they were made
        self._found: list[NonFinite | None] = []

    @classmethod
    def of(cls, states: Sequence[TrainState], reducer: Any = None) -> FiniteCheck:
        """Return the check of some states.

        reducer: None under a transform of torch.func, where no value can be read.
        """
        flats = [flat for state in states for flat in state.params.flats]
        wanted = any(state.setup.policy.check_finite for state in states)
        if reducer is None and wanted and (in_transform() or is_recorded(flats)):
            raise PhaseError(_UNREADABLE.seen(states), cause=_UNREADABLE.cause, fix=_UNREADABLE.fix)
        return cls(states)

    def loss(self, x: Any, weight: Weight | None = None) -> None:
        """A loss is about to be differentiated, without its scale. One of weight 0 may be NaN."""
        if isinstance(x, Tensor):
            x = counted_loss(x, weight)
        for state in self._observed.values():
            tell("loss", state, (x, weight))
        if any(self._wanted) and isinstance(x, Tensor) and x.is_floating_point() and x.numel():
            self._losses.append(_bounds(x))

    def gradient(self, state: int, leaf: int, gradient: Tensor) -> Tensor:
        """The backward has made the gradient of one leaf of a state; return what is reduced."""
        if state in self._observed:
            told = leaf, gradient.detach()
            gradient = tell("gradient", self._observed[state], told, default=gradient)
        if self._whole[state] and gradient.numel():
            self._gradients.append((state, leaf, _bounds(gradient)))
        return gradient

    def change(self, number: int) -> Changed | None:
        """Return what looks at each gradient of a state. Keeps none: the reducer frees them."""
        if not (self._whole[number] or number in self._observed):
            return None
        return lambda leaf, gradient, dtype: self.gradient(number, leaf, gradient)

    def settles(self) -> None:
        """The backward is over. The host waits."""
        self._found = self.taken()

    def ends(self, number: int, state: TrainState) -> TrainState:
        """Return the state that knows what the backward, which is not counted yet, has brought."""
        found = self._found[number]
        if found is None:
            return state
        return state.replace(progress=progress.saw_nonfinite(state.progress, found))

    def drop_losses(self) -> None:
        """Forget losses whose backward is over."""
        self._losses.clear()

    def drop(self) -> None:
        """The backward raised."""
        self._losses, self._gradients = [], []

    def taken(self) -> list[NonFinite | None]:
        """Return, and forget, the first for each state that is not finite. The host waits."""
        losses, made = self._losses, self._gradients
        self.drop()
        bounds = [*losses, *(x for _, _, x in made)]
        alike: dict[Any, list[int]] = {}
        for i, x in enumerate(bounds):
            if not has_no_values(x):  # a plan goes on
                alike.setdefault((x.dtype, x.device), []).append(i)
        bad = set[int]()
        for some in alike.values():  # one read for each dtype and device
            read = torch.stack([bounds[i] for i in some]).tolist()
            bad |= {
                i for i, pair in zip(some, read, strict=True) if not all(map(math.isfinite, pair))
            }
        bad_loss = any(i in bad for i in range(len(losses)))
        first: dict[int, tuple[int, int]] = {}
        for place, (state, leaf, _) in enumerate(made):
            if place + len(losses) in bad:
                first.setdefault(state, (place, leaf))
        found: list[NonFinite | None] = []
        for state, wanted in enumerate(self._wanted):
            place, leaf = first.get(state, (len(made), None))
            what = "loss" if bad_loss else "gradient"
            is_bad = wanted and (bad_loss or leaf is not None)
            found.append(NonFinite(what=what, leaf=leaf, place=place) if is_bad else None)
        return found


def _error_of(
    states: Sequence[TrainState],
    treespec: optree.PyTreeSpec | None,
    bad: Sequence[TrainState],
) -> NonFiniteError | None:
    """Return the error for the first that is not finite on any rank. An exchange.

    treespec: of the tree that the states are in; None for one state. bad: the states of which a
    rank says so.
    """
    keys: Any = [()] if treespec is None else treespec.paths()
    noted = [
        (found.backward, found.place, found, state, key)
        for state, key in zip(states, keys, strict=True)
        if (found := state.progress.nonfinite) and not state.setup.policy.defer_update
    ]
    first: NonFiniteError | None = None
    if noted:  # of this rank's backwards
        *_, found, state, key = min(noted, key=lambda one: one[:2])
        path = None if found.leaf is None else state.setup.layout.leaves[found.leaf].path
        if path is not None and key:  # a model that is one tensor has the path "."
            path = ".".join([*map(str, key), *([] if path == "." else [path])])
        first = NonFiniteError(int(state.step), world().rank, found.what, path, found.backward)
    for axis, state in {state.setup.axis: state for state in bad}.items():
        performer = None if needs_func(state.params.flats) else performer_of(axis)
        told = [first] if performer is None else performer.tell(first)
        if errors := [error for error in told if error is not None]:
            ranks = sorted({rank for error in errors for rank in error.ranks})
            one = min(errors, key=lambda error: (error.backward, error.rank))
            first = NonFiniteError(one.step, one.rank, one.what, one.path, one.backward, ranks)
    return first


def _bounds(x: Tensor) -> Tensor:
    """The smallest and the largest element, [2]: NaN if one is. Nothing is read by the host."""
    x = x.detach()
    if x.is_complex():
        x = torch.view_as_real(x.resolve_conj())
    return torch.stack(torch.aminmax(x))


_UNREADABLE = Excludes(
    beside="a transform of torch.func, or a trace, around the step",
    when="graph",
    seen=lambda _: "check_finite: grad_and_reduce inside a torch.func transform or a trace.",
    cause="a transform around a step that checks; no value can be read in there.",
    fix="leave check_finite out there, and look at what comes out of the transform.",
)

CHECK = Builtin(
    name="check_finite",
    acts=lambda state: state.setup.policy.check_finite or state.setup.policy.observer is not None,
    flag=Flag(of=lambda state: state.progress.nonfinite is not None, raises=_error_of),
    calls=FiniteCheck.of,
    excludes=(_UNREADABLE,),
)
"""A look at losses and gradients, for `check_finite` and observers."""
