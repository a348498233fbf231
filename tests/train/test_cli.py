"""`python examples/train`, as a user starts it: alone, stopped, misused."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.train.runs import saved_losses
from train.command import main

ROOT = Path(__file__).parent.parent.parent
SMALL = shlex.split("--layers 1 --width 32 --heads 2 --context 32 --text-mb 0.1 --sample-bytes 20")


def environ() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def test_a_run_alone_says_its_result_and_leaves_checkpoint_and_curve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["--steps", "3", *SMALL]) == 0
    told, shown = capsys.readouterr()
    assert "shard(stage=2, logical_ranks=8, donate=True) . coalesce . clip(max_norm=1.0)" in told
    assert "checkpoint: runs/gpt-001/step-000003" in told
    assert re.search(r"^last loss \d\.\d+, parameters [0-9a-f]{16}$", told, re.MULTILINE)
    assert "nats/byte (byte bigram: " in told
    assert "sample:\ndef " in told
    assert "step 3/3: loss " in shown
    assert (tmp_path / "runs/gpt-001/loss.png").read_bytes().startswith(b"\x89PNG")
    assert len(saved_losses(tmp_path / "runs/gpt-001")) == 3
    assert main(["--steps", "1", *SMALL, "--no-plot"]) == 0  # a folder of its own
    assert "checkpoint: runs/gpt-002/step-000001" in capsys.readouterr().out
    assert len(saved_losses(tmp_path / "runs/gpt-001")) == 3


def test_ctrl_c_ends_with_130_and_a_checkpoint_that_continues(tmp_path: Path) -> None:
    out = ["--out", str(tmp_path), "--no-plot", "--save-every", "1000"]
    with subprocess.Popen(
        [sys.executable, "examples/train", "--steps", "100000", *SMALL, *out],
        cwd=ROOT,
        env=environ(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        assert any(line.startswith("step 1/100000") for line in process.stderr)  # the loop runs
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)  # an impatient second one changes nothing
        told, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    steps = len(saved_losses(tmp_path))
    before, command = told.splitlines()[-2:]  # the last lines, to be copied
    assert before == f"stopped after step {steps} of 100000, which is saved; it continues with:"
    assert shlex.split(command)[1:] == [
        "examples/train", "--resume", str(tmp_path), "--save-every", "1000", "--sample-bytes", "20",
        "--no-plot",
    ]  # fmt: skip
    more = shlex.split(f"{command} --steps {steps + 1}")
    done = subprocess.run(more, cwd=ROOT, env=environ(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(saved_losses(tmp_path)) == steps + 1


@pytest.mark.parametrize("ended", [False, True])
def test_what_is_said_last_comes_after_all_that_the_launcher_says(ended: bool) -> None:
    launcher = "2**22 + 1" if ended else "os.getpid()"  # no process has so large a number
    code = (
        "import os, sys, time; sys.path.insert(0, 'examples')\n"
        "from train.stop import say_last\n"
        f"say_last('the command', '    x --y z', launcher={launcher})\n"
        "time.sleep(0.6); print('a traceback', flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stderr == ""
    last = ["", "the command", "    x --y z"]  # a line of its own, below the shell's prompt
    launchers = ["a traceback"]
    assert done.stdout.splitlines() == (last + launchers if ended else launchers + last)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["unknown"], "unknown"),
        (["--layer", "2"], "unrecognized arguments: --layer"),  # an option cut short
        (["--micro-batches", "3"], "fzero, rank 0: --global-batch 8 cannot be split evenly"),
        (["--out", "a file"], "fzero, rank 0: --out a file: "),
    ],
)
def test_what_is_wrong_ends_with_2_and_a_word_before_the_first_step(
    argv: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a file").write_text("no folder")
    try:
        code = main(argv)
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    assert words in capsys.readouterr().err


def test_help_tells_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    assert told.startswith("usage: python examples/train")
    for option in ("stage", "no-coalesce", "accumulate", "micro-batches", "resume", "global-batch"):
        assert f"--{option}" in told
