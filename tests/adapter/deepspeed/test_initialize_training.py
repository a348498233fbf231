"""initialize(): what the engines of configs compute, beside plain torch on all the data."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fzero.adapter import Engine, initialize, sharded_init
from fzero.errors import LayoutError
from tests.adapter.deepspeed.configs import SGD, linear, merged
from tests.ranks import run_ranks
from tests.strategies import integers

gloo = pytest.mark.xdist_group("gloo")


def net() -> nn.Module:
    """Sizes that no number of ranks divides; float64, so that the order of sums is no matter."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def batch(rank: int, at: int) -> Tensor:
    return integers((2, 5), seed=10 * rank + at)


def train(engine: Engine, rank: int, counts: list[int]) -> list[bool]:
    """Some micro-batches before each step()."""
    due, at = [], 0
    for count in counts:
        for _ in range(count):
            engine(batch(rank, at)).square().sum().backward()
            at += 1
        due.append(engine.step())
    return due


def reference(optimizer: Any, world_size: int, groups: list[list[int]], **how: Any) -> list[Tensor]:
    """One process, all data: `groups` are the micro-batches of each update."""
    model = net()
    made: Optimizer = optimizer(model.parameters())
    for group in groups:
        divisor = world_size * (len(group) if how.get("average") else 1)
        for at in group:
            for rank in range(world_size):
                (model(batch(rank, at)).square().sum() / divisor).backward()
        if how.get("clip"):
            nn.utils.clip_grad_norm_(model.parameters(), how["clip"])
        made.step()
        made.zero_grad()
    return [p.detach() for p in model.parameters()]


def trained(rank: int, world_size: int, config: dict[str, Any], counts: list[int]) -> Any:
    engine = initialize(net(), config=config)
    due = train(engine, rank, counts)
    return list(engine.full_parameters().values()), due


def adamw(params: Any) -> Optimizer:
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.25)


TRAINING = {
    "managed": (
        {"gradient_accumulation_steps": 2, "gradient_clipping": 0},
        [1, 1, 1, 1],
        {"groups": [[0, 1], [2, 3]], "average": True},
    ),
    "two backwards, one step()": ({"gradient_clipping": 0}, [2, 1], {"groups": [[0, 1], [2]]}),
    "unmanaged": (
        {"managed_gradient_accumulation": False, "gradient_clipping": 0},
        [3, 1],
        {"groups": [[0, 1, 2], [3]], "average": True},
    ),
    "unmanaged sum": (
        {
            "managed_gradient_accumulation": False,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 0,
        },
        [3, 1],
        {"groups": [[0, 1, 2], [3]]},
    ),
    "clipped by default": ({}, [1, 1], {"groups": [[0], [1]], "clip": 1.0}),
    "clipped": ({"gradient_clipping": 0.5}, [1, 1], {"groups": [[0], [1]], "clip": 0.5}),
}


@gloo
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("name", TRAINING)
def test_training_by_a_config_is_training_on_all_data(name: str, stage: int) -> None:
    config, counts, how = TRAINING[name]
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 30}
    config = merged(config, SGD, {"zero_optimization": zero})

    def sgd(params: Any) -> Optimizer:
        return torch.optim.SGD(params, lr=0.5)

    wanted = reference(sgd, 2, **how)
    for params, due in run_ranks(trained, 2, config, counts):
        torch.testing.assert_close(params, wanted, rtol=1e-12, atol=1e-13)
        assert sum(due) == len(how["groups"])


ADAMS = [
    ("Adam", {}, torch.optim.AdamW, {"weight_decay": 0.0}),
    ("adamw", {}, torch.optim.AdamW, {"weight_decay": 0.0}),
    ("ADAM", {"weight_decay": 0.5}, torch.optim.AdamW, {"weight_decay": 0.5}),
    ("Adam", {"weight_decay": 0.5, "adam_w_mode": False}, torch.optim.Adam, {"weight_decay": 0.5}),
    (
        "AdamW",
        {"weight_decay": 0.5, "adam_w_mode": False},
        torch.optim.AdamW,
        {"weight_decay": 0.5},
    ),
    ("AdamW", {"torch_adam": True}, torch.optim.AdamW, {}),
    ("Adam", {"torch_adam": True, "adam_w_mode": False}, torch.optim.Adam, {}),
    ("Adam", {"betas": [0.5, 0.75], "bias_correction": True}, torch.optim.AdamW, {}),
    ("rmsprop", {"alpha": 0.5}, torch.optim.RMSprop, {"alpha": 0.5}),
    ("NAdam", {}, torch.optim.NAdam, {}),
]


@pytest.mark.parametrize(("name", "params", "cls", "same"), ADAMS)
def test_an_optimizer_type_means_what_it_means_to_deepspeed(
    name: str, params: dict[str, Any], cls: Any, same: dict[str, Any]
) -> None:
    if "betas" in params:
        same = {"betas": (0.5, 0.75), "weight_decay": 0.0}
    config = {"optimizer": {"type": name, "params": {"lr": 0.25, **params}}, "gradient_clipping": 0}
    before = dict(config["optimizer"]["params"])
    engine = initialize(net(), config=config)
    train(engine, 0, [1, 1])
    wanted = reference(lambda ps: cls(ps, lr=0.25, **same), 1, [[0], [1]])
    torch.testing.assert_close(list(engine.full_parameters().values()), wanted)
    assert config["optimizer"]["params"] == before


