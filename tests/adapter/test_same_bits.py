"""Laws 8 and 11: the engine and the functional step give the same bits, whatever they are asked
to do, and those of real ranks are those of virtual ones."""

from __future__ import annotations

import functools
import math
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import optree
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fzero
from fzero.adapter import Engine
from fzero.state import NAMESPACE, OptimizerOver, Reshard, TrainState
from tests.ranks import run_ranks
from tests.strategies import keeps, seeds, stages, worlds

UPDATES = 3
IDS = 7


RULES: dict[str, Callable[..., Any]] = {
    "sgd": functools.partial(fzero.optim.sgd, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adamw": functools.partial(fzero.optim.adamw, lr=0.01, weight_decay=0.1),
    "lion": functools.partial(fzero.optim.lion, lr=0.01, weight_decay=0.1),
}
CLASSES: dict[str, Callable[..., Any]] = {
    "torch sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
    "torch adamw": functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
}


class Part(NamedTuple):
    """Some backwards, each reduced at once, or all of them together."""

    window: bool
    backwards: int


class Plan(NamedTuple):
    """The backwards of one update."""

    parts: tuple[Part, ...]
    micro_batches: int = 1  # the update is by the mean over so many times all parts
    one_window: bool = False  # around everything, the update too

    @property
    def rows(self) -> int:
        """How many there are; each has one row of the batch."""
        return self.micro_batches * sum(part.backwards for part in self.parts)

    @property
    def adds_in_one_order(self) -> bool:
        """Whether both drivers add the same numbers in the same order.

        An engine has a window for each micro-batch, a functional step one around them all: each
        of those windows must have one backward.
        """
        return not self.one_window or self.micro_batches in (1, self.rows)


class Options(NamedTuple):
    """What may change bits, and must change those of both drivers."""

    max_norm: float | None = None
    bucket_bytes: int = 100
    ordered: bool = False
    reshard: Reshard = True
    replicas: int = 1  # of a mesh of two dims, where they divide the ranks
    over: OptimizerOver = "shard"

    def mesh(self) -> tuple[int, int]:
        ranks = fzero.axis_size()
        replicas = math.gcd(self.replicas, ranks)
        return replicas, ranks // replicas


class Numbers(NamedTuple):
    """How 16-bit parameters and optimizer states are held."""

    masters: bool = True
    state_dtype: torch.dtype | None = None
    rounding: bool = False  # by chance

    @property
    def options(self) -> dict[str, Any]:
        return {
            "master_weights": self.masters,
            "state_dtype": self.state_dtype,
            "stochastic_rounding": self.rounding,
        }


class Run(NamedTuple):
    """What both drivers are told to do."""

    stage: int
    optimizer: str  # of RULES or CLASSES
    dtype: str
    plan: Plan
    options: Options = Options()
    numbers: Numbers = Numbers()
    away: str = ""  # what of the state is on disk: o(ptimizer), g(radients), p(arams)
    seed: int = 0

    @property
    def offload(self) -> fzero.Offload:
        kinds = {"o": "optimizer", "g": "gradients", "p": "params"}
        homes: dict[str, Any] = {kinds[letter]: "disk" for letter in self.away}
        return fzero.Offload(**homes, folder=tempfile.gettempdir())


parts = st.lists(st.builds(Part, st.booleans(), st.integers(1, 2)), min_size=1, max_size=3)
plans = st.builds(Plan, parts.map(tuple), st.integers(1, 3), st.booleans())
runs = st.builds(
    Run,
    stage=stages,
    optimizer=st.sampled_from([*RULES, *CLASSES]),
    dtype=st.sampled_from(["fp32", "bf16", "mixed"]),
    plan=plans.filter(lambda plan: plan.adds_in_one_order),
    options=st.builds(
        Options,
        max_norm=st.sampled_from([None, 0.05, 100.0]),
        bucket_bytes=st.sampled_from([16, 100, 2**20]),
        ordered=st.booleans(),
        reshard=keeps,
        replicas=st.integers(1, 4),
        over=st.sampled_from(["shard", "all"]),
    ),
    numbers=st.sampled_from(
        [
            Numbers(),
            Numbers(masters=False),
            Numbers(state_dtype=torch.bfloat16),
            Numbers(masters=False, state_dtype=torch.float32),
        ]
    ),
    away=st.sampled_from(["", "", "o", "g", "og"]),
    seed=seeds,
)


class Tied(nn.Module):
    """Names out of order, sizes that do not divide; a weight that is used twice, one that is
    frozen, one that even ranks alone use, one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inner = nn.Embedding(IDS, 5), nn.Linear(5, 5)
        self.blocks = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 5, bias=False))
        self.even, self.unused = nn.Linear(5, 5), nn.Linear(3, 1)
        self.inner.bias.requires_grad_(False)

    def forward(self, ids: Tensor, rank: int) -> Tensor:
        h = self.blocks(torch.tanh(self._inner(self.embed(ids))))
        if rank % 2 == 0:
            h = h + self.even(h)
        return torch.tanh(self._inner(h)) @ self.embed.weight.t()

    def _inner(self, h: Tensor) -> Tensor:
        return self.inner(h.to(self.inner.weight.dtype)).to(h.dtype)


def make(run: Run) -> nn.Module:
    torch.manual_seed(run.seed)
    module = Tied()
    module = module if run.dtype == "fp32" else module.bfloat16()
    if run.dtype == "mixed":
        module.inner.float()
    return module


def batch_of(run: Run, rank: int, update: int) -> Tensor:
    """[rows, 4] ids of this rank."""
    source = torch.Generator().manual_seed(1000 * run.seed + 10 * update + rank)
    return torch.randint(0, IDS, (run.plan.rows, 4), generator=source)


def loss_of(out: Tensor, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(out.float().flatten(0, -2), ids.flatten())


class ByEngine:
    """The run with `loss.backward()` and `engine.step()`."""

    def __init__(self, run: Run, rank: int) -> None:
        self.run, self.rank = run, rank
        self.engine = Engine(
            make(run),
            CLASSES[run.optimizer]
            if run.optimizer in CLASSES
            else RULES[run.optimizer](**run.numbers.options),
            stage=run.stage,
            bucket_bytes=run.options.bucket_bytes,
            ordered=run.options.ordered,
            **run.numbers.options,
            offload=run.offload,
            max_norm=run.options.max_norm,
            gradient_accumulation_steps=run.plan.micro_batches,
            average_micro_batches=run.plan.micro_batches > 1,
            reshard_after_forward=run.options.reshard,
            mesh=run.options.mesh(),
            optimizer_over=run.options.over,
        )

    def update(self, batch: Tensor) -> None:
        rows = iter(batch.split(1))
        for number in range(self.run.plan.micro_batches):
            self.backwards(rows)
            assert self.engine.step() is (number == self.run.plan.micro_batches - 1)

    def backwards(self, rows: Iterator[Tensor]) -> None:
        with self.engine.no_sync() if self.run.plan.one_window else nullcontext():
            for part in self.run.plan.parts:
                inside = part.window and not self.run.plan.one_window
                with self.engine.coalesce() if inside else nullcontext():
                    for _ in range(part.backwards):
                        ids = next(rows)
                        loss_of(self.engine(ids, self.rank), ids).backward()


class BySteps:
    """The run with `grad_and_reduce` and `apply_gradients`."""

    def __init__(self, run: Run, rank: int) -> None:
        self.run, self.rank = run, rank
        self.apply, params = fzero.functionalize(make(run))
        if run.optimizer in CLASSES:
            chosen = CLASSES[run.optimizer]
            optimizer = fzero.optim.from_torch(chosen, **run.numbers.options)
        else:
            optimizer = RULES[run.optimizer](**run.numbers.options)

        def micro_batch(state: TrainState, batch: Tensor) -> Any:
            state = self.backwards(state, batch)
            return fzero.apply_gradients(state), None

        step: Any = micro_batch
        if run.plan.micro_batches > 1:
            step = fzero.accumulate(step, steps=run.plan.micro_batches)
        if run.plan.one_window:
            step = fzero.coalesce(step)
        self.step = fzero.shard(
            fzero.offload(
                fzero.clip(step, max_norm=run.options.max_norm),
                **run.offload.homes,
                folder=run.offload.folder,
            ),
            stage=run.stage,
            bucket_bytes=run.options.bucket_bytes,
            ordered=run.options.ordered,
            reshard_after_forward=run.options.reshard,
            mesh=run.options.mesh(),
            optimizer_over=run.options.over,
            donate=True,
        )
        self.state: TrainState = self.step.init(params, optimizer)

    def update(self, batch: Tensor) -> None:
        self.state, _ = self.step(self.state, batch)

    def backwards(self, state: TrainState, batch: Tensor) -> TrainState:
        rows = iter(batch.split(1))

        def loss(params: Any, ids: Tensor) -> Tensor:
            return loss_of(self.apply(params, ids, self.rank), ids)

        for part in self.run.plan.parts:

            def several(state: TrainState, part: Part = part) -> Any:
                for _ in range(part.backwards):
                    state, _ = fzero.grad_and_reduce(loss, state)(next(rows))
                return state, None

            inside = part.window and not self.run.plan.one_window
            state, _ = (fzero.coalesce(several) if inside else several)(state)
        return state


def same(found: TrainState, wanted: TrainState) -> None:
    """Assert that two states hold the same, and in the same places."""
    assert found.setup.layout.groups == wanted.setup.layout.groups
    assert (found.phase, found.progress.backwards) == (wanted.phase, wanted.progress.backwards)
    for what in ("params", "optimizer", "gradients", "window", "step"):
        mine, theirs = (
            optree.tree_flatten_with_path(getattr(state, what), namespace=NAMESPACE)
            for state in (found, wanted)
        )
        assert mine[0] == theirs[0], what
        for path, x, y in zip(mine[0], mine[1], theirs[1], strict=True):
            assert x.dtype == y.dtype and torch.equal(x, y), (what, *path)


def check(rank: int, run: Run) -> Tensor:
    """Some updates, and the gradients of one more, by both drivers; return the parameters."""
    engine, steps = ByEngine(run, rank), BySteps(run, rank)
    begin = engine.engine.full_parameters()
    same(engine.engine.state, steps.state)
    for number in range(UPDATES):
        batch = batch_of(run, rank, number)
        engine.update(batch)
        steps.update(batch)
        same(engine.engine.state, steps.state)
    found = engine.engine.full_parameters()
    assert not all(torch.equal(found[path], value) for path, value in begin.items())
    if run.plan.micro_batches == 1 and not run.plan.one_window:
        batch = batch_of(run, rank, UPDATES)
        engine.backwards(iter(batch.split(1)))
        same(engine.engine.state, steps.backwards(steps.state, batch))
    engine.engine.close()
    return torch.cat([value.flatten().double() for value in found.values()])


def on_virtual_ranks(run: Run, world_size: int) -> Tensor:
    def each(x: Tensor) -> Tensor:
        return check(fzero.axis_index(), run)

    return fzero.simulate(each, world_size=world_size)(torch.zeros(world_size, 1))


@settings(max_examples=40)
@given(runs, worlds)
def test_on_virtual_ranks_both_drivers_hold_the_same_bits(run: Run, world_size: int) -> None:
    on_virtual_ranks(run, world_size)


ALONE, TOGETHER = Part(window=False, backwards=1), Part(window=True, backwards=2)
LOW = Options(max_norm=0.05, ordered=True)
CHOSEN = (
    Run(0, "torch adamw", "fp32", Plan((ALONE, TOGETHER)), LOW),
    Run(1, "adamw", "bf16", Plan((TOGETHER, ALONE), micro_batches=2)),
    Run(1, "torch sgd", "mixed", Plan((ALONE,), one_window=True), LOW),
    Run(2, "torch sgd", "mixed", Plan((ALONE,), micro_batches=3, one_window=True)),
    Run(2, "lion", "bf16", Plan((TOGETHER,)), LOW, Numbers(masters=False)),
    Run(2, "torch adamw", "bf16", Plan((ALONE, TOGETHER)), Options(ordered=True)),
    Run(3, "sgd", "bf16", Plan((TOGETHER, ALONE)), Options(reshard=False, ordered=True)),
    Run(3, "torch adamw", "mixed", Plan((ALONE,), micro_batches=2), LOW),
    Run(3, "lion", "fp32", Plan((TOGETHER,), one_window=True), Options(reshard="window")),
    Run(1, "adamw", "mixed", Plan((ALONE, TOGETHER)), Options(0.05, 16, True, replicas=2)),
    Run(3, "torch adamw", "bf16", Plan((ALONE, ALONE)), LOW._replace(replicas=2, over="all")),
)


@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("run", CHOSEN)
def test_on_gloo_ranks_both_drivers_hold_the_bits_of_virtual_ranks(
    run: Run, world_size: int
) -> None:
    found = on_virtual_ranks(run, world_size)
    for rank, real in enumerate(run_ranks(on_gloo, world_size, run)):
        assert torch.equal(found[rank], found[0])
        if run.options.ordered or world_size < 3:  # else the backend chooses the order of sums
            assert torch.equal(found[rank], real)


def on_gloo(rank: int, world_size: int, run: Run) -> Tensor:
    return check(rank, run)
