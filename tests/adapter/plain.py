"""One user program, run on an engine and on plain modules, one for each rank, without any of it.

    program(e, draw)    calls e(x), loss.backward(), e.backward(loss), with e.coalesce(): ...

`e` is an Engine, or a `Plain`, which is a module with an engine's calls. Rank r draws its own
data. What an engine must have then is the mean over ranks of what the plain modules have.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from fzero.adapter import Engine
from fzero.adapter._gradient import HeldGradient

LR = 0.25
STAGES = (0, 1, 2, 3)


class Draw:
    """Rank's own data, the same whenever it is asked again: draw(3, 4) is the next [3, 4]."""

    def __init__(self, rank: int, number: int) -> None:
        self.rank = rank
        self._source = torch.Generator().manual_seed(1000 * number + rank)

    def __call__(self, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.randn(shape, generator=self._source, dtype=torch.float64).to(dtype)

    def whole(self, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        """Small integers: sums of them are exact."""
        return torch.randint(-3, 4, shape, generator=self._source).to(dtype)


class Plain:
    """A module with the calls of an engine: what they mean on one rank."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def backward(self, loss: Any, gradient: Any = None, **options: Any) -> None:
        torch.autograd.backward(loss, gradient, **options)

    def coalesce(self) -> Any:
        return nullcontext()

    def no_sync(self) -> Any:
        return nullcontext()

    def scale(self, loss: Tensor) -> Tensor:
        return loss


Program = Callable[[Any, Draw], None]
Make = Callable[[], nn.Module]


class Reference:
    """W plain modules, stepped together by SGD on the mean of their gradients."""

    def __init__(self, make: Make, world_size: int) -> None:
        torch.manual_seed(7)
        self.modules = [make()]
        for _ in range(world_size - 1):
            torch.manual_seed(7)
            self.modules.append(make())

    def run(self, program: Program, number: int) -> dict[str, Tensor]:
        """Run it for every rank; return the mean gradients, zero where there is none."""
        for rank, module in enumerate(self.modules):
            module.zero_grad()
            program(Plain(module), Draw(rank, number))
        return self.gradients()

    def gradients(self) -> dict[str, Tensor]:
        """{path: the mean over ranks of p.grad}."""
        found: dict[str, Tensor] = {}
        for module in self.modules:
            for path, p in learning(module).items():
                mine = torch.zeros_like(p) if p.grad is None else p.grad.detach()
                found[path] = found.get(path, 0) + mine / len(self.modules)
        return found

    @torch.no_grad()
    def step(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """Take p - LR g everywhere; return the parameters."""
        for module in self.modules:
            for path, p in learning(module).items():
                p -= LR * gradients[path]
        return {path: p.detach() for path, p in self.modules[0].named_parameters()}


def learning(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that require grad."""
    return {path: p for path, p in module.named_parameters() if p.requires_grad}


def engine_of(make: Make, stage: int, **options: Any) -> Engine:
    """An engine with SGD on a module that is that of the `Reference`."""
    torch.manual_seed(7)
    module = make()
    learns = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(learns, lr=LR) if learns else None
    return Engine(module, optimizer, stage=stage, **options)


@contextmanager
def order_may_change() -> Iterator[None]:
    """Stage 3 warns, once, when modules use their parameters in another order than before."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the order in which modules use", UserWarning)
        yield


def same(label: str, found: dict[str, Tensor], wanted: dict[str, Tensor], tol: float) -> None:
    """Raise if the two differ in a path, a shape, a dtype or a value."""
    assert found.keys() == wanted.keys(), f"{label}: {sorted(found.keys() ^ wanted.keys())}"
    for path, value in wanted.items():
        mine = found[path].to(value.dtype)
        assert torch.allclose(mine, value, rtol=tol, atol=tol), (
            f"{label}: {path}\nfound {mine.flatten()[:6].tolist()}\n"
            f"wanted {value.flatten()[:6].tolist()}"
        )


def _is_held(gradient: Tensor | None) -> bool:
    """Whether `p.grad` is nothing, or the engine's stand-in for what it holds."""
    return gradient is None or isinstance(gradient, HeldGradient)


def check_program(
    rank: int,
    world_size: int,
    make: Make,
    program: Program,
    *,
    stages: tuple[int, ...] = STAGES,
    steps: int = 2,
    tol: float = 1e-11,
    **options: Any,
) -> None:
    """Gradients and updates of `steps` steps, and idle hooks, at every stage."""
    for stage in stages:
        reference, engine = Reference(make, world_size), engine_of(make, stage, **options)
        for number in range(steps):
            label = f"stage {stage}, W={world_size}, step {number}, {options}"
            wanted = reference.run(program, number)
            with order_may_change():
                program(engine, Draw(rank, number))
            same(f"{label}: gradients", engine.full_gradients(), wanted, tol)
            assert engine.hooks.backward_active_depth == 0, label
            assert all(_is_held(p.grad) for p in engine.module.parameters()), label
            assert engine.step() is True
            same(f"{label}: updated", engine.full_parameters(), reference.step(wanted), tol)
        engine.close()
