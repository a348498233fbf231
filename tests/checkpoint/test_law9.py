"""Law 9: saved on W ranks at stage s, loaded on W' ranks at stage s', every value is the same."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

import fzero
from fzero.checkpoint import load, save
from tests.checkpoint.states import (
    ADAM,
    blank,
    contents,
    first_rank,
    make,
    mixed,
    on_ranks,
    snapshot,
    train,
)
from tests.ranks import run_ranks
from tests.strategies import same, stages, trees

STAGES = range(4)
WORLDS = (1, 2, 3, 4)
OPTIMIZERS: dict[str, Any] = {
    "adam": ADAM,
    "sgd": fzero.optim.sgd(0.5),
    "momentum": fzero.optim.sgd(0.5, momentum=0.5),
    "torch's adamw": fzero.optim.from_torch(torch.optim.AdamW),
    "torch's adagrad": fzero.optim.from_torch(
        functools.partial(torch.optim.Adagrad, lr=0.5, initial_accumulator_value=0.5)
    ),
}
places = st.tuples(st.integers(0, 4), stages)  # virtual ranks (0: this process alone), stage


@given(trees(), places, places, st.sampled_from(sorted(OPTIMIZERS)))
def test_any_pytree_moves_between_any_two_places(
    params: Any, source: tuple[int, int], target: tuple[int, int], name: str
) -> None:
    optimizer = OPTIMIZERS[name]
    state = make(params, stage=source[1], ranks=source[0], optimizer=optimizer)
    state = on_ranks(train, state, 2)
    into = make(blank(params), stage=target[1], ranks=target[0], optimizer=optimizer)
    before = snapshot((state, into))
    with tempfile.TemporaryDirectory() as folder:
        save(folder, state)
        loaded = load(folder, into)
    same((state, into), before)
    same(first_rank(loaded), first_rank(state))
    assert loaded.setup == into.setup
    assert loaded.phase is fzero.state.Phase.IDLE


@given(trees(), places, st.sampled_from(sorted(OPTIMIZERS)))
def test_training_goes_on_as_if_it_had_not_stopped(
    params: Any, place: tuple[int, int], name: str
) -> None:
    ranks, stage = place
    optimizer = OPTIMIZERS[name]
    state = on_ranks(train, make(params, stage=stage, ranks=ranks, optimizer=optimizer), 2)
    with tempfile.TemporaryDirectory() as folder:
        save(folder, state)
        into = make(blank(params), stage=stage, ranks=ranks, optimizer=optimizer)
        loaded = load(folder, into)
    same(first_rank(on_ranks(train, loaded, 2)), first_rank(on_ranks(train, state, 2)))


def _save_each(rank: int, size: int, folder: Path) -> dict[str, dict[str, Any]]:
    saved = {}
    for stage in STAGES:
        state = train(make(mixed(seed=10 * size + stage), stage=stage), 1)
        name = f"{size} ranks, stage {stage}"
        save(folder / name, state)
        saved[name] = contents(state)
    return saved


def _load_each(rank: int, size: int, folder: Path) -> dict[str, dict[str, Any]]:
    found = {}
    for number, path in enumerate(sorted(folder.iterdir())):
        stage = (number + number // 4) % 4  # in turn: each saved stage is loaded at others
        found[path.name] = contents(load(path, make(blank(mixed()), stage=stage)))
    return found


@pytest.mark.xdist_group("gloo")
def test_gloo_ranks_load_what_other_gloo_and_virtual_ranks_saved(tmp_path: Path) -> None:
    saved: dict[str, Any] = {}
    for size in WORLDS:
        saved |= run_ranks(_save_each, size, tmp_path)[0]
    for stage in STAGES:
        state = on_ranks(train, make(mixed(seed=stage), stage=stage, ranks=3), 1)
        name = f"virtual ranks, stage {stage}"
        save(tmp_path / name, state)
        saved[name] = first_rank(state)
    for size in WORLDS:
        for found in run_ranks(_load_each, size, tmp_path):
            same(found, saved)


def _two_by_two(rank: int, size: int, folder: Path) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("model", "dp"))
    which = rank // 2
    params = {"w": torch.arange(7.0) + 10 * which}
    state = fzero.init(params, ADAM, stage=3, mesh=mesh["dp"])
    save(folder / str(which), state)
    loaded = load(folder / str(which), fzero.init(blank(params), ADAM, stage=1, mesh=mesh["dp"]))
    return fzero.full_params(loaded)["w"]


@pytest.mark.xdist_group("gloo")
def test_two_groups_of_ranks_save_two_states_at_once(tmp_path: Path) -> None:
    found = run_ranks(_two_by_two, 4, tmp_path)
    assert [w.tolist() for w in found] == [
        [10 * which + i for i in range(7)] for which in (0, 0, 1, 1)
    ]


def test_gradients_of_the_target_are_not_kept(tmp_path: Path) -> None:
    state = make({"w": torch.ones(3)}, stage=0)
    save(tmp_path, state)
    held, _ = fzero.grad_and_reduce(lambda p: p["w"].sum(), state)()
    loaded = load(tmp_path, held)
    assert loaded.phase is fzero.state.Phase.IDLE
    assert loaded.progress.backwards == 0
    assert held.phase is fzero.state.Phase.READY
