"""Several models under one loss with collectives over sub-axes, and other orders on each rank."""

from __future__ import annotations

from random import Random
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import fzero
from fzero.adapter import Engine
from fzero.errors import PeerFailedError
from tests.ranks import run_ranks

pytestmark = pytest.mark.xdist_group("gloo")

AXES = {"data": 2, "seq": 2}
RANKS, MODELS, LEAVES, STEPS = 4, 2, 8, 3
RATE = 2.0**-10
PARAMS = {f"p{i}": torch.full((3,), float(i + 1)) for i in range(LEAVES)}
"""A bucket each, and at stage 3 a unit."""


class Part(NamedTuple):
    """A sum of squares of some leaves of a model; of all ranks of an axis if there is one.

    late: its sum over ranks is in the backward only.
    """

    model: int
    leaves: tuple[str, ...]
    axis: str = ""
    late: bool = False


class Late(torch.autograd.Function):
    """The identity, whose backward sums over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Any) -> Tensor:
        ctx.axis = axis
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return fzero.psum(gradient, axis=ctx.axis), None


def value(params: Any, x: float, part: Part) -> Tensor:
    found = torch.stack([(params[name] ** 2).sum() for name in part.leaves]).sum() * x
    if not part.axis:
        return found
    whole = fzero.Mesh(AXES).axis
    axis = whole if part.axis == "all" else whole.along(part.axis)
    return Late.apply(found, axis) if part.late else fzero.psum(found, axis=axis)


def program(seed: int) -> list[list[list[Part]]]:
    """The parts of the loss in each step, on each rank: sums over ranks come in one order."""
    random = Random(seed)

    def some() -> tuple[str, ...]:
        return tuple(random.sample(sorted(PARAMS), random.randint(1, 3)))

    steps = []
    for _ in range(STEPS):
        kinds = [
            (random.randrange(MODELS), random.choice(["all", *AXES]), random.randrange(3) == 0)
            for _ in range(random.randint(1, 4))
        ]
        ranks = []
        for _ in range(RANKS):
            parts = [Part(model, some(), axis, late) for model, axis, late in kinds]
            for _ in range(random.randint(0, 4)):
                parts.insert(random.randint(0, len(parts)), Part(random.randrange(MODELS), some()))
            ranks.append(parts)
        steps.append(ranks)
    return steps


def by_hand(seed: int) -> list[dict[str, Tensor]]:
    """The parameters after the steps, in one process: the mean over ranks of their losses."""
    models = [dict(PARAMS) for _ in range(MODELS)]
    sizes = {"": 1, "all": RANKS, **AXES}
    for ranks in program(seed):
        factors = [dict.fromkeys(PARAMS, 0.0) for _ in models]
        for x, parts in enumerate(ranks, start=1):
            for part in parts:
                for name in part.leaves:
                    factors[part.model][name] += 2 * sizes[part.axis] * x / RANKS
        models = [
            {name: p - RATE * factor[name] * p for name, p in model.items()}
            for model, factor in zip(models, factors, strict=True)
        ]
    return models


class Many(nn.Module):
    """`PARAMS` as a module."""

    def __init__(self) -> None:
        super().__init__()
        for name, p in PARAMS.items():
            setattr(self, name, nn.Parameter(p.clone()))

    def forward(self, x: float, part: Part) -> Tensor:
        return value(dict(self.named_parameters()), x, part)


def by_engines(rank: int, _: int, stages: tuple[int, ...], seeds: range) -> list[Any]:
    """Between the parts some ranks evaluate a model."""
    found = []
    for seed in seeds:
        looks = Random(f"{seed} {rank}")
        models = [Many() for _ in stages]
        engines = [
            Engine(model, fzero.optim.sgd(RATE), stage=stage, mesh=AXES, bucket_bytes=12)
            for model, stage in zip(models, stages, strict=True)
        ]
        for ranks in program(seed):
            loss = torch.zeros(())
            for part in ranks[rank]:
                if looks.randrange(4) == 0:
                    with torch.no_grad():
                        models[looks.randrange(MODELS)](1.0, Part(0, ("p1", "p6")))
                loss = loss + models[part.model](rank + 1.0, part)
            loss.backward()
            for engine in engines:
                engine.step()
        found.append([fzero.full_params(engine.state) for engine in engines])
        for engine in engines:
            engine.close()
    return found


def by_states(rank: int, _: int, stages: tuple[int, ...], seeds: range) -> list[Any]:
    """In each step one rank raises first, between two collectives: all of them do."""
    found = []
    for seed in seeds:
        chance, mesh = Random(seed), fzero.Mesh(AXES)
        rule, options = fzero.optim.sgd(RATE), {"mesh": mesh, "bucket_bytes": 12}
        states: Any = [fzero.init(PARAMS, rule, stage=stage, **options) for stage in stages]
        for ranks in program(seed):
            raises = chance.randrange(RANKS) == rank

            def loss(params: Any, parts: list[Part], *, raises: bool) -> Tensor:
                total = torch.zeros(())
                for number, part in enumerate(parts):
                    if raises and number == len(parts) // 2:
                        raise ValueError("in the middle")
                    total = total + value(params[part.model], rank + 1.0, part)
                return total

            grad = fzero.grad_and_reduce(loss, states)
            with pytest.raises(ValueError if raises else PeerFailedError):
                grad(ranks[rank], raises=raises)
            states = grad(ranks[rank], raises=False)[0]
            states = [fzero.apply_gradients(state) for state in states]
        found.append([fzero.full_params(state) for state in states])
    return found


@pytest.mark.parametrize("stages", [(1, 2), (2, 3), (3, 3)])
@pytest.mark.parametrize("driver", [by_engines, by_states])
def test_no_rank_waits_for_ever_and_the_sums_are_those_of_one_process(
    driver: Any, stages: tuple[int, ...]
) -> None:
    seeds = range(2)
    want = [by_hand(seed) for seed in seeds]
    for got in run_ranks(driver, RANKS, stages, seeds, timeout_s=60):
        torch.testing.assert_close(got, want)


def one_evaluates(rank: int, _: int) -> Any:
    """Rank 1 evaluates the first engine in a pass of the second; rank 0 is in its backward then."""
    models = [Many(), Many()]
    engines = [Engine(model, fzero.optim.sgd(RATE), stage=3) for model in models]
    loss = models[rank](1.0, Part(rank, ("p0",)))
    if rank == 1:
        with torch.no_grad():
            models[0](1.0, Part(0, tuple(PARAMS)))
    loss.backward()
    for engine in engines:
        engine.step()
    return [fzero.full_params(engine.state) for engine in engines]


def test_what_others_bring_is_in_the_update_of_a_rank_that_evaluates_the_engine() -> None:
    """On that rank its part of the sums was lost."""
    want = PARAMS | {"p0": PARAMS["p0"] * (1 - RATE)}
    for got in run_ranks(one_evaluates, 2, timeout_s=30):
        torch.testing.assert_close(got, [want, want])
