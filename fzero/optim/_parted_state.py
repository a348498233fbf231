"""What several rules keep for the leaves of one state, each for its own."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fzero.optim._base import Base
from fzero.optim._optimizer import Optimizer
from fzero.optim._torch import TorchOptimizer
from fzero.state import record
from fzero.state.layout import Leaf

Rule = Optimizer | TorchOptimizer


@record
class PartitionState:
    """The state of each rule, in the order of the rules; each is as long as the list of flats."""

    count: Tensor  # [] int64: updates made
    parts: tuple[Any, ...]


class PartedState(Base):
    """The part of a partition that is asked about its state."""

    __slots__ = ()

    rules: tuple[tuple[str, Rule], ...]
    number_at: tuple[tuple[str, int], ...]

    def parted(self, leaves: Sequence[Leaf]) -> list[tuple[Rule, list[Leaf]]]:
        """Return each rule with its leaves."""
        numbers = dict(self.number_at)
        return [
            (rule, [leaf for leaf in leaves if numbers.get(leaf.path) == number])
            for number, (_, rule) in enumerate(self.rules)
        ]

    def _each(
        self, state: PartitionState, paths: Sequence[str]
    ) -> list[tuple[Any, Any, list[str]]]:
        """Return (rule, its state, those of these paths that are its) of each rule."""
        numbers = dict(self.number_at)
        return [
            (rule, state.parts[number], [path for path in paths if numbers.get(path) == number])
            for number, (_, rule) in enumerate(self.rules)
        ]

    def _rule_of(self, path: str) -> Rule | None:
        number = dict(self.number_at).get(path, -1)
        return None if number < 0 else self.rules[number][1]

    def slots(self, state: PartitionState) -> Mapping[str, Sequence[Tensor]]:
        """Return the slots of every rule by name: of a flat, those of its rule."""
        found: dict[str, list[Tensor]] = {}
        for rule, part, _ in self._each(state, ()):
            for name, flats in rule.slots(part).items():
                before = found.setdefault(name, list(flats))
                pairs = zip(before, flats, strict=True)
                found[name] = [new if new.numel() else old for old, new in pairs]
        return found

    def owned(self, state: PartitionState) -> Mapping[str, Sequence[Tensor]]:
        """Return what is kept of parameters with owners, by every rule."""
        found: dict[str, list[Tensor]] = {}
        for rule, part, _ in self._each(state, ()):
            for name, some in rule.owned(part).items():
                before = found.setdefault(name, list(some))
                pairs = zip(before, some, strict=True)
                found[name] = [new if new.numel() else old for old, new in pairs]
        return found

    def with_owned(
        self, state: PartitionState, owned: Mapping[str, Sequence[Tensor]]
    ) -> PartitionState:
        """Return the state with something else kept of parameters with owners."""
        parts = [
            rule.with_owned(part, {k: x for k, x in owned.items() if k in rule.owned_names})
            for rule, part, _ in self._each(state, ())
        ]
        return replace(state, parts=tuple(parts))

    def kept_of(self, leaf: Leaf) -> Collection[str]:
        """Return what the rule of a leaf keeps with an element for each of its own."""
        rule = self._rule_of(leaf.path)
        return () if rule is None else rule.kept_of(leaf)

    def made_by_steps(self, leaf: Leaf) -> Collection[str]:
        """Return what the first step of a leaf's rule makes, in any shape."""
        rule = self._rule_of(leaf.path)
        return () if rule is None else rule.made_by_steps(leaf)

    def kept_numel(self, leaf: Leaf) -> int:
        """Return about how many elements the owner of a leaf keeps of it, by its rule."""
        rule = self._rule_of(leaf.path)
        return 0 if rule is None or not rule.needs_whole(leaf.path) else rule.kept_numel(leaf)

    @property
    def counts_by_leaf(self) -> bool:
        """Return True: each leaf has its own counters, those of its rule."""
        return True

    def counted(self, state: PartitionState, paths: Sequence[str]) -> dict[str, dict[str, Tensor]]:
        """Return the counters {name: {path: value}} of leaves, by their rules."""
        found: dict[str, dict[str, Tensor]] = {}
        for rule, part, own in self._each(state, paths):
            for name, some in rule.counted(part, own).items():
                found.setdefault(name, {}).update(some)
        return found

    def shares(self, path: str, name: str) -> bool:
        """Whether the rule of a leaf keeps a counter for its whole param group."""
        rule = self._rule_of(path)
        return rule is not None and rule.shares(path, name)

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
        parts = []
        for rule, part, own in self._each(state, paths):
            mine = {
                name: {path: x for path, x in counters[name].items() if path in own}
                for name in rule.counted(part, own)
            }
            left = [path for path in unstepped if path in own]
            made = rule.recounted(part, own, mine, count=count, unstepped=left) if own else part
            parts.append(made)
        made_count = state.count if count is None else torch.full_like(state.count, count)
        return PartitionState(count=made_count, parts=tuple(parts))

    def unstepped(self, state: PartitionState) -> Sequence[str]:
        """Return the paths of leaves that took no step yet, where others did."""
        each = self._each(state, ())
        return [path for rule, part, _ in each for path in rule.unstepped(part)]

    def anew(self, state: PartitionState, fresh: PartitionState) -> PartitionState:
        """Return a new state with what the rules keep when they begin anew."""
        pairs = zip(self._each(state, ()), fresh.parts, strict=True)
        return replace(fresh, parts=tuple(rule.anew(old, new) for (rule, old, _), new in pairs))

    def restarted(self, state: PartitionState, fresh: PartitionState) -> PartitionState:
        """Return the state with new parts of the rules of which owners keep something."""
        pairs = zip(self._each(state, ()), fresh.parts, strict=True)
        return replace(
            state, parts=tuple(rule.restarted(old, new) for (rule, old, _), new in pairs)
        )

    def begun(self, state: PartitionState, paths: Sequence[str], path: str) -> PartitionState:
        """Return the state in which the leaf at `path` counts as stepped."""
        parts = [
            rule.begun(part, own, path) if path in own else part
            for rule, part, own in self._each(state, paths)
        ]
        return replace(state, parts=tuple(parts))
