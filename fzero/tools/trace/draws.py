"""Random numbers of a recorded step: which generator each op draws from, and where that stands.

A draw of a recorded step computes nothing, so that a generator would stay as it is. Here every draw
leaves its generator in a state that nobody else has, not even by the same seed: where a later draw
starts from is then read off the generator itself, by whatever way it was put back (`fork_rng`, a
checkpoint, `set_state`).
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from fzero.context.rng import of_devices
from fzero.machine.placeholder import LazyParam

_FIRST = 0x2F5A_31C7 << 32
"""The seed of state 0 while a step is recorded; the numbers count on."""

States = tuple[tuple[torch.Generator, int], ...]
"""Generators, each with the number of its state."""


class Draw(NamedTuple):
    """Which generator an op draws from, and the numbers of its states before and after."""

    generator: torch.Generator
    before: int
    after: int


class Randomness(NamedTuple):
    """The draws of a step in their order, and the states of its generators before and after.

    constants: states that are the same in each call, by number: those of a seed in the step.
    """

    begins: States
    draws: tuple[Draw, ...]
    ends: States
    constants: dict[int, Tensor]

    @property
    def made(self) -> list[torch.Generator]:
        """The generators that the step was not found with: it creates them in each call."""
        found = [generator for generator, _ in self.begins]
        drawn = {id(one.generator): one.generator for one in self.draws}
        return [x for x in drawn.values() if not any(x is y for y in found)]


class RecordedDraws(TorchDispatchMode):
    """Notes what is drawn while a step is recorded; all generators are put back at the end."""

    def __init__(self, held: Iterable[torch.Generator] = ()) -> None:
        super().__init__()
        self._held = [*{id(one): one for one in (*of_devices(), *held)}.values()]
        self._numbers = itertools.count()
        self._draws: list[Draw] = []
        self._constants: dict[int, Tensor] = {}
        self._found: list[tuple[torch.Generator, Tensor]] = []
        self._begins: States = ()
        self.randomness: Randomness | None = None

    def __enter__(self) -> Any:
        self._begins = tuple(map(self._marked, self._held))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        ends = tuple((one, self._state_of(one)) for one in self._held)
        self.randomness = Randomness(self._begins, tuple(self._draws), ends, self._constants)
        for generator, state in self._found:
            generator.set_state(state)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note a draw; the graph has it without its generator."""
        if any(issubclass(kind, LazyParam) for kind in types):
            return NotImplemented  # a placeholder handles it first; the ops it calls come back
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        given = tree_leaves((args, kwargs))
        devices = (x.device for x in given if isinstance(x, Tensor))
        device = torch.device(kwargs.get("device") or next(devices, "cpu"))
        own = (x for x in given if isinstance(x, torch.Generator))
        generator = next(own, None) or of_devices(device)[-1]
        before = self._state_of(generator)
        known, after = self._marked(generator)
        self._draws.append(Draw(known, before, after))
        args, kwargs = tree_map(
            lambda x: None if isinstance(x, torch.Generator) else x, (args, kwargs)
        )
        return func(*args, **kwargs)

    def _state_of(self, generator: torch.Generator) -> int:
        number = generator.initial_seed() - _FIRST
        with torch._C.DisableTorchFunction():  # and no op: modes and transforms are at work
            state = generator.get_state()
            body = ctypes.string_at(state.data_ptr() + 8, state.numel() - 8)
        if not 0 <= number < 2**32 or body != _after_a_draw(generator.device):
            number = next(self._numbers)  # of a state that the step sets
            self._constants[number] = state
        return number

    def _marked(self, generator: torch.Generator) -> tuple[torch.Generator, int]:
        """Leave a generator in the state of the next number; return it and the number.

        A dispatcher may show it as another object: it is the one that has this state now.
        """
        before, number = generator.get_state(), next(self._numbers)
        seed = (_FIRST + number).to_bytes(8, "little")
        state = bytearray(seed + _after_a_draw(generator.device))
        generator.set_state(torch.frombuffer(state, dtype=torch.uint8))
        for known, _ in self._found:
            if known.initial_seed() == _FIRST + number:
                return known, number
        self._found.append((generator, before))
        return generator, number


@functools.cache
def _after_a_draw(device: torch.device) -> bytes:
    """Return the state of a generator after a draw, without its seed: no seed leaves it there."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        one = torch.Generator(device).manual_seed(_FIRST)
        torch.rand(1, generator=one, device=device)
        state = one.get_state()
        return ctypes.string_at(state.data_ptr() + 8, state.numel() - 8)


def draws(node: fx.Node) -> bool:
    """Return whether an op may draw random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
