"""Logical ranks that run together: virtual ranks of each rank, whose collectives span all of them.

    a value of each logical rank -> those of this rank, when its last one comes
        -> those of all logical ranks, from the other ranks -> what is made of them

A collective in a loss of logical ranks needs all L of them at one place. Each rank runs its own as
virtual ranks; the one that comes last asks the other ranks for their rows, and makes the result as
virtual ranks of one process make it, from all L values in order. So its bits, and the order of its
sums, are those of L ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from fzero.collectives._lowering import Told, any_of
from fzero.collectives._performers import performer_of
from fzero.collectives._tree import gather_values
from fzero.context.here import Here, Make, be, current_ranks, standing_as
from fzero.context.modes import for_training
from fzero.errors import PhaseError
from fzero.ranks.mesh import Axis, Carried, Runs, Runtime, carrying, running_on
from fzero.ranks.virtual import run_ranks

T = TypeVar("T")


def run_together(body: Callable[[int], T], carried: Carried, axis: Axis) -> list[T]:
    """Run `body(place)` for each logical rank of this rank; return the results in their order.

    In it they are ranks of an axis of all logical ranks. All ranks of `axis` call it. The first
    exception of a logical rank is raised here; other ranks hear of it from who catches it.
    """
    outer = current_ranks()
    ended: list[BaseException] = []  # the run of this rank itself, while it waited for others
    met = [""]  # the call of which all ranks were told last: its values are exchanged next
    runtime = Runtime.LOCAL if carried.size == 1 else Runtime.VIRTUAL
    logical = Axis(name=axis.name, size=carried.size, runtime=runtime)

    def one(place: int) -> T:
        here = current_ranks()
        assert here is not None
        among = here.exchange

        def exchange(op: str, value: Any, make: Make) -> Any:
            def made(own: list[Any]) -> Any:
                try:
                    with standing_as(outer):
                        everyone = for_training(_of_all, op, own, carried.size, axis, met)
                except Exception:
                    raise
                except BaseException as error:
                    ended.append(error)
                    raise PhaseError(
                        f"{op}: the run of this rank was ended.",
                        cause="an error of another rank, or an interrupt.",
                        fix="see that error.",
                    ) from None
                return make(everyone)

            return among(op, value, made)

        be(Here(carried.ranks[place], carried.size, exchange, {}))
        now = Carried(carried.size, carried.ranks, carried.ranks[place], Runs.TOGETHER)
        with running_on(logical), carrying(now):
            return body(place)

    try:
        names = [f"logical rank {rank}" for rank in carried.ranks]
        return run_ranks(one, len(names), names)
    except BaseException:
        if ended:
            raise ended[0] from None
        raise


@torch.no_grad()
def _of_all(op: str, own: Sequence[Any], size: int, axis: Axis, met: list[str]) -> list[Any]:
    """Return the values of all logical ranks, of which this rank has some. A collective."""
    performer = performer_of(axis)
    if performer is None:
        return list(own)
    called, text = op.partition("[")[0], f"{op} of logical ranks in a loss"
    if isinstance(own[0], Told):
        met[0] = called
        return list(performer.call_with(text, lambda: any_of(own)))
    if called != met[0]:
        performer.call(text)
    met[0] = ""
    values = [_tensors(op, value, size) for value in own]
    columns = [_column(column, size, axis) for column in zip(*values, strict=True)]
    return [list(row) for row in zip(*columns, strict=True)]


def _tensors(op: str, value: Any, size: int) -> list[Tensor]:
    several = isinstance(value, list | tuple)
    given = [*cast("Sequence[Any]", value)] if several else [value]
    if all(isinstance(x, Tensor) for x in given):
        return given
    raise PhaseError(
        f"{op} in a loss, where ranks carry several logical ranks.",
        cause="a call that tells other ranks what is no tensor.",
        fix=f"make it outside of the loss, or run it on {size} ranks.",
    )


def _column(own: Sequence[Tensor], size: int, axis: Axis) -> Sequence[Tensor]:
    if not own[0].numel():
        return [own[0]] * size
    return gather_values(torch.stack([*own]), axis, size).unbind()
