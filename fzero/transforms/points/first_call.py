"""A function of a transform is called at a point of a step; its first call is checked.

    each call     it returns (slots, value), with the keys, shapes and dtypes that it was given
    the first     what it is given are copies, to which it may not write
                  the cut test: it looks at single elements, and at what `ctx` says
                  slots and values are equal on ranks where their form, or placement, says so

In the cut test what it was given, and what `ctx` and the rule have answered, are cut by path where
they lie as pieces do. All else is given again as it was.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import optree
import torch
from torch import Tensor

from fzero.collectives import Rehearsal, assert_same_everywhere, told_everywhere
from fzero.context.current_rank import is_abstract
from fzero.context.modes import in_transform, is_recorded
from fzero.context.rng import seeded
from fzero.errors import AxisError, CallError, LayoutError, MismatchError, PhaseError, explain
from fzero.machine import elementwise
from fzero.machine.elementwise import Key, Values, require_unaccused, sampled
from fzero.machine.named_shards import Pieces
from fzero.machine.packing import digest
from fzero.state import NAMESPACE, Buffers, Placement, Setup, TrainState
from fzero.state.points import Points
from fzero.transforms.points.context import By, Context


def call_at(
    state: TrainState,
    one: Points,
    point: str,
    slots: dict[str, Any],
    value: Any,
    ctx: Context,
    rule: Callable[[Pieces], Pieces] | None = None,
    *,
    first: bool,
) -> tuple[dict[str, Any], Any, str]:
    """Return (slots, value) as a function made them, and of what its first call is accused.

    rule: at `update`, gradients -> the parameters after the optimizer's update.
    """
    stepped, shown = list[Pieces](), list[Pieces]()

    def rule_once(grads: Pieces) -> Pieces:
        assert rule is not None
        if stepped:
            raise CallError(
                f"{one.name}: `update` called the rule twice.",
                cause="a second step from the same state, which would count as two updates.",
                fix="call rule(grads) once; a gradient at another point is made in the step: "
                "fzero.map_params and a second grad_and_reduce.",
            )
        require_like(one, point, "grads", value, grads)
        stepped.append(rule(grads))
        shown.append(_copied(stepped[0]) if first else stepped[0])
        return dict(shown[0])

    function, more = getattr(one, point), () if rule is None else (rule_once,)
    copies, asked = (slots, value), ctx
    if first:
        copies, asked = _copied(copies), KeptContext(ctx.watched(f"{one.name}, `{point}`"))
    returned = function(*copies, asked, *more)
    if first:
        require_unwritten(one, point, copies, shown, asked.shown)
    if not (isinstance(returned, tuple) and len(returned) == 2):
        raise LayoutError(
            f"{one.name}: `{point}` returned a {type(returned).__name__}, not a pair.",
            cause="a function that returns the slots alone, or the value alone.",
            fix=f"end it with `return slots, {_VALUES[point]}`.",
        )
    # What was returned as it was given is a copy here: the state goes on with its own.
    after, new = _own(copies[0], slots, returned[0]), returned[1]
    new = _own(shown[0], stepped[0], new) if shown else _own(copies[1], value, new)
    like = value
    if rule is not None:
        like = stepped[0] if stepped else ctx.params
    require_like(one, point, "slots", slots, after)
    require_like(one, point, _VALUES[point], like, new)
    error = ""
    if isinstance(asked, KeptContext) and point != "local" and not one.whole:
        error = accused(one, point, asked, slots, value, after, new, *stepped)
    return after, new, error


_VALUES = {"local": "g", "reduced": "grads", "update": "params", "updated": "params"}


def _own(copies: Any, own: Any, returned: Any) -> Any:
    """Return what was returned, with the state's own tensors in the place of their copies."""
    if returned is copies:
        return own
    if isinstance(own, Mapping) and isinstance(returned, Mapping) and own.keys() == returned.keys():
        return {key: _own(copies[key], own[key], returned[key]) for key in own}
    return returned


