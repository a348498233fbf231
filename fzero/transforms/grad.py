"""`grad_and_reduce`: differentiate a pure loss, and reduce its gradient as the stage says."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import optree
from torch import Tensor

from fzero.collectives import gather_many
from fzero.errors import AxisError, LayoutError, PhaseError, explain
from fzero.lazy import Gatherer, PeerFailedError, defer
from fzero.mesh import Axis, enter, leave
from fzero.packing import cut, seat_shape, unpack
from fzero.partition import assemble
from fzero.placeholder import Unit, placeholders
from fzero.state import NAMESPACE, Buffers, Keep, Layout, Placement, TrainState, progress, window
from fzero.transforms._differentiate import LossOf, Result, Source, by_autograd, by_func
from fzero.transforms._donate import check_alive, donates, take_over
from fzero.transforms._modes import in_transform, is_recorded, require_autograd, wants_graph
from fzero.transforms._reduce import accumulate, mean_over_ranks, reduce_gradients
from fzero.transforms._states import flatten_states


def grad_and_reduce(
    fn: Callable[..., Any], state: Any, *, has_aux: bool = False
) -> Callable[..., tuple[Any, Any]]:
    """Return g: g(*args) = (state', value), gradients' = gradients + mean_r dL_r/dp.

    L_r = fn(params, *args) on rank r, a scalar tensor. `value` is this rank's own L_r
    (`fzero.pmean` averages it); with `has_aux`, fn returns (loss, aux) and g returns
    (state', (value, aux)), the tensors of the pytree aux detached (one in an object that optree
    does not know is not seen, and stays as it is). Calls add up. While a coalescing window is open
    the gradient stays local; otherwise it is reduced now: all-reduced at stages 0 and 1,
    reduce-scattered at 2 and 3.

    state: a `TrainState`, or a pytree of them (several models under one loss): then fn is given
        the matching pytree of params, and the pytree of states comes back.

    Pure: `state` stays as it is, also when fn raises. Under a torch.func transform, or when fn's
    arguments require grad, the result can be differentiated again.

    Raises `LayoutError` for a loss that is not one floating number, `DonatedError` for a state
    that was used up.

    Source: Rajbhandari et al., "ZeRO", arXiv 1910.02054, sections 5 and 7.

    Example:
        >>> import torch, fzero
        >>> state = fzero.init({"w": torch.tensor([3.0])}, fzero.optim.sgd(0.1), stage=0)
        >>> state, loss = fzero.grad_and_reduce(lambda p, x: (p["w"] * x).sum(), state)(2.0)
        >>> loss, fzero.gradients(state)["w"]
        (tensor(6.), tensor([2.]))
    """
    if not callable(fn):
        raise LayoutError(
            explain(
                f"grad_and_reduce got a {type(fn).__name__} in the place of the loss.",
                cause="its arguments in another order, or a loss that was called already.",
                fix="pass the function: grad_and_reduce(loss, state)(batch).",
            )
        )
    states, treespec = flatten_states("grad_and_reduce", state)
    for one in states:
        check_alive(one)

    @functools.wraps(fn, updated=())
    def differentiated(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        def loss_of(params: list[Any]) -> Any:
            return fn(optree.tree_unflatten(treespec, params), *args, **kwargs)

        require_autograd("grad_and_reduce")
        for one in states:  # again: a call of this function may have used them up
            check_alive(one)
        token = enter(states[0].setup.axis)
        try:
            new, result = _differentiate(loss_of, states, (args, kwargs), has_aux=has_aux)
        finally:
            leave(token)
        value = (result.value, result.aux) if has_aux else result.value
        return optree.tree_unflatten(treespec, new), value

    return differentiated


def _differentiate(
    loss_of: LossOf, states: Sequence[TrainState], arguments: Any, *, has_aux: bool
) -> tuple[list[TrainState], Result]:
    tensors = [flat for state in states for flat in state.params.flats]
    given = optree.tree_leaves(arguments, namespace=NAMESPACE)
    if in_transform() or is_recorded(tensors) or wants_graph([*tensors, *given]):
        held = [_with_full(state) for state in states]
        result = by_func(loss_of, [_full_source(*one) for one in held], has_aux=has_aux)
        pairs = zip(held, result.grads, strict=True)
        return [_receive(state, grads) for (state, _), grads in pairs], result
    return _by_autograd(loss_of, states, has_aux=has_aux)


def _by_autograd(
    loss_of: LossOf, states: Sequence[TrainState], *, has_aux: bool
) -> tuple[list[TrainState], Result]:
    """The fast path. States that gather unit by unit share one gatherer."""
    lazy = [state for state in states if state.setup.gathers_by_unit]
    gatherer = Gatherer(
        [unit for state in lazy for unit in _units(state)],
        _one_axis(lazy or states[:1]),
        lockstep=all(state.setup.lockstep for state in lazy),
    )
    held, sources, firsts, first = [], [], [], 0
    for state in states:
        firsts.append(first)
        if state.setup.gathers_by_unit:
            held.append(state)
            sources.append(_lazy_source(state, gatherer, first))
            first += len(state.setup.layout.groups)
        else:
            state, fulls = _with_full(state)
            held.append(state)
            sources.append(_full_source(state, fulls, cut))
    result, served = _run(loss_of, held, sources, gatherer, has_aux=has_aux)
    result = _apart(result, held)
    new = [
        _receive_reduced(state, grads, served, first)
        if state.setup.gathers_by_unit and not state.window.is_open
        else _receive(state, grads, has_old=_adds_up_in_place(state), fresh=True)
        for state, grads, first in zip(held, result.grads, firsts, strict=True)
    ]
    return new, result


def _run(
    loss_of: LossOf,
    states: Sequence[TrainState],
    sources: Sequence[Source],
    gatherer: Gatherer,
    *,
    has_aux: bool,
) -> tuple[Result, dict[int, Tensor]]:
    """Forward and backward; then serve the other ranks. An error here ends them as well."""
    versions = _versions(states)

    def into() -> list[Tensor | None]:
        gatherer.begin_backward()
        if _versions(states) != versions:
            raise PhaseError(_WROTE)
        return [buffer for state in states for buffer in _own_sum(state)]

    try:
        result = by_autograd(loss_of, sources, has_aux=has_aux, into=into)
    except PeerFailedError:
        raise
    except (Exception, KeyboardInterrupt) as error:
        if gatherer.units:
            gatherer.abort()
        wrote = _versions(states) != versions or "_Cut" in str(error)
        if isinstance(error, RuntimeError) and wrote:
            raise PhaseError(_WROTE) from error  # autograd does not say whose views they are
        raise
    return result, gatherer.finish() if gatherer.units else {}


def _one_axis(states: Sequence[TrainState]) -> Axis:
    """The axis of states that gather as the loss runs: their ranks agree on what comes next."""
    first, *others = dict.fromkeys(state.setup.axis for state in states)
    if others:
        raise AxisError(
            explain(
                f"states of stage 3 on {first} and on {others[0]} under one loss.",
                cause="models that are sharded over other groups of ranks.",
                fix='make them with keep="backward", or at stages 0 to 2: those are gathered '
                "before the loss runs.",
            )
        )
    return first


def _versions(states: Sequence[TrainState]) -> list[int]:
    """How often each buffer was written to, as torch counts it."""
    flats = [x for state in states for x in state.window.gathered or state.params.flats]
    return [0 if flat.is_inference() else flat._version for flat in flats]


_WROTE = explain(
    "the loss wrote to a parameter in place; below stage 3 the state itself has changed.",
    cause="an in-place method (add_, copy_, ...) on a leaf, under no_grad or on a frozen one.",
    fix="clone the leaf first, and make the state anew: losses are pure.",
)


def _apart(result: Result, states: Sequence[TrainState]) -> Result:
    """Copy what the loss returned if it is a view of a state's buffer: that may be donated."""
    flats = [flat for state in states for flat in state.params.flats if flat.numel()]
    ours = {flat.untyped_storage().data_ptr() for flat in flats}

    def copied(x: Any) -> Any:
        shared = type(x) is Tensor and x.numel() and x.untyped_storage().data_ptr() in ours
        return x.clone() if shared else x

    aux: Any = optree.tree_map(copied, result.aux, namespace=NAMESPACE)
    return dataclasses.replace(result, value=copied(result.value), aux=aux)


def _adds_up_in_place(state: TrainState) -> bool:
    """Whether backward itself may add to the sum that this state holds."""
    if not donates(state) or state.setup.policy.grad_scale != 1.0:
        return False
    if state.window.is_open:
        return state.window.pending.held
    return state.setup.axis.size == 1 and state.gradients.held


def _own_sum(state: TrainState) -> list[Tensor | None]:
    """The buffers for backward to add to; taking them uses the old sum up."""
    layout = state.setup.layout
    if not _adds_up_in_place(state):
        return [None] * len(layout.trainable)
    old = take_over(state.window.pending if state.window.is_open else state.gradients)
    if state.setup.gathers_by_unit:
        return list(old.flats)
    pairs = zip(layout.trainable, old.flats, strict=True)
    return [flat.view(seat_shape(layout, i)) for i, flat in pairs]


def _with_full(state: TrainState) -> tuple[TrainState, Sequence[Tensor]]:
    """Return full flats of every group, and the state (which keeps them if asked to)."""
    setup = state.setup
    if setup.stage < 3:
        return state, state.params.flats
    if state.window.gathered:
        return state, state.window.gathered
    fulls = gather_many(state.params.flats, setup.axis)
    if setup.keep is Keep.WINDOW and state.window.is_open:
        state = state.replace(window=dataclasses.replace(state.window, gathered=tuple(fulls)))
    return state, fulls


def _full_source(
    state: TrainState,
    fulls: Sequence[Tensor],
    taken_apart: Callable[[Layout, int, Tensor], list[Tensor]] = unpack,
) -> Source:
    layout = state.setup.layout

    def build(seats: Sequence[Tensor]) -> Any:
        leaves: dict[int, Any] = {}
        seat_of = dict(zip(layout.trainable, seats, strict=True))
        for i, group in enumerate(layout.groups):
            apart = taken_apart if i in seat_of else unpack
            leaves.update(
                zip(group.leaves, apart(layout, i, seat_of.get(i, fulls[i])), strict=True)
            )
        return assemble(layout, leaves)

    seats = tuple(fulls[i].view(seat_shape(layout, i)) for i in layout.trainable)
    return Source(seats=seats, build=build)


def _units(state: TrainState) -> list[Unit]:
    setup, flats = state.setup, state.params.flats
    return [Unit(setup.layout, i, flat, setup.ordered) for i, flat in enumerate(flats)]


def _lazy_source(state: TrainState, gatherer: Gatherer, first: int) -> Source:
    """Seats are this rank's shards, or in a window stand-ins for the full flats."""
    layout, shards = state.setup.layout, state.params.flats
    reduces = not state.window.is_open

    def build(seats: Sequence[Tensor]) -> Any:
        leaves: dict[int, Any] = {}
        seat_of = dict(zip(layout.trainable, seats, strict=True))
        for i, group in enumerate(layout.groups):
            if i in seat_of:
                tensors = defer(seat_of[i], gatherer, first + i, reduces=reduces)
            else:
                tensors = placeholders(gatherer, first + i)
            leaves.update(zip(group.leaves, tensors, strict=True))
        return assemble(layout, leaves)

    if reduces:
        return Source(seats=tuple(shards[i] for i in layout.trainable), build=build)
    # A stand-in takes no memory: one zero, expanded.
    stand_ins = (shards[i].new_zeros(1).expand(layout.full_numel(i)) for i in layout.trainable)
    return Source(seats=tuple(stand_ins), build=build)


def _receive(
    state: TrainState, local: Sequence[Tensor], *, has_old: bool = False, fresh: bool = False
) -> TrainState:
    """Add this rank's own gradients: leave them in the open window, or reduce them now.

    `has_old`: backward has added them to what the state held; they replace it. `fresh`: nobody
    else has these tensors.
    """
    setup = state.setup
    counted = progress.saw_backward(state.progress, reduced=not state.window.is_open)
    local = _scaled(state, [g.reshape(-1) for g in local])
    if state.window.is_open:
        before = window.take(state.window, keep_gathered=True)[0] if has_old else state.window
        new = Buffers(flats=tuple(local), placement=Placement.PARTIAL)
        return state.replace(window=window.put(before, new), progress=counted)
    if has_old:
        state = state.replace(gradients=Buffers())
    state = accumulate(state, reduce_gradients(setup, local, setup.gradients, owned=fresh))
    return state.replace(progress=counted)


def _receive_reduced(
    state: TrainState, summed: Sequence[Tensor], served: dict[int, Tensor], first: int
) -> TrainState:
    """Add gradients that backward has reduce-scattered already, and those only others had."""
    groups = state.setup.layout.trainable
    summed = [
        g if (extra := served.get(first + i)) is None else g + extra
        for i, g in zip(groups, summed, strict=True)
    ]
    mean = mean_over_ranks(state.setup, _scaled(state, summed))
    state = accumulate(state, Buffers(flats=mean, placement=Placement.SHARDED))
    return state.replace(progress=progress.saw_backward(state.progress, reduced=True))


def _scaled(state: TrainState, grads: Sequence[Tensor]) -> Sequence[Tensor]:
    scale = state.setup.policy.grad_scale
    return grads if scale == 1.0 else [g * scale for g in grads]
