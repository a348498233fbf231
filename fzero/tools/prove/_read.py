"""Read a program op by op: what each value is, in terms of the inputs of the step."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Generator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from torch import Tensor, fx

from fzero.tools.prove import _table as table
from fzero.tools.prove._budget import Budget, OutOfBudget
from fzero.tools.prove._call import OpCall, call_of
from fzero.tools.prove._dtypes import ADDS
from fzero.tools.prove._gradient import AGAIN
from fzero.tools.prove._memory import Storages, StorageSlice, view_of
from fzero.tools.prove._ops import opaque, written
from fzero.tools.prove._reading import Interpretation
from fzero.tools.prove._terms import Symbolic, of_term
from fzero.tools.trace.found import bytes_of


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


_NOTHING_KNOWN = (
    *(LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError),
    *(AssertionError, OutOfBudget),
)
"""Arguments that do not fit a meaning: it says nothing of such a call."""


def read(
    graph: fx.GraphModule,
    inputs: Sequence[Symbolic],
    reading: Interpretation,
    budget: Budget | None = None,
) -> ProgramRead:
    """Return what the values of a graph are, given what its inputs are."""
    return read_together([graph], [inputs], reading, budget)[0]


def read_together(
    graphs: Sequence[fx.GraphModule],
    inputs: Sequence[Sequence[Symbolic]],
    reading: Interpretation,
    budget: Budget | None = None,
) -> list[ProgramRead]:
    """Return the same of the graphs of all ranks, given the inputs of each; or of one for all."""
    done: list[ProgramRead] = []
    with reading.terms.within(budget):
        runs = [_run(*pair, reading) for pair in zip(graphs, inputs, strict=True)]
        answers: list[Any] = [None] * len(runs)
        while not done:
            sent = list[_Sent]()
            for run, answer in zip(runs, answers, strict=True):
                try:
                    sent.append(
                        run.throw(answer) if isinstance(answer, Exception) else run.send(answer)
                    )
                except StopIteration as end:
                    done.append(end.value)
            if sent and done:
                raise NotImplementedError("ranks make other collectives")
            answers = _answers(reading, sent)
    return done


def _answers(reading: Interpretation, sent: Sequence[_Sent]) -> list[Any]:
    """Return what a collective gives each rank, or the error that it is."""
    try:
        if len({(one.name, len(one.values)) for one in sent}) > 1:
            raise NotImplementedError("ranks make other collectives")
        made = [
            reading.collective(one.name, list(x))
            for one in sent[:1]
            for x in zip(*(one.values for one in sent), strict=True)
        ]
        return [list(own) for own in zip(*made, strict=True)] if made else [[] for _ in sent]
    except _NOTHING_KNOWN as error:
        return [error for _ in sent]


class _Sent(NamedTuple):
    """What a rank hands in to a collective."""

    name: str
    values: list[Symbolic]


def _run(
    graph: fx.GraphModule, inputs: Sequence[Symbolic], reading: Interpretation
) -> Generator[_Sent, Any, ProgramRead]:
    """Read a program; at a collective ask for what it gives."""
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
            elif node.target in table.COLLECTIVES:
                reader.put(node, (yield reader.sent(node)))
            else:
                reader.run(node)
            made[node] = reader.made_by(node)
        except _NOTHING_KNOWN as error:
            said = isinstance(error, NotImplementedError | OutOfBudget)
            stopped = node, f"{error}" if said else repr(error)
            break
    return ProgramRead(made, outputs, {node: reader.writers_of(node) for node in made}, stopped)


class _ProgramReader:
    """The values of one graph, while it is read."""

    def __init__(self, graph: fx.GraphModule, reading: Interpretation) -> None:
        self._graph, self._reading = graph, reading
        self._memory = Storages(1 if reading.one_rank else reading.world)
        self._regions: dict[Any, Any] = {}  # node -> region, or a list of them
        self._writers: dict[int, list[fx.Node]] = {}
        self._constants = set[int]()  # storages that a call must not write to
        self._draws = 0

    def put(
        self,
        node: fx.Node,
        made: Symbolic | list[Symbolic],
        of: StorageSlice | None = None,
        *,
        chunk: bool = False,
    ) -> None:
        """Note what a node makes: one value, or several."""
        some = made if isinstance(made, list) else [made]
        new = [self._memory.new(x, of, chunk=chunk) for x in some]
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
            self._constants.add(self._regions[node].storage)
        elif target is operator.getitem:
            self._regions[node] = self._regions[node.args[0]][node.args[1]]
        elif target is AGAIN:  # the next call draws its own numbers
            self._draws = 0
            self.put(node, self.value(node.args[0]))
        elif target in table.VIEWS:
            self._view(node)
        elif target in table.MOVES:
            self.put(node, opaque(self._call(node)), self._regions[node.args[0]])
        elif target in table.UNWRITTEN:
            self.put(node, self._unwritten(node))
        elif target in table.BATCH_NORM:
            self._batch_norm(node)
        elif target in table.WRITES:
            self._in_place(node)
        elif target in table.WRITES_UNKNOWN:
            self._writes_unknown(node)
        elif target in table.MEANINGS:
            self.put(node, table.MEANINGS[target](self._call(node)))
        else:
            raise NotImplementedError(f"{target} is no op that a proof knows")

    def _constant(self, node: fx.Node) -> Symbolic:
        known = digest(self._graph, node)
        if known is None:
            raise NotImplementedError("it is a constant without values")
        head = "constant", *known
        return of_term(self._reading.terms.term(head, (), prod(known[-1])), known[-1])

    def _unwritten(self, node: fx.Node) -> Symbolic:
        shape = tuple(node.meta["val"].shape)
        head = "unwritten", self._reading.one_rank, node.name
        return of_term(self._reading.terms.term(head, (), prod(shape), varies=True), shape)

    def sent(self, node: fx.Node) -> _Sent:
        """Return what the rank hands in to a collective."""
        given: Any
        given, axis, group, size, _ = node.args
        if (axis, group) != self._reading.axis or size != self._reading.world:
            raise NotImplementedError("it is over other ranks than those of the state")
        name = table.COLLECTIVES[node.target]
        if name != "all_gather" and any(x.meta["val"].dtype not in ADDS for x in given):
            raise NotImplementedError("it sums numbers of a dtype that wraps around")
        return _Sent(name, self.value(given))

    def _view(self, node: fx.Node) -> None:
        """Read a view: of elements in a row the same memory, else a function of it."""
        call = self._call(node)
        held = self._regions[node.args[0]]
        if node in self._reading.own_parts:
            whole = self._memory.read(held)
            if whole.spread or node.args[1] != 0 or whole.shape[0] != self._reading.world:
                raise NotImplementedError("ranks take parts that are not of a whole")
            self.put(node, Symbolic(whole.shape[1:], whole.pieces, spread=True), held)
            return
        name = call.target._schema.name.split("::")[1]
        found = view_of(name, held, list(call.args.values())[1:], call.results[0][0])
        if found is None:
            # torch lets the parts of an unsafe split be written to, and nobody read the whole
            chunks = name.startswith("unsafe") and self._memory.may_be_chunked(held)
            self.put(node, opaque(call), held, chunk=chunks)
        else:
            self._regions[node] = found

    def _call(self, node: fx.Node, target: Any = None) -> OpCall:
        call = call_of(self._reading, node, self.value, target=target)
        if node.target not in table.DRAWS:
            return call
        self._draws += 1
        return call._replace(draw=self._draws)

    def _write(self, node: fx.Node, into: fx.Node, value: Symbolic) -> None:
        region = self._regions[into]
        if region.storage in self._constants:
            raise NotImplementedError(f"it writes into {into.name}, a constant of the step")
        self._memory.write(region, value)
        self._writers.setdefault(region.storage, []).append(node)

    def _in_place(self, node: fx.Node) -> None:
        """Read an op that writes what is known into its first argument."""
        apart, meaning = table.WRITES[node.target]  # type: ignore[index]
        into: Any = node.args[0]
        val = into.meta["val"]
        call = self._call(node, apart)._replace(results=((tuple(val.shape), val.dtype),))
        made = meaning(call)
        assert isinstance(made, Symbolic)
        self._write(node, into, made)
        self._regions[node] = self._regions[into]

    def _writes_unknown(self, node: fx.Node) -> None:
        """Read an op that writes into arguments: each is then an unknown function."""
        target, call = node.target, self._call(node)
        arguments: Any = target._schema.arguments  # type: ignore[union-attr]
        given = {a.name: x for a, x in zip(arguments, node.args, strict=False)} | dict(node.kwargs)
        into = [
            given[a.name]
            for a in arguments
            if a.alias_info and a.alias_info.is_write and given.get(a.name) is not None
        ]
        self._write_unknown(node, call, into)
        if len(into) == 1 and into[0] is node.args[0]:
            self._regions[node] = self._regions[into[0]]
        else:
            self.put(node, opaque(call))

    def _batch_norm(self, node: fx.Node) -> None:
        call = self._call(node)
        given = dict(zip(call.args, node.args, strict=False)) | dict(node.kwargs)
        names = ("running_mean", "running_var") if call.args["training"] else ()
        self.put(node, opaque(call))
        self._write_unknown(node, call, [x for n in names if (x := given.get(n)) is not None])

    def _write_unknown(self, node: fx.Node, call: OpCall, into: Sequence[Any]) -> None:
        values = [written(call, self.value(one), i) for i, one in enumerate(into)]
        for one, value in zip(into, values, strict=True):
            self._write(node, one, value)


def digest(graph: fx.GraphModule, node: fx.Node) -> tuple[Any, ...] | None:
    """Return what identifies a constant of a graph, with its shape; None for what has no values."""
    held = getattr(graph, str(node.target), None)
    if type(held) is not Tensor:
        return None
    return hashlib.sha256(bytes_of(held)).hexdigest(), str(held.dtype), tuple(held.shape)
