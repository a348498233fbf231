"""The experiment: a small copy of an optimizer steps a few elements, as a leaf and lying flat.

It says what a class needs that is neither known nor declared, and what any class keeps. The
optimizer, its parameters and the random numbers of the process stay as they are.
"""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._functorch import pyfunctorch
from torch.optim import Optimizer

from fzero.context.modes import holds, samples
from fzero.machine.elementwise import Key, looks_beyond, sampled
from fzero.optim._rules import has_kernel, sgd_fuses
from fzero.optim._silent import rule_step

LARGE = 130  # some rules factor matrices of 128 and more only
SIZES = (1.0, 1e3, 1e-2)  # of the gradients of each step: so that a clip in the rule has an effect
LATER = (1.0, 1.0, 1.0, 1.0)  # of more steps: some rules are plain ones in the first five

Rule = Callable[[list[Tensor], list[list[Tensor]]], tuple[list[Tensor], list[float]]]
"""(parameters, for each step their gradients) -> what each parameter was changed by, and the
numbers that the rule keeps for all of them together."""
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
    small.state.update({p: state for p in params if (state := begin(p))})
    group = small.param_groups[0]
    options, attributes = _as_now(group), _as_now(vars(small))
    for gs in grads:
        for p, g in zip(params, gs, strict=True):
            p.grad = g.clone()
            small.state.get(p, {}).pop(without, None)
        rule_step(small)
    kinds = int | float | Tensor  # what may count or average something: no flag
    counted = [k for k, x in vars(small).items() if isinstance(x, kinds) and type(x) is not bool]
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
    options |= {name: _copied(x, memo) for name, x in group.items() if name != "params"}
    lr = options.get("lr")  # a warm-up begins with 0, at which all rules are alike
    if isinstance(lr, Tensor | int | float):
        options["lr"] = torch.full_like(lr, 0.1) if isinstance(lr, Tensor) else 0.1
    if fuses(optimizer, options, params):
        options["fused"] = True
    for name, value in vars(optimizer).items():
        if name.endswith("_hooks"):
            vars(small)[name] = type(value)()
        elif name not in vars(small) and not (callable(value) and hasattr(type(optimizer), name)):
            vars(small)[name] = _copied(value, memo)  # but a scheduler's own step
    return small


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # a lock, a process group: shared
        return value


def _as_now(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: x.clone() if isinstance(x, Tensor) else x for name, x in values.items()}


def _changed(before: Any, after: Any) -> bool:
    if isinstance(after, Tensor):
        return not (isinstance(before, Tensor) and torch.equal(before, after))
    return after is not before and repr(after) != repr(before)


def is_number(value: Any) -> bool:
    """Whether a value is a number, or a tensor with one element."""
    return value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, int | float)


def rule_of(optimizer: Optimizer, number: int, early: Begin) -> Rule:
    """Return the rule of param group `number`."""

    def rule(params: list[Tensor], grads: list[list[Tensor]]) -> tuple[list[Tensor], list[float]]:
        ran = run_small(optimizer, number, params, grads, early)
        numbers = [float(x) for _, x in sorted(ran.options.items()) if is_number(x)]
        return [p - before for p, before in zip(ran.params, params, strict=True)], numbers

    return rule


def small_shape(shape: Sequence[int], most: int = LARGE) -> tuple[int, ...]:
    """Return the shape of the leaf on which a rule for leaves of a shape is tried.

    It is square if the leaf is: factors of a matrix [n, m], which are [n, n] and [m, m], have the
    shape of the leaf itself only if n = m. So are its last two dims, for a stack of matrices.

    Example:
        >>> small_shape([50_000, 768]), small_shape([64, 3, 7, 7]), small_shape([])
        ((131, 130), (64, 3, 2, 2), (1,))
    """
    small = [min(size, most if dim < 2 else 2) for dim, size in enumerate(shape)]
    if len(small) > 1 and small[0] == small[1] and shape[0] != shape[1]:
        small[0 if shape[0] > shape[1] else 1] += 1
    if len(small) > 2 and (small[-2] == small[-1]) != (shape[-2] == shape[-1]):
        small[-1] = small[-2] + (shape[-2] != shape[-1])
    return tuple(max(size, 1) for size in small) or (1,)


