"""NCCL: one rank, and two ranks on one GPU, against one process; with delays that show races."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.ranks import spawn_script

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

WORKER = Path(__file__).parent / "worker.py"
CASES = 4 * 3  # stages x (overlap, no overlap, lockstep)

# NCCL refuses two ranks on one GPU of one host: each rank passes for a host of its own, and
# talks over loopback. From 2.30 on NCCL_MULTI_RANK_GPU_ENABLE says that it is meant.
SHARED = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "1",
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
}

# The environment of a rank must be set in its own process, before its first NCCL call.
START = """
import os, runpy, sys
os.environ["NCCL_HOSTID"] = "fzero-rank" + os.environ["RANK"]
sys.argv = sys.argv[1:]
sys.path.insert(0, os.getcwd())
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(tmp_path: Path, ranks: int, where: str) -> str:
    start = tmp_path / "start.py"
    start.write_text(START)
    done = spawn_script(start, ranks, [str(WORKER), where], timeout_s=500)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.gpu
@pytest.mark.xdist_group("gpu")
@pytest.mark.timeout(600)
@needs_gpu
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("where", ["nothing", "gathers", "reductions"])
def test_nccl_gives_the_numbers_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, where: str
) -> None:
    for name, value in SHARED.items():
        monkeypatch.setenv(name, value)
    told = run(tmp_path, ranks, where)
    assert told.count("right: ") == ranks * (CASES + 4 * (where == "nothing")), told


@pytest.mark.xdist_group("gloo")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the same as above")
def test_the_program_that_waits_for_a_gpu_is_right_on_gloo(tmp_path: Path) -> None:
    assert run(tmp_path, 2, "nothing").count("right: ") == 2 * (CASES + 4)
