"""Which rank writes what: every element of every leaf once, and no padding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import fzero
from fzero.checkpoint import load, save
from fzero.checkpoint._pieces import OwnShard, leaf_names, pieces_of
from fzero.partition import flatten, plan_layout, shard_of
from tests.checkpoint.states import blank, contents, equal, make, mixed, train
from tests.ranks import run_ranks
from tests.strategies import trees, unique, worlds


@given(trees(), worlds, st.sampled_from([None, 1, 40]), st.sampled_from([1, 3, 2**24]))
def test_the_pieces_of_all_ranks_are_every_leaf_once(
    params: Any, ranks: int, bucket_bytes: int | None, block_numel: int
) -> None:
    layout = plan_layout(params, ranks=ranks, bucket_bytes=bucket_bytes)
    flats = flatten(layout, params)
    found: dict[str, list[Any]] = {}
    for rank in reversed(range(ranks)):
        rows = [OwnShard("x", i, shard_of(f, ranks, rank)) for i, f in enumerate(flats)]
        for piece in pieces_of(layout, rows, rank, block_numel=block_numel):
            assert 0 < piece.values.numel() <= block_numel
            found.setdefault(piece.name, []).append(piece)
    names = leaf_names(layout)
    assert len(set(names)) == len(names)
    for name, leaf in zip(names, unique(params), strict=True):
        pieces = sorted(found.pop(f"x/{name}", []), key=lambda piece: piece.start)
        ends = [piece.start + piece.values.numel() for piece in pieces]
        assert [piece.start for piece in pieces] == [0, *ends[:-1]][: len(pieces)]
        assert all(piece.numel == leaf.numel() for piece in pieces)
        joined = torch.cat([piece.values for piece in pieces]) if pieces else leaf.new_zeros(0)
        torch.testing.assert_close(joined, leaf.detach().reshape(-1), rtol=0, atol=0)
    assert not found


def _save_mixed(rank: int, size: int, folder: Path) -> None:
    for stage in (0, 3):
        save(folder / f"{stage}", train(make(mixed(), stage=stage, ranks=0), 1))


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


def _written_bytes(rank: int, size: int, folder: Path) -> None:
    state = fzero.init({"w": torch.zeros(120_000)}, fzero.optim.adam(1e-3), stage=0)
    save(folder, state)


@pytest.mark.xdist_group("gloo")
def test_ranks_share_the_writing_of_what_all_of_them_hold(tmp_path: Path) -> None:
    run_ranks(_written_bytes, 3, tmp_path)
    (folder,) = tmp_path.glob("data-*")
    sizes = [file.stat().st_size for file in folder.glob("*.distcp")]
    third = 3 * 4 * 120_000 / 3  # parameters and two moments, over three ranks
    assert len(sizes) == 3
    assert all(third < size < 1.05 * third for size in sizes)


def test_large_leaves_are_cut_so_that_no_reader_needs_all_of_one(tmp_path: Path) -> None:
    numel = 2**24 + 5
    values = torch.arange(numel, dtype=torch.int32).to(torch.uint8)
    save(tmp_path, fzero.init({"w": values}, fzero.optim.sgd(1.0), stage=0))
    (folder,) = tmp_path.glob("data-*")
    entry = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata["params/w"]
    assert sorted(chunk.sizes[0] for chunk in entry.chunks) == [5, 2**24]
    into = make(
        {"w": torch.zeros(numel, dtype=torch.uint8)},
        stage=3,
        ranks=2,
        optimizer=fzero.optim.sgd(1.0),
    )
    loaded = load(tmp_path, into)
    assert torch.equal(loaded.params.flats[0].reshape(-1)[:numel], values)


def test_the_data_is_an_ordinary_checkpoint_of_torch(tmp_path: Path) -> None:
    save(tmp_path / "mine", make(mixed(), stage=3, ranks=3))
    (folder,) = (tmp_path / "mine").glob("data-*")
    dcp_to_torch_save(folder, tmp_path / "plain.pt")
    plain = torch.load(tmp_path / "plain.pt")
    assert torch.equal(plain["params/layers.0.w"].view(5, 3), mixed()["layers"][0]["w"])
    assert torch.equal(plain["params/half"], mixed()["half"])


def test_paths_that_look_alike_stay_apart(tmp_path: Path) -> None:
    params = {"a": {"b": torch.ones(2)}, "a.b": torch.full((3,), 2.0), "a.b#2": torch.zeros(2)}
    state = make(params, stage=0, ranks=0)
    save(tmp_path, state)
    equal(contents(load(tmp_path, make(blank(params), stage=3, ranks=0))), contents(state))


@pytest.mark.parametrize("params", [{"w": torch.zeros(0)}, torch.ones(2), torch.ones(())])
def test_small_pytrees_too(params: Any, tmp_path: Path) -> None:
    state = make(params, stage=1, ranks=0)
    save(tmp_path, state)
    equal(contents(load(tmp_path, make(blank(params), stage=2, ranks=0))), contents(state))
