"""The cut test: functions of single elements pass, whatever they are; others are found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from fzero.machine.elementwise import Beyond, Values, looks_beyond, sampled

Tensors = dict[str, Tensor]
F = torch.nn.functional


def tried(fn: Callable[[Tensors], Tensors], pieces: Tensors) -> Beyond | None:
    """What the test finds in a function of pieces by path, called as at a point."""

    def called(values: Values) -> Values:
        made = fn({leaf: x for (_, leaf), x in values.items()})
        assert all(x.shape == values["g", leaf].shape for leaf, x in made.items())
        return {("g", leaf): x for leaf, x in made.items()}

    values = {("g", leaf): sampled(x) for leaf, x in pieces.items()}
    return looks_beyond(called, values, {("g", k): sampled(x) for k, x in fn(pieces).items()})


def each(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensors], Tensors]:
    return lambda pieces: {k: fn(x) if x.numel() else x for k, x in pieces.items()}


# Of single elements: random compositions, of values with every kind of trouble.

ONE: dict[str, Callable[[Tensor], Tensor]] = {
    name: getattr(torch, name)
    for name in (
        *("abs", "neg", "exp", "log", "sin", "tanh", "sigmoid", "sqrt", "rsqrt", "reciprocal"),
        *("square", "sign", "round", "floor", "frac", "erf", "expm1", "log1p", "sinh", "relu"),
    )
}
ONE |= {
    "clamp": lambda x: x.clamp(-0.5, 0.75),
    "scaled": lambda x: 0.3 * x,
    "shifted": lambda x: x - 1,
    "isnan": lambda x: x.isnan().to(x.dtype),
    "nan_to_num": torch.nan_to_num,
    "half": lambda x: x.to(torch.bfloat16).to(x.dtype),
    "softplus": F.softplus,
}
TWO: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "mul": torch.mul,
    "div": torch.div,
    "maximum": torch.maximum,
    "where": lambda x, y: torch.where(x > y, x, y + 1),
    "remainder": torch.remainder,
    "lerp": lambda x, y: x.lerp(y, 0.25),
}
COMPLEX = ("neg", "exp", "sin", "tanh", "square", "sqrt", "reciprocal", "scaled", "shifted")
HARD = [0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1.0, -1.0, 0.5, 1e-30, 3e4]


@st.composite
def programs(draw: st.DrawFn) -> list[tuple[str, int, int]]:
    names = st.sampled_from([*ONE, *TWO])
    depth = draw(st.integers(1, 6))
    return [(draw(names), draw(st.integers(0, i)), draw(st.integers(0, i))) for i in range(depth)]


def run_program(program: list[tuple[str, int, int]], x: Tensor) -> Tensor:
    made = [x]
    for name, i, j in program:
        if x.is_complex():
            name = name if name in (*COMPLEX, "add", "mul", "lerp") else "add"
        made.append(ONE[name](made[i]) if name in ONE else TWO[name](made[i], made[j]))
    return made[-1].to(x.dtype)


DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64)


@settings(max_examples=60, deadline=None)
@given(
    programs(),
    st.sampled_from(DTYPES),
    st.integers(0, 10_000),
    st.sampled_from([(1, 1), (5, 5, 0), (64, 3), (1500,), (1024, 2, 7)]),
    st.sampled_from(["random", "hard", "ones", "zeros", "integers"]),
)
def test_a_function_of_elements_is_never_accused(
    program: Any, dtype: torch.dtype, seed: int, sizes: tuple[int, ...], kind: str
) -> None:
    g, pieces = torch.Generator().manual_seed(seed), Tensors()
    for number, size in enumerate(sizes):
        x = torch.randn(size, generator=g)
        if kind == "hard":
            x = torch.tensor(HARD)[torch.randint(len(HARD), (size,), generator=g)]
        if kind in ("ones", "zeros"):
            x = torch.full((size,), float(kind == "ones"))
        pieces[f"leaf.{number}"] = (x.mul(3).round() if kind == "integers" else x).to(dtype)
    assert tried(each(lambda x: run_program(program, x)), pieces) is None, program


# Others: each is right on one rank at stage 0, and another function of parts.


def first(x: Tensor, count: int = 1) -> Tensor:
    return (torch.arange(x.numel()) < count).to(x.dtype)


def rows(x: Tensor, size: int) -> Tensor:
    return F.pad(x, (0, -x.numel() % size)).view(-1, size)


LOOKS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: x - x.mean(),
    "a little of the mean": lambda x: x + 1e-4 * x.mean(),
    "median": lambda x: x - x.median(),
    "quantile": lambda x: x.clamp(max=x.quantile(0.9)),
    "norm": lambda x: x / (x.norm() + 1e-6),
    "clip by norm": lambda x: x * (1.0 / x.norm()).clamp(max=1.0),
    "clip by a large norm": lambda x: x * (1e3 / x.norm()).clamp(max=1.0),
    "clip by a small norm": lambda x: x if x.norm() > 0.1 else x * 2,
    "max": lambda x: x / x.abs().max(),
    "min": lambda x: x - x.min(),
    "top k": lambda x: x * (x.abs() >= x.abs().topk(min(3, x.numel()))[0][-1]),
    "the largest": lambda x: x * (x == x.max()),
    "std": lambda x: x / (x.std() + 1e-3),
    "var": lambda x: x * x.var(),
    "softmax": lambda x: x.softmax(0),
    "log_softmax": lambda x: x.log_softmax(0),
    "logsumexp": lambda x: x - x.logsumexp(0),
    "sort": lambda x: x.sort()[0],
    "argsort": lambda x: x.argsort().to(x.dtype),
    "rank": lambda x: x * x.argsort().argsort(),
    "flip": lambda x: x.flip(0),
    "roll": lambda x: x.roll(1),
    "cumsum": lambda x: x.cumsum(0),
    "cummax": lambda x: x.cummax(0)[0],
    "cumprod": lambda x: x.clamp(0.5, 1.5).cumprod(0),
    "diff": lambda x: torch.cat([x[:1], x.diff()]),
    "second difference": lambda x: x - 0.5 * (x.roll(1) + x.roll(-1)),
    "smoothed": lambda x: F.avg_pool1d(x[None], 3, 1, 1)[0],
    "local maximum": lambda x: x * (x >= F.max_pool1d(x[None], 3, 1, 1)[0]),
    "numel": lambda x: x / x.numel(),
    "sqrt numel": lambda x: x * x.numel() ** -0.5,
    "len": lambda x: x + 1 / len(x),
    "many elements": lambda x: 2 * x if x.numel() > 1200 else x,
    "few elements": lambda x: x - x.mean() if x.numel() < 50 else x,
    "even number": lambda x: x * (1 + x.numel() % 2),
    "arange": lambda x: x * torch.arange(x.numel()),
    "linspace": lambda x: x * torch.linspace(0.5, 1, x.numel()),
    "the first": lambda x: x * (1 - first(x)),
    "but the first": lambda x: x * first(x),
    "the first two": lambda x: x * first(x, 2),
    "the last": lambda x: x * (1 - first(x).flip(0)),
    "every second": lambda x: x * (torch.arange(x.numel()) % 2),
    "every hundredth": lambda x: x * (torch.arange(x.numel()) % 100 > 0),
    "pairs": lambda x: rows(x, 2).flip(1).reshape(-1)[: x.numel()],
    "pairs' norms": lambda x: (rows(x, 2) / (1 + rows(x, 2).norm(dim=1, keepdim=True))).reshape(-1)[
        : x.numel()
    ],
    "blocks of 64": lambda x: (rows(x, 64) - rows(x, 64).mean(1, keepdim=True)).reshape(-1)[
        : x.numel()
    ],
    "int8 in blocks": lambda x: (
        (rows(x, 256) / rows(x, 256).abs().amax(1, keepdim=True) * 127)
        .round()
        .reshape(-1)[: x.numel()]
    ),
    "fft": lambda x: torch.fft.fft(x).real,
    "dot": lambda x: x * (x @ x),
    "share of signs": lambda x: x * (x > 0).float().mean(),
    "any NaN": lambda x: torch.zeros_like(x) if x.isnan().any() else x,
    "all finite": lambda x: x * x.isfinite().all(),
    "any negative": lambda x: x.abs() if (x < 0).sum() > x.numel() // 3 else x,
    "any below zero": lambda x: x * (2.0 if (x < 0).any() else 1.0),
    "count of zeros": lambda x: x / (1 + (x == 0).sum()),
    "a small leaf": lambda x: x * (2.0 if x.numel() < 10 else 1.0),
    "unique": lambda x: x / len(x.unique()),
    "count of large": lambda x: x / (1 + (x.abs() > 1).sum()),
    "a host number": lambda x: x * float(x.abs().sum() > 5),
    "noise": lambda x: x + torch.randn_like(x),
    "dropout": lambda x: F.dropout(x, 0.5),
    "rounded by chance": lambda x: (x * 8 + torch.rand_like(x)).floor() / 8,
    "permuted": lambda x: x[torch.randperm(x.numel())],
    "histogram": lambda x: x * torch.histc(x, 4)[0],
    "whitened": lambda x: (x - x.mean()) / x.std().clamp(min=1e-3),
    "outliers": lambda x: torch.where((x - x.mean()).abs() > 2 * x.std(), 0.0, x),
    "mean of absolutes": lambda x: x.sign() * x.abs().mean(),
    "argmax": lambda x: F.one_hot(x.argmax(), x.numel()).to(x.dtype),
    "layer norm": lambda x: F.layer_norm(x, x.shape),
}
PIECES = {
    "a": torch.randn(1700, generator=torch.Generator().manual_seed(0)),
    "b": torch.randn(7, generator=torch.Generator().manual_seed(1)),
    "c": torch.zeros(0),
}


@pytest.mark.parametrize("name", LOOKS)
def test_a_function_that_looks_at_more_is_found(name: str) -> None:
    assert (found := tried(each(LOOKS[name]), PIECES)) is not None
    assert found.key[1] in PIECES


TWINS = {k: torch.randn(6, generator=torch.Generator().manual_seed(ord(k))) for k in "abcdefgh"}
ACROSS: dict[str, Callable[[Tensors], Tensors]] = {
    "swapped": lambda p: {**p, "a": p["b"], "b": p["a"]},
    "turned": lambda p: dict(zip(p, [*list(p.values())[1:], p["a"]], strict=True)),
    "minus another": lambda p: {k: x - 0.01 * p["h"] for k, x in p.items()},
    "mean of leaves": lambda p: {k: x - torch.stack([*p.values()]).mean(0) for k, x in p.items()},
    "how many have elements": lambda p: {
        k: x / sum(y.numel() > 0 for y in p.values()) for k, x in p.items()
    },
    "norm of all": lambda p: {k: x / torch.cat([*p.values()]).norm() for k, x in p.items()},
}


@pytest.mark.parametrize("name", ACROSS)
@pytest.mark.parametrize("size", [1, 2, 6])
def test_a_leaf_of_the_same_size_is_not_taken_for_another(name: str, size: int) -> None:
    assert tried(ACROSS[name], {k: x[:size] for k, x in TWINS.items()}) is not None


def test_a_closed_over_piece_is_found() -> None:
    mask, kept = (PIECES["a"] > 0).float(), Tensors()

    def cached(pieces: Tensors) -> Tensors:
        return {k: x + kept.setdefault(k, x.clone()) for k, x in pieces.items()}

    found = tried(lambda p: {"a": p["a"] * mask}, {"a": PIECES["a"]})
    assert found is not None and found.how == "raised" and found.key[1] == "a"
    assert tried(cached, PIECES) is not None


def test_the_generator_is_put_back_and_memory_is_small() -> None:
    state, sizes = torch.get_rng_state(), set[int]()

    def seen(pieces: Tensors) -> Tensors:
        sizes.update(x.numel() for x in pieces.values())
        return {k: 2 * x for k, x in pieces.items()}

    fn = {("g", "a"): sampled(torch.randn(100_000))}
    state = torch.get_rng_state()
    assert looks_beyond(lambda v: {("g", "a"): seen({"a": v["g", "a"]})["a"]}, fn) is None
    assert torch.equal(state, torch.get_rng_state()) and max(sizes) <= 1024
