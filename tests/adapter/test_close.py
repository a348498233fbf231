"""What an engine gives back when it is closed; and that its state and record are frozen."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import pytest
import torch
from torch import nn

import fzero
from fzero.adapter import Engine
from fzero.errors import DonatedError, PhaseError
from tests.adapter.nets import Tied
from tests.adapter.plain import STAGES, Draw
from tests.adapter.test_access import ADAM, adam_of, close_to
from tests.adapter.unsharded import Odd, Unsharded, loss_of, same_update, seeded
from tests.ranks import run_ranks

pytestmark = pytest.mark.xdist_group("gloo")


def hooks_on(module: nn.Module) -> dict[str, int]:
    """How many hooks there are of each kind, on modules and on parameters."""
    found: dict[str, int] = {}
    for part in module.modules():
        for kind, hooks in vars(part).items():
            if "hooks" in kind and hooks:
                found[kind] = found.get(kind, 0) + len(hooks)
    for p in module.parameters():
        for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            count = len(getattr(p, kind, None) or ())
            if count:
                found[kind] = found.get(kind, 0) + count
    return found


def saved_bytes(value: Any) -> int:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getbuffer().nbytes


def close_body(rank: int, world_size: int, as_instance: bool) -> None:
    for stage in STAGES:
        label = f"stage {stage}, W={world_size}, instance {as_instance}"
        reference = Unsharded(Odd, adam_of, world_size)
        module = seeded(Odd)
        module.c.register_forward_hook(lambda *_: None)  # the user's own stays
        before = hooks_on(module)
        alone = {path: saved_bytes(p) for path, p in module.named_parameters()}
        given = adam_of(module) if as_instance else ADAM
        engine = Engine(module, given, stage=stage)
        for number in range(2):
            loss_of(engine, rank, number).backward()
            engine.step()
            reference.step(number)
        loss_of(engine, rank, 9).backward()  # lost
        optimizer = engine.optimizer
        assert optimizer is not None
        engine.close()
        engine.close()
        assert hooks_on(module) == before, label
        for path, p in module.named_parameters():
            assert type(p) is nn.Parameter and p.is_leaf and p.grad is None, f"{label}: {path}"
            assert p.requires_grad == (path != "fixed"), f"{label}: {path}"
            assert saved_bytes(p) <= alone[path] + 64, f"{label}: {path} shares memory"
        same_update(label, dict(module.named_parameters()), reference.parameters(), reference.begin)
        goes_on(label, module, optimizer, reference)


def goes_on(
    label: str, module: nn.Module, optimizer: torch.optim.Optimizer, reference: Unsharded
) -> None:
    """Plain PyTorch, with the module and optimizer that were given back: the same updates."""
    begin = reference.parameters()
    wanted = reference.optimizer.state_dict()["state"]
    assert len(optimizer.state) == len(wanted), label
    for number in range(2, 4):
        optimizer.zero_grad()
        for r in range(reference.world_size):
            (loss_of(module, r, number) / reference.world_size).backward()
        for p in module.parameters():
            if p.requires_grad and p.grad is None:
                p.grad = torch.zeros_like(p)
        optimizer.step()
        reference.step(number)
    found = {path: p.detach() for path, p in module.named_parameters()}
    same_update(f"{label}, closed", found, reference.parameters(), begin)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_after_close_plain_training_goes_on_as_if_there_had_been_no_engine(
    world_size: int,
) -> None:
    run_ranks(close_body, world_size, True)
    run_ranks(close_body, world_size, False)


def tied_body(rank: int, world_size: int) -> None:
    for stage in STAGES:
        module = seeded(Tied)
        engine = Engine(module, ADAM, stage=stage)
        engine(torch.arange(4)).square().sum().backward()
        engine.step()
        engine.close()
        assert module.head.weight is module.embedding.weight, f"stage {stage}"
        assert module.decoder.weight is module.encoder.weight, f"stage {stage}"
        assert all(type(p) is nn.Parameter for p in module.parameters())
        assert len(list(module.parameters())) == len(list(seeded(Tied).parameters()))


def test_what_was_tied_is_tied_when_the_engine_is_closed() -> None:
    run_ranks(tied_body, 1)
    run_ranks(tied_body, 2)


def closed_body(rank: int, world_size: int) -> None:
    for stage in STAGES:
        module = seeded(Odd)
        engine = Engine(module, ADAM, stage=stage)
        loss_of(engine, rank, 0).backward()
        engine.close()
        with pytest.raises(PhaseError, match="closed engine"):
            engine.step()
        with pytest.raises(PhaseError, match="closed engine"), engine.coalesce():
            pass
        again = Engine(module, ADAM, stage=(stage + 1) % 4)  # the module is nobody's
        x = Draw(0, 1)(2, 3)
        close_to(f"stage {stage}", again(x).detach(), seeded(Odd)(x).detach())
        again.close()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_closed_engine_refuses_and_its_module_can_have_another_one(world_size: int) -> None:
    run_ranks(closed_body, world_size)


def frozen_body(rank: int, world_size: int) -> None:
    for stage in STAGES:
        one, two = (Engine(seeded(Odd), ADAM, stage=stage) for _ in range(2))
        new = one.hooks
        assert new == two.hooks
        loss_of(one, rank, 0).backward()
        held = one.state
        assert one.hooks != new and held.progress.backwards == 1 and held.gradients.held
        loss_of(two, rank, 0).backward()
        assert one.hooks == two.hooks and held.progress == two.state.progress
        assert held.schedule == two.state.schedule
        for record in (one.hooks, held, held.progress, held.window, held.schedule, held.setup):
            name = dataclasses.fields(record)[0].name
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(record, name, getattr(record, name))
        one.step()
        two.step()
        with pytest.raises(DonatedError):  # the update used it up
            fzero.full_params(held)
        assert int(one.state.step) == 1 and one.state.progress == two.state.progress
        one.close()
        two.close()


def test_the_records_of_an_engine_are_frozen_and_equal_for_equal_histories() -> None:
    run_ranks(frozen_body, 1)
    run_ranks(frozen_body, 2)
