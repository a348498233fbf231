"""The first call of a function at a point: what it may return, and what it may not do.

shapes and dtypes    as it was given them, by path
writes in place      none: what it is given are copies then, whose versions are compared
ranks                values are equal where the form, or the placement, says so
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import optree
from torch import Tensor

from fzero.collectives import assert_same_everywhere, told_everywhere
from fzero.context.current_rank import is_abstract
from fzero.context.modes import in_transform, is_recorded
from fzero.errors import AxisError, LayoutError, MismatchError, PhaseError
from fzero.machine.elementwise import require_unaccused
from fzero.machine.packing import digest
from fzero.state import NAMESPACE, Buffers, Placement, Setup, Slot, TrainState
from fzero.state.points import Function, Points


def is_first(state: TrainState, one: Points, point: str) -> bool:
    """Whether a function was not checked on this rank yet; never where tensors have no values."""
    if in_transform() or is_recorded(state.params.flats) or is_abstract():
        return False
    return _key(state.setup, point) not in one.checked


@contextmanager
def told(setup: Setup, what: str) -> Iterator[None]:
    """Tell the other ranks of an error in a first call, for which they wait in its checks.

    Not of one that ranks have from each other: a sum of `ctx` that not all of them make.
    """
    try:
        yield
    except MismatchError:
        raise
    except Exception:
        with told_everywhere(setup.axis, what=what):
            raise


def passed(state: TrainState, one: Points, point: str) -> None:
    """Note that the first call of a function was right."""
    one.checked.add(_key(state.setup, point))


def _key(setup: Setup, point: str) -> Any:
    return point, setup.stage, setup.axis, setup.axis.rank, setup.layout


def copied(tree: Any) -> Any:
    """Return a pytree of copies, which a function may not write to either."""
    return optree.tree_map(
        lambda x: x.clone() if isinstance(x, Tensor) else x, tree, namespace=NAMESPACE
    )


def require_unwritten(one: Points, point: str, *trees: Any, of: int = 0) -> None:
    """Raise `PhaseError` if a function wrote to what it was given: copies, which are new.

    of: how often the last one of the trees, no copy, was written to before.
    """
    leaves = [x for tree in trees for x in optree.tree_leaves(tree, namespace=NAMESPACE)]
    counts = [x._version for x in leaves if isinstance(x, Tensor) and not x.is_inference()]
    if sum(counts) != of:
        raise PhaseError(
            f"{one.name}: `{point}` wrote in place to what it was given.",
            cause="an in-place method (mul_, add_, lerp_, copy_, clamp_) on a slot, a gradient or "
            "a parameter: states are immutable, and others share their tensors.",
            fix="return a new tensor: x.mul(a).add(y) in the place of x.mul_(a).add_(y). Nothing "
            "was changed.",
        )


def function_at(one: Points, point: str) -> Function:
    """Return what a transform does at a point."""
    return getattr(one, point)


def require_pair(one: Points, point: str, returned: Any) -> tuple[Any, Any]:
    """Return (slots, value); raise `LayoutError` if a function did not return such a pair."""
    if not (isinstance(returned, tuple) and len(returned) == 2):
        raise LayoutError(
            f"{one.name}: `{point}` returned a {type(returned).__name__}, not a pair.",
            cause="a function that returns the slots alone, or the value alone.",
            fix=f"end it with `return slots, {_VALUES[point]}`.",
        )
    return returned


_VALUES = {"local": "g", "reduced": "grads", "update": "params", "updated": "params"}


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


# The same values on all ranks.


def require_equal(
    state: TrainState,
    one: Points,
    point: str,
    values: Mapping[str, Tensor] | None,
    skipped: Any = False,
    accused: str = "",
) -> None:
    """Raise `MismatchError` on every rank if what ranks must have in common differs. A collective.

    values: pieces by path, placed as the optimizer's state; slots are those of the state.
    accused: the `LayoutError` that all ranks raise where any has found one.
    """
    setup = state.setup
    lines = [accused, f"skipped: {bool(skipped)}"]
    for name, slot in state.slots.items():
        if name.startswith(f"{one.name}/"):
            lines += _lines_of(setup, name, slot)
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


def _lines_of(setup: Setup, name: str, slot: Slot) -> list[str]:
    placement = slot.value.placement if isinstance(slot.value, Buffers) else slot.form.placement
    if placement in (Placement.PARTIAL, Placement.OWNER) or slot.form.elsewhere == "own":
        return []
    if isinstance(slot.value, Buffers):
        if slot.value.placement is not Placement.REPLICATED:
            return []
        return [f"{name} {[digest(x) for x in slot.value.flats]}"]
    values = slot.value.values() if isinstance(slot.value, dict) else [slot.value]
    return [f"{name} {[digest(x.reshape(-1)) for x in values]}"]
