"""Which bucket of gradients may cross ranks now, in one backward: integers, no tensors.

A bucket is ready when each of its parameters has its gradient. With `in_turn` (stages 0 to 2)
bucket i is launched only after all before it, so that ranks that use other parameters, or use
them in another order, still issue the same collectives in the same order; what is not ready when
the backward ends is launched then. Without it (stage 3, where ranks agree on each collective) a
bucket is launched as soon as it is ready, and one that nothing touched is not launched.

Li et al., "PyTorch Distributed", VLDB 2020, section 3.2.3 (buckets in one order on all ranks).
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """One backward's progress through the buckets; everything but `sizes` is reset by `finish`.

    `late` are buckets that got a gradient after they had been launched (a weight that is used
    inside and outside of a reentrant checkpoint does that). That gradient waits on this rank,
    and goes with the next launch of its bucket.
    """

    sizes: tuple[int, ...]  # parameters with a gradient hook, in launch order
    in_turn: bool = True
    turn: int = 0  # in_turn: buckets before it were launched
    partial: tuple[tuple[int, int], ...] = ()  # (bucket, gradients so far); a few at a time
    ready: frozenset[int] = frozenset()  # in_turn: all there, waiting for their turn
    launched: frozenset[int] = frozenset()  # not in_turn
    late: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Launch:
    """Start the reduction of these buckets, in this order, with all that waits for them here."""

    buckets: tuple[int, ...]


Launches = tuple[Launch, ...]


def fired(s: Buckets, bucket: int) -> tuple[Buckets, Launches]:
    """One gradient of `bucket` is here; Launch what may go now.

    Example:
        >>> s = Buckets(sizes=(1, 1))
        >>> s, effects = fired(s, 1)  # not its turn
        >>> effects
        ()
        >>> fired(s, 0)[1]
        (Launch(buckets=(0, 1)),)
    """
    if bucket < s.turn or bucket in s.launched:
        return replace(s, late=s.late | {bucket}), ()
    size = s.sizes[bucket]
    if size > 1:
        before = dict(s.partial)
        count = before.get(bucket, 0) + 1
        if count < size:
            before[bucket] = count
            return replace(s, partial=tuple(before.items())), ()
        before.pop(bucket, None)
        s = replace(s, partial=tuple(before.items()))
    if not s.in_turn:
        return replace(s, launched=s.launched | {bucket}), (Launch((bucket,)),)
    return _take_turns(replace(s, ready=s.ready | {bucket}))


def finish(s: Buckets, waiting: frozenset[int] = frozenset()) -> tuple[Buckets, Launches]:
    """The backward is over: Launch what is left, and start again.

    What is left is every bucket that was not launched; without `in_turn`, those of them that got
    a gradient or are among the `waiting`. Late gradients stay behind.

    Example:
        >>> finish(Buckets(sizes=(2, 1, 1)))[1]
        (Launch(buckets=(0, 1, 2)),)
        >>> finish(Buckets(sizes=(2, 1, 1), in_turn=False), frozenset({2}))[1]
        (Launch(buckets=(2,)),)
    """
    if s.in_turn:
        left = tuple(range(s.turn, len(s.sizes)))
    else:
        touched = {bucket for bucket, _ in s.partial} | waiting
        left = tuple(sorted(touched - s.launched))
    return restart(s), ((Launch(left),) if left else ())


def restart(s: Buckets) -> Buckets:
    """A backward begins, or was given up: nothing has fired."""
    return Buckets(sizes=s.sizes, in_turn=s.in_turn)


def _take_turns(s: Buckets) -> tuple[Buckets, Launches]:
    turn = s.turn
    while turn in s.ready:
        turn += 1
    gone = tuple(range(s.turn, turn))
    if not gone:
        return s, ()
    return replace(s, turn=turn, ready=s.ready.difference(gone)), (Launch(gone),)
