"""What a torch.optim optimizer steps, needs and keeps: found when it is bound, before all else.

    bind        which parameter is in which param group
      needs     of each group: an element, a leaf, or all leaves at once: known, declared, or tried
      keeps     of each leaf: slots of its shape, counters, and what has another shape

A copy of the optimizer steps a few elements for it. So the optimizer, its parameters and the random
numbers of the process stay as they are, and every rank finds the same.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._functorch import pyfunctorch
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from fzero.context.current_rank import current_ranks
from fzero.context.modes import holds, samples
from fzero.context.rng import seeded
from fzero.errors import FzeroError, LayoutError, explain
from fzero.machine import elementwise
from fzero.machine.partition import identity
from fzero.optim.precision import Precision
from fzero.optim.rules import has_kernel, sgd_fuses
from fzero.optim.step_hooks import HOOKS, rule_step
from fzero.state.layout import Leaf, learns, stored_dtype
from fzero.state.points import Needs
from fzero.state.setup import NO_OPTIONS

Shape = tuple[int, ...]
Key = tuple[int, torch.dtype, Shape]  # param group, dtype, shape of the leaf
Changes = tuple[list[Tensor], list[float]]
"""What each parameter was changed by, and the numbers that a rule keeps for all of them."""
Rule = Callable[[list[Tensor], list[list[Tensor]]], Changes]
"""(parameters, for each step their gradients) -> what it makes of them."""
Begin = Callable[[Tensor], dict[str, Any]]
"""parameter -> the state that it has before the first step."""


class KeptState(NamedTuple):
    """The slots and counters of a rule for parameters of one param group, dtype and shape."""

    slots: dict[str, Tensor]  # a tensor shaped as the parameter: the value that it begins with
    odd: dict[str, int]  # of another shape, or a number of the leaf's values: how many elements
    counters: dict[str, Tensor]  # a number for all parameters alike: the value it begins with
    numbers: frozenset[str]  # which are Python numbers
    unread: frozenset[str]  # what a step writes and none reads: it is let go
    late: bool  # whether it must make its state itself, in its first step
    dtype: torch.dtype  # of the parameter
    sample: tuple[Shape, dict[str, Any]]  # a small parameter, and what is kept of it after steps

    @property
    def names(self) -> set[str]:
        """The names of all slots and counters."""
        return {*self.slots, *self.odd, *self.counters}


class GroupCounts(NamedTuple):
    """Numbers that a rule keeps among the options of a param group: the count of its steps."""

    begin: Mapping[str, Tensor]  # the value before the first step
    numbers: frozenset[str]  # which are Python numbers
    late: bool  # whether the first step makes some, which must not be there before


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """A torch.optim optimizer and the parameters that it steps, by path."""

    instance: Optimizer
    precision: Precision
    group_at: Mapping[str, int]  # of every path that a param group has, tied ones too
    members: Sequence[Sequence[str]]  # of each group: the path of each of its parameters
    needs: Sequence[str]  # of each group: "element", "leaf", or "all" leaves together
    kept: Mapping[Key, KeptState]
    shared: Sequence[GroupCounts]  # of each group
    devices: Sequence[torch.device]  # of each group

    @property
    def late(self) -> bool:
        """Whether the rule gets less before its first step than it keeps after it."""
        return any(one.late for one in [*self.shared, *self.kept.values()])

    def kept_for(self, leaf: Leaf) -> KeptState | None:
        """Return what the rule keeps for a leaf; None for one that it does not step."""
        group = self.group_at.get(leaf.path, -1)
        dtype = self.precision.stepped(stored_dtype(leaf.dtype))
        cut = group >= 0 and self.needs[group] == "element"
        return self.kept.get((group, dtype, _FLAT if cut else tuple(leaf.shape)))

    def begin_of(self, group: int) -> dict[str, Tensor]:
        """Return the counters of a param group before the first step."""
        own = [kept.counters for (number, *_), kept in self.kept.items() if number == group]
        return {k: x for some in (*own, self.shared[group].begin) for k, x in some.items()}

    def idle(self) -> Optimizer:
        """Return a copy of the optimizer that steps nothing of anybody's: what the trial stepped.

        One parameter, for many rules take no empty list.
        """
        idle = object.__new__(type(self.instance))
        vars(idle).update(vars(self.instance))
        vars(idle).update({name: OrderedDict() for name in HOOKS})
        for name in ("found_inf", "grad_scale"):  # for a fused kernel, which there is none of
            vars(idle).pop(name, None)
        idle.state, idle.param_groups = defaultdict(dict), []
        for (number, dtype, _), kept in [*self.kept.items()][:1]:
            shape, sample = kept.sample
            p = nn.Parameter(torch.ones(shape, dtype=dtype, device=self.devices[number]))
            p.grad = torch.ones_like(p)
            idle.state.update({} if kept.late else {p: copy.deepcopy(sample)})
            idle.param_groups.append({**self.instance.param_groups[number], "params": [p]})
        return idle


_FLAT: Shape = (-1,)  # of any flat, however many elements of a leaf are in it


def bind(
    source: Any, params: Mapping[str, Tensor], *, precision: Precision, needs: Needs | None = None
) -> Bound:
    """Make the optimizer if there is none yet, find its parameters, and what its rule needs."""
    made = not isinstance(source, Optimizer)
    given = _given_to(params) if made else NamedParameters({})
    instance = _made_by(source, given) if made else source
    group_at, members = _group_at(instance, params, given)
    learning = {path: params[path] for path in group_at if learns(params[path])}
    devices = [torch.device("cpu")] * len(instance.param_groups)
    shapes = [dict[Shape, None]() for _ in devices]
    for path, p in learning.items():
        shapes[group_at[path]][tuple(p.shape)] = None
    for path, group in group_at.items():
        devices[group] = devices[group] if params[path].is_meta else params[path].device
    used = not made and has_steps(instance)
    probes = [probe_of(instance, k, device, used=used) for k, device in enumerate(devices)]
    each = _needs_of(type(instance), probes, shapes, needs)
    keys = dict[Key, None]()  # in the order of the parameters
    for path, p in learning.items():
        group, dtype = group_at[path], precision.stepped(stored_dtype(p.dtype))
        keys[group, dtype, _FLAT if each[group] == "element" else tuple(p.shape)] = None
    kept, shared = _keeps(probes, keys)
    if not used:
        instance.state.clear()  # what the constructor made; it is made again for the shards
    for group in instance.param_groups if made else ():
        group["params"] = []  # lets go of the whole values
    return Bound(
        instance=instance,
        precision=precision,
        group_at=group_at,
        members=members,
        needs=each,
        kept=kept,
        shared=shared,
        devices=devices,
    )


# Which parameters


class NamedParameters(list[nn.Parameter]):
    """A list of parameters that has a module's methods `named_parameters` and `parameters`.

    Example:
        >>> w, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(1))
        >>> params = NamedParameters({"w": w, "b": b})
        >>> len(params), [name for name, p in params.named_parameters() if p.numel() > 1]
        (2, ['w'])
    """

    def __init__(self, params: Mapping[str, nn.Parameter]) -> None:
        super().__init__(params.values())
        self._names = tuple(params)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield (path, parameter), as `nn.Module.named_parameters`."""
        yield from zip(self._names, self, strict=True)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield each parameter, as `nn.Module.parameters`."""
        yield from self


def _given_to(params: Mapping[str, Tensor]) -> NamedParameters:
    """Return the parameters that learn, each once: themselves, or others on their memory."""
    found: dict[object, tuple[str, nn.Parameter]] = {}
    for path, p in params.items():
        if not learns(p) or (key := identity(p)) in found:
            continue
        if is_functorch_wrapped_tensor(p):  # inside a transform: only its shape is looked at
            p = torch.empty(p.shape, dtype=p.dtype, device="meta")
        found[key] = path, p if isinstance(p, nn.Parameter) else nn.Parameter(p.detach())
    return NamedParameters(dict(found.values()))


def _made_by(factory: Callable[[NamedParameters], Optimizer], given: NamedParameters) -> Optimizer:
    """Call the factory: errors in it come before anything is moved.

    torch's optimizers take no empty list: where nothing learns, they get a parameter of nobody's.
    """
    made: Any = factory(given or NamedParameters({"nothing": nn.Parameter(torch.zeros(1))}))
    if not isinstance(made, Optimizer):
        raise not_an_optimizer(f"{name_of(factory)}, which gives a {type(made).__name__}")
    require_pure_class(type(made))
    for group in () if given else made.param_groups:
        group["params"] = []
    return made


def _group_at(
    instance: Optimizer, params: Mapping[str, Tensor], given: NamedParameters
) -> tuple[dict[str, int], list[list[str]]]:
    """Return the param group of each path, and the paths of each param group, in its order."""
    paths: dict[Any, list[str]] = {}
    for path, p in params.items():
        paths.setdefault(identity(p), []).append(path)
    # Those without memory to be known by: in a plan, on the meta device, and empty ones.
    named = {path: tied for key, tied in paths.items() if type(key) is int for path in tied}
    stand_ins = {id(p): path for path, p in given.named_parameters()}
    found: dict[str, int] = {}

    def like(p: Tensor) -> list[str] | None:
        """Return the paths of an empty parameter: of several that are alike any will do."""
        free = (path for path in named if path not in found and not p.numel())
        form = p.shape, p.dtype
        return next((named[x] for x in free if (params[x].shape, params[x].dtype) == form), None)

    members: list[list[str]] = []
    objects: set[int] = set()
    for number, group in enumerate(instance.param_groups):
        names = group.get("param_names", [None] * len(group["params"]))
        own: list[str] = []
        for name, p in zip(names, group["params"], strict=True):
            known = stand_ins.get(id(p))
            key = identity(p) if known is None else identity(params[known])
            mine = paths.get(key) or named.get(name) or like(p)
            if mine is None:
                raise LayoutError(
                    f"the optimizer's group {number} has a parameter of shape {tuple(p.shape)} "
                    "that is not the module's.",
                    cause="the optimizer was made for another model, or before the module was "
                    "converted or wrapped; a factory that does not use the parameters that it is "
                    "given; or there are no values to know it by: a plan, a functionalized module "
                    "on the meta device, an empty parameter.",
                    fix="make the optimizer right before the state or the engine is made, from "
                    "module.parameters(), or from module.named_parameters(): names will do. A "
                    "factory makes it of what it is given.",
                )
            # Several parameter objects on one memory are one parameter, of one group.
            if found.get(mine[0], number) != number or id(p) in objects:
                raise LayoutError(
                    f"{mine[0]} is in the optimizer's groups {found[mine[0]]} and {number}.",
                    cause="tied weights listed twice, or overlapping group filters.",
                    fix="list every parameter once.",
                )
            found.update(dict.fromkeys(mine, number))
            own.append(mine[0])
            objects.add(id(p))
        members.append(list(dict.fromkeys(own)))
    return found, members


# What a rule needs

_ELEMENTS = ("SGD", "ASGD", "Rprop", "RMSprop", "Adagrad", "Adadelta")
_ELEMENTS += ("Adam", "AdamW", "Adamax", "NAdam", "RAdam")
_KNOWN: dict[type, str] = {getattr(torch.optim, name): "element" for name in _ELEMENTS}
_KNOWN |= {torch.optim.Adafactor: "leaf", torch.optim.Muon: "leaf"}


def known_needs(kind: type) -> str | None:
    """Return what a class of torch.optim or of fzero needs; None for any other, subclasses too.

    Example:
        >>> known_needs(torch.optim.Muon), known_needs(torch.optim.AdamW)
        ('leaf', 'element')
    """
    return "leaf" if kind.__module__.startswith("fzero.optim.") else _KNOWN.get(kind)


def _needs_of(
    kind: type, probes: Sequence[Probe], shapes: Sequence[Collection[Shape]], declared: Needs | None
) -> list[str]:
    """Return what each param group needs: an "element", a "leaf", or "all" leaves at once.

    What is known is not tried. What is declared is tried on two leaves, together and alone; and an
    "element", declared or not, by the cut test.

    Raises `LayoutError` for a class of which something else is declared than is known or seen.
    """
    known, tried = known_needs(kind), dict[Any, Any]()
    call = f"from_torch({kind.__name__}, needs={declared!r}): "

    def found(test: Callable[..., str], number: int, some: Iterable[Shape]) -> set[str]:
        """Return what a test has seen; tried once for groups that differ in the rate."""
        probe, rates = probes[number], {*NO_OPTIONS, "lr", "initial_lr"}
        rest = repr({k: x for k, x in probe.group.items() if k not in rates})
        keys = {(test, rest, small_shape(shape)) for shape in some}
        for key in keys - tried.keys():
            with _naming(kind.__name__):
                tried[key] = test(probe.changes, probe.device, key[-1])
        return {tried[key] for key in keys} - {""}

    def needs_of(number: int) -> str:
        some = sorted(shapes[number], key=prod)
        if declared and "others" in found(beyond_its_leaf, number, some[:1]):
            raise LayoutError(
                f"{call}tried on two small parameters, it makes other updates of both together "
                "than of each alone.",
                cause="a rule that looks at all parameters at once: a norm of all gradients or a "
                "clip in it, a list that it joins, a number that it finds from all (Prodigy).",
                fix="leave needs= out, and use stage 0 or one rank; clip with fzero.clip or "
                "max_norm, and not inside of the optimizer.",
            )
        seen = found(beyond_elements, number, some) if declared in (None, "element") else set()
        chances.extend(seen & {"chance"} if declared else ())
        if not declared and seen:
            return "all" if found(beyond_its_leaf, number, some) else "leaf"
        if seen - {"chance"}:
            raise not_elements
        return "leaf" if declared in ("leaf", "matrix") else "element"

    not_elements = LayoutError(
        f"{call}{kind.__name__} looks at whole matrices, or at more of them than single elements.",
        cause="a rule for matrices of torch.optim; or, tried on small parameters, it makes other "
        "updates of parts than of the whole: a mean, a norm, rows, the shape, the number of "
        "elements.",
        fix='say needs="leaf": the owner of each parameter steps the whole of it, at every stage.',
    )
    if (known, declared) == ("leaf", "element"):
        raise not_elements
    if known:
        return [known if declared in (None, "element") else "leaf"] * len(shapes)
    chances = list[str]()
    each = [needs_of(number) for number in range(len(shapes))]
    if "leaf" in each and not declared:
        _warn(
            f"{kind.__name__} looks at more than single elements of a parameter: tried on small "
            "ones, it makes other updates of parts than of the whole. It goes on with whole "
            "parameters, each stepped by the rank that owns it.",
            cause="a mean, a norm, a product of matrices, a test of the shape (LAMB, Muon, "
            "Adafactor), and nothing that says so.",
            fix=f'say it: fzero.optim.from_torch({kind.__name__}, needs="leaf").',
        )
    elif chances:
        _warn(
            f"{call}{kind.__name__} draws random numbers.",
            cause="stochastic rounding, or noise, from torch's generators: each rank draws for its "
            "own part, so that the bits are others at each stage and on each number of ranks.",
            fix="nothing, if its mean is what counts; fzero.optim.adamw and from_torch have "
            "stochastic_rounding=True, which is the same everywhere.",
        )
    return each


def _warn(seen: str, *, cause: str, fix: str) -> None:
    """Warn once: of virtual ranks, which all find the same, the first one does."""
    if (here := current_ranks()) is None or not here.rank:
        warnings.warn(explain(seen, cause=cause, fix=fix), UserWarning, stacklevel=2)


_SIZES = (1.0, 1e3, 1e-2)  # of the gradients of each step: so that a clip in the rule has an effect
_LATER = (1.0, 1.0, 1.0, 1.0)  # of more steps: some rules are plain ones in the first five


def beyond_elements(rule: Rule, device: torch.device, shape: Sequence[int]) -> str:
    """Return how the cut test shows that a rule looks at more than single elements of a leaf.

    "" if it does not. A rule that only differs with other random numbers gives "chance"; see
    `elementwise.Beyond`.
    """
    (whole,), steps = _trial(device, shape, 1, (*_SIZES, *_LATER))
    given = {"p": whole, **{f"g{number}": g for number, (g,) in enumerate(steps)}}

    def changed(values: list[Tensor]) -> dict[elementwise.Key, Tensor]:
        with pyfunctorch.temporarily_restore_interpreter_stack(around):
            changes, numbers = rule(values[:1], [[g] for g in values[1:]])
            of_samples = samples(changes[0].nan_to_num())  # of a pair under vmap
        found = {(f"number {i}", ""): torch.tensor(x) for i, x in enumerate(numbers)}
        return {**{(f"p {i}", "w"): x for i, x in enumerate(of_samples)}, **found}

    with (
        pyfunctorch.temporarily_clear_interpreter_stack() as around,
        seeded(0, device),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # of a rule for matrices, which are none here
        got = changed([x.clone() for x in given.values()])
        found = elementwise.looks_beyond(
            lambda some: changed([some[name, "w"] for name in given]),
            {(name, "w"): elementwise.sampled(x) for name, x in given.items()},
            {key: elementwise.sampled(x) for key, x in got.items() if key[1]},
        )
    return "" if found is None else found.how


def beyond_its_leaf(rule: Rule, device: torch.device, shape: Sequence[int]) -> str:
    """Return whether two small leaves are updated together otherwise than each of them alone.

    "" if not; else "others", or "chance" for a rule that draws random numbers, of which this says
    nothing. In few steps: matrices that are iterated in one batch round otherwise than each alone.
    """
    leaves, steps = _trial(device, shape, 2, _SIZES)

    def run(some: slice, seed: int = 0) -> tuple[list[Tensor], Tensor]:
        grads = [[g.clone() for g in gs[some]] for gs in steps]
        with seeded(seed, device):
            changes, numbers = rule([x.clone() for x in leaves[some]], grads)
        return [x.nan_to_num() for x in changes], torch.tensor(numbers, dtype=torch.float64)

    together, numbers = run(slice(2))
    tolerance = 1e-9 if device.type == "cpu" else 1e-4
    rounding = 16 * torch.finfo(leaves[0].dtype).eps
    for leaf, (x, whole) in enumerate(zip(leaves, together, strict=True)):
        (apart,), own = run(slice(leaf, leaf + 1))
        alike = numbers.shape == own.shape
        alike = alike and torch.allclose(numbers, own, rtol=tolerance, atol=0, equal_nan=True)
        size, off = whole.abs().max(), (whole - apart).abs().max()
        near = (off <= rounding * (size + x.abs().max())) | (off < size * tolerance)
        if not (alike and holds(near)):
            same = zip(run(slice(2))[0], run(slice(2), seed=1)[0], strict=True)
            return "others" if all(torch.equal(a, b) for a, b in same) else "chance"
    return ""


def small_shape(shape: Sequence[int], most: int = 130) -> Shape:
    """Return the shape of the leaf on which a rule for leaves of a shape is tried.

    It is square if the leaf is: factors of a matrix [n, m], which are [n, n] and [m, m], have the
    shape of the leaf itself only if n = m. So are its last two dims, for a stack of matrices. Some
    rules factor matrices of 128 and more only.

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


