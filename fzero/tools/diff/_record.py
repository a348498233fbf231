"""Record losses, gradients and updates of a step on every rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import optree
import torch
from torch import Tensor

from fzero.checkpoint.elements import slots_of
from fzero.machine.encode import coarseness
from fzero.state import NAMESPACE, Buffers, TrainState
from fzero.state.layout import as_real
from fzero.state.setup import MASTERS
from fzero.tools.compare import Coarsest, Widened, copied, eps_of
from fzero.tools.diff._lead import Corner, Lead, corners
from fzero.tools.diff._modules import Trail, Trails, rank_here

Flats = tuple[Tensor, ...]
Leads = Sequence[Sequence[Lead | None]]  # of each state, of each update


@dataclass(slots=True, kw_only=True, eq=False)
class Backward:
    """One backward of one rank."""

    weight: float  # of its loss in the update, but for what the sum over ranks is divided by
    counts: float | None = None  # the weight that the step gave it; None: it gave none
    loss: Tensor | None  # None: gradients that were added by hand
    gradients: dict[int, Tensor] = field(default_factory=dict)  # leaf -> its part of the update's
    trail: Trail = field(default_factory=dict)  # what modules made before the loss


@dataclass(slots=True, kw_only=True, eq=False)
class RankUpdate:
    """The backwards of one rank since the last update of a state, and the update."""

    backwards: list[Backward] = field(default_factory=list)
    gathered: list[tuple[int, int, Tensor]] = field(default_factory=list)  # (backward, group, flat)
    reduced: Flats = ()  # gradients; none before an update
    given: Flats = ()  # to the optimizer
    norm: float | None = None  # before clipping, if they are clipped
    corners: list[Corner] = field(default_factory=list)  # what rounding makes of the update
    after: TrainState | None = None  # None: there was no update
    onward: TrainState | None = None  # what the step goes on from, if it is another state


class CallRecord:
    """The record of one call of a step, for each state and rank.

    `unit` is the relative spacing of numbers in the coarsest dtype that the states ask for, and
    `optimizer_unit` that of what the optimizer works with. leads: for each state the updates of
    another run, from which this one goes on. widens: casts to other floats do nothing, and what is
    computed of constants alone, the same in each run, may be narrow.
    """

    def __init__(
        self,
        count: int,
        trails: Trails,
        leads: Leads = (),
        optimizer_unit: float = 0.0,
        *,
        widens: bool = False,
    ) -> None:
        self._seen: list[dict[int, list[RankUpdate]]] = [
            defaultdict(lambda: [RankUpdate()]) for _ in range(count)
        ]
        self._trails, self._leads = trails, leads
        self._coarsest = CoarsestOfPasses(of_parameters=widens)
        self._widens = widens
        self.unit, self.optimizer_unit = 0.0, optimizer_unit

    def watching(self) -> CoarsestOfPasses:
        """Return the mode that records the dtypes of losses and gradients."""
        return self._coarsest

    def widening(self) -> AbstractContextManager[Any]:
        """Return the context in which passes, and no updates, are computed in float64."""
        return Widened(self._coarsest.looks) if self._widens else nullcontext()

    def observers(self) -> list[Any]:
        """Return an observer for each state: see fzero/transforms/observe.py."""

        def of(number: int) -> Any:
            return lambda what, state, value: self._told(number, what, state, value)

        return [of(number) for number in range(len(self._seen))]

    def updates(self, state: int, ranks: int) -> list[list[RankUpdate]]:
        """Return each rank's updates, and last the part after them."""
        return [self._seen[state][rank] for rank in range(ranks)]

    def _told(self, number: int, what: str, state: TrainState, value: Any) -> Any:
        rank = rank_here()
        if what == "reduced":
            self._coarsest.updating.add(rank)
        elif what == "updated":
            self._coarsest.updating.discard(rank)
        seen = self._seen[number][rank]
        leads = self._leads[number] if self._leads else ()
        lead = leads[len(seen) - 1] if len(seen) <= len(leads) else None
        with torch.no_grad():
            if what == "prepared":
                return self._prepared(seen[-1], state, value, rank, lead)
            if what == "updated":
                return self._updated(seen, state, rank, lead)
            getattr(self, f"_{what}")(seen[-1], state, value)

    def _gathered(self, seen: RankUpdate, state: TrainState, value: tuple[int, Tensor]) -> None:
        seen.gathered.append((len(seen.backwards), value[0], value[1].detach().clone()))

    def _loss(self, seen: RankUpdate, state: TrainState, value: tuple[Tensor, Any]) -> None:
        loss, counts = value[0].detach().double().cpu(), None
        self.unit = max(self.unit, spacing_of(state))
        weight = state.setup.policy.grad_scale
        if value[1] is not None:
            counts = float(value[1])
            weight *= counts
        made = Backward(weight=weight, counts=counts, loss=loss, trail=self._trails.taken())
        seen.backwards.append(made)

    def _gradient(self, seen: RankUpdate, state: TrainState, value: tuple[int, Tensor]) -> None:
        leaf, gradient = value
        weight = state.setup.policy.grad_scale
        if state.scale is not None:
            weight /= float(state.scale.scale)
        self._add(seen, leaf, gradient, weight)

    def _added(self, seen: RankUpdate, state: TrainState, value: tuple[int, Tensor, bool]) -> None:
        leaf, gradient, reduced = value
        self.unit = max(self.unit, spacing_of(state))
        if not seen.backwards or seen.backwards[-1].loss is not None:
            seen.backwards.append(Backward(weight=0.0, loss=None))
        summed = state.setup.reduction.reduce_op == "sum"
        share = 1 / state.setup.axis.size if reduced and summed else 1.0
        self._add(seen, leaf, gradient, share * state.setup.policy.grad_scale)

    def _add(self, seen: RankUpdate, leaf: int, gradient: Tensor, weight: float) -> None:
        if not seen.backwards:  # of a loss that was differentiated before the update
            seen.backwards.append(Backward(weight=0.0, loss=None))
        own = seen.backwards[-1].gradients
        new = as_real(gradient.detach()).double().cpu() * weight
        own[leaf] = own[leaf] + new if leaf in own else new

    def _reduced(
        self, seen: RankUpdate, state: TrainState, value: tuple[Buffers, Tensor | None]
    ) -> None:
        held, total = value
        scale = 1.0 if state.scale is None else float(state.scale.scale)
        scale *= 1.0 if total is None else float(total) or 1.0
        seen.reduced = tuple(flat.detach().double() / scale for flat in held.flats)

    def _prepared(
        self, seen: RankUpdate, state: TrainState, ready: Any, rank: int, lead: Lead | None
    ) -> Any:
        by = 1.0 if ready.grad_scale is None else float(ready.grad_scale)
        seen.given = tuple(flat.detach().double() / by for flat in ready.gradients.flats)
        seen.norm = None if ready.norm is None else float(ready.norm)
        self.optimizer_unit = max(
            self.optimizer_unit, optimizer_unit_of(state, ready.gradients.flats)
        )
        if lead is None:
            return ready
        ready = lead.given(state, rank, ready)
        given = [flat / by for flat in ready.gradients.flats]
        seen.corners = corners(state, given, self.optimizer_unit)
        return ready

    def _updated(
        self, seen: list[RankUpdate], state: TrainState, rank: int, lead: Lead | None
    ) -> TrainState:
        seen[-1].after = copied(state)
        if lead is not None:
            seen[-1].onward = state = lead.onward(state, rank)
            state = copied(state)
        seen.append(RankUpdate())
        return state


