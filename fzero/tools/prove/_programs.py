"""The programs of a step: of one rank alone, and of ranks of a world, recorded without hardware."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import optree
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from fzero.context.here import abstract_rank
from fzero.machine.partition import assemble
from fzero.state import TrainState
from fzero.tools.prove._ops import constant_of
from fzero.tools.trace.program import RecordedStep, record_step
from fzero.transforms.states import flatten_states, map_states

ALL_RANKS = 4
"""Up to this world every rank is recorded; of a larger one `ranks_of`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """One program for all ranks.

    program: of rank 0. own_parts: nodes that select the part of their own rank, in each of these
    programs. differs: the node from which on ranks do other things, or None.
    """

    program: RecordedStep
    ranks: tuple[int, ...]
    own_parts: frozenset[fx.Node]
    differs: fx.Node | None


def ranks_of(world: int) -> tuple[int, ...]:
    """Return the ranks whose programs are recorded.

    Example:
        >>> ranks_of(3), ranks_of(1024)
        ((0, 1, 2), (0, 1, 512, 1023))
    """
    return tuple(range(world)) if world <= ALL_RANKS else (0, 1, world // 2, world - 1)


def record(step: Any, state: Any, args: tuple[Any, ...], world: int, ranks: Sequence[int]) -> list[RecordedStep]:
    """Record the programs of some ranks of a world, from new states of the parameters of `state`."""
    found: list[RecordedStep] = []
    for rank in ranks:
        new = _on_world(step, state, world, rank)
        if found:  # all ranks have the schedule that the first one has recorded
            known = iter(found[0].states)
            new = map_states("prove", lambda one: one.replace(schedule=next(known).schedule), new)
        axis = flatten_states("prove", new)[0][0].setup.axis
        found.append(record_step(step, (new, *args), axis, rank))
    return found


def _on_world(step: Any, state: Any, world: int, rank: int) -> Any:
    """Return a new state of a rank: parameters of the same shapes, without values."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    states, treespec = flatten_states("prove", state)
    params: Any = optree.tree_unflatten(treespec, [_params(mode, one) for one in states])
    optimizers: Any = optree.tree_unflatten(treespec, [one.setup.optimizer for one in states])
    with abstract_rank(rank, world):
        return step.init(params, optimizers, initializer=lambda _, leaf: torch.empty_like(leaf))


def _params(mode: FakeTensorMode, state: TrainState) -> Any:
    layout = state.setup.layout
    made: dict[int, Tensor] = {}
    for i, leaf in enumerate(layout.leaves):
        meta = torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
        made[i] = FakeTensor(mode, meta, torch.device("cpu"))
        if not leaf.trainable:
            made[i] = torch.nn.Parameter(made[i], requires_grad=False)
    return assemble(layout, made)


def joined_programs(programs: Sequence[RecordedStep]) -> Programs:
    """Return programs of several ranks as one, if they differ in nothing but whose part they take."""
    ranks = tuple(one.rank for one in programs)
    parts: set[fx.Node] = set()
    differs = None
    every = [list(one.graph.graph.nodes) for one in programs]
    for nodes in zip(*every, strict=False):
        known = [_facts(node, one) for node, one in zip(nodes, programs, strict=True)]
        if len(ranks) > 1 and _selects_own(nodes, ranks):
            parts.add(nodes[0])
        elif any(one != known[0] for one in known):
            differs = nodes[0]
            break
    if differs is None and len({len(nodes) for nodes in every}) > 1:
        differs = every[0][-1]
    return Programs(program=programs[0], ranks=ranks, own_parts=frozenset(parts), differs=differs)


def _selects_own(nodes: Sequence[fx.Node], ranks: Sequence[int]) -> bool:
    """Whether each program selects the part of its rank, and is the same but for that."""
    if any(node.target is not torch.ops.aten.select.int for node in nodes):
        return False
    first = {(str(node.args[0]), node.args[1]) for node in nodes}
    return len(first) == 1 and [node.args[2] for node in nodes] == list(ranks)


def _facts(node: fx.Node, program: RecordedStep) -> Any:
    """Return what must be the same of a node on every rank."""
    val = node.meta.get("val")
    shape = tuple(val.shape) if isinstance(val, Tensor) else None
    held = constant_of(getattr(program.graph, str(node.target), None)) if node.op == "get_attr" else None
    return node.op, str(node.target), str(node.args), str(node.kwargs), shape, held


def local_nodes(graph: fx.Graph, ran_by_autograd: Any, update: Any) -> frozenset[fx.Node]:
    """Return the nodes that make losses and gradients: run by autograd, or read by what it runs.

    What an update lies between and that, is not among them.
    """
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        feeds = any(user in found and user.target is not update for user in node.users)
        if ran_by_autograd(node) or (feeds and node.target is not update):
            found.add(node)
    return frozenset(found)
