"""Passes about memory: functionalization, so that ops can move; later, writes into donated inputs.

See `_passes` for the rules of all passes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from fzero.errors import LayoutError
from fzero.tools.compile._passes import GATHER, REDUCE
from fzero.tools.trace.program import (
    UPDATE,
    inputs_of,
    is_collective,
    is_item,
    root_of,
    without_unused,
)

aten = torch.ops.aten
_MAKERS = (aten.cat, aten.clone, aten.mm)  # a compiler may give `x` for `x + 0`, but not for these
_VIEWS = (aten.detach, aten.view, aten.t)
OWNED = "owned"
"""Under which name the meta of an update says which of its arguments it may write to."""

INTO = "into"
"""Under which name the meta of a gather says the inputs of the step in whose memory it ends."""


def without_writes(graph: fx.GraphModule) -> fx.GraphModule:
    """Replace in-place ops by out-of-place ones, so that the passes may move ops.

    Needs: no write into an argument of the step. Keeps: every value. A compiler writes in place
    again where it can. Raises `LayoutError` where an argument is written to.
    """
    if not any(map(_writes, graph.graph.nodes)):
        return graph
    if any(x.op == "get_attr" for node in graph.graph.nodes for x in _written(node)):
        raise NoGraphError("the step writes into a tensor that is none of its arguments")
    inputs = [node.meta["val"] for node in inputs_of(list(graph.graph.nodes))]

    def run(*values: Tensor) -> Any:
        return _InMemoryOrder(graph).run(*values)

    with fx_traceback.preserve_node_meta(), inputs[0].fake_mode:
        pure: Any = torch.func.functionalize(run, remove="mutations")
        made = make_fx(pure, _allow_non_fake_inputs=True)(*inputs)
    found = next(filter(_writes, made.graph.nodes), None)
    if found is not None:
        raise LayoutError(
            f"compile: the step writes into one of its arguments ({found.target}).",
            cause="an op with a trailing underscore on the batch, or on a view of it.",
            fix="clone it first, or run the step without fzero.compile.",
        )
    return without_unused(made)


class NoGraphError(Exception):
    """What a step does and a graph cannot, as a sentence; the step itself runs, with a warning."""


class _InMemoryOrder(fx.Interpreter):
    """Draws random numbers in the memory order of the tensor that they were written to.

    A new tensor is contiguous: without this, a transposed one would get other numbers.
    """

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        draws = torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())
        if not draws or 0 not in _writes_to(target) or not isinstance(args[0], Tensor):
            return super().call_function(target, args, kwargs)
        x, *rest = args
        order = sorted(range(x.ndim), key=x.stride, reverse=True)
        super().call_function(target, (x.permute(order), *rest), kwargs)
        return x


def _writes_to(target: Any) -> list[int]:
    """Return the positions of the arguments that an op writes to."""
    infos = [argument.alias_info for argument in target._schema.arguments]
    return [i for i, info in enumerate(infos) if info is not None and info.is_write]


def _written(node: fx.Node) -> list[fx.Node]:
    """Return the nodes in whose memory an op writes."""
    found: list[Any] = [node.args[i] for i in _writes_to(node.target)] if _writes(node) else []
    return [_memory_of(x) for one in found for x in (one if isinstance(one, list) else [one])]


def _memory_of(node: fx.Node) -> fx.Node:
    """Return the node that made the memory of a value: through views, and ops that write to it."""
    target: Any = node.target
    while node.op == "call_function" and (getattr(target, "is_view", False) or _writes(node)):
        made: Any = node.args[0]
        node, target = made, made.target
    return node


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def write_back(graph: fx.Graph, pairs: Sequence[tuple[int, int]]) -> None:
    """Write output k into the memory of input i, for each (i, k), after the last read of i.

    Needs: donated inputs. Keeps: every value. The new state needs no new memory: the kernel of an
    update works in place, a gather fills its input, other values are copied.
    """
    order = {node: i for i, node in enumerate(graph.nodes)}
    inputs = inputs_of(list(graph.nodes))
    given_up = {inputs[i] for i, _ in pairs}
    output = graph.output_node()
    outs = list(output.args[0])  # type: ignore
    for node in graph.nodes:
        if node.target is UPDATE:
            node.meta[OWNED] = [
                root_of(x) in given_up and _last_reader(x, order) <= order[node]
                for x in made_by_update(node)
            ]
    at = list(order)
    alike = [(inputs[i], k) for i, k in pairs if _are_alike(inputs[i], outs[k])]
    _gather_in_place(graph, {outs[k]: old for old, k in alike}, order)
    for old, k in alike:
        new = outs[k]
        last = max(order[new], _last_reader(old, order))
        if last >= order[output] or is_made_in(root_of(new), old):
            continue
        with graph.inserting_after(at[last]):
            outs[k] = graph.call_function(aten.copy_.default, (old, new))
        outs[k].meta["val"] = old.meta["val"]
    output.args = (outs,)


def _gather_in_place(
    graph: fx.Graph, places: Mapping[fx.Node, fx.Node], order: dict[fx.Node, int]
) -> None:
    """Let gathers write into the donated inputs of their results, if these have no later reader."""
    for node in graph.nodes:
        if node.target is GATHER:
            into = {item.args[1]: places.get(item) for item in node.users}
            wanted = [into.get(i) for i in range(len(node.args[0]))]
            if all(old and _last_reader(old, order) < order[node] for old in wanted):
                node.meta[INTO] = wanted


def _are_alike(old: fx.Node, new: fx.Node) -> bool:
    """Return whether a value is not this input, and has its shape and dtype."""
    x, y = old.meta["val"], new.meta["val"]
    return old is not new and x.shape == y.shape and x.dtype == y.dtype


def made_by_update(update: fx.Node) -> list[fx.Node]:
    """Return the outputs of an update: the parameters, and each moment of all of them."""
    params, moments = update.args[2], update.args[4]
    return [*params, *moments]  # type: ignore


def is_made_in(node: fx.Node, old: fx.Node) -> bool:
    """Return whether an update or a gather writes this value into the memory of an input."""
    if not is_item(node):
        return False
    made: Any = node.args
    maker, place = made
    if maker.target is UPDATE:
        return maker.meta[OWNED][place] and root_of(made_by_update(maker)[place]) is old
    return INTO in maker.meta and maker.meta[INTO][place] is old


def _last_reader(node: fx.Node, order: dict[fx.Node, int]) -> int:
    """Return the position of the last read of a value's memory.

    A collective reads until it is awaited; the end of the step reads the outputs.
    """
    found, last = [root_of(node)], 0
    for one in found:
        for user in one.users:
            if root_of(user) is not user:
                found.append(user)
            elif is_collective(user):
                readers = (order[reader] for item in user.users for reader in item.users)
                last = max(last, min(readers, default=len(order)))
            else:
                last = max(last, order[user])
    return last


def own_buffers(graph: fx.Graph) -> None:
    """Clone the input of each all-reduce, which overwrites it, unless it was created for it alone.

    A compiler fuses the clone with a pointwise op before it.
    """
    for node in graph.find_nodes(op="call_function", target=REDUCE):
        for x in node.all_input_nodes:
            if not _is_alone(x):
                with graph.inserting_before(node):
                    own = graph.call_function(aten.clone.default, (x,))
                own.meta["val"] = x.meta["val"].clone()
                node.replace_input_with(x, own)


def _is_alone(node: fx.Node) -> bool:
    """Return whether an op created this buffer for its only reader, directly or through views."""
    packet, alone = getattr(node.target, "overloadpacket", None), len(node.users) == 1
    return alone and (
        packet in _MAKERS or (packet in _VIEWS and _is_alone(node.all_input_nodes[0]))
    )
