"""`autocast`: losses computed in a lower precision, and what may cross ranks in it, too."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from fzero.context.modes import other_autocast
from fzero.errors import explain
from fzero.errors.check import called_as
from fzero.machine.placeholder import DISABLED_FRAMES
from fzero.state import TrainState
from fzero.state.buffers import SIXTEEN_BIT
from fzero.state.scale import DynamicScale
from fzero.state.setup import Autocast, SafeModules, sixteen_bit_error
from fzero.transforms.loss_scale import with_policy
from fzero.transforms.models import flatten_states, map_states, under_policy
from fzero.transforms.pipeline import Step, Transform, transform, transform_function


@transform_function
@called_as("autocast(step, dtype=torch.bfloat16)")
def autocast(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    dtype: torch.dtype = torch.bfloat16,
    lower_precision_safe_modules: SafeModules | None = None,
) -> Step[..., Any] | Transform:
    """Let every loss in `fn(state, *args)` run under torch.autocast(dtype); parameters stay fp32.

    Operators follow torch.autocast's own policy: a matrix product in `dtype`, a norm or a softmax
    in fp32. Each use of a parameter has a cast of its own, as with `cache_enabled=False`: the
    gradients of several uses add up in fp32, at every stage and in both drivers. The backward runs
    outside of the region, as torch advises. In a state that the step's own
    `init` makes, gradients of parameters that only safe modules use are reduced in `dtype` (half
    the bytes), and at stage 3 such parameters are gathered in it; all others cross ranks in fp32.
    Sums over micro-batches and the update stay in fp32. In another state all of it does.

    Which modules use a parameter is known if `fzero.functionalize` made it; else name the paths. At
    stage 3 a loss that reads a safe parameter itself, a penalty on weights, say, gets it rounded.

    The region is the loss, all of it. An autocast around the step does not count in it, and the
    first one that has another dtype is warned of; one inside the loss holds there, as in torch.

    Args:
        fn: the step.
        dtype: torch.bfloat16; torch.float16, which brings the dynamic loss scale of
            `fzero.scale_loss`, unless the state has another one; or torch.float32, with which this
            is the identity.
        lower_precision_safe_modules: classes of modules, subclasses included, also by qualified
            name; or path -> whether the parameter is safe. Default: Linear, Conv1d, Conv2d, Conv3d.

    Returns:
        A step that is called as `fn` is. Without `fn`, a decorator.

    Raises:
        LayoutError: for another dtype, or what names no modules; around `shard`, `simulate` or
            another `autocast`; in `init` or a call, for parameters in 16 bits that learn.

    Source: Micikevicius et al., "Mixed Precision Training", arXiv 1710.03740.

    Example:
        >>> import torch, fzero
        >>> apply, params = fzero.functionalize(torch.nn.Linear(2, 1))
        >>> seen = []
        >>> def loss_fn(params, x):
        ...     seen.append(apply(params, x).dtype)
        ...     return apply(params, x).sum()
        >>> def step_fn(state, x):
        ...     state, loss = fzero.grad_and_reduce(loss_fn, state)(x)
        ...     return fzero.apply_gradients(state), loss
        >>> step = fzero.shard(fzero.autocast(step_fn, dtype=torch.bfloat16), stage=2)
        >>> state, _ = step(step.init(params, fzero.optim.sgd(0.5)), torch.ones(3, 2))
        >>> seen, fzero.full_params(state)["weight"].dtype
        ([torch.bfloat16], torch.float32)
    """
    record = Autocast(dtype=dtype, lower_precision_safe_modules=lower_precision_safe_modules)
    computes = record.computes
    warned = [False]

    def prepare(state: Any) -> Any:
        return map_states("autocast", lambda one: _scaled(one, computes), state)

    def around(
        inner: Callable[..., Any], state: Any, /, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        state = prepare(state)
        states = flatten_states("autocast", state)[0]
        for layout in (one.setup.layout for one in states if computes):
            for group in (layout.groups[index] for index in layout.trainable):
                if group.dtype in SIXTEEN_BIT:
                    raise sixteen_bit_error(layout.leaves[group.leaves[0]].path, group.dtype)
        other = other_autocast(computes, states[0].device) if computes and not warned[0] else None
        if computes and other is not None:
            warned[0] = True
            text = around_message(computes, other)
            warnings.warn(text, UserWarning, stacklevel=4 + DISABLED_FRAMES)
        return under_policy("autocast", inner, state, (args, kwargs), autocast=computes)

    return transform(
        "autocast",
        fn,
        around,
        never_around=("autocast", "shard", "simulate"),
        right="fzero.shard(fzero.autocast(step, dtype=...), stage=...), with one autocast",
        options={"dtype": dtype},
        init_options={"autocast": record},
        prepare=prepare,
    )


def _scaled(state: TrainState, dtype: torch.dtype | None) -> TrainState:
    """With the loss scale that fp16 needs, unless the state has one."""
    needs = dtype is torch.float16 and state.scale is None
    return with_policy(state, DynamicScale()) if needs else state


def around_message(dtype: torch.dtype, other: torch.dtype) -> str:
    """What to warn of where an autocast of another dtype is around."""
    return explain(
        f"torch.autocast({other}) is around a step whose own autocast has {dtype}; that one holds.",
        cause="two settings of one thing.",
        fix="leave the outer one out.",
    )
