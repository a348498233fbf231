"""The table of keys: what each may say, by what names, and that nothing is ignored."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn

from fzero.adapter import initialize
from fzero.errors import LayoutError
from fzero.integrations.deepspeed import DeepSpeedEngine
from fzero.integrations.deepspeed._config_keys import KEYS, KINDS, NAMES, RENAMED, Key
from tests.integrations.deepspeed.configs import SGD, linear, merged, nested

USED = [key for key in KEYS.values() if key.kind]
REFUSED, HARMLESS, SECTIONS = (
    [key for key in KEYS.values() if key.use == use] for use in ("refused", "harmless", "off")
)
ON: dict[str, Any] = {  # what switches the section of a key on
    "fp16": {"fp16": {"enabled": True}},
    "bf16": {"bf16": {"enabled": True}},
    "torch_autocast": {"torch_autocast": {"enabled": True}},
    "optimizer": SGD,
    **{
        f"zero_optimization.{name}": {"zero_optimization": {"stage": 3, name: {"device": "cpu"}}}
        for name in ("offload_param", "offload_optimizer")
    },
}


def by_path(key: Key) -> str:
    return key.path


def problems_of(config: dict[str, Any], model: Any = None, **more: Any) -> list[str]:
    """The lines of the error; none if the config is taken."""
    try:
        initialize(model or linear(), config=config, **more)
    except LayoutError as error:
        first, *lines, _, _ = str(error).splitlines()
        return [line.strip() for line in lines or [first]]
    return []


def options_of(config: dict[str, Any], model: Any = None) -> list[Any]:
    """What an engine was made with."""
    made: DeepSpeedEngine = initialize(model or linear(), config=config)
    return [made.options, made.stage, made.batch, made.fp16_enabled(), made.bfloat16_enabled()]


def in_use(path: str, value: Any) -> dict[str, Any]:
    """A key in its section, which is on."""
    return merged(ON.get(path.rpartition(".")[0], {}), nested(path, value))


def other_than(value: Any) -> Any:
    """A value of the same kind that is not this one."""
    if isinstance(value, bool):
        return not value
    return {"none": "cpu", "mean": "sum"}.get(value, 7)


def as_written(value: Any, by: str) -> Any:
    """The same value, as others write it: ints for bools, floats for ints, strings for numbers."""
    if by == "default" or value == sys.maxsize or not isinstance(value, bool | int | float):
        return value
    if isinstance(value, bool):
        return {"number": int(value), "text": str(value).lower(), "Text": str(value)}[by]
    return float(value) if by == "number" else str(value)


@pytest.mark.parametrize("section", ["", *ON])
@pytest.mark.parametrize("by", ["default", "number", "text", "Text"])
def test_a_config_of_all_defaults_asks_for_nothing(section: str, by: str) -> None:
    base = every = ON.get(section, {})
    for key in KEYS.values():
        there = key.path.rpartition(".")[0]
        if key.use == "off":
            switch, off = key.default
            every = merged(every, nested(key.path, {} if switch is None else {switch: off, "x": 1}))
        elif there == section or (not section and there not in ON):
            every = merged(nested(key.path, as_written(key.default, by)), every)
    assert options_of(every) == options_of(base)


@pytest.mark.parametrize("key", REFUSED, ids=by_path)
def test_a_refused_key_is_refused_by_its_full_name_with_what_to_do(key: Key) -> None:
    other = other_than(key.default)
    assert problems_of(in_use(key.path, other)) == [f"{key.path} = {other!r}: {key.says}."]
    assert not problems_of(nested(key.path, None))


@pytest.mark.parametrize("key", SECTIONS, ids=by_path)
def test_a_section_that_is_on_is_refused_and_one_that_is_off_is_not(key: Key) -> None:
    switch, off = key.default
    on = {switch or "mode": other_than(off)}
    (problem,) = problems_of(nested(key.path, on))
    assert problem.startswith(key.path) and problem.endswith(f": {key.says}.")
    assert problems_of(nested(key.path, True)), "neither on nor off"
    for nothing in ({}, None, *([] if switch is None else [{switch: off, "what": [1]}])):
        assert not problems_of(nested(key.path, nothing))


@pytest.mark.parametrize("value", [0, 1e9, True, "auto", "x", {"a": 1}, [1]], ids=repr)
def test_a_harmless_key_may_say_anything(value: Any) -> None:
    for other in ("bf16", "fp16"):  # one config has one of both
        keys = [key.path for key in HARMLESS if not key.path.startswith(other)]
        assert not problems_of(merged(*(in_use(path, value) for path in keys)))


WRONG = {
    "count": (0, -1, 1.5, True, "two", float("inf"), [1]),
    "numel": (-1, 0.5, False, float("nan"), {}, "5e8"),
    "power": (-1, 0.5, True, "16.0", 128),
    "number": (-0.5, True, "x", float("inf"), [1.0]),
    "norm": (-0.5, True, "x", float("nan")),
    "bool": (2, "maybe", 0.5, []),
    "stage": (4, -1, 1.5, True, "two"),
    "dtype": ("int8", "fp64", 16),
    "text": (1, ["SGD"]),
    "mapping": (1, "lr"),
    "names": (1, [int]),
    "op": ("max", 1),
    "factor": (0, -1, True, "x"),
    "place": ("gpu", 1, "disk", ["cpu"]),
}


@pytest.mark.parametrize("key", USED, ids=by_path)
def test_a_value_of_another_kind_or_out_of_range_is_refused(key: Key) -> None:
    for value in WRONG[key.kind]:
        wanted = f"{key.path} = {value!r}: give {KINDS[key.kind][2]}."
        assert wanted in problems_of(in_use(key.path, value))


NAMED = [*(name for name in RENAMED if name != "bfloat16"), "bfloat16.enabled"]


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.filterwarnings("ignore:granularity_threshold_numel=:UserWarning")
def test_another_name_of_a_key_means_the_same(name: str) -> None:
    new = RENAMED.get(name, "bf16.enabled")
    key, stage_3 = KEYS[new], {"zero_optimization": {"stage": 3}}
    value: Any = other_than(key.default) if key.use == "refused" or key.kind == "bool" else 7
    said = merged(stage_3, nested(name, value))
    if key.use == "refused":
        assert problems_of(said) == [f"{name} ({new}) = {value!r}: {key.says}."]
        assert not problems_of(nested(name, key.default))
    elif key.use == "harmless":
        assert not problems_of(said)
    elif name in NAMES["renamed_switches"]:
        assert options_of(merged(stage_3, nested(name, True))) == options_of(
            merged(stage_3, nested(new, "cpu"))
        )
        assert options_of(nested(name, False)) == options_of({})
    else:
        by_new = merged(stage_3, nested(new, value))
        assert options_of(said) == options_of(by_new) != options_of(stage_3)
        (problem,) = problems_of(merged(by_new, said))
        assert problem.endswith(f" = {value!r}: it is there twice, by two names.")


def test_zero_optimization_may_be_the_bool_of_old_configs() -> None:
    for old, stage in ((True, 1), (False, 0)):
        assert initialize(linear(), config={"zero_optimization": old}).stage == stage
    assert problems_of({"zero_optimization": 2}) == [
        "zero_optimization = 2: give an object { ... }."
    ]


UNKNOWN = [
    ("gradient_cliping", "gradient_clipping"),
    ("stage", "zero_optimization.stage"),
    ("zero_optimization.stag", "zero_optimization.stage"),
    ("zero_optimization.train_batch_size", "train_batch_size"),
    ("optimizer.scheduler", "scheduler"),
    ("max_grad_norm", "gradient_clipping"),
    ("qqq", "nothing"),
]


@pytest.mark.parametrize(("name", "near"), UNKNOWN)
def test_an_unknown_key_is_refused_with_what_comes_near(name: str, near: str) -> None:
    (problem,) = problems_of(nested(name, None))
    assert problem.startswith(f"{name} = None: unknown (near: {near}")


def test_a_dotted_name_is_not_taken_for_a_section() -> None:
    (problem,) = problems_of({"zero_optimization.stage": 2})
    assert problem.startswith("zero_optimization.stage: a name with a dot")


def test_all_that_is_wrong_is_in_one_error_and_the_model_is_as_it_was() -> None:
    config = {
        "sparse_gradients": True,
        "gradient_clipping": "auto",
        "train_batch_size": 7,
        "train_micro_batch_size_per_gpu": 2,
        "fp16": {"enabled": True},
        "flops_profiler": {"enabled": True},
        "zero_optimization": {"stage": 5, "offload_optimizer": {"device": "gpu"}, "stag": 3},
        "optimizer": {"type": "Adam", "params": {"lr": "auto", "max_grad_norm": 1, "bets": 1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 3}},
    }
    model = linear()
    with pytest.raises(LayoutError) as error:
        initialize(model, config=config)
    lines = [line.strip() for line in str(error.value).splitlines()]
    for path in (
        "sparse_gradients = True: ",
        'gradient_clipping = "auto": ',
        "train_batch_size = 7: it is no multiple of ",
        "flops_profiler.enabled = True: ",
        "zero_optimization.stage = 5: give 0, 1, 2 or 3.",
        "zero_optimization.offload_optimizer.device = 'gpu': ",
        "zero_optimization.stag = 3: unknown (near: zero_optimization.stage",
        'optimizer.params.lr = "auto": ',
        "optimizer.params.max_grad_norm = 1: torch.optim.AdamW does not have it (near: gradient_cl",
        "optimizer.params.bets = 1: torch.optim.AdamW does not have it (near: betas",
        "scheduler.params.warmup_steps = 3: WarmupLR does not have it (near: warmup_num_steps",
    ):
        assert sum(line.startswith(path) for line in lines) == 1, path
    assert len(lines) == 1 + 11 + 2
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_keys_that_contradict_each_other_are_in_the_same_error() -> None:
    config = {
        "gradient_cliping": 1,
        "fp16": {"enabled": True},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}},
    }
    with pytest.raises(LayoutError) as error:
        initialize(linear(), config=config)
    _, *lines, _, _ = str(error.value).splitlines()
    assert [line.split()[0] for line in lines] == [
        *("gradient_cliping", "bf16.enabled", "zero_optimization.offload_param"),
    ]
    assert all(": " in line for line in lines)


@pytest.mark.parametrize(("section", "switch"), NAMES["switches"].items())
def test_what_a_switched_off_section_says_is_not_looked_at(section: str, switch: Any) -> None:
    name, off = switch
    assert not problems_of(nested(section, {name: off, "what": 1, "loss_scale": "x"}))
    if off == "none":
        assert not problems_of(nested(section, {"pin_memory": True}))


# "auto".


class Hugging(nn.Module):
    """A model with a config, as Hugging Face's have it."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.config = type("Config", (), sizes)()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_auto_dtypes_are_those_of_the_model(dtype: torch.dtype) -> None:
    config = {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}
    engine = initialize(linear(dtype), config=config)
    assert engine.bfloat16_enabled() is (dtype is torch.bfloat16)
    assert engine.fp16_enabled() is (dtype is torch.float16)


