"""A parameter of the full shape without storage: whoever reads it gets the values gathered.

Autograd saves the placeholder, not the values, so what is gathered for a kernel can go when the
kernel has run, and backward gathers it anew. Who gathers, and when, is the `Gathers` behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from fzero.state.layout import Layout
from fzero.virtual import in_forward_mode


class Unit(NamedTuple):
    """One group of one state: what is gathered, and reduced, together."""

    layout: Layout
    index: int
    shard: Tensor
    ordered: bool


class Gathers(Protocol):
    """What a placeholder needs: somebody who has, or gets, full values."""

    @property
    def units(self) -> Sequence[Unit]:
        """What is gathered in one piece; a placeholder names its own by number."""
        ...

    def leaf(self, unit: int, position: int) -> Tensor:
        """Return a full leaf of `unit`, gathering the unit if need be."""
        ...

    def begin_write(self, placeholder: LazyParam, func: Any) -> None:
        """`func` is about to write to it: raise if what is written would be lost."""
        ...

    def end_write(self, placeholder: LazyParam) -> None:
        """It was written."""
        ...


class LazyParam(torch.Tensor):
    """A parameter of the full shape without storage: a leaf of a unit, then some views.

    Any kernel that is given one gets the gathered values; views of it stay lazy.
    """

    gatherer: Gathers
    where: tuple[int, int]  # unit, position of the leaf in it
    meta: Tensor
    views: tuple[Callable[[Tensor], Tensor], ...]

    @staticmethod
    def __new__(
        cls,
        gatherer: Gathers,
        where: tuple[int, int],
        meta: Tensor,
        views: tuple[Callable[[Tensor], Tensor], ...] = (),
    ) -> LazyParam:
        """Make the placeholder; `meta` has its shape and strides."""
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            meta.shape,
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            device=gatherer.units[where[0]].shard.device,
        )
        made.gatherer, made.where, made.meta, made.views = gatherer, where, meta, views
        return made

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    def full(self) -> Tensor:
        """Return the values, gathered."""
        x = self.gatherer.leaf(*self.where)
        for view in self.views:
            x = view(x)
        return x

    def __repr__(self) -> str:
        number, position = self.where
        unit = self.gatherer.units[number]
        leaf = unit.layout.leaves[unit.layout.groups[unit.index].leaves[position]]
        return f"LazyParam({leaf.path}, shape={tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Keep views lazy; gather for everything else."""
        kwargs = kwargs or {}
        written = _written(func, args, kwargs) if func._schema.is_mutable else ()
        for placeholder in written:
            placeholder.gatherer.begin_write(placeholder, func)
        # Forward mode insists that a view and its base share storage, so there it must gather.
        if _is_view(func) and isinstance(args[0], cls) and not in_forward_mode():
            first, rest = args[0], args[1:]
            meta = func(first.meta, *rest, **kwargs)
            if isinstance(meta, Tensor):
                same = func is torch.ops.aten.detach.default  # of values that have no graph
                more = () if same else (_Replay(func, rest, kwargs),)
                return cls(first.gatherer, first.where, meta, (*first.views, *more))
        result = func(*map(_filled, args), **{name: _filled(x) for name, x in kwargs.items()})
        for placeholder in written:
            placeholder.gatherer.end_write(placeholder)
        return result


def _filled(argument: Any) -> Any:
    """An argument of a kernel with values for placeholders: a tensor, or a list of some."""
    if isinstance(argument, LazyParam):
        return argument.full()
    if isinstance(argument, list | tuple):
        return [x.full() if isinstance(x, LazyParam) else x for x in argument]
    return argument


class _Replay:
    """A view op with its arguments, to be applied to the gathered values."""

    __slots__ = ("args", "func", "kwargs")

    def __init__(self, func: Any, args: Any, kwargs: Any) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs

    def __call__(self, x: Tensor) -> Tensor:
        return self.func(x, *self.args, **self.kwargs)


def _written(func: Any, args: Any, kwargs: Any) -> list[LazyParam]:
    """The placeholders among the arguments that `func` writes to."""
    found = []
    for i, argument in enumerate(func._schema.arguments):
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = value if isinstance(value, list | tuple) else [value]
            found += [x for x in given if isinstance(x, LazyParam)]
    return found


def _is_view(func: Any) -> bool:
    return func.is_view or func is torch.ops.aten.detach.default


def placeholders(gatherer: Gathers, unit: int) -> list[LazyParam]:
    """Return a placeholder for each leaf of `unit`."""
    layout, index = gatherer.units[unit].layout, gatherer.units[unit].index
    leaves = [layout.leaves[i] for i in layout.groups[index].leaves]
    metas = [torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") for leaf in leaves]
    return [LazyParam(gatherer, (unit, i), meta) for i, meta in enumerate(metas)]


def in_place_of(old: Tensor, value: Tensor) -> nn.Parameter:
    """Return a parameter of `value` that is `old` for everybody who holds it, if it can be.

    It cannot where somebody has a weak reference to `old`, as recurrent modules do: assign what
    is returned, in any case.
    """
    new = nn.Parameter(value, requires_grad=old.requires_grad)
    try:
        torch.utils.swap_tensors(old, new)
    except RuntimeError:
        return new
    return old  # type: ignore[return-value]
