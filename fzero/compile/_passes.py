"""Passes over the graph of a step. Each says what it needs and what it keeps.

A pass changes the graph in place. All of them are functions of the graph alone, which is the same
on every rank but for the rank's own offsets: so all ranks still make the same collectives.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from fzero.errors import LayoutError, explain
from fzero.trace._alive import inputs_of, is_item
from fzero.trace._ops import UPDATE, in_backward, is_collective
from fzero.trace._program import without_unused

aten = torch.ops.aten
GATHER, SCATTER, REDUCE = (
    getattr(torch.ops.fzero, name).default
    for name in ("all_gather", "reduce_scatter", "all_reduce")
)


OWNED = "owned"
"""Under which name the meta of an update says which of its arguments it may write to."""


def without_writes(graph: fx.GraphModule) -> fx.GraphModule:
    """Put ops that make new values in the place of ops that write: the passes may then move ops.

    Needs: no write into an argument of the step. Keeps: every value. A compiler writes in place
    again where it can. Raises `LayoutError` where an argument is written to.
    """
    if not any(map(_writes, graph.graph.nodes)):
        return graph
    inputs = [node.meta["val"] for node in inputs_of(list(graph.graph.nodes))]

    def run(*values: Tensor) -> Any:
        return _InMemoryOrder(graph).run(*values)

    with fx_traceback.preserve_node_meta(), inputs[0].fake_mode:
        pure: Any = torch.func.functionalize(run, remove="mutations")
        made = make_fx(pure, _allow_non_fake_inputs=True)(*inputs)
    found = next(filter(_writes, made.graph.nodes), None)
    if found is not None:
        raise LayoutError(
            explain(
                f"compile: the step writes into one of its arguments ({found.target}).",
                cause="an op with a trailing underscore on the batch, or on a view of it.",
                fix="clone it first, or run the step without fzero.compile.",
            )
        )
    return without_unused(made)


class _InMemoryOrder(fx.Interpreter):
    """Draws random numbers in the order of the memory that they were written to.

    A new tensor is contiguous: without this a transposed one would have other numbers in it.
    """

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        draws = torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())
        if not draws or not target._schema.is_mutable or not isinstance(args[0], Tensor):
            return super().call_function(target, args, kwargs)
        x, *rest = args
        order = sorted(range(x.ndim), key=x.stride, reverse=True)
        super().call_function(target, (x.permute(order), *rest), kwargs)
        return x


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def write_back(graph: fx.Graph, pairs: Sequence[tuple[int, int]]) -> None:
    """Write output k into the memory of input i, for each (i, k), as soon as nobody reads that.

    Needs: inputs that the caller gives up. Keeps: every value. Spares new memory for the new state:
    the kernel of an update writes where its arguments are, other values are copied.
    """
    order = {node: i for i, node in enumerate(graph.nodes)}
    inputs = inputs_of(list(graph.nodes))
    given_up = {inputs[i] for i, _ in pairs}
    output = graph.output_node()
    outs = list(output.args[0])  # type: ignore
    for node in graph.nodes:
        if node.target is UPDATE:
            node.meta[OWNED] = [
                _root(x) in given_up and _last_reader(x, order) <= order[node]
                for x in held_by(node)
            ]
    at = list(order)
    for i, k in pairs:
        old, new = inputs[i], outs[k]
        alike = old.meta["val"].shape == new.meta["val"].shape
        if old is new or not alike or old.meta["val"].dtype != new.meta["val"].dtype:
            continue
        last = max(order[new], _last_reader(old, order))
        if last >= order[output] or _is_written(_root(new)):
            continue
        with graph.inserting_after(at[last]):
            outs[k] = graph.call_function(aten.copy_.default, (old, new))
        outs[k].meta["val"] = old.meta["val"]
    output.args = (outs,)


def held_by(update: fx.Node) -> list[fx.Node]:
    """What an update makes anew: the parameters, and each moment of all of them."""
    params, moments = update.args[2], update.args[4]
    return [*params, *moments]  # type: ignore


def _is_written(node: fx.Node) -> bool:
    """Whether a value is there already where it is to be: an update wrote it in place."""
    source: Any = _base(node)
    return source is not node and source.target is UPDATE and source.meta[OWNED][node.args[1]]


def _root(node: fx.Node) -> fx.Node:
    """The value that a node is a view of."""
    while getattr(node.target, "is_view", False) or node.target is aten.detach.default:
        node = node.all_input_nodes[0]
    return node


def _last_reader(node: fx.Node, order: dict[fx.Node, int]) -> int:
    """Where the memory of a value is read last: for a collective, where its result is waited for.

    What the step returns is read at the end.
    """
    found, last = [_root(node)], 0
    for one in found:
        for user in one.users:
            if _root(user) is not user:
                found.append(user)
            elif is_collective(user):
                readers = (order[reader] for item in user.users for reader in item.users)
                last = max(last, min(readers, default=len(order)))
            else:
                last = max(last, order[user])
    return last


def wait_late(graph: fx.Graph) -> None:
    """Move what depends on the sum of gradients behind what does not: nobody waits early.

    Needs: no op that writes to its arguments. Keeps: which collectives there are, and their order
    among reductions that do not depend on each other. Results of reductions wait longer.
    """
    after: set[fx.Node] = set()
    last = graph.output_node()
    for node in list(graph.nodes):
        sums = node.target in (SCATTER, REDUCE)
        if any(x in after for x in node.all_input_nodes) and node is not last:
            after.add(node)
            last.prepend(node)
        elif sums:
            after.update(node.users)
            for user in list(node.users):
                last.prepend(user)


def gather_early(graph: fx.Graph, *, most_bytes: int) -> None:
    """Start each gather of parameters beside the one before it, as far as memory allows.

    Needs: gathers of arguments of the step (stage 3), for which nothing has to be computed.
    Keeps: which collectives there are, what each gives, and the order of gathers. At most
    `most_bytes` of full values are there before anything reads them.
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
            for moved in (*behind, node):
                order[moved], last = place, _put(last, moved)
        else:
            last, place = node, order[node]
        waiting.append((reader, _bytes(node)))


