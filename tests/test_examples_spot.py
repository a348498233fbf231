"""`spot.py`: 8 ranks, then 3, then 5, killed and stopped, give the bits of one process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TIER_INPUTS = ("examples",)  # tests/tiers.py: a push that changes them runs these tests

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
@pytest.mark.xdist_group("gloo")
def test_two_kills_and_a_ctrl_c_give_the_digest_of_no_trouble() -> None:
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "examples/spot.py")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=230)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    wanted = re.findall(r"^no trouble, 1 rank\(s\): digest (\w{16})$", done.stdout, re.MULTILINE)
    found = re.findall(r"no trouble: True, (\w{16})$", done.stdout, re.MULTILINE)
    assert len(wanted) == 1 and found == wanted, done.stdout
    assert "stopped by Ctrl-C, and saved" in done.stdout and done.stdout.count("kill at") == 2
