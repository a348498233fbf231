"""What people do with a module goes on under an engine: modes, .to(), trainers, saving."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
)
from torch.optim.lr_scheduler import LambdaLR

from fzero.adapter import Engine
from tests.adapter.nets import Net
from tests.ranks import run_ranks
from tests.strategies import integers

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported, which reads it then

STAGES = pytest.mark.parametrize("stage", range(4))
gloo = pytest.mark.xdist_group("gloo")


def made(stage: int) -> Engine:
    torch.manual_seed(5)
    net = Net()
    return Engine(net, torch.optim.SGD(net.parameters(), lr=0.25), stage=stage)


def backward(engine: Engine, rank: int) -> None:
    engine(integers((2, 3), seed=rank)).square().sum().backward()


def raised(do: Callable[[], Any]) -> str:
    """The whole text of what it raises, with what that was raised from."""
    try:
        do()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def same(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# The methods of a module.


def methods(rank: int, world_size: int, stage: int) -> None:
    engine = made(stage)
    module = engine.module
    assert engine.eval() is engine and not module.training and not module.a.training
    assert engine.train() is engine and module.training
    assert list(engine.parameters()) == list(module.parameters())
    assert dict(engine.named_parameters()) == dict(module.named_parameters())
    torch.manual_seed(5)
    alone = Net()
    whole = engine.state_dict()
    assert same(whole, alone.state_dict())
    backward(engine, rank)
    engine.step()
    assert same(whole, alone.state_dict())  # a copy: the update did not reach it
    alone.load_state_dict(engine.state_dict())
    x = integers((2, 3), seed=9)
    assert torch.equal(alone(x), engine(x))


@gloo
@STAGES
def test_an_engine_has_the_methods_of_a_module(stage: int) -> None:
    run_ranks(methods, 2, stage)


# .to()


def moved(rank: int, world_size: int, stage: int, moves: bool) -> Any:
    engine = made(stage)

    def move() -> None:
        if moves:
            module = engine.module
            module.to("cpu")
            module.to(device="cpu", dtype=torch.float64, non_blocking=True)
            module.double().cpu()

    for _ in range(2):
        move()
        backward(engine, rank)
        move()
        engine.step()
    return engine.full_state_dict()


@gloo
@STAGES
def test_moving_a_module_to_where_it_is_changes_nothing(stage: int) -> None:
    wanted = run_ranks(moved, 2, stage, False)
    for found, without in zip(run_ranks(moved, 2, stage, True), wanted, strict=True):
        assert same(found, without)


def converted(rank: int, world_size: int) -> Any:
    engine = made(3)
    module = engine.module
    seen = []
    for _ in range(2):
        seen += [raised(lambda: module.to(torch.bfloat16)), raised(module.float)]
        backward(engine, rank)
        engine.step()
    return seen, engine.full_state_dict()


@gloo
def test_another_dtype_is_refused_at_stage_3_at_once_and_training_goes_on() -> None:
    wanted = run_ranks(moved, 2, 3, False)
    for (seen, values), whole in zip(run_ranks(converted, 2), wanted, strict=True):
        assert same(values, whole)
        for text in seen:
            assert text.startswith("LayoutError: LazyParam(a.weight")
            assert "convert, move and resize the module first, then make the engine" in text


def converted_or_away(rank: int, world_size: int, stage: int, to: Any) -> str:
    engine = made(stage)
    backward(engine, rank)
    engine.step()
    engine.module.to(to)
    return raised(engine.step)


@gloo
@pytest.mark.parametrize(
    ("stage", "to"), [(0, torch.bfloat16), (2, torch.bfloat16), (2, "meta"), (3, "meta")]
)
def test_another_dtype_or_device_is_refused_by_the_next_step(stage: int, to: Any) -> None:
    for text in run_ranks(converted_or_away, 2, stage, to):
        assert text.startswith("LayoutError: a.weight ")
        assert "make the engine when the module is as it will be" in text


# A Hugging Face model, in the loop that its Trainer runs.

BATCHES = 4
MICRO_BATCHES = 2


def language_model() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 16,
        "n_positions": 8,
        "n_embd": 8,
        "n_layer": 2,
        "n_head": 2,
    }
    config = GPT2Config(
        **sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0
    )
    model = GPT2LMHeadModel(config).double()
    model.loss_type = "ForCausalLM"  # what it takes anyway, with a warning
    return model


def decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices decay, the rest does not, as in a Trainer."""
    named = list(model.named_parameters())
    return [
        {"params": [p for _, p in named if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for _, p in named if p.dim() < 2], "weight_decay": 0.0},
    ]


def tokens(rank: int, at: int) -> Tensor:
    random = torch.Generator().manual_seed(100 * rank + at)
    return torch.randint(16, (2, 6), generator=random)


