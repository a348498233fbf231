"""Convert a recorded graph to the ops of a trace: names, phases, FLOPs, bytes."""

from __future__ import annotations

import itertools
import string
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map

from fzero.collectives import CollectiveEvent
from fzero.tools.trace._parameters import Flat, flats_of, index_of_view
from fzero.tools.trace._record import Op, Phase, Value
from fzero.tools.trace.alive import SAME, alive_at, inputs_of, is_item, is_op, kinds_of
from fzero.tools.trace.flops import flops_of
from fzero.tools.trace.program import BACKWARD, MODULE, RecordedStep

COLLECTIVES = "fzero"
"""The namespace of the ops that communicate."""

UPDATE = torch.ops.fzero_optim.update.default
"""The op that is the kernel of an optimizer."""

RATE = torch.ops.fzero_optim.schedule.default
"""The op that asks a schedule for its number."""


def ops_of(program: RecordedStep) -> tuple[tuple[Value, ...], tuple[Op, ...], tuple[Value, ...]]:
    """Return the inputs, the ops and the outputs of a program."""
    nodes = list(program.graph.graph.nodes)
    names = names_of(program)
    phases = _phases(nodes, program.inputs)
    about = _about(program)
    flats = flats_of(program, about)
    of_parameters = {node for node, some in about.items() if any(one.paths for one in some)}
    ops = [
        _op(node, _values(node, names, flats), names, phases[node], about.get(node, ()))
        for node in nodes
        if is_op(node)
    ]
    inputs = tuple(
        replace(_values(node, names, flats)[0], path=path)
        for node, path in zip(inputs_of(nodes), program.inputs, strict=True)
    )
    outputs = tuple(
        replace(_values(node, names, flats)[0], path=path)
        for node, path in zip(nodes[-1].args[0], program.outputs, strict=True)
    )
    alive = alive_at(nodes, kinds_of(program, phases, of_parameters))
    seen = zip(ops, alive, strict=True)
    return inputs, tuple(replace(op, alive=one) for op, one in seen), outputs


def read_by(program: RecordedStep) -> tuple[dict[fx.Node, str], dict[int, Flat]]:
    """Return the names of the values of a program, and its flats, as `ops_of` has them."""
    return names_of(program), flats_of(program, _about(program))


def _about(program: RecordedStep) -> dict[fx.Node, list[CollectiveEvent]]:
    """Return the events of each collective, one for each buffer."""
    events = deque(event for event in program.log.of(program.rank) if event.op != "agree")
    nodes = filter(is_collective, program.graph.graph.nodes)
    return {node: [events.popleft() for _ in node.args[0]] for node in nodes}


