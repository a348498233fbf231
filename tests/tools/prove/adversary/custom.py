"""Ops of the user whose names are those of ATen, and functions of autograd by hand."""

# ruff: noqa: E501
# A table has a program a line.

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import fzero
from tests.tools.prove.adversary.places import (
    Fn,
    as_data,
    as_own,
    as_update,
    as_weights,
    in_update,
    mean_gradients,
    on_many,
    stepped,
)
from tests.tools.prove.adversary.programs import Program, of_step

KIND = "custom ops"
_ONE, _TWO = "(Tensor x) -> Tensor", "(Tensor x, Tensor y) -> Tensor"
_WRITES = "(Tensor(a!) x, Tensor y) -> Tensor(a!)"
_IN_PLACE = "(Tensor(a!) x) -> Tensor(a!)"

# name: (schema, what it computes, whether it is tagged as pointwise)
OPS: dict[str, tuple[str, Callable[..., Any], bool]] = {
    "clone": (_ONE, lambda x: x / 3, False),
    "detach": (_ONE, lambda x: x * 2, False),
    "alias": (_ONE, lambda x: x + 1, False),
    "lift_fresh_copy": (_ONE, lambda x: x.flip(0), False),
    "_to_copy": (_ONE, torch.square, False),
    "t": (_ONE, lambda x: x.flip(1), False),
    "view": ("(Tensor x, int[] size) -> Tensor", lambda x, size: x.reshape(size).flip(0), False),
    "_unsafe_view": ("(Tensor x, int[] size) -> Tensor", lambda x, size: x.reshape(size) * 2, False),
    "neg": (_ONE, torch.abs, True),
    "zeros_like": (_ONE, torch.ones_like, False),
    "ones_like": (_ONE, torch.zeros_like, False),
    "sum": (_ONE, lambda x: x.sum() * 2, False),
    "linalg_vector_norm": (_ONE, lambda x: x.abs().sum(), False),
    "sqrt": (_ONE, torch.square, True),
    "all": (_ONE, torch.any, False),
    "add": (_TWO, lambda x, y: x - y, True),
    "sub": (_TWO, lambda x, y: x + y, True),
    "mul": (_TWO, lambda x, y: x + y, True),
    "div": (_TWO, lambda x, y: x - 3 * y, True),
    "eq": (_TWO, torch.ne, True),
    "where": (_TWO, torch.maximum, True),
    "cat": ("(Tensor[] xs) -> Tensor", lambda xs: torch.cat(xs[::-1]), False),
    "stack": ("(Tensor[] xs) -> Tensor", lambda xs: torch.stack(xs) * 2, False),
    "copy_": (_WRITES, lambda x, y: x.copy_(y * 2), False),
    "zero_": (_IN_PLACE, lambda x: x.fill_(1.0), False),
    "add_": (_WRITES, lambda x, y: x.sub_(y), True),
    "all_reduce": (_ONE, lambda x: x * 2, False),
    "all_gather": (_ONE, lambda x: torch.cat([x, x.flip(0)]), False),
    "update": (_ONE, lambda x: x * 0.5, False),
    "mine": (_ONE, lambda x: x.sign() * 0.1, True),
}  # fmt: skip


@functools.cache
def _library() -> Any:
    """The ops, in a namespace of their own."""
    library = torch.library.Library("fzero_adversary", "FRAGMENT")
    for name, (schema, fn, pointwise) in OPS.items():
        library.define(f"{name}{schema}", tags=(torch.Tag.pointwise,) if pointwise else ())
        library.impl(name, fn, "CompositeExplicitAutograd")
    return library


def _op(name: str, *more: Any) -> Fn:
    def call(x: Tensor) -> Tensor:
        _library()
        return getattr(torch.ops.fzero_adversary, name)(x, *more)

    return call


def _of_two(name: str) -> Fn:
    return lambda x: _op(name, x.flip(0))(x)


def _writes(name: str) -> Fn:
    return lambda x: _op(name, x * 0.5)(x.clone())


