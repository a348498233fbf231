"""From a module, an optimizer and options to the setup of a state: checked, nothing touched."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from fzero.adapter.driver import OWNERS
from fzero.collectives import assert_same_everywhere, told_everywhere
from fzero.context.current_rank import current_ranks, is_abstract
from fzero.context.modes import require_autograd
from fzero.errors import LayoutError, PhaseError
from fzero.machine.module_buffers import apart_from, held_beside, lines_of, require_paths
from fzero.machine.partition import Holder, require_classes, require_own_memory, unit_of
from fzero.optim import NoOptimizer, ShardOptimizer, as_optimizer, from_torch
from fzero.options import ModuleOptions, Scale, SharedOptions, Updating, grouped, one_record
from fzero.ranks.mesh import Axis, Runtime
from fzero.state import Policy, Setup
from fzero.state.layout import ModuleInfo, class_name, find_leaf_modules
from fzero.state.scale import DynamicScale, ScalePolicy, as_policy
from fzero.state.setup import as_autocast, owners_in
from fzero.transforms.clip import clipping
from fzero.transforms.init import COMPARED, check_shared, check_stage, plan_setup
from fzero.transforms.local import require_local
from fzero.transforms.points import require_excluded

Factory = Callable[[list[nn.Parameter]], Optimizer]
"""Makes an optimizer of the parameters that learn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(SharedOptions):
    """What `Engine(...)` takes besides the module, the optimizer, the stage and the mesh."""

    module: ModuleOptions
    updating: Updating


OLDER = {"gradient_accumulation_steps": "micro_batches"}
"""Older spelling -> option."""


def options_of(given: Mapping[str, Any]) -> Options:
    """Return the options of `Engine(...)` in their groups, unchecked, of all that it was given."""
    return grouped(
        Options,
        given,
        module=one_record(ModuleOptions, given),
        updating=one_record(Updating, given),
    )


def planned(
    module: nn.Module,
    optimizer: Any,
    stage: int,
    axis: Axis,
    options: Options,
    *,
    made: bool = False,
) -> Setup:
    """Check module, optimizer and options; return the setup of the engine's state.

    made: whether an initializer makes the values of parameters on the meta device.
    """
    with told_everywhere(axis, what=COMPARED):  # the next that all ranks compare
        require_autograd("Engine(...)")
        options = check_shared(options)
        require_local(options.local)
        as_policy("loss_scale", options.updating.loss_scale)
        check_stage(stage)
        _require_plain(module)
        require_classes(dict(module.named_parameters()), keeps=True)
        _require_one_device(module, made=made)
        require_own_memory(module)
        autocast = as_autocast(options.autocast)
        unit, warning = _units(module, options)
        held = held_beside(module)
        paths = require_paths(options.module.own, held)
        beside: list[str] = []  # what ranks compare of other tensors; buffers become rank 0's
        if not (axis.runtime is Runtime.LOCAL or is_abstract()):
            beside = lines_of(apart_from(held, module), paths, unread={Holder.BUFFER})
        chosen, updating = optimizer, options.updating
        if optimizer is None:
            chosen = NoOptimizer()
        elif isinstance(optimizer, tuple | ShardOptimizer) or hasattr(optimizer, "update"):
            chosen = as_optimizer(optimizer)
        else:
            chosen = from_torch(
                optimizer,
                master_weights=updating.master_weights,
                state_dtype=updating.state_dtype,
                stochastic_rounding=updating.stochastic_rounding,
            )
    _require_own(module, axis)
    if warning:
        warnings.warn(warning, UserWarning, stacklevel=4)
    setup = plan_setup(
        OrderedDict(module.named_parameters(remove_duplicate=False)),
        chosen,
        stage=stage,
        axis=axis,
        options=replace(options, units=unit),
        owners=owners_in(module),
        beside=beside,
    )
    # As ranks compare them: no address, no value of a tensor. Units and codecs of leaves are
    # compared as those of the layout.
    compared = replace(updating, loss_scale=as_policy("loss_scale", updating.loss_scale))
    shown = f"{replace(options, updating=compared, units=None, frozen=None)}"
    assert_same_everywhere([shown], axis, what="the engine's options")
    steps, averages = updating.micro_batches, updating.average_micro_batches
    stand_for = {
        "clip": updating.max_norm is not None,
        "scale_loss": updating.loss_scale is not None,
        "check_finite": updating.check_finite,
        "accumulate": steps > 1,
    }
    require_excluded(setup.transforms, [name for name, is_there in stand_for.items() if is_there])
    clip = clipping(max_norm=updating.max_norm)
    policy = Policy(
        points=() if clip is None else (clip,),
        grad_scale=1.0 / steps if averages else 1.0,
        averages=averages and steps == 1,
        donate=True,
        autocast=None if autocast is None else autocast.computes,
        check_finite=updating.check_finite,
    )
    return replace(setup, policy=policy)


