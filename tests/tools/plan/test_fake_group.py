"""A plan for 1,024 ranks against one process of a fake group of so many."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.rank_process import ROOT
from tests.tools.plan.fake_group import CASES, RANK, WORLD


@pytest.mark.slow
def test_a_plan_is_what_a_rank_of_a_fake_group_does() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.tools.plan.fake_group"],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    counted = json.loads(done.stdout.splitlines()[-1])
    for case, (counts, wire_bytes) in zip(CASES, counted, strict=True):
        plan = case.plan(WORLD, rank=RANK)
        assert (plan.collectives, plan.wire_bytes) == (counts, wire_bytes)
