"""`python -m fzero plan`: plan a step of a Hugging Face config, or of a number of parameters."""

from __future__ import annotations

import argparse
import json
from dataclasses import fields, replace
from typing import Any

import torch

from fzero.errors import FzeroError, LayoutError
from fzero.tools.columns import wants_color
from fzero.tools.plan import plan
from fzero.tools.plan.config import from_config, tokens
from fzero.tools.plan.records import Comparison, Plan, Rates

SUMMARY = "what a step takes on any number of ranks: bytes, collectives, the peak"
DESCRIPTION = (
    "Plans one training step, on one rank without values. Of a Hugging Face config all is known: "
    "it runs the language model that it names (transformers must be installed). Of a number of "
    "parameters the state and what crosses the ranks are known; activations, and so the peak and "
    "the time, are not. The optimizer is AdamW, which writes in place (donate=True)."
)
EPILOG = "Exit code 2 for wrong input, and if no world fits what --fits says."
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the options."""
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--params", metavar="N", type=_number, help="a number of parameters, 7e9")
    model.add_argument("--hf-config", metavar="PATH", help="a config.json, or its folder")
    ranks = parser.add_mutually_exclusive_group()
    ranks.add_argument(
        "--world", metavar="W", type=_world, help="ranks, 64; or replicas x shards, 8x8 (1)"
    )
    ranks.add_argument(
        "--fits", metavar="BYTES", type=_number, help="the smallest world that fits, 80e9"
    )
    stages = ("0", "1", "2", "3", "all")
    parser.add_argument(
        "--stage", metavar="S", choices=stages, help="0, 1, 2, 3, or `all` to compare them (3)"
    )
    parser.add_argument("--dtype", choices=tuple(_DTYPES), help="of the parameters (bf16)")
    parser.add_argument("--batch", type=int, metavar="B", help="sequences of one rank (1)")
    parser.add_argument(
        "--length",
        type=int,
        metavar="T",
        help="tokens of a sequence (4096, or as many as the model has positions for)",
    )
    parser.add_argument("--micro-batches", type=int, metavar="M", help="parts of the batch (1)")
    parser.add_argument("--coalesce", action="store_true", help="reduce once for all of them")
    parser.add_argument("--checkpoint", action="store_true", help="recompute each layer")
    parser.add_argument("--flops", type=float, metavar="F", help="rate of the device, FLOP/s")
    parser.add_argument("--memory", type=float, metavar="B", help="rate of its memory, bytes/s")
    parser.add_argument("--link", type=float, metavar="B", help="rate of the link, bytes/s")
    parser.add_argument("--latency", type=float, metavar="S", help="of a collective, seconds")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no positive number: give one, as 7e9")
    return value


def _world(text: str) -> int | tuple[int, int]:
    parts = text.split("x")
    if not all(part.isdigit() for part in parts) or len(parts) > 2:
        raise argparse.ArgumentTypeError(
            f"{text} is no number of ranks: give 64, or 8x8 for 8 replicas of 8 ranks"
        )
    return int(text) if len(parts) == 1 else (int(parts[0]), int(parts[1]))


def run(given: dict[str, Any]) -> int:
    """Print the plan of the parsed arguments."""
    made = _of_params(given) if "params" in given else _of_config(given)
    as_json = given.get("json")
    print(json.dumps(made.to_dict(), indent=1) if as_json else made.table(bold=wants_color()))
    return 0


def _of_params(given: dict[str, Any]) -> Plan | Comparison:
    """Plan a model of one parameter, which has the bytes, but for activations, of any other."""
    only = [name for name in _OF_MODELS if name in given]
    if only:
        raise LayoutError(
            f"--{only[0].replace('_', '-')} with --params.",
            cause="a number of parameters says nothing of activations.",
            fix="give --hf-config; or leave it out.",
        )
    numel = int(given["params"])
    model = _OneParameter(numel, _DTYPES[given.get("dtype", "bf16")])
    made = _planned(model, torch.empty((), device="meta"), given, loss=lambda model, _: model())
    plans = made.plans if isinstance(made, Comparison) else (made,)
    name = f"{numel / 1e9:g} billion parameters"
    known = tuple(replace(one, name=name, peak={}, time=None) for one in plans)
    return known[0] if isinstance(made, Plan) else Comparison(plans=known)


class _OneParameter(torch.nn.Module):
    weight: torch.nn.Parameter

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(numel, dtype=dtype, device="meta"))

    def forward(self) -> torch.Tensor:
        """Read the parameter in the forward and in the backward, as a layer does."""
        return (self.weight * self.weight).sum()


_OF_MODELS = (
    *("batch", "length", "micro_batches", "fits", "flops", "memory", "link", "latency"),
    *("coalesce", "checkpoint"),
)


def _of_config(given: dict[str, Any]) -> Plan | Comparison:
    model: Any = from_config(given["hf_config"]).to(_DTYPES[given.get("dtype", "bf16")]).train()
    batch = tokens(model, given.get("batch", 1), given.get("length"))
    names = {field.name.split("_")[0]: field.name for field in fields(Rates)}
    options: dict[str, Any] = {
        "micro_batches": given.get("micro_batches", 1),
        "coalesced": given.get("coalesce", False),
        "rates": Rates(**{name: given[key] for key, name in names.items() if key in given}),
    }
    try:
        if given.get("checkpoint"):
            newer = getattr(model, "activation_checkpointing_enable", None)  # of transformers 5.23
            (newer or model.gradient_checkpointing_enable)({"use_reentrant": False})
        return _planned(model, batch, given, **options)
    except FzeroError:
        raise
    except Exception as error:  # what models raise is of any kind
        seen = str(error).rstrip(".")
        raise LayoutError(
            f"{type(model).__name__} could not be run on {[*batch['input_ids'].shape]} tokens that "
            f"are its labels: {seen}.",
            cause="a model that is no language model, or whose forward depends on values.",
            fix="fzero.plan(module, batch, loss=..., stage=..., world=...) plans any nn.Module.",
        ) from error


def _planned(
    model: torch.nn.Module, batch: Any, given: dict[str, Any], **options: Any
) -> Plan | Comparison:
    stage = given.get("stage", "3")
    stages = [0, 1, 2, 3] if stage == "all" else [int(stage)]
    options["donate"] = True
    if "fits" in given:
        if len(stages) > 1:
            raise LayoutError(
                "--fits with --stage all.",
                cause="worlds of several sizes, which no table compares.",
                fix="give one stage.",
            )
        return plan.smallest_world(
            model, batch, stage=stages[0], fits_bytes=given["fits"], **options
        )
    options["world"] = given.get("world", 1)
    if len(stages) > 1:
        return plan.compare(model, batch, stages=stages, **options)
    return plan(model, batch, stage=stages[0], **options)
