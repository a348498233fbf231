"""What PowerSGD keeps in a checkpoint: each rank's residual, and where factors start from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
from fzero import codecs
from fzero.checkpoint import Mirror, load, save
from fzero.checkpoint.elements import state_of_rank
from fzero.machine.compress import memory_flats, start_slots
from fzero.machine.packing import unpack
from tests.checkpoint.test_residual_saved import begun, step_of, trained

POWER = codecs.powersgd(rank=2)


@pytest.mark.parametrize("stage", [0, 3])
def test_training_goes_on_from_a_checkpoint_with_the_same_bits(stage: int, tmp_path: Path) -> None:
    step = fzero.simulate(step_of(stage, POWER), world_size=3)
    state = trained(step, begun(step), 3)
    save(tmp_path, state)
    found, wanted = (trained(step, s, 3, 2) for s in (load(tmp_path, begun(step)), state))
    for x, y in zip(found.params.flats, wanted.params.flats, strict=True):
        assert torch.equal(x, y)
    for x, y in zip(memory_flats(found), memory_flats(wanted), strict=True):
        assert torch.equal(x, y)


def test_on_other_ranks_sums_are_what_they_were_and_factors_start_where_they_did(
    tmp_path: Path,
) -> None:
    step = fzero.simulate(step_of(2, POWER), world_size=3)
    state = trained(step, begun(step), 3)
    save(tmp_path, state)
    other = fzero.simulate(step_of(3, POWER), world_size=2)
    loaded = load(tmp_path, begun(other))
    found, wanted = whole(loaded), whole(state)
    for path, value in wanted.items():
        torch.testing.assert_close(found[path], value, rtol=0, atol=1e-6)
    other = fzero.simulate(step_of(3, codecs.powersgd(rank=1)), world_size=2)
    with pytest.warns(UserWarning, match="start has other shapes there than here"):
        loaded = load(tmp_path, begun(other))  # of another rank: factors start anew
    trained(other, loaded, 2, 2)


def whole(state: Any) -> dict[str, Tensor]:
    """{path: sum_r e_r; the start} of a stacked state."""
    layout, found = state.setup.layout, {}
    for index, flat in zip(layout.trainable, memory_flats(state), strict=False):
        paths = [layout.leaves[i].path for i in layout.groups[index].leaves]
        found.update(zip(paths, unpack(layout, index, flat.sum(0)), strict=True))
    first = state_of_rank(state, 0)
    return found | {f"start {layout.leaves[leaf].path}": q for leaf, q in start_slots(first)}


@pytest.mark.parametrize("stage", [0, 3])
def test_a_mirror_keeps_it(stage: int, tmp_path: Path) -> None:
    step = fzero.simulate(step_of(stage, POWER), world_size=3)
    state = trained(step, begun(step), 3)
    Mirror(tmp_path, every=1).update(state)
    restored, _ = Mirror(tmp_path, every=1).restore(begun(step))
    found, wanted = (trained(step, s, 3, 2) for s in (restored, state))
    for x, y in zip(memory_flats(found), memory_flats(wanted), strict=True):
        assert torch.equal(x, y)
