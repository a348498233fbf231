"""The run without an engine: one plain module, which sees the data of all ranks.

    program(e, draw)    calls e(x), loss.backward(), e.backward(loss), with e.coalesce(): ...

`e` is an Engine, or a `Plain`, which is a module with an engine's calls. Rank r draws its own
data. What engines must have after a program is the mean over ranks of what the plain module has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from fzero.adapter import Engine
from fzero.adapter.param_grad import ShardedGrad

STAGES = (0, 1, 2, 3)
LR = 0.25
Gradients = dict[str, Tensor]


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


Program = Callable[[Any, Draw], None]
Together = Callable[[Sequence[Any], Draw], None]
Make = Callable[[], nn.Module]
OptimizerOf = Callable[[nn.Module], torch.optim.Optimizer | None]


def back(e: Any, draw: Draw) -> None:
    """The usual program: one backward of one loss."""
    e(draw(2, 3)).square().sum().backward()


def seeded(make: Make) -> nn.Module:
    torch.manual_seed(7)
    return make()


def learning(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that require grad."""
    return {path: p for path, p in module.named_parameters() if p.requires_grad}


def sgd_of(module: nn.Module) -> torch.optim.Optimizer | None:
    learns = list(learning(module).values())
    return torch.optim.SGD(learns, lr=LR) if learns else None


def adamw_of(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(learning(module).values(), lr=0.05)


def gradients_of(module: nn.Module) -> Gradients:
    """A copy of each p.grad, zero where there is none."""
    return {
        path: torch.zeros_like(p) if p.grad is None else p.grad.detach().clone()
        for path, p in learning(module).items()
    }


def mean(ranks: Sequence[Gradients]) -> Gradients:
    found = {path: torch.zeros_like(gradient) for path, gradient in ranks[0].items()}
    for gradients in ranks:
        for path, gradient in gradients.items():
            found[path] += gradient / len(ranks)
    return found


class Reference:
    """What every rank's engine together must be equal to."""

    def __init__(self, make: Make, world_size: int, optimizer_of: OptimizerOf = sgd_of) -> None:
        self.module, self.world_size = seeded(make), world_size
        self.optimizer = optimizer_of(self.module)
        self.used: set[str] = set()  # what got a gradient, on any rank, since the last step

    def run(self, program: Program, number: int) -> Gradients:
        """Run it with the data of each rank; return the mean over ranks of the gradients."""
        return run_together([self], lambda es, draw: program(es[0], draw), number)[0]

    def clip(self, gradients: Gradients, max_norm: float) -> Tensor:
        """Clip these gradients in place, as torch does; return the norm before."""
        for path, p in learning(self.module).items():
            p.grad = gradients[path]
        return nn.utils.clip_grad_norm_(learning(self.module).values(), max_norm)

    def step(self, gradients: Gradients) -> dict[str, Tensor]:
        """Update from these gradients, which are None where nothing came; return all parameters."""
        for path, p in learning(self.module).items():
            has = path in self.used or bool(gradients[path].any())
            p.grad = gradients[path].clone() if has else None
        self.used = set()
        if self.optimizer is not None:
            self.optimizer.step()
        self.module.zero_grad()
        return self.parameters()

    def parameters(self) -> dict[str, Tensor]:
        return {path: p.detach().clone() for path, p in self.module.named_parameters()}


def run_together(
    references: Sequence[Reference], program: Together, number: int
) -> list[Gradients]:
    """Run a program over several modules with the data of each rank; the mean for each module."""
    found: list[list[Gradients]] = [[] for _ in references]
    for rank in range(references[0].world_size):
        for reference in references:
            reference.module.zero_grad()
        program([Plain(reference.module) for reference in references], Draw(rank, number))
        for own, reference in zip(found, references, strict=True):
            own.append(gradients_of(reference.module))
            named = learning(reference.module).items()
            reference.used |= {path for path, p in named if p.grad is not None}
    return [mean(own) for own in found]


def engine_of(make: Make, stage: int, optimizer_of: OptimizerOf = sgd_of, **options: Any) -> Engine:
    """An engine of the module and the optimizer that the `Reference` has."""
    module = seeded(make)
    return Engine(module, optimizer_of(module), stage=stage, **options)


def same(
    found: Mapping[str, Any], wanted: Mapping[str, Any], tol: float = 1e-11, label: str = ""
) -> None:
    """Raise if the two differ in a path, a shape or a value."""
    assert found.keys() == wanted.keys(), f"{label}: {sorted(found.keys() ^ wanted.keys())}"
    for path, value in wanted.items():
        mine = found[path].to(value.dtype)
        assert mine.shape == value.shape, f"{label}: {path}"
        assert torch.allclose(mine, value, rtol=tol, atol=tol), (
            f"{label}: {path}\nfound {mine.flatten()[:6].tolist()}\n"
            f"wanted {value.flatten()[:6].tolist()}"
        )


def is_idle(engine: Engine) -> bool:
    """Whether no backward is running, and `p.grad` is nothing or the engine's stand-in."""
    gradients = [p.grad for p in engine.module.parameters()]
    known = all(gradient is None or isinstance(gradient, ShardedGrad) for gradient in gradients)
    return known and engine.hooks.backward_active_depth == 0


def update(
    engine: Engine,
    reference: Reference,
    rank: int,
    number: int,
    program: Program = back,
    tol: float = 1e-11,
) -> None:
    """One step of both, by gradients that are the same, to parameters that are the same."""
    wanted = reference.run(program, number)
    program(engine, Draw(rank, number))
    same(engine.full_gradients(), wanted, tol, f"gradients of step {number}")
    assert is_idle(engine)
    assert engine.step() is True
    same(engine.full_parameters(), reference.step(wanted), tol, f"updated by step {number}")


def check_program(
    rank: int,
    world_size: int,
    make: Make,
    program: Program,
    *,
    stages: Sequence[int] = STAGES,
    steps: int = 2,
    **options: Any,
) -> None:
    """Gradients and updates of `steps` steps, and idle hooks, at every stage."""
    for stage in stages:
        reference, engine = Reference(make, world_size), engine_of(make, stage, **options)
        for number in range(steps):
            try:
                update(engine, reference, rank, number, program)
            except AssertionError as error:
                raise AssertionError(f"stage {stage}, {options}: {error}") from error
        engine.close()
