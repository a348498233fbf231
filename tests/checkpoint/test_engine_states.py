"""`engine.state` is a train state: it is read, saved, loaded and gone on with as any other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import fzero
from fzero.adapter import Engine
from fzero.checkpoint import load, load_universal, save, save_universal
from fzero.errors import DonatedError
from fzero.state import TrainState
from tests import oracle
from tests.checkpoint.trainings import (
    MOVES,
    ROWS,
    RULES,
    STYLES,
    Trainer,
    curved,
    make,
    rows_of,
    total,
)
from tests.covering import covered
from tests.ranks import run_ranks
from tests.strategies import integers, same


def unsharded(*updates: int) -> dict[str, Tensor]:
    """torch.optim.SGD on all rows of each update."""
    module = make(seed=1)
    params = dict(module.named_parameters())
    rows = [[integers((ROWS, 3), number, torch.float32)] for number in updates]
    found = oracle.train(
        lambda p, x: functional_call(module, p, x).sum(), params, rows, RULES["sgd"][0]
    )
    return found | {"step": torch.tensor(len(updates))}


def save_here(rank: int, size: int, folder: Path, saving: Callable[..., None]) -> None:
    for number, (source, _) in enumerate(MOVES):
        if source.ranks == size:
            trainer = Trainer(source.style, source.stage, "sgd", seed=1, loss=total)
            trainer.train(0, 1)
            saving(folder / f"{number}", (number % 2 and trainer.engine) or trainer.state)
            trainer.end()


def go_on_here(
    rank: int, size: int, folder: Path, loading: Callable[..., Any]
) -> dict[int, dict[str, Tensor]]:
    found = {}
    for number, (_, target) in enumerate(MOVES):
        if target.ranks == size:
            trainer = Trainer(target.style, target.stage, "sgd", seed=2, loss=total)
            if number % 2 and trainer.engine is not None:
                assert loading(folder / f"{number}", trainer.engine) is trainer.engine
            else:
                trainer.load(folder / f"{number}", loading)
            trainer.train(2, 3)
            found[number] = trainer.end()
    return found


@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize(
    ("saving", "loading"),
    [(save, load), (save_universal, load_universal)],
    ids=["own", "universal"],
)
def test_a_training_goes_on_at_another_place_by_another_driver(
    saving: Any, loading: Any, tmp_path: Path
) -> None:
    for ranks in (1, 2, 3):
        run_ranks(save_here, ranks, tmp_path, saving)
    wanted = unsharded(0, 1, 2, 3)
    for ranks in (1, 2, 3):
        for found in run_ranks(go_on_here, ranks, tmp_path, loading):
            assert found
            for params in found.values():
                same(params, wanted)


def go_on_with_each(rank: int, size: int, folder: Path) -> None:
    for stage in range(4):
        whole = Trainer("engine", stage, "adamw", seed=1, loss=curved)
        whole.train(0, 1, 2, 3)
        wanted = whole.end()
        for source in STYLES:
            first = Trainer(source, stage, "adamw", seed=1, loss=curved)
            first.train(0, 1)
            save(folder / f"{stage} {source}", first.state)
            first.end()
        for source, target in zip(STYLES, (*STYLES[2:], *STYLES[:2]), strict=True):
            second = Trainer(target, stage, "adamw", seed=2, loss=curved)
            second.load(folder / f"{stage} {source}")
            second.train(2, 3)
            same(second.end(), wanted)


@pytest.mark.xdist_group("gloo")
def test_a_training_that_changes_driver_and_optimizer_has_the_bits_of_one_that_does_not(
    tmp_path: Path,
) -> None:
    run_ranks(go_on_with_each, 2, tmp_path)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_reads_a_state_reads_that_of_an_engine(stage: int) -> None:
    """Before the update, with gradients: the answers are those of a functional step's state."""

    def each(x: Tensor) -> Tensor:
        by_engine = Trainer("engine", stage, "adamw", seed=1, loss=curved)
        by_steps = Trainer("steps with torch", stage, "adamw", seed=1, loss=curved)
        assert by_engine.engine is not None
        curved(by_engine.engine(rows_of(0))).backward()
        loss = fzero.grad_and_reduce(lambda p, x: curved(by_steps.apply(p, x)), by_steps.state)
        mine, theirs = by_engine.state, loss(rows_of(0))[0]
        assert torch.equal(fzero.global_norm(mine), fzero.global_norm(theirs))
        assert fzero.state_bytes(mine) == fzero.state_bytes(theirs)
        for read in (fzero.full_params, fzero.full_gradients):
            found, wanted = read(mine), read(theirs)
            found.pop("tied.weight")
            assert found.keys() == wanted.keys()
            for path, value in wanted.items():
                if value is not None:  # a frozen one has no gradient
                    assert torch.equal(found[path], value), path
        shown = [fzero.plot.partition_map(state) for state in (mine, theirs)]
        assert repr(shown[0]) == repr(shown[1])
        by_engine.end()
        return x

    fzero.simulate(each, world_size=2)(torch.zeros(2, 1))


