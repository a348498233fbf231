"""What an engine asks of torch's hooks: which graph task runs, when it ends, who is first."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, ParamSpec

import torch
from torch import Tensor

from fzero.machine.placeholder import not_for_jit

P = ParamSpec("P")


def current_graph_task() -> int:
    """Return the id of the graph task that runs in this thread; -1 outside of every backward."""
    return torch._C._current_graph_task_id()


def in_backward() -> bool:
    """Return whether a backward runs in this thread."""
    return current_graph_task() >= 0


def at_end_of_graph_task(callback: Callable[[], None]) -> None:
    """Have autograd call it at the end of the graph task that runs."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(callback)


def register_first(p: Any, hook: Callable[[Tensor], None]) -> Any:
    """Register a hook of a parameter's gradient before those of the user; return its handle.

    They would otherwise find the rank's own gradient, and an optimizer that steps there would
    make other parameters on each rank.
    """
    users = dict(p._post_accumulate_grad_hooks or {})
    handle = p.register_post_accumulate_grad_hook(hook)
    for number, later in users.items():  # torch calls them in the order in which they came
        del p._post_accumulate_grad_hooks[number]
        p._post_accumulate_grad_hooks[number] = later
    return handle


def weakly(method: Callable[P, None]) -> Callable[P, None]:
    """Return what calls a method of an object for as long as the object is there.

    Autograd holds placeholders where the garbage collector does not look: from them no way may lead
    to an engine, or one that nobody holds any more would never go.
    """
    held = weakref.WeakMethod(method)

    def call(*args: P.args, **kwargs: P.kwargs) -> None:
        if (do := held()) is not None:
            do(*args, **kwargs)

    return call


class ModuleHook:
    """A hook on an engine's module. A copy of the module belongs to no engine: it does nothing."""

    def __init__(self, do: Callable[..., None]) -> None:
        self._do = do

    @torch._disable_dynamo
    def __call__(self, *args: Any) -> None:
        self._do(*args)

    @property
    def __name__(self) -> str:
        """What torch.jit.script asks for."""
        raise AttributeError(str(not_for_jit("a module with the hooks of an engine")))

    def __reduce__(self) -> tuple[Any, ...]:
        return ModuleHook, (_nothing,)


def _nothing(*_: Any) -> None:
    """What a copied hook does."""
