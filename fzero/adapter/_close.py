"""An engine gives its module and its optimizer back, as ordinary ones, group by group."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fzero.adapter import parts
from fzero.adapter._kept_masters import keep
from fzero.adapter.boundary import require_no_forward
from fzero.adapter.driver import Driver
from fzero.collectives import gather_many
from fzero.machine.offload import to_device
from fzero.machine.packing import unpack
from fzero.optim import TorchOptimizer
from fzero.transforms.donation import empty


@torch.no_grad()
def close(driver: Driver) -> None:
    """Take off every hook, and give module and optimizer back as ordinary ones. A collective.

    Gradients that were not used are lost. Parameters are gathered unit by unit. This rank's part of
    fp32 masters stays with them, for the next engine of the module. Closing twice is allowed.
    """
    if driver.closed:
        return
    require_no_forward(driver, "close()")
    driver.wait()
    driver.call("close()")
    _give_back(driver)


def _give_back(driver: Driver) -> None:
    """Make parameters and optimizer states whole, as if there had been no engine. A collective.

    What this rank holds of a group is let go as soon as the group was given back.
    """
    driver.events.remove()
    driver.stand_ins.drop()
    driver.guard.remove()
    driver.running.changed()
    state = driver.state
    rule = state.setup.optimizer
    stepped = rule if isinstance(rule, TorchOptimizer) and int(state.optimizer.count) else None
    if stepped is not None:
        stepped.give_numbers(state.optimizer)
    if isinstance(rule, TorchOptimizer):
        for path, own in rule.held.items():  # of parameters that were frozen meanwhile
            rule.instance.state[driver.params.at(path)] = own
    driver.writes.masters.follow(state)
    for index in range(len(state.setup.layout.groups)):
        _give_parameters(driver, index)
        keep(driver.params, state, index)
        if stepped is not None:
            _give_states(driver, stepped, index)
        held = [state.params.flats[index], *parts.slots_of_group(state, index).values()]
        if driver.state.setup.gathers_by_unit:  # the gatherer has the shard by another tensor
            held.append(driver.running.gatherer.groups[index].shard)
        for flat in held:
            empty(flat, flat.new_empty(0))
    driver.end()


def _give_parameters(driver: Driver, index: int) -> None:
    flat = driver.state.params.flats[index]
    here = to_device(flat, driver.state.device)
    whole = (
        gather_many([here], driver.axis.shards)[0] if driver.state.setup.gathers_by_unit else here
    )
    leaves = [x.clone() for x in unpack(driver.state.setup.layout, index, whole)]
    lazy = driver.state.setup.is_read_lazily(index)
    (driver.params.place if lazy else driver.params.have)(index, leaves)


def _give_states(driver: Driver, rule: TorchOptimizer, index: int) -> None:
    """Give torch's optimizer its states of a group's parameters."""
    leaves = {leaf.path: leaf for leaf in driver.state.setup.layout.leaves}
    stepped = {id(p) for group in rule.instance.param_groups for p in group["params"]}
    unstepped = set(rule.unstepped(driver.state.optimizer))
    for path, slots in parts.states_of_group(driver, index).items():
        p = driver.params.at(path)
        if id(p) in stepped and path not in unstepped:
            own = rule.own_state(leaves[path], slots)
            rule.instance.state[p] = {name: _laid_as(p, x) for name, x in own.items()}


def _laid_as(p: Tensor, x: Any) -> Any:
    """A state of `p` in the memory format of `p`, as the optimizer itself would make it."""
    if not isinstance(x, Tensor) or x.shape != p.shape:
        return x
    return torch.empty_like(p, dtype=x.dtype, requires_grad=False).copy_(x)