def require_like(one: Points, point: str, what: str, given: Any, new: Any) -> None:
    """Raise `LayoutError`, naming the place, for other keys, shapes or dtypes than were given."""
    if isinstance(given, Mapping):
        if not isinstance(new, Mapping) or set(new) != set(given):
            seen = sorted(new) if isinstance(new, Mapping) else f"a {type(new).__name__}"
            raise LayoutError(
                f"{one.name}: `{point}` returned {what} with {seen}; it was given {sorted(given)}.",
                cause="a slot or a leaf that is left out, or one that `init` has not made.",
                fix="return every key that was given, e.g. {**slots, 'mean': new}.",
            )
        for key, value in given.items():
            require_like(one, point, f"{what}[{key!r}]", value, new[key])
        return
    if not isinstance(new, Tensor):
        raise LayoutError(
            f"{one.name}: `{point}` returned a {type(new).__name__} for {what}.",
            cause="a Python number in the place of a tensor, or None.",
            fix="return a tensor of the same shape and dtype: torch.full_like(x, value).",
        )
    if new.shape != given.shape or new.dtype != given.dtype:
        raise LayoutError(
            f"{one.name}: `{point}` returned {tuple(new.shape)} {new.dtype} for {what}, which is "
            f"{tuple(given.shape)} {given.dtype}.",
            cause="an operation that changes the shape or the dtype: a sum, a cast, broadcasting.",
            fix="return a tensor of the same shape and dtype, e.g. x.to(given.dtype).",
        )


def is_first(state: TrainState, one: Points, point: str) -> bool:
    """Whether a function was not checked on this rank yet; never where tensors have no values."""
    if in_transform() or is_recorded(state.params.flats) or is_abstract():
        return False
    return _key_of(state.setup, point) not in one.checked


def passed(state: TrainState, one: Points, point: str) -> None:
    """Note that the first call of a function was right."""
    one.checked.add(_key_of(state.setup, point))


def _key_of(setup: Setup, point: str) -> Any:
    return point, setup.stage, setup.axis, setup.axis.rank, setup.layout


@contextmanager
def told(state: TrainState, one: Points, point: str, *, first: bool) -> Iterator[None]:
    """Tell the other ranks of an error in a first call, for which they wait in its checks.

    Not of one that ranks have from each other: a sum of `ctx` that not all of them make.
    """
    try:
        yield
    except Exception as error:
        if not first or isinstance(error, MismatchError):
            raise
        with told_everywhere(state.setup.axis, what=f"{one.name}, `{point}`"):
            raise


def _copied(tree: Any) -> Any:
    """Return a pytree of copies, which a function may not write to either."""
    return optree.tree_map(
        lambda x: x.clone() if isinstance(x, Tensor) else x, tree, namespace=NAMESPACE
    )


def watched_call(one: Points, point: str, ctx: Context, *given: Any) -> tuple[Any, KeptContext]:
    """Return what the first call of a function without a pair returned, and its `ctx`."""
    copies, asked = _copied(given), KeptContext(ctx.watched(f"{one.name}, `{point}`"))
    returned = getattr(one, point)(*copies, asked)
    require_unwritten(one, point, copies, asked.shown)
    return returned, asked


def require_unwritten(one: Points, point: str, *trees: Any) -> None:
    """Raise `PhaseError` if a function wrote to what it was given: copies, which are new."""
    copies: Any = trees
    leaves = optree.tree_leaves(copies, namespace=NAMESPACE)
    if any(isinstance(x, Tensor) and not x.is_inference() and x._version for x in leaves):
        raise PhaseError(
            f"{one.name}: `{point}` wrote in place to what it was given.",
            cause="an in-place method (mul_, add_, lerp_, copy_, clamp_) on a slot, a gradient or "
            "a parameter: states are immutable, and others share their tensors.",
            fix="return a new tensor: x.mul(a).add(y) in the place of x.mul_(a).add_(y). Nothing "
            "was changed.",
        )


def require_equal(
    state: TrainState,
    one: Points,
    point: str,
    values: Mapping[str, Tensor] | None,
    skipped: Any = False,
    accusation: str = "",
) -> None:
    """Raise on every rank if what ranks must have in common differs; else a first call was right.

    A collective. values: pieces by path, placed as the optimizer's state; slots are those of the
    state. accusation: of this rank's call, which all ranks raise then.
    """
    setup = state.setup
    lines = [accusation, f"skipped: {bool(skipped)}"]
    for name, slot in state.slots.items():
        value, form = slot.value, slot.form
        placement = value.placement if isinstance(value, Buffers) else form.placement
        apart = placement in (Placement.PARTIAL, Placement.OWNER) or form.elsewhere == "own"
        if apart or not name.startswith(f"{one.name}/"):
            continue
        if not isinstance(value, Buffers):
            every = value.values() if isinstance(value, dict) else [value]
            lines.append(f"{name} {[digest(x.reshape(-1)) for x in every]}")
        elif placement is Placement.REPLICATED:
            lines.append(f"{name} {[digest(x) for x in value.flats]}")
    if values is not None and setup.optimizer_state is Placement.REPLICATED:
        lines += [f"{path} {digest(x)}" for path, x in values.items()]
    try:
        require_unaccused(lines, setup.axis, what=f"{one.name}, `{point}`")
    except AxisError as error:
        error.add_note(
            f"({one.name}: what `{point}` returned must be equal on these ranks. Random numbers: "
            "use ctx.normal(path). What each rank has of its own: give the slot "
            'Form(placement=fzero.Placement.PARTIAL, elsewhere="own").)'
        )
        raise
    passed(state, one, point)


