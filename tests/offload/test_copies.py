"""The record and the transform: what they refuse, moves of states, checkpoints, both drivers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
from fzero.adapter import Engine
from fzero.errors import LayoutError, PhaseError
from fzero.machine.offload import cloned, is_on_disk, offloaded
from tests.adapter.on_ranks import on_ranks

PARAMS = {"w": torch.arange(5.0), "b": torch.ones(3)}


def step_fn(state: Any, x: Tensor) -> Any:
    def loss(p: Any, x: Tensor) -> Tensor:
        return (p["w"] * x).square().sum() + p["b"].sum()

    state, value = fzero.grad_and_reduce(loss, state)(x)
    return fzero.apply_gradients(state), value


def _trained(step: Any, state: Any, steps: int = 3) -> Any:
    for number in range(steps):
        state, _ = step(state, torch.arange(5.0) / 4 - number)
    return state


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"optimizer": "nvme"}, "optimizer='nvme'"),
        ({"params": "cuda"}, "params='cuda'"),
        ({"gradients": "disk"}, "folder=None"),
        ({"gradients": "disk", "folder": "/nowhere/at/all"}, "folder='/nowhere/at/all'"),
    ],
)
def test_another_place_is_refused(given: dict[str, Any], says: str) -> None:
    for make in (fzero.Offload, partial(fzero.offload, step_fn)):
        with pytest.raises(LayoutError, match="Fix: ") as caught:
            make(**given)
        assert says in str(caught.value)


def test_what_cannot_be_offloaded_is_refused_and_nothing_is_touched(tmp_path: Path) -> None:
    module = nn.Linear(2, 2)
    weight = module.weight
    away = fzero.Offload(params="disk", folder=tmp_path)
    for given, says in (
        ({"stage": 2, "offload": away}, "params='disk' at stage 2"),
        ({"stage": 3, "offload": "cpu"}, "offload='cpu'"),
    ):
        with pytest.raises(LayoutError, match=says):
            Engine(module, torch.optim.SGD, **given)
    (tmp_path / "gone").mkdir()
    away = fzero.Offload(optimizer="disk", folder=tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(LayoutError, match="could not make a file"):
        Engine(module, torch.optim.SGD, stage=2, offload=away)
    pair = (lambda params: (), lambda grads, state, params: (grads, state))
    with pytest.raises(LayoutError, match="offload of the states"):
        fzero.init(PARAMS, pair, stage=2, offload=fzero.Offload(optimizer="cpu"))
    assert module.weight is weight
    with pytest.raises(LayoutError, match=r"fzero.shard\(fzero.offload"):
        fzero.offload(fzero.shard(step_fn, stage=2), optimizer="cpu")


def test_a_state_from_elsewhere_is_moved_and_back_with_the_same_bits(tmp_path: Path) -> None:
    plain = fzero.shard(step_fn, stage=3)
    away = fzero.shard(
        fzero.offload(step_fn, optimizer="disk", gradients="disk", params="disk", folder=tmp_path),
        stage=3,
    )
    begin = plain.init(PARAMS, fzero.optim.adamw(0.1))
    wanted = _trained(plain, _trained(plain, begin))
    there = _trained(away, begin)
    assert fzero.state_bytes(there)["on disk"] == 3 * 4 * 8
    here = fzero.shard(fzero.offload(step_fn, optimizer=None), stage=3)
    back = _trained(plain, _trained(here, there, 0))
    assert repr(away) == (
        "shard(stage=3) . offload(optimizer='disk', gradients='disk', params='disk') . step_fn"
    )
    for path, value in fzero.full_params(wanted).items():
        assert torch.equal(fzero.full_params(back)[path], value)
        assert torch.equal(fzero.full_params(_trained(away, there))[path], value)


def test_neutral_offload_is_the_identity_and_brings_a_state_back(tmp_path: Path) -> None:
    away = fzero.offload(step_fn, optimizer="disk", folder=tmp_path)
    here = fzero.shard(fzero.offload(step_fn, optimizer=None), stage=2)
    state = fzero.shard(away, stage=2).init(PARAMS, fzero.optim.adamw(0.1))
    assert all(is_on_disk(x) for some in state.optimizer.moments for x in some)
    state = _trained(here, state, 1)
    assert not any(is_on_disk(x) for some in state.optimizer.moments for x in some)
    assert "on disk" not in fzero.state_bytes(state)


def test_a_state_with_gradients_is_not_moved() -> None:
    state = fzero.init(PARAMS, fzero.optim.sgd(0.1), stage=2)
    state, _ = fzero.grad_and_reduce(lambda p: p["w"].sum(), state)()
    step = fzero.shard(fzero.offload(step_fn, optimizer="cpu"), stage=2)
    with pytest.raises(PhaseError, match="the state holds gradients"):
        step(state, torch.ones(5))


@on_ranks(1, 2)
def test_checkpoints_go_between_places(world_size: int, tmp_path: Path) -> None:
    def engine(**options: Any) -> Engine:
        torch.manual_seed(1)
        module = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).bfloat16()
        return Engine(module, torch.optim.AdamW, **options)

    def train(one: Engine) -> None:
        for number in range(2):
            one(torch.full((2, 3), 0.5 + number).bfloat16()).float().square().sum().backward()
            one.step()

    everything = fzero.Offload(optimizer="disk", gradients="disk", params="disk", folder=tmp_path)
    away, here = engine(stage=3, offload=everything), engine(stage=1)
    train(away)
    fzero.checkpoint.save(tmp_path / "away", away)
    fzero.checkpoint.load(tmp_path / "away", here)
    train(here)
    fzero.checkpoint.save(tmp_path / "here", here)
    other = engine(stage=3, offload=everything)
    fzero.checkpoint.load(tmp_path / "here", other)
    assert all(is_on_disk(x) for x in other.state.params.flats)
    assert all(is_on_disk(x) for some in other.state.optimizer.slots.values() for x in some)
    train(away)
    train(away)
    train(other)
    for path, value in away.full_parameters().items():
        assert torch.equal(other.full_parameters()[path], value)
    away.close()
    assert not isinstance(away.module[0].weight, fzero.machine.placeholder.LazyParam)  # type: ignore[union-attr]


def test_a_copy_lives_where_the_tensor_does(tmp_path: Path) -> None:
    offload = fzero.Offload(optimizer="disk", folder=tmp_path)
    x = offloaded("disk", torch.arange(3000.0).view(3, 1000), offload)
    y = cloned(x)
    y += 1
    assert is_on_disk(x)
    assert is_on_disk(y)
    assert torch.equal(y, torch.arange(3000.0).view(3, 1000) + 1)
    assert torch.equal(x, torch.arange(3000.0).view(3, 1000))
    assert offloaded("disk", x, offload) is x
    assert not is_on_disk(cloned(torch.ones(3)))


@pytest.mark.parametrize("away", [{}, {"optimizer": "disk", "gradients": "disk"}])
def test_empty_parameters_in_16_bits_are_stepped_with_the_others(
    away: dict[str, Any], tmp_path: Path
) -> None:
    params = {"e": torch.zeros(0).bfloat16(), "w": torch.ones(3).bfloat16()}
    for optimizer in (
        fzero.optim.adamw(0.5),
        fzero.optim.from_torch(partial(torch.optim.AdamW, lr=0.5)),
    ):
        state = fzero.init(
            params, optimizer, stage=0, offload=fzero.Offload(**away, folder=tmp_path)
        )
        state, _ = fzero.grad_and_reduce(lambda p: p["w"].float().sum(), state)()
        after = fzero.full_params(fzero.apply_gradients(state))
        assert (after["w"] < 1).all()
        assert after["e"].shape == (0,)
