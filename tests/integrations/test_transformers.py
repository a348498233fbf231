"""Trainers of three libraries, as the examples make them: on ranks as in one process."""

from __future__ import annotations

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

for name in ("accelerate", "datasets", "sentence_transformers", "transformers", "trl"):
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
    rank: int, world_size: int, tmp_path: Path, make: Any, batch: int, tol: float, own: Any
) -> None:
    """Losses, norms, rates; resumed at another stage; saved whole; evaluated."""
    short: Any = {"use_cpu": True, "max_steps": 4, "save_steps": 2}
    with launched(0, 1):
        alone = make(None, tmp_path / f"alone-{rank}", per_device_train_batch_size=batch, **own,
                     **short)  # fmt: skip
        wanted = trained(alone)
        values = {name: x.clone() for name, x in alone.model.state_dict().items()}
    for stage, other in zip(STAGES, (3, 0, 2), strict=True):
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
        check_trainer(rank, world_size, tmp_path, make, 16, 1e-9, {})


@on_ranks(2, timeout_s=200)
def test_so_does_the_trainer_of_trl(rank: int, world_size: int, tmp_path: Path) -> None:
    with example("hf_trainer") as module:  # its head computes in float32
        make = functools.partial(module.make_trainer, "sft")
        check_trainer(rank, world_size, tmp_path, make, 16, 1e-5, {})


@on_ranks(2, timeout_s=200)
def test_so_does_that_of_sentence_transformers_with_a_cached_loss(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    with example("st_trainer") as module:
        own = {"gather": False}
        check_trainer(rank, world_size, tmp_path, module.make_trainer, module.BATCH, 1e-9, own)


def test_only_a_class_of_trainers_is_sharded() -> None:
    from fzero.integrations.transformers import sharded

    with pytest.raises(LayoutError, match="in the place of its class"):
        sharded(torch.nn.Linear, stage=2)
