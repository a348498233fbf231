"""Modes of the calling thread: virtual ranks have them, or they are refused."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import jvp
from torch.fx.experimental.proxy_tensor import make_fx

import fzero
from fzero.errors import PhaseError
from tests.covering import covered
from tests.strategies import integers, same, tensors
from tests.transforms.steps import many_backwards, sgd


@covered(ranks=[1, 2], stage=range(4))
def test_inference_mode_is_refused_and_no_grad_is_not(stage: int, ranks: int) -> None:
    run = fzero.simulate(fzero.shard(many_backwards, stage=stage), world_size=ranks)
    params, xs = {"w": integers((3,), 1)}, integers((ranks, 2), 2)
    state = run.init(params, sgd())
    with torch.inference_mode():
        with pytest.raises(PhaseError, match="inference_mode"):
            run(state, xs)
        with pytest.raises(PhaseError, match="inference_mode"):
            run.init(params, sgd())
    with torch.no_grad():
        got, _ = run(state, xs)
    same(tensors(got), tensors(run(state, xs)[0]))


def test_virtual_ranks_have_the_modes_of_the_caller() -> None:
    seen: list[Any] = []

    def look(x: Tensor) -> Tensor:
        device = torch.empty(2).device.type
        seen.append(((x @ x).dtype, torch.is_grad_enabled(), device))
        return x

    run, x = fzero.simulate(look, world_size=2), torch.ones(2, 2, 2)
    run(x)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad(), torch.device("meta"):
        run(x)
    assert seen == [(torch.float32, True, "cpu")] * 2 + [(torch.bfloat16, False, "meta")] * 2
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.timeout(60)
def test_autocast_inside_a_loss_on_virtual_ranks_does_not_lock_them_up() -> None:
    """Its cache of casts holds a lock of the process while a cast waits for another rank."""

    def loss(p: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return (x @ p["w"] @ p["w"]).float().sum()

    def run(x: Tensor) -> Any:
        state = fzero.init({"w": torch.eye(2)}, fzero.optim.sgd(0.1), stage=3)
        return fzero.gradients(fzero.grad_and_reduce(loss, state)(x)[0])["w"]

    found = fzero.simulate(run, world_size=2)(torch.ones(2, 1, 2))
    assert found.tolist() == [[[2.0, 2.0], [2.0, 2.0]]] * 2


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Let SIGINT raise KeyboardInterrupt, also where tests inherit that it is ignored (nohup)."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.timeout(60)
@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_ends_the_virtual_ranks() -> None:
    ticks: list[int] = []

    def run(x: Tensor) -> Tensor:
        while len(ticks) < 10**6:
            x = fzero.psum(x) / 2
            ticks.append(1)
            if len(ticks) == 10:
                os.kill(os.getpid(), signal.SIGINT)
        return x

    with pytest.raises(KeyboardInterrupt):
        fzero.simulate(run, world_size=2)(torch.ones(2))
    count, x = len(ticks), torch.tensor(0.3)
    assert jvp(torch.sin, (x,), (x,))[1] == x * torch.cos(x)
    assert len(ticks) == count < 10**6


@pytest.mark.skipif(torch.__version__.startswith("2.11."), reason="torch ends the process there")
def test_a_trace_on_virtual_ranks_is_refused_and_one_on_one_rank_is_right() -> None:
    def traced(x: Tensor) -> Tensor:
        with pytest.raises(PhaseError, match="inside a trace"):
            make_fx(lambda x: fzero.psum(x))(x)
        return fzero.psum(x)

    assert fzero.simulate(traced, world_size=2)(torch.ones(2)).tolist() == [2.0, 2.0]
    assert make_fx(lambda x: fzero.psum(x) * 2)(torch.ones(2))(torch.ones(2)).tolist() == [2, 2]
