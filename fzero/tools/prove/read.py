"""Read a program op by op: what each value is, in terms of the inputs of the step."""

from __future__ import annotations

import hashlib
import operator
import re
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from fzero.state import Setup, TrainState
from fzero.tools.prove import ops as table
from fzero.tools.prove.ops import ADDS, AGAIN, Made, opaque, written
from fzero.tools.prove.terms import (
    FINITE,
    OVER_RANKS,
    OWN_TOTAL,
    UNIFORM,
    Budget,
    Interpretation,
    OpCall,
    OutOfBudget,
    Stretch,
    Sum,
    Symbolic,
    Term,
    Terms,
    call_of,
    cut,
    joined,
    of_term,
    whole,
)
from fzero.tools.trace.found import bytes_of
from fzero.tools.trace.program import FIELD, RecordedStep

# Storages, and views of elements in a row: what is where, while a program is read.


class StorageSlice(NamedTuple):
    """Elements of a storage in a row, as a tensor of some shape."""

    storage: int
    start: int
    shape: tuple[int, ...]


class _Source(NamedTuple):
    """What a storage is kept as a copy of, but is a view of.

    writes: how often that had been written to. chunk: one of several that do not overlap, and are
    the only ones of it.
    """

    storage: int
    writes: int
    chunk: bool


class _Storage(NamedTuple):
    value: Symbolic
    writes: int = 0
    of: _Source | None = None
    chunked: bool = False
    lost: bool = False  # a chunk of it was written to


class Storages:
    """The storages of a program on `world` ranks."""

    def __init__(self, world: int) -> None:
        self._world, self._storages = world, list[_Storage]()

    def new(
        self, value: Symbolic, of: StorageSlice | None = None, *, chunk: bool = False
    ) -> StorageSlice:
        """Return a new storage; `of`: what it is a view of, whose elements are not in a row."""
        source = None
        if of is not None:
            held = self._storages[of.storage]
            source = _Source(of.storage, held.writes, chunk)
            self._storages[of.storage] = held._replace(chunked=held.chunked or chunk)
        self._storages.append(_Storage(value._replace(shape=(value.numel,)), of=source))
        return StorageSlice(len(self._storages) - 1, 0, value.shape)

    def may_be_chunked(self, region: StorageSlice) -> bool:
        """Return whether chunks of a region may be written to apart from each other."""
        held = self._storages[region.storage]
        return prod(region.shape) == held.value.numel and held.of is None and not held.chunked

    def all_of(self, region: StorageSlice) -> StorageSlice:
        """Return the storage of a region as one."""
        return StorageSlice(region.storage, 0, self._storages[region.storage].value.shape)

    def read(self, region: StorageSlice) -> Symbolic:
        """Return what is there."""
        held, numel = self._storages[region.storage], prod(region.shape)
        at = held
        stale = held.lost
        while at.of is not None:  # a view of a view is one of the first
            of, at = at.of, self._storages[at.of.storage]
            stale = stale or at.writes != of.writes or (at.lost and not of.chunk)
        if stale:
            raise NotImplementedError("it reads a view of what was written to since")
        full, pieces = held.value, held.value.pieces
        if numel != full.numel:
            ranks = range(self._world if full.spread else 1)
            parts = (cut(pieces, r * full.numel + region.start, numel) for r in ranks)
            pieces = joined(piece for part in parts for piece in part)
        return Symbolic(region.shape, pieces, full.spread)

    def write(self, region: StorageSlice, value: Symbolic) -> None:
        """Put a value there."""
        held, numel = self._storages[region.storage], value.numel
        old, new, stop = held.value, value.pieces, region.start + numel
        part = numel != old.numel
        view = held.of is not None and not held.of.chunk
        if view or prod(region.shape) != numel or (part and (value.spread or old.spread)):
            raise NotImplementedError("it writes to elements that are not in a row")
        if part:
            after = cut(old.pieces, stop, old.numel - stop)
            new = joined([*cut(old.pieces, 0, region.start), *new, *after])
        made = Symbolic(old.shape, new, value.spread)
        self._storages[region.storage] = held._replace(value=made, writes=held.writes + 1)
        if held.of is not None:
            base = self._storages[held.of.storage]
            self._storages[held.of.storage] = base._replace(lost=True)


