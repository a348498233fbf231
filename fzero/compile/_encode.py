"""A graph as JSON values, and back: ops by their names, tensors by shape, stride, dtype, device."""

from __future__ import annotations

import base64
import operator
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from fzero.errors import LayoutError
from fzero.optim._recorded import SCHEDULES, Schedule, number_of
from fzero.trace._ops import RATE

Json = Any

_NAMED: dict[type, str] = {
    torch.dtype: "dtype",
    torch.memory_format: "memory_format",
    torch.layout: "layout",
}
_ITEM = "item"


def encoded(value: Any, of_leaf: Callable[[Any], Json | None] = lambda _: None) -> Json:
    """Return a value as JSON: numbers, strings, lists as they are, others {kind: ...}.

    of_leaf: says what stands for a node or a tensor; None for anything else. Raises `TypeError` for
    what has no such form.
    """
    leaf = of_leaf(value)
    if leaf is not None:
        return leaf
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) in (list, fx.immutable_collections.immutable_list):
        return [encoded(x, of_leaf) for x in value]
    if type(value) is tuple:
        return {"tuple": [encoded(x, of_leaf) for x in value]}
    if type(value) in (dict, fx.immutable_collections.immutable_dict):
        return {"dict": [[encoded(k), encoded(x, of_leaf)] for k, x in value.items()]}
    if type(value) is torch.device:
        return {"device": value.type}  # which one is each rank's own
    if type(value) in _NAMED:
        return {_NAMED[type(value)]: str(value).removeprefix("torch.")}
    raise TypeError(f"a {type(value).__name__}")


def decoded(value: Json, of_leaf: Callable[[str, Any], Any]) -> Any:
    """Return what `encoded` was given. of_leaf: (kind, what it says) -> a node or a tensor."""
    if isinstance(value, list):
        return [decoded(x, of_leaf) for x in value]
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "tuple":
        return tuple(decoded(x, of_leaf) for x in inner)
    if kind == "dict":
        return {decoded(k, of_leaf): decoded(x, of_leaf) for k, x in inner}
    if kind == "device":
        return torch.device(inner)
    if kind in _NAMED.values():
        return getattr(torch, inner)
    return of_leaf(kind, inner)


def encoded_graph(graph: fx.GraphModule, schedules: Mapping[str, Schedule]) -> Json:
    """Return the nodes of a graph, in order. A schedule is said by its place, the key of it."""
    number = {node: i for i, node in enumerate(graph.graph.nodes)}
    places = {id(lr): place for place, lr in schedules.items()}

    def of_node(x: Any) -> Json | None:
        if id(x) in places:
            return {"schedule": places[id(x)]}
        return {"node": number[x]} if isinstance(x, fx.Node) else None

    lines = []
    for node in graph.graph.nodes:
        try:
            line = [node.op, node.name, _target(graph, node)]
            line += [encoded(_arguments(node), of_node), encoded(dict(node.kwargs), of_node)]
            lines.append([*line, _of_value(node.meta.get("val"))])
        except TypeError as error:
            raise LayoutError(
                f"export: {node.target} in the graph has {error} among its arguments.",
                cause="an op that is no op of torch.library, or a subclass of Tensor.",
                fix="write it with ops of torch, or as a torch.library.custom_op.",
            ) from error
    return lines


def _arguments(node: fx.Node) -> tuple[Any, ...]:
    """The arguments of a node; a schedule itself, whose number is of this process only."""
    if node.target is not RATE:
        return node.args
    count, number = cast("Any", node.args)
    return count, SCHEDULES[number]


def _target(graph: fx.GraphModule, node: fx.Node) -> Json:
    target: Any = node.target
    if node.op == "get_attr":
        return _constant(getattr(graph, target))
    if node.op in ("placeholder", "output"):
        return node.op
    if target is operator.getitem:
        return _ITEM
    if isinstance(target, torch._ops.OpOverload):
        return f"{target._schema.name}::{target._overloadname}"
    raise TypeError(f"no op of torch ({target})")


def decoded_graph(lines: Json, schedules: Mapping[str, Schedule]) -> fx.GraphModule:
    """Return the graph that `encoded_graph` was given, with the schedules that are there now.

    Raises `LookupError` for an unknown op.
    """
    root, graph, nodes = torch.nn.Module(), fx.Graph(), list[fx.Node]()
    fake = FakeTensorMode()

    def of_node(kind: str, inner: Any) -> Any:
        return number_of(schedules[inner]) if kind == "schedule" else nodes[inner]

    for op, name, target, args, kwargs, value in lines:
        if op == "get_attr":
            root.register_buffer(name, _as_constant(target))
            target = name
        elif op == "call_function":
            target = operator.getitem if target == _ITEM else _op(target)
        elif op == "placeholder":
            target = name
        given = decoded(args, of_node), decoded(kwargs, of_node)
        node = graph.create_node(op, target, *given, name=name)
        node.meta["val"] = _as_value(value, fake)
        nodes.append(node)
    return fx.GraphModule(root, graph)


def _op(name: str) -> Any:
    space, packet, overload = name.split("::")
    try:
        return getattr(getattr(getattr(torch.ops, space), packet), overload)
    except AttributeError as error:
        raise LookupError(f"torch.ops.{space}.{packet}.{overload}") from error


def _of_value(value: Any) -> Json:
    """What is known of the result of a node."""
    if isinstance(value, Tensor):
        known = [value.shape, value.stride()]
        return {"tensor": [*map(list, known), encoded(value.dtype), value.device.type]}
    if isinstance(value, list | tuple):
        return [_of_value(x) for x in value]
    return None


def _as_value(value: Json, fake: FakeTensorMode) -> Any:
    if value is None or isinstance(value, list):
        return value and [_as_value(x, fake) for x in value]
    shape, stride, dtype, device = value["tensor"]
    with fake:
        return torch.empty_strided(shape, stride, dtype=_dtype(dtype), device=torch.device(device))


def _dtype(value: Json) -> torch.dtype:
    return getattr(torch, value["dtype"])


def _constant(value: Tensor) -> Json:
    """A tensor of the graph, with its numbers."""
    flat = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
    numbers = base64.b64encode(bytes(flat.tolist())).decode()
    return {"numbers": numbers, "like": _of_value(value)}


def _as_constant(value: Json) -> Tensor:
    shape, _, dtype, device = value["like"]["tensor"]
    numbers = bytearray(base64.b64decode(value["numbers"]))
    flat = torch.frombuffer(numbers, dtype=_dtype(dtype)) if numbers else torch.empty(0)
    return flat.view(shape).to(device)
