"""The call with which two runs part: what `fzero.diff` says of their steps, and other inputs."""

from __future__ import annotations

from typing import Any

import optree
import torch
from torch import Tensor

from fzero.checkpoint.elements import stack_of
from fzero.state import NAMESPACE, Setup
from fzero.tools.diff import Difference, Run, diff
from fzero.tools.record._records import Inputs, RecordedCall
from fzero.tools.record._replaying import inputs_on
from fzero.transforms.pipeline import Step
from fzero.transforms.setup import blank_params
from fzero.transforms.shard import sharded_as


def difference_of(
    trusted: Any, other: Any, before: Any, calls: tuple[RecordedCall, RecordedCall]
) -> Difference | None:
    """Return the first difference of one call of two steps, from one state, stacked over ranks.

    calls: the inputs of each. None if there is none, and if they cannot be compared: engines, steps
    that were not loaded, ranks with inputs of other shapes.
    """
    if not isinstance(trusted, Step) or not isinstance(other, Step):
        return None
    try:
        return diff(_run(trusted, before, calls[0]), _run(other, before, calls[1]))
    except Exception:  # what bisect has found stands without it
        return None


def _run(step: Any, before: Any, call: RecordedCall) -> Run:
    setup: Setup = before.setup
    ranks = setup.axis.size
    logical = None if setup.logical is None else setup.logical.ranks
    inputs = stack_of(inputs_on(ranks, call.inputs, call.number, logical))
    return Run(
        step=_with_inputs(sharded_as(step, ranks=ranks, shards=setup.layout.ranks)),
        params=blank_params(setup.layout),
        optimizer=setup.optimizer,
        batches=[inputs],
        world_size=ranks,
        start=before,
    )


def _with_inputs(step: Step[..., Any]) -> Step[..., Any]:
    """Return the step as one of (state, inputs)."""

    def around(inner: Any, state: Any, inputs: Inputs) -> Any:
        args, kwargs = inputs
        return inner(state, *args, **kwargs)

    return Step("inputs", step, around, options={})


def ranks_of_other_inputs(a: RecordedCall, b: RecordedCall) -> tuple[int, ...]:
    """Return the ranks that two calls give other inputs; () where they have other ranks."""
    if len(a.inputs) != len(b.inputs):
        return ()
    pairs = zip(a.inputs, b.inputs, strict=True)
    return tuple(rank for rank, (x, y) in enumerate(pairs) if not _same(x, y))


def _same(a: Any, b: Any) -> bool:
    mine, spec = optree.tree_flatten(a, namespace=NAMESPACE)
    other, other_spec = optree.tree_flatten(b, namespace=NAMESPACE)
    return spec == other_spec and all(map(_is_same, mine, other))


def _is_same(x: Any, y: Any) -> bool:
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        return type(x) is type(y) and bool(x == y)
    bits = (z.contiguous().reshape(-1).view(torch.uint8) for z in (x, y))
    return x.dtype == y.dtype and x.shape == y.shape and torch.equal(*bits)
