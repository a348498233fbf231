"""An update under way: what its transforms have found, and why it may not be made.

    decides     found, total, ...          -> `Running.skips`
    units       gradients / scale / total  -> in the units of the mean gradient
    reduced     gradients                  -> gradients
    the rule    parameters                 -> parameters, unless it is skipped
    selected    the state after it; where it is skipped, the one before it

A reason to skip has the slots of its moment: what was put into slots before it stays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import optree
import torch
from torch import Tensor

from fzero.machine.by_path import Pieces
from fzero.state import NAMESPACE, Slot, TrainState
from fzero.state.form import undone
from fzero.state.points import Points
from fzero.transforms.points._context import Context, LeafPart
from fzero.transforms.points._slots import stepped_by_path
from fzero.transforms.prepare import Prepared


@dataclass(frozen=True, slots=True, kw_only=True)
class Skip:
    """A reason for which an update is not made.

    flag: whether it is not: a bool, or a tensor [] that is not 0 then.
    slots: those of the state where it is not made.
    overflows: gradients are not finite then: a rule may leave the update out by itself.
    known: the flag as the host has it; None: it was not read.
    says: a warning.
    """

    flag: bool | Tensor
    slots: dict[str, Slot]
    overflows: bool = False
    known: bool | None = None
    says: str = ""


@dataclass(slots=True)
class Running:
    """An update under way. Its transforms write here what others must know.

    old: the state before it. state: the same, whose slots change. general: whether it is
    differentiated, mapped or traced. ready: its gradients on their way to the rule, as they are
    now: whoever multiplies them in place puts them here, for an error gives them back.
    """

    old: TrainState
    state: TrainState
    general: bool
    ready: Prepared
    skips: list[Skip] = field(default_factory=list)  # from the outside in
    total: Tensor | None = None  # what gradients are sums by, and to be divided by
    skipped: Any = False  # what `ctx.skip` was given: a bool, or a tensor [] if it is general
    before: Pieces | None = None  # the parameters before it, for transforms that read them
    by_rule: bool = False  # the rule leaves an overflow out by itself

    def put(self, state: TrainState) -> None:
        """Go on with another record of the state."""
        self.state = state

    def leave_out(self, flag: bool | Tensor, *, overflows: bool = False, says: str = "") -> None:
        """Make no update if `flag` is true; the slots stay as they are now."""
        known = flag if isinstance(flag, bool) else None
        one = Skip(flag=flag, slots=self.state.slots, overflows=overflows, known=known, says=says)
        self.skips.append(one)

    def skip(self, flag: Any) -> None:
        """Make no update if `flag` is true; the host reads it, unless the update is general."""
        read = flag.reshape(()).bool() if self.general and isinstance(flag, Tensor) else bool(flag)
        self.skipped = read | self.skipped

    @property
    def kept(self) -> bool:
        """Whether it is known that the update is not made."""
        return any(one.known is True for one in self.skips)

    @property
    def overflow(self) -> Tensor | None:
        """Whether gradients are not finite, [], on the device; None if nobody looks."""
        flags = (one.flag for one in self.skips if one.overflows)
        return next((flag for flag in flags if isinstance(flag, Tensor)), None)

    def read(self, leaves_out: Callable[[], bool]) -> None:
        """Let the host read whether there was an overflow, where neither a graph nor the rule does.

        leaves_out: whether the rule leaves one out by itself.
        """
        if self.general or self.overflow is None:
            return
        self.by_rule = leaves_out()
        if self.by_rule or self.kept:
            return
        self.skips = [
            replace(one, known=bool(one.flag)) if one.known is None else one for one in self.skips
        ]

    def context(
        self,
        one: Points,
        point: str,
        parts: Mapping[str, LeafPart],
        *,
        wholes: Sequence[Pieces] = (),
    ) -> Context:
        """Return what a function of a transform at a point may know.

        wholes: the whole leaves that it is given; and behind them those before the update.
        """
        state = self.state
        setup = state.setup
        reads: Callable[[], Pieces] | None = None
        if wholes:
            reads = (lambda: dict(wholes[1])) if len(wholes) > 1 else None
        elif point in ("reduced", "update"):
            reads = lambda: stepped_by_path(state)[1]  # noqa: E731
        elif self.before is not None and "before" in one.reads:
            kept = self.before
            reads = lambda: kept  # noqa: E731
        running = self if point == "reduced" else None
        axis = setup.over(setup.optimizer_state)
        return Context(
            setup,
            state.step,
            axis,
            parts,
            device=state.device,
            params=reads,
            running=running,
            whole=bool(wholes),
        )

    # After it.

    def selected(self, new: TrainState) -> TrainState:
        """Return the state after the update: the old one where it is skipped, but for slots."""
        old = self.old
        new = new.replace(step=self._step())
        skipped = any(one.known is True for one in self.skips)
        for one in reversed(self.skips):
            if one.known is True:  # its parameters and its rule are the old ones already
                new = new.replace(slots=undone(one.slots))
            elif one.known is None and not skipped and not (one.overflows and self.by_rule):
                before = old.params, old.optimizer, undone(one.slots)
                after = new.params, new.optimizer, new.slots
                params, optimizer, slots = unless(one.flag, before, after)
                new = new.replace(params=params, optimizer=optimizer, slots=slots)
        return new

    def _step(self) -> Tensor:
        """Return how many updates were made: this one, unless it is skipped."""
        step = self.old.step
        if any(one.flag is True for one in self.skips):
            return step
        made: Any = 1
        for one in self.skips:
            if isinstance(one.flag, Tensor):
                made = made * (one.flag == 0).to(step.dtype)
        return step + made

    def lost(self) -> Tensor | None:
        """Return whether the update is skipped: [], not 0; None if that cannot be."""
        flags = [one.flag for one in self.skips if one.flag is not False]
        if any(flag is True for flag in flags):
            return torch.ones(())
        found: Any = None
        for flag in flags:
            found = flag if found is None else (found != 0) | (flag != 0)
        return found


def unless(flag: Any, old: Any, new: Any) -> Any:
    """Return `old` where the flag, [], is not 0, else `new`: two pytrees of one structure."""
    skips = flag != 0

    def of(before: Any, after: Any) -> Any:
        if before is after or not isinstance(after, Tensor):
            return after
        return torch.where(skips, before, after)

    return optree.tree_map(of, old, new, namespace=NAMESPACE)
