"""Models sharded as they are made."""

from __future__ import annotations

import functools
import gc
import time
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fzero
from fzero.adapter import Engine, gathered, sharded_init
from fzero.machine.placeholder import LazyParam
from tests.adapter.on_ranks import Place, at_places, on_ranks
from tests.adapter.plain import Draw, same

SGD = functools.partial(torch.optim.SGD, lr=0.001, momentum=0.9)


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


def made(rank: int, make: Any, *, sharded: bool = True, dtype: torch.dtype = torch.float32) -> Any:
    """A module made on every rank; the others draw other numbers than rank 0."""
    torch.manual_seed(7 if rank == 0 or not sharded else 100 + rank)
    torch.set_default_dtype(dtype)
    try:
        with sharded_init() if sharded else nullcontext():
            return make()
    finally:
        torch.set_default_dtype(torch.float32)


def everything_loss(module: Any, rank: int, number: int) -> Tensor:
    return module(Draw(rank, number).whole(2, 7, dtype=torch.int64).abs())


def write(module: nn.Module) -> None:
    """What users do once the model is there."""
    torch.manual_seed(13)
    nn.init.xavier_uniform_(module.get_parameter("conv.weight"))
    module.get_parameter("rnn.bias_hh_l0").data.fill_(0.5)
    with torch.no_grad():
        module.get_parameter("scale").mul_(2.0)
        module.get_parameter("listed.1").copy_(torch.ones(2, 1))


def same_values(module: nn.Module, plain: nn.Module) -> None:
    with gathered(module) as fulls:
        for full, (path, p) in zip(fulls, plain.named_parameters(), strict=True):
            assert full.dtype == p.dtype and torch.equal(full, p), path


@on_ranks(1, 2, 3)
def test_a_model_made_under_sharded_init_is_that_of_rank_0_bit_for_bit(
    rank: int, world_size: int
) -> None:
    plain = made(rank, Everything, sharded=False)
    after_plain = torch.rand(1)
    module = made(rank, Everything)
    assert rank or torch.equal(torch.rand(1), after_plain)  # rank 0 drew as many numbers
    same_values(module, plain)
    write(plain)
    write(module)
    same_values(module, plain)
    assert module.head.weight is module.embedding.weight
    flags = {path: p.requires_grad for path, p in plain.named_parameters()}
    assert {path: p.requires_grad for path, p in module.named_parameters()} == flags
    if world_size > 1:
        assert all(isinstance(p, LazyParam) for p in module.parameters())
    assert type(nn.Linear(2, 2).weight) is nn.Parameter  # made after the block: whole


@on_ranks(2)
def test_sharded_init_that_raises_shards_nothing_that_is_made_later() -> None:
    with pytest.raises(ZeroDivisionError), sharded_init():
        raise ZeroDivisionError
    assert type(nn.Linear(2, 2).weight) is nn.Parameter


@pytest.mark.parametrize("world_size", [2, 3])
def test_virtual_ranks_may_make_their_models_under_sharded_init(world_size: int) -> None:
    """torch's hooks of registration are the process's, and a rank pauses inside of them."""

    def train(rank: Tensor) -> Tensor:
        module = made(int(rank), Everything)
        assert all(isinstance(p, LazyParam) for p in module.parameters())
        same_values(module, made(int(rank), Everything, sharded=False))
        engine = Engine(module, functools.partial(torch.optim.SGD, lr=0.25), stage=3)
        engine.backward(everything_loss(engine, 0, 0))
        engine.step()
        return engine.full_parameter("head.weight")

    weights = fzero.simulate(train, world_size=world_size)(torch.arange(world_size))
    plain = made(0, Everything, sharded=False)
    everything_loss(plain, 0, 0).backward()
    weight = plain.get_parameter("head.weight")
    assert weight.grad is not None
    wanted = (weight.detach() - 0.25 * weight.grad).expand_as(weights)
    torch.testing.assert_close(weights, wanted)
    assert type(nn.Linear(2, 2).weight) is nn.Parameter  # made after the block: whole


SIDE = 37


def full_weights(at_most: int) -> int:
    """How many storages of at least one full weight are alive in this process.

    A thread of gloo lets go of what it sent a moment after the wait for it is over, later still on
    a busy machine: more than `at_most` are counted again for two seconds.
    """
    give_up = time.monotonic() + 2.0
    while (count := counted_weights()) > at_most and time.monotonic() < give_up:
        time.sleep(0.005)
    return count


def counted_weights() -> int:
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
        self.seen.append(full_weights(1))
        super().reset_parameters()
        self.seen.append(full_weights(1))


class Stack(nn.Sequential):
    """A layer becomes a part of it before the next one is made."""

    def __init__(self, seen: list[int]) -> None:
        super().__init__()
        for _ in range(5):
            self.append(Counted(seen))


@on_ranks(2, pytest.param(3, marks=pytest.mark.slow))
def test_no_rank_ever_holds_more_than_one_full_parameter(rank: int) -> None:
    gc.collect()
    gc.freeze()  # `full_weights` then looks at what the test makes alone, which is soon done
    before, seen = full_weights(0), []
    layers = made(rank, lambda: Stack(seen))
    assert len(seen) == 10 and max(seen) <= before + 1, f"{seen}, {before} before"
    assert all(isinstance(p, LazyParam) for p in layers.parameters())
    assert full_weights(0) == before
    engine = Engine(layers, SGD, stage=3)
    assert full_weights(0) == before
    engine(torch.ones(2, SIDE)).sum().backward()
    engine.step()
    assert full_weights(0) == before
    seen.clear()
    whole = [Counted(seen) for _ in range(2)]  # the count can see a full weight
    assert max(seen) == before + 2 and len(whole) == 2


@at_places(1, 2, 3)
def test_an_engine_of_any_stage_trains_a_model_made_under_sharded_init(at: Place) -> None:
    plain = made(at.rank, Everything, sharded=False, dtype=torch.float64)
    module = made(at.rank, Everything, dtype=torch.float64)
    optimizer, reference = (
        SGD([p for p in m.parameters() if p.requires_grad]) for m in (module, plain)
    )
    engine = Engine(module, optimizer, stage=at.stage)
    for number in range(2):
        everything_loss(engine, at.rank, number).backward()
        engine.step()
        reference.zero_grad()
        losses = [everything_loss(plain, r, number) for r in range(at.ranks)]
        torch.stack(losses).mean().backward()
        reference.step()
    same(engine.full_parameters(), dict(plain.named_parameters()), 1e-9)
    engine.close()
    assert all(type(p) is nn.Parameter for p in module.parameters())
