"""Collectives and other libraries on `p.grad` and on parameters: nothing that they write is lost.

What an engine does not do as plain PyTorch does is refused by name, and the next update is right.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed._functional_collectives import all_reduce_inplace
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import fzero
from fzero.adapter import Engine, gathered
from fzero.errors import FzeroError, LayoutError, MismatchError, PhaseError
from tests.adapter.nets import Net
from tests.adapter.on_ranks import STAGES, Place, on_ranks, virtually
from tests.adapter.plain import Draw, Reference, back, engine_of, same

Tensors = list[Any]


def average(xs: Tensors) -> None:
    """`average_gradients()` of torch's tutorial."""
    for x in xs:
        dist.all_reduce(x.data, op=dist.ReduceOp.SUM)
        x.data /= dist.get_world_size()


def average_later(xs: Tensors) -> None:
    work: Tensors = [dist.all_reduce(x, async_op=True) for x in xs]
    for one, x in zip(work, xs, strict=True):
        one.wait()
        x /= dist.get_world_size()


def average_flat(xs: Tensors) -> None:
    """As apex and the first DDP had it."""
    flat = _flatten_dense_tensors([x.data for x in xs])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for x, mean in zip(xs, _unflatten_dense_tensors(flat, xs), strict=True):
        x.copy_(mean)


def average_coalesced(xs: Tensors) -> None:
    with dist._coalescing_manager():
        for x in xs:
            dist.all_reduce(x.data)


def coalesced(xs: Tensors) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        dist.all_reduce_coalesced([x.data for x in xs])


def gather(xs: Tensors) -> None:
    mine = torch.zeros(xs[0].shape, dtype=xs[0].dtype)
    dist.all_gather([xs[0].data for _ in range(dist.get_world_size())], mine)


def scatter(xs: Tensors) -> None:
    some = [torch.zeros(xs[0].shape, dtype=xs[0].dtype) for _ in range(dist.get_world_size())]
    dist.scatter(xs[0].data, some if dist.get_rank() == 0 else None)


HABITS: tuple[Callable[[Tensors], Any], ...] = (
    average,
    average_later,
    average_coalesced,
    gather,
    scatter,
    lambda xs: dist.broadcast(xs[0].data, 0),
    lambda xs: dist.reduce(xs[0].data, 0),
    coalesced,
    lambda xs: dist.group.WORLD and dist.group.WORLD.allreduce([xs[0].data]).wait(),
    lambda xs: dist.all_to_all_single(xs[0].data, xs[0].detach().clone()),
    lambda xs: dist.irecv(xs[0].data, 0),
)
WRITES: tuple[Callable[[Tensors], Any], ...] = (
    lambda xs: torch._foreach_add_([x.data for x in xs], 1.0),
    lambda xs: torch._foreach_copy_([x.data for x in xs], [torch.zeros_like(x) for x in xs]),
    lambda xs: torch.add(xs[0], 1.0, out=xs[0]),
    lambda xs: vector_to_parameters(torch.zeros(10**3, dtype=xs[0].dtype), xs),
    lambda xs: all_reduce_inplace(xs[0].data, "sum", dist.group.WORLD),
    average_flat,
)
"""Of parameters; of gradients at stage 0 they are edits as in torch (test_edited_gradients.py)."""


@on_ranks(1, 2)
def test_a_collective_by_hand_is_refused_and_the_update_is_that_of_one_process(
    rank: int, world_size: int
) -> None:
    for stage in STAGES:
        e, plain = engine_of(Net, stage), Reference(Net, world_size)
        for number in range(2):
            wanted = plain.run(back, number)
            back(e, Draw(rank, number))
            with torch.no_grad():
                for habit in HABITS:
                    with pytest.raises(FzeroError, match=r"(?s)p\.grad.*Fix: "):
                        habit([p.grad for p in e.module.parameters()])
                for habit in (*HABITS, *WRITES) if stage == 3 and world_size > 1 else ():
                    with pytest.raises(LayoutError, match=r"(?s)LazyParam.*Fix: .*gathered"):
                        habit(list(e.module.parameters()))
            with pytest.raises(PhaseError, match="mean over ranks already"):
                average([p.grad for p in e.module.parameters()])
            same(e.full_gradients(), wanted, label=f"stage {stage}")
            assert e.step()
            same(e.full_parameters(), plain.step(wanted), label=f"stage {stage}")
        e.close()


