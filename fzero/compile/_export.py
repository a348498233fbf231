"""`export`: the graphs of a step in one file, for ranks that do not trace."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optree

from fzero.compile._encode import Json, encoded, encoded_graph
from fzero.compile._file import write
from fzero.compile._fit import facts_of, schedules_of
from fzero.compile._run import (
    EARLY_BYTES,
    MERGED_BYTES,
    axis_of_states,
    checked_sizes,
    donates,
    recorded,
)
from fzero.errors import LayoutError
from fzero.state import NAMESPACE
from fzero.state.schedule import Schedule
from fzero.trace._api import of_one_rank
from fzero.trace._program import Program
from fzero.transforms._pipeline import Step, describe, require_order
from fzero.transforms._states import flatten_states


def export(
    step: Callable[..., Any],
    path: str | os.PathLike[str],
    *,
    bucket_bytes: int = MERGED_BYTES,
    gather_bytes: int = EARLY_BYTES,
) -> Callable[..., Path]:
    """Return e: e(state, *args) writes the graph of each rank that runs `step(state, *args)`.

    `fzero.compile(step, exported=path)` runs what is in the file, on every rank of another run, and
    traces nothing. No number of the state or of the batch is written but constants of the step. One
    process can write the file for any number of ranks: on virtual ones, with `fzero.simulate`.

    A file is a program: read only those that you would also run as code.

    Args:
        step: (state, *args) -> (state, aux), sharded, or `fzero.simulate` of one. It returns states
            as it was given them: a step that ends with an update.
        path: of the file, which is written as a whole or not at all.
        bucket_bytes: as for `fzero.compile`.
        gather_bytes: as for `fzero.compile`.

    Returns:
        A function of the arguments of the step that returns the path. Not a collective: let one
        rank call it.

    Raises:
        LayoutError: for bad sizes, and a compiled step. In the call, for a step that does not
            return states like those that it was given, whose aux is more than tensors, numbers and
            strings in dicts, lists and tuples, or whose graph has what is no op of torch.library.
        PhaseError: in the call, as `fzero.trace`.

    Example:
        >>> import tempfile, torch, fzero
        >>> def step_fn(state, x):
        ...     state, loss = fzero.grad_and_reduce(lambda p, x: (p["w"] * x).sum(), state)(x)
        ...     return fzero.apply_gradients(state), loss
        >>> step = fzero.shard(step_fn, stage=2)
        >>> state = step.init({"w": torch.ones(2)}, fzero.optim.sgd(0.5))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = fzero.export(step, f"{folder}/step.json")(state, torch.ones(2))
        ...     fast = fzero.compile(step, exported=path, backend="eager")
        >>> fast(state, torch.ones(2))[1]
        tensor(2.)
    """
    require_order("export", step, never_around=("compile",), right="fzero.export(step, path)")
    inner: Any = step.inner if isinstance(step, Step) and step.name == "simulate" else step
    sizes = checked_sizes("export", bucket_bytes=bucket_bytes, gather_bytes=gather_bytes)

    def written(*args: Any, **kwargs: Any) -> Path:
        arguments: Any = (*args, kwargs)
        graphs: dict[str, int] = {}  # ranks may have the same one
        content: dict[str, Any] = {"step": describe(inner), "donate": donates(inner), "ranks": []}
        for rank in range(axis_of_states("export", arguments).size):
            one, given, axis, _ = of_one_rank("export", step, arguments, rank)
            program = recorded(one, given, axis, rank, sizes)
            lines = json.dumps(encoded_graph(program.graph, schedules_of(program.states)))
            content["ranks"].append(graphs.setdefault(lines, len(graphs)))
            content |= {"facts": facts_of(given), "aux": _aux(program, given[0])}
        return write(Path(path), content | {"graphs": [json.loads(lines) for lines in graphs]})

    return written


@dataclass(frozen=True, slots=True)
class _Slot:
    """Where a tensor stands in the result."""

    number: int


def _aux(program: Program, given: Any) -> Json:
    """What the step returns beside the states, with the numbers of its tensors."""
    numbers = iter(range(len(program.others)))
    leaves = [_Slot(next(numbers)) if x is None else x for x in program.others]
    returned: Any = optree.tree_unflatten(program.result, leaves)
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise _no_step("does not return (state, aux)")
    after = optree.tree_leaves(returned[0], namespace=NAMESPACE)
    same = _structure(returned[0], None) == _structure(given, program.states)
    if not same or not all(isinstance(x, _Slot) for x in after):
        raise _no_step("does not return states like those that it was given")
    try:
        return encoded(returned[1], lambda x: {"tensor": x.number} if type(x) is _Slot else None)
    except TypeError as error:
        raise _no_step(f"returns {error} in its aux") from error


def _structure(tree: Any, states: Sequence[Any] | None) -> Any:
    """The structure of a tree of states without what a schedule of stage 3 has recorded."""
    found, treespec = flatten_states("export", tree)
    plain: Any = [one.replace(schedule=Schedule()) for one in states or found]
    return treespec, [optree.tree_structure(one, namespace=NAMESPACE) for one in plain]


def _no_step(seen: str) -> LayoutError:
    return LayoutError(
        f"export: the step {seen}.",
        cause="a part of a step (gradients without their update), or a record of your own as "
        "aux: a file can only say tensors, numbers and strings in dicts, lists and tuples.",
        fix="export the step that ends with fzero.apply_gradients, and return such an aux.",
    )
