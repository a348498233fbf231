"""initialize(): dtypes of parameters and buffers, and schedulers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

from fzero.adapter import Engine, initialize
from fzero.errors import LayoutError
from tests.adapter.deepspeed.configs import SGD, linear, merged


class Tied(nn.Module):
    """Two parameters on one memory, a frozen one, a buffer of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.second = nn.Linear(2, 2)
        self.second.weight.data = self.first.weight.data
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("table", torch.full((2,), 1 / 3))
        self.register_buffer("index", torch.arange(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def test_bf16_converts_parameters_keeps_buffers_and_shared_memory_and_has_fp32_masters() -> None:
    model = Tied()
    engine = initialize(model, config=merged(SGD, {"bf16": {"enabled": True}}))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.first.weight.data_ptr() == model.second.weight.data_ptr()
    assert (model.table.dtype, model.index.dtype) == (torch.float32, torch.int64)
    assert engine.local_parameter("first.bias").dtype is torch.float32
    engine(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
    assert engine.full_gradient("first.bias").dtype is torch.bfloat16


def test_a_buffer_dtype_converts_floating_buffers_only() -> None:
    model = Tied()
    initialize(model, config={"data_types": {"buffer_dtype": "bf16"}})
    assert (model.table.dtype, model.index.dtype) == (torch.bfloat16, torch.int64)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_a_refused_engine_leaves_the_model_in_its_dtype() -> None:
    model, other = linear(), linear()
    before = [p.clone() for p in model.parameters()]
    wrong = torch.optim.SGD(other.parameters(), lr=0.5)
    bf16 = {"bf16": {"enabled": True}}
    leaf = {"zero_optimization": {"leaf_module": {"names": ["experts"]}}}
    for optimizer, config in ((wrong, bf16), (None, merged(bf16, leaf))):
        with pytest.raises(LayoutError):
            initialize(model, optimizer, config)
        assert all(torch.equal(p, x) for p, x in zip(model.parameters(), before, strict=True))
        assert {p.dtype for p in model.parameters()} == {torch.float32}


# Schedulers.


def test_the_scheduler_steps_after_each_update_and_after_no_other_call() -> None:
    config = merged(SGD, {"gradient_accumulation_steps": 2})
    engine = initialize(linear(), config=config, lr_scheduler=lambda o: StepLR(o, 1, gamma=0.5))
    seen = []
    for _ in range(4):
        engine(torch.ones(1, 3)).sum().backward()
        engine.step()
        seen.append(engine.optimizer.param_groups[0]["lr"])
    assert seen == [0.5, 0.25, 0.25, 0.125]


def test_a_scheduler_of_the_given_optimizer_goes_on_alone_once_the_engine_is_closed() -> None:
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=8.0)
    scheduler = StepLR(optimizer, 1, gamma=0.5)
    engine: Engine = initialize(model, optimizer, {}, lr_scheduler=scheduler)
    engine(torch.ones(1, 3)).sum().backward()
    engine.step()
    assert scheduler.get_last_lr() == [4.0]
    engine.close()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert scheduler.get_last_lr() == [4.0]


def test_a_scheduler_that_cannot_be_stepped_is_refused() -> None:
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=8.0)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(LayoutError, match="lr_scheduler is a ReduceLROnPlateau"):
        initialize(model, optimizer, {}, lr_scheduler=plateau)
    with pytest.raises(LayoutError, match="lr_scheduler is of another optimizer"):
        initialize(model, config=SGD, lr_scheduler=StepLR(optimizer, 1))
    with pytest.raises(LayoutError, match="there is no optimizer"):
        initialize(model, config={}, lr_scheduler=lambda o: StepLR(o, 1))