def scale_of(given: Scale, setup: Setup) -> ScalePolicy | None:
    """The policy of a `loss_scale`: of None, what autocast needs."""
    if given is None and setup.policy.autocast is torch.float16:
        return DynamicScale()
    return as_policy("loss_scale", given)


def _require_plain(module: Any) -> None:
    """Raise for what cannot be an engine's module."""
    if not isinstance(module, nn.Module):
        raise LayoutError(
            f"Engine got a {type(module).__name__}.",
            cause="a function or a state was passed in the place of a module.",
            fix="pass an nn.Module; for pure functions there is fzero.shard.",
        )
    for path, p in module.named_parameters(remove_duplicate=False):
        if id(p) in OWNERS:
            raise PhaseError(
                f"{path} belongs to an engine that is open.",
                cause="a notebook cell that made the engine was run again, or two modules "
                "share a parameter.",
                fix="call close() on that engine first (of a trainer, "
                "trainer.accelerator.engine_of(model).close()), or make the module anew if its "
                "name is lost; for a shared part, make one engine of a module that has all of it.",
            )
        if isinstance(p, nn.UninitializedParameter):
            raise LayoutError(
                f"{path} is not initialized: it has no shape yet.",
                cause="a lazy module (nn.LazyLinear, ...) that has not run.",
                fix="run the module once, without gradient, then make the engine.",
            )
    for name, part in module.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None:
            raise LayoutError(
                f"{name or 'the module'} has max_norm={part.max_norm}: its forward writes to its "
                "weight.",
                cause=f"nn.{type(part).__name__}(..., max_norm=). Each rank would shorten the rows "
                "that its own data use, and ranks would train other weights.",
                fix="leave max_norm out, and shorten all rows after each step on every rank: "
                "torch.renorm of the weight, in `with gathered(module, modify=True):`; or those "
                "that are used, out of place, in the forward.",
            )
        if isinstance(part, DistributedDataParallel):
            raise LayoutError(
                f"{name or 'the module'} is wrapped by DistributedDataParallel.",
                cause="the wrapper of before; it reduces gradients, which the engine does, too.",
                fix="pass the module inside it (`.module`).",
            )
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
            raise LayoutError(
                f"{name or 'the module'} gives sparse gradients.",
                cause=f"nn.{type(part).__name__}(..., sparse=True).",
                fix="leave sparse out: buckets of gradients are dense.",
            )


def _require_one_device(module: nn.Module, *, made: bool) -> None:
    """Raise unless all parameters are on one device, and have values, or those are `made`."""
    named = (pair for pair in module.named_parameters() if not (made and pair[1].is_meta))
    by_device = {p.device: path for path, p in named}
    if len(by_device) > 1 or any(device.type == "meta" for device in by_device):
        seen = ", ".join(f"{path} on {device}" for device, path in by_device.items())
        raise LayoutError(
            f"the module's parameters are spread: {seen}.",
            cause="a part of the module was not moved, or was built on the meta device.",
            fix="call module.to(device) before making the engine; to build a model that no "
            "rank can hold, use fzero.adapter.sharded_init, or initializer=.",
        )
    for path, buffer in module.named_buffers():
        if buffer.is_meta:
            raise LayoutError(
                f"the buffer {path} is on the meta device: it has a shape and no values.",
                cause="a module that was built under torch.device('meta').",
                fix="make its buffers: accelerate.init_empty_weights(include_buffers=False) puts "
                "parameters alone on the meta device.",
            )


def _units(module: nn.Module, options: Options) -> tuple[Callable[[str], str], str]:
    """Return path -> unit, where a leaf module is one unit; and what to warn about."""
    spec, others = options.module.leaf_modules, options.units or unit_of
    if spec is None:
        return others, ""
    tree = [
        ModuleInfo(
            name=name,
            classes=tuple(class_name(cls) for cls in type(part).__mro__),
            numel=sum(prod(p.shape) for p in part.parameters()),
            descendants=sum(1 for _ in part.modules()) - 1,
        )
        for name, part in module.named_modules()
    ]
    found = find_leaf_modules(tree, spec)

    def unit(path: str) -> str:
        inside = [leaf for leaf in found.leaves if path.startswith(leaf + ".") or not leaf]
        return inside[0] or "(root)" if inside else others(path)

    return unit, "\n".join(found.warnings)


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
