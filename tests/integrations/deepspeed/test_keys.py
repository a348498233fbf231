"""The table of keys: what each may say, by what names, and that nothing is ignored."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn

from fzero.adapter import initialize
from fzero.errors import LayoutError
from fzero.integrations.deepspeed._auto import with_autos
from fzero.integrations.deepspeed._keys import Key, KeyUse
from fzero.integrations.deepspeed._kinds import KINDS
from fzero.integrations.deepspeed._read import read_config, with_defaults
from fzero.integrations.deepspeed._zero_keys import KEYS, RENAMED, SWITCHES
from tests.integrations.deepspeed.configs import SGD, linear, merged, nested

USED = [key for key in KEYS.values() if key.use in (KeyUse.OPTION, KeyUse.READ)]
REFUSED = [key for key in KEYS.values() if key.use is KeyUse.REFUSED]
HARMLESS = [key for key in KEYS.values() if key.use is KeyUse.HARMLESS]
SECTIONS = [key for key in KEYS.values() if key.use is KeyUse.SECTION]


def by_path(key: Key) -> str:
    return key.path


def problems_of(config: dict[str, Any]) -> list[str]:
    return read_config(config).problems


def in_use(path: str, value: Any) -> dict[str, Any]:
    """A key in its section, which is switched on if it looks at no key else."""
    section = path.rpartition(".")[0]
    on = nested(f"{section}.device", "cpu") if section.endswith(("_param", "_optimizer")) else {}
    return nested(path, value) if path.endswith(".device") else merged(on, nested(path, value))


def other_than(value: Any) -> Any:
    """A value of the same kind that is not this one."""
    if isinstance(value, bool):
        return not value
    return {"none": "cpu", "mean": "sum"}.get(value, 7)


def test_a_config_of_all_defaults_asks_for_nothing() -> None:
    plain = [key for key in KEYS.values() if key.use is not KeyUse.SECTION]
    every = merged(*(nested(key.path, key.default) for key in plain))
    for key in SECTIONS:
        switch, off = key.default
        every = merged(every, nested(key.path, {} if switch is None else {switch: off, "x": 1}))
    reading = read_config(every)
    assert not reading.problems and not reading.autos
    assert with_defaults(reading.given) == with_defaults({})
    # Written as ints for bools, floats for ints and strings for numbers, they are the same.
    for key in plain:
        for written in as_others_write(key.default):
            reading = read_config(nested(key.path, written))
            assert not reading.problems, key.path
            assert with_defaults(reading.given) == with_defaults({}), key.path


def as_others_write(value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [int(value), str(value), str(value).lower()]
    exact = isinstance(value, int | float) and value != sys.maxsize
    return [float(value), str(value)] if exact else []


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
    for nothing in ({}, None):
        assert not problems_of(nested(key.path, nothing))
    if switch is not None:
        assert not problems_of(nested(key.path, {switch: off, "what": [1]}))


def test_a_harmless_key_may_say_anything() -> None:
    for key in HARMLESS:
        for value in (0, 1e9, True, "auto", "x", {"a": 1}, [1]):
            assert not problems_of(nested(key.path, value)), key.path


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
        wanted = f"{key.path} = {value!r}: give {KINDS[key.kind][1]}."
        assert problems_of(in_use(key.path, value)) == [wanted]


@pytest.mark.parametrize("name", RENAMED)
def test_another_name_of_a_key_means_the_same(name: str) -> None:
    new, values = RENAMED[name]
    if new == "bf16":
        name, new = "bfloat16.enabled", "bf16.enabled"
    key = KEYS[new]
    if key.use is KeyUse.REFUSED:
        value: Any = True if values else other_than(key.default)
        (problem,) = problems_of(nested(name, value))
        assert problem.startswith(f"{name} ({new}) = ") and key.says in problem
        assert not problems_of(nested(name, False if values else key.default))
    elif key.use is KeyUse.HARMLESS:
        assert not problems_of(nested(name, True))
    else:
        value = not key.default if key.kind == "bool" else 7
        if values:
            assert read_config(nested(name, True)).given == {new: values[True]}
            assert not problems_of(nested(name, False))
            return
        assert read_config(nested(name, value)).given == {new: value}
        twice = merged(nested(new, value), nested(name, value))
        (problem,) = problems_of(twice)
        assert problem.endswith(f" = {value!r}: it is there twice, by two names.")


def test_zero_optimization_may_be_the_bool_of_old_configs() -> None:
    assert read_config({"zero_optimization": True}).given == {"zero_optimization.stage": 1}
    assert read_config({"zero_optimization": False}).given == {"zero_optimization.stage": 0}
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


def test_what_a_switched_off_section_says_is_not_looked_at() -> None:
    for section, (switch, off) in SWITCHES.items():
        assert not problems_of(nested(section, {switch: off, "what": 1, "loss_scale": "x"}))
    assert not problems_of(nested("zero_optimization.offload_param", {"pin_memory": True}))


# "auto".


class Hugging(nn.Module):
    """A model with a config, as Hugging Face's have it."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.config = type("Config", (), sizes)()


def auto_of(*paths: str, model: Any = None, **given: Any) -> tuple[Any, list[str]]:
    config = merged(given, *(nested(path, "auto") for path in paths))
    return with_autos(read_config(config), model or linear())


def test_auto_is_what_the_model_and_the_other_keys_say() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        found, problems = auto_of("bf16.enabled", "fp16.enabled", model=linear(dtype))
        on = {"bf16.enabled": dtype is torch.bfloat16, "fp16.enabled": dtype is torch.float16}
        assert found == on and not problems
    zero = (
        "reduce_bucket_size",
        "stage3_prefetch_bucket_size",
        "stage3_param_persistence_threshold",
    )
    paths = [f"zero_optimization.{name}" for name in zero]
    text = type("Text", (), {"hidden_size": 10})()
    for sizes in ({"hidden_size": 10}, {"text_config": text}):
        found, problems = auto_of(*paths, model=Hugging(**sizes))
        assert found == dict(zip(paths, (100, 90, 100), strict=True)) and not problems
    assert auto_of(*paths) == ({}, [])
    batches = ("train_batch_size", "train_micro_batch_size_per_gpu")
    assert auto_of(*batches, gradient_accumulation_steps=2) == (
        {"gradient_accumulation_steps": 2},
        [],
    )
    both = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}
    assert auto_of("gradient_accumulation_steps", **both) == (both, [])


def test_auto_is_refused_where_only_the_user_knows_the_number() -> None:
    paths = [
        *("gradient_accumulation_steps", "gradient_clipping", "zero_optimization.stage"),
        *("optimizer.params.lr", "optimizer.params.betas", "scheduler.params.total_num_steps"),
        *("fp16.loss_scale", "communication_data_type", "optimizer.type"),
    ]
    found, problems = auto_of(*paths)
    assert sorted(line.split(" ")[0] for line in problems) == sorted(paths)
    assert set(found) == {"optimizer.params", "scheduler.params"}


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
