"""`shard`: give a step its stage, its ranks and its `init`; donate the state's buffers."""

from __future__ import annotations

import functools
import gc
import warnings
from collections.abc import Callable, Sequence
from types import CodeType, FunctionType, ModuleType
from typing import Any, Unpack

from torch import Tensor

from fzero.context.modes import in_transform, is_recorded
from fzero.errors import AxisError, LayoutError, PhaseError, explain
from fzero.machine.placeholder import DISABLED_FRAMES
from fzero.options import OPTIONS, SharedOptions, Stages, StepOptions, grouped, takes
from fzero.ranks.mesh import Axis, Runtime, carrying, names_of_mesh, running_on
from fzero.state import TrainState
from fzero.transforms.donation import check_alive, own_gradients
from fzero.transforms.init import check_shared, check_stages, init
from fzero.transforms.local import mesh_for
from fzero.transforms.logical_ranks import carried_by, drawn_in_losses_alone
from fzero.transforms.models import axes_of_loss, flatten_states, map_states, meshes_of, stages_of
from fzero.transforms.pipeline import (
    Step,
    Transform,
    init_options_of,
    returned_pair,
    transform,
    transform_function,
)
from fzero.transforms.update import apply_gradients


@transform_function
@takes("shard", "shard(step, stage=2)")
def shard(  # noqa: D417 {options}
    fn: Callable[..., Any] | None = None,
    /,
    *,
    stage: Stages,
    **options: Unpack[StepOptions],
) -> Step[..., Any] | Transform:
    """Run `fn(state, *args) -> (state, aux)` on states partitioned as ZeRO `stage` says.

    `step.init(params, optimizer)` makes such a state. The arguments stay each rank's own. With
    stage 0 on one rank it is the identity. Use it outermost, but for `simulate`.

    All options but `donate` are what `step.init` makes a state with; a state that was made
    elsewhere keeps its own.

    Several models: `stage` or `mesh` may be a pytree, {"g": 2, "d": 3}, and so may the optimizer.
    `init` then takes a pytree of parameters with these keys and gives one of states; the step is
    given that pytree and returns it, and with `donate` all that it has updated is donated.

    A batch that requires grad makes the parameters part of its graph, so that the caller can
    differentiate through the step. A step that is given such parameters again warns: they keep the
    activations of every earlier step. One that never updates warns once: its gradients add up from
    call to call. (It is one whose functions do not name `apply_gradients`.)

    Args:
        fn: the step.
        {options}

    Returns:
        A step that is called as `fn` is. Without `fn`, a decorator.

    Raises:
        LayoutError: for a bad option; in a call, before anything runs, for a state of another
            stage, states under other keys, or one state under two keys with `donate`.
        AxisError: in a call, before anything runs, for a state of another axis.
        DonatedError: in a call, for a state that was used up.
        PhaseError: after a call with `logical_ranks=` that drew from torch's generators outside of
            the losses of `grad_and_reduce`.

    Source: Rajbhandari et al., "ZeRO", arXiv 1910.02054, section 5.

    Example:
        >>> import torch, fzero
        >>> def step_fn(state, x):
        ...     state, loss = fzero.grad_and_reduce(lambda p, x: (p["w"] * x).sum(), state)(x)
        ...     return fzero.apply_gradients(state), loss
        >>> step = fzero.shard(fzero.coalesce(step_fn), stage=2)
        >>> step
        shard(stage=2) . coalesce . step_fn
        >>> state, loss = step(step.init({"w": torch.ones(2)}, fzero.optim.sgd(1.0)), 0.5)
        >>> fzero.full_params(state)
        {'w': tensor([0.5000, 0.5000])}
    """
    stage = check_stages("shard", stage)
    for name, value in options.items():
        OPTIONS[name].require(value)
    check_shared(grouped(SharedOptions, options))
    of_init: dict[str, Any] = {**options}
    donate = of_init.pop("donate", False)
    leftovers = _Leftovers()

    def around(
        inner: Callable[..., Any], state: Any, /, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        states = flatten_states("shard", state)[0]
        meshes = meshes_of(options.get("mesh"), state, states)
        for (one, its_stage, where), mesh in zip(
            stages_of(stage, state, states), meshes, strict=True
        ):
            _check_state(one, its_stage, mesh_for(mesh, one.outer), where)
        if donate:
            _require_apart(states)
        state = map_states("shard", lambda one: _donating(one, donate), state)
        # So that collectives of the step know its axes by name, and its logical ranks.
        over, first = axes_of_loss(states, [one.mesh for one in states]), states[0]
        with running_on(*over), carrying(carried_by(first.setup)), drawn_in_losses_alone(first):
            try:
                state, aux = returned_pair("shard", inner, inner(state, *args, **kwargs))
            except RuntimeError as error:
                if not str(error).startswith("element 0 of tensors does not require grad"):
                    raise
                raise PhaseError(
                    "backward() of a value in a step: it has no graph.",
                    cause="loss.backward() after grad_and_reduce, which has made the gradients "
                    "already.",
                    fix="leave it out: state, loss = fzero.grad_and_reduce(loss_fn, state)(batch), "
                    "then state = fzero.apply_gradients(state). With backward() trains "
                    "fzero.adapter.Engine.",
                ) from error
        leftovers.saw(inner, states, flatten_states("shard", state)[0])
        return map_states("shard", lambda one: _donating(one, False), state), aux

    def init_of(inner: Any) -> Callable[..., Any]:
        return functools.partial(init, stage=stage, **of_init, **init_options_of(inner))

    # A pipeline prints the options that differ from their defaults.
    hidden = {"mesh", "units", "trainable"}
    shown = {k: x for k, x in of_init.items() if k not in hidden and x != OPTIONS[k].default}
    return transform(
        "shard",
        fn,
        around,
        never_around=("shard", "simulate"),
        right="fzero.simulate(fzero.shard(step, stage=...), world_size=...), with one shard",
        options={"stage": stage, **shown, **({"donate": True} if donate else {})},
        init_of=init_of,
    )


def sharded_as(
    step: Step[..., Any], *, ranks: int, shards: int, stage: Stages | None = None
) -> Step[..., Any]:
    """Return the step sharded over the ranks that run it, and without donation.

    step: with a `shard`, under `simulate` or not. Its mesh stays where it has names, which a loss
    may call, and as many ranks; else there are replicas of so many shards. stage: None for its own.

    Example:
        >>> import fzero
        >>> step = fzero.simulate(fzero.shard(lambda s: (s, 0), stage=2, donate=True), world_size=2)
        >>> sharded_as(step, ranks=2, shards=2, stage=3)
        shard(stage=3) . <lambda>
    """
    if step.name == "simulate":
        inner: Any = step.inner
        return sharded_as(inner, ranks=ranks, shards=shards, stage=stage)
    made: Any = step.find_init()
    mesh: Any = names_of_mesh(made.keywords.get("mesh"), ranks)
    if mesh is None and shards < ranks:
        mesh = ranks // shards, shards
    asked = init_options_of(step.inner)
    options: Any = {name: x for name, x in made.keywords.items() if name not in asked}
    options |= {"mesh": mesh} | ({} if stage is None else {"stage": stage})
    return shard(step.inner, **options)


def asked_of(step: Any) -> dict[str, Any]:
    """Return the options that a step makes states with, but for stage, ranks and optimizer.

    Example:
        >>> import fzero
        >>> asked_of(fzero.shard(lambda s: (s, 0), stage=2, ordered=True))
        {'ordered': True}
    """
    while isinstance(step, Step) and step.name == "simulate":
        step = step.inner
    made: Any = step.find_init() if isinstance(step, Step) else None
    if made is None:
        return {}
    return {name: x for name, x in made.keywords.items() if name not in ("stage", "mesh")}


def _donating(state: TrainState, donate: bool) -> TrainState:
    if state.setup.policy.donate == donate:
        return state
    return (own_gradients(state) if donate else state).replace_policy(donate=donate)


def _require_apart(states: Sequence[TrainState]) -> None:
    """Raise `LayoutError` for two states on one memory, of which the first uses the second up."""
    seen: set[int] = set()
    for state in states if len(states) > 1 else ():
        own = {id(flat) for flat in state.params.flats if flat.numel()}
        if own & seen:
            raise LayoutError(
                "a step with donate=True was given one state under two keys.",
                cause="the same state, or one that shares its parameters (EMA, a target network), "
                "in several places of the pytree; donation overwrites it under the first key.",
                fix='give a copy: optree.tree_map(torch.clone, state, namespace="fzero"); or leave '
                "donate out.",
            )
        seen |= own


def _check_state(state: TrainState, stage: int, axis: Axis, where: str) -> None:
    check_alive(state)
    if state.setup.stage != stage:
        raise LayoutError(
            f"a state of stage {state.setup.stage} was given to a step of stage {stage}"
            f"{where and f', at {where}'}.",
            cause="the state came from another step's init, or from fzero.reshard.",
            fix=f"use this step's init, or fzero.shard(step, stage={state.setup.stage}).",
        )
    if state.mesh != axis:
        raise AxisError(
            f"a state of {state.mesh} was given to a step on {axis}.",
            cause="the state was made in another world, or inside fzero.simulate."
            if Runtime.VIRTUAL in (axis.runtime, state.mesh.runtime)
            else "the state was made for another number of ranks, or another mesh.",
            fix="make it with step.init in this world; or move it: fzero.reshard(state, mesh=...) "
            "takes the mesh of the step; or give the step the mesh of the state: "
            "fzero.shard(step, mesh=...).",
        )
    flats = state.params.flats  # under a transform it is meant that they have a graph
    if not in_transform() and not is_recorded(flats) and any(x.grad_fn is not None for x in flats):
        warnings.warn(_GRAPH, UserWarning, stacklevel=4 + DISABLED_FRAMES)


class _Leftovers:
    """Warns once of a step that adds to the gradients of its own earlier calls, without an update.

    What waits in a window that is open, or for the last micro-batch, is meant to add up; so are the
    gradients of several steps, those of a state that was updated before, and those of a step that
    names an update, which it makes in a later call.
    """

    def __init__(self) -> None:
        self._warned = False
        self._left: set[int] = set()  # virtual ranks whose calls have left gradients

    def saw(
        self, step: Callable[..., Any], before: Sequence[TrainState], after: Sequence[TrainState]
    ) -> None:
        """A call of the step was given states, and returned others."""
        if self._warned or in_transform() or len(before) != len(after):
            return
        pairs = [
            (x.progress.backwards, y.progress.backwards) for x, y in zip(before, after, strict=True)
        ]
        waits = any(x.window.is_open or x.setup.policy.defer_update for x in before)
        if waits or any(new < old for old, new in pairs):
            return
        rank = before[0].setup.axis.rank
        if rank in self._left and any(0 < old < new for old, new in pairs):
            self._warned = True
            if is_recorded([x.step for x in before]) or any(int(x.step) for x in before):
                return
            if not _names(step, apply_gradients):
                warnings.warn(_LEFTOVERS, UserWarning, stacklevel=6 + DISABLED_FRAMES)
        if any(old < new for old, new in pairs):
            self._left.add(rank)


_NOT_USERS = ("torch.", "fzero.", "builtins.")


def _names(step: Any, fn: Callable[..., Any]) -> bool:
    """Whether a step holds `fn`, or reaches a function of the user's whose code names it."""
    rest, seen = [step], dict[int, Any]()
    while rest and len(seen) < 100_000:
        x = rest.pop()
        if x is fn:
            return True
        if id(x) in seen or isinstance(x, ModuleType | Tensor | TrainState):
            continue
        seen[id(x)] = x
        if isinstance(x, CodeType):
            if fn.__name__ in x.co_names:
                return True
            rest += x.co_consts
        elif isinstance(x, type):
            rest += vars(x).values() if not f"{x.__module__}.".startswith(_NOT_USERS) else ()
        elif isinstance(x, FunctionType):
            rest += [*(x.__closure__ or ()), x.__defaults__, x.__kwdefaults__, vars(x)]
            if not f"{x.__module__}.".startswith(_NOT_USERS):
                called = (x.__globals__.get(name) for name in x.__code__.co_names)
                rest += [x.__code__, *filter(callable, called)]
        else:
            rest += gc.get_referents(x)
    return False


_LEFTOVERS = explain(
    "this step was given the gradients of its earlier call, added its own, and made no update.",
    cause="a step without fzero.apply_gradients: gradients add up from call to call for ever.",
    fix="end it with `return fzero.apply_gradients(state), loss`. If calls are to add up, call "
    "fzero.apply_gradients after the last of them (or fzero.accumulate, which is one call): this "
    "is said once, and not after an update.",
)


_GRAPH = explain(
    "the parameters of this state carry the graph of all steps before, which stay in memory.",
    cause="a batch that requires grad, or that a model under training made.",
    fix="give the step batch.detach(). To differentiate through several steps, take "
    "torch.func.grad of a function that makes them.",
)
