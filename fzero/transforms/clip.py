"""`clip`: bound the global norm of the gradients that a step updates from."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import inf
from typing import Any, overload

import torch
from torch import Tensor

from fzero.collectives import reduce_many
from fzero.errors.check import called_as, is_positive, require
from fzero.machine.offload import to_device
from fzero.machine.packing import over_places
from fzero.machine.tree_sum import square_sum
from fzero.optim import require_ordered
from fzero.state import Buffers, Placement, TrainState
from fzero.state.points import Builtin
from fzero.state.train_state import require_state
from fzero.transforms.backward_pass import agree, reduce_agreed, require_held
from fzero.transforms.donation import check_alive, without_donation
from fzero.transforms.grad import require_learner
from fzero.transforms.leaf_slices import Prepared, clip_factor
from fzero.transforms.loss_scale import without_scale
from fzero.transforms.models import flatten_states, under_policy
from fzero.transforms.pipeline import P, R, Step, Transform, transform, transform_function
from fzero.transforms.points import Running
from fzero.transforms.recipe import mean_of

# The norm of gradients over all ranks, and the factor that clips to one.


def global_norm(state: TrainState) -> Tensor:
    """sqrt(sum of g^2) over the mean gradients of every trainable element, on all ranks alike.

    Shards are summed over ranks, replicas counted once, padding is zero; tied leaves are one
    leaf, frozen ones have no gradient. Of a state on a part of a mesh it is over the elements at
    all places: over all experts. A scalar, fp32 or wider. A collective.

    Raises `PhaseError` if the state holds no gradients, and `LayoutError` for what is no state, or
    one of which no leaf learns.

    Example:
        >>> import torch, fzero
        >>> state = fzero.init({"w": torch.tensor([3.0, 4.0])}, fzero.optim.sgd(0.5), stage=0)
        >>> state, _ = fzero.grad_and_reduce(lambda p: (p["w"] ** 2).sum() / 2, state)()
        >>> fzero.global_norm(state)
        tensor(5.)
    """
    require_state("global_norm", state)
    check_alive(state)
    require_learner([state], "global_norm")
    said = agree("global_norm", [state])
    require_held(said, "global_norm")
    reduced = reduce_agreed(without_donation(state), said[0])
    return mean_of(reduced).of(norm_of_state(reduced, reduced.gradients))


def norm_of_state(state: TrainState, gradients: Buffers) -> Tensor:
    """Return the norm of a state's reduced gradients, without its loss scale. A collective.

    Before any other division.
    """
    flats = (without_scale(state, flat) for flat in gradients.flats)  # one at a time
    return norm_of(state, flats, gradients.placement)


def norm_of(state: TrainState, flats: Iterable[Tensor], placement: Placement) -> Tensor:
    """Return the norm of what ranks hold of gradients placed so. A collective.

    In a layout of blocks it is a sum in one order: the same bits at any stage, on any ranks.
    """
    setup, device = state.setup, state.device
    if setup.layout.options.block > 1 and setup.layout.trainable:
        return square_sum(setup, (to_device(flat, device) for flat in flats), placement).sqrt()
    squares: list[Tensor] = []
    for flat in flats:
        if flat.numel():
            wide = torch.promote_types(flat.dtype, torch.float32)
            norm = torch.linalg.vector_norm(to_device(flat, device), dtype=wide)
            squares.append(norm.square())
    nothing = torch.zeros((), dtype=torch.float32, device=device)
    total = torch.stack(squares).sum() if squares else nothing
    axis = setup.over(placement)  # replicas have the same elements, which count once
    total = reduce_many([total], axis, ordered=setup.reduction.ordered)[0]
    return over_places(setup, total).sqrt()


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
        others = flatten_states("clip", state)[0][0].setup.policy.points
        points = others if own is None else (own, *others)
        beside = others[0] if others else None
        if own is not None and isinstance(beside, Builtin) and beside.name == own.name:
            mine, theirs = dict(own.options), dict(beside.options)
            both = {x: min(mine.get(x, inf), theirs.get(x, inf)) for x in {**mine, **theirs}}
            points = (clipping(**both), *others[1:])
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
        held, bound = ready.gradients, most / ready.rest
        flats = tuple(to_device(flat, state.device).clamp(-bound, bound) for flat in held.flats)
        made = Buffers(flats=flats, placement=held.placement)  # in new memory
        ready = ready._replace(gradients=made, is_shared=False)
    if (most := bounds.get("max_norm")) is not None:
        norm = norm_of(state, ready.gradients.flats, ready.gradients.placement) * ready.rest
        ready = ready._replace(norm=norm, rest=ready.rest * clip_factor(norm, most))
    return ready


# `check_finite`: a loss or a gradient that is no finite number stops a step before its update.


@transform_function
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
