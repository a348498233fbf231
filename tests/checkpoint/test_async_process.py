"""A program that ends with a save in flight: it is there afterwards."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from fzero.checkpoint import read_extra

ENDS = """
import sys, torch, fzero
from fzero.checkpoint import save_async
torch.set_num_threads(1)
state = fzero.init({"w": torch.ones(1000)}, fzero.optim.sgd(1.0), stage=0)
save_async(sys.argv[1], state, extra={"last": True})
"""


def test_the_interpreter_waits_for_it(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", ENDS, str(tmp_path)], timeout=100, check=True)
    assert read_extra(tmp_path) == {"last": True}
