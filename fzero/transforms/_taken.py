"""Copy the state of a torch.optim optimizer that has already stepped into a new train state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fzero.collectives import broadcast
from fzero.machine.offload import write_back
from fzero.machine.owners import owners_of
from fzero.machine.packing import cut, pack
from fzero.optim import TorchOptimizer
from fzero.optim.entries import codec_in
from fzero.ranks.mesh import Axis
from fzero.state import Placement, TrainState


@torch.no_grad()
def taken_over(state: TrainState, mesh: Axis) -> TrainState:
    """Return the state that goes on from what its optimizer has; the optimizer lets go of it.

    Values are those of rank 0 of the mesh on every rank, as those of parameters are. A collective
    if there are any, of which all ranks have said the same.
    """
    rule, layout = state.setup.optimizer, state.setup.layout
    if not (isinstance(rule, TorchOptimizer) and rule.held):
        return state
    paths = [
        leaf.path for leaf in layout.leaves if leaf.trainable and rule.group_of(leaf.path) >= 0
    ]
    slots = {name: list(flats) for name, flats in state.optimizer.slots.items()}
    for number, index in enumerate(layout.trainable):
        leaves = [layout.leaves[i] for i in layout.groups[index].leaves]
        for name, flats in slots.items():
            if name in rule.odd_slots:
                own = rule.held.get(leaves[0].path, {}).get(name)
                flats[number] = (
                    flats[number] if own is None else _sent(state, torch.as_tensor(own), mesh)
                )
            elif flats[number].numel():
                codec = codec_in(state.setup, index, name)
                dtype = flats[number].dtype if codec is None else torch.float32
                values = [rule.begin(leaf, name, dtype, state.device) for leaf in leaves]
                whole = _sent(state, pack(layout, index, values), mesh)
                part = cut(state.setup, whole, Placement.REPLICATED, state.setup.optimizer_state)
                write_back(flats[number], part if codec is None else codec.row_of(part))
    kept = {name: tuple(flats) for name, flats in slots.items()}
    owned = _owned(state, rule, mesh)
    optimizer = rule.with_owned(replace(state.optimizer, slots=kept), owned)
    optimizer = _counted(rule, optimizer, paths)
    rule.let_go(paths)
    return state.replace(optimizer=optimizer)


def _owned(state: TrainState, rule: TorchOptimizer, mesh: Axis) -> dict[str, tuple[Tensor, ...]]:
    """Return what owners keep of whole parameters: what the optimizer has of them."""
    owned = {name: list(some) for name, some in rule.owned(state.optimizer).items()}
    owners = owners_of(state.setup)
    mine = set() if owners is None else set(owners.mine)
    for number, one in enumerate(() if owners is None else owners.leaves):
        has, kept = rule.held.get(one.leaf.path, {}), rule.kept_of(one.leaf)
        for name in (name for name in owned if name in has):
            sent = _sent(state, torch.as_tensor(has[name]), mesh)
            if number in mine:
                like = owned[name][number]
                owned[name][number] = sent.reshape(-1).to(like) if name in kept else sent
    return {name: tuple(some) for name, some in owned.items()}


def _sent(state: TrainState, value: Tensor, mesh: Axis) -> Tensor:
    return broadcast([value.detach().to(state.device)], mesh, 0)[0]


def _counted(rule: TorchOptimizer, optimizer: Any, paths: Sequence[str]) -> Any:
    """Return the optimizer state with the counters that each leaf has in a run."""
    counters = rule.counted(optimizer, paths)
    most = 1
    for name, some in counters.items():
        for path, like in some.items():
            if path in rule.held and not rule.shares(path, name):
                some[path] = torch.full_like(like, float(rule.held[path][name]))
                most = max(most, int(some[path])) if name == "step" else most
    fresh = [path for path in paths if path not in rule.held]
    return rule.recounted(optimizer, paths, counters, count=most, unstepped=fresh)
