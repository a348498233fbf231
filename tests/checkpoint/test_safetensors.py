"""Weights out to safetensors and in again; other readers of the format agree."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import fzero
from fzero.adapter import Engine
from fzero.checkpoint import (
    CheckpointError,
    export_safetensors,
    import_safetensors,
    safetensors_initializer,
    state_dict,
)
from fzero.checkpoint._safetensors import places_in, read_values
from fzero.errors import LayoutError
from tests.checkpoint.forge import full_disk
from tests.checkpoint.states import ADAM, blank, make, mixed, on_ranks, snapshot
from tests.live_bytes import LiveBytes
from tests.ranks import run_ranks
from tests.strategies import same, stages

INDEX = "model.safetensors.index.json"
places = st.tuples(st.integers(0, 3), stages)


def _read(folder: Path) -> dict[str, Tensor]:
    """Return what is there, a tied one under the name that it is stored by."""
    return {x.name: read_values(x) for x in places_in(folder).values()}


def _wanted(params: dict[str, Any]) -> dict[str, Tensor]:
    found = {name: x for name, x in params.items() if isinstance(x, Tensor) and name != "head"}
    layers = {
        f"layers.{i}.{k}": x for i, one in enumerate(params["layers"]) for k, x in one.items()
    }
    return {name: x.detach() for name, x in (found | layers).items()}


@given(places, places, st.sampled_from([1, 50, 100, 10**6]))
def test_values_go_out_and_in_at_any_place(source: Any, target: Any, most: int) -> None:
    params = mixed(seed=3)
    state = make(params, stage=source[1], ranks=source[0])
    into = make(blank(params), stage=target[1], ranks=target[0])
    before = snapshot((state, into))
    with tempfile.TemporaryDirectory() as name:
        export_safetensors(name, state, max_shard_bytes=most)
        same(_read(Path(name)), _wanted(params))
        loaded = import_safetensors(name, into)
    same((state, into), before)
    for one in (on_ranks(fzero.full_params, loaded),):
        ranks = target[0] or 1
        half = one["half"].reshape(ranks, -1)
        assert torch.equal(half, params["half"].expand(ranks, -1))
        assert torch.equal(one["head"], one["embed"])
    masters = [x for x in loaded.optimizer.masters if x.numel()]
    assert masters and all(x.abs().sum() > 0 for x in masters)


def test_other_readers_find_the_same(tmp_path: Path) -> None:
    torch_files = pytest.importorskip("safetensors.torch")
    params = mixed()
    export_safetensors(tmp_path, make(params, stage=3, ranks=3), max_shard_bytes=60)
    index = json.loads((tmp_path / INDEX).read_text())
    found: dict[str, Tensor] = {}
    for file in sorted(tmp_path.glob("*.safetensors")):
        found |= torch_files.load_file(file)
    same(found, _wanted(params))
    assert index["weight_map"].keys() == found.keys()
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in found.values())
    files = sorted(set(index["weight_map"].values()))
    assert files == [
        f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)
    ]


def test_what_others_write_is_read(tmp_path: Path) -> None:
    torch_files = pytest.importorskip("safetensors.torch")
    params = {name: x for name, x in _wanted(mixed()).items()}
    torch_files.save_file(params, tmp_path / "model.safetensors")
    same({name: x for name, x in _read(tmp_path).items()}, params)


def test_transformers_loads_an_export(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_embd=8, n_head=2, vocab_size=17, n_positions=8)
    model = transformers.GPT2LMHeadModel(config)
    engine = Engine(model, torch.optim.AdamW, stage=3)
    config.save_pretrained(tmp_path)
    export_safetensors(tmp_path, engine, max_shard_bytes=1000)
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    values = state_dict(engine)
    for name, x in again.state_dict().items():
        assert torch.equal(x, values[name]), name
    tokens = torch.arange(6).reshape(1, 6)
    assert torch.equal(again.eval()(tokens).logits, engine.eval()(tokens).logits)
    other = Engine(transformers.GPT2LMHeadModel(config), torch.optim.AdamW, stage=1)
    again.save_pretrained(tmp_path / "theirs", max_shard_size=2000)
    import_safetensors(tmp_path / "theirs", other)
    for name, x in state_dict(other).items():
        assert torch.equal(x, values[name]), name


def test_a_plain_module_loads_a_state_dict(tmp_path: Path) -> None:
    def build() -> nn.Sequential:
        module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
        module[2].weight = module[0].weight
        return module

    module = build()
    _, params, _ = fzero.functionalize(module, buffers=True)
    state = make(params, stage=3, ranks=0, optimizer=fzero.optim.sgd(0.5))
    for values in (state_dict(state, module), state_dict(Engine(build(), None, stage=2))):
        assert build().load_state_dict(values).missing_keys == []
    found = state_dict(state, module)
    assert torch.equal(found["2.weight"], module.state_dict()["0.weight"])
    with pytest.raises(LayoutError, match=r"the state has no parameter 3\.weight"):
        state_dict(state, nn.Sequential(*module, nn.Linear(3, 1)))


def test_floating_values_are_converted_and_masters_keep_all_bits(tmp_path: Path) -> None:
    fine = torch.tensor([1.0 + 2.0**-20, 3.0])
    export_safetensors(tmp_path, fzero.init({"w": fine}, ADAM, stage=0))
    state = import_safetensors(
        tmp_path, fzero.init({"w": torch.zeros(2).bfloat16()}, ADAM, stage=2)
    )
    assert torch.equal(fzero.full_params(state)["w"], fine.bfloat16())
    masters: Any = state.optimizer.masters
    assert torch.equal(masters[0][:2], fine)


@pytest.mark.parametrize(
    ("params", "match"),
    [
        ({"v": torch.ones(2)}, "the files have no v; they have"),
        ({"w": torch.ones(3)}, r"w is \(2,\) torch.float32 in .*, \(3,\) torch.float32 in the"),
        ({"w": torch.ones(2, dtype=torch.int64)}, "torch.int64 in the model"),
    ],
)
def test_weights_of_another_model_are_refused(params: Any, match: str, tmp_path: Path) -> None:
    export_safetensors(tmp_path, fzero.init({"w": torch.ones(2)}, ADAM, stage=0))
    into = fzero.init(params, ADAM, stage=1)
    before = snapshot(into)
    with pytest.raises(LayoutError, match=match):
        import_safetensors(tmp_path, into)
    same(into, before)


def _with_header(folder: Path, header: Any, length: int | None = None) -> None:
    """Write a file with a header, and 8 bytes of values."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(text) if length is None else length
    (folder / "model.safetensors").write_bytes(size.to_bytes(8, "little") + text + bytes(8))


