"""Are the programs of ranks one program, but for which part of a whole each takes?"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from fzero.tools.prove._read import digest
from fzero.tools.trace.program import UPDATE, RecordedStep

OTHER_PROGRAMS = "ranks run other programs"
_CUT = (
    f"{OTHER_PROGRAMS}: their updates differ. Options of some leaves (decay_mask=, groups=) cut "
    "what each rank has of a flat at other elements, which is followed on 64 ranks and fewer. With "
    "more it is with stage=0, where ranks have all of a flat; at stage 3 with units=lambda path: "
    "path, where each leaf is a flat; and with the same options for all leaves"
)
_SELECT, _SLICE = torch.ops.aten.select.int, torch.ops.aten.slice.Tensor


class ProgramComparison:
    """Compares programs with a first one, node by node, and keeps none of them.

    differs: the first node of the first program at which another one does something else. why: in
    words.
    """

    def __init__(self, first: RecordedStep) -> None:
        self._nodes, self._facts, self._ends = list(first.graph.graph.nodes), *_facts_of(first)
        self._selects = {node: node.args[2] for node in self._nodes if node.target is _SELECT}
        self._own = {node for node, index in self._selects.items() if index == first.rank}
        self._moves = set[fx.Node]()  # those that select other parts on other ranks
        self.differs: fx.Node | None = None
        self.why = OTHER_PROGRAMS

    def add(self, other: RecordedStep) -> None:
        """Compare one more."""
        facts, ends = _facts_of(other)
        nodes = list(other.graph.graph.nodes)
        for node, fact, its, found in zip(self._nodes, self._facts, nodes, facts, strict=False):
            if found != fact:
                self._note(node, cuts=_is_of_update(node) or _is_of_update(its))
                return
            if node in self._selects:
                index: Any = its.args[2]
                self._own -= {node} if index != other.rank else set()
                self._moves |= {node} if index != self._selects[node] else set()
        if len(nodes) != len(self._nodes) or ends != self._ends:
            self._note(self._nodes[-1])

    def _note(self, node: fx.Node, *, cuts: bool = False) -> None:
        order = self._nodes.index
        if self.differs is None or order(node) < order(self.differs):
            self.differs = node
            self.why = _CUT if cuts else OTHER_PROGRAMS

    def own_parts(self) -> frozenset[fx.Node]:
        """Return the nodes that select the part of their rank; what moves otherwise differs."""
        for node in self._moves - self._own:
            self._note(node)
        return frozenset(self._moves & self._own)


def same_program(one: RecordedStep, other: RecordedStep) -> fx.Node | None:
    """Return the first node of a program at which another one of the same rank differs."""
    comparison = ProgramComparison(one)
    comparison.add(other)
    comparison.own_parts()
    return comparison.differs or next(iter(comparison._moves), None)


def _is_of_update(node: fx.Node) -> bool:
    """Whether it is an update, or cuts what an update is given."""
    updates = [one for one in node.graph.nodes if one.target is UPDATE]
    given = {x for one in updates for x in one.all_input_nodes}
    return node in updates or (node in given and node.target is _SLICE)


def _facts_of(program: RecordedStep) -> tuple[list[Hashable], Hashable]:
    number = {node: i for i, node in enumerate(program.graph.graph.nodes)}
    facts = [_facts(node, number, program) for node in number]
    return facts, (program.inputs, program.outputs)


def _facts(node: fx.Node, number: Mapping[fx.Node, int], program: RecordedStep) -> Hashable:
    val = node.meta.get("val")
    made = val if isinstance(val, list | tuple) else [val]
    kinds = tuple((tuple(x.shape), x.dtype) for x in made if isinstance(x, Tensor))
    args = (
        node.args[:2] if node.target is _SELECT else node.args
    )  # which part: see `ProgramComparison`
    held = digest(program.graph, node) if node.op == "get_attr" else None
    target = node.target if node.op == "call_function" else node.op
    return target, _plain(args, number), _plain(node.kwargs, number), kinds, held


def _plain(x: Any, number: Mapping[fx.Node, int]) -> Hashable:
    if isinstance(x, fx.Node):
        return "node", number[x]
    if isinstance(x, list | tuple):
        return tuple(_plain(one, number) for one in x)
    if isinstance(x, Mapping):
        return tuple(sorted((str(key), _plain(one, number)) for key, one in x.items()))
    return type(x).__name__, x.hex() if isinstance(x, float) else str(x)
