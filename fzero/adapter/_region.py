"""What the forward of an engine's module runs in: torch.autocast, and no cache of its casts."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fzero.context.modes import computed_in, other_autocast
from fzero.transforms.autocast import around_message


class Region:
    """Entered before each forward of the module, and left after that forward.

    Hooks do it, so module(x) does the same as engine(x). It is entered again where a checkpoint
    recomputes a forward in backward.

    dtype: of autocast; None: as autocast is around the forward.
    """

    def __init__(self, dtype: torch.dtype | None, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._warned = False

    @contextmanager
    def entered(self, *, outermost: bool) -> Iterator[None]:
        """Run the block in it. Warns once if another autocast is around the `outermost`."""
        if outermost and self._dtype is not None and not self._warned:
            other = other_autocast(self._dtype, self._device)
            if other is not None:
                self._warned = True
                warnings.warn(around_message(self._dtype, other), UserWarning, stacklevel=2)
        with computed_in(self._dtype, self._device):
            yield
