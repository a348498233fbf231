"""CPU seconds of `import fzero` beyond `import torch`, each in an interpreter of its own.

    python benchmarks/import_time.py --rounds 5

With bytecode, as after the first import of an installed package, and without, where each import
compiles the sources (PYTHONDONTWRITEBYTECODE=1). The least of the rounds counts: other programs
only add to it. Of each import one full garbage collection is a part, which goes over what torch
has made.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

_PROGRAM = """
import gc, json, sys, time
import torch
spent, began = 0.0, 0.0
def watch(phase, info):
    global spent, began
    if phase == "start":
        began = time.process_time()
    else:
        spent += time.process_time() - began
of_torch, start = len(sys.modules), time.process_time()
gc.callbacks.append(watch)
{imports}
print(json.dumps([time.process_time() - start, spent, len(sys.modules) - of_torch]))
"""

IMPORTS = {
    "import fzero": "import fzero",
    "and the engine": "import fzero; fzero.adapter",
    "and all else": "from fzero import *",
}


def measure(imports: str, environment: dict[str, str]) -> tuple[float, float, int]:
    """Return CPU seconds, those of them in garbage collections, and modules of some imports."""
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM.format(imports=imports)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent), **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    seconds, collecting, modules = json.loads(done.stdout)
    return seconds, collecting, modules


def main() -> None:
    """Parse the command line, measure in turn, print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="interpreters for each number")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        environments = {
            "with bytecode": {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": folder},
            "without": {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPYCACHEPREFIX": f"{folder}/none"},
        }
        measure(IMPORTS["and all else"], environments["with bytecode"])  # writes the bytecode
        print("| imports | bytecode | CPU s | of it garbage collection | modules |")
        print("|---|---|---|---|---|")
        for name, imports in IMPORTS.items():
            for bytecode, environment in environments.items():
                rounds = [measure(imports, environment) for _ in range(options.rounds)]
                seconds, collecting, modules = min(rounds)
                cells = f"{seconds:.3f} | {collecting:.3f} | {modules}"
                print(f"| `{name}` | {bytecode} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
