"""`check_spmd`: do all ranks make the same collectives and calls, in the same order?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import fx

from fzero.collectives import assert_same_everywhere, disagreement, told_everywhere
from fzero.ranks.mesh import Axis
from fzero.state import Placement
from fzero.tools.trace._api import program_of
from fzero.tools.trace._record import Op
from fzero.tools.trace.alive import inputs_of
from fzero.tools.trace.found import AsFound
from fzero.tools.trace.ops import UPDATE, is_collective, ops_of
from fzero.tools.trace.program import FIELD, RecordedStep
from fzero.transforms.pipeline import Step
from fzero.transforms.states import flatten_states


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
    with AsFound("check_spmd", step, arguments) as found:
        return _checked(step, arguments, axis, found)


def _checked(
    step: Callable[..., Any], arguments: tuple[Any, ...], axis: Axis, found: AsFound
) -> tuple[str, ...]:
    if isinstance(step, Step) and step.name == "simulate":
        everyone = [_schedule(step, arguments, rank, found) for rank in range(axis.size)]
        for what, lines in zip(_WHAT, zip(*everyone, strict=True), strict=True):
            if any(other != lines[0] for other in lines):
                raise disagreement(lines, what=what)
        return everyone[0].collectives
    with told_everywhere(axis, what=_WHAT[0]):
        mine = _schedule(step, arguments, None, found)
    for what, lines in zip(_WHAT, mine, strict=True):
        assert_same_everywhere(lines, axis, what=what)
    return mine.collectives


_WHAT = ("the collectives of the step", "the calls of the step", "what the step returns")


class _Schedule(NamedTuple):
    """What one rank does, a line each; calls have a line for each option."""

    collectives: tuple[str, ...]
    calls: tuple[str, ...]
    returned: tuple[str, ...]


def _schedule(
    step: Callable[..., Any], arguments: tuple[Any, ...], rank: int | None, found: AsFound
) -> _Schedule:
    program = program_of(step, arguments, rank, found)
    collectives = (op for op in ops_of(program)[1] if op.is_collective)
    calls = enumerate(program.log.calls)
    return _Schedule(
        tuple(f"{number}: {_line(op)}" for number, op in enumerate(collectives)),
        tuple(line for number, text in calls for line in _lines(number, text)),
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


def _line(op: Op) -> str:
    return f"{op.name} {op.detail} -> {' '.join(map(str, op.gives))}"


def _lines(number: int, text: str) -> list[str]:
    name, *options = text.splitlines()
    return [f"{number}: {name}", *(f"{number}: {name}, {option}" for option in options)]
