"""`transform`: a transform of steps of one's own, from pure functions at the points of a step."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from fzero.errors import LayoutError, PhaseError
from fzero.errors.check import require
from fzero.machine.compress import require_codec
from fzero.machine.named_shards import Pieces
from fzero.state import Form, Placement, TrainState
from fzero.state.codec import Codec, Compress
from fzero.state.points import POINTS, Needs, Points
from fzero.transforms.models import flatten_states, under_policy
from fzero.transforms.pipeline import P, R, Step
from fzero.transforms.pipeline import transform as put_around
from fzero.transforms.points.context import Context

Slots = dict[str, Any]
"""{slot: pieces, a number, or named tensors}."""
Returned = Mapping[str, Any]
Made = Mapping[str, Tensor]
OnPieces = Callable[[Slots, Pieces, Context], tuple[Returned, Made]]
Rule = Callable[[Made], Pieces]


class StepTransform(Points):
    """A transform of steps: `ema(step)` is a step. What `fzero.transform` returns.

    It also goes into `transforms=` of `fzero.init`, `fzero.shard` and `Engine`.
    """

    def __call__(self, fn: Callable[P, R], /) -> Step[P, R]:
        """Return the step `fn(state, *args) -> (state, aux)` with this transform around it."""

        def around(
            inner: Callable[..., Any], state: Any, /, *args: Any, **kwargs: Any
        ) -> tuple[Any, Any]:
            states = flatten_states(self.name, state)[0]
            before = states[0].setup.policy.points
            for one in states:
                _require_slots(one, self)
                beside = {other.name for other in one.setup.policy.points}
                beside |= {name.partition("/")[0] for name in one.slots}
                require_excluded([self], beside)
            return under_policy(self.name, inner, state, (args, kwargs), points=(self, *before))

        init_options: dict[str, Any] = {"transforms": (self,)}
        if self.wire is not None:
            init_options["compress"] = Compress(gradients=self.wire)
        step: Any = put_around(
            self.name,
            fn,
            around,
            never_around=(self.name, *self.excludes, "shard", "simulate"),
            right=f"fzero.shard({self.name}(step), stage=...), with one {self.name}",
            options={},
            init_options=init_options,
        )
        return step


def _require_slots(state: TrainState, record: Points) -> None:
    """Raise `PhaseError` for a state that was made without the slots of a transform."""
    if record.init is None or record in state.setup.transforms:
        return
    same = [one for one in state.setup.transforms if one.name == record.name]
    raise PhaseError(
        f"{record.name}: the state has no slots of this transform"
        + (", but of another one of that name." if same else "."),
        cause="a state from fzero.init, or from another step; or a transform that is defined "
        "anew for each step.",
        fix=f"make it by the init of this step, fzero.shard({record.name}(step), stage=...).init; "
        "or give fzero.init transforms=[...]. A checkpoint of the other state can be loaded into "
        "the new one.",
    )


def transform(
    *,
    name: str,
    slots: Mapping[str, Form] | None = None,
    init: Callable[[Pieces, Context], Mapping[str, Any]] | None = None,
    loss: Callable[[Slots, Tensor, Context], Tensor] | None = None,
    local: Callable[[Slots, Tensor, Context], tuple[Returned, Tensor]] | None = None,
    wire: Codec | None = None,
    reduced: OnPieces | None = None,
    update: Callable[[Slots, Pieces, Context, Rule], tuple[Returned, Made]] | None = None,
    updated: OnPieces | None = None,
    reads: Sequence[str] = (),
    needs: Needs = "element",
    excludes: Sequence[str] = (),
) -> StepTransform:
    """Return a transform of steps that acts at the points of a step, and keeps slots in the state.

        loss -> local -> wire -> reduced -> update -> updated

    All functions are pure: they return new slots and values, and write to nothing. Values are this
    rank's parts of each leaf, {path: 1-D tensor}, so that elementwise code is right at every stage
    and on every number of ranks; `ctx` has sums and norms over all of them. A leaf of which a rank
    has nothing is an empty tensor. At each point transforms act from the inside out. `ctx` is a
    `fzero.Context`. One that raises leaves the state as it was: around the rule, and after it, new
    tensors are made, and a donated state is written to when all functions have returned.

    Args:
        name: of the transform: how it shows in a pipeline, and before the names of its slots.
        slots: {slot: `fzero.Form`}. A slot of `init` that is not in it is parallel to the leaves
            that learn, placed as the optimizer's state, in fp32 or wider; a number is the same on
            all ranks.
        init: (params, ctx) -> {slot: {path: 1-D tensor} or a number}, before the first update.
        loss: (slots, value, ctx) -> value: what is differentiated in the place of the loss. Each
            call; slots are read only; what `grad_and_reduce` returns is the value before it.
        local: (slots, g, ctx) -> (slots, g): this rank's gradient of one call and one leaf,
            `ctx.path`, in its shape, before it crosses ranks; times the loss scale, if there is
            one. The slots are those of which a rank has whole leaves, and numbers.
        wire: a codec of `fzero.codecs`, or one's own: how gradients cross ranks.
        reduced: (slots, grads, ctx) -> (slots, grads): once an update; the mean gradients in the
            units of the loss, clipped if a clip is further in.
        update: (slots, grads, ctx, rule) -> (slots, params); rule(grads) -> params steps the
            optimizer. Left out: rule.
        updated: (slots, params, ctx) -> (slots, params): once an update, of what the optimizer has
            stepped (masters, where there are any), before parameters are gathered or rounded.
        reads: "before": `updated` may read `ctx.params`, the parameters before the update; with
            whole leaves `reduced` needs it for that, too.
        needs: what its functions look at to change an element. "element": that one alone, which is
            tested when a function is first called. "leaf": its leaf: `reduced` and `updated` get
            whole leaves in their shapes, each on the rank that owns it, and slots are by leaf on
            its owner. "matrix" says the same of leaves that are matrices. `local` has whole leaves
            anyway.
        excludes: names of transforms and options of fzero, or of other transforms, that it cannot
            stand beside: "clip", "scale_loss", "local", "compress", "offload", "autocast".

    Returns:
        A transform: `ema(step)` is a step; `transforms=[ema]` of `fzero.init`, `fzero.shard` and
        `Engine` takes it. `fzero.slots(state, name)` reads what it keeps.

    Raises:
        LayoutError: for arguments that do not go together; on its first call for what a function
            returns in another shape or dtype; and, on every rank, for a function of elements that
            looks at more: a mean or a norm of a piece, its length, a place in it.
        MismatchError: on its first call, on every rank, for a value that differs by rank where its
            form says that it is equal.
        PhaseError: on its first call, for a function that writes in place.

    Example:
        >>> import torch, fzero
        >>> def begin(params, ctx):
        ...     return {"mean": {path: p.clone() for path, p in params.items()}}
        >>> def follow(slots, params, ctx):
        ...     mean = {path: x.lerp(params[path], 0.5) for path, x in slots["mean"].items()}
        ...     return {"mean": mean}, params
        >>> ema = fzero.transform(name="ema", init=begin, updated=follow)
        >>> def step_fn(state):
        ...     state, loss = fzero.grad_and_reduce(lambda p: p["w"].sum(), state)()
        ...     return fzero.apply_gradients(state), loss
        >>> step = fzero.shard(ema(step_fn), stage=2)
        >>> state, _ = step(step.init({"w": torch.ones(2)}, fzero.optim.sgd(1.0)))
        >>> fzero.slots(state, "ema")
        {'mean': {'w': tensor([0.5000, 0.5000])}}
    """
    if name in _TAKEN:
        raise LayoutError(
            f"transform: name={name!r} is taken.",
            cause="the name of a transform of fzero's, or of what every state keeps.",
            fix=f"give another one: name='my_{name}'.",
        )
    functions: dict[str, Any] = {"init": init, "loss": loss, "local": local, "reduced": reduced}
    functions |= {"update": update, "updated": updated}
    is_name = isinstance(name, str) and name.isidentifier()
    require("transform: name", name, lambda _: is_name, "a word, as name='ema'")
    for key, function in functions.items():
        good = function is None or callable(function)
        require(f"transform: {key}", function, lambda _, good=good: good, "a function, or None")
        if function is None:
            continue
        try:
            takes = inspect.signature(function)
        except (TypeError, ValueError):  # of a builtin, nobody knows
            continue
        try:
            takes.bind(*_ARGUMENTS[key])
        except TypeError as error:
            raise LayoutError(
                f"transform {name!r}: `{key}` takes {takes}.",
                cause=f"the arguments of another point ({error}).",
                fix=f"define it as {key}({', '.join(_ARGUMENTS[key])}).",
            ) from None
    wanted = '"element", "leaf" or "matrix"'
    require("transform: needs", needs, ("element", "leaf", "matrix").__contains__, wanted)
    good = all(one == "before" for one in reads)
    require("transform: reads", reads, lambda _: good, '("before",), or ()')
    if wire is not None:
        require_codec("transform: wire", wire)
    pairs = None if slots is None else tuple(slots.items())
    record = StepTransform(
        name=name,
        slots=pairs,
        wire=wire,
        reads=tuple(reads),
        needs=needs,
        excludes=tuple(excludes),
        **functions,
    )
    _require_together(record)
    return record


_TAKEN = (
    *("accumulate", "autocast", "check_finite", "clip", "coalesce", "compress", "evaluate"),
    *("local", "offload", "remat", "scale_loss", "shard", "simulate", "weights"),
    *("gradients", "masters", "optimizer", "outer", "params", "residual", "window"),
)
"""Names that would be read as those of fzero's own."""

