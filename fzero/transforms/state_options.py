"""Which values of options a state may have, and which of them go together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import optree
from torch import Tensor

from fzero.machine.compress import require_codec
from fzero.options import BUCKET_BYTES, OPTIONS, SharedOptions, check_values
from fzero.ranks.mesh import Axis
from fzero.state import NAMESPACE, Reduction
from fzero.state.codec import Codec, Compress
from fzero.state.logical import Logical
from fzero.transforms.builtins import BUILTINS
from fzero.transforms.compress import wire_of
from fzero.transforms.together import require_together

OptionsT = TypeVar("OptionsT", bound=SharedOptions)


def check_shared(options: OptionsT) -> OptionsT:
    """Return the options; raise `LayoutError`, naming the option, for a value out of range.

    A transform with a codec at `wire` says `compress`.
    """
    check_values(options)
    require_together(BUILTINS, "options", options)
    wires = [one for one in options.transforms if one.wire is not None]
    if wires:
        options = replace(options, compress=wire_of(wires[0]))
    compress = options.compress or Compress()
    for name, codec in (("gradients", compress.gradients), ("parameters", compress.parameters)):
        if codec is not None:
            require_codec(f"compress: {name}", codec, name)
    return options


def check_stage(stage: Any, name: str = "Engine") -> int:
    """Return `stage` if it is 0, 1, 2 or 3; raise `LayoutError`, of the call `name`, otherwise."""
    OPTIONS["stage"].require(stage, f"{name}: ")
    return stage


def check_stages(name: str, stage: Any) -> Any:
    """Return `stage` if it is a stage or a pytree of them; raise `LayoutError` otherwise."""
    if optree.tree_is_leaf(stage, none_is_leaf=True, namespace=NAMESPACE) or not stage:
        return check_stage(stage, name)
    return optree.tree_map(
        lambda one: check_stage(one, name), stage, none_is_leaf=True, namespace=NAMESPACE
    )


def bucket_at(stage: int, bucket_bytes: int | None) -> int | None:
    """Return the bucket of a stage; None at stage 3, where leaves cross ranks unit by unit."""
    usual = BUCKET_BYTES.get(stage)
    return usual and (bucket_bytes or usual)


def encodes(frozen: Any) -> Callable[[str, Tensor], Codec | None] | None:
    """Return (path, leaf) -> the codec of a frozen leaf, of an option `frozen`; None for none.

    Raises `LayoutError`, in a call, for what is no codec, or does not what it says.
    """
    if frozen is None:
        return None
    tried: list[Codec] = []

    def codec_of(path: str, leaf: Tensor) -> Codec | None:
        if isinstance(frozen, Codec):
            found = frozen if leaf.ndim > 1 else None
        else:
            found: Any = frozen(path, leaf)
        if found is not None and found not in tried:
            OPTIONS["frozen"].require(found if isinstance(found, Codec) else object(), f"{path}: ")
            require_codec("frozen", found, "frozen")
            tried.append(found)
        # What a gradient has lost would be remembered; what is stored once is not added to.
        return found and (replace(found, memory=False) if found.memory else found)

    return codec_of


def logical_of(options: SharedOptions) -> Logical | None:
    """Return the logical ranks that a state is made for; None for its own ranks."""
    if options.logical_ranks is None:
        return None
    return Logical(ranks=options.logical_ranks, seed=options.seed)


def compressed(axis: Axis, options: SharedOptions) -> Reduction:
    """Return how gradients are reduced, with their codec."""
    compress = options.compress or Compress()
    over = compress.over
    if options.local is None and axis.shards.size == 1:  # replicas are all there is
        over = "all"
    return replace(options.reduction, codec=compress.gradients, over=over)