def merge_collectives(graph: fx.Graph, *, bucket_bytes: int) -> None:
    """Make one collective of several small ones in a row: a collective costs its latency.

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
                _merge(graph, run)
                run = []
            run += [node] if node.target in (GATHER, SCATTER, REDUCE) else []
        elif any(_base(x) in run for x in node.all_input_nodes) and not is_item(node):
            _merge(graph, run)
            run = []
    _merge(graph, run)


def rematerialize(graph: fx.Graph) -> None:
    """Compute cheap activations again where the backward reads them, instead of keeping them.

    Needs: pointwise ops without randomness, of arguments of the step and of values that the
    backward keeps anyway. Keeps: every value, bit for bit, and the collectives. Takes these ops a
    second time, for one tensor less that waits for the backward.
    """
    order = {node: i for i, node in enumerate(graph.nodes)}
    kept = {node for node in graph.nodes if node.op in ("placeholder", "get_attr")}
    free = set(kept)  # and what pointwise ops make of these
    for node in list(graph.nodes):
        if in_backward(node):
            continue
        cheap = _is_cheap(node) and all(x in free for x in node.all_input_nodes)
        readers = [user for user in node.users if in_backward(user)]
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


def _put(place: fx.Node, node: fx.Node) -> fx.Node:
    """Move a node behind another one; return it."""
    place.append(node)
    return node


def _again(graph: fx.Graph, node: fx.Node, kept: set[fx.Node]) -> fx.Node:
    """A second node for a value, and for what it is made of, down to what is kept."""
    if node in kept:
        return node
    made = {x: _again(graph, x, kept) for x in node.all_input_nodes}
    return graph.node_copy(node, made.__getitem__)


def _items(node: fx.Node) -> Sequence[fx.Node]:
    """The buffers that a collective is given."""
    items: Any = node.args[0]
    return items


def _base(node: fx.Node) -> fx.Node:
    """The collective that gives a value, if one does."""
    return node.args[0] if is_item(node) else node  # type: ignore


def _chain(node: fx.Node) -> list[fx.Node] | None:
    """The ops that make a value of one argument of the step (views, a rounded copy), in order.

    None if it is made of something else.
    """
    if node.op == "placeholder":
        return []
    if is_collective(_base(node)) or len(node.all_input_nodes) != 1:
        return None
    before = _chain(node.all_input_nodes[0])
    return None if before is None else [*before, node]


def _bytes(node: fx.Node) -> int:
    """Bytes of the full buffers of a collective."""
    return max(_nbytes(x.meta["val"] for x in _items(node)), _nbytes(node.meta["val"]))


def _sum(nodes: Sequence[fx.Node]) -> int:
    return sum(map(_bytes, nodes))


def _nbytes(values: Iterable[Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in values)


def _is_cheap(node: fx.Node) -> bool:
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags


def _call(graph: fx.Graph, target: Any, *args: Any) -> fx.Node:
    """A new node, with the shape that it gives."""
    node = graph.call_function(target, args)
    node.meta["val"] = target(*fx.map_arg(args, lambda x: x.meta["val"]))
    return node


def _goes_with(node: fx.Node, run: Sequence[fx.Node]) -> bool:
    first = run[0]
    same = node.target is first.target and node.args[1:] == first.args[1:]
    dtypes = {x.meta["val"].dtype for one in (first, node) for x in _items(one)}
    return bool(same) and len(dtypes) == 1 and not any(_base(x) in run for x in _items(node))


def _merge(graph: fx.Graph, run: Sequence[fx.Node]) -> None:
    """[x0], [x1], ... -> one buffer, in which the parts of each rank lie together."""
    parts = [x for node in run for x in _items(node)]
    if len(parts) < 2:
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
