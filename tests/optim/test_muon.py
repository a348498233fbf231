"""`muon` and `partition`: the bits of torch's optimizers on one process, at every stage."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
from fzero.adapter import Engine
from fzero.checkpoint import load, save
from fzero.errors import LayoutError, PhaseError
from fzero.machine import owners
from fzero.optim import adamw, from_torch, muon, partition
from tests.covering import covered
from tests.descends import descends
from tests.optim.cases import trained
from tests.optim.torch_cases import by_torch
from tests.oracle import linear_loss
from tests.ranks import run_ranks
from tests.strategies import everywhere, integers

STEPS = 4
run = partial(trained, loss=linear_loss)
MATRICES = {"a": (3, 5), "b": (8, 2), "c": (3, 5), "d": (1, 9), "e": (1, 1), "f": (17, 4)}
MODEL = {"a": (3, 5), "c": (3, 5), "emb": (11, 3), "f": (17, 4), "s": (), "v": (8,)}
DATA = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast")


def parameters(
    shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype = torch.float32
) -> dict[str, nn.Parameter]:
    torch.manual_seed(1)
    return {path: nn.Parameter(torch.randn(shape).to(dtype)) for path, shape in shapes.items()}


class Both(torch.optim.Optimizer):
    """Two of torch's, as programs step them."""

    def __init__(self, of: Mapping[str, Tensor]) -> None:
        matrices, rest = (
            [p for k, p in of.items() if (k in "acf") is yes] for yes in (True, False)
        )
        self.both = torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(rest, 0.01, fused=True)
        super().__init__([{"params": matrices}, {"params": rest}], {})

    def step(self, closure: Any = None) -> None:
        for one in self.both:
            one.step()


def label(leaf: Any) -> str:
    return "matrices" if leaf.path in "acf" else "rest"


OURS = partition({"matrices": muon(0.01), "rest": adamw(0.01)}, label)
FOREIGN = partition(
    {
        "matrices": from_torch(partial(torch.optim.Muon, lr=0.01)),
        "rest": from_torch(partial(torch.optim.AdamW, lr=0.01)),
    },
    label,
)


@covered(
    strength=2,
    place=[(0, 1), (0, 3), (1, 4), (2, 2), (2, 3), (3, 2), (3, 5), (3, 8)],
    options=[{}, {"nesterov": False, "weight_decay": 0.0}, {"ns_steps": 3, "momentum": 0.5}],
    numel=[1, 2**23],
)
def test_the_bits_are_torchs(
    monkeypatch: pytest.MonkeyPatch, place: tuple[int, int], options: dict[str, Any], numel: int
) -> None:
    monkeypatch.setattr(owners, "BATCH_NUMEL", numel)
    owners._owners.cache_clear()
    (stage, ranks), xs = place, integers((STEPS, place[1]), 9, torch.float32)
    params = parameters(MATRICES)
    got, state = run(params, muon(0.01, **options), xs, stage=stage)
    everywhere(
        got,
        by_torch(params, xs, lambda of: torch.optim.Muon([*of.values()], 0.01, **options)),
        ranks,
    )
    elements = sum(flat[0].numel() for flat in state.params.flats) if stage == 3 else 0
    assert elements in (0, sum(flat[0].numel() for flat in state.optimizer.moments[0]))


@covered(ours=[OURS, FOREIGN], place=[(0, 2), (1, 3), (2, 2), (3, 3)])
def test_matrices_and_the_rest_by_two_rules_over_a_checkpoint(
    tmp_path: Path, ours: Any, place: tuple[int, int]
) -> None:
    """Saved at one stage and number of ranks, gone on with at another."""
    stage, ranks = place
    params, xs = parameters(MODEL), integers((STEPS, ranks), 9, torch.float32)
    xs = xs[:, :1].expand(STEPS, ranks)  # of the same data, so that a mean is that of one rank
    _, state = run(params, ours, xs[:2], stage=stage)
    save(tmp_path, state)
    _, fresh = run(params, ours, xs[:0, :1].expand(0, 2), stage=3 - stage)
    got, _ = run(
        params, ours, xs[2:, :1].expand(2, 2), stage=3 - stage, state=load(tmp_path, fresh)
    )
    everywhere(got, by_torch(params, xs[:, :1], Both), 2)


