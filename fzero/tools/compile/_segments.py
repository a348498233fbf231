"""From a graph to actions: compiled segments of ops, and starts and waits of collectives.

A segment has the ops between two collectives, compiled together. A collective starts at its place
in the graph and is awaited at the first read of its result; the ops between overlap with it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, fx

from fzero.collectives import (
    InFlight,
    start_all_to_all,
    start_extremum,
    start_gather,
    start_gather_in_place,
    start_permute,
    start_reduce,
    start_scatter,
)
from fzero.errors import LayoutError
from fzero.machine.packing import shard_of
from fzero.optim.recorded import SCHEDULES, update_in_place
from fzero.ranks.mesh import Axis
from fzero.tools.compile._random import DRAW, Draw, Randomness, State, replay_of
from fzero.tools.compile._writes import INTO, OWNED, is_made_in, made_by_update, own_buffers
from fzero.tools.trace.program import RATE, UPDATE, is_collective, is_item

Compiler = Callable[[fx.GraphModule, Sequence[Tensor]], Callable[..., Any]]
"""(graph, example tensors) -> a function of such tensors that returns a list."""


@dataclass(frozen=True, slots=True)
class Action:
    """A function of named values, whose results get names: a segment, or the start of a collective.

    writes: into an argument of the step, which is given up. drops: what nobody reads after it.
    collective: of a start, the values of its inputs; None for what this rank does alone.
    """

    run: Callable[..., Sequence[Any]]
    reads: tuple[str, ...]
    gives: tuple[str, ...]
    writes: bool = False
    drops: tuple[str, ...] = ()
    collective: tuple[Tensor, ...] | None = None

    def take_part(self) -> None:
        """Make a collective of which this rank has no inputs, for the others'."""
        if self.collective is not None:
            shapes = [(x.shape, x.dtype, x.device) for x in self.collective]
            zeros = [torch.zeros(shape, dtype=kind, device=on) for shape, kind, on in shapes]
            for flight in self.run(*zeros):
                flight.wait()

    def __call__(self, env: dict[str, Any]) -> None:
        """Run it on the values by the names of their nodes."""
        env.update(zip(self.gives, self.run(*[env[name] for name in self.reads]), strict=True))
        for name in self.drops:
            del env[name]


def actions_of(
    graph: fx.GraphModule, axes: dict[str, Axis], compiler: Compiler, randomness: Randomness
) -> tuple[Action, ...]:
    """Return the actions of a graph; `axes` has the axes of its collectives by name."""
    own_buffers(graph.graph)
    held = held_in(graph)
    replay = replay_of(graph.graph, randomness)
    actions = [_kept(one, number) for one, number in replay.begins]
    run: list[fx.Node] = []
    pending: set[fx.Node] = set()

    def flush() -> None:
        if run:
            actions.append(_segment(graph, run, compiler, held))
            run.clear()

    def wait(node: fx.Node) -> None:
        pending.discard(node)
        actions.append(_wait(node))

    for node in graph.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            continue
        if is_item(node) and _is_apart(node.args[0]):
            continue
        needed = [x.args[0] for x in node.all_input_nodes if is_item(x) and x.args[0] in pending]
        if _is_apart(node) or needed or node.op == "output":
            flush()
        rest = [x for x in graph.graph.nodes if x in pending] if node.op == "output" else needed
        for one in dict.fromkeys(rest):
            wait(one)
        if is_collective(node):
            actions.append(_with_values(_start(node, axes), node))
            pending.add(node)
        elif node.target is UPDATE:
            actions.append(_update(node))
        elif node.target is RATE:
            actions.append(_rate(node))
        elif node in replay.draws:
            actions.append(_drawn(node, replay.draws[node]))
        elif node.op != "output":
            run.append(node)
    actions += [_put_back(one, state) for one, state in replay.ends]
    return _with_drops(actions, {x.name for x in graph.graph.output_node().all_input_nodes})


