"""One program, run by an engine and by a functional step, which are to hold the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import optree
import torch
from torch import Tensor, nn

import fzero
from fzero.adapter import Engine
from fzero.state import NAMESPACE, TrainState
from tests.adapter.programs import CLASSES, RULES, WHOLE, Part, Run

UPDATES = 3
IDS = 7
FROM_TORCH = {**CLASSES, **WHOLE}


class Tied(nn.Module):
    """Names out of order, sizes that do not divide; a weight that is used twice, one that is
    frozen, one that even ranks alone use; a frozen one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inner = nn.Embedding(IDS, 5), nn.Linear(5, 5)
        self.blocks = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 5, bias=False))
        self.even, self.unused = nn.Linear(5, 5), nn.Linear(3, 1).requires_grad_(False)
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


def rule_of(run: Run) -> Any:
    """A rule of whole leaves says so."""
    if run.optimizer in RULES:
        return RULES[run.optimizer](**run.numbers.options)
    needs: Any = "leaf" if run.optimizer in WHOLE else None
    return fzero.optim.from_torch(FROM_TORCH[run.optimizer], needs=needs, **run.numbers.options)


class ByEngine:
    """The run with `loss.backward()` and `engine.step()`."""

    def __init__(self, run: Run, rank: int) -> None:
        self.run, self.rank = run, rank
        self.engine = Engine(
            make(run),
            rule_of(run),
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
        optimizer = rule_of(run)

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


def on_gloo(rank: int, world_size: int, run: Run) -> Tensor:
    return check(rank, run)
