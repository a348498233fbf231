"""Transforms that a user writes, as docs/write_a_transform.md does, against plain PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import fzero
from fzero.adapter import Engine
from tests.covering import covered
from tests.transforms import page
from tests.transforms.page import MADE, Plain, Tensors

LR, ROWS = 0.05, 12


def values(seed: int = 0) -> dict[str, Any]:
    """Leaves of uneven sizes: an empty one, a scalar, a complex one, one that nothing uses."""
    g = torch.Generator().manual_seed(seed)
    made = {
        "w": torch.randn(5, 3, generator=g, dtype=torch.float64),
        "b": torch.randn(5, generator=g, dtype=torch.float64),
        "empty": torch.zeros(0, 4, dtype=torch.float64),
        "scalar": torch.randn((), generator=g, dtype=torch.float64),
        "c": torch.randn(3, 2, generator=g, dtype=torch.complex128),
        "unused": torch.randn(2, 2, generator=g, dtype=torch.float64),
        "cube": torch.randn(2, 3, 2, generator=g),
    }
    return made


def loss_fn(p: Any, x: Tensor) -> Tensor:
    """The mean over rows [n, 3]."""
    h = torch.tanh(x @ p["w"].mT + p["b"]) * p["scalar"]
    c = (p["c"] * (1 + 2j)).abs().square().sum()
    return (
        h.square().mean()
        + x.mean() * (p["cube"] * 0.5).square().sum()
        + 0.1 * c
        + 0.0 * (p["empty"].sum())
    )


def with_others(params: Tensors) -> dict[str, Any]:
    """The parameters with a frozen leaf and a tied one."""
    return {**params, "frozen": torch.arange(3), "tied": params["b"]}


def batches(count: int, wild: int | None = None) -> list[Tensor]:
    """Batches [ROWS, 3]; the one of number `wild` is far away."""
    g = torch.Generator().manual_seed(1)
    made = [1 + torch.randn(ROWS, 3, generator=g, dtype=torch.float64) for _ in range(count)]
    if wild is not None:
        made[wild] = 100 * made[wild]
    return made


def sgd(params: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, LR, momentum=0.5)


def run(
    transforms: list[Any],
    ranks: int,
    stage: int,
    given: list[Tensor],
    state: Any = None,
    **options: Any,
) -> Any:
    """Train `shard(transforms(step))` on virtual ranks; the stacked state."""

    def step_fn(state: Any, x: Tensor) -> Any:
        state, loss = fzero.grad_and_reduce(loss_fn, state)(x)
        return fzero.apply_gradients(state), loss

    step: Any = step_fn
    for one in transforms:
        step = one(step)
    step = fzero.simulate(fzero.shard(step, stage=stage, **options), world_size=ranks)
    if state is None:
        state = step.init(with_others(values()), fzero.optim.sgd(LR, momentum=0.5))
    for x in given:
        state, _ = step(state, x.view(ranks, ROWS // ranks, 3))
    return state


def kept_of(state: Any, name: str, ranks: int) -> Any:
    """What a transform keeps, of rank 0; all ranks have the same."""
    found = fzero.simulate(lambda s: fzero.slots(s, name), world_size=ranks)(state)
    return _first(found)


def _first(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {k: _first(v) for k, v in tree.items()}
    for other in tree[1:]:
        assert torch.equal(tree[0], other)
    return tree[0]


def full(state: Any, ranks: int) -> Any:
    return _first(fzero.simulate(fzero.full_params, world_size=ranks)(state))


def close(got: Any, want: Any, what: str = "") -> None:
    if isinstance(want, dict):
        for key in want:
            close(got[key], want[key], f"{what}/{key}")
        return
    want = torch.as_tensor(want)
    low = want.dtype in (torch.float32, torch.complex64)
    tol = 1e-5 if low or got.dtype == torch.float32 else 1e-7
    torch.testing.assert_close(
        got.to(want.dtype), want, rtol=tol, atol=tol, msg=lambda m: f"{what}: {m}"
    )


def plain(kinds: list[str], given: list[Tensor]) -> tuple[Tensors, list[Plain]]:
    ones = [MADE[kind][1]() for kind in kinds]
    return page.trained(ones, values(), loss_fn, given, sgd), ones


@covered(kind=sorted(MADE), ranks=[1, 2, 3, 4], stage=range(4), donate=[False, True])
def test_a_step_with_one_is_that_of_plain_torch(
    kind: str, ranks: int, stage: int, donate: bool
) -> None:
    given = batches(6, wild=4 if kind == "outliers" else None)
    made = MADE[kind][0]()
    state = run([made], ranks, stage, given, donate=donate)
    want, (one,) = plain([kind], given)
    close(full(state, ranks), want)
    if one.kept is not None:
        close(kept_of(state, made.name, ranks), one.kept)
    assert state.step.tolist() == [5 if kind == "outliers" else 6] * ranks


class Net(nn.Module):
    """The leaves of `values` as a module."""

    def __init__(self) -> None:
        super().__init__()
        for name, x in values().items():
            self.register_parameter(name, nn.Parameter(x.clone()))
        self.frozen = nn.Parameter(torch.arange(3.0), requires_grad=False)
        self.tied = self.b

    def forward(self, x: Tensor) -> Tensor:
        return loss_fn(dict(self.named_parameters()), x) + 0 * self.unused.sum()


def by_engine(
    transforms: list[Any], ranks: int, stage: int, given: list[Tensor], **more: Any
) -> Any:
    """Train an engine on virtual ranks: its full parameters, and what its transforms keep."""

    def on_rank(index: Tensor) -> Any:
        model = Net()
        optimizer = torch.optim.SGD([*model.parameters()], LR, momentum=0.5)
        engine = Engine(model, optimizer, stage=stage, transforms=transforms, **more)
        for x in given:
            engine.backward(engine(x.view(ranks, ROWS // ranks, 3)[index]))
            engine.step()
        kept = {
            one.name: fzero.slots(engine.state, one.name) if one.init else {} for one in transforms
        }
        found = {k: v.clone() for k, v in engine.full_parameters().items()}
        step = engine.state.step.clone()
        engine.close()
        return found, kept, step

    return _first_of(fzero.simulate(on_rank, world_size=ranks)(torch.arange(ranks)))


def _first_of(tree: Any) -> Any:
    return tuple(_first(one) for one in tree)


@covered(kind=sorted(MADE), ranks=[1, 2, 3, 4], stage=range(4))
def test_an_engine_with_one_is_that_of_plain_torch(kind: str, ranks: int, stage: int) -> None:
    given = batches(6, wild=4 if kind == "outliers" else None)
    made = MADE[kind][0]()
    got, kept, step = by_engine([made], ranks, stage, given)
    want, (one,) = plain([kind], given)
    close(got, want)
    if one.kept is not None:
        close(kept[made.name], one.kept)
    assert step == (5 if kind == "outliers" else 6)
