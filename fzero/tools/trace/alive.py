"""Live bytes while each op of a graph runs, by kind: parameters, gradients, and so on.

Storages are counted, each from the op that creates it to its last reader.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, fx

from fzero.tools.trace._record import Alive, Phase
from fzero.tools.trace.program import FIELD, RecordedStep

KINDS = tuple(field.name for field in fields(Alive))

_OF_FIELD = {
    "params": "parameters",
    "optimizer": "optimizer",
    "gradients": "gradients",
    "window": "gradients",
}

_PUT_TOGETHER = (torch.ops.aten.cat, torch.ops.aten.constant_pad_nd, torch.ops.aten._to_copy)
"""Ops, beside pointwise ones, through which the pieces of a gradient become the gradient."""


def inputs_of(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Return the input nodes of the graph."""
    return [node for node in nodes if node.op == "placeholder"]


def is_item(node: fx.Node) -> bool:
    """Return whether a node only selects one of several results of another node."""
    return getattr(node.target, "__name__", "") == "getitem"


def is_op(node: fx.Node) -> bool:
    """Return whether a node is an op of the trace."""
    return node.op == "call_function" and not is_item(node)


SAME = tuple(
    getattr(torch.ops.aten, name).default for name in ("detach", "lift_fresh_copy", "_unsafe_view")
)
"""Ops that give the values of their argument."""


def root_of(node: fx.Node) -> fx.Node:
    """Return the node whose elements a view has; of another node, itself."""
    while True:
        one: Any = node
        of: Any = one.args[0] if is_item(node) else one
        if not is_op(of) or not (of.target in SAME or getattr(of.target, "is_view", False)):
            return node
        if not isinstance(of.args[0], fx.Node):  # a constant: lift_fresh_copy(2j)
            return node
        node = of.args[0]


def alive_at(nodes: Sequence[fx.Node], kinds: Mapping[int, str]) -> list[Alive]:
    """Return the live bytes while each op runs. Inputs and outputs live to the end.

    `kinds` has the kind of each storage, by its key.
    """
    order = {node: i for i, node in enumerate(nodes)}
    size: dict[int, int] = {}
    born: dict[int, int] = {}
    dies: dict[int, int] = defaultdict(int)
    for node in nodes:
        for key, nbytes in storages(node):
            size[key] = nbytes
            born[key] = min(born.get(key, order[node]), order[node])
            readers = [order[user] for user in node.users]
            end = len(nodes) if node.op in ("placeholder", "get_attr") else order[node]
            dies[key] = max(dies[key], end, *readers, 0)
    changes = {kind: [0] * (len(nodes) + 2) for kind in KINDS}
    for key, nbytes in size.items():
        change = changes[kinds[key]]
        change[0 if nodes[born[key]].op == "placeholder" else born[key]] += nbytes
        change[min(dies[key], len(nodes)) + 1] -= nbytes
    alive = {kind: list(itertools.accumulate(change)) for kind, change in changes.items()}
    return [
        Alive(**{kind: some[order[node]] for kind, some in alive.items()})
        for node in nodes
        if is_op(node)
    ]


def storages(node: fx.Node) -> list[tuple[int, int]]:
    """Return (key, bytes) of each storage that the results of a node are in."""
    val = node.meta.get("val")
    tensors = val if isinstance(val, list | tuple) else [val]
    found = [x.untyped_storage() for x in tensors if isinstance(x, Tensor)]
    return [(storage._cdata, storage.nbytes()) for storage in found]


def kinds_of(
    program: RecordedStep, phases: Mapping[fx.Node, Phase], of_parameters: AbstractSet[fx.Node]
) -> dict[int, str]:
    """Return the kind of each storage. `of_parameters`: collectives that are about parameters."""
    nodes = list(program.graph.graph.nodes)
    kinds: dict[int, str] = {}
    for node, path in zip(inputs_of(nodes), program.inputs, strict=True):
        kinds.update((key, _of_path(path)) for key, _ in storages(node))
    for node, path in zip(nodes[-1].args[0], program.outputs, strict=True):
        if (kind := _of_path(path)) != "other":
            for key, _ in storages(node):
                kinds.setdefault(key, kind)
    for key in _gradients(nodes, phases, of_parameters):
        kinds.setdefault(key, "gradients")
    for node in nodes:
        made = [key for key, _ in storages(node) if key not in kinds]
        if made:
            kinds.update(dict.fromkeys(made, _made_by(node, kinds, phases, of_parameters)))
    return kinds


def _of_path(path: str) -> str:
    found = FIELD.match(path)
    if found is None:
        return "other"
    return "gathered" if found[3] else _OF_FIELD.get(found[2], "other")


def _made_by(
    node: fx.Node,
    kinds: Mapping[int, str],
    phases: Mapping[fx.Node, Phase],
    of_parameters: AbstractSet[fx.Node],
) -> str:
    if not is_op(node) or phases[node] == "update":
        return "other"
    read = {kinds[key] for one in node.all_input_nodes for key, _ in storages(one)}
    is_of_parameters = bool(read) and read <= {"parameters", "gathered"}
    return "gathered" if node in of_parameters or is_of_parameters else "activations"


def _gradients(
    nodes: Sequence[fx.Node], phases: Mapping[fx.Node, Phase], of_parameters: AbstractSet[fx.Node]
) -> set[int]:
    """Return the storages of gradients: inputs of reductions and of the update, and their parts."""
    found: set[int] = set()
    first: dict[int, fx.Node] = {}
    for node in nodes:
        for key, _ in storages(node):
            first.setdefault(key, node)
    for node in reversed(nodes):
        mine = {key for key, _ in storages(node) if phases[first[key]] == "backward"}
        if any(_takes_gradients(user, phases, of_parameters) for user in node.users):
            found |= mine
        if mine & found and _puts_together(node):
            read = (key for one in node.all_input_nodes for key, _ in storages(one))
            found.update(key for key in read if phases[first[key]] == "backward")
    return found - {key for key, node in first.items() if _gathers(node, of_parameters)}


def _takes_gradients(
    node: fx.Node, phases: Mapping[fx.Node, Phase], of_parameters: AbstractSet[fx.Node]
) -> bool:
    reduces = node in of_parameters and not _gathers(node, of_parameters)
    return is_op(node) and (reduces or phases[node] == "update")


def _gathers(node: fx.Node, of_parameters: AbstractSet[fx.Node]) -> bool:
    return node in of_parameters and node.target is torch.ops.fzero.all_gather.default


def _puts_together(node: fx.Node) -> bool:
    target: Any = node.target
    if not is_op(node) or not isinstance(target, torch._ops.OpOverload):
        return False
    return (
        target.is_view
        or torch.Tag.pointwise in target.tags
        or target.overloadpacket in _PUT_TOGETHER
    )
