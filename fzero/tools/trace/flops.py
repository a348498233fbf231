"""Count the floating-point operations of an op, for traces and for plans.

Counted are matrix products, convolutions and attention; a multiplication and the addition that goes
with it are two. For products of matrices and for convolutions torch has formulas
(`torch.utils.flop_counter`). Here are those of ops that it leaves out (the fused attention of CPUs,
products with vectors, ops that write into an argument), or that it counts for as many heads of
queries as of keys only. A recurrent layer is counted as its products: see `_recurrent`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

_aten = torch.ops.aten


def flops_of(op: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Return the operations of one call of an ATen op; of its tensors only shapes are looked at."""
    packet = getattr(op, "overloadpacket", op)
    own = _OWN.get(packet)
    if own is not None:
        return int(own(*args, **kwargs))
    formula = flop_registry.get(packet)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=out))


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """Scores, and sums of values: of all pairs, also of those that a mask drops."""
    pairs = math.prod(query.shape[:-1]) * key.shape[-2]
    return 2 * pairs * (query.shape[-1] + value.shape[-1])


def _attention_backward(
    _grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
) -> int:
    """The scores again; the gradients of weights and values, then those of queries and keys."""
    pairs = math.prod(query.shape[:-1]) * key.shape[-2]
    return 2 * pairs * (3 * query.shape[-1] + 2 * value.shape[-1])


def _product(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    """[..., m, k] with [..., k, n]; or [m, k] with [k]."""
    return 2 * a.numel() * (b.shape[-1] if b.ndim > 1 else 1)


def _added_product(_to: Tensor, a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    return _product(a, b)


def _grouped_product(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    """Groups of rows, each with a matrix of its own; of two stacks, a product of each pair."""
    shared = a.shape[0] if a.ndim == 3 and b.ndim == 2 else 1  # groups of the columns of b
    return 2 * a.numel() * b.shape[-1] // shared


def _trilinear(
    a: Tensor, b: Tensor, c: Tensor, e1: Any, e2: Any, e3: Any, *_: Any, **__: Any
) -> int:
    """A sum of products of three, as two matrix products, of which the first is counted."""
    ndim = a.ndim + len(e1)
    factors = [_unsqueezed(x, dims, ndim) for x, dims in ((a, e1), (b, e2), (c, e3))]
    return 2 * math.prod(map(max, *factors))


def _unsqueezed(x: Tensor, dims: Any, ndim: int) -> list[int]:
    sizes = iter(x.shape)
    return [1 if i in dims else next(sizes) for i in range(ndim)]


def _distances(a: Tensor, b: Tensor) -> int:
    """|x|^2 - 2 x y + |y|^2 of rows, as one product of matrices with two more columns."""
    return 2 * math.prod(a.shape[:-1]) * b.shape[-2] * (a.shape[-1] + 2)


def _packets(**formulas: Callable[..., int]) -> Mapping[Any, Callable[..., int]]:
    """The formulas by the ops of these names that this version of torch has."""
    return {getattr(_aten, name): f for name, f in formulas.items() if hasattr(_aten, name)}


_OWN = _packets(
    _scaled_dot_product_flash_attention_for_cpu=_attention,
    _scaled_dot_product_flash_attention_for_cpu_backward=_attention_backward,
    _scaled_dot_product_flash_attention=_attention,
    _scaled_dot_product_flash_attention_backward=_attention_backward,
    _scaled_dot_product_efficient_attention=_attention,
    _scaled_dot_product_efficient_attention_backward=_attention_backward,
    _scaled_dot_product_cudnn_attention=_attention,
    _scaled_dot_product_cudnn_attention_backward=_attention_backward,
    _scaled_dot_product_fused_attention_overrideable=_attention,
    _scaled_dot_product_attention_math_for_mps=_attention,
    mv=_product,
    dot=_product,
    vdot=_product,
    _int_mm=_product,
    addmv=_added_product,
    addmv_=_added_product,
    addmm_=_added_product,
    addbmm=_added_product,
    addbmm_=_added_product,
    baddbmm_=_added_product,
    _addmm_activation=_added_product,
    _grouped_mm=_grouped_product,
    _scaled_grouped_mm=_grouped_product,
    _trilinear=_trilinear,
    _euclidean_dist=_distances,
)
