"""`offload_states` and `reload_states`: states in host memory, as for generation between updates.

Tensors keep their identity and get other memory, so that the state, the gatherer and all others
who hold one see the same. On the CPU nothing is moved.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from fzero.adapter.driver import Driver
from fzero.checkpoint.elements import slots_of
from fzero.state import TrainState
from fzero.state.setup import MASTERS

KINDS = ("lp_params", "lp_grads", "hp_params", "optim_states")
"""DeepSpeed's names: parameters, gradients, masters, and the other slots of the optimizer."""

Moved = list[tuple[Tensor, torch.device]]
"""What was moved, and where it was."""


@torch.no_grad()
def to_host(driver: Driver, kinds: Sequence[str], *, pin: bool) -> Moved:
    """Move the tensors of these kinds to host memory; return those that were moved."""
    driver.require_no_window("offload_states()")
    driver.wait()
    moved: Moved = []
    for x in _tensors(driver.state, kinds):
        if x.device.type != "cpu":
            moved.append((x, x.device))
            x.data = torch.empty_like(x, device="cpu", pin_memory=pin).copy_(x)
    _rebind(driver)
    return moved


@torch.no_grad()
def to_device(driver: Driver, moved: Moved) -> None:
    """Move the tensors that `to_host` returned back to the device."""
    driver.require_not_closed()
    for x, device in moved:
        x.data = x.to(device)
    _rebind(driver)


def _tensors(state: TrainState, kinds: Sequence[str]) -> Iterable[Tensor]:
    if "lp_params" in kinds:
        yield from state.params.flats
    if "lp_grads" in kinds:
        yield from (*state.gradients.flats, *state.window.pending.flats)
    for slot in slots_of(state):
        if ("hp_params" if slot.name == MASTERS else "optim_states") in kinds:
            yield slot.flat
    if "optim_states" in kinds:
        owned = state.setup.optimizer.owned(state.optimizer)
        yield from (x for some in owned.values() for x in some if x.numel())


def _rebind(driver: Driver) -> None:
    """Below stage 3, make the module's parameters views of the flats again, after those moved."""
    if not driver.state.setup.gathers_by_unit:
        for index, flat in enumerate(driver.state.params.flats):
            driver.params.follow(driver.state.setup, index, flat)
        driver.params.remember()
    driver.published()
