"""The command that resumes: of what was started alone, by torchrun, and by others."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from train.again import resume_command
from train.command import make_parser
from train.settings import Output

JOB = Path("examples/train")
RUN = Path("runs/gpt-001")
AGENT = {"TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2"}


def command(environ: dict[str, str], **output: object) -> str:
    given = Output(**output)  # type: ignore[arg-type]
    return resume_command(given, RUN, RUN, environ, python="/else/where/python", program=JOB)


@pytest.mark.parametrize(
    ("environ", "start"),
    [
        ({}, "/else/where/python examples/train"),
        ({"WORLD_SIZE": "1"}, "/else/where/python examples/train"),
        ({"WORLD_SIZE": "4"}, "<the launcher, as before> /else/where/python examples/train"),
        (AGENT, "/else/where/python -m torch.distributed.run --nproc-per-node 2 examples/train"),
        (AGENT | {"GROUP_WORLD_SIZE": "2"}, "/else/where/python -m torch.distributed.run <its "),
        (
            AGENT | {"MASTER_PORT": "41111", "TORCHELASTIC_MAX_RESTARTS": "3"},
            "/else/where/python -m torch.distributed.run --standalone --nproc-per-node 2 "
            "--max-restarts 3 examples/train",
        ),
    ],
)
def test_it_starts_the_ranks_as_they_were_started(environ: dict[str, str], start: str) -> None:
    assert command(environ).startswith(start)


def test_torchrun_is_called_by_its_name_where_it_is_and_paths_are_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torchrun").touch()
    monkeypatch.chdir(tmp_path)
    python = str(tmp_path / "python")
    assert resume_command(Output(), RUN, RUN, AGENT, python=python, program=JOB).startswith(
        "torchrun --nproc"
    )
    assert resume_command(Output(), RUN, RUN, {}, python=python, program=JOB).startswith(
        "python examples/train"
    )


def test_it_repeats_what_no_checkpoint_keeps_and_nothing_else() -> None:
    given = {"save_every": 5, "sample_bytes": 0, "plot": False, "quiet": True, "overwrite": True}
    words = shlex.split(command({}, out=RUN, resume=Path("x"), **given))
    parsed = vars(make_parser().parse_args(words[2:]))
    assert {name: parsed[name] for name in given if name in parsed} == {
        name: value for name, value in given.items() if name != "overwrite"
    }
    assert parsed["resume"] == RUN and "out" not in parsed


def test_a_run_that_goes_on_elsewhere_names_both_folders() -> None:
    made = resume_command(
        Output(), RUN / "step-000003", Path("an other"), {}, python="python", program=JOB
    )
    assert made == "python examples/train --resume runs/gpt-001/step-000003 --out 'an other'"
    in_it = resume_command(Output(), RUN / "step-000003", RUN, {}, python="python", program=JOB)
    assert in_it == "python examples/train --resume runs/gpt-001/step-000003"
