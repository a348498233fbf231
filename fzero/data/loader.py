"""The ids of an order for torch.utils.data.DataLoader, and its batches with the order after each.

A loader asks for ids ahead of what is trained on. So no position is read from it: the order that
comes with a batch is counted where the batch is handed out.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, default_collate

from fzero.context.rng import seeded
from fzero.data.collated import digest_of, joined, rows_of, without_rows
from fzero.data.order import Order
from fzero.errors import CallError, LayoutError, check, explain
from fzero.state.logical import fold_in

_WORKERS, _ROWS = int.from_bytes(b"workers"), int.from_bytes(b"rows")  # for seeds of their own
_OF_ORDER = ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last")


class BatchSampler(Sampler[list[int]]):
    """The ids of this rank's batches from an order on: `batch_sampler=` of a DataLoader.

    Each iteration begins at `order` again, and `order` does not move: keep the order of what was
    trained on by `order.after()` for each batch, or use `fzero.data.batches`, which does it.

    Args:
        order: of the first batch.
        epochs: where it ends: before the first batch of this epoch. Left out, it never ends.
        ranks: the logical ranks that get rows; left out, `order.carried()`, those of this rank.

    Raises:
        LayoutError: if there are more ranks than logical ranks, or for a logical rank out of range.

    Example:
        >>> import fzero, torch
        >>> order = fzero.data.Order(8, batch_size=2, logical_ranks=2, shuffle=False)
        >>> sampler = fzero.data.BatchSampler(order, epochs=1)
        >>> loader = torch.utils.data.DataLoader(torch.arange(8), batch_sampler=sampler)
        >>> [batch.tolist() for batch in loader]
        [[0, 1, 2, 3], [4, 5, 6, 7]]
    """

    def __init__(
        self, order: Order, *, epochs: int | None = None, ranks: Iterable[int] | None = None
    ) -> None:
        """Take the ids from `order` on."""
        _require_order("BatchSampler", order)
        wanted = "the number of the first epoch that is not to be loaded, or None"
        check.require("epochs", epochs, lambda x: x is None or check.is_count(x, least=0), wanted)
        self.order, self.epochs = order, epochs
        self.ranks = tuple(order.carried() if ranks is None else order.checked(ranks))

    def __iter__(self) -> Iterator[list[int]]:
        """Give the ids of each batch."""
        order = self.order
        while self.epochs is None or order.epoch < self.epochs:
            ids, order = order.next(self.ranks)
            yield ids

    def __len__(self) -> int:
        """Return the number of batches. Raises `TypeError` if it never ends."""
        if self.epochs is None:
            raise TypeError("a BatchSampler without epochs= never ends, and has no length")
        return max(self.epochs * self.order.batches_per_epoch - self.order.position, 0)


def batches(
    dataset: Any,
    order: Order,
    *,
    epochs: int | None = None,
    ranks: Iterable[int] | None = None,
    empty: Callable[[Any], Any] | None = None,
    **options: Any,
) -> Iterator[tuple[Any, Order]]:
    """Return an iterator over this rank's batches, each with the order after it.

    A DataLoader loads them, with workers and prefetch if its options say so. The order that comes
    with a batch stands behind that batch, whatever was loaded ahead: saved after the update, it is
    where training goes on.

    What the data set and `collate_fn` draw from torch's generator of the CPU, for augmentations or
    masks, is a function of the seed, the position and the logical rank: the same with any workers,
    on any number of ranks. Python's and NumPy's generators are not set so.

    `collate_fn` is called for the rows of each logical rank, so what it pads and draws depends on
    no other one. Where this rank carries several, their tensors are put together along the dim of
    the rows, the first, if their shapes go together; else a `fzero.data.Parts` in the place of the
    tensor has that of each. It is called twice more for the first batch, to see what is by rows.

    Args:
        dataset: with rows by number, as many as `order.length`. For what a worker knows of itself,
            `get_worker_info().dataset`, it is the attribute `dataset`.
        order: of the first batch.
        epochs: where it ends: before the first batch of this epoch. Left out, it never ends.
        ranks: the logical ranks that get rows; left out, `order.carried()`, those of this rank.
        empty: what makes a batch without rows of one with one row, where `drop_last=False` leaves a
            logical rank without any. Left out, tensors and arrays get 0 rows and lists no element.
        options: of the DataLoader: `num_workers`, `collate_fn`, `pin_memory` and so on. Its own
            `generator`, if it is left out, begins at a seed of the order and the rank.

    Returns:
        An iterator of pairs (batch, order).

    Raises:
        LayoutError: for an iterable data set, one of another length, and as `BatchSampler` does;
            with the first batch, on every rank, if the last one of an epoch leaves a logical rank
            without rows, and no such batch can be made.
        CallError: for an option that the order decides: `batch_size`, `shuffle`, `sampler`,
            `batch_sampler`, `drop_last`; for `in_order=False`.

    Example:
        >>> import fzero, torch
        >>> rows = torch.arange(8)
        >>> order = fzero.data.Order(len(rows), batch_size=2, logical_ranks=2, shuffle=False)
        >>> for batch, order in fzero.data.batches(rows, order, epochs=1):
        ...     print(batch.tolist(), order.position, order.epoch)
        [0, 1, 2, 3] 1 0
        [4, 5, 6, 7] 2 1
    """
    _require_order("batches", order)
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise LayoutError(
            f"batches: {type(dataset).__name__} has no rows by number.",
            cause="an iterable data set or a stream: nobody can ask it for a row, so where it "
            "stands is no number.",
            fix="give a data set with __len__ and __getitem__. A stream of your own can read the "
            "rows that `ids, order = order.next()` names, or keep its position in extra=.",
        )
    if hasattr(dataset, "__len__") and len(dataset) != order.length:
        raise LayoutError(
            f"batches: the data set has {len(dataset)} rows, and the order is of {order.length}.",
            cause="the order of another split, or a data set that has grown since.",
            fix="give fzero.data.Order(len(dataset), ...).",
        )
    for name in _OF_ORDER:
        if name in options:
            raise CallError(
                f"batches: {name}={options[name]!r:.80} is not an option here.",
                cause="a call of DataLoader, whose batches the order now decides.",
                fix="give batch_size=, shuffle=, drop_last= to fzero.data.Order.",
            )
    if options.get("in_order") is False:
        raise CallError(
            "batches: in_order=False.",
            cause="the batch of whichever worker is first: which rows were trained on would be no "
            "position.",
            fix="leave it out.",
        )
    sampler = BatchSampler(order, epochs=epochs, ranks=ranks)
    end = 2**63 if epochs is None else epochs * order.batches_per_epoch
    if options.get("generator") is None:
        place = fold_in(order.seed, _WORKERS, order.position, *sampler.ranks[:1])
        options["generator"] = torch.Generator().manual_seed(place)
    collate = options.pop("collate_fn", None) or default_collate
    rows = _Batches(dataset, order, sampler.ranks, collate, empty)
    positions: Any = range(order.position, end)
    loader: Any = DataLoader(
        rows, batch_size=None, sampler=positions, collate_fn=_as_it_is, **options
    )
    return _paired(loader, order)


def _paired(loader: Iterable[Any], order: Order) -> Iterator[tuple[Any, Order]]:
    for digest, batch in loader:
        if 0 != order.digest != digest != 0:
            warnings.warn(_OTHERS, UserWarning, stacklevel=2)
        order = dataclasses.replace(order.after(), digest=digest)
        yield batch, order


_OTHERS = explain(
    "batches: rows of the data set are others than those of the run that saved the order.",
    cause="a data set of the same length in another order (shuffled or split by another seed, "
    "files listed otherwise), or with other values: the epoch would not go on with the rows that "
    "it has left.",
    fix="give the data set of that run; or begin at the next epoch: "
    "dataclasses.replace(order, position=(order.epoch + 1) * order.batches_per_epoch, digest=0).",
)


class _Batches(Dataset[Any]):
    """This rank's batches by position: of each logical rank alone, with its own random numbers."""

    def __init__(
        self,
        dataset: Any,
        order: Order,
        ranks: tuple[int, ...],
        collate: Callable[[list[Any]], Any],
        empty: Callable[[Any], Any] | None,
    ) -> None:
        self.dataset, self.order, self.ranks = dataset, order, ranks
        self.several = getattr(dataset, "__getitems__", None)
        self.collate, self.empty = collate, empty
        self._dims: dict[Any, int | None] | None = None  # of the rows, in a batch
        last = dataclasses.replace(order, position=order.batches_per_epoch - 1)
        self._tried = all(last.sizes(range(order.logical_ranks)))  # whether an empty one is known
        self._digest: int | None = None

    def __getitem__(self, position: int) -> tuple[int, Any]:
        if self._digest is None:
            self._digest = self._digest_of_some()
        return self._digest, self._batch(position)

    def _digest_of_some(self) -> int:
        """Return a digest of the first, the middle and the last row; 0 if it is not always equal.

        So draws from other generators than torch's are not told as another data set.
        """
        length, known = self.order.length, self.order.digest

        def made() -> int:
            with seeded(0, torch.device("cpu")):
                return digest_of([self.dataset[row] for row in (0, length // 2, length - 1)])

        found = made()
        return found if known in (0, found) or made() == found else 0

    def _batch(self, position: int) -> Any:
        order = dataclasses.replace(self.order, position=position)
        parts, place = order.parts(self.ranks), fold_in(order.seed, _ROWS, position)
        with torch.random.fork_rng(devices=[]):
            if not self._tried:
                self._without_rows()
                self._tried = True
            if self._dims is None and len(parts) > 1:
                ids = next((ids for ids in parts if ids), [0])
                self._dims = rows_of(*self._once_and_twice(ids), len(ids))
            found, stacks = list[Any](), self._stacks
            for rank, ids in zip(self.ranks, parts, strict=True):
                torch.default_generator.manual_seed(fold_in(place, rank))
                rows = self._rows(ids) if ids else []
                found.append(rows if stacks else self._collated(rows))
            if stacks:
                try:  # with the same result, and much faster
                    return default_collate([row for rows in found for row in rows])
                except (RuntimeError, IndexError):  # other shapes, or no row at all
                    found = [self._collated(rows) for rows in found]
        sizes, dims = [len(ids) for ids in parts], self._dims
        return found[0] if dims is None else joined(found, sizes, dims)

    @property
    def _stacks(self) -> bool:
        """Whether a batch of several logical ranks is their rows, stacked, which draws nothing."""
        dims = self._dims
        return (
            self.collate is default_collate
            and bool(dims)
            and not any(dim is None or dim for dim in dims.values())
        )

    def _collated(self, rows: list[Any]) -> Any:
        return self.collate(rows) if rows else self._without_rows()

    def _rows(self, ids: list[int]) -> list[Any]:
        if self.several is None:
            return [self.dataset[row] for row in ids]
        rows = self.several(ids)
        if isinstance(rows, Mapping) or len(rows) != len(ids):
            raise LayoutError(
                f"batches: __getitems__ of {len(ids)} ids gave a {type(rows).__name__} of "
                f"{len(rows)}.",
                cause="columns, as a table has them: {name: values of all rows}.",
                fix="return a list with a row for each id, as torch.utils.data.Dataset says.",
            )
        return [*rows]

    def _once_and_twice(self, ids: list[int]) -> tuple[Any, Any]:
        """Return a batch of some rows, and one that has them twice, with the same draws."""
        made, rows = [], self._rows(ids)
        for times in (1, 2):
            torch.default_generator.manual_seed(0)
            made.append(self.collate([copy.copy(row) for row in rows * times]))  # some pop keys
        return made[0], made[1]

    def _without_rows(self) -> Any:
        """Return a batch without rows. Raises `LayoutError` if none can be made."""
        if self.empty is not None:
            return self.empty(self.collate(self._rows([0])))
        return without_rows(*self._once_and_twice([0]))


def _as_it_is(x: Any) -> Any:
    return x


def _require_order(name: str, order: Any) -> None:
    if not isinstance(order, Order):
        raise CallError(
            f"{name}: order is a {type(order).__name__}.",
            cause="a list of ids, a saved dict, or the two arguments the other way round.",
            fix="give fzero.data.Order(len(dataset), batch_size=..., logical_ranks=..., seed=...), "
            "at a saved position by its resumed(saved).",
        )
