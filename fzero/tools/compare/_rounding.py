"""Bounds of rounding: the model that `certify` and `diff` share.

A sum of n terms in any order is the exact sum of terms that are each changed by at most (n - 1) u
of themselves (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 4.2). So:

    over ranks and micro-batches    the terms are known: (n + 4) u sum(|terms|)
    inside of a loss                the terms are not known: it is computed a second time with every
                                    parameter and every input changed by 4 u of itself, up or down;
                                    4 times the largest change of a leaf's numbers that this makes
    inside of an update             the same, element by element, with every gradient and slot
                                    changed in four combinations of up and down

u is the spacing of numbers at 1 in the coarsest dtype that a number passes through, and not below
2^-44, so that sums of thousands of terms inside of a loss are covered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import optree
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fzero.state import NAMESPACE

SMALLEST_UNIT = 2.0**-44
DISTURBANCE = 4.0  # units by which parameters, inputs and gradients are changed
MARGIN = 4.0  # times what that makes of a number
TERMS = 4  # roundings of one number beside its sum: casts, divisions

CORNERS = ((1, 1), (1, -1), (-1, 1), (-1, -1))  # signs with which gradients and slots are changed


def shift(a: Tensor, twin: Tensor) -> Tensor:
    """Return |twin - a|: by how much the perturbation changed each element."""
    return (a.double() - twin.double()).abs().nan_to_num(0.0, posinf=0.0)


def disturbed_bound(a: Tensor, twin: Tensor) -> float:
    """Return the bound of a leaf: the margin times its largest change by the perturbation."""
    off = shift(a, twin)
    return MARGIN * float(off.max()) if off.numel() else 0.0


def of_terms(sizes: Tensor | float, count: int, unit: float) -> Any:
    """Return (n + 4) u sizes, the bound for another order of a sum; `sizes` is sum(|terms|)."""
    return (count + TERMS) * unit * sizes


def signs_like(x: Tensor, source: torch.Generator) -> Tensor:
    """Return +1 or -1 for each element, at random, on the CPU."""
    return torch.randint(0, 2, x.shape, generator=source).double() * 2 - 1


def perturbed(x: Tensor, size: float, signs: Tensor) -> Tensor:
    """Return x (1 + size signs), for a floating tensor."""
    if not x.is_floating_point():
        return x
    return (x.double() * (1 + size * signs.to(x.device))).to(x.dtype)


def disturbed_tree(tree: Any, size: float, seed: int = 0) -> Any:
    """Return a pytree with each element of its floating tensors changed by `size` of itself."""
    source = torch.Generator().manual_seed(seed)

    def of(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        return perturbed(x, size, signs_like(x, source))

    return optree.tree_map(of, tree, namespace=NAMESPACE)


def eps_of(dtype: torch.dtype) -> float:
    """Return the spacing of numbers of a dtype at 1; 0 for integers."""
    return torch.finfo(dtype).eps if dtype.is_floating_point else 0.0


class Coarsest(TorchFunctionMode):
    """Context that records the coarsest floating dtype that functions of torch return.

    of_parameters: look only at what requires grad. Constants are the same in each run.
    """

    def __init__(self, *, of_parameters: bool = False) -> None:
        super().__init__()
        self.of_parameters = of_parameters
        self.dtype = torch.float64

    @property
    def unit(self) -> float:
        """The spacing of numbers at 1 in it."""
        return eps_of(self.dtype)

    def looks(self) -> bool:
        """Whether what is computed now counts."""
        return True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at what a function returns."""
        out = func(*args, **(kwargs or {}))
        if not self.looks():
            return out
        for x in out if isinstance(out, list | tuple) else (out,):
            if isinstance(x, Tensor) and (x.requires_grad or not self.of_parameters):
                self.dtype = coarser(self.dtype, x.dtype)
        return out


def coarser(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    """Return the dtype with the larger eps."""
    return b if eps_of(b) > eps_of(a) else a


def largest(tensors: Sequence[Tensor]) -> float:
    """Return the largest absolute value of any element."""
    return max((float(x.abs().max()) for x in tensors if x.numel()), default=0.0)
