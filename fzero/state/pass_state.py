"""Where a rank is in its forward and backward, and what the other ranks know of it.

    begin_forward -> end_forward -> begin_backward -> first_gradient -> finish
                                |-> finish_forward                  |-> fail

A pass concerns the other ranks if something of it crosses ranks: parameters that are gathered, or
gradients that are reduced. Such a phase is announced to them before anything crosses, and ended
with them, or they are told that it failed: nobody waits for a rank that has gone on. A record of
flags and pure transitions say when that is due, as effects.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fzero.state.effects import AnnouncePhase, EndPhase, PassEffect

FORWARD, BACKWARD = 0, 1
"""The phases of a pass, as the schedule of stage 3 counts them."""

Next = tuple["PassState", tuple[PassEffect, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PassState:
    """One rank's place in a pass.

    Example:
        >>> state, effects = begin_forward(PassState(), reads=True, sums=True)
        >>> effects, state.gathered
        ((AnnouncePhase(phase=0),), True)
        >>> state, effects = begin_backward(end_forward(state), reads=True, sums=True)
        >>> effects, finish(state)[1]
        ((AnnouncePhase(phase=1),), (EndPhase(),))
    """

    runs: bool = False  # a forward or a backward: what is gathered now may be rounded
    crosses: bool = False  # something of the latest phase crosses ranks
    gathered: bool = False  # a forward announced gathers, which the ranks have not ended
    silent: bool = False  # a backward has begun, and the other ranks were not told yet
    dropped: bool = False  # this rank threw its gradients away just before


def begin_forward(s: PassState, *, reads: bool, sums: bool) -> Next:
    """Begin a forward: announced if it `reads` parameters that are gathered.

    `sums`: gradients of a backward that may follow cross ranks. What an earlier forward gathered is
    ended with this one.
    """
    gathers = reads or s.gathered
    new = PassState(runs=True, crosses=gathers or sums, gathered=gathers)
    return new, (AnnouncePhase(FORWARD),) if gathers else ()


def end_forward(s: PassState) -> PassState:
    """End a forward that a backward may follow."""
    return replace(s, runs=False)


def finish_forward(s: PassState) -> Next:
    """End a forward that no backward follows, with the other ranks if it has gathered."""
    return replace(s, runs=False, gathered=False), (EndPhase(),) if s.gathered else ()


def begin_backward(
    s: PassState, *, reads: bool, sums: bool, silent: bool = False, dropped: bool = False
) -> Next:
    """Begin a backward: announced now, or if it is `silent` at its first gradient.

    `reads`, `sums`: as for a forward. `dropped`: this rank has just thrown its gradients away.
    """
    crosses = reads or s.gathered or sums
    new = PassState(runs=True, crosses=crosses, gathered=s.gathered, silent=silent, dropped=dropped)
    return (new, ()) if silent else first_gradient(new)


def first_gradient(s: PassState) -> Next:
    """A backward brings gradients: what crosses ranks is announced."""
    return replace(s, silent=False), (AnnouncePhase(BACKWARD),) if s.crosses else ()


def finish(s: PassState) -> Next:
    """End a backward, with the other ranks if it was announced: a silent one brought nothing.

    It still `crosses`: an error on the way to its end is theirs, too.
    """
    new = replace(s, runs=False, gathered=False, silent=False)
    return new, (EndPhase(),) if s.crosses and not s.silent else ()


def fail(s: PassState, *, known: bool, astray: bool) -> tuple[PassState, bool, bool]:
    """Give the pass up: return (state, whether this rank keeps step, whether it tells the others).

    `known`: the other ranks raised, too, in the same round. `astray`: the error came from the
    communication itself, after which ranks may not be at one place. A rank that keeps step runs
    what is left of its plan, with zeros, for the others wait for its part.
    """
    in_step = s.crosses and (known or not astray)
    return PassState(), in_step, in_step and not known
