"""Further records of numbers in a state, a loss scale for one: saved by their names."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fzero.checkpoint import CheckpointError
from fzero.checkpoint._parts import OTHERS, numbers_of, placed, with_numbers
from fzero.errors import LayoutError
from fzero.state import TrainState
from fzero.state._record import record, static


@record
class Scale:
    """A loss scale with tensors; how it grows is an option."""

    value: Tensor
    good_steps: Tensor
    interval: int = static(default=100)


@dataclass(frozen=True)
class Counted:
    """Numbers of the host, one of them deeper."""

    seen: int = 0
    best: float = float("inf")
    inner: Any = ()


@dataclass(frozen=True)
class Longer:
    """Stands for a TrainState with two more fields."""

    step: Tensor
    scale: Any = None
    counted: Any = None


def _state(**parts: Any) -> Any:
    return Longer(step=torch.zeros(()), **parts)


def _scale(value: float, good: int, interval: int = 100) -> Scale:
    return Scale(value=torch.tensor(value), good_steps=torch.tensor(good), interval=interval)


@given(st.floats(1, 2.0**24, width=32), st.integers(0, 1000), st.integers(0, 9), st.booleans())
def test_numbers_come_back_and_options_stay(value: float, good: int, seen: int, flag: bool) -> None:
    saved = numbers_of(_state(scale=_scale(value, good, 7), counted=Counted(seen, inner=[flag])))
    assert saved == {
        "scale/value": value, "scale/good_steps": good,
        "counted/seen": seen, "counted/best": float("inf"), "counted/inner/0": flag,
    }  # fmt: skip
    into = _state(scale=_scale(1.0, 0, 9), counted=Counted(inner=[not flag]))
    found = with_numbers(into, saved)
    assert found["scale"].value.item() == value and found["scale"].good_steps.item() == good
    assert found["scale"].good_steps.dtype is torch.int64 and found["scale"].interval == 9
    assert found["counted"] == Counted(seen, inner=[flag])
    assert into.scale.value.item() == 1.0


def test_a_part_that_only_one_side_has_stays_as_the_state_has_it() -> None:
    assert with_numbers(_state(scale=_scale(4.0, 2)), {"step": 3}) == {}
    assert with_numbers(_state(), numbers_of(_state(scale=_scale(4.0, 2)))) == {}


def test_a_part_of_another_kind_is_refused() -> None:
    saved = {"scale/value": 2.0, "scale/bad_steps": 1}
    with pytest.raises(LayoutError, match=r"the scale has the numbers .*bad_steps.*good_steps"):
        with_numbers(_state(scale=_scale(1.0, 0)), saved)


@pytest.mark.parametrize("value", [True, 1.5, float("nan"), 10**400, 2**63])
def test_a_number_that_does_not_fit_is_refused(value: Any) -> None:
    saved = {"scale/value": 2.0, "scale/good_steps": value}
    with pytest.raises(CheckpointError, match=r"scale/good_steps is .*torch.int64"):
        with_numbers(_state(scale=_scale(1.0, 0)), saved)
    with pytest.raises(CheckpointError):
        placed("x", 3, 1.5)
    with pytest.raises(CheckpointError):
        placed("x", 1.5, 10**400)


def test_a_tensor_of_many_elements_is_refused() -> None:
    part = Scale(value=torch.zeros(3), good_steps=torch.tensor(0))
    with pytest.raises(LayoutError, match=r"a tensor of shape \(3,\) at scale/value"):
        numbers_of(_state(scale=part))
    with pytest.raises(LayoutError, match="at scale/history"):
        numbers_of(_state(scale={"history": torch.zeros(2)}))


def test_all_fields_of_a_train_state_have_their_way() -> None:
    fields = {field.name for field in dataclasses.fields(TrainState)}
    assert set(OTHERS) <= fields
