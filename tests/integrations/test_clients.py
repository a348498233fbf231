"""What scripts of clients ask for: options, a part of a checkpoint, another trainer, hooks."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fzero.errors import LayoutError
from tests.adapter.on_ranks import on_ranks
from tests.integrations.launched import launched, started

TIER_INPUTS = ("fzero/integrations",)  # tests/tiers.py: a push that changes them runs these tests

for name in ("accelerate", "datasets", "lightning_fabric", "transformers"):
    pytest.importorskip(name, exc_type=ImportError)


@contextmanager
def quiet() -> Iterator[None]:
    """What the libraries warn of is theirs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()


def adamw(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    weights, others = [*model.parameters()][:1], [*model.parameters()][1:]
    groups: Any = [{"params": weights, "weight_decay": 0.5}, {"params": others}]
    return torch.optim.AdamW(groups, lr=lr)


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(
        torch.equal(found[k], x) for k, x in wanted.items()
    )


def refused_by(client: str, **options: Any) -> None:
    """Make a client with options of its engines."""
    import transformers

    from fzero.integrations.accelerate import FzeroAccelerator
    from fzero.integrations.fabric import FzeroStrategy
    from fzero.integrations.transformers import sharded

    {
        "accelerate": lambda: FzeroAccelerator(cpu=True, stage=2, engine=options),
        "fabric": lambda: FzeroStrategy(stage=2, engine=options),
        "transformers": lambda: sharded(transformers.Trainer, stage=2, **options),
    }[client]()


@on_ranks(1, timeout_s=200)
def test_a_count_or_a_clip_of_the_engine_is_refused_by_name(rank: int) -> None:
    given: dict[str, Any] = {"micro_batches": 2, "average_micro_batches": True, "max_norm": 1.0}
    with quiet(), launched(0, 1):
        for client in ("accelerate", "fabric", "transformers"):
            for name, value in (given | {"gradient_accumulation_steps": 1}).items():
                with pytest.raises(LayoutError, match=f"the option {name}="):
                    refused_by(client, **{name: value})
            refused_by(client, max_norm=None, bucket_bytes=64)


@on_ranks(2, timeout_s=200)
def test_fabric_loads_what_is_named_and_no_more(rank: int, world_size: int, tmp_path: Path) -> None:
    from lightning_fabric import Fabric

    from fzero.integrations.fabric import FzeroStrategy

    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(3)).double()

    def run(fabric: Any) -> dict[str, Any]:
        folder, got = tmp_path / str(fabric.world_size), dict[str, Any]()
        folder = folder / str(getattr(fabric.strategy, "stage", rank))

        def made(lr: float = 0.1) -> Any:
            module = net()
            return fabric.setup(module, adamw(module, lr))

        def steps(model: Any, optimizer: Any, count: int) -> dict[str, Tensor]:
            for _ in range(count):
                fabric.backward(model(x).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            return values(model)

        def values(model: Any) -> dict[str, Tensor]:
            found = fabric.strategy.get_module_state_dict(model.module)
            return {name: value.clone() for name, value in found.items()}

        model, optimizer = made()
        saved = steps(model, optimizer, 2)
        state = {"model": model, "optimizer": optimizer, "n": 7}
        fabric.save(folder, state)
        steps(model, optimizer, 1)
        optimizer.param_groups[0]["lr"] = 0.01
        fabric.load(folder, {"model": model})
        assert same(values(model), saved) and optimizer.param_groups[0]["lr"] == 0.01
        got["model"] = steps(model, optimizer, 1)
        model, optimizer = made(0.5)
        before = values(model)
        fabric.load(folder, {"optimizer": optimizer})
        assert same(values(model), before) and optimizer.param_groups[0]["lr"] == 0.1
        got["optimizer"] = steps(model, optimizer, 1)
        for wrong in ({"model": model, "other": 1}, {"other": optimizer, "model": model}):
            with pytest.raises(KeyError, match="other"):
                fabric.load(folder, wrong)
        assert same(values(model), got["optimizer"])
        whole = fabric.load(folder)
        assert sorted(whole) == ["model", "n", "optimizer"] and same(whole["model"], saved)
        plain = net(1)
        plain.load_state_dict(whole["model"])
        alone = adamw(plain, 0.7)
        alone.load_state_dict(whole["optimizer"])
        plain(x).square().mean().backward()
        alone.step()
        got["all"] = dict(plain.state_dict())
        if isinstance(fabric.strategy, FzeroStrategy):
            torch.save({"0.weight": torch.zeros(4, 3)}, tmp_path / f"raw-{rank}")
            with pytest.raises(LayoutError, match=r"no 0\.bias"):
                fabric.load_raw(tmp_path / f"raw-{rank}", model)
            assert same(values(model), got["optimizer"])
        return got

    with quiet(), started(0, 1):
        fabric = Fabric(accelerator="cpu", devices=1)
        fabric.launch()
        (tmp_path / "1").mkdir(exist_ok=True)
        wanted = run(fabric)
    for stage in (1, 3):
        with quiet(), started(rank, world_size):
            fabric = Fabric(accelerator="cpu", devices=2, strategy=FzeroStrategy(stage=stage))
            fabric.launch()
            torch.testing.assert_close(run(fabric), wanted, rtol=1e-11, atol=1e-11)


class Tokens(nn.Module):
    """Returns the sum over tokens by the count that it is given, or a mean of its own."""

    def __init__(self, divides: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.divides, self.table, self.out = divides, nn.Embedding(10, 6), nn.Linear(6, 10)

    def forward(self, input_ids: Tensor, labels: Tensor, **counted: Any) -> Any:
        logits = self.out(torch.tanh(self.table(input_ids)))
        pairs = logits.flatten(0, 1), labels.flatten()
        if not self.divides:
            return {"loss": nn.functional.cross_entropy(*pairs), "logits": logits}
        total = nn.functional.cross_entropy(*pairs, reduction="sum")
        return {"loss": total / counted["num_items_in_batch"], "logits": logits}


def trainer_of(stage: int | None, folder: Path, ranks: int, model: nn.Module, **own: Any) -> Any:
    import datasets
    import transformers

    from fzero.integrations.transformers import sharded

    class Own(transformers.Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs)

    kind: Any = own.pop("kind", transformers.Trainer)
    kind = Own if kind == "own" else kind
    g = torch.Generator().manual_seed(1)
    ids, labels = (torch.randint(0, 10, (12, 5), generator=g) for _ in range(2))
    for row in range(12):
        labels[row, : row % 5] = -100
    rows = datasets.Dataset.from_dict({"input_ids": ids.tolist(), "labels": labels.tolist()})
    batch = 4 // ranks
    args = transformers.TrainingArguments(
        str(folder), use_cpu=True, report_to=[], per_device_eval_batch_size=batch,
        per_device_train_batch_size=batch, max_steps=2, disable_tqdm=True, save_strategy="no",
        remove_unused_columns=False, learning_rate=0.1, **own,
    )  # fmt: skip
    trainer: Any = kind if stage is None else sharded(kind, stage=stage)
    return trainer(model, args, train_dataset=rows, eval_dataset=rows)


@on_ranks(2, timeout_s=200)
def test_an_evaluation_has_the_loss_of_one_process(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    for divides, kind in ((True, None), (False, None), (False, "own")):
        own = {} if kind is None else {"kind": kind}
        with quiet(), launched(0, 1):
            wanted = trainer_of(None, tmp_path, 1, Tokens(divides), **own).evaluate()["eval_loss"]
        for stage in (0, 3):
            with quiet(), launched(rank, world_size):
                trainer = trainer_of(stage, tmp_path, 2, Tokens(divides), **own)
                assert trainer.evaluate()["eval_loss"] == pytest.approx(wanted, rel=1e-5)


@on_ranks(1, 2, timeout_s=200)
def test_a_second_trainer_goes_on_from_the_values_of_the_first(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    def twice(stage: int | None, ranks: int) -> dict[str, Tensor]:
        model = Tokens(True)
        for turn in range(2):
            trainer = trainer_of(stage, tmp_path, ranks, model)
            trainer.train()
            if turn == 0:
                first = trainer
                del trainer
        assert first.model is model
        if stage is None:
            return dict(model.state_dict())
        copied = copy.deepcopy(Tokens(True))
        copied.load_state_dict(trainer.accelerator.get_state_dict(model))
        trainer.accelerator.engine_of(model).close()
        assert same(dict(model.state_dict()), dict(copied.state_dict()))
        return dict(copied.state_dict())

    with quiet(), launched(0, 1):
        wanted = twice(None, 1)
    for stage in (2, 3):
        with quiet(), launched(rank, world_size):
            torch.testing.assert_close(twice(stage, world_size), wanted, rtol=1e-4, atol=1e-5)


@on_ranks(2, timeout_s=200)
def test_what_the_engine_cannot_do_says_what_to_write(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    from accelerate.local_sgd import LocalSGD

    from fzero.integrations.accelerate import FzeroAccelerator

    with quiet(), launched(rank, world_size):
        accelerator = FzeroAccelerator(cpu=True, stage=3, gradient_accumulation_steps=2)
        model = net()
        with pytest.raises(LayoutError, match="before its model"):
            accelerator.prepare(adamw(model))
        model, _ = accelerator.prepare(model, adamw(model))
        with pytest.raises(LayoutError, match=r"local=fzero\.Local"):
            LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2).__enter__()
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(2, 3).double()).sum())
            with pytest.raises(LayoutError, match=r"if accelerator\.sync_gradients"):
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
        accelerator.engine_of(model).close()
    with quiet(), launched(rank, world_size):
        trainer = trainer_of(2, tmp_path, 2, Tokens(True), bf16_full_eval=True)
        trainer.evaluate()
        trainer.model.float()
        trainer.train()
        with pytest.raises(LayoutError, match=r"engine_of\(trainer.model\).close\(\)"):
            trainer.evaluate()
        trainer.accelerator.engine_of(trainer.model).close()
        trainer.evaluate()


@on_ranks(2, timeout_s=200)
def test_hooks_of_saves_and_loads_get_whole_models(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    from fzero.integrations.accelerate import FzeroAccelerator

    def write(models: Any, weights: Any, folder: Any) -> None:
        for model in models:
            if rank == 0:
                torch.save(model.state_dict(), Path(folder) / "unet.pt")
            weights.pop()

    def read(models: Any, folder: Any) -> None:
        while models:
            models.pop().load_state_dict(torch.load(Path(folder) / "unet.pt"))

    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(3)).double()

    def run(stage: int, folder: Path) -> None:
        accelerator, model = FzeroAccelerator(cpu=True, stage=stage), net()
        model, optimizer = accelerator.prepare(model, adamw(model))

        def step() -> dict[str, Tensor]:
            accelerator.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            return accelerator.get_state_dict(model)

        hooks = [accelerator.register_save_state_pre_hook(write)]
        hooks += [accelerator.register_load_state_pre_hook(read)]
        saved = step()
        accelerator.save_state(str(folder))
        assert not [*folder.glob("model*.safetensors")]
        accelerator.wait_for_everyone()
        assert same(torch.load(folder / "unet.pt"), saved)
        after = step()
        accelerator.load_state(str(folder))
        assert same(accelerator.get_state_dict(model), saved)
        assert same(step(), after)
        accelerator.wait_for_everyone()
        more = {name: value + 1 for name, value in saved.items()}
        if rank == 0:  # what a hook loads counts
            torch.save(more, folder / "unet.pt")
        accelerator.wait_for_everyone()
        accelerator.load_state(str(folder))
        assert same(accelerator.get_state_dict(model), more)
        for hook in hooks:
            hook.remove()
        accelerator.load_state(str(folder))
        assert same(accelerator.get_state_dict(model), saved)
        accelerator.engine_of(model).close()

    for stage in (2, 3):
        with quiet(), launched(rank, world_size):
            run(stage, tmp_path / str(stage))
