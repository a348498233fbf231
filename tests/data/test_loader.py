"""An order and torch's DataLoader: prefetched batches, killed runs, what is refused."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, get_worker_info

import fzero
from fzero.data import BatchSampler, Order, batches
from fzero.state.logical import carried
from tests.data.killed import WORKERS, new_order, train
from tests.ranks import spawn_script

ROWS = torch.arange(20)
SCRIPT = Path(__file__).with_name("killed.py")


def order_of(length: int = 20, **options: Any) -> Order:
    return Order(length, **{"batch_size": 2, "logical_ranks": 3, **options})


def test_a_loader_has_the_rows_of_the_order() -> None:
    order = order_of(drop_last=False).after()
    loader = DataLoader(TensorDataset(ROWS), batch_sampler=BatchSampler(order, epochs=2))
    found = [batch.tolist() for (batch,) in loader]
    assert len(loader) == len(found) == 7
    for ids in found:
        wanted, order = order.next()
        assert ids == wanted
    assert order.epoch == 2
    assert len(BatchSampler(order, epochs=2)) == 0 and [*BatchSampler(order, epochs=2)] == []
    with pytest.raises(TypeError, match="never ends"):
        len(BatchSampler(order))


def test_ranks_have_the_rows_of_their_logical_ranks_or_of_those_that_are_asked_for() -> None:
    order = order_of(shuffle=False)

    def run(x: torch.Tensor) -> torch.Tensor:
        own, _ = next(batches(ROWS, order))
        return torch.cat([own, own.new_zeros(4 - len(own))])

    found = fzero.simulate(run, world_size=2)(torch.ones(2))
    assert found.tolist() == [[0, 1, 2, 3], [4, 5, 0, 0]]
    assert next(iter(BatchSampler(order, ranks=[2, 0]))) == [4, 5, 0, 1]
    paired = batches(ROWS, order, epochs=1, ranks=[1])
    assert [batch.tolist() for batch, _ in paired] == [[2, 3], [8, 9], [14, 15]]


@pytest.mark.parametrize("options", [{}, WORKERS], ids=["alone", "workers"])
def test_the_order_stands_at_what_was_given_out_and_not_at_what_is_prefetched(
    options: dict[str, Any],
) -> None:
    order = order_of()
    plain = order
    for number, (batch, after) in enumerate(batches(ROWS, order, **options), 1):
        wanted, plain = plain.next()
        assert batch.tolist() == wanted and after == plain and after.position == number
        if number == 7:  # in the third epoch
            break
    assert plain.epoch == 2 and plain.position == 7


def test_no_rows_are_a_batch_without_rows() -> None:
    data = TensorDataset(torch.arange(6.0).reshape(3, 2), torch.arange(3))
    order = order_of(3, drop_last=False, logical_ranks=4)
    (pair,) = batches(data, order, epochs=1, ranks=[3])
    (x, y), after = pair
    assert x.shape == (0, 2) and y.shape == (0,) and y.dtype == torch.int64
    assert after.epoch == 1

    named = [{"x": torch.ones(2), "name": "a"}] * 3
    ((batch, _),) = batches(named, order, epochs=1, ranks=[3])
    assert batch["x"].shape == (0, 2)


class Random(Dataset[Any]):
    """Rows with random numbers, and with the seed that the loader gave to the workers."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, row: int) -> Any:
        info = get_worker_info()
        known = 0 if info is None else info.seed - info.id
        return torch.tensor([row, known], dtype=torch.float64), torch.rand(2)


class Several(Random):
    """The same, which takes the rows of a batch together."""

    def __getitems__(self, rows: list[int]) -> list[Any]:
        return [Random.__getitem__(self, row) for row in rows]


def drawn(dataset: Any, order: Order, size: int, **options: Any) -> list[Any]:
    """The random numbers of the rows of three batches, on `size` ranks."""
    found = []
    for rank in range(size):
        here = carried(rank, size, order.logical_ranks)
        pairs = itertools.islice(batches(dataset, order, ranks=here, **options), 3)
        found.append([random for (_, random), _ in pairs])
    return [torch.cat(columns) for columns in zip(*found, strict=True)]


