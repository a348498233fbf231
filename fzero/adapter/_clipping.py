"""Gradients of an engine, clipped by hand: what torch.nn.utils does to those of one process."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from fzero.adapter._gradient import as_held
from fzero.adapter.driver import Driver
from fzero.errors.check import is_number, require
from fzero.machine.offload import change
from fzero.optim import require_ordered
from fzero.transforms.clip import norm_of_state
from fzero.transforms.leaf_slices import clip_factor, scaled
from fzero.transforms.weights import averaged


def clip_grad_norm_(driver: Driver, max_norm: float) -> Tensor:
    """Scale the gradients so that their global norm is at most `max_norm`; return it before.

    g <- g min(1, max_norm / (|g| + 1e-6)). A collective. `max_norm=` of the engine does the
    same at every update.
    """
    good = max_norm == float("inf") or (is_number(max_norm) and max_norm >= 0)
    require("clip_grad_norm_(): max_norm", max_norm, lambda _: good, "a number of 0 or more")
    held = driver.reduced(f"clip_grad_norm_({max_norm})")
    state = driver.state
    norm = averaged(state, norm_of_state(state, state.gradients))
    if not held:  # as torch.nn.utils.clip_grad_norm_: nothing to scale
        return norm
    gradients = scaled(state, state.gradients, clip_factor(norm, max_norm))
    driver.put(state.replace(gradients=gradients))
    driver.stand_ins.gradients.changed()
    return norm


@torch.no_grad()
def clip_grad_value_(driver: Driver, clip_value: float) -> None:
    """Bound each element of the reduced gradients: g <- max(-clip_value, min(g, clip_value)).

    What torch.nn.utils.clip_grad_value_ does to the gradients of one process: that works, too.
    """
    good = is_number(clip_value) and clip_value >= 0
    name = "clip_grad_value_(): clip_value"
    require(name, clip_value, lambda _: good, "a number of 0 or more")
    require_ordered("clip_grad_value_()", driver.state.setup.layout.leaves)
    state = driver.with_gradients(f"clip_grad_value_({clip_value})")
    for index, flat in zip(state.setup.layout.trainable, state.gradients.flats, strict=True):
        low, high = (as_held(state, index, bound) for bound in (-clip_value, clip_value))
        change(flat, state.device, partial(Tensor.clamp_, min=low, max=high))
    driver.stand_ins.gradients.changed()
