"""A torch.optim optimizer, made for flat rows: its groups, its state, and what cannot be."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fzero.adapter._parameters import Parameters
from fzero.errors import LayoutError, PhaseError, explain

Factory = Callable[[list[nn.Parameter]], Optimizer]

States = Mapping[str, dict[str, Any]]
"""Optimizer state by parameter path, then by name."""

WHOLE = tuple(
    getattr(torch.optim, name)
    for name in ("LBFGS", "SparseAdam", "Adafactor", "Muon")
    if hasattr(torch.optim, name)
)
"""Optimizers that are no formula for each element: rows of a flat buffer are not enough."""


def groups_of(
    optimizer: Optimizer | Factory | None, params: Sequence[nn.Parameter]
) -> list[list[Tensor]]:
    """The parameter groups that the user gave; one of all that learn for a class or factory."""
    if optimizer is None:
        return []
    if isinstance(optimizer, Optimizer):
        return [list(group["params"]) for group in optimizer.param_groups]
    return [[p for p in params if p.requires_grad]]


def require_usable(optimizer: Optimizer | Factory | None, ranks: int) -> str:
    """Raise, before anything is moved, for what cannot step rows; else say what it is.

    A factory is tried on one scalar: its errors come here.
    """
    if optimizer is None:
        return "none"
    if isinstance(optimizer, Optimizer):
        require_new(optimizer)
        made = optimizer
    elif callable(optimizer):
        factory: Factory = optimizer
        if isinstance(optimizer, type) and issubclass(optimizer, Optimizer):
            require_elementwise(optimizer, ranks)
        made = factory([nn.Parameter(torch.zeros(1, 1))])
    else:
        made = None
    if not isinstance(made, Optimizer):
        raise LayoutError(
            explain(
                f"the optimizer is {optimizer!r}"
                + (f", which gives a {type(made).__name__}." if callable(optimizer) else "."),
                cause="an fzero.optim rule, a scheduler, or the name of an optimizer.",
                fix="pass a torch.optim optimizer, its class, or params -> optimizer: "
                "functools.partial(torch.optim.AdamW, lr=3e-4).",
            )
        )
    require_elementwise(type(made), ranks)
    plain = (bool, int, float, str, tuple, type(None))
    groups = [
        {name: x for name, x in group.items() if name != "params" and isinstance(x, plain)}
        for group in made.param_groups
    ]
    return f"{type(made).__name__} with {groups}"


def attach(
    optimizer: Optimizer | Factory, rows: Sequence[list[nn.Parameter]]
) -> tuple[Optimizer, list[int]]:
    """Return the optimizer, stepping `rows` group by group, and which groups are fused now."""
    made = optimizer if isinstance(optimizer, Optimizer) else _made_for(optimizer, rows[0])
    fused = []
    for number, (group, of_group) in enumerate(zip(made.param_groups, rows, strict=True)):
        early = [(p, made.state.pop(p)) for p in group["params"] if p in made.state]
        group["params"] = list(of_group)
        for p in of_group if early else ():
            made.state[p] = _first_state(early, p)
        fusible = group.get("fused", False) is None and group.get("foreach") is None
        plain = not (group.get("capturable") or group.get("differentiable"))
        if fusible and plain and all(map(_is_plain, of_group)):
            group["fused"] = True
            fused.append(number)
    return made, fused


def detach(
    optimizer: Optimizer, fused: Sequence[int], parameters: Parameters, states: States
) -> None:
    """Undo `attach`: the module's parameters again, with `states` {path: {name: value}}."""
    optimizer.state.clear()
    for number in fused:
        optimizer.param_groups[number]["fused"] = None
    for group, paths in zip(optimizer.param_groups, parameters.plan.param_groups, strict=True):
        group["params"] = [parameters.at(path) for path in paths]
        for p, path in zip(group["params"], paths, strict=True):
            if states.get(path):
                optimizer.state[p] = {name: _laid_as(p, x) for name, x in states[path].items()}


def _made_for(factory: Factory, rows: list[nn.Parameter]) -> Optimizer:
    if rows:
        return factory(rows)
    made = factory([nn.Parameter(torch.zeros(1, 1))])  # this rank has nothing to step
    made.param_groups[0]["params"] = []
    return made


def require_elementwise(kind: type[Optimizer], ranks: int) -> None:
    """Raise `LayoutError` for optimizers that need whole matrices, or a closure."""
    if not issubclass(kind, WHOLE) or (ranks == 1 and not issubclass(kind, torch.optim.LBFGS)):
        return
    raise LayoutError(
        explain(
            f"{kind.__name__} cannot step a rank's rows of a flat buffer.",
            cause="it is no formula for each element: it needs whole matrices, sparse gradients "
            "or several evaluations of the loss.",
            fix="use an elementwise optimizer (SGD, Adam, AdamW, Adagrad, RMSprop, NAdam, ...).",
        )
    )


def require_new(optimizer: Optimizer) -> None:
    """Raise `PhaseError` for an optimizer that has made steps: its state has other shapes."""
    if any(state.get("step", 1) != 0 for state in optimizer.state.values()):
        raise PhaseError(
            explain(
                f"the optimizer has state for {len(optimizer.state)} parameters already.",
                cause="it made steps, or loaded a state_dict, before the engine was made.",
                fix="make the engine first, then write the state with "
                "engine.set_full_optimizer_state(path, name, value).",
            )
        )


def _first_state(early: Sequence[tuple[Tensor, Mapping[str, Any]]], p: Tensor) -> dict[str, Any]:
    """The state before the first step, for optimizers that make it early: constants (Adagrad)."""
    first, like = next((one for one in early if one[0].numel()), early[0])
    return {
        name: torch.full_like(p, x.flatten()[0].item() if x.numel() else 0.0)
        if isinstance(x, Tensor) and x.shape == first.shape and name != "step"
        else copy.deepcopy(x)
        for name, x in like.items()
    }


def _is_plain(p: Tensor) -> bool:
    """Whether a fused kernel, which goes through memory as it comes, sees each element of `p`."""
    return p.is_floating_point() and torch.empty_like(p).stride() == p.stride()


def _laid_as(p: Tensor, x: Any) -> Any:
    """A state `x` of `p`, in the memory format of `p`, as the optimizer itself would make it."""
    if not isinstance(x, Tensor) or x.shape != p.shape:
        return x
    return torch.empty_like(p, dtype=x.dtype, requires_grad=False).copy_(x)
