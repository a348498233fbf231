"""What the ranks of a run make in a call of its step, and the values from which a run goes on.

An observer sees losses, gradients and updates of each state, hooks see the modules of a forward.
A run that follows another one gets the gradients and the values of each of its updates, its lead:
then it differs by the rounding of that update alone, also where Adam divides by nearly zero, or
Lion takes the sign of it.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from fzero.context.current_rank import current_ranks
from fzero.context.modes import in_transform
from fzero.errors import LayoutError
from fzero.machine.compress import coarseness
from fzero.machine.owners import owners_of
from fzero.machine.packing import cut, leaf_ranges, pack, part_of
from fzero.optim.counters import counters_of, unstepped_of, with_counters
from fzero.optim.entries import RuleSlot, slots_across, slots_of
from fzero.state import Buffers, Part, Placement, Setup, TrainState
from fzero.state.layout import as_real
from fzero.state.scale import with_slot
from fzero.state.setup import MASTERS
from fzero.tools import rounding
from fzero.tools.trees import copied, tensors_in
from fzero.transforms.leaf_slices import pieces_of

LOSS_TERM = -1  # in the place of a leaf
Flats = Sequence[Tensor]
Key = str | tuple[str, str]  # the path of a parameter; of a slot of the optimizer (name, path)


def rank_here() -> int:
    """Return the number of the running virtual rank."""
    here = current_ranks()
    return here.rank if here else 0


# The modules of a forward.


class EventKey(NamedTuple):
    """The identity of an event of a forward, the same in all runs."""

    path: str  # of the module that is entered, or returns
    number: int  # how often it was entered before
    returns: bool


class Event(NamedTuple):
    """The inputs or the outputs of a module call."""

    caller: str | None  # the path of the module that calls it; None: it is the outermost
    tensors: list[Tensor | None]  # None: a parameter that is not here


Trail = dict[EventKey, Event]
"""The events of one forward, in order."""


@dataclass(frozen=True, slots=True, eq=False)
class _Forward:
    """The module calls of one rank since its last loss."""

    trail: Trail = field(default_factory=dict)
    open: list[tuple[nn.Module, EventKey]] = field(default_factory=list)  # calls that go on
    names: dict[int, str] = field(default_factory=dict)  # inside of the outermost, by identity
    ended: bool = False


class Trails:
    """Records the events of all ranks, with copies of the tensors."""

    def __init__(self) -> None:
        self._of_rank: dict[int, _Forward] = defaultdict(_Forward)

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Context in which module calls are recorded."""
        enters = register_module_forward_pre_hook(self._enters)
        with enters, register_module_forward_hook(self._returns, with_kwargs=True):
            yield

    def taken(self) -> Trail:
        """What has run on this rank since the loss before; several states may have one loss."""
        trail = self._of_rank[rank_here()].trail
        self._of_rank[rank_here()] = _Forward(trail=trail, ended=True)
        return trail

    def _enters(self, module: nn.Module, args: Any) -> None:
        if _is_apart():
            return
        if self._of_rank[rank_here()].ended:
            del self._of_rank[rank_here()]
        here = self._of_rank[rank_here()]
        caller = here.open[-1][1].path if here.open else None
        if caller is None:
            here.names.clear()
            here.names.update({id(x): name for name, x in module.named_modules()})
        path = here.names.get(id(module), "") or type(module).__name__
        number = sum(key.path == path and not key.returns for key in here.trail)
        key = EventKey(path, number, False)
        here.trail[key] = Event(caller, _copied(args))
        here.open.append((module, key))

    def _returns(self, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        here = self._of_rank[rank_here()]
        if _is_apart() or not any(one is module for one, _ in here.open):
            return
        while here.open[-1][0] is not module:  # whose forward has raised
            here.open.pop()
        _, key = here.open.pop()
        caller, given = here.trail[key]
        here.trail[key] = Event(caller, given + _copied(kwargs))  # by name: seen only now
        here.trail[key._replace(returns=True)] = Event(caller, _copied(out))


def _is_apart() -> bool:
    """Return whether this forward is a recomputation in a backward, or has no values."""
    return torch._C._current_graph_task_id() != -1 or in_transform()


def _copied(given: Any) -> list[Tensor | None]:
    """Return copies of the tensors in arguments or a result, in order."""
    if isinstance(given, Tensor):
        stands = type(given) in (Tensor, nn.Parameter)
        return [as_real(given.detach()).clone() if stands else None]
    if isinstance(given, Mapping):
        given = tuple(given.values())
    return [x for one in given for x in _copied(one)] if isinstance(given, list | tuple) else []


# A call of a step.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Backward:
    """One backward of one rank."""

    counts: float | None = None  # the weight that the step gave it; None: it gave none
    loss: Tensor | None = None  # None: gradients that were added by hand
    # Terms of the update, but for the divisor of the sum over ranks: {leaf: gradient, -1: loss}
    terms: dict[int, Tensor] = field(default_factory=dict)
    trail: Trail = field(default_factory=dict)  # what modules made before the loss


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
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
        self, count: int, leads: Sequence[Sequence[Values | None]], least: float, *, widens: bool
    ) -> None:
        self.trails = Trails()
        self.updates: list[dict[int, list[RankUpdate]]] = [  # of each state, of each rank
            defaultdict(lambda: [RankUpdate()]) for _ in range(count)
        ]
        self.unit, self.optimizer_unit = 0.0, least
        self.coarsest = rounding.Coarsest(of_parameters=widens, looks=self._in_pass)
        self._leads, self._widens, self._updating = leads, widens, set[int]()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context of a rank: dtypes of passes, and of no updates, are seen; or are float64."""
        with self.coarsest, rounding.Widened(self._in_pass) if self._widens else nullcontext():
            yield

    def observers(self) -> list[Any]:
        """Return an observer for each state: see fzero/transforms/observe.py."""
        return [functools.partial(self._told, number) for number in range(len(self.updates))]

    def _in_pass(self) -> bool:
        return not self._updating or rank_here() not in self._updating

    @torch.no_grad()
    def _told(self, number: int, what: str, state: TrainState, value: Any) -> Any:
        rank = rank_here()
        updates, leads = self.updates[number][rank], self._leads[number] if self._leads else ()
        lead = leads[len(updates) - 1] if len(updates) <= len(leads) else None
        seen, scale = updates[-1], 1.0 if state.scale is None else float(state.scale.scale)
        by_policy = state.setup.policy.grad_scale
        if what in ("loss", "added"):
            self.unit = max(self.unit, spacing_of(state))
        if what == "gathered":
            seen.gathered.append((len(seen.backwards), value[0], value[1].detach().clone()))
        elif what == "loss":
            loss, counts = value[0].detach().double().cpu(), value[1]
            counts = None if counts is None else float(counts)
            weight = by_policy * (1.0 if counts is None else counts)
            terms, trail = {LOSS_TERM: loss * weight}, self.trails.taken()
            seen.backwards.append(Backward(counts=counts, loss=loss, terms=terms, trail=trail))
        elif what == "gradient":
            _add(seen, value[0], value[1], by_policy / scale)
        elif what == "added":
            leaf, gradient, reduced = value
            if not seen.backwards or seen.backwards[-1].loss is not None:
                seen.backwards.append(Backward())
            summed = reduced and state.setup.reduction.reduce_op == "sum"
            _add(seen, leaf, gradient, by_policy / (state.setup.axis.size if summed else 1))
        elif what == "reduced":
            self._updating.add(rank)
            held, total = value
            scale *= 1.0 if total is None else float(total) or 1.0
            flats = tuple(flat.detach().double() / scale for flat in held.flats)
            updates[-1] = replace(seen, reduced=flats)
        elif what == "prepared":
            return self._prepared(updates, state, value, lead)
        elif what == "updated":
            self._updating.discard(rank)
            onward = None if lead is None else with_whole(state, rank, lead)
            updates[-1] = replace(seen, after=copied(state), onward=onward)
            updates.append(RankUpdate())
            return state if onward is None else copied(onward)
        return None

    def _prepared(
        self, updates: list[RankUpdate], state: TrainState, ready: Any, lead: Values | None
    ) -> Any:
        by = 1.0 if ready.grad_scale is None else float(ready.grad_scale)
        flats, corners = ready.gradients.flats, list[Corner]()
        unit = self.optimizer_unit = max(self.optimizer_unit, _optimizer_unit(state, flats))
        if lead is not None:
            ready = with_gradients(ready, state, rank_here(), lead)
            corners = corners_of(state, [flat / by for flat in ready.gradients.flats], unit)
        updates[-1] = replace(
            updates[-1],
            given=tuple(flat.detach().double() / by for flat in flats),
            norm=None if ready.norm is None else float(ready.norm),
            corners=corners,
        )
        return ready


def _add(seen: RankUpdate, leaf: int, gradient: Tensor, weight: float) -> None:
    if not seen.backwards:  # of a loss that was differentiated before the update
        seen.backwards.append(Backward())
    own = seen.backwards[-1].terms
    new = as_real(gradient.detach()).double().cpu() * weight
    own[leaf] = own[leaf] + new if leaf in own else new


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
    dtypes |= {x.dtype for x in tensors_in(state.optimizer) if x.ndim and x.numel()}
    codecs = {group.codec for group in setup.layout.groups} | {setup.codec}
    units = [*map(rounding.eps_of, dtypes), *(coarseness(x) for x in codecs if x is not None)]
    return max(units, default=torch.finfo(torch.float64).eps)


def _optimizer_unit(state: TrainState, gradients: Flats) -> float:
    """Return eps of the coarsest dtype of the optimizer."""
    layout, slots = state.setup.layout, slots_of(state)
    mastered = {slot.group for slot in slots if slot.name == MASTERS}
    dtypes = {slot.flat.dtype for slot in slots} | {flat.dtype for flat in gradients}
    dtypes |= {layout.groups[i].dtype for i in layout.trainable if i not in mastered}
    return max(map(rounding.eps_of, dtypes), default=0.0)


Corner = dict[tuple[str, int], Tensor]
"""The result of this rank's update from perturbed gradients and slots: (slot, group) -> its values.

