"""A loaded run goes on with the same bits: engines, their buffers, options and random numbers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import fzero
from fzero.adapter import Engine
from fzero.checkpoint import CheckpointError, load, load_with_extra, save
from fzero.errors import LayoutError
from tests.checkpoint.forge import body_of, edit
from tests.ranks import run_ranks


class Net(nn.Module):
    """Dropout, running statistics that differ by rank, a buffer that is not saved, 16 bits."""

    constant: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 6), nn.BatchNorm1d(6)
        self.drop, self.last = nn.Dropout(0.5), nn.Linear(6, 3).bfloat16()
        self.register_buffer("constant", torch.arange(3.0))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(self.norm(self.first(x)))
        return self.last(hidden.bfloat16()).float() + self.constant


def _engine(stage: int, seed: int = 0) -> tuple[Engine, Any]:
    torch.manual_seed(seed)
    engine = Engine(Net(), lambda ps: torch.optim.AdamW(ps, lr=0.05), stage=stage, bucket_bytes=64)
    assert engine.optimizer is not None
    return engine, torch.optim.lr_scheduler.StepLR(engine.optimizer, 2, gamma=0.5)


def _seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    numpy.random.seed(number)


def _train(engine: Engine, scheduler: Any, steps: int) -> list[float]:
    """Data, masks and losses are of torch's, python's and numpy's generators."""
    losses = []
    for _ in range(steps):
        x = torch.randn(5, 4) + random.random() + float(numpy.random.rand())
        loss = engine(x).pow(2).mean()
        loss.backward()
        engine.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


def _go_on(rank: int, size: int, folder: Path, stage: int) -> None:
    engine, scheduler = _engine(stage)
    _seed(100 + rank)
    _train(engine, scheduler, 3)
    save(folder, engine, extra={"position": 3, "scheduler": scheduler.state_dict()})
    wanted = _train(engine, scheduler, 3)
    kept = {name: x.clone() for name, x in engine.module.named_buffers()}
    params = engine.full_parameters()

    again, scheduler = _engine(stage, seed=1)
    _seed(7)
    same, extra = load_with_extra(folder, again)
    assert same is again and extra["position"] == 3
    scheduler.load_state_dict(extra["scheduler"])
    assert _train(again, scheduler, 3) == wanted
    for name, x in again.module.named_buffers():
        assert torch.equal(x, kept[name]), name
    for name, x in again.full_parameters().items():
        assert torch.equal(x, params[name]), name


@pytest.mark.parametrize("stage", [0, 3])
def test_one_rank_goes_on_bit_for_bit(stage: int, tmp_path: Path) -> None:
    _go_on(0, 1, tmp_path, stage)


@pytest.mark.floor
@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_with_other_buffers_and_random_numbers_go_on_bit_for_bit(
    stage: int, tmp_path: Path
) -> None:
    run_ranks(_go_on, 2, tmp_path, stage)
    held = body_of(tmp_path)["module"]["buffers"]
    assert set(held["norm.running_mean"]) == {"0", "1"}
    assert set(held["constant"]) == {"0"}  # rank 1's is the same
    assert "scratch" not in held


def _load_here(rank: int, size: int, folder: Path) -> dict[str, Tensor]:
    engine, _ = _engine(2, seed=5)
    _seed(50 + rank)
    before = torch.get_rng_state()
    load(folder, engine)
    changed = not torch.equal(before, torch.get_rng_state())
    assert changed is (rank < 2), "a rank that did not save keeps its generators"
    return {name: x.clone() for name, x in engine.module.named_buffers()}


@pytest.mark.xdist_group("gloo")
def test_other_numbers_of_ranks_get_the_buffers_of_rank_0(tmp_path: Path) -> None:
    run_ranks(_go_on, 2, tmp_path, 3)
    for found in run_ranks(_load_here, 3, tmp_path):
        for one in run_ranks(_load_here, 1, tmp_path):
            for name, x in one.items():
                assert torch.equal(x, found[name]), name


