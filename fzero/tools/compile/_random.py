"""Random numbers in a graph: each op that draws knows the state of its generator before and after.

A draw of a recorded step computes nothing, so that a generator would stay as it is. Here every draw
leaves its generator in a state that nobody else has: where a later draw starts from is then read
off the generator itself, by whatever way it was put back (`fork_rng`, a checkpoint, `set_state`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from fzero.context.rng import of_devices
from fzero.machine.placeholder import LazyParam

State = int | Tensor
"""The state of a generator: that after a draw by its number, or one that is the same each time."""

_FIRST = 0x2F5A_31C7 << 32
"""The seed of state 0 while a step is recorded; the numbers count on."""

DRAW = "draw"
"""Under which name the meta of a node has its `Draw`."""


@dataclass(frozen=True, slots=True)
class Draw:
    """Which generator an op draws from. starts: a state to set first; keeps: the state after."""

    generator: torch.Generator
    before: State
    after: int
    starts: State | None = None
    keeps: bool = False


@dataclass(frozen=True, slots=True)
class Randomness:
    """The draws of a step in their order, and the states of its generators before and after."""

    begins: tuple[tuple[torch.Generator, int], ...]
    draws: tuple[Draw, ...]
    ends: tuple[tuple[torch.Generator, State], ...]

    @property
    def made(self) -> list[torch.Generator]:
        """The generators that the step was not found with: it creates them in each call."""
        found = [generator for generator, _ in self.begins]
        drawn = {id(one.generator): one.generator for one in self.draws}
        return [x for x in drawn.values() if not any(x is y for y in found)]


def draws(node: fx.Node) -> bool:
    """Return whether an op may draw random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


class RecordedDraws(TorchDispatchMode):
    """Notes what is drawn while a step is recorded; all generators are put back at the end."""

    def __init__(self, held: Iterable[torch.Generator]) -> None:
        super().__init__()
        self._held = [*{id(one): one for one in (*of_devices(), *held)}.values()]
        self._numbers = itertools.count()
        self._draws: list[Draw] = []
        self._found: list[tuple[torch.Generator, Tensor]] = []
        self._begins: list[tuple[torch.Generator, int]] = []
        self.randomness: Randomness | None = None

    def __enter__(self) -> Any:
        self._begins = [self._marked(one) for one in self._held]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        ends = tuple((one, _state_of(one)) for one in self._held)
        self.randomness = Randomness(tuple(self._begins), tuple(self._draws), ends)
        for generator, state in self._found:
            generator.set_state(state)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note a draw; the graph has it without its generator."""
        if any(issubclass(kind, LazyParam) for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        generator = _generator_of(args, kwargs)
        before = _state_of(generator)
        own, number = self._marked(generator)
        self._draws.append(Draw(own, before, number))
        return func(*tree_map(_unless_generator, args), **tree_map(_unless_generator, kwargs))

    def _marked(self, generator: torch.Generator) -> tuple[torch.Generator, int]:
        """Leave a generator in the state of the next number; return it and the number.

        A dispatcher may show it as another object: it is the one that has this state now.
        """
        state, number = generator.get_state(), next(self._numbers)
        generator.manual_seed(_FIRST + number)
        for known, _ in self._found:
            if known.initial_seed() == _FIRST + number:
                return known, number
        self._found.append((generator, state))
        return generator, number


def _state_of(generator: torch.Generator) -> State:
    number = generator.initial_seed() - _FIRST
    return number if 0 <= number < 2**32 else generator.get_state()


def _generator_of(args: Any, kwargs: Mapping[str, Any]) -> torch.Generator:
    given = tree_leaves((args, kwargs))
    own = next((x for x in given if isinstance(x, torch.Generator)), None)
    devices = [x.device for x in given if isinstance(x, Tensor)]
    device = kwargs.get("device") or next(iter(devices), torch.device("cpu"))
    return own if own is not None else of_devices(torch.device(device))[-1]


def _unless_generator(x: Any) -> Any:
    return None if isinstance(x, torch.Generator) else x


def note_draws(graph: fx.Graph, randomness: Randomness) -> None:
    """Put its `Draw` on each op of a graph that draws."""
    for node, one in zip(filter(draws, graph.nodes), randomness.draws, strict=True):
        node.meta[DRAW] = one


@dataclass(frozen=True, slots=True)
class ReplayedDraws:
    """Which states of generators are kept and set while the draws of a graph are made.

    Where draws follow each other as they did, nothing is: a generator is there already.
    """

    begins: tuple[tuple[torch.Generator, int], ...]  # states to keep before the first draw
    draws: dict[fx.Node, Draw]
    ends: tuple[tuple[torch.Generator, State], ...]  # states to set behind the last draw


def replay_of(graph: fx.Graph, randomness: Randomness) -> ReplayedDraws:
    """Return what the draws of a graph need, in the order that they have in it."""
    now: dict[int, State] = {id(one): number for one, number in randomness.begins}
    drawn: dict[fx.Node, Draw] = {}
    for node in graph.nodes:
        if (one := node.meta.get(DRAW)) is not None:
            there = _same(now.get(id(one.generator)), one.before)
            drawn[node] = one if there else replace(one, starts=one.before)
            now[id(one.generator)] = one.after
    ends = [(one, state) for one, state in randomness.ends if not _same(now[id(one)], state)]
    wanted = [one.starts for one in drawn.values()] + [state for _, state in ends]
    numbers = {x for x in wanted if isinstance(x, int)}
    return ReplayedDraws(
        begins=tuple((one, number) for one, number in randomness.begins if number in numbers),
        draws={node: replace(one, keeps=one.after in numbers) for node, one in drawn.items()},
        ends=tuple(ends),
    )


def _same(now: State | None, state: State) -> bool:
    return isinstance(now, int) and isinstance(state, int) and now == state
