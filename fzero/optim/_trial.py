"""Trials of a torch.optim rule on a few elements: its updates, and what it keeps.

A trial steps a copy of the optimizer that has the rule and the options of one param group, and
small parameters. Neither the optimizer nor the random numbers of the process are touched.
"""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fzero.errors import LayoutError
from fzero.optim._elementwise import SMALL, Rule, numbers_of, seeded
from fzero.optim._rules import has_kernel, sgd_fuses

Early = Mapping[str, Any]
"""State from before the first step: of a slot its one value as `Fill`; of a counter the value."""


class Fill(NamedTuple):
    """The one value of all elements of a slot, and its dtype: None for that of the parameter."""

    value: float
    dtype: torch.dtype | None


class Kept(NamedTuple):
    """What a rule keeps for a parameter of one param group, one dtype and number of dims."""

    slots: dict[str, Tensor]  # a tensor shaped as the parameter: the value that it begins with
    odd: tuple[str, ...]  # a tensor of another shape (the row means of Adafactor)
    counters: dict[str, Tensor]  # a number for the whole parameter: the value it begins with
    numbers: dict[str, type]  # which counters are Python numbers, and of which type
    given: frozenset[str]  # what the rule gets before its first step; the rest it makes itself
    size: int  # how many names its state has, None values among them
    dtype: torch.dtype  # of the parameter


def rule_of(optimizer: Optimizer, number: int, early: Early) -> Rule:
    """Return the rule of param group `number`."""

    def rule(params: list[Tensor], grads: list[list[Tensor]]) -> list[Tensor]:
        begin = [p.clone() for p in params]
        new, _ = _run(optimizer, number, params, grads, lambda p: _begun(early, p))
        return [n - b for n, b in zip(new, begin, strict=True)]

    return rule


def learn(optimizer: Optimizer, number: int, early: Early, like: Tensor, dims: int) -> Kept:
    """Return what the rule of param group `number` keeps for a parameter of `dims` dims.

    Raises `LayoutError` for state that is neither a tensor nor a number.
    """
    shape = (2, 3, 2, 2, 2, 2, 2, 2)[:dims] if dims > 1 else (6,)
    values = [numbers_of(shape, 0).to(like.device, like.dtype)]
    grads = [[numbers_of(shape, k).to(like.device, like.dtype)] for k in (1, 2)]
    with seeded(like.device):
        lazy = _run(optimizer, number, values, grads, lambda p: _begun(early, p))
    kept = _sorted(type(optimizer).__name__, lazy[1][0], early, lazy[0][0])
    if kept.odd or kept.given == (everything := frozenset([*kept.slots, *kept.counters])):
        return kept
    # Zeros that are there from the beginning save a first step that holds its state twice. The
    # rule may have them if they make no difference.

    def begin(p: Tensor) -> dict[str, Any]:
        counters = {name: as_kept(kept, name, x.clone()) for name, x in kept.counters.items()}
        return state_of(kept, p, None) | counters

    try:
        with seeded(like.device):
            filled = _run(optimizer, number, values, grads, begin)
    except Exception:  # it looks into the state that it began with
        return kept
    return kept._replace(given=everything) if _equal(lazy, filled) else kept


def early_of(optimizer: Optimizer, small: Tensor) -> Early:
    """Return the state that the constructor made for the parameter `small`."""
    found = {}
    for name, value in optimizer.state.get(small, {}).items():
        found[name] = copy.deepcopy(value)
        if isinstance(value, Tensor) and value.shape == small.shape:
            dtype = None if value.dtype == small.dtype else value.dtype
            found[name] = Fill(value.flatten()[0].item(), dtype)
    return found


def early_of_group(optimizer: Optimizer, number: int) -> Early:
    """Return the state that the constructor makes for a parameter of group `number`.

    By making another one. Where that is not possible (a constructor with other arguments), the
    rule is taken for one that makes its state in its first step, as most do.
    """
    group = optimizer.param_groups[number]
    names = inspect.signature(type(optimizer)).parameters
    options = {key: x for key, x in group.items() if key in names and key != "params"}
    device = next((p.device for p in group["params"]), None)
    small = nn.Parameter(torch.zeros(SMALL, device=device))
    try:
        return early_of(type(optimizer)([small], **options), small)
    except Exception:
        return {}