Of masters, and of parameters (""), what the update adds.
"""


def corners_of(state: TrainState, gradients: Flats, unit: float) -> list[Corner]:
    """Return this rank's updates from gradients and slots changed by 4 u of themselves.

    Not a collective: the optimizer runs on the local shards. gradients: unscaled.
    """
    setup = state.setup
    if owners_of(setup) is not None:
        raise LayoutError(
            f"diff: {setup.optimizer!r} updates whole parameters, each on the rank that owns it.",
            cause="a matrix rule (Muon, LAMB, Adafactor), whose states lie with the owners.",
            fix="use an elementwise optimizer for the comparison, such as fzero.optim.adamw.",
        )
    fulls = [state.params.flats[i] for i in setup.layout.trainable]
    shards = [cut(setup, full, setup.params, setup.optimizer_state) for full in fulls]
    source = torch.Generator().manual_seed(0)
    signs = [rounding.signs_like(x, source) for x in gradients]
    of_group = dict(zip(setup.layout.trainable, signs, strict=True))
    options: dict[str, Any] = {"differentiable": False, "owned": False}
    if not setup.offload.neutral:
        options["device"] = state.device

    def slots(optimizer: Any) -> Corner:
        found = slots_of(state.replace(optimizer=optimizer))
        return {(slot.name, slot.group): slot.numbers.double() for slot in found}

    before, found = slots(state.optimizer), []
    for up, of_slots in rounding.CORNERS:

        def slot(one: RuleSlot, size: float = rounding.DISTURBANCE * unit * of_slots) -> Tensor:
            if one.name == MASTERS:
                return one.flat.clone()
            return rounding.perturbed(one.numbers, size, of_group[one.group])

        optimizer = with_counters(state, slot, counters_of(state), unstepped_of(state))
        size, pairs = rounding.DISTURBANCE * unit * up, zip(gradients, signs, strict=True)
        given = [rounding.perturbed(g, size, sign) for g, sign in pairs]
        new, after = setup.optimizer.advance(shards, given, optimizer, pieces_of(setup), **options)
        corner = slots(after)
        corner |= {key: x - before[key] for key, x in corner.items() if key[0] == MASTERS}
        for index, x, y in zip(setup.layout.trainable, shards, new, strict=True):
            corner["", index] = y.double() - x.double()
        found.append(corner)
    return found


# Values of a state, from the shards of all ranks.


def spread(
    setup: Setup, groups: Sequence[int], flats: Sequence[Flats], placement: Placement
) -> dict[str, rounding.Spread]:
    """Split the ranks' parts of some groups, flats[rank][k], into leaves: {path: copies}."""
    layout = setup.layout
    copies: dict[int, list[rounding.Copy]] = {}
    for k, index in enumerate(groups):
        for rank, some in enumerate(flats):
            if k < len(some) and some[k].numel():
                for found in leaf_ranges(layout, index, setup.part(placement, rank)):
                    own = rounding.Copy(rank, found.start, found.of(some[k]).detach().cpu())
                    copies.setdefault(found.leaf, []).append(own)
    return {
        layout.names[leaf]: rounding.Spread(layout.leaves[leaf].stored_shape, tuple(some))
        for leaf, some in copies.items()
    }


