"""A universal checkpoint is there whole or not at all; what the layout cannot hold is refused."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

import fzero
from fzero.checkpoint import CheckpointError, load_universal, save_universal
from fzero.errors import LayoutError, PhaseError
from tests.checkpoint.states import blank, contents, make, mixed, snapshot
from tests.checkpoint.test_interrupted import FSYNC, REPLACE, TORCH_SAVE, Target, failing
from tests.strategies import same


@pytest.mark.parametrize(
    ("target", "after"),
    [(TORCH_SAVE, 0), (TORCH_SAVE, 9), (FSYNC, 3), (REPLACE, 0), ((Path, "mkdir"), 0)],
)
def test_a_save_that_fails_leaves_the_one_before(
    target: Target, after: int, tmp_path: Path
) -> None:
    old, new = (make(mixed(seed=seed), stage=2) for seed in (1, 2))
    save_universal(tmp_path, old)
    before = snapshot(new)
    with failing(target, after, OSError("disk is full")), pytest.raises(CheckpointError):
        save_universal(tmp_path, new)
    same(new, before)
    assert not list(tmp_path.glob(".partial*/zero"))
    into = make(blank(mixed()), stage=0)
    same(contents(load_universal(tmp_path, into)), contents(old))
    save_universal(tmp_path, new)
    same(contents(load_universal(tmp_path, into)), contents(new))


def test_tags_are_names_and_new(tmp_path: Path) -> None:
    state = make(mixed(), stage=0)
    save_universal(tmp_path, state, tag="one")
    for _ in range(2):
        save_universal(tmp_path, state)
    assert (tmp_path / "latest_universal").read_text() == "global_step0_universal_2"
    load_universal(tmp_path, state, tag="one")
    with pytest.raises(LayoutError, match=r"'one' is in .* already"):
        save_universal(tmp_path, state, tag="one")
    for tag in ("../one", "", ".one", "a/b", 3):
        for run in (save_universal, load_universal):
            with pytest.raises(LayoutError, match="is no name of a folder"):
                run(tmp_path, state, tag=tag)  # type: ignore
    with pytest.raises(CheckpointError, match="has no folder zero"):
        load_universal(tmp_path, state, tag="two")


def test_what_the_layout_has_no_place_for_is_refused(tmp_path: Path) -> None:
    nadam = fzero.optim.from_torch(functools.partial(torch.optim.NAdam, lr=0.5))
    for state, match in (
        (make({"w": torch.ones(2)}, stage=0, ranks=0, optimizer=nadam), "optimizer's mu_product"),
        (make({"a/b": torch.ones(2)}, stage=0, ranks=0), "parameter 'a/b'"),
        (make({"..": torch.ones(2)}, stage=0, ranks=0), r"parameter '\.\.'"),
    ):
        for run in (save_universal, load_universal):
            with pytest.raises(LayoutError, match=match):
                run(tmp_path / "new", state)
    assert not (tmp_path / "new").exists()
    state = make({"w": torch.ones(2)}, stage=0, ranks=0)
    state = fzero.grad_and_reduce(lambda p: p["w"].sum(), state)()[0]
    with pytest.raises(PhaseError, match="between gradient and update"):
        save_universal(tmp_path / "new", state)
