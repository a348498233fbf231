"""Flat buffers and the tag that says what a rank's copy of them means."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import torch
from torch import Tensor

from fzero.errors import CallError, PhaseError, explain
from fzero.state._record import record, static

SIXTEEN_BIT = (torch.float16, torch.bfloat16)
"""What is summed in fp32, and has fp32 masters, unless somebody says otherwise."""


class Placement(Enum):
    """What the ranks' copies of a buffer are to each other, with S shards in each of R replicas.

    On a mesh of one dim there is one replica, and S is the number of ranks, W.
    """

    REPLICATED = "replicated"  # [S l]: every rank has the same full values
    SHARDED = "sharded"  # [l]: the s-th rank of each replica has shard s of the full values
    OVER_ALL = "sharded over all ranks"  # [l / R]: replica r has the r-th part of each shard
    BY_RANK = "sharded over all ranks, by their numbers"  # [l / R]: rank r has the r-th part
    PARTIAL = "partial"  # [S l]: the full value is the sum of all ranks' copies
    OWNER = "owner"  # a whole tensor on the rank that owns its leaf, nothing on the others


@record
class Buffers:
    """One flat tensor for each group, all with one placement; without flats: no values.

    Example:
        >>> import torch
        >>> Buffers(flats=(torch.zeros(4),), placement=Placement.PARTIAL).held
        True
    """

    flats: tuple[Tensor, ...] = ()
    placement: Placement = static(default=Placement.REPLICATED)

    @property
    def held(self) -> bool:
        """Whether there are values: whether it is not empty."""
        return bool(self.flats)

    __iter__: ClassVar[None] = None  # else Python would ask __getitem__

    def __getitem__(self, key: Any) -> NoReturn:
        """Raise `CallError`: what is known by path is in flat buffers, a part on each rank."""
        raise CallError(
            f"{key!r} of flat buffers, which have no items.",
            cause="state.params or state.gradients taken for the pytree that a state is made of.",
            fix=f"use fzero.full_params(state)[{key!r}], or fzero.gradients(state)[{key!r}]: at "
            "stage 3, and of gradients from stage 2 on, collectives, which every rank calls.",
        )

    if not TYPE_CHECKING:  # a type checker would take any name for one of the record

        def __getattr__(self, name: str) -> NoReturn:
            """Raise `AttributeError`, which says where names are: hasattr() asks, too."""
            seen = f"flat buffers have no attribute {name!r}."
            if not name.startswith("__"):
                seen = explain(
                    seen,
                    cause="state.params or state.gradients taken for the pytree of them.",
                    fix="fzero.full_params(state) and fzero.gradients(state) return pytrees.",
                )
            raise AttributeError(seen, name=name, obj=self)


def add(old: Buffers, new: Buffers) -> Buffers:
    """Return old + new, elementwise; both must mean the same.

    Raises `PhaseError` for buffers of different placements: the sum would mean nothing.
    """
    if not old.held:
        return new
    if old.placement is not new.placement:
        raise PhaseError(
            f"a {new.placement.value} gradient met a {old.placement.value} one.",
            cause="records were combined by hand.",
            fix="reduce first: fzero.gradients(state) and fzero.apply_gradients do.",
        )
    flats = tuple(a + b for a, b in zip(old.flats, new.flats, strict=True))
    return Buffers(flats=flats, placement=old.placement)


def require_reduced(gradients: Buffers) -> Buffers:
    """Return `gradients`, unless they are PARTIAL: an update from those would be wrong."""
    if gradients.placement is Placement.PARTIAL:
        raise PhaseError(
            "the gradients are partial: each rank holds only what it computed itself.",
            cause="an update was made from a coalescing window's local sum.",
            fix="let fzero.apply_gradients(state) close the window; it reduces first.",
        )
    return gradients
