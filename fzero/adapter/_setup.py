"""From a module, an optimizer and options to the setup of a state: checked, nothing touched."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fzero._modes import require_autograd
from fzero.adapter._driver import OWNERS
from fzero.adapter._module import require_one_device, require_plain
from fzero.adapter._options import Options, compared, require_options
from fzero.adapter._units import unit_of_leaves
from fzero.collectives import assert_same_everywhere, told_everywhere
from fzero.errors import PhaseError
from fzero.mesh import Axis, Runtime
from fzero.optim import NoOptimizer, TorchOptimizer, as_optimizer, from_torch
from fzero.state import Policy, Setup
from fzero.state.precision import as_autocast, owners_in
from fzero.state.scale import DynamicScale, ScalePolicy, as_policy
from fzero.transforms._options import check_stage
from fzero.transforms._plan import COMPARED, plan
from fzero.transforms.scale_loss import Scale
from fzero.virtual import current_ranks, is_abstract

Factory = Callable[[list[nn.Parameter]], Optimizer]
"""Makes an optimizer of the parameters that learn."""


def planned(module: nn.Module, optimizer: Any, stage: int, axis: Axis, options: Options) -> Setup:
    """Check module, optimizer and options; return the setup of the engine's state."""
    with told_everywhere(axis, what=COMPARED):  # the next that all ranks compare
        require_autograd("Engine(...)")
        require_options(options)
        check_stage(stage)
        require_plain(module, lambda p: id(p) in OWNERS)
        require_one_device(module)
        autocast = as_autocast(options.autocast)
        unit, warning = unit_of_leaves(module, options.leaf_modules)
        chosen = _as_optimizer(optimizer, options)
    _require_own(module, axis)
    if warning:
        warnings.warn(warning, UserWarning, stacklevel=4)
    setup = plan(
        OrderedDict(module.named_parameters(remove_duplicate=False)),
        chosen,
        stage=stage,
        axis=axis,
        options=options,
        units=unit,
        owners=owners_in(module),
    )
    assert_same_everywhere([compared(options)], axis, what="the engine's options")
    updating = options.updating
    steps = updating.gradient_accumulation_steps
    averages = updating.average_micro_batches
    policy = Policy(
        max_norm=updating.max_norm,
        grad_scale=1.0 / steps if averages else 1.0,
        averages=averages and steps == 1,
        donate=True,
        autocast=None if autocast is None else autocast.computes,
        check_finite=updating.check_finite,
    )
    return replace(setup, policy=policy)


def _require_own(module: nn.Module, axis: Axis) -> None:
    """Refuse one module for all virtual ranks: each came here before any had an engine."""
    here = current_ranks()
    if here is None or is_abstract() or axis.runtime is not Runtime.VIRTUAL:
        return
    different = here.exchange("the module of an engine", id(module), set)
    if len(different) < here.size:
        raise PhaseError(
            f"{here.size} virtual ranks make an engine each, of {len(different)} modules in all "
            f"({type(module).__name__}).",
            cause="a module that was made outside of the function that fzero.simulate runs; "
            "virtual ranks share Python's objects.",
            fix="make the module, its optimizer and the engine inside of that function, or "
            "give each rank a copy: Engine(copy.deepcopy(module), ...).",
        )


def scale_of(given: Scale, setup: Setup) -> ScalePolicy | None:
    """The policy of a `loss_scale`: of None, what autocast needs."""
    if given is None and setup.policy.autocast is torch.float16:
        return DynamicScale()
    return as_policy("loss_scale", given)


def _as_optimizer(optimizer: Any, options: Options) -> Any:
    """An optimizer of a state: torch.optim's through `from_torch`."""
    if optimizer is None:
        return NoOptimizer()
    pair = isinstance(optimizer, tuple) or hasattr(optimizer, "update")
    if pair or isinstance(optimizer, TorchOptimizer):
        return as_optimizer(optimizer)
    updating = options.updating
    return from_torch(
        optimizer,
        master_weights=updating.master_weights,
        state_dtype=updating.state_dtype,
        stochastic_rounding=updating.stochastic_rounding,
    )
