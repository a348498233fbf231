"""Join the slices of tensor-parallel ranks into whole parameters, as DeepSpeed does.

DeepSpeed's `universal_checkpoint_info` says by patterns of parameter names how each was cut:

    tp_replicated_parameter_patterns            every rank has all of it
    parameter_to_average_patterns               every rank has its own; their mean counts
    parameter_with_row_parallelism_patterns     cut along dim 1
    parameter_with_2_sub_params_cat_dim_0       two parameters in one, each cut along dim 0
    parameter_with_sub_params                   several in one along a dim (fused q, k, v), each cut
    (none of them)                              cut along dim 0
    vocabulary_parameter_patterns               also: rows after `original_vocab_size` are padding

Source: DeepSpeed 0.19, checkpoint/ds_to_universal.py, `merge_tp_slices`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Info = Mapping[str, Any]
_REFUSED = ("affine_map", "autotp_unsupported_parameter_patterns")


def whole_parameter(name: str, slices: Sequence[Tensor], info: Info) -> Any:
    """Return the whole parameter; flat, if it is several in one; in a dict, if it is a vocabulary.

    Raises `ValueError` for slices that do not fit together, or that no pattern here describes.

    Example:
        >>> info = {"parameter_with_row_parallelism_patterns": [r".*dense.weight"]}
        >>> whole_parameter("dense.weight", [torch.zeros(1, 2), torch.ones(1, 2)], info)
        tensor([[0., 0., 1., 1.]])
    """
    for key in _REFUSED:
        if info.get(key):
            raise ValueError(f"it was cut as {key} says, which only DeepSpeed's converter can join")
    whole = _joined(name, slices, info)
    if _matches(name, info, "vocabulary_parameter_patterns"):
        return {"param": whole[: info["original_vocab_size"]], "vocab_tensor": True}
    return whole


def _joined(name: str, slices: Sequence[Tensor], info: Info) -> Tensor:
    if _matches(name, info, "tp_replicated_parameter_patterns"):
        for rank, one in enumerate(slices):
            if not torch.equal(one, slices[0]):
                raise ValueError(
                    f"tensor-parallel ranks 0 and {rank} differ in what they both have"
                )
        return slices[0]
    if _matches(name, info, "parameter_to_average_patterns"):
        return torch.stack(list(slices)).mean(0)
    if _matches(name, info, "parameter_with_2_sub_params_cat_dim_0"):
        halves = [one.chunk(2, dim=0) for one in slices]
        return torch.cat([half[k] for k in range(2) for half in halves])
    for entry in info.get("parameter_with_sub_params", ()):
        pattern = _match(name, entry["patterns"])
        if pattern is not None:
            widths = info.get("sub_param_shard_widths", {}).get(pattern)
            return _of_sub_params(slices, entry, widths)
    rows = _matches(name, info, "parameter_with_row_parallelism_patterns")
    return torch.cat(list(slices), dim=1 if rows else 0)


def _of_sub_params(
    slices: Sequence[Tensor], entry: Mapping[str, Any], widths: Sequence[Sequence[int]] | None
) -> Tensor:
    """Join each sub-parameter of its ranks' pieces, and then those.

    widths: of each sub-parameter on each rank; without them every rank has as much as the others.
    """
    shape, dim = list(entry["shape"]), entry["partition_dim"]
    if widths is None:
        sizes = shape[dim]
        if isinstance(sizes, int):  # so many sub-parameters of one size
            total = sum(one.shape[dim] for one in slices)
            sizes = [total // sizes] * sizes
        if any(size % len(slices) for size in sizes):
            raise ValueError(f"sub-parameters of {sizes} cannot lie on {len(slices)} ranks alike")
        widths = [[size // len(slices)] * len(slices) for size in sizes]
    parts: list[list[Tensor]] = []
    for rank, one in enumerate(slices):
        own = [some[rank] for some in widths]
        view = [sum(size) if isinstance(size, tuple | list) else size for size in shape]
        view[dim] = sum(own)
        parts.append(list(one.reshape(view).split(own, dim=dim)))
    pieces = [part[k] for k in range(len(widths)) for part in parts]
    return torch.cat(pieces, dim=dim).reshape(-1)


def _matches(name: str, info: Info, key: str) -> bool:
    return _match(name, info.get(key, ())) is not None


def _match(name: str, patterns: Sequence[str]) -> str | None:
    found = [pattern for pattern in patterns if re.match(pattern, name)]
    if len(found) > 1:
        raise ValueError(f"two patterns describe it: {found[0]!r} and {found[1]!r}")
    return found[0] if found else None
