"""`check_finite`: a loss or a gradient that is no finite number stops a step before its update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, overload

from fzero.errors.check import called_as
from fzero.transforms.pipeline import P, R, Step, Transform, transform
from fzero.transforms.states import under_policy


@overload
def check_finite(fn: Callable[P, R], /) -> Step[P, R]: ...
@overload
def check_finite() -> Transform: ...
@called_as("check_finite(step)")
def check_finite(fn: Callable[..., Any] | None = None, /) -> Step[..., Any] | Transform:
    """Let `apply_gradients` raise if a loss L_r, or a gradient dL_r/dp, in `fn` is not finite.

    Where all of them are finite it is the identity, bit for bit. Else every rank raises the same
    `NonFiniteError` before anything is updated: it has the step (updates made), the rank whose own
    loss or gradient it is, and the first parameter whose gradient is so. First is what the
    backward made first, which is nearest to the loss; of several backwards since the last update,
    the earliest; of several ranks, the lowest. Gradients are looked at before they are reduced:
    afterwards every rank has the NaN. The state that the step was given is still good.

    With a loss scale (`fzero.scale_loss`) an infinite gradient is a step that is skipped, which
    raises nothing: then only losses are looked at, as they are without the scale. Not looked at are
    gradients of `add_gradients`, and a sum over ranks or backwards that is the first to overflow.

    It reads each local gradient once more, and the host waits for the device once at the end of
    each backward, not for each parameter. Ranks exchange nothing more, unless it raises.

    It may stand on either side of `shard`, `coalesce`, `accumulate`, `clip`, `scale_loss` and
    `autocast`, with the same result. Inside `accumulate` and windows it raises at the update, too.

    Args:
        fn: the step. Its state may be a pytree of states; their keys are part of the path.

    Returns:
        A step that is called as `fn` is. Without `fn`, a decorator.

    Raises:
        LayoutError: for check_finite around simulate.
        NonFiniteError: in a call, on every rank, as above.
        PhaseError: in a call, inside a torch.func transform or a trace, where no value can be read.
        MismatchError: in a call, on every rank, when only some ranks check.

    Example:
        >>> import torch, fzero
        >>> @fzero.check_finite
        ... def step_fn(state, x):
        ...     state, loss = fzero.grad_and_reduce(lambda p, x: (p["w"] * x).sqrt(), state)(x)
        ...     return fzero.apply_gradients(state), loss
        >>> state = fzero.init({"w": torch.tensor(1.0)}, fzero.optim.sgd(0.5), stage=2)
        >>> state, loss = step_fn(state, 4.0)
        >>> try:
        ...     step_fn(state, 0.0)
        ... except fzero.NonFiniteError as error:
        ...     print(error.step, error.rank, error.what, error.path)
        1 0 gradient w
    """

    def around(
        inner: Callable[..., Any], state: Any, /, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        return under_policy("check_finite", inner, state, (args, kwargs), check_finite=True)

    return transform(
        "check_finite",
        fn,
        around,
        never_around=("simulate",),
        right="fzero.simulate(fzero.check_finite(step), world_size=...)",
        options={},
    )
