"""What people do with a module goes on under an engine: modes, trainers, saving, copies, calls."""

from __future__ import annotations

import copy
import io
import os
from collections.abc import Callable
from dataclasses import replace
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
from torch.func import functional_call, grad, vmap
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fzero
from fzero.adapter import Engine, gathered
from fzero.errors import LayoutError
from tests.adapter.nets import Net
from tests.adapter.on_ranks import Place, at_places, on_ranks
from tests.adapter.plain import Draw, back, engine_of, same, seeded, sgd_of, update

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported, which reads it then
MEAN = get_ema_multi_avg_fn(0.5)


def made(stage: int, rank: int) -> Engine:
    """An engine of a Net, after one update."""
    engine = engine_of(Net, stage)
    back(engine, Draw(rank, 0))
    engine.step()
    return engine


def raised(do: Callable[[], Any]) -> str:
    """What it raises, as a traceback ends."""
    try:
        do()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@at_places(2)
def test_an_engine_has_the_methods_of_a_module(at: Place) -> None:
    engine, alone = at.engine(Net), seeded(Net)
    module: Any = engine.module
    assert engine.eval() is engine and not module.training and not module.a.training
    assert engine.train() is engine and module.training
    assert list(engine.parameters()) == list(module.parameters())
    assert dict(engine.named_parameters()) == dict(module.named_parameters())
    whole, live = engine.full_state_dict(), engine.state_dict()
    back(engine, at.draw(0))
    engine.step()
    same(whole, alone.state_dict(), 0.0)  # a copy: the update did not reach it
    same(live, whole if at.stage == 3 else engine.full_state_dict(), 0.0)  # below stage 3 it did
    alone.load_state_dict(engine.state_dict())
    x = Draw(0, 9)(2, 3)
    assert torch.equal(alone(x), engine(x))


def language_model() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes: Any = {"vocab_size": 16, "n_positions": 8, "n_embd": 8, "n_layer": 2, "n_head": 2}
    config = GPT2Config(
        **sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0
    )
    model = GPT2LMHeadModel(config).double()
    model.loss_type = "ForCausalLM"  # what it takes anyway, with a warning
    return model


def decaying_adamw(module: nn.Module) -> torch.optim.Optimizer:
    """Matrices decay, the rest does not, as in a Trainer."""
    params = list(module.parameters())
    groups = [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.01)


def tokens(draw: Draw) -> Tensor:
    return draw.whole(2, 6, dtype=torch.int64) + 3


def micro_batches(e: Any, draw: Draw) -> None:
    """Two backwards of the module's own loss, as a Trainer makes them."""
    for _ in range(2):
        e.module.to("cpu")
        ids = tokens(draw)
        e.backward(e.module(input_ids=ids, labels=ids).loss / 2)


@at_places(2, timeout_s=120)
def test_a_trainers_loop_trains_and_saves_a_hugging_face_model(at: Place, tmp_path: Path) -> None:
    from transformers import GPT2LMHeadModel

    reference = at.plain(language_model, decaying_adamw)
    model: Any = seeded(language_model)
    optimizers: Any = reference.optimizer, decaying_adamw(model)
    schedules = [LambdaLR(optimizer, lambda step: 1 / (1 + step)) for optimizer in optimizers]
    engine = Engine(model, optimizers[1], stage=at.stage)
    for number in range(2):
        gradients = reference.run(micro_batches, number)
        reference.clip(gradients, 0.5)
        model.train()
        micro_batches(engine, at.draw(number))
        engine.clip_grad_norm_(0.5)
        engine.step()
        same(engine.full_parameters(), reference.step(gradients), 1e-9)
        for schedule in schedules:
            schedule.step()
        model.zero_grad()
        model.eval()
        with torch.no_grad():
            model(input_ids=tokens(Draw(7, number)))
    whole = engine.full_state_dict()
    same(whole, dict(reference.module.state_dict()), 1e-9)
    if at.rank == 0:
        model.save_pretrained(tmp_path, state_dict=dict(whole))  # which it empties
    dist.barrier()
    plain: Any = reference.module
    saved: Any = GPT2LMHeadModel.from_pretrained(tmp_path)
    assert saved.transformer.wte.weight is saved.lm_head.weight  # still tied
    ids = tokens(Draw(3, 3))
    found, wanted = saved(input_ids=ids).logits, plain(input_ids=ids).logits
    assert torch.allclose(found, wanted, atol=1e-10)