@covered(stage=[0, 1, 2, 3], ranks=[2, 3, 8])
def test_what_crosses_beyond_adamw_is_an_update_there_and_back(stage: int, ranks: int) -> None:
    """In bf16: 2 M (W - 1) / W elements at most, summed over ranks; M (W - 1) at stage 0."""
    shapes = {"a": (16, 24), "b": (47, 16), "c": (8, 8), "d": (3, 1), "e": (5, 5), "f": (1, 9)}
    params = {path: torch.ones(shape) for path, shape in shapes.items()}

    def bytes_of(optimizer: Any) -> int:
        step = fzero.simulate(fzero.shard(descends(linear_loss), stage=stage), world_size=ranks)
        state = step.init(params, optimizer)
        with fzero.count_collectives() as log:
            step(state, torch.ones(ranks))
        return sum(log.wire_bytes(rank, ops=DATA) for rank in range(ranks))

    m = sum(p.numel() for p in params.values())
    more = bytes_of(muon(0.1)) - bytes_of(adamw(0.1))
    if stage:
        assert 0 < more <= 2 * 2 * m * (ranks - 1) / ranks
    else:
        assert more == 2 * m * (ranks - 1)


@covered(stage=[0, 1, 2, 3], way=["functional", "engine"])
def test_a_window_is_one_update(stage: int, way: str) -> None:
    """Momentum and iteration once an update, not once a micro-batch; clipped, with a loss scale."""
    batches = integers((STEPS, 3, 2, 4, 3), 5, torch.float32)  # updates, micro-batches, ranks

    def model() -> nn.Linear:
        torch.manual_seed(0)
        return nn.Linear(3, 5, bias=False)

    def loss_of(module: Any, x: Tensor) -> Tensor:
        return (module(x) * x.sum()).sum()

    def by_engine(rank: Tensor) -> Any:
        engine = Engine(model(), muon(0.01), stage=stage, max_norm=1.0, loss_scale=8.0)
        for xs in batches[:, :, int(rank)]:
            with engine.coalesce():
                for x in xs:
                    engine.backward(loss_of(engine, x))
            engine.step()
        return engine.full_state_dict()["weight"]

    def by_steps(rank: Tensor) -> Any:
        apply, params = fzero.functionalize(model())

        def step_fn(state: Any, xs: Tensor) -> Any:
            for x in xs:
                state, _ = fzero.grad_and_reduce(lambda p, x: loss_of(partial(apply, p), x), state)(
                    x
                )
            return fzero.apply_gradients(state), None

        step = fzero.scale_loss(fzero.clip(fzero.coalesce(step_fn), max_norm=1.0), scale=8.0)
        step = fzero.shard(step, stage=stage, donate=True)
        state = step.init(params, muon(0.01))
        for xs in batches[:, :, int(rank)]:
            state, _ = step(state, xs)
        return fzero.full_params(state)["weight"]

    plain = model()
    optimizer = torch.optim.Muon(plain.parameters(), 0.01)
    for xs in batches:
        optimizer.zero_grad()
        (torch.stack([loss_of(plain, x) for x in xs.flatten(0, 1)]).sum() / 2).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
    train: Any = by_engine if way == "engine" else by_steps
    got = fzero.simulate(train, world_size=2)(torch.arange(2))
    torch.testing.assert_close(got, plain.weight.detach().expand_as(got), rtol=1e-2, atol=1e-4)


