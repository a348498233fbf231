"""Models that no rank holds whole: sharded as they are made."""

from __future__ import annotations

import weakref
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from fzero.adapter.module import in_place_of
from fzero.collectives import broadcast
from fzero.context.modes import for_training
from fzero.errors.check import require
from fzero.machine import Gatherer, GroupShard, UnitTable
from fzero.machine.packing import pack
from fzero.machine.partition import plan_layout, require_classes, require_own_memory, shard_of
from fzero.machine.placeholder import LazyParam, placeholders
from fzero.ranks.mesh import Axis, MeshLike, Runtime, axis_of


class _UnownedUnits:
    """The units of no model yet: gathered where they are read, on all ranks at once."""

    def __init__(self, gatherer: Gatherer) -> None:
        self._gatherer = gatherer
        self.holds: Counter[int] = Counter()  # how many blocks hold a unit

    def use(self, unit: int) -> None:
        """Gather a unit unless it is held."""
        if unit not in self._gatherer.held:
            for_training(self._gatherer.start, unit, exact=True)
            for_training(self._gatherer.wait, unit)

    def hold(self, units: Sequence[int]) -> Sequence[int]:
        """Gather units; they stay until `let_go`."""
        for unit in units:
            self.use(unit)
        self.holds.update(units)
        return units

    def let_go(self, units: Sequence[int]) -> None:
        """End a `hold`."""
        self.holds.subtract(units)
        for unit in units:
            self.read(unit)

    def read(self, unit: int) -> None:
        """Free a unit that was read, unless a block holds it."""
        if not self.holds[unit]:
            self._gatherer.free(unit)

    def changed(self) -> None:
        """Free everything."""
        for unit in [*self._gatherer.held]:
            self._gatherer.free(unit)


class _Unowned(Gatherer):
    """Parameters between their construction and their engine: a unit each, always writable.

    A write (an initializer) gathers the parameter, runs on the full values, and leaves each rank
    its shard of what rank 0 has: the same model that rank 0 alone would have made.
    """

    def __init__(self, axis: Axis, dtype: torch.dtype | None) -> None:
        self._units = _UnownedUnits(weakref.proxy(self))  # no cycle: shards go with the last user
        super().__init__(UnitTable([], []), self._units)
        self.axis, self.dtype = axis, dtype
        self.made: dict[int, nn.Module] = {}  # modules with parameters of the block
        self._written: set[int] = set()  # groups that are gathered for one write

    def take(self, module: nn.Module) -> None:
        """Shard the parameters of a module, and of those in it, that are whole.

        On one rank they are converted and nothing else.
        """
        if any(_is_whole(p) for p in module.parameters()):
            keeps = self.axis.shards.runtime is Runtime.LOCAL
            require_classes(dict(module.named_parameters()), keeps=keeps)
            require_own_memory(module)
        for part in module.modules():
            for name, p in list(part._parameters.items()):
                if p is not None and _is_whole(p):
                    if self.dtype is not None and p.is_floating_point():
                        p.data = p.data.to(self.dtype)
                    if self.axis.shards.runtime is not Runtime.LOCAL:
                        setattr(part, name, self._sharded(name, p))

    @torch.no_grad()
    def _sharded(self, name: str, p: Any) -> nn.Parameter:
        shards = self.axis.shards
        layout = plan_layout(OrderedDict({name: p}), ranks=shards.size, bucket_bytes=2**62)
        flat = broadcast([pack(layout, 0, [p.detach()])], self.axis, 0)[0]
        own = shard_of(flat, shards.size, shards.rank).clone()
        self.groups.append(GroupShard(layout, 0, own, own.device))
        number = self.table.add(layout, self.axis)
        # Whoever holds `p` already (`init(p)` follows) then holds the placeholder.
        return in_place_of(p, placeholders(self, number)[0])

    def leaf(self, group: int, position: int) -> Tensor:
        """Return the full values; they go at once unless they are held."""
        values = super().leaf(group, position)
        self._units.read(group)
        return values

    def begin_write(self, placeholder: LazyParam, func: Any) -> None:
        """Gather the parameter for one write; refuse it where `gathered` reads."""
        unit = placeholder.where[0]
        if self._units.holds[unit] and not self.writable[unit]:
            super().begin_write(placeholder, func)
        if not self.writable[unit]:
            self._written.add(placeholder.where[0])
            self.hold([placeholder.where[0]], 0)

    def end_write(self, placeholder: LazyParam, values: Tensor) -> None:
        """Keep this rank's shard of what was written."""
        if placeholder.where[0] in self._written:
            self._written.remove(placeholder.where[0])
            self.let_go([placeholder.where[0]], 0)


