"""What a function at a point of a step may know beside its arguments."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import pi, prod
from typing import Any, Literal, NamedTuple, overload

import optree
import torch
from torch import Tensor
from torch.nn.functional import pad

from fzero.collectives import assert_same_everywhere, reduce_many
from fzero.context.current_rank import has_no_values
from fzero.errors import CallError, LayoutError
from fzero.machine.named_shards import FlatRanges, Pieces, leaf_numbers, leaf_paths, ranges_in
from fzero.machine.packing import gather_parts, over_places, stored_leaves
from fzero.machine.tree_sum import (
    HeldRuns,
    leaf_runs,
    squares_of_blocks,
    sums_in_order,
    sums_of_blocks,
)
from fzero.state import NAMESPACE, Buffers, Placement, Setup, TrainState
from fzero.state.layout import BLOCK, Leaf

# Sums over pieces in a layout of blocks: one order, at any stage and on any number of ranks.

LeafPiece = tuple[int, Tensor]
"""(a leaf, a tensor that is parallel to this rank's elements of it, 1-D)."""


def leaf_sums(
    setup: Setup, pieces: Sequence[LeafPiece], *, of_squares: bool
) -> tuple[Tensor, Tensor]:
    """Return (the sum over each leaf [n], that over all of them []), fp32 or wider. A collective.

    A leaf may be there several times. of_squares: sums of |x|^2.
    """
    layout, placement = setup.layout, setup.optimizer_state
    order = sorted(range(len(pieces)), key=lambda k: pieces[k][0])
    order = [k for k in order if layout.leaves[pieces[k][0]].numel]
    runs = leaf_runs(setup, placement, tuple(pieces[k][0] for k in order))
    flats, at, length = list[Tensor](), list[int](), 0
    for run in runs.own:
        at.append(length)
        length += run.stop - run.start
        leaf, x = pieces[order[run.item]]
        stored = _as_stored(x, complex_leaf=layout.leaves[leaf].dtype.is_complex)
        flats.append(pad(stored, (0, -stored.numel() % BLOCK)))
    wide = _wide([x for _, x in pieces])
    made = squares_of_blocks(flats) if of_squares else sums_of_blocks(flats)
    values = made.to(pieces[0][1].device if pieces else made.device, wide)
    held = HeldRuns(values, runs.own, tuple(at))
    by_item, total = sums_in_order(held, runs.ranks, runs.places, setup.over(placement))
    found = list(values.new_zeros(len(pieces)).unbind())
    for k, x in zip(order, by_item.unbind(), strict=True):
        found[k] = x
    return torch.stack(found) if found else values.new_zeros(0), total


def _as_stored(x: Tensor, *, complex_leaf: bool) -> Tensor:
    """Return the elements as a flat has them: two for each of a complex leaf."""
    if x.is_complex():
        return torch.view_as_real(x.resolve_conj()).reshape(-1)
    if complex_leaf:  # a real number for each complex one
        return torch.stack((x.reshape(-1), torch.zeros_like(x).reshape(-1)), dim=1).view(-1)
    return x.reshape(-1)


def _wide(tensors: Sequence[Tensor]) -> torch.dtype:
    wide = torch.float32
    for x in tensors:
        wide = torch.promote_types(wide, x.dtype.to_real() if x.is_complex() else x.dtype)
    return wide


def row_sums(setup: Setup, pieces: Pieces) -> Pieces:
    """Return, for each element of a piece, the sum over the whole row that it is in. A collective.

    A row has all elements with one index of the first dim; a leaf of fewer than two dims is one.
    One flat after the other is made whole for it, so that a sum has the order of its leaf.

    pieces: of real numbers, one for each element of a leaf.
    """
    layout, placement, names = setup.layout, setup.optimizer_state, leaf_paths(setup.layout)
    wide, found = _wide([*pieces.values()]), dict(pieces)
    for some in ranges_in(setup, Buffers(placement=placement)):
        own = {one.path: one for one in some.ranges if one.path in pieces}
        if not own:
            continue
        part = next(pieces[path] for path in own).new_zeros(some.numel, dtype=wide)
        for path, one in own.items():
            stored = _as_stored(pieces[path].to(wide), complex_leaf=one.leaf.dtype.is_complex)
            part[one.at : one.at + one.numel] = stored
        (flat,) = gather_parts(setup, [part], placement, Placement.REPLICATED)
        leaves = stored_leaves(layout, some.index, flat)
        for i, (leaf, stored) in zip(layout.groups[some.index].leaves, leaves, strict=True):
            if names[i] in own and leaf.numel:
                one = own[names[i]]
                values = stored.view(-1, 2)[:, 0] if leaf.dtype.is_complex else stored
                rows = values.reshape(leaf.shape[0] if len(leaf.shape) > 1 else 1, -1)
                sums = rows.sum(1, keepdim=True).expand(rows.shape).reshape(-1)
                found[names[i]] = sums[one.first : one.first + one.count]
    return found


# Normal random numbers that are a function of (seed, step, path, element) alone.
#
# So they are the same at every stage and on every number of ranks, and again after a resume. The
# 64 bits of an element are those of SplitMix64 at its place in the stream of its leaf; two uniform
# numbers of 32 bits are made of them, and of these one normal number, by the method of Box and
# Muller.
#
# Source: Steele et al., "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014; Box and
# Muller, "A Note on the Generation of Random Normal Deviates", 1958.

_MOD = 2**64
_GOLDEN = 0x9E3779B97F4A7C15
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_LOW = 2**32 - 1


def normal(seed: int, step: Tensor, path: str, first: int, like: Tensor) -> Tensor:
    """Return [n] standard normal numbers, in fp32: of elements `first` and on of the leaf `path`.

    Args:
        seed: any int.
        step: [], an integer: of which update they are.
        path: of the leaf.
        first: the number of the first element in its leaf.
        like: [n]: how many, and on which device.

    Example:
        >>> step, x = torch.tensor(3), torch.empty(4)
        >>> whole = normal(0, step, "w", 0, x)
        >>> torch.equal(whole[2:], normal(0, step, "w", 2, x[2:]))
        True
    """
    digest = hashlib.blake2b(f"{seed}/{path}".encode(), digest_size=8).digest()
    key = _signed(int.from_bytes(digest, "little"))
    key = _mixed(step.to(like.device, torch.int64) * _signed(_GOLDEN) + key)
    places = torch.arange(first, first + like.numel(), device=like.device, dtype=torch.int64)
    bits = _mixed(places * _signed(_GOLDEN) + key)
    one, other = (_shifted(bits, 32), bits & _LOW)
    # In (0, 1] and [0, 1): the logarithm is finite.
    radius = torch.sqrt(-2 * torch.log((one.double() + 1) / 2**32))
    return (radius * torch.cos(2 * pi * other.double() / 2**32)).float()


def _mixed(x: Tensor) -> Tensor:
    """A bijection of 64 bits in which each bit of the result depends on all of x."""
    for shift, factor in zip((30, 27), _FACTORS, strict=True):
        x = (x ^ _shifted(x, shift)) * _signed(factor)  # of int64: modulo 2^64
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, by: int) -> Tensor:
    """Shift right, with zeros from the left."""
    return (x >> by) & (2 ** (64 - by) - 1)


