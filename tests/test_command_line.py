"""`python -m fzero`: its commands, what it says of a wrong one, and of the job that it had."""

from __future__ import annotations

import json
import os
import shlex

import pytest
import torch

from fzero.__main__ import main
from fzero.tools.doctor import environment


def test_help_tells_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    told = capsys.readouterr().out
    assert "usage: python -m fzero" in told
    assert all(name in told for name in ("plan", "certify", "doctor", "info"))
    assert "train" not in told


@pytest.mark.parametrize("argv", [["unknown"], ["info", "--unknown"]])
def test_what_is_wrong_ends_with_2_and_a_word(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    assert "unknown" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options", [[], ["--help"], ["--stage", "3", "--out", "a folder"]], ids=" ".join
)
def test_train_is_no_command_any_more_and_the_way_to_it_keeps_the_options(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *options]) == 2
    told, error = capsys.readouterr()
    assert told == ""
    seen, cause, fix = error.splitlines()
    assert seen == "python -m fzero train: the library has no trainer inside any more."
    assert cause.startswith("Usual cause: ") and fix.startswith("Fix: ")
    make, torchrun = (shlex.split(code) for code in fix.split("`")[1::2])
    assert make[:2] == ["make", "train"]
    assert torchrun[:4] == ["torchrun", "--nproc-per-node", "2", "examples/train"]
    assert torchrun[4:] == options
    args = "".join(word.removeprefix("ARGS=") for word in make[2:])
    assert shlex.split(args) == options  # the shell of make reads it once more


def test_info_reports_this_machine_and_its_launcher(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("FZERO_TIMEOUT_S", "77")
    assert main(["info", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == environment()
    assert report["torch"]["version"] == torch.__version__
    assert report["cpu"]["cores"] == os.cpu_count()
    assert len(report["gpus"]) == torch.cuda.device_count()
    assert report["packages"]["optree"]
    assert report["torchrun"]["RANK"] == "1"
    assert report["variables"]["FZERO_TIMEOUT_S"] == "77"
    assert "gloo" in report["backends"]
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    assert f"torch      version {torch.__version__}" in text
    assert f"cores {os.cpu_count()}" in text and "GiB" in text
    assert "variables  " in text and "FZERO_TIMEOUT_S 77" in text
    lines = text.splitlines()  # one block that an issue takes as it is
    assert (lines[0], lines[-1], lines.count("```")) == ("```text", "```", 1)
