"""Puts an engine together: checks first, then moves the module's parameters; and takes it apart."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from fzero.adapter._backward import OF_ENGINE, Backward
from fzero.adapter._bucket import Bucket
from fzero.adapter._exchange import Exchange, Lockstep, private_axis
from fzero.adapter._optimizer import (
    Factory,
    States,
    attach,
    detach,
    groups_of,
    require_usable,
)
from fzero.adapter._options import Options
from fzero.adapter._parameters import Parameters, free_to_swap, named_parameters
from fzero.adapter._plan import Plan, make_plan, unit_of_leaves
from fzero.adapter._reducer import Reducer, make_buckets
from fzero.adapter._source import Source
from fzero.adapter._update import Rows
from fzero.collectives import assert_same_everywhere, gather_many, told_everywhere
from fzero.errors import LayoutError, PhaseError, explain
from fzero.mesh import Axis
from fzero.packing import unpack
from fzero.placeholder import LazyParam, placeholders
from fzero.state.accumulation import Accumulation
from fzero.transforms._modes import require_autograd


@dataclass(slots=True, kw_only=True)
class Parts:
    """What an engine is made of."""

    exchange: Exchange | None  # shared with other engines; None: the process group is its own
    plan: Plan
    parameters: Parameters
    rows: Rows
    reducer: Reducer
    backward: Backward
    source: Source | None  # stage 3 on several ranks
    optimizer: Optimizer | None

    @property
    def buckets(self) -> Sequence[Bucket]:
        """The gradients, in launch order."""
        return self.reducer.buckets

    @torch.no_grad()
    def disassemble(self, states: States) -> None:
        """Undo `assemble`: ordinary parameters with their values, and an ordinary optimizer."""
        self.backward.remove()
        if self.source is not None:
            self.source.exchange.leave()
        layout = self.plan.layout
        fulls: Sequence[Tensor] = self.parameters.flats
        if self.plan.shards_params:
            fulls = gather_many(self.parameters.rows, self.plan.axis)
        self.parameters.give_back([unpack(layout, i, full) for i, full in enumerate(fulls)])
        if self.optimizer is not None:
            detach(self.optimizer, self.rows.fused, self.parameters, states)


class Closed:
    """In the place of the parts of a closed engine: whatever is asked of it raises."""

    def __getattr__(self, name: str) -> Any:
        """Raise `PhaseError`."""
        raise PhaseError(
            explain(
                "a closed engine was used.",
                cause="engine.close() gave the module and the optimizer back.",
                fix="use those as ordinary ones, or make a new Engine of the module.",
            )
        )


def assemble(
    module: nn.Module,
    optimizer: Optimizer | Factory | None,
    stage: int,
    axis: Axis,
    options: Options,
    *,
    check: Callable[[int | None], None] | None,
) -> Parts:
    """Check everything, then take over the module's parameters and the optimizer's groups."""
    plan = checked_plan(module, optimizer, stage, axis, options)
    # Only now: a rank that is refused must not leave others behind that connect to it.
    asks = stage == 3 and not options.gathering.lockstep
    private, exchange = private_axis(axis, asks=asks)
    plan = replace(plan, axis=private)
    parameters = Parameters(module, plan)
    parameters.take_over()
    source = None
    if plan.shards_params:
        source = Source(plan, parameters.rows, options.limits)
        with free_to_swap(module):
            for index in range(len(plan.layout.groups)):
                parameters.place(index, placeholders(source, index))
    rows = Rows(plan, parameters, masters=options.updating.master_weights)
    if optimizer is not None:
        optimizer, rows.fused = attach(optimizer, rows.groups())
    buckets = make_buckets(plan, options.reduction)
    reducer = Reducer(plan, buckets, options.reduction, source)
    if source is not None:
        source.exchange = exchange.join(reducer) if exchange else Lockstep(reducer, plan.axis)
    return Parts(
        exchange=exchange,
        plan=plan,
        parameters=parameters,
        rows=rows,
        reducer=reducer,
        backward=Backward(reducer, _learning(parameters, buckets), check),
        source=source,
        optimizer=optimizer,
    )


def checked_plan(
    module: nn.Module,
    optimizer: Optimizer | Factory | None,
    stage: int,
    axis: Axis,
    options: Options,
) -> Plan:
    """The plan, if everything is as it must be. Nothing is touched yet."""
    what = "the engine's model, optimizer or options"
    with told_everywhere(axis, what=what):
        plan, probe = _plan_of(module, optimizer, stage, axis, options)
        facts = [f"stage {stage}, {options}", f"optimizer {probe}", *plan.layout.describe()]
        facts.append(f"param groups {plan.steppers}")
    assert_same_everywhere(facts, axis, what=what)
    return plan


def _plan_of(
    module: nn.Module,
    optimizer: Optimizer | Factory | None,
    stage: int,
    axis: Axis,
    options: Options,
) -> tuple[Plan, str]:
    """The plan, and what the optimizer is."""
    require_autograd("Engine(...)")
    params = _parameters_of(module)
    if stage == 3 and axis.size > 1:
        _require_no_weak_references(module, params)
    probe = require_usable(optimizer, axis.size)
    given = groups_of(optimizer, [p for p in module.parameters() if p.requires_grad])
    unit, warning = unit_of_leaves(module, options.gathering.leaf_modules)
    if warning:
        warnings.warn(warning, UserWarning, stacklevel=6)
    bucket_bytes = options.reduction.bucket_bytes
    plan = make_plan(
        params,
        given,
        stage=stage,
        axis=axis,
        bucket_bytes=bucket_bytes,
        unit=unit,
        small_numel=options.limits.persistence_threshold_numel,
    )
    return plan, probe


def divided(s: Accumulation, options: Options) -> float:
    """What an update multiplies the summed gradients by: 1 / (micro-batches x loss scale)."""
    count = 1
    if options.updating.average_micro_batches:
        steps = options.updating.gradient_accumulation_steps
        count = steps if steps > 1 else max(s.backwards, 1)
    return 1.0 / (count * options.updating.loss_scale)


def _parameters_of(module: nn.Module) -> dict[str, nn.Parameter]:
    if not isinstance(module, nn.Module):
        raise LayoutError(
            explain(
                f"Engine got a {type(module).__name__}.",
                cause="a function or a state was passed in the place of a module.",
                fix="pass an nn.Module; for pure functions there is fzero.shard.",
            )
        )
    params = named_parameters(module)
    for path, p in params.items():
        if _has_engine(p):
            raise PhaseError(
                explain(
                    f"{path} belongs to an engine that is open.",
                    cause="a notebook cell that made the engine was run again, or two modules "
                    "share a parameter.",
                    fix="call close() on that engine first, or make the module anew if its name is "
                    "lost; for a shared part, make one engine of a module that has all of it.",
                )
            )
        if is_lazy(p):
            raise LayoutError(
                explain(
                    f"{path} is not initialized: it has no shape yet.",
                    cause="a lazy module (nn.LazyLinear, ...) that has not run.",
                    fix="run the module once, without gradient, then make the engine.",
                )
            )
    for name, part in module.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
            raise LayoutError(
                explain(
                    f"{name or 'the module'} gives sparse gradients.",
                    cause=f"nn.{type(part).__name__}(..., sparse=True).",
                    fix="leave sparse out: buckets of gradients are dense.",
                )
            )
    return params  # type: ignore[return-value]


def _has_engine(p: Tensor) -> bool:
    hooks = p._post_accumulate_grad_hooks or {}
    taken = isinstance(p, LazyParam) and isinstance(p.gatherer, Source)
    return taken or any(getattr(hook, OF_ENGINE, False) for hook in hooks.values())


def _require_no_weak_references(module: nn.Module, params: Mapping[str, Tensor]) -> None:
    """Raise if somebody's reference cannot follow a parameter that becomes a placeholder."""
    with free_to_swap(module):
        held = [path for path, p in params.items() if weakref.getweakrefs(p)]
    if held:
        raise LayoutError(
            explain(
                f"somebody has a weak reference to {held[0]}"
                + (f" and {len(held) - 1} more parameters." if len(held) > 1 else "."),
                cause="a moving average of the parameters, or torch.compile, from before the "
                "engine: it would go on with the old tensor.",
                fix="make the engine of stage 3 first, and then what refers to its parameters.",
            )
        )


def _learning(parameters: Parameters, buckets: Sequence[Bucket]) -> list[tuple[Tensor, int, int]]:
    """Every parameter object that learns, with its bucket's number and its position there."""
    found = []
    for number, bucket in enumerate(buckets):
        group = parameters.plan.layout.groups[bucket.index]
        for position in range(len(group.leaves)):
            found += [(p, number, position) for p in parameters.objects(bucket.index, position)]
    return found
