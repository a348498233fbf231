"""A small copy of a torch.optim optimizer: it steps a few elements by one param group's rule.

Neither the optimizer nor its parameters are touched.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fzero.optim._rules import has_kernel, sgd_fuses
from fzero.optim._silent import rule_step

Begin = Callable[[Tensor], dict[str, Any]]
"""parameter -> the state that it has before the first step."""


class Ran(NamedTuple):
    """A small copy after its steps: parameters, states, and what else the steps changed."""

    params: list[Tensor]
    states: list[dict[str, Any]]  # of each parameter
    options: dict[str, Any]  # of the param group, those that a step changed
    hidden: list[str]  # what a step counted elsewhere: attributes, state of no parameter


def run_small(
    optimizer: Optimizer,
    number: int,
    values: Sequence[Tensor],
    grads: Sequence[Sequence[Tensor]],
    begin: Begin,
    *,
    without: str | None = None,
) -> Ran:
    """Step values [.] by param group `number`, once for each of `grads`.

    without: what is taken out of the state of each parameter before each step.
    """
    params = [nn.Parameter(x.clone()) for x in values]
    small = _small_copy(optimizer, number, params)
    for p in params:
        if state := begin(p):
            small.state[p] = state
    group = small.param_groups[0]
    options, attributes = _kept(group), _kept(vars(small))
    for gs in grads:
        for p, g in zip(params, gs, strict=True):
            p.grad = g.clone()
            if without is not None:
                small.state.get(p, {}).pop(without, None)
        rule_step(small)
    counted = [name for name, x in vars(small).items() if _is_count(x)]
    return Ran(
        params=[p.detach() for p in params],
        states=[dict(small.state.get(p, {})) for p in params],
        options={k: x for k, x in group.items() if k != "params" and _changed(options.get(k), x)},
        hidden=[
            *(f"self.{k}" for k in counted if _changed(attributes.get(k), vars(small)[k])),
            *(f"state[{k!r}]" for k in small.state if not isinstance(k, Tensor)),
        ],
    )


def fuses(optimizer: Optimizer, group: Mapping[str, Any], params: Sequence[Tensor]) -> bool:
    """Whether a param group that leaves the choice to torch is stepped by a fused kernel here."""
    free = group.get("fused", False) is None and group.get("foreach") is None
    plain = not (group.get("capturable") or group.get("differentiable"))
    taken = all(p.is_floating_point() for p in params) and has_kernel(params)
    if isinstance(optimizer, torch.optim.SGD):
        taken = taken and sgd_fuses(params)
    return free and plain and taken and not isinstance(group.get("lr"), Tensor)


def _small_copy(optimizer: Optimizer, number: int, params: list[nn.Parameter]) -> Any:
    """Return an optimizer with the class, the attributes and one param group of another.

    Not by its constructor, whose arguments need not all be options of the group.
    """
    small: Any = object.__new__(type(optimizer))
    group = optimizer.param_groups[number]
    options: dict[str, Any] = {"params": params}
    small.state, small.param_groups = defaultdict(dict), [options]
    # Attributes that lead to the optimizer, its groups or its parameters lead to the small ones.
    memo: dict[int, Any] = {id(p): params[0] for p in group["params"]}
    memo |= {id(optimizer): small, id(group): options}
    memo |= {id(optimizer.state): small.state, id(optimizer.param_groups): small.param_groups}
    for name, value in group.items():
        if name != "params":
            options[name] = _copied(value, memo)
    lr = options.get("lr")
    if isinstance(lr, Tensor):
        options["lr"] = torch.full_like(lr, 0.1)
    elif isinstance(lr, int | float):
        options["lr"] = 0.1  # a warm-up begins with 0, at which all rules are alike
    if fuses(optimizer, options, params):
        options["fused"] = True
    for name, value in vars(optimizer).items():
        if name.endswith("_hooks"):
            vars(small)[name] = type(value)()
        elif name in ("state", "param_groups"):
            continue
        elif not (callable(value) and hasattr(type(optimizer), name)):  # a scheduler's own step
            vars(small)[name] = _copied(value, memo)
    return small


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # a lock, a process group: shared
        return value


def _kept(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values as they are now: tensors are copied."""
    return {name: x.clone() if isinstance(x, Tensor) else x for name, x in values.items()}


def _changed(before: Any, after: Any) -> bool:
    if isinstance(after, Tensor):
        return not (isinstance(before, Tensor) and torch.equal(before, after))
    return after is not before and repr(after) != repr(before)


def _is_count(value: Any) -> bool:
    """Whether an attribute may count or average something: a number, and no flag."""
    return isinstance(value, int | float | Tensor) and not isinstance(value, bool)