_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "init": ("params", "ctx"),
    "loss": ("slots", "value", "ctx"),
    "local": ("slots", "g", "ctx"),
    "reduced": ("slots", "grads", "ctx"),
    "update": ("slots", "grads", "ctx", "rule"),
    "updated": ("slots", "params", "ctx"),
}


def _require_together(record: Points) -> None:
    """Raise `LayoutError` for a transform that does nothing, or contradicts itself."""
    name = f"transform {record.name!r}"
    if not record.at:
        raise LayoutError(
            f"{name}: it does nothing.",
            cause="no function at any point.",
            fix=f"give one of {', '.join(POINTS)}.",
        )
    if record.slots and record.init is None:
        raise LayoutError(
            f"{name}: slots= without init=.",
            cause="forms of values that nobody makes.",
            fix="give init=(params, ctx) -> {slot: value}.",
        )
    for slot, form in record.slots or ():
        good = isinstance(form, Form) and form.leaves != "record"
        if not good or not isinstance(slot, str) or "/" in slot:
            raise LayoutError(
                f"{name}: slots={{{slot!r}: {form!r:.60}}}.",
                cause="a placement or a dtype in the place of a form, or a name with a slash.",
                fix="give {slot: fzero.Form(...)}.",
            )
        if (
            record.whole
            and form.leaves != "number"
            and (form.leaves != "named" or form.placement is not Placement.OWNER)
        ):
            raise LayoutError(
                f"{name}: the slot {slot} is {form.leaves!r}, and needs={record.needs!r}.",
                cause="whole leaves are on their owners, and so is what is kept of them.",
                fix='leave slots= out, or give fzero.Form(leaves="named", '
                "placement=fzero.Placement.OWNER).",
            )
    if record.whole and record.update is not None:
        raise LayoutError(
            f"{name}: `update` with needs={record.needs!r}.",
            cause="the rule steps this rank's parts, and not the leaves that it owns.",
            fix="act at `reduced` or `updated`, or write a rule: fzero.optim.from_torch("
            "..., needs='matrix').",
        )


def transforms_apart(transforms: Sequence[Any], beside: Sequence[str] = ()) -> tuple[Points, ...]:
    """Return the transforms of a state; raise `LayoutError` for two of one name.

    beside: the names of fzero's own transforms and options that the state has.
    """
    seen = set[str]()
    for one in transforms:
        require("transforms", one, lambda x: isinstance(x, Points), "what fzero.transform returns")
        if one.name in seen:
            raise LayoutError(
                f"transforms: two are named {one.name!r}.",
                cause="one transform twice, or two whose slots would have the same names.",
                fix="give each a name of its own: fzero.transform(name=...).",
            )
        seen.add(one.name)
    require_excluded(transforms, seen | {*beside})
    return tuple(transforms)


def require_excluded(transforms: Sequence[Points], beside: Collection[str]) -> None:
    """Raise `LayoutError` for a transform beside one that it excludes."""
    for one in transforms:
        found = sorted({*beside}.intersection(one.excludes))
        if found:
            raise LayoutError(
                f"transforms: {one.name} beside {found[0]}.",
                cause=f"{one.name} says that it cannot stand beside it (excludes=).",
                fix="leave one of them out.",
            )
