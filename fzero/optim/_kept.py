"""What a torch.optim rule keeps for a parameter, and for a param group: seen in an experiment."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fzero.errors import LayoutError
from fzero.optim._small import Begin, Ran, is_number, numbers_of, run_small, same_random_numbers


class KeptState(NamedTuple):
    """The slots and counters of a rule for parameters of one param group, dtype and shape."""

    slots: dict[str, Tensor]  # a tensor shaped as the parameter: the value that it begins with
    odd: tuple[str, ...]  # of another shape (row means), or a number that depends on the values
    counters: dict[str, Tensor]  # a number for all parameters alike: the value it begins with
    numbers: frozenset[str]  # which are Python numbers
    unread: frozenset[str]  # what a step writes and none reads: it is let go
    late: bool  # whether it must make its state itself, in its first step
    dtype: torch.dtype  # of the parameter
    shape: tuple[int, ...]  # of the parameter that was tried
    sample: dict[str, Any]  # what it kept then, after some steps

    @property
    def names(self) -> set[str]:
        """The names of all slots and counters."""
        return {*self.slots, *self.odd, *self.counters}


class GroupCounts(NamedTuple):
    """Numbers that a rule keeps among the options of a param group: the count of its steps."""

    begin: Mapping[str, Tensor]  # the value before the first step
    numbers: frozenset[str]  # which are Python numbers
    late: bool  # whether the first step makes some, which must not be there before


def try_state(
    optimizer: Optimizer, number: int, early: Begin, like: Tensor, shape: Sequence[int]
) -> tuple[KeptState, GroupCounts]:
    """Return what param group `number` keeps for a parameter of a shape, and for itself.

    Raises `LayoutError` for what is neither a tensor nor a number, or is kept elsewhere.
    """

    def run(begin: Begin = early, seed: int = 0, **how: Any) -> Ran:
        sizes = (1.0, 1.0, 10.0, 0.1)  # of the values, and of the gradients of each step
        every = ((1 + seed / 8) * x * numbers_of(shape, seed + k) for k, x in enumerate(sizes))
        values, *grads = (x.to(like.device, like.dtype) for x in every)
        with same_random_numbers(like.device):
            return run_small(optimizer, number, [values], [[g] for g in grads], begin, **how)

    def changes_nothing(begin: Begin = early, without: str | None = None) -> bool:
        try:
            return _equal(ran, run(begin, without=without), without)
        except Exception:  # it looks into what it was given, or misses it
            return False

    ran, others, rule = run(), run(seed=4).states[0], type(optimizer).__name__
    if ran.hidden:
        raise _kept_elsewhere(rule, ran.hidden)
    state, begun = ran.states[0], early(ran.params[0])
    numbers = {k: float(x) for k, x in state.items() if is_number(x)}
    varying = {k for k, x in numbers.items() if x != float(others.get(k, "nan"))}
    nothing = {k for k, x in state.items() if x is None}
    unread = {k for k in varying | nothing if changes_nothing(without=k)}
    kept = _sorted(rule, ran, begun, varying=varying, unread=unread)
    shared = _shared(rule, ran, optimizer.param_groups[number], kept)
    # Zeros that are there from the beginning save a first step that holds its state twice. The
    # rule may have them if they make no difference.
    late = bool(kept.odd) or not changes_nothing(lambda p: begin_state(kept, p))
    if late and begun:
        raise _made_in_parts(rule, sorted(begun))
    return kept._replace(late=late), shared


def early_of_group(optimizer: Optimizer, number: int, *, used: bool) -> Begin:
    """Return parameter -> the state that the constructor makes for it, in a param group.

    As it has made it for those of the group; else as another optimizer has it, made of one. Where
    that is not possible (a constructor with other arguments), the rule is taken for one that makes
    its state in its first step.

    used: whether the optimizer has the state of a run, and not what its constructor has made.
    """
    group, kind = optimizer.param_groups[number], type(optimizer)
    own = [p for p in group["params"] if p.ndim and p.numel() and not p.is_meta]
    has = [] if used else [p for p in own if optimizer.state.get(p)]
    if has:
        return _early_of(optimizer, has)
    like = own[0] if own else torch.empty(0)
    small = nn.Parameter(numbers_of((2, 3), 0).to(like.device, like.dtype))
    try:
        names = inspect.signature(kind).parameters
        options = {key: x for key, x in group.items() if key in names and key != "params"}
        with same_random_numbers(small.device):
            return _early_of(kind([small], **options), [small])
    except Exception:
        return lambda p: {}


def _early_of(optimizer: Optimizer, like: Sequence[Tensor]) -> Begin:
    """Return parameter -> the state that a constructor makes for it, as it has for some.

    Raises `LayoutError` for a slot with other values for other elements.
    """
    first = like[0]
    made = dict(optimizer.state.get(first, {}))
    for name, value in made.items():
        slots = [optimizer.state[p].get(name) for p in like] if _fits(value, first) else []
        for p, slot in zip(like, slots, strict=False):
            if not _fits(slot, p) or bool((slot != value.flatten()[0]).any()):
                raise LayoutError(
                    f"{type(optimizer).__name__} makes {name} in its constructor, with other "
                    "values for other elements.",
                    cause="a copy of the parameters from which training begins, or a mask of them.",
                    fix="make it in the first step(), where there is none yet: there it is made of "
                    "the shards.",
                )

    def made_for(p: Tensor, value: Any) -> Any:
        if not _fits(value, first):
            return copy.deepcopy(value)
        dtype = p.dtype if value.dtype == first.dtype else value.dtype
        return torch.full_like(p, value.flatten()[0].item(), dtype=dtype, requires_grad=False)

    return lambda p: {name: made_for(p, value) for name, value in made.items()}


def begin_state(kept: KeptState, p: Tensor) -> dict[str, Any]:
    """Return the state that `p` begins with."""
    slots = {
        name: torch.full_like(p, fill.item(), dtype=fill.dtype, requires_grad=False)
        for name, fill in kept.slots.items()
    }
    counters = {k: as_kept(kept.numbers, k, x.clone()) for k, x in kept.counters.items()}
    return slots | counters


def as_tensor(value: Tensor | float) -> Tensor:
    """Return a number that a rule keeps as it is stored: Python's numbers lose nothing."""
    if isinstance(value, Tensor):
        return value.detach()
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)


