"""The tables of docs/support.md. Each entry was tried: what raises is refused."""

from __future__ import annotations

import functools
import itertools
import tomllib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

import fzero
from fzero import Compress, codecs
from fzero.errors import LayoutError
from fzero.optim import from_torch, require_elementwise, require_leafwise, require_real_views
from fzero.options import DRIVERS, REQUIRED, Option
from fzero.options import OPTIONS as TABLE
from fzero.transforms.recipe import BUILTINS
from tests.site.tables import ROOT, table

OPTIONS: dict[str, dict[str, Any]] = {
    "reshard_after_forward=False": {"reshard_after_forward": False},
    'reshard_after_forward="window"': {"reshard_after_forward": "window"},
    'mesh=(2, 2), optimizer_over="all"': {"mesh": (2, 2), "optimizer_over": "all"},
    'reduce_op="sum"': {"reduce_op": "sum"},
    "gradient_predivide_factor=2.0": {"gradient_predivide_factor": 2.0},
    "compress=Compress(gradients=bf16())": {"compress": Compress(gradients=codecs.bf16())},
    "compress=Compress(gradients=cast(torch.bfloat16))": {
        "compress": Compress(gradients=codecs.cast(torch.bfloat16))
    },
    "compress=Compress(gradients=int8())": {"compress": Compress(gradients=codecs.int8())},
    "compress=Compress(gradients=powersgd())": {"compress": Compress(gradients=codecs.powersgd())},
    "compress=Compress(parameters=powersgd())": {
        "compress": Compress(parameters=codecs.powersgd())
    },
    'compress=Compress(gradients=powersgd(), over="replicas"), mesh=(2, 2)': {
        "compress": Compress(gradients=codecs.powersgd(), over="replicas"),
        "mesh": (2, 2),
    },
    "compress=Compress(parameters=int8())": {"compress": Compress(parameters=codecs.int8())},
    'compress=Compress(gradients=int8(), over="replicas"), mesh=(2, 2)': {
        "compress": Compress(gradients=codecs.int8(), over="replicas"),
        "mesh": (2, 2),
    },
    "accumulate_dtype=torch.float64": {"accumulate_dtype": torch.float64},
    "ordered=True": {"ordered": True},
    "autocast=torch.bfloat16": {"autocast": torch.bfloat16},
    'offload=Offload(optimizer="cpu")': {"offload": fzero.Offload(optimizer="cpu")},
    'offload=Offload(gradients="cpu")': {"offload": fzero.Offload(gradients="cpu")},
    'offload=Offload(params="cpu")': {"offload": fzero.Offload(params="cpu")},
    "local=Local(every=8)": {"local": fzero.Local(every=8)},
    'local=Local(every=8), optimizer_over="all"': {
        "local": fzero.Local(every=8),
        "optimizer_over": "all",
    },
}
TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "shard": functools.partial(fzero.shard, stage=2),
    "coalesce": fzero.coalesce,
    "accumulate": functools.partial(fzero.accumulate, micro_batches=2),
    "autocast": functools.partial(fzero.autocast, dtype=torch.bfloat16),
    "scale_loss": functools.partial(fzero.scale_loss, scale="dynamic"),
    "clip": functools.partial(fzero.clip, max_norm=1.0),
    "check_finite": fzero.check_finite,
    "offload": functools.partial(fzero.offload, optimizer="cpu"),
    "local": functools.partial(fzero.local, every=8),
    "compress": functools.partial(fzero.compress, gradients=codecs.int8()),
    "remat": fzero.remat,
    "simulate": functools.partial(fzero.simulate, world_size=2),
}
DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
PRECISIONS: dict[str, dict[str, Any]] = {
    "masters": {},
    "masters, states in bf16": {"state_dtype": torch.bfloat16},
    "masters, states in fp32": {"state_dtype": torch.float32},
    "masters, states in fp16": {"state_dtype": torch.float16},
    "masters, stochastic rounding": {"stochastic_rounding": True},
    "no masters": {"master_weights": False},
    "no masters, states in bf16": {"master_weights": False, "state_dtype": torch.bfloat16},
    "no masters, states in fp32": {"master_weights": False, "state_dtype": torch.float32},
    "no masters, stochastic rounding": {"master_weights": False, "stochastic_rounding": True},
}
GRADIENTS = {
    **{f"add up in {name}": {"accumulate_dtype": dtype} for name, dtype in DTYPES.items()},
    **{
        f"cross ranks in {name}": {"compress": Compress(gradients=codecs.cast(dtype))}
        for name, dtype in DTYPES.items()
    },
}


