"""Run what transforms do at the points of a step: from pieces to pieces, in their order.

    a call      loss: value -> value            local: this rank's g of a leaf -> g
    an update   reduced: mean gradients -> gradients
                update: gradients, the rule -> parameters
                updated: parameters -> parameters, before they are gathered or rounded

At each point transforms act from the inside out: those around the running step, then those that
the state was made with and that the step has not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import optree
import torch
from torch import Tensor

from fzero.errors import LayoutError
from fzero.machine.elementwise import require_unaccused
from fzero.machine.named_shards import Pieces, as_flats, by_path, leaf_paths, ranges_in
from fzero.machine.offload import offloaded, to_device, write_back
from fzero.machine.tree_sum import one_thread
from fzero.optim.precision import work_tensors
from fzero.state import NAMESPACE, Buffers, Placement, Setup, Slot, TrainState
from fzero.state.points import Builtin, Points
from fzero.state.setup import MASTERS
from fzero.state.slots import undone
from fzero.transforms.leaf_slices import Prepared, with_rest
from fzero.transforms.points.context import Context, LeafPart, parts_of, whole_parts
from fzero.transforms.points.first_call import (
    accused_of_others,
    call_at,
    is_first,
    passed,
    require_equal,
    require_same_skip,
    told,
    watched_call,
)
from fzero.transforms.points.slots import (
    given,
    on_owners,
    owned_paths,
    put,
    renewed,
    stepped_by_path,
    stepped_parts,
    value_given,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Skip:
    """A reason for which an update is not made.

    flag: True where that is known; else a tensor [] that is not 0 where it is not made.
    slots: those of the state where it is not made.
    overflows: gradients are not finite then: a rule may leave the update out by itself.
    says: a warning.
    """

    flag: bool | Tensor
    slots: dict[str, Slot]
    overflows: bool = False
    says: str = ""

    @property
    def known(self) -> bool:
        """Whether it is known that the update is not made."""
        return self.flag is True


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
    overflow: Tensor | None = None  # whether gradients are not finite, []; None: nobody looks
    by_rule: bool = False  # the rule leaves an overflow out by itself

    def put(self, state: TrainState) -> None:
        """Go on with another record of the state."""
        self.state = state

    def leave_out(self, flag: bool | Tensor, *, overflows: bool = False, says: str = "") -> None:
        """Make no update if `flag` is true; the slots stay as they are now."""
        if flag is not False:
            one = Skip(flag=flag, slots=self.state.slots, overflows=overflows, says=says)
            self.skips.append(one)
        if overflows and isinstance(flag, Tensor):
            self.overflow = flag

    def skip(self, flag: Any) -> None:
        """Make no update if `flag` is true; the host reads it, unless the update is general."""
        read = flag.reshape(()).bool() if self.general and isinstance(flag, Tensor) else bool(flag)
        self.skipped = read | self.skipped

    @property
    def kept(self) -> bool:
        """Whether it is known that the update is not made."""
        return any(one.known for one in self.skips)

    def read(self, leaves_out: Callable[[], bool]) -> None:
        """Let the host read whether there was an overflow, where neither a graph nor the rule does.

        leaves_out: whether the rule leaves one out by itself.
        """
        if self.general or self.overflow is None:
            return
        self.by_rule = leaves_out()
        if not (self.by_rule or self.kept):
            self.skips = [replace(one, flag=True) for one in self.skips if bool(one.flag)]

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
        state, reads = self.state, None
        if wholes:
            reads = (lambda: dict(wholes[1])) if len(wholes) > 1 else None
        elif point in ("reduced", "update"):
            reads = lambda: stepped_by_path(state)[1]  # noqa: E731
        elif (before := self.before) is not None and "before" in one.reads:
            reads = lambda: before  # noqa: E731
        running = self if point == "reduced" else None
        return Context(state, parts, params=reads, running=running, whole=bool(wholes))

    # After it.

    def selected(self, new: TrainState) -> TrainState:
        """Return the state after the update: the old one where it is skipped, but for slots."""
        old, made = self.old, cast("Any", 1)
        for one in reversed(self.skips):
            if one.known:  # its parameters and its rule are the old ones already
                new = new.replace(slots=undone(one.slots))
            elif not self.kept and not (one.overflows and self.by_rule):
                skips: Any = one.flag != 0

                def chosen(before: Any, after: Any, skips: Any = skips) -> Any:
                    same = before is after or not isinstance(after, Tensor)
                    return after if same else torch.where(skips, before, after)

                before: Any = (old.params, old.optimizer, undone(one.slots))
                after: Any = (new.params, new.optimizer, new.slots)
                made_of: Any = optree.tree_map(chosen, before, after, namespace=NAMESPACE)
                params, optimizer, slots = made_of
                new = new.replace(params=params, optimizer=optimizer, slots=slots)
            if isinstance(one.flag, Tensor):
                made = made * (one.flag == 0).to(old.step.dtype)
        return new.replace(step=old.step if self.kept else old.step + made)

    def lost(self) -> Tensor | None:
        """Return whether the update is skipped: [], not 0; None if that cannot be."""
        if self.kept:
            return torch.ones(())
        found: Any = None
        for one in self.skips:
            found = one.flag if found is None else (found != 0) | (one.flag != 0)
        return found


def transforms_of(setup: Setup, point: str) -> list[Any]:
    """Return the transforms that do something at a point, from the inside out.

    They are `Points`; at `reduced` also a `Builtin`, whose place among them matters.
    """
    found = setup.recipes.get(point)
    if found is None:
        around = setup.policy.points
        every = (*around, *(one for one in setup.transforms if one not in around))
        found = [one for one in every if getattr(one, point, None) is not None]
        setup.recipes[point] = found
    return found


# Once for each update.


def reduced(running: Running, ready: Prepared) -> Prepared:
    """Let all transforms at `reduced` act on the gradients; their slots go into the state.

    Those of users are not called where the update is not made. What is multiplied yet, is then.
    """
    state, asked = running.old, False
    running.ready = ready
    for one in transforms_of(state.setup, "reduced"):
        if isinstance(one, Builtin):
            running.ready = one.reduced(one, running, running.ready)  # type: ignore[misc]
        elif not running.kept:
            running.ready = with_rest(state, running.ready)
            gradients = _acted(running, one, "reduced", running.ready.gradients)
            running.ready = running.ready._replace(gradients=gradients, is_shared=True)
            asked = True
    if asked:
        require_same_skip(running.state, running.skipped)
    return with_rest(state, running.ready)


def _acted(running: Running, one: Points, point: str, held: Buffers) -> Buffers:
    if not one.whole:
        return _on_pieces(running, one, point, held)
    flats = [to_device(x, running.state.device) for x in held.flats]
    return Buffers(flats=_on_owners(running, one, point, flats), placement=held.placement)


def _on_pieces(
    running: Running,
    one: Points,
    point: str,
    held: Buffers,
    rule: Callable[[Buffers], Buffers] | None = None,
) -> Buffers:
    """Run a function on this rank's parts by path; return what stands in the place of `held`.

    rule: at `update`, of gradients; what it returns is then what is changed.
    """
    state = running.state
    ranges = ranges_in(state.setup, held)

    def on_device(buffers: Buffers) -> tuple[Buffers, list[Tensor], Pieces]:
        here = [to_device(x, state.device) for x in buffers.flats]
        return buffers, here, by_path(ranges, here)

    changed = (_, here, pieces) = on_device(held)

    def rule_by_path(grads: Pieces) -> Pieces:
        nonlocal changed
        assert rule is not None
        changed = on_device(rule(replace(held, flats=as_flats(ranges, here, pieces, grads))))
        return changed[2]

    slots, first = given(state, one), is_first(state, one, point)
    ctx = running.context(one, point, parts_of(ranges))
    by_rule = None if rule is None else rule_by_path
    # Pieces are cut where ranks are.
    with told(state, one, point, first=first), one_thread(state.setup.layout.options.block > 1):
        after, new, error = call_at(state, one, point, slots, pieces, ctx, by_rule, first=first)
    running.put(put(running.state, one, slots, after))
    if first:
        require_equal(running.state, one, point, new, running.skipped, error)
    if rule is not None and changed[0] is held:  # it has made the parameters itself
        changed = on_device(replace(held, flats=tuple(stepped_parts(state))))
    old, here, pieces = changed
    stored = point == "reduced" and not running.general  # parameters are written where they stand
    home = state.setup.offload.gradients if stored else None
    made = as_flats(ranges, here, pieces, new)
    flats = tuple(
        x if y is now else offloaded(home, y, state.setup.offload)
        for x, now, y in zip(old.flats, here, made, strict=True)
    )
    return replace(old, flats=flats)


# The rule.


def step_in_transforms(
    running: Running,
    state: TrainState,
    shards: Sequence[Tensor],
    gradients: Sequence[Tensor],
    optimizer: Any,
    pieces: Any,
    *,
    owned: bool,
    **options: Any,
) -> tuple[list[Tensor], Any]:
    """Return this rank's shards and the rule's state, after transforms around the rule and behind.

    Nothing is written before all of them have returned: one that raises leaves the state as it was.
    state: the running one, whose parameters and optimizer may be `owned`: written to then.
    """
    rule = state.setup.optimizer
    now: tuple[list[Tensor], Any] = list(shards), optimizer
    running.put(running.state.replace(params=state.params, optimizer=state.optimizer))
    if any("before" in one.reads for one in transforms_of(state.setup, "updated")):
        running.before = stepped_by_path(state)[1]

    def work() -> list[Tensor]:
        """Return what the rule has stepped: masters, where there are any."""
        masters = rule.slots(now[1]).get(MASTERS, ())
        return work_tensors(now[0], masters) if masters else list(now[0])

    def step(grads: Buffers) -> Buffers:
        nonlocal now
        new, kept = rule.advance(now[0], grads.flats, now[1], pieces, owned=False, **options)
        now = list(new), kept
        return replace(grads, flats=tuple(work()))

    setup, around = state.setup, step
    for one in transforms_of(setup, "update"):
        around = partial(_on_pieces, running, one, "update", rule=around)
    made = around(Buffers(flats=tuple(gradients), placement=setup.gradients))
    made = replace(made, placement=setup.optimizer_state)
    for one in transforms_of(setup, "updated"):
        made = _acted(running, one, "updated", made)
    masters: dict[int, Tensor] = {}
    for k, (old, new) in enumerate(zip(work(), made.flats, strict=True)):
        if new is not old:
            shard = now[0][k]
            if old is not shard:
                masters[id(old)] = to_device(new, old.device, old.dtype)
            now[0][k] = to_device(new, shard.device, shard.dtype)
    if masters:
        by_id: Any = optree.tree_map(lambda x: masters.get(id(x), x), now[1], namespace=NAMESPACE)
        now = now[0], by_id
    return _written((list(shards), optimizer), now) if owned else now


def _written(before: Any, after: Any) -> Any:
    """Return `after` in the memory of `before`: of each tensor that has one there."""
    old, old_spec = optree.tree_flatten(before, none_is_leaf=True, namespace=NAMESPACE)
    new, spec = optree.tree_flatten(after, none_is_leaf=True, namespace=NAMESPACE)
    if old_spec != spec:  # a rule that keeps more after its first step
        (shards, _), (mine, optimizer) = before, after
        return _written((shards, None), (mine, None))[0], optimizer
    made: list[Any] = []
    for x, y in zip(old, new, strict=True):
        tensors = isinstance(x, Tensor) and isinstance(y, Tensor)
        if tensors and x is not y and (x.shape, x.dtype) == (y.shape, y.dtype):
            with torch.no_grad():
                write_back(x, y)
            y = x
        made.append(y)
    return optree.tree_unflatten(spec, made)


def _on_owners(
    running: Running, one: Points, point: str, flats: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Run a function on whole leaves, on the ranks that own them. A collective."""
    state = running.state
    ranges = ranges_in(state.setup, Buffers(placement=state.setup.optimizer_state))
    parts = whole_parts(parts_of(ranges))
    outs = [x.clone() for x in flats]
    slots = given(state, one)
    after: dict[str, Any] = {
        name: dict(value) if isinstance(value, dict) else value for name, value in slots.items()
    }
    first = is_first(state, one, point)

    def slots_of(own: Mapping[str, Tensor]) -> dict[str, Any]:
        return {
            name: {path: value[path] for path in own} if isinstance(value, dict) else value
            for name, value in after.items()
        }

    def compute(wholes: list[dict[str, Tensor]]) -> Mapping[str, Tensor]:
        def call(own: dict[str, Tensor]) -> tuple[dict[str, Any], Any, str]:
            return call_at(state, one, point, slots_of(own), own, ctx, first=first)

        own, ctx = wholes[0], running.context(one, point, parts, wholes=wholes)
        with told(state, one, point, first=first):
            new_slots, new, error = call(own)
            if first:
                error = accused_of_others(one, point, own, new, lambda some: call(some)[1])
        if first:  # owners have other leaves, so all are told of an error of one
            lines = [error, f"skipped: {running.skipped}"]
            require_unaccused(lines, state.setup.axis, what=f"{one.name}, `{point}`")
        for name, value in new_slots.items():
            if isinstance(value, dict):
                after[name].update(value)
            elif value is not after[name]:
                raise LayoutError(
                    f"{one.name}: `{point}` returned another number {name}.",
                    cause="a number that is kept by a transform of whole leaves: owners are "
                    "called batch by batch, and each has other leaves.",
                    fix="keep what belongs to a leaf by its path.",
                )
        return new

    inputs = [list(flats)]
    if "before" in one.reads:
        inputs.append([to_device(x, state.device) for x in stepped_parts(state)])
    on_owners(state.setup, inputs, compute, outs)
    if first:
        passed(state, one, point)
    # A stacked state has slots everywhere: they are empty where another rank owns the leaf.
    others = {path for path, is_mine in owned_paths(state.setup).items() if not is_mine}
    for value in after.values():
        if isinstance(value, dict):
            for path in others & value.keys():
                value[path] = value[path].new_zeros(0) if value[path].numel() else value[path]
    running.put(put(running.state, one, slots, after))
    return tuple(outs)


