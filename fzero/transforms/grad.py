"""`grad_and_reduce`: differentiate a pure loss, and reduce its gradient as the stage says."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Concatenate, overload

import optree

from fzero.context.modes import (
    computed_in,
    explains_inference,
    needs_func,
    require_autograd,
    wants_graph,
)
from fzero.errors import LayoutError
from fzero.errors.check import called_as, require_function_of_params
from fzero.machine.placeholder import MADE_FRAMES, without_dynamo
from fzero.ranks.mesh import running_on
from fzero.state import NAMESPACE, Buffers, Layout, TrainState
from fzero.state.progress import CLOSED
from fzero.state.train_state import GivenCall, Weight
from fzero.transforms.accumulate import InAxes
from fzero.transforms.autograd import (
    GradientCall,
    Result,
    detached,
    grad_by_func,
    loss_and_aux,
)
from fzero.transforms.backward_pass import (
    functional_of,
    raises_together,
)
from fzero.transforms.donation import check_alive, returned
from fzero.transforms.forward import Forward, learns_nothing
from fzero.transforms.logical_rank import require_own_backward
from fzero.transforms.logical_ranks import (
    EachWeight,
    call_given,
    call_logical_ranks,
    each_call,
    setup_of,
)
from fzero.transforms.models import (
    ParamsT,
    S,
    axes_of_loss,
    call_of_states,
    flatten_states,
    is_state,
)
from fzero.transforms.pipeline import P, R
from fzero.transforms.recipe import begun, called


@overload
def grad_and_reduce(
    fn: Callable[Concatenate[ParamsT, P], R],
    state: TrainState[ParamsT],
    *,
    has_aux: bool = False,
    wrt: Any = None,
    weight: EachWeight | None = None,
    in_axes: InAxes = 0,
    sizes: Sequence[int] | None = None,
) -> Callable[P, tuple[TrainState[ParamsT], R]]: ...
@overload
def grad_and_reduce(
    fn: Callable[Concatenate[Any, P], R],
    state: S,
    *,
    has_aux: bool = False,
    wrt: Any = None,
    weight: EachWeight | None = None,
    in_axes: InAxes = 0,
    sizes: Sequence[int] | None = None,
) -> Callable[P, tuple[S, R]]: ...
@called_as("grad_and_reduce(loss, state)(batch)")
def grad_and_reduce(
    fn: Callable[Concatenate[Any, P], R],
    state: S,
    *,
    has_aux: bool = False,
    wrt: Any = None,
    weight: EachWeight | None = None,
    in_axes: InAxes = 0,
    sizes: Sequence[int] | None = None,
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
        calls of an update have one, on every rank, or none. A loss that calls collectives is
        multiplied by w itself, for its gradient crosses to ranks that have other weights; there a
        loss of weight 0 must be finite.

    in_axes, sizes: of a state with `logical_ranks=`, of which a rank carries several. The call is
        then made for each of them, one after another, with its part of the arguments: `in_axes`
        says which dim of each is cut, as in `torch.func.vmap` and `fzero.accumulate`, and `sizes`
        how many rows each gets, default equal parts. The value is the mean over all logical ranks,
        by their weights if they have some, equal on all ranks; the tensors of aux have a first dim
        of this rank's. `weight` is a sequence of one for each of this rank's, or a function of its
        part, weight(*args). Where fn calls a collective, those of this rank run at once, as virtual
        ranks, with the bits of a rank for each: all of their activations, and at stage 3 whole
        parameters, are then in memory, and a first forward is given up where it meets the
        collective.

    Pure: `state` stays as it is, also when fn raises. Under a torch.func transform, or when fn's
    arguments require grad, the result can be differentiated again. Other leaves that require grad
    (another module, which the loss closes over) get their `.grad` as by loss.backward(), times the
    loss scale if there is one; those that the state was made of raise `PhaseError`, for their part
    of the gradient would be lost.

    Raises `LayoutError` for a loss that is not one floating number, and for one by which nothing
    learns (`no_optimizer()`, all leaves frozen), `DonatedError` for a state that was used up,
    `AxisError` for states of stage 3 on other ranks, or of two meshes, `MismatchError` on every
    rank if the ranks make calls, or reduce gradients, that do not go together.

    Source: Rajbhandari et al., "ZeRO", arXiv 1910.02054, sections 5 and 7.

    Example:
        >>> import torch, fzero
        >>> state = fzero.init({"w": torch.tensor([3.0])}, fzero.optim.sgd(0.1), stage=0)
        >>> state, loss = fzero.grad_and_reduce(lambda p, x: (p["w"] * x).sum(), state)(2.0)
        >>> loss, fzero.gradients(state)["w"]
        (tensor(6.), tensor([2.]))
    """
    usage = "grad_and_reduce(loss, state)(batch)"
    require_function_of_params("grad_and_reduce", fn, usage, what="loss")
    loss: Any = fn
    states, treespec = flatten_states("grad_and_reduce", state)
    learns = [True] * len(states) if wrt is None else learning(wrt, state, states)
    name = call_of_states("grad_and_reduce", treespec, learns)
    over = axes_of_loss(states, [one.setup.axis for one in states])
    setup = next(one.setup for one, by in zip(states, learns, strict=True) if by)
    is_logical = any(one.setup.logical is not None for one in states)
    if is_logical:
        setup = setup_of([one for one, by in zip(states, learns, strict=True) if by])
    if is_logical or sizes is not None or in_axes != 0:
        with raises_together(setup.axis if is_logical else None):
            given = call_given("grad_and_reduce", setup, weight, in_axes, sizes)
    else:
        given: Any = GivenCall("grad_and_reduce", weight)  # type: ignore[arg-type]

    def differentiate(
        states: Sequence[TrainState], args: Any, kwargs: Any, weight: Weight | None
    ) -> tuple[list[TrainState], Result]:
        def loss_of(params: list[Any]) -> Any:
            with computed_in(states[0].setup.policy.autocast, states[0].device):
                return loss(optree.tree_unflatten(treespec, params), *args, **kwargs)

        call = GradientCall(loss_of, has_aux=has_aux, weight=weight, name=name)
        flats = [flat for one in states for flat in one.params.flats]
        arguments: Any = args, kwargs
        leaves = optree.tree_leaves(arguments, namespace=NAMESPACE)
        if needs_func(flats) or wants_graph([*flats, *leaves, weight]):
            return grad_by_func(call, states)
        return _by_autograd(call, states)

    @without_dynamo
    @functools.wraps(fn, updated=())
    def differentiated(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        require_autograd("grad_and_reduce")
        for one in states:
            check_alive(one)
        pairs = [*zip(states, learns, strict=True)]
        with running_on(*over), explains_inference((args, kwargs)):
            known = [called(begun(one), given) if by else as_read(one) for one, by in pairs]
            if setup.logical is None:
                new, result = differentiate(known, args, kwargs, given.weight)
            else:
                with raises_together(setup.axis):
                    require_own_backward(known, (args, kwargs, weight))
                    how = weight, in_axes, sizes
                    each = each_call("grad_and_reduce", fn, setup, (args, kwargs), *how)

                def of_logical_rank(place: int, states: Sequence[TrainState]) -> Any:
                    return differentiate(states, *each[place])

                by_rank = [by for *_, by in each]
                new, result = call_logical_ranks(of_logical_rank, known, learns, by_rank)
        new = [
            made if by else after_reading(one, made)
            for (one, by), made in zip(pairs, new, strict=True)
        ]
        returned(new, gradients=True, name="grad_and_reduce", given=states)
        value = (result.value, result.aux) if has_aux else result.value
        return optree.tree_unflatten(treespec, new), value

    return differentiated


# Ordinary autograd: gathers and reductions run beside it.


def _by_autograd(
    call: GradientCall, states: Sequence[TrainState]
) -> tuple[list[TrainState], Result]:
    run = Forward(states, functional_of(states, call.name))
    with run.in_step():
        loss, aux = run.forward(
            lambda params: loss_and_aux(call.loss_of(params), has_aux=call.has_aux)
        )
        if text := run.backward(loss, call.weight):
            warnings.warn(text, UserWarning, stacklevel=4 + MADE_FRAMES)
        value, aux = detached((loss, aux), states)
        return run.finish(), Result(grads=(), value=value, aux=aux)


# States that a loss only reads: nothing of them is differentiated, reduced or counted.


def learning(wrt: Any, tree: Any, states: Sequence[TrainState]) -> list[bool]:
    """Whether each of `states`, which are those of `tree`, is differentiated by.

    wrt: a key of the tree, or several; or a pytree of bools in its structure.
    Raises `LayoutError` for what names no state.
    """
    paths = optree.tree_paths(tree, is_leaf=is_state, namespace=NAMESPACE)
    keys = [path[0] if path else None for path in paths]
    wanted = list(wrt) if isinstance(wrt, list | tuple | set | frozenset) else [wrt]
    flags = isinstance(wrt, list | tuple) and wrt and all(isinstance(x, bool) for x in wrt)
    if flags or isinstance(wrt, dict):
        return _flags(wrt, tree)
    unknown = [key for key in wanted if key not in keys]
    if unknown or not wanted or is_state(tree):
        raise _misfit(f"wrt={wrt!r} of {'one state' if is_state(tree) else f'states at {keys}'}")
    return [key in wanted for key in keys]


def _flags(wrt: Any, tree: Any) -> list[bool]:
    spec = optree.tree_structure(tree, is_leaf=is_state, namespace=NAMESPACE)
    try:
        prefix: Any = optree.tree_broadcast_prefix(wrt, tree, is_leaf=is_state, namespace=NAMESPACE)
        flags: Any = spec.flatten_up_to(prefix)
    except ValueError as error:
        raise _misfit(f"wrt={wrt!r} does not fit the states: {error!s:.200}") from None
    if not all(isinstance(x, bool) for x in flags) or not any(flags):
        raise _misfit(f"wrt={wrt!r} names no state, or is no pytree of bools")
    return flags


def _misfit(seen: str) -> LayoutError:
    return LayoutError(
        f"grad_and_reduce: {seen}.",
        cause="a key that the pytree of states does not have, or the name of a parameter.",
        fix='give a key of the states, wrt="d", several, or bools in their structure.',
    )


def require_learner(states: Sequence[TrainState], name: str) -> None:
    """Raise `LayoutError` if no leaf of any of the states learns: there is no gradient then."""
    if not any(state.setup.layout.trainable for state in states):
        raise learns_nothing(name)


def as_read(state: TrainState) -> TrainState:
    """Return a state whose parameters are those of this one, and all frozen, for one pass."""
    setup = replace(state.setup, layout=_frozen(state.setup.layout))
    waits = replace(CLOSED, gathered=state.window.gathered, is_open=state.window.is_open)
    # What is recorded of the pass is apart from that of passes that differentiate by this state.
    counted = replace(state.progress, backwards=state.progress.backwards + 1)
    return state.replace(setup=setup, gradients=Buffers(), window=waits, slots={}, progress=counted)


def after_reading(state: TrainState, read: TrainState) -> TrainState:
    """Return the state that was read as it is after that: only its schedule may be another one."""
    gathered = replace(state.window, gathered=read.window.gathered)
    return state.replace(schedule=read.schedule, window=gathered)


@lru_cache(maxsize=64)
def _frozen(layout: Layout) -> Layout:
    return replace(
        layout,
        leaves=tuple(replace(leaf, trainable=False) for leaf in layout.leaves),
        groups=tuple(replace(group, trainable=False) for group in layout.groups),
    )