def tables() -> str:
    """Return all of them, in Markdown."""
    parts = {
        "Versions": ("", table(("", "needed"), list(_versions()))),
        "Which transform may stand around which": ("Row around column.", _orders()),
        "What does not go together": (
            "As each feature declares it; one function checks it for both drivers, at the moment "
            "when both are known.",
            _excluded(),
        ),
        "Every option": (
            "Its default, the stages at which it changes anything, who takes it, and the key of "
            "DeepSpeed's config that sets it.",
            _everything(),
        ),
        "Options and stages": ("Of `fzero.init`, `fzero.shard` and `Engine`.", _options()),
        "Dtypes of parameters and optimizers": (
            "Options of `fzero.optim.adamw`; a 16-bit parameter has an fp32 master by default.",
            _precisions(),
        ),
        "Dtypes of gradients": ("`accumulate_dtype`, `fzero.codecs.cast`.", _gradients()),
        "Optimizers of torch.optim": (
            "Whole, by owners: [each parameter is updated by one rank]"
            "(transforms/shard.md#optimizers-that-need-whole-matrices). Refused there, and for "
            "`fzero.optim.muon`: an update that is differentiated or traced (an exchange by owners "
            "has no derivative), also as the outer rule of `fzero.local`; of what owners keep, "
            "`fzero.diff` (it steps single ranks) and "
            "`save_universal` (DeepSpeed's layout cuts every state as the parameter). The last "
            "column: parameters that are complex, by their real views.",
            _optimizers(),
        ),
    }
    return "\n".join(f"## {head}\n\n{text}\n\n{made}" for head, (text, made) in parts.items())


