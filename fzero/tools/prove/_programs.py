"""The programs of a step on one rank alone and on ranks among W; the leaves in their tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from fzero.context.here import abstract_rank
from fzero.machine.partition import assemble
from fzero.state import Setup, TrainState
from fzero.tools.prove._read import digest
from fzero.tools.prove._terms import Stretch, Symbolic, Terms, cut, joined, of_term, whole
from fzero.tools.trace.ops import UPDATE, ran_by_autograd
from fzero.tools.trace.program import RecordedStep, record_step
from fzero.transforms.states import flatten_states, map_states


def ranks_of(world: int) -> tuple[int, ...]:
    """Return the ranks whose programs are recorded.

    Example:
        >>> ranks_of(3), ranks_of(1024)
        ((0, 1, 2), (0, 1, 512, 1023))
    """
    return tuple(range(world)) if world <= 4 else (0, 1, world // 2, world - 1)


def record(
    step: Any, state: Any, args: Any, world: int, ranks: Sequence[int]
) -> list[RecordedStep]:
    """Record ranks of a world, from new states with parameters of the shapes of `state`."""
    found: list[RecordedStep] = []
    states, treespec = flatten_states("prove", state)
    optimizers: Any = optree.tree_unflatten(treespec, [one.setup.optimizer for one in states])
    for rank in ranks:
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        params: Any = optree.tree_unflatten(treespec, [_params(mode, one) for one in states])
        with abstract_rank(rank, world):
            new = step.init(params, optimizers, initializer=lambda _, leaf: torch.empty_like(leaf))
        if found:  # the schedule that the first rank has recorded is that of all
            schedules = [one.schedule for one in found[0].states]
            new = map_states("prove", lambda one: one.replace(schedule=schedules.pop(0)), new)  # noqa: B023
        axis = flatten_states("prove", new)[0][0].setup.axis
        found.append(record_step(step, (new, *args), axis, rank))
    return found


def _params(mode: FakeTensorMode, state: TrainState) -> Any:
    made: dict[int, Tensor] = {}
    for i, leaf in enumerate(state.setup.layout.leaves):
        meta = torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
        fake = FakeTensor(mode, meta, torch.device("cpu"))
        made[i] = fake if leaf.trainable else torch.nn.Parameter(fake, requires_grad=False)
    return assemble(state.setup.layout, made)


def compared(programs: Sequence[RecordedStep]) -> tuple[frozenset[fx.Node], fx.Node | None]:
    """Return the nodes that select the part of their rank, and the first that differs otherwise.

    Of the first program; None if there is no such node.
    """
    own, every = set[fx.Node](), [list(one.graph.graph.nodes) for one in programs]
    for nodes in zip(*every, strict=False):
        facts = [_facts(*pair) for pair in zip(nodes, programs, strict=True)]
        if any(one != facts[0] for one in facts):
            selects = all(node.target is torch.ops.aten.select.int for node in nodes)
            same = len({(one[0], one[1], str(one[2][:2])) for one in facts}) == 1
            if (
                not selects
                or not same
                or any(node.args[2] != one.rank for node, one in zip(nodes, programs, strict=True))
            ):
                return frozenset(own), nodes[0]
            own.add(nodes[0])
    same_length = len({len(nodes) for nodes in every}) == 1
    return frozenset(own), None if same_length else every[0][-1]


def _facts(node: fx.Node, program: RecordedStep) -> Any:
    val = node.meta.get("val")
    shape = tuple(val.shape) if isinstance(val, Tensor) else ()
    held = digest(program.graph, node) if node.op == "get_attr" else None
    return node.op, str(node.target), tuple(map(str, node.args)), str(node.kwargs), shape, held


def local_nodes(graph: fx.Graph) -> frozenset[fx.Node]:
    """Return the nodes that make losses and gradients: run by autograd, or read by what it runs.

    Not those of which only another update is made.
    """
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        feeds = any(user in found for user in node.users)
        if node.target is not UPDATE and (ran_by_autograd(node) or feeds):
            found.add(node)
    return frozenset(found)


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
_OF_STATE = re.compile(r"^(state.*?)\.(params|gradients|optimizer|window|step|scale)\b")


def places_of(
    program: RecordedStep, paths: Sequence[str], nodes: Sequence[fx.Node]
) -> list[BufferPlace]:
    """Return the place of each tensor of a state, or of an argument."""
    heads = dict.fromkeys(m[1] for path in program.inputs if (m := _OF_STATE.match(path)))
    setups = dict(zip(heads, (one.setup for one in program.states), strict=True))
    return [_place(path, node, setups) for path, node in zip(paths, nodes, strict=True)]


def _place(path: str, node: fx.Node, setups: Mapping[str, Setup]) -> BufferPlace:
    state, indexed = _OF_STATE.match(path), re.match(r"^(.*)\[(\d+)\]$", path)
    shape = getattr(node.meta.get("val"), "shape", ())
    if state is None or indexed is None or len(shape) != 1 or not shape[0]:
        return BufferPlace(path)
    setup, of_params = setups[state[1]], state[2] == "params"
    groups = range(len(setup.layout.groups)) if of_params else setup.layout.trainable
    placement = setup.params if of_params else setup.optimizer_state
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


def outputs_by_leaf(
    places: Sequence[BufferPlace], values: Sequence[Symbolic]
) -> dict[Key, Symbolic | None]:
    """Return the elements of each leaf in the outputs; None where other ranks have them."""
    found: dict[Key, Symbolic | None] = {}
    for place, value in zip(places, values, strict=True):
        if place.setup is None and value.numel:
            found[place.kind, ""] = value
        for path, start, numel in place.leaves:
            part = Symbolic((numel,), cut(value.pieces, start, numel))
            found[place.kind, path] = part if value.spread == place.spread else None
    return found
