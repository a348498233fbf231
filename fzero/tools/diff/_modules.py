"""Record inputs and outputs of each module of a forward, and find where two forwards differ.

A forward is a sequence of events, "a module is entered" and "a module returns", with tensors. The
first event at which two forwards differ says where the difference was made: in the module that
returns it, or, if a module is given another input, in the module that calls it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from fzero.context.here import current_ranks
from fzero.context.modes import in_transform
from fzero.state.layout import as_real
from fzero.tools.compare import TERMS, Found, disturbed_bound, first_apart, largest, whole_leaf


class EventKey(NamedTuple):
    """The identity of an event of a forward, the same in all runs."""

    path: str  # of the module that is entered, or returns
    number: int  # how often it was entered before
    returns: bool


class Event(NamedTuple):
    """The inputs or the outputs of a module call."""

    caller: str | None  # the path of the module that calls it; None: it is the outermost
    tensors: list[Tensor | None]  # None: a parameter that is not here


Trail = dict[EventKey, Event]
"""The events of one forward, in order."""


@dataclass(slots=True, eq=False)
class _Entered:
    """A module call that has not returned."""

    module: nn.Module
    key: EventKey
    names: dict[int, str]  # of the modules inside of the outermost one, by identity


class Trails:
    """Records the events of all ranks, with copies of the tensors."""

    def __init__(self) -> None:
        self._open: dict[int, list[_Entered]] = {}
        self._trails: dict[int, Trail] = {}
        self._ended: set[int] = set()

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Context in which module calls are recorded."""
        hooks = (
            register_module_forward_pre_hook(self._enters),
            register_module_forward_hook(self._returns, with_kwargs=True),
        )
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def taken(self) -> Trail:
        """What has run on this rank since the loss before; several states may have one loss."""
        rank = rank_here()
        self._ended.add(rank)
        self._open.pop(rank, None)  # of a forward that has raised
        return self._trails.get(rank, {})

    def _enters(self, module: nn.Module, args: Any) -> None:
        if _is_apart():
            return
        rank = rank_here()
        if rank in self._ended:
            self._ended.remove(rank)
            self._trails.pop(rank, None)
        trail = self._trails.setdefault(rank, {})
        stack = self._open.setdefault(rank, [])
        caller = stack[-1] if stack else None
        names = caller.names if caller else {id(x): name for name, x in module.named_modules()}
        path = (names.get(id(module)) if caller else "") or type(module).__name__
        number = sum(key.path == path and not key.returns for key in trail)
        key = EventKey(path, number, False)
        trail[key] = Event(caller.key.path if caller else None, _copied(args))
        stack.append(_Entered(module, key, names))

    def _returns(self, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        stack = self._open.get(rank_here(), [])
        if _is_apart() or not any(one.module is module for one in stack):
            return
        while stack[-1].module is not module:  # whose forward has raised
            stack.pop()
        key, trail = stack.pop().key, self._trails[rank_here()]
        caller, given = trail[key]
        trail[key] = Event(caller, given + _copied(kwargs))  # by name: seen only now
        trail[key._replace(returns=True)] = Event(caller, _copied(out))


class Divergence(NamedTuple):
    """The event in which two forwards differ first."""

    path: str  # of the module that made the difference
    into: str | None  # the module inside of it that is given it; None: it returns it
    place: int  # in the forward
    found: Found


def first_difference(a: Trail, b: Trail, twin: Trail, unit: float) -> Divergence | None:
    """Return the first event in which two forwards differ; `twin` is a, perturbed.

    None if the input of the outermost module differs: the difference is older.
    """
    for place, (key, event) in enumerate(a.items()):
        if key not in b or key not in twin:
            continue
        for x, y, z in zip(event.tensors, b[key].tensors, twin[key].tensors):  # noqa: B905
            found = _apart(x, y, z, unit)
            if found is None:
                continue
            if key.returns:
                return Divergence(key.path, None, place, found)
            if event.caller is None:
                return None
            return Divergence(event.caller, key.path, place, found)
    return None


def _apart(x: Tensor | None, y: Tensor | None, z: Tensor | None, unit: float) -> Found | None:
    if x is None or y is None or z is None or x.shape != y.shape or x.shape != z.shape:
        return None
    return first_apart(
        whole_leaf(x), whole_leaf(y), disturbed_bound(x, z) + TERMS * unit * largest([x.double()])
    )


def _copied(given: Any) -> list[Tensor | None]:
    """Return copies of the tensors in arguments or a result, in order."""
    if isinstance(given, Tensor):
        stands = type(given) in (Tensor, nn.Parameter)
        return [as_real(given.detach()).clone() if stands else None]
    if isinstance(given, Mapping):
        given = tuple(given.values())
    if isinstance(given, list | tuple):
        return [x for one in given for x in _copied(one)]
    return []


def _is_apart() -> bool:
    """Return whether this forward is a recomputation in a backward, or has no values."""
    return torch._C._current_graph_task_id() != -1 or in_transform()


def rank_here() -> int:
    """Return the number of the running virtual rank."""
    here = current_ranks()
    return here.rank if here else 0