def held_in(graph: fx.GraphModule) -> dict[str, Tensor]:
    """Return the tensors that the step reads as free variables, by name of node, as inputs.

    As constants of a compiler they would not follow later writes. Tensors that the step creates
    from numbers stay constants, and are copied before use.
    """
    lift = torch.ops.aten.lift_fresh_copy.default
    nodes = [node for node in graph.graph.nodes if node.op == "get_attr"]
    read = [node for node in nodes if any(user.target is not lift for user in node.users)]
    found = {node.name: operator.attrgetter(str(node.target))(graph) for node in read}
    return {name: x for name, x in found.items() if isinstance(x, Tensor)}


def _is_apart(node: fx.Node) -> bool:
    """Return whether a node is outside of segments."""
    return is_collective(node) or node.target in (UPDATE, RATE) or DRAW in node.meta


def _items(node: fx.Node) -> dict[str, int]:
    """Return {name: position} of the results of a node that are read."""
    return {user.name: int(user.args[1]) for user in node.users}  # type: ignore


def _named(nodes: Iterable[fx.Node]) -> tuple[str, ...]:
    return tuple(node.name for node in nodes)


def _with_values(action: Action, node: fx.Node) -> Action:
    inputs = [*cast("Any", node.args[0]), *node.meta.get(INTO, ())]
    return replace(action, collective=tuple(x.meta["val"] for x in inputs))


def _start(node: fx.Node, axes: dict[str, Axis]) -> Action:
    """Return the start of a collective; it gives the handle to wait for."""
    inputs, name, _, _, *rest = cast("Any", node.args)
    axis = axes[name]
    if node.target is torch.ops.fzero.uneven_all_to_all.default:
        raise LayoutError(
            f"compile: all_to_all with sizes, along {name!r}.",
            cause="experts that each take the rows which chose them; a compiled step has the "
            "sizes of its first call in its graph.",
            fix="leave this step uncompiled, and compile parts of its loss with torch.compile.",
        )
    if INTO in node.meta:
        return _start_in_place(node, inputs, axis)
    begin = _STARTS[node.target]
    if begin in (start_permute, start_extremum):
        rest = rest if begin is start_permute else [node.target._opname]  # type: ignore
        return Action(lambda *xs: [begin(xs, axis, *rest)], _named(inputs), (node.name,))
    order = {} if begin in (start_gather, start_all_to_all) else {"ordered": bool(rest[0])}

    def run(*xs: Tensor) -> list[InFlight]:
        return [begin([x.contiguous() for x in xs], axis, **order)]

    return Action(run, _named(inputs), (node.name,))


_STARTS: dict[Any, Callable[..., InFlight]] = {
    torch.ops.fzero.all_gather.default: start_gather,
    torch.ops.fzero.reduce_scatter.default: start_scatter,
    torch.ops.fzero.all_reduce.default: start_reduce,
    torch.ops.fzero.all_to_all.default: start_all_to_all,
    torch.ops.fzero.ppermute.default: start_permute,
    torch.ops.fzero.pmax.default: start_extremum,
    torch.ops.fzero.pmin.default: start_extremum,
}


def _start_in_place(node: fx.Node, shards: Sequence[fx.Node], axis: Axis) -> Action:
    """Return the start of a gather into the memory of donated arguments of the step."""
    fulls = node.meta[INTO]
    there = list(map(is_made_in, shards, fulls))  # whether a shard is where it belongs already

    def run(*xs: Tensor) -> list[InFlight]:
        for shard, full, known in zip(xs[: len(there)], xs[len(there) :], there, strict=True):
            if not known:
                shard_of(full, axis.size, axis.rank).copy_(shard)
        return [start_gather_in_place(list(xs[len(there) :]), axis)]

    return Action(run, _named([*shards, *fulls]), (node.name,), writes=True)


def _wait(node: fx.Node) -> Action:
    """Return the wait for a collective; it gives those of its results that are read."""
    items = _items(node)

    def run(flight: InFlight) -> list[Tensor]:
        outs = flight.wait()
        return [outs[at] for at in items.values()]

    return Action(run, (node.name,), tuple(items))


