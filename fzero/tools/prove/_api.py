"""`prove`: a step, a state and its arguments -> a proof about the step on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
from torch import Tensor

from fzero.context.modes import in_transform, is_recorded
from fzero.errors import AxisError, LayoutError, PhaseError
from fzero.errors.check import is_count, require
from fzero.state import NAMESPACE, TrainState
from fzero.state.progress import Phase
from fzero.tools.prove._check import prove_programs
from fzero.tools.prove._programs import ranks_of, record
from fzero.tools.prove._proof import Proof
from fzero.transforms.pipeline import Step, describe_function
from fzero.transforms.states import flatten_states


def prove(step: Callable[..., Any], state: Any, args: Any = (), *, world: int | None = None) -> Proof:
    """Prove that `step` on W ranks is the step of one rank with the mean gradient, for all values.

    new_state(p, b_1, ..., b_W) = update(p, (1 / W) sum_r gradient(p, b_r)), where update and
    gradient are what the step does on one rank alone.

    Two programs are recorded as `fzero.trace` does it, without numbers and without other ranks: of
    one rank alone, and of ranks among W. Each value of them is read as an expression over the
    parameters, the state and the batches: a whole tensor, each rank's part of one, what a rank has
    made of its own batch, a sum over ranks. Where both programs give the same expression for every
    leaf of the new state, the theorem holds for all real numbers, and prints with what it assumes. A
    leaf for which they do not is named, with the line of the graph at which the ranks begin to
    do what one rank does not explain. That a claim is not shown does not say that it is wrong.

    Args:
        step: (state, *args) -> (state, aux), with a `fzero.shard` in it; or `fzero.simulate` of one.
        state: as the step is given it, between two updates. Its shapes, stage and optimizer count,
            and no value of it.
        args: the further arguments, a tuple; what is no tuple is the only one. Of a simulated step
            they are stacked, and rank 0's are read.
        world: W, any number of ranks; default that of the state.

    Returns:
        A `Proof`: true if all is shown. Not a collective.

    Raises:
        LayoutError: for a step without `fzero.shard`, and for a `world` that is no count.
        AxisError: for a mesh of two dims, and for local updates.
        PhaseError: for a state that holds gradients, inside of a trace or a transform, and where
            `fzero.trace` raises it: a step that reads values, an optimizer that has no graph.

    Source: Rajbhandari et al., "ZeRO", arXiv 1910.02054; Willsey et al., "egg", POPL 2021.

    Example:
        >>> import torch, fzero
        >>> def step_fn(state, x):
        ...     state, loss = fzero.grad_and_reduce(lambda p, x: (p["w"] * x).sum(), state)(x)
        ...     return fzero.apply_gradients(state), loss
        >>> step = fzero.shard(step_fn, stage=2)
        >>> state = step.init({"w": torch.ones(5)}, fzero.optim.sgd(1.0))
        >>> fzero.prove(step, state, torch.ones(5), world=1024).proved
        True
    """
    inner = _sharded(step)
    states = flatten_states("prove", state)[0]
    for one in states:
        _require_supported(one)
    world = states[0].setup.axis.size if world is None else world
    require("prove: world", world, is_count, "at least 1")
    if in_transform() or is_recorded(()):
        raise PhaseError(
            "prove inside of a torch.func transform or of a trace.",
            cause="a step that proves itself.",
            fix="call fzero.prove outside of the step.",
        )
    arguments = args if isinstance(args, tuple) else (args,)
    if inner is not step:
        arguments = _of_first_rank(arguments, states[0].setup.axis.size)
    alone = record(inner, state, arguments, 1, (0,))[0]
    ranks = record(inner, state, arguments, world, ranks_of(world))
    return prove_programs(describe_function(inner), alone, ranks, world)


def _sharded(step: Any) -> Step[..., Any]:
    """Return the step of one rank, which can make a state for any number of ranks."""
    inner = step.inner if isinstance(step, Step) and step.name == "simulate" else step
    if isinstance(inner, Step) and inner.find_init() is not None:
        return inner
    raise LayoutError(
        f"prove: {describe_function(step) if callable(step) else type(step).__name__} has no "
        "fzero.shard in it.",
        cause="the function that shard is put around, or a step that was called already.",
        fix="pass the step itself: fzero.prove(fzero.shard(step_fn, stage=2), state, batch).",
    )


def _require_supported(state: TrainState) -> None:
    if state.setup.replicas > 1 or state.window.outer is not None:
        raise AxisError(
            f"prove: a state on {state.mesh}, with replicas or local updates.",
            cause="a mesh of two dims, or fzero.local.",
            fix="prove the step on one dim of ranks; for the others use fzero.certify.",
        )
    if state.phase is not Phase.IDLE:
        raise PhaseError(
            "prove: the state holds gradients.",
            cause="a state from between grad_and_reduce and apply_gradients.",
            fix="pass a new state, or the one after an update.",
        )


def _of_first_rank(arguments: Any, world: int) -> Any:
    """Return rank 0's part of the stacked arguments of a simulated step."""

    def first(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if not x.ndim or x.shape[0] != world:
            raise LayoutError(
                f"prove: an argument of shape {tuple(x.shape)}; dim 0 must be the {world} ranks.",
                cause="one batch in the place of one for each rank.",
                fix="give what the simulated step is given.",
            )
        return x[0]

    return optree.tree_map(first, arguments, namespace=NAMESPACE)
