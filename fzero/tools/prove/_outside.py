"""What a step uses beside its arguments, while it is recorded: noted where that is cheap.

Noted are reads of the environment and of torch.distributed's rank and world size, seeds, values of
tensors that a step asked for and did without, and what a call leaves changed in the variables,
attributes and containers that the step reaches.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from torch.utils._python_dispatch import TorchDispatchMode

from fzero.machine.placeholder import LazyParam
from fzero.optim.recorded import SCHEDULES
from fzero.tools.prove._budget import Budget
from fzero.tools.prove._schedules import facts_of
from fzero.tools.trace.ops import RATE


class Watch:
    """Watches this thread while it is entered.

    noted: what was seen, once each. warm: whether what libraries look up once is known to them.
    inside: whether the step runs now, and not what records it.
    """

    def __init__(self) -> None:
        self.noted: dict[str, None] = {}
        self.warm = self.inside = False
        self._rates: dict[int, Any] = {}
        self._draws: list[str] = []  # of this call: what was drawn, and when a state was put back
        self._first_draws: list[str] | None = None

    def note(self, what: str) -> None:
        """Keep what was seen."""
        self.noted.setdefault(what)

    def asks_for_rate(self, number: int) -> None:
        """A schedule is asked now: what it reads must be the same whenever it is."""
        facts = facts_of(SCHEDULES[number])
        if self._rates.setdefault(number, facts) != facts:
            self.note("the option lr reads other values, or is another function, in another call")

    def draws(self, what: str) -> None:
        """A random number is drawn, or the state of the generator is set."""
        if self.inside:
            self._draws.append(what)

    def compare_draws(self) -> None:
        """Note a program whose states are put back elsewhere among the draws than another's."""
        first = self._draws if self._first_draws is None else self._first_draws
        self._first_draws = first
        if first != self._draws and "set" in (*first, *self._draws):
            self.note("it sets the state of random numbers in other places than on one rank")

    def __enter__(self) -> Watch:
        self._watching = _watching(self, threading.get_ident())
        self._watching.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._watching.__exit__(*error)

    def around(self, step: Callable[..., Any], budget: Budget, *, warm: bool) -> Callable[..., Any]:
        """Return the step, watched op by op, within a budget.

        warm: torch has looked up what it needs; who reads the environment now is the step.
        """

        def watched(*args: Any) -> Any:
            self.inside, self.warm, self._draws = True, warm, []
            try:
                with _EachOp(self, budget):
                    return step(*args)
            finally:
                self.inside = False

        return watched


@contextmanager
def _watching(watch: Watch, thread: int) -> Iterator[None]:
    look_up, ask = os._Environ.__getitem__, c10d._rank_not_in_group
    is_there = dist.is_initialized
    seed = torch.default_generator.initial_seed()

    def looked_up(self: Any, key: Any) -> Any:
        mine = (
            watch.warm and watch.inside and threading.get_ident() == thread and isinstance(key, str)
        )
        if mine:
            watch.note(f"it reads os.environ[{key!r}]")
        return look_up(self, key)

    def asked(group: Any) -> bool:
        if threading.get_ident() == thread:
            watch.note("it asks torch.distributed for its rank or for the number of ranks")
        return ask(group)

    def there() -> bool:
        if watch.inside and threading.get_ident() == thread:
            watch.note("it asks torch.distributed whether there is a group")
        return is_there()

    def put_back(state: Any) -> None:
        watch.draws("set")
        put(state)

    def seeded(number: int) -> Any:
        if watch.inside:
            watch.note("it seeds the random numbers of torch")
        return sow(number)

    put, sow = torch.random.set_rng_state, torch.random.manual_seed
    torch.set_rng_state = torch.random.set_rng_state = put_back
    torch.manual_seed = torch.random.manual_seed = seeded
    os._Environ.__getitem__, c10d._rank_not_in_group = looked_up, asked
    dist.is_initialized = c10d.is_initialized = there
    try:
        yield
    finally:
        os._Environ.__getitem__, c10d._rank_not_in_group = look_up, ask
        dist.is_initialized = c10d.is_initialized = is_there
        torch.set_rng_state = torch.random.set_rng_state = put
        torch.manual_seed = torch.random.manual_seed = sow
        if torch.default_generator.initial_seed() != seed:
            watch.note("it seeds the random numbers of torch")


class _EachOp(TorchDispatchMode):
    def __init__(self, watch: Watch, budget: Budget) -> None:
        super().__init__()
        self._watch, self._budget = watch, budget

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, LazyParam) for kind in types):
            return NotImplemented  # a placeholder handles it first; the ops it calls come back
        # An error where torch asks for a device, or inside of autograd, would end the process.
        aten = isinstance(func, torch._ops.OpOverload) and func.namespace == "aten"
        computes = aten and not func.is_view
        if computes and torch._C._current_autograd_node() is None:
            self._budget.check(f", at {func}")
        if aten and torch.Tag.nondeterministic_seeded in func.tags:
            self._watch.draws(str(func))
        if func is RATE:
            self._watch.asks_for_rate(args[1])
        try:
            return func(*args, **(kwargs or {}))
        except (DataDependentOutputException, DynamicOutputShapeException):
            self._watch.note(f"it asks for a value ({func}) and goes on without")
            raise
