"""What a step uses beside its arguments, while it is recorded: noted where that is cheap.

Noted are reads of the environment and of torch.distributed's rank and world size, seeds, values of
tensors that a step asked for and did without, and what a call leaves changed in the variables,
attributes and containers that the step reaches.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fzero.machine.placeholder import LazyParam
from fzero.optim.recorded import SCHEDULES
from fzero.tools.prove._budget import Budget
from fzero.tools.prove._schedules import facts_of
from fzero.tools.trace.found import bytes_of
from fzero.tools.trace.program import RATE


class Watch:
    """Watches this thread while it is entered.

    noted: what was seen, once each. warm: whether what libraries look up once is known to them.
    inside: whether the step runs now, and not what records it.
    """

    def __init__(self) -> None:
        self.noted: dict[str, None] = {}
        self.warm = self.inside = False
        self._rates: dict[int, Any] = {}
        self._random: Tensor = torch.default_generator.get_state()  # before a call
        one = torch.Generator()
        torch.rand(1, generator=one.manual_seed(_SEED))  # no seed leaves a generator here
        self._body = bytes_of(one.get_state())[8:]
        self._seeds: list[int] = []  # of this call: where the generator stood, draw by draw
        self._draws: list[str] = []  # of this call: what was drawn, and when a state was put back
        self._first_draws: list[str] | None = None

    def note(self, what: str) -> None:
        """Keep what was seen."""
        self.noted.setdefault(what)

    def notes(self, what: str) -> None:
        """Keep what this thread does inside of the step."""
        if self.inside and threading.get_ident() == self._thread:
            self.note(what)

    def asks_for_rate(self, number: int) -> None:
        """A schedule is asked now: what it reads must be the same whenever it is."""
        facts = facts_of(SCHEDULES[number])
        if self._rates.setdefault(number, facts) != facts:
            self.note("the option lr reads other values, or is another function, in another call")

    def call_begins(self) -> None:
        """The step runs from here on; let the generator stand where no program puts it."""
        self.inside, self._seeds = True, []
        self._moves()

    def call_ends(self) -> None:
        """It does no longer. Put the generator back, and note where it was left."""
        self.inside = False
        self._stands()
        torch.default_generator.set_state(self._random)

    def draws(self, what: str) -> None:
        """A random number is drawn: a record moves no generator, so it is moved here."""
        if self.inside:
            self._stands()
            self._draws.append(what)
            self._moves()

    def _stands(self) -> None:
        """Note whether the generator stands where the last draw has left it."""
        seed = torch.default_generator.initial_seed()
        if seed not in self._seeds or _state_now()[8:] != self._body:
            self.note("it seeds the random numbers of torch")
        elif seed != self._seeds[-1]:
            self._draws.append(f"set to {self._seeds.index(seed)}")

    def _moves(self) -> None:
        self._seeds.append(_SEED + len(self._seeds))
        state = bytearray(self._seeds[-1].to_bytes(8, "little") + self._body)
        torch.default_generator.set_state(torch.frombuffer(state, dtype=torch.uint8))

    def compare_draws(self) -> None:
        """Note a program whose states are put back elsewhere among the draws than another's."""
        first = self._draws if self._first_draws is None else self._first_draws
        self._first_draws = first
        if first != self._draws and any(x.startswith("set") for x in (*first, *self._draws)):
            self.note("it sets the state of random numbers in other places than on one rank")

    def __enter__(self) -> Watch:
        self._thread = threading.get_ident()
        self._watching = _watching(self)
        self._watching.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._watching.__exit__(*error)

    def around(self, step: Callable[..., Any], budget: Budget, *, warm: bool) -> Callable[..., Any]:
        """Return the step, watched op by op, within a budget.

        warm: torch has looked up what it needs; who reads the environment now is the step.
        """

        def watched(*args: Any) -> Any:
            self.warm, self._draws = warm, []
            self.call_begins()
            try:
                with _EachOp(self, budget), _EachCall(self):
                    return step(*args)
            finally:
                self.inside = False
                torch.default_generator.set_state(self._random)

        return watched


def _state_now() -> bytes:
    with torch._C.DisableTorchFunction():  # and no op: modes and transforms are at work
        state = torch.default_generator.get_state()
        return ctypes.string_at(state.data_ptr(), state.numel())


_SEED = 2**61 + 0x5EED  # that nobody else sows


@contextmanager
def _watching(watch: Watch) -> Iterator[None]:
    """Put what says what it is asked in the place of what a step may ask."""
    environment, swap = os._Environ, torch.utils.swap_tensors
    reads = {name: getattr(environment, name) for name in ("__getitem__", "__iter__", "__len__")}

    def reader(name: str) -> Any:
        def read(self: Any, *key: Any) -> Any:
            if watch.warm:
                asked = (
                    f"[{os.fsdecode(key[0])!r}]" if key and isinstance(key[0], str | bytes) else ""
                )
                watch.notes(f"it reads os.environ{asked}")
            return reads[name](self, *key)

        return read

    def swapped(*tensors: Any) -> Any:
        watch.notes("it swaps the memory of tensors, which is in no program")
        return swap(*tensors)

    groups = c10d._world
    try:
        for name in reads:
            setattr(environment, name, reader(name))
        torch.utils.swap_tensors, c10d._world = swapped, _Groups(watch, groups)
        yield
    finally:
        for name, read in reads.items():
            setattr(environment, name, read)
        torch.utils.swap_tensors, c10d._world = swap, groups


class _Groups:
    """What torch.distributed knows of groups of ranks, which says who asks."""

    def __init__(self, watch: Watch, of: Any) -> None:
        vars(self).update(_watch=watch, _of=of)

    def __getattr__(self, name: str) -> Any:
        self._watch.notes("it asks torch.distributed for its rank or for the number of ranks")
        return getattr(self._of, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._of, name, value)


_ESCAPES: dict[Any, str] = {
    Tensor.data.__set__: "sets `.data` of a tensor",  # type: ignore[attr-defined]
    Tensor.numpy: "asks for `.numpy()`",
    Tensor.__array__: "asks for `.numpy()`",
    Tensor.tolist: "asks for `.tolist()`",
    Tensor.data_ptr: "asks for `.data_ptr()`",
    Tensor.untyped_storage: "asks for `.untyped_storage()`",
    Tensor.storage: "asks for `.storage()`",
    Tensor.__dlpack__: "asks for `.__dlpack__()`",
}
"""What is done to a tensor beside the ops of a program, and so is in no graph."""


def _has_values(x: Any) -> bool:
    return type(x) in (Tensor, torch.nn.Parameter) and not is_functorch_wrapped_tensor(x)


class _EachCall(TorchFunctionMode):
    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (what := _ESCAPES.get(func)) is not None and not _has_values(args[0]):
            self._watch.notes(f"it {what}, which is in no program")
        return func(*args, **(kwargs or {}))


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