def state_of(kept: Kept, p: Tensor, names: frozenset[str] | None) -> dict[str, Any]:
    """Return the slots that `p` begins with: those of `names`; None for all."""
    return {
        name: torch.full_like(p, fill.item(), dtype=fill.dtype, requires_grad=False)
        for name, fill in kept.slots.items()
        if names is None or name in names
    }


def as_kept(kept: Kept, name: str, counter: Tensor) -> Any:
    """Return a counter as the rule has it: the tensor itself, or a Python number."""
    return kept.numbers[name](counter.item()) if name in kept.numbers else counter


def fuses(optimizer: Optimizer, group: Mapping[str, Any], params: Sequence[Tensor]) -> bool:
    """Whether a param group that leaves the choice to torch is stepped by a fused kernel here."""
    free = group.get("fused", False) is None and group.get("foreach") is None
    plain = not (group.get("capturable") or group.get("differentiable"))
    taken = all(p.is_floating_point() for p in params) and has_kernel(params)
    if isinstance(optimizer, torch.optim.SGD):
        taken = taken and sgd_fuses(params)
    return free and plain and taken and not isinstance(group.get("lr"), Tensor)


def _run(
    optimizer: Optimizer,
    number: int,
    values: Sequence[Tensor],
    grads: Sequence[Sequence[Tensor]],
    begin: Callable[[Tensor], dict[str, Any]],
) -> tuple[list[Tensor], list[dict[str, Any]]]:
    params = [nn.Parameter(x.clone()) for x in values]
    small = _small_copy(optimizer, number, params)
    for p in params:
        if state := begin(p):
            small.state[p] = state
    for gs in grads:
        for p, g in zip(params, gs, strict=True):
            p.grad = g.clone()
        small.step()
    return [p.detach() for p in params], [dict(small.state.get(p, {})) for p in params]


def _small_copy(optimizer: Optimizer, number: int, params: list[nn.Parameter]) -> Optimizer:
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
    return small


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # a lock, a process group: shared
        return value


def _begun(early: Early, p: Tensor) -> dict[str, Any]:
    return {
        name: torch.full_like(p, x.value, dtype=x.dtype, requires_grad=False)
        if isinstance(x, Fill)
        else copy.deepcopy(x)
        for name, x in early.items()
    }


def _sorted(rule: str, state: Mapping[str, Any], early: Early, p: Tensor) -> Kept:
    slots: dict[str, Tensor] = {}
    odd: list[str] = []
    counters: dict[str, Tensor] = {}
    numbers: dict[str, type] = {}
    for name, value in state.items():
        begin = early.get(name)
        if isinstance(value, Tensor) and value.shape == p.shape:
            fill = begin.value if isinstance(begin, Fill) else 0.0
            slots[name] = torch.tensor(fill, dtype=value.dtype)
        elif isinstance(value, Tensor) and value.numel() == 1:
            counters[name] = torch.zeros_like(value) + (0 if begin is None else begin)
        elif isinstance(value, Tensor):
            odd.append(name)
        elif isinstance(value, int | float):
            numbers[name] = type(value)
            dtype = torch.float64 if isinstance(value, float) else None
            counters[name] = torch.tensor(type(value)(begin or 0), dtype=dtype)
        elif value is not None:
            raise LayoutError(
                f"{rule} keeps {name} = {type(value).__name__} for a parameter.",
                cause="state that is neither a tensor nor a number: a list of past "
                "gradients, an object.",
                fix="use an optimizer whose state has tensors and numbers.",
            )
    return Kept(slots, tuple(odd), counters, numbers, frozenset(early), len(state), p.dtype)


def _equal(a: tuple[list[Tensor], list[dict]], b: tuple[list[Tensor], list[dict]]) -> bool:
    states = list(zip(a[1], b[1], strict=True))
    if any(one.keys() != two.keys() for one, two in states):
        return False
    pairs = [*zip(a[0], b[0], strict=True)]
    pairs += [(one[name], two[name]) for one, two in states for name in one]
    return all(
        torch.equal(x, y) if isinstance(x, Tensor) and isinstance(y, Tensor) else x == y
        for x, y in pairs
    )
