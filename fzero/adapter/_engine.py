"""The engine: an nn.Module, a torch.optim optimizer and loss.backward(), over many ranks."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from fzero.adapter._access import Access
from fzero.adapter._assemble import Closed, Parts, assemble, divided
from fzero.adapter._forward import Forward
from fzero.adapter._guard import Guard
from fzero.adapter._optimizer import Factory
from fzero.adapter._options import make_options
from fzero.adapter._report import MemoryReport, report
from fzero.adapter._scale import LossScale
from fzero.errors import PhaseError, explain
from fzero.mesh import Axis, axis_of, end_group
from fzero.state import accumulation as acc
from fzero.state.accumulation import Accumulation
from fzero.state.buckets import Buckets
from fzero.state.coordinator import CoordinatorState
from fzero.state.hooks import HookState
from fzero.transforms._norm import clip_factor, norm_of
from fzero.transforms.init import check_stage


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """All that an engine decides by, at one moment: records, no tensors."""

    hooks: HookState
    buckets: Buckets
    accumulation: Accumulation
    coordinator: CoordinatorState | None  # stage 3 on several ranks


class Engine(Access):
    """ZeRO stage 0 to 3 for a module whose loss is made and differentiated in the usual way.

    `loss.backward()` leaves each rank its part of mean_r(g_r), the mean of the ranks' gradients;
    backwards add up until `step()`, as in PyTorch. Elements a rank holds, for P
    parameters and K optimizer slots over W ranks:

        stage   parameters   gradients   optimizer
        0       P            P           K P
        1, 2    P            P / W       K P / W
        3       P / W        P / W       K P / W

    (Stage 1 is stage 2: a gradient that is reduce-scattered costs no more on the wire than one
    that is kept whole, and less memory.) At stage 3 the module's parameters are placeholders; a
    kernel that reads one gets the full values, gathered for its unit and freed again.

    module: any nn.Module; its parameters become views of the engine's buffers. Rank 0's values
        are given to all ranks, buffers too; later each rank's buffers (running statistics) are
        its own.
    optimizer: a torch.optim optimizer of module.parameters(), in any param groups; or its class
        or a factory, called with what learns; None for a model that is not stepped. It is made
        to step this rank's rows, with fused kernels unless it says otherwise. `engine.step()`
        runs it; `optimizer.step()` alone raises.
    stage: 0, 1, 2 or 3. mesh: a one-dim DeviceMesh; default the world.

    Options: bucket_bytes (stages 0 to 2), contiguous_gradients, overlap, ordered (sums in rank
    order), accumulate_dtype (default fp32 for 16-bit parameters), communication_dtype (default
    the parameters'), master_weights (fp32 copies of 16-bit parameters), max_norm (clipping),
    gradient_accumulation_steps (step() updates at every n-th call), average_micro_batches (the
    update is divided by the number of step() calls, or of backwards when each call updates),
    loss_scale (see `scale`); for stage 3 leaf_modules, lockstep, prefetch_bucket_numel,
    max_live_parameters_numel, max_reuse_distance_numel, persistence_threshold_numel (default 0)
    and model_persistence_threshold_numel.

    A parameter that got no gradient counts as one with a gradient of zero. There is no p.grad after
    a backward, so torch.nn.utils.clip_grad_norm_ clips nothing: give `max_norm`.

    Raises `LayoutError` for wrong arguments, before the module is touched; `AxisError` when the
    ranks' models differ.

    Source: Rajbhandari et al., "ZeRO", arXiv 1910.02054.

    Example:
        >>> import torch
        >>> from fzero.adapter import Engine
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> _ = torch.nn.init.ones_(model.weight)
        >>> engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.5), stage=2)
        >>> engine(torch.tensor([[1.0, 2.0]])).sum().backward()
        >>> engine.step()
        True
        >>> model.weight.data
        tensor([[0.5000, 0.0000]])
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer | Factory | None = None,
        *,
        stage: int,
        mesh: DeviceMesh | Axis | None = None,
        **options: Any,
    ) -> None:
        self.options = make_options(options)
        self.module, self.stage = module, check_stage(stage)
        self._norm: Tensor | None = None
        self._closed = False
        scale = self.options.updating.loss_scale
        self._scale = LossScale(scale)
        check = self._scale.require if scale != 1.0 else None
        self._parts: Parts = assemble(
            module, optimizer, self.stage, axis_of(mesh), self.options, check=check
        )
        self.axis = self._parts.plan.axis
        owns = self._parts.exchange is None
        self._end_group = weakref.finalize(self, end_group, self.axis) if owns else None
        self._forward = Forward(self._parts)
        self.optimizer = self._parts.optimizer
        self._guard = Guard(self.optimizer, self.zero_grad) if self.optimizer else None

    # Forward and backward.

    def __repr__(self) -> str:
        if self._closed:
            return "Engine(closed)"
        plan, state = self._parts.plan, self._parts.backward.accumulation
        numel = sum(leaf.numel for leaf in plan.layout.leaves)
        return (
            f"Engine({type(self.module).__name__}, stage={self.stage}, {self.axis}, "
            f"{numel:,} parameters in {len(plan.layout.groups)} groups, "
            f"{type(self.optimizer).__name__}, {state.updates} updates, "
            f"{state.backwards} backwards since)"
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module. `engine.module(...)` does the same."""
        try:
            return self.module(*args, **kwargs)
        except BaseException as error:
            self._forward.failed(error)
            raise

    def backward(self, loss: Any, gradient: Any = None, **options: Any) -> None:
        """`torch.autograd.backward(loss, gradient, **options)`; plain loss.backward() is as good.

        After an error here the other ranks of stage 3 are told, and raise as well.
        """
        try:
            torch.autograd.backward(loss, gradient, **options)
        except BaseException as error:
            self._forward.failed(error)
            raise

    def scale(self, loss: Tensor) -> Tensor:
        """Return loss x `loss_scale`; the update divides by it again.

        With a `loss_scale` other than 1 every backward needs it: one without raises before any
        gradient is used.
        """
        return self._scale.apply(loss)

    @contextmanager
    def coalesce(self) -> Iterator[None]:
        """Any number of backwards, one reduction, at the end of the block.

        A block that raises brings nothing, and leaves what was there before.
        """
        with self._window("coalesce"):
            yield
        self._reduce_what_waits()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Like `coalesce`, but the reduction is left to the next backward, or to `step`."""
        with self._window("no_sync"):
            yield

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Throw away every gradient since the last update.

        Every rank calls it: at stage 3, outside of a window, they wait for each other.
        Either `set_to_none`, torch's argument, means the same: the engine keeps no p.grad. With
        `gradient_accumulation_steps` the accumulation starts again, with a warning.
        """
        self._norm = None
        if not self._parts.backward.accumulation.window:
            self._meet()
        every = self.options.updating.gradient_accumulation_steps
        if message := acc.thrown_away(self._parts.backward.accumulation, every):
            warnings.warn(message, UserWarning, stacklevel=2)
        self._parts.backward.clear()

    # The update.

    def step(self) -> bool:
        """Update the parameters from the gradients, and clear those; True if it was due.

        With `gradient_accumulation_steps=n` it is due at every n-th call. A collective.

        Raises `PhaseError` without gradients, inside a window or a backward, and for an engine
        without optimizer; everything is then as before.
        """
        backward, optimizer, guard = self._parts.backward, self.optimizer, self._guard
        self._require_open("step()")
        if optimizer is None or guard is None:
            raise PhaseError(
                explain(
                    "step() of an engine without optimizer.",
                    cause="Engine(module, stage=...) is for a model that is not trained.",
                    fix="pass a torch.optim optimizer, its class or a factory.",
                )
            )
        backward.settle_abandoned()
        every = self.options.updating.gradient_accumulation_steps
        called, due = acc.call_step(backward.accumulation, every)
        if due:
            self._update(optimizer, guard, called)
        else:
            backward.accumulation = called
        return due

    def _update(self, optimizer: Optimizer, guard: Guard, called: Accumulation) -> None:
        source, buckets, rows = self._parts.source, self._parts.buckets, self._parts.rows
        if source is not None:
            source.require_free()
        held = acc.require_gradients(self._reduce_what_waits(), "step()")
        factor = self._factor(held)
        with guard.stepping():
            rows.step(optimizer, buckets, factor)
        rows.publish()
        self._parts.reducer.clear()
        self._parts.backward.accumulation = acc.updated(called)
        if source is not None:
            source.updated(tuple(rows.of))

    def _factor(self, called: Accumulation) -> Tensor | float:
        """What the update multiplies the gradients by: the divisions, then the clipping."""
        share = divided(called, self.options)
        self._norm, max_norm = None, self.options.updating.max_norm
        if max_norm is None:
            return share
        self._norm = self._gradient_norm() * share
        return share * clip_factor(self._norm, max_norm)

    def _gradient_norm(self) -> Tensor:
        """|g| of all that learns, tied ones once, before the divisions."""
        plan = self._parts.plan
        reduced = [b.reduced for b in self._parts.buckets if b.reduced is not None]
        ordered = self.options.reduction.ordered
        return norm_of(reduced, plan.placement, plan.axis, ordered=ordered)

    @property
    def global_grad_norm(self) -> Tensor | None:
        """|g|, before clipping, of what an update would use now. A collective.

        Without gradients, that of the last update if `max_norm` was given, else None.
        """
        self._require_no_window("global_grad_norm")
        if not self._reduce_what_waits().held:
            return self._norm
        share = divided(self._parts.backward.accumulation, self.options)
        return self._gradient_norm() * share

    # What it holds.

    @property
    def state(self) -> EngineState:
        """The records that the engine decides by, now."""
        backward, source = self._parts.backward, self._parts.source
        return EngineState(
            hooks=backward.hooks,
            buckets=backward.buckets,
            accumulation=backward.accumulation,
            coordinator=source.state if source is not None else None,
        )

    def memory_report(self) -> MemoryReport:
        """Bytes that this rank holds now, by kind and dtype. No collective."""
        self._parts.backward.settle()
        return report(self._parts, self.optimizer)

    def close(self) -> None:
        """Take off every hook, and give module and optimizer back as ordinary ones. A collective.

        Gradients that were not used are lost. Closing twice is allowed.
        """
        if self._closed:
            return
        self._parts.backward.clear()
        self._forward.remove()
        self._parts.disassemble(self.full_optimizer_states())
        if self._guard is not None:
            self._guard.remove()
        if self._end_group is not None:
            self._end_group()
        self._closed, self._parts = True, cast(Parts, Closed())

    # Checks.

    @contextmanager
    def _window(self, kind: str) -> Iterator[None]:
        backward = self._parts.backward
        self._require_open(f"{kind}()")
        backward.open_window(kind)
        good = False
        try:
            yield
            good = True
        finally:
            backward.close_window(good=good)

    def _require_open(self, name: str) -> None:
        if self._parts.backward.inside():
            raise PhaseError(
                explain(
                    f"{name} inside a backward.",
                    cause="a hook on a tensor or parameter called it.",
                    fix="call it after loss.backward() has returned.",
                )
            )
