"""`Order`: which rows of a data set come next, and for whom; the permutation of an epoch. Pure."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fzero.errors import LayoutError, check
from fzero.ranks.mesh import MeshLike, ambient, axis_of, carried_here, logical_ranks
from fzero.state.logical import carried, fold_in, share

_30, _27, _31 = (np.uint64(shift) for shift in (30, 27, 31))
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_ROUNDS = 8
_LEAST_SIDE = 16  # with 2 or 3, not all permutations of a few numbers would come equally often
_ORDER = int.from_bytes(b"order")  # so that other users of the seed have other numbers


@dataclass(frozen=True, slots=True)
class Order:
    """Where a run stands in its data: `ids, order = order.next()`, for any number of ranks.

    Batch k of an epoch has the rows k B to (k + 1) B - 1 of the epoch's order, where B is
    `batch_size` times `logical_ranks`; logical rank l has `batch_size` of them, from row
    l `batch_size` of the batch on. A rank has the rows of the logical ranks that it carries, in
    their order. So what all ranks have together does not depend on how many they are. Epochs
    follow each other without end.

    Nothing but these integers is held: the shuffled order is a permutation that is computed row by
    row (some microseconds), also for 10**12 rows. It is a function of the seed and of the epoch.

    Args:
        length: the number of rows, at least 1.
        batch_size: rows of a logical rank in a batch.
        logical_ranks: how many logical ranks the run has; the number of ranks, or more.
        seed: of the shuffled orders.
        shuffle: False: each epoch goes over the rows from 0 on.
        drop_last: whether an epoch leaves out the rows at its end that are less than a batch
            (others in each epoch, if they are shuffled). False: its last batch is short, and cut
            over the logical ranks as evenly as can be: sizes differ by at most 1, the first ones
            have more, and some may have no rows. A mean over rows then needs the numbers of rows
            as `weight=`.
        position: how many batches of the run were taken, over all epochs.
        digest: of some rows of the data set, as `fzero.data.batches` makes it, which warns where
            those of a run that goes on are others; 0: not known. Orders that differ by it alone are
            equal.

    Raises:
        LayoutError: for a number out of range, and with `drop_last` for fewer rows than a batch.

    Example:
        >>> import fzero
        >>> order = fzero.data.Order(10, batch_size=2, logical_ranks=2, seed=0)
        >>> ids, order = order.next()
        >>> ids
        [4, 0, 5, 1]
        >>> order.epoch, order.position, order.batches_per_epoch
        (0, 1, 2)
    """

    length: int
    _: dataclasses.KW_ONLY
    batch_size: int
    logical_ranks: int
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = True
    position: int = 0
    digest: int = dataclasses.field(default=0, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Refuse numbers of which no order can be made."""
        for name, least in (("length", 1), ("batch_size", 1), ("logical_ranks", 1)):
            _require_count(name, getattr(self, name), least)
        _require_count("seed", self.seed, 0)
        _require_count("position", self.position, 0)
        _require_count("digest", self.digest, 0)
        check.check_flags(shuffle=self.shuffle, drop_last=self.drop_last)
        if not self.batches_per_epoch:
            whole = self.batch_size * self.logical_ranks
            raise LayoutError(
                f"Order: length={self.length} is less than a batch of {whole} rows "
                f"(batch_size={self.batch_size}, logical_ranks={self.logical_ranks}), and "
                "drop_last=True leaves it out.",
                cause="a small data set, or the rows of all ranks as batch_size, which is that of "
                "one logical rank.",
                fix="give drop_last=False, or a smaller batch_size.",
            )

    @property
    def batches_per_epoch(self) -> int:
        """How many batches an epoch has."""
        whole, rest = divmod(self.length, self.batch_size * self.logical_ranks)
        return whole + (rest > 0 and not self.drop_last)

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, from 0."""
        return self.position // self.batches_per_epoch

    def next(self, ranks: Iterable[int] | None = None) -> tuple[list[int], Order]:
        """Return the ids of this rank's rows in the next batch, and the order after it.

        Args:
            ranks: the logical ranks to give rows to, in this order; left out, `carried()`.

        Returns:
            `(ids, order)`: those of each logical rank after the other. They are `batch_size` for
            each, but for the last batch of an epoch without `drop_last`, which may give none.

        Raises:
            LayoutError: if there are more ranks than logical ranks, or for a logical rank out of
                range.

        Example:
            >>> import fzero
            >>> order = fzero.data.Order(5, batch_size=2, logical_ranks=2, drop_last=False)
            >>> first, order = order.next()
            >>> last, order = order.next()
            >>> first, last, order.epoch
            ([4, 0, 3, 1], [2], 1)
        """
        return [row for part in self.parts(ranks) for row in part], self.after()

    def parts(self, ranks: Iterable[int] | None = None) -> list[list[int]]:
        """Return the ids of the next batch by logical rank: a list for each of `ranks`.

        Args:
            ranks: as for `next`; `range(order.logical_ranks)` is all of them.

        Raises:
            LayoutError: as `next`.

        Example:
            >>> import fzero
            >>> order = fzero.data.Order(8, batch_size=2, logical_ranks=3, shuffle=False)
            >>> order.parts(range(3)), order.parts([1])
            ([[0, 1], [2, 3], [4, 5]], [[2, 3]])
        """
        places = self._places(ranks)
        if not self.shuffle:
            return [[*one] for one in places]
        keys = keys_of(self.seed, self.epoch)
        return permuted(places, self.length, keys)

    def sizes(self, ranks: Iterable[int] | None = None) -> list[int]:
        """Return the numbers of rows of the next batch by logical rank, one for each of `ranks`.

        They are `sizes=` of `fzero.grad_and_reduce`, and `weight=` where the loss is a mean over
        rows, for a batch that may be short.

        Args:
            ranks: as for `next`.

        Raises:
            LayoutError: as `next`.

        Example:
            >>> import fzero
            >>> fzero.data.Order(5, batch_size=2, logical_ranks=3, drop_last=False).sizes()
            [2, 2, 1]
        """
        return [len(one) for one in self._places(ranks)]

    def _places(self, ranks: Iterable[int] | None) -> list[range]:
        """Return where in the epoch's order the rows of each of `ranks` are."""
        whole = self.batch_size * self.logical_ranks
        start = self.position % self.batches_per_epoch * whole
        count = min(whole, self.length - start)
        here = self.carried() if ranks is None else self.checked(ranks)
        shares = [share(rank, self.logical_ranks, count) for rank in here]
        return [range(start + one.start, start + one.stop) for one in shares]

    def after(self) -> Order:
        """Return the order after the next batch, as `next` does.

        Example:
            >>> import fzero
            >>> fzero.data.Order(8, batch_size=2, logical_ranks=3).after().position
            1
        """
        return dataclasses.replace(self, position=self.position + 1)

    def state_dict(self) -> dict[str, int]:
        """Return the order as a dict that JSON can hold.

        `extra={"order": order}` of a checkpoint or a mirror saves this dict.

        Example:
            >>> import fzero
            >>> order = fzero.data.Order(8, batch_size=2, logical_ranks=2, position=3)
            >>> order.state_dict()["position"]
            3
        """
        return dataclasses.asdict(self)

    def resumed(self, saved: Mapping[str, Any] | None) -> Order:
        """Return this order at the position that was saved, on any number of ranks.

        Args:
            saved: what `state_dict` gave; None, of a run that has saved nothing yet: this order.

        Raises:
            LayoutError: if it was saved of an order that has other rows: another length,
                `batch_size`, number of logical ranks or seed.

        Example:
            >>> import fzero
            >>> order = fzero.data.Order(8, batch_size=2, logical_ranks=2)
            >>> saved = order.after().state_dict()
            >>> order.resumed(saved).position, order.resumed(None).position
            (1, 0)
        """
        if saved is None:
            return self
        mine = self.state_dict()
        given: Any = dict(saved) if isinstance(saved, Mapping) else {}
        given.setdefault("digest", 0)  # an order that was saved before there was one
        if given.keys() != mine.keys():
            raise LayoutError(
                f"Order.resumed: {saved!r:.200} is no saved order.",
                cause="the whole of `extra` in the place of its entry, or a position that another "
                "loader saved.",
                fix='save extra={"order": order}, and give resumed(extra["order"]).',
            )
        there = dataclasses.replace(self, **given)  # and so it is checked
        if dataclasses.replace(there, position=self.position) != self:
            names = [
                name
                for name in mine
                if name not in ("position", "digest") and mine[name] != given[name]
            ]
            saved_as = ", ".join(f"{name}={given[name]!r}" for name in names)
            grown = given["length"] < self.length and names == ["length"]
            raise LayoutError(
                f"Order.resumed: the order was saved with {saved_as}; here it has "
                f"{', '.join(f'{name}={mine[name]!r}' for name in names)}.",
                cause="another data set or other options than those of the run that saved it: the "
                "rows that come next would not be those that it has left.",
                fix="give the options of that run; the number of ranks may be another one. A new "
                "Order begins at its first batch."
                if not grown
                else "if rows were added at the end, finish the epoch with those of that run, "
                f"torch.utils.data.Subset(dataset, range({given['length']})) and "
                f"Order({given['length']}, ...).resumed(saved). Then begin new = "
                f"Order({self.length}, ...) at the epoch e that follows, "
                "position=e * new.batches_per_epoch.",
            )
        return there

    def carried(self, mesh: MeshLike = None) -> range:
        """Return the logical ranks that this rank carries: a contiguous run, as even as can be.

        In a loss under `logical_ranks=` it is the one that runs, as `fzero.logical_ranks()`.

        Args:
            mesh: over which ranks the run goes, as for `fzero.init`; left out, the world. For a
                state on some of the processes it is `state.mesh`; where ranks of a tensor-parallel
                group read the same rows, the other dim of the DeviceMesh.

        Raises:
            LayoutError: if there are more ranks than logical ranks, and in a step of another number
                of them.
            AxisError: for another mesh, and on a rank that is not in it.

        Example:
            >>> import fzero
            >>> order = fzero.data.Order(8, batch_size=2, logical_ranks=3)
            >>> order.carried()
            range(0, 3)
            >>> ids, after = order.next(order.carried())
        """
        running = carried_here()
        if mesh is None and running is not None:
            if running.size != self.logical_ranks:
                raise LayoutError(
                    f"Order: logical_ranks={self.logical_ranks}, in a step of {running.size}.",
                    cause="one number of logical ranks for the data and another for the step.",
                    fix=f"give both the same, here logical_ranks={running.size}.",
                )
            return logical_ranks()
        axis = ambient() if mesh is None else axis_of(mesh)
        return carried(axis.rank, axis.size, self.logical_ranks)

    def checked(self, ranks: Iterable[int]) -> list[int]:
        """Return the logical ranks as a list. Raises `LayoutError` for one that is none."""
        found = [*ranks]
        for rank in found:
            check.require(
                "logical rank",
                rank,
                lambda x: check.is_count(x, least=0) and x < self.logical_ranks,
                f"an int of 0 to {self.logical_ranks - 1}",
            )
        return found


