"""What the owner of a parameter keeps of it, by path: on the owner alone, or on every rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fzero.collectives import broadcast, gather_objects
from fzero.errors import LayoutError
from fzero.machine.owners import OwnedLeaf, Owners, owners_of
from fzero.state import TrainState


def owned_leaf(state: TrainState, path: str) -> tuple[Owners, int] | None:
    """Return the owners, and the number among their parameters of the leaf at `path`, if it is."""
    owners = owners_of(state.setup)
    every = () if owners is None else enumerate(owners.leaves)
    number = next((k for k, one in every if one.leaf.path == path), None)
    return None if owners is None or number is None else (owners, number)


def owned_values(state: TrainState, path: str) -> dict[str, Tensor]:
    """Return {name: what this rank keeps}: in the parameter's shape, or its own; else empty."""
    found = owned_leaf(state, path)
    if found is None:
        return {}
    owners, number = found
    leaf, rule = owners.leaves[number].leaf, state.setup.optimizer
    names = [*rule.kept_of(leaf), *rule.made_by_steps(leaf)]
    every = rule.owned(state.optimizer)
    return {name: every[name][number] for name in names}


def whole_values(state: TrainState, path: str) -> dict[str, Tensor]:
    """Return {name: what the owner keeps} on every rank. A collective."""
    found, own = owned_leaf(state, path), owned_values(state, path)
    if found is None:
        return {}
    owners, number = found
    one, axis = owners.leaves[number], state.setup.axis
    told = gather_objects({name: (tuple(x.shape), x.dtype) for name, x in own.items()}, axis)
    made = {}
    for name, (shape, dtype) in told[one.owner].items():
        mine = _is_owner(state, owners, one)
        sent = own[name] if mine else torch.empty(shape, dtype=dtype, device=state.device)
        whole = broadcast([sent.detach().to(state.device)], axis, one.owner)[0]
        made[name] = whole.view(one.leaf.shape) if name in _kept(state, one) else whole
    return made


def with_value(
    state: TrainState, path: str, name: str, value: Tensor | float, like: Tensor
) -> TrainState:
    """Return the state whose owner keeps `value`, as large as `like`; every rank calls it."""
    found = owned_leaf(state, path)
    assert found is not None
    owners, number = found
    one, rule = owners.leaves[number], state.setup.optimizer
    given = torch.as_tensor(value).detach()
    if like.numel() not in (0, given.numel()):
        raise LayoutError(
            f"{name} of {path} has the shape {tuple(like.shape)}, the new value "
            f"{tuple(given.shape)}.",
            cause="a part of a value: what is kept of this parameter is whole, on its owner.",
            fix="give the full value, in the shape that full_optimizer_state(path, name) returns.",
        )
    if not _is_owner(state, owners, one):
        return state
    owned = {key: list(some) for key, some in rule.owned(state.optimizer).items()}
    old = owned[name][number]
    made = given.reshape(old.shape) if old.numel() else given
    owned[name][number] = made.to(old.device, old.dtype if old.numel() else made.dtype).clone()
    made_of: Any = rule.with_owned(state.optimizer, {k: tuple(x) for k, x in owned.items()})
    return state.replace(optimizer=made_of)


def _kept(state: TrainState, one: OwnedLeaf) -> Any:
    return state.setup.optimizer.kept_of(one.leaf)


def _is_owner(state: TrainState, owners: Owners, one: OwnedLeaf) -> bool:
    return owners.rank_of(state.setup.axis.rank) == one.owner
