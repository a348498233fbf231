"""`python -m fzero certify`: the matrix of the built-in models."""

from __future__ import annotations

import argparse
import functools
import json
from typing import Any

import torch

from fzero.errors import LayoutError
from fzero.tools.certify._axes import AXES
from fzero.tools.certify._matrix import ADAMW, certify
from fzero.tools.certify._models import MODELS, batch
from fzero.tools.certify._report import CHECKS, CellResult, Report

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
