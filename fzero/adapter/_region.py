"""The forward of an engine's module runs under torch.autocast."""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from fzero.adapter._events import ModuleHook
from fzero.context.ambient import computed_in, other_autocast
from fzero.transforms.autocast import around_message


class Region:
    """Enters autocast before each forward of the module, and leaves it after that forward.

    Hooks do it, so module(x) does the same as engine(x). It is entered again where a checkpoint
    recomputes a forward in backward.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._entered: list[ExitStack] = []
        self._warned = False
        self._handles = [
            module.register_forward_pre_hook(ModuleHook(self._enter), prepend=True),
            module.register_forward_hook(ModuleHook(self._leave), always_call=True),
        ]

    def remove(self) -> None:
        """Take the hooks off."""
        self.abandon()
        for handle in self._handles:
            handle.remove()

    def abandon(self) -> None:
        """Leave what an interrupted forward has entered."""
        while self._entered:
            self._leave()

    def _enter(self, *_: Any) -> None:
        other = None if self._entered else other_autocast(self._dtype, self._device)
        if other is not None and not self._warned:
            self._warned = True
            warnings.warn(around_message(self._dtype, other), UserWarning, stacklevel=2)
        entered = ExitStack()
        entered.enter_context(computed_in(self._dtype, self._device))
        self._entered.append(entered)

    def _leave(self, *_: Any) -> None:
        if self._entered:  # else the forward raised, and was abandoned before this hook
            self._entered.pop().close()
