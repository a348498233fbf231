"""The options that only some drivers take, each with its replacement in the others."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fzero.errors.check import is_count, is_positive
from fzero.options._checks import FLAG, ZERO
from fzero.options._record import Option, ValueCheck
from fzero.options._typed import Initializer, Own, Scale
from fzero.state import Local
from fzero.state.codec import Compress
from fzero.state.leaf_modules import LeafSpec
from fzero.state.offload import Offload
from fzero.state.points import Points
from fzero.state.precision import Autocast


def _step(fix: str) -> dict[str, str]:
    return dict.fromkeys(("init", "shard"), fix)


def _of_step(fix: str) -> dict[str, str]:
    return _step(fix) | {"plan": f"{fix}, and plan.of_step plans that step"}


def _of_rule(name: str) -> dict[str, str]:
    fix = f"the rule has it: fzero.optim.adamw(..., {name}=), fzero.optim.from_torch(..., {name}=)"
    return dict.fromkeys(("init", "shard", "plan"), fix)


OF_DRIVERS = (
    Option(
        name="autocast",
        type=Autocast | torch.dtype | None,
        help="losses are computed under torch.autocast with this dtype, and the parameters of safe "
        "modules cross ranks in it, in groups of their own (see `fzero.autocast`, and `Autocast` "
        "for their names). `step.init` passes that of its own transform.",
        instead={"shard": "fzero.autocast(step, dtype=) is a transform of the step"},
        deepspeed="torch_autocast.enabled",
        axis="precisions",
    ),
    Option(
        name="offload",
        type=Offload | None,
        help="what lives in host memory or on disk, and where; see `fzero.offload`. `step.init` "
        "passes that of its own transform.",
        instead={"shard": "fzero.offload(step, ...) is a transform of the step"},
        deepspeed=ZERO + "offload_optimizer.device",
        axis="offload",
    ),
    Option(
        name="local",
        type=Local | None,
        check=ValueCheck(
            lambda x: x is None or isinstance(x, Local), "a fzero.Local(every=...), or None"
        ),
        help="replicas make `every` updates apart, then an outer update together: see "
        "`fzero.local`. `step.init` passes that of its own transform.",
        instead=dict.fromkeys(
            ("shard", "plan"), "fzero.local(step, every=) is a transform of the step"
        ),
    ),
    Option(
        name="compress",
        type=Compress | None,
        check=ValueCheck(
            lambda x: x is None or isinstance(x, Compress),
            "fzero.Compress(gradients=codec, parameters=codec), with codecs of fzero.codecs",
        ),
        help="what crosses ranks encoded, and by which codec: see `fzero.compress`. `step.init` "
        "passes that of its own transform.",
        instead={"shard": "fzero.compress(step, gradients=codec) is a transform of the step"},
        deepspeed="communication_data_type",
        axis="wires",
    ),
    Option(
        name="transforms",
        default=(),
        type=Sequence[Points],
        check=ValueCheck(
            lambda x: isinstance(x, list | tuple) and all(isinstance(y, Points) for y in x),
            "a list of what fzero.transform returns",
        ),
        help="what acts at the points of a step and keeps slots in the state, from the inside out: "
        "see `fzero.transform`. `step.init` passes those around its step.",
        instead=dict.fromkeys(
            ("shard", "plan"),
            "what fzero.transform returns is a transform of the step, ema(step), and plan.of_step "
            "plans that step",
        ),
    ),
    Option(
        name="leaf_modules",
        type=LeafSpec | None,
        check=ValueCheck(
            lambda x: x is None or isinstance(x, LeafSpec),
            "a fzero.adapter.LeafSpec(classes=..., names=..., name_suffixes=...)",
        ),
        help="modules whose parameters are one unit, whatever `units` says of them.",
        stages=(3,),
        instead=dict.fromkeys(
            ("init", "shard", "plan"),
            "parameters have paths and no modules: units=apply.units, of apply, params = "
            "fzero.functionalize(model, units=lambda path, module: ...)",
        ),
        deepspeed=ZERO + "leaf_module.classes",
    ),
    Option(
        name="own",
        default=(),
        type=Own,
        help="paths of buffers, and of tensors in attributes of the module, that each rank has for "
        "itself. Of all others an engine takes rank 0's buffers, and refuses attributes that "
        "differ by rank.",
        instead=dict.fromkeys(
            ("init", "shard", "plan"),
            "parameters have no buffers: apply, params = fzero.functionalize(model, own=paths)",
        ),
    ),
    Option(
        name="initializer",
        type=Initializer | None,
        help="(path, leaf) -> values of that leaf, for `params` that have shapes and dtypes only "
        "(tensors on the meta device): so that no rank ever holds the model. The values of rank 0 "
        "are used on every rank.",
        instead={
            "shard": "a step has no parameters: step.init(params, optimizer, initializer=)",
            "Engine": "a module makes its own: build it in `with fzero.adapter.sharded_init():`",
            "plan": "a plan needs no values: a model on the meta device will do",
        },
    ),
    Option(
        name="donate",
        default=False,
        type=bool,
        check=FLAG,
        help="`apply_gradients` then writes into the buffers of the state it is given, at fused "
        "speed and without a second copy. That state, and every state that shares its buffers, is "
        "used up: using it again raises `DonatedError`. If the step raises before the update, also "
        "in a backward, the state is still good.",
        instead={
            "init": "a step donates its states: fzero.shard(step, stage=, donate=True)",
            "Engine": "an engine always writes into its own buffers: leave it out",
        },
    ),
    Option(
        name="micro_batches",
        default=1,
        type=int,
        check=ValueCheck(
            is_count,
            "an int of 1 or more (gradient_accumulation_steps and accumulate's steps are older "
            "spellings of it)",
        ),
        help="how many micro-batches one update has: an engine updates at every n-th `step()`; a "
        "plan cuts its batch into so many parts, as `fzero.accumulate` does.",
        instead=_step("fzero.accumulate(step, micro_batches=) is a transform of the step"),
        deepspeed="gradient_accumulation_steps",
        axis="micro_batches",
    ),
    Option(
        name="average_micro_batches",
        default=False,
        type=bool,
        check=FLAG,
        help="divide by the number of step() calls, or backwards if each updates.",
        instead=dict.fromkeys(("init", "shard", "plan"), "fzero.accumulate always averages"),
    ),
    Option(
        name="max_norm",
        type=float | None,
        check=ValueCheck(
            lambda x: x is None or is_positive(x), "a positive number, or None for off"
        ),
        help="clip the global gradient norm; None: not clipped.",
        instead=_step("fzero.clip(step, max_norm=) is a transform of the step"),
        deepspeed="gradient_clipping",
        axis="clipping",
    ),
    Option(
        name="loss_scale",
        type=Scale,
        help='of `fzero.scale_loss`: a number, "dynamic", a `DynamicScale`, or the user\'s own. '
        "Losses go through `backward` or `scale`. An overflow on any rank skips the update on all; "
        'see `step_was_skipped`. 1: no scale. None: "dynamic" for autocast in fp16, else 1.',
        instead=_of_step("fzero.scale_loss(step, scale=) is a transform of the step"),
        deepspeed="fp16.loss_scale",
        axis="loss_scales",
    ),
    Option(
        name="check_finite",
        default=False,
        type=bool,
        check=FLAG,
        help="`step()` raises `NonFiniteError`, on every rank, if a loss that `backward` was "
        "given, or a gradient, is NaN or infinite: see `fzero.check_finite`.",
        instead=_of_step("fzero.check_finite(step) is a transform of the step"),
    ),
    Option(
        name="master_weights",
        default=True,
        type=bool,
        check=FLAG,
        help="fp32 copies of 16-bit parameters.",
        instead=_of_rule("master_weights"),
        deepspeed="bf16.bf16_master_weights_and_grads",
        axis="precisions",
    ),
    Option(
        name="state_dtype",
        type=torch.dtype | None,
        help="of the optimizer's states, as in `fzero.optim.adamw`.",
        instead=_of_rule("state_dtype"),
        deepspeed="bf16.bf16_optimizer_states",
    ),
    Option(
        name="stochastic_rounding",
        default=False,
        type=bool,
        check=FLAG,
        help="of bf16 parameters without masters, as in `fzero.optim.adamw`.",
        instead=_of_rule("stochastic_rounding"),
    ),
)
