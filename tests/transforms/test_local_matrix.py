"""Rules for whole matrices in replicas that train apart, inner and outer: against plain models."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
from fzero.adapter import Engine
from fzero.checkpoint import load, save
from fzero.errors import LayoutError
from fzero.optim import from_torch, partition
from fzero.transforms.local import DEFAULT_OUTER
from tests.covering import covered
from tests.local_oracle import Replicas, sgd_of_diloco
from tests.optim.torch_cases import NOT_ELEMENTWISE

ROWS, EVERY, STEPS = 4, 2, 5
MESHES = {"2x2": (2, 2), "4x1": (4, 1), "1x4": (1, 4), "2": None}
SOAP: dict[str, Any] = {"betas": (0.95, 0.95), "eps": 1e-8, "weight_decay": 0.01}
SOAP |= {"refresh_every": 2, "max_size": 100}


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.Linear(4, 1)).double()


def data(ranks: int, steps: int = STEPS) -> Tensor:
    """[steps, ranks, ROWS, 4]: inputs and targets; another scale on each rank."""
    torch.manual_seed(2)
    x = torch.randn(steps, ranks, ROWS, 4, dtype=torch.float64)
    return x * torch.arange(1, ranks + 1)[:, None, None]


def error(module: Any, batch: Tensor) -> Tensor:
    return ((module(batch[..., :3])[..., 0] - batch[..., 3]) ** 2).mean()


class Several:
    """Some plain optimizers as one."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self.parts = parts

    def zero_grad(self) -> None:
        for one in self.parts:
            one.zero_grad()

    def step(self) -> None:
        for one in self.parts:
            one.step()

    @property
    def state(self) -> Any:
        return {p: s for one in self.parts for p, s in one.state.items()}


def by_dims(matrices: Any, others: Any) -> Callable[[list[Any]], Any]:
    def made(params: list[Any]) -> Any:
        some = [p for p in params if p.ndim == 2], [p for p in params if p.ndim != 2]
        pairs = zip((matrices, others), some, strict=True)
        return Several(*(make(own) for make, own in pairs if own))

    return made


