"""Faults planted into the programs of all ranks, or of one: each changes one place of a graph."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import torch
from torch import Tensor, fx

from fzero.tools.trace.program import RecordedStep

aten = torch.ops.aten
Nodes = list[Any]  # one node of each rank that is mutated
Mutation = Callable[[Nodes, Sequence[int], Random], set[str]]
"""Changes the nodes; returns the names of those that are now others, or of those that read them."""


def copied(program: RecordedStep) -> RecordedStep:
    graph = fx.Graph()
    graph.output(graph.graph_copy(program.graph.graph, {}))
    new = fx.GraphModule(program.graph, graph)
    old = list(program.graph.graph.nodes)[-1]
    list(graph.nodes)[-1].meta.update(old.meta)
    return dataclasses.replace(program, graph=new)


def mutant(ranks: Sequence[RecordedStep], seed: int) -> tuple[str, list[RecordedStep], set[str]]:
    """A mutation, the programs with it, and the names of the mutated lines."""
    random = Random(seed)
    while True:
        name, (fits, change) = random.choice(list(MUTATIONS.items()))
        new = [copied(one) for one in ranks]
        chosen = new if random.random() < 0.8 else [random.choice(new)]
        places = [i for i, node in enumerate(new[0].graph.graph.nodes) if fits(node)]
        if not places:
            continue
        place = random.choice(places)
        nodes = [list(one.graph.graph.nodes)[place] for one in chosen]
        names = change(nodes, [one.rank for one in chosen], random)
        if names:
            return f"{name} at {nodes[0].name}", new, names


def _is(*names: str) -> Callable[[fx.Node], bool]:
    return lambda node: node.op == "call_function" and _name(node) in names


def _name(node: Any) -> str:
    if node.target is operator.getitem:
        return "getitem"
    schema = getattr(node.target, "_schema", None)
    return schema.name.split("::")[1] if schema else ""


def _shape(node: Any) -> Any:
    val = node.meta.get("val") if isinstance(node, fx.Node) else None
    return (*val.shape, val.dtype) if isinstance(val, Tensor) else None


def _replaced(node: Any, by: Any) -> set[str]:
    readers = {user.name for user in node.users}
    node.replace_all_uses_with(by, delete_user_cb=lambda user: user is not by)
    return readers


def _new(node: Any, target: Any, args: Any, val: Any) -> Any:
    made = node.graph.call_function(target, args)
    made.meta["val"] = val
    return made


def _rows(val: Tensor, size: int) -> Tensor:
    return torch.empty(size, val.numel() // size, dtype=val.dtype, device="meta")


def drop_collective(nodes: Nodes, ranks: Sequence[int], random: Random) -> set[str]:
    """What a rank hands in, or its own part of it, is taken for the result."""
    names: set[str] = set()
    for node, rank in zip(nodes, ranks, strict=True):
        collective, i = node.args
        by, size, name = collective.args[0][i], collective.args[3], _name(collective)
        with node.graph.inserting_before(node):
            if name == "all_gather":
                by = _new(node, aten.cat.default, ([by] * size,), node.meta["val"])
            if name == "reduce_scatter":
                val = _rows(by.meta["val"], size)
                rows = _new(node, aten.view.default, (by, [size, -1]), val)
                by = _new(node, aten.select.int, (rows, 0, rank), node.meta["val"])
        names |= _replaced(node, by) | {by.name}
    return names


def other_collective(nodes: Nodes, ranks: Sequence[int], random: Random) -> set[str]:
    """Another rank's part of the sum, or that of rank 0 on all ranks."""
    names: set[str] = set()
    for node, rank in zip(nodes, ranks, strict=True):
        (given, *_), *rest = node.args
        size, val = rest[2], given.meta["val"]
        (item,) = [user for user in node.users if user.args[1] == 0]
        with node.graph.inserting_before(item):
            summed = _new(node, torch.ops.fzero.all_reduce.default, ([given], *rest), [val])
            first = _new(node, operator.getitem, (summed, 0), val)
            rows = _new(node, aten.view.default, (first, [size, -1]), _rows(val, size))
            index = (rank + 1) % size if len(nodes) > 1 else 0
            part = _new(node, aten.select.int, (rows, 0, index), item.meta["val"])
        names |= _replaced(item, part) | {part.name}
    return names


