"""From a recorded step to a callable: passes, actions, inputs and outputs."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import optree
import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import _disable_current_modes

from fzero.collectives import performer_of
from fzero.errors import LayoutError
from fzero.ranks.mesh import Axis
from fzero.state import NAMESPACE, TrainState
from fzero.tools.compile.key import FunctionsRun
from fzero.tools.compile.passes import (
    Action,
    Compiler,
    Randomness,
    RecordedDraws,
    actions_of,
    gather_early,
    held_in,
    merge_collectives,
    note_draws,
    rematerialize,
    wait_late,
    without_writes,
    write_back,
)
from fzero.tools.trace.found import AsFound
from fzero.tools.trace.program import RecordedStep, inputs_of, is_collective, record_step
from fzero.transforms.donation import take_over, undo_take_over
from fzero.transforms.models import flatten_states, is_state
from fzero.transforms.pipeline import Step

Backend = Literal["inductor", "eager"]
MERGED_BYTES = 2**20
EARLY_BYTES = 8 * 2**20
Returns = Callable[[list[Tensor]], Any]
"""The tensors that the graph gives -> what the step returns."""


def step_donates(fn: Any) -> bool:
    """Return whether a step donates its state, as in `shard(donate=True)`."""
    if not isinstance(fn, Step):
        return False
    return fn.options.get("donate", False) if fn.name == "shard" else step_donates(fn.inner)


def axis_of_states(arguments: Any) -> Axis:
    """Return the common axis of the states, after checking that a graph can hold their optimizers.

    Raises `LayoutError` for several axes, and for a torch.optim instance.
    """
    states: Sequence[TrainState] = flatten_states("compile", arguments[0])[0]
    axes = {state.setup.axis for state in states}
    if len(axes) > 1:
        raise LayoutError(
            f"compile: the states are on {len(axes)} meshes.",
            cause="models that are sharded over other groups of ranks.",
            fix="put them on one mesh, or run the step itself.",
        )
    for state in states:
        groups = state.setup.optimizer.param_groups(state.setup.layout.leaves, 0)
        if groups.instance is not None:
            raise LayoutError(
                "compile: the options of the optimizer are read from a "
                f"{type(groups.instance).__name__} at each update.",
                cause="fzero.optim.from_torch(instance): a scheduler would change them, and a "
                "graph would not see it.",
                fix="use a rule of fzero.optim, whose lr is a number or a schedule.",
            )
    return axes.pop()


def recorded(
    step: Callable[..., Any],
    arguments: Any,
    axis: Axis,
    found: AsFound,
    ran: FunctionsRun,
) -> tuple[RecordedStep, Randomness]:
    """Return the program of this rank, without writes, and its draws; `ran` notes what runs.

    The last argument has the keywords.
    """
    known: list[Randomness] = []

    def with_keywords(*given: Any) -> Any:
        with RecordedDraws(found.generators()) as drawn, ran:
            returned = step(*given[:-1], **given[-1])
        known[:] = [drawn.randomness]
        return returned

    program = record_step(with_keywords, arguments, axis, axis.rank, found)
    program = replace(program, graph=without_writes(program.graph))
    note_draws(program.graph.graph, known[0])
    return program, known[0]


def _with_passes(program: RecordedStep, sizes: dict[str, int] | None) -> fx.GraphModule:
    """Return a copy of the graph after the passes; without `sizes`, of those that leave order."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(program.graph.graph, {}))
    if sizes is not None:
        gather_early(graph, most_bytes=sizes["gather_bytes"])
        wait_late(graph)
        merge_collectives(graph, bucket_bytes=sizes["bucket_bytes"])
    rematerialize(graph)
    graph.lint()
    return fx.GraphModule(program.graph, graph)


def _same_places(program: RecordedStep) -> list[tuple[int, int]]:
    """Return (input, output) pairs of the same buffer of a state, before and after the step."""
    where = {path: i for i, path in enumerate(program.inputs) if path.startswith("state")}
    pairs = ((where.get(path), i) for i, path in enumerate(program.outputs))
    return [(i, k) for i, k in pairs if i is not None]


