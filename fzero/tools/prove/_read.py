"""Read a program op by op: what each value is, in terms of the inputs of the step."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from fzero.tools.prove._memory import Memory, Region, view_of
from fzero.tools.prove._ops import DRAW, WRITES, evaluate
from fzero.tools.prove._reading import Call, Reading
from fzero.tools.prove._terms import Value, of_term

UNKNOWN = "nothing is known"
"""The head of a term for a value of which nothing is known: (UNKNOWN, one rank or not, node, why)."""


class Read(NamedTuple):
    """What a program makes.

    made: the values of each node; of one that writes in place, of all of that memory. writers: the
    nodes that write into the memory of a node's value.
    """

    made: Mapping[fx.Node, Sequence[Value]]
    outputs: Sequence[Value]
    writers: Mapping[fx.Node, Sequence[fx.Node]]


def read(graph: fx.GraphModule, inputs: Sequence[Value], reading: Reading) -> Read:
    """Return what the values of a graph are, given what its inputs are."""
    reader, given = _Reader(graph, reading), iter(inputs)
    made: dict[fx.Node, list[Value]] = {}
    outputs: Sequence[Value] = ()
    for node in graph.graph.nodes:
        if node.op == "output":
            outputs = reader.value(node, node.args[0])
            continue
        if node.op == "placeholder":
            reader.put(node, [next(given)], single=True)
        else:
            reader.run(node)
        made[node] = reader.made_by(node)
    return Read(made, outputs, {node: reader.writers_of(node) for node in made})


class _Reader:
    """The values of one graph, while it is read."""

    def __init__(self, graph: fx.GraphModule, reading: Reading) -> None:
        self._graph, self._reading = graph, reading
        self._memory = Memory(1 if reading.one_rank else reading.world)
        self._regions: dict[fx.Node, Region | list[Region]] = {}
        self._writers: dict[int, list[fx.Node]] = {}
        self._draws = 0

    def put(
        self, node: fx.Node, values: Sequence[Value], *, single: bool, of: Region | None = None
    ) -> None:
        """Note what a node makes: one value, or several."""
        regions = [self._memory.new(value, of) for value in values]
        self._regions[node] = regions[0] if single else regions

    def _held(self, node: fx.Node) -> list[Region]:
        held = self._regions[node]
        return held if isinstance(held, list) else [held]

    def made_by(self, node: fx.Node) -> list[Value]:
        """Return what a node has made, or the memory that it has written to."""
        regions = self._held(node)
        if node in self.writers_of(node):
            regions = list(map(self._memory.all_of, regions))
        return [self._read(node, one) for one in regions]

    def writers_of(self, node: fx.Node) -> list[fx.Node]:
        """Return the nodes that write into the memory of what a node has made."""
        return [x for one in self._held(node) for x in self._writers.get(one.storage, ())]

    def value(self, node: fx.Node, x: Any) -> Any:
        """Return an argument of a node with values in the place of nodes."""
        if isinstance(x, list | tuple):
            return [self.value(node, one) for one in x]
        return self._read(node, self._regions[x]) if isinstance(x, fx.Node) else x  # type: ignore

    def _read(self, node: fx.Node, region: Region) -> Value:
        found = self._memory.read(region)
        return found or self._unknown(node, region.shape, "it reads a view of what was overwritten")

    def run(self, node: fx.Node) -> None:
        """Read one node; take nothing for known where its arguments are unlike its rule."""
        try:
            if node.op == "get_attr":
                self.put(node, [self._constant(node)], single=True)
            elif node.target is operator.getitem:
                self._regions[node] = self._regions[node.args[0]][node.args[1]]  # type: ignore
            elif not isinstance(node.target, torch._ops.OpOverload):
                self._spoil(node, "it is no op of ATen")
            elif node.target.namespace == "fzero":
                self._collective(node)
            elif node.target._schema.is_mutable:
                self._in_place(node)
            elif not self._viewed(node):
                self._computed(node)
        except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
            self._spoil(node, f"its arguments are unlike what is known of it ({error!r})")

    def _constant(self, node: fx.Node) -> Value:
        known = digest(self._graph, node)
        if known is None:
            return self._unknown(node, (), "it is a constant without values")
        head = "constant", *known
        return of_term(self._reading.terms.term(head, (), prod(known[-1])), known[-1])

    def _collective(self, node: fx.Node) -> None:
        given, axis, group, size, _ = node.args
        found = []
        for one, val in zip(self.value(node, given), node.meta["val"], strict=True):
            known: Value | str = "it is over other ranks than those of the state"
            if (axis, group) == self._reading.axis and size == self._reading.world:
                known = self._reading.collective(_name(node), one)
            found.append(self._unknown(node, val.shape, known) if isinstance(known, str) else known)
        self.put(node, found, single=False)

    def _viewed(self, node: fx.Node) -> bool:
        """Read a view of elements in a row; return whether it was one."""
        source = node.args[0] if node.args else None
        held = self._regions.get(source) if isinstance(source, fx.Node) else None
        if not isinstance(held, Region):
            return False
        if node in self._reading.own_parts:
            whole = self._read(node, held)
            made = Value(whole.shape[1:], whole.pieces, spread=True)
            if whole.spread or node.args[1] != 0 or whole.shape[0] != self._reading.world:
                made = self._unknown(node, made.shape, "ranks take parts that are not of a whole")
            self.put(node, [made], single=True, of=held)
            return True
        val = node.meta["val"]
        found = view_of(_name(node), held, node.args[1:], getattr(val, "shape", ()))
        if found is not None:
            self._regions[node] = found
        return found is not None

    def _call(self, node: fx.Node, name: str) -> Call:
        args = tuple(self.value(node, one) for one in node.args)
        kwargs = {key: self.value(node, one) for key, one in node.kwargs.items()}
        if torch.Tag.nondeterministic_seeded in node.target.tags:  # type: ignore
            kwargs[DRAW] = self._draws = self._draws + 1
        return Call(self._reading, node, name, args, kwargs)

    def _computed(self, node: fx.Node) -> None:
        made = evaluate(self._call(node, _name(node)))
        source = self._regions.get(node.args[0]) if node.target.is_view else None  # type: ignore
        several = isinstance(made, list)
        of = source if isinstance(source, Region) else None
        self.put(node, made if several else [made], single=not several, of=of)  # type: ignore

    def _in_place(self, node: fx.Node) -> None:
        """Read an op that writes into its first argument."""
        schema, name = node.target._schema, _name(node)  # type: ignore
        base, target = name.removesuffix("_"), self._regions[node.args[0]]  # type: ignore
        writes = [x.alias_info is not None and x.alias_info.is_write for x in schema.arguments]
        known = base in WRITES or torch.Tag.pointwise in node.target.tags  # type: ignore
        if not known or base == name or writes.index(True) or sum(writes) > 1:
            return self._spoil(node, "what it writes is not known")
        made: Any = evaluate(self._call(node, base))
        if not self._memory.write(target, made):  # type: ignore
            return self._spoil(node, "it writes into a view whose elements are not in a row")
        self._writers.setdefault(target.storage, []).append(node)  # type: ignore
        self._regions[node] = target
        return None

    def _spoil(self, node: fx.Node, why: str) -> None:
        """Take nothing for known of what a node makes, or writes into."""
        for region in (one for argument in node.all_input_nodes for one in self._held(argument)):
            if not isinstance(node.target, torch._ops.OpOverload) or _mutates(node):
                self._memory.spoil(region, lambda n: self._unknown(node, (n,), why).pieces)
        val = node.meta.get("val")
        several = isinstance(val, list | tuple)
        made = [
            self._unknown(node, x.shape, why) for x in (val if several else [val]) if x is not None
        ]
        self.put(node, made, single=len(made) == 1 and not several)

    def _unknown(self, node: fx.Node, shape: Sequence[int], why: str) -> Value:
        head = UNKNOWN, self._reading.one_rank, node.name, why
        return of_term(self._reading.terms.term(head, (), prod(shape), varies=True), shape)


def _name(node: fx.Node) -> str:
    return node.target._schema.name.split("::")[1]  # type: ignore


def _mutates(node: fx.Node) -> bool:
    return node.target._schema.is_mutable  # type: ignore


def digest(graph: fx.GraphModule, node: fx.Node) -> tuple[Any, ...] | None:
    """Return what identifies a constant of a graph, with its shape; None for what has no values."""
    held = getattr(graph, str(node.target), None)
    if type(held) is not Tensor:
        return None
    data = held.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(data).hexdigest(), str(held.dtype), tuple(held.shape)
