"""`trace`: a step and its arguments -> the program of one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor

from fzero.context.modes import in_transform, is_recorded
from fzero.errors import AxisError, LayoutError, PhaseError
from fzero.ranks.mesh import Axis
from fzero.state import NAMESPACE
from fzero.tools.trace._calls import calls_of
from fzero.tools.trace._trace import Trace
from fzero.tools.trace.found import AsFound
from fzero.tools.trace.ops import ops_of
from fzero.tools.trace.program import RecordedStep, record_step
from fzero.transforms.pipeline import Step, describe_function
from fzero.transforms.simulate import require_stacked
from fzero.transforms.states import flatten_states


def trace(step: Callable[..., Any], *, rank: int | None = None) -> Callable[..., Trace]:
    """Return t: t(state, *args) is the program that `step(state, *args)` runs on one rank.

    Every ATen op and collective of one optimizer step, forward, backward and update, in the order
    in which they run, at every stage; no number is computed and nothing is sent. At stage 3 a state
    without a schedule is given that of its first step, so that the program is that of a steady one.

    The ranks are those of the state: one process, the processes of a group, or, of a simulated
    step with a stacked state, its virtual ranks. The update of a rule of `fzero.optim` is one op,
    out of place, unless the step differentiates it.

    Args:
        step: (state, *args) -> (state, aux), sharded or not; or `fzero.simulate` of one.
        rank: whose program; default this process's, or virtual rank 0.

    Returns:
        A function of the arguments of `step` that returns a `Trace`. Not a collective.

    Raises:
        LayoutError: for a `rank` that the axis does not have, in the call.
        PhaseError: in the call, if the step reads a value of a tensor (`.item()`, `if x > 0:`),
            and inside of another trace or transform.

    Source: Bradbury et al., JAX, `jax.make_jaxpr`; Reed et al., "torch.fx", arXiv 2112.08429.

    Example:
        >>> import torch, fzero
        >>> def step_fn(state, x):
        ...     state, loss = fzero.grad_and_reduce(lambda p, x: (p["w"] * x).sum(), state)(x)
        ...     return fzero.apply_gradients(state), loss
        >>> step = fzero.simulate(fzero.shard(step_fn, stage=2), world_size=4)
        >>> state = step.init({"w": torch.ones(16)}, fzero.optim.sgd(1.0))
        >>> program = trace(step)(state, torch.ones(4, 16))
        >>> program.collectives, program.wire_bytes
        ({'reduce_scatter': 1, 'all_gather': 1}, 96)
    """
    if not callable(step):
        raise LayoutError(
            f"trace got a {type(step).__name__} in the place of the step.",
            cause="a step that was called already.",
            fix="pass the function: fzero.trace(step)(state, batch).",
        )

    def traced(*arguments: Any) -> Trace:
        with AsFound("trace", step, arguments) as found:
            program = program_of(step, arguments, rank, found)
            inputs, ops, outputs = ops_of(program)
            world_size = program.states[0].setup.axis.size
            return Trace(
                title=f"{describe_function(step)} on rank {program.rank} of {world_size}",
                rank=program.rank,
                inputs=inputs,
                ops=ops,
                outputs=outputs,
                log=program.log,
                graph=program.graph,
                calls=calls_of(program, ops),
            )

    return traced


def program_of(
    step: Callable[..., Any], arguments: tuple[Any, ...], rank: int | None, found: AsFound
) -> RecordedStep:
    """Record a step on one rank of the axis that its state is on."""
    if in_transform() or is_recorded(()):
        raise PhaseError(
            "trace inside of a torch.func transform or of another trace.",
            cause="a traced step in the place of the step.",
            fix="trace the outermost function.",
        )
    return record_step(*_of_one_rank(step, arguments, rank), found)


def _of_one_rank(
    step: Callable[..., Any], arguments: tuple[Any, ...], rank: int | None
) -> tuple[Callable[..., Any], Any, Axis, int]:
    """Return (step, arguments, axis, rank) of one rank, unstacked if ranks are virtual.

    rank: default this process's, or virtual rank 0.
    """
    states = flatten_states("trace", arguments[0] if arguments else None)[0]
    axis = states[0].setup.axis
    if isinstance(step, Step) and step.name == "simulate":
        rank = _checked(0 if rank is None else rank, axis)
        return step.inner, _of_rank(arguments, rank, axis), axis, rank
    if axis.group_name or axis.size == 1:
        return step, arguments, axis, _checked(axis.rank if rank is None else rank, axis)
    raise AxisError(
        f"trace of a step on one rank, with the stacked state of {axis}.",
        cause="the state was made by `fzero.simulate(...).init`.",
        fix=f"trace the simulated step, fzero.simulate(step, world_size={axis.size}), with "
        "stacked batches.",
    )


def _checked(rank: int, axis: Axis) -> int:
    if type(rank) is int and 0 <= rank < axis.size:
        return rank
    raise LayoutError(
        f"trace: rank={rank!r}, and {axis} has ranks 0 to {axis.size - 1}.",
        cause="a state of fewer ranks than were meant.",
        fix="trace with a state of more ranks, or give one of these.",
    )


def _of_rank(arguments: Any, rank: int, axis: Axis) -> Any:
    """Return the part of virtual rank `rank` of stacked arguments."""
    require_stacked("trace", arguments, axis.size)

    def mine(x: Any) -> Any:
        # A copy, so that bytes of one rank are counted and not of the whole stack.
        like = isinstance(x, Tensor)
        return torch.empty_like(x[rank], requires_grad=x.requires_grad) if like else x

    return optree.tree_map(mine, arguments, namespace=NAMESPACE)
