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
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import optree
import torch
from torch import Tensor

from fzero.errors import CallError, LayoutError
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
from fzero.transforms.points import context
from fzero.transforms.points.context import Context, LeafPart, parts_of, whole_parts
from fzero.transforms.points.cut import KeptContext, accused, accused_of_others
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


Rule = Callable[[Pieces], Pieces]
"""Gradients by path -> the parameters after the rule's update, by path."""


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
        context.require_same_skip(running.state, running.skipped)
    return with_rest(state, running.ready)


def updated(running: Running, flats: Sequence[Tensor]) -> list[Tensor]:
    """Return what the rule has stepped after all transforms at `updated`."""
    held = Buffers(flats=tuple(flats), placement=running.state.setup.optimizer_state)
    for one in transforms_of(running.state.setup, "updated"):
        held = _acted(running, one, "updated", held)
    return list(held.flats)


def _acted(running: Running, one: Points, point: str, held: Buffers) -> Buffers:
    if not one.whole:
        return _on_pieces(running, one, point, held)
    flats = [to_device(x, running.state.device) for x in held.flats]
    return Buffers(flats=_on_owners(running, one, point, flats), placement=held.placement)


def _on_pieces(running: Running, one: Points, point: str, held: Buffers) -> Buffers:
    """Run a function on this rank's parts by path."""
    state = running.state
    ranges = ranges_in(state.setup, held)
    here = [to_device(x, state.device) for x in held.flats]
    pieces, slots = by_path(ranges, here), given(state, one)
    ctx = running.context(one, point, parts_of(ranges))
    with one_thread(state.setup.layout.options.block > 1):  # pieces are cut where ranks are
        slots_after, new = _called(running, one, point, slots, pieces, ctx)
    running.put(put(running.state, one, slots, slots_after))
    made = as_flats(ranges, here, pieces, new)
    stored = point == "reduced" and not running.general  # parameters are written where they stand
    home = state.setup.offload.gradients if stored else None
    flats = tuple(
        old if x is now else offloaded(home, x, state.setup.offload)
        for old, now, x in zip(held.flats, here, made, strict=True)
    )
    return Buffers(flats=flats, placement=held.placement)


def _called(
    running: Running, one: Points, point: str, slots: Any, value: Any, ctx: Context
) -> tuple[dict[str, Any], Any]:
    """Call `one.point(slots, value, ctx)`; check the first call."""
    function, state = getattr(one, point), running.state
    if not context.is_first(state, one, point):
        return context.require_pair(one, point, function(slots, value, ctx))
    with context.told(state.setup, f"{one.name}, `{point}`"):
        copies, ctx = context.copied((slots, value)), ctx.watched(f"{one.name}, `{point}`")
        asked = KeptContext(ctx)
        after, new = context.require_pair(one, point, function(*copies, asked))
        context.require_unwritten(one, point, copies, ctx.shown)
        context.require_like(one, point, "slots", slots, after)
        context.require_like(one, point, context.VALUES[point], value, new)
        error = accused(one, point, asked, slots, value, after, new)
    # What was returned as it was given is a copy here: the state goes on with its own.
    after, new = _same(copies[0], slots, after), _same(copies[1], value, new)
    now = put(state, one, slots, after)
    context.require_equal(now, one, point, new, running.skipped, error)
    context.passed(state, one, point)
    return after, new


def _same(copies: Any, own: Any, returned: Any) -> Any:
    """Return what was returned, with the state's own tensors in the place of their copies."""
    if returned is copies:
        return own
    if isinstance(own, Mapping):
        return {key: _same(copies[key], own[key], returned[key]) for key in own}
    return returned


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

    def step(grads: Buffers) -> list[Tensor]:
        nonlocal now
        new, kept = rule.advance(now[0], grads.flats, now[1], pieces, owned=False, **options)
        now = list(new), kept
        return work()

    means = Buffers(flats=tuple(gradients), placement=state.setup.gradients)
    made = updated(running, stepping(running, step)(means))
    masters: dict[int, Tensor] = {}
    for k, (old, new) in enumerate(zip(work(), made, strict=True)):
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


def stepping(running: Running, rule: Callable[[Buffers], list[Tensor]]) -> Callable[..., Any]:
    """Return the update of transforms around a rule: gradients -> what the rule has stepped.

    rule: gradients -> this rank's parts of what it steps, after one update. It is called once, or
    not at all by a transform that makes the parameters itself.
    """
    wrapped = rule
    for one in transforms_of(running.state.setup, "update"):
        wrapped = _around(running, one, wrapped)
    return wrapped