class Orthogonal(torch.optim.Optimizer):
    """Muon in fp64: what `fzero.optim.muon` computes, line by line."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            b = self.state[p].setdefault("b", torch.zeros_like(p)).lerp_(p.grad, 1 - 0.95)
            u = p.grad.lerp(b, 0.95)
            rows, columns = p.shape
            x = (u.mT if rows > columns else u) / u.norm()
            for _ in range(5):
                gram = x @ x.mT
                x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
            x = x.mT if rows > columns else x
            p.mul_(1 - 0.1 * 0.1).sub_(0.1 * max(1, rows / columns) ** 0.5 * x)


def parted(matrices: Any, others: Any) -> Any:
    rules = {"matrices": matrices, "rest": others}
    return partition(rules, lambda leaf: "matrices" if len(leaf.shape) == 2 else "rest")


muon = partial(torch.optim.Muon, lr=0.02)
adafactor = partial(torch.optim.Adafactor, lr=0.02)
RULES: dict[str, tuple[Any, Any]] = {  # name: (ours, the plain optimizer of parameters)
    "muon": (
        lambda: parted(from_torch(muon), fzero.optim.adamw(0.01)),
        by_dims(muon, partial(torch.optim.AdamW, lr=0.01)),
    ),
    "adafactor": (lambda: from_torch(adafactor, needs="matrix"), adafactor),
    "shampoo": (
        lambda: fzero.optim.shampoo(0.05, eps=1e-3),
        fzero.optim.shampoo(0.05, eps=1e-3).source,
    ),
    "soap": (lambda: fzero.optim.soap(0.02, **SOAP), fzero.optim.soap(0.02, **SOAP).source),
}
NAMES = [name for name, _ in model().named_parameters()]


def ranks_of(mesh: str) -> tuple[int, int]:
    return MESHES[mesh] or (int(mesh), 1)


def step_of(mesh: str, stage: int, *, donate: bool = False, **options: Any) -> Any:
    apply, _ = fzero.functionalize(model())

    def step_fn(state: Any, batch: Tensor) -> Any:
        def loss(p: Any, x: Tensor) -> Tensor:
            return error(lambda x: apply(p, x), x)

        state, _ = fzero.grad_and_reduce(loss, state)(batch)
        return fzero.apply_gradients(state), None

    replicas, shards = ranks_of(mesh)
    step = fzero.local(step_fn, every=EVERY, **options)
    step = fzero.shard(step, stage=stage, mesh=MESHES[mesh], donate=donate)
    return fzero.simulate(step, world_size=replicas * shards)


def trained(step: Any, state: Any, batches: Tensor) -> Any:
    for batch in batches:
        state, _ = step(state, batch)
    return state


def plainly(mesh: str, batches: Tensor, inner: Any, **options: Any) -> Replicas:
    plain = Replicas(model(), ranks_of(mesh)[0], every=EVERY, inner=inner, **options)
    for batch in batches:
        plain.update(error, batch)
    return plain


def both(state: Any) -> Any:
    found = fzero.full_params(state), fzero.full_params(state, replica=True)
    return [[one[name] for name in NAMES] for one in found]


def require_equal(state: Any, plain: Replicas, mesh: str) -> None:
    replicas, shards = ranks_of(mesh)
    anchors, own = fzero.simulate(both, world_size=replicas * shards)(state)
    close = partial(torch.testing.assert_close, rtol=1e-7, atol=1e-9)
    for rank in range(replicas * shards):
        for one, wanted in zip(anchors, plain.anchors, strict=True):
            close(one[rank], wanted.detach())
        for one, wanted in zip(own, plain.modules[rank // shards].parameters(), strict=True):
            close(one[rank], wanted.detach())


ADAMW: tuple[Any, Any] = (lambda: fzero.optim.adamw(0.01), partial(torch.optim.AdamW, lr=0.01))
SGD: tuple[Any, Any] = (DEFAULT_OUTER, sgd_of_diloco)
OUTER: dict[str, tuple[Any, Any]] = {
    "outer muon": (
        parted(fzero.optim.muon(0.1, weight_decay=0.1, dtype=torch.float64), fzero.optim.sgd(0.5)),
        by_dims(partial(Orthogonal, lr=0.1), partial(torch.optim.SGD, lr=0.5)),
    ),
    "outer torch's muon": (
        parted(from_torch(muon), fzero.optim.adamw(0.01)),
        by_dims(muon, partial(torch.optim.AdamW, lr=0.01)),
    ),
    "outer adafactor": (from_torch(adafactor, needs="matrix"), adafactor),
    "outer soap": (fzero.optim.soap(0.02, **SOAP), fzero.optim.soap(0.02, **SOAP).source),
    "outer adam of torch": (from_torch(ADAMW[1]), ADAMW[1]),
}
CASES = {name: (rule, SGD) for name, rule in RULES.items()}
CASES |= {name: (ADAMW, rule) for name, rule in OUTER.items()}
CASES["both soap"] = (RULES["soap"], OUTER["outer soap"])


SOME = ["muon", "soap", "outer muon", "outer adafactor"]


@covered(name=SOME, mesh=["2x2", "4x1", "1x4"], stage=[0, 1, 2, 3])
def test_a_matrix_rule_trains_replicas_as_plain_models(
    name: str, mesh: str, stage: int, tmp_path: Path
) -> None:
    require_plain(name, mesh, stage, tmp_path)


@pytest.mark.slow
@covered(name=[x for x in CASES if x not in SOME], mesh=[*MESHES], stage=[0, 1, 2, 3])
def test_any_matrix_rule_does(name: str, mesh: str, stage: int, tmp_path: Path) -> None:
    require_plain(name, mesh, stage, tmp_path)


def require_plain(name: str, mesh: str, stage: int, folder: Path) -> None:
    """Also saved between two meetings, and resumed, on as many replicas: bit for bit."""
    (ours, inner), (outer, plain_outer) = CASES[name]
    fragments, late = 1 + stage % 2, int(stage == 2)
    replicas, shards = ranks_of(mesh)
    batches = data(replicas * shards)
    options: dict[str, Any] = {"delay": late, "mixing": late / 2}
    step = step_of(mesh, stage, donate=stage > 1, fragments=fragments, outer=outer, **options)
    first = {name: p.detach() for name, p in model().named_parameters()}
    start = step.init(first, ours())
    plain = plainly(mesh, batches, inner, outer=plain_outer, fragments=parts_of(start), **options)
    whole = trained(step, start, batches)
    require_equal(whole, plain, mesh)

    save(folder, trained(step, step.init(first, ours()), batches[:3]))
    after = trained(step, load(folder, step.init(first, ours())), batches[3:])
    for one, other in zip(both_of(whole, mesh), both_of(after, mesh), strict=True):
        assert torch.equal(one, other)


def parts_of(state: Any) -> list[list[int]]:
    """Which parameters are in each fragment."""
    layout, local = state.setup.layout, state.outer.local
    own = [local.numbers_in(f, len(layout.trainable)) for f in range(local.fragments)]
    groups = [[layout.groups[layout.trainable[k]] for k in some] for some in own]
    paths = [[layout.leaves[i].path for one in some for i in one.leaves] for some in groups]
    return [sorted(NAMES.index(path) for path in some) for some in paths]


def both_of(state: Any, mesh: str) -> list[Tensor]:
    replicas, shards = ranks_of(mesh)
    return [x for some in fzero.simulate(both, world_size=replicas * shards)(state) for x in some]


def test_a_replica_that_is_not_finite_begins_anew_with_what_owners_keep() -> None:
    """As a plain optimizer without state; the other replica goes on."""
    batches = data(4)
    batches[1, 2] = torch.nan  # on one rank of replica 1
    ours, inner = RULES["soap"]
    step = step_of("2x2", 2)
    first = {name: p.detach() for name, p in model().named_parameters()}
    with pytest.warns(UserWarning, match=r"replicas \[1\] of 2"):
        state = trained(step, step.init(first, ours()), batches)
    plain = Replicas(model(), 2, every=EVERY, inner=inner)
    for k, batch in enumerate(batches):
        plain.update(error, batch, out=[1] if k == 1 else [])
        if k == 1:
            plain.inner[1].state.clear()
    require_equal(state, plain, "2x2")


def test_other_replicas_and_none_begin_with_the_optimizer_of_the_first(tmp_path: Path) -> None:
    ours, _ = RULES["adafactor"]
    step = step_of("2x2", 3)
    first = {name: p.detach() for name, p in model().named_parameters()}
    saved = trained(step, step.init(first, ours()), data(4, steps=2))
    save(tmp_path, saved)
    other, alone = step_of("4x1", 1), fzero.init(first, ours(), stage=0)
    with pytest.warns(UserWarning, match="the optimizer state of replica 0"):
        found = [load(tmp_path, other.init(first, ours())), load(tmp_path, alone)]
    for state in found:
        assert torch.equal(state.optimizer.counters["step"][0].flatten()[:1], torch.tensor([2.0]))
        for kept, own in zip(saved.optimizer.owned["row_var"], state.optimizer.owned["row_var"],
                             strict=True):  # fmt: skip
            mine = [x for x in kept[:2] if x.any()]  # of the owner in replica 0
            for x in own.view(-1, *kept.shape[1:]) if mine else ():
                assert torch.equal(x, mine[0])


@pytest.mark.parametrize("stage", [1, 3])
def test_an_engine_trains_replicas_with_a_matrix_rule(stage: int) -> None:
    batches = data(4)

    def body(batches: Tensor) -> Any:
        module = model()
        rule = fzero.optim.soap(0.02, **SOAP)
        local = fzero.Local(every=EVERY)
        engine = Engine(module, rule, stage=stage, mesh=(2, 2), local=local)
        for batch in batches:
            engine.backward(error(engine, batch))
            engine.step()
        shown = engine.full_optimizer_states()
        assert all(some["exp_avg"].shape == p.shape for some, p in zip(
            shown.values(), model().parameters(), strict=True))  # fmt: skip
        return list(fzero.full_params(engine.state).values())

    found = fzero.simulate(body, world_size=4)(batches.transpose(0, 1))
    plain = plainly("2x2", batches, RULES["soap"][1])
    for one, wanted in zip(found, plain.anchors, strict=True):
        torch.testing.assert_close(one, wanted.detach().expand_as(one), rtol=1e-7, atol=1e-9)


def test_what_a_rule_needs_is_asked_and_not_what_it_is() -> None:
    first = {name: p.detach() for name, p in model().named_parameters()}
    clipped: Any = from_torch(NOT_ELEMENTWISE["clipped"][0])
    with pytest.raises(LayoutError, match="needs all parameters at once"):
        step_of("2", 0).init(first, clipped)
    for outer, seen in (
        (clipped, "needs all parameters at once"),
        (fzero.optim.muon(0.1), "is no matrix"),  # it has vectors, too
        (fzero.optim.no_optimizer(), "local: outer"),
        ((lambda p: (), lambda g, s: (g, s)), "local: outer"),
        (torch.optim.SGD, "local: outer"),
    ):
        with pytest.raises(LayoutError, match=seen):
            step_of("2x2", 2, outer=outer).init(first, fzero.optim.sgd(0.1))
