"""Batches of logical ranks: each is collated alone, in any container, and one may have no rows."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import Dataset, TensorDataset

import fzero
from fzero.data import Order, Parts, batches
from fzero.errors import LayoutError

LOGICAL = 5
LENGTH = 21  # the last batch has 6 rows, of which each logical rank has some


class Texts(Dataset[Tensor]):
    """Rows of other lengths."""

    def __init__(self, length: int = LENGTH) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, row: int) -> Tensor:
        return torch.arange(1, 2 + row % 5) * (row + 1)


@dataclass(frozen=True)
class Record:
    """A batch as a dataclass."""

    x: Any
    mask: Any
    names: list[str]
    mixed: float


class Pair(NamedTuple):
    """A batch as a namedtuple."""

    x: Any
    mask: Any


def padded(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Rows of one length, and a mask that is drawn."""
    most = max(map(len, rows))
    x = torch.stack([pad(row, (0, most - len(row))) for row in rows])
    return x, torch.rand(x.shape) < 0.5


def recorded(rows: list[Tensor]) -> Record:
    """A dataclass, with a number that is drawn, too."""
    mixed = torch.rand(()).item()
    return Record(*padded(rows), [str(row[0]) for row in rows], mixed)


COLLATE: dict[str, Any] = {
    "tuple": padded,
    "namedtuple": lambda rows: Pair(*padded(rows)),
    "dict": lambda rows: dict(zip("xm", padded(rows), strict=True)),
    "UserDict": lambda rows: UserDict(zip("xm", padded(rows), strict=True)),
    "dataclass": recorded,
    "numpy": lambda rows: [x.numpy() for x in padded(rows)],
    "time first": lambda rows: [x.T for x in padded(rows)],
    "nested": lambda rows: [{"a": (padded(rows), [3])}, None, torch.tensor(2.0), torch.eye(2)],
    "packed": lambda rows: torch.cat(rows),
    "list": lambda rows: rows,
}


def step_fn(state: Any, batch: Any, sizes: list[int], seen: list[Any]) -> Any:
    def loss_fn(p: Tensor, batch: Any) -> Tensor:
        seen.append((fzero.axis_index(), repr(batch)))
        return p.sum() * 1.0

    call = fzero.grad_and_reduce(loss_fn, state, sizes=sizes, weight=sizes)
    return fzero.apply_gradients(call(batch)[0]), 0


def seen_on(ranks: int, dataset: Any, order: Order, **options: Any) -> list[Any]:
    """What the loss of each logical rank is given in one epoch, on some ranks."""
    seen: list[Any] = []

    def run() -> None:
        now = order
        step: Any = fzero.shard(step_fn, stage=0, logical_ranks=order.logical_ranks)
        state = step.init(torch.ones(2), fzero.optim.sgd(0.1))
        for batch, after in batches(dataset, order, epochs=1, **options):
            state, _ = step(state, batch, now.sizes(), seen)
            now = after

    fzero.simulate(run, world_size=ranks)()
    return sorted(seen, key=lambda one: one[0])


@pytest.mark.parametrize("kind", COLLATE)
def test_a_logical_rank_has_the_same_batch_on_any_number_of_ranks(kind: str) -> None:
    order = Order(LENGTH, batch_size=3, logical_ranks=LOGICAL, drop_last=False)
    wanted = seen_on(LOGICAL, Texts(), order, collate_fn=COLLATE[kind])
    assert len(wanted) == 2 * LOGICAL
    for ranks in (1, 2, 3):
        assert seen_on(ranks, Texts(), order, collate_fn=COLLATE[kind]) == wanted


@pytest.mark.parametrize("kind", ["tuple", "UserDict", "dataclass", "numpy", "time first", "list"])
def test_a_logical_rank_without_rows_has_none_in_any_container(kind: str) -> None:
    order = Order(18, batch_size=3, logical_ranks=LOGICAL, drop_last=False)
    wanted = seen_on(LOGICAL, Texts(18), order, collate_fn=COLLATE[kind])
    assert len([1 for _, text in wanted if "size=(0" in text or "[]" in text or "[0]" in text])
    for ranks in (1, 2):
        assert seen_on(ranks, Texts(18), order, collate_fn=COLLATE[kind]) == wanted


def as_arrays(rows: list[Tensor]) -> Any:
    return UserDict(x=torch.stack(rows).numpy())


def test_a_mean_over_rows_is_that_of_all_rows() -> None:
    """Of arrays, of which a rank without rows would otherwise have row 0."""
    order = Order(1 + 4 * 3, batch_size=4, logical_ranks=3, drop_last=False, shuffle=False)
    rows = torch.arange(13.0).reshape(13, 1)

    def run() -> Tensor:
        def loss_fn(p: Tensor, batch: Any) -> Tensor:
            return (p * torch.as_tensor(batch["x"])).mean()

        state = fzero.init(torch.ones(()), fzero.optim.sgd(0.0), stage=0, logical_ranks=3)
        found, now = [], order
        for batch, after in batches(rows, now, epochs=1, collate_fn=as_arrays):
            sizes, now = now.sizes(), after
            call = fzero.grad_and_reduce(loss_fn, state, sizes=sizes, weight=sizes)
            state, loss = call(batch)
            found.append(loss)
        return torch.stack([*found, fzero.gradients(state)])

    for ranks in (1, 2, 3):
        for losses in fzero.simulate(run, world_size=ranks)():
            assert losses.tolist() == [5.5, 12.0, 6.0]