def _trial(
    device: torch.device, shape: Sequence[int], count: int, sizes: Sequence[float]
) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Return small leaves, and gradients of them for steps of these sizes."""
    dtype = torch.float64 if device.type == "cpu" else torch.float32
    leaves, *steps = (
        [size * numbers_of(shape, count * k + i).to(device, dtype) for i in range(count)]
        for k, size in enumerate((1.0, *sizes))
    )

    def turned(x: Tensor) -> Tensor:
        """[a, b, c] -> [b, -a, c / 1000], in each row of a matrix [n, *t]: orthogonal, nearly."""
        rows = x.reshape(len(x), -1) if x.ndim > 1 else x.reshape(1, -1)
        even = rows.shape[1] // 2 * 2
        a, b = rows[:, 0:even:2], rows[:, 1:even:2]
        return torch.cat([torch.stack([b, -a], 2).flatten(1), 1e-3 * rows[:, even:]], 1).view_as(x)

    # Some rules project where a gradient is orthogonal to its values, row by row (AdamP).
    steps[0] = [turned(x) for x in leaves]
    return leaves, steps


# What a rule keeps


def _keeps(
    probes: Sequence[Probe], keys: Iterable[Key]
) -> tuple[dict[Key, KeptState], list[GroupCounts]]:
    """Return what the rule keeps for each key, and in each param group."""
    kept, tried = dict[Key, KeptState](), dict[Any, tuple[KeptState, GroupCounts]]()
    shared = [GroupCounts({}, frozenset(), False)] * len(probes)
    counted: dict[tuple[int, str], tuple[float, Shape]] = {}
    for group, dtype, shape in keys:
        probe = probes[group]
        of_torch, rule = is_of_torch(probe.optimizer), type(probe.optimizer).__name__
        if shape == _FLAT:
            small = (24,) if of_torch else (8192,)  # some rules quantize from 4096 elements on
        else:
            small = small_shape(shape, 6) if of_torch else small_shape(shape)
        with _naming(rule):
            if (group, dtype, small) not in tried:
                tried[group, dtype, small] = _tried(probe, dtype, small)
            mine, shared[group] = tried[group, dtype, small]
            if prod(shape) > prod(small):
                mine = _as_large(probe, dtype, shape, mine)
        if mine.odd and shape == _FLAT:
            raise LayoutError(
                f"{rule} keeps {next(iter(mine.odd))} for a parameter, which is neither shaped as "
                "the parameter nor a count of updates.",
                cause="state that does not go with the elements: it cannot be cut into shards.",
                fix='say from_torch(..., needs="leaf"): the owner of a parameter keeps it.',
            )
        for name in mine.counters:
            value = float(mine.sample[1][name])
            other, before = counted.setdefault((group, name), (value, small))
            if other != value:
                raise LayoutError(
                    f"{rule} keeps another {name} for other parameters of param group {group}: "
                    f"{other} for one of shape {before}, and {value} for one of shape {small}.",
                    cause="a rule that treats matrices in one way and the rest in another, in one "
                    "param group, and notes which (timm's Muon).",
                    fix="make param groups of their own, params=[{'params': matrices}, {'params': "
                    "others}]: such a number is kept once for each group.",
                )
        kept[group, dtype, shape] = mine
    return kept, shared


def _tried(probe: Probe, dtype: torch.dtype, shape: Shape) -> tuple[KeptState, GroupCounts]:
    """Return what a param group keeps for a small parameter, and for itself.

    What it keeps are tensors shaped as the parameter, numbers, and tensors of other shapes. A
    number is a counter if it is the same for other values and gradients.

    Raises `LayoutError` for what is neither a tensor nor a number, or is kept elsewhere.
    """

    def run(seed: int = 0, begin: Begin = probe.begin, without: str | None = None) -> Ran:
        sizes = (1.0, 1.0, 10.0, 0.1)  # of the values, and of the gradients of each step
        every = ((1 + seed / 8) * x * numbers_of(shape, seed + k) for k, x in enumerate(sizes))
        values, *grads = (x.to(probe.device, dtype) for x in every)
        with seeded(0, probe.device):
            return probe._replace(begin=begin).step([values], [[g] for g in grads], without)

    def changes_nothing(begin: Begin = probe.begin, without: str | None = None) -> bool:
        with suppress(Exception):  # it looks into what it was given, or misses it
            again = run(begin=begin, without=without)
            one, two = ({"": x.params[0], **x.options, **x.states[0]} for x in (ran, again))
            alike = one.keys() ^ two.keys() <= {without}
            return alike and not any(_changed(one[k], two[k]) for k in one.keys() & two.keys())
        return False

    ran, others, rule = run(), run(seed=4).states[0], type(probe.optimizer).__name__
    if ran.hidden:
        raise LayoutError(
            f"{rule} writes {', '.join(ran.hidden)} in step().",
            cause="a count or an average in an attribute of the optimizer, or in its state under a "
            "name: it belongs to no parameter, and no checkpoint would have it.",
            fix="use an optimizer that keeps its numbers in the state of each parameter, or in its "
            "param groups.",
        )
    (p,), (state,), group = ran.params, ran.states, probe.group
    begun = probe.begin(p)
    varying = {
        k for k, x in state.items() if is_number(x) and float(x) != float(others.get(k, "nan"))
    }
    unread = {k for k, x in state.items() if x is None or k in varying}
    unread = {k for k in unread if changes_nothing(without=k)}
    slots, odd, counters = dict[str, Tensor](), dict[str, int](), dict[str, Tensor]()
    for name, value in ((k, x) for k, x in state.items() if k not in unread):
        if type(value) is Tensor and value.shape == p.shape:
            slots[name] = _at(begun.get(name), value.new_empty(()))
        elif name in varying or (type(value) is Tensor and value.numel() != 1):
            odd[name] = as_tensor(value).numel()
        elif is_number(value):
            counters[name] = _at(begun.get(name), value)
        else:
            raise _not_kept(rule, name, value)
    numbers = frozenset(k for k, x in state.items() if isinstance(x, int | float))
    for name, value in ran.options.items():
        if not is_number(value) or name == "lr" or name in {*slots, *odd, *counters}:
            raise LayoutError(
                f"{rule} writes {name} ({type(value).__name__}) into its param group in step().",
                cause="an optimizer with a schedule of its own, or with more than numbers there.",
                fix="use one that writes no options but numbers of its own; for the learning "
                "rate a scheduler of torch.optim.lr_scheduler.",
            )

    def begins(p: Tensor) -> dict[str, Any]:
        own = {k: as_kept(numbers, k, x.clone()) for k, x in counters.items()}
        full = {k: torch.full_like(p.detach(), x.item(), dtype=x.dtype) for k, x in slots.items()}
        return full | own

    # Zeros that are there from the beginning save a first step that holds its state twice. The
    # rule may have them if they make no difference.
    late = bool(odd) or not changes_nothing(begins)
    if late and begun:
        raise LayoutError(
            f"{rule} makes {', '.join(sorted(begun))} in its constructor, and more in its first "
            "step().",
            cause="state that is neither all there before the first step nor all made by it.",
            fix="make all of it in the first step(), where a parameter has none yet.",
        )
    left = {name: value for name, value in state.items() if name not in unread}
    kept = KeptState(slots, odd, counters, numbers, frozenset(unread), late, p.dtype, (shape, left))
    return kept, GroupCounts(
        begin={name: _at(group.get(name), value) for name, value in ran.options.items()},
        numbers=frozenset(k for k, x in ran.options.items() if isinstance(x, int | float)),
        late=any(name not in group for name in ran.options),
    )


def _as_large(probe: Probe, dtype: torch.dtype, shape: Shape, small: KeptState) -> KeptState:
    """Return what a rule keeps of a leaf of this shape, as a step on the meta device shows it.

    small: what it keeps of a small one: with which values that begins, and which numbers are
    counters. Of a rule that cannot make this step it is all that is known.
    """

    class Ones(TorchDispatchMode):
        """What a step reads of a tensor without values is 1."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
                return torch.ones((), dtype=args[0].dtype).item()
            return func(*args, **(kwargs or {}))

    p, state = torch.empty(shape, dtype=dtype, device="meta"), dict[str, Any]()
    quiet = warnings.catch_warnings(action="ignore")
    with suppress(Exception), quiet, seeded(0, probe.device), Ones():
        state = probe.step([p], [[p]]).states[0]
    slots, odd = dict[str, Tensor](), dict[str, int]()
    for name in state.keys() - small.unread - small.counters.keys():
        value = as_tensor(state[name])
        if value.shape != p.shape:
            odd[name] = value.numel()
        elif type(value) is not Tensor:
            raise _not_kept(type(probe.optimizer).__name__, name, value)
        else:
            slots[name] = small.slots.get(name, torch.zeros((), dtype=value.dtype))
    if not state or probe.begin(p):
        return small
    counters = {name: x for name, x in small.counters.items() if name in state}
    late = small.late or bool(odd) or slots.keys() != small.slots.keys()
    order = {name: slots[name] for name in state if name in slots}
    return small._replace(slots=order, odd=odd, counters=counters, late=late)


