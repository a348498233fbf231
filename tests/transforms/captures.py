"""Functions of x that hold a tensor w in every way that Python has: w x, but for globals."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Make = Callable[[Any], Callable[[Tensor], Tensor]]  # w -> a function of x


class Scaled:
    """An object that holds a tensor, with a method and a call."""

    def __init__(self, w: Tensor) -> None:
        self.w = w

    def method(self, x: Tensor) -> Tensor:
        return self.w * x

    __call__ = method


class Layer(torch.nn.Module):
    """A module whose parameter is w."""

    def __init__(self, w: Tensor) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(w)

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x


def cell(w: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: w * x


def cell_with_dict(w: Tensor) -> Callable[[Tensor], Tensor]:
    held = {"deep": [(w, "text")], "none": None}
    return lambda x: held["deep"][0][0] * x


def cell_with_function(w: Tensor) -> Callable[[Tensor], Tensor]:
    inner = cell(w)
    return lambda x: inner(x)


def cell_with_object(w: Tensor) -> Callable[[Tensor], Tensor]:
    held = Scaled(w)
    return lambda x: held.w * x


def default(w: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x, w=w: w * x


def keyword_default(w: Tensor) -> Callable[[Tensor], Tensor]:
    def fn(x: Tensor, *, w: Tensor = w) -> Tensor:
        return w * x

    return fn


def wrapped(w: Tensor) -> Callable[[Tensor], Tensor]:
    inner = cell(w)

    @functools.wraps(inner)
    def outer(x: Tensor) -> Tensor:
        return inner(x)

    return outer


def recursive(w: Tensor) -> Callable[[Tensor], Tensor]:
    def fn(x: Tensor, depth: int = 2) -> Tensor:
        return w * x if depth == 0 else fn(x, depth - 1)

    return fn


TENSORS: dict[str, Make] = {
    "cell": cell,
    "cell with dict": cell_with_dict,
    "cell with function": cell_with_function,
    "default": default,
    "keyword default": keyword_default,
    "partial": lambda w: functools.partial(torch.mul, w),
    "partial keyword": lambda w: functools.partial(lambda x, w: w * x, w=w),
    "wrapped": wrapped,
}

# Where it cannot be found: refused, for its gradient would silently be missing.
HIDDEN: dict[str, Make] = {
    "cell with object": cell_with_object,
    "method": lambda w: Scaled(w).method,
    "callable object": lambda w: Scaled(w),
    "recursive": recursive,
}


def module_in_cell(layer: Layer) -> Callable[[Tensor], Tensor]:
    return lambda x: layer(x)


def modules_in_list(layer: Layer) -> Callable[[Tensor], Tensor]:
    layers = [torch.nn.Identity(), layer]
    return lambda x: layers[1](layers[0](x))


def modules_in_dict(layer: Layer) -> Callable[[Tensor], Tensor]:
    layers = {"layer": layer}
    return lambda x: layers["layer"](x)


MODULES: dict[str, Make] = {
    "module": lambda layer: layer,
    "method of a module": lambda layer: layer.forward,
    "module in a cell": module_in_cell,
    "modules in a list": modules_in_list,
    "modules in a dict": modules_in_dict,
    "sequential": lambda layer: torch.nn.Sequential(torch.nn.Identity(), layer),
    "partial of a module": lambda layer: functools.partial(layer),
}
