"""`observe`: callbacks that see the losses, gradients and updates of a step.

    what        value                      when, on each rank
    gathered    (group, full flat)         stage 3: the full values of a group are there
    loss        (loss, weight)             a loss was computed, unscaled; None without a weight
    gradient    (leaf, gradient)           this rank's own of a leaf, times loss scale and weight
    added       (leaf, gradient, mean)     the same by `add_gradients`, without a scale
    reduced     (`Buffers`, weight)        an update begins: the means over ranks; or the sums, and
                                           the sum of all weights
    prepared    `Prepared`                 what the rule gets: in the units of the loss, clipped
    updated     None, or who skips it      the state is the one after the update

Nothing is told under a torch.func transform, where tensors have no values. An observer copies what
it keeps, for a step that donates writes into these tensors later. What it returns of `gradient`,
`prepared` and `updated` takes the place of what it was told: so `fzero.diff` lets one run go on
from what the other one has, and `fzero.prove` marks what is reduced. Of the others it returns
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from fzero.context.modes import in_transform
from fzero.machine.packing import unpack_groups
from fzero.state import Buffers, TrainState
from fzero.state.points import Builtin
from fzero.state.setup import Observer
from fzero.transforms.leaf_slices import Prepared
from fzero.transforms.models import map_states
from fzero.transforms.pipeline import Step, returned_pair
from fzero.transforms.points import Running


def tell(what: str, state: TrainState, value: Any, default: Any = None) -> Any:
    """Tell the observer of a state, if it has one; return what it has instead of `default`."""
    observer = state.setup.policy.observer
    if observer is None or in_transform():
        return default
    instead = observer(what, state, value)
    return default if instead is None else instead


def tell_added(state: TrainState, flats: Sequence[Tensor], *, reduced: bool) -> None:
    """Tell the observer of a state what is added by hand: [W l] for each group that learns."""
    if state.setup.policy.observer is None:
        return
    layout = state.setup.layout
    made = unpack_groups(layout, dict(zip(layout.trainable, flats, strict=True)))
    for leaf, gradient in made.items():
        tell("added", state, (leaf, gradient, reduced))


def _on_gathered(
    states: Sequence[TrainState], running: Callable[[], Any]
) -> Callable[[int, Tensor], None]:
    """Return what tells observers of each group that a pass has gathered."""

    def saw(group: int, flat: Tensor) -> None:
        if (one := running()) is not None:
            number, index = one.gatherer.table.state_of(group)
            tell("gathered", one.states[number], (index, flat))

    return saw


def observe(fn: Callable[..., Any], observers: Sequence[Observer]) -> Step[..., Any]:
    """Run `fn(state, *args) -> (state, aux)`; the i-th observer is told of the i-th state."""

    def around(
        inner: Callable[..., Any], state: Any, /, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        rest = iter(observers)
        state = map_states("observe", lambda s: s.replace_policy(observer=next(rest)), state)
        state, aux = returned_pair("observe", inner, inner(state, *args, **kwargs))
        return map_states("observe", lambda s: s.replace_policy(observer=None), state), aux

    return Step("observe", fn, around, options={})


def _begins(running: Running, means: Buffers) -> None:
    tell("reduced", running.old, (means, running.total))


def _prepared(running: Running, ready: Prepared) -> Prepared:
    return tell("prepared", running.old, ready, default=ready)


def _updated(running: Running, new: TrainState) -> TrainState:
    return tell("updated", new, running.overflow, default=new)


OBSERVE = Builtin(
    name="observe",
    acts=lambda state: state.setup.policy.observer is not None,
    gathered=_on_gathered,
    decides=_begins,
    ready=_prepared,
    updated=_updated,
)
"""An observer, at the points of an update."""
