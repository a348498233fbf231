"""What a state is when a call takes it, and after one has returned it.

    check_alive   a call takes a state: it was not used up by donation, its buffers are those that
                  a call returned, and what the step has made so far is used
    returned      a call returns states: how often each buffer was written to, and by which line
    take_over     a donating call goes on in the memory of a state, whose handles it empties

No call writes to the tensors of a state that it is given; a donating step makes new ones on their
memory. So torch's count of writes to each stays what it was when the state was returned. The counts
are kept beside the states, by tensor: in a record each step would have another treespec. A state is
known to be used by some of its tensors, which copies of it by `replace` share.
"""

from __future__ import annotations

import dataclasses
import sys
import threading
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from fzero.context.current_rank import is_abstract
from fzero.context.modes import in_transform, is_recorded, wants_graph
from fzero.errors import PhaseError, explain
from fzero.machine.offload import add_to
from fzero.state import NAMESPACE, Buffers, TrainState
from fzero.state.setup import Home
from fzero.state.train_state import require_not_donated


def check_alive(state: TrainState, *, written: bool = False, optimizer: bool = False) -> None:
    """Raise `DonatedError` if `state`, or its gradients, was used up by a donating step.

    And `AxisError` if its ranks are not here: a stacked state outside of `simulate`, say;
    `PhaseError`, naming the buffer, if one was written to since a call returned it, unless a
    `written` state will do. optimizer: look at what the optimizer and transforms keep, too; else at
    parameters and gradients alone.
    """
    if HERE.made:
        took([state])
    state.setup.axis.rank  # noqa: B018 - raises
    held: list[Any] = [*state.params.flats, *state.gradients.flats, *state.window.pending.flats]
    count = getattr(state.optimizer, "count", None)
    for x in held if count is None else (*held, count):
        if isinstance(x, Tensor) and not x.numel():
            require_not_donated(state)
            break
    if not written:
        require_unwritten(state, [*held, *kept_of(state)] if optimizer else held)


def require_unwritten(state: TrainState, held: Iterable[Any]) -> None:
    """Raise `PhaseError` if one of these tensors of it was written to since a call returned it."""
    for x in () if HERE.comparing else held:
        found = _COUNTS.get(id(x))
        if found is None or found[1] == x._version or found[0]() is not x:
            continue
        if x.numel():  # else a donating step has emptied it, which another check finds
            raise _written(state, x)


def returned(
    new: Sequence[TrainState],
    *,
    gradients: bool = False,
    name: str = "",
    given: Sequence[TrainState] = (),
) -> None:
    """Note how often buffers have been written to: a call returns these states as they are.

    gradients: nothing else of the states is new. name, given: of a call whose states a step is to
    use, and what it was given.

    Under a transform and in a trace tensors are none that a user writes to; those of inference mode
    have no count.
    """
    if not in_transform() and not is_recorded(()):
        for state in new:
            held: list[Any] = [*state.gradients.flats, *state.window.pending.flats]
            if not gradients:
                held += [*state.params.flats, *kept_of(state)]
            _count(held)
    if name and HERE.made is not None and get_proxy_mode() is None and not is_abstract():
        _note_made(HERE.made, name, given, new)  # a record may be read further than the step


class _Here(threading.local):
    """Of the steps of this thread.

    Attributes:
        made: what the outermost one has made so far; None outside of a step.
        comparing: how many calls look for changed bits themselves.
    """

    made: list[Made] | None = None
    comparing: int = 0

    def begin(self) -> list[Made] | None:
        """A step begins: return where its states are noted; None inside of another one."""
        if self.made is not None:
            return None
        self.made = []
        return self.made

    def end(self) -> None:
        """It is over."""
        self.made = None


HERE = _Here()

# Donation: buffers of a used-up state are overwritten, and its own handles on them emptied.


def donates(state: TrainState) -> bool:
    """Whether a state donates its buffers now: no graph or trace needs them."""
    if not state.setup.policy.donate or in_transform() or is_recorded(state.params.flats):
        return False
    return not wants_graph([*state.gradients.flats, *state.window.pending.flats])


def without_donation(state: TrainState) -> TrainState:
    """Return the same state to read from: reading must not use it up."""
    return state.replace_policy(donate=False)


def take_over(tree: Any) -> Any:
    """Return the same memory behind new tensors, and empty the old ones.

    Every state that shares the old tensor objects is used up by this: `check_alive` raises for
    it, and no read of it can see memory that changes under it. Copies (`torch.clone`) live on.
    """
    empties: dict[Any, Any] = {}

    def take(tensor: Any) -> Any:
        if not isinstance(tensor, Tensor) or not tensor.numel():
            return tensor
        kind = (type(tensor), tensor.dtype, tensor.device)  # a plan has some without values
        if kind not in empties:
            empties[kind] = tensor.new_empty(0)
        alias = tensor.detach()
        tensor.set_(empties[kind])
        return alias

    with torch.no_grad():
        return optree.tree_map(take, tree, namespace=NAMESPACE)


def undo_take_over(old: Any, taken: Any) -> None:
    """Undo `take_over`: the tensors of `old` have the memory of those of `taken` again."""
    before = optree.tree_leaves(old, namespace=NAMESPACE)
    after = optree.tree_leaves(taken, namespace=NAMESPACE)
    with torch.no_grad():
        for x, y in zip(before, after, strict=True):
            if x is not y:
                x.set_(y)
    given_back(before)


def add_donated(old: Buffers, new: Buffers, home: Home) -> Buffers:
    """old + new in the memory of `old`, which lives at `home` and is used up."""
    kept: Buffers = take_over(old)
    if home is not None:
        for mine, flat in zip(kept.flats, new.flats, strict=True):
            add_to(mine, flat)
    else:
        torch._foreach_add_(list(kept.flats), list(new.flats))
    return kept


