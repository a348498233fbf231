"""A first call of fzero that one rank makes alone: an error that says so, after the timeout."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import fzero
from fzero.collectives import performer as _performers
from fzero.errors import LostRankError
from tests.ranks import run_ranks, spawn_script

pytestmark = pytest.mark.xdist_group("gloo")


def nobody_comes(rank: int, world_size: int) -> None:
    """As the store tells it: DistStoreError is what waiting for the other ranks ends in."""

    def own_group(*_: object, **__: object) -> None:
        raise dist.DistStoreError("wait timeout after 3000ms, keys: /default_pg/0//1//cpu//0/1")

    kept, known = _performers.own_group, dict(_performers._OPEN)
    try:
        _performers.own_group = own_group
        _performers._OPEN.clear()
        for call in (
            lambda: fzero.init({"w": torch.ones(3)}, fzero.optim.sgd(0.1), stage=2),
            lambda: fzero.psum(torch.ones(2)),
        ):
            with pytest.raises(LostRankError, match=r"the first call of fzero (.|\n)*if rank == 0"):
                call()
    finally:
        _performers.own_group = kept
        _performers._OPEN.update(known)


def test_a_store_that_waits_in_vain_is_told_as_a_lost_rank() -> None:
    run_ranks(nobody_comes, 2, timeout_s=30)


SCRIPT = """
import sys, torch, fzero

fzero.world()
if fzero.axis_index() == 0:
    try:
        fzero.init({"w": torch.ones(3)}, fzero.optim.sgd(0.1), stage=2)
    except fzero.LostRankError as error:
        sys.stdout.write(f"seen {tuple(error.ranks)} {error}\\n")
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="a launcher and its timeouts")
def test_init_on_one_rank_names_the_rank_that_did_not_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    monkeypatch.setitem(os.environ, "FZERO_TIMEOUT_S", "3")
    done = spawn_script(script, 2)
    assert "seen (1,) rank 1 has ended its program" in done.stdout, done.stderr
    assert "Usual cause: a call of fzero that some ranks make alone" in done.stdout, done.stdout
