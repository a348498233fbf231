"""What is written into `p.grad` between a backward and `step()`, beside plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fzero.errors import MismatchError
from fzero.ranks.virtual import run_ranks
from tests.adapter.nets import Odd
from tests.adapter.plain import Draw, Reference, back, engine_of, learning, same

Grads = dict[str, Tensor]
Edit = Callable[[dict[str, Any]], object]


def momentum_of(module: nn.Module) -> torch.optim.Optimizer:
    """What moves a parameter also where its gradient is zero."""
    some = learning(module).values()
    return torch.optim.SGD(some, lr=0.25, momentum=0.5, weight_decay=0.125)


def train(edit: Edit, stage: int, world_size: int, **options: Any) -> None:
    """Three updates of an engine and of a plain module, whose gradients are edited alike."""

    def body(rank: int) -> None:
        engine = engine_of(Odd, stage, momentum_of, **options)
        plain = Reference(Odd, world_size, momentum_of)
        for number in range(3):
            gradients = plain.run(back, number)
            some = learning(plain.module)
            for path, p in some.items():
                p.grad = gradients[path].clone() if path in plain.used else None
            edit(some)
            plain.optimizer.step()
            plain.used = set()
            back(engine, Draw(rank, number))
            edit(learning(engine.module))
            assert engine.step()
            same(engine.full_parameters(), plain.parameters(), 1e-12)

    run_ranks(body, world_size)


ZERO: dict[str, Edit] = {
    "zero_()": lambda p: p["a.weight"].grad.zero_(),
    ".data": lambda p: p["a.weight"].grad.data.zero_(),
    "detach()": lambda p: [p["a.weight"].grad.detach().zero_(), p["b.bias"].grad.detach_().zero_()],
    "_foreach_zero_": lambda p: torch._foreach_zero_([p["a.weight"].grad, p["c.weight"].grad]),
    "zero_grad of a part": lambda p: torch.optim.SGD([p["b.weight"]], 1.0).zero_grad(False),
    "mul_(0)": lambda p: p["a.weight"].grad.mul_(0.0),
}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_gradient_that_was_set_to_zero_is_a_gradient_of_zero(stage: int, world_size: int) -> None:
    for edit in ZERO.values():
        train(edit, stage, world_size)


def noise(like: Tensor) -> Tensor:
    """The same on every rank."""
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(3)).to(like)


def grads(p: dict[str, Any]) -> list[Any]:
    """Without those that nothing uses, which are None in torch."""
    return [x.grad for path, x in p.items() if not path.startswith("unused")]


def masks(p: dict[str, Any]) -> list[Tensor]:
    return [noise(x) > 0 for x in grads(p)]


def each(edit: Callable[[Any], object]) -> Edit:
    return lambda p: [edit(x) for x in grads(p)]


def put(new: Callable[[Any], Any]) -> Edit:
    def edit(p: dict[str, Any]) -> None:
        for path, x in p.items():
            if not path.startswith("unused"):  # whose p.grad is None in torch
                x.grad = new(x.grad)

    return edit


@torch.no_grad()
def decay(p: dict[str, Any]) -> None:
    for x in p.values():
        if x.grad is not None:
            x.grad.add_(x, alpha=0.5)
            x.grad.addcmul_(x.data, x.detach().abs(), value=0.25)


def rows(p: dict[str, Any]) -> None:
    for x in grads(p):
        x[0] = 0.0
        x[..., 1:].mul_(2.0)
        if x.ndim == 2:
            x.t()[0].add_(torch.arange(float(len(x))).to(x))
            x[:, -1:].copy_(noise(x)[:, :1])


def foreach(some: list[Any]) -> None:
    drawn = [noise(x) for x in some]
    torch._foreach_mul_(some, [x > 0 for x in drawn])
    torch._foreach_sign_(some)
    torch._foreach_add_(some, drawn, alpha=0.5)
    torch._foreach_mul_(some, [1.0 + i for i in range(len(some))])
    torch._foreach_copy_(some, torch._foreach_mul(some, 0.5))
    torch._foreach_addcmul_(some, drawn, drawn, torch.arange(1.0, 1.0 + len(some)).double())


EDITS: dict[str, Edit] = {
    "mul_(mask)": lambda p: [x.mul_(m) for x, m in zip(grads(p), masks(p), strict=True)],
    "add_(noise)": each(lambda x: x.add_(torch.ones_like(x) * noise(x), alpha=0.5)),
    "sign_, abs_, neg_": each(lambda x: [x.sign_(), x.abs_(), x.neg_().sub_(1)]),
    "nan_to_num_": each(lambda x: x.div_(x - x).nan_to_num_(nan=0.5, posinf=2.0, neginf=-2.0)),
    "copy_, fill_": lambda p: [
        p["a.weight"].grad.fill_(2.0), p["c.weight"].grad.copy_(noise(p["c.weight"]))],
    "broadcast": lambda p: [
        p["a.weight"].grad.mul_(torch.arange(1.0, 1 + p["a.weight"].shape[1])),
        p["a.weight"].grad.add_(torch.arange(p["a.weight"].shape[0])[:, None])],
    "masked_fill_": each(lambda x: x.masked_fill_(x > 0, 0.5).clamp_(min=-noise(x).abs())),
    "where": each(lambda x: x.copy_(torch.where(noise(x) > 0, x, x * 2 + 1))),
    "out=": each(lambda x: [
        torch.mul(x, noise(x), out=x), torch.where(noise(x) > 0, x, x.sign(), out=x)]),
    "foreach": lambda p: foreach(grads(p)),
    "weight decay by hand": decay,
    "rows": rows,
    "p.grad = p.grad * mask": put(lambda x: x * (noise(x) > 0)),
    "p.grad = torch.where": put(lambda x: torch.where(noise(x) > 0, x, torch.zeros_like(x))),
    "p.grad = g": put(lambda x: noise(x)),
    ".data = ": each(lambda x: setattr(x, "data", x.data * noise(x))),
    "a clone": each(lambda x: [c := x.clone(), x.zero_(), x.add_(c.mul_(noise(x)))]),
    "powers of itself": each(lambda x: x.mul_(x).sqrt_().add_(x.pow(3))),
}  # fmt: skip


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("name", EDITS)
def test_an_elementwise_edit_is_that_of_one_process(name: str, stage: int, world_size: int) -> None:
    train(EDITS[name], stage, world_size)


NONE: dict[str, Edit] = {
    "p.grad = None": lambda p: setattr(p["a.weight"], "grad", None),
    "zero_grad of a part": lambda p: torch.optim.SGD([p["b.weight"], p["c.weight"]]).zero_grad(),
    "some zero": lambda p: [setattr(p["a.weight"], "grad", None), p["c.weight"].grad.zero_()],
}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", NONE)
def test_a_gradient_that_was_set_to_none_is_not_used(
    name: str, stage: int, world_size: int
) -> None:
    train(NONE[name], stage, world_size)


def test_edits_that_differ_by_rank_raise_on_every_rank() -> None:
    edits: list[Callable[[int, Any], object]] = [
        lambda rank, x: x.add_(torch.full_like(x, 1.0 + rank)),
        lambda rank, x: x.copy_(x * torch.full_like(x, 1.0 + rank)),
        lambda rank, x: x.mul_(2.0) if rank else None,
        lambda rank, x: x.mul_(2.0) if rank else x.add_(1.0),
    ]

    def body(rank: int) -> None:
        for stage in (0, 1, 3):
            engine = engine_of(Odd, stage)
            weight = engine.module.get_parameter("a.weight")
            for edit in edits:
                back(engine, Draw(rank, 0))
                before = engine.full_parameters()
                with pytest.raises(MismatchError):
                    edit(rank, weight.grad)
                    engine.step()
                same(engine.full_parameters(), before, 0.0)
                engine.zero_grad()
            back(engine, Draw(rank, 0))
            if rank:
                weight.grad = None
            with pytest.raises(MismatchError, match=r"= None"):
                engine.step()
            engine.zero_grad()

    run_ranks(body, 2)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_that_no_backward_made_are_gradients(stage: int) -> None:
    def body(rank: int) -> None:
        for given in (False, True):
            engine, plain = engine_of(Odd, stage, momentum_of), Reference(Odd, 2, momentum_of)
            for path, p in learning(plain.module).items():
                if path[0] in "ab":
                    p.grad = noise(p)
                    mine = engine.module.get_parameter(path)
                    if given:
                        mine.grad = noise(p)
                    else:
                        engine.set_full_gradient(path, noise(p))
            plain.optimizer.step()
            assert engine.step()
            same(engine.full_parameters(), plain.parameters(), 1e-12)

    run_ranks(body, 2)


class Wave(nn.Module):
    """Complex numbers, a scalar, one element."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(3, 5, dtype=torch.float64)
        self.z = nn.Parameter(torch.randn(5, 3, dtype=torch.complex128))
        self.s, self.one = nn.Parameter(torch.tensor(0.5).double()), nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return ((self.a(x) * self.s).to(self.z) @ self.z).abs() * self.one


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("options", [{}, {"loss_scale": 8.0}, {"average_micro_batches": True}])
def test_complex_scaled_and_averaged_gradients_are_edited_as_an_update_uses_them(
    stage: int, options: dict[str, Any]
) -> None:
    names = ["mul_(mask)", "add_(noise)", "where", "rows", "weight decay by hand"]

    def body(rank: int) -> None:
        engine = engine_of(Wave, stage, momentum_of, **options)
        plain = Reference(Wave, 2, momentum_of)
        for number, name in enumerate(names):
            some = learning(plain.module)
            found = plain.run(back_of, number)
            for path, p in some.items():
                p.grad = found[path].clone()
            back_of(engine, Draw(rank, number))
            for edited in (some, learning(engine.module)):
                chosen = {k: p for k, p in edited.items() if p.ndim and not p.is_complex()}
                EDITS[name](chosen if name in ("rows", "mul_(mask)", "where") else edited)
            plain.optimizer.step()
            assert engine.step()
            same(engine.full_parameters(), plain.parameters(), 1e-6)

    def back_of(engine: Any, draw: Draw) -> None:
        engine.backward(engine(draw(2, 3)).sum() / 64)

    run_ranks(body, 2)
