"""Ranks that read copies of their own, on local disks: what a rank reads it has checked."""

from __future__ import annotations

import shutil
from pathlib import Path
from unittest import mock

import pytest

from fzero.checkpoint import CheckpointError, folders, load, save
from tests.checkpoint.forge import data_of, edit
from tests.checkpoint.states import blank, contents, make, mixed
from tests.ranks import run_ranks
from tests.strategies import same


def _from_own_copy(rank: int, size: int, folder: Path, stage: int, bad: int, old: bool) -> str:
    """Rank `bad` has a copy with another byte in the file that it reads: said by that rank."""
    state = make(mixed(seed=3), stage=2, ranks=0)
    save(folder / "all", state)
    own = folder / f"copy {rank}" / "all"
    shutil.copytree(folder / "all", own)
    if old:  # as before there were checksums of chunks
        edit(own, lambda body: body["files"].pop("sums.json"))
    file = data_of(own) / f"__{bad}_0.distcp"
    good = file.read_bytes()
    if rank == bad:
        data = bytearray(good)
        data[100] ^= 1
        file.write_bytes(data)
    # One path for all, which leads each rank to its own disk.
    with mock.patch.object(folders, "shared_path", lambda *_: own):
        into = make(blank(mixed()), stage=stage, ranks=0)
        with pytest.raises(CheckpointError) as raised:
            load(own, into)
        if rank == bad:
            file.write_bytes(good)
        same(contents(load(own, into)), contents(state))
    return "".join([str(raised.value), *raised.value.__notes__])


@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize(("stage", "bad", "old"), [(2, 1, False), (3, 0, False), (0, 1, True)])
def test_damage_in_the_copy_of_one_rank_is_found(
    stage: int, bad: int, old: bool, tmp_path: Path
) -> None:
    for said in run_ranks(_from_own_copy, 2, tmp_path, stage, bad, old):
        assert "its checksum is wrong" in said and f"rank {bad} of 2" in said
