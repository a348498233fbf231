"""Which parameter is in which param group of a torch.optim optimizer, and what it keeps for it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fzero.context.here import current_ranks
from fzero.errors import FzeroError, LayoutError
from fzero.machine.partition import identity
from fzero.optim._kept import GroupCounts, KeptState, early_of_group, try_state
from fzero.optim._named import NamedParameters, given_to
from fzero.optim._precision import Precision
from fzero.optim._small import (
    LARGE,
    Begin,
    beyond_elements,
    is_leafwise,
    rule_of,
    sees_no_other,
    small_shape,
)
from fzero.optim._usable import (
    Needs,
    cannot_be_cut,
    has_steps,
    known_needs,
    name_of,
    not_alike,
    not_alone,
    not_an_optimizer,
    not_elements,
    require_pure_class,
    warn_of_chance,
)
from fzero.state.layout import Leaf, learns, stored_dtype
from fzero.state.setup import NO_OPTIONS, ParamGroups

Shape = tuple[int, ...]
Key = tuple[int, torch.dtype, Shape]  # param group, dtype, shape of the trial


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """A torch.optim optimizer and the parameters that it steps, by path."""

    instance: Optimizer
    precision: Precision
    group_at: Mapping[str, int]  # of every path that a param group has, tied ones too
    members: Sequence[Sequence[str]]  # of each group: the path of each of its parameters
    elementwise: Sequence[bool]  # of each group: whether it may update a part of a leaf
    kept: Mapping[Key, KeptState]
    shared: Sequence[GroupCounts]  # of each group
    leafwise: bool  # whether a leaf may be updated without the others
    devices: Sequence[torch.device]  # of each group

    def kept_for(self, leaf: Leaf) -> KeptState | None:
        """Return what the rule keeps for a leaf; None for one that it does not step."""
        group = self.group_at.get(leaf.path, -1)
        if group < 0:
            return None
        elementwise = self.elementwise[group]
        shape = _tried_shape(self.instance, leaf.shape, elementwise=elementwise)
        return self.kept.get((group, self.precision.stepped(stored_dtype(leaf.dtype)), shape))

    def begin_of(self, group: int) -> dict[str, Tensor]:
        """Return the counters of a param group before the first step."""
        own = {
            k: x
            for (g, *_), kept in self.kept.items()
            if g == group
            for k, x in kept.counters.items()
        }
        return {**own, **self.shared[group].begin}

    def param_groups(self, leaves: Sequence[Leaf]) -> ParamGroups:
        """Return the param groups of the instance, as they are now."""
        groups = self.instance.param_groups
        return ParamGroups(
            of_leaf=tuple(self.group_at.get(x.path, -1) if x.trainable else -1 for x in leaves),
            options=tuple(
                {k: one[k] for k in one if k not in {*NO_OPTIONS, *shared.begin}}
                for one, shared in zip(groups, self.shared, strict=True)
            ),
            instance=self.instance,
        )


def bind(
    source: Any, params: Mapping[str, Tensor], *, precision: Precision, needs: Needs = None
) -> Bound:
    """Make the optimizer if there is none yet, find its parameters, and what its rule needs."""
    made = not isinstance(source, Optimizer)
    given = given_to(params) if made else NamedParameters({})
    instance = _made_by(source, given) if made else source
    group_at, members = _group_at(instance, params, given)
    used, numbers = not made and has_steps(instance), range(len(instance.param_groups))
    earlies = [early_of_group(instance, g, used=used) for g in numbers]
    devices = _devices(instance, params, group_at)
    learning = {path: params[path] for path in group_at if learns(params[path])}
    shapes = [set[Shape]() for _ in numbers]
    for path, p in learning.items():
        shapes[group_at[path]].add(_tried_shape(instance, p.shape, elementwise=False))
    each = _needs_of(instance, earlies, devices, shapes, needs)
    elementwise = [need == "element" for need in each]
    keys: dict[Key, None] = {}  # in the order of the parameters
    for path, p in learning.items():
        shape = _tried_shape(instance, p.shape, elementwise=elementwise[group_at[path]])
        keys[group_at[path], precision.stepped(stored_dtype(p.dtype)), shape] = None
    kept, shared = _learned(instance, keys, elementwise, earlies, devices)
    if not used:
        instance.state.clear()  # what the constructor made; it is made again for the shards
    for group in instance.param_groups if made else ():
        group["params"] = []  # lets go of the whole values
    return Bound(
        instance=instance,
        precision=precision,
        group_at=group_at,
        members=members,
        elementwise=elementwise,
        kept=kept,
        shared=shared,
        leafwise="all" not in each,
        devices=devices,
    )


def _needs_of(
    instance: Optimizer,
    earlies: Sequence[Begin],
    devices: Sequence[torch.device],
    shapes: Sequence[Collection[Shape]],
    declared: Needs,
) -> list[str]:
    """Return what each param group needs: an "element", a "matrix", or "all" parameters at once.

    Raises `LayoutError` for a class of which something else is declared than is known or seen.
    """
    known, rule = known_needs(type(instance)), type(instance).__name__
    if known is not None:
        if (known, declared) == ("matrix", "element"):
            raise not_elements(rule)
        return [declared or known] * len(instance.param_groups)
    tried: dict[Any, Any] = {}

    def found(test: Callable[..., Any], number: int, some: Iterable[Shape]) -> set[Any]:
        """Return what a test gives; tried once for groups that differ in the rate."""
        group = instance.param_groups[number]
        rest = repr({k: group[k] for k in group if k not in {*NO_OPTIONS, "lr", "initial_lr"}})
        of = rule_of(instance, number, earlies[number])
        for shape in some:
            if (test, rest, shape) not in tried:
                with _naming(rule):
                    tried[test, rest, shape] = test(of, devices[number], shape)
        return {tried[test, rest, shape] for shape in some}

    def need_of(number: int, some: Collection[Shape]) -> str:
        if declared is not None and not all(
            found(sees_no_other, number, sorted(some, key=prod)[:1])
        ):
            raise not_alone(rule, declared)
        hows = set[str]() if declared == "matrix" else found(beyond_elements, number, some)
        if declared == "element" and hows - {"", "chance"}:
            raise not_elements(rule)
        if declared is not None or hows <= {""}:
            chances.append("chance" in hows)
            return declared or "element"
        return "matrix" if all(found(is_leafwise, number, some)) else "all"

    chances = list[bool]()
    needs = [need_of(number, some) for number, some in enumerate(shapes)]
    if any(chances) and ((here := current_ranks()) is None or not here.rank):
        warn_of_chance(rule)
    return needs


def _learned(
    instance: Optimizer,
    keys: Iterable[Key],
    elementwise: Sequence[bool],
    earlies: Sequence[Begin],
    devices: Sequence[torch.device],
) -> tuple[dict[Key, KeptState], list[GroupCounts]]:
    """Return what the rule keeps for each key, and in each param group."""
    kept: dict[Key, KeptState] = {}
    shared = [GroupCounts({}, frozenset(), False)] * len(instance.param_groups)
    counted: dict[tuple[int, str], tuple[float, Shape]] = {}
    for g, dtype, shape in keys:
        like = torch.empty(0, dtype=dtype, device=devices[g])
        with _naming(type(instance).__name__):
            mine, shared[g] = try_state(instance, g, earlies[g], like, shape)
        if mine.odd and elementwise[g]:
            raise cannot_be_cut(instance, mine.odd[0])
        for name in mine.counters:
            value = float(mine.sample[name])
            other, before = counted.setdefault((g, name), (value, shape))
            if other != value:
                raise not_alike(instance, g, name, {before: other, shape: value})
        kept[g, dtype, shape] = mine
    return kept, shared


def _tried_shape(instance: Optimizer, shape: Shape, *, elementwise: bool) -> Shape:
    """Return the shape with which is tried what a rule keeps for a leaf, or for any flat.

    Of few elements for torch.optim's own, in whose rules no size counts.
    """
    own = f"{type(instance).__module__}.".startswith("torch.optim.")
    if elementwise:
        return (24,) if own else (8192,)  # some rules quantize from 4096 elements on
    return small_shape(shape, 6 if own else LARGE)


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
    members: list[list[str]] = []
    objects: set[int] = set()
    for number, group in enumerate(instance.param_groups):
        names = group.get("param_names", [None] * len(group["params"]))
        own: list[str] = []
        for name, p in zip(names, group["params"], strict=True):
            known = stand_ins.get(id(p))
            key = identity(p) if known is None else identity(params[known])
            mine = paths.get(key) or named.get(name) or _empty_like(p, params, named, found)
            if mine is None:
                raise _not_the_modules(number, p)
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


def _empty_like(
    p: Tensor, params: Mapping[str, Tensor], named: Mapping[str, list[str]], found: Collection[str]
) -> list[str] | None:
    """Return the paths of an empty parameter like `p`, which has no memory to be known by.

    Of several that are alike any will do: there is nothing in them.
    """
    if p.numel():
        return None
    free = (path for path in named if path not in found and params[path].shape == p.shape)
    path = next((path for path in free if params[path].dtype is p.dtype), None)
    return None if path is None else named[path]


def _not_the_modules(group: int, p: Tensor) -> LayoutError:
    return LayoutError(
        f"the optimizer's group {group} has a parameter of shape {tuple(p.shape)} that is not the "
        "module's.",
        cause="the optimizer was made for another model, or before the module was converted or "
        "wrapped; a factory that does not use the parameters that it is given; or there are no "
        "values to know it by: a plan, a functionalized module on the meta device, an empty "
        "parameter.",
        fix="make the optimizer right before the state or the engine is made, from "
        "module.parameters(), or from module.named_parameters(): names will do. A factory makes it "
        "of what it is given.",
    )


def _devices(
    instance: Optimizer, params: Mapping[str, Tensor], group_at: Mapping[str, int]
) -> list[torch.device]:
    devices = [torch.device("cpu")] * len(instance.param_groups)
    for path, g in group_at.items():
        if not params[path].is_meta:
            devices[g] = params[path].device
    return devices


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
