"""Find non-finite losses and gradients on each rank; report them on all ranks at the update.

    a gradient is made     its smallest and its largest element stay on the device
    the backward is over   the host reads them, once; `state.progress` has the first that is bad
    the update             each rank says whether it has one, in a round that is made anyway; if
                           any has, ranks tell each other which, and all raise the same

Gradients are looked at before they are reduced: afterwards every rank has the NaN of any.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from fzero.collectives import Performer, performer_of
from fzero.context.current_rank import has_no_values
from fzero.context.modes import in_transform, is_recorded, needs_func
from fzero.errors import NonFiniteError, PhaseError
from fzero.ranks.mesh import world
from fzero.state import TrainState, progress
from fzero.state.points import Builtin, Excludes, Flag
from fzero.state.progress import NonFinite
from fzero.state.train_state import Weight
from fzero.transforms.observe import tell
from fzero.transforms.points import CallPart, Changed
from fzero.transforms.weights import counted_loss


class FiniteCheck(CallPart):
    """What one backward after another brings to some states, if their policy is to look at it.

    The gradients of a state with a loss scale are not looked at: there an overflow is a step that
    is skipped, and nothing to raise.
    """

    looks = True

    def __init__(self, states: Sequence[TrainState]) -> None:
        self._wanted = [state.setup.policy.check_finite for state in states]
        self._whole = [
            wanted and state.scale is None
            for wanted, state in zip(self._wanted, states, strict=True)
        ]
        self._observed = {i: s for i, s in enumerate(states) if s.setup.policy.observer}
        self._losses: list[Tensor] = []  # [2] each: smallest, largest
        self._gradients: list[tuple[int, int, Tensor]] = []  # (state, leaf, [2]) as they were made
        self._found: list[NonFinite | None] = []

    @classmethod
    def of(cls, states: Sequence[TrainState], reducer: Any = None) -> FiniteCheck:
        """Return the check of some states.

        reducer: None under a transform of torch.func, where no value can be read.
        """
        if reducer is None:
            _require_values(states)
        return cls(states)

    def loss(self, x: Any, weight: Weight | None = None) -> None:
        """A loss is about to be differentiated, without its scale. One of weight 0 may be NaN."""
        if isinstance(x, Tensor):
            x = counted_loss(x, weight)
        for state in self._observed.values():
            tell("loss", state, (x, weight))
        if any(self._wanted) and isinstance(x, Tensor) and x.is_floating_point() and x.numel():
            self._losses.append(_bounds(x))

    def gradient(self, state: int, leaf: int, gradient: Tensor) -> Tensor:
        """The backward has made the gradient of one leaf of a state; return what is reduced."""
        if state in self._observed:
            told = leaf, gradient.detach()
            gradient = tell("gradient", self._observed[state], told, default=gradient)
        if self._whole[state] and gradient.numel():
            self._gradients.append((state, leaf, _bounds(gradient)))
        return gradient

    def change(self, number: int) -> Changed | None:
        """Return what looks at each gradient of a state. Keeps none: the reducer frees them."""
        if not (self._whole[number] or number in self._observed):
            return None
        return lambda leaf, gradient, dtype: self.gradient(number, leaf, gradient)

    def settles(self) -> None:
        """The backward is over. The host waits."""
        self._found = self.taken()

    def ends(self, number: int, state: TrainState) -> TrainState:
        """Return the state that knows what the backward, which is not counted yet, has brought."""
        found = self._found[number]
        if found is None:
            return state
        return state.replace(progress=progress.saw_nonfinite(state.progress, found))

    def drop_losses(self) -> None:
        """Forget losses whose backward is over."""
        self._losses.clear()

    def drop(self) -> None:
        """The backward raised."""
        self._losses, self._gradients = [], []

    def taken(self) -> list[NonFinite | None]:
        """Return, and forget, the first for each state that is not finite. The host waits."""
        losses, made = self._losses, self._gradients
        self.drop()
        good = _are_finite([*losses, *(bounds for _, _, bounds in made)])
        bad_loss = not all(good[: len(losses)])
        first: dict[int, tuple[int, int]] = {}
        for place, ((state, leaf, _), is_good) in enumerate(
            zip(made, good[len(losses) :], strict=True)
        ):
            if not is_good:
                first.setdefault(state, (place, leaf))
        found: list[NonFinite | None] = []
        for state, wanted in enumerate(self._wanted):
            place, leaf = first.get(state, (len(made), None))
            if wanted and (bad_loss or leaf is not None):
                what = "loss" if bad_loss else "gradient"
                found.append(NonFinite(what=what, leaf=leaf, place=place))
            else:
                found.append(None)
        return found


def _require_values(states: Sequence[TrainState]) -> None:
    """Raise `PhaseError` where a state is to be looked at, and nothing can be read."""
    wanted = any(state.setup.policy.check_finite for state in states)
    flats = [flat for state in states for flat in state.params.flats]
    if wanted and (in_transform() or is_recorded(flats)):
        raise PhaseError(_UNREADABLE.seen(states), cause=_UNREADABLE.cause, fix=_UNREADABLE.fix)


def _error_of(
    states: Sequence[TrainState],
    treespec: optree.PyTreeSpec | None,
    bad: Sequence[TrainState],
) -> NonFiniteError | None:
    """Return the error for the first that is not finite on any rank. An exchange.

    bad: the states of which a rank says so.
    """
    found = _report_of(states, treespec)
    for axis, state in {state.setup.axis: state for state in bad}.items():
        asks = not needs_func(state.params.flats)
        found = _first_report(performer_of(axis) if asks else None, found)
    return found


def _report_of(
    states: Sequence[TrainState], treespec: optree.PyTreeSpec | None
) -> NonFiniteError | None:
    """Return the error for the first that this rank's backwards brought to states, at an update.

    treespec: of the tree that the states are in; None for one state.
    """
    keys: Any = [()] if treespec is None else treespec.paths()
    found = [
        (noted.backward, noted.place, noted, state, key)
        for state, key in zip(states, keys, strict=True)
        if (noted := state.progress.nonfinite) and not state.setup.policy.defer_update
    ]
    if not found:
        return None
    *_, noted, state, key = min(found, key=lambda one: one[:2])
    path = None if noted.leaf is None else state.setup.layout.leaves[noted.leaf].path
    if path is not None and key:  # a model that is one tensor has the path "."
        path = ".".join([*map(str, key), *([] if path == "." else [path])])
    rank = world().rank
    return NonFiniteError(int(state.step), rank, noted.what, path, noted.backward)


def _first_report(performer: Performer | None, own: NonFiniteError | None) -> NonFiniteError | None:
    """Return the first that any rank reports, the same on every rank. An exchange."""
    told = [own] if performer is None else performer.tell(own)
    found = [error for error in told if error is not None]
    if not found:
        return None
    ranks = sorted({rank for error in found for rank in error.ranks})
    one = min(found, key=lambda error: (error.backward, error.rank))
    return NonFiniteError(one.step, one.rank, one.what, one.path, one.backward, ranks)


def _bounds(x: Tensor) -> Tensor:
    """The smallest and the largest element, [2]: NaN if one is. Nothing is read by the host."""
    x = x.detach()
    if x.is_complex():
        x = torch.view_as_real(x.resolve_conj())
    return torch.stack(torch.aminmax(x))


def _are_finite(bounds: Sequence[Tensor]) -> list[bool]:
    """Whether each [2] is finite: one read for each dtype and device."""
    alike: dict[Any, list[int]] = {}
    for i, one in enumerate(bounds):
        alike.setdefault((one.dtype, one.device), []).append(i)
    good = [True] * len(bounds)
    for indices in alike.values():
        if any(has_no_values(bounds[i]) for i in indices):  # a plan: it goes on
            continue
        read = torch.stack([bounds[i] for i in indices]).tolist()
        for i, (low, high) in zip(indices, read, strict=True):
            good[i] = math.isfinite(low) and math.isfinite(high)
    return good


_UNREADABLE = Excludes(
    beside="a transform of torch.func, or a trace, around the step",
    when="graph",
    seen=lambda _: "check_finite: grad_and_reduce inside a torch.func transform or a trace.",
    cause="a transform around a step that checks; no value can be read in there.",
    fix="leave check_finite out there, and look at what comes out of the transform.",
)

CHECK = Builtin(
    name="check_finite",
    acts=lambda state: state.setup.policy.check_finite or state.setup.policy.observer is not None,
    flag=Flag(of=lambda state: state.progress.nonfinite is not None, raises=_error_of),
    calls=FiniteCheck.of,
    excludes=(_UNREADABLE,),
)
"""A look at losses and gradients, for `check_finite` and observers."""
