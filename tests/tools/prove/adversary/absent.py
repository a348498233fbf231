"""An op that is given a tensor in the place of another one, or of none: both must be told apart."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.tools.prove.adversary.places import Fn

Pair = tuple[Fn, Fn]


def row_of(x: Tensor) -> Tensor:
    """A number for each column: of the values, so that it is one operand more."""
    return x[:1].detach().squeeze(0) + 0.5


def square_of(x: Tensor) -> Tensor:
    return x[:4, :4]


def cube_of(x: Tensor) -> Tensor:
    """[2, 4, 4] or so: of all elements."""
    return torch.stack([x[:4, :4], x[-4:, -4:]])


def ids_of(x: Tensor) -> Tensor:
    """[4] numbers below 4, of the values."""
    return (x[:4, 0].detach().abs() * 10).long() % 4


def map_of(x: Tensor) -> Tensor:
    """[1, 2, 4, 4]."""
    return cube_of(x)[None]


def kernel_of(x: Tensor) -> Tensor:
    """[2, 4, 2]."""
    return torch.stack([x[:4, :2], x[-4:, -2:]])


# A tensor that is given in the place of another one, or of none.
ABSENT: dict[str, Pair] = {
    "layer_norm weight, bias": (
        lambda x: F.layer_norm(x, x.shape[1:], weight=row_of(x)),
        lambda x: F.layer_norm(x, x.shape[1:], bias=row_of(x)),
    ),
    "group_norm weight, bias": (
        lambda x: F.group_norm(x, 2, weight=row_of(x)),
        lambda x: F.group_norm(x, 2, bias=row_of(x)),
    ),
    "batch_norm weight, bias": (
        lambda x: F.batch_norm(x, None, None, weight=row_of(x), training=True),
        lambda x: F.batch_norm(x, None, None, bias=row_of(x), training=True),
    ),
    "instance_norm weight, bias": (
        lambda x: F.instance_norm(map_of(x), weight=row_of(x)[:2]),
        lambda x: F.instance_norm(map_of(x), bias=row_of(x)[:2]),
    ),
    "rms_norm weight": (
        lambda x: F.rms_norm(x, x.shape[1:], weight=row_of(x)),
        lambda x: F.rms_norm(x, x.shape[1:]),
    ),
    "clamp min, max": (
        lambda x: torch.clamp(x, min=row_of(x)),
        lambda x: torch.clamp(x, max=row_of(x)),
    ),
    "clamp min, max, numbers": (lambda x: x.clamp(min=0.1), lambda x: x.clamp(max=0.1)),
    "index of the first, of the last dim": (
        lambda x: cube_of(x)[ids_of(x) % 2, :, ids_of(x)],
        lambda x: cube_of(x)[:, ids_of(x) % 2, ids_of(x)],
    ),
    "index of dim 0, 1": (lambda x: square_of(x)[ids_of(x)], lambda x: square_of(x)[:, ids_of(x)]),
    "index with a None between": (
        lambda x: square_of(x)[ids_of(x)][None],
        lambda x: square_of(x)[:, None, ids_of(x)],
    ),
    "index_put of dim 0, 1": (
        lambda x: square_of(x).clone().index_put((ids_of(x),), row_of(x)[:4]),
        lambda x: (
            square_of(x).clone().index_put((torch.arange(4)[:, None], ids_of(x)), row_of(x)[:4])
        ),
    ),
    "conv bias": (
        lambda x: F.conv1d(cube_of(x), kernel_of(x), bias=row_of(x)[:2]),
        lambda x: F.conv1d(cube_of(x), kernel_of(x)),
    ),
    "linear bias": (
        lambda x: F.linear(x, x, x.sum(1)),
        lambda x: F.linear(x, x),
    ),
    "cross_entropy weight": (
        lambda x: F.cross_entropy(square_of(x), ids_of(x), weight=row_of(x)[:4].abs()),
        lambda x: F.cross_entropy(square_of(x), ids_of(x)),
    ),
    "bce weight, pos_weight": (
        lambda x: F.binary_cross_entropy_with_logits(x, x.sigmoid() ** 2, weight=row_of(x).abs()),
        lambda x: F.binary_cross_entropy_with_logits(
            x, x.sigmoid() ** 2, pos_weight=row_of(x).abs()
        ),
    ),
    "attention mask": (
        lambda x: F.scaled_dot_product_attention(
            map_of(x), map_of(x), map_of(x), attn_mask=square_of(x)
        ),
        lambda x: F.scaled_dot_product_attention(map_of(x), map_of(x), map_of(x)),
    ),
    "where, swapped": (
        lambda x: torch.where(x > 0, x, x * 2),
        lambda x: torch.where(x > 0, x * 2, x),
    ),
    "histc bounds": (
        lambda x: torch.histc(x, 4, -1.0, 1.0),
        lambda x: torch.histc(x, 4, -1.0, 2.0),
    ),
    "lerp weight": (
        lambda x: torch.lerp(x, x.flip(0), x.abs()),
        lambda x: torch.lerp(x, x.flip(0), 0.5),
    ),
    "addcmul, addcdiv": (
        lambda x: torch.addcmul(x, x, x + 3, value=0.5),
        lambda x: torch.addcmul(x, x, x + 3, value=0.25),
    ),
    "embedding padding_idx": (
        lambda x: F.embedding(ids_of(x), x),
        lambda x: F.embedding(ids_of(x), x.clone(), max_norm=0.5),
    ),
    "embedding_bag mode": (
        lambda x: F.embedding_bag(ids_of(x)[None], x.clone(), mode="sum"),
        lambda x: F.embedding_bag(ids_of(x)[None], x.clone(), mode="mean"),
    ),
    "embedding_bag weights": (
        lambda x: F.embedding_bag(
            ids_of(x)[None], x.clone(), mode="sum", per_sample_weights=row_of(x)[None, :4]
        ),
        lambda x: F.embedding_bag(ids_of(x)[None], x.clone(), mode="sum"),
    ),
}
