"""torch.optim optimizers and others shaped like them: elementwise ones, and those that are not."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers.optimization import Adafactor

from tests import oracle
from tests.optim.cases import Lion

SHAPES = {"a.bias": (5,), "a.weight": (3, 5), "b": (2, 3, 2), "scale": ()}


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    """The same numbers at each call."""
    torch.manual_seed(1)
    return {path: nn.Parameter(torch.randn(shape).to(dtype)) for path, shape in SHAPES.items()}


def fused(optimizer: Optimizer) -> Optimizer:
    """As fzero does: the kernel that rounds as little as possible, where torch may choose."""
    for group in optimizer.param_groups:
        if group.get("fused", False) is None:
            group["fused"] = True
    return optimizer


def by_torch(
    params: dict[str, nn.Parameter], xs: Tensor, make: Callable[[dict[str, Tensor]], Optimizer]
) -> dict[str, Tensor]:
    """The oracle on xs [steps, ranks], or [steps]; `make` gets parameters by path."""

    def optimizer(tensors: Iterable[Tensor]) -> Optimizer:
        return fused(make(dict(zip(params, tensors, strict=True))))

    steps = [list(x) for x in xs.reshape(len(xs), -1)]
    return oracle.train(oracle.linear_loss, params, steps, optimizer)


class GroupAdam(Optimizer):
    """Adam whose param group counts its steps, from the first on, as in many libraries."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "largest": torch.zeros(1)})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One update of everything that has a gradient."""
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            group["largest"] = group["largest"].maximum(torch.tensor([group["lr"]]))
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state.update(m=torch.zeros_like(p), v=torch.zeros_like(p))
                state["m"].mul_(0.9).add_(p.grad * 0.1)
                state["v"].mul_(0.99).add_(p.grad**2 * 0.01)
                step = state["m"] / (1 - 0.9 ** group["step"])
                step = step / ((state["v"] / (1 - 0.99 ** group["step"])).sqrt() + 1e-6)
                p.sub_(group["largest"].item() * step)


ELEMENTWISE: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.05, "weight_decay": 0.1, "maximize": True}),
    "momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "dampening": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "dampening": 0.5}),
    "nesterov": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "adam": (torch.optim.Adam, {"lr": 0.05, "weight_decay": 0.1}),
    "adamw": (torch.optim.AdamW, {"lr": 0.05, "weight_decay": 0.1}),
    "adamw by its class alone": (torch.optim.AdamW, {}),
    "amsgrad": (torch.optim.AdamW, {"lr": 0.05, "amsgrad": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.05, "initial_accumulator_value": 0.5}),
    "adadelta": (torch.optim.Adadelta, {"lr": 0.5}),
    "adamax": (torch.optim.Adamax, {"lr": 0.05}),
    "nadam": (torch.optim.NAdam, {"lr": 0.05}),
    "radam": (torch.optim.RAdam, {"lr": 0.05}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.05, "momentum": 0.5, "centered": True}),
    "rprop": (torch.optim.Rprop, {"lr": 0.05}),
    "asgd": (torch.optim.ASGD, {"lr": 0.05, "t0": 1.0}),
    "lion": (Lion, {"lr": 0.05, "weight_decay": 0.1}),
    "adam that counts in its group": (GroupAdam, {"lr": 0.05}),
}


class Lamb(Optimizer):
    """You et al., arXiv 1904.00962; with adam=True, which no param group shows, plain Adam."""

    def __init__(self, params: Any, lr: float = 0.01, *, adam: bool = False) -> None:
        super().__init__(params, {"lr": lr})
        self.adam = adam

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One update of everything that has a gradient."""
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(step=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
                state["step"] += 1
                state["m"] = 0.9 * state["m"] + 0.1 * p.grad
                state["v"] = 0.99 * state["v"] + 0.01 * p.grad**2
                step = state["m"] / (1 - 0.9 ** state["step"])
                step = step / ((state["v"] / (1 - 0.99 ** state["step"])).sqrt() + 1e-6)
                trust = 1.0 if self.adam else p.norm() / (step.norm() + 1e-6)
                p.data = p.data - group["lr"] * trust * step  # as much code found in the wild does


class Clipped(torch.optim.SGD):
    """SGD that clips by the norm of all that it has."""

    def step(self, closure: Any = None) -> Any:
        params = [p for group in self.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        return super().step(closure)


class Noisy(torch.optim.SGD):
    """SGD with noise (Langevin dynamics)."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.data += 0.01 * torch.randn_like(p)


NOT_ELEMENTWISE: dict[str, tuple[Any, dict[str, Any]]] = {
    "torch's adafactor": (torch.optim.Adafactor, {}),
    "hugging face's adafactor": (Adafactor, {}),
    "hugging face's adafactor with a rate": (
        Adafactor,
        {"lr": 1e-3, "relative_step": False, "scale_parameter": False},
    ),
    "muon": (torch.optim.Muon, {}),
    "lamb": (Lamb, {}),
    "clipped": (Clipped, {"lr": 0.1}),
    "noisy": (Noisy, {"lr": 0.1}),
}
