"""Run examples one after another in one process: Python and torch cost more to start than they do.

    torchrun --nproc-per-node 2 tests/examples_in_turn.py maml.py "reshard.py --folder run"

Each argument is a script and its arguments. Each starts as it would alone: as `__main__`, with the
seed that it sets itself, warnings being errors but for those that pyproject.toml exempts. Rank 0
prints a line `== script` before the output of each. An example that fails ends all of them.
"""

from __future__ import annotations

import os
import runpy
import shlex
import sys

from tests.rank_process import ROOT, filter_warnings, pytest_filters


def run_all(commands: list[str]) -> None:
    """Run each of `commands` as a program."""
    for command in commands:
        if int(os.environ.get("RANK", "0")) == 0:
            print(f"== {command.split()[0]}", flush=True)
        sys.argv = shlex.split(command)
        runpy.run_path(str(ROOT / "examples" / sys.argv[0]), run_name="__main__")


if __name__ == "__main__":
    filter_warnings(pytest_filters())
    run_all(sys.argv[1:])
