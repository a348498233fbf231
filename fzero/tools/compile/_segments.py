"""From a graph to actions: compiled segments of ops, and starts and waits of collectives.

A segment has the ops between two collectives, compiled together. A collective starts at its place
in the graph and is awaited at the first read of its result; the ops between overlap with it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx

from fzero.collectives import (
    InFlight,
    start_all_to_all,
    start_gather,
    start_gather_in_place,
    start_reduce,
    start_scatter,
)
from fzero.machine.packing import shard_of
from fzero.optim.recorded import SCHEDULES, update_in_place
from fzero.ranks.mesh import Axis
from fzero.tools.compile._writes import INTO, OWNED, is_made_in, made_by_update, own_buffers
from fzero.tools.trace.alive import is_item
from fzero.tools.trace.ops import RATE, UPDATE, is_collective

Env = dict[str, Any]  # values by the name of their node


Compiler = Callable[[fx.GraphModule, Sequence[Tensor]], Callable[..., Any]]
"""(graph, example tensors) -> a function of such tensors that returns a list."""


@dataclass(frozen=True, slots=True)
class FusedOps:
    """A compiled segment."""

    run: Callable[..., Any]
    reads: tuple[str, ...]
    gives: tuple[str, ...]
    writes: bool  # into an argument of the step, which is given up

    def __call__(self, env: Env) -> None:
        """Run them."""
        env.update(zip(self.gives, self.run(*[env[name] for name in self.reads]), strict=True))


@dataclass(frozen=True, slots=True)
class Start:
    """Start a collective."""

    op: str
    axis: Axis
    ordered: bool
    reads: tuple[str, ...]
    gives: tuple[str]  # the handles to wait for

    def __call__(self, env: Env) -> None:
        """Start it."""
        xs = [env[name].contiguous() for name in self.reads]
        (name,) = self.gives
        if self.op == "all_gather":
            env[name] = start_gather(xs, self.axis)
        elif self.op == "reduce_scatter":
            env[name] = start_scatter(xs, self.axis, ordered=self.ordered)
        elif self.op == "all_reduce":
            env[name] = start_reduce(xs, self.axis, ordered=self.ordered)
        else:
            env[name] = start_all_to_all(xs, self.axis)


@dataclass(frozen=True, slots=True)
class StartInPlace:
    """Start a gather into the memory of donated arguments of the step."""

    axis: Axis
    shards: tuple[str, ...]
    fulls: tuple[str, ...]
    there: tuple[bool, ...]  # whether a shard is where it belongs already
    gives: tuple[str]
    writes: bool = True

    @property
    def reads(self) -> tuple[str, ...]:
        """What it is given."""
        return (*self.shards, *self.fulls)

    def __call__(self, env: Env) -> None:
        """Start it."""
        fulls = [env[name] for name in self.fulls]
        for full, name, there in zip(fulls, self.shards, self.there, strict=True):
            if not there:
                shard_of(full, self.axis.size, self.axis.rank).copy_(env[name])
        env[self.gives[0]] = start_gather_in_place(fulls, self.axis)


@dataclass(frozen=True, slots=True)
class AwaitCollective:
    """Wait for a collective."""

    reads: tuple[str]
    gives: dict[str, int]  # name -> its place among the results

    def __call__(self, env: Env) -> None:
        """Wait for it."""
        flight: InFlight = env[self.reads[0]]
        outs = flight.wait()
        env.update((name, outs[at]) for name, at in self.gives.items())


@dataclass(frozen=True, slots=True)
class UpdateKernel:
    """The kernel of an optimizer, in place in donated arguments."""

    rule: str
    options: str
    held: tuple[str, ...]  # parameters, then moments
    owned: tuple[bool, ...]
    grads: tuple[str, ...]
    count: str
    lr: str | None
    gives: dict[str, int]  # name -> its place in `held`

    @property
    def writes(self) -> bool:
        """Whether it writes into an argument of the step."""
        return any(self.owned)

    @property
    def reads(self) -> tuple[str, ...]:
        """What it is given."""
        return (*self.held, *self.grads, self.count, *([] if self.lr is None else [self.lr]))

    def __call__(self, env: Env) -> None:
        """Run it."""
        pairs = zip(self.held, self.owned, strict=True)
        held = [env[name] if own else env[name].clone() for name, own in pairs]
        grads, lr = [env[name] for name in self.grads], None if self.lr is None else env[self.lr]
        update_in_place(self.rule, self.options, held, grads, env[self.count], lr)
        env.update((name, held[at]) for name, at in self.gives.items())


@dataclass(frozen=True, slots=True)
class Rate:
    """The value of a schedule of `fzero.optim` after this many updates."""

    schedule: Callable[[int], float]
    reads: tuple[str, ...]
    gives: tuple[str, ...]

    def __call__(self, env: Env) -> None:
        """Ask the schedule."""
        lr = float(self.schedule(int(env[self.reads[0]])))
        env[self.gives[0]] = torch.tensor(lr, dtype=torch.float64)


@dataclass(frozen=True, slots=True)
class DropValues:
    """Free values after their last reader."""

    reads: tuple[str, ...]
    gives: tuple[str, ...] = ()

    def __call__(self, env: Env) -> None:
        """Let go of them."""
        for name in self.reads:
            del env[name]


Action = FusedOps | Start | StartInPlace | AwaitCollective | UpdateKernel | Rate | DropValues


def actions_of(
    graph: fx.GraphModule, axes: dict[str, Axis], compiler: Compiler
) -> tuple[Action, ...]:
    """Return the actions of a graph; `axes` has the axes of its collectives by name."""
    own_buffers(graph.graph)
    held = held_in(graph)
    actions: list[Action] = []
    run: list[fx.Node] = []
    pending: set[fx.Node] = set()

    def flush() -> None:
        if run:
            actions.append(_segment(graph, run, compiler, held))
            run.clear()

    def wait(node: fx.Node) -> None:
        pending.discard(node)
        actions.append(AwaitCollective((node.name,), _items(node)))

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
            actions.append(_start(node, axes))
            pending.add(node)
        elif node.target is UPDATE:
            actions.append(_update(node))
        elif node.target is RATE:
            count, number = node.args
            actions.append(Rate(SCHEDULES[number], (count.name,), (node.name,)))
        elif node.op != "output":
            run.append(node)
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
    return is_collective(node) or node.target in (UPDATE, RATE)


def _items(node: fx.Node) -> dict[str, int]:
    """Return {name: position} of the results of a node that are read."""
    return {user.name: int(user.args[1]) for user in node.users}  # type: ignore


def _update(node: fx.Node) -> UpdateKernel:
    rule, options, _, grads, _, count, lr = cast("Any", node.args)
    held = made_by_update(node)
    return UpdateKernel(
        rule=rule,
        options=options,
        held=tuple(x.name for x in held),
        owned=tuple(node.meta.get(OWNED, [False] * len(held))),
        grads=tuple(x.name for x in grads),
        count=count.name,
        lr=None if lr is None else lr.name,
        gives=_items(node),
    )


def _start(node: fx.Node, axes: dict[str, Axis]) -> Start | StartInPlace:
    xs, name, _, _, ordered = node.args
    inputs: Any = xs
    axis = axes[str(name)]
    if INTO in node.meta:
        return StartInPlace(
            axis=axis,
            shards=tuple(x.name for x in inputs),
            fulls=tuple(x.name for x in node.meta[INTO]),
            there=tuple(map(is_made_in, inputs, node.meta[INTO])),
            gives=(node.name,),
        )
    return Start(
        op=node.target._schema.name.split("::")[1],  # type: ignore
        axis=axis,
        ordered=bool(ordered),
        reads=tuple(x.name for x in inputs),
        gives=(node.name,),
    )


def _segment(
    graph: fx.GraphModule, nodes: Sequence[fx.Node], compiler: Compiler, held: Mapping[str, Tensor]
) -> FusedOps:
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
    return FusedOps(
        run, tuple(x.name for x in reads), tuple(node.name for node in gives), writes=writes
    )


def _is_value(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)


def _with_drops(actions: Sequence[Action], results: set[str]) -> tuple[Action, ...]:
    """Insert actions that free each value after its last reader."""
    needed, made = set(results), list[Action]()
    for action in reversed(actions):
        gone = [name for name in (*action.reads, *action.gives) if name not in needed]
        needed.update(action.reads)
        if gone:
            made.append(DropValues(tuple(dict.fromkeys(gone))))
        made.append(action)
    return tuple(reversed(made))
