"""Optimizer states of any form: which leaf is a slot of the parameters, which a counter."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import fzero
from fzero.checkpoint import load, save
from fzero.errors import LayoutError
from fzero.optim.entries import roles_of
from tests.checkpoint.states import make
from tests.strategies import everywhere, same


class Scaled(NamedTuple):
    """Shaped as TorchOpt's: lists parallel to the parameters, a counter for each."""

    mu: Any
    count: Any


class Chained(NamedTuple):
    """Shaped as optax's chain: an empty state, then a full one, and a Python number."""

    first: tuple[()]
    inner: Scaled
    rate: float


def _foreign_init(params: Any) -> Chained:
    mu = [torch.zeros_like(p) for p in params]
    count = [torch.zeros((), dtype=torch.int64) for _ in params]
    return Chained((), Scaled(mu, count), 0.5)


def _foreign_update(grads: Any, state: Chained, params: Any) -> Any:
    mu = [0.5 * m + g for m, g in zip(state.inner.mu, grads, strict=True)]
    count = [c + 1 for c in state.inner.count]
    updates = [-state.rate * m for m in mu]
    return updates, Chained((), Scaled(mu, count), 0.5 * state.rate)


FOREIGN = (_foreign_init, _foreign_update)
PARAMS = {"a": torch.ones(5), "b": {"w": torch.ones(2, 3), "v": torch.ones(())}}


def _step(state: Any) -> Any:
    state, _ = fzero.grad_and_reduce(
        lambda p: 4 * p["a"].sum() + (p["b"]["w"] * p["b"]["v"]).sum(), state
    )()
    return fzero.apply_gradients(state)


def test_a_foreign_optimizer_moves_between_layouts(tmp_path: Path) -> None:
    state = _step(_step(fzero.init(PARAMS, FOREIGN, stage=0)))
    save(tmp_path, state)
    expected = fzero.full_params(_step(state))
    for ranks in (1, 2, 3):
        for stage in range(4):
            loaded = load(tmp_path, make(PARAMS, stage=stage, ranks=ranks, optimizer=FOREIGN))
            assert loaded.optimizer.rate == 0.125  # a Python number comes back as one
            assert all(c.tolist() == [2] * ranks for c in loaded.optimizer.inner.count)
            onward = fzero.simulate(lambda s: fzero.full_params(_step(s)), world_size=ranks)(loaded)
            everywhere(onward, expected, ranks)
    alone = load(tmp_path, fzero.init(PARAMS, FOREIGN, stage=3))
    assert type(alone.optimizer.rate) is float


def _named(state: Any, numels: list[int]) -> list[Any]:
    return [(role.name, role.position) for role in roles_of(state, numels)]


def test_roles() -> None:
    two = [torch.zeros(3), torch.zeros(5)]
    count = torch.tensor(1)
    assert _named(two, [3, 5]) == [(".", 0), (".", 1)]
    assert _named((count, two), [3, 5]) == [("[0]", None), ("[1]", 0), ("[1]", 1)]
    assert _named({"m": tuple(two)}, [3, 5]) == [("['m']", 0), ("['m']", 1)]
    assert _named([count, count], [3, 5]) == [(".", None), (".", None)]
    assert _named((count, count), [3, 5]) == [("[0]", None), ("[1]", None)]
    assert _named([torch.zeros(0), two[1]], [3, 5]) == [(".", 0), (".", 1)]
    assert _named(count, [3, 5]) == [(".", None)]
    assert _named(((), ()), []) == []
    # As many moments as groups, of equal sizes: the inner tuples are the slots.
    four = tuple((torch.zeros(3), torch.zeros(3)) for _ in range(2))
    assert _named(four, [3, 3]) == [("[0]", 0), ("[0]", 1), ("[1]", 0), ("[1]", 1)]
    # One group of one element: a slot is 1-D, a counter is not.
    assert _named({"m": [torch.zeros(1)], "n": count}, [1]) == [("['m']", 0), ("['n']", None)]


@pytest.mark.parametrize(
    ("state", "place"),
    [
        ({"factor": torch.zeros(4, 4)}, r"shape \(4, 4\) at \['factor'\]"),
        ([{"m": torch.zeros(3)}, {"m": torch.zeros(5)}], r"shape \(3,\) at \[0\]\['m'\]"),
        ([torch.zeros(3), torch.zeros(4)], r"shape \(3,\) at \[0\]"),
        ({"name": "lamb"}, r"'lamb' at \['name'\]"),
        (torch.zeros(2), r"shape \(2,\) at \."),
    ],
)
def test_what_cannot_be_resharded_is_refused_by_its_place(state: Any, place: str) -> None:
    with pytest.raises(LayoutError, match=f"{place}.*\n.*\nFix: keep such state outside"):
        roles_of(state, [3, 5])


def test_counters_that_differ_are_refused(tmp_path: Path) -> None:
    state = fzero.init(PARAMS, FOREIGN, stage=0)
    state.optimizer.inner.count[1].fill_(7)
    with pytest.raises(LayoutError, match=r"inner.count is 0 .* and 7 for another"):
        save(tmp_path, state)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("saved", "wanted", "lines"),
    [
        (
            fzero.optim.sgd(0.1),
            fzero.optim.adam(0.1),
            [
                "rule: sgd in the checkpoint, adam here",
                "slot exp_avg of w: nothing in the checkpoint, torch.float32 in the state",
                "slot exp_avg_sq of w",
            ],
        ),
        (
            fzero.optim.lion(0.1),  # it has the slots of SGD with momentum
            fzero.optim.sgd(0.1, momentum=0.9),
            ["rule: lion in the checkpoint, sgd here"],
        ),
        (
            fzero.optim.from_torch(torch.optim.RAdam),
            fzero.optim.adamw(0.1),
            ["rule: radam in the checkpoint, adam here"],
        ),
        (
            fzero.optim.adam(0.1),
            fzero.optim.adam(0.1, master_weights=False),
            [
                "slot masters of h: torch.float32 in the checkpoint, nothing in the state",
                "slot exp_avg of h: torch.float32 in .*, torch.bfloat16 in the state",
            ],
        ),
        (fzero.optim.sgd(0.1), FOREIGN, ["rule: sgd", "inner.mu of w", "counter optimizer/rate"]),
    ],
)
def test_another_optimizer_is_refused_by_its_slots(
    saved: Any, wanted: Any, lines: list[str], tmp_path: Path
) -> None:
    params = {"w": torch.ones(3), "h": torch.ones(2, dtype=torch.bfloat16)}
    save(tmp_path, fzero.init(params, saved, stage=0))
    with pytest.raises(LayoutError) as raised:
        load(tmp_path, fzero.init(params, wanted, stage=2))
    for line in lines:
        assert raised.match(line)
    assert raised.match("To go on with another one, load so, and then fzero.init")


def test_adam_and_adamw_and_other_options_are_the_same_state(tmp_path: Path) -> None:
    state = _step(fzero.init(PARAMS, fzero.optim.adam(0.1), stage=0))
    save(tmp_path, state)
    loaded = load(tmp_path, fzero.init(PARAMS, fzero.optim.adamw(0.2), stage=0))
    same(loaded.optimizer, state.optimizer)
