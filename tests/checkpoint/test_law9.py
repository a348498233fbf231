"""Law 9: saved on W ranks at stage s, loaded on W' ranks at stage s', every value is the same.

And what is in the files: every element of every leaf once, and no padding.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import example, given
from hypothesis import strategies as st
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
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
places = st.fixed_dictionaries(
    {
        "ranks": st.integers(0, 4),  # virtual ones; 0: this process alone
        "stage": stages,
        "replicas": st.integers(1, 4),
        "over": st.sampled_from(["shard", "all"]),
    }
)
Place = dict[str, Any]
MESHES: Any = ((1, "shard"), (2, "all"), (2, "shard"), (2, "all"))  # by stage, on 2 or 4 ranks
OF_4: Place = {"ranks": 4, "stage": 1, "replicas": 2, "over": "all"}
OF_6: Place = {"ranks": 6, "stage": 3, "replicas": 3, "over": "shard"}


@given(trees(learning=True), places, places, st.sampled_from(sorted(OPTIMIZERS)))
@example(mixed(), OF_4, OF_6, "adam")
@example(mixed(), OF_6, OF_4, "adam")
def test_any_pytree_moves_between_any_two_places(
    params: Any, source: Place, target: Place, name: str
) -> None:
    optimizer = OPTIMIZERS[name]
    state = on_ranks(train, make(params, optimizer=optimizer, **source), 2)
    into = make(blank(params), optimizer=optimizer, **target)
    before = snapshot((state, into))
    with tempfile.TemporaryDirectory() as folder:
        save(folder, state)
        loaded = load(folder, into)
    same((state, into), before)
    same(first_rank(loaded), first_rank(state))
    assert loaded.setup == into.setup
    assert loaded.phase is fzero.state.Phase.IDLE


def _save_each(rank: int, size: int, folder: Path) -> dict[str, dict[str, Any]]:
    saved = {}
    for stage, (replicas, over) in zip(STAGES, MESHES, strict=True):
        params = mixed(seed=10 * size + stage)
        state = train(make(params, stage=stage, replicas=replicas, over=over), 1)
        name = f"{size} ranks, stage {stage}"
        save(folder / name, state)
        saved[name] = contents(state)
    return saved


def _load_each(rank: int, size: int, folder: Path) -> dict[str, dict[str, Any]]:
    found = {}
    for number, path in enumerate(sorted(folder.iterdir())):
        if (number + size) % 2:  # the ranks of other sizes load it
            continue
        stage = (number + number // 4) % 4  # in turn: each saved stage is loaded at others
        replicas, over = MESHES[number % 3 + 1]
        into = make(blank(mixed()), stage=stage, replicas=replicas, over=over)
        found[path.name] = contents(load(path, into))
    return found


@pytest.mark.floor
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
    loaded: set[str] = set()
    for size in WORLDS:
        for found in run_ranks(_load_each, size, tmp_path):
            same(found, {name: saved[name] for name in found})
            loaded |= found.keys()
    assert loaded == saved.keys()


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


# The files


def _save_mixed(rank: int, size: int, folder: Path) -> None:
    for stage in (0, 3):
        save(folder / f"{stage}", train(make(mixed(), stage=stage), 1))


@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize("size", [1, 3])
def test_a_checkpoint_has_the_logical_tensors_and_nothing_else(size: int, tmp_path: Path) -> None:
    run_ranks(_save_mixed, size, tmp_path)
    whole = {
        "embed": 21, "layers.0.w": 15, "layers.0.b": 5, "layers.1.w": 15, "layers.1.b": 3,
        "half": 11, "double": 4, "scale": 1,
    }  # fmt: skip
    wanted = {f"params/{name}": numel for name, numel in whole.items()}
    wanted |= {"params/frozen": 4, "params/steps": 3, "params/mask": 5}
    for slot in ("exp_avg", "exp_avg_sq"):
        wanted |= {f"optimizer/{slot}/{name}": numel for name, numel in whole.items()}
    wanted["optimizer/masters/half"] = 11
    for stage in (0, 3):
        (folder,) = (tmp_path / f"{stage}").glob("data-*")
        saved = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        assert {name: entry.size.numel() for name, entry in saved.items()} == wanted
        for name, entry in saved.items():
            assert sum(chunk.sizes[0] for chunk in entry.chunks) == wanted[name]
            assert len(entry.chunks) <= size
        assert saved["params/half"].properties.dtype is torch.bfloat16
        assert saved["optimizer/masters/half"].properties.dtype is torch.float32
        assert len(list(folder.glob("*.distcp"))) == size


def _save_zeros(rank: int, size: int, folder: Path) -> None:
    save(folder, make({"w": torch.zeros(120_000)}, stage=0))


@pytest.mark.smoke
@pytest.mark.xdist_group("gloo")
def test_ranks_share_the_writing_of_what_all_of_them_hold(tmp_path: Path) -> None:
    run_ranks(_save_zeros, 3, tmp_path)
    (folder,) = tmp_path.glob("data-*")
    sizes = [file.stat().st_size for file in folder.glob("*.distcp")]
    third = 3 * 4 * 120_000 / 3  # parameters and two moments, over three ranks
    assert len(sizes) == 3
    assert all(third < size < 1.05 * third for size in sizes)


def test_large_leaves_are_cut_so_that_no_reader_needs_all_of_one(tmp_path: Path) -> None:
    numel = 2**24 + 5
    values = torch.arange(numel, dtype=torch.int32).to(torch.uint8)
    save(tmp_path, make({"w": values}, stage=0))
    (folder,) = tmp_path.glob("data-*")
    entry = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata["params/w"]
    assert sorted(chunk.sizes[0] for chunk in entry.chunks) == [5, 2**24]
    loaded = load(tmp_path, make(blank({"w": values}), stage=3, ranks=2))
    assert torch.equal(loaded.params.flats[0].reshape(-1)[:numel], values)


def test_the_data_is_an_ordinary_checkpoint_of_torch(tmp_path: Path) -> None:
    save(tmp_path / "mine", make(mixed(), stage=3, ranks=3))
    (folder,) = (tmp_path / "mine").glob("data-*")
    dcp_to_torch_save(folder, tmp_path / "plain.pt")
    plain = torch.load(tmp_path / "plain.pt")
    assert torch.equal(plain["params/layers.0.w"].view(5, 3), mixed()["layers"][0]["w"])
    assert torch.equal(plain["params/half"], mixed()["half"])


@pytest.mark.parametrize(
    "params",
    [
        {"a": {"b": torch.ones(2)}, "a.b": torch.full((3,), 2.0), "a.b#2": torch.zeros(2)},
        {"w": torch.zeros(0)},
        torch.ones(2),
        torch.ones(()),
    ],
    ids=["paths that look alike", "nothing", "no path", "one number"],
)
def test_small_and_ambiguous_pytrees_come_back(params: Any, tmp_path: Path) -> None:
    state = train(make(params, stage=1), 1)
    save(tmp_path, state)
    same(contents(load(tmp_path, make(blank(params), stage=3))), contents(state))
