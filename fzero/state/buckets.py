"""Which bucket of gradients may cross ranks now, in one backward: integers, no tensors.

A bucket is full when each of its parameters has its gradient. With `in_turn` (stages 0 to 2)
bucket i is launched only after all before it, so that ranks that use other parameters, or use
them in another order, still issue the same collectives in the same order; what is not full when
the backward ends is launched then. Without it (stage 3, where ranks agree on each collective) a
bucket is launched as soon as it is full, and one that nothing touched is not launched.

Li et al., "PyTorch Distributed", VLDB 2020, section 3.2.3 (buckets in one order on all ranks).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """One backward's progress through `count` buckets; the rest is reset by `finish`.

    Sets of buckets are the bits of an int: to change one costs the same whatever their number.
    """

    count: int
    in_turn: bool = True
    turn: int = 0  # in_turn: buckets before it were launched
    full: int = 0  # in_turn, bit i: bucket turn + i is full; bit 0 is 0, or it would have gone
    launched: int = 0  # not in_turn, bit i: bucket i was launched


@dataclass(frozen=True, slots=True)
class Launch:
    """Start the reduction of these buckets, in this order, with all that waits for them here."""

    buckets: tuple[int, ...]


Launches = tuple[Launch, ...]


def filled(s: Buckets, bucket: int) -> tuple[Buckets, Launches]:
    """All gradients of `bucket` are here; Launch what may go now.

    Again for a bucket that was launched (a weight that is used inside and outside of a reentrant
    checkpoint does that): nothing happens, what came late waits for the next launch.

    Example:
        >>> s = Buckets(count=2)
        >>> s, effects = filled(s, 1)  # not its turn
        >>> effects
        ()
        >>> filled(s, 0)[1]
        (Launch(buckets=(0, 1)),)
    """
    if bucket < s.turn or s.launched >> bucket & 1:
        return s, ()
    if not s.in_turn:
        return replace(s, launched=s.launched | 1 << bucket), (Launch((bucket,)),)
    full = s.full | 1 << (bucket - s.turn)
    gone = (~full & (full + 1)).bit_length() - 1  # the ones at the low end: it is their turn
    moved = replace(s, turn=s.turn + gone, full=full >> gone)
    return moved, ((Launch(tuple(range(s.turn, s.turn + gone))),) if gone else ())


def finish(s: Buckets, waiting: Collection[int] = ()) -> tuple[Buckets, Launches]:
    """The backward is over: Launch what is left, and start again.

    What is left is every bucket that was not launched; without `in_turn`, those of them that are
    `waiting` with a gradient.

    Example:
        >>> finish(Buckets(count=3))[1]
        (Launch(buckets=(0, 1, 2)),)
        >>> finish(Buckets(count=3, in_turn=False), {2})[1]
        (Launch(buckets=(2,)),)
    """
    if s.in_turn:
        left = tuple(range(s.turn, s.count))
    else:
        left = tuple(bucket for bucket in sorted(waiting) if not s.launched >> bucket & 1)
    return restart(s), ((Launch(left),) if left else ())


def restart(s: Buckets) -> Buckets:
    """A backward begins, or was given up: nothing is full."""
    return Buckets(count=s.count, in_turn=s.in_turn)
