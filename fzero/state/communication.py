"""How gradients cross ranks, and how stage 3 gathers parameters: options that ride in a setup."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from fzero.errors.check import is_positive
from fzero.state.codec import Codec, Over, cast
from fzero.state.option import DTYPE, FLAG, NUMEL, ZERO, ValueCheck, one_of, option
from fzero.state.schedule import Limits

Reshard = bool | Literal["window"]
"""Whether stage 3 frees a unit after its use: True; False: after the backward; or "window"."""

ReduceOp = Literal["mean", "sum"]
"""How the gradients of the ranks are combined."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathering:
    """How stage 3 gets full parameters."""

    reshard_after_forward: Reshard = option(
        True,
        "True: the full values of a unit are freed when another unit is used, and gathered again "
        'in backward. False: they are kept until the backward is over. "window": over a window '
        "(`coalesce`, `no_sync`).",
        check=one_of(
            *(True, False, "window"),
            wanted='True (gather again in backward), False (keep until then) or "window"',
        ),
        stages=(3,),
        deepspeed=ZERO + "stage3_max_live_parameters",
    )
    prefetch_numel: int = option(
        1,
        "elements gathered early: the next unit, and more that fit; 0: none.",
        check=NUMEL,
        stages=(3,),
        deepspeed=ZERO + "stage3_prefetch_bucket_size",
    )
    persistence_threshold_numel: int = option(
        0,
        "parameters of at most so many elements are in units of their own, which are gathered "
        "once: an engine keeps them whole until its next update, a functional step until its "
        "gradient is made.",
        check=NUMEL,
        stages=(3,),
        deepspeed=ZERO + "stage3_param_persistence_threshold",
    )
    # Units that stay whole from one update to the next: known when the state is planned.
    persistent: tuple[int, ...] = ()

    @property
    def limits(self) -> Limits:
        """What the schedule is planned by."""
        return Limits(
            prefetch_numel=self.prefetch_numel, keeps=self.reshard_after_forward is not True
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """How gradients cross ranks."""

    ordered: bool = option(
        False,
        "each reduction sums in rank order, on every backend: bits then do not depend on the "
        "bucketing. (At stage 3 a rank that uses units in another order than all expect may bring "
        "a part of a gradient by itself, which is added to the sum of the others.)",
        check=FLAG,
    )
    overlap: bool = option(
        True, "reduce beside the backward.", check=FLAG, deepspeed=ZERO + "overlap_comm"
    )
    contiguous_gradients: bool = option(
        False,
        "copy each gradient into its bucket as it comes.",
        check=FLAG,
        deepspeed=ZERO + "contiguous_gradients",
    )
    accumulate_dtype: torch.dtype | None = option(
        None,
        "dtype in which gradients are accumulated and stored; default fp32 for 16-bit parameters, "
        "else their own.",
        check=DTYPE,
        deepspeed="data_types.grad_accum_dtype",
    )
    reduce_op: ReduceOp = option(
        "mean",
        '"mean" or "sum": how the gradients of the ranks are combined.',
        check=one_of("mean", "sum"),
        deepspeed="gradient_allreduce_op",
        axis="reductions",
    )
    gradient_predivide_factor: float = option(
        1.0,
        'f: each rank sends g / f, and the sum is multiplied by f / W (by f for "sum"). With f = W '
        "the sum of W gradients overflows no sooner than one of them.",
        check=ValueCheck(is_positive, "a positive number"),
        deepspeed="gradient_predivide_factor",
        axis="wires",
    )
    # How they are encoded, and for which ranks; None: in the dtype of the parameters.
    codec: Codec | None = None
    over: Over = "all"
    # Gradients since the last update are sums of w g, which the update divides by the sum of w.
    weighted: bool = False

    @property
    def cast(self) -> torch.dtype | None:
        """The dtype in which gradients add up on the wire, if a codec says nothing but that."""
        codec = self.codec
        return codec.dtype if isinstance(codec, cast) and self.over == "all" else None