@pytest.mark.parametrize("ranks", [[0], [3], [0, 1, 2, 3]])
@pytest.mark.parametrize("workers", [0, 2])
def test_what_cannot_be_emptied_raises_with_the_first_batch(ranks: Any, workers: int) -> None:
    order = Order(10, batch_size=2, logical_ranks=4, drop_last=False)
    rows = torch.arange(10.0)

    def counted(rows: list[Tensor]) -> dict[str, Any]:
        return {"x": torch.stack(rows), "n": torch.tensor(len(rows)), "scale": torch.tensor(0.5)}

    with pytest.raises(LayoutError, match=r"leaves a logical rank without rows, and batch\['n'\]"):
        next(batches(rows, order, ranks=ranks, collate_fn=counted, num_workers=workers))

    def emptied(batch: Any) -> Any:
        return {**batch, "x": batch["x"][:0], "n": torch.tensor(0)}

    found = [*batches(rows, order, ranks=[3], epochs=1, collate_fn=counted, empty=emptied)]
    assert [batch["n"].item() for batch, _ in found] == [2, 0]
    whole = Order(10, batch_size=2, logical_ranks=4)
    (batch, _) = next(batches(rows, whole, ranks=ranks, collate_fn=counted))
    assert len(batch["x"]) == 2 * len(ranks) and batch["scale"] == 0.5


def test_a_collate_function_may_take_keys_out_of_its_rows() -> None:
    class Named(Dataset[Any]):
        def __len__(self) -> int:
            return 9

        def __getitem__(self, row: int) -> Any:
            return {"x": torch.tensor(row), "label": row}

    def popping(rows: list[Any]) -> Any:
        labels = [row.pop("label") for row in rows]
        return torch.stack([row["x"] for row in rows]), torch.tensor(labels)

    order = Order(9, batch_size=2, logical_ranks=4, drop_last=False, shuffle=False)
    found = [*batches(Named(), order, epochs=1, collate_fn=popping)]
    assert [x.tolist() for (x, _), _ in found] == [[*range(8)], [8]]


def test_rows_of_other_lengths_in_the_default_collate_function() -> None:
    order = Order(4, batch_size=1, logical_ranks=4, shuffle=False)
    batch, _ = next(batches(Texts(4), order))
    assert isinstance(batch, Parts)
    assert [x.tolist() for x in batch.parts] == [[[1]], [[2, 4]], [[3, 6, 9]], [[4, 8, 12, 16]]]
    assert [x.dtype for x in batch.to(torch.float64).parts] == [torch.float64] * 4
    assert batch.map(len).parts == (1, 1, 1, 1)
    with pytest.raises(AttributeError, match=r"no attribute 'shape': the logical ranks"):
        batch.shape  # noqa: B018
    state = fzero.init(torch.ones(1), fzero.optim.sgd(1.0), stage=0, logical_ranks=3)
    with pytest.raises(LayoutError, match="the values of 4 logical ranks, and is cut for 3"):
        fzero.grad_and_reduce(lambda p, x: (p * x).sum(), state)(batch)


@pytest.mark.parametrize("ranks", [[0], [0, 1]])
def test_columns_of_several_rows_are_refused(ranks: list[int]) -> None:
    class Table(TensorDataset):
        def __getitems__(self, rows: list[int]) -> Any:
            return {"x": [self[row] for row in rows]}

    order = Order(8, batch_size=2, logical_ranks=2)
    with pytest.raises(LayoutError, match="__getitems__ of 2 ids gave a dict of 1"):
        next(batches(Table(torch.ones(8)), order, ranks=ranks))


# The data set of a run that goes on.


def saved(dataset: Any, order: Order, **options: Any) -> dict[str, int]:
    _, after = next(batches(dataset, order, **options))
    return after.state_dict()


@pytest.mark.parametrize("workers", [0, 1])
def test_another_data_set_of_the_same_length_is_said(workers: int) -> None:
    order, rows = Order(20, batch_size=2, logical_ranks=3), torch.arange(20.0)
    there = order.resumed(saved(rows, order, num_workers=workers))
    assert there.digest and there == order.after()
    next(batches(rows, there, num_workers=workers))
    for other in (rows.flip(0), rows + 1, torch.randperm(20).float()):
        with pytest.warns(UserWarning, match="others than those of the run that saved the order"):
            next(batches(other, there, num_workers=workers))


def test_rows_that_are_never_the_same_are_not_said_to_be_others() -> None:
    class Noisy(Texts):
        def __getitem__(self, row: int) -> Any:
            return np.random.default_rng().random(3)

    order = Order(LENGTH, batch_size=2, logical_ranks=3)
    there = order.resumed(saved(Noisy(), order))
    next(batches(Noisy(), there))
    assert not saved(Noisy(), there)["digest"]


def test_an_order_that_was_saved_before_there_was_a_digest() -> None:
    order = Order(20, batch_size=2, logical_ranks=3).after()
    before = order.state_dict()
    del before["digest"]
    assert order.resumed(before) == order
    next(batches(torch.arange(20.0), order.resumed(before)))


def test_a_data_set_that_grew_says_how_to_go_on() -> None:
    order = Order(20, batch_size=2, logical_ranks=3)
    grown = Order(30, batch_size=2, logical_ranks=3)
    with pytest.raises(LayoutError, match=r"Subset\(dataset, range\(20\)\)") as error:
        grown.resumed(order.state_dict())
    assert "position=e * new.batches_per_epoch" in str(error.value)
    with pytest.raises(LayoutError, match="give the options of that run"):
        order.resumed(grown.state_dict())
