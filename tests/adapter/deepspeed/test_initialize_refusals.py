"""initialize(): no key of a config is ignored; what cannot be honoured is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from fzero.adapter import initialize
from fzero.adapter.deepspeed._keys import ONLY, REFUSED, USED
from fzero.errors import LayoutError
from tests.adapter.deepspeed.configs import SGD, batch, linear, merged, nested


def optimizer(kind: str, **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": kind, "params": params}}


SPARSE_BF16 = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
CONFIGS: list[tuple[dict[str, Any], str]] = [
    # Unknown keys, with what comes near.
    ({"gradient_cliping": 1.0}, r"unknown key 'gradient_cliping' \(near: gradient_clipping"),
    ({"stage": 2}, r"unknown key 'stage' \(near: zero_optimization.stage"),
    (
        nested("zero_optimization.stag", 2),
        r"'zero_optimization.stag' \(near: zero_opt",
    ),
    ({"bfloat16": {"enabled": True}}, r"unknown key 'bfloat16' \(near: bf16"),
    ({"max_grad_norm": 1.0}, r"unknown key 'max_grad_norm' \(near: gradient_clipping"),
    ({"qqq": None}, r"unknown key 'qqq' \(near: nothing"),
    # Values.
    ({"zero_optimization": True}, "zero_optimization = True"),
    # Keys that contradict each other.
    (nested("bf16.bf16_optimizer_states", True), "bf16_master_weights_and_grads = False"),
    (
        {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
        "bf16_optimizer_states = False",
    ),
    ({"bf16": SPARSE_BF16}, "without bf16.enabled"),
    (nested("data_types.param_dtype", "bf16"), "bf16.enabled = False"),
    ({"data_types": {"param_dtype": "fp32"}, "bf16": {"enabled": True}}, "enabled = True"),
    (
        {"managed_gradient_accumulation": False, "gradient_accumulation_steps": 2},
        "gradient_accumulation_steps = 2 with managed",
    ),
    (nested("zero_optimization.leaf_module.names", ["experts"]), "experts"),
    # Batch sizes.
    (batch(13, 3, 4), "=13 is not micro-batch size 3 x accumulation 4 x 1 ranks = 12"),
    (batch(13, 3, None), "13 is no multiple of micro-batch size 3 x accumulation . x 1 ranks = 3"),
    (batch(13, None, 4), "13 is no multiple of micro-batch size . x accumulation 4 x 1 ranks = 4"),
    # Optimizers.
    (optimizer("Lamb"), r"optimizer.type = 'Lamb' is not supported"),
    (optimizer("OneBitAdam"), r"optimizer.type = 'OneBitAdam' is not supported"),
    (optimizer("Muon"), r"optimizer.type = 'Muon' is not supported"),
    (optimizer("AdmaW"), r"near: adamw"),
    (optimizer("LBFGS"), r"LBFGS cannot step"),
    (optimizer("SGD", max_grad_norm=1.0), r"(?s)max_grad_norm.*gradient_clip"),
    (optimizer("SGD", learning_rate=1.0), r"params.learning_rate = 1.0"),
    (optimizer("SGD", moment=1.0), r"near: momentum"),
    (optimizer("SGD", lr=-1.0), r"optimizer.params: Invalid learning rate"),
    (optimizer("SGD", lr="fast"), r"optimizer.params: "),
    (optimizer("Adam", bias_correction=False), r"bias_correction"),
    (nested("optimizer.params.lr", 1.0), r"optimizer.type = None"),
    (nested("optimizer.typ", "SGD"), r"unknown key 'optimizer.typ'"),
]


@pytest.mark.parametrize(("config", "seen"), CONFIGS)
def test_a_config_that_cannot_be_honoured_is_refused(config: dict[str, Any], seen: str) -> None:
    with pytest.raises(LayoutError, match=seen):
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
def test_a_file_that_cannot_be_used_is_refused(tmp_path: Path, text: str | None, seen: str) -> None:
    path = tmp_path / "ds.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(LayoutError, match=seen):
        initialize(linear(), config=path)


def test_arguments_that_do_not_go_together_are_refused() -> None:
    model, other = linear(), linear()
    sgd = torch.optim.SGD(model.parameters(), lr=8.0)
    plateau = ReduceLROnPlateau(sgd)
    wrong: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        ((model,), {}, r"(?s)config is a NoneType.*Engine\(model"),
        ((model, None, ["stage", 2]), {}, "config is a list"),
        (({}, None, {}), {}, "initialize got a dict"),
        ((other, torch.optim.SGD, SGD), {}, r"optimizer.type = SGD, and initialize\(optimizer="),
        ((model, sgd, {}), {"lr_scheduler": plateau}, "lr_scheduler is a ReduceLROnPlateau"),
        ((other, None, SGD), {"lr_scheduler": StepLR(sgd, 1)}, "lr_scheduler is of another optim"),
        ((other, None, {}), {"lr_scheduler": lambda o: StepLR(o, 1)}, "there is no optimizer"),
    ]
    for given, options, seen in wrong:
        with pytest.raises(LayoutError, match=seen):
            initialize(*given, **options)
