"""`trace`: a step and its arguments -> the program of one rank; `check_spmd`: that of all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from fzero.collectives import assert_same_everywhere, disagreement, told_everywhere
from fzero.context.modes import in_transform, is_recorded
from fzero.errors import AxisError, LayoutError, PhaseError
from fzero.state import Placement
from fzero.tools.trace.calls import calls_of
from fzero.tools.trace.found import AsFound
from fzero.tools.trace.ops import ops_of
from fzero.tools.trace.program import (
    FIELD,
    UPDATE,
    RecordedStep,
    inputs_of,
    is_collective,
    record_step,
)
from fzero.tools.trace.traces import Trace
from fzero.tools.trees import map_tensors
from fzero.transforms.models import flatten_states
from fzero.transforms.pipeline import Step, describe_function
from fzero.transforms.simulate import require_stacked


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
    states = flatten_states("trace", arguments[0] if arguments else None)[0]
    axis = states[0].setup.axis
    simulated = isinstance(step, Step) and step.name == "simulate"
    if not simulated and not axis.group_name and axis.size > 1:
        raise AxisError(
            f"trace of a step on one rank, with the stacked state of {axis}.",
            cause="the state was made by `fzero.simulate(...).init`.",
            fix=f"trace the simulated step, fzero.simulate(step, world_size={axis.size}), with "
            "stacked batches.",
        )
    if rank is None:
        rank = 0 if simulated else axis.rank
    if type(rank) is not int or not 0 <= rank < axis.size:
        raise LayoutError(
            f"trace: rank={rank!r}, and {axis} has ranks 0 to {axis.size - 1}.",
            cause="a state of fewer ranks than were meant.",
            fix="trace with a state of more ranks, or give one of these.",
        )
    if isinstance(step, Step) and simulated:
        require_stacked("trace", arguments, axis.size)
        # Copies, so that bytes of one rank are counted and not of the whole stack.
        step = step.inner
        arguments = map_tensors(
            lambda x: torch.empty_like(x[rank], requires_grad=x.requires_grad), arguments
        )
    return record_step(step, arguments, axis, rank, found)


def check_spmd(step: Callable[..., Any], state: Any, args: Any = ()) -> tuple[str, ...]:
    """Return the collectives of a step, in order, if every rank makes the same ones.

    Each rank's program is traced (see `fzero.trace`), and compared before any of its collectives is
    issued; then the calls in it (`psum`, `grad_and_reduce`, `map_params`) with their options, which
    ranks tell each other at run time; then the states that it returns: updated by the same ops, or
    as they were given. Ranks that read other parameters, or read them in
    another order, are found, too; stage 3 serves them, at the price of a slower step.

    Args:
        step: (state, *args) -> (state, aux); or `fzero.simulate` of one, whose ranks are then all
            traced here, one after the other.
        state: as the step is given it.
        args: the further arguments of the step, a tuple; what is no tuple is the only one. A batch
            that is a tuple goes into one: ((x, y),).

    Returns:
        A line for each collective: what it is, the axis, the parameters, the shapes it gives. In
        processes this is a collective itself: every rank calls it.

    Raises:
        MismatchError: on every rank, for programs that differ: the first collective in which they
            do, the ranks, and the parameters that it is about; or the first call or option.
        PhaseError: as `fzero.trace` does.

    Example:
        >>> import torch, fzero
        >>> def step_fn(state, x):
        ...     return state, fzero.pmean(x) if fzero.axis_index() < 2 else x
        >>> step = fzero.simulate(fzero.shard(step_fn, stage=0), world_size=3)
        >>> state = step.init({"w": torch.ones(2)}, fzero.optim.sgd(1.0))
        >>> check_spmd(step, state, torch.ones(3, 2))
        Traceback (most recent call last):
            ...
        fzero.errors.MismatchError: the ranks disagree about the collectives of the step: rank 0 has
        0: all_reduce dp -> f32[2], rank 2 has nothing.
        Usual cause: ...
    """
    arguments = (state, *(args if isinstance(args, tuple) else (args,)))
    axis = flatten_states("check_spmd", state)[0][0].setup.axis
    what = ("the collectives of the step", "the calls of the step", "what the step returns")
    with AsFound("check_spmd", step, arguments) as found:
        if isinstance(step, Step) and step.name == "simulate":
            everyone = [_schedule(step, arguments, rank, found) for rank in range(axis.size)]
            for of, lines in zip(what, zip(*everyone, strict=True), strict=True):
                if any(other != lines[0] for other in lines):
                    raise disagreement(lines, what=of)
            return everyone[0][0]
        with told_everywhere(axis, what=what[0]):
            mine = _schedule(step, arguments, None, found)
        for of, lines in zip(what, mine, strict=True):
            assert_same_everywhere(lines, axis, what=of)
        return mine[0]


def _schedule(
    step: Callable[..., Any], arguments: tuple[Any, ...], rank: int | None, found: AsFound
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Return what one rank does, a line each: collectives, calls and their options, results."""
    program = program_of(step, arguments, rank, found)
    collectives = (op for op in ops_of(program)[1] if op.is_collective)
    calls = list[str]()
    for number, text in enumerate(program.log.calls):
        name, *options = text.splitlines()
        calls += [f"{number}: {name}", *(f"{number}: {name}, {option}" for option in options)]
    return (
        tuple(
            f"{number}: {op.name} {op.detail} -> {' '.join(map(str, op.gives))}"
            for number, op in enumerate(collectives)
        ),
        tuple(calls),
        tuple(_returned(program)),
    )


def _returned(program: RecordedStep) -> Iterator[str]:
    """Yield a line for each tensor of the returned states that an update changes.

    It says whether the tensor is an argument. Of what every rank has whole, it has the ops behind
    it, as far as the last collective or update: before those ranks may compute other things.
    """
    nodes = list(program.graph.graph.nodes)
    paths = dict(zip(inputs_of(nodes), program.inputs, strict=True))
    for node, path in zip(nodes[-1].args[0], program.outputs, strict=True):
        if (found := FIELD.match(path)) is None or found[2] not in ("params", "optimizer", "step"):
            continue
        is_whole = path.endswith((".step", ".count")) or (
            found[2] == "params" and program.setups[found[1]].params is Placement.REPLICATED
        )
        behind, ahead = dict[fx.Node, str](), [node] if is_whole else []
        while ahead:
            if (one := ahead.pop()) not in behind:
                target: Any = one.target
                behind[one] = getattr(target, "__name__", str(target))
                is_last = one in paths or target is UPDATE or is_collective(one)
                ahead += [] if is_last else one.all_input_nodes
        of = f"the argument {paths[node]}" if node in paths else f"new {sorted(behind.values())}"
        yield f"{path}: {of}"