def own_gradients(state: TrainState) -> TrainState:
    """Copy the gradients that a state brings into a donating step.

    Inside, gradients add up in place; the caller's must survive a step that raises.
    """
    held: Any = (state.gradients, state.window.pending)
    gradients, pending = optree.tree_map(torch.clone, held, namespace=NAMESPACE)
    kept = dataclasses.replace(state.window, pending=pending)
    return state.replace(gradients=gradients, window=kept)


def empty(tensor: Tensor, nothing: Any) -> None:
    """Let go of what `tensor` holds: it is as empty as `nothing` from now on."""
    with torch.no_grad():
        tensor.set_(nothing)


# Buffers that were written in place since a call returned them: the next call raises.


_COUNTS: dict[int, tuple[weakref.ref[Tensor], int]] = {}
"""{id of a tensor: it, and how often it had been written to when a call returned it}.

Those that are gone are dropped; nothing else depends on that.
"""


@contextmanager
def bits_are_compared() -> Iterator[None]:
    """Let writes be in this block: its caller finds bits that have changed, whoever changed them.

    The recorder does: a fault is planted in a state by a write to it.
    """
    HERE.comparing += 1
    try:
        yield
    finally:
        HERE.comparing -= 1


def kept_of(state: TrainState) -> list[Any]:
    """Return what the optimizer and transforms keep."""
    tree: Any = (state.optimizer, state.slots)
    return optree.tree_leaves(tree, namespace=NAMESPACE)


def given_back(tensors: Iterable[Any]) -> None:
    """Note the counts anew of tensors whose memory was taken over, and given back."""
    _count([x for x in tensors if id(x) in _COUNTS])


def _count(tensors: Iterable[Any]) -> None:
    for x in tensors:
        if type(x) is Tensor and x.numel() and not x.is_inference():
            gone = partial(_COUNTS.pop, id(x))  # which is given the reference, as what to return
            _COUNTS[id(x)] = weakref.ref(x, gone), x._version


def _written(state: TrainState, written: Tensor) -> PhaseError:
    tree: Any = state
    accessors, leaves, _ = optree.tree_flatten_with_accessor(tree, namespace=NAMESPACE)
    names = (a.codify("state") for a, x in zip(accessors, leaves, strict=True) if x is written)
    return PhaseError(
        f"{next(names, 'a buffer of the state')} was written in place since a call returned it.",
        cause="an in-place method (zero_, mul_, copy_, clamp_) on a buffer of a state: states are "
        "immutable, and others share their tensors.",
        fix="make another state of new tensors: state.replace(params=dataclasses.replace("
        "state.params, flats=tuple(flat.clamp(-1, 1) for flat in state.params.flats))); fzero.init "
        "of changed fzero.full_params(state) begins the optimizer anew.",
    )


# Which states a step has made that nothing has used: an update, or gradients, that are dropped.
# Outside of a step nothing is noted: what becomes of a state is not known there. What a step inside
# of another one returns counts as used.


_WARNED: dict[Any, Any] = {}
_OF_LIBRARIES = ("fzero.", "torch.")


class Made(NamedTuple):
    """What a call has returned that its states were not given."""

    name: str
    tensors: dict[int, Any]  # by id, for as long as it is not used
    line: tuple[str, int]


def _note_made(
    noted: list[Made], name: str, given: Sequence[TrainState], new: Sequence[TrainState]
) -> None:
    fresh = dict[int, Any]()
    for some, is_new in ((new, True), (given, False)):
        for one in some:
            for x in _telling(one):
                if is_new:
                    fresh[id(x)] = x
                else:
                    fresh.pop(id(x), None)
    if fresh:
        frame: Any = sys._getframe(1)  # up to where the user has called fzero
        while frame.f_back and frame.f_globals.get("__name__", "").startswith(_OF_LIBRARIES):
            frame = frame.f_back
        noted.append(Made(name, fresh, (frame.f_code.co_filename, frame.f_lineno)))


def took(states: Iterable[TrainState]) -> None:
    """Note that a call was given these states."""
    if noted := HERE.made:
        used = {id(x) for one in states for x in _telling(one)}
        noted[:] = [one for one in noted if used.isdisjoint(one.tensors)]


def left_by(noted: list[Made], returned: Any) -> Made | None:
    """Return the last of what a step has made and dropped, given what it returns."""
    if noted:
        leaves: Any = optree.tree_leaves(returned, is_leaf=_is_state, namespace=NAMESPACE)
        took(filter(_is_state, leaves))
    return noted[-1] if noted else None


def warn_of(one: Made, step: str) -> None:
    """Say so, with the line of the call."""
    text = explain(
        f"what {one.name} returned was not used, and {step} has returned no state that came of it.",
        cause=f"`fzero.{one.name}(state)` without `state = ...`: states are values, and the one "
        "that is given stays as it was; or a step that returns the state that it was given.",
        fix="write state = fzero.apply_gradients(state), and return that state. For the value of "
        "a loss alone, fzero.evaluate(loss, state)(batch); of several states, `wrt=` says which "
        "of them are to learn.",
    )
    warnings.warn_explicit(text, UserWarning, *one.line, registry=_WARNED)


def _is_state(x: Any) -> bool:
    return isinstance(x, TrainState)


def _telling(state: TrainState) -> tuple[Tensor, ...]:
    """What changes in an update, and with gradients: one tensor of each kind."""
    held = state.params.flats[:1], state.gradients.flats[:1], state.window.pending.flats[:1]
    return state.step, *(x for flats in held for x in flats)
