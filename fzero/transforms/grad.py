"""`grad_and_reduce`: differentiate a pure loss, and reduce its gradient as the stage says."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, NamedTuple

import optree
import torch
from torch import Tensor

from fzero.collectives import gather_many, performer_of
from fzero.context.ambient import computed_in
from fzero.context.modes import explains_inference, needs_func, require_autograd, wants_graph
from fzero.errors import AxisError, LayoutError, PhaseError, explain
from fzero.errors.check import called_as
from fzero.machine.compiled import DISABLED_FRAMES
from fzero.machine.offload import to_device
from fzero.machine.packing import input_shape, unpack_groups
from fzero.machine.partition import assemble
from fzero.ranks.mesh import running_on
from fzero.state import NAMESPACE, TrainState
from fzero.transforms._differentiate import (
    LossOf,
    Result,
    Source,
    by_func,
    copy_views,
    detached,
    loss_and_aux,
)
from fzero.transforms._finite import found_at_once, require_values, with_found
from fzero.transforms._passes import leaves_in_pass, passes_of
from fzero.transforms._reading import after_reading, as_read, learning
from fzero.transforms.agree import agree
from fzero.transforms.announcement import functional
from fzero.transforms.donation import check_alive
from fzero.transforms.pass_events import Pass
from fzero.transforms.pipeline import P, R
from fzero.transforms.receive import mean_of, not_differentiable, receive
from fzero.transforms.scaled import scales_of, with_value
from fzero.transforms.states import S, flatten_states
from fzero.transforms.weights import (
    Weight,
    counted,
    require_no_weights,
    require_weight,
    times_weight,
    with_weights,
)


@called_as("grad_and_reduce(loss, state)(batch)")
def grad_and_reduce(
    fn: Callable[Concatenate[Any, P], R],
    state: S,
    *,
    has_aux: bool = False,
    wrt: Any = None,
    weight: Weight | None = None,
) -> Callable[P, tuple[S, R]]:
    """Return g: g(*args) = (state', value), gradients' = gradients + mean_r dL_r/dp.

    L_r = fn(params, *args) on rank r, a scalar tensor. `value` is this rank's own L_r
    (`fzero.pmean` averages it); with `has_aux`, fn returns (loss, aux) and g returns
    (state', (value, aux)), the tensors of the pytree aux detached (one in an object that optree
    does not know is not seen, and stays as it is). Calls add up. While a coalescing window is open
    the gradient stays local; otherwise it is reduced beside the backward that makes it:
    all-reduced at stage 0, reduce-scattered at stages 1 to 3. A leaf that fn does not use has a
    gradient of zero, which the update steps, as in JAX.

    state: a `TrainState`, or a pytree of them (several models under one loss): then fn is given
        the matching pytree of params, and the pytree of states comes back. With a loss scale
        (`fzero.scale_loss`) the state holds gradients times the scale; `value` is without it.

    wrt: which states of a pytree get gradients: a key of it (`wrt="d"`), several in a list, or a
        pytree of bools in its structure; None for all of them. The others are only read: nothing
        of them is reduced, and they come back as they were.

    weight: w of this call on this rank, a number of 0 or more or a scalar tensor, such as its count
        of tokens. Then gradients of the update are sum(w g) / sum(w) over all calls and ranks, the
        exact mean whatever the split: gradients add up as w g in the accumulation dtype, fp32 or
        wider, and are divided once. A call of weight 0 adds zeros, also where its loss is NaN. All
        calls of an update have one, on every rank, or none.

    Pure: `state` stays as it is, also when fn raises. Under a torch.func transform, or when fn's
    arguments require grad, the result can be differentiated again. Other leaves that require grad
    (a module that the loss closes over) get their `.grad` as by loss.backward().

    Raises `LayoutError` for a loss that is not one floating number, `DonatedError` for a state
    that was used up, `AxisError` for states of stage 3 on other ranks, `MismatchError` on every
    rank if the ranks make calls, or reduce gradients, that do not go together.

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
            f"grad_and_reduce got a {type(fn).__name__} in the place of the loss.",
            cause="its arguments in another order, or a loss that was called already.",
            fix="pass the function: grad_and_reduce(loss, state)(batch).",
        )
    states, treespec = flatten_states("grad_and_reduce", state)
    for one in states:
        check_alive(one)
    learns = learning(wrt, state, states)
    if weight is not None:
        require_weight("grad_and_reduce", weight)

    @torch._disable_dynamo
    @functools.wraps(fn, updated=())
    def differentiated(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        def loss_of(params: list[Any]) -> Any:
            with computed_in(states[0].setup.policy.autocast, states[0].device):
                return fn(optree.tree_unflatten(treespec, params), *args, **kwargs)

        require_autograd("grad_and_reduce")
        for one in states:  # again: a call of this function may have used them up
            check_alive(one)
        with running_on(states[0].setup.axis), explains_inference((args, kwargs)):
            pairs = [*zip(states, learns, strict=True)]
            known = [_begun(one, weight) if by else as_read(one) for one, by in pairs]
            call = _Call(loss_of, has_aux=has_aux, weight=weight)
            new, result = _differentiate(call, known, (args, kwargs))
        new = [
            made if by else after_reading(one, made)
            for (one, by), made in zip(pairs, new, strict=True)
        ]
        value = (result.value, result.aux) if has_aux else result.value
        return optree.tree_unflatten(treespec, new), value

    return differentiated


class _Call(NamedTuple):
    """One gradient call: the loss of its parameters, and how it is counted."""

    loss_of: LossOf
    has_aux: bool
    weight: Weight | None

    def looked_at(self, loss: Tensor) -> Tensor:
        """The loss as a check of its values sees it: one of weight 0 is not counted."""
        if self.weight is None:
            return loss
        return times_weight(loss.detach(), self.weight, loss.dtype)


def _begun(state: TrainState, weight: Weight | None) -> TrainState:
    """Return a state as the pass of a call takes it."""
    if weight is None:
        require_no_weights(state, "grad_and_reduce")
        return with_value(state)
    return with_weights(with_value(state), "grad_and_reduce")


def _differentiate(
    call: _Call, states: Sequence[TrainState], arguments: Any
) -> tuple[list[TrainState], Result]:
    tensors = [flat for state in states for flat in state.params.flats]
    given = [*optree.tree_leaves(arguments, namespace=NAMESPACE), call.weight]
    if needs_func(tensors) or wants_graph([*tensors, *given]):
        return _by_func(call, states)
    return _by_autograd(call, states)


# Ordinary autograd: gathers and reductions run beside it.


def _by_autograd(call: _Call, states: Sequence[TrainState]) -> tuple[list[TrainState], Result]:
    _require_one_gathers(states)
    passes, places = passes_of(states, functional)
    flats = [x for state in states for x in state.window.gathered or state.params.flats]
    versions = _versions(flats)
    try:
        for one in passes:
            one.begin_forward()
        with torch.enable_grad():
            made = [_leaves(passes[number], position) for number, position in places]
            loss, aux = loss_and_aux(
                call.loss_of([params for params, _ in made]), has_aux=call.has_aux
            )
        for one in passes:
            one.finite.loss(call.looked_at(loss))
            one.end_forward()
            one.begin_backward(weight=call.weight)
        scale, rest = scales_of(states)
        for (_, leaves), (number, position), factor in zip(made, places, rest, strict=True):
            _listen(leaves, passes[number], position, factor)
        if _versions(flats) != versions:
            raise PhaseError(_WROTE)
        learning = any(leaves for _, leaves in made)
        if loss.requires_grad:
            torch.autograd.backward(loss, None if scale is None else scale.to(loss))
            if learning and not any(one.reducer.received for one in passes):
                warnings.warn(_BY_NOTHING, UserWarning, stacklevel=4 + DISABLED_FRAMES)
        elif learning:
            warnings.warn(_DETACHED, UserWarning, stacklevel=4 + DISABLED_FRAMES)
        aux = optree.tree_map(detached, aux, namespace=NAMESPACE)
        result = _apart(Result(grads=(), value=detached(loss), aux=aux), states)
        new = [one.finish() for one in passes]
    except BaseException as error:
        for one in passes:
            one.fail(error)
        if isinstance(error, RuntimeError) and _versions(flats) != versions:
            raise PhaseError(_WROTE) from error
        raise
    finally:
        for one in passes:
            one.close()
    return [new[number][position] for number, position in places], result


def _require_one_gathers(states: Sequence[TrainState]) -> None:
    gathering = [one.setup.axis for one in states if one.setup.gathers_by_unit]
    if len(set(gathering)) < 2:
        return
    by_ranks = {performer_of(axis): axis for axis in reversed(gathering)}
    if len(by_ranks) > 1:
        last, first, *_ = by_ranks.values()
        raise AxisError(
            f"states of stage 3 on {first} and on {last} under one loss.",
            cause="models that are sharded over other groups of ranks.",
            fix="make all but one of them at stages 0 to 2, or on the same mesh.",
        )


def _leaves(one: Pass, number: int) -> tuple[Any, dict[int, Tensor]]:
    """The pytree of one state for the loss, and by index its leaves to differentiate by."""
    layout, by_leaf = one.states[number].setup.layout, leaves_in_pass(one, number)
    learning = {
        index: by_leaf[index].requires_grad_()
        for index, leaf in enumerate(layout.leaves)
        if leaf.trainable
    }
    return assemble(layout, by_leaf), learning


def _listen(
    leaves: dict[int, Tensor], one: Pass, number: int, factor: Tensor | None = None
) -> None:
    """Hand the gradients of leaves to the pass from now on, times `factor`.

    Those that a backward inside of the loss has left on the leaves are dropped.
    """
    for index, leaf in leaves.items():
        leaf.grad = None
        if factor is not None:
            leaf.register_hook(lambda g: g * factor.to(g.dtype))
        leaf.register_post_accumulate_grad_hook(one.hook(number, index))


def _versions(flats: Sequence[Tensor]) -> list[int]:
    return [0 if flat.is_inference() else flat._version for flat in flats]


_WROTE = explain(
    "the loss wrote to a parameter in place; below stage 3 the state itself has changed.",
    cause="an in-place method (add_, copy_, ...) on a leaf, under no_grad or on a frozen one.",
    fix="clone the leaf first, and make the state anew: losses are pure.",
)

_BY_NOTHING = explain(
    "the loss requires grad, and by no parameter of the state: its gradient is zero.",
    cause="a loss that calls the module itself, model(x), in the place of apply(params, x).",
    fix="use the `params` that the loss is given.",
)

_DETACHED = explain(
    "the loss requires no grad: its gradient is zero for every parameter.",
    cause="a loss that was detached, computed under no_grad, or made of numbers only.",
    fix="return the loss as the `params` that it is given made it; loss.detach() belongs outside.",
)


def _apart(result: Result, states: Sequence[TrainState]) -> Result:
    """Copy what the loss returned if it is a view of a state's buffer: that may be donated."""
    value, aux = copy_views((result.value, result.aux), states)
    return dataclasses.replace(result, value=value, aux=aux)


# torch.func: everything is gathered first, and the result can be differentiated again.


def _by_func(call: _Call, states: Sequence[TrainState]) -> tuple[list[TrainState], Result]:
    require_values(states)
    # Ranks on which nothing requires grad announce a pass instead: then all of them raise.
    crosses = [one for one in states if one.setup.stage == 3 or not one.window.is_open]
    agree("grad_and_reduce of arguments that require grad", crosses)
    held = [with_full(state) for state in states]
    scale, rest = scales_of(states)
    fulls = [flat for _, some in held for flat in some]
    versions = _versions(fulls)
    try:
        result = by_func(
            call.loss_of, [_source(*one) for one in held], has_aux=call.has_aux, scale=scale
        )
    except RuntimeError as error:
        if _versions(fulls) != versions:
            raise PhaseError(_WROTE) from error
        raise
    if _versions(fulls) != versions:
        raise PhaseError(_WROTE)
    grads = [
        _times_weight(state, some, call.weight)
        for (state, _), some in zip(held, result.grads, strict=True)
    ]
    seen = Result(grads=tuple(map(tuple, grads)), value=call.looked_at(result.value), aux=None)
    made = zip(held, found_at_once(states, seen), grads, rest, strict=True)
    new = [_received(with_found(one, bad), some, by) for (one, _), bad, some, by in made]
    return [counted(state, call.weight) for state in new], result


def _times_weight(
    state: TrainState, grads: Sequence[Tensor], weight: Weight | None
) -> Sequence[Tensor]:
    if weight is None:
        return grads
    dtypes = map(state.setup.accumulate_dtype, state.setup.layout.trainable)
    return [times_weight(g, weight, dtype) for g, dtype in zip(grads, dtypes, strict=True)]


def with_full(state: TrainState) -> tuple[TrainState, Sequence[Tensor]]:
    """Gather the full flats of every group; return the state, which may keep them, and them."""
    setup, layout = state.setup, state.setup.layout
    if setup.stage < 3:
        return state, state.params.flats
    if any(group.quantized for group in layout.groups):
        raise not_differentiable("quantized_weights")
    fulls = state.window.gathered
    if not fulls or any(flat.numel() < layout.full_numel(i) for i, flat in enumerate(fulls)):
        pairs = zip(layout.groups, state.params.flats, strict=True)
        device = state.device
        sent = [to_device(flat, device, group.communication_dtype) for group, flat in pairs]
        fulls = tuple(gather_many(sent, setup.axis.shards))
        if setup.gathering.reshard_after_forward == "window" and state.window.is_open:
            state = state.replace(window=dataclasses.replace(state.window, gathered=fulls))
    pairs = zip(layout.groups, fulls, strict=True)
    return state, [flat.to(group.dtype) for group, flat in pairs]


def _source(state: TrainState, fulls: Sequence[Tensor]) -> Source:
    layout = state.setup.layout

    def build(inputs: Sequence[Tensor]) -> Any:
        flats = dict(enumerate(fulls)) | dict(zip(layout.trainable, inputs, strict=True))
        return assemble(layout, unpack_groups(layout, flats))

    inputs = tuple(fulls[i].view(input_shape(layout, i)) for i in layout.trainable)
    return Source(inputs=inputs, build=build)


def _received(
    state: TrainState, grads: Sequence[Tensor], factor: Tensor | None = None
) -> TrainState:
    """Add this rank's own gradients: leave them in the open window, or reduce them now."""
    setup = state.setup
    local = [
        g.reshape(-1).to(setup.accumulate_dtype(i))
        for i, g in zip(setup.layout.trainable, grads, strict=True)
    ]
    if factor is not None:
        local = [g * factor.to(g.dtype) for g in local]
    return receive(state, local if state.window.is_open else mean_of(setup, local))
