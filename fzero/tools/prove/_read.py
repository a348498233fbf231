"""Read a program op by op: what each value is, in terms of the inputs of the step."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from fzero.tools.prove._memory import Storages, StorageSlice, view_of
from fzero.tools.prove._ops import DRAW, WRITES, evaluate, opaque
from fzero.tools.prove._reading import Interpretation, OpCall
from fzero.tools.prove._terms import Symbolic, of_term


class ProgramRead(NamedTuple):
    """What a program makes.

    made: the values of each node; of one that writes in place, of all of that memory. writers: the
    nodes that write into the memory of a node's value. stopped: (node, why) of the first op of
    which nothing is known; then there are no outputs.
    """

    made: Mapping[fx.Node, Sequence[Symbolic]]
    outputs: Sequence[Symbolic]
    writers: Mapping[fx.Node, Sequence[fx.Node]]
    stopped: tuple[fx.Node, str] | None


def read(graph: fx.GraphModule, inputs: Sequence[Symbolic], reading: Interpretation) -> ProgramRead:
    """Return what the values of a graph are, given what its inputs are."""
    reader, given = _ProgramReader(graph, reading), iter(inputs)
    made: dict[fx.Node, list[Symbolic]] = {}
    outputs, stopped = [], None
    for node in graph.graph.nodes:
        try:
            if node.op == "output":
                outputs = reader.value(node.args[0])
                break
            if node.op == "placeholder":
                reader.put(node, next(given))
            else:
                reader.run(node)
            made[node] = reader.made_by(node)
        except (
            LookupError,
            TypeError,
            ValueError,
            AttributeError,
            ArithmeticError,
            RuntimeError,
        ) as error:
            # Arguments that do not fit a rule: the rule says nothing of such an op.
            stopped = node, f"{error}" if isinstance(error, NotImplementedError) else repr(error)
            break
    return ProgramRead(made, outputs, {node: reader.writers_of(node) for node in made}, stopped)


class _ProgramReader:
    """The values of one graph, while it is read."""

    def __init__(self, graph: fx.GraphModule, reading: Interpretation) -> None:
        self._graph, self._reading = graph, reading
        self._memory = Storages(1 if reading.one_rank else reading.world)
        self._regions: dict[Any, Any] = {}  # node -> region, or a list of them
        self._writers: dict[int, list[fx.Node]] = {}
        self._draws = 0

    def put(
        self, node: fx.Node, made: Symbolic | list[Symbolic], of: StorageSlice | None = None
    ) -> None:
        """Note what a node makes: one value, or several."""
        new = [self._memory.new(x, of) for x in (made if isinstance(made, list) else [made])]
        self._regions[node] = new if isinstance(made, list) else new[0]

    def _held(self, node: fx.Node) -> list[StorageSlice]:
        held = self._regions[node]
        return held if isinstance(held, list) else [held]

    def made_by(self, node: fx.Node) -> list[Symbolic]:
        """Return what a node has made, or the memory that it has written to."""
        wrote = node in self.writers_of(node)
        return [
            self._memory.read(self._memory.all_of(one) if wrote else one)
            for one in self._held(node)
        ]

    def writers_of(self, node: fx.Node) -> list[fx.Node]:
        """Return the nodes that write into the memory of what a node has made."""
        return [x for one in self._held(node) for x in self._writers.get(one.storage, ())]

    def value(self, x: Any) -> Any:
        """Return an argument with values in the place of nodes."""
        if isinstance(x, list | tuple):
            return [self.value(one) for one in x]
        return self._memory.read(self._regions[x]) if isinstance(x, fx.Node) else x

    def run(self, node: fx.Node) -> None:
        """Read one node. Raises if nothing is known of it."""
        target: Any = node.target
        if node.op == "get_attr":
            self.put(node, self._constant(node))
        elif target is operator.getitem:
            self._regions[node] = self._regions[node.args[0]][node.args[1]]
        elif not isinstance(target, torch._ops.OpOverload):
            raise NotImplementedError("it is no op of ATen")
        elif target.namespace == "fzero":
            self._collective(node)
        elif target._schema.is_mutable:
            self._in_place(node)
        elif not self._viewed(node):
            source = self._regions.get(node.args[0]) if target.is_view else None
            self.put(node, evaluate(self._call(node)), source)

    def _constant(self, node: fx.Node) -> Symbolic:
        known = digest(self._graph, node)
        if known is None:
            raise NotImplementedError("it is a constant without values")
        head = "constant", *known
        return of_term(self._reading.terms.term(head, (), prod(known[-1])), known[-1])

    def _collective(self, node: fx.Node) -> None:
        given, axis, group, size, _ = node.args
        if (axis, group) != self._reading.axis or size != self._reading.world:
            raise NotImplementedError("it is over other ranks than those of the state")
        self.put(node, [self._reading.collective(_name(node), x) for x in self.value(given)])

    def _viewed(self, node: fx.Node) -> bool:
        """Read a view of elements in a row; return whether it was one."""
        held = self._regions.get(node.args[0]) if node.args else None
        if not isinstance(held, StorageSlice):
            return False
        if node in self._reading.own_parts:
            whole = self._memory.read(held)
            if whole.spread or node.args[1] != 0 or whole.shape[0] != self._reading.world:
                raise NotImplementedError("ranks take parts that are not of a whole")
            self.put(node, Symbolic(whole.shape[1:], whole.pieces, spread=True), held)
            return True
        shape = getattr(node.meta["val"], "shape", ())
        self._regions[node] = view_of(_name(node), held, node.args[1:], shape)
        return self._regions[node] is not None

    def _call(self, node: fx.Node) -> OpCall:
        args = tuple(map(self.value, node.args))
        kwargs = {key: self.value(x) for key, x in node.kwargs.items()}
        if torch.Tag.nondeterministic_seeded in node.target.tags:  # type: ignore
            kwargs[DRAW] = self._draws = self._draws + 1
        return OpCall(self._reading, node, _name(node), args, kwargs)

    def _in_place(self, node: fx.Node) -> None:
        """Read an op that writes into arguments: each is then what is known, or a function."""
        target, call = node.target, self._call(node)
        if DRAW in call.kwargs:  # bernoulli_: what was there before does not count
            call = call._replace(args=(call.args[0].shape, *call.args[1:]))
        arguments: Any = target._schema.arguments  # type: ignore
        given = {a.name: x for a, x in zip(arguments, node.args, strict=False)} | dict(node.kwargs)
        written = [
            given[a.name]
            for a in arguments
            if a.alias_info and a.alias_info.is_write and given.get(a.name) is not None
        ]
        base = call.name.removesuffix("_")
        pointwise = base in WRITES or torch.Tag.pointwise in target.tags  # type: ignore
        alone = base != call.name and len(written) == 1 and written[0] is node.args[0]
        if alone and pointwise:
            values: Any = [evaluate(call._replace(name=base))]
        else:
            values = opaque(call, [self.value(one) for one in written])
        for one, value in zip(written, values, strict=True):
            self._memory.write(self._regions[one], value)
            self._writers.setdefault(self._regions[one].storage, []).append(node)
        if alone:
            self._regions[node] = self._regions[written[0]]
        else:
            self.put(node, opaque(call) if node.meta.get("val") is not None else [])


def _name(node: fx.Node) -> str:
    return node.target._schema.name.split("::")[1]  # type: ignore


def digest(graph: fx.GraphModule, node: fx.Node) -> tuple[Any, ...] | None:
    """Return what identifies a constant of a graph, with its shape; None for what has no values."""
    held = getattr(graph, str(node.target), None)
    if type(held) is not Tensor:
        return None
    data = held.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(data).hexdigest(), str(held.dtype), tuple(held.shape)
