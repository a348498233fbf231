"""|g| over all ranks, and the factor that clips by it: for the update here, and the adapter's."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from fzero.collectives import reduce_many
from fzero.homes import lent
from fzero.mesh import Axis


def norm_of(
    flats: Iterable[Tensor],
    axis: Axis,
    *,
    ordered: bool,
    device: torch.device | None = None,
) -> Tensor:
    """Return the 2-norm of `flats`, of which each rank of `axis` holds a part: [], on `device`."""
    squares = [_square_sum(flat, device) for flat in flats if flat.numel()]
    total = torch.stack(squares).sum() if squares else torch.zeros((), device=device)
    return reduce_many([total], axis, ordered=ordered)[0].sqrt()


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """min(1, max_norm / |g|): the factor that torch.nn.utils.clip_grad_norm_ uses."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def _square_sum(flat: Tensor, device: torch.device | None) -> Tensor:
    wide = torch.promote_types(flat.dtype, torch.float32)
    here = lent(flat, device or flat.device)
    return torch.linalg.vector_norm(here, dtype=wide).square()
