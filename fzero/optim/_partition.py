"""Several optimizers for the leaves of one state, as optax.partition has it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import lcm
from typing import Any, TypeVar

import torch
from torch import Tensor

from fzero.errors import LayoutError
from fzero.machine.blocks import Blocks
from fzero.machine.owners import Owners
from fzero.optim.encoded_moments import counted
from fzero.optim.optimizer import Optimizer, masked
from fzero.optim.precision import Place, stay
from fzero.optim.torch_optim import TorchOptimizer, require_real_views
from fzero.state import record
from fzero.state.layout import Leaf, learns
from fzero.state.setup import MASTERS, ParamGroups, SavedNames
from fzero.state.stateful_update import Piece, StatefulUpdate

Rule = Optimizer | TorchOptimizer
Label = Callable[[Leaf], str]
T = TypeVar("T")

_GROUPS = 2**16  # more than a rule has param groups


def partition(rules: Mapping[str, Rule], label: Label) -> Partition:
    """Each leaf by the rule that its label names: p' = rules[label(leaf)](p, g).

    Muon for the matrices of a model, and AdamW for its embeddings, its head and its vectors, are
    one optimizer then: one state, one update, one checkpoint.

    Args:
        rules: name -> a rule of `fzero.optim`, or `fzero.optim.from_torch(...)` of a class or a
            factory.
        label: leaf -> name of its rule; `leaf` has path, shape and dtype. It is asked for leaves
            that learn, and must be the same on every rank.

    Returns:
        The optimizer, for `fzero.init`, `step.init` and `Engine`.

    Raises:
        LayoutError: for rules of another kind; when a state is made, for a label without a rule.

    Source: optax, `optax.partition`.

    Example:
        >>> import torch, fzero
        >>> rules = {"matrices": fzero.optim.muon(0.02), "rest": fzero.optim.adamw(3e-4)}
        >>> optimizer = partition(rules, lambda x: "matrices" if len(x.shape) == 2 else "rest")
        >>> params = {"w": torch.ones(2, 3), "b": torch.ones(3)}
        >>> state = fzero.init(params, optimizer, stage=0)
        >>> state, _ = fzero.grad_and_reduce(lambda p: (p["w"] + p["b"]).sum(), state)()
        >>> sorted(fzero.full_params(fzero.apply_gradients(state)))
        ['b', 'w']
    """
    good = isinstance(rules, Mapping) and all(isinstance(x, Rule) for x in rules.values())
    if not good or not rules or not callable(label):
        raise LayoutError(
            f"partition: rules={rules!r:.200}, label={label!r:.80}.",
            cause="something else than {name: optimizer} and leaf -> name: a class of torch.optim "
            "itself, or an (init, update) pair.",
            fix="write fzero.optim.partition({'a': fzero.optim.muon(lr), 'b': fzero.optim."
            "from_torch(torch.optim.AdamW)}, lambda leaf: 'a' if len(leaf.shape) == 2 else 'b').",
        )
    return Partition(rules=tuple((str(name), rule) for name, rule in rules.items()), label=label)


@record
class PartitionState:
    """The state of each rule, in the order of the rules; each is as long as the list of flats."""

    count: Tensor  # [] int64: updates made
    parts: tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition(StatefulUpdate):
    """What `fzero.optim.partition` returns."""

    counts_by_leaf = True

    rules: tuple[tuple[str, Rule], ...]
    label: Label
    number_at: tuple[tuple[str, int], ...] = ()  # (path, number of its rule), once bound

    @property
    def elementwise(self) -> bool:
        """Whether every rule is."""
        return all(rule.elementwise for _, rule in self.rules)

    @property
    def leafwise(self) -> bool:
        """Whether every rule is."""
        return all(rule.leafwise for _, rule in self.rules)

    @property
    def odd_slots(self) -> frozenset[str]:
        """Those of all rules."""
        return frozenset().union(*(rule.odd_slots for _, rule in self.rules))

    @property
    def of_torch(self) -> Sequence[Any]:
        """Those of all rules."""
        return [bound for _, rule in self.rules for bound in rule.of_torch]

    def bind(self, params: Mapping[str, Tensor]) -> Partition:
        """Return the partition whose rules are bound to those of {path: tensor} that learn."""
        names, number_at = [name for name, _ in self.rules], dict[str, int]()
        for path, p in params.items():
            if not learns(p):
                continue
            leaf = Leaf(path=path, shape=tuple(p.shape), dtype=p.dtype, trainable=True)
            if (name := self.label(leaf)) not in names:
                raise LayoutError(
                    f"partition: the label of {path} is {name!r}.",
                    cause="a label that returns no name of a rule, or nothing for some leaves.",
                    fix=f"return one of {names} for every leaf that learns.",
                )
            number_at[path] = names.index(name)
        bound: list[tuple[str, Rule]] = []
        for number, (name, rule) in enumerate(self.rules):
            mine = {p: params[p] for p, k in number_at.items() if k == number}
            made: Any = rule.bind(mine)
            if getattr(made, "held", None):
                raise LayoutError(
                    f"partition: {rule!r} has the state of a run.",
                    cause="an instance of torch.optim that made steps, or loaded a state.",
                    fix="give a class or a factory, or an instance without a step.",
                )
            require_real_views(made, mine)
            bound.append((name, made))
        return replace(self, rules=tuple(bound), number_at=tuple(number_at.items()))

    def _own(self, some: Iterable[T], path_of: Callable[[T], str]) -> list[tuple[Any, list[T]]]:
        """Return each rule, and those of some things whose path has it."""
        numbers, own = dict(self.number_at), [list[T]() for _ in self.rules]
        for one in some:
            if (number := numbers.get(path_of(one), -1)) >= 0:
                own[number].append(one)
        return [(rule, mine) for (_, rule), mine in zip(self.rules, own, strict=True)]

    def parted(self, leaves: Sequence[Leaf]) -> list[tuple[Rule, list[Leaf]]]:
        """Return each rule with its leaves."""
        return self._own(leaves, lambda leaf: leaf.path)

    def _each(
        self, state: PartitionState, paths: Iterable[str] = ()
    ) -> list[tuple[Any, Any, list[str]]]:
        """Return (rule, its state, those of these paths that are its) of each rule."""
        pairs = zip(self._own(paths, str), state.parts, strict=True)
        return [(rule, part, own) for (rule, own), part in pairs]

    def _rule_of(self, path: str) -> Any:
        number = dict(self.number_at).get(path, -1)
        return StatefulUpdate() if number < 0 else self.rules[number][1]  # which keeps nothing

    def group_of(self, path: str) -> int:
        """Return the number of the leaf's rule and of its param group in it, as one number."""
        number = dict(self.number_at).get(path, -1)
        group = -1 if number < 0 else self.rules[number][1].group_of(path)
        return -1 if group < 0 else number * _GROUPS + group

    @property
    def block(self) -> int:
        """Whole blocks of every rule."""
        return lcm(*(rule.block for _, rule in self.rules))

    def kind_of(self, path: str, numel: int) -> Hashable:
        """Return what leaves of one flat have in common, and the number of their rule."""
        return self.group_of(path), self._rule_of(path).kind_of(path, numel)

    def codec_of(self, leaf: Leaf, slot: str) -> Blocks | None:
        """Return what the rule of a leaf encodes a slot of it by."""
        return self._rule_of(leaf.path).codec_of(leaf, slot)

    def batch_dims_of(self, path: str) -> tuple[str, int | None] | None:
        """Return what the rule of the leaf was told of stacks of matrices."""
        return self._rule_of(path).batch_dims_of(path)

    def needs_whole(self, path: str) -> bool:
        """Whether the rule of the leaf looks at the whole of it."""
        return self._rule_of(path).needs_whole(path)

    def kept_of(self, leaf: Leaf) -> Collection[str]:
        """Return what the rule of a leaf keeps with an element for each of its own."""
        return self._rule_of(leaf.path).kept_of(leaf)

    def made_by_steps(self, leaf: Leaf) -> Collection[str]:
        """Return what the first step of a leaf's rule makes, in any shape."""
        return self._rule_of(leaf.path).made_by_steps(leaf)

    def kept_numel(self, leaf: Leaf) -> int:
        """Return about how many elements the owner of a leaf keeps of it, by its rule."""
        return self._rule_of(leaf.path).kept_numel(leaf)

    def shares(self, path: str, name: str) -> bool:
        """Whether the rule of a leaf keeps a counter for its whole param group."""
        return self._rule_of(path).shares(path, name)

    def slots(self, state: PartitionState) -> Mapping[str, Sequence[Tensor]]:
        """Return the slots of every rule by name: of a flat, those of its rule."""
        return _merged([rule.slots(part) for rule, part, _ in self._each(state)])

    def owned(self, state: PartitionState) -> Mapping[str, Sequence[Tensor]]:
        """Return what is kept of parameters with owners, by every rule."""
        return _merged([rule.owned(part) for rule, part, _ in self._each(state)])

    def with_owned(
        self, state: PartitionState, owned: Mapping[str, Sequence[Tensor]]
    ) -> PartitionState:
        """Return the state with something else kept of parameters with owners."""
        parts = tuple(rule.with_owned(part, owned) for rule, part, _ in self._each(state))
        return replace(state, parts=parts)

    def counted(self, state: PartitionState, paths: Sequence[str]) -> dict[str, dict[str, Tensor]]:
        """Return the counters {name: {path: value}} of leaves, by their rules."""
        found: dict[str, dict[str, Tensor]] = {}
        for rule, part, own in self._each(state, paths):
            for name, some in rule.counted(part, own).items():
                found.setdefault(name, {}).update(some)
        return found

    def recounted(
        self,
        state: PartitionState,
        paths: Sequence[str],
        counters: Mapping[str, Mapping[str, Tensor]],
        *,
        count: int | None = None,
        unstepped: Collection[str] = (),
    ) -> PartitionState:
        """Return the state with these counters, each in the state of its leaf's rule."""
        parts = [
            rule.recounted(part, own, counters, count=count, unstepped={*unstepped} & {*own})
            if own
            else part
            for rule, part, own in self._each(state, paths)
        ]
        made = state.count if count is None else torch.full_like(state.count, count)
        return PartitionState(count=made, parts=tuple(parts))

    def unstepped(self, state: PartitionState) -> Sequence[str]:
        """Return the paths of leaves that took no step yet, where others did."""
        return [path for rule, part, _ in self._each(state) for path in rule.unstepped(part)]

    def anew(self, state: PartitionState, fresh: PartitionState) -> PartitionState:
        """Return a new state with what the rules keep when they begin anew."""
        pairs = zip(self._each(state), fresh.parts, strict=True)
        return replace(fresh, parts=tuple(rule.anew(old, new) for (rule, old, _), new in pairs))

    def restarted(self, state: PartitionState, fresh: PartitionState) -> PartitionState:
        """Return the state with new parts of the rules of which owners keep something."""
        pairs = zip(self._each(state), fresh.parts, strict=True)
        parts = tuple(rule.restarted(old, new) for (rule, old, _), new in pairs)
        return replace(state, parts=parts)

    def begun(self, state: PartitionState, paths: Sequence[str], path: str) -> PartitionState:
        """Return the state in which the leaf at `path` counts as stepped."""
        parts = [
            rule.begun(part, own, path) if path in own else part
            for rule, part, own in self._each(state, paths)
        ]
        return replace(state, parts=tuple(parts))

    def _turns(
        self, pieces: Sequence[Piece], owners: Owners | None
    ) -> Iterator[tuple[Any, set[int], list[Piece], dict[str, Any]]]:
        """Yield each rule, its flats, their pieces, and what it is given beside them."""
        for rule, own in self._own(pieces, lambda piece: piece.leaf.path):
            mine = {piece.index for piece in own}
            some = None if owners is None else owners.of(mine)
            yield rule, mine, own, {"owners": some} if some and some.positions else {}

    def init(
        self,
        params: Sequence[Tensor],
        pieces: Sequence[Piece] = (),
        *,
        place: Place = stay,
        owners: Owners | None = None,
    ) -> PartitionState:
        """Return the state of every rule; a flat of another rule is empty in it."""
        parts = tuple(
            rule.init(masked(params, mine), own, place=place, **given)
            for rule, mine, own, given in self._turns(pieces, owners)
        )
        return PartitionState(count=torch.zeros((), dtype=torch.int64), parts=parts)

    def advance(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        state: PartitionState,
        pieces: Sequence[Piece],
        *,
        unused: frozenset[str] = frozenset(),
        owners: Owners | None = None,
        **options: Any,
    ) -> tuple[list[Tensor], PartitionState]:
        """Return (params', state') after one update by every rule, one after the other."""
        new, parts = list(params), []
        left = [set(paths) for _, paths in self._own(unused, str)]
        for number, (rule, mine, own, given) in enumerate(self._turns(pieces, owners)):
            flats, gs, part = masked(params, mine), masked(grads, mine), state.parts[number]
            still = frozenset(left[number])
            moved, part = rule.advance(flats, gs, part, own, unused=still, **given, **options)
            parts.append(part)
            for i in mine:
                new[i] = moved[i]
        after = counted(state.count, options.get("found_inf"))
        return new, PartitionState(count=after, parts=tuple(parts))

    def skips(self, params: Sequence[Tensor], state: PartitionState) -> bool:
        """Whether every rule skips an overflowing update by itself."""
        return all(rule.skips(params, part) for rule, part, _ in self._each(state))

    def describe(self, leaves: Sequence[Leaf], step: Any = None) -> list[str]:
        """Return the lines that ranks compare: those of each rule, and which leaves it has."""
        lines = [f"optimizer {self!r}"]
        for (name, _), (rule, own) in zip(self.rules, self.parted(leaves), strict=True):
            lines += [f"{name}: {line}" for line in rule.describe(own, step)]
            lines += [f"{name} has {leaf.path}" for leaf in own]
        return lines

    def saved_names(self, state: PartitionState, leaves: Sequence[Leaf]) -> SavedNames:
        """Return the names of the rules, and of what each keeps, in a checkpoint."""
        parts: dict[str, str] = {}
        names = []
        for number, (rule, own) in enumerate(self.parted(leaves)):
            saved = rule.saved_names(state.parts[number], own)
            names.append(saved.rule)
            parts[f"parts[{number}].masters"] = MASTERS
            parts |= {f"parts[{number}].{key}": name for key, name in saved.parts.items()}
        return SavedNames(rule=f"partition({', '.join(names)})", parts=parts)

    def param_groups(self, leaves: Sequence[Leaf], step: int) -> ParamGroups:
        """Return the param groups of the rules, one behind the other."""
        of_leaf = [-1] * len(leaves)
        options: list[Mapping[str, Any]] = []
        for rule, own in self.parted(leaves):
            paths = {leaf.path for leaf in own}
            found = rule.param_groups([leaf for leaf in leaves if leaf.path in paths], step)
            places = [i for i, leaf in enumerate(leaves) if leaf.path in paths]
            for i, group in zip(places, found.of_leaf, strict=True):
                of_leaf[i] = -1 if group < 0 else len(options) + group
            options += found.options
        return ParamGroups(of_leaf=tuple(of_leaf), options=tuple(options))

    def __repr__(self) -> str:
        return f"partition({', '.join(f'{name}={rule!r}' for name, rule in self.rules)})"


def _merged(every: Sequence[Mapping[str, Sequence[Tensor]]]) -> dict[str, list[Tensor]]:
    """What several rules have by name: of each flat or parameter, what is not empty."""
    found: dict[str, list[Tensor]] = {}
    for some in every:
        for name, flats in some.items():
            pairs = zip(found.setdefault(name, list(flats)), flats, strict=True)
            found[name] = [new if new.numel() else old for old, new in pairs]
    return found
