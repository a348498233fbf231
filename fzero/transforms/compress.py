"""`compress`: what crosses ranks is encoded, by codecs that the user chooses or writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fzero.errors import PhaseError
from fzero.errors.check import called_as
from fzero.machine.compress import Lent, codecs_asked, require_codec, with_memories
from fzero.machine.powersgd import powersgd
from fzero.state import TrainState
from fzero.state.codec import Codec, Compress, Over, cast
from fzero.state.points import Builtin, Excludes
from fzero.transforms.accumulate_grad import NOT_DIFFERENTIABLE
from fzero.transforms.models import map_states
from fzero.transforms.pipeline import Step, Transform, entering, transform, transform_function
from fzero.transforms.points import CallPart
from fzero.transforms.together import Requested


@transform_function
@called_as("compress(step, gradients=fzero.codecs.int8())", any_of=("gradients", "parameters"))
def compress(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    gradients: Codec | None = None,
    parameters: Codec | None = None,
    over: Over = "all",
) -> Step[..., Any] | Transform:
    """Let what crosses ranks in `fn(state, *args)` be encoded: gradients, gathered parameters.

    A rank encodes its gradient, the ranks exchange what they have encoded, decode it, and add up in
    the dtype in which gradients accumulate, fp32 or wider; or, of a codec that is linear, encoded
    gradients are reduced as they are. At stage 0, and where replicas of a mesh of two dims keep the
    same sum, that sum is encoded once more on its way back. A codec with a memory (error feedback)
    adds what a rank has lost of a gradient, and of a sum, to its next one: the memory is a part of
    the state, without the loss scale, and stays as it was where an update is skipped.

    Parameters that learn, and are floating, are encoded where stage 3 gathers them for a forward or
    a backward, and decoded to the same values on every rank; what an update, a checkpoint or
    `full_params` sees is exact. What is frozen crosses as it is: it may hold packed bits.

    The step's own `init` makes a state for it; so does `fzero.init(..., compress=)`.

    Args:
        fn: the step.
        gradients: a codec of `fzero.codecs`, or a user's own; None: gradients cross as they are.
        parameters: the same, of what stage 3 gathers.
        over: "all" ranks, or "replicas": on a mesh of two dims gradients are reduced over the
            shards of a replica as they are, and encoded where they cross to other replicas.

    Returns:
        A step that is called as `fn` is. Without `fn`, a decorator.

    Raises:
        CallError: without any codec: `gradients=None`, written, is the identity.
        LayoutError: for what is no codec, or does not what it says of itself; around `shard`,
            `simulate` or another `compress`; in `init`, for parameters below stage 3, and for
            replicas where there are none.
        PhaseError: in a call, for a state that was made for other codecs.

    Source: Wang et al., "ZeRO++", arXiv 2306.10209; Karimireddy et al., "Error Feedback Fixes
    SignSGD", arXiv 1901.09847.

    Example:
        >>> import torch, fzero
        >>> def step_fn(state, x):
        ...     state, loss = fzero.grad_and_reduce(lambda p, x: (p["w"] * x).sum(), state)(x)
        ...     return fzero.apply_gradients(state), loss
        >>> step = fzero.shard(fzero.compress(step_fn, gradients=fzero.codecs.int8()), stage=2)
        >>> step
        shard(stage=2) . compress(gradients=int8(memory=True, block=256)) . step_fn
        >>> state, loss = step(step.init({"w": torch.ones(2)}, fzero.optim.sgd(1.0)), 0.5)
    """
    record = Compress(gradients=gradients, parameters=parameters, over=over)
    shown = {"gradients": gradients, "parameters": parameters}
    shown = {name: codec for name, codec in shown.items() if codec is not None}
    for name, codec in shown.items():
        require_codec(f"compress: {name}", codec, name)

    def enter(state: Any) -> Any:
        return map_states("compress", lambda one: _made_for(one, record), state)

    return transform(
        "compress",
        fn,
        entering("compress", enter),
        never_around=("compress", "shard", "simulate"),
        right="fzero.shard(fzero.compress(step, ...), stage=...), with one compress",
        options={**shown, **({} if over == "all" else {"over": over})},
        init_options={"compress": record} if shown else {},
    )


def _made_for(state: TrainState, record: Compress) -> TrainState:
    """Return the state; raise `PhaseError` if what crosses its ranks does so in other forms."""
    setup = state.setup
    shards = setup.layout.ranks > 1
    wanted = record.gradients, record.parameters if shards else None, record.over
    asked = setup.layout.options.compress if shards else None
    parameters = None if asked is None else asked.parameters
    has = setup.reduction.codec, parameters, setup.reduction.over if shards else record.over
    if has != wanted:
        shown = [
            f"gradients={gradients}, parameters={parameters}, over={over!r}"
            for gradients, parameters, over in (has, wanted)
        ]
        raise PhaseError(
            f"compress: the state was made for {shown[0]}, and the step has {shown[1]}.",
            cause="a state that fzero.init has made without compress=, or another step's.",
            fix="make it by the init of this step, step.init(params, optimizer), and load what "
            "was saved into it.",
        )
    return state


class _Encoding(CallPart):
    """What encoding has lost of gradients goes from the states to their next backward, and back."""

    def __init__(self, states: Sequence[TrainState], reducer: Any) -> None:
        self._reducer = reducer
        for number in range(len(states)):  # the residuals of the states, as they are then
            if (encoder := reducer.encoder(number)) is not None:
                encoder.remembers_by(
                    lambda n=number: Lent(states[n], states[n].setup.gradient_share)
                )

    def reduced(self, number: int, state: TrainState) -> TrainState:
        """Return the state with what reductions have lost."""
        encoder = self._reducer.encoder(number)
        return state if encoder is None else with_memories(state, encoder.changed())


def _two_wires(options: Any) -> str:
    wires = [one for one in options.transforms if one.wire is not None]
    if not wires or (
        len(wires) == 1 and options.compress in (None, Compress(gradients=wires[0].wire))
    ):
        return ""
    return f"transforms: a codec at `wire` of {wires[0].name}, and another one beside it."


def _predivided(options: Any) -> str:
    factor, codec = options.reduction.gradient_predivide_factor, codecs_asked(options).gradients
    if factor == 1 or isinstance(codec, cast | None):
        return ""
    return f"gradient_predivide_factor={factor!r} with compress: gradients={codec}."


def _nothing_gathered(asked: Requested) -> str:
    codec = codecs_asked(asked.options).parameters
    there = codec is not None and asked.stage != 3
    return f"compress: parameters={codec} at stage {asked.stage}." if there else ""


def _cut_matrices(asked: Requested) -> str:
    held = codecs_asked(asked.options)
    factors = isinstance(held.gradients, powersgd)
    there = factors and held.over != "all" and asked.axis.shards.size > 1
    return f"compress: gradients={held.gradients}, over={held.over!r}." if there else ""


def _no_replicas(asked: Requested) -> str:
    axis = asked.axis
    over = asked.options.local is None and codecs_asked(asked.options).over == "replicas"
    there = over and axis.size > 1 and (axis.dims is None or asked.stage == 0)
    return f'compress: over="replicas" at stage {asked.stage} on {axis}.' if there else ""


_EXCLUDES = (
    Excludes(
        beside="a transform with a codec at `wire`",
        when="options",
        seen=_two_wires,
        cause="two transforms with a codec, or one beside compress=.",
        fix="leave one of them out: a gradient crosses ranks in one form.",
    ),
    Excludes(
        beside="gradient_predivide_factor",
        when="options",
        seen=_predivided,
        cause="a factor against overflow, and a codec that has scales of its own.",
        fix="leave one of them out.",
    ),
    Excludes(
        beside="stages 0 to 2, for parameters",
        when="ranks",
        seen=_nothing_gathered,
        cause="only stage 3 gathers parameters for a forward or a backward; what stages 1 "
        "and 2 gather after an update is the parameters themselves.",
        fix="use stage=3, or leave it out.",
    ),
    Excludes(
        beside='over="replicas", for powersgd on several shards',
        when="ranks",
        seen=_cut_matrices,
        cause="what crosses replicas is a shard, which cuts matrices at any element.",
        fix='leave over= out: factors then cross all ranks; or give over="replicas" another '
        "codec, as fzero.codecs.int8().",
    ),
    Excludes(
        beside='a mesh of one dim, or stage 0, for over="replicas"',
        when="ranks",
        seen=_no_replicas,
        cause="a mesh of one dim or one replica, whose ranks all have other shards; or stage "
        "0, where gradients are reduced over all ranks at once.",
        fix='give a mesh of two dims at stage 1, 2 or 3, or leave it out: over="all".',
    ),
    NOT_DIFFERENTIABLE,
)

COMPRESS = Builtin(
    name="compress",
    acts=lambda state: state.setup.encodes_gradients,
    # Under torch.func, without a reducer, nothing can be encoded.
    calls=lambda states, reducer: None if reducer is None else _Encoding(states, reducer),
    excludes=_EXCLUDES,
)
"""Codecs of gradients, at the points of a step."""
