"""`compress`: what crosses ranks is encoded, by codecs that the user chooses or writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, overload

from fzero.errors import PhaseError
from fzero.errors.check import called_as
from fzero.machine.encode import require_codec
from fzero.state import TrainState
from fzero.state.codec import Codec, Compress, Over
from fzero.transforms.pipeline import P, R, Step, Transform, transform
from fzero.transforms.states import flatten_states


@overload
def compress(
    fn: Callable[P, R],
    /,
    *,
    gradients: Codec | None = None,
    parameters: Codec | None = None,
    over: Over = "all",
) -> Step[P, R]: ...
@overload
def compress(
    *, gradients: Codec | None = None, parameters: Codec | None = None, over: Over = "all"
) -> Transform: ...
@called_as("compress(step, gradients=fzero.codecs.int8())")
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
        require_codec(f"compress: {name}", codec)

    def around(
        inner: Callable[..., Any], state: Any, /, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        for one in flatten_states("compress", state)[0]:
            _require_made_for(one, record)
        return inner(state, *args, **kwargs)

    return transform(
        "compress",
        fn,
        around,
        never_around=("compress", "shard", "simulate"),
        right="fzero.shard(fzero.compress(step, ...), stage=...), with one compress",
        options={**shown, **({} if over == "all" else {"over": over})},
        init_options={"compress": record} if shown else {},
    )


def _require_made_for(state: TrainState, record: Compress) -> None:
    """Raise `PhaseError` for a state whose gradients or parameters cross ranks in other forms."""
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