@on_ranks(2, timeout_s=120)
def test_saving_shards_as_if_they_were_whole_is_refused_with_the_way(
    rank: int, tmp_path: Path
) -> None:
    model = language_model()
    engine = Engine(model, torch.optim.AdamW, stage=3)
    micro_batches(engine, Draw(rank, 0))
    engine.step()
    optimizer: Any = engine.optimizer
    held = get_model_state_dict(model)
    for save in (
        lambda: model.save_pretrained(tmp_path / f"a{rank}"),
        lambda: torch.save(model.state_dict(), tmp_path / f"b{rank}"),
        lambda: dcp.save({"model": held}, checkpoint_id=tmp_path / "c"),
    ):
        text = raised(save)
        assert "this rank has only a shard of it" in text
        assert "engine.full_state_dict() has whole values on every rank, to save" in text
    for save in (lambda: get_state_dict(model, optimizer), optimizer.state_dict):
        text = raised(save)
        assert text.startswith("PhaseError: optimizer.")
        assert "fzero.checkpoint.save(path, engine.state)" in text
    optimizer.zero_grad()
    micro_batches(engine, Draw(rank, 1))
    engine.step()  # nothing was broken


@at_places(2)
def test_the_state_dict_helpers_of_torchs_checkpoint_have_whole_values(
    at: Place, tmp_path: Path
) -> None:
    engine = made(at.stage, at.rank)
    whole = engine.full_state_dict()
    held = get_model_state_dict(engine.module)
    same(held, whole, 0.0)  # at stage 3 placeholders: comparing them gathers
    options = StateDictOptions(full_state_dict=True)
    same(get_model_state_dict(engine.module, options=options), whole, 0.0)
    dcp.save({"model": whole if at.stage == 3 else held}, checkpoint_id=tmp_path)
    loaded = {name: torch.zeros_like(value) for name, value in whole.items()}
    dcp.load({"model": loaded}, checkpoint_id=tmp_path)
    same(loaded, whole, 0.0)


IDS = torch.tensor([0, 1, 1, 4])


