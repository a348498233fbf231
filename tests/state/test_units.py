"""Units, modules and limits: what persists, and what is refused."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from fzero.errors import LayoutError
from fzero.state.units import Limits, Units, plan_modules, plan_units, with_need

SIZES = {"a": 8, "b": 1, "c": 9, "d": 4, "e": 0}


@pytest.mark.parametrize(
    ("each", "model", "persistent"),
    [
        (0, sys.maxsize, "e"),
        (3, sys.maxsize, "be"),
        (8, sys.maxsize, "abde"),
        (99, sys.maxsize, "abcde"),
        (8, 12, "abe"),  # d would make it 13
        (8, 13, "abde"),
        (9, 7, "bde"),
        (99, 0, "e"),
    ],
)
def test_small_units_persist_in_order_while_they_fit(
    each: int, model: int, persistent: str
) -> None:
    limits = Limits(persistence_threshold_numel=each, model_persistence_threshold_numel=model)
    units = plan_units(SIZES, limits)
    assert "".join(units.names[unit] for unit in sorted(units.persistent)) == persistent


def test_the_defaults_are_those_of_deepspeed() -> None:
    assert Limits() == Limits(
        prefetch_bucket_numel=50_000_000,
        max_live_parameters_numel=1_000_000_000,
        max_reuse_distance_numel=1_000_000_000,
        persistence_threshold_numel=100_000,
        model_persistence_threshold_numel=sys.maxsize,
    )


@pytest.mark.parametrize("value", [-1, 5e7, True, "5", None])
@pytest.mark.parametrize("name", ["prefetch_bucket_numel", "model_persistence_threshold_numel"])
def test_limits_are_numbers_of_elements(name: str, value: Any) -> None:
    with pytest.raises(LayoutError, match=rf"{name}={value!r} is not a number of elements"):
        Limits(**{name: value})


def test_a_unit_of_less_than_nothing_is_refused() -> None:
    with pytest.raises(LayoutError, match="unit 'a' has -1 elements"):
        plan_units({"a": -1}, Limits())


def test_modules_need_units_by_id_each_once() -> None:
    units = plan_units(SIZES, Limits())
    modules = plan_modules(units, {"net": [], "net.tied": ["c", "a", "c"]})
    assert modules.needs == ((), (2, 0))
    assert with_need(modules, 0, [3, 1]).needs == ((3, 1), (2, 0))


def test_a_need_that_is_no_unit_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"module 'net' needs \['x'\], and there is no such unit"):
        plan_modules(plan_units(SIZES, Limits()), {"net": ["a", "x"]})


def test_messages_name_units_and_stay_short() -> None:
    units = Units(names=tuple("abcdefgh"), numels=(1,) * 8)
    assert units.text([]) == "none"
    assert units.text([2, 0]) == "2 ('c'), 0 ('a')"
    assert units.text(range(8)).endswith("5 ('f') and 2 more")
