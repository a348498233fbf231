"""Refuse tensors that a function closes over, where their gradient would be lost."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor, maybe_current_level, maybe_get_level
from torch.overrides import TorchFunctionMode

from fzero.errors import LayoutError, PhaseError

_REQUIRES_GRAD = Tensor.requires_grad.__set__  # type: ignore[attr-defined]


def _next_node() -> int:
    """Return a number that autograd's nodes of this thread have from now on."""
    x = torch.zeros((), requires_grad=True).view(())
    assert x.grad_fn is not None
    return x.grad_fn._sequence_nr()


def _under_a_transform() -> LayoutError:
    return LayoutError(
        "remat: the function calls torch.autograd.grad, and is itself under a torch.func "
        "transform.",
        cause="torch.func.grad, vmap or fzero.compile around it, or a step that is given a batch "
        "that requires grad.",
        fix="call torch.func.grad(f)(x) in the function, which works everywhere; or give the step "
        "x.detach() and write x = x.detach().requires_grad_() in the function.",
    )


class ClosureWatch(TorchFunctionMode):
    """Refuses tensors that are differentiated by and are no arguments: they would be constants."""

    def __init__(self, inputs: Iterable[Tensor], *, records: bool, plain: bool) -> None:
        super().__init__()
        self._inputs, self._records = {id(x): x for x in inputs}, records
        self._plain = plain  # not under torch.func
        self.drawn: dict[int, tuple[torch.Generator, Tensor]] = {}  # with the state at first
        self._start = _next_node() if records and torch.is_grad_enabled() else 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at the arguments, then go on."""
        if func is torch.autograd.grad and not self._plain and maybe_current_level() is None:
            raise _under_a_transform()
        for x in (*args, *(kwargs or {}).values()):
            for part in x if isinstance(x, list | tuple) else (x,):
                if isinstance(part, Tensor):
                    self.refuse(part)
                elif isinstance(part, torch.Generator) and id(part) not in self.drawn:
                    self.drawn[id(part)] = part, part.get_state()
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, list | tuple) else (out,):
            if isinstance(x, Tensor) and self._tracked(x):  # a view of an input, or a new leaf
                self._inputs[id(x)] = x
        if func == _REQUIRES_GRAD:  # x.requires_grad = True, of a tensor that the function made
            self._inputs[id(args[0])] = args[0]
        return out

    def _tracked(self, x: Tensor) -> bool:
        if is_functorch_wrapped_tensor(x):  # of a transform that this call is already below
            return maybe_get_level(x) > (maybe_current_level() or 0)
        if not (self._records and x.requires_grad):
            return False
        # Where the function is recorded, its own tensors require grad, and have later nodes.
        return not self._start or x.grad_fn is None or x.grad_fn._sequence_nr() < self._start

    def refuse(self, x: Tensor) -> None:
        """Raise, if x is differentiated by, and neither an argument nor a view of one."""
        if id(x) not in self._inputs and self._tracked(x):
            raise LayoutError(
                f"remat: the function reads a tensor of {x.dtype}, shape {[*x.shape]}, that "
                "requires grad and was not given to it.",
                cause="a closure, a global or an attribute; its gradient would silently be "
                "missing.",
                fix="pass it as an argument, e.g. fzero.remat(layer)(params, x); for a module, "
                "fzero.remat(module)(x).",
            )


# Leaves that a state was made of: a loss that closes over one would lose its gradient.
#
# `functionalize` and `init` leave a hook on each such leaf that requires grad. It does nothing but
# in the backward of a functional loss, where it raises: elsewhere the module may be trained as
# ever.

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
