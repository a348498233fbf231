"""What a function at a point of a step may know beside its arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any, Literal, NamedTuple, Protocol, overload

import optree
import torch
from torch import Tensor

from fzero.collectives import assert_same_everywhere, reduce_many
from fzero.context.current_rank import has_no_values
from fzero.errors import CallError, LayoutError
from fzero.machine.named_shards import FlatRanges, Pieces, leaf_numbers
from fzero.machine.packing import over_places
from fzero.ranks.mesh import Axis
from fzero.state import NAMESPACE, Setup
from fzero.state.layout import Leaf
from fzero.transforms.points._normal import normal
from fzero.transforms.points._ordered import leaf_sums, row_sums

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
    general: bool

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
        device: torch.device,
        path: str | None = None,
        params: Callable[[], Pieces] | None = None,
        running: Skipping | None = None,
        whole: bool = False,
        sums: bool = True,
    ) -> None:
        self.step, self.path, self.rank = step, path, setup.axis.rank
        self._setup, self._axis, self._parts, self._device = setup, axis, parts, device
        self._params, self._running, self._whole, self._sums = params, running, whole, sums
        self._read: Pieces | None = None  # what `params` has returned
        self._what: str | None = None  # of a first call

    def watched(self, what: str) -> Context:
        """Return this context for the first call of a function, `what`.

        What it gives are copies then, `shown`, and ranks agree on each collective before it: so
        one whose function raised before it is not waited for.
        """
        self.step, self._what = self.step.clone(), what
        return self

    @property
    def shown(self) -> list[Tensor]:
        """What a function was given here so far, and may not write to."""
        return [self.step, *(self._read or {}).values()]

    @property
    def params(self) -> Pieces:
        """The parameters before the update, as the rule steps them: masters where there are any.

        In `updated`, and of whole leaves, only for a transform that reads=("before",). At `local`
        and `loss`, none.
        """
        if self._params is None:
            raise CallError(
                "ctx.params: the parameters before the update are not there at this point.",
                cause="`updated`, or a function of whole leaves, of a transform without "
                "reads=('before',); or `loss` or `local`.",
                fix="declare reads=('before',); at `loss` and `local` use the parameters that the "
                "loss is given.",
            )
        if self._read is None:
            read = self._params()
            self._read = {k: x.clone() for k, x in read.items()} if self._what else read
        return dict(self._read)

    def skip(self, flag: Any = True) -> None:
        """Make no update if `flag` is true: what `reduced` has put into slots so far stays.

        Parameters, optimizer and `state.step` stay as they are, gradients are cleared. The flag
        must be the same on every rank: take it from `sum` or `norm`, which are.

        flag: a bool, or a tensor [] of one, which the host reads.

        Raises `CallError` at another point than `reduced`, `LayoutError` for more than one flag,
        and after all of `reduced` `MismatchError`, on every rank, where ranks differ.
        """
        if self._running is None:
            raise CallError(
                "ctx.skip(): the update is not to be skipped at this point any more, or not yet.",
                cause="a call outside of `reduced`.",
                fix="decide in `reduced`, which sees the gradients before the rule does.",
            )
        if isinstance(flag, Tensor) and flag.numel() != 1:
            raise LayoutError(
                f"ctx.skip got {flag.numel()} flags, {tuple(flag.shape)}.",
                cause="a comparison of each element, in the place of one of a sum or a norm.",
                fix="give one flag, the same on every rank: ctx.skip(ctx.norm(grads) > bound).",
            )
        planned = isinstance(flag, Tensor) and not self._running.general and has_no_values(flag)
        if not planned:  # a plan is of an update that is made
            self._running.skip(flag)

    @property
    def skipped(self) -> Any:
        """Whether the update is not made, so far: a bool, or a tensor [] of one."""
        return self._running is not None and self._running.skipped

    def sum(self, tree: Any) -> Tensor:
        """The sum of all elements of all pieces, on every rank: [], fp32 or wider. A collective.

        tree: a pytree of tensors that are parallel to pieces, each element on one rank. With
        logical ranks each stands under the path of its leaf: {path: tensor}.
        """
        self._require_pieces("sum")
        places, leaves, _ = optree.tree_flatten_with_path(tree, namespace=NAMESPACE)
        leaves = self._tensors("sum", leaves)
        if self._in_blocks:
            paths = [next((k for k in reversed(at) if k in self._parts), None) for at in places]
            pieces = self._pieces("sum", paths, leaves)
            self._agree("sum", [])
            return leaf_sums(self._setup, pieces, of_squares=False)[1]
        sums = [x.sum(dtype=_wide(x)) for x in leaves]
        return self._over_all("sum", _total(sums, self._device))

    @overload
    def norm(self, tree: Mapping[str, Tensor], by: Literal["all"] = "all") -> Tensor: ...
    @overload
    def norm(self, tree: Mapping[str, Tensor], by: Literal["leaf", "row"]) -> dict[str, Tensor]: ...
    def norm(self, tree: Mapping[str, Tensor], by: By = "all") -> Tensor | dict[str, Tensor]:
        """The norm sqrt(sum |x|^2) over all pieces. A collective where ranks have parts.

        tree: {path: this rank's elements}. by: "all" for one number, [], on every rank alike;
        "leaf" for {path: []}; "row" for {path: the norm of the row of each element, as long as its
        piece}: a row has all elements with one index of the first dim, and a leaf of fewer than two
        dims is one row. Of a state on a part of a mesh, a leaf or a row is that of all places.
        """
        if by not in ("all", "leaf", "row"):
            raise LayoutError(
                f"ctx.norm: by={by!r}.", cause="another word.", fix='give "all", "leaf" or "row".'
            )
        if not isinstance(tree, Mapping):
            raise LayoutError(
                f"ctx.norm got a {type(tree).__name__}.",
                cause="one tensor in the place of tensors by path.",
                fix="give {path: tensor}, as `grads` is: ctx.norm(grads), or "
                "ctx.norm({path: g for path, g in grads.items() if ...}).",
            )
        if by == "all":
            self._require_pieces("norm")
        values = self._tensors("norm", tree.values())
        if self._in_blocks:
            return self._norm_in_order(tree, by)
        squares = [_square(x) for x in values]
        if by == "all":
            sums = [x.sum() for x in squares]
            return self._over_all("norm", _total(sums, self._device)).sqrt()
        self._require_collective("norm")
        if by == "leaf":
            total = _total_of(squares, self._device)
            norms = self._over_all('norm by="leaf"', total).sqrt()
            return dict(zip(tree, norms, strict=True))
        rows = [self._rows(path, x) for path, x in tree.items()]
        sums = [
            x.new_zeros(count).index_add(0, row, x.reshape(-1))
            for x, (row, count) in zip(squares, rows, strict=True)
        ]
        total = torch.cat(sums) if sums else torch.zeros(0, device=self._device)
        split = self._over_all('norm by="row"', total).sqrt().split([len(x) for x in sums])
        return {
            path: norms[row].view(x.shape)
            for (path, x), norms, (row, _) in zip(tree.items(), split, rows, strict=True)
        }

    @property
    def _in_blocks(self) -> bool:
        """Whether sums over pieces have one order. Over whole leaves they have it anyway."""
        return self._setup.layout.options.block > 1 and not self._whole

    def _norm_in_order(self, tree: Mapping[str, Tensor], by: By) -> Tensor | dict[str, Tensor]:
        name = "norm" if by == "all" else f'norm by="{by}"'
        self._require_collective(name)
        pieces = self._pieces("norm", [*tree], [*tree.values()])
        self._agree(name, [len(tree)] if by == "leaf" else [])
        if by == "row":
            sums = row_sums(self._setup, [(leaf, _square(x)) for leaf, x in pieces])
            named = zip(tree.items(), sums, strict=True)
            return {path: x.sqrt().view(piece.shape) for (path, piece), x in named}
        by_leaf, total = leaf_sums(self._setup, pieces, of_squares=True)
        return dict(zip(tree, by_leaf.sqrt(), strict=True)) if by == "leaf" else total.sqrt()

    def _pieces(
        self, name: str, paths: Sequence[Any], tensors: Sequence[Tensor]
    ) -> list[tuple[int, Tensor]]:
        """Return tensors with their leaves, each with one element for each of a piece."""
        numbers, found = leaf_numbers(self._setup.layout), list[tuple[int, Tensor]]()
        for path, x in zip(paths, tensors, strict=True):
            if path is None or x.numel() != self._part_of(name, path).numel:
                wanted = (
                    "" if path is None else f", of which this rank has {self._parts[path].numel}"
                )
                raise LayoutError(
                    f"ctx.{name} got {x.numel()} elements of {path or 'no leaf'}{wanted}.",
                    cause="a part of a piece, or a tensor without the path of its leaf: with "
                    "logical ranks the order of a sum is that of the elements in their leaves.",
                    fix="give {path: tensor} of whole pieces, with zeros for what does not count.",
                )
            found.append((numbers[path], x))
        return found

    def normal(self, path: str, seed: int = 0) -> Tensor:
        """Standard normal numbers, one for each element of this rank's piece of a leaf.

        They are a function of (seed, step, path, element): the same at every stage, on every
        number of ranks, and after a resume. In fp32; complex for a complex leaf. On a part of a
        mesh each place has its own.
        """
        leaf, first, numel = self._part_of("normal", path)
        if place := self._setup.axis.place:
            path = f"{path} at {place}"
        two = 2 if leaf.dtype.is_complex else 1
        like = torch.empty(numel * two, device=self._device)
        found = normal(seed, self.step, path, first * two, like)
        if leaf.dtype.is_complex:
            found = torch.view_as_complex(found.view(-1, 2))
        return found.view(leaf.shape) if self._whole else found

    def shape(self, path: str) -> torch.Size:
        """The shape of a whole leaf, wherever its elements are: the same on every rank.

        So the size of a row or of a leaf is asked here, and not of a piece.
        """
        numbers = leaf_numbers(self._setup.layout)
        if path not in numbers:
            raise _no_leaf("shape", path, "no leaf", numbers)
        return torch.Size(self._setup.layout.leaves[numbers[path]].shape)

    def _part_of(self, name: str, path: str) -> LeafPart:
        if path not in self._parts:
            raise _no_leaf(name, path, "no leaf that learns", self._parts)
        return self._parts[path]

    def _rows(self, path: str, x: Tensor) -> tuple[Tensor, int]:
        """Return which row of its leaf each element of a piece is in, and how many it has."""
        leaf, first, numel = self._part_of("norm", path)
        if x.numel() != numel:
            raise LayoutError(
                f'ctx.norm: by="row" of {x.numel()} elements of {path}, of which this rank has '
                f"{numel}.",
                cause="a part of a piece: which row an element is in is known by its place.",
                fix="give whole pieces, with zeros for what does not count.",
            )
        places = torch.arange(first, first + numel, device=x.device)
        if len(leaf.shape) < 2:
            return torch.zeros_like(places), 1
        return places // max(prod(leaf.shape[1:]), 1), leaf.shape[0]

    def _tensors(self, name: str, leaves: Iterable[Any]) -> list[Tensor]:
        found = list(leaves)
        for x in found:
            if not isinstance(x, Tensor):
                raise LayoutError(
                    f"ctx.{name} got a {type(x).__name__} among its tensors.",
                    cause="a number in the place of a tensor that is parallel to a piece.",
                    fix="give tensors that are parallel to pieces.",
                )
        return found

    def _over_all(self, name: str, x: Tensor) -> Tensor:
        """Return the sum over ranks, and over all places of a mesh that the state is on a part of.

        With whole leaves, x itself: each is on one rank, at each place at another time.
        """
        if self._whole:
            return x
        self._agree(name, [*x.shape])
        if not x.numel():
            return x
        x = reduce_many([x], self._axis, ordered=self._setup.reduction.ordered)[0]
        return over_places(self._setup, x)

    def _agree(self, name: str, shape: list[int]) -> None:
        """In a first call, compare which sums ranks make."""
        if self._what is not None:
            what = f"{self._what}: which sums its ctx makes"
            axis = self._setup.axis
            assert_same_everywhere([f"ctx.{name}, {shape}"], axis.mesh or axis, what=what)

    def _require_collective(self, name: str) -> None:
        if not self._sums:
            raise CallError(
                f"ctx.{name} at `local` or `loss`.",
                cause="a collective in the middle of a backward, where ranks are at other leaves; "
                "at `loss` there are no pieces.",
                fix="make sums in `reduced`; a mean over ranks in a loss is fzero.pmean(x).",
            )

    def _require_pieces(self, name: str) -> None:
        self._require_collective(name)
        if self._whole:
            raise CallError(
                f"ctx.{name} over all leaves, in a transform that needs whole leaves.",
                cause="owners are called batch by batch, and each has other leaves.",
                fix='use norm(tree, by="leaf") or by="row", or a second transform with '
                'needs="element" before it.',
            )


def _no_leaf(name: str, path: str, what: str, known: Iterable[str]) -> LayoutError:
    return LayoutError(
        f"ctx.{name}: {path!r} is {what}; {', '.join(known)} are.",
        cause="another name, or that of a frozen leaf.",
        fix="take paths from what the function is given, e.g. grads.items().",
    )


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _square(x: Tensor) -> Tensor:
    real = torch.view_as_real(x) if x.is_complex() else x
    squares = real.to(_wide(real)).square()
    return squares.sum(-1) if x.is_complex() else squares


def _total_of(squares: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the sums of some tensors as one tensor [n]."""
    sums = [x.sum() for x in squares]
    return torch.stack(sums) if sums else torch.zeros(0, device=device)


def _total(sums: Sequence[Tensor], device: torch.device) -> Tensor:
    if not sums:
        return torch.zeros((), device=device)
    wide = sums[0].dtype
    for x in sums:
        wide = torch.promote_types(wide, x.dtype)
    return torch.stack([x.to(wide) for x in sums]).sum()
