"""What a state is but for its numbers: what a rank that comes must be told, to make room for it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fzero.ranks.mesh import MeshLike
from fzero.state import Local, Setup, TrainState
from fzero.state.scale import ScalePolicy
from fzero.transforms.init import blank_state
from fzero.transforms.outer import mesh_for
from fzero.transforms.scaled import with_policy
from fzero.transforms.setup import setup_at


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """What a state is but for its numbers, whatever ranks it is on: records of this program."""

    setup: Setup
    local: Local | None
    policy: ScalePolicy | None  # of the loss scale
    device: torch.device


def pattern_of(state: TrainState) -> Pattern:
    """Return what a state is."""
    outer = state.outer
    return Pattern(
        setup=state.setup,
        local=None if outer is None else outer.local,
        policy=None if state.scale is None else state.scale.policy,
        device=state.device,
    )


def blank_at(pattern: Pattern, *, stage: int, mesh: MeshLike) -> TrainState:
    """Return zeros in the place of a state, at a stage, on a mesh of this rank.

    Raises `LayoutError` for an option that does not go with the stage or with the ranks.
    """
    old, local, device = pattern.setup, pattern.local, pattern.device
    axis = mesh_for(mesh, local)
    setup = setup_at(old, stage=stage, axis=axis, device=device, local=local)
    return with_policy(blank_state(setup, device, local=local), pattern.policy)
