"""Each rank reads units in its own order, as often as it likes, other ones each time.

At stage 3 what a step records is replayed by the next one; a rank that does something else must be
right too. What a loss differentiates by itself is its own, and counted nowhere.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fzero
from tests.behaviours.networks import PLACES, virtual

UNITS, STEPS, LR = 5, 3, 2.0**-8
FROZEN = UNITS - 1


How = Literal["learns", "detached", "inner grad", "inner backward"]


class Read(NamedTuple):
    """One use of a layer: for the gradient, only to look at, or differentiated inside the loss."""

    layer: int
    how: How


Walk = list[list[Read]]  # parts; between them all ranks have a collective of their own
hows: list[How] = ["learns", "learns", "detached", "inner grad", "inner backward"]
reads = st.builds(Read, layer=st.integers(0, UNITS - 1), how=st.sampled_from(hows))
places = st.sampled_from([*PLACES, *[place for place in PLACES if place[0] == 3]])


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
        for step, (i, how) in enumerate(part):
            w, b = params[f"layers.{i}.w"], params[f"layers.{i}.b"]
            if how == "detached":
                w, b = w.detach(), b.detach()
            here = x.detach().requires_grad_()
            inner = (w * w).sum() * here**2
            if how == "inner grad":
                total = total + torch.autograd.grad(inner, here, create_graph=True)[0]
            if how == "inner backward":
                inner.backward()
            total = total + (step + 1) * x * ((w * w).sum() + b.sum() + total.detach() % 7)
    return 12 * total


def trains(path: str) -> bool:
    return not path.startswith(f"layers.{FROZEN}.")


def unsharded(journey: list[list[list[Walk]]], xs: Tensor) -> list[dict[str, Tensor]]:
    """The parameters after each step, by plain autograd."""
    params, found = layers(), []
    for passes in journey:
        summed = {path: torch.zeros_like(p) for path, p in params.items()}
        for walk_of in passes:
            for x, walk in zip(xs, walk_of, strict=True):
                own = {path: p.clone().requires_grad_(trains(path)) for path, p in params.items()}
                learning = {path: p for path, p in own.items() if p.requires_grad}
                value = loss(own, x, walk) / len(xs)
                if value.requires_grad:
                    by = torch.autograd.grad(value, [*learning.values()], allow_unused=True)
                    for path, g in zip(learning, by, strict=True):
                        summed[path] += 0 if g is None else g
        params = {path: p - LR * summed[path] for path, p in params.items()}
        found.append(params)
    return found


@pytest.mark.filterwarnings("ignore:the loss requires no grad:UserWarning")
@given(ranks=st.integers(2, 3), place=places, window=st.booleans(), data=st.data())
def test_steps_of_ranks_that_read_as_they_like_are_those_of_the_unsharded_step(
    ranks: int, place: tuple[int, Any], window: bool, data: st.DataObject
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
            stage=place[0],
            reshard_after_forward=place[1],
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
