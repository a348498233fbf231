"""Which parameters are computed with, and cross ranks, in a lower precision under autocast."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fzero.errors import LayoutError
from fzero.errors.check import require
from fzero.state.buffers import SIXTEEN_BIT
from fzero.state.layout import learns
from fzero.state.leaf_modules import class_name

SafeModules = Sequence[type[nn.Module] | str] | Callable[[str], bool]
"""Classes of modules, also by qualified name; or path of a parameter -> whether it is safe."""

SAFE_CLASSES = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Modules whose operators torch.autocast runs in the lower precision, weights and all."""

Owners = Sequence[tuple[str, ...]]
"""Of each module that owns a parameter: the names of its class and of those above it."""

_OWNERS = "fzero_owners"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Autocast:
    """Operators follow torch.autocast; what only safe modules use crosses ranks in `dtype`.

    Attributes:
        dtype: torch.bfloat16, torch.float16, or torch.float32 for no autocast.
        lower_precision_safe_modules: classes of modules (also by qualified name, "torch.nn.Linear"
            or "torch.nn.modules.linear.Linear"), subclasses included; or path -> whether the
            parameter is safe. None: Linear, Conv1d, Conv2d and Conv3d.

    Raises `LayoutError` for another dtype, or what names no modules.
    """

    dtype: torch.dtype = torch.bfloat16
    lower_precision_safe_modules: SafeModules | None = None

    def __post_init__(self) -> None:
        """Check it."""
        require(
            "autocast: dtype",
            self.dtype,
            lambda x: x in (*SIXTEEN_BIT, torch.float32),
            "torch.bfloat16 or torch.float16; torch.float32 switches it off",
            cause="a dtype that torch.autocast has no policy for, or its name.",
        )
        require(
            "autocast: lower_precision_safe_modules",
            self.lower_precision_safe_modules,
            _names_modules,
            "classes, [nn.Linear, 'my.package.Projection'], or a function of a parameter's path",
            cause="one class instead of a list of them, or modules instead of classes.",
        )

    @property
    def computes(self) -> torch.dtype | None:
        """The lower dtype in which losses are computed; None if autocast is switched off."""
        return None if self.dtype is torch.float32 else self.dtype

    def communication_dtype(self, path: str, p: Tensor, owners: Owners) -> torch.dtype | None:
        """Return `dtype` for a parameter that only safe modules own; None for its own dtype.

        Raises `LayoutError` for a 16-bit parameter that learns.
        """
        if self.computes is None:
            return None
        if p.dtype in SIXTEEN_BIT and learns(p):
            raise sixteen_bit_error(path, p.dtype)
        safe = self.lower_precision_safe_modules
        if callable(safe):
            chosen = safe(path)
        else:
            names = {_qualified(one) for one in (SAFE_CLASSES if safe is None else safe)}
            chosen = bool(owners) and all(names.intersection(classes) for classes in owners)
        return self.dtype if chosen and p.dtype is torch.float32 else None

    def __repr__(self) -> str:
        """As ranks compare it: no address of a function."""
        safe = self.lower_precision_safe_modules
        if callable(safe):
            shown = getattr(safe, "__qualname__", type(safe).__name__)
        else:
            shown = "default" if safe is None else sorted(map(_qualified, safe))
        return f"autocast({self.dtype}, {shown})"


def sixteen_bit_error(path: str, dtype: torch.dtype) -> LayoutError:
    """Return the error for a parameter in 16 bits that learns under autocast."""
    return LayoutError(
        f"{path} is {dtype}, and autocast wants fp32 parameters.",
        cause="a model in 16 bits (module.half(), module.bfloat16()) under autocast.",
        fix="leave one of them out: keep the model in fp32, or leave out autocast.",
    )


def as_autocast(given: Any) -> Autocast | None:
    """Return the record of a dtype or a record; None for None."""
    if given is None or isinstance(given, Autocast):
        return given
    return Autocast(dtype=given)


def owners_in(module: nn.Module) -> dict[str, Owners]:
    """Return who owns each parameter of a module, by every path that it has.

    Example:
        >>> [one[0] for one in owners_in(nn.Sequential(nn.Linear(1, 1)))["0.bias"]]
        ['torch.nn.modules.linear.Linear']
    """
    found: dict[int, list[tuple[str, ...]]] = {}
    for part in module.modules():
        classes = tuple(name for cls in type(part).__mro__ for name in _names(cls))
        for p in part.parameters(recurse=False):
            found.setdefault(id(p), []).append(classes)
    named = module.named_parameters(remove_duplicate=False)
    return {path: tuple(found[id(p)]) for path, p in named}


def remember_owners(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Note on each of `tensors`, which stand for parameters of `module`, who owns it."""
    owners = owners_in(module)
    for path, tensor in tensors.items():
        note_owners(tensor, owners[path])


def note_owners(tensor: Tensor, owners: Owners) -> None:
    """Note on a tensor who owns the parameter that it stands for."""
    vars(tensor)[_OWNERS] = owners


def owners_of(tensor: Tensor) -> Owners:
    """Return what `note_owners` has noted; nothing of any other tensor."""
    return vars(tensor).get(_OWNERS, ())


def _names(cls: type) -> tuple[str, ...]:
    """Its qualified name; of torch's own classes also the public one."""
    name = class_name(cls)
    public = (f"torch.nn.{cls.__name__}",) if name.startswith("torch.nn.modules.") else ()
    return (name, *public)


def _qualified(one: type | str) -> str:
    return one if isinstance(one, str) else class_name(one)


def _names_modules(safe: Any) -> bool:
    if isinstance(safe, list | tuple):
        several: list[Any] = [*safe]
        classes = [one for one in several if not isinstance(one, str)]
        return all(isinstance(one, type) and issubclass(one, nn.Module) for one in classes)
    return safe is None or (callable(safe) and not isinstance(safe, type))
