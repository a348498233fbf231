"""`python -m fzero doctor`: examine the installation, and print the report."""

from __future__ import annotations

import argparse
import json
from typing import Any

from fzero.tools.doctor._report import examine

SUMMARY = "examine collectives x transforms x dtypes on 2 ranks of this installation"
DESCRIPTION = (
    "Starts 2 ranks on gloo and runs every collective under every transform in every dtype, on "
    "whole numbers, with which all results are exact, and compares them with a formula of one "
    "process. Finds sums that are no sums, and gradients that are silently zero."
)
EPILOG = (
    "right: equal bit for bit. wrong, zero: not so, without an error. refused: it raises. The exit "
    "code is 1 if a cell is not right, 2 if no ranks can be started."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the options."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(given: dict[str, Any]) -> int:
    """Examine this installation; return 0 if it is sound, else 1."""
    report = examine()
    if given.get("json"):
        print(json.dumps(report.to_dict(), indent=1))
    else:
        print(report.text())
    return 0 if report else 1
