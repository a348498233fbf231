"""Round trips through DeepSpeed itself: its converter's folders come in, its loader takes ours."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fzero.adapter import Engine
from fzero.checkpoint import load_universal, save_universal
from tests.checkpoint.by_deepspeed import adamw, loss_of, net, rows
from tests.ranks import spawn_script

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="DeepSpeed is not installed: pip install fzero[bench]",
)
RANKS = 2
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def _deepspeed(folder: Path, stage: int, dtype: str, mode: str) -> None:
    script = Path(__file__).with_name("by_deepspeed.py")
    ended = spawn_script(script, RANKS, [str(folder), str(stage), dtype, mode])
    assert ended.returncode == 0, ended.stderr[:4000]


def _converted(source: Path, target: Path) -> Path:
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
    command += ["--input_folder", str(source), "--output_folder", str(target)]
    command += ["--num_extract_workers=1", "--num_merge_workers=1", "--inject_missing_state"]
    env = os.environ | {"DS_ACCELERATOR": "cpu"}
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=110)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return target


def _values(root: Path) -> dict[tuple[str, str], Tensor]:
    """Every file of a parameter, flat, as plain torch reads it."""
    found = {}
    for file in (root / "zero").glob("*/*.pt"):
        value: Any = torch.load(file, weights_only=True)
        value = value["param"] if isinstance(value, dict) else value
        found[file.parent.name, file.stem] = torch.as_tensor(value).detach().reshape(-1)
    return found


def _same(found: dict[Any, Tensor], wanted: dict[Any, Tensor], *, atol: float = 0.0) -> None:
    for key, value in wanted.items():
        torch.testing.assert_close(found[key].float(), value.float(), rtol=0.0, atol=atol, msg=key)


@pytest.mark.parametrize(
    ("stage", "then", "dtype"), [(1, 3, "bf16"), (2, 1, "fp32"), (3, 2, "fp32")]
)
def test_deepspeed_to_fzero_and_back(stage: int, then: int, dtype: str, tmp_path: Path) -> None:
    """Bit for bit where values are only moved; both go on as DeepSpeed alone would have gone on."""
    theirs = tmp_path / "theirs"
    _deepspeed(theirs, stage, dtype, "train")
    four = _values(_converted(theirs / "4", theirs / "four"))
    two = _values(_converted(theirs / "2", theirs / "two"))  # the latest

    module = net().to(DTYPES[dtype])
    frozen = module[0].bias.detach().clone()  # type: ignore
    optimizer = adamw(module)
    with torch.no_grad():
        for p in module.parameters():
            p.zero_()
    for group in optimizer.param_groups:
        group["lr"] = 7.0
    engine = Engine(module, optimizer, stage=3)
    load_universal(theirs, engine)
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.02]
    save_universal(tmp_path / "ours", engine)
    ours = _values(tmp_path / "ours" / "global_step2_universal")
    _same(ours, two)
    assert torch.equal(ours["0.bias", "fp32"], frozen.float())
    assert all(step == 2 for (_, key), step in ours.items() if key == "step")

    for update in (2, 3):  # of both ranks in one backward
        losses = [loss_of(engine(rows(update, rank).to(DTYPES[dtype]))) for rank in range(RANKS)]
        engine.backward(sum(losses) / RANKS)
        engine.step()
    save_universal(tmp_path / "further", engine)
    further = _values(tmp_path / "further" / "global_step4_universal")
    _same(further, four, atol=1e-6)

    _deepspeed(tmp_path / "ours", then, dtype, "go_on")
    facts: Any = torch.load(tmp_path / "ours" / "facts.pt", weights_only=True)
    for key, wanted in (("loaded", two), ("trained", four)):
        found = {
            (name, part): value.reshape(-1)
            for name, parts in facts[key].items()
            for part, value in parts.items()
        }
        # Stage 3 of DeepSpeed gives every param group the options of the first.
        if key == "loaded" or then < 3:
            _same({**wanted, **found}, wanted)
    rates = [(group["lr"], group["weight_decay"]) for group in facts["options"]]
    assert rates == ([(0.01, 0.01), (0.02, 0.0)] if then < 3 else [(0.01, 0.01)] * 2)
