"""Announcements: what a pass tells the other ranks of its next phase."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fzero.collectives import FUNCTIONAL, Performer
from fzero.errors import PhaseError
from fzero.ranks.mesh import Runtime
from fzero.state import TrainState, schedule
from fzero.state.protocol import Announcement, Begin
from fzero.transforms.builtins import facts


@dataclass(frozen=True, slots=True, kw_only=True)
class PassForm:
    """What a pass is, as its driver says.

    Attributes:
        name: what the other ranks are told that runs.
        number: of the model among those of the ranks.
        served: ranks that make a call while others are in this pass take part in it (stage 3).
        uses: note which leaves get a gradient; else all count as used.
        exact: values are gathered exactly, also in a forward.
        carries: what a window keeps goes with the state, to the next pass of the window.
    """

    name: str
    number: int
    served: bool = False
    uses: bool = False
    exact: bool = False
    carries: bool = False


def functional_of(
    states: Sequence[TrainState], name: str
) -> Callable[[Performer | None], PassForm]:
    """Return what gives the form of a gradient call on the ranks of a performer; None on one rank.

    Where ranks carry several logical ranks of these states, some make more passes than others.
    """
    served = any(one.setup.carries_several for one in states)

    def functional(performer: Performer | None) -> PassForm:
        number = FUNCTIONAL if performer is None else performer.nested(FUNCTIONAL)
        return PassForm(name=name, number=number, carries=True, served=served)

    return functional


def of_engine(number: int) -> PassForm:
    """Return the form of an engine's passes."""
    name = f"a forward or backward of engine {number}"
    return PassForm(name=name, number=number, served=True, uses=True)


def begin_of(
    form: PassForm,
    states: Sequence[TrainState],
    owner: int,
    phase: int,
    buckets: int | None,
    text: str,
    *,
    dropped: bool,
) -> Begin:
    """Return the event of a phase.

    text: see `text_of`. owner: the state whose schedule has the programs. buckets: how many there
    are where nothing is gathered: no program is recorded then, each bucket is reduced once, the
    last one first.
    """
    state = states[owner]
    index = state.progress.backwards
    if buckets is None:
        program = schedule.expected(state.schedule, index, phase)
    else:
        program = schedule.backwards(buckets)
    said = Announcement(
        text=text,
        place=(index, phase),
        program=program,
        served=form.served and not dropped,
    )
    in_window = [one.window.is_open for one in states]
    return Begin(
        form.number,
        announcement=said,
        sums=any(map(_crosses, states)) and not all(in_window),
        stays=state.setup.gathering.reshard_after_forward == "window" and in_window[owner],
        rounds=not form.exact,
        dropped=dropped,
    )


def kept_beyond(path: str) -> PhaseError:
    """Return the error of a parameter that was kept beyond its pass, and gets a gradient."""
    return PhaseError(
        f"a backward brings a gradient to {path} of a call of grad_and_reduce that is over.",
        cause="a parameter that a loss was given, and that was kept (in a list, an attribute) and "
        "read in another loss, or outside of one.",
        fix="use the params that each loss is given; of those of another call keep p.detach(), at "
        "stage 3 p.detach().clone().",
    )


def _crosses(state: TrainState) -> bool:
    """Whether anything of a state crosses ranks, or comes and goes as if it did."""
    return state.setup.streams or state.setup.axis.runtime is not Runtime.LOCAL


def text_of(form: PassForm, states: Sequence[TrainState], *, dropped: bool, said: str) -> str:
    """Return what must be equal on all ranks of a phase; of a backward also what is `said`."""
    lines = [form.name, f"gradients dropped just before: {dropped}"]
    for state in states:
        setup = state.setup
        place = "in a window" if state.window.is_open else "at once"
        lines.append(f"stage {setup.stage}, reduced {place}, {setup.differentiates_as}")
        lines += facts(state, "pass")
        if not form.served:
            lines.append(f"after {state.progress.reductions} reductions since the update")
    return "\n".join([*lines, *[said] * bool(said)])