def test_a_write_to_a_16_bit_parameter_is_saved_with_its_master(tmp_path: Path) -> None:
    engine, _ = _engine(1)
    with torch.no_grad():
        engine.module.get_parameter("last.weight").fill_(2.0)
    save(tmp_path, engine)
    again, _ = _engine(2, seed=1)
    load(tmp_path, again)
    state: Any = again.state
    (found,) = [x for x in state.optimizer.masters if x.numel() == 18]
    assert torch.equal(found, torch.full((18,), 2.0))


def test_a_damaged_checkpoint_leaves_an_engine_as_it_was(tmp_path: Path) -> None:
    engine, _ = _engine(2)
    save(tmp_path, engine)
    (file,) = tmp_path.glob("data-*/*.distcp")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))
    again, _ = _engine(3, seed=1)
    before = {name: x.clone() for name, x in again.full_state_dict().items()}
    drawn = torch.get_rng_state()
    with pytest.raises(CheckpointError, match="checksum is wrong"):
        load(tmp_path, again)
    assert torch.equal(torch.get_rng_state(), drawn)
    for name, x in again.full_state_dict().items():
        assert torch.equal(x, before[name]), name


def test_options_are_those_that_were_saved_where_the_groups_are_as_many(tmp_path: Path) -> None:
    engine, scheduler = _engine(0)
    _train(engine, scheduler, 2)
    assert engine.optimizer is not None and engine.optimizer.param_groups[0]["lr"] == 0.025
    save(tmp_path, engine)
    again, _ = _engine(3)
    assert again.optimizer is not None
    load(tmp_path, again)
    assert again.optimizer.param_groups[0]["lr"] == 0.025
    assert again.optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    edit(tmp_path, lambda body: body["module"]["options"][0].update(lr="fast"))
    with pytest.raises(CheckpointError, match="option lr of param group 0 is 'fast'"):
        load(tmp_path, again)
    edit(tmp_path, lambda body: body["module"].update(options=[{}, {}]))
    load(tmp_path, again)
    assert again.optimizer.param_groups[0]["lr"] == 0.025


def test_buffers_of_another_module_are_refused_by_name(tmp_path: Path) -> None:
    engine, _ = _engine(0)
    save(tmp_path, engine)
    other = Net()
    other.register_buffer("more", torch.zeros(1))
    with pytest.raises(LayoutError, match="the buffer more is nothing in the checkpoint"):
        load(tmp_path, Engine(other, torch.optim.AdamW, stage=0))
    other = Net()
    other.constant = torch.zeros(4)
    with pytest.raises(LayoutError, match=r"constant is \(3,\) .* in the checkpoint, \(4,\)"):
        load(tmp_path, Engine(other, torch.optim.AdamW, stage=0))


def test_a_state_takes_what_an_engine_saved_and_the_other_way_round(tmp_path: Path) -> None:
    engine, _ = _engine(2)
    save(tmp_path / "engine", engine)
    _, params, _ = fzero.functionalize(Net(), buffers=True)
    rule = fzero.optim.adamw(0.05)
    state = load(tmp_path / "engine", fzero.init(params, rule, stage=0))
    save(tmp_path / "state", state)
    again, _ = _engine(3, seed=4)
    own = again.module.get_buffer("constant").clone()
    load(tmp_path / "state", again)  # without buffers: it keeps its own
    assert torch.equal(again.module.get_buffer("constant"), own)
    for name, x in again.full_parameters().items():
        assert torch.equal(x, engine.full_parameters()[name]), name


def test_random_generators_can_be_left_alone(tmp_path: Path) -> None:
    state = fzero.init({"w": torch.ones(3)}, fzero.optim.sgd(0.1), stage=0)
    save(tmp_path, state)
    before = torch.rand(3)
    load(tmp_path, state, rng=False)
    assert not torch.equal(torch.rand(3), before)
    load(tmp_path, state)
    assert torch.equal(torch.rand(3), before)
    save(tmp_path, state, rng=False)
    drawn = torch.get_rng_state()
    load(tmp_path, state)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert not list(tmp_path.glob("data-*/rng-*"))