def beyond_elements(rule: Rule, device: torch.device, shape: Sequence[int]) -> str:
    """Return how it shows that a rule for leaves of a shape looks at more than single elements.

    "" if it does not: it updates elements of a small leaf that lie flat as it updates the leaf. A
    rule that only differs with other random numbers gives "chance"; see `elementwise.Beyond`.
    """
    (whole,), steps = _trial(device, shape, 1, (*SIZES, *LATER))
    given = {"p": whole, **{f"g{number}": g for number, (g,) in enumerate(steps)}}

    def changed(values: list[Tensor]) -> dict[Key, Tensor]:
        with pyfunctorch.temporarily_restore_interpreter_stack(around):
            changes, numbers = rule(values[:1], [[g] for g in values[1:]])
            of_samples = samples(changes[0].nan_to_num())  # of a pair under vmap
        found = {(f"number {i}", ""): torch.tensor(x) for i, x in enumerate(numbers)}
        return {**{(f"p {i}", "w"): x for i, x in enumerate(of_samples)}, **found}

    with (
        pyfunctorch.temporarily_clear_interpreter_stack() as around,
        same_random_numbers(device),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # of a rule for matrices, which are none here
        got = changed([x.clone() for x in given.values()])
        found = looks_beyond(
            lambda some: changed([some[name, "w"] for name in given]),
            {(name, "w"): sampled(x) for name, x in given.items()},
            {key: sampled(x) for key, x in got.items() if key[1]},
        )
    return "" if found is None else found.how


def is_leafwise(rule: Rule, device: torch.device, shape: Sequence[int]) -> bool:
    """Whether two small leaves are updated together as each of them is alone.

    In few steps: matrices that are iterated in one batch round in another way than each alone.
    """
    leaves, steps = _trial(device, shape, 2, SIZES)

    def run(some: slice) -> tuple[list[Tensor], Tensor]:
        grads = [[g.clone() for g in gs[some]] for gs in steps]
        with same_random_numbers(device):
            changes, numbers = rule([x.clone() for x in leaves[some]], grads)
        return changes, torch.tensor(numbers, dtype=torch.float64)

    together, numbers = run(slice(2))
    tolerance, rounding = (
        (1e-9 if device.type == "cpu" else 1e-4),
        16 * torch.finfo(leaves[0].dtype).eps,
    )
    for leaf, x in enumerate(leaves):
        (apart,), own = run(slice(leaf, leaf + 1))
        same = numbers.shape == own.shape
        if not same or not torch.allclose(numbers, own, rtol=tolerance, atol=0, equal_nan=True):
            return False
        size = (whole := together[leaf].nan_to_num()).abs().max()
        off = (whole - apart.nan_to_num()).abs().max()
        if not holds((off <= rounding * (size + x.abs().max())) | (off < size * tolerance)):
            return False
    return True


def is_random(rule: Rule, device: torch.device, shape: Sequence[int]) -> bool:
    """Whether the update is another with other random numbers."""
    x, g = (numbers_of(shape, seed).to(device, torch.float32) for seed in (0, 1))

    def change(seed: int) -> Tensor:
        with same_random_numbers(device, seed):
            return rule([x.clone()], [[g.clone()]])[0][0]

    return not torch.equal(change(0), change(1))


def sees_no_other(rule: Rule, device: torch.device, shape: Sequence[int]) -> bool:
    """Whether a leaf may be updated alone, as far as a trial tells: random rules are believed."""
    return is_leafwise(rule, device, shape) or is_random(rule, device, shape)


def _trial(
    device: torch.device, shape: Sequence[int], count: int, sizes: Sequence[float]
) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Return small leaves, and gradients of them for steps of these sizes."""
    dtype = torch.float64 if device.type == "cpu" else torch.float32
    leaves, *steps = (
        [size * numbers_of(shape, count * k + i).to(device, dtype) for i in range(count)]
        for k, size in enumerate((1.0, *sizes))
    )
    # Some rules project where a gradient is orthogonal to its values, row by row (AdamP).
    steps[0] = [_turned(x) for x in leaves]
    return leaves, steps


def _turned(x: Tensor) -> Tensor:
    """[a, b, c] -> [b, -a, c / 1000], in each row of a matrix [n, *t]: orthogonal, nearly."""
    rows = x.reshape(len(x), -1) if x.ndim > 1 else x.reshape(1, -1)
    even = rows.shape[1] // 2 * 2
    a, b = rows[:, 0:even:2], rows[:, 1:even:2]
    turned = torch.stack([b, -a], 2).flatten(1)
    return torch.cat([turned, 1e-3 * rows[:, even:]], 1).view(x.shape)


@contextmanager
def same_random_numbers(device: torch.device, seed: int = 0) -> Iterator[None]:
    """Random numbers are those of the seed in this block, and go on as before after it."""
    on_gpu = device.type == "cuda"
    index = torch.cuda.current_device() if on_gpu and device.index is None else device.index
    with torch.random.fork_rng(devices=[index] if on_gpu else []):
        torch.default_generator.manual_seed(seed)
        if on_gpu:
            torch.cuda.default_generators[index].manual_seed(seed)
        yield


def numbers_of(shape: Sequence[int], seed: int) -> Tensor:
    """Fixed numbers between -3 and 3, none of them 0, alike on every machine, in fp64."""
    count = torch.arange(torch.Size(shape).numel())
    sizes = 3 * (0.5 + (7 * count + 5 * seed + 3).remainder(11).double()) / 11
    signs = 1 - 2 * (count + seed).remainder(3).remainder(2)
    return (sizes * signs).view(*shape)
