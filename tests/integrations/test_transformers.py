"""Trainers of three libraries, as the examples make them: on ranks as in one process."""

from __future__ import annotations

import doctest
import functools
import importlib
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import fzero
from fzero.errors import LayoutError
from tests.adapter.on_ranks import on_ranks
from tests.integrations.launched import launched
from tests.ranks import spawn_script

for name in ("accelerate", "datasets", "lightning_fabric", "sentence_transformers", "trl"):
    pytest.importorskip(name, exc_type=ImportError)

EXAMPLES = Path(__file__).parents[2] / "examples"
STAGES = (0, 2, 3)


@contextmanager
def example(name: str) -> Iterator[Any]:
    """An example as a module. What the libraries warn of is theirs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sys.path.insert(0, str(EXAMPLES))
        try:
            module: Any = importlib.import_module(name)
            module.read_pairs = functools.lru_cache(module.read_pairs)
            datasets: Any = importlib.import_module("datasets")
            datasets.disable_progress_bars()
            importlib.import_module("transformers.utils.logging").disable_progress_bar()
            yield module
        finally:
            sys.path.remove(str(EXAMPLES))


def trained(trainer: Any, resume: Path | None = None) -> list[tuple[float, ...]]:
    """Train in float64; return (loss, norm, learning rate) of each step."""
    trainer.model.double()
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    names = ("loss", "grad_norm", "learning_rate")
    return [tuple(e[n] for n in names) for e in trainer.state.log_history if "loss" in e]


def close(found: Any, wanted: Any, tol: float = 1e-6) -> None:
    """The trainers add losses up in float32."""
    mine, theirs = torch.tensor(found).double(), torch.tensor(wanted).double()
    torch.testing.assert_close(mine, theirs, rtol=tol, atol=tol)


def check_trainer(
    rank: int,
    world_size: int,
    tmp_path: Path,
    make: Any,
    batch: int,
    tol: float,
    stages: tuple[int, ...] = STAGES,
    **own: Any,
) -> None:
    """Losses, norms, rates; resumed at another stage; saved whole; evaluated."""
    short: Any = {"use_cpu": True, "max_steps": 4, "save_steps": 2}
    with launched(0, 1):
        alone = make(None, tmp_path / f"alone-{rank}", per_device_train_batch_size=batch, **own,
                     **short)  # fmt: skip
        wanted = trained(alone)
        values = {name: x.clone() for name, x in alone.model.state_dict().items()}
    for stage, other in zip(stages, (*stages[1:], (stages[0] + 1) % 4), strict=True):
        folder = tmp_path / str(stage)
        with launched(rank, world_size):
            trainer = make(stage, folder, **short)
            with fzero.count_collectives() as log:
                close(trained(trainer), wanted)
            sent = sum(e.numel for e in log.of() if e.op in ("all_reduce", "reduce_scatter"))
            count = sum(p.numel() for p in trainer.model.parameters())
            assert 4 <= sent / count < 4.01  # 4 updates: one reduction each, padding, norms
            (engine,) = trainer.accelerator.engines
            assert engine.stage == stage
            found = engine.full_state_dict()
            assert all(torch.allclose(found[name], x, rtol=tol, atol=tol)
                       for name, x in values.items())  # fmt: skip
            engine.close()
        with launched(rank, world_size):
            trainer = make(other, folder, **short)
            close(trained(trainer, folder / "checkpoint-2"), wanted)
            trainer.save_model(str(folder / "saved"))
            trainer.accelerator.wait_for_everyone()
            trainer.accelerator.engines[0].close()
            check_saved(trainer.model, folder / "saved")


def check_saved(model: Any, folder: Path) -> None:
    """What rank 0 has saved is loaded by its own library."""
    loads = type(model).from_pretrained if hasattr(model, "from_pretrained") else type(model)
    loaded = loads(str(folder))
    here = dict(model.named_parameters())
    for name, p in loaded.named_parameters():
        torch.testing.assert_close(p.double(), here[name].double(), rtol=1e-6, atol=1e-6)


@on_ranks(2, timeout_s=200)
def test_the_trainer_gives_the_losses_of_one_process_and_resumes_at_other_stages(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    with example("hf_trainer") as module:
        make = functools.partial(module.make_trainer, "hf")
        check_trainer(rank, world_size, tmp_path, make, 16, 1e-9)


@on_ranks(2, timeout_s=200)
@pytest.mark.slow
@pytest.mark.parametrize("stages", [(3,), (0, 2)])
def test_so_does_the_trainer_of_trl(
    rank: int, world_size: int, tmp_path: Path, stages: tuple[int, ...]
) -> None:
    with example("hf_trainer") as module:  # its head computes in float32
        make = functools.partial(module.make_trainer, "sft")
        check_trainer(rank, world_size, tmp_path, make, 16, 1e-5, stages)


@on_ranks(2, timeout_s=200)
@pytest.mark.parametrize("stages", [(2,), pytest.param((0, 3), marks=pytest.mark.slow)])
def test_so_does_that_of_sentence_transformers_with_a_cached_loss(
    rank: int, world_size: int, tmp_path: Path, stages: tuple[int, ...]
) -> None:
    with example("st_trainer") as module:
        make, batch = module.make_trainer, module.BATCH
        check_trainer(rank, world_size, tmp_path, make, batch, 1e-9, stages, gather=False)


@pytest.mark.slow
@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("script", "args", "claim"),
    [
        ("hf_trainer.py", ("--stage", "3"), "when resumed; generated"),
        ("hf_trainer.py", ("--stage", "2", "--trainer", "sft"), "when resumed; generated"),
        ("st_trainer.py", ("--stage", "3"), "gradients cross"),
    ],
)
def test_an_example_does_what_it_says(
    script: str, args: tuple[str, ...], claim: str, ranks: int, tmp_path: Path
) -> None:
    done = spawn_script(f"examples/{script}", ranks, (*args, "--folder", str(tmp_path)), 280)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert f"{ranks} rank(s)" in done.stdout and claim in done.stdout
    if script == "st_trainer.py" and ranks == 2:
        assert "gradients cross 1.00 x a step" in done.stdout


@on_ranks(2, timeout_s=200)
def test_only_a_class_of_trainers_is_sharded(rank: int) -> None:
    from fzero.integrations.transformers import sharded

    with pytest.raises(LayoutError, match="in the place of its class"):
        sharded(torch.nn.Linear, stage=2)


@on_ranks(2, timeout_s=200)
def test_what_the_docstrings_show(rank: int, world_size: int) -> None:
    from fzero.integrations import accelerate, fabric, transformers

    with launched(rank, world_size):
        for module in (accelerate, fabric, transformers):
            found = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
            assert found.attempted and not found.failed, module
