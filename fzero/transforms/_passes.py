"""The passes of some states under one function: one for each set of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from fzero.collectives import Performer, performer_of
from fzero.machine.packing import unpack
from fzero.machine.placeholder import placeholders
from fzero.state import TrainState
from fzero.transforms.announcement import PassForm
from fzero.transforms.pass_events import Pass


def passes_of(
    states: Sequence[TrainState], form: Callable[[Performer | None], PassForm]
) -> tuple[list[Pass], list[tuple[int, int]]]:
    """One pass for each set of ranks; and for each state its pass, and its place in it.

    form: of a pass on the ranks of a performer; None is one rank.
    """
    # What gathers comes first: a rank that waits elsewhere, for the end of a backward, would not
    # serve those of its ranks that still read what it has left out.
    by_gathers = sorted(states, key=lambda one: not one.setup.gathers_by_unit)
    by_ranks: dict[Performer | None, list[TrainState]] = {
        performer_of(state.setup.axis): [] for state in by_gathers
    }
    places = []
    for state in states:
        performer = performer_of(state.setup.axis)
        some = by_ranks[performer]
        places.append((list(by_ranks).index(performer), len(some)))
        some.append(state)
    return [Pass(form(performer), some) for performer, some in by_ranks.items()], places


def leaves_in_pass(one: Pass, number: int) -> dict[int, Tensor]:
    """The leaves of one state of a pass, by index: placeholders where they are gathered."""
    state = one.states[number]
    layout = state.setup.layout
    by_leaf: dict[int, Tensor] = {}
    groups = one.gatherer.table.groups[number]
    for i, group in enumerate(layout.groups):
        if state.setup.gathers_by_unit:
            tensors: Sequence[Tensor] = placeholders(one.reader, groups[i])
        elif (held := one.held[number]) is not None and group.encoded:
            tensors = placeholders(held, i)
        else:
            # Else torch's refusal of a write would speak of the split that made the view.
            tensors = [x.detach() for x in unpack(layout, i, state.params.flats[i])]
        by_leaf.update(zip(group.leaves, tensors, strict=True))
    return by_leaf
