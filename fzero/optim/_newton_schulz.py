"""The orthogonalization of matrices, those of one shape in one batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalized(
    matrices: Sequence[Tensor],
    *,
    coefficients: tuple[float, float, float] = COEFFICIENTS,
    steps: int = 5,
    eps: float = 1e-7,
) -> list[Tensor]:
    """Return U V^T, nearly, of each M = U S V^T [n, m], in its dtype.

    X <- a X + (b X X^T + c (X X^T)^2) X, `steps` times from X = M / |M|: matrices of one shape in
    one batch.

    Source: Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024; the bits
    are those of torch.optim.Muon.

    Example:
        >>> import torch
        >>> (x,) = orthogonalized([torch.diag(torch.tensor([3.0, 2.0]))], steps=9)
        >>> bool((x.diagonal() - 1).abs().max() < 0.4)
        True
    """
    by_shape: dict[torch.Size, list[int]] = {}
    for i, m in enumerate(matrices):
        by_shape.setdefault(m.shape, []).append(i)
    found: dict[int, Tensor] = {}
    for some in by_shape.values():
        stacked = _iterated([matrices[i] for i in some], coefficients, steps, eps)
        found.update(zip(some, stacked.unbind(), strict=True))
    return [found[i] for i in range(len(matrices))]


def _iterated(
    matrices: Sequence[Tensor],
    coefficients: tuple[float, float, float],
    steps: int,
    eps: float,
) -> Tensor:
    a, b, c = coefficients
    tall = matrices[0].shape[0] > matrices[0].shape[1]
    # Each norm by itself: that of a batch is summed in another order.
    norms = torch.stack([(m.mT if tall else m).norm().clamp(min=eps) for m in matrices])
    x = torch.stack(list(matrices))
    x = x.mT if tall else x
    x = x.div_(norms[:, None, None])
    for _ in range(steps):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