def _is_whole(p: Tensor) -> bool:
    """Whether a parameter has all of its values on this rank."""
    return not (isinstance(p, LazyParam | nn.UninitializedParameter) or p.is_meta)


@contextmanager
def sharded_init(mesh: MeshLike = None, *, dtype: torch.dtype | None = None) -> Iterator[None]:
    """Modules made inside keep only this rank's shard of each parameter.

    A module is sharded when it becomes a part of another one, or at the end of the block. Until
    then its parameters are whole: those of a list of layers that is given to nn.Sequential later,
    for example. So a model may be larger than a rank's memory. The values are those of rank 0.
    Initializers may write to the placeholders, inside and after the block, until an `Engine` takes
    them over. Every rank must run them.
    Parameters that are on the meta device when the block ends are not sharded: call to_empty()
    inside.
    Every rank must make the same modules in the same order. On one rank nothing is sharded.
    `mesh` is that of the engine: of two dims, the ranks of each replica share a parameter.
    `dtype` is what floating-point parameters made inside are converted to.

    Raises:
        LayoutError: for a dtype that is no floating-point one.

    Source: Rajbhandari et al., "ZeRO-Infinity", arXiv 2104.07857, section 7.2.

    Example:
        >>> import torch
        >>> from fzero.adapter import Engine, sharded_init
        >>> with sharded_init():
        ...     model = torch.nn.Linear(3, 2)
        >>> engine = Engine(model, torch.optim.AdamW, stage=3)
    """
    wanted = "a floating-point torch.dtype, or None"
    good = dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point)
    require("sharded_init: dtype", dtype, lambda _: good, wanted)
    axis = axis_of(mesh)
    if axis.shards.runtime is Runtime.LOCAL and dtype is None:
        yield
        return
    block = _Unowned(axis, dtype)
    with _watched(block):
        yield
    for module in list(block.made.values()):
        block.take(module)


_HERE: ContextVar[_Unowned | None] = ContextVar("sharded_init", default=None)
_BLOCKS: list[_Unowned] = []  # of all virtual ranks
_HANDLES: list[Any] = []


@contextmanager
def _watched(block: _Unowned) -> Iterator[None]:
    """Tell the block of each module and parameter that is registered on this rank.

    torch has these hooks for the process. A virtual rank pauses inside of one, so they are there
    from the first block that begins to the last one that ends, and act for the rank that runs.
    """
    if not _BLOCKS:
        _HANDLES.append(register_module_parameter_registration_hook(_on_parameter))
        _HANDLES.append(register_module_module_registration_hook(_on_module))
    _BLOCKS.append(block)
    before = _HERE.set(block)
    try:
        yield
    finally:
        _HERE.reset(before)
        _BLOCKS.remove(block)
        while _HANDLES and not _BLOCKS:
            _HANDLES.pop().remove()


def _on_parameter(module: nn.Module, name: str, param: Any) -> None:
    block = _HERE.get()
    if block is not None:
        block.made[id(module)] = module


def _on_module(module: nn.Module, name: str, child: Any) -> None:
    block = _HERE.get()
    if block is not None and isinstance(child, nn.Module):
        block.take(child)
