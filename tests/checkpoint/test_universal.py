"""DeepSpeed's universal layout: out and in at any place; in from folders as DeepSpeed has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fzero
from fzero.adapter import Engine
from fzero.checkpoint import CheckpointError, load_universal, save_universal
from fzero.errors import LayoutError
from tests.checkpoint.states import (
    ADAM,
    blank,
    contents,
    first_rank,
    make,
    mixed,
    on_ranks,
    slot_of,
    snapshot,
    train,
    whole,
)
from tests.live_bytes import LiveBytes
from tests.ranks import run_ranks
from tests.strategies import same

PLACES = [  # ranks (0: this process) and stage, before and after
    ((3, 3), (2, 1)),
    ((2, 1), (3, 3)),
    ((0, 0), (3, 2)),
    ((3, 2), (0, 3)),
    ((1, 3), (2, 0)),
    ((2, 0), (1, 1)),
]


@pytest.mark.parametrize(("source", "target"), PLACES)
def test_what_is_saved_comes_back_at_any_place(source: Any, target: Any, tmp_path: Path) -> None:
    state = make(mixed(seed=3), stage=source[1], ranks=source[0])
    state = on_ranks(train, state, 2)
    into = make(blank(mixed()), stage=target[1], ranks=target[0])
    before = snapshot((state, into))
    save_universal(tmp_path, state)
    loaded = load_universal(tmp_path, into)
    same((state, into), before)
    wanted = first_rank(state)
    assert int(wanted["step"]) == 2
    same(first_rank(loaded), wanted)


def test_the_files_are_those_of_the_layout(tmp_path: Path) -> None:
    params = {"a": {"w": torch.full((2, 3), 1 + 2.0**-9)}, "low": torch.ones(5).bfloat16()}
    rule = fzero.optim.adamw(0.3, betas=(0.5, 0.75), weight_decay=0.125)
    state = train(make(params, stage=2, ranks=0, optimizer=rule), 1)
    save_universal(tmp_path, state)
    root = tmp_path / "global_step1_universal"
    assert (tmp_path / "latest_universal").read_text() == root.name
    found = contents(state)
    for name in ("a.w", "low"):
        folder = root / "zero" / name
        assert sorted(file.stem for file in folder.iterdir()) == [
            "exp_avg", "exp_avg_sq", "fp32", "step",
        ]  # fmt: skip
        read = {f.stem: torch.load(f, weights_only=True) for f in folder.iterdir()}
        assert torch.equal(read.pop("step"), torch.tensor(1.0))
        for slot, key in enumerate(("exp_avg", "exp_avg_sq")):
            assert torch.equal(read[key]["param"], slot_of(found, slot, name))
        assert all(one["param"].dtype is torch.float32 for one in read.values())
    fp32 = torch.load(root / "zero" / "low" / "fp32.pt", weights_only=True)["param"]
    assert torch.equal(fp32, slot_of(found, 2, "low"))
    assert not torch.equal(fp32, fp32.bfloat16().float())
    shared = torch.load(root / "zero" / "optimizer_state.pt", weights_only=True)
    (group,) = shared["param_groups"]
    assert group["lr"] == 0.3 and group["betas"] == (0.5, 0.75) and group["params"] == [0, 1]
    assert group["decoupled_weight_decay"] is True
    assert torch.equal(shared["optimizer_state_dict"]["state"][0]["step"], torch.tensor(1.0))
    for file in ("mp_rank_00", "zero_pp_rank_0_mp_rank_00"):
        states = torch.load(root / f"{file}_model_states.pt", weights_only=True)
        assert states["global_steps"] == 1 and states["mp_world_size"] == 1


UNITS, UNIT = 8, 40_000


def _part_and_a_unit(rank: int, size: int, folder: Path) -> None:
    """Peak bytes of a save and of a load, as parts of parameters and momentum."""
    params = {"layers": [{"w": torch.full((UNIT,), float(i))} for i in range(UNITS)]}
    rule, model = fzero.optim.sgd(0.5, momentum=0.5), UNITS * UNIT * 4
    state = fzero.init(params, rule, stage=3)
    del params
    live = LiveBytes()
    with live, live.at_most(2 * model / size + 4.1 * model / UNITS, "save"):
        save_universal(folder, state)
    with live, live.at_most(4 * model / size + 2.1 * model / UNITS, "load"):
        load_universal(folder, state)


@pytest.mark.xdist_group("gloo")
def test_no_rank_holds_more_than_its_part_and_a_unit(tmp_path: Path) -> None:
    run_ranks(_part_and_a_unit, 4, tmp_path)


def _groups(module: nn.Module, lr: float, **options: Any) -> torch.optim.AdamW:
    first, *rest = module.parameters()
    return torch.optim.AdamW([{"params": [first]}, {"params": rest}], lr=lr, **options)


@pytest.mark.parametrize("by_engine", [True, False])
def test_options_of_param_groups_come_back(by_engine: bool, tmp_path: Path) -> None:
    def made(lr: float, **options: Any) -> tuple[Any, torch.optim.AdamW]:
        module = nn.Linear(3, 2)
        optimizer = _groups(module, lr, **options)
        if by_engine:
            return Engine(module, optimizer, stage=2), optimizer
        _, params = fzero.functionalize(module)
        return fzero.init(params, fzero.optim.from_torch(optimizer), stage=2), optimizer

    source, optimizer = made(0.5)
    optimizer.param_groups[1]["lr"], optimizer.param_groups[0]["betas"] = 0.125, (0.5, 0.75)
    save_universal(tmp_path, source)
    into, other = made(7.0, foreach=False)
    load_universal(tmp_path, into)
    assert [group["lr"] for group in other.param_groups] == [0.5, 0.125]
    assert other.param_groups[0]["betas"] == (0.5, 0.75)
    assert other.param_groups[0]["foreach"] is False  # how it computes is its own
    load_universal(tmp_path, made(7.0)[0], optimizer=False)
    one = torch.optim.AdamW(nn.Linear(3, 2).parameters())
    _, params = fzero.functionalize(nn.Linear(3, 2))
    with pytest.raises(LayoutError, match="in one param group here, and in two of the checkpoint"):
        load_universal(tmp_path, fzero.init(params, fzero.optim.from_torch(type(one)), stage=0))
    into, other = made(7.0, maximize=True)
    with pytest.raises(CheckpointError, match=r"maximize=False in .*, maximize=True here"):
        load_universal(tmp_path, into)
    assert [group["lr"] for group in other.param_groups] == [7.0, 7.0]


def test_options_of_a_rule_are_compared(tmp_path: Path) -> None:
    params = {"w": torch.ones(2), "b": torch.ones(3)}
    groups = [(lambda leaf: leaf.path == "b", {"lr": 0.5})]

    def state(lr: Any) -> Any:
        return fzero.init(params, fzero.optim.adamw(lr, groups=groups), stage=1)

    save_universal(tmp_path, state(lambda step: 0.25 * (step + 1)))
    load_universal(tmp_path, state(0.25))
    with pytest.warns(UserWarning, match=r"lr=0.25 in param group 0, 0.75 here"):
        load_universal(tmp_path, state(0.75))


def test_only_values_are_taken_without_the_optimizer(tmp_path: Path) -> None:
    params = {"w": torch.full((3,), 1 + 2.0**-9), "low": torch.ones(5).bfloat16()}
    save_universal(tmp_path, train(make(params, stage=2, ranks=0, optimizer=ADAM), 2))
    (tmp_path / "global_step2_universal" / "zero" / "optimizer_state.pt").unlink()
    momentum = fzero.optim.sgd(0.5, momentum=0.5)
    state = train(make(blank(params), stage=3, ranks=0, optimizer=momentum), 1)
    loaded = load_universal(tmp_path, state, optimizer=False)
    found, before, saved = contents(loaded), contents(state), tmp_path / "global_step2_universal"
    assert int(loaded.step) == 1
    assert int(found["count"]) == 1
    for name in ("w", "low"):
        assert torch.equal(slot_of(found, 0, name), slot_of(before, 0, name))
    for name, value in (("w", whole(loaded)["w"]), ("low", slot_of(found, 1, "low"))):
        fp32 = torch.load(saved / "zero" / name / "fp32.pt", weights_only=True)
        assert torch.equal(value, fp32["param"])