def require_same_skip(state: TrainState, skipped: Any) -> None:
    """Raise `MismatchError` on every rank, before the rule, if some of them skip an update.

    Else those would wait for the others, or go on with other parameters.
    """
    if isinstance(skipped, Tensor) or in_transform() or is_recorded(state.params.flats):
        return
    try:
        lines = [f"skipped: {skipped}"]
        assert_same_everywhere(lines, state.setup.axis, what="ctx.skip of an update")
    except Exception as error:
        error.add_note(
            "(An update is skipped on all ranks, or on none. Take the flag from ctx.norm or "
            "ctx.sum, which are equal on all ranks, and not from this rank's pieces. No update "
            "was made.)"
        )
        raise


# The cut test.

_WAYS = (
    "ask ctx.norm and ctx.sum for norms and sums over whole leaves, ctx.shape(path) for a shape, "
    "ctx.normal(path, seed) for random numbers; keep what lasts in a slot; or declare "
    'needs="leaf": whole leaves in their shapes, each on the rank that owns it. Nothing was '
    "changed."
)


class KeptContext(Context):
    """`ctx` of a first call, whose answers are kept."""

    def __init__(self, ctx: Context) -> None:
        vars(self).update(vars(ctx))
        self._ctx, self._calls = ctx, Counter[str]()
        self.values, self.paths = dict[Key, Tensor](), dict[str, list[str] | None]()

    @property
    def shown(self) -> list[Tensor]:
        """As `Context.shown`."""
        return self._ctx.shown

    @property
    def params(self) -> dict[str, Tensor]:
        """As `Context.params`."""
        return self._answer("ctx.params", lambda: self._ctx.params, lies=True)

    def sum(self, tree: Any) -> Tensor:
        """As `Context.sum`."""
        return self._answer(self._asked("ctx.sum", tree), lambda: self._ctx.sum(tree))

    def norm(self, tree: Mapping[str, Tensor], by: By = "all") -> Any:
        """As `Context.norm`."""
        name = self._asked(f"ctx.norm by {by}", tree)
        return self._answer(name, lambda: self._ctx.norm(tree, by), lies=by == "row")

    def normal(self, path: str, seed: int = 0) -> Tensor:
        """As `Context.normal`."""
        name = f"ctx.normal of {path}, seed {seed}"
        return self._answer(name, lambda: {path: self._ctx.normal(path, seed)}, lies=True)[path]

    def _asked(self, name: str, tree: Any) -> str:
        """Return the name of a call, by its number."""
        self._calls[name] += 1
        return f"{name}, call {self._calls[name]}"

    def _answer(self, name: str, ask: Callable[[], Any], *, lies: bool = False) -> Any:
        """Return an answer: a tensor, or by path; `lies`: as the pieces do."""
        found = ask()
        by_path = isinstance(found, Mapping)
        self.paths[name] = [*found] if by_path else None
        for path, x in (found if by_path else {"": found}).items():
            self.values[_key(name, path, lies=lies)] = sampled(x) if lies else x.detach()
        return found


class RepeatedContext(KeptContext):
    """`ctx` in the test: it answers what another one has answered."""

    def __init__(self, first: KeptContext, values: Values, skipped: Any) -> None:
        super().__init__(first._ctx)
        self._first, self._given, self._skipped = first, values, skipped
        self.made = dict[Key, Tensor]()

    @property
    def skipped(self) -> Any:
        """Whether the update is not made, so far."""
        return self._skipped

    def skip(self, flag: Any = True) -> None:
        """Keep the flag, which must be the same for all parts."""
        self._skipped = self._skipped | torch.as_tensor(flag).bool()
        self.made[self._asked("ctx.skip", None), ""] = torch.as_tensor(flag)

    def _asked(self, name: str, tree: Any) -> str:
        """Return the name of a call, and keep what it is of, where that is by path."""
        name = super()._asked(name, tree)
        lengths = {leaf: x.numel() for (_, leaf), x in self._given.items()}
        for path, x in tree.items() if isinstance(tree, Mapping) else ():
            if path in lengths and isinstance(x, Tensor) and x.numel() == lengths[path]:
                self.made[f"what {name} is given", path] = x
        return name

    def _answer(self, name: str, ask: Callable[[], Any], *, lies: bool = False) -> Any:
        """As it was: raises `KeyError` for what was not asked."""
        paths = self._first.paths[name]
        if paths is None:
            return self._given[_key(name, "", lies=lies)]
        return {path: self._given[_key(name, path, lies=lies)] for path in paths}


