"""Copies of an engine's module, its state dict, and calls of it with other tensors."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.optim.swa_utils import AveragedModel

from fzero.adapter import Engine, gathered
from fzero.errors import LayoutError
from tests.adapter.plain import STAGES, Draw, engine_of
from tests.ranks import run_ranks

pytestmark = pytest.mark.xdist_group("gloo")


class Small(nn.Module):
    """A tied weight, a buffer, a block."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(3, dtype=torch.float64)
        self.head = nn.Linear(3, 5, bias=False, dtype=torch.float64)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.embedding(ids)))


IDS = torch.tensor([0, 1, 1, 4])


def back(engine: Any) -> None:
    engine(IDS).square().sum().backward()


def copies_body(rank: int, world_size: int) -> None:
    for stage in STAGES:
        engine = engine_of(Small, stage)
        if stage == 3 and world_size > 1:
            for attempt in (copy.deepcopy, AveragedModel, lambda m: torch.save(m, io.BytesIO())):
                with pytest.raises(LayoutError, match="has only a shard of it"):
                    attempt(engine.module)
        else:
            twin, averaged = copy.deepcopy(engine.module), AveragedModel(engine.module)
            torch.save(engine.module, io.BytesIO())
            before = twin(IDS).detach()
            twin(IDS).sum().backward()  # a copy is nobody's: its gradients stay its own
            assert twin.get_parameter("head.weight").grad is not None
            assert not engine.state.gradients.held
            back(engine)
            engine.step()
            averaged.update_parameters(engine.module)
            assert not torch.equal(engine.module.get_parameter("head.weight"), before)
            assert torch.equal(twin.eval()(IDS), twin(IDS))
        engine.close()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_copy_belongs_to_no_engine_and_a_placeholder_says_that_it_cannot_be_copied(
    world_size: int,
) -> None:
    run_ranks(copies_body, world_size)


def state_dict_body(rank: int, world_size: int) -> None:
    for stage in STAGES:
        engine = engine_of(Small, stage)
        back(engine)
        engine.step()
        saved = engine.full_state_dict()
        assert list(saved) == list(Small().state_dict())
        torch.save(saved, io.BytesIO())
        fresh = Small()
        fresh.load_state_dict(saved)
        assert torch.equal(fresh.head.weight, engine.full_parameter("embedding.weight"))
        other = {name: 2 * value for name, value in saved.items()}
        with gathered(engine.module, modify=True):
            engine.module.load_state_dict(other)
        for name, value in engine.full_state_dict().items():
            assert torch.equal(value, other[name]), f"stage {stage}: {name}"
        engine.close()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_full_state_dict_has_every_name_and_can_be_loaded_again(world_size: int) -> None:
    run_ranks(state_dict_body, world_size)


def functional_body(rank: int, world_size: int) -> None:
    """functional_call gives other tensors for the length of a call; the engine goes on."""
    for stage in STAGES:
        engine, other = engine_of(Small, stage), engine_of(Small, stage)
        module = engine.module.eval()
        other.module.eval()
        values = {path: value + 1 for path, value in engine.full_parameters().items()}

        def loss(values: dict[str, Tensor], ids: Tensor, module: Any = module) -> Tensor:
            return functional_call(module, values, (ids,)).square().sum()

        slopes = grad(loss)(values, IDS)
        samples = vmap(grad(loss), in_dims=(None, 0))(values, IDS[:, None])
        for path, slope in slopes.items():
            assert torch.allclose(samples[path].sum(0), slope, rtol=1e-11), f"{stage}: {path}"
        leaves = {path: value.clone().requires_grad_() for path, value in values.items()}
        loss(leaves, IDS).backward()
        for path, slope in slopes.items():
            found = leaves[path].grad
            assert found is not None
            assert torch.allclose(found, slope, rtol=1e-12), f"{stage}: {path}"
        assert not engine.state.gradients.held
        for one in (engine, other):
            one(IDS + 0 * Draw(rank, 0)(4).long()).square().sum().backward()
            one.step()
        for path, value in other.full_parameters().items():
            assert torch.equal(engine.full_parameter(path), value), f"{stage}: {path}"
        engine.close()
        other.close()


@pytest.mark.parametrize("world_size", [1, 2])
def test_functional_call_of_an_engines_module_is_a_call_of_a_plain_one(world_size: int) -> None:
    run_ranks(functional_body, world_size)


def belongings_body(rank: int, world_size: int) -> None:
    for stage in STAGES:
        module, seen = nn.Linear(2, 1, bias=False, dtype=torch.float64), []
        weight: Any = module.weight
        weight.lr_mult = 0.5
        scaled = weight.register_hook(lambda g: 10 * g)
        weight.register_post_accumulate_grad_hook(lambda p, seen=seen: seen.append(p.grad is None))
        weight.grad = torch.full((1, 2), 100.0, dtype=torch.float64)
        x = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
        engine = Engine(module, torch.optim.SGD([weight], lr=1.0), stage=stage)
        engine(x).sum().backward()
        label = f"stage {stage}, W={world_size}"
        assert engine.full_gradients()["weight"].tolist() == [[110.0, 120.0]], label
        assert seen == [False], label
        assert module.weight.lr_mult == 0.5, label
        engine.zero_grad()
        scaled.remove()
        engine(x).sum().backward()
        assert engine.full_gradients()["weight"].tolist() == [[1.0, 2.0]], label
        engine.close()
        assert module.weight.lr_mult == 0.5, label
        module(x).sum().backward()
        assert len(seen) == 3 and module.weight.grad is not None, label


@pytest.mark.parametrize("world_size", [1, 2])
def test_hooks_attributes_and_gradients_of_a_parameter_outlive_the_engine(world_size: int) -> None:
    run_ranks(belongings_body, world_size)


def again_body(rank: int, world_size: int) -> None:
    for first in STAGES:
        for second in STAGES:
            module = nn.Linear(3, 2, dtype=torch.float64)
            x = Draw(rank, 0)(4, 3)
            for stage in (first, second):
                engine = Engine(module, torch.optim.SGD(module.parameters(), lr=0.5), stage=stage)
                engine(x).sum().backward()
                share = engine.full_gradient("bias")
                assert share.tolist() == [4.0, 4.0], f"{first} then {second}: {share}"
                engine.step()
                engine.close()
                assert all(p.grad is None for p in module.parameters())


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_module_may_have_one_engine_after_another_of_any_stage(world_size: int) -> None:
    run_ranks(again_body, world_size)
