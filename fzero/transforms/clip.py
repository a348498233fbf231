"""`clip`: bound the global norm of the gradients that a step updates from."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any, overload

from fzero.errors.check import called_as, is_positive, require
from fzero.transforms.pipeline import P, R, Step, Transform, transform
from fzero.transforms.states import flatten_states, under_policy


@overload
def clip(
    fn: Callable[P, R], /, *, max_norm: float | None = None, max_value: float | None = None
) -> Step[P, R]: ...
@overload
def clip(*, max_norm: float | None = None, max_value: float | None = None) -> Transform: ...
@called_as("clip(step, max_norm=1.0)")
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
    None or infinity is the identity. Of two clips the smaller bound holds, in either order.

    Args:
        fn: the step. If its state is a pytree of states, each has a norm of its own.
        max_norm: the bound, in the unit of the mean gradient after all scales; None for none.
        max_value: the bound of each element, in the same unit; None for none.

    Returns:
        A step that is called as `fn` is. Without `fn`, a decorator.

    Raises:
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

    def around(
        inner: Callable[..., Any], state: Any, /, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        before = flatten_states("clip", state)[0][0].setup.policy
        smaller = {
            name: _smaller(getattr(before, name), None if bound == inf else bound)
            for name, bound in bounds.items()
        }
        return under_policy("clip", inner, state, (args, kwargs), **smaller)

    return transform(
        "clip",
        fn,
        around,
        never_around=("simulate",),
        right="fzero.simulate(fzero.clip(step, max_norm=...), world_size=...)",
        options=bounds if max_value is not None else {"max_norm": max_norm},
    )


def _smaller(a: float | None, b: float | None) -> float | None:
    bounds = [bound for bound in (a, b) if bound is not None]
    return min(bounds) if bounds else None