def leaves_of(states: Sequence[TrainState]) -> dict[Key, rounding.Spread]:
    """Return the parameters of a state, and the slots of its optimizer, from all of its ranks."""
    setup = states[0].setup
    flats = [state.params.flats for state in states]
    groups = range(len(setup.layout.groups))
    found: dict[Key, rounding.Spread] = {**spread(setup, groups, flats, setup.params)}
    for name, group, parts in slots_across(states):
        cut = spread(setup, [group], [[part] for part in parts], setup.optimizer_state)
        found |= {(name, path): one for path, one in cut.items()}
    return found


def counters(state: TrainState) -> dict[str, float]:
    """Return the counters of one rank's state."""
    own: dict[str, float] = {}
    for name, value in counters_of(state).items():
        by_leaf = value if isinstance(value, dict) else {"": value}
        own |= {f"{name} of {leaf}" if leaf else name: float(x) for leaf, x in by_leaf.items()}
    waiting = state.progress.backwards
    return {"updates": float(state.step), **own, "backwards since the update": float(waiting)}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Values:
    """The full values of a state, from which a run on any number of ranks can continue."""

    leaves: Mapping[Key, Tensor]
    state: TrainState  # of one rank: its counters and its loss scale
    gradients: Mapping[str, Tensor] = field(default_factory=dict)  # given to the last update, flat

    def disturbed(self, size: float, seed: int) -> Values:
        """Return the values with each parameter changed by `size` of itself; masters alike."""
        source = torch.Generator().manual_seed(seed)
        params = {key: x for key, x in self.leaves.items() if isinstance(key, str)}
        signs = {path: rounding.signs_like(x, source) for path, x in params.items()}
        moved: dict[Key, Tensor] = {**self.leaves}
        for path, sign in signs.items():
            for key in (path, (MASTERS, path)):
                if key in moved:
                    moved[key] = rounding.perturbed(moved[key], size, sign)
        return replace(self, leaves=moved)