# Each call.


def at_loss(state: TrainState, value: Tensor) -> Tensor:
    """Return the loss that is differentiated: after all transforms at `loss` of a state."""
    for one in transforms_of(state.setup, "loss"):
        ctx, slots = Context(state, {}, sums=False), given(state, one)
        function: Any = one.loss
        if is_first(state, one, "loss"):
            new = watched_call(one, "loss", ctx, slots, value)[0]
            passed(state, one, "loss")
        else:
            new = function(slots, value, ctx)
        if not isinstance(new, Tensor) or new.ndim or not new.is_floating_point():
            seen = f"a {type(new).__name__}"
            if isinstance(new, Tensor):
                seen = f"{tuple(new.shape)} {new.dtype}"
            raise LayoutError(
                f"{one.name}: `loss` returned {seen}.",
                cause="a function that reports the loss, or one that returns (slots, value).",
                fix="return one floating number in a tensor, made of `value`.",
            )
        value = new
    return value


class Locals:
    """What transforms do to this rank's own gradients in one call: slots change leaf by leaf.

    A function at `local` is given the slots of which this rank has the whole leaf, and numbers.
    """

    def __init__(self, state: TrainState) -> None:
        self._state, self._transforms = state, transforms_of(state.setup, "local")
        self._given: dict[str, dict[str, Any]] = {one.name: {} for one in self._transforms}
        for name, slot in state.slots.items():
            owner, _, own = name.partition("/")
            whole = slot.form.placement in (Placement.PARTIAL, Placement.REPLICATED)
            if owner in self._given and (whole or slot.form.leaves == "number"):
                self._given[owner][own] = value_given(state, slot)
        self._after = {
            name: {k: dict(v) if isinstance(v, dict) else v for k, v in slots.items()}
            for name, slots in self._given.items()
        }
        self._first = [one for one in self._transforms if is_first(state, one, "local")]

    def __bool__(self) -> bool:
        return bool(self._transforms)

    def __call__(self, number: int, gradient: Tensor) -> Tensor:
        """Return the gradient of a leaf of the layout, in its shape, after all transforms."""
        setup = self._state.setup
        path, leaf = leaf_paths(setup.layout)[number], setup.layout.leaves[number]
        parts = {path: LeafPart(leaf, 0, gradient.numel())}
        for one in self._transforms:
            ctx = Context(self._state, parts, path=path, sums=False)
            gradient = self._of(one, path, gradient, ctx)
        return gradient

    def _of(self, one: Points, path: str, gradient: Tensor, ctx: Context) -> Tensor:
        state, after = self._state, self._after[one.name]
        slots = {
            k: v[path].view(gradient.shape) if isinstance(v, dict) else v for k, v in after.items()
        }
        first = one in self._first
        new_slots, new, _ = call_at(state, one, "local", slots, gradient, ctx, first=first)
        for name, value in new_slots.items():
            if value is slots[name]:
                continue
            form = state.slots[f"{one.name}/{name}"].form
            if form.placement is not Placement.PARTIAL:
                raise LayoutError(
                    f"{one.name}: `local` changed the slot {name}, which is equal on all ranks.",
                    cause="each rank has its own gradient, and would have its own value then.",
                    fix="give the slot a form with placement=fzero.Placement.PARTIAL, or change "
                    "it in `reduced`.",
                )
            if isinstance(after[name], dict):
                after[name][path] = value.reshape(-1)
            else:
                after[name] = value
        return new

    def put(self, state: TrainState) -> TrainState:
        """Return the state with the slots after this call."""
        for one in self._transforms:
            passed(state, one, "local")
            own = {**given(state, one), **self._given[one.name]}
            state = put(state, one, own, {**own, **self._after[one.name]})
        return state


