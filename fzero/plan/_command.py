"""`python -m fzero plan`: what a step takes, of a Hugging Face config or a number of parameters."""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch

from fzero._columns import wants_color
from fzero.errors import FzeroError, LayoutError
from fzero.plan import _text, plan
from fzero.plan._api import size_of
from fzero.plan._config import from_config, tokens
from fzero.plan._record import Comparison, Plan
from fzero.plan._time import Rates

SUMMARY = "what a step takes on any number of ranks: bytes, collectives, the peak"
DESCRIPTION = (
    "Plans one training step, on one rank without values. Of a Hugging Face config all is known: "
    "it runs the language model that it names (transformers must be installed). Of a number of "
    "parameters the state and what crosses the ranks are known; activations, and so the peak and "
    "the time, are not. The optimizer is AdamW, which writes in place (donate=True)."
)
EPILOG = "Exit code 2 for wrong input, and if no world fits what --fits says."
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_OPTIMIZER = "fzero.optim.adamw(3e-4)"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the options."""
    parser.add_argument("--params", metavar="N", help="a number of parameters, 7e9")
    parser.add_argument("--hf-config", metavar="PATH", help="a config.json, or its folder")
    parser.add_argument("--world", metavar="W", help="ranks, 64; or replicas x shards, 8x8 (1)")
    parser.add_argument("--stage", metavar="S", help="0, 1, 2, 3, or `all` to compare them (3)")
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
    parser.add_argument("--fits", metavar="BYTES", help="the smallest world that fits, 80e9")
    parser.add_argument("--flops", type=float, metavar="F", help="rate of the device, FLOP/s")
    parser.add_argument("--memory", type=float, metavar="B", help="rate of its memory, bytes/s")
    parser.add_argument("--link", type=float, metavar="B", help="rate of the link, bytes/s")
    parser.add_argument("--latency", type=float, metavar="S", help="of a collective, seconds")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(given: dict[str, Any]) -> int:
    """Plan what was asked for, and print it."""
    _require_one(given)
    made = _of_params(given) if "params" in given else _of_config(given)
    if given.get("json"):
        print(json.dumps(made.to_dict(), indent=1))
        return 0
    bold = wants_color()
    if isinstance(made, Comparison):
        print(_text.of_comparison(made.plans, bold=bold))
    else:
        print(_text.of_plan(made, bold=bold))
    return 0


def _of_params(given: dict[str, Any]) -> Plan | Comparison:
    """A model of one parameter: all that is not activations is that of any other of its size."""
    only = [name for name in _OF_MODELS if name in given]
    if only:
        raise _wrong(
            f"--{only[0].replace('_', '-')} with --params",
            "a number of parameters says nothing of activations.",
            "give --hf-config; or leave it out.",
        )
    numel = int(_number("params", given["params"]))
    model = _OneParameter(numel, _DTYPES[given.get("dtype", "bf16")])
    batch = torch.empty((), device="meta")
    world = _world(given)
    plans = [
        plan(model, batch, world=world, stage=stage, loss=lambda model, _: model(), donate=True)
        for stage in _stages(given)
    ]
    known = tuple(map(_without_activations, plans))
    return known[0] if len(known) == 1 else Comparison(plans=known)


class _OneParameter(torch.nn.Module):
    weight: torch.nn.Parameter

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(numel, dtype=dtype, device="meta"))

    def forward(self) -> torch.Tensor:
        """Use it in the forward and in the backward, as a layer does."""
        return (self.weight * self.weight).sum()


def _without_activations(made: Plan) -> Plan:
    numel = sum(leaf.numel for leaf in made.setups[0].layout.leaves)
    return Plan(
        name=f"{numel / 1e9:g} billion parameters",
        setups=made.setups,
        device=made.device,
        bytes=made.bytes,
        peak={},
        traffic=made.traffic,
        time=None,
    )


_OF_MODELS = (
    *("batch", "length", "micro_batches", "fits", "flops", "memory", "link", "latency"),
    *("coalesce", "checkpoint"),
)


def _of_config(given: dict[str, Any]) -> Plan | Comparison:
    model = from_config(given["hf_config"]).to(_DTYPES[given.get("dtype", "bf16")]).train()
    batch = tokens(model, given.get("batch", 1), given.get("length"))
    try:
        return _of_model(model, batch, given)
    except FzeroError:
        raise
    except Exception as error:  # what models raise is of any kind
        raise _wrong(
            f"{type(model).__name__} could not be run on {[*batch['input_ids'].shape]} tokens that "
            f"are its labels: {error}",
            "a model that is no language model, or whose forward depends on values.",
            "fzero.plan(module, batch, loss=..., stage=..., world=...) plans any nn.Module.",
        ) from error


def _of_model(
    model: torch.nn.Module, batch: dict[str, torch.Tensor], given: dict[str, Any]
) -> Plan | Comparison:
    if given.get("checkpoint"):
        language_model: Any = model
        newer = getattr(model, "activation_checkpointing_enable", None)  # since transformers 5.23
        (newer or language_model.gradient_checkpointing_enable)({"use_reentrant": False})
    rates = {
        name: given[key]
        for key, name in (
            ("flops", "flops_per_s"),
            ("memory", "memory_bytes_per_s"),
            ("link", "link_bytes_per_s"),
            ("latency", "latency_s"),
        )
        if key in given
    }
    options: dict[str, Any] = {
        "micro_batches": given.get("micro_batches", 1),
        "coalesced": given.get("coalesce", False),
        "rates": Rates(**rates),
        "donate": True,
    }
    stages = _stages(given)
    if "fits" in given:
        if len(stages) > 1 or "world" in given:
            raise _wrong(
                "--fits with --world or --stage all",
                "a world that is given, and one that is looked for.",
                "leave one of them out.",
            )
        limit = _number("fits", given["fits"])
        return plan.smallest_world(model, batch, stage=stages[0], fits_bytes=limit, **options)
    options["world"] = _world(given)
    if len(stages) > 1:
        return plan.compare(model, batch, stages=stages, **options)
    return plan(model, batch, stage=stages[0], **options)


def _require_one(given: dict[str, Any]) -> None:
    if ("params" in given) == ("hf_config" in given):
        raise _wrong(
            "plan needs one of --params and --hf-config",
            "both were given, or neither.",
            "python -m fzero plan --params 7e9 --world 64 --stage 3",
        )


def _stages(given: dict[str, Any]) -> list[int]:
    text = given.get("stage", "3")
    if text == "all":
        return [0, 1, 2, 3]
    if text not in ("0", "1", "2", "3"):
        raise _wrong(f"--stage {text}", "a stage that does not exist.", "give 0, 1, 2, 3 or all.")
    return [int(text)]


def _world(given: dict[str, Any]) -> int | tuple[int, int]:
    text = given.get("world", "1")
    parts = text.split("x")
    if not all(part.isdigit() for part in parts) or len(parts) > 2:
        raise _wrong(
            f"--world {text}", "no number of ranks.", "give 64, or 8x8 for 8 replicas of 8 ranks."
        )
    numbers = [int(part) for part in parts]
    found = numbers[0] if len(numbers) == 1 else (numbers[0], numbers[1])
    size_of(found)
    return found


def _number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1 <= value < float("inf"):
        raise _wrong(f"--{name} {text}", "no positive number.", f"give a number: --{name} 7e9.")
    return value


def _wrong(seen: str, cause: str, fix: str) -> LayoutError:
    return LayoutError(f"{seen.rstrip('.')}.", cause=cause, fix=fix)