def _key(name: str, path: str, *, lies: bool) -> Key:
    return (name, path) if lies else (f"{name} {path}".rstrip(), "")


def accused(
    one: Points,
    point: str,
    asked: KeptContext,
    slots: Mapping[str, Any],
    value: Mapping[str, Tensor],
    after: Mapping[str, Any],
    new: Mapping[str, Tensor],
    stepped: Mapping[str, Tensor] | None = None,
) -> str:
    """Return the error of a function that looks at more than single elements; "" if it does not.

    asked: the context of its first call. slots, value: what that was given. after, new: what it
    returned. stepped: what the rule returned, at `update`.
    """
    named = {name for name, form in one.slots or () if form.leaves == "named"}
    skipped, function = asked.skipped, getattr(one, point)

    def key_of(name: str, path: str) -> Key:
        return _key(name, path, lies=bool(path) and name.removeprefix("slot ") not in named)

    def by_key(slots: Mapping[str, Any], **more: Any) -> dict[Key, Tensor]:
        trees = {**{f"slot {name}": x for name, x in slots.items()}, **more}
        return {
            key_of(name, path): torch.as_tensor(x)
            for name, tree in trees.items()
            for path, x in (tree if isinstance(tree, Mapping) else {"": tree}).items()
        }

    def called(values: Values) -> Values:
        def of(name: str, like: Any) -> Any:
            if not isinstance(like, Mapping):
                return values[key_of(name, "")]
            return {path: values[key_of(name, path)] for path in like}

        def rule(grads: Mapping[str, Tensor]) -> Any:
            asks.update(grads)
            return of("the rule's", stepped)

        again, asks = RepeatedContext(asked, values, skipped), dict[str, Tensor]()
        own, given = {name: of(f"slot {name}", x) for name, x in slots.items()}, of("", value)
        if point == "init":
            made = by_key(function(given, again))
        else:
            after, new = function(own, given, again, *([rule] if point == "update" else []))
            made = by_key(after, **{"": new, "for the rule": asks})
        for key in made.keys() & values.keys():
            if made[key].numel() != values[key].numel():
                raise LayoutError(f"it returned {made[key].numel()}, not {values[key].numel()}")
        return {**made, **again.made}

    def looked_at(some: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
        return {key: sampled(x) if key[1] else x.detach() for key, x in some.items()}

    given = by_key(slots, **{"": value, "the rule's": stepped or {}})
    returned = by_key(after, **({} if point == "init" else {"": new}))
    values = {**looked_at(given), **asked.values}
    found = elementwise.looks_beyond(called, values, looked_at(returned))
    return elementwise.accusation(f"{one.name}: `{point}`", found, _WAYS) if found else ""


def accused_of_others(
    one: Points,
    point: str,
    wholes: Mapping[str, Tensor],
    made: Mapping[str, Tensor],
    call: Callable[[dict[str, Tensor]], Mapping[str, Tensor]],
) -> str:
    """Return the error of a function of whole leaves that looks at others; "" if it does not.

    made: of all of `wholes` together. call: the function, of some of them.
    """
    for path, x in wholes.items() if len(wholes) > 1 else ():
        try:
            with seeded(0, x.device), Rehearsal(elementwise.SIZE).given():
                apart = (call({path: x})[path] - made[path]).abs().max()
            seen = "made something else" if apart > 1e-3 * made[path].abs().max() else ""
        except Exception as error:
            seen = f"raised {type(error).__name__} ({error})"
        if seen:
            return explain(
                f"{one.name}: `{point}` looks at more than one leaf: of {path} alone it {seen}, "
                f"unlike beside {len(wholes) - 1} others.",
                cause="a sum or a norm over all that it is given, another leaf, or random numbers: "
                "which leaves are called together depends on the number of ranks.",
                fix="make of each leaf what its own elements say; sums and norms over all of them "
                'are asked of ctx in a transform with needs="element". Nothing was changed.',
            )
    return ""
