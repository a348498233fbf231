"""A small copy of a torch.optim optimizer: it steps a few elements by one param group's rule.

Neither the optimizer nor its parameters are touched.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fzero.optim._rules import has_kernel, sgd_fuses


class Ran(NamedTuple):
    """What the steps of a small copy left."""

    params: list[Tensor]
    states: list[dict[str, Any]]  # of each parameter
    options: dict[str, Any]  # of the param group, those that a step wrote
    hidden: list[str]  # what a step wrote elsewhere: attributes, state of no parameter


class _Options(dict[str, Any]):
    """A param group that knows which of its options were written."""

    def __init__(self) -> None:
        super().__init__()
        self.written: set[str] = set()

    def __setitem__(self, name: str, value: Any) -> None:
        self.written.add(name)
        super().__setitem__(name, value)


def run_small(
    optimizer: Optimizer,
    number: int,
    values: Sequence[Tensor],
    grads: Sequence[Sequence[Tensor]],
    begin: Callable[[Tensor], dict[str, Any]],
    *,
    forgetful: bool = False,
    without: Collection[str] = (),
) -> Ran:
    """Step values [.] by param group `number`, once for each of `grads`.

    begin: the state that a parameter has before the first step.
    forgetful: before each step, what is hidden is what it was before the first.
    without: numbers in the states of parameters that are 0 before each step.
    """
    params = [nn.Parameter(x.clone()) for x in values]
    small, options = _small_copy(optimizer, number, params)
    for p in params:
        if state := begin(p):
            small.state[p] = state
    before = _beside(small)
    for gs in grads:
        for p, g in zip(params, gs, strict=True):
            p.grad = g.clone()
        if forgetful:
            _put_back(small, before)
        for p in params:
            for name in {*without} & small.state[p].keys() if without else ():
                small.state[p][name] = zero(small.state[p][name])
        small.step()
    after = _beside(small)
    return Ran(
        params=[p.detach() for p in params],
        states=[dict(small.state.get(p, {})) for p in params],
        options={name: options[name] for name in sorted(options.written) if name in options},
        hidden=[key for key in after if repr(after[key]) != repr(before.get(key))],
    )


def zero(number: Any) -> Any:
    """Return 0 in the type of a number, or of a tensor that has one."""
    return torch.zeros_like(number) if isinstance(number, Tensor) else type(number)(0)


def fuses(optimizer: Optimizer, group: Mapping[str, Any], params: Sequence[Tensor]) -> bool:
    """Whether a param group that leaves the choice to torch is stepped by a fused kernel here."""
    free = group.get("fused", False) is None and group.get("foreach") is None
    plain = not (group.get("capturable") or group.get("differentiable"))
    taken = all(p.is_floating_point() for p in params) and has_kernel(params)
    if isinstance(optimizer, torch.optim.SGD):
        taken = taken and sgd_fuses(params)
    return free and plain and taken and not isinstance(group.get("lr"), Tensor)


def _small_copy(
    optimizer: Optimizer, number: int, params: list[nn.Parameter]
) -> tuple[Any, _Options]:
    """Return an optimizer with the class, the attributes and one param group of another.

    Not by its constructor, whose arguments need not all be options of the group.
    """
    small: Any = object.__new__(type(optimizer))
    group = optimizer.param_groups[number]
    options = _Options()
    options["params"] = params
    small.state, small.param_groups = defaultdict(dict), [options]
    # Attributes that lead to the optimizer, its groups or its parameters lead to the small ones.
    memo: dict[int, Any] = {id(p): params[0] for p in group["params"]}
    memo |= {id(optimizer): small, id(group): options}
    memo |= {id(optimizer.state): small.state, id(optimizer.param_groups): small.param_groups}
    for key, value in group.items():
        if key != "params":
            options[key] = _copied(value, memo)
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
    options.written.clear()
    return small, options


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # a lock, a process group: shared
        return value


_PLAIN = (int, float, str, Tensor, type(None))


def _beside(small: Any) -> dict[str, Any]:
    """Copies of what it has beside param groups and the state of parameters, by place."""
    own = {f"self.{name}": x for name, x in vars(small).items() if isinstance(x, _PLAIN)}
    loose = {f"state[{k!r}]": x for k, x in small.state.items() if not isinstance(k, Tensor)}
    return copy.deepcopy(own | loose)


def _put_back(small: Any, before: Mapping[str, Any]) -> None:
    for values, place in ((vars(small), "self.{}"), (small.state, "state[{!r}]")):
        for key in [key for key in values if not isinstance(key, Tensor)]:
            if (name := place.format(key)) in before:
                values[key] = copy.deepcopy(before[name])
            elif values is small.state or isinstance(values[key], _PLAIN):
                del values[key]
