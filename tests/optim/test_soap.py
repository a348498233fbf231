"""`soap`: its formula written out on one process, at every stage; what rounding may not choose."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
from fzero.adapter import Engine
from fzero.checkpoint import load, save
from fzero.optim import soap
from tests.covering import covered
from tests.optim.cases import trained
from tests.oracle import linear_loss
from tests.strategies import integers

STEPS = 8
SHAPES = {"a": (6, 6), "b": (4, 2, 2), "c": (7,), "d": (1, 8), "e": (3, 1), "f": (), "g": (12, 3)}
OPTIONS: dict[str, Any] = {"betas": (0.9, 0.8), "weight_decay": 0.1, "refresh_every": 3}


def parameters(shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> dict[str, nn.Parameter]:
    torch.manual_seed(1)
    return {path: nn.Parameter(torch.randn(s, dtype=torch.float64)) for path, s in shapes.items()}


class ByFormula(torch.optim.Optimizer):
    """Algorithm 3 of the paper, for matrices whose factors are of full rank, and Adam for others.

    sides: which of a matrix have a basis.
    """

    def __init__(self, params: Any, sides: Mapping[tuple[int, ...], str]) -> None:
        super().__init__(params, {})
        self.sides = sides

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"]):
            g, s = p.grad.reshape(len(p) if p.ndim else 1, -1), self.state[p]
            which = self.sides.get(tuple(p.shape), "")
            squares = [g @ g.T, g.T @ g]
            if not s:
                s["f"] = [0.2 * x for x in squares]
                s["q"] = [torch.linalg.eigh(x).eigenvectors.flip(1) for x in s["f"]]
                for k, side in enumerate("lr"):
                    if side not in which:
                        s["q"][k] = torch.eye(len(squares[k]), dtype=g.dtype)
                s["m"], s["v"], s["t"] = torch.zeros_like(g), torch.zeros_like(g), 0
                continue
            (left, right), s["t"] = s["q"], s["t"] + 1
            s["m"] = 0.9 * s["m"] + 0.1 * g
            s["v"] = 0.8 * s["v"] + 0.2 * (left.T @ g @ right) ** 2
            u = left @ ((left.T @ s["m"] @ right) / (s["v"].sqrt() + 1e-8)) @ right.T
            size = 0.1 * (1 - 0.8 ** s["t"]) ** 0.5 / (1 - 0.9 ** s["t"])
            p.copy_((p - size * u.view(p.shape)) * (1 - 0.1 * 0.1))
            s["f"] = [0.8 * f + 0.2 * x for f, x in zip(s["f"], squares, strict=True)]
            for k, side in enumerate("lr"):
                if s["t"] % 3 == 0 and side in which:
                    factor, q = s["f"][k], s["q"][k]
                    order = (q.T @ factor @ q).diagonal().argsort(descending=True)
                    s["v"] = s["v"].index_select(k, order)
                    s["q"][k] = torch.linalg.qr(factor @ q[:, order]).Q


SIDES = {(6, 6): "lr", (4, 2, 2): "lr", (12, 3): "r"}  # of `g` the left one is too large


def generic(count: int) -> Any:
    torch.manual_seed(3)
    weights = {path: torch.randn(count, *s, dtype=torch.float64) for path, s in SHAPES.items()}

    def loss(params: Mapping[str, Tensor], x: Tensor) -> Tensor:
        parts = [(params[path] * weights[path][int(x)]).sum() for path in SHAPES]
        return torch.stack(parts).sum()

    return loss


@covered(place=[(0, 1), (0, 2), (1, 4), (2, 3), (3, 2)])
def test_the_numbers_are_those_of_the_formula(place: tuple[int, int]) -> None:
    stage, ranks = place
    loss = generic(STEPS * ranks)
    xs = torch.arange(STEPS * ranks, dtype=torch.float64).view(STEPS, ranks)
    rule = soap(0.1, max_size=10, batch_dims=0, **OPTIONS)
    got, _ = trained(parameters(), rule, xs, loss=loss, stage=stage)
    params = {path: p.detach().clone().requires_grad_() for path, p in parameters().items()}
    optimizer = ByFormula([*params.values()], SIDES)
    for some in xs:
        optimizer.zero_grad()
        torch.stack([loss(params, x) for x in some]).mean().backward()
        optimizer.step()
    for path, p in params.items():
        wanted = p.detach().expand_as(got[path])
        torch.testing.assert_close(got[path], wanted, rtol=1e-6, atol=1e-6)


WIDE = {"w": (5, 9), "n": (9, 4), "c": (3, 2, 5), "v": (4,), "k": (1, 3)}


@covered(place=[(0, 2), (1, 4), (2, 3), (3, 2), (3, 5)])
def test_ranks_have_the_bits_of_one_process(place: tuple[int, int]) -> None:
    stage, ranks = place
    xs = integers((STEPS, 1), 8).double()
    run = partial(trained, loss=linear_loss)
    got, _ = run(
        parameters(WIDE), soap(0.1, batch_dims=0, **OPTIONS), xs.expand(STEPS, ranks), stage=stage
    )
    want, _ = run(parameters(WIDE), soap(0.1, batch_dims=0, **OPTIONS), xs, stage=0)
    for path in WIDE:
        for rank in range(ranks):
            assert torch.equal(got[path][rank], want[path][0])


@pytest.mark.parametrize("saving", [1, 4])
def test_other_ranks_go_on_with_the_bases(saving: int, tmp_path: Path) -> None:
    xs = integers((STEPS, 1), 8).double().expand(STEPS, 3)
    run = partial(trained, loss=linear_loss)
    _, state = run(parameters(WIDE), soap(0.1, batch_dims=0, **OPTIONS), xs[:saving], stage=3)
    save(tmp_path, state)
    _, fresh = run(parameters(WIDE), soap(0.1, batch_dims=0, **OPTIONS), xs[:0, :2], stage=1)
    got, _ = run(
        parameters(WIDE),
        soap(0.1, batch_dims=0, **OPTIONS),
        xs[saving:, :2],
        stage=1,
        state=load(tmp_path, fresh),
    )
    want, _ = run(parameters(WIDE), soap(0.1, batch_dims=0, **OPTIONS), xs, stage=2)
    for path, p in got.items():
        assert torch.equal(p[0], want[path][0])


# What rounding may not choose.


def gradients() -> Iterator[tuple[str, float, list[Tensor]]]:
    """(name, how far fp32 may be off, gradients) whose first ones leave much without a gradient."""
    source = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=source, dtype=torch.float64)

    yield "wide", 1e-2, [random(5, 9) for _ in range(12)]
    yield "of rank 1", 1e-1, [torch.outer(random(8), random(8)) for _ in range(12)]
    row, column = random(8, 2), random(2, 8)
    yield "always of rank 2", 1e-2, [row @ random(2, 2) @ column for _ in range(12)]
    yield "the same", 1e-2, [random(6, 9)] * 12
    late = [random(6, 9) for _ in range(12)]
    for g in late[:6]:
        g[:, 3:] = 0
    yield "columns that come late", 1e-2, late


def stepped(grads: list[Tensor], dtype: torch.dtype, off: float = 0.0) -> Tensor:
    p = nn.Parameter(torch.ones(grads[0].shape, dtype=dtype))
    options: Any = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0, "max_size": 100}
    rule = soap(0.1, refresh_every=3, **options).source([p])
    for number, g in enumerate(grads):
        noise = torch.sin(7.0 * torch.arange(g.numel()).double() + number).view(g.shape)
        p.grad = (g * (1 + off * noise)).to(dtype)
        rule.step()
    return p.detach().double()


@pytest.mark.parametrize("case", list(gradients()), ids=lambda case: case[0])
def test_rounding_chooses_no_basis(case: tuple[str, float, list[Tensor]]) -> None:
    _, bound, grads = case
    wanted = stepped(grads, torch.float64)
    assert (wanted - 1).abs().max() > 0.1
    torch.testing.assert_close(stepped(grads, torch.float64, 1e-15), wanted, rtol=0, atol=1e-6)
    torch.testing.assert_close(stepped(grads, torch.float32), wanted, rtol=0, atol=bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_has_no_gradient_does_not_move(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    grads = [torch.randn(12, 12, dtype=torch.float64) for _ in range(20)]
    for g in grads:
        g[:, [3, 7]] = 0
    assert (stepped(grads, dtype)[:, [3, 7]] - 1).abs().max() < 1e-6


def test_an_engine_with_masters_a_loss_scale_and_odd_parameters() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 20, bias=False)
            self.head.weight = self.embed.weight
            self.inner, self.scale = nn.Linear(8, 8), nn.Parameter(torch.ones(()))
            self.frozen = nn.Parameter(torch.ones(3, 3), requires_grad=False)
            self.unused = nn.Linear(3, 5)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.inner(self.embed(ids)) * self.scale)

    def body(rank: Tensor) -> Tensor:
        torch.manual_seed(0)
        module = Net().half()
        scale = fzero.DynamicScale(init_scale=2.0**17, growth_interval=100)
        engine = Engine(module, soap(1e-2, refresh_every=5), stage=2, loss_scale=scale)
        ids = torch.arange(20) if rank else torch.arange(0, 20, 2)
        losses = []
        for _ in range(30):
            loss = nn.functional.cross_entropy(engine(ids).float(), ids)
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        assert int(engine.state.step) < 30  # the first scale overflows
        return torch.stack(losses)

    losses = fzero.simulate(body, world_size=2)(torch.arange(2)).mean(0)
    assert losses[-1] < losses[0] / 2


def test_a_nan_goes_on_into_the_parameters_as_with_any_rule() -> None:
    for first in (1.0, torch.nan):
        xs = torch.tensor([first, torch.nan, 1.0], dtype=torch.float64)[:, None].expand(3, 2)
        got, _ = trained(parameters(WIDE), soap(0.1, batch_dims=0), xs, loss=linear_loss, stage=2)
        assert all(p.isnan().all() for p in got.values())


def test_in_bf16_without_masters_and_beside_another_rule() -> None:
    params = {"w": torch.ones(6, 4, dtype=torch.bfloat16), "v": torch.ones(4)}
    rule = fzero.optim.partition(
        {"w": soap(0.1, master_weights=False), "v": fzero.optim.adamw(0.1)}, lambda leaf: leaf.path
    )
    torch.manual_seed(0)
    g = torch.randn(6, 4)

    def step_fn(state: Any, x: Tensor) -> Any:
        def loss(p: Any) -> Tensor:
            return (p["w"].float() * g).sum() * x + p["v"].sum()

        return fzero.apply_gradients(fzero.grad_and_reduce(loss, state)()[0]), None

    run = fzero.simulate(fzero.shard(step_fn, stage=3), world_size=2)
    state = run.init(params, rule)
    for _ in range(3):
        state, _ = run(state, torch.ones(2))
    found = fzero.simulate(fzero.full_params, world_size=2)(state)
    assert found["w"].dtype is torch.bfloat16 and (found["w"] != 1).all() and (found["v"] < 1).all()


@pytest.mark.parametrize("rule", [fzero.optim.soap(0.1), fzero.optim.shampoo(0.1)], ids=str)
def test_a_plan_says_what_its_owners_compute_and_keep(rule: Any) -> None:
    model = torch.nn.Linear(6, 4)
    plan = fzero.plan(model, torch.ones(2, 6), optimizer=rule, stage=2, world=2, device="cpu")
    assert "2 owners, one computes at most" in str(plan) and "one keeps at most" in str(plan)
