"""What changes values by a dtype: read as if it did not, it would be the identity."""

# ruff: noqa: E501
# A table has a program a line.

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tests.tools.prove.adversary.places import (
    Fn,
    as_data,
    as_own,
    as_update,
    as_weights,
    in_data,
    in_update,
    on_many,
)
from tests.tools.prove.adversary.programs import Program

KIND = "casts"
I8, I16, I32, I64, U8, BOOL = (
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.bool,
)


def _same(x: Tensor) -> Tensor:
    return x


def _into(dtype: torch.dtype) -> Fn:
    return lambda x: torch.empty(x.shape, dtype=dtype).copy_(x).to(x.dtype)


def _part(dtype: torch.dtype) -> Fn:
    def fn(x: Tensor) -> Tensor:
        kept = x.clone()
        whole = torch.zeros(x.shape, dtype=dtype)
        whole[:1].copy_(x[:1])
        kept[:1].copy_(whole[:1])
        return kept

    return fn


def _out(x: Tensor) -> Tensor:
    return torch.mul(x, 1.0, out=torch.empty(x.shape, dtype=torch.float16)).to(x.dtype)


# Shapes stay: each of these is read as the identity by who does not look at the dtype.
ROUNDED: dict[str, Fn] = {
    **{f"to({d})".replace("torch.", ""): (lambda x, d=d: x.to(d).to(x.dtype)) for d in (I8, I16, I32, I64, U8)},
    "to(bool)": lambda x: x.relu().to(BOOL).to(x.dtype),
    **{f"copy_ into {d}".replace("torch.", ""): _into(d) for d in (I8, I64, U8)},
    "copy_ into bool": lambda x: _into(BOOL)(x.relu()),
    "copy_ of rows into int8": _part(I8),
    "long, and back": lambda x: x.long().float(),
    "int, times two, halved": lambda x: (x.int() * 2).float() / 2,
    "bool, and back": lambda x: x.bool().float() * x.abs().mean(),
    "bool by ne": lambda x: (x.relu() != 0).to(x.dtype),
    "type_as an integer": lambda x: x.type_as(torch.zeros(1, dtype=I64)).type_as(x),
    "type(IntTensor)": lambda x: x.type(torch.int32).type(torch.float32),
    "to(other)": lambda x: x.to(torch.zeros(1, dtype=I16)).to(x),
    "cat with integers": lambda x: torch.cat([x.to(I32), torch.zeros_like(x, dtype=I32)])[: len(x)].to(x.dtype),
    "stack of integers": lambda x: torch.stack([x.long(), x.long()])[1].float(),
    "index_put_ into integers": lambda x: torch.zeros(x.shape, dtype=I64).index_put_((torch.arange(len(x)),), x.long()).float(),
    "masked_fill of integers": lambda x: x.long().masked_fill(x.long() > 90, 0).float(),
    "where of integers": lambda x: torch.where(x > 9e9, x.long(), x.long()).float(),
    "view of bytes": lambda x: x.view(torch.int32).float() * 1e-9,
    "real part of a root": lambda x: x.to(torch.complex64).sqrt().real,
    "imaginary part": lambda x: torch.complex(x, x.abs()).sqrt().imag,
    "div by floor": lambda x: torch.div(x, 1.0, rounding_mode="floor"),
    "div by trunc": lambda x: torch.div(x, 1.0, rounding_mode="trunc"),
    "floor_divide": lambda x: x // 1.0,
    "remainder": lambda x: x - x % 1.0,
    "fmod": lambda x: x.fmod(0.7),
    "integer division": lambda x: (x * 8).int().div(8, rounding_mode="floor").float(),
    "shift": lambda x: ((x * 8).int() >> 2).float(),
    "bitwise_and": lambda x: ((x * 8).int() & 6).float(),
    "bitwise_not": lambda x: (~(x * 8).int()).float(),
    "int8 overflow": lambda x: ((x * 50).to(I8) * 3).float() / 150,
    "uint8 of negatives": lambda x: (x * 10).long().to(U8).float() / 10,
    "int32 overflow": lambda x: ((x * 1e6).to(I32) * 100000).float() / 1e11,
    "float16 bits": lambda x: x.half().view(I16).float() * 1e-4,
    "quantized": lambda x: torch.fake_quantize_per_tensor_affine(x, 0.5, 0, -128, 127),
    "float8": lambda x: (x * 3).to(torch.float8_e4m3fn).float() + x.to(I8).float(),
}  # fmt: skip