def _signed(x: int) -> int:
    return x - _MOD if x >= _MOD // 2 else x


By = Literal["all", "leaf", "row"]
"""Over what a norm is: everything, each leaf, or each row (all dims but the first) of a leaf."""


class LeafPart(NamedTuple):
    """Which elements of a leaf a function is given: `numel` of them, from `first` on."""

    leaf: Leaf
    first: int
    numel: int


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
        state: TrainState,
        parts: Mapping[str, LeafPart],
        *,
        path: str | None = None,
        params: Callable[[], Pieces] | None = None,
        running: Any = None,
        whole: bool = False,
        sums: bool = True,
    ) -> None:
        self.step, self.path, self.rank = state.step, path, state.setup.axis.rank
        self._setup, self._parts, self._device = state.setup, parts, state.device
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
        sums = [x.sum(dtype=torch.promote_types(x.dtype, torch.float32)) for x in leaves]
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
            name = "norm" if by == "all" else f'norm by="{by}"'
            self._require_collective(name)
            pieces = self._pieces("norm", [*tree], values)
            self._agree(name, [] if by == "all" else [len(tree)])
            if by == "row":
                sums = row_sums(self._setup, {path: _square(x) for path, x in tree.items()})
                return {path: sums[path].sqrt().view(x.shape) for path, x in tree.items()}
            by_leaf, total = leaf_sums(self._setup, pieces, of_squares=True)
            norms = by_leaf.sqrt()
            return dict(zip(tree, norms, strict=True)) if by == "leaf" else total.sqrt()
        squares = [_square(x) for x in values]
        if by == "all":
            sums = [x.sum() for x in squares]
            return self._over_all("norm", _total(sums, self._device)).sqrt()
        self._require_collective("norm")
        if by == "leaf":
            none = torch.zeros(0, device=self._device)
            total = torch.stack([x.sum() for x in squares]) if squares else none
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
        setup = self._setup
        axis = setup.over(setup.optimizer_state)
        return over_places(setup, reduce_many([x], axis, ordered=setup.reduction.ordered)[0])

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


def _square(x: Tensor) -> Tensor:
    real = torch.view_as_real(x) if x.is_complex() else x
    squares = real.to(_wide([real])).square()
    return squares.sum(-1) if x.is_complex() else squares


def _total(sums: Sequence[Tensor], device: torch.device) -> Tensor:
    if not sums:
        return torch.zeros((), device=device)
    wide = sums[0].dtype
    for x in sums:
        wide = torch.promote_types(wide, x.dtype)
    return torch.stack([x.to(wide) for x in sums]).sum()