@on_ranks(2)
def test_what_only_reads_is_right_and_what_writes_parameters_below_stage_3(
    rank: int, world_size: int
) -> None:
    for stage in STAGES:
        e, plain = engine_of(Net, stage), Reference(Net, world_size)
        wanted = plain.run(back, 0)
        back(e, Draw(rank, 0))
        some = list(e.module.parameters())
        whole = torch.cat([x.flatten() for x in plain.parameters().values()])
        assert torch.equal(parameters_to_vector(p.data for p in some), whole)
        rows = [torch.zeros_like(whole[:1]).expand(some[0].shape).clone() for _ in range(2)]
        dist.all_gather(rows, some[0].data)
        assert torch.equal(rows[0], rows[1]) and torch.equal(rows[1], some[0].data.clone())
        if stage == 0:
            of_all = torch.cat([g.flatten() for g in wanted.values()])
            shown: Any = [p.grad for p in some]
            assert torch.allclose(parameters_to_vector(shown), of_all)
            mean = shown[0].clone()
            dist.all_reduce(mean)
            assert torch.allclose(mean / 2, shown[0].clone())
        if stage < 3:  # ordinary memory
            for p in some:
                dist.broadcast(p.data, 0)
            average([p.detach() for p in some])
        with gathered(e.module, modify=True):  # at each stage
            average(some)
        assert e.step()
        same(e.full_parameters(), plain.step(wanted), label=f"stage {stage}")
        e.close()


@on_ranks(2)
def test_masters_follow_values_that_one_rank_has_written_and_sent_to_the_others(
    rank: int, world_size: int
) -> None:
    """A collective on `p.data` is no write that torch counts."""
    for stage in (0, 1, 2):
        module = torch.nn.Linear(3, 2, dtype=torch.bfloat16)
        e = Engine(module, torch.optim.SGD(module.parameters(), lr=1.0), stage=stage)
        with torch.no_grad():
            for p in module.parameters():
                if rank == 0:
                    p.fill_(2.0)
                dist.broadcast(p.data, 0)
        e(torch.full((1, 3), 0.5, dtype=torch.bfloat16)).sum().backward()
        assert e.step()
        assert e.full_parameter("weight").tolist() == [[1.5] * 3] * 2
        assert module.weight.tolist() == [[1.5] * 3] * 2
        e.close()


UNCOUNTED: dict[str, Callable[[Any, float], Any]] = {
    "add_": lambda p, by: p.data.add_(by),
    "noise": lambda p, by: p.data.mul_(1 + by * torch.rand(p.shape, dtype=p.dtype)),
    "detach": lambda p, by: p.detach().numpy().__iadd__(by),
    "load": lambda p, by: p.data.copy_(torch.full_like(p, by)),
}


@virtually(1, 2, 3)
@pytest.mark.parametrize("way", UNCOUNTED)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_writes_that_torch_does_not_count_are_compared(at: Place, stage: int, way: str) -> None:
    e, plain = Place(at.rank, at.ranks, stage).both(Net)
    names = ("a.weight", "c.bias")
    for number in range(2):
        wanted = plain.run(back, number)
        back(e, at.draw(number))
        for of, by in ((e.module, 0.25 * (at.rank + 1)), (plain.module, 0.25)):
            torch.manual_seed(1)
            for name in names[:number]:
                UNCOUNTED[way](of.get_parameter(name), by)
        if number and at.ranks > 1:
            with pytest.raises(MismatchError, match=r"parameter a\.weight"):
                e.step()
            with gathered(e.module, modify=True):
                pass
        if number and way == "load":  # alike
            for name in names:
                e.module.get_parameter(name).data.fill_(0.5)
                plain.module.get_parameter(name).data.fill_(0.5)
        assert e.step()
        same(e.full_parameters(), plain.step(wanted))
    e.close()


@virtually(1, 2)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_masters_follow_writes_that_torch_does_not_count(at: Place, stage: int) -> None:
    module = torch.nn.Linear(3, 2, dtype=torch.bfloat16)
    e = Engine(module, torch.optim.SGD(module.parameters(), lr=1.0), stage=stage)
    for _ in range(2):
        module.weight.data.fill_(2.0)
        e(torch.full((1, 3), 0.5, dtype=torch.bfloat16)).sum().backward()
        assert e.step()
        assert e.full_parameter("weight").tolist() == [[1.5] * 3] * 2
    e.close()


