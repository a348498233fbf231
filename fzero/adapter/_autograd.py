"""What torch's autograd engine tells of the graph task that runs."""

from __future__ import annotations

import torch

_NEEDED = ("_current_graph_task_id", "_will_engine_execute_node")


def autograd_has_callbacks() -> bool:
    """Whether this torch tells graph tasks apart; without it, hooks are counted instead."""
    return all(hasattr(torch._C, name) for name in _NEEDED)


def current_graph_task() -> int | None:
    """The id of the graph task that runs in this thread; -1 for none, None if torch cannot tell."""
    return torch._C._current_graph_task_id() if autograd_has_callbacks() else None