# Numbers and sums whose dtype is another on several ranks.
NUMBERS: dict[str, tuple[Fn, Fn]] = {
    "sum(dtype=int64)": (lambda x: x.sum(), lambda x: x.sum(dtype=I64)),
    "sum(dim, dtype=int32)": (lambda x: x.sum(0), lambda x: x.sum(0, dtype=I32)),
    "mean of integers": (lambda x: x.mean(), lambda x: x.long().float().mean()),
    "prod(dtype=int64)": (lambda x: (1.7 + 0 * x[0]).prod(), lambda x: (1.7 + 0 * x[0]).prod(dtype=I64)),
    "cumsum(dtype=int64)": (lambda x: x.cumsum(0), lambda x: x.cumsum(0, dtype=I64)),
    "cumprod(dtype=int16)": (lambda x: x.cumprod(0), lambda x: x.cumprod(0, dtype=I16)),
    "sum of bools": (lambda x: (x > 0).sum(), lambda x: (x > 0).sum(dtype=BOOL)),
    "sum of uint8": (lambda x: (x > 0).sum() * 90, lambda x: ((x > 0).to(U8) * 90).sum(dtype=U8)),
    "any for a sum": (lambda x: (x > 0).sum(), lambda x: (x > 0).any()),
    "fill_ of integers": (lambda x: x.clone().fill_(0.7), lambda x: x.long().fill_(0.7)),
    "full(dtype=int64)": (
        lambda x: torch.full(x.shape, 0.7) * x,
        lambda x: torch.full(x.shape, 0.7, dtype=I64) * x,
    ),
    "full(dtype=bool)": (lambda x: torch.full((3,), 0.7), lambda x: torch.full((3,), 0.7, dtype=BOOL)),
    "full_like(dtype)": (lambda x: torch.full_like(x, 1.7), lambda x: torch.full_like(x, 1.7, dtype=U8)),
    "new_full of integers": (lambda x: x.new_full((3,), 2.5), lambda x: x.long().new_full((3,), 2.5)),
    "scalar_tensor": (
        lambda x: torch.scalar_tensor(0.7) * x,
        lambda x: torch.scalar_tensor(0.7, dtype=I64) * x,
    ),
    "tensor(dtype)": (lambda x: torch.tensor(1.7), lambda x: torch.tensor(1.7, dtype=I32)),
    "arange(dtype)": (lambda x: torch.arange(0, 3, 0.5), lambda x: torch.arange(0, 3, 0.5).int()),
    "linspace(dtype)": (
        lambda x: torch.linspace(0, 3, 6),
        lambda x: torch.linspace(0, 3, 6, dtype=I64),
    ),
    "add_ into integers": (
        lambda x: (x * 5).round() + 0,
        lambda x: (x * 5).round().to(I8).add_(100).float(),
    ),
    "zeros(dtype=bool) + 2": (
        lambda x: torch.zeros(3) + 2 * torch.ones(3),
        lambda x: (torch.zeros(3, dtype=BOOL) | torch.ones(3, dtype=BOOL)).float(),
    ),
    "bool + bool": (
        lambda x: (x > 0).float() + (x > 1).float(),
        lambda x: ((x > 0) + (x > 1)).float(),
    ),
    "bool * bool": (lambda x: (x > 0).float() * 3, lambda x: ((x > 0) * True).float()),
    "uint8 - uint8": (
        lambda x: (x > 0).float() - (x < 0).float(),
        lambda x: ((x > 0).to(U8) - (x < 0).to(U8)).float(),
    ),
    "logical_not": (lambda x: (x > 0).float(), lambda x: torch.logical_not(x > 0).float()),
    "logical_xor": (
        lambda x: torch.logical_or(x > 0, x > 1).float(),
        lambda x: torch.logical_xor(x > 0, x > 1).float(),
    ),
    "where with an integer": (
        lambda x: torch.where(x > 0, 1.5, 0.5),
        lambda x: torch.where(x > 0, 1.5, 0.5).long(),
    ),
    "complex, real only": (
        lambda x: torch.complex(x, x + 1).abs(),
        lambda x: torch.complex(x, x + 1).real.abs(),
    ),
    "conj": (lambda x: torch.complex(x, x).imag.relu(), lambda x: torch.complex(x, x).conj().imag.relu()),
    "masked sum of ints": (lambda x: x[:, 0].sum(), lambda x: x[:, 0].to(I8).sum()),
    "alpha of integers": (
        lambda x: torch.add(x, x, alpha=0.5),
        lambda x: torch.add(x.long(), x.long(), alpha=2).float(),
    ),
}  # fmt: skip


def programs() -> Iterator[Program]:
    for i, (name, fn) in enumerate(ROUNDED.items()):
        other = on_many(_same, fn)
        places: Any = (as_update, as_data, as_weights)
        yield as_own(KIND, name, fn, world=2 + i % 3, options={"stage": i % 4})
        yield places[i % 3](KIND, f"{name} on several ranks", other, world=2 + i % 2)
        if i < 12:
            yield places[(i + 1) % 3](KIND, f"{name} on several ranks", other)
    for i, (name, pair) in enumerate(NUMBERS.items()):
        place = in_data if i % 2 else in_update
        yield place(KIND, name, on_many(*pair), options={"stage": i % 4})
