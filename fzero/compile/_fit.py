"""Whether a file of graphs fits the arguments of a call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import optree
from torch import Tensor

from fzero.errors import LayoutError
from fzero.optim._optimizer import Optimizer
from fzero.state import NAMESPACE, TrainState
from fzero.transforms._plan import facts
from fzero.transforms._states import flatten_states


def facts_of(arguments: Any) -> list[str]:
    """Return what a graph is made for, a line for each fact: alike on every rank of a run."""
    lines = []
    for state in flatten_states("export", arguments[0])[0]:
        setup = state.setup
        lines += facts(replace(setup, axis=setup.axis.as_virtual()))
        scale = None if state.scale is None else state.scale.policy
        lines += [f"{setup.policy}", f"{state.phase.value}, loss scale {scale}"]
    leaves = optree.tree_leaves(arguments, namespace=NAMESPACE)
    accessors = optree.tree_accessors(arguments, namespace=NAMESPACE)
    last = len(arguments) - 1
    for accessor, leaf in zip(accessors, leaves, strict=True):
        at = accessor[0].entry
        head = "state" if at == 0 else "keywords" if at == last else f"args[{at - 1}]"
        lines.append(f"{accessor[1:].codify(head)} = {_shown(leaf)}")
    return lines


def _shown(leaf: Any) -> str:
    if not isinstance(leaf, Tensor):
        return repr(leaf)
    dtype = str(leaf.dtype).removeprefix("torch.")
    return f"{dtype}{list(leaf.shape)}, strides {list(leaf.stride())}, {leaf.device.type}"


def require_fit(path: Any, known: Sequence[str], arguments: Any) -> None:
    """Raise `LayoutError` with the first fact in which a call is not what the file was made for."""
    for wanted, found in zip_longest(known, facts_of(arguments), fillvalue="nothing"):
        if wanted != found:
            raise LayoutError(
                f"{path} was made for {wanted}; this call has {found}.",
                cause="another model, optimizer, number of ranks or shape of the batch than "
                "when the file was written.",
                fix="export again with this step and these arguments, or leave out exported=.",
            )


def schedules_of(states: Sequence[TrainState]) -> dict[str, Any]:
    """Return the schedules of the optimizers, by their places: "state.param group"."""
    found: dict[str, Any] = {}
    for i, state in enumerate(states):
        optimizer = state.setup.optimizer
        if isinstance(optimizer, Optimizer):
            every = [optimizer.options, *(changes for _, changes in optimizer.overrides)]
            given = ((k, dict(options).get("lr")) for k, options in enumerate(every))
            found.update({f"{i}.{k}": lr for k, lr in given if callable(lr)})
    return found
