"""Tools and the collectives of an axis: plan, trace, check_spmd, pictures, a compiled step."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
from fzero.errors import LayoutError, MismatchError
from tests.adapter.on_ranks import on_ranks
from tests.covering import covered
from tests.descends import descends
from tests.strategies import integers, same

AXIS = {"ulysses": "seq", "ring_attention": "seq", "siglip": "ring"}
SGD = fzero.optim.sgd(2.0**-9)


def stepped(loss: Any, params: Any, mesh: Any, stage: int, args: list[Tensor]) -> Any:
    """(the step of one rank, the step of all, a state, the log of its third call)."""
    sharded = fzero.shard(descends(loss), stage=stage, mesh=mesh)
    step = fzero.simulate(sharded, world_size=len(args[0]))
    state = step.init(params, SGD)
    for _ in range(3):  # the first one asks, where ranks do not know what they will read
        with fzero.count_collectives() as log:
            state, _ = step(state, *args)
    return sharded, step, state, log


def without_rounds(counts: dict[str, int]) -> dict[str, int]:
    return {op: n for op, n in counts.items() if op != "agree"}


@covered(stage=[0, 2, 3], ranks=[2, 4], name=[*AXIS])
def test_plan_and_trace_have_the_counts_and_the_bytes_of_the_real_step(
    name: str, ranks: int, stage: int
) -> None:
    module = importlib.import_module(name)
    args = [torch.stack([module.piece(x, r, ranks) for r in range(ranks)]) for x in module.whole]
    mesh = {AXIS[name]: ranks}
    sharded, step, state, log = stepped(module.loss, module.params, mesh, stage, args)
    plan = fzero.plan.of_step(
        sharded, module.params, SGD, *(x[0] for x in args), world=ranks, device="cpu"
    )
    assert without_rounds(plan.collectives) == without_rounds(log.counts(0))
    sent = {op: log.wire_bytes(0, ops=(op,)) for op in without_rounds(log.counts(0))}
    assert {one.op: 0 for one in plan.traffic if one.op != "agree"} == dict.fromkeys(sent, 0)
    for op, size in sent.items():
        assert sum(one.wire_bytes for one in plan.traffic if one.op == op) == size
    trace = fzero.trace(step)(state, *args)
    assert trace.collectives == without_rounds(log.counts(0))
    assert trace.wire_bytes == sum(sent.values())


PARAMS = {"w": integers((4, 4), 1), "router": integers((4, 2), 2)}


def moe(p: Any, x: Tensor) -> Tensor:
    """One expert a rank along "expert"; data decide which rows it gets."""
    number = (x @ p["router"]).argmax(-1)
    order = number.argsort(stable=True)
    sizes = torch.nn.functional.one_hot(number, 2).sum(0)
    rows, received = fzero.all_to_all(x[order], sizes=sizes, axis="expert")
    back, _ = fzero.all_to_all(rows @ p["w"], sizes=received, axis="expert")
    return (back[order.argsort()] ** 2).sum() + fzero.pmax(x.detach().amax(), "data")


MOE_MESH = {"data": 2, "expert": 2}


@pytest.mark.parametrize("stage", [1, 3])
def test_where_data_decide_sizes_a_plan_has_a_bound(stage: int) -> None:
    """Counts are exact; bytes are those of a step in which every row leaves its rank."""
    xs = integers((4, 6, 4), 3)
    sharded, step, state, log = stepped(moe, PARAMS, MOE_MESH, stage, [xs])
    plan = fzero.plan.of_step(sharded, PARAMS, SGD, xs[0], world=4, device="cpu")
    assert without_rounds(plan.collectives) == without_rounds(log.counts(0))
    planned = sum(one.wire_bytes for one in plan.traffic if one.op == "all_to_all")
    assert planned == 3 * xs[0].numel() * 8  # there and back, and back again in the backward
    sent = [log.wire_bytes(rank, ops=("all_to_all",)) for rank in range(4)]
    assert 0 < sum(sent) <= 4 * planned
    assert fzero.trace(step)(state, xs).collectives == without_rounds(log.counts(0))


def test_a_plan_of_given_sizes_is_exact() -> None:
    def loss(p: Any, x: Tensor) -> Tensor:
        y, received = fzero.all_to_all(x * p["w"][0], sizes=[4, 2], axis="seq")
        return fzero.all_to_all(y, sizes=received, axis="seq")[0].sum()

    mesh, xs = {"data": 2, "seq": 2}, integers((4, 6, 4), 3)
    plan = fzero.plan.of_step(
        fzero.shard(descends(loss), stage=1, mesh=mesh), PARAMS, SGD, xs[0], world=4, device="cpu"
    )
    sent = [one.wire_bytes for one in plan.traffic if one.op == "all_to_all"]
    assert sum(sent) == 4 * 2 * 4 * 8  # there, back, and both in the backward; 2 rows each


def other_pairs(p: Any, x: Tensor) -> Tensor:
    pairs = [(0, 1), (1, 0)] if fzero.axis_index() else [(0, 0), (1, 1)]
    return (fzero.ppermute(x, pairs) * p["w"][0]).sum()


def other_dims(p: Any, x: Tensor) -> Tensor:
    dims = (0, 1) if fzero.axis_index() else (1, 0)
    y = fzero.all_to_all(x @ p["w"], split_dim=dims[0], concat_dim=dims[1])
    return y.sum()


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (other_pairs, "rank 0 has 0: ppermute dp 0>0 1>1 -> .*, rank 1 has 0: ppermute dp 0>1 1>0"),
        (other_dims, r"rank 0 has 0: all_to_all dp -> f64\[2,2,2\], rank 1 has 0: all_to_all dp"),
    ],
)
def test_check_spmd_tells_them_apart(loss: Any, message: str) -> None:
    step = fzero.simulate(fzero.shard(descends(loss), stage=0), world_size=2)
    state = step.init(PARAMS, SGD)
    with pytest.raises(MismatchError, match=message):
        fzero.check_spmd(step, state, integers((2, 2, 4), 1))


def test_a_difference_of_collectives_has_them() -> None:
    ring = importlib.import_module("ring_attention")
    args = [torch.stack([ring.piece(x, r, 2) for r in range(2)]) for x in ring.whole]
    _, step, state, _ = stepped(ring.loss, ring.params, {"seq": 2}, 3, args)
    trace = fzero.trace(step)(state, *args)
    assert trace.diff(trace, only="collectives").equal
    without = replace(trace, ops=tuple(op for op in trace.ops if op.name != "ppermute"), calls=())
    lines = trace.diff(without, only="collectives").lines
    assert "ppermute" in str(lines) and not any(line.startswith("-  ") for line in lines)


def moves(p: Any, x: Tensor) -> Tensor:
    y = fzero.all_to_all(x @ p["w"], split_dim=1, axis="seq")
    y = fzero.ppermute(y, [(0, 1)], axis="seq") + fzero.pmin(y.detach(), "seq")
    return (y**2).sum() + fzero.psum(y.sum(), "data") * fzero.pmax(x.detach().amax())


@on_ranks(4)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_compiled_step_has_their_bits(rank: int, stage: int) -> None:
    step = fzero.shard(descends(moves), stage=stage, mesh={"data": 2, "seq": 2})
    x = integers((4, 2, 4), 3)[rank]
    plain = compiled = step.init(PARAMS, SGD)
    run = fzero.compile(step, backend="eager")
    for _ in range(2):
        plain, _ = step(plain, x)
        compiled, _ = run(compiled, x)
        same(fzero.full_params(compiled), fzero.full_params(plain))
    by_data = fzero.shard(descends(moe), stage=stage, mesh=MOE_MESH)
    with pytest.raises(LayoutError, match="compile: all_to_all with sizes, along 'expert'"):
        fzero.compile(by_data, backend="eager")(by_data.init(PARAMS, SGD), x)