def is_collective(node: fx.Node) -> bool:
    """Whether a node is an op that communicates."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == COLLECTIVES


def in_module(node: fx.Node) -> str:
    """Return the module of an op; "" outside of all modules."""
    return str(node.meta.get("custom", {}).get(MODULE, ""))


def ran_by_autograd(node: fx.Node) -> bool:
    """Return whether autograd ran a node."""
    return bool(node.meta.get("custom", {}).get(BACKWARD))


def names_of(program: RecordedStep) -> dict[fx.Node, str]:
    """Name each value: a, b, ..., z, aa, ...; not as a parameter, which has its path for a name."""
    taken = {leaf.path for state in program.states for leaf in state.setup.layout.leaves}
    letters = itertools.chain.from_iterable(
        map("".join, itertools.product(string.ascii_lowercase, repeat=n))
        for n in itertools.count(1)
    )
    free = (name for name in letters if name not in taken)
    nodes = list(program.graph.graph.nodes)
    return {node: "" if _has_no_name(node) else next(free) for node in nodes}


def _has_no_name(node: fx.Node) -> bool:
    several = any(map(is_item, node.users)) and not is_item(node)
    return several or node.op == "output"


def _values(node: fx.Node, names: dict[fx.Node, str], flats: Mapping[int, Flat]) -> list[Value]:
    """Return the results of a node: one or several values; unread ones are called "_"."""
    val = node.meta.get("val")
    read = {user.args[1]: names[user] for user in node.users if is_item(user)}
    made = enumerate(val) if isinstance(val, list | tuple) else [(None, val)]
    return [
        _value_of(x, names[node] if i is None else read.get(i, "_"), flats)
        for i, x in made
        if isinstance(x, Tensor)
    ]


def _value_of(x: Tensor, name: str, flats: Mapping[int, Flat]) -> Value:
    flat = flats.get(x.untyped_storage()._cdata)
    parameter = flat.parameter(x) if flat is not None and flat.is_whole else ""
    holds = () if flat is None or parameter else flat.paths
    return Value(name=name, shape=tuple(x.shape), dtype=x.dtype, parameter=parameter, holds=holds)


def _op(
    node: fx.Node,
    gives: Sequence[Value],
    names: dict[fx.Node, str],
    phase: Phase,
    about: Sequence[CollectiveEvent],
) -> Op:
    target: Any = node.target
    kind = "compute"
    if about:
        kind = "collective"
    elif target.is_view or target in SAME:
        kind = "view"
    elif torch.Tag.pointwise in target.tags or target.overloadpacket in _ELEMENTWISE:
        kind = "pointwise"
    name = about[0].op if about else target._schema.name.split("::")[1]
    return Op(
        name=str(node.args[0]) if target is UPDATE else name,
        phase=phase,
        reads=tuple(names[one] for one in node.all_input_nodes),
        gives=tuple(gives),
        detail=_detail(node, about) or (index_of_view(node) if kind == "view" else in_module(node)),
        wire_bytes=sum(event.wire_bytes for event in about),
        flops=_flops(node),
        kind=kind,
    )


_ELEMENTWISE = tuple(
    getattr(torch.ops.aten, name)
    for name in ("_to_copy", "clone", "copy", "empty_like", "full_like", "ones_like", "zeros_like")
)
"""Ops that a compiler puts into one kernel with pointwise ones, and that torch does not tag."""


def _detail(node: fx.Node, about: Sequence[CollectiveEvent]) -> str:
    if not about:
        return ""
    if node.target is torch.ops.fzero.ppermute.default:
        *_, sources, destinations = node.args
        pairs: Any = zip(sources, destinations, strict=True)  # type: ignore
        return f"{about[0].axis} {' '.join(f'{s}>{d}' for s, d in pairs)}".rstrip()
    paths = ", ".join(path for event in about for path in event.paths)
    return f"{about[0].axis}: {paths}" if paths else about[0].axis


def _phases(nodes: Sequence[fx.Node], paths: Sequence[str]) -> dict[fx.Node, Phase]:
    """Return the phase of each node.

    Up to the last op that autograd runs, its ops and their readers are backward, the others
    forward. After it, the update begins at the first read of the state.
    """
    marked = list(map(ran_by_autograd, nodes))
    last = max((i for i, inside in enumerate(marked) if inside), default=-1)
    of_gradient: set[fx.Node] = set()
    of_state = {
        node for node, path in zip(inputs_of(nodes), paths, strict=True) if path.startswith("state")
    }
    phases: dict[fx.Node, Phase] = {}
    updates = False
    for i, node in enumerate(nodes):
        if marked[i] or any(one in of_gradient for one in node.all_input_nodes):
            of_gradient.add(node)
        updates = updates or (i > last and any(one in of_state for one in node.all_input_nodes))
        before = i <= last and node not in of_gradient
        phases[node] = "forward" if before else "update" if updates else "backward"
    return phases


def _flops(node: fx.Node) -> int:
    args, kwargs, out = tree_map(_value, (node.args, node.kwargs, node))
    return flops_of(node.target, args, kwargs, out)


def _value(x: Any) -> Any:
    return x.meta.get("val") if isinstance(x, fx.Node) else x
