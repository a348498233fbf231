"""Models sharded as they are made."""

from __future__ import annotations

import functools
import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fzero.adapter import Engine, gathered, sharded_init
from fzero.placeholder import LazyParam
from tests.adapter.plain import STAGES, Draw
from tests.adapter.unsharded import same_update
from tests.ranks import run_ranks

pytestmark = pytest.mark.xdist_group("gloo")

SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)


class Everything(nn.Module):
    """Initializers of each kind that modules and users have."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6, padding_idx=2)
        self.rnn = nn.LSTM(6, 5, batch_first=True)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.conv, self.norm = nn.Conv1d(6, 3, 3, padding=1), nn.BatchNorm1d(3)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.listed = nn.ParameterList([torch.randn(3), nn.Parameter(torch.randn(2, 1))])
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)
        self.apply(self.reset)
        self.scale = nn.Parameter(torch.randn(()))
        self.register_parameter("absent", None)

    def reset(self, module: nn.Module) -> None:
        if isinstance(module, nn.Conv1d):
            nn.init.orthogonal_(module.weight)
            assert module.bias is not None
            module.bias.data.normal_(1.0, 0.1)
        if isinstance(module, nn.Embedding):
            with torch.no_grad():
                module.weight[3].fill_(0.25)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        h = self.attention(x, x, x, need_weights=False)[0] + self.frozen.sum()
        z = self.norm(self.conv(h.transpose(1, 2))).tanh().mean() + self.rnn(h)[0].square().mean()
        out = F.log_softmax(self.head(h) * self.scale, -1)
        return out.square().mean() + z * self.listed[0].sum() + self.listed[1].prod()


def made(rank: int, make: Any, *, sharded: bool = True) -> nn.Module:
    """A module made on every rank; the others draw other numbers than rank 0."""
    torch.manual_seed(7 if rank == 0 or not sharded else 100 + rank)
    if not sharded:
        return make()
    with sharded_init():
        return make()


def everything_loss(module: Any, rank: int, number: int) -> Tensor:
    return module(Draw(rank, number).whole(2, 7, dtype=torch.int64).abs())


def after_block(module: nn.Module) -> None:
    """What users do once the model is there."""
    torch.manual_seed(13)
    nn.init.xavier_uniform_(module.get_parameter("conv.weight"))
    module.get_parameter("rnn.bias_hh_l0").data.fill_(0.5)
    with torch.no_grad():
        module.get_parameter("scale").mul_(2.0)
        module.get_parameter("listed.1").copy_(torch.ones(2, 1))


def same_values(label: str, module: nn.Module, plain: nn.Module) -> None:
    with gathered(module) as fulls:
        named = list(plain.named_parameters())
        assert len(fulls) == len(named), label
        for full, (path, p) in zip(fulls, named, strict=True):
            assert full.dtype == p.dtype and torch.equal(full, p), f"{label}: {path}"


def bit_for_bit_body(rank: int, world_size: int) -> None:
    plain = made(rank, Everything, sharded=False)
    after_plain = torch.rand(1)
    module = made(rank, Everything)
    assert rank or torch.equal(torch.rand(1), after_plain)  # rank 0 drew as many numbers
    same_values("made", module, plain)
    after_block(plain)
    after_block(module)
    same_values("written afterwards", module, plain)
    assert module.head.weight is module.embedding.weight
    flags = {path: p.requires_grad for path, p in plain.named_parameters()}
    assert {path: p.requires_grad for path, p in module.named_parameters()} == flags
    if world_size > 1:
        assert all(isinstance(p, LazyParam) for p in module.parameters())
    assert type(nn.Linear(2, 2).weight) is nn.Parameter  # made after the block: whole


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_model_made_under_sharded_init_is_that_of_rank_0_bit_for_bit(world_size: int) -> None:
    run_ranks(bit_for_bit_body, world_size)


def raising_body(rank: int, world_size: int) -> None:
    with pytest.raises(ZeroDivisionError), sharded_init():
        raise ZeroDivisionError
    outer = nn.Sequential(nn.Linear(2, 2))
    assert type(outer[0].weight) is nn.Parameter


def test_sharded_init_that_raises_shards_nothing_that_is_made_later() -> None:
    run_ranks(raising_body, 2)


SIDE = 37


def full_weights() -> int:
    """How many storages of at least one full weight are alive in this process."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if type(x) in (Tensor, nn.Parameter)]
    storages = [x.untyped_storage() for x in tensors if x.device.type == "cpu"]
    return len({x.data_ptr() for x in storages if x.nbytes() >= 4 * SIDE * SIDE})


class Counted(nn.Linear):
    """Notes what is held of full size before and after it is initialized."""

    def __init__(self, seen: list[int]) -> None:
        self.seen = seen
        super().__init__(SIDE, SIDE, bias=False)

    def reset_parameters(self) -> None:
        self.seen.append(full_weights())
        super().reset_parameters()
        self.seen.append(full_weights())


class Stack(nn.Sequential):
    """A layer becomes a part of it before the next one is made."""

    def __init__(self, seen: list[int]) -> None:
        super().__init__()
        for _ in range(5):
            self.append(Counted(seen))


def never_whole_body(rank: int, world_size: int) -> None:
    before, seen = full_weights(), []
    layers = made(rank, lambda: Stack(seen))
    assert len(seen) == 10 and max(seen) <= before + 1, f"{seen}, {before} before"
    assert all(isinstance(p, LazyParam) for p in layers.parameters())
    assert full_weights() == before
    engine = Engine(layers, SGD, stage=3)
    assert full_weights() == before
    engine(torch.ones(2, SIDE)).sum().backward()
    engine.step()
    assert full_weights() == before
    seen.clear()
    whole = [Counted(seen) for _ in range(2)]  # the count can see a full weight
    assert max(seen) == before + 2 and len(whole) == 2
    engine.close()


@pytest.mark.parametrize("world_size", [2, 3])
def test_no_rank_ever_holds_more_than_one_full_parameter(world_size: int) -> None:
    run_ranks(never_whole_body, world_size)


def engines_body(rank: int, world_size: int) -> None:
    def mean_loss(number: int) -> Tensor:
        losses = [everything_loss(plain, r, number) for r in range(world_size)]
        return torch.stack(losses).mean()

    for stage in STAGES:
        label = f"stage {stage}, W={world_size}"
        plain = made(rank, lambda: Everything().double(), sharded=False)
        begin = {path: p.detach().clone() for path, p in plain.named_parameters()}
        torch.set_default_dtype(torch.float64)
        try:
            module = made(rank, Everything)
            with gathered(module, modify=True) as fulls:
                for full, value in zip(fulls, begin.values(), strict=True):
                    full.copy_(value)
        finally:
            torch.set_default_dtype(torch.float32)
        optimizer = SGD([p for p in module.parameters() if p.requires_grad])
        reference = SGD([p for p in plain.parameters() if p.requires_grad])
        engine = Engine(module, optimizer, stage=stage)
        for number in range(2):
            everything_loss(engine, rank, number).backward()
            engine.step()
            reference.zero_grad()
            mean_loss(number).backward()
            reference.step()
        found, wanted = engine.full_parameters(), dict(plain.named_parameters())
        same_update(label, found, {p: v.detach() for p, v in wanted.items()}, begin, rtol=1e-6)
        engine.close()
        assert all(type(p) is nn.Parameter for p in module.parameters()), label


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_an_engine_of_any_stage_trains_a_model_made_under_sharded_init(world_size: int) -> None:
    run_ranks(engines_body, world_size)
