"""The options of a state: how it is laid out, gathered and reduced. Every driver takes them.

`trainable` alone is not an engine's: there the module says it.
"""

from __future__ import annotations

import torch

from fzero.errors.check import is_count, is_positive
from fzero.options._checks import DTYPE, FLAG, NUMEL, ZERO, of_path, one_of
from fzero.options._record import REQUIRED, Option, ValueCheck
from fzero.options._typed import Stages, Trainable, Units
from fzero.ranks.mesh import MeshLike
from fzero.state import OptimizerOver, ReduceOp, Reshard

BUCKET_BYTES = {0: 8 * 2**20, 1: 4 * 2**20, 2: 4 * 2**20}
"""Default bucket of a stage: large enough that latency does not count on gloo. At stages 1 and 2
memory beyond this rank's part of the gradients is a few buckets, and a large layer is one of its
own, which is never copied; at stage 0 a bucket is summed where its gradients stay, so that a larger
one takes no more of it (see benchmarks/)."""
_USUAL = ", ".join(f"{size} at stage {stage}" for stage, size in BUCKET_BYTES.items())
_SHARDED, _UNITS = (1, 2, 3), (3,)

OF_STATE = (
    Option(
        name="stage",
        default=REQUIRED,
        type=Stages,
        check=ValueCheck(
            lambda x: is_count(x, 0) and x <= 3,
            "0 (replicas), 1 (+ optimizer sharded), 2 (+ gradients) or 3 (+ parameters)",
            "a ZeRO stage that does not exist.",
        ),
        help="0, 1, 2 or 3; of `init` and `shard` also a pytree of such.",
        deepspeed=ZERO + "stage",
        axis="stages",
    ),
    Option(
        name="mesh",
        type=MeshLike,
        help="default the world (what torchrun started; else one rank); a DeviceMesh of one dim, "
        "or of two, (replicate, shard); or their sizes (R, S), R S being the world's.",
        axis="meshes",
    ),
    Option(
        name="optimizer_over",
        default="shard",
        type=OptimizerOver,
        check=one_of(
            *("shard", "all"),
            wanted='"shard" (the ranks of one replica share masters and optimizer states) or '
            '"all" (all ranks of the mesh do)',
        ),
        help="which ranks of a mesh of two dims share gradients, masters and optimizer states: "
        '"shard", those of each replica, or "all".',
        stages=_SHARDED,
        axis="meshes",
    ),
    Option(
        name="reshard_after_forward",
        default=True,
        type=Reshard,
        check=one_of(
            *(True, False, "window"),
            wanted='True (gather again in backward), False (keep until then) or "window"',
        ),
        help="True: the full values of a unit are freed when another unit is used, and gathered "
        'again in backward. False: they are kept until the backward is over. "window": over a '
        "window (`coalesce`, `no_sync`).",
        stages=_UNITS,
        deepspeed=ZERO + "stage3_max_live_parameters",
    ),
    Option(
        name="prefetch_numel",
        default=1,
        type=int,
        check=NUMEL,
        help="elements gathered early: the next unit, and more that fit; 0: none.",
        stages=_UNITS,
        deepspeed=ZERO + "stage3_prefetch_bucket_size",
    ),
    Option(
        name="persistence_threshold_numel",
        default=0,
        type=int,
        check=NUMEL,
        help="parameters of at most so many elements are in units of their own, which are gathered "
        "once: an engine keeps them whole until its next update, a functional step until its "
        "gradient is made.",
        stages=_UNITS,
        deepspeed=ZERO + "stage3_param_persistence_threshold",
    ),
    Option(
        name="units",
        default=None,
        type=Units,
        check=of_path("units"),
        help="path -> name of the unit it is gathered with; default "
        "`fzero.machine.partition.unit_of`.",
        stages=_UNITS,
    ),
    Option(
        name="trainable",
        type=Trainable,
        check=of_path("trainable"),
        help="path -> whether it learns; on top of the rule in "
        "`fzero.machine.partition.plan_layout`.",
        instead={
            "Engine": "a module says it itself, and autograd must know it: call "
            "p.requires_grad_(False) on each frozen parameter before Engine(...)"
        },
    ),
    Option(
        name="bucket_bytes",
        type=int | None,
        check=ValueCheck(
            lambda x: x is None or is_count(x), f"bytes, or None for the default ({_USUAL})"
        ),
        help="the size in bytes up to which leaves share a collective; default 8 MiB at stage 0, "
        "4 MiB at stages 1 and 2.",
        stages=(0, 1, 2),
        deepspeed=ZERO + "reduce_bucket_size",
        axis="buckets",
    ),
    Option(
        name="ordered",
        default=False,
        type=bool,
        check=FLAG,
        help="each reduction sums in rank order, on every backend: bits then do not depend on the "
        "bucketing. (At stage 3 a rank that uses units in another order than all expect may bring "
        "a part of a gradient by itself, which is added to the sum of the others.)",
    ),
    Option(
        name="overlap",
        default=True,
        type=bool,
        check=FLAG,
        help="reduce beside the backward.",
        deepspeed=ZERO + "overlap_comm",
    ),
    Option(
        name="contiguous_gradients",
        default=False,
        type=bool,
        check=FLAG,
        help="copy each gradient into its bucket as it comes.",
        deepspeed=ZERO + "contiguous_gradients",
    ),
    Option(
        name="accumulate_dtype",
        type=torch.dtype | None,
        check=DTYPE,
        help="dtype in which gradients are accumulated and stored; default fp32 for 16-bit "
        "parameters, else their own.",
        deepspeed="data_types.grad_accum_dtype",
    ),
    Option(
        name="reduce_op",
        default="mean",
        type=ReduceOp,
        check=one_of("mean", "sum"),
        help='"mean" or "sum": how the gradients of the ranks are combined.',
        deepspeed="gradient_allreduce_op",
        axis="reductions",
    ),
    Option(
        name="gradient_predivide_factor",
        default=1.0,
        type=float,
        check=ValueCheck(is_positive, "a positive number"),
        help='f: each rank sends g / f, and the sum is multiplied by f / W (by f for "sum"). '
        "With f = W the sum of W gradients overflows no sooner than one of them.",
        deepspeed="gradient_predivide_factor",
        axis="wires",
    ),
)
