"""`accumulate`: one large batch as several micro-batches and one update."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, overload

import optree
import torch
from torch import Tensor

from fzero.errors import LayoutError
from fzero.options import OPTIONS, takes
from fzero.state import NAMESPACE, Policy, TrainState, progress
from fzero.transforms.pipeline import P, R, Step, Transform, returned_pair, transform
from fzero.transforms.states import S, flatten_states, is_state, map_states


@overload
def accumulate(fn: Callable[P, R], /, *, micro_batches: int) -> Step[P, R]: ...
@overload
def accumulate(*, micro_batches: int) -> Transform: ...
@overload  # the older spelling
def accumulate(fn: Callable[P, R], /, *, steps: int) -> Step[P, R]: ...
@overload
def accumulate(*, steps: int) -> Transform: ...
@takes("accumulate", "accumulate(step, micro_batches=4)", older={"steps": "micro_batches"})
def accumulate(
    fn: Callable[..., Any] | None = None, /, *, micro_batches: int
) -> Step[..., Any] | Transform:
    """Run `fn(state, *batch) -> (state, aux)` on each of `micro_batches` equal parts of the batch.

    g = (1/k) sum_i g(part_i): for a loss that is a mean over examples, the gradient of the whole
    batch. An `apply_gradients` inside `fn` waits for the last part, so the result is that of one
    call with the whole batch; activations are those of one part. With
    `micro_batches=1` it is the identity.

    Tensors in the arguments are split along dim 0 (scalars and everything else go to each part).
    In aux, floating scalars are averaged, other scalars summed, tensors concatenated along dim 0;
    what is neither must be the same for every part.

    Without `coalesce` each part is reduced as it comes; `coalesce(accumulate(fn))` reduces once.

    Accumulations may be nested: the update then waits for the last part of the outermost one.

    Args:
        fn: the step. Its state may be a pytree of states.
        micro_batches: k, the number of parts, at least 1 (older code says `steps`). A batch
            [n, *t] is given in parts [n / k, *t].

    Returns:
        A step that is called as `fn` is. Without `fn`, a decorator.

    Raises:
        LayoutError: for `micro_batches` that is no count; in a call, naming the argument, when a
            batch does not divide by it, or when a state is among the arguments after the first.
        PhaseError: in a call, when `fn` updates twice, or goes on to another gradient after its
            update, also where that update ends an `accumulate` inside `fn`: those would be lost in
            one sum.

    Source: Huang et al., "GPipe", arXiv 1811.06965, section 2: micro-batches and one update.

    Example:
        >>> import torch, fzero
        >>> def step_fn(state, x):
        ...     state, loss = fzero.grad_and_reduce(lambda p, x: (p * x).mean(), state)(x)
        ...     return fzero.apply_gradients(state), loss
        >>> state = fzero.init(torch.ones(()), fzero.optim.sgd(1.0), stage=0)
        >>> xs = torch.tensor([1.0, 2.0, 3.0, 4.0])
        >>> state, loss = fzero.accumulate(step_fn, micro_batches=2)(state, xs)
        >>> loss, fzero.full_params(state)
        (tensor(2.5000), tensor(-1.5000))
    """
    OPTIONS["micro_batches"].require(micro_batches, "accumulate: ")

    def around(
        inner: Callable[..., Any], state: Any, /, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        parts = _split((args, kwargs), micro_batches)
        states = flatten_states("accumulate", state)[0]
        before = [(one.setup.policy, one.progress.deferred) for one in states]
        auxes = []
        for i, (part_args, part_kwargs) in enumerate(parts):
            begin = partial(_begin_part, parts=micro_batches, last=i == micro_batches - 1)
            state = _each(state, before, begin)
            returned = inner(state, *part_args, **part_kwargs)
            state, aux = returned_pair("accumulate", inner, returned)
            auxes.append(aux)
        # Whether an update waits stays as the last part left it: what comes next, inside an
        # accumulation further out, must not add to its gradients.
        return _each(state, before, lambda one, before: _with_policy(one, before[0])), _join(auxes)

    return transform(
        "accumulate",
        fn,
        around,
        never_around=("simulate",),
        right="fzero.simulate(fzero.accumulate(step, micro_batches=...), world_size=...)",
        options={"micro_batches": micro_batches},
    )


Before = tuple[Policy, bool]
"""The policy of a state before the first part, and whether an update of it waits."""


def _each(state: S, before: list[Before], fn: Callable[[TrainState, Before], TrainState]) -> S:
    rest = iter(before)
    return map_states("accumulate", lambda one: fn(one, next(rest)), state)


def _begin_part(state: TrainState, before: Before, *, parts: int, last: bool) -> TrainState:
    policy, deferred = before
    state = state.replace(progress=progress.next_part(state.progress, deferred=deferred))
    share, defers = policy.grad_scale / parts, policy.defer_update or not last
    return _with_policy(state, replace(policy, grad_scale=share, defer_update=defers))


def _with_policy(state: TrainState, policy: Policy) -> TrainState:
    return state.replace(setup=replace(state.setup, policy=policy))


def _split(arguments: Any, steps: int) -> list[Any]:
    if steps > 1:
        _require_no_state(arguments)
    accessors, leaves, treespec = optree.tree_flatten_with_accessor(arguments, namespace=NAMESPACE)
    for accessor, leaf in zip(accessors, leaves, strict=True):
        if isinstance(leaf, Tensor) and leaf.ndim and leaf.shape[0] % steps:
            raise LayoutError(
                f"accumulate: argument {accessor.codify('arguments')} of shape "
                f"{tuple(leaf.shape)} does not divide into {steps} parts along dim 0.",
                cause="a last, shorter batch, or a tensor that is no batch.",
                fix=f"use batches of a multiple of {steps}, or close over the tensor.",
            )
    columns = [
        leaf.chunk(steps)
        if isinstance(leaf, Tensor) and leaf.ndim and len(leaf)
        else [leaf] * steps
        for leaf in leaves
    ]
    return [
        optree.tree_unflatten(treespec, [column[i] for column in columns]) for i in range(steps)
    ]


def _require_no_state(arguments: Any) -> None:
    accessors, leaves, _ = optree.tree_flatten_with_accessor(
        arguments, is_leaf=is_state, namespace=NAMESPACE
    )
    for accessor, leaf in zip(accessors, leaves, strict=True):
        if is_state(leaf):
            raise LayoutError(
                f"accumulate: argument {accessor.codify('arguments')} is a TrainState, which "
                "is no batch to be split.",
                cause="the state is the first argument of a step, and stood further back, or "
                "a second state was passed beside it.",
                fix="write step(state, *batch), with a dict or tuple of states as the first "
                "argument if there are several; close over a state that is only read.",
            )


def _join(auxes: list[Any]) -> Any:
    if len(auxes) == 1:
        return auxes[0]
    first = optree.tree_structure(auxes[0], namespace=NAMESPACE)
    for aux in auxes[1:]:
        if optree.tree_structure(aux, namespace=NAMESPACE) != first:
            raise LayoutError(
                "accumulate: the step returned aux of another structure for another part.",
                cause="aux that depends on the data.",
                fix="return the same structure each time.",
            )
    return optree.tree_map(_join_leaves, *auxes, namespace=NAMESPACE)


def _join_leaves(*leaves: Any) -> Any:
    head = leaves[0]
    if isinstance(head, Tensor):
        if head.ndim:
            return torch.cat(leaves)
        total = torch.stack(leaves).sum()
        return total / len(leaves) if head.is_floating_point() else total
    if isinstance(head, float):
        return sum(leaves) / len(leaves)
    if isinstance(head, int) and not isinstance(head, bool):
        return sum(leaves)
    if all(leaf == head for leaf in leaves):
        return head
    raise LayoutError(
        f"accumulate: aux differs between parts: {head!r} and others.",
        cause="aux that can be neither averaged nor concatenated.",
        fix="return tensors or numbers.",
    )