def test_random_numbers_of_rows_depend_on_no_worker_and_no_rank() -> None:
    order = order_of(drop_last=False)
    before = torch.get_rng_state()
    wanted = drawn(Random(), order, 1)
    assert len({*torch.cat(wanted).flatten().tolist()}) == 36
    for size, workers in itertools.product((1, 2, 3), (0, 2)):
        found = drawn(Random(), order, size, num_workers=workers)
        assert all(map(torch.equal, found, wanted))
    assert all(map(torch.equal, drawn(Several(), order, 2), wanted))
    later = drawn(Random(), order.after(), 2)
    assert all(map(torch.equal, later[:2], wanted[1:]))
    assert torch.equal(torch.get_rng_state(), before)


def test_workers_begin_at_the_order() -> None:
    order = order_of()

    def seeds(order: Order, **options: Any) -> float:
        (batch, _), _ = next(batches(Random(), order, num_workers=1, **options))
        return batch[0, 1].item()

    found = [seeds(order), seeds(order), seeds(order.after()), seeds(order, ranks=[1])]
    assert found[0] == found[1] and len(set(found)) == 3
    given = torch.Generator().manual_seed(3)
    assert seeds(order, generator=given) not in found
    assert not torch.equal(given.get_state(), torch.Generator().manual_seed(3).get_state())


@pytest.mark.parametrize("at", [2, 6])
def test_a_run_that_is_killed_goes_on_elsewhere_with_the_same_rows_and_bits(
    at: int, tmp_path: Path
) -> None:
    """Two ranks, two workers each, four batches ahead; then one rank. An epoch has 6 batches."""
    done = spawn_script(SCRIPT, 2, [str(tmp_path), str(at)])
    assert done.returncode != 0 and "SIGKILL" in done.stderr + done.stdout
    both = [(tmp_path / f"2-{rank}").read_text().splitlines() for rank in range(2)]
    seen: dict[int, list[int]] = {}
    for line in [*both[0], *both[1]]:
        position, ids = json.loads(line)
        seen.setdefault(position, []).extend(ids)
    again: dict[int, list[int]] = {}
    found = train(tmp_path, 14, again.__setitem__)
    assert min(again) == at and max(again) == 13 and min(seen) == 0 and max(seen) == at
    order = new_order()
    for position in range(14):
        wanted, order = order.next(range(4))
        if position < at:  # what was not saved may have been killed on one rank only
            assert seen[position] == wanted
        else:
            assert again[position] == wanted
    (tmp_path / "unbroken").mkdir()
    assert torch.equal(train(tmp_path / "unbroken", 14, lambda *_: None), found)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(range(20))


@pytest.mark.parametrize(
    ("dataset", "named"),
    [
        (Stream(), r"Stream has no rows by number"),
        ((row for row in range(20)), r"generator has no rows by number"),
        (ROWS[:19], r"has 19 rows, and the order is of 20"),
    ],
)
def test_a_data_set_without_such_rows_is_refused(dataset: Any, named: str) -> None:
    with pytest.raises(fzero.LayoutError, match=f"batches: (.*){named}"):
        batches(dataset, order_of())


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"batch_size": 4}, r"batch_size=4 is not an option"),
        ({"shuffle": True}, r"shuffle=True is not an option"),
        ({"sampler": None}, r"sampler=None is not an option"),
        ({"batch_sampler": []}, r"batch_sampler=\[\] is not an option"),
        ({"drop_last": False}, r"drop_last=False is not an option"),
        ({"in_order": False}, r"in_order=False"),
    ],
)
def test_what_the_order_decides_is_no_option(options: dict[str, Any], named: str) -> None:
    with pytest.raises(fzero.CallError, match=f"batches: {named}"):
        batches(ROWS, order_of(), **options)


def test_another_thing_than_an_order_is_refused() -> None:
    wrong: Any = order_of().state_dict()
    with pytest.raises(fzero.CallError, match="batches: order is a dict"):
        batches(ROWS, wrong)
    with pytest.raises(fzero.CallError, match="BatchSampler: order is a dict"):
        BatchSampler(wrong)
    with pytest.raises(fzero.LayoutError, match="epochs=-1"):
        BatchSampler(order_of(), epochs=-1)
    with pytest.raises(fzero.LayoutError, match="logical rank=3"):
        BatchSampler(order_of(), ranks=[3])
