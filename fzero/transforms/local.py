"""`local`: replicas train apart, and an outer update brings them together now and then."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, overload

import torch

from fzero.errors import PhaseError
from fzero.errors.check import called_as
from fzero.optim import Optimizer
from fzero.state import Local, TrainState
from fzero.state.outer import with_outer
from fzero.transforms.outer import DEFAULT_OUTER
from fzero.transforms.pipeline import P, R, Step, Transform, returned_pair, transform
from fzero.transforms.states import S, flatten_states, map_states


@overload
def local(
    fn: Callable[P, R],
    /,
    *,
    every: int,
    outer: Optimizer = ...,
    fragments: int = 1,
    delay: int = 0,
    mixing: float = 0.0,
) -> Step[P, R]: ...
@overload
def local(
    *,
    every: int,
    outer: Optimizer = ...,
    fragments: int = 1,
    delay: int = 0,
    mixing: float = 0.0,
) -> Transform: ...
@called_as("local(step, every=64)")
def local(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    every: int,
    outer: Optimizer = DEFAULT_OUTER,
    fragments: int = 1,
    delay: int = 0,
    mixing: float = 0.0,
) -> Step[..., Any] | Transform:
    """Let replicas make `every` updates apart, then one outer update together (DiLoCo, local SGD).

    The replicas are those of a mesh of two dims, (replicate, shard); on a mesh of one dim each
    rank is one. All replicas start at the anchors a. Each makes `every` updates by its own
    gradients: means, clips, norms, loss scales and weights are over the ranks of one replica.
    Then, with p_r the parameters of replica r,

        g = (1 / R) sum_r (a - p_r),  a' = a + update of `outer`(g),  p_r' = a'

    so that what crosses replicas is one sum of the parameters for `every` updates. The inner
    optimizer, with its states, is the one that `init` is given; it goes on from the new parameters.

    Each call of `apply_gradients` counts, also one that is skipped (an overflow, a total weight of
    0) on this replica. A replica whose parameters are not finite is left out of the mean, with a
    warning on all: it goes on from the anchors, with optimizer states of zeros. So is one for which
    `leave_out` was called, without a warning.

    With several `fragments` the parameters meet in parts, unit by unit in turn: fragment f of F
    after update (f + 1) every / F of each round, so that less crosses at once. Each has a state of
    the outer rule of its own.

    With a `delay` the outer update of what is exchanged after one update is made that many updates
    later, and a replica keeps a share of what it has become since: p_r' = mixing p_r +
    (1 - mixing) a'. In between g waits in the state (Streaming DiLoCo).

    `fzero.full_params(state)` are the anchors, `full_params(state, replica=True)` this replica's
    parameters, which are also what `evaluate` uses.

    Args:
        fn: the step; `step.init` makes states with local updates.
        every: updates of each replica from one outer update to the next, 1 or more.
        outer: the rule of the outer update, of `fzero.optim`, also `from_torch(...)` and
            `partition(...)`; default SGD with a rate of 0.7 and Nesterov momentum 0.9. It may need
            a matrix, as the inner one may: the ranks of each replica that own it update it.
        fragments: in how many parts the parameters meet, 1 to `every`.
        delay: updates from the exchange of a fragment to its outer update, 0 to `every` - 1.
        mixing: the share of its own parameters that a replica keeps in it, 0 to below 1. With 0
            what it has learned during the delay is lost.

    Returns:
        A step that is called as `fn` is. Without `fn`, a decorator.

    Raises:
        LayoutError: for another `every`, number of fragments, delay or mixing; around `shard`,
            `simulate` or another `local`; in `init`, for `optimizer_over="all"`, for what is no
            rule, and for one that needs all parameters at once.
        PhaseError: in a call, for a state that was made without local updates, or with others.
        MismatchError: in an outer update, on every rank, if a replica makes another call.

    Source: Douillard et al., "DiLoCo", arXiv 2311.08105, algorithm 1; fragments: Douillard et al.,
    "Streaming DiLoCo", arXiv 2501.18512, sections 2.2 and 2.3.

    Example:
        >>> import torch, fzero
        >>> @fzero.simulate(world_size=2)
        ... @fzero.shard(stage=0)
        ... @fzero.local(every=2, outer=fzero.optim.sgd(1.0))
        ... def step(state, x):
        ...     state, _ = fzero.grad_and_reduce(lambda p, x: (p["w"] * x).sum(), state)(x)
        ...     return fzero.apply_gradients(state), fzero.full_params(state, replica=True)["w"]
        >>> state = step.init({"w": torch.zeros(1)}, fzero.optim.sgd(1.0))
        >>> x = torch.tensor([1.0, 3.0])
        >>> for _ in range(3):
        ...     state, before = step(state, x)
        ...     print(before.flatten())
        tensor([0., 0.])
        tensor([-1., -3.])
        tensor([-4., -4.])
    """
    record = Local(every=every, outer=outer, fragments=fragments, delay=delay, mixing=mixing)

    rest = {"outer": (outer, DEFAULT_OUTER), "fragments": (fragments, 1)}
    rest |= {"delay": (delay, 0), "mixing": (mixing, 0.0)}

    def around(
        inner: Callable[..., Any], state: Any, /, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        for one in flatten_states("local", state)[0]:
            held = one.outer
            now = None if held is None else held.local
            if now != record:
                raise _other(now, record)
        return returned_pair("local", inner, inner(state, *args, **kwargs))

    return transform(
        "local",
        fn,
        around,
        never_around=("local", "shard", "simulate"),
        right="fzero.shard(fzero.local(step, every=...), stage=...), with one local",
        options={"every": every} | {k: x for k, (x, usual) in rest.items() if x != usual},
        init_options={"local": record},
    )


def leave_out(state: S) -> S:
    """Return the state of a replica that is left out of the next mean of local updates.

    For a replica that knows that its last updates are not good: a bad batch, data that another
    replica has seen as well. In the next outer update (of each fragment) it contributes nothing,
    and goes on from the anchors that the others make, with its own optimizer state. One rank of a
    replica is enough. No collective. Of an engine, between a step and the next backward:
    `engine.state = fzero.leave_out(engine.state)`.

    Args:
        state: a `TrainState` with local updates, or a pytree of them.

    Returns:
        The state, or the pytree.

    Raises:
        PhaseError: for a state without local updates.
        LayoutError: for what is no state.

    Example:
        >>> import torch, fzero
        >>> local = fzero.Local(every=8)
        >>> state = fzero.init({"w": torch.ones(2)}, fzero.optim.sgd(1.0), stage=0, local=local)
        >>> fzero.leave_out(state).outer.weight
        tensor([0.])
    """

    def one(state: TrainState) -> TrainState:
        held = state.outer
        if held is None:
            raise PhaseError(
                "leave_out: a state without local updates.",
                cause="all ranks have one gradient: nobody can be left out of it.",
                fix="weight= of grad_and_reduce leaves a call out: give 0.",
            )
        after = replace(held, weight=torch.zeros_like(held.weight))
        return state.replace(slots=with_outer(state.slots, after))

    return map_states("leave_out", one, state)


def _other(now: Local | None, wanted: Local) -> PhaseError:
    seen = "made without local updates" if now is None else f"of {now}"
    return PhaseError(
        f"local: a state {seen} was given to a step of {wanted}.",
        cause="a state from fzero.init, or from another step.",
        fix="make it with this step's init: fzero.shard(fzero.local(step, ...), stage=...).init; "
        "or give fzero.init local=fzero.Local(every=...).",
    )
