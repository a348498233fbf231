"""Read a program op by op: what each value is, in terms of the inputs of the step."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from fzero.tools.prove._collectives import COLLECTIVES, collective
from fzero.tools.prove._memory import Memory, Region
from fzero.tools.prove._ops import DRAW, RULES, constant_of, evaluate, is_pointwise
from fzero.tools.prove._reading import Call, Reading
from fzero.tools.prove._terms import Piece, Value, joined, numel_of, of_term
from fzero.tools.prove._views import view_of

UNKNOWN = "cannot show"
"""The head of a term for a value of which nothing is known: (UNKNOWN, node, why)."""


class Read(NamedTuple):
    """What the values of a program are.

    made: of each node; of one that writes in place all of the memory that it writes into. writers:
    the nodes that write into the memory of a node's value.
    """

    made: Mapping[fx.Node, Sequence[Value]]
    outputs: Sequence[Value]
    writers: Mapping[fx.Node, Sequence[fx.Node]]


def read(graph: fx.GraphModule, inputs: Sequence[Value], reading: Reading) -> Read:
    """Return what each value of a graph is, given what its inputs are."""
    reader = _Reader(graph, reading)
    made: dict[fx.Node, list[Value]] = {}
    given = iter(inputs)
    outputs: list[Value] = []
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            reader.put(node, reader.memory.new(next(given)))
        elif node.op == "output":
            outputs = [reader.value(node, one) for one in node.args[0]]
            continue
        else:
            reader.run(node)
        made[node] = reader.values_of(node)
    return Read(made, outputs, {node: reader.writers_of(node) for node in made})


class _Reader:
    """The values of one graph, while it is read."""

    def __init__(self, graph: fx.GraphModule, reading: Reading) -> None:
        self.graph, self.reading = graph, reading
        self.memory = Memory(1 if reading.one_rank else reading.world)
        self._regions: dict[fx.Node, Region | list[Region]] = {}
        self._writers: dict[int, list[fx.Node]] = {}
        self._draws = 0

    def put(self, node: fx.Node, regions: Region | list[Region]) -> None:
        self._regions[node] = regions

    def values_of(self, node: fx.Node) -> list[Value]:
        """Return what a node has made, or written into."""
        regions = self._held(node)
        if any(node in self._writers.get(one.storage, ()) for one in regions):
            regions = [self.memory.all_of(one) for one in regions]
        return [self._read(node, one) for one in regions]

    def writers_of(self, node: fx.Node) -> list[fx.Node]:
        """Return the nodes that write into the memory of what a node has made."""
        return [x for one in self._held(node) for x in self._writers.get(one.storage, ())]

    def _held(self, node: fx.Node) -> list[Region]:
        held = self._regions[node]
        return held if isinstance(held, list) else [held]

    def value(self, node: fx.Node, x: Any) -> Any:
        """Return an argument of a node with values in the place of nodes."""
        if isinstance(x, fx.Node):
            held = self._regions[x]
            return [self._read(node, one) for one in held] if isinstance(held, list) else self._read(node, held)
        return type(x)(self.value(node, one) for one in x) if isinstance(x, list | tuple) else x

    def _read(self, node: fx.Node, region: Region) -> Value:
        found = self.memory.read(region)
        return found or self._unknown_value(node, region.shape, "it reads a view of what was overwritten")

    def run(self, node: fx.Node) -> None:
        """Read one node."""
        if node.op == "get_attr":
            self.put(node, self.memory.new(self._constant(node)))
        elif node.target is operator.getitem:
            self.put(node, self._regions[node.args[0]][node.args[1]])  # type: ignore
        elif not isinstance(node.target, torch._ops.OpOverload):
            self._unknown(node, "it is no op of ATen")
        elif node.target.namespace == "fzero":
            self._collective(node)
        elif node.target._schema.is_mutable:
            self._in_place(node)
        elif not self._viewed(node):
            self._computed(node)

    def _constant(self, node: fx.Node) -> Value:
        held = getattr(self.graph, str(node.target), None)
        known = constant_of(held)
        shape = tuple(held.shape) if isinstance(held, Tensor) else ()
        if known is None:
            return self._unknown_value(node, shape, "it is a constant without values")
        return of_term(self.reading.terms.term(("constant", *known), numel=numel_of(shape)), shape)

    def _collective(self, node: fx.Node) -> None:
        name = node.target._schema.name.split("::")[1]  # type: ignore
        given, _, _, size, _ = node.args
        found = []
        for one in self.value(node, given):
            known = f"no axiom is known of {name}"
            if name in COLLECTIVES:
                known = collective(self.reading, name, one, size)  # type: ignore
            if isinstance(known, str):
                shape = tuple(node.meta["val"][len(found)].shape)
                known = self._unknown_value(node, shape, known)
            found.append(self.memory.new(known))
        self.put(node, found)

    def _viewed(self, node: fx.Node) -> bool:
        """Read a view of elements in a row; return whether it was one."""
        source = node.args[0] if node.args else None
        held = self._regions.get(source) if isinstance(source, fx.Node) else None
        if not isinstance(held, Region):
            return False
        if node in self.reading.own_parts:
            self.put(node, self.memory.new(self._own_part(node, held)))
            return True
        name = node.target._schema.name.split("::")[1]  # type: ignore
        found = view_of(name, node, held, node.args[1:])
        if found is None:
            return False
        self.put(node, found)
        return True

    def _own_part(self, node: fx.Node, region: Region) -> Value:
        """x [W, *] -> x[r] on rank r."""
        value, dim = self._read(node, region), node.args[1]
        if dim != 0 or value.spread or value.shape[:1] != (self.reading.world,):
            return self._unknown_value(node, tuple(node.meta["val"].shape), "ranks take parts that are not of a whole")
        return Value(value.shape[1:], value.pieces, spread=True)

    def _call(self, node: fx.Node, name: str) -> Call:
        args = tuple(self.value(node, one) for one in node.args)
        kwargs = {key: self.value(node, one) for key, one in node.kwargs.items()}
        if torch.Tag.nondeterministic_seeded in node.target.tags:  # type: ignore
            kwargs[DRAW] = self._draws = self._draws + 1
        return Call(self.reading, node, name, args, kwargs)

    def _computed(self, node: fx.Node) -> None:
        call = self._call(node, node.target._schema.name.split("::")[1])  # type: ignore
        made, views = evaluate(call), node.target.is_view  # type: ignore
        held = self._regions.get(node.args[0]) if views and isinstance(node.args[0], fx.Node) else None
        source = held if isinstance(held, Region) else None
        if isinstance(made, list):
            self.put(node, [self.memory.new(one, source) for one in made])
        else:
            self.put(node, self.memory.new(made, source))

    def _in_place(self, node: fx.Node) -> None:
        """Read an op that writes into its first argument."""
        name = node.target._schema.name.split("::")[1]  # type: ignore
        writes = [x.alias_info is not None and x.alias_info.is_write for x in node.target._schema.arguments]  # type: ignore
        base = name.removesuffix("_")
        known = is_pointwise(node.target) or base in ("copy", "fill", "zero")
        target = self._regions.get(node.args[0])  # type: ignore
        if base == name or sum(writes) != 1 or not writes[0] or not known or not isinstance(target, Region):
            self._unknown(node, "what it writes is not known")
            return
        made = evaluate(self._call(node, base))
        if not isinstance(made, Value) or not self.memory.write(target, made._replace(shape=target.shape)):
            self._unknown(node, "it writes into a view whose elements are not in a row")
            return
        self._writers.setdefault(target.storage, []).append(node)
        self.put(node, target)

    def _unknown(self, node: fx.Node, why: str) -> None:
        """Take nothing for known of what a node makes, or writes."""
        for argument in node.all_input_nodes if _mutates(node) else ():
            held = self._regions[argument]
            for one in held if isinstance(held, list) else [held]:
                self.memory.spoil(one, lambda numel: self._unknown_value(node, (numel,), why))
        val = node.meta.get("val")
        many = isinstance(val, list | tuple)
        made = [self.memory.new(self._unknown_value(node, tuple(x.shape), why)) for x in (val if many else [val]) if isinstance(x, Tensor)]
        self.put(node, made if many or not made else made[0])

    def _unknown_value(self, node: fx.Node, shape: tuple[int, ...], why: str) -> Value:
        head = UNKNOWN, self.reading.one_rank, node.name, why
        term = self.reading.terms.term(head, numel=numel_of(shape), varies=True)
        return of_term(term, shape)


def _mutates(node: fx.Node) -> bool:
    return not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.is_mutable
