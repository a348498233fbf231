"""Stage 3's parameters: tensors that are gathered when a kernel reads them, and not before.

    shard --Defer--> LazyParam            (autograd sees a tensor of the full shape)
    kernel reads LazyParam --> Gatherer.full(group) --> all_gather, kept while the unit runs
    backward reads the LazyParam that autograd saved --> gathered again
    gradients of a unit's leaves --> one reduce_scatter

Autograd saves the placeholder, not the gathered values, so a unit's full parameters live while
the unit runs in forward, and again in backward, without recomputing activations.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from fzero.collectives import exchange_ids, gather_many, scatter_many
from fzero.errors import AxisError, LayoutError, explain
from fzero.mesh import Axis, Runtime
from fzero.packing import pack, pack_copied, unpack
from fzero.placeholder import LazyParam, Unit, placeholders

CAPACITY = 2  # units held at once: the one that runs, and the one that it takes over from


_RAISED, _MEETS = -1, -2  # what a rank says in the place of an ask


class _Ask(IntEnum):
    """What a rank wants the others to take part in."""

    GATHER = 0  # the shards of a group
    REDUCE = 1  # the gradient of a group, in the one final backward
    INNER_REDUCE = 2  # a gradient taken inside the loss (a gradient penalty)
    INNER_GATHER = 3  # the cotangent of one of those


class Gatherer:
    """The collectives of one stage-3 gradient call: what is gathered, and who asked for it.

    Ranks may use different parameters, or none (experts chosen by the data): before each
    collective the ranks exchange what they are about to ask for, eight bytes each, and serve
    the union of it in one order. A rank that has finished goes on serving until all have, and
    a rank that raises tells the others, so that nobody waits for ever.

    With `lockstep` the ranks have promised to read the same units in the same order: nothing is
    exchanged (on GPUs each exchange would wait for the device).

    Lives for one call of `grad_and_reduce`; no state survives it.
    """

    def __init__(self, units: Sequence[Unit], axis: Axis, *, lockstep: bool) -> None:
        self.units = units
        self.axis, self.lockstep = axis, lockstep
        self._held: OrderedDict[int, list[Tensor]] = OrderedDict()
        self._served: dict[int, Tensor] = {}
        self._final = False

    def leaf(self, unit: int, position: int) -> Tensor:
        """Return a full leaf of `unit`, gathering the unit unless it is still held."""
        if unit in self._held:
            self._held.move_to_end(unit)
            return self._held[unit][position]
        while len(self._held) >= CAPACITY:  # make room first: never three units at once
            self._held.popitem(last=False)
        layout, index = self.units[unit].layout, self.units[unit].index
        self._held[unit] = unpack(layout, index, self.collective(_Ask.GATHER, unit, None))
        return self._held[unit][position]

    def begin_write(self, placeholder: LazyParam, func: Any) -> None:
        """Refuse: a write would reach the gathered copy only, and be forgotten."""
        raise LayoutError(
            explain(
                f"the loss writes to {placeholder!r} in place ({func}).",
                cause="an in-place method (add_, copy_, ...) on a parameter.",
                fix="clone it first, or use the out-of-place form; losses are pure.",
            )
        )

    def end_write(self, placeholder: LazyParam) -> None:
        """Not reached: `begin_write` raises."""

    def begin_backward(self) -> None:
        """Let go of what forward gathered: it is not kept for backward."""
        self._held.clear()
        self._final = True

    def reduce(self, unit: int, local: Tensor) -> Tensor:
        """Return this rank's rows of the sum over ranks of `local` [W l]."""
        return self.collective(_Ask.REDUCE if self._final else _Ask.INNER_REDUCE, unit, local)

    def collective(self, ask: _Ask, unit: int, value: Tensor | None) -> Tensor:
        """Take part in collectives until `ask` for `unit` was served; return its result."""
        if self.lockstep:
            return self._run(ask, self.units[unit], value)
        mine = ask * len(self.units) + unit + 1
        return self._serve(self._exchange(mine), mine, value)[mine]

    def finish(self) -> dict[int, Tensor]:
        """Serve until every rank is done; return the gradient rows of units not used here."""
        self._held.clear()
        while not self.lockstep and any(asked := self._exchange(0)):
            self._serve(asked, 0, None)
        return self._served

    def abort(self) -> None:
        """Tell the other processes that this rank raised; virtual ranks are told anyway."""
        self._held.clear()
        if self.axis.runtime is Runtime.PROCESSES and not self.lockstep:
            exchange_ids(_RAISED, self.axis)

    def _exchange(self, mine: int) -> list[int]:
        asked = exchange_ids(mine, self.axis)
        _require_no_failure(asked, self.axis)
        if _MEETS in asked:
            raise _apart(self.axis, asked.index(_MEETS), self.axis.rank)
        return asked

    def _serve(self, asked: list[int], mine: int, value: Tensor | None) -> dict[int, Tensor]:
        results = {}
        for code in sorted({code for code in asked if code}):
            ask, unit = divmod(code - 1, len(self.units))
            result = self._run(_Ask(ask), self.units[unit], value if code == mine else None)
            if code == mine:
                results[code] = result
            elif ask == _Ask.REDUCE:  # others used it: its gradient here is what they sum to
                before = self._served.get(unit)
                self._served[unit] = result if before is None else before + result
        return results

    def _run(self, ask: _Ask, unit: Unit, value: Tensor | None) -> Tensor:
        shard = unit.shard.detach()
        with torch.no_grad():
            if ask is _Ask.GATHER:
                return gather_many([shard], self.axis)[0]
            if ask is _Ask.INNER_GATHER:
                value = torch.zeros_like(shard) if value is None else value
                return gather_many([value], self.axis)[0]
            if value is None:
                value = shard.new_zeros(unit.layout.full_numel(unit.index))
            return scatter_many([value], self.axis, ordered=unit.ordered)[0]


