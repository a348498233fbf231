"""Loops as people have them, with what peers refuse or leave to the user: right at every stage."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.func import functional_call, grad, jacfwd, jvp, vmap

import fzero
from fzero.adapter import Engine
from fzero.errors import CallError
from tests.adapter.nets import F64, Net
from tests.adapter.on_ranks import Place, at_places
from tests.adapter.plain import same

Model = Callable[[Tensor], Tensor]
LR = 0.1


def batch(rank: int) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(rank), dtype=F64)


def mean_flow(call: Model, module: nn.Module, x: Tensor) -> Tensor:
    """As MeanFlow has it: a target made of the derivative along a direction."""
    both: Any = jvp(call, (x,), (torch.ones_like(x),))
    value, along = both
    return (value - (1 - 0.3 * along).detach()).square().mean() + along.square().mean()


def jacobians(call: Model, module: nn.Module, x: Tensor) -> Tensor:
    return vmap(jacfwd(lambda row: call(row)))(x).square().mean()


def per_sample(call: Model, module: nn.Module, x: Tensor) -> Tensor:
    def energy(params: Any, row: Tensor) -> Tensor:
        return functional_call(module, params, (row,)).square().sum()

    params = dict(module.named_parameters())
    found = vmap(grad(energy), in_dims=(None, 0))(params, x)
    return torch.stack([g.square().sum() for g in found.values()]).sum()


def plain_gradients(loss_fn: Any, module: nn.Module, ranks: int) -> dict[str, Tensor]:
    losses = [loss_fn(module, module, batch(rank)) for rank in range(ranks)]
    module.zero_grad()
    torch.stack(losses).mean().backward()
    return {
        path: torch.zeros_like(p) if p.grad is None else p.grad
        for path, p in module.named_parameters()
    }


@at_places(2)
def test_gradients_through_torch_func_around_the_model_are_those_of_one_process(at: Place) -> None:
    module = Net()
    plain = copy.deepcopy(module)
    engine = Engine(module, torch.optim.SGD(module.parameters(), lr=LR), stage=at.stage)
    for loss_fn in (mean_flow, jacobians, per_sample):
        wanted = plain_gradients(loss_fn, plain, at.ranks)
        for _ in range(2):  # the second time stage 3 follows what the first one has recorded
            loss_fn(engine, module, batch(at.rank)).backward()
            for path, value in engine.full_gradients().items():
                torch.testing.assert_close(value, wanted[path])
            engine.zero_grad()


def scheduler_of(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


@pytest.mark.parametrize(
    ("synced", "scheduled"), [("each", "before"), ("last", "after"), ("no scaler", "no")]
)
@at_places(1, 2)
def test_the_loop_of_nano_gpt_is_that_of_one_process(
    at: Place, synced: str, scheduled: str
) -> None:
    """`scaler.step(optimizer)` of a scaler that is not enabled is `optimizer.step()`."""

    def train(model: Any, optimizer: Any, no_sync: Any, x: list[Tensor]) -> list[int]:
        seen = list[int]()
        optimizer.register_step_pre_hook(lambda *_: seen.append(1))
        optimizer.register_step_post_hook(lambda *_: seen.append(2))
        scaler: Any = torch.amp.GradScaler("cpu", enabled=False)
        scheduler = known.get(id(optimizer)) or scheduler_of(optimizer)
        for step in range(3):
            for micro_step in range(2):
                with no_sync() if micro_step == 0 and synced == "last" else nullcontext():
                    losses = [model(rows * (1 + step)).square().mean() for rows in x]
                    scaler.scale(torch.stack(losses).mean() / 2).backward()
            if synced != "no scaler":
                scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            if synced == "no scaler":
                assert optimizer.step() is None
            else:
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad(set_to_none=True)
            if scheduled != "no":
                scheduler.step()
        return seen

    known, module = dict[int, Any](), Net()
    plain = copy.deepcopy(module)
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=LR) for m in (module, plain))
    if scheduled == "before":
        known[id(ours)] = scheduler_of(ours)
    engine = Engine(module, ours, stage=at.stage)
    seen = train(engine, ours, engine.no_sync, [batch(at.rank)])
    train(plain, theirs, nullcontext, [batch(rank) for rank in range(at.ranks)])
    assert seen == [1, 2] * 3
    same(engine.full_parameters(), dict(plain.named_parameters()))
    with pytest.raises(CallError, match="given a function"):
        ours.step(lambda: torch.zeros(()))
    ours.step()  # without gradients, as in torch
    same(engine.full_parameters(), dict(plain.named_parameters()))
    engine.close()
    module(batch(0)).square().sum().backward()
    ours.step()  # an ordinary one again
    assert not torch.equal(module.b.weight, plain.b.weight)


@at_places(2)
def test_a_training_of_fsdp2_goes_on_from_its_checkpoint(at: Place, tmp_path: Path) -> None:
    module = Net()
    fully_shard(module)
    optimizer = torch.optim.AdamW(module.parameters(), lr=LR)

    def step() -> None:
        module(batch(at.rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    values, states = get_state_dict(module, optimizer)
    dcp.save({"model": values, "optimizer": states}, checkpoint_id=tmp_path / "checkpoint")
    file = tmp_path / "checkpoint.pt"
    if at.rank == 0:
        dcp_to_torch_save(tmp_path / "checkpoint", file)
    fzero.psum(torch.ones(()))
    step()

    saved, other = torch.load(file), Net()
    other.load_state_dict(saved["model"])
    engine = Engine(other, torch.optim.AdamW(other.parameters(), lr=LR), stage=at.stage)
    for path, slots in saved["optimizer"]["state"].items():
        for name, value in slots.items():
            engine.set_full_optimizer_state(path, name, value)
    other(batch(at.rank)).square().mean().backward()
    engine.step()
    found = engine.full_parameters()
    for path, p in module.named_parameters():
        whole: Any = p
        torch.testing.assert_close(found[path], whole.full_tensor())
