"""torch's modes that belong to a thread: taken where a call is made, entered where it runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch


class AutocastModes(NamedTuple):
    """For each kind of device: its name, whether autocast is on, and its dtype."""

    modes: tuple[tuple[str, bool, torch.dtype], ...]

    @staticmethod
    def take() -> AutocastModes:
        """As it is in this thread."""
        kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
        return AutocastModes(
            tuple((k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds)
        )

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Enter these modes until the block ends. The cache of casts stays as it is here."""
        cache = torch.is_autocast_cache_enabled()
        with ExitStack() as stack:
            for kind, enabled, dtype in self.modes:
                mode = torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cache)
                stack.enter_context(mode)
            yield


@contextmanager
def computed_in(dtype: torch.dtype | None, device: torch.device) -> Iterator[None]:
    """Run the block under torch.autocast(dtype), whatever is around it; None changes nothing.

    This thread's cache of casts is used as it was.
    """
    if dtype is None:
        yield
        return
    cache = torch.is_autocast_cache_enabled()
    with torch.autocast(device.type, dtype=dtype, cache_enabled=cache):
        yield


def other_autocast(dtype: torch.dtype, device: torch.device) -> torch.dtype | None:
    """Return the dtype of an autocast that is on and has another one; None if there is none."""
    there = torch.get_autocast_dtype(device.type)
    return there if torch.is_autocast_enabled(device.type) and there is not dtype else None


class Ambient(NamedTuple):
    """Modes of one thread: gradients, inference, the default device, autocast."""

    grad: bool
    inference: bool
    device: torch.device
    autocast: AutocastModes

    @staticmethod
    def take() -> Ambient:
        """The modes of this thread."""
        return Ambient(
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            device=torch.get_default_device(),
            autocast=AutocastModes.take(),
        )

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Enter these modes until the block ends, with autocast's cache of casts switched off.

        Autocast holds a lock of the process while it fills it, and a cast may wait for a rank.
        """
        with ExitStack() as stack:
            if self.inference:
                stack.enter_context(torch.inference_mode())
            if self.device != torch.get_default_device():
                stack.enter_context(torch.device(self.device))
            stack.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
            torch.set_autocast_cache_enabled(False)
            stack.enter_context(self.autocast.entered())
            stack.enter_context(torch.set_grad_enabled(self.grad))
            yield