def numbered(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in which what an error advises has a number, and the list of them."""
    advice = list(dict.fromkeys(cell for row in rows for cell in row if cell.startswith("no: ")))
    short = {cell: f"no ({number})" for number, cell in enumerate(advice, 1)}
    below = [f"{number}. {cell.removeprefix('no: ')}" for number, cell in enumerate(advice, 1)]
    lines = [table(head, [[short.get(cell, cell) for cell in row] for row in rows]), *below]
    return "\n".join(lines) + "\n"


def refused(call: Callable[[], Any]) -> str:
    """Return "yes", or what the error says is the fix."""
    try:
        call()
    except LayoutError as error:
        return f"no: {str(error).partition('Fix: ')[2].strip()}"
    return "yes"


def _everything() -> str:
    """Return the table of options as the library has it."""
    rows = [[f"`{one.name}`", *_facts(one), *_takers(one)] for one in TABLE.values()]
    return numbered(["option", "default", "stages", "key", *(f"`{d}`" for d in DRIVERS)], rows)


def _facts(one: Option) -> Iterator[str]:
    yield "" if one.default is REQUIRED else f"`{one.default!r}`"
    yield "all" if len(one.stages) == 4 else ", ".join(map(str, one.stages))
    yield f"`{one.deepspeed}`" if one.deepspeed else ""


def _takers(one: Option) -> Iterator[str]:
    for driver in DRIVERS:
        yield f"no: {one.instead[driver]}." if driver in one.instead else "yes"


def _versions() -> Iterator[tuple[str, str]]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    yield "Python", project["requires-python"]
    for needed in project["dependencies"]:
        name = needed.split(">")[0]
        yield name, needed[len(name) :] or "any"


def _step(state: Any) -> Any:
    return state, None


def _orders() -> str:
    found = {
        (outer, inner): refused(lambda: TRANSFORMS[outer](TRANSFORMS[inner](_step)))  # noqa: B023
        for outer, inner in itertools.product(TRANSFORMS, TRANSFORMS)
        if "remat" not in (outer, inner)
    }
    names = [name for name in TRANSFORMS if name != "remat"]
    rows = [[f"`{outer}`", *(found[outer, inner][:3] for inner in names)] for outer in names]
    rows = [[cell.rstrip(":") for cell in row] for row in rows]
    return table(["", *(f"`{name}`" for name in names)], rows)


_WHEN = {
    "options": "a state is made",
    "ranks": "a state is made",
    "rule": "a state is made",
    "call": "a gradient is made",
    "graph": "a gradient is made",
    "write": "it is written",
}
_SPOKEN = {"weights": "`weight=` of a call"}


def _excluded() -> str:
    """Return what fzero's own features declare that they cannot stand beside."""
    rows = [
        [
            _SPOKEN.get(one.name, f"`{one.name}`"),
            pair.beside,
            _WHEN[pair.when],
            pair.cause.removesuffix("."),
            pair.fix.removesuffix("."),
        ]
        for one in BUILTINS
        for pair in one.excludes
    ]
    return table(["", "beside", "refused when", "why", "what to do"], rows)


def _options() -> str:
    """Try each option at each stage, on virtual ranks."""
    rows = []
    for name, options in OPTIONS.items():
        row = []
        for stage in range(4):
            step = fzero.shard(_step, stage=stage)
            make = functools.partial(_init, step, stage, options)
            row.append(refused(make))
        rows.append([f"`{name}`", *row])
    return numbered(["option", *(f"stage {stage}" for stage in range(4))], rows)


def _init(step: Any, stage: int, options: dict[str, Any]) -> Any:
    def made(params: Any) -> Any:
        fzero.init(params, fzero.optim.adamw(0.1), stage=stage, **options)

    params = {"w": torch.ones(4, 8)}
    return fzero.simulate(made, world_size=4)(params)


def _precisions() -> str:
    rows = [
        [name, *(_made(dtype, fzero.optim.adamw, options, {}) for dtype in DTYPES.values())]
        for name, options in PRECISIONS.items()
    ]
    return numbered(["parameters in", *DTYPES], rows)


def _gradients() -> str:
    rows = [
        [name, *(_made(dtype, fzero.optim.adamw, {}, options) for dtype in DTYPES.values())]
        for name, options in GRADIENTS.items()
    ]
    return numbered(["parameters in", *DTYPES], rows)


def _made(dtype: torch.dtype, rule: Any, of_rule: dict[str, Any], of_init: dict[str, Any]) -> str:
    """Try to make a state of parameters in `dtype`."""
    params = {"w": torch.ones(4, dtype=dtype)}
    return refused(lambda: fzero.init(params, rule(0.1, **of_rule), stage=2, **of_init))


def _optimizers() -> str:
    """Try each optimizer of torch: is it elementwise, or right for each leaf alone?"""
    rows = []
    for name in sorted(torch.optim.__all__):
        cls = getattr(torch.optim, name)
        if isinstance(cls, type) and cls is not torch.optim.Optimizer:
            rows.append([f"`{name}`", *_tried(cls)])
    head = "optimizer", "stages 1 to 3 on several ranks", "one rank, or stage 0", "complex"
    return table(head, rows)


def _tried(cls: Any) -> tuple[str, str, str]:
    bound = functools.partial(from_torch(functools.partial(cls, lr=0.1)).bind, _matrix())
    if refused(bound) != "yes":
        return "no", "no", "no"
    rule, params = from_torch(functools.partial(cls, lr=0.1)), _complex()
    by_parts = refused(lambda: require_real_views(rule.bind(params), params)).partition(":")[0]
    if refused(lambda: require_elementwise(bound())) == "yes":
        return "yes", "yes", by_parts
    whole = refused(lambda: require_leafwise(bound())) == "yes"
    return "whole, by owners" if whole else "no", "yes", by_parts


def _complex() -> dict[str, nn.Parameter]:
    return {"w": nn.Parameter(torch.ones(3, 5, dtype=torch.complex64))}


def _matrix() -> dict[str, nn.Parameter]:
    return {"w": nn.Parameter(torch.ones(3, 5))}
