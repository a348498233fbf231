"""Which world a process joins: torchrun's, one that srun or mpirun describe, or none."""

from __future__ import annotations

import datetime
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils.data import DataLoader, Dataset

import fzero
from fzero.errors import AxisError
from fzero.ranks.rendezvous import describes_several_ranks, local_rank, timeout
from tests.rank_process import LOOPBACK

ROOT = Path(__file__).parent.parent
MEETING = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
SRUN = {"SLURM_NTASKS": "4", "SLURM_PROCID": "2"}
MPIRUN = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}
MPICH = {"PMI_SIZE": "2", "PMI_RANK": "1"}


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"WORLD_SIZE": "1"},
        {"RANK": "0", "WORLD_SIZE": "1", **MEETING},
        {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"},
        {"SLURM_NTASKS": "4"},  # the shell of salloc: nobody has started anything yet
        {"WORLD_SIZE": "1", **SRUN},  # said by the user, for runs that are one process each
        MEETING,
    ],
)
def test_one_rank(environ: dict[str, str]) -> None:
    assert not describes_several_ranks(environ)


@pytest.mark.parametrize("more", [{}, SRUN, MPIRUN])
def test_several_ranks(more: dict[str, str]) -> None:
    assert describes_several_ranks({"RANK": "1", "WORLD_SIZE": "2", **MEETING, **more})


@pytest.mark.parametrize(
    ("environ", "missing", "fix"),
    [
        (SRUN, "RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT are", "RANK=$SLURM_PROCID "),
        (SRUN | MEETING, "RANK, WORLD_SIZE are", "RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS in"),
        (MPIRUN | MEETING, "RANK, WORLD_SIZE are", "RANK=$OMPI_COMM_WORLD_RANK WORLD_SIZE=$OMPI"),
        (MPICH | MEETING, "RANK, WORLD_SIZE are", "RANK=$PMI_RANK WORLD_SIZE=$PMI_SIZE in each"),
        ({"WORLD_SIZE": "2", **MEETING}, "RANK is", "RANK=<this rank, from 0> in each process"),
        ({"RANK": "1", **MEETING}, "WORLD_SIZE is", "WORLD_SIZE=<number of ranks> in each process"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "MASTER_ADDR, MASTER_PORT are", "MASTER_ADDR=<host of"),
    ],
)
def test_a_world_that_is_not_whole_is_refused(
    environ: dict[str, str], missing: str, fix: str
) -> None:
    with pytest.raises(AxisError) as raised:
        describes_several_ranks(environ)
    seen, _, how = str(raised.value).splitlines()
    assert seen.endswith(f"set, and {missing} not.")
    assert all(f"{name}={value}" in seen for name, value in environ.items())
    assert f"export {fix}" in how and "WORLD_SIZE=1" in how


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": "2"}, "RANK=2 with WORLD_SIZE=2"),
        ({"MASTER_PORT": "$PORT"}, "MASTER_PORT='\\$PORT' is not a whole number"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE='two' is not a whole number"),
        ({"WORLD_SIZE": "0"}, "RANK=1 with WORLD_SIZE=0"),
    ],
)
def test_numbers_that_cannot_be_are_refused(change: dict[str, str], message: str) -> None:
    with pytest.raises(AxisError, match=message):
        describes_several_ranks({"RANK": "1", "WORLD_SIZE": "2", **MEETING, **change})


def test_the_world_refuses_to_be_one_rank_of_several(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in SRUN.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(AxisError, match=r"SLURM_NTASKS=4, SLURM_PROCID=2 are set"):
        fzero.world()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert fzero.world().size == 1


def test_the_gpu_of_a_process_is_that_of_its_place_on_the_node() -> None:
    assert local_rank({}) == 0
    assert local_rank({"RANK": "5", "LOCAL_RANK": "1", "SLURM_LOCALID": "3"}) == 1
    assert local_rank({"RANK": "5", "OMPI_COMM_WORLD_LOCAL_RANK": "2"}) == 2
    assert local_rank({"RANK": "5"}) == 5


def test_the_timeout_is_a_number_of_seconds() -> None:
    assert timeout({}) == timeout({"FZERO_TIMEOUT_S": ""}) == datetime.timedelta(minutes=10)
    assert timeout({"FZERO_TIMEOUT_S": "0.5"}) == datetime.timedelta(seconds=0.5)
    for wrong in ("90s", "0", "nan", "inf"):
        with pytest.raises(AxisError, match=rf"FZERO_TIMEOUT_S='{wrong}' is not a positive number"):
            timeout({"FZERO_TIMEOUT_S": wrong})


@pytest.mark.xdist_group("gloo")
def test_processes_that_srun_starts_join_the_world_that_they_describe() -> None:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    here = {**os.environ, "GLOO_SOCKET_IFNAME": LOOPBACK, "OMP_NUM_THREADS": "1", **world}
    code = "import fzero; print(fzero.axis_index(), fzero.psum(1.0 + fzero.axis_index()).item())"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env=here | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank, process in enumerate(ranks):
        told, errors = process.communicate(timeout=100)
        assert (process.returncode, told) == (0, f"{rank} 3.0\n"), errors


class Asking(Dataset[int]):
    """Rows that ask which rank they are of."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, row: int) -> int:
        return fzero.axis_index()


def test_a_worker_of_a_loader_starts_no_second_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the variables of its rank, and would wait for the others for ever."""
    assert [*DataLoader(Asking(), batch_size=None, num_workers=1)] == [0, 0]  # of one rank
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", **MEETING}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(AxisError, match=r"ranks are asked for in worker \d+ of a DataLoader"):
        next(iter(DataLoader(Asking(), batch_size=None, num_workers=1)))