READS: dict[str, Callable[[TrainState, Path], Any]] = {
    "full_params": lambda state, path: fzero.full_params(state),
    "full_gradients": lambda state, path: fzero.full_gradients(state),
    "global_norm": lambda state, path: fzero.global_norm(state),
    "apply_gradients": lambda state, path: fzero.apply_gradients(state),
    "save": lambda state, path: save(path, state),
    "load": lambda state, path: load(path, state),
}


@covered(stage=[0, 3], read=[*READS])
def test_a_state_from_before_a_step_of_the_engine_is_used_up(
    read: str, stage: int, tmp_path: Path
) -> None:
    trainer = Trainer("engine", stage, "sgd", seed=1, loss=curved)
    save(tmp_path, trainer.state)
    assert trainer.engine is not None
    curved(trainer.engine(rows_of(0))).backward()
    before = trainer.state
    trainer.engine.step()
    with pytest.raises(DonatedError, match=r"engine\.step\(\)"):
        READS[read](before, tmp_path)
    fzero.full_params(trainer.state)


def two_groups(module: nn.Sequential) -> torch.optim.Optimizer:
    """Param groups with other options; nothing in the second one learns."""
    module[1].requires_grad_(False)
    groups = [{"params": list(module[i].parameters()), "lr": 0.1 * (i + 1)} for i in (0, 1, 2)]
    return torch.optim.AdamW(groups, weight_decay=0.0)


def test_counters_of_param_groups_are_one_step_for_any_other_groups(tmp_path: Path) -> None:
    """A group of frozen parameters, which never counts, is in nobody's way."""
    module = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    engine = Engine(module, two_groups(module), stage=2)
    for _ in range(2):
        engine(torch.ones(1, 2)).sum().backward()
        engine.step()
    save(tmp_path, engine.state)
    apply, params = fzero.functionalize(module)
    groups = [(lambda leaf: leaf.path.startswith("2"), {"lr": 0.3})]
    rule = fzero.optim.adamw(0.1, weight_decay=0.0, groups=groups)
    state = load(tmp_path, fzero.init(params, rule, stage=0))
    assert int(state.optimizer.count) == 2
    state, _ = fzero.grad_and_reduce(lambda p: apply(p, torch.ones(1, 2)).sum(), state)()
    after = fzero.full_params(fzero.apply_gradients(state))
    engine(torch.ones(1, 2)).sum().backward()
    engine.step()
    for path, value in engine.full_parameters().items():
        assert torch.equal(after[path], value), path
    engine.close()


def test_a_step_of_one_parameter_is_kept_by_torch_and_by_a_rule(tmp_path: Path) -> None:
    """Adam's correction of its bias was set by hand, by who went on from another library."""
    trainer = Trainer("engine", 0, "adamw", seed=1, loss=curved)
    trainer.train(0)
    assert trainer.engine is not None
    trainer.engine.set_full_optimizer_state("first.bias", "step", 1000)
    save(tmp_path, trainer.state)
    for driver in ("steps with torch", "steps"):
        again = Trainer(driver, 3, "adamw", seed=2, loss=curved)
        again.load(tmp_path)
        state = again.state
        paths = [leaf.path for leaf in state.setup.layout.leaves if leaf.trainable]
        steps = state.setup.optimizer.counted(state.optimizer, paths)["step"]
        others = dict.fromkeys(paths, 1) | {"first.bias": 1000}
        assert {path: int(step) for path, step in steps.items()} == others


def test_an_engine_without_optimizer_is_saved_and_loaded_and_not_stepped(tmp_path: Path) -> None:
    engines = [Engine(make(seed), None, stage=stage) for seed, stage in ((1, 0), (2, 3))]
    save(tmp_path, engines[0].state)
    engines[1].state = load(tmp_path, engines[1].state)
    same(engines[1].full_parameters(), engines[0].full_parameters())
    curved(engines[0](rows_of(0))).backward()
    with pytest.raises(fzero.errors.PhaseError, match="without optimizer"):
        fzero.apply_gradients(engines[0].state)
