"""`scale_loss`: losses are multiplied before their backward, for gradients that fp16 can hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, overload

from fzero.errors.check import called_as
from fzero.options import Scale
from fzero.state.scale import as_policy
from fzero.transforms.pipeline import P, R, Step, Transform, returned_pair, transform
from fzero.transforms.scaled import with_policy
from fzero.transforms.states import map_states


@overload
def scale_loss(fn: Callable[P, R], /, scale: Scale = "dynamic") -> Step[P, R]: ...
@overload
def scale_loss(*, scale: Scale = "dynamic") -> Transform: ...
@called_as("scale_loss(step, 1024.0)")
def scale_loss(
    fn: Callable[..., Any] | None = None, /, scale: Scale = "dynamic"
) -> Step[..., Any] | Transform:
    """Let `grad_and_reduce` in `fn(state, *args)` differentiate s L, and the update divide by s.

    g = (1 / s) d(s L)/dp: small gradients do not become zero in 16 bits. The value that
    `grad_and_reduce` returns is L; `fzero.gradients` and `fzero.global_norm` give g. What is
    divided by is the s that the gradients were made with, also where the scale then changes.

    An infinity or a NaN in the gradients of any rank skips the update on every rank: parameters,
    optimizer and `state.step` stay as they are, and `state.scale.overflowed` is true. The scale
    is `state.scale.scale`; it goes with the state, also into a checkpoint. The host does not wait
    for the device, except for optimizers without a fused kernel (Lion, foreign pairs).

    A scale of 1, or None, is the identity, and looks for no overflow. A power of two that neither
    overflows nor underflows changes no bit.

    Args:
        fn: the step. If its state is a pytree of states, each has a scale of its own, and is
            skipped by its own gradients.
        scale: a positive number, which stays; "dynamic", for `fzero.DynamicScale()`; a
            `fzero.DynamicScale(init_scale=..., ...)`; a tensor of one element, or a function
            without arguments that gives a number or such a tensor: the user's own scale, the same
            on every rank, read when the first gradient after an update is made.

    Returns:
        A step that is called as `fn` is; its `init` gives states with the scale. Without `fn`, a
        decorator.

    Raises:
        LayoutError: for another scale, and for scale_loss around scale_loss.
        PhaseError: in a call, for a state with gradients that were made with another scale.
        MismatchError: in a call, on every rank, when the ranks scale in other ways.

    Source: Micikevicius et al., "Mixed Precision Training", arXiv 1710.03740, section 3.2.

    Example:
        >>> import torch, fzero
        >>> def step_fn(state, x):
        ...     state, loss = fzero.grad_and_reduce(lambda p, x: (p * x).sum(), state)(x)
        ...     return fzero.apply_gradients(state), loss
        >>> step = fzero.shard(fzero.scale_loss(step_fn, "dynamic"), stage=2)
        >>> state = step.init(torch.ones(2), fzero.optim.sgd(1.0))
        >>> state, loss = step(state, 0.5)
        >>> loss, fzero.full_params(state), state.scale.scale
        (tensor(1.), tensor([0.5000, 0.5000]), tensor(65536.))
        >>> state, loss = step(state, float("inf"))
        >>> fzero.full_params(state), state.scale.scale, state.scale.overflowed
        (tensor([0.5000, 0.5000]), tensor(32768.), tensor(True))
    """
    policy = as_policy("scale_loss: scale", scale)

    def prepare(state: Any) -> Any:
        return map_states("scale_loss", lambda one: with_policy(one, policy), state)

    def around(
        inner: Callable[..., Any], state: Any, /, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        return returned_pair("scale_loss", inner, inner(prepare(state), *args, **kwargs))

    return transform(
        "scale_loss",
        fn,
        around,
        never_around=("scale_loss", "simulate"),
        right="fzero.simulate(fzero.scale_loss(step, ...), world_size=...), with one scale",
        options={"scale": scale if isinstance(scale, str) or policy is None else policy},
        prepare=prepare,
    )
