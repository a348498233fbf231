"""fp32 masters of 16-bit flats: which flats have one, what is stepped, and the copy back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fzero.state.buffers import SIXTEEN_BIT


def stepped_dtype(dtype: torch.dtype, *, masters: bool) -> torch.dtype:
    """Return the dtype in which parameters of `dtype` are stepped."""
    return torch.float32 if masters and dtype in SIXTEEN_BIT else dtype


def make_masters(flats: Sequence[Tensor], wanted: Sequence[bool]) -> tuple[Tensor, ...]:
    """Return an fp32 copy of each 16-bit flat where it is wanted; of the others, empty."""
    return tuple(
        p.detach().float() if want and p.dtype in SIXTEEN_BIT else p.new_empty(0)
        for p, want in zip(flats, wanted, strict=True)
    )


def work_tensors(flats: Sequence[Tensor], masters: Sequence[Tensor]) -> list[Tensor]:
    """Return what the rule steps: the master of each flat that has one, else the flat itself."""
    return [m if m.numel() else p for p, m in zip(flats, masters, strict=True)]


def copy_back(flats: Sequence[Tensor], masters: Sequence[Tensor]) -> None:
    """Round each master into its flat, in place."""
    for p, m in zip(flats, masters, strict=True):
        if m.numel():
            p.copy_(m)
