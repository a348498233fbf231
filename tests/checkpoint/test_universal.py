"""DeepSpeed's universal layout: out and in at any place; in from folders as DeepSpeed has them."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
from fzero.adapter import Engine
from fzero.checkpoint import CheckpointError, load_universal, save_universal
from fzero.errors import LayoutError, PhaseError
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
from tests.checkpoint.test_engine_states import unsharded
from tests.checkpoint.test_interrupted import FSYNC, REPLACE, TORCH_SAVE, Target, failing
from tests.checkpoint.trainings import Place, Trainer, total
from tests.checkpoint.universal_folders import (
    DynamicLossScaler,
    adam,
    as_stage_2,
    as_stage_3,
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
RULE = fzero.optim.adamw(0.25, betas=(0.5, 0.75), weight_decay=0.125)  # as GROUPS


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
            assert torch.equal(read[key]["param"], _slot(found, slot, name))
        assert all(one["param"].dtype is torch.float32 for one in read.values())
    fp32 = torch.load(root / "zero" / "low" / "fp32.pt", weights_only=True)["param"]
    assert torch.equal(fp32, _slot(found, 2, "low"))
    assert not torch.equal(fp32, fp32.bfloat16().float())
    shared = torch.load(root / "zero" / "optimizer_state.pt", weights_only=True)
    (group,) = shared["param_groups"]
    assert group["lr"] == 0.3 and group["betas"] == (0.5, 0.75) and group["params"] == [0, 1]
    assert group["decoupled_weight_decay"] is True
    assert torch.equal(shared["optimizer_state_dict"]["state"][0]["step"], torch.tensor(1.0))
    for file in ("mp_rank_00", "zero_pp_rank_0_mp_rank_00"):
        states = torch.load(root / f"{file}_model_states.pt", weights_only=True)
        assert states["global_steps"] == 1 and states["mp_world_size"] == 1


def _slot(found: dict[str, Tensor], slot: int, name: str) -> Tensor:
    """One of `contents`, whatever the number of its leaf is: moments first, then masters."""
    (value,) = (x for key, x in found.items() if key.startswith(f"{slot} {name} "))
    return value


def _whole(state: Any) -> dict[str, Tensor]:
    """Full parameters by name, those of virtual rank 0."""
    found = on_ranks(fzero.full_params, state)
    return {name: x[0] for name, x in found.items()} if state.step.ndim else found


MOVES = (
    (Place(3, 3, "engine"), Place(2, 1, "steps")),
    (Place(3, 3, "steps with torch"), Place(2, 1, "engine")),
    (Place(2, 2, "engine with a rule"), Place(3, 3, "steps")),
    (Place(1, 0, "steps"), Place(3, 2, "engine with a rule")),
    (Place(2, 1, "engine"), Place(1, 3, "steps with torch")),
)


def _save_here(rank: int, size: int, folder: Path) -> None:
    for number, (source, _) in enumerate(MOVES):
        if source.ranks == size:
            trainer = Trainer(source.style, source.stage, "sgd", seed=1, loss=total)
            trainer.train(0, 1)
            thing = trainer.engine if number % 2 and trainer.engine else trainer.state
            save_universal(folder / f"{number}", thing)
            trainer.end()


def _go_on_here(rank: int, size: int, folder: Path) -> dict[int, dict[str, Tensor]]:
    found = {}
    for number, (_, target) in enumerate(MOVES):
        if target.ranks == size:
            trainer = Trainer(target.style, target.stage, "sgd", seed=2, loss=total)
            if trainer.engine is None:
                trainer._state = load_universal(folder / f"{number}", trainer._state)
            else:
                assert load_universal(folder / f"{number}", trainer.engine) is trainer.engine
            trainer.train(2, 3)
            found[number] = trainer.end()
    return found


@pytest.mark.xdist_group("gloo")
def test_a_training_goes_on_at_another_place_by_another_driver(tmp_path: Path) -> None:
    for ranks in (1, 2, 3):
        run_ranks(_save_here, ranks, tmp_path)
    wanted = unsharded(0, 1, 2, 3)
    for ranks in (1, 2, 3):
        for found in run_ranks(_go_on_here, ranks, tmp_path):
            assert found
            for params in found.values():
                same(params, wanted)


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
    with pytest.raises(CheckpointError, match="has 2 param groups, the optimizer here has 1"):
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
    momentum = fzero.optim.sgd(0.5, momentum=0.5)
    state = train(make(blank(params), stage=3, ranks=0, optimizer=momentum), 1)
    loaded = load_universal(tmp_path, state, optimizer=False)
    found, before, saved = contents(loaded), contents(state), tmp_path / "global_step2_universal"
    assert int(loaded.step) == 1
    assert int(found["count"]) == 1
    for name in ("w", "low"):
        assert torch.equal(_slot(found, 0, name), _slot(before, 0, name))
    for name, value in (("w", _whole(loaded)["w"]), ("low", _slot(found, 1, "low"))):
        fp32 = torch.load(saved / "zero" / name / "fp32.pt", weights_only=True)
        assert torch.equal(value, fp32["param"])


# Folders as DeepSpeed leaves them.

W, B = torch.arange(15.0).reshape(5, 3) + 2.0**-12, torch.arange(5.0)


def _adam_state(stage: int, *, low: bool = False, ranks: int = 3) -> Any:
    weight = W.bfloat16() if low else W
    params = {"w": torch.zeros_like(weight), "b": torch.zeros(5)}
    return make(params, stage=stage, ranks=ranks, optimizer=RULE)


@pytest.mark.parametrize("form", [as_stage_2, as_stage_3])
@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_folder_of_deepspeed_is_read(form: Any, low: bool, stage: int, tmp_path: Path) -> None:
    assert "deepspeed" not in sys.modules
    parts = adam(w=W, b=B)
    form(tmp_path, parts)
    loaded = load_universal(tmp_path, _adam_state(stage, low=low))
    found = first_rank(loaded)
    same(_whole(loaded), {"w": W.bfloat16() if low else W, "b": B})
    for name in ("w", "b"):
        for slot, key in enumerate(("exp_avg", "exp_avg_sq")):
            assert torch.equal(_slot(found, slot, name), parts[name][key])
    if low:
        assert torch.equal(_slot(found, 2, "w"), W)  # the master has all bits
    assert int(found["step"]) == int(found["count"]) == 2


def test_frozen_parameters_are_put_together_of_stage_3(tmp_path: Path) -> None:
    as_stage_3(tmp_path, adam(w=W), frozen={"b": B}, ranks=3)
    params = {"w": torch.zeros(5, 3), "b": nn.Parameter(torch.zeros(5), requires_grad=False)}
    loaded = load_universal(tmp_path, make(params, stage=3, ranks=2, optimizer=RULE))
    assert torch.equal(_whole(loaded)["b"], B)


def test_steps_may_be_numbers_or_not_be_counted(tmp_path: Path) -> None:
    only = {"w": {"fp32": W, "momentum_buffer": W + 1}}
    options = [{"lr": 0.5, "momentum": 0.5, "params": [0]}]
    momentum = functools.partial(torch.optim.SGD, lr=7.0, momentum=0.25)
    for step in (2, 2.0, torch.tensor([2]), {"param": torch.tensor(2.0)}, None):
        as_stage_2(tmp_path, only, step=step, groups=options)
        rule = fzero.optim.from_torch(momentum)
        state = load_universal(tmp_path, fzero.init({"w": torch.zeros(5, 3)}, rule, stage=1))
        assert int(state.step) == 2  # of 3 updates one was skipped
        assert torch.equal(_slot(contents(state), 0, "w"), W + 1)
        instance: Any = state.setup.optimizer
        assert instance.instance.param_groups[0]["momentum"] == 0.5


def test_a_loss_scale_goes_on(tmp_path: Path) -> None:
    as_stage_2(tmp_path, adam(w=W), scaler=DynamicLossScaler(512.0))
    module = nn.Linear(3, 5, bias=False)
    names = torch.optim.AdamW([module.weight], lr=0.5)
    engine = Engine(nn.ParameterDict({"w": module.weight}), names, stage=1, loss_scale="dynamic")
    load_universal(tmp_path, engine)
    scale = engine.state.scale
    assert scale is not None and scale.scale.item() == 512.0
    save_universal(tmp_path, engine)
    load_universal(tmp_path, engine)
    assert engine.state.scale is not None and engine.state.scale.scale.item() == 512.0


def test_buffers_of_an_engine_come_back(tmp_path: Path) -> None:
    def engine() -> Engine:
        module = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
        return Engine(module, torch.optim.AdamW, stage=3)

    one, two = engine(), engine()
    one(torch.randn(4, 3))
    save_universal(tmp_path, one)
    load_universal(tmp_path, two)
    same(dict(two.module.named_buffers()), dict(one.module.named_buffers()))
    assert int(two.module[1].num_batches_tracked) == 1  # type: ignore


def test_a_padded_vocabulary_grows_by_zeros(tmp_path: Path) -> None:
    root = as_stage_2(tmp_path, adam(w=W))
    for file in (root / "zero" / "w").glob("[ef]*.pt"):
        value = torch.load(file, weights_only=True)
        torch.save({**value, "vocab_tensor": True}, file)
    state = fzero.init({"w": torch.ones(8, 3)}, RULE, stage=0)
    loaded = load_universal(tmp_path, state)
    moments = (_slot(contents(loaded), slot, "w") for slot in (0, 1))
    for found, wanted in zip(
        (_whole(loaded)["w"], *moments), (W, W + 0.5, W.abs() + 2), strict=True
    ):
        assert torch.equal(found, torch.cat([wanted, torch.zeros(3, 3)]))
    with pytest.raises(CheckpointError, match=r"a parameter of \(5, 3\), which is \(4, 3\) in the"):
        load_universal(tmp_path, fzero.init({"w": torch.ones(4, 3)}, RULE, stage=0))


# Saves that fail.


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
    assert not list(tmp_path.glob(".universal*/zero"))
    into = make(blank(mixed()), stage=0)
    same(contents(load_universal(tmp_path, into)), contents(old))
    save_universal(tmp_path, new)
    same(contents(load_universal(tmp_path, into)), contents(new))


KILLED = """
import os, signal, sys, torch, fzero
from fzero.checkpoint import load_universal, save_universal
torch.set_num_threads(1)
def state(value):
    return fzero.init({"w": torch.full((9,), value)}, fzero.optim.sgd(1.0), stage=0)
def dying(real):
    def call(*args, **kwargs):
        global left
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
        return real(*args, **kwargs)
    return call
save_universal(sys.argv[1], state(0.0))
killed = 0
while True:  # at each time that something reaches the disk
    child = os.fork()
    if not child:
        left = killed
        os.fsync, os.rename, os.replace = map(dying, (os.fsync, os.rename, os.replace))
        save_universal(sys.argv[1], state(1.0))
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    value = set(load_universal(sys.argv[1], state(2.0)).params.flats[0][:9].tolist())
    assert value == ({1.0} if not status else {0.0}) or killed > 8, (killed, value)
    assert value in ({0.0}, {1.0})
    if not status:
        print(killed)
        break
    killed += 1
"""


def test_a_process_that_is_killed_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    ended = subprocess.run(command, timeout=100, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) > 8


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
    with pytest.raises(LayoutError, match="the path is empty"):
        save_universal("", state)


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