def _not_kept(rule: str, name: str, value: Any) -> LayoutError:
    return LayoutError(
        f"{rule} keeps {name} = {type(value).__name__} for a parameter.",
        cause="state that is neither a plain tensor nor a number: a list of past gradients, an "
        "object, a quantized tensor.",
        fix="use an optimizer whose state has tensors and numbers.",
    )


def probe_of(source: Optimizer, number: int, device: torch.device, *, used: bool) -> Probe:
    """Return a param group, with the state that the constructor makes for a parameter.

    As it has made it for those of the group; else as another optimizer has it, made of one. Where
    that is not possible (a constructor with other arguments), the rule is taken for one that makes
    its state in its first step.

    used: whether the optimizer has the state of a run, and not what its constructor has made.

    Raises `LayoutError` for a slot with other values for other elements.
    """
    optimizer, group, kind = source, source.param_groups[number], type(source)
    own = [p for p in group["params"] if p.ndim and p.numel() and not p.is_meta]
    like = [] if used else [p for p in own if optimizer.state.get(p)]
    if made_anew := not like:
        first = own[0] if own else torch.empty(0)
        like = [nn.Parameter(numbers_of((2, 3), 0).to(first.device, first.dtype))]
        with suppress(Exception), seeded(0, like[0].device):
            names = inspect.signature(kind).parameters
            options = {key: x for key, x in group.items() if key in names and key != "params"}
            optimizer = kind([like[0]], **options)
    made = dict(optimizer.state.get(like[0], {}))

    def fits(value: Any, p: Tensor) -> bool:
        return isinstance(value, Tensor) and value.shape == p.shape

    for name, value in made.items():
        for slot, p in ((optimizer.state[p].get(name), p) for p in like if fits(value, like[0])):
            if not fits(slot, p) or bool((slot != value.flatten()[0]).any()):
                if made_anew:
                    return Probe(source, number, lambda p: {}, device)
                raise LayoutError(
                    f"{kind.__name__} makes {name} in its constructor, with other values for other "
                    "elements.",
                    cause="a copy of the parameters from which training begins, or a mask of them.",
                    fix="make it in the first step(), where there is none yet: there it is made of "
                    "the shards.",
                )

    def made_for(p: Tensor, value: Any) -> Any:
        if not fits(value, like[0]):
            return copy.deepcopy(value)
        dtype = p.dtype if value.dtype == like[0].dtype else value.dtype
        return torch.full_like(p.detach(), value.flatten()[0].item(), dtype=dtype)

    begin = lambda p: {name: made_for(p, value) for name, value in made.items()}  # noqa: E731
    return Probe(source, number, begin, device)