# What an op is taken for by its name, and the op.
PAIRS: dict[str, tuple[Fn, Fn]] = {
    "clone": (torch.clone, _op("clone")),
    "detach": (torch.detach, _op("detach")),
    "alias": (lambda x: x.view_as(x), _op("alias")),
    "lift_fresh_copy": (torch.clone, _op("lift_fresh_copy")),
    "_to_copy": (torch.clone, _op("_to_copy")),
    "t of t": (torch.clone, lambda x: _op("t")(x)),
    "view": (lambda x: x.view(-1).view_as(x), lambda x: _op("view", [-1])(x).view_as(x)),
    "_unsafe_view": (torch.clone, lambda x: _op("_unsafe_view", list(x.shape))(x)),
    "neg": (torch.neg, _op("neg")),
    "zeros_like": (lambda x: x + torch.zeros_like(x), lambda x: x + _op("zeros_like")(x)),
    "ones_like": (lambda x: x * torch.ones_like(x), lambda x: x * _op("ones_like")(x)),
    "sum": (lambda x: x / (9 + x.sum()), lambda x: x / (9 + _op("sum")(x))),
    "norm": (lambda x: x / x.norm(), lambda x: x / _op("linalg_vector_norm")(x)),
    "sqrt": (lambda x: x.abs().sqrt(), lambda x: _op("sqrt")(x.abs())),
    "all": (lambda x: x * (x > 0).all(), lambda x: x * _op("all")(x > 0)),
    "add": (lambda x: x + x.flip(0), _of_two("add")),
    "sub": (lambda x: x - x.flip(0), _of_two("sub")),
    "mul": (lambda x: x * x.flip(0), _of_two("mul")),
    "div": (lambda x: x / x.flip(0), _of_two("div")),
    "eq": (lambda x: x * (x == x.flip(1)), lambda x: x * _op("eq", x.flip(1))(x)),
    "where": (torch.clone, lambda x: _op("where", x.flip(0))(x)),
    "cat": (
        lambda x: torch.cat([x[:2], x[2:]]),
        lambda x: _op("cat")([x[:2], x[2:]]),
    ),
    "stack": (
        lambda x: torch.stack([x, x])[0],
        lambda x: _op("stack")([x, x])[0],
    ),
    "copy_": (lambda x: torch.empty_like(x).copy_(x * 0.5), _writes("copy_")),
    "zero_": (torch.zeros_like, lambda x: _op("zero_")(x.clone())),
    "add_": (lambda x: x + x * 0.5, _writes("add_")),
    "update": (torch.clone, _op("update")),
    "mine": (torch.clone, _op("mine")),
}


class _Scaled(torch.autograd.Function):
    """The identity, whose gradient is `by` times as large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * (3 if fzero.axis_size() > 1 else 1)


class _Reduced(torch.autograd.Function):
    """The identity, which sums its gradient over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return fzero.psum(grads[0])


class _Clipped(_Scaled):
    """The identity, which clips its gradient by the root of the number of ranks."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0].clamp(-0.1 / fzero.axis_size(), 0.1 / fzero.axis_size())


def _hooked(by: Fn) -> Fn:
    def fn(w: Tensor) -> Tensor:
        w = w * 1
        w.register_hook(by)
        return w

    return fn


OF_AUTOGRAD: dict[str, Fn] = {
    "a backward of its own": _Scaled.apply,
    "a backward that sums over ranks": _Reduced.apply,
    "a backward that clips": _Clipped.apply,
    "a hook": _hooked(lambda g: g * fzero.axis_size()),
    "a hook that sums over ranks": _hooked(lambda g: fzero.psum(g)),
    "a hook that averages squares": _hooked(lambda g: fzero.pmean(g.square()).sqrt()),
    "a hook of the rank": _hooked(lambda g: g * (1 + fzero.axis_index())),
}


def _alias_of(name: str) -> Fn:
    """In the place of the reduction of an own gradient."""

    def step(state: Any, x: Tensor) -> Any:
        g = mean_gradients(state, x)
        w = _op(name)(g["w"])[:4] if fzero.axis_size() > 1 else g["w"]
        return stepped(state, {**g, "w": w}, reduced=True), x.sum()

    return step


def programs() -> Iterator[Program]:
    for i, (name, pair) in enumerate(PAIRS.items()):
        many = on_many(*pair)
        yield as_update(KIND, name, many, options={"stage": i % 4})
        if name not in ("eq", "all"):
            yield as_own(KIND, f"{name} of several ranks", many)
        if i % 3 == 0 and name not in ("lift_fresh_copy", "cat"):
            yield as_data(KIND, name, many, world=3)
    for name in ("clone", "mine", "all_reduce", "update"):
        yield as_own(
            KIND, f"{name}, which is no linear op", lambda g, name=name: _op("mine")(_op(name)(g))
        )
    yield of_step(KIND, "all_reduce in place of a mean", _alias_of("all_reduce"))
    yield of_step(KIND, "update in place of a mean", _alias_of("update"))
    yield in_update(KIND, "norm", on_many(*PAIRS["norm"]))
    for name, fn in OF_AUTOGRAD.items():
        yield as_weights(KIND, name, fn)
