"""initialize(): no key of a config is ignored; what cannot be honoured is refused by name."""

from __future__ import annotations

import base64
import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

import fzero
from fzero.adapter import initialize
from fzero.errors import LayoutError
from tests.integrations.deepspeed.configs import SGD, batch, linear, nested


def optimizer(kind: str, **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": kind, "params": params}}


def scheduler(kind: str, **params: Any) -> dict[str, Any]:
    return {**SGD, "scheduler": {"type": kind, "params": params}}


SPARSE_BF16 = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
NVME = {
    "zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": "/no/such/disk"}},
    "steps_per_prnt": 1,
}
CONFIGS: list[tuple[dict[str, Any], str]] = [
    # Keys that contradict each other.
    (nested("bf16.bf16_optimizer_states", True), "bf16_master_weights_and_grads = False"),
    (nested("zero_optimization.offload_param.device", "cpu"), "offload_param at stage 0"),
    (nested("zero_optimization.offload_optimizer.device", "nvme"), "nvme_path"),
    (NVME, r"(?s)steps_per_prnt.*'/no/such/disk', which is no folder here: make a folder"),
    ({"bf16": SPARSE_BF16}, "without bf16.enabled"),
    (nested("data_types.param_dtype", "bf16"), "bf16.enabled = False"),
    ({"data_types": {"param_dtype": "fp32"}, "bf16": {"enabled": True}}, "enabled = True"),
    (nested("zero_optimization.leaf_module.names", ["experts"]), "experts"),
    # Batch sizes.
    (batch(13, 3, 4), "= 13: it is not micro-batch size 3 x accumulation 4 x 1 ranks = 12"),
    (batch(13, 3, None), "13: it is no multiple of micro-batch size 3 x accumulation . x 1 ranks"),
    (batch(13, None, 4), "13: it is no multiple of micro-batch size . x accumulation 4 x 1 ranks"),
    # Optimizers.
    (optimizer("Lamb"), r"optimizer.type = 'Lamb': not supported"),
    (optimizer("OneBitAdam"), r"optimizer.type = 'OneBitAdam': not supported"),
    (optimizer("AdmaW"), r"near: adamw"),
    (optimizer("Muon"), r"'Muon': not supported \(near: nothing\); use one of torch.optim"),
    (optimizer("LBFGS"), r"LBFGS cannot step"),
    (optimizer("SGD", max_grad_norm=1.0), r"(?s)max_grad_norm.*gradient_clip"),
    (optimizer("SGD", learning_rate=1.0), r"params.learning_rate = 1.0"),
    (optimizer("SGD", moment=1.0), r"near: momentum"),
    (optimizer("SGD", lr=-1.0), r"optimizer.params = .*Invalid learning rate"),
    (optimizer("SGD", lr="fast"), r"optimizer.params = "),
    (optimizer("Lion", betas=[1.0, 0.5]), r"optimizer.params = .*Invalid lr"),
    (optimizer("Adam", bias_correction=False), r"params.bias_correction = False: leave it out"),
    (optimizer("AdamW", amsgrad=True), r"params.amsgrad = True: leave it out"),
    (nested("optimizer.params.lr", 1.0), r"optimizer.params without optimizer.type"),
    (nested("optimizer.typ", "SGD"), r"optimizer.typ = 'SGD': unknown"),
    # Schedulers.
    (scheduler("WarmupLr"), r"scheduler.type = 'WarmupLr': not supported \(near: WarmupLR"),
    (scheduler("ReduceLROnPlateau"), r"scheduler.type = 'ReduceLROnPlateau': not supported"),
    (scheduler("WarmupLR", warmup_type="cubic"), r"warmup_type is 'cubic', not log or linear"),
    (scheduler("WarmupLR", warmup_max_lr=[1, 2]), r"2 values for 1 param groups"),
    (scheduler("WarmupLR", last_batch_iteration=7), r"last_batch_iteration = 7: WarmupLR does not"),
    (scheduler("WarmupDecayLR"), r"scheduler.params.total_num_steps: WarmupDecayLR needs it"),
    (scheduler("StepLR", gamma=0.5), r"scheduler.params.step_size: StepLR needs it"),
    (scheduler("OneCycle", cycle_min_lr=0, cycle_max_lr=1, cycle_first_step_size=0), r"size of 0"),
    (nested("scheduler.params.warmup_num_steps", 1), r"scheduler.params without scheduler.type"),
    ({"scheduler": {"type": "WarmupLR"}}, "a scheduler, and no optimizer"),
]


@pytest.mark.parametrize(("config", "seen"), CONFIGS)
def test_a_config_that_cannot_be_honoured_is_refused(config: dict[str, Any], seen: str) -> None:
    with pytest.raises(LayoutError, match=seen):
        initialize(linear(), config=config)


def test_what_a_scheduler_needs_and_is_auto_is_asked_for_once() -> None:
    with pytest.raises(LayoutError) as error:
        initialize(linear(), config=scheduler("WarmupDecayLR", total_num_steps="auto", warmup=1))
    _, *lines, _, _ = str(error.value).splitlines()
    assert [line.split()[0] for line in lines] == [
        *("scheduler.params.total_num_steps", "scheduler.params.warmup"),
    ]


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        (None, r"(?s)No such file.*an absolute one"),
        ("{'a': 1}", r"is no JSON object: .*line 1 column 2"),
        ('{"stage": 1, "stage": 2}', "no JSON object: stage is there twice"),
        ("[1]", r"ds.json' is no JSON object: it has \[1\]"),
        ('{"gradient_clipping": NaN}', "gradient_clipping = nan: give"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(tmp_path: Path, text: str | None, seen: str) -> None:
    path = tmp_path / "ds.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(LayoutError, match=seen):
        initialize(linear(), config=path)


def test_a_config_may_be_in_base64_as_launchers_pass_it() -> None:
    text = base64.urlsafe_b64encode(json.dumps(nested("zero_optimization.stage", 2)).encode())
    assert initialize(linear(), config=text.decode()).stage == 2
    with pytest.raises(LayoutError, match="No such file"):
        initialize(linear(), config="YWJj")  # the base64 of something else


def test_arguments_that_do_not_go_together_are_refused() -> None:
    model, other = linear(), linear()
    sgd = torch.optim.SGD(model.parameters(), lr=8.0)
    plateau = ReduceLROnPlateau(sgd)

    def steps(optimizer: torch.optim.Optimizer) -> StepLR:
        return StepLR(optimizer, 1)

    wrong: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        ((model,), {}, r"(?s)config is a NoneType.*Engine\(model"),
        ((model, None, ["stage", 2]), {}, "config is a list"),
        (({}, None, {}), {}, "initialize got a dict"),
        ((model, sgd, {}), {"args": Namespace(deepspeed_config="a.json")}, "args.deepspeed_config"),
        ((model, fzero.optim.sgd(1.0), {}), {"lr_scheduler": steps}, "no torch.optim optimizer"),
        ((other,), {"config": {}, "training_data": [1]}, "training_data, and no batch size"),
        ((model, sgd, {}), {"lr_scheduler": plateau}, "lr_scheduler is a ReduceLROnPlateau"),
        ((other, None, SGD), {"lr_scheduler": StepLR(sgd, 1)}, "lr_scheduler is of another optim"),
        ((other, None, {}), {"lr_scheduler": steps}, "a scheduler, and no optimizer"),
    ]
    for given, options, seen in wrong:
        with pytest.raises(LayoutError, match=seen):
            initialize(*given, **options)
