"""What only some ranks know of a state: replicas that train apart, and owners of named tensors."""

from __future__ import annotations

from typing import Any

from fzero.checkpoint._held import Held
from fzero.checkpoint._kept import Texts
from fzero.checkpoint.manifest import named_texts
from fzero.state import Placement, TrainState
from fzero.transforms.kept import (
    APART,
    common_facts,
    entries_of,
    replica_facts,
    shared_of,
    trains_apart,
)


def facts_of_replicas(held: Held) -> dict[str, Any]:
    """Return what a manifest says of replicas that train apart; {} without. A collective."""
    first, ranks = held.states[0], held.setup.axis.size
    if not trains_apart(first):
        return {}
    own = [replica_facts(one) for one in held.states]
    told = own if held.is_stack else [one for some in held.processes.tell(own) for one in some]
    return {APART: common_facts(first, told[::ranks])}


def any_named(state: TrainState) -> bool:
    """Whether ranks must tell what named tensors they have: the same on all of them."""
    apart = trains_apart(state)
    every = entries_of(state, 0) + (shared_of(state, 0) if apart else [])
    named = [one for one in every if one.form.leaves == "named"]
    return any(apart or one.placement is Placement.OWNER for one in named)


def texts_here(held: Held) -> list[Texts]:
    """Return what the ranks of this process alone know of named tensors."""
    return [named_texts(one, rank) for one, rank in zip(held.states, held.ranks, strict=True)]
