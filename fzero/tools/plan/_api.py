"""`fzero.plan`: called, it plans one step; its methods compare plans and look for a world."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

import torch

from fzero.errors import LayoutError
from fzero.errors.check import is_count, is_positive, require
from fzero.optim import adamw
from fzero.options import StepOptions, takes
from fzero.state.codec import Compress
from fzero.state.offload import Offload
from fzero.state.precision import Autocast
from fzero.tools.plan._checks import World, module_of, size_of, too_large
from fzero.tools.plan._record import Comparison, Plan
from fzero.tools.plan._run import plan_step
from fzero.tools.plan._subject import (
    Loss,
    PlannedStep,
    device_of,
    maker,
    planned_step_of,
    tree_emptied,
)
from fzero.tools.plan._time import Rates
from fzero.transforms.pipeline import names_inside


class Planner:
    """The type of `fzero.plan`: a function of a model, with methods that return several plans."""

    Rates = Rates

    @takes("plan", "plan(model, batch, world=8, stage=2)")
    def __call__(  # noqa: D417 {options}
        self,
        model: Any,
        batch: Any,
        *,
        world: World,
        stage: Any,
        optimizer: Any = None,
        loss: Loss | None = None,
        micro_batches: int = 1,
        coalesced: bool = False,
        max_norm: float | None = None,
        autocast: Autocast | torch.dtype | None = None,
        offload: Offload | None = None,
        compress: Compress | None = None,
        rank: int = 0,
        device: str | None = None,
        rates: Rates | None = None,
        **options: Unpack[StepOptions],
    ) -> Plan:
        """Return what one training step of `model` takes on each of `world` ranks.

        The step is run, by the code that runs it anywhere, on one rank whose peers are taken to do
        the same, with tensors that have shapes and no values. So collectives, and the bytes that a
        rank holds and sends, are those of the real run. The peak is what is alive after the worst
        operation: all tensors but the batch. What kernels use inside of them, what an allocator
        rounds up and keeps, and the buffers of a backend are not in it.

        A model whose forward depends on values (`if x.sum() > 0`) cannot be planned.

        Args:
            model: an nn.Module, on any device; or a Hugging Face config, as a path, a dict or a
                `PretrainedConfig`: the first of its `architectures`, or its language model.
            batch: what one rank is given for one step: a pytree of tensors, real ones or on the
                meta device; only their shapes and dtypes are used.
            world: W, the number of ranks; or (R, S), R replicas of S ranks.
            optimizer: as in `fzero.init`. Default: `fzero.optim.adamw(3e-4)`.
            loss: loss(model, batch) -> a scalar tensor. Default: the model is called with the
                batch, and what it returns has a `.loss`, or its mean is taken.
            coalesced: whether the gradients of its micro-batches cross the ranks once,
                as by `fzero.coalesce`.
            rank: which rank is run. All send and hold the same number of bytes.
            device: "cpu" (with gloo) or "cuda" (with nccl), which the plan is for. Default: where
                the model's parameters are; "cuda" for those on the meta device.
            rates: of which `time` is estimated.
            {options}

        Returns:
            A `Plan`.

        Raises:
            LayoutError: for what is no model, and for options as `fzero.shard` does.
            AxisError: for a world that is none, and a rank that is not in it.
            PhaseError: at an operation that needs the values of a tensor.

        Source: Rajbhandari et al., "ZeRO", arXiv 1910.02054, sections 5 and 7.

        Example:
            >>> import torch, fzero
            >>> model = torch.nn.Linear(1000, 1000, bias=False, device="meta")
            >>> batch = torch.empty(8, 1000, device="meta")
            >>> plan = fzero.plan(model, batch, stage=3, world=1024)
            >>> plan.bytes["parameters"], plan.bytes["optimizer"]
            (3920, 7848)
            >>> {op: n for op, n in plan.collectives.items() if op != "agree"}
            {'all_gather': 1, 'reduce_scatter': 1}
        """
        size = size_of(world)
        module = module_of(model)
        if isinstance(world, tuple):
            options["mesh"] = world
        subject = planned_step_of(
            module,
            batch,
            loss=loss,
            micro_batches=micro_batches,
            coalesced=coalesced,
            max_norm=max_norm,
            lowered=autocast,
            away=offload,
            encoded=compress,
            options={"stage": stage, **options},
        )
        optimizer = adamw(3e-4) if optimizer is None else optimizer
        kind = device or device_of(module)
        return plan_step(subject, optimizer, world=size, rank=rank, device=kind, rates=rates)

    def of_step(
        self,
        step: Any,
        params: Any,
        optimizer: Any,
        *args: Any,
        world: int,
        rank: int = 0,
        device: str | None = None,
        rates: Rates | None = None,
    ) -> Plan:
        """Return what one call of a step of your own takes: step(state, *args) -> (state, aux).

        Stage, mesh, transforms and donation are the step's own. In the breakdown of the peak, its
        gradients are among the activations and temporaries.

        Args:
            step: what `fzero.shard` returns.
            params: as in `step.init`; only shapes and dtypes are used.
            optimizer: as in `step.init`.
            *args: what one rank gives the step, after the state.
            world: W, the number of ranks.
            rank: as in `fzero.plan`.
            device: as in `fzero.plan`.
            rates: as in `fzero.plan`.

        Returns:
            A `Plan`.

        Raises:
            LayoutError: for what is no sharded step.
            AxisError: for a world that is none, and a rank that is not in it.

        Example:
            >>> import torch, fzero
            >>> def step_fn(state, x):
            ...     state, loss = fzero.grad_and_reduce(lambda p, x: (p["w"] * x).sum(), state)(x)
            ...     return fzero.apply_gradients(state), loss
            >>> step = fzero.shard(step_fn, stage=0)
            >>> params, x = {"w": torch.ones(128)}, torch.ones(128)
            >>> plan = fzero.plan.of_step(step, params, fzero.optim.sgd(0.1), x, world=4)
            >>> [one.wire_bytes for one in plan.traffic if one.op == "all_reduce"]
            [768]
        """
        size = size_of(world)
        if not callable(getattr(step, "init", None)):
            raise LayoutError(
                f"plan.of_step was given a {type(step).__name__} without an init.",
                cause="a step without `fzero.shard`, or a module.",
                fix="plan.of_step(fzero.shard(step_fn, stage=...), params, optimizer, *args, "
                "world=...); fzero.plan(module, batch, ...) plans a module.",
            )
        make = maker(autocasts="autocast" in names_inside(step))
        subject = PlannedStep(
            repr(step), step, tree_emptied(params, make), tree_emptied(args, make)
        )
        kind = device or device_of(params)
        return plan_step(subject, optimizer, world=size, rank=rank, device=kind, rates=rates)

    def compare(
        self, model: Any, batch: Any, *, stages: Sequence[int] = (0, 1, 2, 3), **options: Any
    ) -> Comparison:
        """Return the plans of several stages side by side, as a table.

        Args:
            model: as in `fzero.plan`.
            batch: as in `fzero.plan`.
            stages: which.
            **options: others of `fzero.plan`; `world` must be among them.

        Returns:
            A `Comparison`: `.plans` in the order of the stages.

        Raises:
            LayoutError: as `fzero.plan` does.
            AxisError: as `fzero.plan` does.

        Example:
            >>> import torch, fzero
            >>> model, batch = torch.nn.Linear(64, 64), torch.ones(2, 64)
            >>> comparison = fzero.plan.compare(model, batch, world=8)
            >>> [plan.bytes["optimizer"] for plan in comparison.plans]
            [33288, 4168, 4168, 4168]
        """
        module = module_of(model)
        return Comparison(
            plans=tuple(self(module, batch, stage=stage, **options) for stage in stages)
        )

    def smallest_world(
        self,
        model: Any,
        batch: Any,
        *,
        fits_bytes: float = 80e9,
        at_most: int = 16384,
        multiple_of: int = 1,
        **options: Any,
    ) -> Plan:
        """Return the plan of the smallest world on which a step takes at most `fits_bytes`.

        Worlds are tried by doubling, then by halving what is left: W ranks are enough, and
        W - multiple_of are not. (What a rank holds gets less with W, but for padding.)

        Args:
            model: as in `fzero.plan`.
            batch: as in `fzero.plan`: what one rank is given, whatever the number of ranks.
            fits_bytes: of `Plan.peak_bytes`. Leave room for what a plan does not see.
            at_most: the largest world that is tried.
            multiple_of: worlds are multiples of this, e.g. 8 for machines of 8 devices.
            **options: others of `fzero.plan`; `stage` must be among them.

        Returns:
            A `Plan`, whose `.world` is the answer.

        Raises:
            LayoutError: if no world is large enough; for a bound that is no positive number; else
                as `fzero.plan` does.

        Example:
            >>> import torch, fzero
            >>> model, batch = torch.nn.Linear(256, 256), torch.ones(1, 256)
            >>> plan = fzero.plan.smallest_world(model, batch, stage=2, fits_bytes=800e3)
            >>> plan.world, plan.peak_bytes < 800e3
            (56, True)
        """
        require("fits_bytes", fits_bytes, is_positive, "bytes: 80e9 for 80 GB")
        require("multiple_of", multiple_of, is_count, "a number of ranks")
        module = module_of(model)

        def of(count: int) -> Plan:
            return self(module, batch, world=count * multiple_of, **options)

        most = max(at_most // multiple_of, 1)
        last, count, plan = 0, 1, of(1)
        while not plan.fits(fits_bytes) and count < most:
            last, count = count, min(count * 2, most)
            plan = of(count)
        if not plan.fits(fits_bytes):
            raise too_large(plan, fits_bytes)
        while count - last > 1:
            middle = (count + last) // 2
            tried = of(middle)
            if tried.fits(fits_bytes):
                count, plan = middle, tried
            else:
                last = middle
        return plan
