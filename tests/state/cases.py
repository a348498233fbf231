"""What the ranks of law 14 do, drawn at random: passes in windows and blocks, calls, failures.

Hypothesis gives a `Random` whose choices it shrinks; `random.Random(n)` draws the n-th case of a
sample, a hundred times as fast.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from hypothesis import strategies as st

from fzero.state.protocol import Units
from fzero.state.rounds import CODES
from fzero.state.schedule import Limits
from tests.state.world import AXES, Sync

STEPS = 4  # the first one records, the second one may do something else, the others repeat it


@dataclass(frozen=True)
class Block:
    """Units that are gathered, and what is done in the block: only reads inside of a forward."""

    model: int
    units: tuple[int, ...]
    items: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Evaluation:
    """A forward that no backward follows; its values are not rounded if it is `exact`."""

    model: int
    uses: tuple[Any, ...]
    exact: bool


@dataclass(frozen=True)
class OnePass:
    """A forward and a backward of one model on one rank.

    uses: units of the forward, and what is inside of it: sync points, blocks, evaluations.
    backward: ("use", unit), ("gradient", unit, whether it is complete) or ("sync", axis, whether
        a forward has made it).
    """

    model: int
    uses: tuple[Any, ...]
    backward: tuple[tuple[Any, ...], ...]

    @property
    def joint(self) -> OnePass:
        """What all ranks do at one place, without the pass: model -1 stands for none."""
        uses = tuple(use for use in self.uses if not isinstance(use, int))
        return OnePass(-1, uses, tuple(one for one in self.backward if one[0] == "sync"))


@dataclass(frozen=True)
class Passes:
    """Forwards one after another, and then their backwards, mixed as autograd may on this rank.

    Collectives of the user's come in one order. mix: 0 for one backward after another, else a seed.
    """

    passes: tuple[OnePass, ...]
    mix: int = 0

    @property
    def backwards(self) -> list[tuple[int, tuple[Any, ...]]]:
        """What the backwards do, each with its model."""
        left = [(one.model, deque(one.backward)) for one in self.passes]
        chance, mixed = Random(self.mix), list[tuple[int, tuple[Any, ...]]]()
        while left := [(model, events) for model, events in left if events]:
            number = chance.randrange(len(left)) if self.mix else 0
            before = (event for _, events in left[:number] for event in events)
            if left[number][1][0][0] == "sync" and any(event[0] == "sync" for event in before):
                number = 0
            model, events = left[number]
            mixed.append((model, events.popleft()))
        return mixed


@dataclass(frozen=True)
class Astray:
    """A forward that raises an error of communication on all ranks, before it reads anything."""

    model: int


@dataclass(frozen=True)
class Window:
    """Passes of a model whose gradients are reduced with those that come after it."""

    model: int
    items: tuple[Any, ...]


@dataclass(frozen=True)
class Script:
    """What one rank does: in each step some items, then a call.

    fails_at: the event of its own at which it raises. breaks_in: behind which effect of a kind
    `breaks` (any if empty) it does. raises_at: the step in which it raises outside of a pass. Each
    only once; -1 for never.
    """

    steps: tuple[tuple[Any, ...], ...]
    calls: tuple[str, ...]
    fails_at: int = -1
    breaks_in: int = -1
    breaks: str = ""
    raises_at: int = -1


@dataclass(frozen=True)
class Case:
    """A world, what its ranks do, and who moves next.

    room: how many collectives a message asks for. lives: ranks go on with the next step after a
    failure. repeats: the last steps are the same, on all ranks.
    """

    world: dict[str, Any]
    scripts: tuple[Script, ...]
    order: int  # 0 is by rank, others are seeds
    repeats: bool = False
    lives: bool = False
    room: int = CODES


@dataclass
class Drawing:
    """What one case has drawn so far."""

    random: Random
    size: int
    units: tuple[Units, ...]
    functional: tuple[bool, ...]
    alike: bool
    out: bool  # a rank may make the call while others are in a pass
    astray: bool = False
    inside: list[int] = field(default_factory=list)  # models in a pass or a window
    syncs: int = 0  # collectives of the user's so far

    def flag(self, one_in: int = 2) -> bool:
        """Whether something that is rare happens."""
        return self.random.randrange(one_in) == one_in - 1

    def each(self, make: Any) -> list[Any]:
        """What each rank does, by `make()`: the same if ranks are alike."""
        first = make()
        return [first, *(first if self.alike else make() for _ in range(self.size - 1))]

    def items(self, depth: int = 0) -> list[list[Any]]:
        """Some items of each rank."""
        collected: list[list[Any]] = [[] for _ in range(self.size)]
        for _ in range(self.random.randint(1, 2)):
            for mine, item in zip(collected, self.item(depth), strict=True):
                mine += [] if item is None else [item]
        return collected

    def item(self, depth: int) -> list[Any]:
        """One item of each rank."""
        kinds = ["passes", "passes", "passes", "passes", "evaluation"]
        if depth == 0:
            kinds += ["window", "block"]
            kinds += ["astray"] * 5 if self.astray else []
        kind = self.random.choice(kinds)
        if kind == "block" and self.engines():
            model, units = self.block()
            return [Block(model, units, tuple(mine)) for mine in self.items(1)]
        if kind == "astray":
            return [Astray(self.random.randrange(len(self.units)))] * self.size
        if kind == "window":
            model = self.random.randrange(len(self.units))
            self.inside.append(model)
            items = [self.passes([model])]
            if self.functional[model] and self.flag():
                items += [self.each(lambda: Evaluation(model, self.uses_of(model), True))]
            if self.flag():
                items += [self.passes([model])]
            self.inside.remove(model)
            by_rank = [[x for x in mine if x is not None] for mine in zip(*items, strict=True)]
            return [Window(model, tuple(mine)) for mine in by_rank]
        if kind == "evaluation":
            return self.evaluations()
        both = len(self.units) == 2 and self.flag()
        return self.passes([0, 1] if both else [self.random.randrange(len(self.units))])

    def engines(self) -> list[int]:
        """Models of which blocks may hold units."""
        pairs = zip(self.units, self.functional, strict=True)
        return [n for n, (one, calls) in enumerate(pairs) if one.gathers and not calls]

    def block(self) -> tuple[int, tuple[int, ...]]:
        """The model and the units of a block."""
        model = self.random.choice(self.engines())
        count = len(self.units[model].numels)
        return model, tuple(self.random.sample(range(count), self.random.randint(1, min(3, count))))

    def uses_of(self, model: int, most: int = 7) -> tuple[int, ...]:
        """Units that one rank reads."""
        count = len(self.units[model].numels)
        return tuple(self.random.randrange(count) for _ in range(self.random.randint(0, most)))

    def evaluations(self, avoid: tuple[int, ...] = ()) -> list[Any]:
        """An evaluation of each rank, of a model that is in no pass."""
        free = [n for n in range(len(self.units)) if n not in (*self.inside, *avoid)]
        if not free:
            return [None] * self.size
        model = self.random.choice(free)
        exact = self.functional[model] and self.flag()  # an engine's forwards are all alike
        return self.each(lambda: Evaluation(model, self.uses_of(model), exact))

    def passes(self, models: list[int]) -> list[Any]:
        """A pass of each of these models, on each rank; None where a rank is not in it."""
        inside = self.random.choice([0, 0, 0, 1, 3])
        joints = [[self.joint(models) for _ in range(inside)] for _ in models]
        together = [list(zip(*some, strict=True)) or [()] * self.size for some in joints]
        out = self.out and not inside and not self.alike
        # Drawn apart: what else a case has does not depend on it. One that only backwards make.
        apart = Random(repr((self.units, self.syncs, models, joints)))
        late = -1 if out or apart.randrange(4) else apart.randint(0, inside)
        first, collected = None, list[Any]()
        for rank in range(self.size):
            if out and self.flag(3):
                collected.append(None)
                continue
            if first is None or not self.alike:
                parts = [together[i][rank] for i in range(len(models))]
                pairs = zip(models, parts, strict=True)
                passes = tuple(self.one_pass(*pair, late) for pair in pairs)
                if self.out and inside and not self.alike:  # not in all passes: only what is joint
                    passes = tuple(apart.choice([x, x, x, x.joint]) for x in passes)
                first = Passes(passes, Random(repr(passes)).randrange(3))
            collected.append(first)
        return collected

    def joint(self, models: list[int]) -> list[Any]:
        """What all ranks do at one place of a forward."""
        others = [model for model in self.engines() if model not in (*models, *self.inside)]
        kind = self.random.choice(["sync", "sync", "evaluation", "block"])
        if kind == "block" and others:
            model, units = self.block()
            if model in others:
                return [Block(model, units)] * self.size
        if kind == "evaluation":
            found = self.evaluations(tuple(models))
            return found if found[0] is not None else self.sync()
        return self.sync()

    def sync(self) -> list[Any]:
        """A collective of the user's over the next axis, which all ranks make.

        Of one that is differentiated some ranks have a graph, drawn apart, as in `one_pass`.
        """
        self.syncs += 1
        differentiated, apart = self.syncs % 5 > 0, Random(repr((self.units, self.syncs)))
        some = apart.sample(range(self.size), apart.randint(1, self.size))
        on = tuple(sorted(some)) if differentiated else ()
        return [Sync(AXES[self.syncs % len(AXES)], differentiated, on)] * self.size

    def one_pass(self, model: int, joints: tuple[Any, ...], late: int) -> OnePass:
        """A pass of one rank, with what all ranks do together in it.

        late: before which collective of the backward one comes that no forward had; -1 for none.
        """
        uses: list[Any] = [*self.uses_of(model)]
        for joint in joints:
            uses += [joint, *self.uses_of(model, 4)]
        backward: list[tuple[Any, ...]] = []
        count = len(self.units[model].numels)
        for one in self.random.sample(range(count), count):
            kind = self.random.choice(["nothing", "partial", *["complete"] * 3])
            if kind != "nothing":
                backward += [("use", one), ("gradient", one, kind == "complete")]
        # The adjoint of each collective, in the order of autograd, at another place on each rank.
        # Drawn apart: what else a case has does not depend on it.
        apart, at = Random(repr((model, uses, backward))), 0
        synced = [x for x in reversed(uses) if isinstance(x, Sync) and x.differentiated]
        adjoints = [("sync", one.axis, True) for one in synced]
        if late >= 0:
            adjoints.insert(late, ("sync", "all", False))
        for one in adjoints:
            at = apart.randint(at, len(backward))
            backward.insert(at, one)
            at += 1
        return OnePass(model, tuple(uses), tuple(backward))


def units_of(random: Random) -> Units:
    """The units of a model."""
    numbers, gathers = range(random.randint(1, 6)), random.randrange(4) > 0
    bounded = random.randrange(2) > 0
    return Units(
        numels=tuple(random.randint(1, 3) for _ in numbers),
        persistent=tuple(u for u in numbers if gathers and random.randrange(5) == 0),
        rounds=frozenset(u for u in numbers if random.randrange(2)),
        bounded=frozenset(numbers) if bounded else frozenset(),
        limits=Limits(prefetch_numel=random.choice([0, 1, 4]), keeps=random.randrange(2) > 0),
        gathers=gathers,
    )


BREAKS = ("WaitForReductions", "Gather", "TakePart", "Wait", "Free", "Reduce")
"""Effects behind which a rank may raise."""


def _without_syncs(item: Any) -> Any:
    """An item without the collectives of the user's in its forwards."""
    if not isinstance(item, Passes):
        return item
    passes = [
        replace(
            x,
            uses=tuple(u for u in x.uses if not isinstance(u, Sync)),
            backward=tuple(u for u in x.backward if u[0] != "sync"),
        )
        for x in item.passes
    ]
    return Passes(tuple(passes))