def test_an_overflow_changes_nothing() -> None:
    params = parameters(MATRICES)
    step = fzero.shard(fzero.scale_loss(descends(linear_loss), scale="dynamic"), stage=2)
    simulated = fzero.simulate(step, world_size=3)
    state = simulated.init(params, muon(0.01))
    full = fzero.simulate(fzero.full_params, world_size=3)
    before = full(state)
    state, _ = simulated(state, torch.tensor([1.0, float("inf"), 1.0]))
    for path, p in full(state).items():
        assert torch.equal(p, before[path])
    assert not any(flat.any() for flat in state.optimizer.moments[0])


@pytest.mark.parametrize("masters", [True, False])
def test_16_bit_matrices_have_masters_that_are_cut_evenly(masters: bool) -> None:
    params = parameters(MATRICES, torch.bfloat16)
    xs = integers((STEPS, 2), 9, torch.float32)
    ours = muon(0.01, master_weights=masters)
    sharded, state = run(params, ours, xs, stage=3)
    alone, _ = run(params, ours, xs, stage=0)
    for path, p in sharded.items():  # torch's kernels of 16 bits round the ends of a flat otherwise
        torch.testing.assert_close(p, alone[path], rtol=0.0 if masters else 2**-7, atol=0.0)
    kept = [flat.numel() for flat in state.optimizer.masters]
    assert kept == [flat.numel() * masters for flat in state.params.flats]


def test_a_fused_qkv_is_three_matrices() -> None:
    shapes = {"k": (4, 4), "q": (4, 4), "v": (4, 4)}
    apart = parameters(shapes)
    fused = {"qkv": torch.cat([apart[name].detach() for name in "qkv"])}

    def loss(params: Any, x: Tensor) -> Tensor:
        parts = params["qkv"].split(4) if "qkv" in params else [params[name] for name in "qkv"]
        return sum((i + 1) * (part * x).sum() for i, part in enumerate(parts))  # type: ignore[return-value]

    xs = integers((STEPS, 3), 9, torch.float32)
    got, _ = trained(fused, muon(0.01, split=lambda leaf: [4, 4, 4]), xs, loss=loss, stage=3)
    want, _ = trained(apart, muon(0.01), xs, loss=loss, stage=3)
    assert torch.equal(got["qkv"], torch.cat([want[name] for name in "qkv"], dim=1))
    whole, _ = trained(fused, muon(0.01), xs, loss=loss, stage=3)
    assert not torch.equal(got["qkv"], whole["qkv"])
    with pytest.raises(LayoutError, match=r"split gave \[4, 4\] for qkv, which has 12 rows"):
        fzero.init(fused, muon(0.01, split=lambda leaf: [4, 4]), stage=0)


def test_what_is_no_matrix_is_refused_with_the_way() -> None:
    for shape in ((), (3,)):
        with pytest.raises(LayoutError, match=r"muon: x has the shape .*[\s\S]*optim\.partition"):
            fzero.init({"x": torch.ones(shape)}, muon(0.01), stage=0)
    with pytest.raises(LayoutError, match="the label of x is 'other'"):
        fzero.init({"x": torch.ones(3)}, partition({"a": adamw(0.1)}, lambda _: "other"), stage=0)
    wrong: Any = {"a": torch.optim.AdamW}
    with pytest.raises(LayoutError, match="partition: rules="):
        partition(wrong, lambda _: "a")
    state = fzero.init({"x": torch.eye(3)}, muon(0.01), stage=0)
    with pytest.raises(PhaseError, match=r"muon\(.*differentiated or traced"):
        fzero.trace(descends(lambda p: p["x"].sum()))(state)


@covered(adjust=["original", "match_rms_adamw"], tall=[False, True])
def test_rates_are_of_full_shapes(adjust: str, tall: bool) -> None:
    params = parameters({"w": (8, 3) if tall else (3, 8)})
    xs = integers((STEPS, 5), 9, torch.float32)
    got, _ = run(params, muon(0.01, adjust_lr=adjust), xs, stage=3)
    torchs = partial(torch.optim.Muon, lr=0.01, adjust_lr_fn=adjust)
    everywhere(got, by_torch(params, xs, lambda of: torchs([*of.values()])), 5)


