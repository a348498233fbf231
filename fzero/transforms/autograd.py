"""The gradient of a pure loss by flat buffers, under torch.func."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor
from torch._C._functorch import maybe_current_level

from fzero.collectives import connecting, connecting_calls, gather_many, tied_to
from fzero.errors import LayoutError, PhaseError, explain
from fzero.machine.offload import to_device
from fzero.machine.packing import input_shape, pack, unpack_groups
from fzero.machine.partition import assemble
from fzero.machine.placeholder import LazyParam
from fzero.state import NAMESPACE, TrainState
from fzero.state.train_state import Weight, weighed, with_weight
from fzero.transforms.accumulate_grad import mean_of, not_differentiable, receive
from fzero.transforms.backward_pass import agree
from fzero.transforms.points import Changed, changed_by
from fzero.transforms.recipe import factors_of, loss_learned, parts_in

_storage_id: Any = vars(torch._C)["_storage_id"]  # it has no type


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """grads[i][j] is the gradient by group j of state i; value and aux are detached."""

    grads: tuple[tuple[Tensor, ...], ...]
    value: Tensor
    aux: Any


LossOf = Callable[[list[Any]], Any]  # [params of each state] -> what the user's fn returned

WROTE = explain(
    "the loss wrote to a parameter in place; below stage 3 the state itself has changed.",
    cause="an in-place method (add_, copy_, ...) on a leaf, under no_grad or on a frozen one.",
    fix="clone the leaf first, and make the state anew: losses are pure.",
)


REFUSED = explain(
    "the loss writes in place to a leaf that requires grad, such as a parameter: torch refuses it.",
    cause="an in-place method (mul_, zero_, copy_, +=, p[i] = ...) on the params of a loss.",
    fix="compute a new value, p * 2 in the place of p.mul_(2), or clone the leaf first. Nothing "
    "was changed.",
)


@contextmanager
def explains_writes(params: Any) -> Iterator[None]:
    """Raise `PhaseError` where torch refuses in this block to write to leaves of `params`.

    The refusal is told from other errors by asking torch for the same one. The error is raised
    in any case: only its words depend on this.
    """
    try:
        yield
    except RuntimeError as error:
        if type(error) is RuntimeError and str(error) == _NO_GRAD and _some_learn_not(params):
            raise PhaseError(_LEFT_OUT) from error
        if type(error) is not RuntimeError or str(error) not in _refusals(params):
            raise
        raise PhaseError(REFUSED) from error


_NO_GRAD = "One of the differentiated Tensors does not require grad"
_LEFT_OUT = explain(
    "torch.autograd.grad in a loss, by a tensor that does not require grad.",
    cause="a parameter that wrt= leaves out, or that is frozen: it is given without gradient.",
    fix="leave wrt= out and update what is to learn; or differentiate by a copy of your own, "
    "q = p.detach().requires_grad_(), that the loss uses.",
)


def _some_learn_not(params: Any) -> bool:
    leaves = optree.tree_leaves(params, namespace=NAMESPACE)
    return not all(x.requires_grad for x in leaves if isinstance(x, Tensor))


def _refusals(params: Any) -> set[str]:
    """What torch says to writes to leaves that require grad, and to views of them."""
    found: set[str] = set()
    leaves = optree.tree_leaves(params, namespace=NAMESPACE)
    wanted = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad and x.numel()]
    for leaf in wanted:
        for view in (leaf, leaf.reshape(-1), *((leaf[0], leaf[:1]) if leaf.ndim else ())):
            try:
                with torch.enable_grad():
                    view.mul_(1)
            except (RuntimeError, LayoutError) as error:
                found.add(str(error))
    return found


class GradientCall(NamedTuple):
    """One gradient call: the loss of its parameters, and how it is counted."""

    loss_of: LossOf
    has_aux: bool
    weight: Weight | None
    name: str  # with the states that it is about


def versions_of(flats: Sequence[Tensor]) -> list[int]:
    """How often each of these tensors was written to in place."""
    return [0 if flat.is_inference() else flat._version for flat in flats]


def by_func(
    loss_of: LossOf,
    held: Sequence[tuple[TrainState, Sequence[Tensor]]],
    *,
    has_aux: bool,
    learned: Callable[[Tensor], Tensor],
) -> Result:
    """Differentiate with torch.func: the result can be differentiated, mapped, traced again.

    held: the states, with the full flats of their groups. Gradients are those of `learned(loss)`;
    the value is that of the loss.
    """
    layouts = [state.setup.layout for state, _ in held]
    counts = [len(layout.trainable) for layout in layouts]
    pairs = [*zip(layouts, [fulls for _, fulls in held], strict=True)]
    inputs = tuple(x[i].view(input_shape(one, i)) for one, x in pairs for i in one.trainable)
    kept: dict[str, Any] = {}  # the parts of aux that are no tensors: torch.func refuses them

    def scalar(inputs: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        parts = _cut(inputs, counts)
        params = []
        for (layout, fulls), part in zip(pairs, parts, strict=True):
            flats = dict(enumerate(fulls)) | dict(zip(layout.trainable, part, strict=True))
            params.append(assemble(layout, unpack_groups(layout, flats)))
        level = maybe_current_level() if inputs else None
        anchor = inputs[0].reshape(-1)[:0] if inputs else None
        with explains_writes(params), connecting(level or 0, anchor) as calls:
            loss, aux = loss_and_aux(loss_of(params), has_aux=has_aux)
            root = learned(loss)
        leaves, kept["treespec"] = optree.tree_flatten(aux, namespace=NAMESPACE)
        kept["others"] = [None if isinstance(x, Tensor) else x for x in leaves]
        tensors = tuple(x for x in leaves if isinstance(x, Tensor))
        if inputs and calls.tokens:
            root = tied_to(root, [*calls.tokens.values()])
        return root, (loss, *tensors)

    if inputs:
        grads, (_, found) = torch.func.grad_and_value(scalar, has_aux=True)(inputs)
    else:
        (_, found), grads = scalar(()), ()
    value, *tensors = found
    rest = iter(tensors)
    leaves = [next(rest) if x is None else x for x in kept["others"]]
    aux = optree.tree_unflatten(kept["treespec"], leaves)
    return Result(grads=tuple(tuple(p) for p in _cut(grads, counts)), value=value, aux=aux)


def loss_and_aux(returned: Any, *, has_aux: bool) -> tuple[Tensor, Any]:
    """Return (loss, aux) of what a loss returned; raise `LayoutError` if it is no such thing."""
    if has_aux:
        if not (isinstance(returned, tuple) and len(returned) == 2):
            raise _bad_loss(
                f"has_aux=True, and the loss returned a {type(returned).__name__}",
                "return (loss, aux)",
                "a loss without aux, or more than one object beside the loss.",
            )
        loss, aux = returned
    else:
        loss, aux = returned, None
    if not isinstance(loss, Tensor):
        raise _no_tensor(loss)
    if loss.ndim:
        raise _bad_loss(
            f"the loss has shape {tuple(loss.shape)}",
            "return loss.mean() or .sum()",
            "per-sample losses, or the outputs of the model in the place of a loss.",
        )
    if not loss.is_floating_point():
        raise _bad_loss(
            f"the loss has dtype {loss.dtype}",
            "return a floating tensor",
            "a count or a metric (accuracy, argmax) in the place of a loss, or a complex one.",
        )
    return loss, aux


def _no_tensor(loss: Any) -> LayoutError:
    """Return the error for a loss that is no tensor, with the cause that its type suggests."""
    seen = f"the loss is a {type(loss).__name__}"
    if isinstance(loss, tuple | list | dict):
        seen = f"{seen} of {len(loss)}"
        fix = (
            "pass has_aux=True for (loss, aux); of several losses return the sum, or call "
            "grad_and_reduce for each: gradients add up"
        )
        return _bad_loss(seen, fix, "several losses, or outputs returned beside the loss.")
    if loss is None:
        return _bad_loss(seen, "end it with `return loss`", "a loss function without a return.")
    if isinstance(loss, bool | int | float | complex) or type(loss).__module__ == "numpy":
        cause = "loss.item(), float(loss) or .numpy() in the loss: a number has no gradient."
        fix = "return a scalar tensor; take .item() of the value that grad_and_reduce gives back"
        return _bad_loss(seen, fix, cause)
    fix = "return its scalar tensor, such as model_output.loss"
    return _bad_loss(seen, fix, "the output of a model, or another object around the loss.")


def _bad_loss(seen: str, fix: str, cause: str) -> LayoutError:
    return LayoutError(
        f"grad_and_reduce: {seen}; it must be one number in a tensor.", cause=cause, fix=f"{fix}."
    )


def _cut(flat: Sequence[Any], counts: Sequence[int]) -> list[Sequence[Any]]:
    parts, start = [], 0
    for count in counts:
        parts.append(flat[start : start + count])
        start += count
    return parts


def detached(result: Any, states: Sequence[TrainState]) -> Any:
    """Return a result without its graph: placeholders as their values.

    Views of a buffer of a state are copied: that may be donated.
    """
    flats = [flat for state in states for flat in state.params.flats if flat.numel()]
    ours = {_storage_id(flat) for flat in flats}

    def alone(x: Any) -> Any:
        if isinstance(x, LazyParam):  # outside of this call nobody could gather it any more
            return x.full().detach().clone()
        if not isinstance(x, Tensor):
            return x
        x = x.detach()
        shared = type(x) is Tensor and x.numel() and _storage_id(x) in ours
        return x.clone() if shared else x

    return optree.tree_map(alone, result, namespace=NAMESPACE)


# A gradient call under torch.func: all is gathered first, and the result is differentiable.


def grad_by_func(
    call: GradientCall, states: Sequence[TrainState]
) -> tuple[list[TrainState], Result]:
    """Return the states with the gradient of a call added, and its result.

    Raises `PhaseError` if the loss wrote to a parameter.
    """
    parts = parts_in(states, None, {})
    # Ranks on which nothing requires grad announce a pass instead: then all of them raise.
    crosses = [one for one in states if one.setup.stage == 3 or not one.window.is_open]
    agree(f"{call.name} with arguments that require grad", crosses)
    held = [with_full(state) for state in states]
    by, rest = factors_of(states)
    fulls = [flat for _, some in held for flat in some]
    versions = versions_of(fulls)
    before, connected = connecting_calls(), False

    def learned(loss: Tensor) -> Tensor:
        nonlocal connected
        connected = connecting_calls() > before
        times = with_weight(by, weighed(loss, call.weight, connected=connected))
        loss = loss_learned(states, loss)
        return loss if times is None else loss * times

    try:
        result = by_func(call.loss_of, held, has_aux=call.has_aux, learned=learned)
    except RuntimeError as error:
        if versions_of(fulls) != versions:
            raise PhaseError(WROTE) from error
        raise
    if versions_of(fulls) != versions:
        raise PhaseError(WROTE)
    how = weighed(result.value, call.weight, connected=connected)
    begun = [state for state, _ in held]
    for part in parts.values():
        part.loss(result.value, call.weight)
    for part in parts.values():
        begun = [part.begins(i, state, how) for i, state in enumerate(begun)]
    pairs = zip(begun, result.grads, strict=True)
    changes = [[part.change(i) for part in parts.values()] for i in range(len(begun))]
    grads = [
        _changed(*pair, [by for by in some if by is not None])
        for pair, some in zip(pairs, changes, strict=True)
    ]
    for part in parts.values():
        part.settles()
    for part in parts.values():
        begun = [part.ends(i, state) for i, state in enumerate(begun)]
    return [_received(*one) for one in zip(begun, grads, rest, strict=True)], result


def _changed(
    state: TrainState, grads: Sequence[Tensor], changes: Sequence[Changed]
) -> Sequence[Tensor]:
    """Return what transforms make of the gradient of each group, the last leaf first.

    As it is in most backwards.
    """
    if not changes:
        return grads
    layout, setup = state.setup.layout, state.setup
    made: dict[int, Tensor] = {}
    for index, flat in reversed([*zip(layout.trainable, grads, strict=True)]):
        dtype = setup.accumulate_dtype(index)
        leaves = unpack_groups(layout, {index: flat.reshape(-1)})
        made |= {leaf: changed_by(changes, leaf, leaves[leaf], dtype) for leaf in reversed(leaves)}
    return [
        pack(layout, i, [made[leaf] for leaf in layout.groups[i].leaves]) for i in layout.trainable
    ]


def with_full(state: TrainState) -> tuple[TrainState, Sequence[Tensor]]:
    """Gather the full flats of every group; return the state, which may keep them, and them."""
    setup, layout = state.setup, state.setup.layout
    if setup.stage < 3:
        return state, state.params.flats
    for group in layout.groups:
        if group.codec is not None:
            raise not_differentiable("parameters", group.codec)
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


def _received(
    state: TrainState, grads: Sequence[Tensor], factor: Tensor | None = None
) -> TrainState:
    """Add this rank's own gradients: leave them in the open window, or reduce them now."""
    setup = state.setup
    own = [
        g.reshape(-1).to(setup.accumulate_dtype(i))
        for i, g in zip(setup.layout.trainable, grads, strict=True)
    ]
    if factor is not None:
        own = [g * factor.to(g.dtype) for g in own]
    return receive(state, own if state.window.is_open else mean_of(setup, own))