class Small(nn.Module):
    """A tied weight, a buffer, a block."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(3, dtype=torch.float64)
        self.head = nn.Linear(3, 5, bias=False, dtype=torch.float64)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.embedding(ids)))


def train(engine: Any) -> None:
    engine(IDS).square().sum().backward()
    engine.step()


@at_places(1, 2)
def test_a_copy_belongs_to_no_engine_and_a_placeholder_says_that_it_cannot_be_copied(
    at: Place,
) -> None:
    engine = at.engine(Small)
    if at.is_lazy:
        for attempt in (copy.deepcopy, AveragedModel, lambda m: torch.save(m, io.BytesIO())):
            with pytest.raises(LayoutError, match="has only a shard of it"):
                attempt(engine.module)
        return
    twin, averaged = copy.deepcopy(engine.module), AveragedModel(engine.module)
    torch.save(engine.module, io.BytesIO())
    twin(IDS).sum().backward()  # a copy is nobody's: its gradients stay its own
    assert twin.get_parameter("head.weight").grad is not None
    assert not engine.state.gradients.held
    begin = {path: p.detach().clone() for path, p in twin.named_parameters()}
    train(engine)
    averaged.update_parameters(engine.module)
    same(dict(twin.named_parameters()), begin, 0.0)
    assert not torch.equal(engine.full_parameter("embedding.weight"), begin["embedding.weight"])


@at_places(1, 2, 3)
def test_a_full_state_dict_has_every_name_and_can_be_loaded_again(at: Place) -> None:
    engine = at.engine(Small)
    train(engine)
    saved = engine.full_state_dict()
    assert list(saved) == list(Small().state_dict())
    torch.save(saved, io.BytesIO())
    fresh = Small()
    fresh.load_state_dict(saved)
    assert torch.equal(fresh.head.weight, engine.full_parameter("embedding.weight"))
    other = {name: 2 * value for name, value in saved.items()}
    with gathered(engine.module, modify=True):
        engine.module.load_state_dict(other)
    same(engine.full_state_dict(), other, 0.0)


@at_places(1, 2)
def test_averages_of_the_parameters_are_those_of_one_process(at: Place) -> None:
    """The one that is whole was made before the engine; the other one is of this rank's shards."""
    module, reference = seeded(Net), at.plain(Net)
    whole, wanted = (AveragedModel(m, multi_avg_fn=MEAN) for m in (module, reference.module))
    engine = Engine(module, sgd_of(module), stage=at.stage)
    held = engine.state.params
    shards = torch._foreach_add(list(held.flats), 0.0)
    for number in range(3):
        update(engine, reference, at.rank, number)
        whole.update_parameters(module)
        wanted.update_parameters(reference.module)
        rate = 1.0 if number == 0 else 0.5  # torch's average begins with a copy
        torch._foreach_lerp_(shards, list(engine.state.params.flats), rate)
    state = engine.state.replace(params=replace(held, flats=tuple(shards)))
    found: Any = fzero.full_params(state)
    for path, p in wanted.module.named_parameters():
        torch.testing.assert_close(whole.module.get_parameter(path), p)
        torch.testing.assert_close(found[path], p.detach())


@at_places(1, 2)
def test_functional_call_of_an_engines_module_is_a_call_of_a_plain_one(at: Place) -> None:
    """functional_call gives other tensors for the length of a call; the engine goes on."""
    engine, other = at.engine(Small), at.engine(Small)
    module = engine.module.eval()
    other.module.eval()
    values = {path: value + 1 for path, value in engine.full_parameters().items()}

    def loss(values: dict[str, Tensor], ids: Tensor) -> Tensor:
        return functional_call(module, values, (ids,)).square().sum()

    slopes = grad(loss)(values, IDS)
    samples = vmap(grad(loss), in_dims=(None, 0))(values, IDS[:, None])
    leaves = {path: value.clone().requires_grad_() for path, value in values.items()}
    loss(leaves, IDS).backward()
    for path, slope in slopes.items():
        found = leaves[path].grad
        assert torch.allclose(samples[path].sum(0), slope, rtol=1e-11), path
        assert found is not None and torch.allclose(found, slope, rtol=1e-12), path
    assert not engine.state.gradients.held
    train(engine)
    train(other)
    same(engine.full_parameters(), other.full_parameters(), 0.0)


@at_places(1, 2)
def test_hooks_attributes_and_gradients_of_a_parameter_outlive_the_engine(at: Place) -> None:
    module, seen = nn.Linear(2, 1, bias=False, dtype=torch.float64), []
    weight: Any = module.weight
    weight.lr_mult = 0.5
    scaled = weight.register_hook(lambda g: 10 * g)
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad is None))
    weight.grad = torch.full((1, 2), 100.0, dtype=torch.float64)
    x = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
    engine = Engine(module, torch.optim.SGD([weight], lr=1.0), stage=at.stage)
    engine(x).sum().backward()
    assert engine.full_gradient("weight").tolist() == [[110.0, 120.0]]
    assert seen == [False]
    assert module.weight.lr_mult == 0.5
    engine.zero_grad()
    scaled.remove()
    engine(x).sum().backward()
    assert engine.full_gradient("weight").tolist() == [[1.0, 2.0]]
    engine.close()
    assert module.weight.lr_mult == 0.5
    module(x).sum().backward()
    assert len(seen) == 3 and module.weight.grad is not None