@pytest.mark.parametrize("sizes", [{"hidden_size": 10}, {"text_config": {"hidden_size": 10}}, {}])
def test_auto_sizes_are_those_that_the_trainer_puts_in(sizes: dict[str, Any]) -> None:
    text = {name: type("Text", (), x)() for name, x in sizes.items() if isinstance(x, dict)}
    names = ("reduce_bucket_size", "stage3_prefetch_bucket_size")
    every = [*names, "stage3_param_persistence_threshold"]
    config = {"zero_optimization": {"stage": 3, **dict.fromkeys(every, "auto")}}
    options = initialize(Hugging(**{**sizes, **text}), config=config).options
    found = (
        (options.bucket_bytes or 0) // 4,
        options.gathering.prefetch_numel,
        options.gathering.persistence_threshold_numel,
    )
    assert found == ((100, 90, 100) if sizes else (500_000_000, 50_000_000, 100_000))


@pytest.mark.parametrize("left_out", [0, 1, 2])
def test_an_auto_batch_size_is_what_two_others_give(left_out: int) -> None:
    sizes: dict[str, Any] = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
    }
    auto = [*sizes][left_out]
    assert initialize(linear(), config={**sizes, auto: "auto"}).get_batch_info() == (8, 2, 4)


def test_auto_is_refused_where_only_the_user_knows_the_number() -> None:
    paths = [
        *("gradient_accumulation_steps", "gradient_clipping", "zero_optimization.stage"),
        *("optimizer.params.lr", "optimizer.params.betas", "scheduler.params.total_num_steps"),
        *("fp16.loss_scale", "communication_data_type", "optimizer.type"),
    ]
    config = merged({"fp16": {"enabled": True}}, *(nested(path, "auto") for path in paths))
    lines = problems_of(config)
    asked = [line.split(" ")[0] for line in lines if ' = "auto": only its user knows' in line]
    assert sorted(asked) == sorted(paths)


