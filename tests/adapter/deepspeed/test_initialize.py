"""initialize(): each key of a DeepSpeed config sets its option of the engine; defaults, files."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fzero.adapter import LeafSpec, initialize
from fzero.errors import LayoutError
from tests.adapter.deepspeed.configs import SGD, linear, merged, nested

PARTS = ("updating", "reduction", "gathering")


def options_of(path: str, value: Any) -> dict[str, Any]:
    """What the engine of a config with one key was made with, flat."""
    engine = initialize(linear(), config=nested(path, value))
    flat: dict[str, Any] = {"stage": engine.stage}
    for name in engine.options.__slots__:
        value = getattr(engine.options, name)
        flat |= asdict(value) if name in PARTS else {name: value}
    return flat


def test_an_empty_config_gives_deepspeeds_defaults() -> None:
    assert options_of("zero_optimization", {}) == {
        "stage": 0,
        "bucket_bytes": 4 * 500_000_000,
        "contiguous_gradients": True,
        "overlap": True,
        "ordered": False,
        "accumulate_dtype": torch.float32,
        "communication_dtype": None,
        "master_weights": True,
        "max_norm": 1.0,
        "gradient_accumulation_steps": 1,
        "average_micro_batches": False,
        "loss_scale": 1.0,
        "leaf_modules": LeafSpec(),
        "reshard_after_forward": False,
        "prefetch_numel": 50_000_000,
        "persistent": (),
        "persistence_threshold_numel": 100_000,
    }


ZERO = "zero_optimization."


@pytest.mark.parametrize(
    ("path", "value", "option", "wanted"),
    [
        (ZERO + "stage", 3, "stage", 3),
        (ZERO + "contiguous_gradients", False, "contiguous_gradients", False),
        (ZERO + "overlap_comm", False, "overlap", False),
        (ZERO + "overlap_comm", None, "overlap", True),
        (ZERO + "reduce_bucket_size", 2e6, "bucket_bytes", 8_000_000),
        (ZERO + "allgather_bucket_size", 7, "bucket_bytes", 28),
        (ZERO + "stage3_prefetch_bucket_size", 5e3, "prefetch_numel", 5000),
        (ZERO + "stage3_param_persistence_threshold", 0, "persistence_threshold_numel", 0),
        (ZERO + "stage3_max_live_parameters", 7, "reshard_after_forward", True),
        (ZERO + "stage3_max_live_parameters", 8, "reshard_after_forward", False),
        (ZERO + "stage3_max_reuse_distance", 15, "reshard_after_forward", True),
        (ZERO + "stage3_max_reuse_distance", 16, "reshard_after_forward", False),
        (
            ZERO + "leaf_module",
            {"classes": ["Linear"], "names": "", "name_suffixes": []},
            "leaf_modules",
            LeafSpec(classes=("Linear",), names=("",)),
        ),
        ("gradient_accumulation_steps", 4, "gradient_accumulation_steps", 4),
        ("gradient_accumulation_steps", 4, "average_micro_batches", True),
        ("managed_gradient_accumulation", False, "average_micro_batches", True),
        ("gradient_clipping", 0, "max_norm", None),
        ("gradient_clipping", 0.25, "max_norm", 0.25),
        ("communication_data_type", "bf16", "communication_dtype", torch.bfloat16),
        ("data_types.grad_accum_dtype", "fp16", "accumulate_dtype", torch.float16),
        ("bf16.enabled", True, "accumulate_dtype", torch.bfloat16),
        ("bf16.enabled", True, "bucket_bytes", 2 * 500_000_000),
        ("bf16.enabled", True, "master_weights", True),
        (
            "bf16",
            {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True},
            "master_weights",
            False,
        ),
    ],
)
def test_each_key_sets_the_engines_option(path: str, value: Any, option: str, wanted: Any) -> None:
    assert options_of(path, value)[option] == wanted


@pytest.mark.filterwarnings("ignore:granularity_threshold_numel=:UserWarning")
def test_a_granularity_threshold_reaches_the_leaf_modules() -> None:
    found = options_of(ZERO + "stage3_module_granularity_threshold", 5)["leaf_modules"]
    assert found == LeafSpec(granularity_threshold_numel=5)


def test_the_widest_dtype_that_learns_gives_the_bytes_of_an_element() -> None:
    model = nn.Sequential(linear(torch.float64), linear(torch.bfloat16), linear(torch.float32))
    model[0].requires_grad_(False)
    engine = initialize(model, config={"zero_optimization": {"reduce_bucket_size": 10}})
    assert engine.options.bucket_bytes == 40
    assert engine.options.reduction.accumulate_dtype is torch.float32


# Batch sizes, on one rank; with more of them in test_initialize_training.py.


@pytest.mark.parametrize(
    ("train", "micro", "steps", "wanted"),
    [
        (None, None, None, 1),
        (None, 3, None, 1),
        (None, 3, 4, 4),
        (12, 3, None, 4),
        (12, 3, 4, 4),
        (12, None, 4, 4),
        (12, None, None, 1),
    ],
)
def test_batch_sizes_give_the_accumulation(
    train: int | None, micro: int | None, steps: int | None, wanted: int
) -> None:
    config = {
        "train_batch_size": train,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": steps,
    }
    engine = initialize(linear(), config=config)
    assert engine.options.updating.gradient_accumulation_steps == wanted
    assert engine.options.updating.average_micro_batches == (wanted > 1)


# Files.


def test_a_json_file_gives_what_the_dict_gives(tmp_path: Path) -> None:
    config = merged(SGD, {"zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8}})
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    from_dict = initialize(linear(), config=config)
    for given in (path, str(path)):
        engine = initialize(linear(), config=given)
        assert (engine.options, engine.stage) == (from_dict.options, 2)
        assert isinstance(engine.optimizer, torch.optim.SGD)


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        (None, r"(?s)No such file.*an absolute one"),
        ("{'a': 1}", r"is not JSON: .*line 1 column 2"),
        ('{"stage": 1, "stage": 2}', "config: stage is there twice"),
        ("[1]", r"(?s)ds.json' = \[1\].*give an object"),
        ('{"gradient_clipping": NaN}', "gradient_clipping = nan"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(tmp_path: Path, text: str, seen: str) -> None:
    path = tmp_path / "ds.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(LayoutError, match=seen):
        initialize(linear(), config=path)


def test_without_a_config_or_a_model_the_error_says_what_to_pass() -> None:
    with pytest.raises(LayoutError, match=r"(?s)config is a NoneType.*Engine\(model"):
        initialize(linear())
    config: Any = ["stage", 2]
    with pytest.raises(LayoutError, match="config is a list"):
        initialize(linear(), config=config)
    model: Any = {}
    with pytest.raises(LayoutError, match="initialize got a dict"):
        initialize(model, config={})
