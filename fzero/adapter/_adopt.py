"""`engine.state = state`: the values of another state, in the buffers of the engine's own."""

from __future__ import annotations

from typing import Any

import torch

from fzero.adapter.boundary import require_no_forward
from fzero.adapter.driver import Driver
from fzero.errors import LayoutError
from fzero.state import TrainState
from fzero.state.scale import carried, with_slot
from fzero.state.train_state import require_not_donated
from fzero.transforms.points import begun_slots


@torch.no_grad()
def adopt(driver: Driver, state: TrainState) -> None:
    """Write the values of another state into the buffers of this one."""
    driver.require_not_closed()
    require_no_forward(driver, "engine.state = ...")
    require_not_donated(state)
    own = driver.state
    if _form(state) != _form(own):
        raise LayoutError(
            f"engine.state was set to a state of {_named(state)}; the engine has {_named(own)}.",
            cause="a state of another model, stage, number of ranks or mesh.",
            fix="load it into the engine's form: "
            "engine.state = fzero.checkpoint.load(path, engine.state).",
        )
    for mine, theirs in zip(own.params.flats, state.params.flats, strict=True):
        if mine is not theirs:
            mine.copy_(theirs)
    driver.stand_ins.drop()
    scale = carried(own.scale, state.scale)
    slots = with_slot(state.slots, scale)
    new = state.replace(params=own.params, setup=own.setup, slots=slots)
    driver.put(begun_slots(new))  # those that the other state has not
    driver.writes.agree(driver.params.all_objects)
    driver.published()


def _form(state: TrainState) -> tuple[Any, ...]:
    """What two states must have in common to have buffers of the same sizes on each rank."""
    setup, outer = state.setup, state.outer
    held = setup.stage, setup.layout, setup.replicas, setup.optimizer_state
    return *held, None if outer is None else outer.local


def _named(state: TrainState) -> str:
    setup, outer = state.setup, state.outer
    groups = f"stage {setup.stage} with {len(setup.layout.groups)} groups on {setup.axis}"
    apart = "" if outer is None else f", with {outer.local}"
    return f"{groups}, its optimizer {setup.optimizer_state.value}{apart}"
