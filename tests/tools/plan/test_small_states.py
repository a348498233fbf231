"""A base in 4 bits, adapters and 8-bit moments: the numbers of the picture are those of a plan."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero

PAGE = Path(__file__).parents[3] / "docs" / "pictures.md"


class Adapted(nn.Linear):
    """A linear layer with an adapter of rank 16, in fp32."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False, dtype=torch.bfloat16)
        self.a = nn.Parameter(torch.empty(16, inputs))
        self.b = nn.Parameter(torch.empty(outputs, 16))


class Llama(nn.Module):
    """The parameters of Llama 2 7B; of them only adapters learn, and are read."""

    def __init__(self, d: int = 4096, h: int = 11008, vocabulary: int = 32000) -> None:
        super().__init__()
        low: Any = {"dtype": torch.bfloat16}
        sizes = [(d, d)] * 4 + [(d, h), (d, h), (h, d)]
        self.layers = nn.ModuleList(
            nn.ModuleList(
                [*(Adapted(*size) for size in sizes), nn.RMSNorm(d, **low), nn.RMSNorm(d, **low)]
            )
            for _ in range(32)
        )
        head = nn.Linear(d, vocabulary, bias=False, **low)
        self.ends = nn.ModuleList([nn.Embedding(vocabulary, d, **low), nn.RMSNorm(d, **low), head])
        for p in self.parameters():
            p.requires_grad_(p.dtype == torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        """What a rank keeps does not depend on what is computed."""
        learns = [p.sum() for p in self.parameters() if p.requires_grad]
        return torch.stack(learns).sum() * x


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_the_bars_of_the_picture_are_what_a_plan_says(ranks: int) -> None:
    found = re.search(r"^kept = (\{.*?^\})", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    with torch.device("meta"):
        model = Llama()
    assert sum(p.numel() for p in model.parameters() if not p.requires_grad) == 6_738_415_616
    plan = fzero.plan(
        model,
        torch.empty((), device="meta"),
        world=ranks,
        stage=3,
        optimizer=fzero.optim.adamw(1e-4, state_dtype=fzero.codecs.dynamic8()),
        frozen=fzero.codecs.nf4(),
    )
    wanted = ast.literal_eval(found[1])[ranks]
    assert {kind: plan.bytes[kind] for kind in wanted} == wanted