# Other libraries, and operators of one's own.


def writes(x: Tensor) -> None:
    x.detach().numpy()[:] = 0


EXITS: tuple[tuple[Callable[[Any], Any], Any], ...] = (
    (writes, ValueError),
    (lambda x: np.asarray(x.detach()).__setitem__(0, 0), ValueError),
    (lambda x: torch.from_dlpack(x.detach()), FzeroError),
    (lambda x: np.from_dlpack(x.detach()), FzeroError),
    (lambda x: torch.utils.dlpack.to_dlpack(x.detach()), RuntimeError),
    (lambda x: x.detach().data_ptr(), FzeroError),
    (lambda x: torch.Tensor.data_ptr(x.detach()), RuntimeError),
    (lambda x: x.storage(), FzeroError),
    (lambda x: x.untyped_storage(), FzeroError),
    (lambda x: x.share_memory_(), FzeroError),
    (lambda x: x.view(-1).detach().numpy().fill(0), ValueError),
)


@virtually(2)
@pytest.mark.parametrize("stage", [0, 3])
def test_memory_that_is_not_there_is_neither_given_away_nor_written(stage: int) -> None:
    e = engine_of(Net, stage)
    back(e, Draw(0, 0))
    p = e.module.get_parameter("a.weight")
    stand_in: Any = p.grad if stage == 0 else p
    before = stand_in.detach().clone()
    assert np.asarray(stand_in.detach()).tolist() == before.tolist() == stand_in.tolist()
    assert stand_in.detach().numpy().sum() == before.numpy().sum()
    with pytest.raises(RuntimeError, match="requires grad"):  # as in torch
        p.numpy()
    for do, error in EXITS:
        with pytest.raises(error):
            do(stand_in)
    assert torch.equal(stand_in.detach().clone(), before)
    mine = stand_in.detach().clone().numpy()
    mine[:] = 0  # a copy is one's own


OPS = torch.library.Library("fzero_test_by_hand", "DEF")


def wipe(x: Tensor) -> None:
    x.zero_()


def halve(xs: list[Tensor]) -> Tensor:
    return xs[0].mul_(0.5).sum()


def twice(x: Tensor) -> Tensor:
    return x * 2


for schema, body in (
    ("wipe(Tensor x) -> ()", wipe),
    ("halve(Tensor[] xs) -> Tensor", halve),
    ("twice(Tensor x) -> Tensor", twice),
    ("marked(Tensor(a!) x) -> ()", wipe),
):
    OPS.define(schema)
    OPS.impl(schema.partition("(")[0], body, "CompositeExplicitAutograd")


@virtually(2)
@pytest.mark.parametrize("stage", [0, 3])
def test_an_operator_without_marks_is_judged_by_what_it_did(stage: int) -> None:
    e = engine_of(Net, stage)
    back(e, Draw(0, 0))
    p = e.module.get_parameter("a.weight")
    ops: Any = torch.ops.fzero_test_by_hand
    with torch.no_grad():
        stand_in: Any = p.grad if stage == 0 else p.data
        before = stand_in.clone()
        assert torch.equal(ops.twice(stand_in), before * 2)
        for do in (ops.wipe, ops.marked, lambda x: ops.halve([x])):
            with pytest.raises(FzeroError, match=r"(?s)fzero_test_by_hand.*Fix: "):
                do(stand_in)
            assert torch.equal(stand_in.clone(), before)
        if stage == 3:
            with gathered(p, modify=True):
                ops.halve([p])
            with gathered(p, modify=True):
                ops.marked(p.view(-1)[:1])
            wanted = before / 2
            wanted.view(-1)[0] = 0
            assert torch.equal(e.full_parameter("a.weight"), wanted)


def test_a_functional_step_refuses_the_same() -> None:
    def loss(params: Any) -> Tensor:
        ops: Any = torch.ops.fzero_test_by_hand
        with pytest.raises(LayoutError, match="fzero_test_by_hand"):
            ops.wipe(params["w"].detach())
        assert ops.twice(params["w"].detach()).sum() == 12
        return 2 * params["w"].sum()

    def run() -> Tensor:
        params = {"w": torch.arange(4.0)}
        state = fzero.init(params, fzero.optim.sgd(1.0), stage=3)
        return fzero.grad_and_reduce(loss, state)()[1]

    assert fzero.simulate(run, world_size=2)().tolist() == [12.0] * 2
