"""Models that no rank holds whole: sharded as they are made, and gathered for a while."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fzero.collectives import broadcast_from_first, gather_many
from fzero.errors import LayoutError, explain
from fzero.mesh import Axis, axis_of
from fzero.packing import pack, unpack
from fzero.partition import plan_layout, shard_rows
from fzero.placeholder import LazyParam, Unit, in_place_of, placeholders


class Nursery:
    """Parameters between their construction and their engine: one unit each, always writable.

    A write (an initializer) gathers the parameter, runs on the full values, and leaves each rank
    its rows of what rank 0 has: the same model that rank 0 alone would have made.
    """

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self.units: list[Unit] = []
        self._open: dict[int, list[Tensor]] = {}
        self._held: dict[int, int] = {}

    def adopt(self, name: str, p: nn.Parameter) -> nn.Parameter:
        """Return the placeholder of `p`, of which only this rank's rows stay."""
        layout = plan_layout(OrderedDict({name: p}), ranks=self.axis.size, bucket_bytes=2**62)
        flat = broadcast_from_first([pack(layout, 0, [p.detach()])], self.axis)[0]
        rows = shard_rows(flat, self.axis.size, self.axis.rank).clone()
        self.units.append(Unit(layout, 0, rows, False))
        # Whoever holds `p` already (`init(p)` follows) then holds the placeholder.
        return in_place_of(p, placeholders(self, len(self.units) - 1)[0])

    def leaf(self, unit: int, position: int) -> Tensor:
        """Return the full values of one parameter; a collective unless it is held."""
        if unit in self._open:
            return self._open[unit][position]
        return self._gathered(unit)[position]

    def begin_write(self, placeholder: LazyParam, func: Any) -> None:
        """Open the parameter for one write."""
        self.hold([placeholder.where[0]], writable=True)

    def end_write(self, placeholder: LazyParam) -> None:
        """Keep this rank's rows of what was written."""
        self.let_go([placeholder.where[0]], written=True)

    def hold(self, units: Sequence[int], *, writable: bool) -> list[list[Tensor]]:
        """Gather `units` until `let_go`; return the leaf of each."""
        for unit in units:
            self._held[unit] = self._held.get(unit, 0) + 1
            if unit not in self._open:
                self._open[unit] = self._gathered(unit)
        return [self._open[unit] for unit in units]

    def let_go(self, units: Sequence[int], *, written: bool) -> None:
        """End a `hold`; what was written is rank 0's."""
        for unit in units:
            self._held[unit] -= 1
            if self._held[unit]:
                continue
            del self._held[unit]
            values = self._open.pop(unit)
            if written:
                layout = self.units[unit].layout
                flat = broadcast_from_first([pack(layout, 0, values)], self.axis)[0]
                self.units[unit].shard.copy_(shard_rows(flat, self.axis.size, self.axis.rank))

    def _gathered(self, unit: int) -> list[Tensor]:
        layout = self.units[unit].layout
        with torch.no_grad():
            flat = gather_many([self.units[unit].shard], self.axis)[0]
        return unpack(layout, 0, flat)


@contextmanager
def sharded_init(mesh: DeviceMesh | Axis | None = None) -> Iterator[None]:
    """Modules made inside keep only this rank's rows of each parameter, as soon as it is made.

    No rank holds more than one full parameter at a time, so a model may be larger than a rank's
    memory. The values are those that rank 0 alone would have made. Initializers may write to the
    parameters, inside and after the block, until an `Engine` takes them over; every rank must
    make the same modules in the same order. On one rank nothing is different.

    Patches `nn.Module.register_parameter` for the length of the block, in the whole process.

    Source: Rajbhandari et al., "ZeRO-Infinity", arXiv 2104.07857, section 7.2.

    Example:
        >>> import torch
        >>> from fzero.adapter import Engine, sharded_init
        >>> with sharded_init():
        ...     model = torch.nn.Linear(3, 2)
        >>> engine = Engine(model, torch.optim.AdamW, stage=3)
    """
    axis = axis_of(mesh)
    if axis.size == 1:
        yield
        return
    nursery = Nursery(axis)
    register = nn.Module.register_parameter

    def register_sharded(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if isinstance(param, nn.Parameter) and not isinstance(
            param, LazyParam | nn.UninitializedParameter
        ):
            param = param if param.is_meta else nursery.adopt(name, param)
        register(self, name, param)

    nn.Module.register_parameter = register_sharded
    try:
        yield
    finally:
        nn.Module.register_parameter = register


@contextmanager
def gathered(
    params: nn.Module | Tensor | Iterable[Tensor],
    *,
    modify: bool = False,
    mesh: DeviceMesh | Axis | None = None,
) -> Iterator[list[Tensor]]:
    """Full parameters for a while, at every stage: yields them, in the order given. A collective.

    Without `modify` they are for reading, and a write to a placeholder raises. With it they may
    be written, in the yielded tensors or through the module; when the block ends, the values of
    rank 0 become those of all ranks, also if the block raises.

    params: a module (all of its parameters), a parameter, or several. mesh: whose ranks, for
    parameters that are whole (stages 0 to 2); default the world.

    Example:
        >>> import torch
        >>> from fzero.adapter import gathered
        >>> model = torch.nn.Linear(2, 1)
        >>> with gathered(model, modify=True) as (weight, bias):
        ...     _ = weight.fill_(1.0)
        >>> model.weight.data
        tensor([[1., 1.]])
    """
    wanted = _listed(params)
    lazy = [p for p in wanted if isinstance(p, LazyParam)]
    units: dict[int, tuple[Any, list[int]]] = {}
    for p in lazy:
        _, ids = units.setdefault(id(p.gatherer), (p.gatherer, []))
        if p.where[0] not in ids:
            ids.append(p.where[0])
    held: list[tuple[Any, list[int]]] = []
    try:
        for owner, ids in units.values():
            owner.hold(ids, writable=modify)
            held.append((owner, ids))
        yield [p.full() if isinstance(p, LazyParam) else p.data for p in wanted]
    finally:
        with torch.no_grad():
            for owner, ids in held:
                owner.let_go(ids, written=modify)
            if modify:
                whole = [p for p in wanted if not isinstance(p, LazyParam)]
                _take_firsts(whole, axis_of(mesh))


def _take_firsts(params: Sequence[Tensor], axis: Axis) -> None:
    """Give every rank the values of rank 0. `copy_` tells the engine that they were written."""
    for p, value in zip(params, broadcast_from_first(params, axis), strict=True):
        p.copy_(value)


def _listed(params: nn.Module | Tensor | Iterable[Tensor]) -> list[Tensor]:
    if isinstance(params, nn.Module):
        return list(params.parameters())
    several = isinstance(params, Iterable) and not isinstance(params, Tensor)
    listed: list[Any] = list(params) if several else [params]
    for p in listed:
        if not isinstance(p, Tensor):
            raise LayoutError(
                explain(
                    f"gathered: expected parameters, got a {type(p).__name__}.",
                    cause="names, named_parameters(), which has pairs, or an engine.",
                    fix="pass a module (engine.module), a parameter, or a list of parameters.",
                )
            )
    return listed
