"""What the job is told: the settings, grouped by what a resumed run may change, and the CLI."""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fzero.errors import LayoutError, explain
from fzero.job.gpt import GPTConfig

DEFAULT_LR = {"adamw": 2e-3, "adam": 2e-3, "lion": 1e-3, "sgd": 0.3}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What a checkpoint consists of; a resumed run keeps it, and another value is refused."""

    model: GPTConfig = field(default_factory=GPTConfig)
    dtype: str = "float32"
    optimizer: str = "adamw"


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """What decides the numbers of a run; a resumed run that changes it continues inexactly."""

    seed: int = 0
    steps: int = 400
    global_batch: int = 8
    lr: float = DEFAULT_LR["adamw"]
    warmup: int = 20
    clip: float = 1.0
    text: str | None = None  # folder; the standard library if None
    text_mb: float = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """How the work of a step is split; changes no number beyond rounding, at any time."""

    stage: int = 2
    coalesce: bool = True
    micro_batches: int = 1
    accumulate: int = 1

    @property
    def passes(self) -> int:
        """Backward passes of a rank in one optimizer step."""
        return self.micro_batches * self.accumulate


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What is read and written; never saved."""

    out: Path = Path("runs/gpt")
    resume: Path | None = None
    overwrite: bool = False
    save_every: int = 0
    sample_bytes: int = 400
    plot: bool = True
    quiet: bool = False


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
            raise LayoutError(
                explain(
                    f"--{name} {given[name]}: the run that is resumed has {value}.",
                    cause="another model or optimizer was meant, or the wrong --resume.",
                    fix=f"leave --{name} out, or start a new run without --resume.",
                )
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
        >>> changed_course(Settings(), {"course": {"seed": 3, "steps": 400}})
        ['--seed 3 -> 0']
    """
    now = dataclasses.asdict(settings.course)
    return [
        f"--{name.replace('_', '-')} {old} -> {now[name]}"
        for name, old in saved["course"].items()
        if now[name] != old
    ]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the options of the job; only those that are given appear in the namespace."""
    _add_model(parser.add_argument_group("model (a resumed run keeps it)"))
    _add_course(parser.add_argument_group("course (decides the numbers; kept by --resume)"))
    _add_split(parser.add_argument_group("split (how ranks share a step; free to change)"))
    _add_output(parser.add_argument_group("input and output"))


def _fill(record: Any, values: dict[str, Any]) -> Any:
    names = {each.name for each in dataclasses.fields(record)}
    return record(**{name: value for name, value in values.items() if name in names})


def _add_model(group: argparse._ArgumentGroup) -> None:
    model = GPTConfig()
    group.add_argument("--layers", type=_count, metavar="N", help=f"blocks ({model.layers})")
    group.add_argument(
        "--width", type=_count, metavar="N", help=f"residual features ({model.width})"
    )
    group.add_argument("--heads", type=_count, metavar="N", help=f"attention heads ({model.heads})")
    group.add_argument(
        "--context", type=_count, metavar="N", help=f"bytes in a window ({model.context})"
    )
    group.add_argument("--dtype", choices=("float32", "bfloat16"), help="of parameters (float32)")
    group.add_argument("--optimizer", choices=tuple(DEFAULT_LR), help="(adamw)")


def _add_course(group: argparse._ArgumentGroup) -> None:
    course = Course()
    rates = ", ".join(f"{name} {rate:g}" for name, rate in DEFAULT_LR.items())
    group.add_argument(
        "--steps", type=_count, metavar="N", help=f"optimizer steps in all ({course.steps})"
    )
    group.add_argument(
        "--global-batch",
        type=_count,
        metavar="N",
        help="sequences in one optimizer step over all ranks and backward passes; each pass of a "
        f"rank gets global-batch / (ranks x micro-batches x accumulate) ({course.global_batch})",
    )
    group.add_argument("--lr", type=_positive, metavar="X", help=f"peak learning rate ({rates})")
    group.add_argument(
        "--warmup", type=_whole, metavar="N", help=f"steps of linear warm-up ({course.warmup})"
    )
    group.add_argument(
        "--clip", type=_size, metavar="X", help=f"gradient norm bound, 0: none ({course.clip})"
    )
    group.add_argument("--seed", type=_seed, metavar="N", help=f"of model and data ({course.seed})")
    group.add_argument(
        "--text", type=_absolute, metavar="DIR", help="*.py files to learn (the standard library)"
    )
    group.add_argument(
        "--text-mb", type=_positive, metavar="X", help=f"most text to use ({course.text_mb:g})"
    )


def _add_split(group: argparse._ArgumentGroup) -> None:
    split = Split()
    group.add_argument(
        "--stage",
        type=int,
        choices=range(4),
        help=f"ZeRO: 0 replicas, 1 optimizer, 2 + gradients, 3 + parameters ({split.stage})",
    )
    group.add_argument(
        "--coalesce",
        action=argparse.BooleanOptionalAction,
        help="one gradient reduction a step, whatever the backward passes (on)",
    )
    group.add_argument(
        "--micro-batches",
        type=_count,
        metavar="N",
        help=f"backward passes in the step ({split.micro_batches})",
    )
    group.add_argument(
        "--accumulate",
        type=_count,
        metavar="N",
        help=f"parts that each of them is run in ({split.accumulate})",
    )


def _add_output(group: argparse._ArgumentGroup) -> None:
    output = Output()
    group.add_argument(
        "--out", type=Path, metavar="DIR", help=f"for checkpoints and curve ({output.out})"
    )
    group.add_argument(
        "--resume",
        type=Path,
        metavar="DIR",
        help="continue the run in DIR (an --out, or one checkpoint in it), on any number of ranks",
    )
    group.add_argument(
        "--overwrite",
        action="store_true",
        help="write into an --out that holds files of another run; same names are replaced",
    )
    group.add_argument(
        "--save-every",
        type=_whole,
        metavar="N",
        help="steps between checkpoints, 0: only at the end (0)",
    )
    group.add_argument(
        "--sample-bytes",
        type=_whole,
        metavar="N",
        help=f"of generated text ({output.sample_bytes})",
    )
    group.add_argument("--no-plot", dest="plot", action="store_false", help="write no loss curve")
    group.add_argument("--quiet", action="store_true", help="print results only, no progress")


def _count(text: str) -> int:
    return _checked(text, int, lambda n: n >= 1, "a whole number of at least 1")


def _whole(text: str) -> int:
    return _checked(text, int, lambda n: n >= 0, "a whole number of at least 0")


def _seed(text: str) -> int:
    return _checked(text, int, lambda n: 0 <= n < 2**63, "a whole number from 0 to 2^63 - 1")


def _absolute(text: str) -> str:
    return str(Path(text).resolve())


def _positive(text: str) -> float:
    return _checked(text, float, lambda x: 0 < x < float("inf"), "a positive number")


def _size(text: str) -> float:
    return _checked(text, float, lambda x: 0 <= x < float("inf"), "a number of at least 0")


def _checked(text: str, kind: Any, is_good: Any, wanted: str) -> Any:
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not is_good(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
    return value
