"""Sound pairs of many families of models: nothing is found; and how small a fault still is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import fzero
from tests.covering import covered
from tests.zoo import FAMILIES
from tests.zoo.runs import run_of

SHARDED = ((3, 4), (2, 2), (1, 4), (3, 2))  # stage and ranks of run b
FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def sound(name: str, optimizer: str, dtype: str, seed: int) -> Any:
    options: dict[str, Any] = {"optimizer": optimizer, "dtype": FLOATS[dtype], "seed": seed}
    family, at = FAMILIES[name], SHARDED[seed % len(SHARDED)]
    return fzero.diff(run_of(family, 0, 1, **options), run_of(family, *at, **options))


@pytest.mark.parametrize(
    ("name", "optimizer", "dtype", "seed"),
    [
        ("llama", "adamw", "fp32", 0),
        ("lstm", "lion", "fp32", 3),
        ("conv", "rmsprop", "fp32", 1),
        ("encoder", "lion", "bf16", 2),
    ],
)
def test_a_sound_pair(name: str, optimizer: str, dtype: str, seed: int) -> None:
    found = sound(name, optimizer, dtype, seed)
    assert found is None, found


@pytest.mark.slow
@covered(dtype=[*FLOATS], optimizer=["adamw", "sgd", "lion"], name=[*FAMILIES])
def test_all_sound_pairs(name: str, optimizer: str, dtype: str) -> None:
    for seed in range(2):
        found = sound(name, optimizer, dtype, seed)
        assert found is None, (seed, found)


adamw, lion = fzero.optim.adamw, fzero.optim.lion


@pytest.mark.parametrize(
    ("right", "wrong", "named"),
    [
        ("adamw", adamw(0.01 * (1 + 1e-9)), "update"),
        ("adamw", adamw(0.01, eps=1.0001e-8), "update"),
        ("adamw", adamw(0.01, weight_decay=0.0), "update"),
        ("lion", lion(0.001 * (1 + 1e-6)), "update"),
    ],
    ids=["lr by 1e-9", "eps by 1e-4", "no weight decay", "lr of Lion by 1e-6"],
)
def test_a_small_fault_of_an_update_is_found_although_a_loss_casts_to_fp32(
    right: str, wrong: Any, named: str
) -> None:
    """The loss of a Llama is known to 1e-7; what an optimizer makes of its gradients to 1e-13."""
    family = FAMILIES["llama"]
    b = replace(run_of(family, 2, 2, optimizer=right), optimizer=wrong)
    found = fzero.diff(run_of(family, 0, 1, optimizer=right), b)
    assert found is not None and found.operation == named, found
