"""Engines with local updates: what differs by rank, and what is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fzero
from fzero.adapter import Engine
from fzero.checkpoint import load, save
from fzero.errors import MismatchError, PhaseError
from tests.adapter.on_ranks import on_ranks
from tests.local_oracle import Replicas
from tests.transforms.test_local import adam_of, data, error, model, plainly

LOCAL = fzero.Local(every=2, fragments=2)


def engine_of(stage: int, module: nn.Module, **options: Any) -> Engine:
    return Engine(module, adam_of(module.parameters()), stage=stage, local=LOCAL, **options)


@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(4)
def test_processes_train_as_plain_replicas_do(rank: int, world_size: int, stage: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    batches = data(4)
    module = model()
    with torch.no_grad():
        for p in module.parameters():
            p.add_(rank)  # replicas that start apart: rank 0 counts
    engine = engine_of(stage, module, mesh=mesh)
    for batch in batches:
        error(engine, batch[rank]).backward()
        engine.step()
    plain = plainly("2x2", 2, batches, fragments=[[0, 1], [2, 3]])
    anchors = fzero.full_params(engine.state).values()
    for found, wanted in zip(anchors, plain.anchors, strict=True):
        torch.testing.assert_close(found, wanted.detach())
    own = plain.modules[rank // 2].parameters()
    for found, wanted in zip(engine.full_parameters().values(), own, strict=True):
        torch.testing.assert_close(found, wanted.detach())
    fzero.check_replicas(engine.state)  # of one replica only
    engine.close()


@pytest.mark.xdist_group("gloo")
@on_ranks(4)
def test_a_file_has_each_replica_with_its_buffers(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    def net() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))

    def engine() -> Engine:
        return engine_of(2, net(), mesh=(2, 2))

    def train(one: Engine, some: Tensor) -> None:
        for batch in some:
            error(one, batch[rank]).backward()
            one.step()

    batches, whole, cut, again = data(4), engine(), engine(), engine()
    train(whole, batches)
    train(cut, batches[:3])
    save(tmp_path, cut)
    load(tmp_path, again)
    train(again, batches[3:])
    wanted = whole.module.state_dict()
    for name, found in again.module.state_dict().items():
        assert torch.equal(found, wanted[name]), name
    with pytest.warns(UserWarning, match="training starts at the anchors"):
        alone = load(tmp_path, Engine(net(), adam_of, stage=2))
    anchors = fzero.full_params(cut.state)
    for name, found in alone.full_parameters().items():
        assert torch.equal(found, anchors[name]), name


def test_replicas_start_at_the_values_of_rank_0_and_keep_their_buffers() -> None:
    def body(x: Tensor) -> Any:
        module: Any = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        with torch.no_grad():
            module[0].weight.fill_(x.mean())
        engine = engine_of(1, module)
        start = engine.full_parameters()["0.weight"].clone()
        engine(x).sum().backward()
        engine.step()
        return start, module[1].running_mean.clone()

    start, means = fzero.simulate(body, world_size=2)(torch.randn(2, 4, 3))
    assert torch.equal(start[0], start[1])
    assert not torch.equal(means[0], means[1])


def test_a_replica_that_makes_another_call_is_named_on_all() -> None:
    def body(x: Tensor) -> None:
        engine = engine_of(0, model())
        error(engine, x).backward()
        if fzero.axis_index() == 1:
            fzero.init({"w": torch.zeros(1)}, fzero.optim.sgd(1.0), stage=0)
        engine.step()

    with pytest.raises(MismatchError, match="the outer update of fragment 0"):
        fzero.simulate(body, world_size=2)(data(2)[0])


def test_new_values_that_anchors_would_miss_are_refused() -> None:
    engine = engine_of(3, model())
    value = torch.zeros(5, 3)
    calls = {
        "load_state_dict": lambda: engine.load_state_dict(model().state_dict()),
        "apply": lambda: engine.apply(lambda _: None),
        "set_full_parameter": lambda: engine.set_full_parameter("0.weight", value),
        "set_local_parameter": lambda: engine.set_local_parameter("0.weight", value),
    }
    for name, call in calls.items():
        with pytest.raises(PhaseError, match=name):
            call()
    with pytest.raises(PhaseError, match="without local updates"):
        fzero.leave_out(Engine(model(), adam_of, stage=0).state)


def test_two_engines_meet_in_the_order_of_their_steps() -> None:
    def body(x: Tensor) -> Any:
        first, second = engine_of(2, model(), mesh=(2, 2)), engine_of(3, model(), mesh=(2, 2))
        for batch in x:
            loss = error(first, batch) + error(second, batch)
            loss.backward()
            first.step()
            second.step()
        return [list(fzero.full_params(one.state).values()) for one in (first, second)]

    batches = data(4)
    found = fzero.simulate(body, world_size=4)(batches.transpose(0, 1))
    plain = plainly("2x2", 2, batches, fragments=[[0, 1], [2, 3]])
    for some in found:
        for one, wanted in zip(some, plain.anchors, strict=True):
            torch.testing.assert_close(one[3], wanted.detach())


def test_an_optimizer_that_has_stepped_goes_on_in_every_replica() -> None:
    def stepped(module: nn.Module) -> torch.optim.Optimizer:
        optimizer = adam_of(module.parameters())
        error(module, data(2)[0, 0]).backward()
        optimizer.step()
        optimizer.zero_grad()
        return optimizer

    def body(x: Tensor) -> Any:
        module = model()
        engine = Engine(module, stepped(module), stage=2, mesh=(2, 2), local=LOCAL)
        for batch in x:
            error(engine, batch).backward()
            engine.step()
        return list(fzero.full_params(engine.state).values())

    batches, start = data(4), model()
    found = fzero.simulate(body, world_size=4)(batches.transpose(0, 1))
    held = stepped(start).state_dict()
    plain = Replicas(start, 2, every=2, inner=adam_of, fragments=[[0, 1], [2, 3]])
    for one in plain.inner:
        one.load_state_dict(copy.deepcopy(held))
    for batch in batches:
        plain.update(error, batch)
    for one, wanted in zip(found, plain.anchors, strict=True):
        torch.testing.assert_close(one[3], wanted.detach())
