"""The step of a rule on this rank's shards, with what transforms do around it and after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from fzero.machine.offload import to_device, write_back
from fzero.optim.masters import work_tensors
from fzero.state import NAMESPACE, Buffers, TrainState
from fzero.state.setup import MASTERS
from fzero.transforms.pieces import pieces_of
from fzero.transforms.points import (
    Running,
    is_unchecked,
    keeps_before,
    stepped_by_path,
    stepping,
    transforms_of,
    updated,
)


class Stepping:
    """One step of the rule of a state, whose parameters and optimizer may be `owned`: written to.

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
        self._state, self._running, self._options = state, running, options
        self._shards, self._optimizer = list(shards), state.optimizer
        self._owned = bool(options["owned"])
        self._acts = any(transforms_of(state.setup, point) for point in ("update", "updated"))
        self._backup: list[tuple[Tensor, Tensor]] = []
        if self._owned and self._acts and is_unchecked(state, "update", "updated"):
            leaves: Any = optree.tree_leaves(state.optimizer, namespace=NAMESPACE)
            held = [*shards, *(x for x in leaves if isinstance(x, Tensor))]
            self._backup = [(x, x.detach().to("cpu", copy=True)) for x in held]

    def undo(self) -> None:
        """Give what was written to its values from before the step, if they were kept.

        They are before the first call of a function, which may be wrong.
        """
        with torch.no_grad():
            for x, before in self._backup:
                x.copy_(before)

    def made(self, gradients: Buffers) -> tuple[list[Tensor], Any]:
        """Return this rank's shards after the step, and the rule's state."""
        if not self._acts:
            return self._advance(gradients)
        running, state = self._running, self._state
        if keeps_before(state.setup):
            before = stepped_by_path(state)[1]
            written = self._owned
            running.before = {k: x.clone() for k, x in before.items()} if written else before
        running.state = running.state.replace(params=state.params, optimizer=state.optimizer)

        def rule(grads: Buffers) -> list[Tensor]:
            self._shards, self._optimizer = self._advance(grads)
            return self._work()

        stepped = stepping(running, rule)(gradients)
        self._write(updated(running, stepped))
        return self._shards, self._optimizer

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

    def _write(self, new: Sequence[Tensor]) -> None:
        """Put what transforms have made of what was stepped into masters and shards."""
        masters: dict[int, Tensor] = {}
        for k, (now, after) in enumerate(zip(self._work(), new, strict=True)):
            if after is now:
                continue
            shard, has_master = self._shards[k], now is not self._shards[k]
            if self._owned:
                write_back(now, to_device(after, now.device, now.dtype))
                if has_master:
                    write_back(shard, to_device(after, shard.device, shard.dtype))
                continue
            if has_master:
                masters[id(now)] = to_device(after, now.device, now.dtype)
            self._shards[k] = to_device(after, shard.device, shard.dtype)
        if masters:
            self._optimizer = optree.tree_map(
                lambda x: masters.get(id(x), x), self._optimizer, namespace=NAMESPACE
            )
