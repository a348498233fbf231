"""The step of a rule on this rank's shards, with what transforms do around it and after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from fzero.machine.offload import to_device, write_back
from fzero.machine.owners import owners_of
from fzero.optim.precision import work_tensors
from fzero.state import NAMESPACE, Buffers, Setup, TrainState
from fzero.state.setup import MASTERS
from fzero.transforms.pieces import pieces_of
from fzero.transforms.points import (
    Running,
    keeps_before,
    stepped_by_path,
    stepping,
    transforms_of,
    updated,
)


def rule_options(
    setup: Setup, fulls: Sequence[Tensor], device: torch.device, unused: Sequence[int]
) -> dict[str, Any]:
    """Return what a rule is told of where it runs."""
    options: dict[str, Any] = {}
    if setup.is_offloaded:
        options["device"] = device
    if unused:
        options["unused"] = frozenset(setup.layout.leaves[i].path for i in unused)
    if setup.layout.options.block > 1:
        options["apart"] = True
    if (owners := owners_of(setup)) is not None:
        options["owners"] = owners.at(fulls if setup.stage in (1, 2) else (), device)
    return options


class Stepping:
    """One step of the rule of a state, whose parameters and optimizer may be `owned`: written to.

    Where transforms act around it or after it nothing is written before all of them have returned:
    one that raises leaves the state as it was.

    running: the update, whose state has the slots. shards: what a rank has of the flats that learn.
    options: of the rule's `advance`.
    """

    def __init__(
        self,
        state: TrainState,
        running: Running,
        shards: Sequence[Tensor],
        options: dict[str, Any],
    ) -> None:
        self._state, self._running = state, running
        self._shards, self._optimizer = list(shards), state.optimizer
        self._acts = any(transforms_of(state.setup, point) for point in ("update", "updated"))
        self._writes = bool(options["owned"]) and self._acts
        self._options = {**options, "owned": options["owned"] and not self._acts}

    def made(self, gradients: Buffers) -> tuple[list[Tensor], Any]:
        """Return this rank's shards after the step, and the rule's state."""
        if not self._acts:
            return self._advance(gradients)
        running, state = self._running, self._state
        before = self._shards, self._optimizer
        running.put(running.state.replace(params=state.params, optimizer=state.optimizer))
        if keeps_before(state.setup):
            running.before = stepped_by_path(state)[1]

        def rule(grads: Buffers) -> list[Tensor]:
            self._shards, self._optimizer = self._advance(grads)
            return self._work()

        stepped = stepping(running, rule)(gradients)
        self._put(updated(running, stepped))
        made = self._shards, self._optimizer
        return _written(before, made) if self._writes else made

    def _advance(self, gradients: Buffers) -> tuple[list[Tensor], Any]:
        rule, setup = self._state.setup.optimizer, self._state.setup
        new, optimizer = rule.advance(
            self._shards, gradients.flats, self._optimizer, pieces_of(setup), **self._options
        )
        return list(new), optimizer

    def _work(self) -> list[Tensor]:
        """Return what the rule has stepped: masters, where there are any."""
        masters = self._state.setup.optimizer.slots(self._optimizer).get(MASTERS, ())
        return work_tensors(self._shards, masters) if masters else list(self._shards)

    def _put(self, new: Sequence[Tensor]) -> None:
        """Let what transforms have made take the place of what was stepped, masters and shards."""
        masters: dict[int, Tensor] = {}
        for k, (now, after) in enumerate(zip(self._work(), new, strict=True)):
            if after is now:
                continue
            shard = self._shards[k]
            if now is not shard:
                masters[id(now)] = to_device(after, now.device, now.dtype)
            self._shards[k] = to_device(after, shard.device, shard.dtype)
        if masters:
            self._optimizer = optree.tree_map(
                lambda x: masters.get(id(x), x), self._optimizer, namespace=NAMESPACE
            )


def _written(before: Any, after: Any) -> Any:
    """Return `after` in the memory of `before`: of each tensor that has one there."""
    old, old_spec = optree.tree_flatten(before, none_is_leaf=True, namespace=NAMESPACE)
    new, spec = optree.tree_flatten(after, none_is_leaf=True, namespace=NAMESPACE)
    if old_spec != spec:  # a rule that keeps more after its first step
        (shards, _), (mine, optimizer) = before, after
        return _written((shards, None), (mine, None))[0], optimizer
    with torch.no_grad():
        made = [_in_memory_of(x, y) for x, y in zip(old, new, strict=True)]
    return optree.tree_unflatten(spec, made)


def _in_memory_of(old: Any, new: Any) -> Any:
    tensors = isinstance(old, Tensor) and isinstance(new, Tensor)
    if not tensors or old is new or (old.shape, old.dtype) != (new.shape, new.dtype):
        return new
    write_back(old, new)
    return old
