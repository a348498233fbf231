"""`map_params` is a function of every leaf, whatever the rules: beside plain tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
from fzero.errors import LayoutError
from fzero.optim import adafactor, adamw, no_optimizer, sgd
from fzero.ranks.virtual import run_ranks

Params = dict[str, Tensor]


def made(seed: int, *, frozen: Any = (), dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 7, bias=False), nn.Linear(7, 1)).to(dtype)
    for path, p in net.named_parameters():
        p.requires_grad_(not (frozen is True or path in frozen))
    return net


def state_of(net: nn.Module, rule: Any, stage: int, **options: Any) -> Any:
    return fzero.init(fzero.functionalize(net)[1], rule, stage=stage, **options)


def values(net: nn.Module) -> Params:
    return {path: p.detach().clone() for path, p in net.named_parameters()}


TEACHERS: dict[str, Callable[[int], Any]] = {
    "no optimizer": lambda stage: state_of(made(1), no_optimizer(), stage),
    "frozen": lambda stage: state_of(made(1, frozen=True), no_optimizer(), stage),
    "partly": lambda stage: state_of(made(1, frozen=["0.weight"]), sgd(0.1), stage),
    "other buckets": lambda stage: state_of(made(1), adamw(0.1), stage, bucket_bytes=8),
    "of another stage": lambda stage: state_of(made(1), no_optimizer(), (stage + 3) % 4),
    "in 32 bits": lambda stage: state_of(made(1, dtype=torch.float32), no_optimizer(), stage),
    "whole": lambda stage: fzero.full_params(state_of(made(1), no_optimizer(), stage)),
}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_state_beside_a_state_of_other_rules_is_that_of_tensors(
    stage: int, world_size: int
) -> None:
    def body(rank: int) -> None:
        students: list[Any] = [
            state_of(made(2), adafactor(0.1), stage),
            state_of(made(2), no_optimizer(), stage),
            state_of(made(2, frozen=["1.weight", "2.bias"]), adamw(0.1), stage),
        ]
        for student in students:
            for name, teacher in TEACHERS.items():
                mixed = fzero.map_params(lambda a, b: a + (b - a) * 0.25, student, teacher(stage))
                mine, theirs = values(made(2)), values(made(1))
                for path, x in fzero.full_params(mixed).items():
                    wanted = mine[path] + (theirs[path] - mine[path]) * 0.25
                    tol = 1e-6 if name == "in 32 bits" else 1e-14
                    assert torch.allclose(x, wanted, rtol=tol, atol=tol), f"{name}: {path}"
            if not isinstance(student.setup.optimizer, type(no_optimizer())):
                ahead, _ = fzero.grad_and_reduce(
                    lambda p: sum((x**2).sum() / 2 for x in p.values()), student
                )()
                left = fzero.map_params(lambda a, g: a - g, student, ahead.gradients)
                for path, x in fzero.full_params(left).items():
                    learns = next(
                        one.trainable for one in student.setup.layout.leaves if one.path == path
                    )
                    assert torch.allclose(x, values(made(2))[path] * (not learns)), path

    run_ranks(body, world_size)


def test_integers_and_encoded_leaves_stay_and_other_leaves_are_named() -> None:
    table = {"w": torch.ones(3), "at": torch.arange(3)}
    state = fzero.init(table, sgd(0.1), stage=2)
    assert fzero.full_params(fzero.map_params(lambda a: a * 2, state))["at"].tolist() == [0, 1, 2]
    other = fzero.init({"w": torch.ones(4), "at": torch.arange(3)}, no_optimizer(), stage=2)
    with pytest.raises(LayoutError, match=r"w is \(3,\) in the state, \(4,\) in the other one"):
        fzero.map_params(torch.add, state, other)