def test_a_value_for_auto_is_taken_checked_and_must_be_asked_for() -> None:
    config = {"gradient_clipping": "auto", "optimizer": {"type": "SGD", "params": {"lr": "auto"}}}
    values = {"gradient_clipping": 0.5, "optimizer.params.lr": 0.25}
    engine = initialize(linear(), config=config, auto=values)
    assert engine.options.updating.max_norm == 0.5 and engine.get_lr() == [0.25]
    assert values == {"gradient_clipping": 0.5, "optimizer.params.lr": 0.25}
    with pytest.raises(LayoutError, match=r"gradient_clipping = -1: give"):
        initialize(linear(), config=config, auto={**values, "gradient_clipping": -1})
    with pytest.raises(LayoutError, match=r"auto: the config has no fp16.enabled that is"):
        initialize(linear(), config=config, auto={**values, "fp16.enabled": True})


def test_what_the_user_gives_stands_in_the_place_of_the_sections_of_the_config() -> None:
    config = {
        "optimizer": {"type": "Lamb", "params": {"lr": "auto"}},
        "scheduler": {"type": "Cosine", "params": {"total_num_steps": "auto"}},
    }
    engine = initialize(
        linear(),
        torch.optim.RMSprop,
        config,
        lr_scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1),
    )
    assert isinstance(engine.optimizer, torch.optim.RMSprop)
    assert isinstance(engine.lr_scheduler, torch.optim.lr_scheduler.StepLR)
    ours = initialize(linear(), torch.optim.RMSprop, SGD)
    assert isinstance(ours.optimizer, torch.optim.RMSprop) and ours.lr_scheduler is None
