"""One training run, made three times: by the engine, by the functional step, and without fzero.

A `Task` says what is trained. Each of `by_engine`, `by_function` and `by_hand` returns the full
parameters after its steps, on the CPU, by path; the first two run on every rank with that rank's
batches, the third trains one process on the batches of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import fzero
from fzero.adapter import Engine
from tests import oracle

SYMBOLS = 17
LR = 1e-2
Params = dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is trained, and how; the same on every rank."""

    stage: int
    dtype: torch.dtype = torch.float64
    steps: int = 3
    backwards: int = 1  # more than one: in a window, reduced once
    max_norm: float | None = None
    checkpoint: str = "none"  # or "reentrant", "nonreentrant" (torch's), "remat" (fzero's)
    adam: bool = True  # else SGD with momentum
    accumulates: bool = False  # the backwards are parts of one batch, and in no window
    offload: fzero.Offload = field(default_factory=fzero.Offload)

    @property
    def scale(self) -> fzero.DynamicScale | None:
        """Of fp16, in which losses are computed by autocast; it begins too high."""
        policy = fzero.DynamicScale(init_scale=2.0**21, growth_interval=4)
        return policy if self.dtype is torch.float16 else None


class Block(nn.Module):
    """A residual feed-forward of odd width, so that no shard ends where a parameter does."""

    def __init__(self, checkpoint: str) -> None:
        super().__init__()
        self.checkpoint = checkpoint
        self.norm = nn.LayerNorm(23)
        self.up, self.down = nn.Linear(23, 37), nn.Linear(37, 23)

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpoint in ("reentrant", "nonreentrant"):
            kind = self.checkpoint == "reentrant"
            return checkpoint(self.mixed, x, use_reentrant=kind)
        return fzero.remat(self.mixed)(x) if self.checkpoint == "remat" else self.mixed(x)

    def mixed(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Embedding, three blocks, a tied head; forward(symbols [n, t]) -> logits [n, t, 17]."""

    def __init__(self, checkpoint: str = "none") -> None:
        super().__init__()
        self.symbols = nn.Embedding(SYMBOLS, 23)
        self.blocks = nn.Sequential(*(Block(checkpoint) for _ in range(3)))
        self.scale = nn.Parameter(torch.ones(5))  # fewer bytes than 16 at bf16

    def forward(self, symbols: Tensor) -> Tensor:
        h = self.blocks(self.symbols(symbols)) * self.scale.mean()
        return F.linear(h, self.symbols.weight)


def make_model(task: Task, device: str) -> nn.Module:
    torch.manual_seed(3)
    return Net(task.checkpoint).to(device, torch.float32 if task.scale else task.dtype)


def make_batch(device: str, *, step: int, at: int, rank: int) -> Tensor:
    """Symbols [2, 4, 6], inputs and targets: no two backwards of any rank share a batch."""
    generator = torch.Generator().manual_seed(10_000 * step + 100 * at + rank)
    return torch.randint(0, SYMBOLS, (2, 4, 6), generator=generator).to(device)


def batches_of(task: Task, device: str, *, step: int, rank: int) -> list[Tensor]:
    """One for each backward of an update."""
    return [make_batch(device, step=step, at=at, rank=rank) for at in range(task.backwards)]


def loss_of(model: Callable[[Tensor], Tensor], batch: Tensor | Sequence[Tensor]) -> Tensor:
    logits = model(batch[0]).flatten(0, 1)
    return F.cross_entropy(
        logits.float() if logits.dtype.itemsize < 4 else logits, batch[1].reshape(-1)
    )


def torch_optimizer(task: Task, parameters: Any) -> torch.optim.Optimizer:
    if task.adam:
        return torch.optim.AdamW(parameters, lr=LR, weight_decay=1e-2)
    return torch.optim.SGD(parameters, lr=LR, momentum=0.5)


def torch_on_shards(task: Task) -> fzero.optim.TorchOptimizer:
    return fzero.optim.from_torch(partial(torch_optimizer, task))


def fzero_optimizer(task: Task) -> fzero.optim.Optimizer:
    if task.adam:
        return fzero.optim.adamw(LR, weight_decay=1e-2)
    return fzero.optim.sgd(LR, momentum=0.5)


def by_engine(task: Task, rank: int, device: str, mesh: Any = None) -> Params:
    engine = make_engine(task, make_model(task, device), mesh)
    step_by = accumulating_step if task.accumulates else engine_step
    for step in range(task.steps):
        step_by(engine, batches_of(task, device, step=step, rank=rank))
    found = engine.full_state_dict()
    engine.close()
    return on_cpu(found)


def make_engine(task: Task, model: nn.Module, mesh: Any = None) -> Engine:
    return Engine(
        model,
        torch_optimizer(task, model.parameters()),
        stage=task.stage,
        mesh=mesh,
        max_norm=task.max_norm,
        gradient_accumulation_steps=task.backwards if task.accumulates else 1,
        offload=task.offload,
        autocast=torch.float16 if task.scale else None,
        loss_scale=task.scale,
        gradient_predivide_factor=_predivisor(task),
    )


def _predivisor(task: Task) -> float:
    """In fp16 no sum over two ranks overflows that their gradients do not."""
    return 1.0 if task.scale is None else 2.0


def engine_step(engine: Engine, batches: list[Tensor]) -> None:
    """One update; of several batches in a window."""
    with engine.coalesce() if len(batches) > 1 else nullcontext():
        for batch in batches:
            engine.scale(loss_of(engine, batch)).backward()
    assert engine.step()


def accumulating_step(engine: Engine, batches: list[Tensor]) -> None:
    """One update, at the last of as many calls of `step` as there are batches."""
    for number, batch in enumerate(batches, 1):
        loss_of(engine, batch).backward()
        assert engine.step() is (number == len(batches))


def by_function(
    task: Task,
    rank: int,
    device: str,
    mesh: Any = None,
    rule: Callable[[Task], Any] = fzero_optimizer,
) -> Params:
    train_step, state = make_step(task, make_model(task, device), mesh, rule)
    for step in range(task.steps):
        batches = torch.stack(batches_of(task, device, step=step, rank=rank))
        state, _ = train_step(state, batches)
    return on_cpu(fzero.full_params(state))


def make_step(
    task: Task, model: nn.Module, mesh: Any = None, rule: Callable[[Task], Any] = fzero_optimizer
) -> tuple[Any, Any]:
    """A donating functional step over (state, batches [k, 2, 4, 6]), and its first state."""
    apply, params = fzero.functionalize(model)

    def loss_fn(params: Any, batch: Tensor) -> Tensor:
        return loss_of(lambda symbols: apply(params, symbols), batch)

    def step_fn(state: Any, batches: Any) -> tuple[Any, Tensor]:
        losses = []
        for batch in batches:
            state, loss = fzero.grad_and_reduce(loss_fn, state)(batch)
            losses.append(loss)
        return fzero.apply_gradients(state), torch.stack(losses)

    step: Any = step_fn
    if task.accumulates:
        step = fzero.accumulate(step, steps=task.backwards)
    elif task.backwards > 1:
        step = fzero.coalesce(step)
    if task.max_norm is not None:
        step = fzero.clip(step, max_norm=task.max_norm)
    if task.scale is not None:
        step = fzero.scale_loss(fzero.autocast(step, dtype=torch.float16), task.scale)
    step = fzero.offload(step, **task.offload.homes, folder=task.offload.folder)
    sharded = fzero.shard(
        step,
        stage=task.stage,
        mesh=mesh,
        donate=True,
        gradient_predivide_factor=_predivisor(task),
    )
    return sharded, sharded.init(params, rule(task))


def by_hand(
    task: Task, ranks: Sequence[int], device: str, steps: Sequence[int] | None = None
) -> Params:
    """The oracle of all tests, on the batches of all `ranks`.

    `steps` are the numbers of the batches that it takes, by default all.
    """
    model = make_model(replace(task, checkpoint="none"), device)

    def loss(params: Any, batches: list[Tensor]) -> Tensor:
        losses = [loss_of(partial(functional_call, model, params), batch) for batch in batches]
        return torch.stack(losses).sum()

    numbers = range(task.steps) if steps is None else steps
    given = [[batches_of(task, device, step=k, rank=rank) for rank in ranks] for k in numbers]
    params = dict(model.named_parameters())
    optimizer = partial(torch_optimizer, task)
    return on_cpu(oracle.train(loss, params, given, optimizer, task.max_norm))


def by_grad_scaler(task: Task, ranks: Sequence[int], device: str) -> tuple[Params, float]:
    """The parameters, and the scale, of one process in fp16 autocast with torch's GradScaler."""
    assert task.scale is not None and task.max_norm is not None
    model, policy = make_model(task, device), task.scale
    params = list(model.parameters())
    optimizer = torch_optimizer(task, params)
    scaler = torch.amp.GradScaler(
        device, init_scale=policy.init_scale, growth_interval=policy.growth_interval
    )
    for step in range(task.steps):
        optimizer.zero_grad()
        for rank in ranks:
            with torch.autocast(device, dtype=torch.float16):
                loss = loss_of(model, make_batch(device, step=step, at=0, rank=rank))
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        for p in params:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad / len(ranks)
        nn.utils.clip_grad_norm_(params, task.max_norm)
        scaler.step(optimizer)
        scaler.update()
    return on_cpu(dict(model.named_parameters())), scaler.get_scale()


def on_cpu(params: Params) -> Params:
    return {path: p.detach().cpu() for path, p in params.items()}


def check_close(found: Params, wanted: Params, error: float = 1e-9) -> None:
    """Equal within what fp64 sums in another order may differ by; the same bits for 0."""
    assert set(found) >= set(wanted)
    for path, value in wanted.items():
        try:
            torch.testing.assert_close(found[path], value, rtol=error, atol=error)
        except AssertionError as failure:
            failure.add_note(f"This was {path}.")
            raise


def check_moved(found: Params, wanted: Params, start: Params, bound: float) -> None:
    """|found - wanted| <= bound |wanted - start| over all parameters together; none stood still."""
    far = sum(float((found[p].double() - wanted[p].double()).square().sum()) for p in wanted)
    way = sum(float((wanted[p].double() - start[p].double()).square().sum()) for p in wanted)
    assert way > 0
    assert far**0.5 <= bound * way**0.5, f"{far**0.5:.2e} beside {way**0.5:.2e}"
