"""Laws of `Order`: which rows come, for any number of ranks, from any position on."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fzero
from fzero.data import Order
from fzero.data.order import keys_of, permuted
from fzero.ranks.mesh import Dims
from fzero.state.logical import carried, share


@st.composite
def orders(draw: st.DrawFn) -> Order:
    """An order that has a batch, at any position of its first epochs."""
    batch_size, logical_ranks = draw(st.integers(1, 5)), draw(st.integers(1, 9))
    drop_last = draw(st.booleans())
    least = batch_size * logical_ranks if drop_last else 1
    order = Order(
        draw(st.integers(least, least + 90)),
        batch_size=batch_size,
        logical_ranks=logical_ranks,
        seed=draw(st.integers(0, 2**63 - 1)),
        shuffle=draw(st.booleans()),
        drop_last=drop_last,
    )
    position = draw(st.integers(0, 3 * order.batches_per_epoch))
    return order.resumed({**order.state_dict(), "position": position})


def whole(order: Order) -> list[int]:
    return order.next(range(order.logical_ranks))[0]


def following(order: Order, batches: int) -> list[list[int]]:
    """The ids of all logical ranks in the next batches."""
    found = []
    for _ in range(batches):
        ids, order = order.next(range(order.logical_ranks))
        found.append(ids)
    return found


@given(orders())
def test_an_epoch_is_a_permutation(order: Order) -> None:
    start = order.resumed({**order.state_dict(), "position": order.epoch * order.batches_per_epoch})
    batches = following(start, start.batches_per_epoch)
    rows = [row for batch in batches for row in batch]
    size = order.batch_size * order.logical_ranks
    assert len(rows) == len(set(rows)) and set(rows) <= {*range(order.length)}
    dropped = order.length % size if order.drop_last else 0
    assert len(rows) == order.length - dropped
    assert all(len(batch) == size for batch in batches[:-1])
    assert 0 < len(batches[-1]) <= size
    if not order.shuffle:
        assert rows == [*range(len(rows))]


@given(orders(), st.data())
def test_ranks_have_together_the_batch_of_all_however_many_they_are(
    order: Order, data: st.DataObject
) -> None:
    size = data.draw(st.integers(1, order.logical_ranks))
    ranks = [carried(rank, size, order.logical_ranks) for rank in range(size)]
    assert [row for here in ranks for row in order.next(here)[0]] == whole(order)
    parts = order.parts(range(order.logical_ranks))
    assert [row for part in parts for row in part] == whole(order)
    assert all(order.parts([rank]) == [part] for rank, part in enumerate(parts))
    sizes = [len(part) for part in parts]
    assert order.sizes(range(order.logical_ranks)) == sizes
    assert max(sizes) <= order.batch_size and max(sizes) - min(sizes) <= 1
    for here in ranks:  # rows that are cut as evenly as can be are cut where the parts are
        own = [len(part) for part in order.parts(here)]
        assert own == [len(share(number, len(here), sum(own))) for number in range(len(here))]


@given(orders(), st.integers(0, 20), st.data())
def test_a_run_that_goes_on_elsewhere_has_the_rows_of_the_unbroken_one(
    order: Order, batches: int, data: st.DataObject
) -> None:
    unbroken = following(order, batches)
    new = Order(
        order.length,
        batch_size=order.batch_size,
        logical_ranks=order.logical_ranks,
        seed=order.seed,
        shuffle=order.shuffle,
        drop_last=order.drop_last,
    )
    found = []
    for _ in range(batches):  # saved after each batch, and resumed on another number of ranks
        size = data.draw(st.integers(1, order.logical_ranks))
        everyone = [order.next(carried(rank, size, order.logical_ranks)) for rank in range(size)]
        found.append([row for ids, _ in everyone for row in ids])
        (order,) = {after for _, after in everyone}
        order = new.resumed(json.loads(json.dumps(order.state_dict())))
    assert found == unbroken


def test_each_epoch_and_each_seed_has_an_order_of_its_own() -> None:
    order = Order(50, batch_size=5, logical_ranks=2)
    epochs = [tuple(itertools.chain(*following(order, 5)))]
    for _ in range(3):
        for _ in range(5):
            order = order.after()
        epochs.append(tuple(itertools.chain(*following(order, 5))))
    other = Order(50, batch_size=5, logical_ranks=2, seed=1)
    epochs.append(tuple(itertools.chain(*following(other, 5))))
    assert order.epoch == 3 and len(set(epochs)) == 5
    assert all(sorted(epoch) == [*range(50)] for epoch in epochs)


def test_these_rows_stay_as_they_are() -> None:
    """A run that goes on with another version of the library has the same rows."""
    order = Order(1000, batch_size=3, logical_ranks=2, seed=7)
    assert following(order, 2) == [[660, 759, 925, 911, 410, 478], [270, 442, 14, 237, 909, 629]]
    large = Order(10**12, batch_size=2, logical_ranks=1, seed=7, position=10**9)
    assert following(large, 1) == [[251759350449, 156891868806]]


@pytest.mark.parametrize("length", [2, 3, 4, 5])
def test_all_permutations_of_a_few_rows_are_equally_likely(length: int) -> None:
    kinds = [*itertools.permutations(range(length))]
    expected = max(12, 400 // len(kinds))
    keys = [keys_of(seed, 0) for seed in range(expected * len(kinds))]
    found = Counter(tuple(permuted([range(length)], length, key)[0]) for key in keys)
    chi = sum((found[kind] - expected) ** 2 / expected for kind in kinds)
    degrees = len(kinds) - 1
    assert abs(chi - degrees) < 4 * (2 * degrees) ** 0.5


def test_a_large_order_has_no_row_twice_and_costs_no_memory() -> None:
    length = 10**15
    keys = keys_of(0, 0)
    rows = permuted([range(3000)], length, keys)[0]
    assert len(set(rows)) == 3000 and all(0 <= row < length for row in rows)
    value = torch.tensor(rows, dtype=torch.float64) / length
    assert abs(value.mean().item() - 0.5) < 4 / (12 * 3000) ** 0.5
    neighbours = torch.corrcoef(torch.stack([value[1:], value[:-1]]))[0, 1]
    assert abs(neighbours.item()) < 4 / 3000**0.5


def test_virtual_ranks_have_their_own_rows() -> None:
    order = Order(40, batch_size=2, logical_ranks=5, shuffle=False)

    def run(x: torch.Tensor) -> torch.Tensor:
        ids, _ = order.next()
        return torch.tensor([*ids, *[-1] * (4 - len(ids))])

    found = fzero.simulate(run, world_size=3)(torch.ones(3))
    assert found.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, -1, -1]]
    with pytest.raises(fzero.LayoutError, match=r"logical_ranks=5, and there are 6 ranks"):
        fzero.simulate(run, world_size=6)(torch.ones(6))


def test_the_ranks_of_a_mesh_carry_the_logical_ranks() -> None:
    order = Order(40, batch_size=1, logical_ranks=5)

    def run(x: torch.Tensor) -> torch.Tensor:
        axis = fzero.world()
        runs = [order.carried(), order.carried((2, 2)), order.carried(axis.shards)]
        two = replace(axis, dims=Dims(2))
        runs += [order.carried(two.replicas), order.carried(two.shards)]
        return torch.tensor([[run.start, run.stop] for run in runs])

    found = fzero.simulate(run, world_size=4)(torch.ones(4)).tolist()
    of_all, of_two = [[0, 2], [2, 3], [3, 4], [4, 5]], [[0, 3], [3, 5]]
    for rank, runs in enumerate(found):
        assert runs == [*[of_all[rank]] * 3, of_two[rank // 2], of_two[rank % 2]]
    assert order.carried(fzero.Axis(size=1)) == range(5)
    with pytest.raises(fzero.AxisError, match="mesh is a list"):
        order.carried([0, 1])  # type: ignore


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_loss_is_given_the_rows_of_its_logical_rank(world: int) -> None:
    order = Order(40, batch_size=2, logical_ranks=4, shuffle=False)
    found: list[list[int]] = []

    def loss_fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        found.append(order.next()[0])
        return (p * x).sum()

    def step_fn(state: fzero.TrainState, x: torch.Tensor) -> Any:
        found.append(order.next()[0])
        state, _ = fzero.grad_and_reduce(loss_fn, state)(x)
        return fzero.apply_gradients(state), None

    step = fzero.shard(step_fn, stage=2, logical_ranks=4)

    def run(_: torch.Tensor) -> None:
        state = step.init(torch.ones(1), fzero.optim.sgd(1.0))
        step(state, torch.ones(len(order.carried()), 1))

    fzero.simulate(run, world_size=world)(torch.ones(world))
    own = [[0, 1], [2, 3], [4, 5], [6, 7]]
    of_ranks = {
        1: [[*range(8)]],
        2: [[0, 1, 2, 3], [4, 5, 6, 7]],
        3: [[0, 1, 2, 3], own[2], own[3]],
    }
    assert sorted(found) == sorted(own + of_ranks[world])
    order = replace(order, logical_ranks=3)
    with pytest.raises(fzero.LayoutError, match=r"logical_ranks=3, in a step of 4\."):
        fzero.simulate(run, world_size=1)(torch.ones(1))


def test_extra_of_a_checkpoint_takes_an_order(tmp_path: Path) -> None:
    order = Order(40, batch_size=1, logical_ranks=5).after()
    state = fzero.init(torch.ones(2), fzero.optim.sgd(1.0), stage=1)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    extra = {"order": order, "more": [{"scheduler": scheduler}]}
    fzero.checkpoint.save(tmp_path / "kept", state, extra=extra)
    found = fzero.checkpoint.read_extra(tmp_path / "kept")
    assert found["order"] == order.state_dict() and order.resumed(found["order"]) == order
    assert found["more"][0]["scheduler"]["base_lrs"] == [0.5]
    for wrong in (torch.ones(1), optimizer.param_groups[0]["params"], torch.nn.Linear(1, 1)):
        with pytest.raises(fzero.LayoutError, match=r"as JSON: a (Tensor|Parameter)"):
            fzero.checkpoint.save(tmp_path / "kept", state, extra={"wrong": wrong})


def test_a_short_last_batch_leaves_some_logical_ranks_without_rows() -> None:
    order = Order(3, batch_size=2, logical_ranks=4, drop_last=False, shuffle=False)
    assert order.parts(range(4)) == [[0], [1], [2], []]
    assert order.next([3])[0] == [] and order.after().epoch == 1
    one = Order(1, batch_size=1, logical_ranks=1)
    assert following(one, 3) == [[0], [0], [0]]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"length": 0}, r"Order: length=0\."),
        ({"length": 2.0}, r"Order: length=2\.0\."),
        ({"length": True}, r"Order: length=True\."),
        ({"batch_size": 0}, r"Order: batch_size=0\."),
        ({"logical_ranks": -1}, r"Order: logical_ranks=-1\."),
        ({"seed": -1}, r"Order: seed=-1\."),
        ({"seed": 2**63}, r"Order: seed=9223372036854775808\."),
        ({"position": -1}, r"Order: position=-1\."),
        ({"shuffle": 1}, r"shuffle=1\."),
        ({"drop_last": "no"}, r"drop_last='no'\."),
        ({"length": 7}, r"length=7 is less than a batch of 8 rows (.*)drop_last=True"),
    ],
)
def test_what_is_no_order_is_refused(options: dict[str, Any], named: str) -> None:
    given: Any = {"length": 20, "batch_size": 4, "logical_ranks": 2, **options}
    with pytest.raises(fzero.LayoutError, match=named):
        Order(given.pop("length"), **given)


@pytest.mark.parametrize("rank", [-1, 2, True, 1.0])
def test_a_logical_rank_that_is_none_is_refused(rank: Any) -> None:
    with pytest.raises(fzero.LayoutError, match=rf"logical rank={rank!r}\.(.*\n)+.*of 0 to 1"):
        Order(20, batch_size=4, logical_ranks=2).next([rank])


@pytest.mark.parametrize(
    "other", [{"batch_size": 2}, {"logical_ranks": 4}, {"seed": 1}, {"shuffle": False}]
)
def test_a_position_among_other_rows_is_refused(other: dict[str, Any]) -> None:
    given: Any = {"batch_size": 4, "logical_ranks": 2, "seed": 0}
    order, saved = Order(20, **given), Order(20, **{**given, **other}).after().state_dict()
    ((name, value),) = other.items()
    named = rf"saved with {name}={value}; here it has {name}={order.state_dict()[name]}\."
    with pytest.raises(fzero.LayoutError, match=named):
        order.resumed(saved)
    with pytest.raises(fzero.LayoutError, match="saved with length=24; here it has length=20"):
        order.resumed(Order(24, **given).state_dict())


@pytest.mark.parametrize("saved", [{}, {"position": 3}, 3, {"order": {"position": 3}}])
def test_what_is_no_saved_order_is_refused(saved: Any) -> None:
    with pytest.raises(fzero.LayoutError, match="is no saved order"):
        Order(20, batch_size=4, logical_ranks=2).resumed(saved)
    bad = {**Order(20, batch_size=4, logical_ranks=2).state_dict(), "position": -3}
    with pytest.raises(fzero.LayoutError, match="position=-3"):
        Order(20, batch_size=4, logical_ranks=2).resumed(bad)