def values_of(states: Sequence[TrainState]) -> Values:
    """Return the full values of a state, from the states of all ranks."""
    for leaf in states[0].setup.layout.leaves:
        if leaf.codec is not None:
            raise LayoutError(
                f"diff: {leaf.title} is stored encoded, by {leaf.codec}.",
                cause="a run with frozen=: what rounding explains is asked of values that are a "
                "little apart, which an encoding does not keep.",
                fix="leave frozen= out, and give both runs the decoded parameters, "
                "fzero.full_params(state): training with them has the same bits.",
            )
    leaves = {key: one.full.view(one.shape) for key, one in leaves_of(states).items()}
    return Values(leaves=leaves, state=states[0])


def with_whole(state: TrainState, rank: int, values: Values) -> TrainState:
    """Return a rank's state with these values; slots that they lack are unchanged."""
    setup = state.setup

    def param(path: str, old: Tensor) -> Tensor:
        """In the dtype of `old`, from its master if that is more exact."""
        found = values.leaves[path]
        master = values.leaves.get((MASTERS, path))
        return (found if master is None or old.dtype == found.dtype else master).to(old.dtype)

    def made(slot: RuleSlot) -> Tensor:
        def of(path: str, old: Tensor) -> Tensor:
            found = values.leaves.get((slot.name, path))
            if found is None and slot.name == MASTERS:
                found = values.leaves[path]
            return old if found is None else found.to(old.dtype)

        return _flat_of(setup, slot.group, setup.optimizer_state, rank, of, slot.numbers)

    params = [
        _flat_of(setup, i, setup.params, rank, param, flat)
        for i, flat in enumerate(state.params.flats)
    ]
    own, theirs = state.scale, values.state.scale
    same = own is not None and theirs is not None and own.policy == theirs.policy
    return state.replace(
        params=Buffers(flats=tuple(params), placement=setup.params),
        optimizer=with_counters(state, made, counters_of(state) | counters_of(values.state)),
        step=values.state.step.to(state.step, copy=True),
        slots=with_slot(state.slots, theirs if same else own),
    )


def with_gradients(ready: Any, state: TrainState, rank: int, values: Values) -> Any:
    """Return `ready`, the state before this rank's update, with the gradients of other values."""
    setup, held = state.setup, ready.gradients
    scale = 1.0 if ready.grad_scale is None else ready.grad_scale.double().cpu()

    def of(path: str, old: Tensor) -> Tensor:
        found = values.gradients.get(path)
        return old if found is None else found * scale

    flats = [
        _flat_of(setup, index, setup.gradients, rank, of, flat)
        for index, flat in zip(setup.layout.trainable, held.flats, strict=True)
    ]
    return ready._replace(gradients=Buffers(flats=tuple(flats), placement=held.placement))


def _flat_of(
    setup: Setup,
    index: int,
    placement: Placement,
    rank: int,
    of: Callable[[str, Tensor], Tensor],
    like: Tensor,
) -> Tensor:
    """Return a rank's part of a flat with leaves of(path, old); `like` if one returns `old`."""
    layout, old = setup.layout, like.new_empty(0)
    leaves = [of(layout.names[i], old) for i in layout.groups[index].leaves]
    if any(leaf is old for leaf in leaves):
        return like.clone()
    whole_flat = pack(layout, index, [x.to(like) for x in leaves])
    return part_of(whole_flat, Part(1, 0), setup.part(placement, rank)).clone()
