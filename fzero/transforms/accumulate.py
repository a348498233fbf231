"""`accumulate`: one large batch as several micro-batches and one update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, overload

import optree
import torch
from torch import Tensor

from fzero.errors import LayoutError
from fzero.options import OPTIONS, takes
from fzero.state import NAMESPACE, Policy, TrainState, progress
from fzero.transforms._micro_batches import InAxes, check_axes, parts_of
from fzero.transforms.pipeline import P, R, Step, Transform, returned_pair, transform
from fzero.transforms.states import S, flatten_states, map_states


@overload
def accumulate(fn: Callable[P, R], /, *, micro_batches: int, in_axes: InAxes = 0) -> Step[P, R]: ...
@overload
def accumulate(*, micro_batches: int, in_axes: InAxes = 0) -> Transform: ...
@overload  # the older spelling
def accumulate(fn: Callable[P, R], /, *, steps: int, in_axes: InAxes = 0) -> Step[P, R]: ...
@overload
def accumulate(*, steps: int, in_axes: InAxes = 0) -> Transform: ...
@takes("accumulate", "accumulate(step, micro_batches=4)", older={"steps": "micro_batches"})
def accumulate(
    fn: Callable[..., Any] | None = None, /, *, micro_batches: int, in_axes: InAxes = 0
) -> Step[..., Any] | Transform:
    """Run `fn(state, *batch) -> (state, aux)` on each of `micro_batches` equal parts of the batch.

    g = (1/k) sum_i g(part_i): for a loss that is a mean over examples, the gradient of the whole
    batch. An `apply_gradients` inside `fn` waits for the last part, so the result is that of one
    call with the whole batch; activations are those of one part. With
    `micro_batches=1` it is the identity.

    Tensors in the arguments are split along dim 0, or as `in_axes` says, and must have as many
    examples as each other; scalars and everything else go to each part. In aux, floating scalars
    are averaged, other scalars summed, tensors concatenated along dim 0; what is neither must be
    the same for every part.

    With `logical_ranks=` each part has an equal part of the examples of every logical rank that
    this rank carries, in their order.

    Without `coalesce` each part is reduced as it comes; `coalesce(accumulate(fn))` reduces once.

    Accumulations may be nested: the update then waits for the last part of the outermost one.

    Args:
        fn: the step. Its state may be a pytree of states.
        micro_batches: k, the number of parts, at least 1 (older code says `steps`). A batch
            [n, *t] is given in parts [n / k, *t].
        in_axes: the dim of the examples, as in `torch.func.vmap`: an int, or None for what every
            part gets whole (a table that all examples share). For all arguments after the state
            alike; or a tuple, one for each positional argument (keywords have 0); or a dict by the
            names of arguments, {"table": None}, the others having 0. One of an argument that is a
            tree may be a tree, too, with its first levels: ({"x": 1, "table": None},).

    Returns:
        A step that is called as `fn` is. Without `fn`, a decorator.

    Raises:
        LayoutError: for `micro_batches` that is no count, and axes that are none; in a call, naming
            the argument, when a batch does not divide by it or has another number of examples than
            another one, when axes do not fit, or when a state is among the arguments that are cut.
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
        >>> def weighted(state, x, table):  # the table is whole in each part
        ...     state, loss = fzero.grad_and_reduce(lambda p: (p * x * table.sum()).mean(), state)()
        ...     return fzero.apply_gradients(state), loss
        >>> step = fzero.accumulate(weighted, micro_batches=2, in_axes={"table": None})
        >>> step(state, xs, torch.ones(3))[1]
        tensor(-11.2500)
    """
    OPTIONS["micro_batches"].require(micro_batches, "accumulate: ")
    check_axes(in_axes)

    def around(
        inner: Callable[..., Any], state: Any, /, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        states = flatten_states("accumulate", state)[0]
        groups = _logical_ranks_here(states)
        parts = parts_of(inner, args, kwargs, micro_batches, in_axes, groups=groups)
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
        options={"micro_batches": micro_batches, **({} if in_axes == 0 else {"in_axes": in_axes})},
    )


def _logical_ranks_here(states: Sequence[TrainState]) -> int:
    """Return of how many logical ranks the batch of this rank has the examples; 1 without any."""
    setup = states[0].setup if states else None
    if setup is None or setup.logical is None:
        return 1
    return len(setup.carried(setup.axis.rank))


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
    return state.replace(setup=state.setup.changed(policy=policy))


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
