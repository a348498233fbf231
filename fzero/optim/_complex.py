"""Complex parameters are stepped by their real views, as torch.optim steps them; or refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from fzero.errors import LayoutError
from fzero.optim._kept import early_of_group
from fzero.optim._small import numbers_of, rule_of, same_random_numbers
from fzero.optim._torch import TorchOptimizer
from fzero.optim._usable import has_steps, known_needs
from fzero.state.layout import Leaf, as_real, learns


def require_real_views(optimizer: Any, named: Mapping[str, Tensor]) -> None:
    """Raise `LayoutError` if a rule would not step complex parameters by their real views.

    torch.optim's rules for single elements do: they take each part of a complex number for an
    element (`torch.view_as_real`). What a rule for matrices, or one that squares complex numbers,
    does to them is another thing. Rules of `fzero.optim` and foreign (init, update) pairs are
    given real views, whatever they would do to complex numbers.

    Args:
        optimizer: of any kind that `as_optimizer` gives, bound to its parameters.
        named: {path: tensor}.

    Raises:
        LayoutError: naming the parameter, for a rule that does something else.

    Example:
        >>> from fzero.optim import from_torch
        >>> named = {"w": torch.ones(2, 3, dtype=torch.complex64)}
        >>> require_real_views(from_torch(torch.optim.AdamW).bind(named), named)
        >>> require_real_views(from_torch(torch.optim.Adafactor).bind(named), named)
        Traceback (most recent call last):
        fzero.errors.LayoutError: w is complex, and from_torch(Adafactor) needs whole ...
    """
    for path, p in named.items():
        group = optimizer.group_of(path) if p.is_complex() and learns(p) else -1
        if group < 0:
            continue
        if optimizer.needs_whole(path):
            raise _refused(optimizer, path, "needs whole parameters in their own shape")
        known = not isinstance(optimizer, TorchOptimizer) or known_needs(type(optimizer.instance))
        if not known and (seen := _otherwise(optimizer, group, p.device)) is not None:
            raise _refused(optimizer, path, seen)


def require_ordered(name: str, leaves: Iterable[Leaf]) -> None:
    """Raise `LayoutError` where elements of gradients are to be bounded, and one is complex.

    Args:
        name: of the option or call that bounds them.
        leaves: of a state.

    Raises:
        LayoutError: naming the first complex leaf that learns.

    Example:
        >>> leaf = Leaf(path="w", shape=(2,), dtype=torch.complex64, trainable=True)
        >>> require_ordered("clip", [leaf])
        Traceback (most recent call last):
        fzero.errors.LayoutError: clip with the complex parameter w. ...
    """
    for leaf in leaves:
        if leaf.trainable and leaf.dtype.is_complex:
            raise LayoutError(
                f"{name} with the complex parameter {leaf.path}.",
                cause="complex numbers have no order; torch does not clamp them, either.",
                fix="bound the norm (max_norm, clip_grad_norm_); or make the parameter real, "
                "[*, 2], and use torch.view_as_complex(p) in the forward.",
            )


def _otherwise(optimizer: TorchOptimizer, group: int, device: torch.device) -> str | None:
    """What a rule does to complex parameters that it does not to their real views."""
    here = torch.device("cpu") if device.type == "meta" else device
    early = early_of_group(optimizer.instance, group, used=has_steps(optimizer.instance))
    rule = rule_of(optimizer.instance, group, early)
    x, *gs = (size * numbers_of((6, 2), k).to(here) for k, size in enumerate((1.0, 1.0, 8.0, 0.1)))
    try:
        with same_random_numbers(here):
            (by_parts,), _ = rule([x], [[g] for g in gs])
        with same_random_numbers(here):
            (whole,), _ = rule([torch.view_as_complex(x)], [[torch.view_as_complex(g)] for g in gs])
    except Exception as error:
        return f"raises for a complex parameter: {str(error).splitlines()[0]!r}"
    same = torch.allclose(as_real(whole), by_parts, rtol=1e-6, atol=1e-9, equal_nan=True)
    return None if same else "makes another update of a complex parameter than of its real view"


def _refused(optimizer: Any, path: str, seen: str) -> LayoutError:
    return LayoutError(
        f"{path} is complex, and {optimizer!r} {seen}.",
        cause="a rule for matrices (Muon, Shampoo), with a norm (LAMB), that squares complex "
        "numbers, or that torch refuses for them (Adafactor).",
        fix="use an elementwise rule of torch.optim or fzero.optim (SGD, Adam, AdamW, ...); or "
        "make the parameter real, [*, 2], and use torch.view_as_complex(p) in the forward.",
    )
