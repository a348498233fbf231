"""`coalesce`: however many backward passes a step makes, its gradients cross the ranks once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, overload

import optree

from fzero.errors.check import called_as, is_count, require
from fzero.state import TrainState, progress
from fzero.transforms.agree import agree, reduce_agreed
from fzero.transforms.donation import check_alive
from fzero.transforms.pipeline import P, R, Step, Transform, returned_pair, transform
from fzero.transforms.points import renewed
from fzero.transforms.states import S, call_of_states, flatten_states, map_states


@overload
def coalesce(fn: Callable[P, R], /, *, backwards: int | None = None) -> Step[P, R]: ...
@overload
def coalesce(*, backwards: int | None = None) -> Transform: ...
@called_as("coalesce(step)")
def coalesce(
    fn: Callable[..., Any] | None = None, /, *, backwards: int | None = None
) -> Step[..., Any] | Transform:
    """Run `fn(state, *args) -> (state, aux)` in a window: N gradients, one reduction.

    sum_i reduce(g_i) = reduce(sum_i g_i): the values are the same up to the rounding of one
    re-ordered sum. Inside, `grad_and_reduce` adds to this rank's own full-sized sum (P elements
    at every stage, the price of it); `apply_gradients`, or else the end of `fn`, reduces it.

    If `fn` raises, nothing is reduced and the caller's state is as it was. Several windows
    before one update add up; a window without gradients is the identity.

    Args:
        fn: the step. Its state may be a pytree of states, which have a window each.
        backwards: N, if it is known and the same on all ranks: every N-th gradient call of a state
            since its update reduces the sum, bucket by bucket, beside its own backward pass, as
            DDP does after `no_sync`. None: they are reduced after the last one.

    Returns:
        A step that is called as `fn` is. Without `fn`, a decorator.

    Raises:
        LayoutError: for coalesce around coalesce, and a `backwards` that cannot be; in a call, when
            `fn` does not return a pair.
        PhaseError: in a call, for a state whose window is open already (one coalesced step called
            inside another).
        MismatchError: in a call, on every rank, when the ranks have other gradients to reduce, or
            with `backwards` make other numbers of calls.

    Source: Gao et al., "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup",
    arXiv 2101.06983, needs it: N backward passes for one batch.

    Example:
        >>> import torch, fzero
        >>> @fzero.coalesce
        ... def step_fn(state, xs):
        ...     for x in xs:
        ...         state, _ = fzero.grad_and_reduce(lambda p, x: (p * x).sum(), state)(x)
        ...     return state, None
        >>> state = fzero.init(torch.ones(2), fzero.optim.sgd(1.0), stage=2)
        >>> state, _ = step_fn(state, [1.0, 2.0])
        >>> fzero.gradients(state), state.progress.reductions
        (tensor([3., 3.]), 1)
    """
    if backwards is not None:
        wanted = "an int of 1 or more: the gradient calls before each update, the same on all ranks"
        require("backwards", backwards, is_count, wanted)

    def around(
        inner: Callable[..., Any], state: Any, /, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        state = map_states("coalesce", partial(_open, length=backwards or 0), state)
        state, aux = returned_pair("coalesce", inner, inner(state, *args, **kwargs))
        return _close(state), aux

    return transform(
        "coalesce",
        fn,
        around,
        never_around=("coalesce", "simulate"),
        right="fzero.simulate(fzero.shard(fzero.coalesce(step), stage=...)), with one coalesce",
        options={} if backwards is None else {"backwards": backwards},
    )


def _open(state: TrainState, length: int) -> TrainState:
    check_alive(state)
    opened = progress.open_window(state.window, length)
    state = renewed(state, "window")
    return state.replace(window=progress.add_backward(opened, state.progress.backwards))


def _close(tree: S) -> S:
    """Return the states with closed windows; gradients pending on any rank are reduced.

    Right after an update nothing is pending on any rank, so no message is sent. If only some
    ranks have gradients since then, the calls of the ranks differ, and all of them raise.
    """
    states, treespec = flatten_states("coalesce", tree)
    if not all(_is_settled(one.window) for one in states):
        said = agree(call_of_states("the end of coalesce", treespec), states)
        states = [
            reduce_agreed(one, all_say) if all_say.waits else one
            for one, all_say in zip(states, said, strict=True)
        ]
    closed = [one.replace(window=progress.close(one.window)) for one in states]
    settled: Any = optree.tree_unflatten(treespec, closed)
    return settled


def _is_settled(one: progress.Window) -> bool:
    return one.is_settled and not one.pending.held
