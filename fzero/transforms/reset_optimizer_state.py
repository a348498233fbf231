"""What the optimizer of a replica keeps, begun anew: the replica goes on from the anchors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from fzero.machine.offload import offloaded
from fzero.machine.owners import Owners, owners_of
from fzero.optim.entries import codec_in
from fzero.state import NAMESPACE, TrainState
from fzero.state.setup import MASTERS
from fzero.transforms.leaf_slices import pieces_of


def with_tensors(state: TrainState, new: dict[int, Tensor]) -> TrainState:
    """Return the state with other tensors in its optimizer, by the ids of the old ones."""
    made: Any = optree.tree_map(lambda x: new.get(id(x), x), state.optimizer, namespace=NAMESPACE)
    return state.replace(optimizer=made)


def with_new_slots(state: TrainState, stepped: Sequence[Tensor]) -> TrainState:
    """Return the state with zeros for what its optimizer keeps, but for masters and counters.

    A rule of which owners keep something begins as before its first step, counters too: a basis of
    zeros is none. stepped: what the optimizer steps, this rank's part.
    """
    slots = state.setup.optimizer.slots(state.optimizer)
    new: dict[int, Tensor] = {}
    for name in (name for name in slots if name != MASTERS):
        for group, x in zip(state.setup.layout.trainable, slots[name], strict=True):
            codec, zeros = codec_in(state.setup, group, name), torch.zeros_like(x)
            new[id(x)] = zeros if codec is None or not x.numel() else codec.fill(zeros)
    state = with_tensors(state, new)
    owners = owners_of(state.setup)
    return state if owners is None else _with_new_owned(state, stepped, owners)


def _with_new_owned(state: TrainState, stepped: Sequence[Tensor], owners: Owners) -> TrainState:
    setup = state.setup
    rule: Any = setup.optimizer
    home, given = setup.offload.optimizer, dict[str, Any](owners=owners)
    if home is not None:
        given["place"] = lambda x: offloaded(home, x, setup.offload)
    fresh = rule.init(stepped, pieces_of(setup), **given)
    return state.replace(optimizer=rule.restarted(state.optimizer, fresh))