@pytest.mark.parametrize(
    ("optimizer", "seen"),
    [
        ({"type": "Lamb"}, r"optimizer.type = 'Lamb' is not supported"),
        ({"type": "OneBitAdam"}, r"optimizer.type = 'OneBitAdam' is not supported"),
        ({"type": "Muon"}, r"optimizer.type = 'Muon' is not supported"),
        ({"type": "Optimizer"}, r"optimizer.type = 'Optimizer' is not supported"),
        ({"type": "AdmaW"}, r"near: adamw"),
        ({"type": "SGD", "params": {"max_grad_norm": 1.0}}, r"(?s)max_grad_norm.*gradient_clip"),
        ({"type": "SGD", "params": {"learning_rate": 1.0}}, r"params.learning_rate = 1.0"),
        ({"type": "SGD", "params": {"moment": 1.0}}, r"near: momentum"),
        ({"type": "SGD", "params": {"lr": "auto"}}, r"params.lr = 'auto'"),
        ({"type": "SGD", "params": {"lr": -1.0}}, r"optimizer.params: Invalid learning rate"),
        ({"type": "SGD", "params": {"lr": "fast"}}, r"optimizer.params: "),
        ({"type": "Adam", "params": {"bias_correction": False}}, r"bias_correction"),
        ({"type": "LBFGS"}, r"LBFGS cannot step"),
        ({"params": {"lr": 1.0}}, r"optimizer.type = None"),
        ({"typ": "SGD"}, r"unknown key 'optimizer.typ'"),
    ],
)
def test_an_optimizer_that_cannot_be_made_is_refused(optimizer: dict[str, Any], seen: str) -> None:
    with pytest.raises(LayoutError, match=seen):
        initialize(linear(), config={"optimizer": optimizer})


def test_an_optimizer_in_two_places_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"optimizer.type = SGD, and initialize\(optimizer="):
        initialize(linear(), torch.optim.SGD, SGD)


def refused(rank: int, world_size: int, config: dict[str, Any]) -> None:
    initialize(linear(), config=config)


@gloo
def test_batch_sizes_count_the_ranks() -> None:
    given = {"train_batch_size": 12, "train_micro_batch_size_per_gpu": 3}
    config = merged(SGD, given, {"gradient_clipping": 0})
    wanted = reference(lambda ps: torch.optim.SGD(ps, lr=0.5), 2, [[0, 1]], average=True)
    for params, due in run_ranks(trained, 2, config, [1, 1]):
        torch.testing.assert_close(params, wanted)
        assert due == [False, True]
    seen = "train_batch_size=12 is not micro-batch size 3 x accumulation 4 x 2 ranks = 24"
    config = merged(given, {"gradient_accumulation_steps": 4})
    for kind, message in run_ranks(refused, 2, config, raises=True):
        assert (kind, seen in message) == ("LayoutError", True)


def differs(rank: int, world_size: int) -> None:
    config = {"optimizer": {"type": "SGD", "params": {"lr": 0.5 + rank}}}
    initialize(linear(), config=config)


@gloo
def test_ranks_with_other_configs_are_told_which_key_differs() -> None:
    for kind, message in run_ranks(differs, 2, raises=True):
        assert kind == "AxisError"
        assert "the config: rank 0 has optimizer.params = {'lr': 0.5}, rank 1" in message


def sharded(rank: int, world_size: int) -> None:
    with sharded_init():
        model = linear()
    initialize(model, config={"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}})


@gloo
def test_a_model_that_is_sharded_already_is_not_converted() -> None:
    for kind, message in run_ranks(sharded, 2, raises=True):
        assert (kind, "made under sharded_init" in message) == ("LayoutError", True)


def in_bf16(rank: int, world_size: int, stage: int, masters: bool) -> Any:
    """Small integers and powers of two: exact in bf16."""
    model = nn.Linear(3, 2, bias=False)
    nn.init.ones_(model.weight)
    bf16 = {"enabled": True}
    for key in ("bf16_master_weights_and_grads", "bf16_optimizer_states"):
        bf16[key] = not masters
    config = merged(SGD, {"bf16": bf16, "gradient_clipping": 0})
    config["optimizer"]["params"]["lr"] = 2.0**-10
    engine = initialize(model, config=merged(config, {"zero_optimization": {"stage": stage}}))
    for _ in range(4):
        x = torch.tensor([[1.0, 2.0, 4.0]], dtype=torch.bfloat16) * (rank + 1)
        engine(x).sum().backward()
        engine.step()
    values = engine.full_parameter("weight")
    return values, engine.full_parameters()["weight"].dtype


@gloo
@pytest.mark.parametrize("stage", range(4))
def test_bf16_training_keeps_small_updates_in_its_masters(stage: int) -> None:
    step = 1.5 * 2.0**-10 * torch.tensor([[1.0, 2.0, 4.0]] * 2)  # 1 - step rounds to a bf16
    for values, dtype in run_ranks(in_bf16, 2, stage, True):
        assert dtype is torch.float32
        assert torch.equal(values, 1 - 4 * step)
    for values, dtype in run_ranks(in_bf16, 2, stage, False):
        assert dtype is torch.bfloat16
        assert not torch.equal(values.float(), 1 - 4 * step)
