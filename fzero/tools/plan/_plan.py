"""`fzero.plan`: called, it plans one step; its methods compare plans and look for a world."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from fzero import transforms
from fzero.errors import AxisError, LayoutError
from fzero.errors.check import is_count, is_positive, require
from fzero.optim import adamw
from fzero.options import OPTIONS, StepOptions, takes
from fzero.state.codec import Compress
from fzero.state.setup import Autocast, Offload, as_autocast
from fzero.tools.plan.config import from_config
from fzero.tools.plan.records import Comparison, Plan, Rates
from fzero.tools.plan.run import plan_step, rename
from fzero.tools.plan.without_values import AsOn, emptied, maker, tree_emptied
from fzero.tools.trees import tensors_in
from fzero.transforms.functionalize import functionalize, tracks
from fzero.transforms.models import flatten_states
from fzero.transforms.pipeline import names_inside

Loss = Callable[[Any, Any], Tensor]
"""(model, batch) -> a scalar, as `fzero.certify` takes it. `model` is called like the module."""
World = int | tuple[int, int]
"""W, or (R, S): R replicas of S ranks."""


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
            device: the type of device that the plan is for, with the backend that torch has for
                it: "cpu" (gloo), "cuda" (nccl), "xpu" (xccl), ... Default: where the model's
                parameters are; "cuda" for those on the meta device.
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
        size, module = _size_of(world), _module_of(model)
        if isinstance(world, tuple):
            options["mesh"] = world
        compute, make = loss or _mean_output, maker(autocasts=autocast is not None)
        with nullcontext() if autocast else AsOn("cpu"):  # which keeps what is known of buffers
            apply, params = _functionalized(emptied(module, make))

        def loss_of(params: Any, batch: Any) -> Tensor:
            return compute(lambda *args, **kwargs: apply(params, *args, **kwargs), batch)

        def step_fn(state: Any, batch: Any) -> tuple[Any, Tensor]:
            state, value = transforms.grad_and_reduce(loss_of, state)(batch)
            for one in flatten_states("plan", state)[0]:
                rename("window", one.window)
                rename("gradients", one.gradients)
            return transforms.apply_gradients(state), value

        step: Any = transforms.accumulate(step_fn, micro_batches=micro_batches)
        if coalesced:
            step = transforms.coalesce(step)
        step = transforms.clip(step, max_norm=max_norm)
        if (low := as_autocast(autocast)) is not None:
            safe = low.lower_precision_safe_modules
            step = transforms.autocast(step, dtype=low.dtype, lower_precision_safe_modules=safe)
        if offload is not None:
            step = transforms.offload(step, **offload.homes, folder=offload.folder)
        OPTIONS["compress"].require(compress)
        if compress is not None:
            kinds = {"gradients": compress.gradients, "parameters": compress.parameters}
            step = transforms.compress(step, **kinds, over=compress.over)
        return plan_step(
            type(module).__name__,
            transforms.shard(step, stage=stage, **options),
            params,
            (tree_emptied(batch, make),),
            adamw(3e-4) if optimizer is None else optimizer,
            world=size,
            rank=rank,
            device=device or _device_of(module),
            rates=rates,
        )

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
        size = _size_of(world)
        if not callable(getattr(step, "init", None)):
            raise LayoutError(
                f"plan.of_step was given a {type(step).__name__} without an init.",
                cause="a step without `fzero.shard`, or a module.",
                fix="plan.of_step(fzero.shard(step_fn, stage=...), params, optimizer, *args, "
                "world=...); fzero.plan(module, batch, ...) plans a module.",
            )
        make = maker(autocasts="autocast" in names_inside(step))
        return plan_step(
            repr(step),
            step,
            tree_emptied(params, make),
            tree_emptied(args, make),
            optimizer,
            world=size,
            rank=rank,
            device=device or _device_of(params),
            rates=rates,
        )

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
        module = _module_of(model)
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
        module = _module_of(model)

        def of(count: int) -> Plan:
            return self(module, batch, world=count * multiple_of, **options)

        most = max(at_most // multiple_of, 1)
        last, count, plan = 0, 1, of(1)
        while not plan.fits(fits_bytes) and count < most:
            last, count = count, min(count * 2, most)
            plan = of(count)
        if not plan.fits(fits_bytes):
            peak = "that is not known"
            if plan.peak_bytes is not None:
                peak = f"of {plan.peak_bytes:,} bytes"
            most = max(plan.peak, key=lambda kind: plan.peak[kind])
            raise LayoutError(
                f"plan.smallest_world: a peak {peak} on {plan.world:,} ranks, and "
                f"{fits_bytes:,.0f} fit.",
                cause=f"what does not shrink with the number of ranks; most of it is {most!r}.",
                fix="use a higher stage, a smaller batch, micro_batches, activation checkpoints in "
                "the model, or donate=True.",
            )
        while count - last > 1:
            middle = (count + last) // 2
            tried = of(middle)
            if tried.fits(fits_bytes):
                count, plan = middle, tried
            else:
                last = middle
        return plan


def _size_of(world: Any) -> int:
    """Return the number of ranks of W, or of (R, S); raise `AxisError` for another value."""
    sizes = world if isinstance(world, tuple) else (1, world)
    good = len(sizes) == 2 and all(type(n) is int and n > 0 for n in sizes)
    if not good:
        raise AxisError(
            f"plan: world={world!r}.",
            cause="a number of ranks that is no positive integer, or a mesh of other dims.",
            fix="give W, or (R, S) for R replicas of S ranks: world=1024, world=(8, 128).",
        )
    return sizes[0] * sizes[1]


def _module_of(model: Any) -> nn.Module:
    """Return the module to plan, built from a config if need be; `LayoutError` for other types."""
    if isinstance(model, nn.Module):
        return model
    if isinstance(model, str | os.PathLike | dict) or hasattr(model, "model_type"):
        return from_config(model)
    raise LayoutError(
        f"plan was given a {type(model).__name__}.",
        cause="parameters, a class of modules, or a step in the place of a model.",
        fix="give an nn.Module (it may be on the meta device) or the config.json of one; "
        "fzero.plan.of_step(step, params, optimizer, *args, world=...) plans a step.",
    )


def _functionalized(model: nn.Module) -> tuple[Callable[..., Any], Any]:
    """Return (apply, params) of a module; each call gets the running statistics as they are now."""
    if not any(tracks(part) and part.training for part in model.modules()):
        return functionalize(model)
    apply, params, buffers = functionalize(model, buffers=True)
    return lambda *args, **kwargs: apply(*args, buffers=buffers, **kwargs)[0], params


def _mean_output(model: Callable[..., Any], batch: Any) -> Tensor:
    """The default loss: `.loss` of the model's output, or the mean of the output.

    A dict is passed by name, a tuple or list by position.
    """
    if isinstance(batch, dict):
        out = model(**batch)
    else:
        out = model(*batch) if isinstance(batch, tuple | list) else model(batch)
    found = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", None)
    if isinstance(found, Tensor):
        return found
    first = next((x for x in tensors_in(out) if x.is_floating_point()), None)
    if first is None:
        raise LayoutError(
            f"the model returned a {type(out).__name__} without a floating tensor.",
            cause="an output that needs a loss of its own.",
            fix="give loss=lambda model, batch: ..., which returns a scalar.",
        )
    return first.mean()


def _device_of(tree: Any) -> str:
    """Return the device type of the parameters; "cuda" for those on the meta device."""
    leaves = tree.parameters() if isinstance(tree, nn.Module) else tensors_in(tree)
    kinds = {x.device.type for x in leaves} - {"meta"}
    return kinds.pop() if len(kinds) == 1 else "cuda"