def _around(
    running: Running, one: Points, rule: Callable[[Buffers], list[Tensor]]
) -> Callable[[Buffers], list[Tensor]]:
    def advance(gradients: Buffers) -> list[Tensor]:
        state = running.state
        ranges = ranges_in(state.setup, gradients)
        here = [to_device(x, state.device) for x in gradients.flats]
        pieces, slots = by_path(ranges, here), given(state, one)
        old = stepped_by_path(state)[1]
        stepped: list[list[Tensor]] = []

        first = context.is_first(state, one, "update")
        what = f"{one.name}, `update`"
        ctx, shown = running.context(one, "update", parts_of(ranges)), list[Pieces]()

        def rule_by_path(grads: Pieces) -> Pieces:
            if stepped:
                raise CallError(
                    f"{one.name}: `update` called the rule twice.",
                    cause="a second step from the same state, which would count as two updates.",
                    fix="call rule(grads) once; a gradient at another point is made in the step: "
                    "fzero.map_params and a second grad_and_reduce.",
                )
            context.require_like(one, "update", "grads", pieces, grads)
            flats = as_flats(ranges, here, pieces, grads)
            stepped.append(rule(Buffers(flats=flats, placement=gradients.placement)))
            made = by_path(ranges, [to_device(x, state.device) for x in stepped[0]])
            shown.append(context.copied(made) if first else made)
            return dict(shown[0])

        function: Any = one.update
        own, error = (slots, pieces), ""
        asked: Any = ctx
        if first:
            own, asked = context.copied(own), KeptContext(ctx.watched(what))
        alone = one_thread(state.setup.layout.options.block > 1)
        with context.told(state.setup, what) if first else nullcontext(), alone:
            after, new = context.require_pair(one, "update", function(*own, asked, rule_by_path))
            if first:
                context.require_unwritten(one, "update", own, shown, ctx.shown)
            after = _same(own[0], slots, after)
            context.require_like(one, "update", "slots", slots, after)
            context.require_like(one, "update", "params", old, new)
            if first:
                to = shown[0] if shown else None
                error = accused(one, "update", asked, slots, pieces, after, new, to)
        running.put(put(running.state, one, slots, after))
        if first:
            context.require_equal(running.state, one, "update", new, accused=error)
            context.passed(state, one, "update")
        base = stepped[0] if stepped else stepped_parts(state)
        now = [to_device(x, state.device) for x in base]
        given_now = by_path(ranges, now)
        made = as_flats(ranges, now, given_now, _same(shown[0], given_now, new) if shown else new)
        return [b if m is n else m for b, n, m in zip(base, now, made, strict=True)]

    return advance


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
    function, what = getattr(one, point), f"{one.name}, `{point}`"
    first = context.is_first(state, one, point)

    def slots_of(own: Mapping[str, Tensor]) -> dict[str, Any]:
        return {
            name: {path: value[path] for path in own} if isinstance(value, dict) else value
            for name, value in after.items()
        }

    def checked(some: Any, own: Any, ctx: Context) -> Any:
        """The first call: owners have other leaves, so all are told of an error of one."""
        with context.told(state.setup, what):
            copies = context.copied((some, own))
            after, new = context.require_pair(one, point, function(*copies, ctx.watched(what)))
            context.require_unwritten(one, point, copies, ctx.shown)
            alone = lambda x: function(*context.copied((slots_of(x), x)), ctx)[1]  # noqa: E731
            error = accused_of_others(one, point, own, new, alone)
        lines = [error, f"skipped: {running.skipped}"]
        require_unaccused(lines, state.setup.axis, what=what)
        return _same(copies[0], some, after), new

    def compute(wholes: list[dict[str, Tensor]]) -> Mapping[str, Tensor]:
        own, some = wholes[0], slots_of(wholes[0])
        ctx = running.context(one, point, parts, wholes=wholes)
        if first:
            new_slots, new = checked(some, own, ctx)
        else:
            new_slots, new = context.require_pair(one, point, function(some, own, ctx))
        context.require_like(one, point, "slots", some, new_slots)
        context.require_like(one, point, context.VALUES[point], own, new)
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
        context.passed(state, one, point)
    running.put(put(running.state, one, slots, _of_owners(state.setup, after)))
    return tuple(outs)


