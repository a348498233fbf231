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

TIER_INPUTS = ("fzero/integrations",)  # tests/tiers.py: a push that changes them runs these tests

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
        check_trainer(rank, world_size, tmp_path, make, 16, 1e-5)  # a loss in float32


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
@pytest.mark.slow
@pytest.mark.parametrize("stages", [(2,), (0, 3)])
def test_so_does_that_of_sentence_transformers_with_a_cached_loss(
    rank: int, world_size: int, tmp_path: Path, stages: tuple[int, ...]
) -> None:
    with example("st_trainer") as module:
        make, batch = module.make_trainer, module.BATCH
        check_trainer(rank, world_size, tmp_path, make, batch, 1e-9, stages, gather=False)


class Scores:
    """`compute_metrics`: what was generated, and a score that is best at the first evaluation."""

    calls = 0

    def __call__(self, seen: Any) -> dict[str, float]:
        self.calls += 1
        return {"generated": float(seen.predictions.clip(0).sum()), "score": -self.calls}


def generating(module: Any, stage: int | None, folder: Path, ranks: int) -> Any:
    """A trainer that generates to evaluate, and ends with the model of the best evaluation."""
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

    from fzero.integrations.transformers import sharded

    common: Any = {"output_dir": str(folder), "use_cpu": True, "report_to": [], "max_steps": 4}
    common |= {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "disable_tqdm": True}
    common |= {"load_best_model_at_end": True, "metric_for_best_model": "score"}
    common |= {"predict_with_generate": True, "generation_max_length": 12, "save_total_limit": 1}
    common |= dict.fromkeys(
        ("per_device_train_batch_size", "per_device_eval_batch_size"), 4 // ranks
    )
    model, rows = module.make_model(), torch.arange(16 * 6).view(16, 6) * 37 % module.VOCABULARY
    model.generation_config.eos_token_id = list(range(1, module.VOCABULARY, 4))  # ranks end apart
    data = [{"input_ids": row, "labels": row} for row in rows]
    made: Any = Seq2SeqTrainer if stage is None else sharded(Seq2SeqTrainer, stage=stage)
    args = Seq2SeqTrainingArguments(**common, learning_rate=1e-2)
    return made(
        model=model.double(), args=args, train_dataset=data, eval_dataset=data[:12],
        compute_metrics=Scores(),
    )  # fmt: skip


def evaluated(trainer: Any) -> tuple[list[tuple[float, ...]], Any, dict[str, Any]]:
    """Train; return what was evaluated on the way, and texts and values of the best model."""
    trainer.train()
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-2")
    texts = trainer.predict(trainer.eval_dataset).predictions
    history = [x for x in trainer.state.log_history if "eval_loss" in x]
    numbers = [(x["eval_loss"], x["eval_generated"], x["eval_score"]) for x in history]
    values = trainer.accelerator.get_state_dict(trainer.model)
    return numbers, torch.tensor(texts), values


@on_ranks(2, timeout_s=200)
def test_evaluation_generates_and_the_best_model_is_loaded_at_the_end(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    with example("hf_trainer") as module:
        wanted = None
        if rank == 0:  # a trainer alone saves on rank 0 only
            with launched(0, 1):
                wanted = evaluated(generating(module, None, tmp_path / "alone", 1))
        for stage in (2, 3):
            with launched(rank, world_size):
                trainer = generating(module, stage, tmp_path / str(stage), world_size)
                numbers, texts, values = evaluated(trainer)
                trainer.accelerator.engines[0].close()
            if wanted is not None:
                close(numbers, wanted[0])
                assert torch.equal(texts, wanted[1])
                for name, value in wanted[2].items():
                    torch.testing.assert_close(values[name], value, rtol=1e-9, atol=1e-9)


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


def counting_less(stage: int | None, folder: Path, **arguments: Any) -> Any:
    """A trainer of a model whose forward takes `num_items_in_batch`, and leaves it aside."""
    transformers: Any = importlib.import_module("transformers")
    sharding: Any = importlib.import_module("fzero.integrations.transformers").sharded

    class Mean(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embed, self.head = torch.nn.Embedding(8, 4), torch.nn.Linear(4, 8)

        def forward(self, input_ids: Any, labels: Any, **kwargs: Any) -> Any:
            logits = self.head(self.embed(input_ids)).tanh()
            loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels)
            return {"loss": loss, "logits": logits}

    made = transformers.Trainer
    cls = made if stage is None else sharding(made, stage=stage)
    g = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 8, (48, 5), generator=g)
    gone = torch.rand(48, 5, generator=g) < torch.linspace(0, 1, 48)[:, None]
    gone[5] = True  # a sequence without a label, a micro-batch of a rank where batches have one
    labels = ids.roll(1, 1).masked_fill(gone, -100)
    rows = [{"input_ids": x, "labels": y} for x, y in zip(ids, labels, strict=True)]
    common = {"output_dir": str(folder), "learning_rate": 0.1, "optim": "sgd", "report_to": []}
    common |= {"use_cpu": True, "disable_tqdm": True, "logging_steps": 1, "max_steps": 3}
    common |= {"max_grad_norm": 0.0, "save_strategy": "no", "lr_scheduler_type": "constant"}
    args = transformers.TrainingArguments(**(common | arguments))
    return cls(model=Mean(), args=args, train_dataset=rows)


@pytest.mark.slow  # three ranks import transformers
@on_ranks(3, timeout_s=200)
def test_a_model_that_divides_by_its_own_count_gets_the_mean_over_the_tokens_of_all_ranks(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    sizes = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with launched(0, 1):
            one = {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 1}
            alone = counting_less(None, tmp_path / f"alone-{rank}", **one)
            wanted = trained(alone)
            values = {name: x.clone() for name, x in alone.model.state_dict().items()}
        for stage in (0, 3):
            with launched(rank, world_size):
                trainer = counting_less(stage, tmp_path / str(stage), **sizes)
                close(trained(trainer), wanted)
                (engine,) = trainer.accelerator.engines
                found = engine.full_state_dict()
                for name, x in values.items():
                    torch.testing.assert_close(found[name], x, rtol=1e-9, atol=1e-9)
                engine.close()
