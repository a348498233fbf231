"""What torch's autograd engine tells of the graph task that runs, and of its end."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

from fzero.virtual import current_ranks

_NEEDED = ("_current_graph_task_id", "_will_engine_execute_node")


def autograd_has_callbacks() -> bool:
    """Whether this torch tells graph tasks apart; without it, hooks are counted instead."""
    return all(hasattr(torch._C, name) for name in _NEEDED)


def current_graph_task() -> int | None:
    """The id of the graph task that runs in this thread; -1 for none, None if torch cannot tell."""
    return torch._C._current_graph_task_id() if autograd_has_callbacks() else None


def called_by_autograd_grad() -> bool:
    """Whether `torch.autograd.grad` is running, which accumulates no gradient anywhere.

    On a GPU this is asked in the device's thread, while the caller waits in another. A virtual
    rank's backward runs in its own thread, and another rank may be in a call of its own.
    """
    wanted = torch.autograd.grad.__code__
    frames = sys._current_frames()
    own = current_ranks() is not None
    for top in [frames[threading.get_ident()]] if own else frames.values():
        frame: Any = top
        while frame is not None:
            if frame.f_code is wanted:
                return True
            frame = frame.f_back
    return False


class Callback:
    """What autograd calls when a graph task ends. A task that raises lets it die uncalled."""

    __slots__ = ("__weakref__", "_run", "_task")

    def __init__(self, run: Callable[[int], None], task: int) -> None:
        self._run, self._task = run, task

    def __call__(self) -> None:
        self._run(self._task)
