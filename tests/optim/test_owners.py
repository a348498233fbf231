"""Rules that need whole matrices: flats are cut evenly, each parameter is updated by its owner."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
from fzero.adapter import Engine
from fzero.checkpoint import load, save
from fzero.errors import CallError, LayoutError
from fzero.machine import owners
from fzero.optim import from_torch
from tests.covering import covered
from tests.descends import descends
from tests.optim.cases import trained
from tests.optim.torch_cases import NOT_ELEMENTWISE, Lamb, by_torch, parameters
from tests.oracle import linear_loss
from tests.strategies import everywhere, integers

STEPS = 4
run = partial(trained, loss=linear_loss)  # its gradients are exact


class MuonAndAdam(torch.optim.Optimizer):
    """As many programs have it: matrices by Muon, all else by Adam, which counts its steps."""

    def __init__(self, of: Mapping[str, Tensor]) -> None:
        matrices = [p for p in of.values() if p.ndim == 2]
        others = [p for p in of.values() if p.ndim != 2]
        groups = [{"params": matrices, "muon": True}, {"params": others, "muon": False}]
        super().__init__(groups, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                update = self._by_muon(p) if group["muon"] else self._by_adam(p)
                p.sub_(group["lr"] * update)

    def _by_muon(self, p: Tensor) -> Tensor:
        state = self.state[p]
        momentum = state.setdefault("momentum_buffer", torch.zeros_like(p))
        momentum.mul_(0.9).add_(p.grad)
        x = momentum / (momentum.norm() + 1e-7)
        for _ in range(3):
            x = 1.5 * x - 0.5 * x @ x.t() @ x
        return x

    def _by_adam(self, p: Tensor) -> Tensor:
        state = self.state[p]
        if not state:
            state.update(step=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
        state["step"] += 1
        state["m"].lerp_(p.grad, 0.1)
        state["v"].lerp_(p.grad.square(), 0.01)
        return state["m"] / (1 - 0.9 ** state["step"]) / (state["v"].sqrt() + 1e-6)


class ByDims(MuonAndAdam):
    """The same in one param group: it looks at the parameter itself."""

    def __init__(self, of: Mapping[str, Tensor]) -> None:
        torch.optim.Optimizer.__init__(self, of.values(), {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.sub_(0.05 * (self._by_muon(p) if p.ndim == 2 else self._by_adam(p)))


OPTIMIZERS: dict[str, Any] = {
    "lamb": lambda of: Lamb(of.values()),
    "muon and adam": MuonAndAdam,
    "by dims": ByDims,
}


def close(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> None:
    for path, x in got.items():
        torch.testing.assert_close(x, want[path].expand_as(x), rtol=1e-12, atol=1e-14)


@covered(
    place=[(0, 3), (1, 4), (2, 1), (2, 3), (3, 2), (3, 5), (3, 8)],
    name=["muon", "lamb", "torch's adafactor", "hugging face's adafactor"],
    numel=[1, 2**23],  # of a batch: each parameter alone, all together
)
def test_the_bits_are_torchs(
    monkeypatch: pytest.MonkeyPatch, name: str, place: tuple[int, int], numel: int
) -> None:
    monkeypatch.setattr(owners, "BATCH_NUMEL", numel)
    owners._owners.cache_clear()
    (stage, ranks), (cls, options) = place, NOT_ELEMENTWISE[name]
    params = parameters()
    if name == "muon":  # torch's takes matrices only
        params = {path: p for path, p in params.items() if p.ndim == 2}
        params["other"] = torch.nn.Parameter(torch.ones(2, 7))
    xs = integers((STEPS, ranks), 9, torch.float32)
    got, _ = run(params, from_torch(partial(cls, **options), needs="leaf"), xs, stage=stage)
    everywhere(got, by_torch(params, xs, lambda of: cls(list(of.values()), **options)), ranks)


@pytest.mark.parametrize(
    ("stage", "mesh", "over"),
    [(1, (2, 2), "shard"), (3, (2, 2), "all"), (1, (4, 1), "all"), (3, (4, 1), "shard")],
)
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_replicas_of_shards_make_the_updates_of_one_process(
    name: str, stage: int, mesh: tuple[int, int], over: str, tmp_path: Path
) -> None:
    params, xs = parameters(torch.float64), integers((STEPS, 4), 8)
    made = OPTIMIZERS[name]
    ours = partial(
        run,
        params,
        from_torch(made(params), needs="leaf"),
        stage=stage,
        mesh=mesh,
        optimizer_over=over,
    )
    save(tmp_path, ours(xs[:2])[1])
    got, _ = ours(xs[2:], state=load(tmp_path, ours(xs[:0])[1]))
    close(got, by_torch(params, xs, made))


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_other_ranks_go_on_from_a_checkpoint(name: str, tmp_path: Path) -> None:
    params, made = parameters(torch.float64), OPTIMIZERS[name]
    xs = integers((6, 3), 8)
    ours = from_torch(made(params), needs="leaf")
    _, state = run(params, ours, xs[:2], stage=3)
    save(tmp_path, state)
    pairs = xs[:, :1].expand(6, 2)  # two ranks, of the same data
    _, fresh = run(params, ours, pairs[:0], stage=1)
    state = load(tmp_path, fresh)
    _, state = run(params, ours, pairs[2:4], stage=1, state=state)
    save(tmp_path, state)
    alone = load(tmp_path, fzero.init(params, ours, stage=0))
    got, _ = trained(params, ours, pairs[4:, 0], loss=linear_loss, stage=0, state=alone)
    close(got, by_torch(params, torch.cat([xs[:2], pairs[2:, :1].expand(4, 3)]), made))


@pytest.mark.parametrize("state_dtype", [None, torch.bfloat16])  # which steps one flat at a time
@pytest.mark.parametrize("made", [MuonAndAdam, ByDims])
def test_counters_are_the_same_on_ranks_that_hold_no_leaf_that_is_counted(
    made: Any, state_dtype: torch.dtype | None
) -> None:
    sizes = {"bias": (3,), "w1": (3, 3), "w2": (3, 3)}
    of = {path: torch.nn.Parameter(torch.ones(shape)) for path, shape in sizes.items()}
    ours = from_torch(made(of), state_dtype=state_dtype)
    with pytest.warns(UserWarning, match='say it[^`]*needs="leaf"') as seen:
        _, state = run(of, ours, integers((STEPS, 2), 8), stage=1)
    assert len(seen) == 1 and state.setup.optimizer.needs_whole("bias") == (made is ByDims)
    assert state.optimizer.counters["step"][-1].tolist() == [STEPS] * 2


def test_ranks_share_equal_matrices_and_hold_no_more() -> None:
    """Momentum is half on each of two ranks; also where a matrix is as large as a bucket."""
    side = 2**10
    params = {f"w{i}": torch.ones(side, side) for i in range(4)}
    step = fzero.shard(lambda state: (state, None), stage=2)
    state = fzero.simulate(step, world_size=2).init(params, from_torch(torch.optim.Muon))
    found = owners.owners_of(state.setup)
    assert found is not None
    assert [one.owner for one in found.leaves] == [0, 1, 0, 1]
    assert [x.shape for x in state.optimizer.owned["momentum_buffer"]] == [(2, side * side)] * 4
    assert [x.numel() for x in state.optimizer.slots.get("momentum_buffer", ())] == []
    assert sum(flat[0].numel() for flat in state.params.flats) == 4 * side * side


def test_an_engine_takes_it() -> None:
    def train(rank: Tensor) -> Any:
        torch.manual_seed(0)
        module = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2)).double()
        made = MuonAndAdam(dict(module.named_parameters()))
        engine = Engine(module, from_torch(made, needs="leaf"), stage=3)
        for x in integers((STEPS, 3, 4, 3), 5)[:, int(rank)]:
            engine(x).square().mean().backward()
            engine.step()
        return engine.full_state_dict()

    torch.manual_seed(0)
    alone = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2)).double()
    optimizer = MuonAndAdam(dict(alone.named_parameters()))
    for xs in integers((STEPS, 3, 4, 3), 5):
        optimizer.zero_grad()
        torch.stack([alone(x).square().mean() for x in xs]).mean().backward()
        optimizer.step()
    close(fzero.simulate(train, world_size=3)(torch.arange(3)), alone.state_dict())


@pytest.mark.parametrize("name", ["clipped", "noisy"])
def test_rules_that_need_more_than_one_leaf_are_refused(name: str) -> None:
    cls, options = NOT_ELEMENTWISE[name]
    with pytest.raises(LayoutError, match="is not elementwise, and does not update each"):
        run(parameters(), from_torch(partial(cls, **options)), torch.ones(1, 3), stage=1)


def test_what_replaces_the_option_is_said() -> None:
    old: Any = {"whole_parameters": True}
    with pytest.raises(
        CallError, match=r"'whole_parameters'[\s\S]*Fix: leave it out: where a rule"
    ):
        fzero.shard(lambda state: (state, None), stage=2, **old)
    with pytest.raises(
        CallError, match=r"'whole_parameters'[\s\S]*Fix: leave it out: where a rule"
    ):
        Engine(torch.nn.Linear(2, 2), torch.optim.Muon, stage=2, **old)
    wrong: Any = "vector"
    with pytest.raises(LayoutError, match="needs='vector'"):
        from_torch(torch.optim.Muon, needs=wrong)


@covered(stage=[0, 1, 2, 3], ranks=[2, 3, 8])
def test_bytes_beyond_those_of_adamw_are_those_that_must_cross(stage: int, ranks: int) -> None:
    """M (W - 1) at stage 0; gradients there, parameters back, and at stage 3 parameters there."""
    shapes = {"a": (16, 24), "b": (47, 16), "c": (8, 8), "d": (3, 1), "e": (5, 5), "f": (1, 9)}
    params = {path: torch.ones(shape) for path, shape in shapes.items()}
    step = descends(linear_loss)

    def bytes_of(optimizer: Any) -> int:
        run = fzero.simulate(fzero.shard(step, stage=stage), world_size=ranks)
        state = run.init(params, optimizer)
        with fzero.count_collectives() as log:
            run(state, torch.ones(ranks))
        return sum(log.wire_bytes(rank, ops=DATA) for rank in range(ranks))

    m = sum(p.numel() for p in params.values())
    more = bytes_of(from_torch(torch.optim.Muon)) - bytes_of(fzero.optim.adamw(0.1))
    times = {0: ranks, 1: 2, 2: 2, 3: 3}[stage]
    assert 0 < more <= 4 * times * m * (ranks - 1) / ranks
    assert stage or more == 4 * m * (ranks - 1)


DATA = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast")


@pytest.mark.parametrize("needs", ["element", "leaf", "matrix"])
def test_what_a_rule_needs_can_be_said(needs: Any) -> None:
    """SGD is right in both ways; it has owners where it is said to need matrices."""
    params, xs = parameters(torch.float64), integers((STEPS, 3), 8)
    made = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    got, state = run(params, from_torch(made, needs=needs), xs, stage=3)
    close(got, by_torch(params, xs, lambda of: made(of.values())))
    assert (owners.owners_of(state.setup) is None) == (needs == "element")


@covered(stage=[0, 1, 3], name=["torch's adafactor", "lamb"])
def test_an_engine_shows_takes_and_gives_back_what_owners_keep(stage: int, name: str) -> None:
    cls, options = NOT_ELEMENTWISE[name]
    make = partial(cls, **options)

    def begun() -> tuple[Any, Any]:
        torch.manual_seed(0)
        module = torch.nn.Linear(3, 5).double()
        optimizer = make(module.parameters())
        batch = integers((3, 4, 3), 5)
        for x in batch[:2]:
            descend(module, optimizer, x)
        return module, optimizer

    def descend(module: Any, optimizer: Any, x: Tensor) -> None:
        optimizer.zero_grad()
        module(x).square().mean().backward()
        optimizer.step()

    def train(rank: Tensor) -> Any:
        module, optimizer = begun()
        optimizer.zero_grad()
        engine = Engine(module, from_torch(optimizer, needs="leaf"), stage=stage)
        engine(integers((3, 4, 3), 5)[2]).square().mean().backward()
        engine.step()
        shown = engine.full_optimizer_states()
        for path, some in shown.items():
            for key, value in some.items():
                assert torch.equal(engine.full_optimizer_state(path, key), value)
                engine.set_full_optimizer_state(path, key, value)
        engine.close()
        return (
            dict(module.state_dict()),
            [dict(optimizer.state[p]) for p in module.parameters()],
            [{key: value for key, value in some.items()} for some in shown.values()],
        )

    module, optimizer = begun()
    descend(module, optimizer, integers((3, 4, 3), 5)[2])
    values, given, shown = fzero.simulate(train, world_size=2)(torch.arange(2))
    close(values, module.state_dict())
    for p, some, own in zip(module.parameters(), given, shown, strict=True):
        for key, value in optimizer.state[p].items():
            for found in (some[key], own[key]):
                want = torch.as_tensor(value).to(found.dtype)
                torch.testing.assert_close(found, want.expand_as(found), rtol=1e-12, atol=1e-14)


def test_what_owners_keep_has_no_place_in_a_universal_checkpoint(tmp_path: Path) -> None:
    params = {"w": torch.ones(3, 3)}
    state = fzero.init(params, from_torch(torch.optim.Muon), stage=0)
    with pytest.raises(LayoutError, match="no place for the optimizer's momentum_buffer, which"):
        fzero.checkpoint.save_universal(tmp_path, state)
