"""The axioms of the collectives, for ranks that all run the same op on their own values.

x whole on each rank, x_r of rank r:
    all_gather(part r of x)       x                 on every rank
    all_reduce(x_r)               sum over r of x_r
    reduce_scatter(x_r)           part r of the sum over r of x_r
"""

from __future__ import annotations

from fzero.tools.prove._reading import Reading
from fzero.tools.prove._terms import Value, mapped

COLLECTIVES = frozenset({"all_gather", "all_reduce", "reduce_scatter"})


def collective(reading: Reading, name: str, value: Value, size: int) -> Value | str:
    """Return what a collective over `size` ranks gives, or why that is not known."""
    world = reading.world
    if reading.one_rank or size != world:
        return f"it is over {size} ranks, and there are {1 if reading.one_rank else world}"
    if name == "all_gather":
        return _gathered(value, world)
    if value.spread:
        return "it sums parts of ranks that are not the same elements"
    summed = mapped(value, reading.over_ranks)
    if name == "all_reduce":
        return summed
    if not value.shape or value.shape[0] % world:
        return f"its operand of shape {list(value.shape)} has no {world} equal parts"
    return summed._replace(shape=(value.shape[0] // world, *value.shape[1:]), spread=True)


def _gathered(value: Value, world: int) -> Value | str:
    if any(x.term.varies for piece in value.pieces for x in piece.sum):
        return "it gathers values that each rank has made of its own batch"
    if not value.shape:
        return "its operand has no dim"
    shape = (value.shape[0] * world, *value.shape[1:])
    pieces = value.pieces if value.spread else value.pieces * world
    return Value(shape, pieces)
