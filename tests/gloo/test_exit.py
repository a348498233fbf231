"""How a rank ends: the process group goes before the interpreter does."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.ranks import spawn_script

pytestmark = [
    pytest.mark.xdist_group("gloo"),
    pytest.mark.slow,  # a launcher, and all of torch in each rank
    pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc"),
]

# atexit runs in reverse order: what is registered before the start runs after fzero's own.
SCRIPT = """
import atexit, glob, sys

def gloo_threads():
    names = [open(path).read() for path in glob.glob("/proc/self/task/*/comm")]
    return sum(name.startswith("pt_gloo") for name in names)

atexit.register(lambda: sys.stdout.write(f"threads at the end: {gloo_threads()}\\n"))
import fzero
assert fzero.pmean(2.0) == 2.0 and gloo_threads() > 0
import torch.distributed.checkpoint
"""


def test_no_gloo_thread_outlives_the_group_that_fzero_started(tmp_path: Path) -> None:
    # One that frees a tensor while the interpreter ends aborts the process, now and then.
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = spawn_script(script, 2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("threads at the end: 0\n") == 2, done.stdout