def _require_count(name: str, value: Any, least: int) -> None:
    check.require(
        f"Order: {name}",
        value,
        lambda x: check.is_count(x, least) and x < 2**63,
        f"an int of {least} or more, below 2**63",
        cause="a float of a division, a tensor, or a data set without rows.",
    )


@functools.lru_cache(maxsize=8)
def keys_of(seed: int, epoch: int) -> tuple[int, ...]:
    """Return the keys of an epoch's permutation, one for each round."""
    return tuple(fold_in(seed, _ORDER, epoch, number) for number in range(_ROUNDS))


def permuted(places: Sequence[range], length: int, keys: tuple[int, ...]) -> list[list[int]]:
    """Return where a permutation of range(length) takes each number of some runs.

    index = a s + b with s = max(16, ceil(sqrt(length))), and each round (a Feistel network) is
    (a, b) -> (b, (a + f(b + key)) mod s), with the finalizer f of SplitMix64. That permutes
    range(s s); as long as the result is `length` or more, it is taken there again (cycle walking).

    Sources: Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002; Steele, Lea
    and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014.

    Example:
        >>> permuted([range(3), range(3, 5)], 5, keys_of(0, epoch=0))
        [[4, 0, 3], [1, 2]]
    """
    side = np.uint64(max(math.isqrt(length - 1) + 1, _LEAST_SIDE))
    found = np.array([index for run in places for index in run], np.uint64)
    left = np.arange(len(found))  # those that are not below `length` yet
    while len(left):
        a, b = np.divmod(found[left], side)
        for key in keys:
            x = b + np.uint64(key)  # of 64 bits, as all that follows
            x = (x ^ x >> _30) * _FIRST
            x = (x ^ x >> _27) * _SECOND
            a, b = b, (a + (x ^ x >> _31) % side) % side
        found[left] = a * side + b
        left = left[found[left] >= length]
    rest = iter(found.tolist())
    return [[*itertools.islice(rest, len(run))] for run in places]
