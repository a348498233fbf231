"""What all ranks say before they go on together with some states: one round, for both drivers.

    as text      the call, and what must be equal: stage, options, and the facts of transforms; for
                 an update also which one it is, the optimizer and its rates. Ranks that differ all
                 raise
    as numbers   what each rank holds of gradients, and the flags of transforms, which may differ:
                 all ranks go on with what is true of any of them

Whether something is reduced or updated is decided by `Agreed`, never by what one rank holds. What
an update comes to depend on belongs into `_facts` or `_numbers`; what a transform says into the
`facts` and the `flag` of its `Builtin`. Both drivers have it then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from hashlib import blake2b
from typing import Any

import optree
from torch import Tensor

from fzero.collectives import Performer, note_call, performer_of
from fzero.context.current_rank import is_abstract
from fzero.context.modes import needs_func, wants_graph
from fzero.errors import MismatchError, PhaseError
from fzero.optim.recorded import lacks_value
from fzero.ranks.mesh import Axis, Runtime
from fzero.state import Policy, Progress, TrainState, progress
from fzero.state.layout import from_bits
from fzero.state.protocol import Noted
from fzero.state.rounds import CODES
from fzero.transforms.builtins import BUILTINS, facts
from fzero.transforms.receive import add_means, filled, reduce_window

Row = tuple[int, ...]
"""What one rank says: for each state (flags and backwards, digest of the leaves it left out)."""

_WAITS, _REDUCED, _WRITTEN = 1, 2, 4
_SAY = [(one.name, one.flag) for one in BUILTINS if one.flag is not None]
_FLAGS = [(8 << k, name, flag) for k, (name, flag) in enumerate(_SAY)]
_BACKWARDS = 8 << len(_FLAGS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """What is true of the gradients of a state on all ranks together, whatever this one holds."""

    waits: bool  # some of any rank wait to be reduced
    reduced: bool  # reduced ones are held
    written: bool  # parameters of any rank were written since all ranks had them equal
    backwards: int  # of the rank that made the most
    flags: frozenset[str] = frozenset()  # the transforms whose flag any rank has
    unused: tuple[int, ...] = ()  # leaves that no rank has used, where that was asked for

    @property
    def held(self) -> bool:
        """Whether any rank has any."""
        return self.waits or self.reduced or self.backwards > 0


def agree(
    name: str,
    states: Sequence[TrainState],
    *,
    updates: bool = False,
    uses: bool = False,
    now: Callable[[], Sequence[TrainState]] | None = None,
    written: Callable[[], object] = bool,
) -> list[Agreed]:
    """Wait until every rank makes this call with the same options, on states in the same phase.

    Args:
        name: of the call.
        states: what it is about. Eight of them on the same ranks, or four if it `uses`, share a
            round.
        updates: optimizers, rates and the number of the update must be equal, too.
        uses: find the leaves that no rank has used since the last update.
        now: the states of an engine as they are now: they change while it serves other ranks.
        written: whether this rank's parameters were written, of an engine.

    Returns:
        What is true of each state on all ranks. On one rank, under a torch.func transform and in a
        trace nobody is asked: what is true here.

    Raises:
        MismatchError: on every rank, if they differ. Nothing was changed.
    """
    here = now or (lambda: states)
    found: dict[int, Agreed] = {}
    for performer, chosen in _by_ranks(states):
        lines = [name]
        for i in chosen:
            lines += _facts(states[i], updates=updates, counts=now is None)
        text, width = "\n".join(lines), 1 + uses
        for begin in range(0, len(chosen), CODES // width):
            some = chosen[begin : begin + CODES // width]
            numbers = partial(_numbers, here, some, uses=uses, written=written)
            said = performer.call_with(text, numbers)
            for k, i in enumerate(some):
                found[i] = _together(here()[i], said, slice(width * k, width * (k + 1)), performer)
    for i in range(len(states)):
        if i not in found:
            own = tuple(_numbers(here, [i], uses=uses, written=written))
            found[i] = _together(here()[i], [own], slice(None), None)
    return [found[i] for i in range(len(states))]


def tell_at_next_round(state: TrainState, text: str) -> None:
    """Let ranks compare a call in which nothing crosses them: the next round that there is does."""
    if is_abstract():
        note_call(text)
    elif not needs_func(state.params.flats) and (to := performer_of(state.setup.axis)) is not None:
        to.send(Noted(text))


def require_held(
    said: Sequence[Agreed], name: str, treespec: optree.PyTreeSpec | None = None
) -> None:
    """Raise `PhaseError`, on every rank, if no rank has gradients of one of the states."""
    held = [one.held for one in said]
    if any(held) and not all(held):
        paths: Any = [] if treespec is None else treespec.paths()
        names = [".".join(map(str, path)) for path in paths] if len(paths) == len(held) else held
        seen = [name for name, one in zip(names, held, strict=True) if not one]
        raise PhaseError(
            f"{name}: {len(seen)} of {len(held)} states hold no gradients: {seen}.",
            cause="grad_and_reduce(..., wrt=), which left them out, before a call with all states.",
            fix='update those that learned: states["m"] = fzero.apply_gradients(states["m"]).',
        )
    if not all(held):
        progress.require_gradients(Progress(), name)


def reduce_agreed(state: TrainState, said: Agreed, used: int = progress.ALL) -> TrainState:
    """Return the state with all its gradients reduced: zeros where this rank holds nothing.

    `used`: what this rank counts as used of what another one brought. A collective if any rank has
    something that waits.
    """
    for _, name, flag in _FLAGS:
        if name in said.flags and flag.heard is not None:
            state = flag.heard(state)
    after = progress.of_all_ranks(state.progress, said.backwards, used)
    if after is not state.progress:
        state = state.replace(progress=after)
    if said.waits:
        return reduce_window(state)
    if state.window.gathered:
        state = state.replace(window=progress.pop(state.window)[0])
    if state.gradients.held:
        return state
    return add_means(state, filled(state, {}, state.setup.gradients))


def refused(
    states: Sequence[TrainState], treespec: optree.PyTreeSpec | None, said: Sequence[Agreed]
) -> Exception | None:
    """Return the error for which a transform of any rank makes no update. An exchange if any does.

    treespec: of the tree that the states are in, None for one state. said: of those that are due.
    """
    due = [state for state in states if not state.setup.policy.defer_update]
    for _, name, flag in _FLAGS:
        which = [state for state, one in zip(due, said, strict=True) if name in one.flags]
        if which and flag.raises is not None:
            return flag.raises(states, treespec, which)
    return None


@contextmanager
def raises_together(axis: Axis) -> Iterator[None]:
    """Tell the other ranks, which go on to a round, of an error that only this one may have."""
    try:
        yield
    except Exception:
        performer = performer_of(axis)
        if performer is not None:
            performer.fail()
        raise


# What is said.


def _by_ranks(states: Sequence[TrainState]) -> Iterator[tuple[Performer, list[int]]]:
    """Yield the performer of each set of ranks that are asked, and which states they share."""
    by_axis: dict[Axis, list[int]] = {}
    for i, state in enumerate(states):
        axis = state.setup.axis
        if axis.runtime is not Runtime.LOCAL and not needs_func(state.params.flats):
            by_axis.setdefault(axis, []).append(i)
    for axis, chosen in by_axis.items():
        performer = performer_of(axis)
        assert performer is not None
        yield performer, chosen


def _facts(state: TrainState, *, updates: bool, counts: bool) -> list[str]:
    """Return what ranks must have in common, a line each.

    `counts`: how often gradients were reduced is the same on all ranks, unlike in an engine.
    """
    flats = [*state.params.flats, *state.gradients.flats, *state.window.pending.flats]
    graph = "with a graph" if wants_graph(flats) else "without one"  # it is reduced in another way
    lines = [f"stage {state.setup.stage}, {graph}", *_options(state.setup.policy)]
    if counts:
        lines.append(f"{state.progress.reductions} reductions since the update")
    lines += facts(state, "update" if updates else "call")
    if updates:
        lines += [f"update {int(state.step)}"] if _is_on_host(state.step) else []
        lines += state.setup.optimizer.describe((), state.step)
    return lines


@lru_cache(maxsize=64)
def _options(policy: Policy) -> tuple[str, ...]:
    return tuple(policy.options)


def _is_on_host(x: Tensor) -> bool:
    return x.device.type == "cpu" and not lacks_value(x)


def _numbers(
    now: Callable[[], Sequence[TrainState]],
    some: Sequence[int],
    *,
    uses: bool,
    written: Callable[[], object],
) -> list[int]:
    """Return what this rank says of some states: one number each, and another if it `uses`."""
    states, numbers = now(), []
    for i in some:
        state = states[i]
        flags = _WAITS * state.window.pending.held + _REDUCED * state.gradients.held
        flags += _WRITTEN * bool(written())
        flags += sum(bit for bit, _, flag in _FLAGS if flag.of(state))
        numbers.append(flags + _BACKWARDS * state.progress.backwards)
        if uses:
            numbers.append(_digest(_unused(state)))
    return numbers


def _unused(state: TrainState) -> int:
    """The leaves that this rank has not used, bit by bit."""
    return state.setup.layout.learning & ~state.progress.used


@lru_cache(maxsize=64)
def _digest(bits: int) -> int:
    """0 for none; what is equal for equal leaves only."""
    if not bits:
        return 0
    data = bits.to_bytes((bits.bit_length() + 7) // 8, "little")
    return 1 + int.from_bytes(blake2b(data, digest_size=7).digest(), "little")


# What it means.


def _together(
    state: TrainState, said: Sequence[Row], of_state: slice, performer: Performer | None
) -> Agreed:
    """Return what is true on all ranks, from what each has said of a state in a part of its row.

    Ranks that say the same are one here, so that this work does not grow with their number.
    """
    rows = {row[of_state] for row in frozenset(said)}
    flags = [row[0] for row in rows]
    if len({flag & _REDUCED for flag in flags}) > 1:
        raise _dropped_by_some([bool(row[of_state][0] & _REDUCED) for row in said])
    for bit, _, one in _FLAGS:
        if one.unlike is not None and all(_who(flags, bit)):
            have, lack = _who([row[of_state][0] for row in said], bit)
            raise one.unlike(have[0], lack[0])
    return Agreed(
        waits=any(flag & _WAITS for flag in flags),
        reduced=bool(flags[0] & _REDUCED),
        written=any(flag & _WRITTEN for flag in flags),
        backwards=max(flag // _BACKWARDS for flag in flags),
        flags=frozenset(name for bit, name, _ in _FLAGS if any(flag & bit for flag in flags)),
        unused=_unused_by_all(state, [row[1] for row in rows if len(row) > 1], performer),
    )


def _unused_by_all(
    state: TrainState, digests: Sequence[int], performer: Performer | None
) -> tuple[int, ...]:
    """The leaves that no rank has used. An exchange if ranks have left out other ones."""
    if not all(digests) or not digests:
        return ()
    bits = _unused(state)
    if len(set(digests)) > 1:
        assert performer is not None
        for others in performer.tell(bits):
            bits &= others
    return _indices(bits)


@lru_cache(maxsize=64)
def _indices(bits: int) -> tuple[int, ...]:
    return from_bits(bits) if bits else ()


def _who(ranks: Sequence[int], bit: int) -> tuple[list[int], list[int]]:
    """Return which ranks say so of their gradients, and which hold some and do not.

    One that has made no backward, and has served those of others, has reduced them as its own.
    """
    have = [rank for rank, flags in enumerate(ranks) if flags & bit]
    lack = [rank for rank, flags in enumerate(ranks) if not flags & bit and _holds(flags)]
    return have, lack


def _holds(flags: int) -> bool:
    return flags >= _BACKWARDS or bool(flags & _REDUCED)


def _dropped_by_some(held: Sequence[bool]) -> MismatchError:
    have, lack = held.index(True), held.index(False)
    return MismatchError(
        f"rank {have} holds reduced gradients, and rank {lack} holds none.",
        cause="gradients that were thrown away on some ranks only: zero_grad() of the module or "
        "the optimizer, p.grad = None, or engine.zero_grad() inside a window.",
        fix="throw them away on every rank, with engine.zero_grad() outside of a window. Nothing "
        "was changed.",
    )
