"""Trials of a torch.optim rule on a few elements: its updates, and what it keeps.

The random numbers of the process are not touched.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fzero.errors import LayoutError
from fzero.optim._elementwise import SMALL, Rule, numbers_of, seeded
from fzero.optim._small import Ran, run_small, zero

Begin = Callable[[Tensor], dict[str, Any]]
Early = Mapping[str, Any]
"""State from before the first step: of a slot its one value as `Fill`; of a counter the value."""


class Fill(NamedTuple):
    """The one value of all elements of a slot, and its dtype: None for that of the parameter."""

    value: float
    dtype: torch.dtype | None


class Kept(NamedTuple):
    """What a rule keeps for a parameter of one param group, one dtype and shape."""

    slots: dict[str, Tensor]  # a tensor shaped as the parameter: the value that it begins with
    odd: tuple[str, ...]  # of another shape (row means), or a number that depends on the values
    counters: dict[str, Tensor]  # a number for all parameters alike: the value it begins with
    after: dict[str, float]  # the counters after the trial
    numbers: dict[str, type]  # which are Python numbers, and of which type
    unread: dict[str, Any]  # what a step does not read, and what it gets for it: None, a 0
    given: frozenset[str]  # what the rule gets before its first step; the rest it makes itself
    dtype: torch.dtype  # of the parameter

    @property
    def names(self) -> set[str]:
        """All names in the state of a parameter."""
        return {*self.slots, *self.odd, *self.counters, *self.unread}


class Shared(NamedTuple):
    """Numbers that a rule keeps among the options of a param group: the count of its steps."""

    begin: Mapping[str, Tensor]  # the value before the first step
    numbers: Mapping[str, type]  # which are Python numbers, and of which type
    late: bool  # whether the first step makes some, which must not be there before

    @classmethod
    def nothing(cls) -> Shared:
        """Return that of a rule that writes no options, as all of torch.optim."""
        return cls({}, {}, False)


def rule_of(optimizer: Optimizer, number: int, early: Early) -> Rule:
    """Return the rule of param group `number`."""

    def rule(params: list[Tensor], grads: list[list[Tensor]]) -> tuple[list[Tensor], list[float]]:
        begin = [p.clone() for p in params]
        ran = run_small(optimizer, number, params, grads, lambda p: _begun(early, p))
        numbers = [float(x) for x in ran.options.values() if _count(x, 0) is not None]
        return [p - b for p, b in zip(ran.params, begin, strict=True)], numbers

    return rule


def learn(
    optimizer: Optimizer, number: int, early: Early, like: Tensor, shape: Sequence[int]
) -> tuple[Kept, Shared]:
    """Return what param group `number` keeps for a parameter of a shape, and for itself.

    Raises `LayoutError` for what is neither a tensor nor a number, or is kept elsewhere.
    """

    def run(begin: Begin, seed: int = 0, **how: Any) -> Ran:
        sizes = (1.0, 1.0, 10.0, 0.1)  # of the values, and of the gradients of each step
        every = ((1 + seed / 8) * x * numbers_of(shape, seed + k) for k, x in enumerate(sizes))
        values, *grads = (x.to(like.device, like.dtype) for x in every)
        with seeded(like.device):
            return run_small(optimizer, number, [values], [[g] for g in grads], begin, **how)

    def lazily(p: Tensor) -> dict[str, Any]:
        return _begun(early, p)

    def changes_nothing(begin: Begin = lazily, **how: Any) -> bool:
        try:
            return _equal(ran, run(begin, **how))
        except Exception:  # it looks into what it was given, or misses
            return False

    ran, other, rule = run(lazily), run(lazily, seed=4), type(optimizer).__name__
    if ran.hidden and not changes_nothing(forgetful=True):
        raise _kept_elsewhere(rule, ran.hidden)
    varying = _varying(ran.states[0], other.states[0])
    unread = {name for name in varying if changes_nothing(without={name})}
    kept = _sorted(rule, ran, early, varying=varying, unread=unread)
    shared = _shared(rule, ran, optimizer.param_groups[number], kept)
    if kept.odd or kept.given == (everything := frozenset([*kept.slots, *kept.counters])):
        return kept, shared
    # Zeros that are there from the beginning save a first step that holds its state twice. The
    # rule may have them if they make no difference.

    def begin(p: Tensor) -> dict[str, Any]:
        counters = {k: as_kept(kept.numbers, k, x.clone()) for k, x in kept.counters.items()}
        return state_of(kept, p, None) | counters

    return kept._replace(given=everything) if changes_nothing(begin) else kept, shared


def early_of(optimizer: Optimizer, small: Tensor) -> Early:
    """Return the state that the constructor made for the parameter `small`.

    Raises `LayoutError` for a slot with other values for other elements.
    """
    found = {}
    for name, value in optimizer.state.get(small, {}).items():
        found[name] = copy.deepcopy(value)
        if isinstance(value, Tensor) and value.shape == small.shape:
            dtype = None if value.dtype == small.dtype else value.dtype
            if bool((value != value.flatten()[0]).any()):
                raise _made_of_values(type(optimizer).__name__, name)
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
    small = small_parameter(device)
    try:
        return early_of(type(optimizer)([small], **options), small)
    except Exception:
        return {}


def small_parameter(device: torch.device | None) -> nn.Parameter:
    """Return a parameter for constructors to look at."""
    return nn.Parameter(numbers_of(SMALL, 0).to(device, torch.get_default_dtype()))


def state_of(kept: Kept, p: Tensor, names: frozenset[str] | None) -> dict[str, Any]:
    """Return the slots that `p` begins with, those of `names` (None: all), and what is unread."""
    slots = {
        name: torch.full_like(p, fill.item(), dtype=fill.dtype, requires_grad=False)
        for name, fill in kept.slots.items()
        if names is None or name in names
    }
    return slots | unread_of(kept, names)


def unread_of(kept: Kept, names: frozenset[str] | None) -> dict[str, Any]:
    """Return what a rule does not read, if it finds a state; one that makes it has none of it."""
    return {} if names is not None and not names else copy.deepcopy(kept.unread)


def as_tensor(value: Tensor | float) -> Tensor:
    """Return a number that a rule keeps as it is stored: Python's numbers lose nothing."""
    if isinstance(value, Tensor):
        return value.detach()
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)


