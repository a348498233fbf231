"""Behaviour 6 over several steps: each rank reads units in its own order, other ones each time.

What a step records is replayed by the next one; a rank that does something else must be right too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fzero
from tests.behaviours.networks import KEEPS, virtual

UNITS, STEPS, LR = 5, 3, 2.0**-8
FROZEN = UNITS - 1


class Read(NamedTuple):
    """One use of a layer: differentiated by or only looked at."""

    layer: int
    learns: bool


Walk = list[list[Read]]  # parts; between them all ranks have a collective of their own
reads = st.builds(
    Read, layer=st.integers(0, UNITS - 1), learns=st.sampled_from([True, True, False])
)


@st.composite
def passes_of(draw: st.DrawFn, ranks: int) -> list[Walk]:
    """The walk of each rank; often of all ranks the same, or the same units."""
    found: list[Walk] = [[] for _ in range(ranks)]
    for _ in range(draw(st.sampled_from([1, 1, 2, 3]))):
        first = draw(st.lists(reads, max_size=5))
        found[0].append(first)
        others = st.one_of(st.just(first), st.permutations(first), st.lists(reads, max_size=5))
        for walk in found[1:]:
            walk.append(draw(others))
    return found


@st.composite
def journeys(draw: st.DrawFn, ranks: int) -> list[list[list[Walk]]]:
    """[step][pass][rank] -> the walk; steps often do what the one before did."""
    found: list[list[list[Walk]]] = []
    for _ in range(STEPS):
        if found and draw(st.booleans()):
            found.append(found[-1])
            continue
        found.append(draw(st.lists(passes_of(ranks), min_size=1, max_size=2)))
    return found


def layers() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    made = {}
    for i in range(UNITS):
        w, b = (torch.randint(-3, 4, (n,), generator=generator).double() for n in (i + 1, 2))
        made[f"layers.{i}.w"], made[f"layers.{i}.b"] = w, b
    return made


def loss(params: Any, x: Tensor, walk: Walk) -> Tensor:
    total = x.new_zeros(())
    for number, part in enumerate(walk):
        if number:
            fzero.psum(x)
        for step, (i, learns) in enumerate(part):
            w, b = params[f"layers.{i}.w"], params[f"layers.{i}.b"]
            if not learns:
                w, b = w.detach(), b.detach()
            total = total + (step + 1) * x * ((w * w).sum() + b.sum() + total.detach() % 7)
    return 12 * total


def trains(path: str) -> bool:
    return not path.startswith(f"layers.{FROZEN}.")


def unsharded(journey: list[list[list[Walk]]], xs: Tensor) -> list[dict[str, Tensor]]:
    """The parameters after each step, by plain autograd."""
    params, found = layers(), []
    for passes in journey:
        own = {path: p.clone().requires_grad_(trains(path)) for path, p in params.items()}
        for walk_of in passes:
            for x, walk in zip(xs, walk_of, strict=True):
                value = loss(own, x, walk) / len(xs)
                if value.requires_grad:
                    value.backward()
        params = {
            path: (p - LR * p.grad if p.grad is not None else p).detach() for path, p in own.items()
        }
        found.append(params)
    return found


@pytest.mark.filterwarnings("ignore:the loss requires no grad:UserWarning")
@given(
    ranks=st.integers(2, 3), reshard=st.sampled_from(KEEPS), window=st.booleans(), data=st.data()
)
def test_steps_of_ranks_that_read_as_they_like_are_those_of_the_unsharded_step(
    ranks: int, reshard: Any, window: bool, data: st.DataObject
) -> None:
    journey = data.draw(journeys(ranks))
    xs = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)[:ranks]

    def step(state: Any, x: Tensor, passes: list[list[Walk]]) -> tuple[Any, None]:
        for walk_of in passes:
            state, _ = fzero.grad_and_reduce(loss, state)(x, walk_of[fzero.axis_index()])
        return fzero.apply_gradients(state), None

    def run(x: Tensor) -> Any:
        state = fzero.init(
            layers(),
            fzero.optim.sgd(LR),
            stage=3,
            reshard_after_forward=reshard,
            units=lambda path: path.rpartition(".")[0],
            trainable=trains,
        )
        found = []
        for passes in journey:
            state, _ = (fzero.coalesce(step) if window else step)(state, x, passes)
            found.append(fzero.full_params(state))
        return found

    for got, want in zip(virtual(run, ranks, xs), unsharded(journey, xs), strict=True):
        for path, p in want.items():
            torch.testing.assert_close(got[path], p.expand(ranks, -1), rtol=1e-12, atol=1e-12)