class PeerFailedError(AxisError):
    """Another rank raised; nobody needs to be told so again."""


def meet(axis: Axis) -> None:
    """Raise unless every rank has come to the end of its window: its gradients are all made."""
    asked = exchange_ids(_MEETS, axis)
    _require_no_failure(asked, axis)
    for rank, code in enumerate(asked):
        if code != _MEETS:
            raise _apart(axis, axis.rank, rank)


def _require_no_failure(asked: Sequence[int], axis: Axis) -> None:
    failed = [rank for rank, code in enumerate(asked) if code == _RAISED]
    if failed:
        raise PeerFailedError(
            explain(
                f"rank {axis.rank}: the loss raised on rank{'s' * (len(failed) > 1)} "
                f"{failed}, so this gradient cannot be reduced.",
                cause="an error in the loss function, on that rank only.",
                fix=f"see the error of rank {failed[0]}; the state here is unchanged.",
            )
        )


def _apart(axis: Axis, done: int, busy: int) -> PeerFailedError:
    return PeerFailedError(
        explain(
            f"rank {axis.rank}: rank {done} reduces its window while rank {busy} is in "
            "grad_and_reduce.",
            cause='another number of calls in a window on some ranks, at stage 3 with keep="unit", '
            "where every call is a collective.",
            fix='make as many calls on every rank, or use keep="window": then they may differ.',
        )
    )


class _Defer(torch.autograd.Function):
    """seat -> the lazy leaves of one unit.

    `seat` is what the caller differentiates by: this rank's shard (`reduces`), whose gradient is
    the reduce-scattered one; or a full-sized stand-in, whose gradient is this rank's own.
    """

    @staticmethod
    def forward(seat: Tensor, gatherer: Gatherer, unit: int, reduces: bool) -> tuple[Tensor, ...]:
        return tuple(placeholders(gatherer, unit))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.gatherer, ctx.unit, ctx.reduces = inputs

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Any, ...]:
        unit = ctx.gatherer.units[ctx.unit]
        together = pack if torch.is_grad_enabled() else pack_copied
        local = together(unit.layout, unit.index, dys)
        if ctx.reduces:
            local = _Reduce.apply(local, ctx.gatherer, ctx.unit)
        return local, None, None, None


class _Reduce(torch.autograd.Function):
    """local [W l] -> rows of the sum over ranks [l]; its adjoint gathers, asking like the rest."""

    @staticmethod
    def forward(local: Tensor, gatherer: Gatherer, unit: int) -> Tensor:
        return gatherer.reduce(unit, local)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.gatherer, ctx.unit = inputs

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        return ctx.gatherer.collective(_Ask.INNER_GATHER, ctx.unit, dy), None, None


def defer(seat: Tensor, gatherer: Gatherer, unit: int, *, reduces: bool) -> list[Tensor]:
    """Return the lazy leaves of `unit`, differentiable by `seat`."""
    return list(_Defer.apply(seat, gatherer, unit, reduces))
