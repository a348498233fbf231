"""Parameters that are several matrices: a stack of experts [E, out, in] is E of them.

dims       batch_dims     matrices
0 to 2     any            it is a vector, or one matrix
3, more    0              one: [first dim, all others], as of a convolution
3, more    b              prod(first b dims), each [next dim, all others]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

from torch import Tensor

from fzero.errors import LayoutError
from fzero.errors.check import is_count, require
from fzero.state.layout import learns

Asks = Callable[[str], tuple[str, int | None] | None]
"""path -> (who takes matrices, its `batch_dims`); None for who takes elements."""

_CONVOLUTION = "torch.nn.modules.conv._ConvNd"


def check_batch_dims(name: str, batch_dims: int | None) -> None:
    """Raise `LayoutError` for what is no number of dims."""
    good = batch_dims is None or is_count(batch_dims, 0)
    require(f"{name}: batch_dims", batch_dims, lambda _: good, "an int of 0 or more, or None")


def in_matrices(shape: tuple[int, ...], batch_dims: int | None) -> tuple[int, tuple[int, ...]]:
    """Return how many matrices a parameter of this shape is, and the shape of each.

    Example:
        >>> in_matrices((8, 4, 3), 1), in_matrices((8, 4, 3), 0), in_matrices((4, 3), 1)
        ((8, (4, 3)), (1, (8, 4, 3)), (1, (4, 3)))
    """
    lead = batch_dims if batch_dims is not None and len(shape) > 2 else 0
    return prod(shape[:lead]), shape[lead:]


def require_matrices(params: Mapping[str, Tensor], owners: Mapping[str, Any], asks: Asks) -> None:
    """Raise `LayoutError` for what learns and may be one matrix or several: nobody has said it.

    owners: of each path, the names of the classes of the modules that have it.
    """
    for path, p in params.items():
        matrices = asks(path) if p.ndim > 2 and learns(p) else None
        if matrices is None:
            continue
        name, batch_dims = matrices
        convolved = owners.get(path) and all(_CONVOLUTION in some for some in owners[path])
        if (batch_dims is None and not convolved) or (batch_dims or 0) > p.ndim - 2:
            raise LayoutError(
                f"{name}: {path} has the shape {tuple(p.shape)}; batch_dims={batch_dims}.",
                cause="a stack of matrices, such as experts [E, out, in], which would be taken for "
                "one matrix, [E, out in]; or a convolution that is not a module of torch.nn.",
                fix="give batch_dims=1 for a stack, of which each matrix is then one by itself; "
                "batch_dims=0 for one matrix, [first dim, all others]. Where a model has both, "
                "fzero.optim.partition gives each a rule.",
            )
