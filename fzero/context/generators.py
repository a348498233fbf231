"""torch's default generators: set by a seed while a block runs, and put back afterwards.

Those of Python and of NumPy are the user's.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager

import torch


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
def kept(generators: Sequence[torch.Generator]) -> Generator[None, None, None]:
    """Put generators back to their states when the block ends."""
    before = [(generator, generator.get_state()) for generator in generators]
    try:
        yield
    finally:
        for generator, state in before:
            generator.set_state(state)


@contextmanager
def at_states(
    states: Sequence[tuple[torch.Generator, torch.Tensor]],
) -> Generator[None, None, None]:
    """Set generators to states; put them back when the block ends."""
    with kept([generator for generator, _ in states]):
        for generator, state in states:
            generator.set_state(state)
        yield


@contextmanager
def seeded(seed: int, device: torch.device) -> Generator[None, None, None]:
    """Set the generators of the CPU and of `device` by a seed; put them back when the block ends.

    That of the CPU looks at the lower 32 bits of a seed, as `torch.manual_seed` has it.
    """
    generators = of_devices(device)
    with kept(generators):
        for generator in generators:
            generator.manual_seed(seed)
        yield