@dataclass(frozen=True, slots=True)
class Compiled:
    """A compiled graph: a list of actions."""

    actions: Iterable[Action]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    returns: Returns
    held: dict[str, Tensor]  # tensors that the functions of the step read, by name
    collectives: tuple[str, ...]  # compared between ranks, which must make the same ones
    number: int  # what is compared of them in each call
    donate: bool

    def __call__(self, arguments: Any) -> Any:
        """Run the actions on the tensors of the arguments; return the result of the step."""
        given = arguments[0]
        taken = take_over(given) if self.donate else given
        env = dict(zip(self.inputs, _tensors((taken, *arguments[1:])), strict=True))
        env |= {name: x.detach() for name, x in self.held.items()}  # as they are now
        whole = True  # nothing was written into the old state
        try:
            with torch.no_grad():
                for action in self.actions:
                    whole = whole and not action.writes
                    action(env)
        except BaseException:
            if self.donate and whole:
                undo_take_over(given, taken)
            raise
        return self.returns([env[name] for name in self.outputs])


def compiled(
    program: RecordedStep,
    randomness: Randomness,
    axis: Axis,
    *,
    donate: bool,
    backend: Backend = "eager",
    sizes: dict[str, int] | None = None,
) -> Compiled:
    """Return the callable that runs a recorded step on the ranks of an axis.

    sizes: of the passes that move and merge collectives, which are left out without them.
    """
    graph = _with_passes(program, sizes)
    if donate:
        write_back(graph.graph, _same_places(program))
    performer = performer_of(axis)
    over = axis if performer is None else performer.over(axis)
    axes = {name: over.along(name) for name in over.names}
    axes |= {one.name: one for one in (over.replicas, over.shards)}
    nodes = list(graph.graph.nodes)
    lines = tuple(map(_line, filter(is_collective, nodes)))
    return Compiled(
        actions=actions_of(graph, axes, COMPILERS[backend], randomness),
        inputs=tuple(node.name for node in inputs_of(nodes)),
        outputs=tuple(node.name for node in nodes[-1].args[0]),
        returns=_returned_by(program, axis),
        held=held_in(graph),
        collectives=lines,
        number=zlib.crc32(repr(lines).encode()),
        donate=donate,
    )


def _line(node: fx.Node) -> str:
    values = [x.meta["val"] for x in node.all_input_nodes]
    return f"{node.target} {[(x.dtype, *x.shape) for x in values]} {node.args[1:]}"


def _returned_by(program: RecordedStep, axis: Axis) -> Returns:
    """Return a function from outputs to the result of the step, with states on these ranks."""
    leaves: Any = [0] * program.result.num_leaves
    tree: Any = optree.tree_unflatten(program.result, leaves)

    def moved(node: Any) -> Any:
        if not is_state(node):
            return node
        return node.replace(setup=replace(node.setup, axis=axis))

    real: Any = optree.tree_map(moved, tree, is_leaf=is_state, namespace=NAMESPACE)
    treespec: Any = optree.tree_structure(real, namespace=NAMESPACE)

    def returns(tensors: list[Tensor]) -> Any:
        rest = iter(tensors)
        filled = [next(rest) if x is None else x for x in program.others]
        return optree.tree_unflatten(treespec, filled)

    return returns


def _by_inductor(graph: fx.GraphModule, examples: Sequence[Tensor]) -> Callable[..., Any]:
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx

    made = [
        torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in examples
    ]
    # The modes are off, in which the compiler would see its tensors; dropout is that of torch.
    with torch.no_grad(), _disable_current_modes(), config.patch(fallback_random=True):
        run: Any = compile_fx(graph, made)
    return run


def _eager(graph: fx.GraphModule, _: Sequence[Tensor]) -> Callable[..., Any]:
    return graph.forward  # a call of the module would run the hooks that are for all modules


COMPILERS: dict[Backend, Compiler] = {"inductor": _by_inductor, "eager": _eager}


def _tensors(arguments: Any) -> list[Tensor]:
    leaves = optree.tree_leaves(arguments, namespace=NAMESPACE)
    return [x.detach() for x in leaves if isinstance(x, Tensor)]
