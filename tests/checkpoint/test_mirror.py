"""`Mirror` in one process: what comes back, what is refused, what a failure leaves."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fzero
from fzero.adapter import Engine
from fzero.checkpoint import CheckpointError, Mirror
from fzero.checkpoint import mirror as module
from fzero.errors import LayoutError
from tests.checkpoint.forge import full_disk
from tests.checkpoint.states import blank, contents, first_rank, make, mixed, snapshot, train
from tests.strategies import same


def copies(folder: Path) -> list[Path]:
    """The folders of copies, of all hosts in a folder of a mirror."""
    return sorted(path for path in folder.glob("*/*-update-*") if path.name[0] != "w")


def mirror_of(folder: Path, **options: Any) -> Mirror:
    return Mirror(folder, **{"every": 1, **options})


@pytest.mark.parametrize(("ranks", "stage"), [(0, 0), (0, 3), (3, 2), (4, 3)])
def test_a_state_comes_back_at_another_stage(ranks: int, stage: int, tmp_path: Path) -> None:
    step = fzero.simulate(train, world_size=ranks) if ranks else train
    state = step(make(mixed(), stage=stage, ranks=ranks), steps=2)
    mirror = mirror_of(tmp_path)
    mirror.update(state, extra={"next": [2]})
    drawn = torch.rand(4)
    wanted = first_rank(state)
    again, extra = mirror_of(tmp_path).restore(make(blank(mixed()), stage=3 - stage))
    same(contents(again), wanted)
    assert extra == {"next": [2]}
    assert torch.equal(torch.rand(4), drawn), "random generators are those of the copy"


def test_a_state_without_copies_comes_back_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, mirror = make(mixed(), stage=2), mirror_of(tmp_path)
    assert mirror.restore(state) == (state, {})
    assert "update 0 is whole" in repr(mirror)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with pytest.warns(UserWarning, match="there are no copies in .*: training begins anew"):
        assert mirror.restore(state) == (state, {})


def test_an_extra_that_grows_has_room(tmp_path: Path) -> None:
    state, mirror = make(mixed(), stage=0), mirror_of(tmp_path)
    for size in (1, 2, 2**18, 2**19, 2**18, 3):
        mirror.update(state, extra={"x": "a" * size})
        assert len(mirror_of_next(tmp_path, mirror).restore(state)[1]["x"]) == size


def mirror_of_next(folder: Path, mirror: Mirror) -> Mirror:
    """A mirror that looks at the copies and lets the first one go on."""
    mirror._flight.handle.result()
    copied = folder.parent / "copied"
    shutil.rmtree(copied, ignore_errors=True)
    shutil.copytree(folder, copied)
    return mirror_of(copied)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(3, 5), nn.BatchNorm1d(5)
        self.scale = nn.Parameter(torch.ones(()))
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * self.norm(self.inner(x))


def engine_of(seed: int, stage: int) -> Engine:
    torch.manual_seed(seed)
    net = Net()
    return Engine(net, torch.optim.AdamW(net.parameters(), lr=0.1 * (1 + seed)), stage=stage)


def test_an_engine_comes_back_with_its_buffers_and_options(tmp_path: Path) -> None:
    engine, mirror = engine_of(0, 3), mirror_of(tmp_path, every=2)
    for number in range(3):
        engine(torch.randn(4, 3)).square().sum().backward()
        engine.step()
        mirror.update(engine, extra={"next": number + 1})
        if number == 1:
            wanted = {name: x.clone() for name, x in engine.full_state_dict().items()}
    other = engine_of(1, 0)
    again, extra = mirror_of(tmp_path).restore(other)
    assert again is other and extra == {"next": 2}
    same({**again.full_state_dict()}, wanted)
    assert again.optimizer is not None and again.optimizer.param_groups[0]["lr"] == 0.1


def test_only_each_k_th_update_is_copied_and_two_are_kept(tmp_path: Path) -> None:
    state, mirror = make(mixed(), stage=0), mirror_of(tmp_path, every=3)
    seen = []
    for _ in range(12):
        state = train(state, 1)
        mirror.update(state)
        if mirror._flight is not None:
            mirror._flight.handle.result()
        seen.append([int(file.name.split("-")[2]) for file in copies(tmp_path)])
    assert seen[1] == [] and seen[2] == seen[4] == [3] and seen[5] == [3, 6]
    assert seen[-1] == [9, 12]


def test_an_update_that_is_not_due_takes_no_look_at_the_state(tmp_path: Path) -> None:
    mirror = mirror_of(tmp_path, every=2)
    mirror.update(make(mixed(), stage=0))
    mirror.update(make(mixed(), stage=0))
    mirror.update(None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(LayoutError, match=r"Mirror.update: expected a TrainState or an Engine"):
        mirror.update(None)  # pyright: ignore[reportArgumentType]


def test_steps_that_overwrite_the_state_change_no_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, mirror = make(mixed(), stage=0), mirror_of(tmp_path)
    wanted = snapshot(contents(state))
    real = module.write_draft

    def late(*args: Any) -> None:
        for flat in state.params.flats:
            flat.zero_()  # as a donating step does beside it
        real(*args)

    monkeypatch.setattr(module, "write_draft", late)
    mirror.update(state)
    same(contents(mirror.restore(make(blank(mixed()), stage=0))[0]), wanted)


def test_a_failure_beside_the_steps_is_raised_once_and_costs_no_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, mirror = make(mixed(seed=1), stage=2), mirror_of(tmp_path)
    mirror.update(first, extra={"next": 1})
    mirror._flight.handle.result()
    real = module.write_draft
    monkeypatch.setattr(module, "write_draft", full_disk)
    mirror.update(make(mixed(seed=2), stage=2), extra={"next": 2})
    with pytest.raises(CheckpointError, match="disk is full"):
        mirror.update(make(mixed(seed=3), stage=2), extra={"next": 3})
    monkeypatch.setattr(module, "write_draft", real)
    found, extra = mirror_of(tmp_path).restore(make(blank(mixed()), stage=0))
    assert extra == {"next": 1}
    same(contents(found), contents(first))


def spoil(copy: Path, name: str = "*.distcp", at: int = 70, bit: int = 1) -> None:
    """Flip a bit of a file of a copy: by default of a value."""
    (file,) = copy.rglob(name)
    data = bytearray(file.read_bytes())
    data[at] ^= bit
    file.write_bytes(bytes(data))


def test_a_damaged_copy_is_passed_over_for_the_update_before(tmp_path: Path) -> None:
    first, mirror = make(mixed(seed=1), stage=1), mirror_of(tmp_path)
    mirror.update(first, extra={"next": 1})
    mirror.update(make(mixed(seed=2), stage=1), extra={"next": 2})
    mirror._flight.handle.result()
    old, new = copies(tmp_path)
    spoil(new)
    like = make(blank(mixed()), stage=0)
    found, extra = mirror_of(tmp_path).restore(like)
    assert extra == {"next": 1}
    same(contents(found), contents(first))
    assert copies(tmp_path) == [old], "what is of no use is removed"
    spoil(old)
    with pytest.raises(CheckpointError, match=r"(?s)no update is whole in .*checksum is wrong"):
        mirror_of(tmp_path).restore(like)


def test_a_run_that_ends_well_removes_its_copies(tmp_path: Path) -> None:
    state, folder = make(mixed(), stage=0), tmp_path / "copies"
    with pytest.raises(KeyError), Mirror(folder, every=1) as mirror:
        mirror.update(state)
        mirror._flight.handle.result()
        raise KeyError
    assert len(copies(folder)) == 1, "a restart finds it"
    with Mirror(folder, every=1) as mirror:
        mirror.restore(state)
        mirror.update(state)
    assert not folder.exists()
    mirror = Mirror(folder, every=1)
    mirror.update(state)
    mirror._flight.handle.result()
    mirror._ends()  # at the end of the process, which has waited for its threads
    assert not folder.exists()
    mirror.close()


def test_an_end_with_an_error_keeps_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mirror = mirror_of(tmp_path)
    mirror.update(make(mixed(), stage=0))
    mirror._flight.handle.result()
    monkeypatch.setattr("sys.last_value", KeyError(), raising=False)
    mirror._ends()
    assert len(copies(tmp_path)) == 1


def test_the_memory_is_that_of_the_plan(tmp_path: Path) -> None:
    model = nn.Linear(100, 100)
    batch = torch.ones(2, 100)
    plan = fzero.plan(model, batch, stage=0, world=1)
    assert plan.mirror_bytes(0) == 2 * 12 * 10_100 == plan.mirror_bytes() // 2
    assert "A Mirror with copies=1 takes" in repr(plan)
    _, params = fzero.functionalize(model)
    mirror, state = mirror_of(tmp_path), fzero.init(params, fzero.optim.adamw(3e-4), stage=0)
    for _ in range(3):
        mirror.update(state)
    mirror._flight.handle.result()
    held = sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())
    assert plan.mirror_bytes(0) < held < plan.mirror_bytes(0) + 2 * 2**18
