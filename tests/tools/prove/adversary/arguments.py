"""One op with other arguments on several ranks: both must be told apart."""

# ruff: noqa: E501
# A table has a program a line.

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from tests.tools.prove.adversary.absent import (
    ABSENT,
    Pair,
    cube_of,
    ids_of,
    kernel_of,
    map_of,
    square_of,
)
from tests.tools.prove.adversary.places import (
    Fn,
    as_update,
    in_data,
    in_model,
    in_update,
    in_weights,
    on_many,
)
from tests.tools.prove.adversary.programs import Program

KIND = "arguments"


def _both(fn: Any, key: str, a: Any, b: Any, of: Fn = lambda x: x) -> Pair:
    return (lambda x: fn(of(x), **{key: a})), (lambda x: fn(of(x), **{key: b}))


# A dim, a number, a mode.
OTHER: dict[str, Pair] = {
    "softmax dim": _both(torch.softmax, "dim", 0, 1),
    "log_softmax dim": _both(torch.log_softmax, "dim", 0, -1),
    "sum dim": _both(torch.sum, "dim", 0, 1),
    "sum keepdim": (lambda x: x - x.sum(1, keepdim=True), lambda x: x - x.sum(0, keepdim=True)),
    "sum of a square, dims": _both(torch.sum, "dim", 0, 1, square_of),
    "mean dim": _both(torch.mean, "dim", (0,), (0, 1)),
    "amax dim": _both(torch.amax, "dim", 0, 1, square_of),
    "argmax dim": _both(torch.argmax, "dim", 0, 1, lambda x: square_of(x) + 9 * torch.eye(4).roll(1, 0)),
    "cumsum dim": _both(torch.cumsum, "dim", 0, 1),
    "cumprod dim": _both(torch.cumprod, "dim", 0, 1),
    "logsumexp dim": _both(torch.logsumexp, "dim", 0, 1, square_of),
    "sort dim": (lambda x: x.sort(0)[0], lambda x: x.sort(1)[0]),
    "sort descending": (lambda x: x.sort(0)[0], lambda x: x.sort(0, descending=True)[0]),
    "topk k": (lambda x: x.topk(2, 1)[0], lambda x: x.topk(1, 1)[0]),
    "topk smallest": (lambda x: x.topk(2, 1)[0], lambda x: x.topk(2, 1, largest=False)[0]),
    "topk values, indices": (lambda x: x.topk(2, 1)[0], lambda x: x.topk(2, 1)[1].float()),
    "max values, indices": (lambda x: x.max(1)[0], lambda x: x.max(1)[1].float()),
    "kthvalue": (lambda x: x.kthvalue(1, 1)[0], lambda x: x.kthvalue(2, 1)[0]),
    "flip dims": _both(torch.flip, "dims", (0,), (1,)),
    "roll shifts": _both(torch.roll, "shifts", 1, 2),
    "roll dims": (lambda x: x.roll(1, 0), lambda x: x.roll(1, 1)),
    "var correction": _both(torch.var, "correction", 0, 1),
    "std dim": (lambda x: x.std(0), lambda x: x.std(0, correction=0)),
    "norm order": _both(torch.linalg.vector_norm, "ord", 2, 1),
    "norm dim": (
        lambda x: torch.linalg.vector_norm(square_of(x), dim=0),
        lambda x: torch.linalg.vector_norm(square_of(x), dim=1),
    ),
    "norm of half": (
        lambda x: torch.linalg.vector_norm(x),
        lambda x: torch.linalg.vector_norm(x[:2]),
    ),
    "norm inf, minus inf": _both(torch.linalg.vector_norm, "ord", float("inf"), -float("inf")),
    "gelu, silu": (F.gelu, F.silu),
    "leaky_relu slope": _both(F.leaky_relu, "negative_slope", 0.01, 0.2),
    "elu alpha": _both(F.elu, "alpha", 1.0, 0.5),
    "softplus beta": _both(F.softplus, "beta", 1, 2),
    "threshold": (lambda x: F.threshold(x, 0.1, 0.0), lambda x: F.threshold(x, 0.1, 1.0)),
    "hardtanh": (lambda x: F.hardtanh(x), lambda x: F.hardtanh(x, -1.0, 0.5)),
    "relu, relu6": (lambda x: F.relu(x * 50), lambda x: F.relu6(x * 50)),
    "abs, identity": (lambda x: x.abs(), lambda x: x),
    "square, abs": (lambda x: x.square(), lambda x: x.abs()),
    "pow": (lambda x: x**2, lambda x: x**3),
    "pow of a number": (lambda x: 2**x, lambda x: 3**x),
    "rsub": (lambda x: 1 - x, lambda x: x - 2),
    "sqrt of a square": (lambda x: x.square().sum().sqrt(), lambda x: x.sum()),
    "sqrt, squared": (lambda x: x.sum().sqrt().nan_to_num() ** 2, lambda x: x.sum() ** 2),
    "clamp, one side": (lambda x: x.clamp(-0.5, 0.5), lambda x: x.clamp(-0.5)),
    "clamp of a norm": (lambda x: x.norm().clamp(max=1.0), lambda x: x.norm().clamp(max=2.0)),
    "tril diagonal": _both(torch.tril, "diagonal", 0, 1),
    "tril, triu": (lambda x: x.tril(), lambda x: x.triu()),
    "diagonal offset": _both(torch.diagonal, "offset", 0, 1),
    "transposed": (lambda x: square_of(x).reshape(-1), lambda x: square_of(x).t().reshape(-1)),
    "contiguous, transposed": (
        lambda x: square_of(x).contiguous(),
        lambda x: square_of(x).t().contiguous(),
    ),
    "permuted": (
        lambda x: cube_of(x).permute(0, 2, 1).reshape(-1),
        lambda x: cube_of(x).permute(2, 0, 1).reshape(-1),
    ),
    "viewed": (lambda x: cube_of(x).view(4, 8).sum(0), lambda x: cube_of(x).view(8, 4).sum(0)),
    "expanded": (lambda x: x[0].expand(4, -1), lambda x: x[1].expand(4, -1)),
    "as_strided": (
        lambda x: x.clone().as_strided((3,), (1,), 0),
        lambda x: x.clone().as_strided((3,), (1,), 1),
    ),
    "unfold": (lambda x: x.unfold(1, 2, 1), lambda x: x.unfold(1, 2, 2)),
    "slice start": (lambda x: x[:2], lambda x: x[1:3]),
    "slice step": (lambda x: x[:4:2], lambda x: x[:2]),
    "select": (lambda x: x[0], lambda x: x[-1]),
    "select of the last dim": (lambda x: x[:, 0], lambda x: x[:, 1]),
    "split, other part": (lambda x: x.split(2)[0], lambda x: x.split(2)[1]),
    "chunk of columns": (lambda x: x.chunk(2, 1)[0], lambda x: x.chunk(2, 1)[1]),
    "unbind": (lambda x: x.unbind(0)[1], lambda x: x.unbind(0)[2]),
    "cat order": (lambda x: torch.cat([x, x * 2]), lambda x: torch.cat([x * 2, x])),
    "cat dim": (
        lambda x: torch.cat([square_of(x), square_of(x) * 2], 0),
        lambda x: torch.cat([square_of(x), square_of(x) * 2], 1),
    ),
    "stack dim": (
        lambda x: torch.stack([square_of(x), square_of(x) * 2], 0),
        lambda x: torch.stack([square_of(x), square_of(x) * 2], 1),
    ),
    "repeat": (lambda x: x.repeat(2, 1), lambda x: x.repeat_interleave(2, 0)),
    "pad sides": (lambda x: F.pad(x, (1, 0)), lambda x: F.pad(x, (0, 1))),
    "pad value": _both(lambda x, value: F.pad(x, (1, 0), value=value), "value", 0.0, 1.0),
    "pad mode": (
        lambda x: F.pad(cube_of(x), (2, 1), mode="reflect"),
        lambda x: F.pad(cube_of(x), (2, 1), mode="replicate"),
    ),
    "matmul order": (lambda x: square_of(x) @ square_of(x.flip(1)), lambda x: square_of(x.flip(1)) @ square_of(x)),
    "matmul transposed": (lambda x: x @ x.t(), lambda x: x @ x.flip(0).t()),
    "addmm beta": (
        lambda x: torch.addmm(square_of(x), square_of(x), square_of(x), beta=1.0),
        lambda x: torch.addmm(square_of(x), square_of(x), square_of(x), beta=0.5),
    ),
    "addmm alpha": (
        lambda x: torch.addmm(square_of(x), square_of(x), square_of(x), alpha=1),
        lambda x: torch.addmm(square_of(x), square_of(x), square_of(x), alpha=2),
    ),
    "baddbmm": (
        lambda x: torch.baddbmm(cube_of(x), cube_of(x), cube_of(x), beta=0),
        lambda x: torch.baddbmm(cube_of(x), cube_of(x), cube_of(x), beta=1),
    ),
    "add alpha": (lambda x: x.add(x.flip(0), alpha=2), lambda x: x.add(x.flip(0), alpha=3)),
    "sub order": (lambda x: x - x.flip(0) * 2, lambda x: x.flip(0) * 2 - x * 3),
    "div order": (lambda x: x / (x.flip(0) + 9), lambda x: (x.flip(0) + 9) / (x + 9)),
    "conv stride": _both(lambda x, stride: F.conv1d(cube_of(x), kernel_of(x), stride=stride), "stride", 1, 2),
    "conv padding": _both(lambda x, padding: F.conv2d(map_of(x), map_of(x)[..., :2, :2], padding=padding), "padding", 0, 1),
    "conv groups": (
        lambda x: F.conv1d(cube_of(x), cube_of(x)[:, :2, :2].reshape(2, 2, 2).repeat(1, 2, 1), groups=1),
        lambda x: F.conv1d(cube_of(x), cube_of(x)[:, :2, :2].reshape(2, 2, 2).repeat(1, 1, 1), groups=2),
    ),
    "pool": _both(lambda x, kernel_size: F.avg_pool1d(cube_of(x), kernel_size, stride=1), "kernel_size", 1, 2),
    "pool ceil_mode": _both(lambda x, ceil_mode: F.max_pool1d(cube_of(x), 3, 2, ceil_mode=ceil_mode), "ceil_mode", False, True),
    "avg_pool count_include_pad": _both(lambda x, count_include_pad: F.avg_pool1d(cube_of(x), 2, padding=1, count_include_pad=count_include_pad), "count_include_pad", True, False),
    "interpolate": _both(lambda x, align_corners: F.interpolate(map_of(x * 5), (6, 6), mode="bilinear", align_corners=align_corners), "align_corners", False, True),
    "cross_entropy reduction": (
        lambda x: F.cross_entropy(square_of(x), ids_of(x)),
        lambda x: F.cross_entropy(square_of(x), ids_of(x), reduction="sum"),
    ),
    "cross_entropy ignore_index": (
        lambda x: F.cross_entropy(square_of(x), ids_of(x) * 0),
        lambda x: F.cross_entropy(square_of(x), ids_of(x) * 0, label_smoothing=0.1),
    ),
    "nll ignore_index": (
        lambda x: F.nll_loss(square_of(x), torch.tensor([0, 1, 2, 3])),
        lambda x: F.nll_loss(square_of(x), torch.tensor([0, 1, 2, 3]), ignore_index=2),
    ),
    "attention causal": _both(lambda x, is_causal: F.scaled_dot_product_attention(map_of(x), map_of(x), map_of(x), is_causal=is_causal), "is_causal", False, True),
    "attention scale": _both(lambda x, scale: F.scaled_dot_product_attention(map_of(x), map_of(x), map_of(x), scale=scale), "scale", 0.5, 1.0),
    "gather dim": (
        lambda x: square_of(x).gather(0, ids_of(x).expand(4, 4)),
        lambda x: square_of(x).gather(1, ids_of(x).expand(4, 4)),
    ),
    "scatter dim": (
        lambda x: square_of(x).scatter(0, ids_of(x).expand(4, 4), 9.0),
        lambda x: square_of(x).scatter(1, ids_of(x).expand(4, 4), 9.0),
    ),
    "scatter, scatter_add": (
        lambda x: square_of(x).scatter(0, torch.zeros(4, 4).long(), square_of(x)),
        lambda x: square_of(x).scatter_add(0, torch.zeros(4, 4).long(), square_of(x)),
    ),
    "scatter_reduce": (
        lambda x: square_of(x).scatter_reduce(0, ids_of(x).expand(4, 4), square_of(x) * 2, "amax"),
        lambda x: square_of(x).scatter_reduce(0, ids_of(x).expand(4, 4), square_of(x) * 2, "amin"),
    ),
    "index_put accumulate": (
        lambda x: torch.zeros(4).index_put((ids_of(x) * 0,), x[0, :4]),
        lambda x: torch.zeros(4).index_put((ids_of(x) * 0,), x[0, :4], accumulate=True),
    ),
    "index_add dim": (
        lambda x: square_of(x).index_add(0, ids_of(x), square_of(x)),
        lambda x: square_of(x).index_add(1, ids_of(x), square_of(x)),
    ),
    "index_select dim": (
        lambda x: x.index_select(0, ids_of(x)),
        lambda x: x.index_select(1, ids_of(x)),
    ),
    "index of numbers": (
        lambda x: x[torch.tensor([0, 1, 2])],
        lambda x: x[torch.tensor([0, 2, 1])],
    ),
    "mask": (lambda x: x * (x > 0), lambda x: x * (x >= 0.2)),
    "masked_fill": (lambda x: x.masked_fill(x > 0, 0.0), lambda x: x.masked_fill(x > 0, 0.5)),
    "eq, ne": (lambda x: (x == x.amax()) * x, lambda x: (x != x.amax()) * x),
    "isfinite": (lambda x: x.isfinite().float(), lambda x: (~x.isfinite()).float()),
    "constant": (lambda x: x * torch.tensor([1.0, 2.0])[0], lambda x: x * torch.tensor([1.0, 2.0])[1]),
    "constant, one element": (
        lambda x: x[:3, 0] * torch.tensor([1.0, 2.0, 3.0]),
        lambda x: x[:3, 0] * torch.tensor([1.0, 2.0, 4.0]),
    ),
    "einsum": (
        lambda x: torch.einsum("ij,kj->ik", x, x),
        lambda x: torch.einsum("ij,kj->ki", x, x * 2),
    ),
    "cdist p": (lambda x: torch.cdist(x, x.flip(0), p=2.0), lambda x: torch.cdist(x, x.flip(0), p=1.0)),
    "cosine dim": (
        lambda x: F.cosine_similarity(x, x.flip(0), dim=1),
        lambda x: F.cosine_similarity(x, x.flip(0), dim=0),
    ),
    "huber delta": (lambda x: F.huber_loss(x, x.flip(0)), lambda x: F.huber_loss(x, x.flip(0), delta=0.3)),
    "glu dim": (lambda x: F.glu(square_of(x), 0), lambda x: F.glu(square_of(x), 1)),
    "logcumsumexp": (lambda x: x.logcumsumexp(0), lambda x: x.logcumsumexp(1)),
    "quantile": (lambda x: x.quantile(0.5), lambda x: x.quantile(0.25)),
    "heaviside": (lambda x: x.sign(), lambda x: x.sgn() * 2),
    "eps of a norm": (lambda x: F.layer_norm(x, x.shape[1:], eps=1e-5), lambda x: F.layer_norm(x, x.shape[1:], eps=0.5)),
    "batch_norm, training": (
        lambda x: F.batch_norm(x, torch.zeros(x.shape[1]), torch.ones(x.shape[1]), training=True),
        lambda x: F.batch_norm(x, torch.zeros(x.shape[1]), torch.ones(x.shape[1]), training=False),
    ),
    "svd, qr": (lambda x: torch.linalg.qr(x)[1].abs(), lambda x: torch.linalg.svd(x)[1]),
    "fft": (lambda x: torch.fft.rfft(x, dim=0), lambda x: torch.fft.rfft(x, dim=1)),
}  # fmt: skip


FLAT = ("heaviside", "sqrt, squared")  # derivatives of 0, or of NaN: false of data alone


def programs() -> Iterator[Program]:
    smooth: Any = {*ABSENT} - {"histc bounds", "embedding padding_idx"}
    for i, (name, pair) in enumerate({**ABSENT, **OTHER}.items()):
        places: Any = (in_data, in_update, in_model if name in smooth else in_data, in_weights)
        place = in_data if name in FLAT else places[i % 4]
        yield place(KIND, name, on_many(*pair), options={"stage": i % 4})
        if name in smooth:
            yield places[(i + 2) % 4](KIND, name, on_many(*pair), world=3)
    for name in (
        "flip dims",
        "roll shifts",
        "abs, identity",
        "cumsum dim",
        "softmax dim",
        "tril diagonal",
    ):
        yield as_update(KIND, name, on_many(*OTHER[name]))  # fmt: skip
