"""`offload`: keep parts of a state in host memory or on disk between their uses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fzero.context.modes import in_transform, is_recorded
from fzero.errors import PhaseError
from fzero.errors.check import called_as
from fzero.machine.offload import at_home
from fzero.state import TrainState
from fzero.state.setup import Home, Offload, as_offload
from fzero.transforms.models import map_states
from fzero.transforms.pipeline import Step, Transform, entering, transform, transform_function


@transform_function
@called_as('offload(step, optimizer="cpu")', any_of=("optimizer", "gradients", "params"))
def offload(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    optimizer: Home = None,
    gradients: Home = None,
    params: Home = None,
    folder: str | Path | None = None,
) -> Step[..., Any] | Transform:
    """Let parts of the state of `fn(state, *args)` live in host memory ("cpu") or files ("disk").

    The numbers are the same. What is computed, is computed on the device: the update steps one
    flat buffer after the other, while the next one is on its way there and the one before on its
    way back, so that the device holds two units of what lives elsewhere. At stage 3 a unit's shard
    comes to the device when the unit is gathered.

    A state that the step's own `init` makes is made so, unit by unit; another one is moved by the
    first call. On a model that computes on a CPU, "cpu" changes nothing. Under `fzero.simulate` all
    ranks are stacked in memory between two steps, also what lives on disk inside of them.

    Args:
        fn: the step.
        optimizer: where the optimizer's states and fp32 masters live.
        gradients: where reduced gradients live, and what waits in a window.
        params: where the shards of parameters live; stage 3 only.
        folder: for "disk", a folder on a disk of this machine; it may differ by rank.

    Returns:
        A step that is called as `fn` is. Without `fn`, a decorator.

    Raises:
        CallError: if it is not said what is to live elsewhere. `optimizer=None`, written, is the
            identity, and brings a state back that lives elsewhere.
        LayoutError: for another place; "disk" without a folder that is there; around `shard`,
            `simulate` or another `offload`; in `init` or a call, for `params` below stage 3, and
            for an optimizer that is neither of `fzero.optim` nor from `from_torch`.
        PhaseError: in a call, for a state that holds gradients and lives elsewhere.

    Source: Rajbhandari et al., "ZeRO-Infinity", arXiv 2104.07857, section 5.

    Example:
        >>> import tempfile, torch, fzero
        >>> def step_fn(state, x):
        ...     state, loss = fzero.grad_and_reduce(lambda p, x: (p["w"] * x).sum(), state)(x)
        ...     return fzero.apply_gradients(state), loss
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     away = fzero.offload(step_fn, optimizer="disk", folder=folder)
        ...     step = fzero.shard(away, stage=2)
        ...     state, _ = step(step.init({"w": torch.ones(2)}, fzero.optim.adamw(0.5)), 1.0)
        >>> fzero.state_bytes(state)["on disk"]
        16
    """
    record = Offload(optimizer=optimizer, gradients=gradients, params=params, folder=folder)

    def enter(state: Any) -> Any:
        return map_states("offload", lambda one: _living(one, record), state)

    return transform(
        "offload",
        fn,
        entering("offload", enter),
        never_around=("offload", "shard", "simulate"),
        right="fzero.shard(fzero.offload(step, ...), stage=...), with one offload",
        options={kind: home for kind, home in record.homes.items() if home},
        init_options={"offload": record},
    )


def _living(state: TrainState, record: Offload) -> TrainState:
    """The state, its buffers where `record` says."""
    setup = state.setup
    if setup.offload == record or in_transform() or is_recorded(state.params.flats):
        return state
    if state.gradients.held or state.window.pending.held:
        raise PhaseError(
            f"offload: the state holds gradients, and lives so: {setup.offload.homes}.",
            cause="fzero.offload around a part of a step.",
            fix="put one fzero.offload around the whole step.",
        )
    here = state.device
    resolved = as_offload(record, setup.stage, here)
    moved = state.replace(setup=dataclasses.replace(setup, offload=resolved))
    return at_home(moved, device=here)
