"""initialize(): no key of a config is ignored; what cannot be honoured is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from fzero.adapter import initialize
from fzero.adapter.deepspeed._keys import ONLY, REFUSED, USED
from fzero.errors import LayoutError
from tests.adapter.deepspeed.configs import linear, merged, nested


@pytest.mark.parametrize(
    ("config", "name", "near"),
    [
        ({"gradient_cliping": 1.0}, "gradient_cliping", "gradient_clipping"),
        ({"stage": 2}, "stage", "zero_optimization.stage"),
        ({"zero_optimization": {"stag": 2}}, "zero_optimization.stag", "zero_optimization.stage"),
        ({"zero_optimisation": {"stage": 2}}, "zero_optimisation", "zero_optimization"),
        ({"bfloat16": {"enabled": True}}, "bfloat16", "bf16"),
        ({"max_grad_norm": 1.0}, "max_grad_norm", "gradient_clipping"),
        ({"bf16": {"enable": True}}, "bf16.enable", "bf16.enabled"),
        ({"qqq": None}, "qqq", "nothing"),
    ],
)
def test_an_unknown_key_is_refused_with_what_comes_near(
    config: dict[str, Any], name: str, near: str
) -> None:
    with pytest.raises(LayoutError, match=rf"unknown key '{name}' \(near: {near}"):
        initialize(linear(), config=config)


@pytest.mark.parametrize("path", REFUSED)
def test_an_unsupported_key_is_refused_by_name_with_the_fix(path: str) -> None:
    config = nested(path, {"some": 1} if path in ("fp16", "amp", "torch_autocast") else 3)
    if path.split(".")[-1] in ("offload_param", "offload_optimizer"):
        config = nested(path + ".pin_memory", True)
    with pytest.raises(LayoutError) as error:
        initialize(linear(), config=config)
    assert path in str(error.value).splitlines()[0]
    assert str(error.value).endswith(f"Fix: {REFUSED[path]}.")
    assert initialize(linear(), config=nested(path, None)).stage == 0  # null is left out


@pytest.mark.parametrize("path", ONLY)
def test_a_key_may_say_what_fzero_does_and_nothing_else(path: str) -> None:
    only = ONLY[path].value
    assert initialize(linear(), config=nested(path, only)).stage == 0
    other = {False: True, True: False, "none": "cpu", "mean": "sum"}.get(only, 7)
    for value in (other, int(only) if isinstance(only, bool) else True):
        with pytest.raises(LayoutError) as error:
            initialize(linear(), config=nested(path, value))
        assert f"{path} = {value!r} is not supported" in str(error.value)
        assert ONLY[path].fix in str(error.value)


@pytest.mark.parametrize("path", [*USED, *ONLY, "zero_optimization", "optimizer.params.lr"])
def test_auto_is_refused_wherever_it_is(path: str) -> None:
    config = merged({"optimizer": {"type": "SGD"}}, nested(path, "auto"))
    with pytest.raises(LayoutError, match="(?s)" + path.replace(".", r"\.") + ".*auto"):
        initialize(linear(), config=config)


WRONG = {
    "count": (0, -1, 1.5, True, "2", float("inf")),
    "some": (0, -1, 1.5, True, "5e8"),
    "numel": (-1, 0.5, False, float("nan")),
    "whole": (-1, 0.5, True, "16"),
    "number": (-0.5, True, "1", float("inf")),
    "bool": (0, 1, "true"),
    "stage": (4, -1, 1.5, True, "2"),
    "dtype": ("int8", "fp64", 16),
    "text": (1, ["SGD"]),
    "mapping": (1, "lr"),
    "names": (1, [int]),
}


@pytest.mark.parametrize("path", USED)
def test_a_value_of_another_kind_or_out_of_range_is_refused(path: str) -> None:
    for value in WRONG[USED[path].kind]:
        with pytest.raises(LayoutError, match=rf"config: {path} = .*\n.*\nFix: give "):
            initialize(linear(), config=nested(path, value))


def test_a_section_that_is_no_object_is_refused() -> None:
    with pytest.raises(LayoutError, match="zero_optimization = True"):
        initialize(linear(), config={"zero_optimization": True})


@pytest.mark.parametrize(
    ("config", "seen"),
    [
        ({"bf16": {"bf16_optimizer_states": True}}, "bf16_master_weights_and_grads = False"),
        (
            {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
            "bf16_optimizer_states = False",
        ),
        (
            {"bf16": {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}},
            "without bf16.enabled",
        ),
        ({"data_types": {"param_dtype": "bf16"}}, "bf16.enabled = False"),
        ({"data_types": {"param_dtype": "fp32"}, "bf16": {"enabled": True}}, "enabled = True"),
        (
            {"managed_gradient_accumulation": False, "gradient_accumulation_steps": 2},
            "gradient_accumulation_steps = 2 with managed",
        ),
        ({"zero_optimization": {"leaf_module": {"names": ["experts"]}}}, "experts"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(config: dict[str, Any], seen: str) -> None:
    with pytest.raises(LayoutError, match=seen):
        initialize(linear(), config=config)


@pytest.mark.parametrize(
    ("train", "micro", "steps", "seen"),
    [
        (13, 3, 4, "train_batch_size=13 is not micro-batch size 3 x accumulation 4 x 1 ranks = 12"),
        (13, 3, None, "13 is no multiple of micro-batch size 3 x accumulation . x 1 ranks = 3"),
        (13, None, 4, "13 is no multiple of micro-batch size . x accumulation 4 x 1 ranks = 4"),
    ],
)
def test_batch_sizes_that_do_not_fit_are_refused_with_the_numbers(
    train: int, micro: int | None, steps: int | None, seen: str
) -> None:
    config = {
        "train_batch_size": train,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": steps,
    }
    with pytest.raises(LayoutError, match=seen):
        initialize(linear(), config=config)
