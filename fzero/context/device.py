"""The accelerator of this process, whatever its type: torch has one beside the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def accelerator() -> str | None:
    """Return the type of the accelerator that can be used here, such as "cuda"; None without."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None else found.type


def accelerator_in_use() -> str | None:
    """Return the type of the accelerator if this process has used it; None: it has not.

    To ask an accelerator for its random state, or to wait for it, makes a context on it.
    """
    kind = accelerator()
    if kind is None:
        return None
    began = getattr(torch.get_device_module(kind), "is_initialized", lambda: True)
    return kind if began() else None


def generators_on(kind: str) -> Sequence[torch.Generator]:
    """Return the default generators of the devices of a type, by index; none before its use."""
    return getattr(torch.get_device_module(kind), "default_generators", ())


def current_device(kind: str) -> torch.device:
    """Return the device of a type that this process computes on."""
    return torch.device(kind, torch.accelerator.current_device_index())


def is_device_type(name: str) -> bool:
    """Whether this torch knows devices of this type, whether there is one or not."""
    try:
        return torch.device(name).type == name
    except RuntimeError:
        return False
