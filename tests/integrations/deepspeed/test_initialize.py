"""initialize(): keys of a DeepSpeed config set options of the engine; dtypes, schedulers."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

from fzero import Compress, codecs
from fzero.adapter import Engine, LeafSpec, initialize
from fzero.errors import LayoutError
from fzero.state.setup import Offload
from tests.adapter.plain import LR
from tests.integrations.deepspeed.configs import SGD, batch, linear, merged, nested

AS_BF16 = codecs.cast(torch.bfloat16)
PARTS = ("module", "updating", "reduction", "gathering")


def options_of(config: dict[str, Any]) -> dict[str, Any]:
    """What the engine of a config was made with, flat."""
    engine = initialize(linear(), config=config)
    flat: dict[str, Any] = {"stage": engine.stage}
    for name in (one.name for one in fields(engine.options)):
        value = getattr(engine.options, name)
        parts = [one.name for one in fields(value)] if name in PARTS else []
        flat |= {part: getattr(value, part) for part in parts} or {name: value}
    return flat


def test_an_empty_config_gives_deepspeeds_defaults() -> None:
    assert options_of({}) == {
        "stage": 0,
        "check_finite": False,
        "bucket_bytes": 4 * 500_000_000,
        "contiguous_gradients": True,
        "overlap": True,
        "ordered": False,
        "accumulate_dtype": torch.float32,
        "codec": None,
        "over": "all",
        "reduce_op": "mean",
        "gradient_predivide_factor": 1.0,
        "compress": None,
        "transforms": (),
        "master_weights": True,
        "state_dtype": None,
        "stochastic_rounding": False,
        "offload": Offload(),
        "local": None,
        "max_norm": 1.0,
        "micro_batches": 1,
        "units": None,
        "average_micro_batches": False,
        "loss_scale": None,
        "autocast": None,
        "leaf_modules": LeafSpec(),
        "own": (),
        "optimizer_over": "shard",
        "logical_ranks": None,
        "seed": 0,
        "trainable": None,
        "frozen": None,
        "reshard_after_forward": False,
        "prefetch_numel": 50_000_000,
        "persistent": (),
        "weighted": False,
        "persistence_threshold_numel": 100_000,
    }


def zero(key: str, value: Any) -> dict[str, Any]:
    return {"zero_optimization": {key: value}}


BF16 = {"enabled": True}
ONCE = {"micro_batches": 1, "average_micro_batches": False}
FOUR_TIMES = {"micro_batches": 4, "average_micro_batches": True}


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        (zero("stage", 3), {"stage": 3}),
        (zero("contiguous_gradients", False), {"contiguous_gradients": False}),
        (zero("overlap_comm", False), {"overlap": False}),
        (zero("overlap_comm", None), {"overlap": True}),
        (zero("reduce_bucket_size", 2e6), {"bucket_bytes": 8_000_000}),
        (zero("allgather_bucket_size", 7), {"bucket_bytes": 28}),
        (zero("stage3_prefetch_bucket_size", 5e3), {"prefetch_numel": 5000}),
        (zero("stage3_param_persistence_threshold", 0), {"persistence_threshold_numel": 0}),
        (zero("stage3_max_live_parameters", 7), {"reshard_after_forward": True}),
        (zero("stage3_max_live_parameters", 8), {"reshard_after_forward": False}),
        (zero("stage3_max_reuse_distance", 15), {"reshard_after_forward": True}),
        (zero("stage3_max_reuse_distance", 16), {"reshard_after_forward": False}),
        (
            zero("leaf_module", {"classes": ["Linear"], "names": "", "name_suffixes": []}),
            {"leaf_modules": LeafSpec(classes=("Linear",), names=("",))},
        ),
        (
            zero("stage3_module_granularity_threshold", 5),
            {"leaf_modules": LeafSpec(granularity_threshold_numel=5)},
        ),
        ({"managed_gradient_accumulation": False}, {"average_micro_batches": True}),
        (
            {"managed_gradient_accumulation": False, "gradient_accumulation_steps": 1},
            {"average_micro_batches": False},
        ),
        ({"gradient_clipping": 0}, {"max_norm": None}),
        ({"gradient_clipping": 0.25}, {"max_norm": 0.25}),
        (
            {"communication_data_type": "bf16"},
            {"compress": Compress(gradients=codecs.cast(torch.bfloat16))},
        ),
        (
            {"bf16": BF16, "data_types": {"grad_accum_dtype": "fp32"}},
            {"accumulate_dtype": torch.float32},
        ),
        (
            {"bf16": BF16},
            {
                "accumulate_dtype": torch.bfloat16,
                "bucket_bytes": 2 * 500_000_000,
                "master_weights": True,
            },
        ),
        (
            {"bf16": BF16 | {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}},
            {"master_weights": False, "state_dtype": None},
        ),
        (
            {"bf16": BF16 | {"bf16_master_weights_and_grads": True}},
            {"master_weights": False, "state_dtype": torch.float32},
        ),
        (
            nested("zero_optimization", {"stage": 2, "offload_optimizer": {"device": "cpu"}}),
            {"offload": Offload(optimizer="cpu", gradients="cpu")},
        ),
        (
            nested(
                "zero_optimization",
                {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": gettempdir()}},
            ),
            {"offload": Offload(params="disk", folder=gettempdir())},
        ),
        ({"gradient_allreduce_op": "sum"}, {"reduce_op": "sum"}),
        ({"gradient_predivide_factor": 4.0}, {"gradient_predivide_factor": 1.0}),
        (
            {"prescale_gradients": True, "gradient_predivide_factor": 4.0},
            {"gradient_predivide_factor": 4.0},
        ),
        (
            nested(
                "zero_optimization",
                {"stage": 3, "zero_quantized_weights": True, "zero_quantized_gradients": True},
            ),
            {"compress": Compress(gradients=codecs.int8(), parameters=codecs.int8())},
        ),
        (
            nested("zero_optimization", {"stage": 1, "cpu_offload": True}),
            {"offload": Offload(optimizer="cpu", gradients="cpu")},
        ),
        # On one rank; with more of them in test_initialize_training.py.
        (batch(None, 3, None), ONCE),
        (batch(12, None, None), ONCE),
        (batch(None, 3, 4), FOUR_TIMES),
        (batch(12, 3, None), FOUR_TIMES),
        (batch(12, 3, 4), FOUR_TIMES),
        (batch(12, None, 4), FOUR_TIMES),
    ],
)
@pytest.mark.filterwarnings("ignore:granularity_threshold_numel=:UserWarning")
def test_keys_set_the_engines_options(config: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert options_of(config).items() >= wanted.items()


def test_the_widest_dtype_that_learns_gives_the_bytes_of_an_element() -> None:
    model = nn.Sequential(linear(torch.float64), linear(torch.bfloat16), linear(torch.float32))
    model[0].requires_grad_(False)
    engine = initialize(model, config={"zero_optimization": {"reduce_bucket_size": 10}})
    assert engine.options.bucket_bytes == 40
    assert engine.options.reduction.accumulate_dtype is torch.float32


def test_a_json_file_gives_what_the_dict_gives(tmp_path: Path) -> None:
    config = merged(SGD, {"zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8}})
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    from_dict = initialize(linear(), config=config)
    for given in (path, str(path)):
        engine = initialize(linear(), config=given)
        assert (engine.options, engine.stage) == (from_dict.options, 2)
        assert isinstance(engine.optimizer, torch.optim.SGD)


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


def test_a_scheduler_that_raises_leaves_the_model_as_it_was() -> None:
    model = linear()
    before = [p.clone() for p in model.parameters()]

    def schedule(optimizer: torch.optim.Optimizer) -> StepLR:
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        initialize(model, config={**SGD, "bf16": BF16}, lr_scheduler=schedule)
    assert all(torch.equal(p, x) for p, x in zip(model.parameters(), before, strict=True))
    initialize(model, config=SGD)  # no engine has it


def test_the_scheduler_steps_after_each_update_and_after_no_other_call() -> None:
    config = merged(SGD, {"gradient_accumulation_steps": 2})
    engine = initialize(linear(), config=config, lr_scheduler=lambda o: StepLR(o, 1, gamma=0.5))
    seen = []
    for _ in range(4):
        engine(torch.ones(1, 3)).sum().backward()
        engine.step()
        seen.append(engine.optimizer.param_groups[0]["lr"])
    assert seen == [LR, LR / 2, LR / 2, LR / 4]


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
