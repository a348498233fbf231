"""What a state keeps beside parameters and gradients: slots, and the form of each.

A form says all that others must know of a value to save, reshard, mirror, digest, offload, stack,
plan and draw it, so that none of them has to know what it is for:

    leaves      placement             the value that a rank has           its logical value
    "learning"  REPLICATED            `Buffers`, [S l] a group            the full values
                SHARDED               [l]                                 all parts, in order
                OVER_ALL, BY_RANK     [l / R]                             all parts, in order
                PARTIAL               [S l], this rank's own              the sum over ranks
                                      or [l], this rank's shard of what   the sum over replicas
                                      its replica has
    "all"       as above              also for groups that do not learn
    "number"    REPLICATED            one tensor of any shape             the tensor
                PARTIAL               one tensor, this rank's own         the sum over ranks
    "named"     REPLICATED            {name: tensor of any shape}         the tensors
                OWNER                 the same, empty but on its owner    those of the owners
    "record"    None                  what a rule keeps: any pytree       what its owner gives of it
                                                                          as entries

The logical value is what stays where the ranks change; see `Elsewhere`. Two slots can be one sum:
what "a/b" holds is a part of the sum "a" wherever a state has no slot "a/b".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import optree
import torch
from torch import Tensor

from fzero.errors import LayoutError
from fzero.errors.check import require
from fzero.state.buffers import NAMESPACE, Placement, record, static
from fzero.state.codec import Codec

Leaves = Literal["learning", "all", "number", "named", "record"]
"""What a slot is parallel to: the leaves that learn, all leaves, or nothing (a tensor, tensors)."""

Lifetime = Literal["backward", "window", "update", "run"]
"""How long a value lives: a backward, a coalescing window, until the next update, or for ever."""

Elsewhere = Literal["cut", "sum", "own", "anew"]
"""What becomes of a value on other ranks, or at another stage.

"cut": it is cut as parameters are, and a number is the same on every rank. "sum": the sum over
ranks stays; on as many ranks each goes on with its own. "own": each rank, or each replica of local
updates, goes on with its own on as many of them; else it begins as `init` makes it. "anew": it
begins as `init` makes it, with a warning that says `why`.
"""

Kind = Literal["slots", "window", "gradients", "optimizer", "numbers"]
"""The kinds of what a state keeps beside its parameters; "numbers": a few, which nobody counts."""

_LEAVES = ("learning", "all", "number", "named", "record")
_LIFETIMES = ("backward", "window", "update", "run")
_ELSEWHERE = ("cut", "sum", "own", "anew")


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What others must know of a slot: see the table at the top of this file.

    Attributes:
        leaves: what it is parallel to: "learning", "all", "number", "named"; or "record", of
            fzero's own.
        placement: what the ranks' copies are to each other; None: as the optimizer's state is
            placed, which depends on the stage.
        dtype: of its values; None: that of the leaf, or fp32 for a leaf of 16 bits.
        lifetime: "run", or until when it lives. A checkpoint, which stands between two updates,
            has what lives for the run.
        elsewhere: what becomes of it on other ranks: "cut", "sum", "own" or "anew".
        why: for "anew", the words of the warning: what is lost, and what that means.
        codec: what its flats are encoded by, each as one row of bytes; None: they are numbers. One
            whose dtype is floating is not encoded yet: a checkpoint brings it so.
        optional: whether training is right without it. A checkpoint that lacks it, or has it for
            a state that lacks it, is loaded without a warning then.
        kind: under which kind `fzero.state_bytes`, plans and pictures count it.

    Raises:
        LayoutError: for fields that do not go together.

    Example:
        >>> Form().elsewhere, Form(leaves="number").placement
        ('cut', None)
        >>> Form(placement=Placement.PARTIAL)
        Traceback (most recent call last):
        fzero.errors.LayoutError: Form: placement=partial with elsewhere='cut'.
        Usual cause: a sum of what each rank has cannot be cut: only the sum means something.
        Fix: give elsewhere="sum", "own" or "anew".
    """

    leaves: Leaves = "learning"
    placement: Placement | None = None
    dtype: torch.dtype | None = None
    lifetime: Lifetime = "run"
    elsewhere: Elsewhere = "cut"
    why: str = ""
    codec: Codec | None = None
    optional: bool = False
    kind: Kind = "slots"

    def __post_init__(self) -> None:
        """Check that the fields go together."""
        for name, values in (
            ("leaves", _LEAVES),
            ("lifetime", _LIFETIMES),
            ("elsewhere", _ELSEWHERE),
        ):
            wanted = ", ".join(map(repr, values))
            require(f"Form: {name}", getattr(self, name), values.__contains__, wanted)
        placement = self.placement
        require("Form: placement", placement, _is_placement, "a fzero.Placement, or None")
        _require_together(self)

    def placed(self, default: Placement) -> Placement:
        """Return the placement, where the optimizer's state is placed as `default`."""
        if self.placement is not None:
            return self.placement
        return default if self.leaves in ("learning", "all") else Placement.REPLICATED