def test_unused_matrices_stay_as_they_are() -> None:
    """As with torch.optim, where an engine gives a parameter no gradient."""

    def train(rank: Tensor) -> Any:
        torch.manual_seed(0)
        module = nn.ModuleDict({k: nn.Linear(3, 3, bias=False) for k in "ab"})
        used: Any = module["a"]
        engine = Engine(module, muon(0.01), stage=2)
        for _ in range(2):
            engine.backward(used(torch.eye(3)).sum())
            engine.step()
        return engine.full_state_dict()

    torch.manual_seed(0)
    begin = nn.ModuleDict({k: nn.Linear(3, 3, bias=False) for k in "ab"}).state_dict()
    got = fzero.simulate(train, world_size=2)(torch.arange(2))
    assert torch.equal(got["b.weight"][0], begin["b.weight"])
    assert not torch.equal(got["a.weight"][0], begin["a.weight"])


def on_gloo(rank: int, world_size: int, name: str, stage: int) -> dict[str, Tensor]:
    ours = {"ours": OURS, "foreign": FOREIGN}[name]
    xs = integers((STEPS, world_size), 9, torch.float32)[:, rank]
    got, _ = trained(parameters(MODEL), ours, xs, loss=linear_loss, stage=stage)
    return {path: p.detach() for path, p in got.items()}


@pytest.mark.smoke
@pytest.mark.xdist_group("gloo")
@covered(name=["ours", "foreign"], place=[(0, 2), (1, 2), (3, 2), (2, 4)])
def test_processes_have_the_bits_of_one(name: str, place: tuple[int, int]) -> None:
    stage, ranks = place
    want = by_torch(parameters(MODEL), integers((STEPS, ranks), 9, torch.float32), Both)
    for found in run_ranks(on_gloo, ranks, name, stage):
        for path, p in found.items():
            assert torch.equal(p, want[path]), path


@covered(
    ours=[OURS, FOREIGN],
    options=[
        {"stage": 1, "mesh": (2, 2)},
        {"stage": 3, "mesh": (2, 2), "optimizer_over": "all"},
        {"stage": 2, "mesh": (4, 1)},
        {"stage": 3, "mesh": (1, 4)},
    ],
    away=[{"optimizer": None}, {"optimizer": "disk"}, {"gradients": "cpu"}],
)
def test_replicas_and_offloaded_states(
    tmp_path: Path, ours: Any, options: dict[str, Any], away: dict[str, Any]
) -> None:
    xs = integers((STEPS, 4), 9, torch.float32)
    step = fzero.offload(descends(linear_loss), folder=str(tmp_path), **away)
    sharded = fzero.simulate(fzero.shard(step, donate=True, **options), world_size=4)
    state = sharded.init(parameters(MODEL), ours)
    for x in xs:
        state, _ = sharded(state, x)
    got = fzero.simulate(fzero.full_params, world_size=4)(state)
    everywhere(got, by_torch(parameters(MODEL), xs, Both), 4)


@covered(name=["ours", "foreign"], stage=[0, 2, 3])
def test_a_plain_step_leaves_the_old_state_as_it_was(name: str, stage: int) -> None:
    """Without donation both the old and the new state are good."""
    ours = {"ours": OURS, "foreign": FOREIGN}[name]
    step = fzero.simulate(fzero.shard(descends(linear_loss), stage=stage), world_size=2)
    full = fzero.simulate(fzero.full_params, world_size=2)
    first, _ = step(step.init(parameters(MODEL), ours), torch.ones(2))
    before = full(first)
    second, _ = step(first, torch.ones(2))
    again, _ = step(first, torch.ones(2))
    for path, p in full(first).items():
        assert torch.equal(p, before[path])
        assert torch.equal(full(second)[path], full(again)[path])
