"""What a family of models is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model, its loss, and batches of any size; all of it made from a seed."""

    make: Callable[[], nn.Module]
    loss: Callable[[Any, Any], Tensor]  # (what is called as the module is, a batch): a mean
    batch: Callable[[torch.Generator, int], Any]  # tensors [n, *t]

    def model(self, seed: int = 0, train: bool = False) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.make().train(train)

    def examples(self, number: int, count: int = 2) -> Any:
        return self.batch(torch.Generator().manual_seed(number), count)
