"""Leaves that a state was made of: a loss that closes over one would lose its gradient.

`functionalize` and `init` leave a hook on each such leaf that requires grad. It does nothing but in
the backward of a functional loss, where it raises: elsewhere the module may be trained as ever.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor

from fzero.errors import PhaseError

_current_graph_task_id: Any = torch._C._current_graph_task_id


class _Here(threading.local):
    """How many backwards of losses this thread is in.

    On a CPU hooks run in this thread, also those of a checkpoint that runs a backward of its own.
    """

    depth: int = 0


_HERE = _Here()
_TASKS: set[int] = set()
"""The graph tasks of backwards of losses: on a GPU hooks run in a thread of autograd's own."""


@contextmanager
def backward_of(loss: Tensor) -> Iterator[None]:
    """Hooks that run in this block belong to the backward of a functional loss."""
    tasks: list[int] = []

    def begins(_: Tensor) -> None:
        tasks.append(_current_graph_task_id())
        _TASKS.update(tasks)

    handle = loss.register_hook(begins)
    _HERE.depth += 1
    try:
        yield
    finally:
        _HERE.depth -= 1
        _TASKS.difference_update(tasks)
        handle.remove()


@final
class _Refuses:
    """The hook of a leaf called `path`."""

    __slots__ = ("path",)
    __torch_unserializable__ = True  # a pickle leaves it out without a warning

    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self, _: Tensor) -> None:
        """Raise `PhaseError` in the backward of a functional loss."""
        if _HERE.depth or _current_graph_task_id() in _TASKS:
            raise PhaseError(
                f"the loss reads {self.path} of what the state was made of, and not of the params "
                "that it is given: this part of the gradient would be lost.",
                cause="a closure over the module (net.weight, net(x)), or over the tensors that "
                "init was given, beside the params.",
                fix="use the params of the loss: params[...], apply(params, x). Only to read it, "
                "take x.detach() or torch.no_grad(). A module that is trained by its own .grad "
                "beside the state: make the state of copy.deepcopy(module).",
            )


def watch(path: str, leaf: Tensor) -> None:
    """Let the backward of a functional loss raise if it brings a gradient to this leaf."""
    if not (leaf.requires_grad and leaf.is_leaf):
        return
    hooks: Any = leaf._backward_hooks or {}
    if not any(isinstance(hook, _Refuses) for hook in hooks.values()):
        leaf.register_hook(_Refuses(path))
