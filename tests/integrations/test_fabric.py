"""Lightning Fabric: two models on ranks train as they do in one process, and are saved."""

from __future__ import annotations

import copy
import importlib
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fzero.errors import LayoutError
from tests.adapter.on_ranks import on_ranks
from tests.integrations.launched import started
from tests.ranks import spawn_script

TIER_INPUTS = ("fzero/integrations",)  # tests/tiers.py: a push that changes them runs these tests

pytest.importorskip("lightning_fabric")

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = 4


def example() -> Any:
    sys.path.insert(0, str(EXAMPLES))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module("fabric_gan")
    finally:
        sys.path.remove(str(EXAMPLES))


def fabric_of(strategy: Any, ranks: int, **options: Any) -> Any:
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=ranks, strategy=strategy, **options)
    fabric.launch()
    return fabric


def strategy_of(stage: int, **options: Any) -> Any:
    from fzero.integrations.fabric import FzeroStrategy

    return FzeroStrategy(stage=stage, **options)


def parameters(gan: Any) -> dict[str, torch.Tensor]:
    """The whole values of both models."""
    strategy, found = gan.fabric.strategy, {}
    for model in (gan.generator.module, gan.discriminator.module):
        values = strategy.get_module_state_dict(model)
        found |= {f"{len(found)} {name}": x.clone() for name, x in values.items()}
    return found


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-10, msg=name)


@on_ranks(pytest.param(1, marks=pytest.mark.slow), 2, timeout_s=200)
def test_manual_optimization_of_two_models_goes_on_from_a_checkpoint_of_another_stage(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    module = example()
    with started(0, 1):
        plain = module.Gan(fabric_of("auto", 1))
        plain.fabric.no_backward_sync = lambda model: warnings.catch_warnings()  # nothing to sync
        wanted = [plain.step(number) for number in range(2 * STEPS)]
    for stage, other in ((0, 2), (2, 3), (3, 0)):
        with started(rank, world_size):
            gan = module.Gan(fabric_of(strategy_of(stage), world_size))
            losses = [gan.step(number) for number in range(STEPS)]
            gan.fabric.save(tmp_path / str(stage), gan.state(STEPS))
            losses += [gan.step(number) for number in range(STEPS, 2 * STEPS)]
            torch.testing.assert_close(losses, wanted, rtol=1e-10, atol=1e-10)
            same(parameters(gan), parameters(plain))
            engines = {engine.stage for engine in gan.fabric.strategy.engines}
            assert engines == {stage}
            again = module.Gan(fabric_of(strategy_of(other), world_size))
            state = again.state(0)
            again.fabric.load(tmp_path / str(stage), state)
            assert state["number"] == STEPS
            resumed = [again.step(number) for number in range(STEPS, 2 * STEPS)]
            torch.testing.assert_close(resumed, wanted[STEPS:], rtol=1e-10, atol=1e-10)
            same(parameters(again), parameters(plain))


@on_ranks(2, timeout_s=200)
def test_a_raw_state_dict_is_loaded_and_mixed_precision_is_the_engines(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    with started(rank, world_size):
        fabric = fabric_of(strategy_of(3), world_size, precision="bf16-mixed")
        model, values = nn.Linear(3, 2), nn.Linear(3, 2).state_dict()
        model, _ = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        if rank == 0:
            torch.save(values, tmp_path / "raw.pt")
        fabric.barrier()
        fabric.load_raw(tmp_path / "raw.pt", model)
        same(fabric.strategy.get_module_state_dict(model.module), values)
        seen: list[torch.dtype] = []
        model.module.register_forward_hook(lambda _, __, out: seen.append(out.dtype))
        assert model(torch.ones(1, 3)).dtype is torch.float32
        assert seen == [torch.bfloat16]
        (engine,) = fabric.strategy.engines
        assert engine.state.setup.policy.autocast is torch.bfloat16


@on_ranks(2, timeout_s=200)
def test_a_loss_of_a_derivative_and_a_checkpoint_while_gradients_wait(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    x = torch.tensor([[1.0, 2.0], [3.0, -1.0]])

    def loss_of(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        rows = rows.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(rows).sum(), rows, create_graph=True)
        return slope.square().sum(1).mean() + model(rows).mean()

    for stage in (2, 3):
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
        model = copy.deepcopy(plain)
        with started(rank, world_size):
            fabric = fabric_of(strategy_of(stage), world_size)
            ready = fabric.setup_module(model)
            adam = torch.optim.AdamW(model.parameters(), lr=0.1)
            optimizer = fabric.setup_optimizers(adam)  # after its model
            loss_of(ready, x[rank : rank + 1]).backward()
            fabric.save(tmp_path / str(stage), {"model": ready, "optimizer": optimizer})
            optimizer.step()
            before = {name: value.clone() for name, value in plain.state_dict().items()}
            loss_of(plain, x).backward()
            torch.optim.AdamW(plain.parameters(), lr=0.1).step()
            found = fabric.strategy.get_module_state_dict(model)
            torch.testing.assert_close(found, dict(plain.state_dict()))
            fabric.load(tmp_path / str(stage), {"model": ready, "optimizer": optimizer})
            same(fabric.strategy.get_module_state_dict(model), before)


@on_ranks(2, timeout_s=200)
def test_what_the_engine_cannot_do_is_refused_by_name(rank: int, world_size: int) -> None:
    with started(rank, world_size):
        fabric = fabric_of(strategy_of(2), world_size)
        model, other, third = (nn.Linear(2, 1) for _ in range(3))
        first, second = (torch.optim.SGD(x.parameters(), lr=0.1) for x in (model, other))
        half = torch.optim.SGD([other.bias], lr=0.1)
        attempts: dict[str, Any] = {
            "find_unused_parameters": lambda: strategy_of(2, find_unused_parameters=True),
            "stage=5": lambda: strategy_of(5),
            "optimizer was not set up": lambda: fabric.setup(third)(torch.ones(1, 2)),
            "of the 1 that wait": lambda: fabric.setup_optimizers(first),
            "are not all of one model": lambda: fabric.setup(other, second, half),
        }
        for words, attempt in attempts.items():
            with pytest.raises(LayoutError, match=words):
                attempt()
        shared, optimizer = fabric.setup(model, first)
        fabric.backward(shared(torch.ones(1, 2)).sum())
        attempts = {
            "closure": lambda: optimizer.step(lambda: 1.0),
            "alone": lambda: fabric.save("nowhere", {"optimizer": optimizer}),
            "filter": lambda: fabric.save("nowhere", {"m": shared}, filter={"m": lambda *_: True}),
        }
        for words, attempt in attempts.items():
            with pytest.raises(LayoutError, match=words):
                attempt()
        assert fabric.clip_gradients(shared, optimizer, max_norm=1, norm_type=1) == 3.0
        fabric.clip_gradients(shared, optimizer, clip_val=0.25)
        assert all(p.grad.norm(float("inf")) == 0.25 for p in shared.parameters())
        optimizer.step()  # nothing was changed


@pytest.mark.slow
@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_example_goes_on_as_if_it_had_not_stopped(ranks: int, tmp_path: Path) -> None:
    args = ("--stage", "3", "--folder", str(tmp_path))
    done = spawn_script("examples/fabric_gan.py", ranks, args)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert f"{ranks} rank(s), stage 3" in done.stdout
