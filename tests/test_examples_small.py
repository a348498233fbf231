"""The examples below 100 lines do what they print: alone, and under torchrun."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import sys
from pathlib import Path

import pytest

from tests.ranks import run_ranks, spawn_script

TIER_INPUTS = ("examples",)  # tests/tiers.py: a push that changes them runs these tests

FOLDER = Path(__file__).parent.parent / "examples"
EXAMPLES = (
    "maml.py",
    "dp_sgd.py",
    "distillation.py",
    "actor_critic.py",
    "ema.py",
    "jvp_loss.py",
    "muon.py",
    "reshard.py",
    "stages_by_group.py",
    "ragged_lm.py",
    "chunked_loss.py",
    "weight_sync.py",
)
LONG = {"maml.py", "jvp_loss.py", "distillation.py", "ema.py"}  # on two ranks
FLOAT64 = 1e-9  # no check of an example is further off: what is compared rounds in another order


def run(command: str) -> str:
    """Run an example in this process, on the ranks that there are; return what it printed."""
    said, before = io.StringIO(), sys.argv
    sys.argv = command.split()
    try:
        with contextlib.redirect_stdout(said):
            runpy.run_path(str(FOLDER / sys.argv[0]), run_name="__main__")
    finally:
        sys.argv = before
    return said.getvalue()


def require_claims(script: str, said: str, ranks: int) -> None:
    """What any number of ranks must print, and what depends on it."""
    check = re.findall(r"^check: .* to (\S+)$", said, re.MULTILINE)
    assert len(check) == 1 and float(check[0]) < FLOAT64, said
    shards = -(-100 // ranks)
    if script == "distillation.py":
        held = re.findall(r"([\d,]+) of parameters, 0 of gradients, 0 of its optimizer", said)
        assert len(held) == 1, said
        whole = 8 * (8 * 128 + 128 + 128 * 5 + 5)
        assert whole / ranks <= float(held[0].replace(",", "")) < 1.01 * whole / ranks
    if script == "stages_by_group.py":
        found = re.findall(r"^(\w+) +stage (\d): .* (\d+)% of the p.* (\d+)%", said, re.MULTILINE)
        shares = {(name, stage): (int(p), int(o)) for name, stage, p, o in found}
        wanted = {("table", "3"): (shards, shards), ("layers", "2"): (100, shards)}
        for group, share in wanted.items():
            assert shares[group] == pytest.approx(share, abs=2), said
    if script == "chunked_loss.py":
        assert f"gathered the head {2 if ranks > 1 else 0} times" in said
    if script == "weight_sync.py":
        sent = re.findall(r"^([\d,]+) bytes went to the engine", said, re.MULTILINE)
        assert sent == ["105,984", "6,144", "6,144"]  # all, then the adapters
    if script == "muon.py" and ranks == 2:
        assert "2,832 bytes" in said  # of 5,792: whole leaves of the first rank, no padding
    if script == "ema.py":
        assert "0 collectives in 200 updates" in said
        assert (
            f"; {216 if ranks == 1 else 112} bytes" in said
        )  # 27 numbers; 28 with padding, halved


@pytest.mark.parametrize("script", EXAMPLES)
def test_alone(script: str) -> None:
    require_claims(script, run(script), ranks=1)


@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize(
    "script", [pytest.param(x, marks=[pytest.mark.slow] * (x in LONG)) for x in EXAMPLES]
)
def test_on_two_ranks(script: str, tmp_path: Path) -> None:
    options = f" --stage 2 --folder {tmp_path}/run" if script == "reshard.py" else ""
    require_claims(script, run_ranks(on_a_rank, 2, script + options)[0], ranks=2)


@pytest.mark.slow
@pytest.mark.xdist_group("gloo")
def test_all_of_them_under_torchrun(tmp_path: Path) -> None:
    options = {"reshard.py": f" --stage 2 --folder {tmp_path}/run"}
    commands = [script + options.get(script, "") for script in EXAMPLES]
    done = spawn_script("-m", 2, ["tests.examples_in_turn", *commands], timeout_s=280)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    parts = re.split(r"^== (\S+)\n", done.stdout, flags=re.MULTILINE)
    said = dict(zip(parts[1::2], parts[2::2], strict=True))
    assert [*said] == [*EXAMPLES]
    for script, text in said.items():
        require_claims(script, text, ranks=2)
        if script != "reshard.py":
            assert "on 2 rank(s)" in text


def on_a_rank(rank: int, world_size: int, command: str) -> str:
    return run(command)


@pytest.mark.xdist_group("gloo")
def test_the_losses_of_a_training_go_on_on_4_then_2_then_3_ranks(tmp_path: Path) -> None:
    for number, (ranks, stage) in enumerate(((4, 3), (2, 1), (3, 2)), 1):
        command = f"reshard.py --stage {stage} --folder {tmp_path}/run"
        said = run_ranks(on_a_rank, ranks, command)[0]
        assert f"check: {8 * number} losses" in said
        require_claims("reshard.py", said, ranks)


@pytest.mark.parametrize("script", EXAMPLES)
def test_each_is_shorter_than_100_lines(script: str) -> None:
    assert len((FOLDER / script).read_text(encoding="utf-8").splitlines()) < 100