def _update(node: fx.Node) -> Action:
    """Return the kernel of an optimizer, in place where it may write into its arguments."""
    rule, options, _, grads, _, count, *lr = cast("Any", node.args)
    made, items = made_by_update(node), _items(node)  # parameters, then moments
    owned = node.meta.get(OWNED, [False] * len(made))
    parts = len(made), len(made) + len(grads)

    def run(*xs: Tensor) -> list[Tensor]:
        held = [x if own else x.clone() for x, own in zip(xs[: parts[0]], owned, strict=True)]
        number, *rate = xs[parts[1] :]
        given = list(xs[parts[0] : parts[1]])
        update_in_place(rule, options, held, given, number, rate[0] if rate else None)
        return [held[at] for at in items.values()]

    reads = _named([*made, *grads, count, *(one for one in lr if one is not None)])
    return Action(run, reads, tuple(items), writes=any(owned))


def _rate(node: fx.Node) -> Action:
    """Return the value of a schedule of `fzero.optim` after so many updates."""
    count, number = cast("Any", node.args)
    schedule = SCHEDULES[number]

    def run(updates: Tensor) -> list[Tensor]:
        return [torch.tensor(float(schedule(int(updates))), dtype=torch.float64)]

    return Action(run, (count.name,), (node.name,))


def _drawn(node: fx.Node, draw: Draw) -> Action:
    """Return an op that draws, as torch has it: a compiler would take others in another order."""
    target, generator, inputs = cast("Any", node.target), draw.generator, node.all_input_nodes
    items = _items(node) if isinstance(node.meta["val"], tuple | list) else {node.name: None}
    starts = (_state_name(draw.starts),) if isinstance(draw.starts, int) else ()
    takes = any(one.name == "generator" for one in target._schema.arguments)

    def run(*xs: Any) -> list[Any]:
        if draw.starts is not None:
            generator.set_state(xs[-1] if isinstance(draw.starts, int) else draw.starts)
        env = dict(zip(inputs, xs, strict=False))
        args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
        out = target(*args, **(kwargs | {"generator": generator} if takes else kwargs))
        made = [out if at is None else out[at] for at in items.values()]
        return [*made, generator.get_state()] if draw.keeps else made

    keeps = (_state_name(draw.after),) if draw.keeps else ()
    return Action(run, (*_named(inputs), *starts), (*items, *keeps))


def _kept(generator: torch.Generator, number: int) -> Action:
    """Keep the state that a generator is found in."""
    return Action(lambda: [generator.get_state()], (), (_state_name(number),))


def _put_back(generator: torch.Generator, state: State) -> Action:
    """Leave a generator in the state in which the step leaves it."""

    def run(*kept: Tensor) -> list[Any]:
        generator.set_state(kept[0] if isinstance(state, int) else state)
        return []

    return Action(run, (_state_name(state),) if isinstance(state, int) else (), ())


def _state_name(number: int) -> str:
    return f"random state {number}"


def _segment(
    graph: fx.GraphModule, nodes: Sequence[fx.Node], compiler: Compiler, held: Mapping[str, Tensor]
) -> Action:
    inside = set(nodes)
    outside = dict.fromkeys(x for node in nodes for x in node.all_input_nodes if x not in inside)
    reads = [x for x in outside if x.op != "get_attr" or x.name in held]
    gives = [
        node for node in nodes if any(user not in inside for user in node.users) and _is_value(node)
    ]
    part, copies = fx.Graph(), {}
    for x in reads:
        copies[x] = part.placeholder(x.name)
        copies[x].meta = x.meta
    constants = [x for x in outside if x.op == "get_attr" and x.name not in held]
    for node in (*constants, *nodes):
        copies[node] = part.node_copy(node, copies.__getitem__)
    part.output(tuple(copies[node] for node in gives))
    module = fx.GraphModule(graph, part)
    run = compiler(module, [held[x.name] if x.name in held else x.meta["val"] for x in reads])
    writes = any(node.target is torch.ops.aten.copy_.default for node in nodes)
    return Action(run, _named(reads), _named(gives), writes=writes)


def _is_value(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)


def _with_drops(actions: Sequence[Action], results: set[str]) -> tuple[Action, ...]:
    """Let each value be freed after its last reader."""
    needed, made = set(results), list[Action]()
    for action in reversed(actions):
        gone = (name for name in (*action.reads, *action.gives) if name not in needed)
        made.append(replace(action, drops=tuple(dict.fromkeys(gone))))
        needed.update(action.reads)
    return tuple(reversed(made))
