"""A coordinator under test in a shell that runs its effects, and random programs for it.

`Shell` pretends the memory of a real shell: for each full parameter, the version of the shard it
was gathered from. It checks every transition against `Naive`, and every use against the shards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from fzero.errors import PhaseError
from fzero.state import coordinator
from fzero.state.coordinator_effects import Agree, Drain, Gather, Prefetch, Release, Wait, Warn
from fzero.state.units import Limits
from tests.state.coordinator_naive import Naive, World


class Shell:
    """Runs what the coordinator asks for, on pretended memory, and checks all of it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.state = world.coordinator()
        self.log: list[tuple[Any, ...]] = []
        self.naive = Naive(world, ())
        self.shards = [0] * len(world.numels)  # the version of each shard
        self.flying: dict[int, int] = {}
        self.memory: dict[int, int] = {}
        self.warnings = 0

    def send(self, event: str, *args: Any) -> bool:
        """Make one transition and run its effects; False if it was, rightly, refused."""
        naive, before = self.naive, self.state
        if naive.refuses(event, *args):
            with pytest.raises(PhaseError, match="Fix: "):
                getattr(coordinator, event)(before, *args)
            assert self.state == before
            return False
        state, effects = getattr(coordinator, event)(before, *args)
        self.state = state
        self._note(event, *args)
        assert [_plain(effect) for effect in effects] == naive.effects(self.naive, event, *args)
        for effect in effects:
            self._run(effect)
        self._check_bounds()
        if event != "gathered":  # which comes while the effects of another one run
            live = {*self.memory, *self.flying}
            assert self.state.residency.live_numel == self.world.sum(live)
        return True

    def use(self, module: int) -> bool:
        """Run `module`: what it needs must be here, and of this version."""
        naive = self.naive
        if naive.refuses("require_ready", module):
            with pytest.raises(PhaseError, match="before its parameters are gathered"):
                coordinator.require_ready(self.state, module)
            return False
        assert coordinator.require_ready(self.state, module) is self.state
        for unit in naive.needs[module]:
            assert self.memory[unit] == self.shards[unit], f"unit {unit} is stale"
        return True

    def update(self, ids: tuple[int, ...]) -> bool:
        """Change shards, as an optimizer does."""
        legal = self.send("updated", ids)
        for unit in set(ids) if legal else ():
            self.shards[unit] += 1
        return legal

    def check_clean(self) -> None:
        """Nothing is left but what persists or is held; every gather had its release."""
        kept = self.world.persistent.union(*self.naive.held)
        live = {*self.memory, *self.flying}
        reach = self.world.limits.max_reuse_distance_numel
        assert all(self.naive.window and self.naive.distance(u) < reach for u in live - kept)
        started = [u for what, *a in self.log if what in ("Gather", "Prefetch") for u in a[0]]
        ended = [u for what, *a in self.log if what in ("Release", "Drain") for u in a[0]]
        for unit in range(len(self.world.numels)):
            left = started.count(unit) - ended.count(unit)
            assert left == (unit in self.memory or unit in self.flying)
        assert vars(self.naive) == vars(Naive(self.world, self.log)), "the model kept something"

    def _run(self, effect: Any) -> None:
        if isinstance(effect, Warn | Agree):
            self.warnings += isinstance(effect, Warn)
            return
        held = {*self.memory, *self.flying}
        if isinstance(effect, Wait):
            assert set(effect.ids) <= set(self.flying)
            self.arrive(effect.ids)
            return
        if isinstance(effect, Gather | Prefetch):
            assert not held & set(effect.ids), "gathered twice"
            self.flying |= {unit: self.shards[unit] for unit in effect.ids}
        elif isinstance(effect, Release):
            for unit in effect.ids:
                del self.memory[unit]
        else:
            for unit in effect.ids:
                del self.flying[unit]
        self._note(type(effect).__name__, effect.ids)
        if isinstance(effect, Release | Drain):
            assert not self.naive.used & set(effect.ids), "released in use"
        else:
            self._check_bounds()

    def arrive(self, ids: tuple[int, ...]) -> bool:
        """The gathers of `ids` ended."""
        legal = self.send("gathered", ids)
        for unit in ids if legal else ():
            self.memory[unit] = self.flying.pop(unit)
        return legal

    def _note(self, what: str, *args: Any) -> None:
        """Add to the log, and let the model read it."""
        self.log.append((what, *args))
        self.naive = self.naive.after(what, *args)

    def _check_bounds(self) -> None:
        """Live elements, and what of them was gathered early, are within the limits."""
        naive, limits = self.naive, self.world.limits
        live_numel = self.world.sum({*self.memory, *self.flying})
        needed_numel = self.world.sum(naive.used | self.world.persistent)
        assert live_numel <= max(limits.max_live_parameters_numel, needed_numel)
        assert self.world.sum(naive.early) <= limits.prefetch_bucket_numel


class Choices:
    """Choices read off bytes: fast to draw and to shrink. When they run out, all choices are 0."""

    def __init__(self, data: bytes) -> None:
        self._data = iter(data)

    def pick(self, count: int) -> int:
        """A number below `count`."""
        return next(self._data, 0) % count

    def subset(self, count: int) -> tuple[int, ...]:
        """Some numbers below `count`, ascending."""
        bits = next(self._data, 0)
        return tuple(i for i in range(count) if bits >> i & 1)