def _of_owners(setup: Setup, slots: Mapping[str, Any]) -> dict[str, Any]:
    """Return slots, empty where another rank owns the leaf: a stacked state has them everywhere."""
    others = {path for path, is_mine in owned_paths(setup).items() if not is_mine}
    return {
        name: {k: x.new_zeros(0) if k in others and x.numel() else x for k, x in value.items()}
        if isinstance(value, dict)
        else value
        for name, value in slots.items()
    }


# Each call.


def at_loss(state: TrainState, value: Tensor) -> Tensor:
    """Return the loss that is differentiated: after all transforms at `loss` of a state."""
    for one in transforms_of(state.setup, "loss"):
        function: Any = one.loss
        ctx = Context(
            state.setup, state.step, state.setup.axis, {}, device=state.device, sums=False
        )
        slots, first = given(state, one), context.is_first(state, one, "loss")
        if first:
            slots, ctx = context.copied(slots), ctx.watched(f"{one.name}, `loss`")
        version = value._version
        new = function(slots, value, ctx)
        if first:
            context.require_unwritten(one, "loss", slots, ctx.shown, value, of=version)
            context.passed(state, one, "loss")
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
        self._given = {one.name: _given_whole(state, one) for one in self._transforms}
        self._after = {
            name: {k: dict(v) if isinstance(v, dict) else v for k, v in slots.items()}
            for name, slots in self._given.items()
        }
        self._first = [one for one in self._transforms if context.is_first(state, one, "local")]

    def __bool__(self) -> bool:
        return bool(self._transforms)

    def __call__(self, number: int, gradient: Tensor) -> Tensor:
        """Return the gradient of a leaf of the layout, in its shape, after all transforms."""
        setup = self._state.setup
        path, leaf = leaf_paths(setup.layout)[number], setup.layout.leaves[number]
        parts = {path: LeafPart(leaf, 0, gradient.numel())}
        for one in self._transforms:
            ctx = Context(
                setup,
                self._state.step,
                setup.axis,
                parts,
                device=gradient.device,
                path=path,
                sums=False,
            )
            gradient = self._of(one, path, gradient, ctx)
        return gradient

    def _of(self, one: Points, path: str, gradient: Tensor, ctx: Context) -> Tensor:
        function: Any = one.local
        after = self._after[one.name]
        slots = {
            k: v[path].view(gradient.shape) if isinstance(v, dict) else v for k, v in after.items()
        }
        if one in self._first:
            copies = context.copied((slots, gradient))
            pair = function(*copies, ctx.watched(f"{one.name}, `local`"))
            new_slots, new = context.require_pair(one, "local", pair)
            context.require_unwritten(one, "local", copies, ctx.shown)
            new_slots = _same(copies[0], slots, new_slots)
        else:
            new_slots, new = context.require_pair(one, "local", function(slots, gradient, ctx))
        context.require_like(one, "local", "slots", slots, new_slots)
        context.require_like(one, "local", "g", gradient, new)
        for name, value in new_slots.items():
            if value is slots[name]:
                continue
            form = self._state.slots[f"{one.name}/{name}"].form
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
            context.passed(state, one, "local")
            own = {**given(state, one), **self._given[one.name]}
            state = put(state, one, own, {**own, **self._after[one.name]})
        return state


def _given_whole(state: TrainState, one: Points) -> dict[str, Any]:
    """Return the slots of which this rank has whole leaves, and the numbers."""
    found, prefix = {}, f"{one.name}/"
    for name, slot in state.slots.items():
        whole = slot.form.placement in (Placement.PARTIAL, Placement.REPLICATED)
        if name.startswith(prefix) and (whole or slot.form.leaves == "number"):
            found[name.removeprefix(prefix)] = value_given(state, slot)
    return found


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
        """Return a state at its first event of a backward."""
        state = renewed(state, "backward")
        self._locals[number] = Locals(state)
        return state

    def change(self, number: int) -> Changed | None:
        """Return what changes a gradient of this rank, if anything does."""
        """Return what changes a gradient of this rank, if anything does."""
        own = self._locals[number]
        return (lambda leaf, gradient, dtype: own(leaf, gradient)) if own else None

    def ends(self, number: int, state: TrainState) -> TrainState:
        """Return a state with the slots of this backward."""
        """Return a state with the slots of this backward."""
        return self._locals[number].put(state)


def changed_by(
    changes: Sequence[Changed], leaf: int, gradient: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return the gradient of a leaf after all changes; dtype: in which gradients add up."""
    for change in changes:
        gradient = change(leaf, gradient, dtype)
    return gradient
