"""torch's default generators: set by a seed while a block runs, and put back afterwards.

Those of Python and of NumPy are the user's.
"""

from __future__ import annotations

import ctypes
import random
import struct
from collections.abc import Generator
from contextlib import contextmanager

import torch

_WORDS = struct.Struct("=624Q")  # the Mersenne Twister's 32-bit words, in 8 bytes each
_FIRST_WORD = 24  # bytes; before them: the seed, how many words are left, whether it was seeded


def of_devices(device: torch.device | None = None) -> list[torch.Generator]:
    """Return the default generators of the CPU and of a device; without one, of all devices.

    Before CUDA is in use its devices have no generators.
    """
    on_cuda: tuple[torch.Generator, ...] = torch.cuda.default_generators
    if device is None:
        return [torch.default_generator, *on_cuda]
    if device.type != "cuda" or not on_cuda:
        return [torch.default_generator]
    index = torch.cuda.current_device() if device.index is None else device.index
    return [torch.default_generator, on_cuda[index]]


@contextmanager
def seeded(seed: int, device: torch.device) -> Generator[None, None, None]:
    """Set the generators of the CPU and of `device` by a seed; put them back when the block ends.

    The generator of the CPU is a Mersenne Twister, of which `torch.manual_seed` sets one of 2**32
    states. Here it depends on all bits of the seed, as `random.Random(seed)` does: it draws the
    numbers of that one.
    """
    generators = of_devices(device)
    before = [generator.get_state() for generator in generators]
    try:
        for generator in generators:
            generator.manual_seed(seed)
        _set_twister(torch.default_generator, seed)
        yield
    finally:
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)


def _set_twister(generator: torch.Generator, seed: int) -> None:
    """Write the words into the state's memory: no operator runs, so no mode of torch sees it."""
    state = generator.get_state()
    words = _WORDS.pack(*random.Random(seed).getstate()[1][:-1])
    ctypes.memmove(state.data_ptr() + _FIRST_WORD, words, _WORDS.size)
    generator.set_state(state)
