"""The gradients of an engine as its user has them in `p.grad`: stand-ins, and who replaced them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fzero.adapter._gradient import Gradients
from fzero.adapter._held import HeldGradient
from fzero.adapter._life import Life
from fzero.errors import LayoutError


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

    def stand_for(self, p: Tensor, task: int) -> None:
        """Put the stand-in of one parameter in its place: its gradient was taken, or refused.

        task: the graph task that brought it.
        """
        self._begun = True
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

    # What the user did to `p.grad`.

    def dropped(self, first: Tensor | None = None) -> bool:
        """Whether the user has set every `p.grad` to None, or to zero.

        `first` is a parameter that autograd has written to since: it counts as one set to None.
        Raises `LayoutError`, until that is mended, if some were replaced (a gradient written by
        hand would be lost) or set to None.
        """
        if not self.standing:
            return False
        others = [(p, p.grad, held) for p, held in self._of.values() if p.grad is not held]
        for p, gradient, held in others:
            if gradient is not None and p is not first:
                raise LayoutError(
                    f"p.grad of {held.path} was replaced by a tensor.",
                    cause="a gradient written by hand, or by another backward engine.",
                    fix="write engine.set_full_gradient(path, value), the same on every rank; "
                    "engine.zero_grad() throws all gradients away, this one, too.",
                )
        zeroed = self.gradients.zeroed
        if not others:
            return len(zeroed) == len(self._of) > 0
        replaced = {id(p) for p, _, _ in others}
        left = self._of.keys() - replaced
        if any(self._of[key][1].number not in zeroed for key in left):
            raise LayoutError(
                f"p.grad of {others[0][2].path} was set to None, and those of other parameters "
                "were not.",
                cause="an optimizer's zero_grad() of some of the parameters.",
                fix="drop all of them with engine.zero_grad(), set some to zero with "
                "p.grad.zero_(), or freeze a part with requires_grad_(False) before the backward.",
            )
        return True

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

    def require_taken(self) -> None:
        """Raise `LayoutError` for a `p.grad` that no backward has brought: it would be lost."""
        for p, held in () if self.standing else self._of.values():
            if p.grad is not None and p.grad is not held:
                raise LayoutError(
                    f"p.grad of {held.path} is a tensor that the engine has not got by a backward.",
                    cause="a gradient written by hand, or one from before the engine was made.",
                    fix="write engine.set_full_gradient(path, value) after a backward, the same on "
                    "every rank; engine.zero_grad() throws this one away.",
                )
