"""The three linear maps over ranks as autograd Functions, closed under transposition.

    gather    x_r [l]   -> y   [W l]   adjoint: scatter
    scatter   x_r [W l] -> y_r [l]     adjoint: gather
    reduce    x_r [n]   -> y   [n]     adjoint: reduce

Each takes several buffers, so that one Function is one coalesced collective. They have a rule
for every mode of torch.func: `backward` applies the partner (hence any order), `jvp` applies the
map to the tangent (it is linear), `vmap` moves the batch dim behind the rank dim. The raw
collective sits in a `torch.library` op when the call is traced, because make_fx cannot see
through torch.distributed; otherwise it is called directly, so that counters see it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._functorch import eager_transforms
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from fzero.collectives import _lowering as lowering
from fzero.collectives import _traced as traced
from fzero.collectives._performers import UserCall, before_collective
from fzero.context.modes import is_recorded
from fzero.errors import AxisError
from fzero.ranks.mesh import Axis, Runtime


class LinearMap(NamedTuple):
    """What a Function needs besides tensors."""

    kind: str
    axis: Axis
    ordered: bool = False
    # What a user calls it, for ranks compare it; "" for one of fzero's own, which they agree on.
    name: str = ""


_ADJOINT = {"gather": "scatter", "scatter": "gather", "reduce": "reduce"}


class _Linear(torch.autograd.Function):
    """y = A x for one of the three maps A; `plan` says which, over which axis."""

    @staticmethod
    def forward(plan: LinearMap, *xs: Tensor) -> tuple[Tensor, ...]:
        return tuple(_run(plan, xs))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.plan = inputs[0]
        ctx.set_materialize_grads(True)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Any, ...]:
        return None, *_Linear.apply(ctx.plan._replace(kind=_ADJOINT[ctx.plan.kind]), *dys)

    @staticmethod
    def jvp(ctx: Any, _: Any, *dxs: Tensor | None) -> tuple[Tensor | None, ...]:
        _refuse_linearize()
        wanted = [dx for dx in dxs if dx is not None]  # integers have none
        done = iter(_Linear.apply(ctx.plan, *wanted) if wanted else ())
        return tuple(None if dx is None else next(done) for dx in dxs)

    @staticmethod
    def vmap(info: Any, in_dims: Any, plan: LinearMap, *xs: Tensor) -> tuple[Any, Any]:
        # Behind the rank dim the batch is just one more trailing dim of the same collective.
        at = 0 if plan.kind == "reduce" else 1
        moved = [
            x.unsqueeze(at).expand(*x.shape[:at], info.batch_size, *x.shape[at:])
            if dim is None
            else x.movedim(dim, at)
            for x, dim in zip(xs, in_dims[1:], strict=True)
        ]
        ys = _Linear.apply(plan, *moved)
        return ys, tuple(at for _ in ys)


def gather_many(shards: Sequence[Tensor], axis: Axis, *, name: str = "") -> list[Tensor]:
    """Each [l] -> [W l], concatenated in rank order. Adjoint: `scatter_many`.

    name: of a user's call, here and in the two below.
    """
    return _apply(LinearMap("gather", axis, name=name), shards)


def scatter_many(
    fulls: Sequence[Tensor], axis: Axis, *, ordered: bool = False, name: str = ""
) -> list[Tensor]:
    """Each [W l] -> [l]: this rank's shard of the sum over ranks. Adjoint: `gather_many`."""
    return _apply(LinearMap("scatter", axis, ordered, name), fulls)


def reduce_many(
    values: Sequence[Tensor], axis: Axis, *, ordered: bool = False, name: str = ""
) -> list[Tensor]:
    """Each [n] -> [n]: the sum over ranks. Adjoint: itself."""
    return _apply(LinearMap("reduce", axis, ordered, name), values)


def _apply(plan: LinearMap, xs: Sequence[Tensor]) -> list[Tensor]:
    axis = plan.axis
    if axis.runtime is Runtime.LOCAL:
        return list(xs)  # over one rank all three maps are the identity
    # To a user's call the other ranks come, and may have something.
    sent = [bool(x.numel() or plan.name) for x in xs]
    wanted = [x for x, is_sent in zip(xs, sent, strict=True) if is_sent]
    done = iter(_Linear.apply(plan, *wanted) if wanted else ())
    pairs = zip(xs, sent, strict=True)
    return [next(done) if is_sent else of_nothing(plan.kind, axis, x) for x, is_sent in pairs]


def of_nothing(kind: str, axis: Axis, x: Tensor) -> Tensor:
    """Return what a map makes of a tensor without elements: a shape, and nothing to send."""
    if kind in ("reduce", "all_to_all"):
        return x.clone()
    if kind == "gather":
        return x.repeat(axis.size, *(1 for _ in x.shape[1:]))
    return x[: x.shape[0] // axis.size]


def _run(plan: LinearMap, xs: Sequence[Tensor]) -> list[Tensor]:
    kind, axis, ordered, _ = plan
    _come(plan, xs)
    if not any(x.numel() for x in xs):
        lowering.meet(f"{_OPS[kind]}[{lowering.shapes_of(xs)}]", axis)
        return [of_nothing(kind, axis, x).clone() for x in xs]
    if axis.runtime is Runtime.PROCESSES and is_recorded(xs):
        return traced.RUN[kind](list(xs), axis.name, axis.group().group_name, axis.size, ordered)
    return _BEGIN[kind](xs, axis, ordered).wait()


def _come(plan: LinearMap, xs: Sequence[Tensor]) -> None:
    """Come to this place together with all ranks, which make the same call if it is a user's."""
    if not plan.name or is_recorded(xs):
        before_collective(plan.axis)
        return
    op, name = _OPS[plan.kind], plan.name + " in rank order" * plan.ordered
    said = name if name.startswith(op) else f"{op} in the backward of {name}"
    before_collective(plan.axis, UserCall(said, lowering.shapes_of(xs)))


_OPS = {"gather": "all_gather", "scatter": "reduce_scatter", "reduce": "all_reduce"}

_BEGIN: dict[str, Callable[[Sequence[Tensor], Axis, bool], lowering.Started]] = {
    "gather": lambda xs, axis, ordered: lowering.begin_all_gather(xs, axis),
    "scatter": lambda xs, axis, ordered: lowering.begin_reduce_scatter(xs, axis, ordered=ordered),
    "reduce": lambda xs, axis, ordered: lowering.begin_all_reduce(xs, axis, ordered=ordered),
}


def _refuse_linearize() -> None:
    """Refuse a trace with dual numbers that `torch.func.jvp` has not made: that of linearize.

    It folds a collective's result as a constant: wrong numbers.
    """
    if get_proxy_mode() is None or eager_transforms.JVP_NESTING:
        return
    raise AxisError(
        "torch.func.linearize over a collective.",
        cause="linearize folds what a collective returned as a constant, so its result would "
        "be wrong without an error.",
        fix="use torch.func.jvp(fn, primals, tangents), one call for each tangent.",
    )
