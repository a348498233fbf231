"""Settings: defaults, options, and what a resumed run keeps, may change, and may not."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from fzero.errors import LayoutError
from train.settings import DEFAULT_LR, Settings, add_options, changed_course, resolve, saved_form


def parse(*argv: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser(argument_default=argparse.SUPPRESS)
    add_options(parser)
    return vars(parser.parse_args(argv))


def test_nothing_given_is_the_defaults() -> None:
    assert parse() == {}
    assert resolve({}) == Settings()


EVERYTHING = shlex.split(
    """
    --layers 2 --width 32 --heads 2 --context 16 --dtype bfloat16 --optimizer lion
    --seed 3 --steps 7 --logical-ranks 4 --global-batch 24 --lr 0.5 --warmup 0 --clip 0 --threads 2
    --text src --text-mb 0.5
    --stage 3 --no-coalesce --micro-batches 2 --accumulate 3
    --out o --resume r --overwrite --save-every 5 --mirror 4 --sample-bytes 0 --no-plot --quiet
    """
)


def test_every_option_arrives() -> None:
    given = parse(*EVERYTHING)
    settings, default = resolve(given), Settings()
    flat, flat_default = [
        {**saved["kind"], **saved["course"], **saved["split"]}
        for saved in (saved_form(settings), saved_form(default))
    ]
    assert {name for name in flat if flat[name] == flat_default[name]} == set()
    assert set(given) == set(flat) | set(settings.output.__dataclass_fields__)
    assert settings.output.out == Path("o")
    assert (settings.course.clip, settings.split.passes) == (0.0, 6)
    assert settings.course.text == str(Path("src").resolve())


def test_the_learning_rate_follows_the_optimizer_unless_given() -> None:
    for optimizer, rate in DEFAULT_LR.items():
        assert resolve({"optimizer": optimizer}).course.lr == rate
        assert resolve({"optimizer": optimizer, "lr": 0.125}).course.lr == 0.125


@pytest.mark.parametrize(
    "argv",
    [
        ["--steps", "0"],
        ["--layers", "0"],
        ["--steps", "1.5"],
        ["--lr", "0"],
        ["--lr", "nan"],
        ["--clip", "-1"],
        ["--stage", "4"],
        ["--optimizer", "muon"],
        ["--seed", "-1"],
    ],
    ids=" ".join,
)
def test_a_wrong_option_ends_with_its_name(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(*argv)
    assert ended.value.code == 2
    assert argv[0] in capsys.readouterr().err


def saved(**given: Any) -> dict[str, Any]:
    return json.loads(json.dumps(saved_form(resolve(given))))  # as it comes from the file


def test_a_resumed_run_keeps_what_was_saved_and_says_what_it_changes() -> None:
    before = {"width": 64, "steps": 9, "seed": 4, "stage": 3, "optimizer": "sgd", "coalesce": False}
    assert saved_form(resolve({}, saved(**before))) == saved(**before)
    split = resolve({"stage": 0, "micro_batches": 4}, saved(stage=3))  # it is free to change
    assert (split.split.stage, split.split.micro_batches) == (0, 4)
    assert changed_course(split, saved(stage=3)) == []
    course = resolve({"global_batch": 16, "lr": 1e-4}, saved())
    assert changed_course(course, saved()) == ["--global-batch 8 -> 16", "--lr 0.002 -> 0.0001"]


@pytest.mark.parametrize(
    ("name", "value"), [("width", 512), ("optimizer", "sgd"), ("seed", 1), ("logical_ranks", 4)]
)
def test_a_resumed_run_cannot_become_another_one(name: str, value: Any) -> None:
    option = f"--{name.replace('_', '-')}"
    with pytest.raises(LayoutError, match=rf"(?s){option} {value}: .*Fix: leave {option} out"):
        resolve({name: value}, saved())
