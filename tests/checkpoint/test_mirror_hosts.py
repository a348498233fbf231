"""`Mirror` on several hosts: one that is gone, a damaged copy, other numbers of ranks."""

from __future__ import annotations

import os
import shutil
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from fzero.checkpoint import CheckpointError, Mirror
from tests.checkpoint.states import blank, contents, make, mixed, train
from tests.checkpoint.test_mirror import copies, spoil
from tests.ranks import run_ranks
from tests.strategies import same


def on_host(host: str) -> Any:
    return mock.patch.dict(os.environ, FZERO_HOST=host)


def copied(rank: int, world_size: int, folder: Path, stage: int, copies: int = 1) -> Any:
    """What two updates are, of which both are copied."""
    state = make(mixed(), stage=stage)
    with on_host("ab"[rank * 2 // world_size]):
        mirror = Mirror(folder, every=1, copies=copies)
        for number in range(2):
            state = train(state, 1)
            mirror.update(state, extra={"next": number + 1})
        mirror._flight.handle.result()
    return contents(state), repr(mirror)


def back(rank: int, world_size: int, folder: Path, stage: int, hosts: str = "ab") -> Any:
    """What comes back; then it goes on, and is removed."""
    with on_host(hosts[rank * len(hosts) // world_size]), warnings.catch_warnings(record=True) as w:
        warnings.simplefilter("always")
        mirror = Mirror(folder, every=1)
        state, extra = mirror.restore(make(blank(mixed()), stage=stage))
        found = {name: x.clone() for name, x in contents(state).items()}
        mirror.update(train(state, 1))
        mirror.close()
    return found, extra, [str(one.message) for one in w]


def run_back(ranks: int, folder: Path, stage: int, hosts: str = "ab") -> tuple[Any, Any]:
    found, extra, warned = run_ranks(back, ranks, folder, stage, hosts)[0]
    assert warned == []
    return found, extra


@pytest.mark.parametrize(("ranks", "stage", "hosts"), [(2, 3, "ab"), (1, 0, "b"), (3, 2, "bca")])
@pytest.mark.parametrize("gone", ["a", "b"])
def test_a_host_that_is_wiped_costs_nothing(
    gone: str, ranks: int, stage: int, hosts: str, tmp_path: Path
) -> None:
    wanted, text = run_ranks(copied, 2, tmp_path, 3)[0]
    assert "each part is on 1 other hosts" in text
    assert len(copies(tmp_path)) == 8, "two updates of two ranks, on two hosts"
    shutil.rmtree(tmp_path / gone)
    hosts = hosts if ranks > 1 else {"a": "b", "b": "a"}[gone]
    found, extra = run_back(ranks, tmp_path, stage, hosts)
    same(found, wanted)
    assert extra == {"next": 2}
    assert copies(tmp_path) == []


def test_a_damaged_copy_is_passed_over_for_that_of_the_partner(tmp_path: Path) -> None:
    wanted, _ = run_ranks(copied, 2, tmp_path, 3)[0]
    for host, rank in (("a", 0), ("b", 1)):  # each one's own
        (file,) = (tmp_path / host).glob(f"*-update-000002-rank-{rank:05d}-*")
        spoil(file, "*.distcp" if rank else "checkpoint.json", -9)
        (file.with_name(f"writing-{file.name}") / "torn").mkdir(parents=True)  # by a killed restore
    found, extra = run_back(2, tmp_path, 1)
    same(found, wanted)
    assert extra == {"next": 2}


def test_ranks_of_one_host_have_no_partner_and_go_on(tmp_path: Path) -> None:
    wanted, _ = run_ranks(copied, 2, tmp_path, 2, 0)[0]
    assert len(copies(tmp_path)) == 4
    shutil.move(tmp_path / "b", tmp_path / "c")
    for file in (tmp_path / "c").iterdir():
        shutil.move(file, tmp_path / "a" / file.name)
    same(run_back(2, tmp_path, 3, "a")[0], wanted)


def test_a_host_that_is_gone_with_the_only_copies_is_said_on_all_ranks(tmp_path: Path) -> None:
    run_ranks(copied, 2, tmp_path, 3, 0)
    kept = [file for file in (tmp_path / "a").iterdir() if "update-000001" in file.name]
    shutil.rmtree(tmp_path / "b")
    for kind, text in run_ranks(back, 2, tmp_path, 3, raises=True):
        assert kind == "CheckpointError" and "update 2: no copy of rank 1" in text
    assert len(copies(tmp_path)) == 2, "nothing was changed"
    for copy in copies(tmp_path):
        if copy not in kept:
            shutil.rmtree(copy)
    found, extra, warned = run_ranks(back, 2, tmp_path, 3)[0]
    assert extra == {} and int(found["step"]) == 0
    assert "training begins anew" in warned[0]


def failing(rank: int, world_size: int, folder: Path) -> Any:
    """Rank 1 has too little memory: all ranks hear of it."""
    state = make(mixed(), stage=1)
    with on_host("ab"[rank]):
        mirror = Mirror(folder, every=1)
        real = os.statvfs
        small = mock.Mock(f_bavail=1, f_frsize=1)
        with (
            mock.patch.object(os, "statvfs", lambda path: small if rank else real(path)),
            pytest.raises(CheckpointError, match=r"on the host b.* and 1 bytes are free"),
        ):
            mirror.update(state)
        mirror.update(state)
        mirror._flight.handle.result()
        if rank:
            shutil.move(folder / "b", folder / "c")
        with pytest.raises(CheckpointError, match="No such file"):
            mirror.update(state)
        if rank:
            shutil.move(folder / "c", folder / "b")
        with pytest.raises(Exception, match="the ranks make different calls"):
            mirror.update(state) if rank else train(state, 1)
        mirror.close()


def ended(rank: int, world_size: int, folder: Path) -> Any:
    """Rank 1 ends, unclosed; then rank 0."""
    mirror = Mirror(folder, every=1)
    mirror.update(make(mixed(), stage=1))
    mirror._flight.handle.result()
    seen = []
    for one in (1, 0):
        contents(make(mixed(), stage=1))  # all ranks are here
        if rank == one:
            mirror._ends()
        contents(make(mixed(), stage=1))
        seen.append(len(copies(folder)))
    mirror._forget()
    return seen


def test_the_last_rank_that_ends_removes_the_copies(tmp_path: Path) -> None:
    assert run_ranks(ended, 2, tmp_path / "copies")[0] == [2, 0]
    assert not (tmp_path / "copies").exists()


def test_all_ranks_raise_together(tmp_path: Path) -> None:
    run_ranks(failing, 2, tmp_path)
