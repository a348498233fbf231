"""Loading: a rank holds its part of the new state, and one block of what it reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fzero
from fzero.checkpoint import load, save
from tests.checkpoint.states import ADAM
from tests.live_bytes import LiveBytes
from tests.ranks import run_ranks

LAYERS, NUMEL = 10, 30_000
LEAF, MODEL = 4 * NUMEL, 4 * LAYERS * NUMEL


def _load_here(rank: int, size: int, folder: Path) -> None:
    params = {"layers": [{"w": torch.ones(NUMEL) * i} for i in range(LAYERS)]}
    if size == 2:
        save(folder, fzero.init(params, ADAM, stage=0))
    for stage in range(4):
        state = fzero.init(params, ADAM, stage=stage)
        part = MODEL * (1 if stage < 3 else 1 / size) + 2 * MODEL * (1 if stage < 1 else 1 / size)
        live = LiveBytes()
        with live, live.at_most(part + 3 * LEAF, f"load at stage {stage}"):
            loaded = load(folder, state)
        assert live.alive() > 0.95 * part
        del loaded


@pytest.mark.xdist_group("gloo")
def test_a_load_holds_the_new_part_and_little_more(tmp_path: Path) -> None:
    for size in (2, 4):
        run_ranks(_load_here, size, tmp_path, timeout_s=120)