def has_steps(instance: Optimizer) -> bool:
    """Whether an instance has state of a run: it made steps, or a state_dict was loaded into it."""
    return any(state.get("step", 1) != 0 for state in instance.state.values() if state)


def as_tensor(value: Tensor | float) -> Tensor:
    """Return a number that a rule keeps as it is stored: Python's numbers lose nothing."""
    if isinstance(value, Tensor):
        return value.detach()
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)


def as_kept(numbers: Collection[str], name: str, counter: Tensor) -> Any:
    """Return a counter as the rule has it: the tensor itself, or a Python number."""
    return counter.item() if name in numbers else counter


def is_number(value: Any) -> bool:
    """Whether a value is a number, or a tensor with one element."""
    return value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, int | float)


def _at(begin: Any, value: Any) -> Tensor:
    """Return a tensor like a number, with what it begins with: by default 0."""
    first = begin.flatten()[0].item() if isinstance(begin, Tensor) else begin or 0
    if isinstance(value, Tensor):
        return torch.full_like(value, first, requires_grad=False)
    return as_tensor(type(value)(first))


# A small copy of an optimizer


class Ran(NamedTuple):
    """A small copy after its steps: parameters, states, and what else the steps changed."""

    params: list[Tensor]
    states: list[dict[str, Any]]  # of each parameter
    options: dict[str, Any]  # of the param group, those that a step changed
    hidden: list[str]  # what a step counted elsewhere: attributes, state of no parameter


