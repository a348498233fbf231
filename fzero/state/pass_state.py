"""Where a rank is in its forward and backward, and what the other ranks know of it.

    begin_forward -> end_forward -> begin_backward -> first_gradient -> finish
                                |-> finish                          |-> fail

A pass concerns the other ranks if something of it crosses ranks: parameters that are gathered, or
gradients that are reduced. Such a phase is announced to them before anything crosses, and ended
with them, or they are told that it failed: nobody waits for a rank that has gone on. A record of
flags and pure transitions say when that is due.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

FORWARD, BACKWARD = 0, 1
"""The phases of a pass, as the schedule of stage 3 counts them."""

Next = tuple["PassState", bool]
"""(state, whether the phase is announced to the other ranks, or ended with them)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassState:
    """One rank's place in a pass.

    Example:
        >>> state, is_announced = begin_forward(PassState(), reads=False, sums=True)
        >>> is_announced, state.crosses
        (False, True)
        >>> state, is_announced = begin_backward(end_forward(state), reads=False, sums=True)
        >>> is_announced, finish(state)[1]
        (True, True)
    """

    runs: bool = False  # a forward or a backward: what is gathered now may be rounded
    crosses: bool = False  # something of the latest phase crosses ranks
    announced: bool = False  # a phase was announced, and the ranks have not ended it
    silent: bool = False  # a backward has begun, and the other ranks were not told yet
    deferred: bool = False  # a backward is announced at its end only
    dropped: bool = False  # this rank threw its gradients away just before
    inside: bool = False  # a forward has begun, and the pass is not over
    calls: int = 0  # collectives of the user's of which the backward has not come yet


def begin_forward(s: PassState, *, reads: bool, sums: bool, calls: int = 0) -> Next:
    """Begin a forward: announced if it `reads` parameters that are gathered.

    `sums`: gradients of a backward that may follow cross ranks. `calls`: as in the state. What an
    earlier forward gathered is ended with this one.
    """
    gathers = reads or s.announced
    new = PassState(runs=True, crosses=gathers or sums, announced=gathers)
    return replace(new, inside=True, calls=calls), gathers


def end_forward(s: PassState) -> PassState:
    """End a forward that a backward may follow."""
    return replace(s, runs=False)


def begin_backward(
    s: PassState,
    *,
    reads: bool,
    sums: bool,
    silent: bool = False,
    dropped: bool = False,
    late: int = 0,
) -> Next:
    """Begin a backward: announced now, or if it is `silent` at its first gradient.

    `reads`, `sums`: as for a forward. `dropped`: this rank has just thrown its gradients away.
    `late`: collectives of the user's to expect that no forward has made.
    """
    crosses = reads or s.announced or sums
    new = PassState(runs=True, crosses=crosses, silent=silent, dropped=dropped)
    new = replace(new, inside=True, calls=s.calls + late)
    return (new, False) if silent else first_gradient(new)


def saw_call(s: PassState, *, backward: bool) -> PassState:
    """A collective of the user's begins, whose backward comes later; or that `backward` does.

    One without a backward is counted all the same: it may be made anew in the backward (`remat`).
    """
    if not s.inside:
        return s
    return replace(s, calls=max(0, s.calls - 1) if backward else s.calls + 1)


def first_gradient(s: PassState) -> Next:
    """A backward brings gradients: what crosses ranks is announced."""
    return replace(s, silent=False, announced=s.crosses), s.crosses


def defer(s: PassState) -> PassState:
    """Announce a backward at its end: nothing of it crosses ranks before."""
    return replace(s, announced=False, deferred=True)


def finish(s: PassState) -> Next:
    """End a backward, or a forward that none follows: with the other ranks if it was announced.

    It still `crosses`: an error on the way to its end is theirs, too.
    """
    over = replace(s, runs=False, announced=False, silent=False, deferred=False, inside=False)
    return over, s.announced


def fail(s: PassState, *, known: bool, astray: bool) -> tuple[bool, bool]:
    """Give the pass up: return (whether this rank keeps step, whether it tells the others).

    `known`: the other ranks raised, too, in the same round. `astray`: the error came from the
    communication itself, after which ranks may not be at one place. A rank that keeps step runs
    what is left of its plan, with zeros, for the others wait for its part.
    """
    in_step = s.crosses and (known or not astray)
    return in_step, in_step and not known
