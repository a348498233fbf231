"""Closure conversion: the tensors that a function reaches without being given them.

A rule that recomputes a function must differentiate by these too; a tensor left in a closure
would silently be a constant. What can be found is made an input; the rest is refused by `Watch`.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import optree
import torch
from torch import Tensor
from torch._C._functorch import (
    is_functorch_wrapped_tensor,
    maybe_current_level,
    maybe_get_level,
)
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils import stateless
from torch.overrides import TorchFunctionMode

from fzero.errors import LayoutError, explain
from fzero.state import NAMESPACE

Rebuild = Callable[[Sequence[Any]], Any]  # tensors -> the same thing around these tensors
_WALKED = (Tensor, torch.nn.Module, functools.partial, types.MethodType, types.FunctionType)


@dataclass(slots=True)
class Captured:
    """A function with what it holds: tensors in cells, defaults and partials; modules."""

    tensors: list[Tensor] = field(default_factory=list)
    modules: dict[int, torch.nn.Module] = field(default_factory=dict)
    rebuild: Rebuild = lambda _: None
    recursive: bool = False

    def inputs(self) -> list[Tensor]:
        """Return every tensor the function holds, in the order that `call` takes them."""
        held = [p for m in self.modules.values() for _, p in _named(m)]
        return [*self.tensors, *held]

    def call(self, tensors: Sequence[Any], args: Any, kwargs: Any) -> Any:
        """Call the function with other tensors in the places of `inputs()`."""
        fn = self.rebuild(tensors[: len(self.tensors)])
        start = len(self.tensors)
        with ExitStack() as stack:
            for module in self.modules.values():
                names = [name for name, _ in _named(module)]
                swapped = dict(zip(names, tensors[start : start + len(names)], strict=True))
                stack.enter_context(stateless._reparametrize_module(module, swapped))
                start += len(names)
            return fn(*args, **kwargs)


def captured(fn: Any) -> Captured:
    """Find what `fn` holds. Raises `LayoutError` for a module that updates buffers."""
    found = Captured()
    found.rebuild = _walk(fn, found, frozenset())
    smooth = [t for t in found.tensors if t.requires_grad or is_functorch_wrapped_tensor(t)]
    if found.recursive and smooth:  # its inner calls reach the tensors by the old cells
        raise LayoutError(_message(smooth[0]))
    return found


class Watch(TorchFunctionMode):
    """Refuses tensors that are differentiated by and are no inputs: they would be constants."""

    def __init__(self, inputs: Iterable[Tensor]) -> None:
        super().__init__()
        self._inputs = {id(x): x for x in inputs}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at the arguments, then go on."""
        for x in (*args, *(kwargs or {}).values()):
            for part in x if isinstance(x, list | tuple) else (x,):
                if isinstance(part, Tensor) and id(part) not in self._inputs and _tracked(part):
                    raise LayoutError(_message(part))
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, list | tuple) else (out,):
            if isinstance(x, Tensor) and _tracked(x):  # a view of an input
                self._inputs[id(x)] = x
        return out


def _tracked(x: Tensor) -> bool:
    if is_functorch_wrapped_tensor(x):  # of a transform that this call is already below
        return maybe_get_level(x) > (maybe_current_level() or 0)
    return x.requires_grad and not torch.is_grad_enabled()


def _message(x: Tensor) -> str:
    return explain(
        f"remat: the function reads a tensor of {x.dtype} that requires grad and was not given "
        "to it.",
        cause="it is a global, an attribute of a plain object, or in a recursive closure; its "
        "gradient would silently be missing.",
        fix="pass it as an argument, e.g. fzero.remat(layer)(params, x).",
    )


def _walk(value: Any, found: Captured, above: frozenset[int]) -> Rebuild:
    if id(value) in above:  # a recursive function reaches itself through its own cell
        found.recursive = True
        return lambda _: value
    above = above | {id(value)}
    if isinstance(value, Tensor):
        at = len(found.tensors)
        found.tensors.append(value)
        return lambda tensors: tensors[at]
    if isinstance(value, torch.nn.Module):
        _refuse_updates(value)
        found.modules[id(value)] = value
    elif isinstance(value, functools.partial):
        parts = [_walk(part, found, above) for part in (value.func, value.args, value.keywords)]
        return lambda ts: functools.partial(parts[0](ts), *parts[1](ts), **parts[2](ts))
    elif isinstance(value, types.MethodType):
        _walk(value.__self__, found, above)
    elif isinstance(value, types.FunctionType):
        return _function(value, found, above)
    elif isinstance(value, dict | list | tuple):
        return _container(value, found, above)
    return lambda _: value


def _function(fn: types.FunctionType, found: Captured, above: frozenset[int]) -> Rebuild:
    before = len(found.tensors)
    cells = list(fn.__closure__ or ())
    filled = [i for i, cell in enumerate(cells) if _is_set(cell)]
    contents = [_walk(cells[i].cell_contents, found, above) for i in filled]
    defaults = _walk(fn.__defaults__ or (), found, above)
    keywords = _walk(fn.__kwdefaults__ or {}, found, above)
    if len(found.tensors) == before:
        return lambda _: fn

    def rebuild(tensors: Sequence[Any]) -> Any:
        new = list(cells)
        for i, content in zip(filled, contents, strict=True):
            new[i] = types.CellType(content(tensors))
        made = types.FunctionType(
            fn.__code__, fn.__globals__, fn.__name__, defaults(tensors), tuple(new)
        )
        made.__kwdefaults__ = keywords(tensors)
        return made

    return rebuild


def _container(value: Any, found: Captured, above: frozenset[int]) -> Rebuild:
    leaves, treespec = optree.tree_flatten(value, namespace=NAMESPACE)
    parts = [_walk(x, found, above) if isinstance(x, _WALKED) else None for x in leaves]
    if not any(parts):
        return lambda _: value

    def rebuild(tensors: Sequence[Any]) -> Any:
        pairs = zip(leaves, parts, strict=True)
        return optree.tree_unflatten(treespec, [x if p is None else p(tensors) for x, p in pairs])

    return rebuild


def _refuse_updates(module: torch.nn.Module) -> None:
    for name, part in module.named_modules():
        if isinstance(part, _NormBase) and part.training and part.track_running_stats:
            raise LayoutError(
                explain(
                    f"remat: {name or 'the module'} ({type(part).__name__}) updates its running "
                    "statistics, and would do so again when it is recomputed.",
                    cause="a batch norm in train mode inside remat.",
                    fix="leave it out of remat, or put it in eval mode.",
                )
            )


def _named(module: torch.nn.Module) -> list[tuple[str, Tensor]]:
    return list(module.named_parameters(remove_duplicate=False))


def _is_set(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - an empty cell raises
    except ValueError:
        return False
    return True