class CoarsestOfPasses(Coarsest):
    """Records the coarsest dtype of functions of torch outside of updates."""

    def __init__(self, *, of_parameters: bool = False) -> None:
        super().__init__(of_parameters=of_parameters)
        self.updating: set[int] = set()  # ranks

    def looks(self) -> bool:
        """Whether this rank is outside of an update."""
        return not self.updating or rank_here() not in self.updating


def spacing_of(state: TrainState) -> float:
    """Return eps of the coarsest dtype in the options of a state."""
    setup = state.setup
    dtypes = {setup.layout.groups[i].dtype for i in setup.layout.trainable}
    autocast = setup.policy.autocast
    if autocast is not None and dtypes != {torch.float64}:  # which autocast leaves alone
        dtypes.add(autocast)
    if setup.axis.size > 1:
        dtypes |= {setup.communication_dtype(i) for i in setup.layout.trainable}
    dtypes |= {setup.accumulate_dtype(i) for i in setup.layout.trainable}
    leaves = optree.tree_leaves(state.optimizer, namespace=NAMESPACE)
    dtypes |= {x.dtype for x in leaves if isinstance(x, Tensor) and x.ndim and x.numel()}
    units = [eps_of(dtype) for dtype in dtypes]
    units += map(coarseness, {group.codec for group in setup.layout.groups if group.codec})
    if setup.codec is not None:
        units.append(coarseness(setup.codec))
    return max(units, default=torch.finfo(torch.float64).eps)


def optimizer_unit_of(state: TrainState, gradients: Flats) -> float:
    """Return eps of the coarsest dtype of the optimizer."""
    layout, slots = state.setup.layout, slots_of(state)
    mastered = {slot.group for slot in slots if slot.name == MASTERS}
    dtypes = {slot.flat.dtype for slot in slots} | {flat.dtype for flat in gradients}
    dtypes |= {layout.groups[i].dtype for i in layout.trainable if i not in mastered}
    return max(map(eps_of, dtypes), default=0.0)