Changed = Callable[[int, Tensor, torch.dtype], Tensor]
"""(leaf, gradient, the dtype in which gradients add up) -> what is added up in its place."""


class CallPart:
    """What one transform does in the backwards of some states: nothing, but for what it overrides.

    Each state has a number.
    """

    looks = False
    """Whether it is shown losses."""

    def begins(self, number: int, state: TrainState, weighed: Any) -> TrainState:
        """A backward begins, or a forward, in which one may run: return the state for it."""
        return state

    def loss(self, value: Any, weight: Any) -> None:
        """A loss is about to be differentiated, without its scale."""

    def change(self, number: int) -> Changed | None:
        """Return what is done to each gradient of the backward that begins; None for nothing."""
        return None

    def settles(self) -> None:
        """The backward is over: what it has brought is put into states next."""

    def reduced(self, number: int, state: TrainState) -> TrainState:
        """Return the state with what reductions have changed."""
        return state

    def ends(self, number: int, state: TrainState) -> TrainState:
        """Return the state that gets what the backward has brought."""
        return state

    def put_aside(self, number: int, state: TrainState) -> TrainState:
        """Return the state that gets what a backward inside of a forward has brought."""
        return self.ends(number, state)

    def drop_losses(self) -> None:
        """The losses that were shown are not differentiated any more."""

    def drop(self) -> None:
        """The backward raised, or brought nothing."""


class ByPath(CallPart):
    """The functions of users at `local`."""

    def __init__(self, states: Sequence[TrainState]) -> None:
        self._locals = [Locals(state) for state in states]

    def begins(self, number: int, state: TrainState, weighed: Any) -> TrainState:
        """Return a state at its first event of a backward."""
        state = renewed(state, "backward")
        self._locals[number] = Locals(state)
        return state

    def change(self, number: int) -> Changed | None:
        """Return what changes a gradient of this rank, if anything does."""
        own = self._locals[number]
        return (lambda leaf, gradient, dtype: own(leaf, gradient)) if own else None

    def ends(self, number: int, state: TrainState) -> TrainState:
        """Return a state with the slots of this backward."""
        return self._locals[number].put(state)


def changed_by(
    changes: Sequence[Changed], leaf: int, gradient: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return the gradient of a leaf after all changes; dtype: in which gradients add up."""
    for change in changes:
        gradient = change(leaf, gradient, dtype)
    return gradient
