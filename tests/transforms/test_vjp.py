"""`vjp`: a pull adds the bits that `grad_and_reduce` of sum(c * out) adds, whatever is between."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import fzero
from fzero.errors import (
    AxisError,
    DonatedError,
    LayoutError,
    MismatchError,
    PeerFailedError,
    PhaseError,
)
from tests.covering import covered
from tests.drivers import each_rank
from tests.live_bytes import LiveBytes
from tests.ranks import run_ranks
from tests.strategies import integers, stages, worlds


class Net(nn.Module):
    """Three layers of uneven sizes, a frozen one, and a parameter that most calls do not use."""

    def __init__(self, *, drops: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(5, 7), nn.Linear(7, 3), nn.Linear(3, 3)
        self.last.requires_grad_(requires_grad=False)
        self.extra = nn.Parameter(torch.ones(2))
        self.dropout = nn.Dropout(0.5 if drops else 0.0)

    def forward(self, x: Tensor, *, extra: bool = False) -> Tensor:
        hidden = self.dropout(torch.tanh(self.first(x)))
        out = self.last(self.second(hidden))
        return out * self.extra.sum() if extra else out


def net(seed: int = 0, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    torch.manual_seed(seed)
    return fzero.functionalize(Net(**options).to(dtype))


APPLY, PARAMS = net()
OTHER = net(1)[1]


def x_of(seed: int, rank: Any, rows: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(16 * seed + int(rank))
    return torch.randn(rows, 5, generator=generator)


def c_of(seed: int, rank: Any, rows: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(999 + 16 * seed + int(rank))
    return torch.randn(rows, 3, generator=generator)


def encode(params: Any, x: Tensor, extra: bool = False) -> Tensor:
    return APPLY(params, x, extra=extra)


def rule(**options: Any) -> Any:
    return fzero.optim.adamw(0.1, **options)


def same(a: Any, b: Any) -> None:
    assert a.keys() == b.keys()
    for path, value in a.items():
        assert torch.equal(value, b[path]), path


# The programs: forwards, pulls in any order, plain calls between, windows, updates.

Call = tuple[str, int, bool]  # what, which forward, whether it uses the extra parameter
PROGRAMS = st.lists(
    st.tuples(
        st.booleans(),  # in a window
        st.lists(st.booleans(), min_size=1, max_size=4),  # forwards: uses the extra parameter
        st.randoms(use_true_random=False),
        st.integers(0, 2),  # pulls that never come
        st.booleans(),  # a plain call in the middle
    ),
    min_size=1,
    max_size=3,
)


def run_program(
    program: Any,
    rank: Any,
    by_vjp: bool,
    *,
    fn: Callable[..., Tensor] = encode,
    wrap: Callable[[Any], Any] = lambda fn: fn,
    weighted: bool = False,
    optimizer: Any = None,
    params: Any = PARAMS,
    **options: Any,
) -> Any:
    """Return the parameters after a program, by pulls or by the gradient calls they stand for."""

    def body(state: Any, calls: Any) -> Any:
        forwards, order, plain = calls
        pulls = {}
        if by_vjp:
            for number, extra in enumerate(forwards):
                out, pulls[number] = fzero.vjp(fn, state)(x_of(number, rank), extra=extra)
                assert not out.requires_grad
        for place, number in enumerate(order):
            x, c = x_of(number, rank), c_of(number, rank)
            weight = 1.0 + number + int(rank) if weighted else None
            if plain and place == 1:
                loss = lambda p: encode(p, x_of(9, rank)).square().sum()  # noqa: E731
                state, _ = fzero.grad_and_reduce(loss, state, weight=weight)()
            if by_vjp:
                state = pulls[number](state, c, weight)
            else:
                loss = lambda p: (c * fn(p, x, extra=forwards[number])).sum()  # noqa: B023, E731
                state, _ = fzero.grad_and_reduce(loss, state, weight=weight)()
        return state, None

    step = fzero.shard(wrap(body), **options)
    window = fzero.shard(fzero.coalesce(wrap(body)), **options)
    state = step.init(params, optimizer or rule())
    for in_window, forwards, random, missing, plain in program:
        order = [*range(len(forwards))]
        random.seed(len(forwards))
        random.shuffle(order)
        order = order[: max(1, len(order) - missing)]
        state, _ = (window if in_window else step)(state, (forwards, order, plain))
        state = fzero.apply_gradients(state)
    return fzero.full_params(state)


@given(program=PROGRAMS, ranks=worlds, stage=stages, weighted=st.booleans(), donate=st.booleans())
def test_random_programs_have_the_bits_of_gradient_calls(
    program: Any, ranks: int, stage: int, weighted: bool, donate: bool
) -> None:
    options = {"stage": stage, "weighted": weighted, "donate": donate, "bucket_bytes": 100}
    found, wanted = (
        each_rank(lambda rank: run_program(program, rank, by, **options), ranks)
        for by in (True, False)
    )
    same(found, wanted)


ONE = [(True, [False, True, False], __import__("random").Random(0), 0, True)] * 2
APART = [(False, [False, True, False], __import__("random").Random(0), 0, True)] * 2


def rematerialised(params: Any, x: Tensor, extra: bool = False) -> Tensor:
    return fzero.remat(lambda p, x: encode(p, x, extra))(params, x)


def checkpointed(params: Any, x: Tensor, extra: bool = False) -> Tensor:
    from torch.utils.checkpoint import checkpoint

    made: Any = checkpoint(lambda x: encode(params, x, extra), x, use_reentrant=False)
    return made


def evaluating(params: Any, x: Tensor, extra: bool = False) -> Tensor:
    teacher = fzero.init(OTHER, fzero.optim.no_optimizer(), stage=3)
    return encode(params, x, extra) - fzero.evaluate(encode, teacher)(x)


def communicating(params: Any, x: Tensor, extra: bool = False) -> Tensor:
    out = encode(params, x, extra)
    return out + fzero.pmean(out.square())


def named(params: Any, x: Tensor, extra: bool = False) -> Tensor:
    hidden = encode(params, x, extra)
    return hidden * fzero.psum(hidden.sum(), "data")


FEATURES: dict[str, dict[str, Any]] = {
    "remat": {"fn": rematerialised},
    "checkpoint": {"fn": checkpointed},
    "evaluate": {"fn": evaluating},
    "a collective": {"fn": communicating},
    "autocast": {"wrap": lambda fn: fzero.autocast(fn, dtype=torch.bfloat16)},
    "loss scale": {"wrap": lambda fn: fzero.scale_loss(fn, scale=2.0**7)},
    "check": {"wrap": fzero.check_finite},
    "clip": {"wrap": lambda fn: fzero.clip(fn, max_norm=0.1)},
    "codec": {"wrap": lambda fn: fzero.compress(fn, gradients=fzero.codecs.int8())},
    "kept in a window": {"reshard_after_forward": "window"},
    "persistent": {"persistence_threshold_numel": 8},
    "no prefetch": {"prefetch_numel": 0},
    "sums in order": {"ordered": True},
    "offload": {"wrap": lambda fn: fzero.offload(fn, optimizer="cpu", gradients="cpu")},
}


@covered(feature=[*FEATURES], stage=range(4), world=[1, 2, 3])
def test_beside_a_feature_it_has_the_bits_of_gradient_calls(
    feature: str, stage: int, world: int
) -> None:
    options = {"stage": stage, "bucket_bytes": 100, **FEATURES[feature]}
    for program in (ONE, APART):
        found, wanted = (
            each_rank(lambda rank: run_program(program, rank, by, **options), world)
            for by in (True, False)
        )
        same(found, wanted)