def as_kept(numbers: Mapping[str, type], name: str, counter: Tensor) -> Any:
    """Return a counter as the rule has it: the tensor itself, or a Python number."""
    return numbers[name](counter.item()) if name in numbers else counter


def _begun(early: Early, p: Tensor) -> dict[str, Any]:
    return {
        name: torch.full_like(p, x.value, dtype=x.dtype, requires_grad=False)
        if isinstance(x, Fill)
        else copy.deepcopy(x)
        for name, x in early.items()
    }


def _varying(one: Mapping[str, Any], other: Mapping[str, Any]) -> set[str]:
    """Return the names of numbers that are others for other values."""
    pairs = {name: (x, other.get(name)) for name, x in one.items() if _count(x, 0) is not None}
    return {name for name, (x, y) in pairs.items() if y is None or float(x) != float(y)}


def _sorted(rule: str, ran: Ran, early: Early, *, varying: set[str], unread: set[str]) -> Kept:
    (p,), (state,) = ran.params, ran.states
    slots: dict[str, Tensor] = {}
    odd: list[str] = []
    counters: dict[str, Tensor] = {}
    given = {
        name: None if x is None else zero(x)
        for name, x in state.items()
        if x is None or name in unread
    }
    for name, value in state.items():
        begin = early.get(name)
        if name in given:
            continue
        if type(value) is Tensor and value.shape == p.shape:
            fill = begin.value if isinstance(begin, Fill) else 0.0
            slots[name] = torch.tensor(fill, dtype=value.dtype)
        elif name in varying or (type(value) is Tensor and value.numel() != 1):
            odd.append(name)
        elif (counter := _count(value, begin)) is not None:
            counters[name] = counter
        else:
            raise LayoutError(
                f"{rule} keeps {name} = {type(value).__name__} for a parameter.",
                cause="state that is neither a plain tensor nor a number: a list of past "
                "gradients, an object, a quantized tensor.",
                fix="use an optimizer whose state has tensors and numbers.",
            )
    return Kept(
        slots=slots,
        odd=tuple(odd),
        counters=counters,
        after={name: float(state[name]) for name in counters},
        numbers=_numbers(state),
        unread=given,
        given=frozenset(early),
        dtype=p.dtype,
    )


def _shared(rule: str, ran: Ran, group: Mapping[str, Any], kept: Kept) -> Shared:
    begin: dict[str, Tensor] = {}
    for name, value in ran.options.items():
        counter = _count(value, group.get(name))
        if counter is None and repr(value) == repr(group.get(name)):
            continue
        if counter is None or name == "lr" or name in kept.names:
            raise LayoutError(
                f"{rule} writes {name} ({type(value).__name__}) into its param group in step().",
                cause="an optimizer with a schedule of its own, or with more than numbers there.",
                fix="use one that writes no options but numbers of its own; for the learning "
                "rate a scheduler of torch.optim.lr_scheduler.",
            )
        begin[name] = counter
    return Shared(begin, _numbers(ran.options), any(name not in group for name in begin))


def _count(value: Any, begin: Any) -> Tensor | None:
    """Return a number as a tensor, with its value before the first step; None for what is none."""
    if isinstance(value, Tensor):
        return torch.zeros_like(value) + (begin or 0) if value.numel() == 1 else None
    if not isinstance(value, int | float):
        return None
    return as_tensor(type(value)(begin or 0))


def _numbers(state: Mapping[str, Any]) -> dict[str, type]:
    return {name: type(value) for name, value in state.items() if isinstance(value, int | float)}


def _made_of_values(rule: str, name: str) -> LayoutError:
    return LayoutError(
        f"{rule} makes {name} in its constructor, with other values for other elements.",
        cause="a copy of the parameters from which training begins, or a mask of them.",
        fix="make it in the first step(), where there is none yet: there it is made of the shards.",
    )


def _kept_elsewhere(rule: str, hidden: Sequence[str]) -> LayoutError:
    return LayoutError(
        f"{rule} keeps {', '.join(hidden)}, and its updates depend on it.",
        cause="a count or an average in an attribute of the optimizer, or in its state under a "
        "name: it belongs to no parameter, and no checkpoint would have it.",
        fix="use an optimizer that keeps its numbers in the state of each parameter, or in its "
        "param groups.",
    )


def _equal(a: Ran, b: Ran) -> bool:
    states = list(zip(a.states, b.states, strict=True))
    if any(one.keys() != two.keys() for one, two in states) or a.options.keys() != b.options.keys():
        return False
    pairs = [*zip(a.params, b.params, strict=True)]
    pairs += [(one[name], two[name]) for one, two in states for name in one]
    pairs += [(a.options[name], b.options[name]) for name in a.options]
    return all(
        torch.equal(x, y) if isinstance(x, Tensor) and isinstance(y, Tensor) else x == y
        for x, y in pairs
    )
