"""The gradients of an engine as its user has them in `p.grad`: stand-ins, and who replaced them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fzero.adapter.gradients import Gradients
from fzero.adapter.param_grad import HeldGradient, Life, without_graph
from fzero.errors import LayoutError


class _NoGraph(torch.autograd.Function):
    """Stands between the parameters and a gradient of a backward with create_graph=True."""

    @staticmethod
    def forward(ctx: Any, held: Tensor, *_: Tensor) -> Tensor:
        ctx.mark_dirty(held)
        return held

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise without_graph()


class StandIns:
    """The stand-in of each parameter that learns, in its `p.grad` while the engine holds gradients.

    A stand-in stays in `p.grad` while a backward runs: autograd adds the new gradient to it, and
    the engine takes that. So it is still there after a backward that raised, and zero_grad() then
    drops the gradients that the engine held before.

    They are of one life of the gradients: where those are dropped, others take their places.

    learning: the parameter objects that learn, each with the path of its leaf. standing: whether
    stand-ins are in their places.
    """

    def __init__(self, gradients: Gradients, learning: Sequence[tuple[Tensor, str]]) -> None:
        self.gradients, self._learning = gradients, learning
        self._begin_life()

    def _begin_life(self) -> None:
        self._life, self._begun, self.standing = Life(self.gradients), False, False
        self._graph = False  # whether a backward of create_graph=True has brought some
        self._of = {
            id(p): (p, HeldGradient(p, number, path, self._life))
            for number, (p, path) in enumerate(self._learning)
        }

    def stand(self) -> None:
        """Put the stand-ins in their places: the engine holds gradients now."""
        self._begun = self.standing = True
        self.gradients.arrived()
        for p, held in self._of.values():
            p.grad = held
        if self._graph:
            with torch.enable_grad():
                self._without_graph([one for _, one in self._of.values() if not one.requires_grad])

    def _without_graph(self, values: Iterable[Tensor]) -> None:
        """Let a loss of these values of gradients raise where it is differentiated."""
        leads: Any = _NoGraph.apply(torch.zeros(()), *(p for p, _ in self._of.values()))
        for x in values:
            _NoGraph.apply(x, leads)

    def read(self, values: Tensor) -> Tensor:
        """Return values of gradients, a copy; after create_graph=True a loss of them raises."""
        values = values.clone()
        if self._graph and torch.is_grad_enabled():
            self._without_graph([values])
        return values

    def stand_for(self, p: Tensor, task: int) -> None:
        """Put the stand-in of one parameter in its place: its gradient was taken, or refused.

        task: the graph task that brought it.
        """
        self._begun = True
        self._graph = self._graph or torch.is_grad_enabled()
        p.grad = held = self._of[id(p)][1]
        held.stand_for(task)

    def drop(self) -> None:
        """Take the stand-ins away, whatever is there. The state has the gradients still."""
        self.forget()
        for p, _ in self._of.values():
            p.grad = None

    def forget(self) -> None:
        """The user has taken the stand-ins away, or set all of them to zero: those stay."""
        stay = len(self.gradients.zeroed) == len(self._of)
        self.standing = False
        if self._begun and not stay:
            self._life.end(self.gradients.left())
            self._begin_life()
        self.gradients.forget()

    def stand_again(self, leaf: str) -> None:
        """A gradient was written: the stand-ins of this leaf are there, if others are."""
        for p, held in self._of.values() if self.standing else ():
            if held.path == leaf:
                p.grad = held
                self.gradients.removed.discard(held.number)

    # What the user did to `p.grad`.

    def taken(self) -> dict[int, Tensor]:
        """Return the tensors that the user has put into `p.grad`, by the id of p; take them out."""
        given = {}
        for key, (p, held) in self._of.items():
            if p.grad is not None and p.grad is not held:
                given[key], p.grad = p.grad.detach(), held if self.standing else None
        return given

    def write(self, p: Tensor, gradient: Tensor) -> None:
        """Write what the user has put into `p.grad`. A collective for the first one."""
        self._of[id(p)][1].copy_(gradient)

    def dropped(self, first: Tensor | None = None) -> bool:
        """Whether the user has set every `p.grad` to None, or to zero; those of some: see `remove`.

        `first` is a parameter that autograd has written to since: it counts as one set to None.
        Raises `LayoutError` for a tensor that was put there, and would be lost.
        """
        if not self.standing:
            return False
        others = [(p, p.grad, held) for p, held in self._of.values() if p.grad is not held]
        for p, gradient, held in others:
            if gradient is not None and p is not first:
                raise LayoutError(
                    f"p.grad of {held.path} was replaced by a tensor before a backward.",
                    cause="p.grad = g, and a backward that would add to it, or a hook, before "
                    "engine.step() or engine.full_gradients() has taken it.",
                    fix="write p.grad.copy_(g), or engine.set_full_gradient(path, g), the same on "
                    "every rank; engine.zero_grad() throws all gradients away, this one, too.",
                )
        gone = self.gradients.zeroed.union(held.number for _, _, held in others)
        if len(gone) == len(self._of) > 0:
            return True
        for _, _, held in others:
            self.gradients.remove(held)
        return False

    @property
    def gone(self) -> bool:
        """Whether every `p.grad` is None, or zero, where stand-ins were."""
        zeroed = self.gradients.zeroed
        return self.standing and all(
            p.grad is None or held.number in zeroed for p, held in self._of.values()
        )

    @property
    def removed(self) -> bool:
        """Whether every `p.grad` is None where stand-ins were."""
        return self.standing and all(p.grad is None for p, _ in self._of.values())

    def require_none_replaced(self) -> None:
        """Raise `LayoutError` if a step pre hook has put something else into a `p.grad`."""
        for p, held in self._of.values() if self.standing else ():
            if p.grad is not held:
                raise LayoutError(
                    f"p.grad of {held.path} was replaced in a step pre hook.",
                    cause="p.grad = None, optimizer.zero_grad() or p.grad = g in the hook.",
                    fix="write to the gradient in place (p.grad.mul_(x), clipping by torch's own "
                    "functions), or by engine.set_full_gradient(path, value).",
                )
