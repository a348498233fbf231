"""An option of an optimizer as text that ranks compare: alike on every rank, no address."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fzero.optim.recorded import lacks_value

_FEW = 64  # elements of a tensor whose values are shown


def shown(value: Any) -> str:
    """Return the text of an option; of an object or a function only its name.

    A number on a device is read from there: the host waits.

    Example:
        >>> shown([0.5, torch.tensor(2.0)])
        '(0.5, tensor(2.0))'
    """
    if isinstance(value, bool | int | float | str | complex | None | torch.dtype):
        return repr(value)
    if isinstance(value, Tensor):
        read = not (value.is_meta or lacks_value(value)) and value.numel() <= _FEW
        return f"tensor({value.tolist()})" if read else f"tensor of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {shown(x)}' for key, x in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"({', '.join(map(shown, value))})"
    return getattr(value, "__qualname__", type(value).__qualname__)