class Probe(NamedTuple):
    """A param group of an optimizer, of which small copies are stepped."""

    optimizer: Optimizer
    number: int  # of the param group
    begin: Begin  # what the constructor keeps of a parameter
    device: torch.device

    @property
    def group(self) -> dict[str, Any]:
        """The param group itself."""
        return self.optimizer.param_groups[self.number]

    def changes(self, params: list[Tensor], grads: list[list[Tensor]]) -> Changes:
        """Return what the rule makes of parameters."""
        ran = self.step(params, grads)
        numbers = [float(x) for _, x in sorted(ran.options.items()) if is_number(x)]
        return [p - before for p, before in zip(ran.params, params, strict=True)], numbers

    def step(
        self, values: list[Tensor], grads: list[list[Tensor]], without: str | None = None
    ) -> Ran:
        """Step values [.] by a copy of the param group, once for each of `grads`.

        The copy is not made by the constructor, whose arguments need not all be options of it.

        without: what is taken out of the state of each parameter before each step.
        """
        optimizer, group = self.optimizer, self.group
        params = [nn.Parameter(x.clone()) for x in values]
        small: Any = object.__new__(type(optimizer))
        options: dict[str, Any] = {"params": params}
        small.state, small.param_groups = defaultdict(dict), [options]
        # Attributes that lead to the optimizer, its groups or its parameters lead to small ones.
        memo: dict[int, Any] = {id(p): params[0] for p in group["params"]}
        memo |= {id(optimizer): small, id(group): options}
        memo |= {id(optimizer.state): small.state, id(optimizer.param_groups): small.param_groups}

        def copied(value: Any) -> Any:
            try:
                return copy.deepcopy(value, memo)
            except Exception:  # a lock, a process group: shared
                return value

        options |= {name: copied(x) for name, x in group.items() if name != "params"}
        lr = options.get("lr")  # a warm-up begins with 0, at which all rules are alike
        if isinstance(lr, Tensor | int | float):
            options["lr"] = torch.full_like(lr, 0.1) if isinstance(lr, Tensor) else 0.1
        if fuses(optimizer, options, params):
            options["fused"] = True
        for name, value in vars(optimizer).items():
            if name.endswith("_hooks"):
                vars(small)[name] = type(value)()
            elif name not in vars(small) and not (callable(value) and hasattr(type(small), name)):
                vars(small)[name] = copied(value)  # but a scheduler's own step
        small.state.update({p: state for p in params if (state := self.begin(p))})

        def as_now(values: Mapping[str, Any]) -> dict[str, Any]:
            return {name: x.clone() if isinstance(x, Tensor) else x for name, x in values.items()}

        before, attributes = as_now(options), as_now(vars(small))
        for gs in grads:
            for p, g in zip(params, gs, strict=True):
                p.grad = g.clone()
                small.state.get(p, {}).pop(without, None)
            rule_step(small)
        kinds = int | float | Tensor  # what may count or average something: no flag
        now = {k: x for k, x in vars(small).items() if isinstance(x, kinds) and type(x) is not bool}
        options.pop("params")
        return Ran(
            params=[p.detach() for p in params],
            states=[dict(small.state.get(p, {})) for p in params],
            options={k: x for k, x in options.items() if _changed(before.get(k), x)},
            hidden=[
                *(f"self.{k}" for k, x in now.items() if _changed(attributes.get(k), x)),
                *(f"state[{k!r}]" for k in small.state if not isinstance(k, Tensor)),
            ],
        )


