"""Which rank writes what: every element of every leaf once, and no padding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from fzero.checkpoint import load, save
from tests.checkpoint.states import blank, contents, make, mixed, train
from tests.ranks import run_ranks
from tests.strategies import same


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
