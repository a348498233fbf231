"""Every codec of fzero, and one as users write them: what laws of codecs are tried with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fzero import codecs
from fzero.machine.codecs import Codec


@dataclass(frozen=True)
class Signs(Codec):
    """One bit for each element, and their mean size in fp32."""

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        missing = -x.shape[-1] % 8
        bits = F.pad((x >= 0).to(torch.uint8), (0, missing)).unflatten(-1, (-1, 8))
        places = 2 ** torch.arange(8, device=x.device)
        return x.abs().mean(-1, keepdim=True).float(), (bits * places).sum(-1).to(torch.uint8)

    def decode(self, parts: tuple[Tensor, ...], numel: int, dtype: torch.dtype) -> Tensor:
        mean, packed = parts
        bits = (packed.unsqueeze(-1) >> torch.arange(8, device=packed.device)) & 1
        return (bits.flatten(-2)[..., :numel].to(dtype) * 2 - 1) * mean

    def wire_bytes(self, numel: int) -> int:
        return 4 + -(-numel // 8)

    def bound(self, x: Tensor) -> Tensor:
        return x.abs() + x.abs().mean(-1, keepdim=True) * (1 + 2.0**-20)


@dataclass(frozen=True)
class Halved(Codec):
    """A linear one: sums of neighbours. What it loses is their differences."""

    linear: ClassVar[bool] = True

    def encode(self, x: Tensor) -> tuple[Tensor]:
        return (F.pad(x, (0, x.shape[-1] % 2)).unflatten(-1, (-1, 2)).sum(-1),)

    def decode(self, parts: tuple[Tensor, ...], numel: int, dtype: torch.dtype) -> Tensor:
        return (parts[0].to(dtype) / 2).repeat_interleave(2, -1)[..., :numel]

    def wire_bytes(self, numel: int) -> int:
        return 4 * -(-numel // 2)

    def bound(self, x: Tensor) -> Tensor:
        pairs = F.pad(x.abs(), (0, x.shape[-1] % 2)).unflatten(-1, (-1, 2))
        return pairs.sum(-1).repeat_interleave(2, -1)[..., : x.shape[-1]] * (1 + 2.0**-20)


REMEMBERING = (
    codecs.int8(),
    codecs.int8(block=32),
    codecs.int4(),
    codecs.fp8(),
    Signs(memory=True),
    Halved(memory=True),
)
FORGETTING = (
    codecs.bf16(),
    codecs.stochastic(),
    codecs.int8(memory=False),
    codecs.nf4(),
    codecs.nf4(block=6, double=False),
    codecs.dynamic8(block=32),
    Signs(),
)
POWER = codecs.powersgd(rank=2)
"""It encodes matrices, and whole groups of them: where it goes is its own."""
EVERY = (*REMEMBERING, *FORGETTING, codecs.cast(torch.float16))
each_codec = pytest.mark.parametrize("codec", EVERY, ids=str)