@dataclass(frozen=True)
class Call:
    """A call of a module, and the calls that its forward makes."""

    module: int
    calls: tuple[Call, ...]


class InForward(Exception):
    """Raised by a module of a program."""


def draw_world(choices: Choices) -> World:
    """A few units and modules; modules share units, and some have none."""
    numels = tuple(choices.pick(10) for _ in range(1 + choices.pick(6)))
    few = [(choices.subset(len(numels)), choices.subset(len(numels))) for _ in range(5)]
    needs = tuple(tuple(unit for unit in one if unit in other) for one, other in few)
    limits = Limits(
        max_live_parameters_numel=choices.pick(64),
        prefetch_bucket_numel=choices.pick(32),
        max_reuse_distance_numel=choices.pick(32),
        persistence_threshold_numel=choices.pick(4),
        model_persistence_threshold_numel=choices.pick(8),
    )
    return World(numels, needs, limits)


def draw_call(choices: Choices, modules: int, depth: int = 0) -> Call:
    """A tree of calls; a module may come in it more than once, also inside itself."""
    below = choices.pick(4) if depth == 0 else choices.pick(3) if depth == 1 else 0
    calls = tuple(draw_call(choices, modules, depth + 1) for _ in range(below))
    return Call(choices.pick(modules), calls)


class Program:
    """Training steps and passes without gradient over one tree of calls, most of them alike."""

    def __init__(self, choices: Choices) -> None:
        self.choices = choices
        self.shell = Shell(draw_world(choices))
        self.root = draw_call(choices, len(self.shell.world.needs))
        self.recompute = self.choices.pick(3) == 1  # checkpointing: forward again in backward
        self.wild = False  # whether this step may leave the usual order

    def run(self) -> Shell:
        """Run a few steps; what they are is drawn as they go."""
        for _ in range(2 + self.choices.pick(4)):
            if self.choices.pick(3) == 1:
                self.shell.send("end_window" if self.shell.state.repeats else "begin_window")
            self.wild = self.choices.pick(4) == 1
            kind = self.choices.pick(8)
            try:
                self._step(eval_only=kind == 1, forwards=2 if kind == 2 else 1)
            except InForward:
                self.shell.send("abort")
            self.shell.check_clean()
        return self.shell

    def _step(self, *, eval_only: bool, forwards: int) -> None:
        """Forwards, their backwards in reverse, an update."""
        tapes: list[list[int]] = []
        for _ in range(forwards):
            self.shell.send("begin_step")
            tapes.append([])
            self._forward(self.root, tapes[-1])
        for tape in reversed(tapes) if not eval_only else ():
            self._backward(tape)
        self.shell.send("end_step")
        if self.choices.pick(2):
            self.shell.update(self.choices.subset(len(self.shell.world.numels)))

    def _forward(self, call: Call, tape: list[int]) -> None:
        if self.wild:
            self._maybe_raise()
            if self.choices.pick(6) == 1:
                return  # the branch without this module
        self.shell.send("fetch", call.module)
        self._poke()
        assert self.shell.use(call.module)
        for inner in call.calls:
            self._forward(inner, tape)
        if self.wild and self.choices.pick(6) == 1:
            units = self.choices.subset(len(self.shell.world.numels))
            self.shell.send("register_external", call.module, units)
        assert self.shell.use(call.module)
        self.shell.send("release", call.module)
        tape.append(call.module)

    def _backward(self, tape: list[int]) -> None:
        """In reverse; some modules never learn that their backward is over, some learn it late."""
        late: list[int] = []
        for module in reversed(tape):
            if self.recompute:
                self._forward(Call(module, ()), [])
            self.shell.send("fetch", module)
            self._maybe_raise()
            assert self.shell.use(module)
            self._poke()
            fate = self.choices.pick(6)
            if fate == 1:
                late.append(module)
            elif fate != 2:
                self.shell.send("release", module)
        for module in late:
            self.shell.send("release", module)

    def _maybe_raise(self) -> None:
        if self.wild and self.choices.pick(16) == 1:
            raise InForward

    def _poke(self) -> None:
        """Now and then: a prefetch ends early, a context holds units, an illegal call."""
        what, shell = self.choices.pick(24), self.shell
        if what == 1 and shell.flying:
            shell.arrive((min(shell.flying),))
        elif what == 2:
            shell.send("hold", self.choices.subset(len(shell.world.numels)))
        elif what == 3 and shell.state.held:
            shell.send("let_go", shell.state.held[0])
        elif what == 4:
            shell.arrive(self.choices.subset(len(shell.world.numels)))
        elif what == 5:
            shell.update(self.choices.subset(len(shell.world.numels)))
        elif what == 6:
            assert not shell.send("begin_step")
        elif what == 8:
            shell.send("end_window" if shell.state.repeats else "begin_window")
        elif what == 7 and shell.state.active:
            idle = set(range(len(shell.world.needs))) - set(shell.state.active)
            assert not any(shell.send("release", m) or shell.use(m) for m in idle)


def _plain(effect: Any) -> Any:
    """An effect as `Naive` writes it."""
    if isinstance(effect, Warn):
        assert "Fix: " in effect.message
        return "warn"
    if isinstance(effect, Agree):
        return "agree"
    frees = isinstance(effect, Release | Drain)
    return type(effect)(tuple(sorted(effect.ids))) if frees else effect
