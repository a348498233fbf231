"""Compare digests: of the ranks of one state, and of two states."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from torch import Tensor

from fzero.errors import LayoutError, MismatchError
from fzero.state import Placement
from fzero.tools.record._again import Wrong
from fzero.tools.record._digest import of_leaves
from fzero.tools.record._records import RecordedForm


class Unequal(NamedTuple):
    """A leaf of which ranks have other values, where they must have the same."""

    leaf: str
    ranks: tuple[int, ...]  # that hold it, or that part of it
    odd: tuple[int, ...]  # those in the minority; () where no value is that of most of them


def unequal_ranks(form: RecordedForm, rows: Tensor) -> Unequal | None:
    """Return the first leaf of which ranks have other digests; None if none have.

    rows: [W, n], of all ranks.

    Example:
        >>> import torch
        >>> from fzero.tools.record._digest import DigestedLeaf
        >>> leaf = DigestedLeaf("parameter w", Placement.REPLICATED)
        >>> form = RecordedForm(stage=0, world_size=3, shards=3, leaves=(leaf,), driver="step")
        >>> unequal_ranks(form, torch.tensor([[5], [5], [4]]))
        Unequal(leaf='parameter w', ranks=(0, 1, 2), odd=(2,))
    """
    for leaf, column in zip(form.leaves, rows.unbind(1), strict=True):
        for ranks in _alike(form, leaf.placement):
            values = {rank: int(column[rank]) for rank in ranks}
            (usual, count), *others = Counter(values.values()).most_common()
            if others:
                odd = tuple(rank for rank, value in values.items() if value != usual)
                return Unequal(leaf.name, tuple(values), odd if 2 * count > len(values) else ())
    return None


def _alike(form: RecordedForm, placement: Placement) -> list[range]:
    """Return the ranks that must have the same of a leaf, together."""
    if form.apart:
        if placement is not Placement.REPLICATED:
            return []
        firsts = range(0, form.world_size, form.shards)
        return [range(first, first + form.shards) for first in firsts]
    # Of OVER_ALL no two ranks have the same.
    span = {Placement.REPLICATED: 1, Placement.SHARDED: form.shards}.get(placement, 0)
    return [range(shard, form.world_size, span) for shard in range(span)]


def error_of(found: Unequal, updates: int, wrong: Wrong | None) -> MismatchError:
    """Return the error that tells it. wrong: where a rank holds what it does not compute."""
    if found.odd:
        who = f"rank {found.odd[0]} has" if len(found.odd) == 1 else f"ranks {[*found.odd]} have"
        others = len(found.ranks) - len(found.odd)
        seen = f"{who} other values of {found.leaf} than the other {others} ranks that hold it"
    else:
        seen = f"ranks {[*found.ranks]} have several values of {found.leaf}, none of them most"
    if wrong is not None:
        ranks = ", ".join(map(str, wrong.ranks))
        seen += (
            "; the calls since the last state that was kept, made again, show "
            f"rank{'s' * (len(wrong.ranks) > 1)} {ranks} wrong first: in {wrong.leaf}, after "
            f"{wrong.updates} updates"
        )
    return MismatchError(
        f"after {updates} updates {seen}.",
        cause="a bit that flipped, hardware that computes wrong, or a write on some ranks only.",
        fix="save the recording on every rank; fzero.bisect(fzero.load_recording(folder), step) "
        "says at which update, in which leaf and on which rank it happened.",
    )


class LeavesApart(NamedTuple):
    """How two states differ: not at all, if no leaf does."""

    leaves: tuple[str, ...]
    ranks: tuple[int, ...]  # whose parts differ; () where the states have other forms


def apart(a: RecordedForm, mine: Tensor, b: RecordedForm, other: Tensor) -> LeavesApart:
    """Compare the digests [W, n] of two states; of other forms, those of the whole leaves.

    Raises `LayoutError` for states of other leaves.
    """
    require_same_leaves(a, b)
    if a == b:
        differ = mine != other
        odd = [name for name, bad in zip(a.names, differ.any(0).tolist(), strict=True) if bad]
        return LeavesApart(
            tuple(odd), tuple(r for r, bad in enumerate(differ.any(1).tolist()) if bad)
        )
    wanted, found = (
        dict(zip(form.names, of_leaves(form.leaves, rows, form.shards).tolist(), strict=True))
        for form, rows in ((a, mine), (b, other))
    )
    return LeavesApart(tuple(name for name, value in wanted.items() if found[name] != value), ())


def require_same_leaves(a: RecordedForm, b: RecordedForm) -> None:
    """Raise `LayoutError` for states of other leaves."""
    if differ := {*a.names} ^ {*b.names}:
        raise LayoutError(
            f"bisect: other leaves: {', '.join(sorted(differ)[:4])}.",
            cause="another model or optimizer.",
            fix="compare runs of one model and one optimizer.",
        )