@record
class Slot:
    """One value of a state, and its form. `value` is what the table in this file says.

    Attributes:
        value: by the form.
        before: what `value` was at the last update, where gradients since then have changed it;
            else None. It is that again where they are thrown away, or their update is skipped.
        form: what others must know of it.
        note: what its owner knows of it beside that, hashable and the same on every rank, such as
            an option; it stays with the state, and is in no file.

    Example:
        >>> Slot(value=torch.zeros(()), form=Form(leaves="number")).value
        tensor(0.)
    """

    value: Any
    before: Any = None
    form: Form = static()
    note: Any = static(default=None)


def changed(slot: Slot, value: Any) -> Slot:
    """Return the slot with the value after a gradient; it keeps the one before the update."""
    before = slot.value if slot.before is None else slot.before
    return replace(slot, value=value, before=before)


def settled(slots: Mapping[str, Slot], skipped: Tensor | None = None) -> dict[str, Slot]:
    """Return slots after an update; where that was `skipped` ([], not 0), they are as before."""

    def of(slot: Slot) -> Slot:
        if skipped is None or slot.before is None:
            return replace(slot, before=None)
        skips = skipped != 0

        def chosen(before: Tensor, after: Tensor) -> Tensor:
            return torch.where(skips, before, after)

        value: Any = optree.tree_map(chosen, slot.before, slot.value, namespace=NAMESPACE)
        return replace(slot, value=value, before=None)

    return {name: of(slot) for name, slot in slots.items()}


def undone(slots: Mapping[str, Slot]) -> dict[str, Slot]:
    """Return slots as they were at the last update: gradients since then are thrown away."""
    return {
        name: replace(slot, value=slot.value if slot.before is None else slot.before, before=None)
        for name, slot in slots.items()
    }


def _is_placement(x: Any) -> bool:
    return x is None or isinstance(x, Placement)


def _require_together(form: Form) -> None:
    """Raise `LayoutError` for fields that contradict each other."""
    placement, per_leaf = form.placement, form.leaves in ("learning", "all")
    named = placement.value if placement is not None else "None"
    if placement is Placement.PARTIAL and form.elsewhere == "cut":
        raise LayoutError(
            f"Form: placement={named} with elsewhere='cut'.",
            cause="a sum of what each rank has cannot be cut: only the sum means something.",
            fix='give elsewhere="sum", "own" or "anew".',
        )
    if form.elsewhere == "sum" and placement is not Placement.PARTIAL:
        raise LayoutError(
            f"Form: elsewhere='sum' with placement={named}.",
            cause="ranks that have equal or different parts of one value have no sum to keep.",
            fix="give placement=fzero.Placement.PARTIAL, of which each rank has its own summand.",
        )
    if placement is Placement.OWNER and form.leaves != "named":
        raise LayoutError(
            f"Form: placement={named} with leaves={form.leaves!r}.",
            cause="an owner keeps whole tensors of single leaves, by their paths.",
            fix='give leaves="named".',
        )
    sharded = placement in (Placement.SHARDED, Placement.OVER_ALL, Placement.BY_RANK)
    if sharded and not per_leaf:
        raise LayoutError(
            f"Form: placement={named} with leaves={form.leaves!r}.",
            cause="a number, or a tensor that is parallel to no leaf, is not cut over ranks.",
            fix='give leaves="learning" or "all", or leave placement= out.',
        )
    if form.elsewhere == "anew" and not form.why:
        raise LayoutError(
            "Form: elsewhere='anew' without why=.",
            cause="a value that is lost where ranks change, and nobody is told.",
            fix='say what that means, e.g. why="the average begins again".',
        )