def view_of(name: str, region: StorageSlice, args: Sequence[Any], shape: Sequence[int]) -> Any:
    """Return the region or regions of a view; None where its elements are not in a row.

    name: of an op of the table of views. args: all its further arguments. shape: of its result.
    """
    if name in ("detach", "alias", "unsqueeze", "squeeze"):
        return region._replace(shape=tuple(shape))
    if name in ("view", "_unsafe_view"):
        numel, rest = prod(region.shape), prod(size for size in args[0] if size != -1)
        made = tuple(numel // rest if size == -1 else size for size in args[0])
        return region._replace(shape=made) if prod(made) == numel else None
    if name in ("split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes"):
        sizes, dim = args
        total, found, at = region.shape[dim], [], 0
        if isinstance(sizes, int):
            sizes = [min(sizes, total - first) for first in range(0, total, sizes)]
        for size in sizes:
            found.append(_part(region, dim, at, size, (size,)))
            at += size
        return found if at == total and all(found) else None
    if name == "select":
        dim, index = args
        return _part(region, dim, index % region.shape[dim], 1, ())
    if name == "slice":
        dim, start, stop, step = args
        first, last, _ = slice(start, stop).indices(region.shape[dim])
        size = max(last - first, 0)
        return _part(region, dim, first, size, (size,)) if step == 1 else None
    return None


def _part(region: StorageSlice, dim: int, first: int, size: int, kept: tuple[int, ...]) -> Any:
    outer, inner = prod(region.shape[:dim]), prod(region.shape[dim + 1 :])
    fits = outer == 1 and dim >= 0 and 0 <= first <= first + size <= region.shape[dim]
    shape = (*region.shape[:dim], *kept, *region.shape[dim + 1 :])
    return StorageSlice(region.storage, region.start + first * inner, shape) if fits else None


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


def read_together(
    graphs: Sequence[fx.GraphModule],
    inputs: Sequence[Sequence[Symbolic]],
    reading: Interpretation,
    budget: Budget | None = None,
) -> list[ProgramRead]:
    """Return what the values of the graphs of all ranks are, given the inputs of each; or of one.

    All are read up to their next collective, which gives each rank what it does of all.
    """
    done: list[ProgramRead] = []
    with reading.terms.within(budget):
        pairs = zip(graphs, inputs, strict=True)
        runs = [_ProgramReader(graph, reading).read(given) for graph, given in pairs]
        answers: list[Any] = [None] * len(runs)
        while not done:
            sent = list[_Sent]()
            for run, answer in zip(runs, answers, strict=True):
                failed = isinstance(answer, Exception)
                try:
                    sent.append(run.throw(answer) if failed else run.send(answer))
                except StopIteration as end:
                    done.append(end.value)
            try:
                if (sent and done) or len({(name, len(values)) for name, values in sent}) > 1:
                    raise NotImplementedError("ranks make other collectives")
                of_ranks = [values for _, values in sent]
                made = [
                    reading.collective(sent[0][0], list(x)) for x in zip(*of_ranks, strict=True)
                ]
                answers = [list(x) for x in zip(*made, strict=True)] if made else [[] for _ in sent]
            except _NOTHING_KNOWN as error:
                if done:
                    raise
                answers = [error for _ in sent]
    return done


_Sent = tuple[str, list[Symbolic]]
"""What a rank hands in to a collective: its name, and values."""


class _ProgramReader:
    """The values of one graph, while it is read."""

    def __init__(self, graph: fx.GraphModule, reading: Interpretation) -> None:
        self._graph, self._reading = graph, reading
        self._memory = Storages(1 if reading.one_rank else reading.world)
        self._regions: dict[Any, Any] = {}  # node -> region, or a list of them
        self._writers: dict[int, list[fx.Node]] = {}
        self._constants = set[int]()  # storages that a call must not write to
        self._draws = 0

    def read(self, inputs: Sequence[Symbolic]) -> Generator[_Sent, Any, ProgramRead]:
        """Read the program; at a collective ask for what it gives."""
        given, made = iter(inputs), dict[fx.Node, list[Symbolic]]()
        outputs, stopped = [], None
        for node in self._graph.graph.nodes:
            try:
                if node.op == "output":
                    outputs = self._value(node.args[0])
                    break
                if node.op == "placeholder":
                    self._put(node, next(given))
                elif node.target in table.COLLECTIVES:
                    self._put(node, (yield self._sent(node)))
                else:
                    self._run(node)
                wrote = node in self._writers_of(node)
                held = (self._memory.all_of(one) if wrote else one for one in self._held(node))
                made[node] = [*map(self._memory.read, held)]
            except _NOTHING_KNOWN as error:
                said = isinstance(error, NotImplementedError | OutOfBudget)
                stopped = node, f"{error}" if said else repr(error)
                break
        return ProgramRead(made, outputs, {node: self._writers_of(node) for node in made}, stopped)

    def _put(
        self, node: fx.Node, made: Made, of: StorageSlice | None = None, *, chunk: bool = False
    ) -> None:
        """Note what a node makes: one value, or several."""
        some = made if isinstance(made, list) else [made]
        new = [self._memory.new(x, of, chunk=chunk) for x in some]
        self._regions[node] = new if isinstance(made, list) else new[0]

    def _held(self, node: fx.Node) -> list[StorageSlice]:
        held = self._regions[node]
        return held if isinstance(held, list) else [held]

    def _writers_of(self, node: fx.Node) -> list[fx.Node]:
        """Return the nodes that write into the memory of what a node has made."""
        return [x for one in self._held(node) for x in self._writers.get(one.storage, ())]

    def _value(self, x: Any) -> Any:
        """Return an argument with values in the place of nodes."""
        if isinstance(x, list | tuple):
            return [self._value(one) for one in x]
        return self._memory.read(self._regions[x]) if isinstance(x, fx.Node) else x

    def _run(self, node: fx.Node) -> None:
        """Read one node. Raises if nothing is known of it."""
        target: Any = node.target
        if node.op == "get_attr":
            known = digest(self._graph, node)
            if known is None:
                raise NotImplementedError("it is a constant without values")
            self._put(node, self._term(("constant", *known), known[-1]))
            self._constants.add(self._regions[node].storage)
        elif target is operator.getitem:
            self._regions[node] = self._regions[node.args[0]][node.args[1]]
        elif target is AGAIN:  # the next call draws its own numbers
            self._draws = 0
            self._put(node, self._value(node.args[0]))
        elif target in table.VIEWS:
            self._view(node)
        elif target in table.MOVES:
            self._put(node, opaque(self._call(node)), self._regions[node.args[0]])
        elif target in table.UNWRITTEN:
            head = "unwritten", self._reading.one_rank, node.name
            self._put(node, self._term(head, tuple(node.meta["val"].shape), varies=True))
        elif target in table.WRITES:  # what is known, into its first argument
            apart, meaning = table.WRITES[target]
            into: Any = node.args[0]
            val = into.meta["val"]
            call = self._call(node, apart)._replace(results=((tuple(val.shape), val.dtype),))
            made = meaning(call)
            assert isinstance(made, Symbolic)
            self._write(node, into, made)
            self._regions[node] = self._regions[into]
        elif target in table.WRITES_UNKNOWN or target in table.BATCH_NORM:
            self._writes_unknown(node)
        elif target in table.MEANINGS:
            self._put(node, table.MEANINGS[target](self._call(node)))
        else:
            raise NotImplementedError(f"{target} is no op that a proof knows")

    def _term(self, head: Any, shape: tuple[int, ...], varies: bool | None = None) -> Symbolic:
        return of_term(self._reading.terms.term(head, (), prod(shape), varies), shape)

    def _sent(self, node: fx.Node) -> _Sent:
        """Return what the rank hands in to a collective."""
        given: Any
        given, axis, group, size, _ = node.args
        if (axis, group) != self._reading.axis or size != self._reading.world:
            raise NotImplementedError("it is over other ranks than those of the state")
        name = table.COLLECTIVES[node.target]
        if name != "all_gather" and any(x.meta["val"].dtype not in ADDS for x in given):
            raise NotImplementedError("it sums numbers of a dtype that wraps around")
        return name, self._value(given)

    def _view(self, node: fx.Node) -> None:
        """Read a view: of elements in a row the same memory, else a function of it."""
        call = self._call(node)
        held = self._regions[node.args[0]]
        if node in self._reading.own_parts:
            whole = self._memory.read(held)
            if whole.spread or node.args[1] != 0 or whole.shape[0] != self._reading.world:
                raise NotImplementedError("ranks take parts that are not of a whole")
            self._put(node, Symbolic(whole.shape[1:], whole.pieces, spread=True), held)
            return
        name = call.target._schema.name.split("::")[1]
        found = view_of(name, held, list(call.args.values())[1:], call.results[0][0])
        if found is None:
            # torch lets the parts of an unsafe split be written to, and nobody read the whole
            chunks = name.startswith("unsafe") and self._memory.may_be_chunked(held)
            self._put(node, opaque(call), held, chunk=chunks)
        else:
            self._regions[node] = found

    def _call(self, node: fx.Node, target: Any = None) -> OpCall:
        call = call_of(self._reading, node, self._value, target=target)
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

    def _writes_unknown(self, node: fx.Node) -> None:
        """Read an op that writes into arguments: each is then an unknown function."""
        target: Any = node.target
        call, arguments = self._call(node), target._schema.arguments
        names = [a.name for a in arguments if a.alias_info and a.alias_info.is_write]
        if target in table.BATCH_NORM and call.args["training"]:
            names = ["running_mean", "running_var"]
        given: Any = dict(zip(call.args, node.args, strict=False)) | dict(node.kwargs)
        into = [x for name in names if (x := given.get(name)) is not None]
        values = [written(call, self._value(one), i) for i, one in enumerate(into)]
        for one, value in zip(into, values, strict=True):
            self._write(node, one, value)
        if into == [node.args[0]]:
            self._regions[node] = self._regions[into[0]]
        else:
            self._put(node, opaque(call))


def digest(graph: fx.GraphModule, node: fx.Node) -> tuple[Any, ...] | None:
    """Return what identifies a constant of a graph, with its shape; None for what has no values."""
    held = getattr(graph, str(node.target), None)
    if type(held) is not Tensor:
        return None
    return hashlib.sha256(bytes_of(held)).hexdigest(), str(held.dtype), tuple(held.shape)


# The inputs and outputs of a recorded program: which leaves are where in its tensors.


class BufferPlace(NamedTuple):
    """What a tensor of a state is: the flat of a group, whole or spread; or a tensor of its own.

    kind: its path, without the number of the group.
    """

    kind: str
    setup: Setup | None = None
    group: int = -1
    spread: bool = False

    @property
    def leaves(self) -> Iterator[tuple[str, int, int]]:
        """(path, where it starts in the full flat, its elements) of each leaf of the group."""
        if self.setup is None:
            return
        layout, group = self.setup.layout, self.setup.layout.groups[self.group]
        for i, start in zip(group.leaves, group.offsets, strict=True):
            if layout.leaves[i].numel:
                yield layout.leaves[i].path, start, layout.leaves[i].numel

    @property
    def keys(self) -> list[Key]:
        """Of what is in it."""
        return [(self.kind, path) for path, _, _ in self.leaves] or [(self.kind, "")]


Key = tuple[str, str]
"""(kind, path of a leaf), or (path of a tensor of the state, "")."""


def places_of(
    program: RecordedStep, paths: Sequence[str], nodes: Sequence[fx.Node]
) -> list[BufferPlace]:
    """Return the place of each tensor of a state, or of an argument."""
    states = dict(zip(program.setups, program.states, strict=True))
    return [_place(path, node, states) for path, node in zip(paths, nodes, strict=True)]


_SLOT = re.compile(r"^(state.*?)\.slots\[(['\"])(.*?)\2\]\.value\.flats\[\d+\]$")


def _place(path: str, node: fx.Node, states: Mapping[str, TrainState]) -> BufferPlace:
    state, indexed = _SLOT.match(path) or FIELD.match(path), re.match(r"^(.*)\[(\d+)\]$", path)
    shape = getattr(node.meta.get("val"), "shape", ())
    if state is None or indexed is None or len(shape) != 1 or not shape[0]:
        return BufferPlace(path)
    setup, every, placement = states[state[1]].setup, state[2] == "params", None
    if state.re is _SLOT:
        slot = states[state[1]].slots[state[3]]
        every, placement = slot.form.leaves == "all", slot.value.placement
    groups = range(len(setup.layout.groups)) if every else setup.layout.trainable
    placement = placement or (setup.params if every else setup.optimizer_state)
    at = int(indexed[2])
    if at >= len(groups) or shape[0] != setup.numel(groups[at], placement):
        return BufferPlace(path)
    return BufferPlace(indexed[1], setup, groups[at], setup.part(placement, 0).count > 1)


def input_value(terms: Terms, place: BufferPlace, node: fx.Node) -> Symbolic:
    """Return what an input is: leaves, and padding between them of which nothing is known."""
    shape = tuple(node.meta["val"].shape)
    if place.setup is None:
        varies = not place.kind.startswith("state")
        numel = torch.Size(shape).numel()
        return of_term(terms.term(place.kind, (), numel, varies=varies), shape)
    pieces, at = [], 0
    end = "", place.setup.layout.full_numel(place.group), 0
    for path, start, numel in [*sorted(place.leaves, key=lambda leaf: leaf[1]), end]:
        padding = terms.term(("padding", place.kind, place.group, at), (), start - at)
        pieces.append(Stretch(start - at, whole(padding)))
        pieces.append(Stretch(numel, whole(terms.term((place.kind, path), (), numel))))
        at = start + numel
    return Symbolic(shape, joined(pieces), place.spread)


Values = Mapping[Key, Symbolic | None]
"""The elements of each leaf in the outputs of a program; None where other ranks have them."""


def outputs_by_leaf(places: Sequence[BufferPlace], values: Sequence[Symbolic]) -> Values:
    """Return what there is in these outputs."""
    found: dict[Key, Symbolic | None] = {}
    for place, value in zip(places, values, strict=True):
        if place.setup is None and value.numel:
            found[place.kind, ""] = None if value.spread else value
        for path, start, numel in place.leaves:
            part = Symbolic((numel,), cut(value.pieces, start, numel))
            found[place.kind, path] = part if value.spread == place.spread else None
    return found


# Where a fault begins: at the first value that the one-rank program does not explain.


class Explained:
    """What the values of a sound program may be.

    A sum that the one-rank program has, of one rank or over ranks, divided by one of the `divisors`
    or not: gradients are so on their way to the mean. In a buffer of the state, each leaf where a
    group has it, and zeros or what was there between them.
    """

    def __init__(
        self,
        reading: Interpretation,
        made: Iterable[Symbolic],
        leaves: Iterable[tuple[Key, Symbolic | None]],
        divisors: Iterable[Fraction],
    ) -> None:
        self._reading, self._divisors = reading, {Fraction(1), *divisors}
        self._known: dict[Any, set[Fraction]] = {}
        self._leaves: dict[Term, set[str]] = {}  # that become of a term, element by element
        for value in made:
            self._learn(value)
        for (_, path), value in leaves:
            self._follow(value, path, 6)

    def _learn(self, value: Symbolic) -> None:
        for one in (piece.sum for piece in value.pieces):
            pattern, by = _pattern(one)
            if by in self._known.get(pattern, ()):
                continue
            varies = any(x.term.varies for x in one)
            for pattern, by in map(_pattern, (one, self._reading.over_ranks(one))):
                known = self._known.setdefault(pattern, set())
                known.update(by / x for x in self._divisors if varies or x == 1)
            for operand in (operand for x in one for operand in x.term.operands):
                self._learn(operand)

    def _follow(self, value: Symbolic | None, path: str, depth: int) -> None:
        if value is None or not path:
            return
        for term in (x.term for x in value.addends):
            if term.numel == value.numel:
                self._leaves.setdefault(term, set()).add(path)
                for operand in term.operands if depth else ():
                    self._follow(operand, path, depth - 1)

    def explains(self, value: Symbolic, places: Sequence[BufferPlace]) -> bool:
        """Return whether a value may be in a sound program with these buffers."""
        total = sum(piece.numel for piece in value.pieces)
        fits = [
            self._fits(value, place)
            for place in places
            if place.setup is not None and place.setup.layout.full_numel(place.group) == total
        ]
        padded = {self._pads(piece.sum) for piece in value.pieces if piece.sum}
        return self._knows(value) and (any(fits) if fits else len(padded) < 2)

    def _knows(self, value: Symbolic) -> bool:
        sums = [piece.sum for piece in value.pieces if piece.sum and not self._pads(piece.sum)]
        mixed = value.spread and any(x.term.varies for one in sums for x in one)
        return not mixed and all(map(self._knows_sum, sums))

    def _knows_sum(self, one: Sum) -> bool:
        for pattern, by in map(_pattern, (one, self._reading.over_ranks(one))):
            if by in self._known.get(pattern, ()):
                return True
        return all(x.term.head == "one" or self._knows_own(x.term) for x in one)

    def _knows_own(self, term: Term) -> bool:
        """Whether a term is a total, a largest one, or a test, of parts that are explained."""
        if term.name in ("abs", OVER_RANKS):
            return all(self._knows_own(x.term) for x in term.operands[0].addends)
        own = term.head in (OWN_TOTAL, "largest", FINITE)
        return own and all(map(self._knows, term.operands))

    def _fits(self, value: Symbolic, place: BufferPlace) -> bool:
        at = 0
        for piece in value.pieces:
            inside = {path: s for path, s, numel in place.leaves if s <= at < s + numel}
            for x in piece.sum:
                known = self._leaves.get(x.term)
                if x.term.head == "one" and not inside:
                    return False  # padding that is not zero
                if known and not any(inside.get(path) == at - max(x.start, 0) for path in known):
                    return False
            at += piece.numel
        return True

    def _pads(self, one: Sum, depth: int = 4) -> bool:
        """Whether a sum is of padding, or of memory that nobody has written to."""
        return depth > 0 and any(
            x.term.name in ("padding", "unwritten")
            or (
                x.term.name in ("update", "mul", "where", "clamp")
                and any(self._pads(p.sum, depth - 1) for v in x.term.operands for p in v.pieces)
            )
            for x in one
        )


def _pattern(one: Sum) -> tuple[Any, Fraction]:
    """Return a sum without its factor and without where it starts, and the factor."""
    first = next((x.start for x in one if x.start != UNIFORM), 0)
    by = one[0].by if one else Fraction(1)
    starts = [x.start if x.start == UNIFORM else x.start - first for x in one]
    return tuple((x.term, s, x.by / by) for x, s in zip(one, starts, strict=True)), by


def first_unexplained(
    read: ProgramRead, explained: Explained, places: Sequence[BufferPlace], ends: Iterable[fx.Node]
) -> fx.Node | None:
    """Return the first node that makes what is not explained, of those that `ends` come from."""
    wanted: set[fx.Node] = set()
    rest = list(ends)
    while rest:
        node = rest.pop()
        if node not in wanted:
            wanted.add(node)
            rest += [*node.all_input_nodes, *read.writers.get(node, ())]
    for node, values in read.made.items():
        # A norm of a part is a number of one rank alone, and explained if its operand is.
        norm = node.target is torch.ops.aten.linalg_vector_norm.default
        if node in wanted and not norm and not all(explained.explains(x, places) for x in values):
            return node
    return None
