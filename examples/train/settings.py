"""What the job is told: the settings, grouped by what a resumed run may change, and the CLI."""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fzero import LayoutError
from train.gpt import GPTConfig
from train.option import (
    ABSOLUTE,
    COUNT,
    FOLDER,
    POSITIVE,
    SIZE,
    WHOLE,
    add_fields,
    option,
)

DEFAULT_LR = {"adamw": 2e-3, "adam": 2e-3, "lion": 1e-3, "sgd": 0.3}
_RATES = ", ".join(f"{name} {rate:g}" for name, rate in DEFAULT_LR.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What a checkpoint consists of; a resumed run keeps it, and another value is refused."""

    model: GPTConfig = field(default_factory=GPTConfig)
    dtype: str = option("float32", "of parameters ({})", choices=("float32", "bfloat16"))
    optimizer: str = option("adamw", "({})", choices=tuple(DEFAULT_LR))
    logical_ranks: int = option(
        8,
        "ranks that the run is written for; any number of ranks up to it carries them, and "
        "computes the same bits ({})",
        **COUNT,
    )
    seed: int = option(0, "of model, data and random numbers ({})", **WHOLE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """What decides the numbers of a run; a resumed run that changes it continues inexactly."""

    steps: int = option(400, "optimizer steps in all ({})", **COUNT)
    global_batch: int = option(
        8,
        "sequences in one optimizer step over all logical ranks and backward passes; each pass of "
        "a logical rank gets global-batch / (logical-ranks x micro-batches x accumulate) ({})",
        **COUNT,
    )
    lr: float = option(DEFAULT_LR["adamw"], f"peak learning rate ({_RATES})", **POSITIVE)
    warmup: int = option(20, "steps of linear warm-up ({})", **WHOLE)
    clip: float = option(1.0, "gradient norm bound, 0: none ({})", **SIZE)
    threads: int = option(
        1, "of each rank on the CPU, which split the sums inside of a kernel ({})", **COUNT
    )
    text: str | None = option(None, "*.py files to learn (the standard library)", **ABSOLUTE)
    text_mb: float = option(8.0, "most text to use ({:g})", **POSITIVE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """How the work of a step is split; changes no number beyond rounding, at any time."""

    stage: int = option(
        2,
        "ZeRO: 0 replicas, 1 optimizer, 2 + gradients, 3 + parameters ({})",
        type=int,
        choices=range(4),
    )
    coalesce: bool = option(
        True,
        "one gradient reduction a step, whatever the backward passes (on)",
        action=argparse.BooleanOptionalAction,
    )
    micro_batches: int = option(1, "backward passes in the step ({})", **COUNT)
    accumulate: int = option(1, "parts that each of them is run in ({})", **COUNT)

    @property
    def passes(self) -> int:
        """Backward passes of a rank in one optimizer step."""
        return self.micro_batches * self.accumulate


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What is read and written; never saved."""

    out: Path | None = option(
        None, "for checkpoints and curve (a new folder: runs/gpt-001, then -002, ...)", **FOLDER
    )
    resume: Path | None = option(
        None,
        "continue the run in DIR (an --out, or one checkpoint in it), on any number of ranks",
        **FOLDER,
    )
    overwrite: bool = option(
        False,
        "write into an --out that holds files of another run; same names are replaced",
        action="store_true",
    )
    save_every: int = option(0, "steps between checkpoints, 0: only at the end ({})", **WHOLE)
    mirror: int = option(
        0,
        "steps between copies in the memory of the host, from which torchrun --max-restarts goes "
        "on; 0: none ({})",
        **WHOLE,
    )
    sample_bytes: int = option(400, "of generated text ({})", **WHOLE)
    plot: bool = option(True, "write no loss curve", action="store_false")
    quiet: bool = option(False, "print results only, no progress", action="store_true")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings of one run."""

    kind: Kind = field(default_factory=Kind)
    course: Course = field(default_factory=Course)
    split: Split = field(default_factory=Split)
    output: Output = field(default_factory=Output)


def saved_form(settings: Settings) -> dict[str, dict[str, Any]]:
    """Return what a checkpoint keeps of the settings, as plain JSON values.

    Example:
        >>> saved_form(Settings())["kind"]["optimizer"]
        'adamw'
    """
    kind = dataclasses.asdict(settings.kind)
    return {
        "kind": {**kind.pop("model"), **kind},
        "course": dataclasses.asdict(settings.course),
        "split": dataclasses.asdict(settings.split),
    }


def resolve(given: dict[str, Any], saved: dict[str, Any] | None = None) -> Settings:
    """Make settings of what was given on the command line, over what was saved, over defaults.

    Args:
        given: option name (`global_batch`) to value, only the options that were given.
        saved: `saved_form` of the run that is resumed.

    Raises:
        LayoutError: an option was given that contradicts the kind of the saved run.

    Example:
        >>> resolve({"stage": 3, "width": 64}).kind.model.width
        64
        >>> resolve({"optimizer": "lion"}).course.lr
        0.001
    """
    saved = saved or {"kind": {}, "course": {}, "split": {}}
    for name, value in saved["kind"].items():
        if given.get(name, value) != value:
            option_name = f"--{name.replace('_', '-')}"
            raise LayoutError(
                f"{option_name} {given[name]}: the run that is resumed has {value}.",
                cause="another model, optimizer or seed was meant, or the wrong --resume.",
                fix=f"leave {option_name} out, or start a new run without --resume.",
            )
    merged = {**saved["kind"], **saved["course"], **saved["split"], **given}
    if "lr" not in merged and "optimizer" in merged:
        merged["lr"] = DEFAULT_LR[merged["optimizer"]]
    return Settings(
        kind=_fill(Kind, {**merged, "model": _fill(GPTConfig, merged)}),
        course=_fill(Course, merged),
        split=_fill(Split, merged),
        output=_fill(Output, merged),
    )


def changed_course(settings: Settings, saved: dict[str, Any]) -> list[str]:
    """Say which settings make a resumed run another one than the saved run would have been.

    Example:
        >>> changed_course(Settings(), {"course": {"steps": 400, "warmup": 3}})
        ['--warmup 3 -> 20']
    """
    now = dataclasses.asdict(settings.course)
    return [
        f"--{name.replace('_', '-')} {old} -> {now[name]}"
        for name, old in saved["course"].items()
        if now[name] != old
    ]


_GROUPS = {
    "model and run (a resumed run keeps it)": (GPTConfig, Kind),
    "course (decides the numbers; kept by --resume)": (Course,),
    "split (how ranks share a step; free to change)": (Split,),
    "input and output": (Output,),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the options of the job; only those that are given appear in the namespace."""
    for title, records in _GROUPS.items():
        add_fields(parser.add_argument_group(title), *records)


def _fill(record: Any, values: dict[str, Any]) -> Any:
    names = {each.name for each in dataclasses.fields(record)}
    return record(**{name: value for name, value in values.items() if name in names})
