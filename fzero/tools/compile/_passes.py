"""Passes over the graph of a step: fewer collectives, started earlier, and fewer activations.

A pass changes the graph in place. All of them are functions of the graph alone, which is the same
on every rank but for the rank's own offsets: so all ranks still make the same collectives.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fzero.tools.compile._random import DRAW
from fzero.tools.trace.program import is_collective, is_item, ran_by_autograd

aten = torch.ops.aten
GATHER, SCATTER, REDUCE = (
    getattr(torch.ops.fzero, name).default
    for name in ("all_gather", "reduce_scatter", "all_reduce")
)


def wait_late(graph: fx.Graph) -> None:
    """Move readers of reduced gradients behind other ops, so that waits are late.

    Needs: no op that writes to its arguments. Keeps: which collectives there are, and their order
    among reductions that do not depend on each other; the order of random numbers. Results of
    reductions wait longer.
    """
    after: set[fx.Node] = set()
    last = graph.output_node()
    drawn = False  # by an op that has moved
    for node in list(graph.nodes):
        sums = node.target in (SCATTER, REDUCE)
        reads = any(x in after for x in node.all_input_nodes)
        if (reads or (drawn and DRAW in node.meta)) and node is not last:
            drawn = drawn or DRAW in node.meta
            after.add(node)
            last.prepend(node)
        elif sums:
            after.update(node.users)
            for user in list(node.users):
                last.prepend(user)


def gather_early(graph: fx.Graph, *, most_bytes: int) -> None:
    """Start each gather of parameters during the one before it, as far as memory allows.

    Needs: gathers of arguments of the step (stage 3), for which nothing has to be computed.
    Keeps: which collectives there are, what each gives, and the order of gathers. At most
    `most_bytes` of full values are gathered before their first read.
    """
    order = {node: i for i, node in enumerate(graph.nodes)}
    place = -1  # where the last gather that did not move stands
    last: fx.Node | None = None
    waiting: list[tuple[int, int]] = []  # where it is read first, and its bytes
    for node in list(graph.nodes):
        if node.target is not GATHER:
            last = None if is_collective(node) else last
            continue
        reader = min((order[user] for item in node.users for user in item.users), default=0)
        waiting = [(at, size) for at, size in waiting if at > place]
        fits = sum(size for _, size in waiting) + _bytes(node) <= most_bytes
        chains = [_chain(x) for x in node.all_input_nodes]
        if last is not None and fits and None not in chains:
            behind = [x for chain in chains for x in chain or () if order[x] > place]
            for moved in (node, *reversed(behind)):
                last.append(moved)
                order[moved] = place
            last = node
        else:
            last, place = node, order[node]
        waiting.append((reader, _bytes(node)))


def merge_collectives(graph: fx.Graph, *, bucket_bytes: int) -> None:
    """Merge consecutive small collectives, as each costs a latency.

    Needs: collectives of one kind, axis and dtype, with nothing between them that reads one or that
    a later one reads. Keeps: the sum of each element over ranks, in the same order; the bytes on
    the wire. Copies what is merged, at most `bucket_bytes` of full buffers at a time.
    """
    run: list[fx.Node] = []
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if is_collective(node):
            if not (run and _goes_with(node, run) and _sum([*run, node]) <= bucket_bytes):
                _merge(graph, run, bucket_bytes)
                run = []
            run += [node] if node.target in (GATHER, SCATTER, REDUCE) else []
        elif any(_base(x) in run for x in node.all_input_nodes) and not is_item(node):
            _merge(graph, run, bucket_bytes)
            run = []
    _merge(graph, run, bucket_bytes)


def rematerialize(graph: fx.Graph) -> None:
    """Recompute cheap activations in the backward instead of keeping them.

    Needs: pointwise ops without randomness, of arguments of the step and of values that the
    backward keeps anyway. Keeps: every value, bit for bit, and the collectives. Takes these ops a
    second time, for one tensor less that waits for the backward.
    """
    order = {node: i for i, node in enumerate(graph.nodes)}
    kept = {node for node in graph.nodes if node.op in ("placeholder", "get_attr")}
    free = set(kept)  # and what pointwise ops make of these
    for node in list(graph.nodes):
        if ran_by_autograd(node):
            continue
        cheap = _is_cheap(node) and all(x in free for x in node.all_input_nodes)
        readers = [user for user in node.users if ran_by_autograd(user)]
        if cheap:
            free.add(node)
        elif readers:
            kept.add(node)
            free.add(node)
        if cheap and readers:
            with graph.inserting_before(min(readers, key=order.__getitem__)):
                again = _again(graph, node, kept)
            for reader in readers:
                reader.replace_input_with(node, again)


def _again(graph: fx.Graph, node: fx.Node, kept: set[fx.Node]) -> fx.Node:
    """Return a copy of a node and of its inputs, up to kept ones."""
    if node in kept:
        return node
    made = {x: _again(graph, x, kept) for x in node.all_input_nodes}
    return graph.node_copy(node, made.__getitem__)


def _items(node: fx.Node) -> Sequence[fx.Node]:
    """Return the input buffers of a collective."""
    items: Any = node.args[0]
    return items


def _base(node: fx.Node) -> fx.Node:
    """Return the collective that a value is a result of, or None."""
    return node.args[0] if is_item(node) else node  # type: ignore


def _chain(node: fx.Node) -> list[fx.Node] | None:
    """Return the ops (views, a cast) from an argument of the step to this value, in order.

    None if there are other ops between them.
    """
    if node.op == "placeholder":
        return []
    if is_collective(_base(node)) or len(node.all_input_nodes) != 1:
        return None
    before = _chain(node.all_input_nodes[0])
    return None if before is None else [*before, node]


def _bytes(node: fx.Node) -> int:
    """Return the bytes of the full buffers of a collective."""
    return max(_nbytes(x.meta["val"] for x in _items(node)), _nbytes(node.meta["val"]))


def _sum(nodes: Sequence[fx.Node]) -> int:
    return sum(map(_bytes, nodes))


def _nbytes(values: Iterable[Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in values)


def _is_cheap(node: fx.Node) -> bool:
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags


def _call(graph: fx.Graph, target: Any, *args: Any) -> fx.Node:
    """Add a node, with the shape of its result."""
    node = graph.call_function(target, args)
    node.meta["val"] = target(*fx.map_arg(args, lambda x: x.meta["val"]))
    return node


def _goes_with(node: fx.Node, run: Sequence[fx.Node]) -> bool:
    first = run[0]
    same = node.target is first.target and node.args[1:] == first.args[1:]
    dtypes = {x.meta["val"].dtype for one in (first, node) for x in _items(one)}
    return bool(same) and len(dtypes) == 1 and not any(_base(x) in run for x in _items(node))


def _merge(graph: fx.Graph, run: Sequence[fx.Node], bucket_bytes: int) -> None:
    """[x0], [x1], ... -> one buffer, in which the parts of each rank lie together.

    Not one collective alone that is larger than `bucket_bytes`.
    """
    parts = [x for node in run for x in _items(node)]
    if len(parts) < 2 or _sum(run) > bucket_bytes:
        return
    last, size = run[-1], int(run[-1].args[3])  # type: ignore
    rows = 1 if last.target is not SCATTER else size
    with graph.inserting_before(last):
        flat = [_call(graph, aten.view.default, x, [rows, -1]) for x in parts]
        packed = _call(graph, aten.view.default, _call(graph, aten.cat.default, flat, 1), [-1])
        done = _call(graph, last.target, [packed], *last.args[1:])
        whole = _call(graph, operator.getitem, done, 0)
        out = size if last.target is GATHER else 1
        matrix = _call(graph, aten.view.default, whole, [out, -1])
        widths = [x.meta["val"].numel() // rows for x in parts]
        pieces = _call(graph, aten.split_with_sizes.default, matrix, widths, 1)
        shapes = [list(x.shape) for node in run for x in node.meta["val"]]
        given = [
            _call(graph, aten.reshape.default, _call(graph, operator.getitem, pieces, i), shape)
            for i, shape in enumerate(shapes)
        ]
    rest = iter(given)
    for node in run:
        mine = [next(rest) for _ in _items(node)]
        for user in list(node.users):
            user.replace_all_uses_with(mine[user.args[1]])  # type: ignore
            graph.erase_node(user)
        graph.erase_node(node)
