"""`clip`: bound the global norm of the gradients that a step updates from."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any, overload

from fzero.errors.check import called_as, is_positive, require
from fzero.machine.offload import to_device
from fzero.optim import require_ordered
from fzero.state import Buffers, TrainState
from fzero.state.points import Builtin
from fzero.transforms.norm import norm_of
from fzero.transforms.pipeline import P, R, Step, Transform, transform
from fzero.transforms.points import Running
from fzero.transforms.prepare import Prepared, clipped_to
from fzero.transforms.states import flatten_states, under_policy


@overload
def clip(
    fn: Callable[P, R], /, *, max_norm: float | None, max_value: float | None = None
) -> Step[P, R]: ...
@overload
def clip(
    fn: Callable[P, R], /, *, max_norm: float | None = None, max_value: float | None
) -> Step[P, R]: ...
@overload
def clip(*, max_norm: float | None, max_value: float | None = None) -> Transform: ...
@overload
def clip(*, max_norm: float | None = None, max_value: float | None) -> Transform: ...
@called_as("clip(step, max_norm=1.0)", any_of=("max_norm", "max_value"))
def clip(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    max_norm: float | None = None,
    max_value: float | None = None,
) -> Step[..., Any] | Transform:
    """Let every `apply_gradients` in `fn(state, *args)` use g min(1, max_norm / (|g| + 1e-6)).

    |g| is the true norm (`fzero.global_norm`): over all shards, each element once. The factor is
    torch.nn.utils.clip_grad_norm_'s. With `max_value`, g is max(-max_value, min(g, max_value)) of
    the mean gradient first, as torch.nn.utils.clip_grad_value_ bounds the gradient of one process.
    None or infinity is the identity. Of two clips side by side the smaller bound holds, in either
    order. Among transforms of one's own that act on the mean gradient (`fzero.transform`) it acts
    in its place, from the inside out.

    Args:
        fn: the step. If its state is a pytree of states, each has a norm of its own.
        max_norm: the bound, in the unit of the mean gradient after all scales; None for none.
        max_value: the bound of each element, in the same unit; None for none.

    Returns:
        A step that is called as `fn` is. Without `fn`, a decorator.

    Raises:
        CallError: without any bound: `max_norm=None`, written, is the identity.
        LayoutError: for a bound that is not a positive number.
        MismatchError: in a call, on every rank, when the ranks clip by other bounds.

    Source: Pascanu et al., "On the difficulty of training recurrent neural networks",
    arXiv 1211.5063, algorithm 1.

    Example:
        >>> import torch, fzero
        >>> def step_fn(state):
        ...     state, loss = fzero.grad_and_reduce(lambda p: 10 * p.sum(), state)()
        ...     return fzero.apply_gradients(state), loss
        >>> state = fzero.init(torch.zeros(1), fzero.optim.sgd(1.0), stage=0)
        >>> fzero.full_params(fzero.clip(step_fn, max_norm=1.0)(state)[0])
        tensor([-1.0000])
    """
    bounds = {"max_norm": max_norm, "max_value": max_value}
    for name, bound in bounds.items():
        if bound is not None:
            wanted = "None to switch it off, else a positive bound"
            require(f"clip: {name}", bound, lambda x: x == inf or is_positive(x), wanted)

    own = clipping(**{name: None if bound == inf else bound for name, bound in bounds.items()})

    def around(
        inner: Callable[..., Any], state: Any, /, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        before = flatten_states("clip", state)[0][0].setup.policy.points
        points = before if own is None else _with_clip(own, before)
        return under_policy("clip", inner, state, (args, kwargs), points=points)

    return transform(
        "clip",
        fn,
        around,
        never_around=("simulate",),
        right="fzero.simulate(fzero.clip(step, max_norm=...), world_size=...)",
        options=bounds if max_value is not None else {"max_norm": max_norm},
    )


def clipping(*, max_norm: float | None = None, max_value: float | None = None) -> Builtin | None:
    """Return what clips at the points of a step; None for no bounds."""
    bounds = {"max_norm": max_norm, "max_value": max_value}
    options = tuple((name, bound) for name, bound in bounds.items() if bound is not None)
    return Builtin(name="clip", options=options, reduced=_clips) if options else None


def _clips(one: Builtin, running: Running, ready: Prepared) -> Prepared:
    """max(-v, min(g, v)), and then g min(1, m / |g|), which waits in `rest`."""
    state, bounds = running.old, dict(one.options)
    if (most := bounds.get("max_value")) is not None:
        require_ordered("clip: max_value", state.setup.layout.leaves)
        ready = _bounded(state, ready, most / ready.rest)
    if (most := bounds.get("max_norm")) is not None:
        norm = norm_of(state, ready.gradients.flats, ready.gradients.placement) * ready.rest
        ready = clipped_to(ready, norm, most)
    return ready


def _bounded(state: TrainState, ready: Prepared, bound: Any) -> Prepared:
    """max(-bound, min(g, bound)), in new memory."""
    held = ready.gradients
    flats = tuple(to_device(flat, state.device).clamp(-bound, bound) for flat in held.flats)
    made = Buffers(flats=flats, placement=held.placement)
    return ready._replace(gradients=made, is_shared=False)


def _with_clip(own: Builtin, others: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the transforms with a clip inside of them: of two side by side the smaller bound."""
    if not others or others[0].name != own.name or not isinstance(others[0], Builtin):
        return (own, *others)
    mine, theirs = dict(own.options), dict(others[0].options)
    both = {name: min(mine.get(name, inf), theirs.get(name, inf)) for name in {**mine, **theirs}}
    merged = clipping(**both)
    assert merged is not None
    return (merged, *others[1:])
