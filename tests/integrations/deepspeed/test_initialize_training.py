"""initialize(): what the engines of configs compute, beside plain torch on all the data."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fzero
from fzero.adapter import Engine, initialize, sharded_init
from fzero.errors import AxisError, LayoutError
from tests.adapter.nets import Net
from tests.adapter.on_ranks import on_ranks
from tests.adapter.plain import Draw, Reference, back, learning, same, seeded, update
from tests.integrations.deepspeed.configs import SGD, linear, merged


@pytest.mark.parametrize(
    ("name", "params", "cls", "options"),
    [
        ("Adam", {}, torch.optim.AdamW, {"weight_decay": 0.0}),
        ("adamw", {}, torch.optim.AdamW, {"weight_decay": 0.0}),
        ("ADAM", {"weight_decay": 0.5}, torch.optim.AdamW, {"weight_decay": 0.5}),
        (
            "Adam",
            {"weight_decay": 0.5, "adam_w_mode": False},
            torch.optim.Adam,
            {"weight_decay": 0.5},
        ),
        (
            "AdamW",
            {"weight_decay": 0.5, "adam_w_mode": False},
            torch.optim.AdamW,
            {"weight_decay": 0.5},
        ),
        ("AdamW", {"torch_adam": True}, torch.optim.AdamW, {}),
        ("Adam", {"torch_adam": True, "adam_w_mode": False}, torch.optim.Adam, {}),
        (
            "Adam",
            {"betas": [0.5, 0.75], "bias_correction": True},
            torch.optim.AdamW,
            {"betas": (0.5, 0.75), "weight_decay": 0.0},
        ),
        ("rmsprop", {"alpha": 0.5}, torch.optim.RMSprop, {"alpha": 0.5}),
        ("NAdam", {}, torch.optim.NAdam, {}),
    ],
)
def test_an_optimizer_type_means_what_it_means_to_deepspeed(
    name: str, params: dict[str, Any], cls: Any, options: dict[str, Any]
) -> None:
    config = {"optimizer": {"type": name, "params": {"lr": 0.25, **params}}, "gradient_clipping": 0}
    before = dict(config["optimizer"]["params"])
    engine = initialize(seeded(Net), config=config)
    reference = Reference(Net, 1, lambda m: cls(learning(m).values(), lr=0.25, **options))
    for number in range(2):
        update(engine, reference, 0, number, tol=1e-9)
    assert config["optimizer"]["params"] == before


@on_ranks(1, 2)
@pytest.mark.parametrize("name", ["Lion", "FusedLion"])
def test_lion_is_the_rule_of_the_functional_optimizers(rank: int, name: str) -> None:
    params = {"lr": 0.25, "betas": [0.5, 0.75], "weight_decay": 0.5}
    optimizer = {"type": name, "params": params}
    config = {"optimizer": optimizer, "gradient_clipping": 0, "zero_optimization": {"stage": 2}}
    engine = initialize(seeded(Net), config=config)
    rule = fzero.optim.lion(0.25, betas=(0.5, 0.75), weight_decay=0.5)
    other = Engine(seeded(Net), rule, stage=0)
    for number in range(3):
        for e in (engine, other):
            back(e, Draw(rank, number))
            e.step()
        same(engine.full_parameters(), other.full_parameters(), 1e-12)


@on_ranks(2)
def test_batch_sizes_count_the_ranks() -> None:
    given = {"train_batch_size": 12, "train_micro_batch_size_per_gpu": 3}
    engine = initialize(linear(), config=given)
    assert engine.options.updating.micro_batches == 2
    seen = "train_batch_size = 12: it is not micro-batch size 3 x accumulation 4 x 2 ranks = 24"
    with pytest.raises(LayoutError, match=seen):
        initialize(linear(), config={**given, "gradient_accumulation_steps": 4})


@on_ranks(2)
def test_ranks_with_other_configs_are_told_which_key_differs(rank: int) -> None:
    config = {"optimizer": {"type": "SGD", "params": {"lr": 0.5 + rank}}}
    seen = r"the config: rank 0 has optimizer.params = \{'lr': 0.5\}, rank 1"
    with pytest.raises(AxisError, match=seen):
        initialize(linear(), config=config)


@on_ranks(2)
def test_a_model_that_is_sharded_already_is_not_converted() -> None:
    with sharded_init():
        model = linear()
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
    with pytest.raises(LayoutError, match=r"weight is torch.float32, made under sharded_init"):
        initialize(model, config=config)


@on_ranks(1, 2)
@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_one_config_serves_the_construction_and_the_engine(name: str, dtype: torch.dtype) -> None:
    """Parameters are made sharded, in 16 bits; masters and loss scale are the config's."""
    with sharded_init(dtype=dtype):
        model = seeded(linear)
    assert {p.dtype for p in model.parameters()} == {dtype}
    config = {name: {"enabled": True}, "zero_optimization": {"stage": 3}}
    engine = initialize(model, config=merged(SGD, config))
    other = initialize(seeded(linear), config=merged(SGD, config))
    assert engine.bfloat16_enabled() is (name == "bf16")
    assert engine.fp16_enabled() is (name == "fp16")
    x = torch.ones(1, 3, dtype=dtype)
    for one in (engine, other):
        one.backward(one(x).float().sum())
        one.step()
    same(engine.full_parameters(), other.full_parameters(), 2.0**-7)  # masters of rounded values
    assert repr(engine.options.updating.loss_scale) == repr(other.options.updating.loss_scale)
    assert (engine.state.scale is None) is (other.state.scale is None)