def _changed(before: Any, after: Any) -> bool:
    if isinstance(after, Tensor):
        return not (isinstance(before, Tensor) and torch.equal(before, after))
    return after is not before and repr(after) != repr(before)


def fuses(optimizer: Optimizer, group: Mapping[str, Any], params: Sequence[Tensor]) -> bool:
    """Whether a param group that leaves the choice to torch is stepped by a fused kernel here."""
    free = group.get("fused", False) is None and group.get("foreach") is None
    plain = not (group.get("capturable") or group.get("differentiable"))
    taken = all(p.is_floating_point() for p in params) and has_kernel(params)
    if isinstance(optimizer, torch.optim.SGD):
        taken = taken and sgd_fuses(params)
    return free and plain and taken and not isinstance(group.get("lr"), Tensor)


def is_of_torch(optimizer: Optimizer) -> bool:
    """Whether a class is torch.optim's own, in whose rules no size counts."""
    return f"{type(optimizer).__module__}.".startswith("torch.optim.")


def numbers_of(shape: Sequence[int], seed: int) -> Tensor:
    """Fixed numbers between -3 and 3, none of them 0, alike on every machine, in fp64."""
    count = torch.arange(torch.Size(shape).numel())
    sizes = 3 * (0.5 + (7 * count + 5 * seed + 3).remainder(11).double()) / 11
    signs = 1 - 2 * (count + seed).remainder(3).remainder(2)
    return (sizes * signs).view(*shape)


