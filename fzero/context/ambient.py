"""torch's thread-local modes: captured where a call is made, entered in the thread that runs it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch


@functools.cache
def kinds_of_autocast() -> tuple[str, ...]:
    """The kinds of devices that autocast may be on for."""
    return ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)


@contextmanager
def without_cast_cache() -> Iterator[None]:
    """Let every use of a parameter in the block have a cast of its own under autocast.

    With the cache, the gradients of all uses are added up in the lower dtype, before one cast back.
    It has only leaves that are no views, so that gradients would depend on the stage and the
    driver; and it is one for the process, under a lock, while a cast may wait for another rank.
    """
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


class AutocastModes(NamedTuple):
    """For each kind of device: its name, whether autocast is on, and its dtype."""

    modes: tuple[tuple[str, bool, torch.dtype], ...]

    @staticmethod
    def take() -> AutocastModes:
        """As it is in this thread."""
        kinds = kinds_of_autocast()
        found = ((k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds)
        return AutocastModes(tuple(found))

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Enter these modes until the block ends, without autocast's cache of casts."""
        with ExitStack() as stack:
            stack.enter_context(without_cast_cache())
            for kind, enabled, dtype in self.modes:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            yield


@contextmanager
def computed_in(dtype: torch.dtype | None, device: torch.device) -> Iterator[None]:
    """Run the block under torch.autocast(dtype), whatever is around it; None changes nothing.

    In both cases autocast has no cache of casts in the block.
    """
    with without_cast_cache():
        if dtype is None:
            yield
        else:
            with torch.autocast(device.type, dtype=dtype):
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
        """Enter these modes until the block ends."""
        with ExitStack() as stack:
            if self.inference:
                stack.enter_context(torch.inference_mode())
            if self.device != torch.get_default_device():
                stack.enter_context(torch.device(self.device))
            stack.enter_context(self.autocast.entered())
            stack.enter_context(torch.set_grad_enabled(self.grad))
            yield
