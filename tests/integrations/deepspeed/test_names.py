"""What DeepSpeed's users call: boundaries, scaling by accumulation, access by parameter object."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from fzero.adapter import initialize
from fzero.errors import FzeroError, LayoutError, PhaseError
from fzero.integrations import deepspeed
from fzero.integrations.deepspeed import DeepSpeedEngine
from tests.adapter.nets import Odd
from tests.adapter.on_ranks import Place, at_places, on_ranks
from tests.adapter.plain import LR, adamw_of, back, same, seeded
from tests.integrations.deepspeed.configs import SGD, linear, merged

X = torch.tensor([[1.0, 2.0, 4.0]])


def engine_of(stage: int = 0, steps: int = 1, **config: Any) -> DeepSpeedEngine:
    model = linear()
    for p in model.parameters():
        nn.init.ones_(p)
    given = {"gradient_accumulation_steps": steps, "gradient_clipping": 0, **config}
    zero = {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
    return initialize(model, config=merged(SGD, zero, given))


def weight(engine: DeepSpeedEngine) -> Tensor:
    """What the updates have taken from the first row of the weight, over lr X."""
    return ((1 - engine.full_parameter("weight")[0]) / (LR * X[0])).double()


@at_places(1, 2)
def test_an_update_divides_by_the_accumulation_unless_it_is_told_not_to(at: Place) -> None:
    engine = engine_of(at.stage, steps=4)
    seen = []
    for number in range(4):
        loss = engine(X)[:, 0].sum()
        assert engine.is_gradient_accumulation_boundary() is (number == 3)
        returned = engine.backward(loss, scale_wrt_gas=number != 1)
        assert (
            torch.equal(returned, loss / (1 if number == 1 else 4)) and not returned.requires_grad
        )
        engine.step()
        seen.append((engine.was_step_applied(), engine.global_steps))
    assert seen == [(False, 0), (False, 0), (False, 0), (True, 1)]
    assert torch.equal(weight(engine), torch.full((3,), 7 / 4, dtype=torch.float64))
    with pytest.raises(RuntimeError):
        engine.backward(loss, scale_wrt_gas=False)  # its graph is gone
    engine.backward([engine(X)[:, 0].sum(), engine(X)[:, 0].sum()], scale_wrt_gas=False)
    assert engine.full_gradient("weight")[0].tolist() == [2.0, 4.0, 8.0]


@at_places(1, 2)
def test_a_boundary_that_is_set_holds_until_it_is_set_again(at: Place) -> None:
    engine = engine_of(at.stage, steps=2)

    def micro_batch() -> tuple[bool, bool, float]:
        boundary = engine.is_gradient_accumulation_boundary()
        engine.backward(engine(X)[:, 0].sum())
        return boundary, engine.step(), weight(engine)[0].item()

    engine.set_gradient_accumulation_boundary(False)
    assert [micro_batch() for _ in range(3)] == [(False, False, 0.0)] * 3
    engine.set_gradient_accumulation_boundary(True)
    assert micro_batch() == (True, True, 2.0)  # four halves
    assert micro_batch() == (True, True, 2.5)
    assert engine.global_steps == 2
    engine.set_gradient_accumulation_boundary(None)
    assert [micro_batch() for _ in range(2)] == [(False, False, 2.5), (True, True, 3.5)]


def test_an_engine_that_averages_over_what_comes_has_no_boundary_to_set() -> None:
    engine = engine_of(managed_gradient_accumulation=False, gradient_accumulation_steps=None)
    assert engine.is_gradient_accumulation_boundary()
    for call in (
        lambda: engine.set_gradient_accumulation_boundary(True),
        lambda: engine.backward(engine(X).sum(), scale_wrt_gas=False),
    ):
        with pytest.raises(PhaseError, match="managed_gradient_accumulation = false"):
            call()


def test_a_skipped_update_is_a_step_that_was_not_applied() -> None:
    fp16 = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}
    engine = initialize(linear(), config=merged(SGD, {"fp16": fp16}))
    seen = []
    for x in (1.0, float("inf"), 1.0):
        engine.backward(engine(torch.full((1, 3), x, dtype=torch.float16)).float().sum())
        engine.step()
        seen.append((engine.was_step_applied(), engine.global_steps, engine.skipped_steps))
    assert seen == [(True, 1, 0), (False, 2, 1), (True, 3, 1)]


@on_ranks(2)
def test_the_engine_says_what_its_config_says() -> None:
    engine = engine_of(2, train_batch_size=12, gradient_accumulation_steps=None)
    assert engine.train_batch_size() == 12 and engine.train_micro_batch_size_per_gpu() == 6
    assert engine.gradient_accumulation_steps() == 1 and engine.zero_optimization_stage() == 2
    assert engine.get_lr() == [LR] and engine.get_global_grad_norm() is None
    micro = engine_of(train_micro_batch_size_per_gpu=3, gradient_accumulation_steps=2)
    assert micro.train_batch_size() == 12
    assert (engine_of().train_batch_size(), engine_of().get_global_grad_norm()) == (None, None)
    clipped = engine_of(gradient_clipping=1.0)
    with clipped.coalesce_grad_reduction():
        clipped.backward(clipped(X)[:, 0].sum())
        clipped.backward(clipped(X)[:, 0].sum())
    clipped.step()
    assert clipped.get_global_grad_norm() == pytest.approx(2 * 22**0.5)
    clipped.destroy()
    assert clipped.closed


@on_ranks(2)
def test_as_a_tuple_it_returns_what_deepspeed_returns(rank: int) -> None:
    data = TensorDataset(torch.arange(10.0)[:, None] * torch.ones(3))
    model: Any = linear()
    path = {"train_batch_size": 4, **SGD}
    engine, optimizer, loader, scheduler = initialize(
        args=Namespace(deepspeed_config=path),
        model=model,
        model_parameters=[{"params": [model.weight], "lr": 0.5}, {"params": [model.bias]}],
        training_data=data,
        as_tuple=True,
    )
    assert engine.module is model and optimizer is engine.optimizer and scheduler is None
    assert loader is engine.training_dataloader and engine.get_lr() == [0.5, LR]
    own = [batch[:, 0].tolist() for (batch,) in loader]
    assert [len(batch) for batch in own] == [2, 2, 1]
    both: list[Any] = [None, None]
    torch.distributed.all_gather_object(both, own)
    assert sorted(x for rank in both for batch in rank for x in batch) == list(range(10))
    path = {**path, "dataloader_drop_last": True}
    least = initialize(linear(), config=path, training_data=data, collate_fn=len)
    assert list(least.training_dataloader) == [2, 2]
    some: Any = linear()
    only = initialize(some, config=SGD, model_parameters=[some.bias])
    before = only.full_parameters()
    only.backward(only(X).sum())
    only.step()
    after = only.full_parameters()
    assert torch.equal(after["weight"], before["weight"])
    assert not torch.equal(after["bias"], before["bias"])


# Functions of a parameter.


def of_config(stage: int, persist: int = 0) -> tuple[DeepSpeedEngine, dict[str, nn.Parameter]]:
    model = seeded(Odd)
    zero = {"stage": stage, "reduce_bucket_size": 10, "param_persistence_threshold": persist}
    config = {"zero_optimization": zero, "gradient_clipping": 0}
    engine = initialize(model, adamw_of(model), config)
    return engine, dict(engine.named_parameters())


def has(value: Tensor | None) -> Tensor:
    assert value is not None
    return value


def pieces(mine: Tensor | None, world_size: int, stage: int) -> Tensor:
    """The 1-D pieces of all ranks, one after the other; at stage 0 each has all."""
    assert has(mine).ndim == 1
    found: list[Any] = [mine]
    if stage and world_size > 1:
        found = [None] * world_size
        torch.distributed.all_gather_object(found, mine)
    return torch.cat(found)


@at_places(1, 3)
def test_a_parameter_gives_its_gradient_values_and_states_whole_and_in_pieces(at: Place) -> None:
    engine, params = of_config(at.stage)
    reference = at.plain(Odd, adamw_of)
    back(engine, at.draw(0))
    engine.step()
    reference.step(reference.run(back, 0))
    wanted = reference.run(back, 1)
    back(engine, at.draw(1))
    assert reference.optimizer is not None
    for path, p in reference.module.named_parameters():
        mine = params[path]
        local = deepspeed.safe_get_local_fp32_param(mine)
        if not p.requires_grad:
            assert deepspeed.safe_get_full_fp32_param(mine) is None
            assert deepspeed.safe_get_full_grad(mine) is None
            assert deepspeed.safe_get_local_grad(mine) is None
            assert deepspeed.safe_get_full_optimizer_state(mine, "exp_avg") is None
            assert deepspeed.safe_get_local_optimizer_state(mine, "exp_avg") is None
            continue
        same({path: deepspeed.safe_get_full_fp32_param(mine)}, {path: p.detach()}, 1e-9)
        own = reference.optimizer.state[p]  # of what was not used there is none
        state = own.get("exp_avg", torch.zeros_like(p))
        found = {
            "gradient": pieces(deepspeed.safe_get_local_grad(mine), at.ranks, at.stage),
            "values": pieces(local, at.ranks, at.stage),
            "state": pieces(
                deepspeed.safe_get_local_optimizer_state(mine, "exp_avg"), at.ranks, at.stage
            ),
            "full gradient": has(deepspeed.safe_get_full_grad(mine)).reshape(-1),
            "full state": has(deepspeed.safe_get_full_optimizer_state(mine, "exp_avg")).reshape(-1),
        }
        gradient, values = wanted[path].reshape(-1), p.detach().reshape(-1)
        state = state.reshape(-1)
        wholes = (gradient, values, state, gradient, state)
        expected = dict(zip(found, wholes, strict=True))
        same(found, expected, 1e-9, path)
        count = has(deepspeed.safe_get_local_optimizer_state(mine, "step"))
        assert count.item() == len(own) // 3


@at_places(1, 3)
def test_what_is_set_by_pieces_is_what_the_update_uses(at: Place) -> None:
    engine, params = of_config(at.stage, persist=100)  # what is gathered once is gathered anew
    reference = at.plain(Odd, adamw_of)
    back(engine, at.draw(0))
    engine.step()
    reference.step(reference.run(back, 0))
    path = "a.weight"
    mine, plain = params[path], reference.module.get_parameter(path)
    with torch.no_grad():
        engine(at.draw(9)(2, 3))  # from here on every parameter is there
    if at.stage == 3:
        deepspeed.safe_set_local_fp32_param(
            mine, 2 * has(deepspeed.safe_get_local_fp32_param(mine))
        )
        plain.data.mul_(2)
    wanted = reference.run(back, 1)
    back(engine, at.draw(1))
    engine.full_gradients()  # reduced from here on
    deepspeed.safe_set_local_grad(mine, 3 * has(deepspeed.safe_get_local_grad(mine)))
    wanted[path] = 3 * wanted[path]
    deepspeed.safe_update_full_grad_vectorized(
        [params["b.weight"], params["fixed"]], lambda gradient, p: gradient * p.numel()
    )
    wanted["b.weight"] = wanted["b.weight"] * params["b.weight"].numel()
    held = has(deepspeed.safe_get_local_optimizer_state(mine, "exp_avg"))
    deepspeed.safe_set_local_optimizer_state(mine, 2 * held, "exp_avg")
    assert reference.optimizer is not None
    reference.optimizer.state[plain]["exp_avg"].mul_(2)
    same({path: deepspeed.safe_get_full_grad(mine)}, {path: wanted[path]}, 1e-9)
    engine.step()
    same(engine.full_parameters(), reference.step(wanted), 1e-9)


def test_of_16_bits_the_master_is_what_is_given_and_set() -> None:
    model = linear(torch.bfloat16)
    config = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
    engine = initialize(model, torch.optim.Adam, config)
    p = next(engine.parameters())
    fine = torch.full((2, 3), 1 + 2.0**-20)
    deepspeed.safe_set_local_fp32_param(p, fine.flatten())
    assert torch.equal(has(deepspeed.safe_get_full_fp32_param(p)), fine)
    assert torch.equal(engine.full_state_dict()["weight"], torch.ones(2, 3, dtype=torch.bfloat16))
    deepspeed.safe_set_full_fp32_param(p, 2 * fine)
    assert torch.equal(has(deepspeed.safe_get_local_fp32_param(p)), 2 * fine.flatten())
    deepspeed.safe_set_full_optimizer_state(p, fine, "exp_avg")
    assert torch.equal(has(deepspeed.safe_get_local_optimizer_state(p, "exp_avg")), fine.flatten())


WRONG: list[tuple[Callable[[Any, nn.Parameter], Any], type[FzeroError], str]] = [
    (
        lambda e, p: deepspeed.safe_get_full_grad(nn.Parameter(p.data)),
        LayoutError,
        "no open engine",
    ),
    (lambda e, p: deepspeed.safe_set_local_grad(p, p), PhaseError, "no reduced gradients"),
    (lambda e, p: deepspeed.safe_set_local_fp32_param(p, p), LayoutError, "at stage 2"),
    (
        lambda e, p: deepspeed.safe_set_local_optimizer_state(p, torch.ones(7), "exp_avg"),
        LayoutError,
        "has 6 elements of weight, the new value 7",
    ),
    (lambda e, p: deepspeed.safe_get_local_optimizer_state(p, "exp"), LayoutError, "'exp'"),
    (lambda e, p: e.save_checkpoint(""), LayoutError, "save_checkpoint: the folder is ''"),
    (lambda e, p: e.save_checkpoint(None), LayoutError, "save_checkpoint: the folder is None"),
    (lambda e, p: e.load_checkpoint(None), LayoutError, "load_checkpoint: the folder is None"),
    (lambda e, p: e.offload_states(device="nvme"), LayoutError, "device='nvme'"),
]


@pytest.mark.parametrize(("call", "kind", "seen"), WRONG)
def test_what_cannot_be_is_refused(call: Any, kind: type[FzeroError], seen: str) -> None:
    engine = initialize(linear(), torch.optim.Adam, {"zero_optimization": {"stage": 2}})
    with pytest.raises(kind, match=seen):
        call(engine, next(engine.parameters()))


class Writer(nn.Linear):
    config = "of the model"

    def generate(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


@at_places(1, 2)
def test_the_engine_says_where_it_runs_and_has_what_its_module_has(at: Place) -> None:
    zero = {"zero_optimization": {"stage": at.stage, "stage3_param_persistence_threshold": 0}}
    engine = initialize(Writer(3, 2), config=merged(SGD, zero))
    assert engine.device == engine.module.weight.device == torch.device("cpu")
    assert (engine.global_rank, engine.world_size) == (engine.axis.rank, engine.axis.size)
    assert engine.local_rank == 0
    weight = engine.full_parameter("weight")
    assert torch.equal(engine.generate(X), X @ weight.T) and engine.config == "of the model"
    assert engine.stage == at.stage and not hasattr(engine, "_parameters")
    with pytest.raises(AttributeError, match=r"(?s)its Writer has 'set_lr'.*deepspeed_config.md"):
        engine.set_lr(1.0)
