"""Slots of any form, which nothing in fzero knows: made by hand, and read as what they mean."""

from __future__ import annotations

from typing import Any

import optree
import torch
from hypothesis import strategies as st
from torch import Tensor

from fzero.checkpoint.elements import state_of_rank
from fzero.machine.packing import pack, part_of, unpack
from fzero.state import NAMESPACE, Buffers, Form, Part, Placement, Setup, Slot, TrainState
from fzero.state.train_state import stack_ranks

NAME = "mine/it"
WHY = "it begins again"
SHARDS = (Placement.SHARDED, Placement.OVER_ALL)


def _forms() -> list[Form]:
    """Every form of the table: leaves x placement x what becomes of it elsewhere."""
    found: list[Form] = []
    owner: Any = {"placement": Placement.OWNER}
    partial: Any = {"placement": Placement.PARTIAL}
    for elsewhere in ("cut", "own", "anew"):
        how: Any = {"elsewhere": elsewhere, "why": WHY if elsewhere == "anew" else ""}
        for leaves in ("learning", "all"):
            for placement in (None, Placement.REPLICATED, *SHARDS):
                found.append(Form(**how, leaves=leaves, placement=placement))
        found += [Form(**how, leaves="number"), Form(**how, leaves="named")]
        found.append(Form(**how, **owner, leaves="named"))
    for elsewhere in ("sum", "own", "anew"):
        how = {"elsewhere": elsewhere, "why": WHY if elsewhere == "anew" else "", **partial}
        found += [Form(**how), Form(**how, leaves="all"), Form(**how, leaves="number")]
    return found


FORMS = _forms()
forms = st.sampled_from(FORMS)
dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16])


def with_slot(stack: Any, form: Form, *, seed: int, dtype: torch.dtype = torch.float32) -> Any:
    """The stacked state with a slot of a form; whole numbers, others for each seed; 0: zeros."""
    setup = stack.setup
    slots: list[Any] = [_slot(setup, form, rank, seed, dtype) for rank in range(stack.mesh.size)]
    whole: Any = optree.tree_map(lambda *xs: stack_ranks(xs), *slots, namespace=NAMESPACE)
    return stack.replace(slots={**stack.slots, NAME: whole})


def of_rank(state: TrainState, form: Form, rank: int, *, seed: int) -> TrainState:
    """The same of the state of one process."""
    return state.replace(slots={NAME: _slot(state.setup, form, rank, seed, torch.float32)})


def _numbers(path: str, shape: Any, seed: int, dtype: torch.dtype) -> Tensor:
    source = torch.Generator().manual_seed(1000 * seed + sum(path.encode()))
    return (torch.randint(1, 9, tuple(shape), generator=source) * bool(seed)).to(dtype)


def _slot(setup: Setup, form: Form, rank: int, seed: int, dtype: torch.dtype) -> Slot:
    layout, placement = setup.layout, form.placed(setup.optimizer_state)
    own = seed + 10 * rank * bool(seed) if placement is Placement.PARTIAL else seed
    if form.leaves == "number":
        return Slot(value=_numbers("number", (3,), own, dtype), form=form)
    if form.leaves == "named":
        leaves = [leaf for leaf in layout.leaves if leaf.numel]
        named = {x.path: _numbers(x.path, (2, len(x.path)), own, dtype) for x in leaves}
        if placement is Placement.OWNER:
            owners = (
                setup.axis
                if setup.optimizer_state is Placement.REPLICATED
                else setup.over(setup.optimizer_state)
            )
            mine = rank % owners.size
            named = {
                name: x if k % owners.size == mine else x.new_zeros(0)
                for k, (name, x) in enumerate(named.items())
            }
        return Slot(value=named, form=form)
    groups = layout.trainable if form.leaves == "learning" else range(len(layout.groups))
    flats: list[Tensor] = []
    for i in groups:
        members = [layout.leaves[k] for k in layout.groups[i].leaves]
        full = pack(layout, i, [_numbers(x.path, x.stored_shape, own, dtype) for x in members])
        flats.append(part_of(full, Part(1, 0), setup.part(placement, rank)).clone())
    return Slot(value=Buffers(flats=tuple(flats), placement=placement), form=form)


def meaning(stack: Any) -> dict[str, Tensor]:
    """The logical value of the slot: {path: tensor}; equal copies are checked."""
    setup, size = stack.setup, stack.mesh.size
    slots = [state_of_rank(stack, rank).slots[NAME] for rank in range(size)]
    form, layout = slots[0].form, setup.layout
    placement = form.placed(setup.optimizer_state)
    if form.leaves in ("number", "named"):
        rows = [x.value if form.leaves == "named" else {"": x.value} for x in slots]
        if placement is Placement.PARTIAL:
            return {key: torch.stack([row[key] for row in rows]).sum(0) for key in rows[0]}
        found: dict[str, Tensor] = {}
        for key, x in (pair for row in rows for pair in row.items() if pair[1].numel()):
            assert torch.equal(found.setdefault(key, x), x)
        return found
    groups = layout.trainable if form.leaves == "learning" else range(len(layout.groups))
    found = {}
    for k, i in enumerate(groups):
        flats = [x.value.flats[k] for x in slots]
        assert {x.value.placement for x in slots} == {placement}
        if placement is Placement.PARTIAL:
            full = torch.stack(flats).sum(0)
        else:
            parts: dict[int, Tensor] = {}
            for rank, flat in enumerate(flats):
                assert torch.equal(parts.setdefault(setup.part(placement, rank).index, flat), flat)
            full = torch.cat([parts[n] for n in sorted(parts)])
        members = [layout.leaves[n] for n in layout.groups[i].leaves]
        for leaf, x in zip(members, unpack(layout, i, full), strict=True):
            found[leaf.path] = x
    return found


def is_kept(form: Form, *, moved: bool, ranks_change: bool) -> bool:
    """Whether the form promises that the logical value goes on."""
    if form.elsewhere == "anew":
        return not moved
    partial = form.placement is Placement.PARTIAL
    return form.elsewhere != "own" or not (partial and ranks_change)
