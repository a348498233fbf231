"""Compare digests: of the ranks of one state, and of two states."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from torch import Tensor

from fzero.errors import LayoutError, MismatchError
from fzero.state import Placement
from fzero.tools.record._digest import of_leaves
from fzero.tools.record._records import RecordedForm


def unequal_ranks(form: RecordedForm, rows: Tensor, updates: int) -> MismatchError | None:
    """Return an error for the first leaf of which ranks have other digests; None if none have.

    rows: [W, n], of all ranks. updates: that were made.

    Example:
        >>> import torch
        >>> from fzero.tools.record._digest import DigestedLeaf
        >>> leaf = DigestedLeaf("parameter w", Placement.REPLICATED)
        >>> form = RecordedForm(stage=0, world_size=3, shards=3, leaves=(leaf,), driver="step")
        >>> print(unequal_ranks(form, torch.tensor([[5], [5], [4]]), 7))
        after 7 updates rank 2 has other values of parameter w than the other 2 ranks that hold it.
        Usual cause: ...
        Fix: ...
    """
    for leaf, column in zip(form.leaves, rows.unbind(1), strict=True):
        span = {Placement.REPLICATED: 1, Placement.SHARDED: form.shards}.get(leaf.placement, 0)
        for shard in range(span):  # of OVER_ALL no two ranks have the same
            ranks = range(shard, len(rows), span)
            values = [int(column[rank]) for rank in ranks]
            if len(set(values)) > 1:
                return _error(leaf.name, dict(zip(ranks, values, strict=True)), updates)
    return None


def _error(name: str, values: dict[int, int], updates: int) -> MismatchError:
    (usual, count), *_ = Counter(values.values()).most_common()
    if 2 * count > len(values):
        odd = [rank for rank, value in values.items() if value != usual]
        who = f"rank {odd[0]} has" if len(odd) == 1 else f"ranks {odd} have"
        seen = f"{who} other values of {name} than the other {count} ranks that hold it"
    else:
        seen = f"ranks {[*values]} have several values of {name}, none of them most of the ranks"
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
