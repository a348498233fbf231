"""Updates by given gradients at any stage, on any number of virtual ranks, with blocks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from math import lcm
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

import fzero
from fzero.ranks.virtual import run_ranks
from fzero.state import OptimizerOver
from fzero.state.layout import BLOCK

SHAPES = {"w": (37, 45), "b": (45,), "e": (130, 64), "s": (), "conv": (6, 5, 3, 3), "v": (200,)}


class Place(NamedTuple):
    """Where an update is made."""

    ranks: int = 1
    stage: int = 0
    bucket_bytes: int | None = None
    over: OptimizerOver = "shard"
    mesh: tuple[int, int] | None = None


PLACES = (
    Place(),
    Place(1, 3),
    Place(2, 0),
    Place(2, 1, 3000),
    Place(3, 2),
    Place(3, 3),
    Place(4, 2, 500),
    Place(4, 3, mesh=(2, 2)),
    Place(4, 2, over="all", mesh=(2, 2)),
)


@contextmanager
def blocks() -> Generator[None]:
    """Leaves and shards of whole blocks, as logical ranks have them."""
    with mock.patch.object(
        sys.modules["fzero.transforms.init"], "lcm", lambda *sizes: lcm(BLOCK, *sizes)
    ):
        yield


def spread(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> Tensor:
    """Numbers of many sizes."""
    if dtype.is_complex:
        return torch.view_as_complex(spread((*shape, 2), seed, dtype.to_real()))
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randn(shape, generator=generator).exp()
    return (torch.randn(shape, generator=generator) * sizes).to(dtype)


def params(dtype: torch.dtype, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> dict[str, Tensor]:
    """The parameters before the first update."""
    return {name: spread(x, k, dtype) for k, (name, x) in enumerate(shapes.items())}


def gradients(dtype: torch.dtype, step: int, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The gradients of an update."""
    return {
        name: spread(tuple(x.shape), 100 * (step + 1) + k, dtype)
        for k, (name, x) in enumerate(like.items())
    }


def one_update(state: Any, grads: Mapping[str, Tensor]) -> tuple[Any, Tensor]:
    """Return the state after an update by the gradients, which rank 0 has, and their norm."""

    def loss(p: Any) -> Tensor:
        own = grads if fzero.axis_index() == 0 else {k: 0 * g for k, g in grads.items()}
        terms = [(p[k] * g.conj()).sum() for k, g in own.items()]
        return torch.stack([(x.real if x.is_complex() else x).float() for x in terms]).sum()

    state, _ = fzero.grad_and_reduce(loss, state)()
    return fzero.apply_gradients(state), fzero.global_norm(state)


def everywhere(
    place: Place,
    optimizer: Callable[[], Any],
    *,
    dtype: torch.dtype = torch.float32,
    updates: Sequence[int] = range(3),
    step: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda fn: fn,
    each: Callable[[Any], Any] = lambda state: None,
    shapes: Mapping[str, tuple[int, ...]] = SHAPES,
    **options: Any,
) -> dict[str, Any]:
    """Return what every rank has after some updates: parameters, slots, counters, what `each` gave.

    Every rank but the first has gradients of zero, and they are added up: so the sum has the bits
    of the given ones on any number of ranks. Raises AssertionError where ranks differ.

    updates: their numbers, which say what the gradients are.
    """
    start = params(dtype, shapes)

    def body(rank: int) -> dict[str, Any]:
        given: Any = {k: torch.nn.Parameter(x.clone()) for k, x in start.items()}
        state = fzero.init(
            given,
            optimizer(),
            stage=place.stage,
            mesh=place.mesh,
            bucket_bytes=place.bucket_bytes,
            optimizer_over=place.over,
            reduce_op="sum",
            **options,
        )
        found, norms = list[Any](), list[Tensor]()
        for number in updates:
            state, norm = step(one_update)(state, gradients(dtype, number, start))
            norms.append(norm)
            found.append(each(state))
        slots = fzero.slots(state, "optimizer")
        return {
            "params": fzero.full_params(state),
            "slots": slots,
            "norms": norms,
            "found": found,
        }

    with blocks():
        first, *others = run_ranks(body, place.ranks)
    for other in others:
        same_bits(other, first)
    return first


def same_bits(actual: Any, expected: Any, at: str = "") -> None:
    """Assert that two trees have the same bits."""
    if isinstance(expected, Mapping):
        assert sorted(actual) == sorted(expected), at
        for key, value in expected.items():
            same_bits(actual[key], value, f"{at}.{key}")
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected), at
        for k, value in enumerate(expected):
            same_bits(actual[k], value, f"{at}.{k}")
    elif isinstance(expected, Tensor):
        assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype), at
        x, y = (t.detach().contiguous().view(-1).view(torch.uint8) for t in (actual, expected))
        differs = int((x != y).sum()) if x.numel() else 0
        assert not differs, f"{at}: {differs} bytes differ"
    else:
        assert actual == expected, at
