"""What a function at a point of a step may know beside its arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, Literal, NamedTuple, Protocol

import optree
import torch
from torch import Tensor

from fzero.collectives import reduce_many
from fzero.errors import CallError, LayoutError
from fzero.machine.by_path import FlatRanges, Pieces
from fzero.ranks.mesh import Axis
from fzero.state import NAMESPACE, Setup
from fzero.state.layout import Leaf
from fzero.transforms.points._normal import normal

By = Literal["all", "leaf", "row"]
"""Over what a norm is: everything, each leaf, or each row (all dims but the first) of a leaf."""


class LeafPart(NamedTuple):
    """Which elements of a leaf a function is given: `numel` of them, from `first` on."""

    leaf: Leaf
    first: int
    numel: int


class Skipping(Protocol):
    """An update that may be left out."""

    skipped: Any

    def skip(self, flag: Any) -> None:
        """Leave it out if `flag` is true."""
        ...


def parts_of(ranges: Sequence[FlatRanges]) -> dict[str, LeafPart]:
    """Return which elements of each leaf are in this rank's part of some flats."""
    return {
        one.path: LeafPart(one.leaf, one.first, one.count) for some in ranges for one in some.ranges
    }


def whole_parts(parts: Mapping[str, LeafPart]) -> dict[str, LeafPart]:
    """Return the parts of a rank that has each leaf whole."""
    return {
        path: LeafPart(one.leaf, 0, one.leaf.numel // (2 if one.leaf.dtype.is_complex else 1))
        for path, one in parts.items()
    }


class Context:
    """The context of a function of a transform: `ctx` in its signature.

    Attributes:
        step: [] int64: the updates that were made before this one, 0 at the first.
        path: of the leaf that `local` is called for; else None.
        rank: of this rank among all ranks of the state.
        skipped: whether an update is not made, so far: what `skip` was given.
    """

    def __init__(
        self,
        setup: Setup,
        step: Tensor,
        axis: Axis,
        parts: Mapping[str, LeafPart],
        *,
        path: str | None = None,
        params: Callable[[], Pieces] | None = None,
        running: Skipping | None = None,
        whole: bool = False,
    ) -> None:
        self.step, self.path, self.rank = step, path, setup.axis.rank
        self._setup, self._axis, self._parts = setup, axis, parts
        self._params, self._running, self._whole = params, running, whole

    @property
    def params(self) -> Pieces:
        """The parameters before the update, as the rule steps them: masters where there are any.

        In `updated` only for a transform that reads=("before",). At `local` and `loss`, none.
        """
        if self._params is None:
            raise CallError(
                "ctx.params: the parameters before the update are not there at this point.",
                cause="`updated` of a transform without reads=('before',), `loss` or `local`.",
                fix="declare reads=('before',), which keeps one copy of them; at `loss` and "
                "`local` use the parameters that the loss is given.",
            )
        return self._params()

    def skip(self, flag: Any = True) -> None:
        """Make no update if `flag` is true: what `reduced` has put into slots so far stays.

        Parameters, optimizer and `state.step` stay as they are, gradients are cleared. The flag
        must be the same on every rank: take it from `sum` or `norm`, which are.

        flag: a bool, or a tensor [] of one, which the host reads.

        Raises `CallError` at another point than `reduced`.
        """
        if self._running is None:
            raise CallError(
                "ctx.skip(): the update is not to be skipped at this point any more, or not yet.",
                cause="a call outside of `reduced`.",
                fix="decide in `reduced`, which sees the gradients before the rule does.",
            )
        self._running.skip(flag)

    @property
    def skipped(self) -> Any:
        """Whether the update is not made, so far: a bool, or a tensor [] of one."""
        return self._running is not None and self._running.skipped

    def sum(self, tree: Any) -> Tensor:
        """The sum of all elements of all pieces, on every rank: [], fp32 or wider. A collective.

        tree: a pytree of tensors that are parallel to pieces, each element on one rank.
        """
        self._require_pieces("sum")
        leaves: Any = optree.tree_leaves(tree, namespace=NAMESPACE)
        sums = [x.sum(dtype=_wide(x)) for x in leaves]
        return self._over_ranks([_total(sums, self.step.device)])[0]

    def norm(self, tree: Mapping[str, Tensor], by: By = "all") -> Any:
        """The norm sqrt(sum |x|^2) over all pieces. A collective where ranks have parts.

        tree: {path: this rank's elements}. by: "all" for one number, [], on every rank alike;
        "leaf" for {path: []}; "row" for {path: the norm of the row of each element, as long as its
        piece}: a row has all elements with one index of the first dim, and a leaf of fewer than two
        dims is one row.
        """
        if by == "all":
            self._require_pieces("norm")
            squares = [_square(x).sum() for x in tree.values()]
            return self._over_ranks([_total(squares, self.step.device)])[0].sqrt()
        if by == "leaf":
            sums = [_square(x).sum() for x in tree.values()]
            total = self._over_ranks([torch.stack(sums)])[0] if sums else ()
            return {path: x.sqrt() for path, x in zip(tree, total, strict=True)}
        if by != "row":
            raise LayoutError(
                f"ctx.norm: by={by!r}.", cause="another word.", fix='give "all", "leaf" or "row".'
            )
        rows = {path: self._rows(path, x) for path, x in tree.items()}
        sums = [
            _square(x).new_zeros(count).index_add(0, row, _square(x).reshape(-1))
            for x, (row, count) in zip(tree.values(), rows.values(), strict=True)
        ]
        if not sums:
            return {}
        total = self._over_ranks([torch.cat(sums)])[0].sqrt()
        split = total.split([len(x) for x in sums])
        return {
            path: norms[row].view(tree[path].shape)
            for norms, (path, (row, _)) in zip(split, rows.items(), strict=True)
        }

    def normal(self, path: str, seed: int = 0) -> Tensor:
        """Standard normal numbers, one for each element of this rank's piece of a leaf.

        They are a function of (seed, step, path, element): the same at every stage, on every
        number of ranks, and after a resume. In fp32; complex for a complex leaf.
        """
        leaf, first, numel = self._parts[path]
        like = self.step.new_empty(0) if self._params is None else self._like(path)
        two = 2 if leaf.dtype.is_complex else 1
        found = normal(seed, self.step, path, first * two, like.new_empty(numel * two))
        if leaf.dtype.is_complex:
            found = torch.view_as_complex(found.view(-1, 2))
        return found.view(leaf.shape) if self._whole else found

    def _like(self, path: str) -> Tensor:
        return self.params[path]

    def _rows(self, path: str, x: Tensor) -> tuple[Tensor, int]:
        """Return which row of its leaf each element of a piece is in, and how many it has."""
        leaf, first, numel = self._parts[path]
        places = torch.arange(first, first + numel, device=x.device)
        if len(leaf.shape) < 2:
            return torch.zeros_like(places), 1
        return places // max(prod(leaf.shape[1:]), 1), leaf.shape[0]

    def _over_ranks(self, sums: list[Tensor]) -> list[Tensor]:
        if self._whole:  # a leaf is on one rank
            return sums
        return reduce_many(sums, self._axis, ordered=self._setup.reduction.ordered)

    def _require_pieces(self, name: str) -> None:
        if self._whole:
            raise CallError(
                f"ctx.{name} over all leaves, in a transform that needs whole matrices.",
                cause="owners are called batch by batch, and each has other leaves.",
                fix='use norm(tree, by="leaf") or by="row", or a second transform with '
                'needs="element" before it.',
            )


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _square(x: Tensor) -> Tensor:
    real = torch.view_as_real(x) if x.is_complex() else x
    squares = real.to(_wide(real)).square()
    return squares.sum(-1) if x.is_complex() else squares


def _total(sums: Sequence[Tensor], device: torch.device) -> Tensor:
    if not sums:
        return torch.zeros((), device=device)
    wide = sums[0].dtype
    for x in sums:
        wide = torch.promote_types(wide, x.dtype)
    return torch.stack([x.to(wide) for x in sums]).sum()
