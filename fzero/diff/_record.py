"""What every rank's step is seen to make, update by update."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import optree
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fzero.state import NAMESPACE, Buffers, TrainState
from fzero.state.layout import as_real
from fzero.virtual import current_ranks

Flats = tuple[Tensor, ...]


@dataclass(slots=True, kw_only=True, eq=False)
class Backward:
    """One backward of one rank."""

    weight: float  # of its loss in the update
    loss: Tensor | None  # None: gradients that were added by hand
    gradients: dict[int, Tensor] = field(default_factory=dict)  # leaf -> its part of the update's


@dataclass(slots=True, kw_only=True, eq=False)
class Seen:
    """What one rank made between two updates of a state, and the update."""

    backwards: list[Backward] = field(default_factory=list)
    gathered: list[tuple[int, int, Tensor]] = field(default_factory=list)  # (backward, group, flat)
    reduced: Flats = ()  # gradients; none before an update
    given: Flats = ()  # to the optimizer
    norm: float | None = None  # before clipping, if they are clipped
    after: TrainState | None = None  # None: there was no update


class Recording:
    """All that the states of one call of a step show, for each state and rank.

    `unit` is the relative spacing of numbers in the coarsest dtype that the states ask for.
    """

    def __init__(self, count: int) -> None:
        self._seen: list[dict[int, list[Seen]]] = [
            defaultdict(lambda: [Seen()]) for _ in range(count)
        ]
        self.unit = 0.0

    def observers(self) -> list[Any]:
        """One function for each state: see fzero/transforms/_observe.py."""

        def of(number: int) -> Any:
            return lambda what, state, value: self._told(number, what, state, value)

        return [of(number) for number in range(len(self._seen))]

    def updates(self, state: int, ranks: int) -> list[list[Seen]]:
        """For each rank, what it made up to each of its updates, and after the last one."""
        return [self._seen[state][rank] for rank in range(ranks)]

    def _told(self, number: int, what: str, state: TrainState, value: Any) -> None:
        here = current_ranks()
        seen = self._seen[number][here.rank if here else 0]
        with torch.no_grad():
            getattr(self, f"_{what}")(seen[-1], state, value)
        if what == "updated":
            seen.append(Seen())

    def _gathered(self, seen: Seen, state: TrainState, value: tuple[int, Tensor]) -> None:
        seen.gathered.append((len(seen.backwards), value[0], value[1].detach().clone()))

    def _loss(self, seen: Seen, state: TrainState, loss: Tensor) -> None:
        policy = state.setup.policy
        self.unit = max(self.unit, unit_of(state))
        made = Backward(weight=policy.grad_scale, loss=loss.detach().double().cpu())
        seen.backwards.append(made)

    def _gradient(self, seen: Seen, state: TrainState, value: tuple[int, Tensor]) -> None:
        leaf, gradient = value
        weight = state.setup.policy.grad_scale
        if state.scale is not None:
            weight /= float(state.scale.scale)
        self._add(seen, leaf, gradient, weight)

    def _added(self, seen: Seen, state: TrainState, value: tuple[int, Tensor, bool]) -> None:
        leaf, gradient, reduced = value
        self.unit = max(self.unit, unit_of(state))
        if not seen.backwards or seen.backwards[-1].loss is not None:
            seen.backwards.append(Backward(weight=0.0, loss=None))
        summed = state.setup.reduction.reduce_op == "sum"
        share = 1 / state.setup.axis.size if reduced and summed else 1.0
        self._add(seen, leaf, gradient, share * state.setup.policy.grad_scale)

    def _add(self, seen: Seen, leaf: int, gradient: Tensor, weight: float) -> None:
        if not seen.backwards:  # of a loss that was differentiated before the update
            seen.backwards.append(Backward(weight=0.0, loss=None))
        own = seen.backwards[-1].gradients
        new = as_real(gradient.detach()).double().cpu() * weight
        own[leaf] = own[leaf] + new if leaf in own else new

    def _reduced(self, seen: Seen, state: TrainState, held: Buffers) -> None:
        scale = 1.0 if state.scale is None else float(state.scale.scale)
        seen.reduced = tuple(flat.detach().double() / scale for flat in held.flats)

    def _prepared(self, seen: Seen, state: TrainState, ready: Any) -> None:
        by = 1.0 if ready.grad_scale is None else float(ready.grad_scale)
        seen.given = tuple(flat.detach().double() / by for flat in ready.gradients.flats)
        seen.norm = None if ready.norm is None else float(ready.norm)

    def _updated(self, seen: Seen, state: TrainState, found: Any) -> None:
        seen.after = copied(state)


def copied(tree: Any) -> Any:
    """The same in memory of its own."""
    return optree.tree_map(
        lambda x: x.detach().clone() if isinstance(x, Tensor) else x, tree, namespace=NAMESPACE
    )


def unit_of(state: TrainState) -> float:
    """The relative spacing of numbers in the coarsest dtype that a state asks for."""
    setup = state.setup
    dtypes = {setup.layout.groups[i].dtype for i in setup.layout.trainable}
    autocast = setup.policy.autocast
    if autocast is not None and dtypes != {torch.float64}:  # which autocast leaves alone
        dtypes.add(autocast)
    if setup.axis.size > 1:
        dtypes |= {setup.communication_dtype(i) for i in setup.layout.trainable}
    dtypes |= {setup.accumulate_dtype(i) for i in setup.layout.trainable}
    leaves = optree.tree_leaves(state.optimizer, namespace=NAMESPACE)
    dtypes |= {x.dtype for x in leaves if isinstance(x, Tensor) and x.ndim and x.numel()}
    units = [torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point]
    quantized = any(group.quantized for group in setup.layout.groups)
    if quantized or setup.quantizes_gradients:
        units.append(1 / 127)  # of the largest element of a block
    return max(units, default=torch.finfo(torch.float64).eps)


class Coarsest(TorchFunctionMode):
    """Notes the coarsest floating dtype that the functions of torch return."""

    def __init__(self) -> None:
        super().__init__()
        self.unit = 0.0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at what a function returns."""
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, list | tuple) else (out,):
            if isinstance(x, Tensor) and x.is_floating_point():
                self.unit = max(self.unit, torch.finfo(x.dtype).eps)
        return out
