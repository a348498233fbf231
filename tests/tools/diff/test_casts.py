"""In the pass in float64 casts to other floats do nothing, so that small faults are found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fzero
from fzero.tools.diff import GradientDifference
from tests.tools.diff.runs import run_of_loss

Cast = Callable[[Tensor], Tensor]

CASTS: dict[str, Cast] = {
    "float": lambda x: x.float(),
    "to": lambda x: x.to(torch.float32),
    "to a device and a dtype": lambda x: x.to("cpu", torch.float32),
    "to a keyword": lambda x: x.to(dtype=torch.float32),
    "to another tensor": lambda x: x.to(torch.ones(1, dtype=torch.float32)),
    "type": lambda x: x.type(torch.float32),
    "type as": lambda x: x.type_as(torch.ones(1, dtype=torch.float32)),
    "half and back": lambda x: x.bfloat16().float(),
    "softmax": lambda x: F.log_softmax(x, -1, dtype=torch.float32),
    "recomputed": lambda x: checkpoint(lambda y: y.float().sin(), x, use_reentrant=False),
    "a table of fp32": lambda x: x.float() @ TABLE,
}
TABLE = torch.eye(5) + 0.1


def loss_of(cast: Cast, smoothing: float = 0.0, eps: float = 1e-6) -> Any:
    def loss(p: Any, x: Tensor) -> Tensor:
        h = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
        logits = cast(h.type_as(x) @ p["w"])
        y = x.argmax(-1)  # of each row, on whatever rank it is
        return F.cross_entropy(logits, y, label_smoothing=smoothing)

    return loss


@pytest.mark.parametrize("name", CASTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_small_fault_is_found_behind_a_cast(name: str, dtype: torch.dtype) -> None:
    cast = CASTS[name]
    a, same = (run_of_loss(loss_of(cast), *at, dtype=dtype) for at in ((0, 1), (3, 2)))
    for other in (loss_of(cast, smoothing=1e-6), loss_of(cast, eps=1.0001e-6)):
        found = fzero.diff(a, run_of_loss(other, 3, 2, dtype=dtype))
        assert found is not None and found.operation == "loss", found
        assert found.compared_in is torch.float64
    if dtype is torch.float32:
        assert fzero.diff(a, same) is None


def test_a_cast_in_one_run_is_found_as_the_runs_are() -> None:
    a = run_of_loss(loss_of(CASTS["float"]), 0, 1)
    found = fzero.diff(a, run_of_loss(loss_of(CASTS["half and back"]), 3, 2))
    assert found is not None and found.compared_in is torch.float32


def test_bits_and_integers_are_left_alone() -> None:
    def loss(p: Any, x: Tensor) -> Tensor:
        bits = torch.ones(2, dtype=torch.float32).view(torch.int32).sum() - 2 * 1065353216
        whole = (x * 3).to(torch.int32).to(torch.float32)
        return ((x + bits + whole) @ p["w"]).square().mean()

    found = fzero.diff(run_of_loss(loss, 0, 1), run_of_loss(loss, 2, 2))
    assert found is None


class Chain(nn.Module):
    """Linears, with a factor on what the backward hands on between the second and the third."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x).tanh()
            if i == 1:
                x = self.factor * x + (1 - self.factor) * x.detach()
        return x.square().mean()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_first_wrong_gradient_is_that_of_the_backward(stage: int) -> None:
    runs = []
    for factor, at in ((1.0, (0, 1)), (1.01, (stage, 2))):
        apply, params = fzero.functionalize(Chain(factor))
        runs.append(run_of_loss(apply, *at, params=params, width=4))
    found = fzero.diff(*runs)
    assert isinstance(found, GradientDifference)
    assert found.path.startswith("layers.1.") and found.operation == "gradient"
    assert {*found.agree} == {f"layers.{i}.{x}" for i in (2, 3) for x in ("weight", "bias")}
    assert {*found.differ} == {f"layers.{i}.{x}" for i in (0, 1) for x in ("weight", "bias")}
    assert {*found.differ[:2]} == {"layers.1.weight", "layers.1.bias"}
    assert "agree; those by" in str(found)