def other_number(nodes: Nodes, ranks: Sequence[int], random: Random) -> set[str]:
    """A divisor, a factor, a bound: twice as large, one more, or its negative."""
    change = random.choice([lambda x: 2 * x, lambda x: x + 1, lambda x: -x, lambda x: x * 1.01])
    places = [i for i, x in enumerate(nodes[0].args) if i and type(x) in (int, float)]
    if not places:
        return set()
    place = random.choice(places)
    for node in nodes:
        node.update_arg(place, change(node.args[place]))
    return {node.name for node in nodes}


def drop_op(nodes: Nodes, ranks: Sequence[int], random: Random) -> set[str]:
    """An op is left out: its first operand is taken for the result."""
    names: set[str] = set()
    for node in nodes:
        by = node.args[0]
        if not isinstance(by, fx.Node) or _shape(by) != _shape(node):
            return set()
        names |= _replaced(node, by)
        if node.target._schema.is_mutable:
            names |= _readers(by)
            node.graph.erase_node(node)
    return names


def _readers(node: Any) -> set[str]:
    """The names of what reads the memory of a node."""
    is_view = _is("view", "getitem", "split_with_sizes", "detach")
    while is_view(node):
        node = node.args[0]
    found, rest = set[str](), [node]
    while rest:
        some = list(rest.pop().users)
        found |= {user.name for user in some}
        rest += filter(is_view, some)
    return found


def stale_operand(nodes: Nodes, ranks: Sequence[int], random: Random) -> set[str]:
    """An earlier value of the same shape in the place of an operand."""
    first = nodes[0]
    every = list(first.graph.nodes)
    before = every[: every.index(first)]
    place = random.choice([i for i, x in enumerate(first.args) if _shape(x)] or [0])
    others = [
        i
        for i, x in enumerate(before)
        if _shape(x) == _shape(first.args[place]) and x is not first.args[place]
    ]
    if not others:
        return set()
    other = random.choice(others)
    for node in nodes:
        node.update_arg(place, list(node.graph.nodes)[other])
    return {node.name for node in nodes}


def swap_in_list(nodes: Nodes, ranks: Sequence[int], random: Random) -> set[str]:
    """Two operands of a join or of the update are swapped, or one of them is there twice."""
    lists = [i for i, x in enumerate(nodes[0].args) if isinstance(x, list | tuple) and len(x) > 1]
    place = random.choice(lists or [0])
    given: Any = nodes[0].args[place] if lists else []
    pairs = [
        (i, j)
        for i in range(len(given))
        for j in range(i)
        if _shape(given[i]) and _shape(given[i]) == _shape(given[j])
    ]
    if not pairs:
        return set()
    (i, j), twice = random.choice(pairs), random.random() < 0.3
    for node in nodes:
        some: list[Any] = list(node.args[place])
        some[i], some[j] = some[j], some[j] if twice else some[i]
        node.update_arg(place, some)
    return {node.name for node in nodes}


def other_item(nodes: Nodes, ranks: Sequence[int], random: Random) -> set[str]:
    """Another one of several results or slices of the same shape."""
    values: Any = nodes[0].args[0].meta["val"]
    mine = nodes[0].args[1]
    others = [i for i, x in enumerate(values) if i != mine and x.shape == values[mine].shape]
    if not others:
        return set()
    other = random.choice(others)
    for node in nodes:
        node.update_arg(1, other)
    return {node.name for node in nodes}


