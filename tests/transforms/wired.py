"""One training by each driver, whose gradients do not depend on the parameters.

    loss_r = sum_p (p x_r).sum()        so dL_r/dp = x_r, whatever p is

`x_r` is anything that a test wants on the wire: signs times a number, where all is exact, or noise.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
from fzero import Compress
from fzero.adapter import Engine
from fzero.checkpoint._pieces import as_numbers, held_part
from fzero.machine.compress import BACK, RESIDUAL, memory_flats
from fzero.machine.packing import unpack
from fzero.state import TrainState
from fzero.transforms.state_entries import entries_of
from tests import drivers
from tests.drivers import each_rank as each_rank

LR = 0.5
INT8 = fzero.codecs.int8()
GRADIENTS: dict[str, Any] = {"compress": Compress(gradients=INT8)}
BOTH_WAYS: dict[str, Any] = {"compress": Compress(gradients=INT8, parameters=INT8)}
CASES = [(1, GRADIENTS), (2, GRADIENTS), (3, BOTH_WAYS)]
"""(stage, options) of all that can be encoded there."""

Batch = Mapping[str, Tensor]
Data = Callable[[int, int], Batch]  # (rank, step) -> {path: the gradient}


class Odd(nn.Module):
    """Sizes that do not divide, a scalar; one frozen, one that no loss uses."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.ones(17, 41, dtype=dtype))
        self.blocks = nn.ModuleList([nn.Linear(7, 33, bias=False), nn.Linear(33, 5)]).to(dtype)
        self.gain = nn.Parameter(torch.ones((), dtype=dtype))
        self.frozen = nn.Parameter(torch.ones(5, dtype=dtype), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(3, dtype=dtype))
        for number, p in enumerate(self.parameters()):
            p.data.copy_(torch.arange(p.numel()).add(number).remainder(5).reshape(p.shape))

    def forward(self, x: Batch) -> Tensor:
        used = [(p * x[path]).sum() for path, p in self.named_parameters() if path in x]
        return torch.stack([self.frozen.sum(), *used]).sum()


USED = {path: p.shape for path, p in Odd().named_parameters() if path not in ("frozen", "unused")}


def signs(a: float, dtype: torch.dtype = torch.float32) -> Batch:
    """a times -1, 0 and 1, for each parameter that is used."""
    return {
        path: a * torch.arange(shape.numel()).remainder(3).sub(1).reshape(shape).to(dtype)
        for path, shape in USED.items()
    }


def twelves(rank: int, step: int) -> Batch:
    """Whole numbers whose means over 1 to 4 ranks are whole, too."""
    return signs(12.0 * ((3 * rank + 5 * step) % 7 - 2))


def noise(rank: int, step: int, dtype: torch.dtype = torch.float32) -> Batch:
    source = torch.Generator().manual_seed(100 * step + rank)
    return {p: torch.randn(s, generator=source).to(dtype) for p, s in USED.items()}


def fine(rank: int, step: int) -> Batch:
    return noise(rank, step, torch.float64)


def by_engine(
    rank: int,
    data: Data,
    stage: int,
    steps: int = 3,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    **options: Any,
) -> TrainState:
    module, make = Odd(dtype).to(device), functools.partial(torch.optim.SGD, lr=LR)
    batches = (_on(device, data(rank, step)) for step in range(steps))
    return drivers.by_engine(module, batches, make, stage=stage, **options).state


def by_function(
    rank: int,
    data: Data,
    stage: int,
    steps: int = 3,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    loss_scale: Any = 1,
    compress: Compress | None = None,
    **options: Any,
) -> TrainState:
    def wrap(step: Any) -> Any:
        return encoding(fzero.scale_loss(step, loss_scale), compress)

    module, rule = Odd(dtype).to(device), fzero.optim.sgd(LR)
    batches = (_on(device, data(rank, step)) for step in range(steps))
    return drivers.by_steps(module, batches, rule, wrap=wrap, stage=stage, **options)


def encoding(step: Any, record: Compress | None) -> Any:
    """The step in `fzero.compress`, with the codecs of a record."""
    if record is None:
        return step
    kinds: Any = {"gradients": record.gradients, "parameters": record.parameters}
    return fzero.compress(step, **kinds, over=record.over)


def _on(device: str, x: Batch) -> Batch:
    return {path: value.to(device) for path, value in x.items()}


def with_gradients(driver: Any, rank: int, data: Data, stage: int, **options: Any) -> TrainState:
    """A state after one backward by either driver, before any update."""
    if driver is by_engine:
        engine = Engine(Odd(), None, stage=stage, **options)
        engine(data(rank, 0)).backward()
        return engine.state
    apply, params = fzero.functionalize(Odd())
    state = fzero.init(params, fzero.optim.sgd(LR), stage=stage, **options)
    return fzero.grad_and_reduce(lambda p: apply(p, data(rank, 0)), state)()[0]


DRIVERS = pytest.mark.parametrize("driver", [by_engine, by_function])


def moved(state: TrainState) -> dict[str, Tensor]:
    """{path: (first value - value) / LR}: the sum of the gradients of all updates."""
    dtype = state.setup.layout.leaves[0].dtype
    first = dict(Odd(dtype).named_parameters())
    last = fzero.full_params(state)
    return {path: (first[path].detach() - last[path].cpu()) / LR for path in USED}


def residual(state: TrainState) -> dict[str, Tensor]:
    """{path: mean_r(e_r)}, of what encoding has lost, there and back."""
    layout, found = state.setup.layout, {}
    lost = {i: state.params.flats[0].new_zeros(layout.full_numel(i)) for i in layout.trainable}
    lost = {i: flat.to(state.setup.accumulate_dtype(i)) for i, flat in lost.items()}
    setup, rank = state.setup, state.setup.axis.rank
    kept = [one for one in entries_of(state, rank) if one.name in (RESIDUAL, BACK)]
    for one, index, flat in ((x, *pair) for x in kept for pair in x.values.items()):
        _, (count, number) = held_part(setup, one, index, flat, rank)
        lost[index].view(count, -1)[number] += as_numbers(setup, one, index, flat)
    for index, flat in lost.items():
        leaves = unpack(layout, index, fzero.pmean(flat))
        paths = [layout.leaves[i].path for i in layout.groups[index].leaves]
        found.update(zip(paths, leaves, strict=True))
    return {path: found[path].cpu() for path in USED}


def total(data: Data, world_size: int, steps: int, *, op: str = "mean") -> dict[str, Tensor]:
    """The sum over steps of what the gradients of all ranks are together."""
    batches = [data(rank, step) for step in range(steps) for rank in range(world_size)]
    ranks = world_size if op == "mean" else 1
    return {path: torch.stack([batch[path] for batch in batches]).sum(0) / ranks for path in USED}


def check_encoded(
    rank: int, world_size: int, device: str, stage: int, options: dict[str, Any]
) -> None:
    """Both drivers have the same bits; updates lack the last residual and nothing else."""
    steps = 3
    wanted = total(noise, world_size, steps)
    mine, theirs = (
        driver(rank, noise, stage, steps, device=device, **options)
        for driver in (by_engine, by_function)
    )
    flats = [[*one.params.flats, *memory_flats(one)] for one in (mine, theirs)]
    for x, y in zip(*flats, strict=True):
        assert torch.equal(x, y)
    found, lost = moved(mine), residual(mine)
    for path in USED:
        torch.testing.assert_close(found[path] + lost[path], wanted[path], rtol=0, atol=1e-5)