def loss_of(model: Any, ids: Tensor) -> Tensor:
    return model(input_ids=ids, labels=ids).loss / MICRO_BATCHES


def trained_alone(world_size: int) -> Any:
    model = language_model()
    optimizer = torch.optim.AdamW(decay_groups(model), lr=0.01)
    schedule = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for first in range(0, BATCHES, MICRO_BATCHES):
        for at in range(first, first + MICRO_BATCHES):
            for rank in range(world_size):
                (loss_of(model, tokens(rank, at)) / world_size).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        model.zero_grad()
    return model


def trained_as_by_a_trainer(rank: int, world_size: int, stage: int, folder: Path) -> Any:
    model = language_model()
    optimizer = torch.optim.AdamW(decay_groups(model), lr=0.01)
    schedule = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    engine = Engine(model, optimizer, stage=stage)
    model.to("cpu")
    for first in range(0, BATCHES, MICRO_BATCHES):
        model.train()
        for at in range(first, first + MICRO_BATCHES):
            model.to("cpu")
            engine.backward(loss_of(model, tokens(rank, at)))
        engine.clip_grad_norm_(0.5)
        engine.step()
        schedule.step()
        model.zero_grad()
        model.eval()
        with torch.no_grad():
            loss_of(model, tokens(7, first))
    whole = engine.full_state_dict()
    if rank == 0:
        model.save_pretrained(folder, state_dict=dict(whole))  # which it empties
    dist.barrier()
    return whole


@gloo
@STAGES
def test_a_trainers_loop_trains_and_saves_a_hugging_face_model(stage: int, tmp_path: Path) -> None:
    from transformers import GPT2LMHeadModel

    wanted = trained_alone(2)
    for whole in run_ranks(trained_as_by_a_trainer, 2, stage, tmp_path, timeout_s=120):
        torch.testing.assert_close(whole, dict(wanted.state_dict()), rtol=1e-9, atol=1e-12)
    saved = GPT2LMHeadModel.from_pretrained(tmp_path)
    assert saved.transformer.wte.weight is saved.lm_head.weight  # still tied
    ids = tokens(3, 3)
    assert torch.allclose(saved(input_ids=ids).logits, wanted(input_ids=ids).logits, atol=1e-10)


# Saving in torch's ways.


def saved_in_the_wrong_way(rank: int, world_size: int, folder: Path) -> list[str]:
    from transformers.modeling_utils import PreTrainedModel

    model: PreTrainedModel = language_model()
    engine = Engine(model, torch.optim.AdamW, stage=3)
    ids = tokens(rank, 0)
    engine.backward(loss_of(model, ids))
    engine.step()
    held = get_model_state_dict(model)
    assert engine.optimizer is not None
    optimizer = engine.optimizer
    texts = [
        raised(lambda: model.save_pretrained(folder / f"a{rank}")),
        raised(lambda: torch.save(model.state_dict(), folder / f"b{rank}")),
        raised(lambda: dcp.save({"model": held}, checkpoint_id=folder / "c")),
        raised(lambda: copy.deepcopy(model)),
        raised(lambda: get_state_dict(model, optimizer)),
        raised(optimizer.state_dict),
    ]
    optimizer.zero_grad()
    engine.backward(loss_of(model, ids))
    engine.step()  # nothing was broken
    return texts


@gloo
def test_saving_shards_as_if_they_were_whole_is_refused_with_the_way(tmp_path: Path) -> None:
    for texts in run_ranks(saved_in_the_wrong_way, 2, tmp_path, timeout_s=120):
        for text in texts[:4]:
            assert "this rank has only a shard of it" in text
            assert "engine.full_state_dict() has whole values on every rank, to save" in text
        for text in texts[4:]:
            assert text.startswith("PhaseError: optimizer.")
            assert "fzero.checkpoint.save(path, engine.state)" in text


def saved_by_dcp(rank: int, world_size: int, stage: int, folder: Path) -> None:
    engine = made(stage)
    backward(engine, rank)
    engine.step()
    whole = engine.full_state_dict()
    held = get_model_state_dict(engine.module)
    assert same(held, whole)  # at stage 3 placeholders: comparing them gathers
    options = StateDictOptions(full_state_dict=True)
    assert same(get_model_state_dict(engine.module, options=options), whole)
    dcp.save({"model": whole if stage == 3 else held}, checkpoint_id=folder)
    loaded = {name: torch.zeros_like(value) for name, value in whole.items()}
    dcp.load({"model": loaded}, checkpoint_id=folder)
    assert same(loaded, whole)


@gloo
@STAGES
def test_the_state_dict_helpers_of_torchs_checkpoint_have_whole_values(
    stage: int, tmp_path: Path
) -> None:
    run_ranks(saved_by_dcp, 2, stage, tmp_path)