def case_of(
    random: Random,
    *,
    served: bool | None = None,
    repeats: bool = False,
    fails: bool = False,
    lives: bool = False,
) -> Case:
    """Draw a case; of ranks that fail if `fails`, after which the others go on if `lives`.

    served: ranks that make a call take part in passes of others; some are then not in them.
    repeats: one model does the same in the last steps, on all ranks.
    """
    size = random.randint(1, 4)
    units = tuple(units_of(random) for _ in range(1 if repeats else random.randint(1, 2)))
    served = random.randrange(3) > 0 if served is None else served
    functional = tuple(not served and random.randrange(4) > 0 for _ in units)
    astray = lives and random.randrange(8) == 0  # all ranks at one place: no other rank fails
    alike = astray or repeats or random.randrange(3) == 0
    drawing = Drawing(random, size, units, functional, alike, served and not repeats, astray)
    steps = [drawing.items() for _ in range(2 if repeats else STEPS)]
    if repeats and drawing.flag():  # the first step is the same, without what is in its forwards
        steps[0] = [[_without_syncs(item) for item in mine] for mine in steps[1]]
    steps += [steps[-1]] * (STEPS - len(steps))
    scripts = [
        Script(tuple(tuple(step[rank]) for step in steps), ("step",) * STEPS)
        for rank in range(size)
    ]
    for _ in range(random.randint(1, 2) if fails and not astray else 0):
        rank, kind = random.randrange(size), ""
        how = random.choice(["fails_at", "fails_at", "breaks_in", "breaks_in", "raises_at"])
        at = random.randrange({"fails_at": 40, "breaks_in": 40, "raises_at": STEPS}[how])
        if how == "breaks_in" and random.randrange(4):
            kind, at = random.choice(BREAKS), at // 10
        scripts[rank] = replace(scripts[rank], **{how: at}, breaks=kind)
    return Case(
        world={
            "size": size,
            "units": units,
            "served": served,
            "replicas": random.choice([1, 2]) if size == 4 else 1,
            "functional": functional,
            "stays": random.randrange(2) > 0,
        },
        scripts=tuple(scripts),
        order=random.randrange(2**16),
        repeats=repeats,  # two models end each other's plans
        lives=lives,
        room=random.choice([1, CODES]),
    )


def cases(**options: Any) -> st.SearchStrategy[Case]:
    """Cases that Hypothesis draws and shrinks."""
    return st.randoms(use_true_random=False).map(lambda random: case_of(random, **options))
