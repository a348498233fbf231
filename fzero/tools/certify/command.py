"""`python -m fzero certify`: the matrix of two built-in models."""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fzero.errors import LayoutError
from fzero.tools.certify.matrix import AXES, CHECKS, CellResult, Report
from fzero.tools.certify.run import certify

ADAMW = functools.partial(torch.optim.AdamW, lr=2.0**-6, eps=2.0**-6)
SUMMARY = "run two small models over the matrix: is each cell the step of one process?"
DESCRIPTION = (
    "Trains two small models on virtual ranks, in cells that have every combination of three "
    "values of any axes, by functional steps and by engines, and compares each cell with the step "
    "of one process. `dyadic` has whole numbers, with which sums are exact: there all bits must be "
    "equal. `transformer` has attention and norms, and is compared within the rounding of sums. "
    "fzero.certify(model, loss, batches) does it for a model of your own."
)
EPILOG = (
    "The exit code is 0 if all cells agree, 1 if one does not, 2 for wrong input. --full prints "
    "cells as they come; Ctrl-C ends it with the table of those that there are, exit code 130."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the options; those of an axis take names with commas in between."""
    parser.add_argument("--models", metavar="M,...", help=f"({','.join(MODELS)})")
    for axis in AXES:
        known = ",".join(value.name for value in axis.values)
        more = ", or any count" if axis.counts else ""
        flag = f"--{axis.name.replace('_', '-')}"
        parser.add_argument(flag, metavar="V,...", help=f"({known}{more})")
    parser.add_argument(
        "--optimizer", choices=("sgd", "adamw"), help="sgd has momentum, and is exact (sgd)"
    )
    parser.add_argument("--full", action="store_true", help="the whole product of all values")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(given: dict[str, Any]) -> int:
    """Certify the models that were chosen; return 0 if all cells agree, else 1."""
    axes = {axis.name: given[axis.name].split(",") for axis in AXES if axis.name in given}
    names = given.get("models", ",".join(MODELS)).split(",")
    unknown = [name for name in names if name not in MODELS]
    if unknown:
        raise LayoutError(
            f"--models {given['models']}: there is no model {unknown[0]!r}.",
            cause="a mistyped name, or a model of your own.",
            fix=f"choose from {', '.join(MODELS)}; fzero.certify takes your own.",
        )
    reports, cells, code = list[Report](), list[CellResult](), 0
    full, as_json = given.get("full", False), given.get("json")

    def on_cell(cell: CellResult) -> None:
        cells.append(cell)
        if full and not as_json:
            print(cell.describe(), *map(cell.verdict, CHECKS), sep="  ", flush=True)

    for name in names:
        model = MODELS[name]
        sgd = functools.partial(torch.optim.SGD, lr=model.lr, momentum=0.5)
        optimizer = ADAMW if given.get("optimizer") == "adamw" else sgd
        made = model.make()
        cells.clear()
        try:
            report = certify(
                made, model.loss, batch, optimizer=optimizer, full=full, on_cell=on_cell, **axes
            )
        except KeyboardInterrupt:
            said = f"{len(cells)} cells, and then an interrupt."
            report = Report(name=type(made).__name__, coverage=said, cells=tuple(cells))
            code = 130
        reports.append(report)
        if not as_json:
            print(f"{report}\n", flush=True)
        if code:
            break
    if as_json:
        print(json.dumps([report.to_dict() for report in reports], indent=1))
    return code or int(not all(reports))


# The models.

IDS = 7
TOKENS = 3


class Dyadic(nn.Module):
    """Scores of ids by an embedding that is also the head; a frozen layer, and one without use.

    `sometimes` is used by every second batch, more or less: by some ranks and micro-batches only.
    All parameters and targets are -1, 0 or 1, and the loss is 12 times a sum: a gradient is a
    multiple of 12, and its sums over 1 to 4 ranks and their mean are exact, before and after an
    update with a learning rate that is a power of two.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(IDS, 5), nn.Linear(5, 5)
        self.unused, self.frozen = nn.Linear(3, 1), nn.Linear(5, IDS)
        self.frozen.requires_grad_(False)
        self.shift = nn.Parameter(torch.zeros(()))
        self.sometimes, self.always = nn.Linear(5, IDS), False
        source = torch.Generator().manual_seed(0)
        for p in self.parameters():
            p.data = torch.randint(-1, 2, p.shape, generator=source).float()

    def forward(self, ids: Tensor) -> Tensor:
        """Ids [n, t] -> scores [n, t, 7]."""
        h = self.embed(ids)
        scores = torch.relu(self.mix(h)) @ self.embed.weight.t() + self.frozen(h) + self.shift
        return scores + self.sometimes(h) if self.always or int(ids.sum()) % 2 else scores


class Transformer(nn.Module):
    """One pre-norm block with attention, a tied head, a frozen bias and a layer without use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(IDS, 6)
        self.norm_1, self.norm_2 = nn.LayerNorm(6), nn.LayerNorm(6)
        self.qkv, self.out = nn.Linear(6, 18), nn.Linear(6, 6, bias=False)
        self.up, self.down = nn.Linear(6, 11), nn.Linear(11, 6)
        self.unused = nn.Linear(3, 1)
        self.up.bias.requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        """Ids [n, t] -> scores [n, t, 7]."""
        x = self.embed(ids)
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, 2, 3)).permute(2, 0, 3, 1, 4)
        mixed = (q @ k.mT / 3**0.5).softmax(-1) @ v
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        x = x + self.down(F.gelu(self.up(self.norm_2(x))))
        return x @ self.embed.weight.t()


def dyadic_loss(model: Any, batch: Any) -> Tensor:
    """12 times the sum of scores times targets."""
    ids, targets = batch
    return 12 * (model(ids) * targets).sum()


def entropy_loss(model: Any, batch: Any) -> Tensor:
    """The cross entropy of the next id."""
    ids, _ = batch
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def batch(number: int) -> tuple[Tensor, Tensor]:
    """Ids [2, 3] and targets [2, 3, 7], whole numbers; others for each number."""
    source = torch.Generator().manual_seed(number)
    ids = torch.randint(0, IDS, (2, TOKENS), generator=source)
    return ids, torch.randint(-1, 2, (2, TOKENS, IDS), generator=source).float()


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandModel:
    """A model of the command, with its loss; all take the same batches."""

    make: Callable[[], nn.Module]
    loss: Callable[[Any, Any], Tensor]
    lr: float  # of SGD; a power of two


MODELS = {
    "dyadic": CommandModel(make=Dyadic, loss=dyadic_loss, lr=2.0**-6),
    "transformer": CommandModel(make=Transformer, loss=entropy_loss, lr=2.0**-2),
}
