"""Calls again, on the ranks of the run: which of them does not compute what it holds."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import optree
from torch import Tensor

from fzero import checkpoint
from fzero.checkpoint.elements import Held, generators, held_by, rng_setter, rng_text, stack_of
from fzero.checkpoint.engine_state import Driven, buffers_of, options_of, set_buffers, set_options
from fzero.state import NAMESPACE
from fzero.tools.record._records import Inputs, RecordedCall, RecordedForm, Snapshot


class Wrong(NamedTuple):
    """The first state that ranks hold, and do not get when the calls before it are made again."""

    updates: int  # that were made
    leaf: str
    ranks: tuple[int, ...]


def wrong_ranks(
    fn: Callable[..., Any],
    thing: Any,
    kept: Snapshot,
    calls: Sequence[RecordedCall],
    form: RecordedForm,
    digests: Callable[[Held], Tensor | None],
) -> Wrong | None:
    """Make calls again from a state that was kept. A collective, which leaves `thing` as it is.

    calls: those since that state, and the one that is to be made now.

    Returns None if every rank gets what it holds, and where the calls cannot be made again.
    """
    held = held_by("record", thing, apart=True)
    own = rng_setter(rng_text(generators()), "this process")
    put_back = None if held.engine is None else _putting_back(held.engine)
    try:
        with kept.as_checkpoint() as path:
            begun = checkpoint.load(path, thing, rng=False)
        return _first(fn, begun, calls, form, digests)
    except Exception:  # the step is the user's, and may do anything but what it did before
        return None
    finally:
        if put_back is not None:
            put_back()
        own()


def _putting_back(engine: Driven) -> Callable[[], None]:
    """Return what gives an engine its present state again, of this rank: its calls change it."""
    tree: Any = engine.state
    state: Any = optree.tree_map(
        lambda x: x.clone() if isinstance(x, Tensor) else x, tree, namespace=NAMESPACE
    )
    buffers = {name: x.clone() for name, x in buffers_of(engine.module).items()}
    options = options_of(engine.optimizer)

    def put_back() -> None:
        engine.state = state
        set_buffers(engine.module, buffers)
        set_options(engine.optimizer, options)

    return put_back


def _first(
    fn: Callable[..., Any],
    thing: Any,
    calls: Sequence[RecordedCall],
    form: RecordedForm,
    digests: Callable[[Held], Tensor | None],
) -> Wrong | None:
    for call, after in itertools.pairwise(calls):
        held = held_by("record", thing, apart=True)
        rng_setter(rng_text(call.generators[0]), "the recording")()
        args, kwargs = _inputs(call, held.is_stack)
        result = fn(thing, *args, **kwargs)
        thing = thing if held.engine is not None else state_in(result)
        rows = digests(held_by("record", thing, apart=True))
        if rows is None or after.words is None or after.number != call.number + 1:
            return None
        differ = (rows != after.words).nonzero().tolist()
        told = held.processes.tell([(held.ranks[row], leaf) for row, leaf in differ])
        if odd := [one for some in told for one in some]:
            leaf = min(leaf for _, leaf in odd)
            ranks = sorted({rank for rank, _ in odd})
            return Wrong(after.updates, form.names[leaf], tuple(ranks))
    return None


def state_in(result: Any) -> Any:
    """Return the state in what a step has returned."""
    return result[0] if isinstance(result, tuple) and result else result


def _inputs(call: RecordedCall, is_stack: bool) -> Inputs:
    """Return the inputs as the step was given them, on their devices."""
    devices = iter(call.devices)
    inputs: Any = stack_of(call.inputs) if is_stack else call.inputs[0]
    given: Any = optree.tree_map(
        lambda x: x.to(next(devices)) if isinstance(x, Tensor) else x, inputs, namespace=NAMESPACE
    )
    return given