ONE = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
HEADERS: dict[str, tuple[Any, str]] = {
    "not JSON": (b"{", "is no JSON"),
    "a list": ([1], "holds no dict"),
    "a dtype": ({"w": {**ONE, "dtype": "F31"}}, "no tensor w"),
    "no shape": ({"w": {"dtype": "F32", "data_offsets": [0, 8]}}, "no tensor w"),
    "a shape": ({"w": {**ONE, "shape": [-2]}}, "no tensor w"),
    "a huge shape": ({"w": {**ONE, "shape": [2**62, 2**62]}}, "no tensor w"),
    "a bool": ({"w": {**ONE, "data_offsets": [False, 8]}}, "no tensor w"),
    "a size": ({"w": {**ONE, "data_offsets": [0, 4]}}, "no tensor w"),
    "the end": ({"w": {**ONE, "data_offsets": [8, 16]}}, "no tensor w"),
    "cut off": ({"v": ONE, "w": {**ONE, "data_offsets": [4, 12]}}, "no tensor w"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_an_odd_header_is_refused(name: str, tmp_path: Path) -> None:
    header, match = HEADERS[name]
    _with_header(tmp_path, header)
    with pytest.raises(CheckpointError, match=match):
        safetensors_initializer(tmp_path)


@pytest.mark.parametrize("length", [0, 7, 10**12, 2**64 - 1])
def test_a_length_that_does_not_fit_is_refused(length: int, tmp_path: Path) -> None:
    _with_header(tmp_path, {"w": ONE}, length)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        safetensors_initializer(tmp_path)


@pytest.mark.parametrize("file", ["../x.safetensors", "/x.safetensors", "x.bin", 7, None, ".."])
def test_an_index_that_leaves_the_folder_is_refused(file: Any, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"w": file}}))
    with pytest.raises(CheckpointError, match="which is no file of the folder"):
        safetensors_initializer(tmp_path)


