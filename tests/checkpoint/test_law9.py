"""Law 9: saved on W ranks at stage s, loaded on W' ranks at stage s', every value is the same."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

import fzero
from fzero.checkpoint import load, read_extra, save
from tests.checkpoint.states import (
    ADAM,
    blank,
    contents,
    equal,
    first_rank,
    make,
    mixed,
    on_ranks,
    snapshot,
    train,
    unchanged,
)
from tests.ranks import run_ranks
from tests.strategies import seeds, stages, trees

STAGES = range(4)
WORLDS = (1, 2, 3, 4)
places = st.tuples(st.integers(0, 4), stages)  # virtual ranks (0: this process alone), stage


@given(trees(), places, places, st.sampled_from(["adam", "sgd", "momentum"]))
def test_any_pytree_moves_between_any_two_places(
    params: Any, source: tuple[int, int], target: tuple[int, int], name: str
) -> None:
    rules = {
        "adam": ADAM,
        "sgd": fzero.optim.sgd(0.5),
        "momentum": fzero.optim.sgd(0.5, momentum=0.5),
    }
    optimizer = rules[name]
    state = make(params, stage=source[1], ranks=source[0], optimizer=optimizer)
    state = on_ranks(train, state, 2)
    into = make(blank(params), stage=target[1], ranks=target[0], optimizer=optimizer)
    before = snapshot((state, into))
    with tempfile.TemporaryDirectory() as folder:
        save(folder, state)
        loaded = load(folder, into)
    unchanged((state, into), before)
    equal(first_rank(loaded), first_rank(state))
    assert loaded.setup == into.setup
    assert loaded.phase is fzero.state.Phase.IDLE


@given(trees(), places, seeds)
def test_training_goes_on_as_if_it_had_not_stopped(
    params: Any, place: tuple[int, int], seed: int
) -> None:
    state = on_ranks(train, make(params, stage=place[1], ranks=place[0]), 2)
    with tempfile.TemporaryDirectory() as folder:
        save(folder, state, extra={"seed": seed})
        loaded = load(folder, make(blank(params), stage=place[1], ranks=place[0]))
        assert read_extra(folder) == {"seed": seed}
    equal(first_rank(on_ranks(train, loaded, 2)), first_rank(on_ranks(train, state, 2)))


def _save_each(rank: int, size: int, folder: Path) -> list[dict[str, Any]]:
    saved = []
    for stage in STAGES:
        state = train(make(mixed(seed=10 * size + stage), stage=stage, ranks=0), 1)
        save(folder / f"{size}-{stage}", state)
        saved.append(contents(state))
    return saved


def _load_each(rank: int, size: int, folder: Path) -> list[Any]:
    into = [make(blank(mixed()), stage=stage, ranks=0) for stage in STAGES]
    return [
        (source, stage, contents(load(folder / f"{source}-{stage}", into[(source + stage) % 4])))
        for source in WORLDS
        for stage in STAGES
    ]


@pytest.mark.xdist_group("gloo")
def test_gloo_ranks_load_what_other_numbers_of_gloo_ranks_saved(tmp_path: Path) -> None:
    saved = {size: run_ranks(_save_each, size, tmp_path)[0] for size in WORLDS}
    for size in WORLDS:
        for per_rank in run_ranks(_load_each, size, tmp_path):
            for source, stage, found in per_rank:
                equal(found, saved[source][stage])


def _go_on(rank: int, size: int, folder: Path) -> None:
    for stage in STAGES:
        state = train(make(mixed(), stage=stage, ranks=0), 2)
        save(folder / f"{stage}", state)
        loaded = load(folder / f"{stage}", make(blank(mixed()), stage=stage, ranks=0))
        equal(contents(train(loaded, 2)), contents(train(state, 2)))


@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize("size", WORLDS)
def test_gloo_ranks_go_on_bit_for_bit(size: int, tmp_path: Path) -> None:
    run_ranks(_go_on, size, tmp_path)


@pytest.mark.xdist_group("gloo")
def test_virtual_ranks_write_the_file_that_gloo_ranks_read(tmp_path: Path) -> None:
    params = mixed(seed=14)
    states = [on_ranks(train, make(params, stage=stage, ranks=3), 1) for stage in STAGES]
    for source in WORLDS:
        for stage, state in enumerate(states):
            save(tmp_path / f"{source}-{stage}", state)
    for _, stage, found in run_ranks(_load_each, 2, tmp_path)[1]:
        equal(found, first_rank(states[stage]))


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


def test_a_donating_step_takes_a_loaded_state(tmp_path: Path) -> None:
    def step_fn(state: Any) -> Any:
        return train(state, 1), None

    save(tmp_path, train(make(mixed(), stage=2, ranks=0), 1))
    step = fzero.shard(step_fn, stage=2, donate=True, bucket_bytes=64)
    after, _ = step(load(tmp_path, make(blank(mixed()), stage=2, ranks=0)))
    again = train(load(tmp_path, make(blank(mixed()), stage=2, ranks=0)), 1)
    equal(contents(after), contents(again))


def test_gradients_of_the_target_are_not_kept(tmp_path: Path) -> None:
    state = make({"w": torch.ones(3)}, stage=0, ranks=0)
    save(tmp_path, state)
    held, _ = fzero.grad_and_reduce(lambda p: p["w"].sum(), state)()
    loaded = load(tmp_path, held)
    assert loaded.phase is fzero.state.Phase.IDLE
    assert loaded.progress.backwards == 0
    assert held.phase is fzero.state.Phase.READY