def shifted_split(nodes: Nodes, ranks: Sequence[int], random: Random) -> set[str]:
    """The first padding of a split is made smaller, and another one larger: leaves move."""
    sizes: Any = list(nodes[0].args[1])
    read = {
        user.args[1] for user in nodes[0].users if any("zero" not in x.name for x in user.users)
    }
    free = [i for i in range(len(sizes)) if i not in read and sizes[i]]
    if len(free) < 2:
        return set()
    a, b = random.sample(free, 2)
    sizes[a], sizes[b] = sizes[a] - 1, sizes[b] + 1
    for node in nodes:
        node.update_arg(1, sizes)
        for user in node.users:  # what fills the padding has its new size
            dtype = user.meta["val"].dtype
            user.meta["val"] = torch.empty(sizes[user.args[1]], dtype=dtype, device="meta")
            for filled in user.users:
                filled.meta["val"] = (
                    user.meta["val"] if "zero" in filled.name else filled.meta["val"]
                )
    return {node.name for node in nodes} | {user.name for node in nodes for user in node.users}


def leaking_padding(nodes: Nodes, ranks: Sequence[int], random: Random) -> set[str]:
    """Padding that is not zero."""
    names: set[str] = set()
    for node in nodes:
        if _name(node) == "zero_":
            node.target = aten.fill_.Scalar
            node.args = (node.args[0], 1.0)
        else:
            node.target = aten.new_ones.default if _name(node) == "new_zeros" else aten.ones.default
        names |= {node.name}
    return names


def other_part(nodes: Nodes, ranks: Sequence[int], random: Random) -> set[str]:
    """Another rank's part of a whole value."""
    size = nodes[0].args[0].meta["val"].shape[0]
    if size < 2:
        return set()
    for node, rank in zip(nodes, ranks, strict=True):
        node.update_arg(2, (rank + 1) % size)
    return {node.name for node in nodes}


def other_rule(nodes: Nodes, ranks: Sequence[int], random: Random) -> set[str]:
    """Another learning rate."""
    for node in nodes:
        node.update_arg(1, str(node.args[1]).replace('"lr": 0.', '"lr": 0.9'))
    return {node.name for node in nodes}


def old_output(nodes: Nodes, ranks: Sequence[int], random: Random) -> set[str]:
    """The old value of a tensor of the state comes out, or that of another one."""
    given = [node for node in nodes[0].graph.nodes if node.op == "placeholder"]
    results: Any = nodes[0].args[0]
    pairs = [
        (i, j)
        for i, x in enumerate(results)
        for j, y in enumerate(given)
        if x is not y and _shape(x) == _shape(y)
    ]
    i, j = random.choice(pairs)
    names: set[str] = set()
    for node in nodes:
        some: list[Any] = list(node.args[0])
        some[i] = [x for x in node.graph.nodes if x.op == "placeholder"][j]
        node.args = (some,)
        names |= {node.name, some[i].name}
    return names


def _gathered(node: Any) -> bool:
    made_by = _is("all_gather", "all_reduce", "reduce_scatter")
    return _is("getitem")(node) and made_by(node.args[0])


_OPS = _is(
    *("mul", "div", "div_", "add", "sub", "t", "copy_", "where", "sqrt", "pow", "reciprocal"),
    *("clamp", "tanh", "ne", "abs", "rsub"),
)

MUTATIONS: dict[str, tuple[Callable[[fx.Node], bool], Mutation]] = {
    "dropped collective": (_gathered, drop_collective),
    "other part of the sum": (_is("reduce_scatter"), other_collective),
    "other number": (
        _is("mul", "div", "div_", "add", "pow", "clamp", "rsub", "addmm"),
        other_number,
    ),
    "dropped op": (_OPS, drop_op),
    "stale operand": (
        lambda node: _OPS(node) or _is("mm", "addmm", "tanh_backward", "linalg_vector_norm")(node),
        stale_operand,
    ),
    "swapped in a list": (
        _is("update", "cat", "stack", "all_gather", "reduce_scatter"),
        swap_in_list,
    ),
    "other slice": (_is("getitem"), other_item),
    "shifted split": (_is("split_with_sizes"), shifted_split),
    "padding that leaks": (_is("zero_", "new_zeros", "zeros"), leaking_padding),
    "other rank's part": (_is("select"), other_part),
    "other rule": (_is("update"), other_rule),
    "old output": (lambda node: node.op == "output", old_output),
}