# What cannot be

_REFUSED = {
    torch.optim.LBFGS: "it evaluates the loss several times in a step, by a closure",
    torch.optim.SparseAdam: "it takes sparse gradients; flat buffers have dense ones",
}


def require_usable(source: Any) -> None:
    """Raise `LayoutError` for what is no torch.optim class, instance or factory."""
    kind = source if isinstance(source, type) else type(source)
    if issubclass(kind, Optimizer):
        require_pure_class(kind)
    elif isinstance(source, list | tuple | dict):
        raise LayoutError(
            f"{len(source)} optimizers in a {type(source).__name__}.",
            cause="an optimizer for each part of a module (DARTS, a GAN in one class).",
            fix="make one engine for each part, Engine(net.generator, optimizer_g, stage=2) and "
            "Engine(net.discriminator, optimizer_d, stage=2), and call net as ever: each step() "
            "updates its own. If both step at once, one optimizer with param groups does. For "
            "other rules by path, fzero.optim.partition.",
        )
    elif not callable(source) or isinstance(source, type):
        raise not_an_optimizer(f"{source!r}")


def require_pure_class(kind: type[Optimizer]) -> None:
    """Raise `LayoutError` for a class that is no function of parameters, gradients and state."""
    for refused, reason in _REFUSED.items():
        if issubclass(kind, refused):
            raise LayoutError(
                f"{kind.__name__} cannot step shards of the parameters: {reason}.",
                cause="an optimizer that is no function of parameters and gradients.",
                fix="use an elementwise optimizer (SGD, Adam, AdamW, Adagrad, RMSprop, ...).",
            )
    if hasattr(kind, "eval"):
        raise LayoutError(
            f"{kind.__name__} has eval(), which changes the parameters by the optimizer's state.",
            cause="an optimizer without a schedule (schedule-free): it trains at one point and is "
            "to be evaluated at another; the state that leads there is sharded.",
            fix="use an optimizer whose parameters are what is to be evaluated; for an average of "
            "them, keep one beside the training (examples/ema.py).",
        )


def not_an_optimizer(seen: str) -> LayoutError:
    """Return the error for what is none of torch.optim."""
    return LayoutError(
        f"the optimizer is {seen}.",
        cause="an fzero.optim rule, a scheduler, or the name of an optimizer.",
        fix="pass a torch.optim optimizer, its class, or params -> optimizer: "
        "functools.partial(torch.optim.AdamW, lr=3e-4).",
    )


def name_of(factory: Any) -> str:
    """Return what a class, factory or instance is called, alike on every rank: no address."""
    if isinstance(factory, Optimizer):
        return type(factory).__name__
    function = getattr(factory, "func", factory)
    return getattr(function, "__qualname__", type(function).__name__)


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Name the optimizer in errors of its rule."""
    try:
        yield
    except FzeroError:
        raise
    except Exception as error:
        raise LayoutError(
            f"{name} could not step a small parameter: {type(error).__name__}: {error}",
            cause=f"{name} wraps another optimizer; or its step() needs a closure (SAM), or "
            "matrices alone (Muon), or state that only its constructor makes, from arguments "
            "that are not options of its groups.",
            fix="for matrices, pass an instance that was made of them, or one that steps the "
            "others by another rule; else a factory, params -> optimizer.",
        ) from error
