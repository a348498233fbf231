"""Bodies about bytes, overlap and raw pointers, on a stack of equal Linear layers."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fzero
from fzero.adapter import Engine
from tests.gpu.watch import trace

BUCKETS_AND_UNITS = 3  # one in use, one on the wire, one that is being filled or freed


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """`layers` of Linear(width, width) without bias, fp32, each a bucket and a unit; AdamW."""

    layers: int
    width: int
    samples: int

    @property
    def layer_bytes(self) -> int:
        return 4 * self.width**2

    @property
    def bytes(self) -> int:
        return self.layers * self.layer_bytes

    def module(self, device: str) -> nn.Module:
        torch.manual_seed(0)
        layers = (nn.Linear(self.width, self.width, bias=False) for _ in range(self.layers))
        return nn.Sequential(*layers).to(device)

    def batch(self, device: str) -> Tensor:
        return torch.randn(self.samples, self.width, device=device)


def stepper(
    stack: Stack, stage: int, driver: str, device: str, **options: Any
) -> Callable[[], Any]:
    """One training step on one batch, again at each call."""
    module, x = stack.module(device), stack.batch(device)
    options |= {"stage": stage, "bucket_bytes": stack.layer_bytes}
    if driver == "engine":
        engine = Engine(module, torch.optim.AdamW(module.parameters(), lr=1e-5), **options)

        def step() -> None:
            engine(x).square().mean().backward()
            engine.step()

        return step
    apply, params = fzero.functionalize(module)
    away = options.pop("offload", fzero.Offload())

    def step_fn(state: Any, x: Tensor) -> Any:
        state, _ = fzero.grad_and_reduce(lambda p, x: apply(p, x).square().mean(), state)(x)
        return fzero.apply_gradients(state), None

    offloaded = fzero.offload(step_fn, **away.homes)
    train_step = fzero.shard(offloaded, donate=True, **options)
    held = [train_step.init(params, fzero.optim.adamw(1e-5))]

    def functional_step() -> None:
        held[0], _ = train_step(held[0], x)

    return functional_step


def resident_bytes(stack: Stack, stage: int, size: int) -> int:
    """Parameters and AdamW's two moments after a step, as ZeRO's table says."""
    moments = 2 * stack.bytes // (size if stage >= 1 else 1)
    return stack.bytes // (size if stage == 3 else 1) + moments


def peak_bound(stack: Stack, stage: int, size: int) -> int:
    """The most that a step may hold beside the activations.

    resident + gradients + three buckets, and at stage 3 three gathered units; the gradients are
    P below stage 2 and P / W from there on.
    """
    gradients = stack.bytes // (size if stage >= 2 else 1)
    ahead = BUCKETS_AND_UNITS * stack.layer_bytes * (2 if stage == 3 else 1)
    return resident_bytes(stack, stage, size) + gradients + ahead


def allocated(device: str) -> int:
    """Bytes that a device has given away, without what an earlier body has left as garbage."""
    gc.collect()
    return torch.accelerator.memory_allocated() if device != "cpu" else 0


def peak_of(
    rank: int, size: int, device: str, stack: Stack, stage: int, driver: str, options: Any
) -> dict[str, int]:
    """Bytes of one steady step on a device: measured, and what the table and the bound say.

    On a CPU, where torch does not count what is allocated, the step runs and nothing is measured.
    """
    before = allocated(device)
    step = stepper(stack, stage, driver, device, **options)
    for _ in range(3):
        step()
    found = {"bound": peak_bound(stack, stage, size), "resident": 0, "peak": 0}
    if device != "cpu":
        torch.accelerator.synchronize()
        torch.accelerator.reset_peak_memory_stats()
        found["resident"] = torch.accelerator.memory_allocated() - before
        step()
        torch.accelerator.synchronize()
        found["peak"] = torch.accelerator.max_memory_allocated() - before
        activations = (stack.layers + 4) * 4 * stack.samples * stack.width
        slack = stack.bytes // 20 + activations
        wanted = resident_bytes(stack, stage, size)
        assert abs(found["resident"] - wanted) <= slack, (found, wanted)
        assert found["peak"] <= found["bound"] + slack, found
    return found


def offloaded_peak(rank: int, size: int, device: str, stack: Stack, driver: str) -> int:
    """Bytes of a steady step with all of the state in pinned memory: eight units at most.

    Two are gathered, two have their gradients, one is on the wire; an update has the parameters,
    the gradients and both moments of two shards.
    """
    away = fzero.Offload(optimizer="cpu", gradients="cpu", params="cpu")
    before = allocated(device)
    step = stepper(stack, 3, driver, device, offload=away)
    for _ in range(3):
        step()
    if device == "cpu":
        return 0
    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats()
    step()
    torch.accelerator.synchronize()
    peak = torch.accelerator.max_memory_allocated() - before
    activations = (stack.layers + 4) * 4 * stack.samples * stack.width
    assert peak <= 8 * stack.layer_bytes + activations, (peak, stack.layer_bytes)
    assert torch.accelerator.memory_allocated() - before <= stack.layer_bytes
    return peak


def overlap(
    rank: int, size: int, device: str, stack: Stack, stage: int, driver: str, folder: str
) -> tuple[int, float]:
    """How many collectives a steady step runs, and the hidden part of the shorter of both kinds."""
    step = stepper(stack, stage, driver, device)
    for _ in range(3):
        step()
    where = Path(folder, f"{driver.split()[0]}-stage{stage}")
    where.mkdir(parents=True, exist_ok=True)
    found = trace(step, device, where)
    assert found.compute and found.collectives
    return len(found.collectives), found.hidden()


def value_by_pointer(x: Tensor) -> float:
    """The first element of `x`, read at its address as a kernel of the user's reads it."""
    if x.device.type != "cuda":  # the simulated device has its memory in the host's
        address = x.data_ptr()
        assert address, "data_ptr() is null"
        return ctypes.cast(address, ctypes.POINTER(ctypes.c_float))[0]
    from tests.gpu.kernels import copy_first

    return copy_first(x).item()


class ReadsByPointer(nn.Linear):
    """A Linear whose forward also reads its weight, or a clone of it, by address."""

    clones = False
    seen = float("nan")

    def forward(self, input: Tensor) -> Tensor:
        self.seen = value_by_pointer(self.weight.clone() if self.clones else self.weight)
        return F.linear(input, self.weight, self.bias)


def placeholder_by_pointer(rank: int, size: int, device: str) -> None:
    """A raw read of a placeholder raises, and one of its clone gives the gathered value."""
    module = ReadsByPointer(8, 8).to(device)
    first = module.weight.flatten()[0].item() if rank == 0 else 0.0
    wanted = fzero.psum(torch.tensor([first], device=device)).item()
    engine = Engine(module, torch.optim.SGD(module.parameters(), lr=0.1), stage=3)
    with pytest.raises(fzero.LayoutError, match=r"Fix: give it `p\.clone\(\)`"):
        engine(torch.ones(2, 8, device=device))
    module.clones = True
    engine(torch.ones(2, 8, device=device))
    assert module.seen == wanted
    engine.close()
