"""The cut test of a function at a point, beside its first call.

What it was given, and what `ctx` and the rule have answered, are the values of the test, by path
where they lie as pieces do, so that they are cut with them. All else is given again as it was.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fzero.collectives import Rehearsal
from fzero.context.rng import seeded
from fzero.errors import LayoutError, explain
from fzero.machine import elementwise
from fzero.machine.elementwise import Key, Values, sampled
from fzero.state.points import Points
from fzero.transforms.points.context import By, Context

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
