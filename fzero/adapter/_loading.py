"""module.load_state_dict of an engine's module: one error where it cannot be, before it begins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from fzero.errors import LayoutError
from fzero.machine.placeholder import LazyParam


def refuse_load(
    module: nn.Module, values: Mapping[str, Any], prefix: str, metadata: Mapping[str, Any], *_: Any
) -> None:
    """Raise if `values` are for placeholders, or are to replace parameters.

    A pre-hook of load_state_dict: torch itself would go on after each parameter that refuses, and
    put all their errors into one.
    """
    named = module.named_parameters(remove_duplicate=False)
    wanted = [(prefix + path, p) for path, p in named if prefix + path in values]
    if wanted and metadata.get("assign_to_params_buffers"):
        raise LayoutError(
            f"load_state_dict(assign=True) of {len(wanted)} parameters of an engine's module.",
            cause="a load that puts other tensors in the places of parameters, which the engine "
            "would not train.",
            fix="leave assign out; or load before the Engine is made.",
        )
    lazy = [path for path, p in wanted if isinstance(p, LazyParam) and not _is_writable(p)]
    if lazy:
        raise LayoutError(
            f"load_state_dict of {len(lazy)} parameters of stage 3, the first {lazy[0]}: this rank "
            "has only a shard of each.",
            cause="module.load_state_dict(values) after Engine(..., stage=3).",
            fix="on every rank, `with fzero.adapter.gathered(module, modify=True): "
            "module.load_state_dict(values)`; or load before the Engine is made.",
        )


def _is_writable(p: LazyParam) -> bool:
    """Whether it is in a block of `gathered(modify=True)`, or waits for its engine."""
    reader: Any = p.reader
    return bool(reader.writable[reader.unit_of(p.where[0])])