def as_kept(numbers: Collection[str], name: str, counter: Tensor) -> Any:
    """Return a counter as the rule has it: the tensor itself, or a Python number."""
    return counter.item() if name in numbers else counter


def _sorted(
    rule: str, ran: Ran, begun: Mapping[str, Any], *, varying: set[str], unread: set[str]
) -> KeptState:
    (p,), (state,) = ran.params, ran.states
    slots, odd, counters = dict[str, Tensor](), list[str](), dict[str, Tensor]()
    for name, value in ((k, x) for k, x in state.items() if k not in unread):
        if type(value) is Tensor and _fits(value, p):
            slots[name] = _at(begun.get(name), value.new_empty(()))
        elif name in varying or (type(value) is Tensor and value.numel() != 1):
            odd.append(name)
        elif is_number(value):
            counters[name] = _at(begun.get(name), value)
        else:
            raise LayoutError(
                f"{rule} keeps {name} = {type(value).__name__} for a parameter.",
                cause="state that is neither a plain tensor nor a number: a list of past "
                "gradients, an object, a quantized tensor.",
                fix="use an optimizer whose state has tensors and numbers.",
            )
    return KeptState(
        slots=slots,
        odd=tuple(odd),
        counters=counters,
        numbers=_python_numbers(state),
        unread=frozenset(unread),
        late=True,
        dtype=p.dtype,
        shape=tuple(p.shape),
        sample={name: value for name, value in state.items() if name not in unread},
    )


def _shared(rule: str, ran: Ran, group: Mapping[str, Any], kept: KeptState) -> GroupCounts:
    for name, value in ran.options.items():
        if not is_number(value) or name == "lr" or name in kept.names:
            raise LayoutError(
                f"{rule} writes {name} ({type(value).__name__}) into its param group in step().",
                cause="an optimizer with a schedule of its own, or with more than numbers there.",
                fix="use one that writes no options but numbers of its own; for the learning "
                "rate a scheduler of torch.optim.lr_scheduler.",
            )
    return GroupCounts(
        begin={name: _at(group.get(name), value) for name, value in ran.options.items()},
        numbers=_python_numbers(ran.options),
        late=any(name not in group for name in ran.options),
    )


def _at(begin: Any, value: Any) -> Tensor:
    """Return a tensor like a number, with what it begins with: by default 0."""
    first = begin.flatten()[0].item() if isinstance(begin, Tensor) else begin or 0
    if isinstance(value, Tensor):
        return torch.full_like(value, first, requires_grad=False)
    return as_tensor(type(value)(first))


def _fits(value: Any, p: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == p.shape


def _python_numbers(state: Mapping[str, Any]) -> frozenset[str]:
    return frozenset(name for name, value in state.items() if isinstance(value, int | float))


def _equal(a: Ran, b: Ran, beside: str | None) -> bool:
    """Whether two experiments end alike, but for one name that a state may lack."""
    one, two = ({"": ran.params[0], **ran.options, **ran.states[0]} for ran in (a, b))
    return one.keys() ^ two.keys() <= {beside} and all(
        torch.equal(one[k], two[k]) if isinstance(one[k], Tensor) else one[k] == two[k]
        for k in one.keys() & two.keys()
    )


def _made_in_parts(rule: str, names: Sequence[str]) -> LayoutError:
    return LayoutError(
        f"{rule} makes {', '.join(names)} in its constructor, and more in its first step().",
        cause="state that is neither all there before the first step nor all made by it.",
        fix="make all of it in the first step(), where a parameter has none yet.",
    )


def _kept_elsewhere(rule: str, hidden: Sequence[str]) -> LayoutError:
    return LayoutError(
        f"{rule} writes {', '.join(hidden)} in step().",
        cause="a count or an average in an attribute of the optimizer, or in its state under a "
        "name: it belongs to no parameter, and no checkpoint would have it.",
        fix="use an optimizer that keeps its numbers in the state of each parameter, or in its "
        "param groups.",
    )
