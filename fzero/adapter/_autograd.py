"""Which graph task torch's autograd engine runs in this thread: one for each call of a backward."""

from __future__ import annotations

import torch


def current_graph_task() -> int:
    """Return the id of the graph task that runs in this thread; -1 outside of every backward."""
    return torch._C._current_graph_task_id()


def in_backward() -> bool:
    """Return whether a backward runs in this thread."""
    return current_graph_task() >= 0
