"""The options of a state as a record, and which of them go together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import optree
import torch

from fzero.errors import LayoutError
from fzero.machine.encode import require_codec
from fzero.machine.powersgd import powersgd
from fzero.options import BUCKET_BYTES, OPTIONS, check_values
from fzero.ranks.mesh import Axis
from fzero.state import NAMESPACE, Gathering, Local, OptimizerOver, Reduction
from fzero.state.codec import Compress, cast
from fzero.state.offload import Offload
from fzero.state.points import Points
from fzero.state.precision import Autocast
from fzero.transforms.outer_sum import require_moves_encoded


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedOptions:
    """The options that both drivers share, as a record that a state is planned from."""

    optimizer_over: OptimizerOver = "shard"
    bucket_bytes: int | None = None
    autocast: Autocast | torch.dtype | None = None
    offload: Offload | None = None
    local: Local | None = None
    compress: Compress | None = None
    transforms: Sequence[Points] = ()
    reduction: Reduction
    gathering: Gathering


def grouped(kind: type, given: Mapping[str, Any], **more: Any) -> Any:
    """Build an options record of this kind from keyword options."""
    return kind(
        reduction=Reduction(**given_of(Reduction, given)),
        gathering=Gathering(**given_of(Gathering, given)),
        **given_of(kind, given),
        **more,
    )


def given_of(kind: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword options that are fields of a record."""
    return {name: given[name] for name in field_names(kind) if name in given}


def field_names(kind: type) -> list[str]:
    """Return the names of the fields of a record that a user may give."""
    return [one.name for one in fields(kind) if one.metadata.get("given", True)]


def check_shared(options: SharedOptions) -> SharedOptions:
    """Return the options; raise `LayoutError`, naming the option, for a value out of range.

    A transform with a codec at `wire` says `compress`.
    """
    check_values(options)
    options = _with_wire(options)
    compress = options.compress or Compress()
    for name, codec in (("gradients", compress.gradients), ("parameters", compress.parameters)):
        if codec is not None:
            require_codec(f"compress: {name}", codec)
    factor = options.reduction.gradient_predivide_factor
    if factor != 1 and not isinstance(compress.gradients, cast | None):
        raise LayoutError(
            f"gradient_predivide_factor={factor!r} with compress: gradients={compress.gradients}.",
            cause="a factor against overflow, and a codec that has scales of its own.",
            fix="leave one of them out.",
        )
    return options


def _with_wire(options: SharedOptions) -> SharedOptions:
    wires = [one for one in options.transforms if one.wire is not None]
    if not wires:
        return options
    wanted = Compress(gradients=wires[0].wire)
    if len(wires) > 1 or options.compress not in (None, wanted):
        raise LayoutError(
            f"transforms: a codec at `wire` of {wires[0].name}, and another one beside it.",
            cause="two transforms with a codec, or one beside compress=.",
            fix="leave one of them out: a gradient crosses ranks in one form.",
        )
    return replace(options, compress=wanted)


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


def compressed(stage: int, axis: Axis, options: SharedOptions) -> Reduction:
    """Return how gradients are reduced, with their codec.

    Raises `LayoutError` for a codec of what this stage never sends, and for replicas where there
    are none.
    """
    compress = options.compress or Compress()
    if compress.parameters is not None and stage != 3:
        raise LayoutError(
            f"compress: parameters={compress.parameters} at stage {stage}.",
            cause="only stage 3 gathers parameters for a forward or a backward; what stages 1 "
            "and 2 gather after an update is the parameters themselves.",
            fix="use stage=3, or leave it out.",
        )
    over = compress.over
    if isinstance(compress.gradients, powersgd) and over != "all" and axis.shards.size > 1:
        raise LayoutError(
            f"compress: gradients={compress.gradients}, over={over!r}.",
            cause="what crosses replicas is a shard, which cuts matrices at any element.",
            fix='leave over= out: factors then cross all ranks; or give over="replicas" another '
            "codec, as fzero.codecs.int8().",
        )
    if options.local is not None:
        require_moves_encoded(options.local, options.compress)
        return replace(options.reduction, codec=compress.gradients, over=over)
    if over == "replicas" and axis.size > 1 and (axis.dims is None or stage == 0):
        raise LayoutError(
            f'compress: over="replicas" at stage {stage} on {axis}.',
            cause="a mesh of one dim or one replica, whose ranks all have other shards; or stage "
            "0, where gradients are reduced over all ranks at once.",
            fix='give a mesh of two dims at stage 1, 2 or 3, or leave it out: over="all".',
        )
    if axis.shards.size == 1:  # replicas are all there is
        over = "all"
    return replace(options.reduction, codec=compress.gradients, over=over)