def test_missing_files_and_names_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there are no weights at"):
        safetensors_initializer(tmp_path)
    state = make(mixed(), stage=0, ranks=0)
    export_safetensors(tmp_path, state, max_shard_bytes=60)
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"]["more"] = index["weight_map"]["embed"]
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="has no more, which its index says"):
        safetensors_initializer(tmp_path)
    (tmp_path / index["weight_map"]["embed"]).unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        safetensors_initializer(tmp_path)


def test_an_export_that_fails_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (make(mixed(seed=seed), stage=3, ranks=0) for seed in (1, 2))
    export_safetensors(tmp_path, first, max_shard_bytes=60)
    with monkeypatch.context() as patch:
        patch.setattr("fzero.checkpoint._safetensors.write_values", full_disk)
        with pytest.raises(CheckpointError, match="disk is full"):
            export_safetensors(tmp_path, second)
    same(_read(tmp_path), _wanted(mixed(seed=1)))
    assert not list(tmp_path.glob(".partial*"))
    export_safetensors(tmp_path, second, max_shard_bytes=10**6)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "model-00001-of-00001.safetensors", INDEX,
    ]  # fmt: skip
    same(_read(tmp_path), _wanted(mixed(seed=2)))
    with pytest.raises(LayoutError, match="max_shard_bytes='5GB'"):
        export_safetensors(tmp_path, second, max_shard_bytes="5GB")  # type: ignore


UNITS, UNIT = 8, 40_000


def _part_and_a_unit(rank: int, size: int, folder: Path) -> float:
    """Peak bytes of an export and of an initialization, as parts of the model's."""
    with torch.device("meta"):
        params = {"layers": [{"w": torch.zeros(UNIT)} for _ in range(UNITS)]}
    rule, model = fzero.optim.sgd(0.1), UNITS * UNIT * 4
    live = LiveBytes()
    with live, live.at_most(model / size + 3.1 * model / UNITS, "from an initializer"):
        state = fzero.init(
            params, rule, stage=3, initializer=lambda path, leaf: torch.ones(UNIT) * len(path)
        )
    with live, live.at_most(model / size + 3.1 * model / UNITS, "export"):
        export_safetensors(folder, state, max_shard_bytes=model // 3)
    with live, live.at_most(2 * model / size + 3.1 * model / UNITS, "import"):
        import_safetensors(folder, state)
    del state
    with live, live.at_most(model / size + 3.1 * model / UNITS, "from the files"):
        fzero.init(params, rule, stage=3, initializer=safetensors_initializer(folder))
    return float(rank)


@pytest.mark.xdist_group("gloo")
def test_no_rank_holds_more_than_its_part_and_a_unit(tmp_path: Path) -> None:
    run_ranks(_part_and_a_unit, 4, tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) == 4


def _export_here(rank: int, size: int, folder: Path) -> None:
    params = mixed(seed=4)
    for stage in range(4):
        export_safetensors(folder, make(params, stage=stage, ranks=0), max_shard_bytes=60)
        same(_read(folder), _wanted(params))
        into = make(blank(params), stage=3 - stage, ranks=0)
        found = fzero.full_params(import_safetensors(folder, into))
        assert torch.equal(found["double"], params["double"])
        same(state_dict(into), {name: torch.zeros_like(x) for name, x in state_dict(into).items()})


@pytest.mark.xdist_group("gloo")
def test_gloo_ranks_export_and_import(tmp_path: Path) -> None:
    run_ranks(_export_here, 3, tmp_path)
