"""`evaluate`: a function of parameters without gradient, unit by unit at stage 3."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, overload

import optree
import torch
from torch import Tensor

from fzero.collectives import EVALUATION
from fzero.context.modes import computed_in, for_training, needs_func
from fzero.errors import PhaseError, explain
from fzero.errors.check import called_as, require_function_of_params
from fzero.machine.offload import to_device
from fzero.machine.packing import unpack, unpack_groups
from fzero.machine.partition import assemble
from fzero.machine.placeholder import DISABLED_FRAMES, placeholders, without_dynamo
from fzero.machine.unshard import HeldReader
from fzero.ranks.mesh import running_on
from fzero.state import NAMESPACE, TrainState
from fzero.state.schedule import Schedule
from fzero.transforms.autograd import detached, versions_of, with_full
from fzero.transforms.backward_pass import Pass, PassForm, leaves_in_pass, passes_of
from fzero.transforms.donation import check_alive
from fzero.transforms.grad import as_read
from fzero.transforms.models import ParamsT, axes_of_loss, call_of_states, flatten_states
from fzero.transforms.pipeline import P, R


@overload
def evaluate(
    fn: Callable[Concatenate[ParamsT, P], R], state: TrainState[ParamsT]
) -> Callable[P, R]: ...
@overload
def evaluate(fn: Callable[Concatenate[Any, P], R], state: Any) -> Callable[P, R]: ...
@called_as("evaluate(fn, state)(batch)")
def evaluate(fn: Callable[Concatenate[Any, P], R], state: Any) -> Callable[P, R]:
    """Return e: e(*args) = fn(params, *args), without gradient.

    For validation, generation, the first pass of GradCache, a teacher. At stage 3 parameters are
    gathered unit by unit, in the order in which `fn` reads them, and freed again: a rank never
    holds more than the units that a forward of training holds, where `fzero.full_params` holds the
    whole model. Below stage 3 nothing crosses ranks, and any rank may evaluate alone.

    The order that the forwards of training have recorded is expected. One that differs is learned,
    and kept with `e`: to generate, make `e` once, and call it for each token.

    Values are exact, also where training gathers rounded ones; inside a step with `fzero.autocast`
    they are those of its region. An evaluation inside a loss or another evaluation is served:
    nothing is differentiated through it. For an engine, `fzero.evaluate(fn, engine.state)`, or the
    engine's own call under `torch.no_grad()`.

    Args:
        fn: any function of the params, and of more. It may use torch.func, and enable gradients
            for a while, by its inputs.
        state: a `TrainState`, or a pytree of them: `fn` is then given the matching pytree of
            params. It stays as it is.

    Returns:
        A function of the other arguments; what it returns has no graph. A collective at stage 3:
        every rank must call it, the same number of times; which units each uses may differ.

    Raises:
        LayoutError: for what is no function, or no state.
        DonatedError: for a state that was used up.
        MismatchError: at stage 3, on every rank, if the ranks make other calls.

    Example:
        >>> import torch, fzero
        >>> state = fzero.init({"w": torch.tensor([3.0])}, fzero.optim.sgd(0.1), stage=3)
        >>> fzero.evaluate(lambda params, x: params["w"] * x, state)(2.0)
        tensor([6.])
    """
    require_function_of_params("evaluate", fn, "fzero.evaluate(fn, state)(batch)")
    states, treespec = flatten_states("evaluate", state)
    over = axes_of_loss(states, [one.setup.axis for one in states])
    for one in states:
        check_alive(one)
    known: dict[int, Schedule] = {}  # what calls of this function have recorded

    @without_dynamo
    @functools.wraps(fn, updated=())
    def evaluated(*args: Any, **kwargs: Any) -> Any:
        def call(params: list[Any]) -> Any:
            with computed_in(states[0].setup.policy.autocast, states[0].device), torch.no_grad():
                return fn(optree.tree_unflatten(treespec, params), *args, **kwargs)

        for one in states:
            check_alive(one)
        _warn_of_graph(fn, (args, kwargs))
        with running_on(*over):
            if needs_func([flat for one in states for flat in one.params.flats]):
                fulls = [(one.setup.layout, with_full(one)[1]) for one in states]
                whole = [(x, unpack_groups(x, dict(enumerate(flats)))) for x, flats in fulls]
                return call([assemble(layout, by_leaf) for layout, by_leaf in whole])
            return _by_unit(call, states, known, call_of_states("evaluate", treespec))

    return evaluated


def _warn_of_graph(fn: Any, given: Any) -> None:
    """Warn, once for each function, of an input that requires grad: nothing flows back to it."""
    key = getattr(fn, "__code__", type(fn))
    leaves = optree.tree_leaves(given, namespace=NAMESPACE) if torch.is_grad_enabled() else ()
    if key not in _WARNED and any(isinstance(x, Tensor) and x.requires_grad for x in leaves):
        _WARNED.add(key)
        warnings.warn(_GRAPH, UserWarning, stacklevel=3 + DISABLED_FRAMES)


_WARNED = set[Any]()
_GRAPH = explain(
    "fzero.evaluate got an input that requires grad: no gradient flows back to it.",
    cause="a teacher, a critic or a reward that a loss is to be differentiated through; evaluate "
    "is without gradient in its inputs, too.",
    fix="x.detach() says that this is meant. Else give both states to grad_and_reduce, which "
    'learns by one of them: fzero.grad_and_reduce(loss, {"actor": a, "critic": c}, wrt="actor").',
)
_WROTE = explain(
    "the function that was evaluated wrote to a parameter in place: the state itself has changed.",
    cause="an in-place method (add_, copy_, ...) on the params that evaluate gives it.",
    fix="compute a new value, or clone the leaf first; and make the state anew.",
)


def _held(state: TrainState) -> Any:
    """The parameters of a state below stage 3, which holds them whole."""
    layout, by_leaf = state.setup.layout, dict[int, Tensor]()
    reader = HeldReader(layout, state.setup.axis, state.device, state.params.flats)
    for i, group in enumerate(layout.groups):
        if group.encoded:
            by_leaf.update(zip(group.leaves, placeholders(reader, i), strict=True))
            continue
        flat = to_device(state.params.flats[i].detach(), state.device)
        by_leaf.update(zip(group.leaves, unpack(layout, i, flat), strict=True))
    return assemble(layout, by_leaf)


def _by_unit(
    call: Callable[[list[Any]], Any],
    states: Sequence[TrainState],
    known: dict[int, Schedule],
    name: str,
) -> Any:
    lazy = [i for i, one in enumerate(states) if one.setup.gathers_by_unit]

    def passes_here() -> tuple[list[Pass], list[tuple[int, int]]]:
        """One pass for each set of ranks that gathers; for each such state its pass and place."""
        read = [as_read(states[i]) for i in lazy]
        exact = not any(one.setup.policy.autocast for one in read)
        pairs = zip(lazy, read, strict=True)
        read = [one.replace(schedule=known.get(i, one.schedule)) for i, one in pairs]
        # A number that all ranks know, whatever they have evaluated before.
        return passes_of(read, PassForm(name=name, number=EVALUATION, exact=exact))

    passes, places = for_training(passes_here)
    made: dict[int, Any] = {i: _held(one) for i, one in enumerate(states) if i not in lazy}
    flats = [x for i in made for x in states[i].params.flats]
    versions = versions_of(flats)
    try:
        for one in passes:
            for_training(one.begin_forward)
        for i, (number, position) in zip(lazy, places, strict=True):
            layout = states[i].setup.layout
            made[i] = assemble(layout, leaves_in_pass(passes[number], position))
        result = call([made[i] for i in range(len(states))])
        if versions_of(flats) != versions:
            raise PhaseError(_WROTE)
        result = detached(result, states)
        for one in passes:
            one.end_forward()
            one.finish_forward()
        for i, (number, position) in zip(lazy, places, strict=True):
            known[i] = passes[number].states[position].schedule
    except BaseException as error:
        for one in passes:
            one.fail(error)
        raise
    finally:
        for one in passes:
            one.close()
    return result
