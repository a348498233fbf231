"""The parameter coordinator of stage 3: which full parameters this rank holds, and why.

`CoordinatorState` is immutable. The shell turns module hooks into transitions, runs the effects
that come back in their order, and goes on from the state that came back with them:

    begin_step                 a root forward starts: the trace advances, what persists is gathered
    fetch, require_ready       before a module runs, in forward, recompute or backward
    gathered                   the work of a Gather or Prefetch is done
    release                    after the module ran
    end_step                   the outermost backward, or a forward without gradient, is over
    begin_window, end_window   around steps between which parameters do not change
    updated                    parameters changed: what was gathered of them is stale
    abort                      an exception left modules in use

Once the effects of a transition have run (they free before they gather), with `live` the units in
flight or available,

    live_numel <= max(max_live_parameters_numel, numel(persistent | held | needs of what is in use))

as what is idle is kept, and prefetched, only below `max_live_parameters_numel`. A transition that
raises leaves the state it was given whole. Ranks that make the same calls start the same gathers
in the same order, whenever these end on each of them.

Rajbhandari et al., ZeRO-Infinity, arXiv 2104.07857, section 6.2 (a prefetcher that follows the
order it traced).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from fzero.errors import PhaseError, explain
from fzero.state import coordinator_moves as moves
from fzero.state import residency
from fzero.state.coordinator_effects import Effect
from fzero.state.coordinator_moves import Transition
from fzero.state.coordinator_record import CoordinatorState as CoordinatorState
from fzero.state.coordinator_record import new_coordinator as new_coordinator
from fzero.state.residency import Status
from fzero.state.trace import Complete, Invalid, Recording
from fzero.state.units import with_need


def begin_step(s: CoordinatorState) -> Transition:
    """A root forward starts: Invalid -> Recording -> Complete, and back to the order's start.

    Frees what the step before left idle (see `end_step`), asks for all that persists in one
    Gather, and emits `Agree` when an order has just become complete. A step that ended before its
    order did leaves the order valid. Raises `PhaseError` while a module is in use.
    """
    if s.active:
        raise PhaseError(
            explain(
                f"begin_step while {s.text(s.active)} is in use.",
                cause="a forward raised and was not aborted, or the root module was called from "
                "inside its own forward or backward (checkpointing all of it does that).",
                fix="call abort(s) after an exception; a root forward inside a running step "
                "belongs to that step and needs no begin_step.",
            )
        )
    s, agree = moves.advance(s)
    s, asked = moves.gather(s, sorted(s.units.persistent))
    s, freed = moves.between_steps(s)
    return s, (*freed, *agree, *asked)


def fetch(s: CoordinatorState, module: int) -> Transition:
    """`module` is about to run: Gather what it misses, Wait for it, then Prefetch what follows.

    Counts one use more; every fetch wants its release. Prefetches only along a complete order,
    at most min(max_live - live, prefetch bucket - what is ahead) elements, where ahead is what
    was prefetched and not fetched yet. A module that the order does not expect now invalidates
    it, with one Warn; the next step records again.

    Example:
        >>> from fzero.state.units import Limits
        >>> s = new_coordinator({"w": 8, "v": 4}, {"a": ["w"], "b": ["v"]}, Limits(
        ...     persistence_threshold_numel=0))
        >>> s, effects = fetch(s, 0)
        >>> effects
        (Gather(ids=(0,)), Wait(ids=(0,)))
        >>> s, _ = gathered(s, [0])
        >>> release(s, 0)[1]
        (Release(ids=(0,)),)
    """
    needs = s.needs_of(module)
    s, warned = moves.follow(s, module)
    s, asked = moves.gather(replace(s, active=(*s.active, module)), needs)
    s, freed = moves.drop(s, moves.surplus(s))
    s, ahead = moves.prefetch(s)
    return s, (*warned, *freed, *asked, *moves.wait(s, needs), *ahead)


def gathered(s: CoordinatorState, ids: Collection[int]) -> Transition:
    """The full values of `ids` are here. Raises `PhaseError` for what was not in flight."""
    s.require_units(ids)
    return replace(s, residency=residency.arrive(s.residency, s.units, ids)), ()


def require_ready(s: CoordinatorState, module: int) -> CoordinatorState:
    """Return `s`, unless `module` may not run now: it was not fetched, or not all is gathered."""
    late = [u for u in s.needs_of(module) if s.residency.status(u) is not Status.AVAILABLE]
    if module in s.active and not late:
        return s
    seen = f"waiting for {s.units.text(late)}" if module in s.active else "it was not fetched"
    raise PhaseError(
        explain(
            f"{s.text([module])} is used before its parameters are gathered: {seen}.",
            cause="the module ran without its pre-forward hook (its forward was called directly), "
            "or the Wait of its fetch was not run.",
            fix="call the module itself, not its forward; run every Wait, then gathered(s, ids).",
        )
    )


def release(s: CoordinatorState, module: int) -> Transition:
    """`module` ran, once: free what nothing needs any more.

    Kept are units that persist, that are held or used by another module (or by another use of
    this one), and those that the order uses again within max_reuse_distance elements, the
    farthest of them leaving first when live elements exceed max_live. Without a complete order
    all others go. Raises `PhaseError` if `module` is not in use, or was never whole.
    """
    needs = s.needs_of(module)
    if module not in s.active:
        raise PhaseError(
            explain(
                f"release of {s.text([module])}, which is not in use; in use: {s.text(s.active)}.",
                cause="a hook fired twice, or after end_step or abort had closed its use.",
                fix="pair every release with one fetch; drop hooks that outlive their step.",
            )
        )
    require_ready(s, module)
    at = len(s.active) - 1 - s.active[::-1].index(module)
    s = replace(s, active=s.active[:at] + s.active[at + 1 :])
    busy = s.in_use
    gone = moves.too_far(s, [unit for unit in s.units.moving(needs) if unit not in busy])
    return moves.drop(s, (*gone, *moves.surplus(s, gone)))


def register_external(s: CoordinatorState, module: int, ids: Collection[int]) -> Transition:
    """`module` uses `ids` as well, though they are not its own; from now on its fetch has them.

    Gathers what is missing now if the module is in use. Invalidates a complete order, as what it
    says about these units is no longer so; a recording goes on and counts them from its start.
    """
    known = s.needs_of(module)
    s.require_units(ids)
    new = [unit for unit in dict.fromkeys(ids) if unit not in known]
    if not new:
        return s, ()
    s = replace(s, modules=with_need(s.modules, module, new))
    warned: tuple[Effect, ...] = ()
    if isinstance(s.trace, Complete) and s.units.moving(new):
        s, warned = moves.invalidate(s, f"{s.text([module])} began to use {s.units.text(new)}")
    if module not in s.active:
        return s, warned
    s, asked = moves.gather(s, new)
    s, freed = moves.drop(s, moves.surplus(s))
    return s, (*warned, *freed, *asked, *moves.wait(s, new))


def hold(s: CoordinatorState, ids: Sequence[int]) -> Transition:
    """Gather `ids` and keep them until `let_go`, whatever modules do; no trace sees it."""
    s.require_units(ids)
    s, asked = moves.gather(replace(s, held=(*s.held, tuple(ids))), ids)
    s, freed = moves.drop(s, moves.surplus(s))
    return s, (*freed, *asked, *moves.wait(s, ids))


def let_go(s: CoordinatorState, ids: Sequence[int]) -> Transition:
    """End one `hold` of `ids`. Raises `PhaseError` if there is none."""
    if tuple(ids) not in s.held:
        raise PhaseError(
            explain(
                f"let_go of {tuple(ids)}; held are {s.held}.",
                cause="the same hold was ended twice.",
                fix="pair every hold with one let_go of the same ids.",
            )
        )
    at = s.held.index(tuple(ids))
    s = replace(s, held=s.held[:at] + s.held[at + 1 :])
    busy = s.in_use | s.units.persistent
    return moves.drop(s, [u for u in dict.fromkeys(ids) if s.residency.codes[u] and u not in busy])


def end_step(s: CoordinatorState) -> Transition:
    """The step's last graph is done: end every use, and free all that does not persist.

    In a window, what a complete order uses again within max_reuse_distance elements of the next
    step stays as far as it fits, and is not gathered again.

    Uses are still open here when a module's inputs needed no gradient: nothing tells when its
    backward is over. The order keeps its place, for another backward may follow.
    """
    return moves.between_steps(replace(s, active=()))


def begin_window(s: CoordinatorState) -> Transition:
    """The steps that follow are made without an update between them."""
    return replace(s, repeats=True), ()


def end_window(s: CoordinatorState) -> Transition:
    """An update may come now: free all that is idle."""
    return moves.drain(replace(s, repeats=False))


def updated(s: CoordinatorState, ids: Collection[int]) -> Transition:
    """The shards of `ids` changed, so that what was gathered of them is stale: free it.

    The next begin_step gathers again what persists. Raises `PhaseError` for what is in use.
    """
    s.require_units(ids)
    busy = s.in_use
    if used := [unit for unit in ids if unit in busy]:
        raise PhaseError(
            explain(
                f"{s.units.text(used)} changed while in use; modules in use: {s.text(s.active)}.",
                cause="an optimizer step inside a forward, a backward or a gathered context.",
                fix="let the forward or backward end first (end_step), and leave the context.",
            )
        )
    return moves.drop(s, [unit for unit in dict.fromkeys(ids) if s.residency.codes[unit]])


def abort(s: CoordinatorState) -> Transition:
    """An exception ended the step: end every use, and free all but what is held and whole.

    What persists goes as well: of what was in flight, each rank may hold something else, and all
    must gather the same next. A recording is dropped, as its step has no end; a complete order
    stays. What is held stays held, for its context will let it go.
    """
    s = replace(s, active=(), trace=Invalid() if isinstance(s.trace, Recording) else s.trace)
    whole = {unit for unit in s.in_use if s.residency.status(unit) is Status.AVAILABLE}
    return moves.drop(s, [unit for unit in s.residency.live if unit not in whole])
