"""Losses of an engine times its scale, and the guard against a backward that went around it."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge

from fzero.adapter._autograd import current_graph_task
from fzero.errors import LayoutError, PhaseError, explain
from fzero.state.scale import LossScale

_TWICE = explain(
    "a loss was scaled twice.",
    cause="engine.backward(), which scales by itself, or engine.scale() of something that was made "
    "from a loss that engine.scale() gave.",
    fix="add the losses first: engine.backward(a + b), or engine.scale(a + b).backward().",
)


_BEFORE = explain(
    "the backward of a loss that was scaled before the last update; the scale may be another now.",
    cause="a scaled loss that was kept over step(), or over engine.state = ....",
    fix="scale the loss, and run its backward, between two updates.",
)
_BY_ANOTHER = explain(
    "a loss that one engine scaled reached the parameters of another one.",
    cause="one loss of two engines, whose updates divide by scales of their own, or by none.",
    fix="give each engine a loss, and a backward, of its own; or use fzero.grad_and_reduce with a "
    "pytree of states, which have each their scale under one loss.",
)


class ScaledLosses:
    """Multiplies losses. A hook on each product notes which graph task began at it."""

    latest: tuple[int, ScaledLosses | None] = (-1, None)
    """Of all engines: the graph task that reached a scaled loss last, and whose loss it was."""

    def __init__(self) -> None:
        self._made: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
        self._numbers = itertools.count()  # of what was made: an id may be given again
        self._roots: set[int | None] | None = None  # of engine.backward(), while it runs
        self._task = -1
        self._by: Tensor | None = None  # the scale of that task's loss

    def scaled(self, loss: Tensor, held: LossScale | None) -> Tensor:
        """Return loss x scale; the loss itself if there is no scale."""
        if not isinstance(loss, Tensor) or not loss.is_floating_point():
            raise _no_loss("scale", loss, "; engine.scale_if_loss(x) takes anything")
        if held is None:
            return loss
        if self.is_scaled(loss):
            raise PhaseError(_TWICE)
        made = loss * held.scale
        if made.requires_grad:  # its hook comes before that of any output or parameter
            number = next(self._numbers)
            self._made[number] = made
            made.register_hook(lambda _: self._saw(number, held.scale))
        return made

    def is_scaled(self, x: Any) -> bool:
        """Whether `scaled` has returned it."""
        return self._number_of(x) is not None

    def _number_of(self, x: Any) -> int | None:
        return next((number for number, made in self._made.items() if made is x), None)

    def begin(self, roots: Any) -> None:
        """`engine.backward` of these runs: no other scaled loss may be below them.

        Raises `LayoutError` for what autograd cannot begin at.
        """
        listed = roots if isinstance(roots, list | tuple) else (roots,)
        for x in listed:
            if not isinstance(x, Tensor | GradientEdge):
                raise _no_loss("backward", x)
        self._roots = {self._number_of(x) for x in listed}

    def end(self) -> None:
        """It is over."""
        self._roots = None

    def require(self, outer_task: int | None, held: LossScale | None) -> None:
        """Raise `PhaseError` unless the gradient of a parameter comes from a loss scaled here.

        Called for each gradient. A loss that another engine has scaled is refused as well.

        outer_task: the graph task that began the backward; the one that runs may be inside of it.
        """
        tasks = (current_graph_task(), outer_task)
        task, owner = ScaledLosses.latest
        if owner is not None and owner is not self and task in tasks:
            raise PhaseError(_BY_ANOTHER)
        if held is None or (self._task in tasks and self._by is held.scale):
            return
        if self._task in tasks:
            raise PhaseError(_BEFORE)
        raise PhaseError(
            f"a backward without engine.scale; loss_scale={_shown(held)}.",
            cause="plain loss.backward() where the update divides by the loss scale.",
            fix="write engine.scale(loss).backward(), or engine.backward(loss).",
        )

    def _saw(self, number: int, by: Tensor) -> None:
        task, inside = current_graph_task(), self._roots is not None and number not in self._roots
        if inside and task == self._task:
            raise PhaseError(_TWICE)
        self._task, self._by = task, by
        ScaledLosses.latest = (task, self)


def _no_loss(name: str, x: Any, more: str = "") -> LayoutError:
    seen = f"a {x.dtype} tensor" if isinstance(x, Tensor) else f"{x!r:.80}"
    return LayoutError(
        f"engine.{name} got {seen}.",
        cause="loss.item(), the whole output of a model, or the loss of one without labels.",
        fix=f"pass the loss tensor{more}.",
    )


def _shown(held: LossScale) -> str:
    value = getattr(held.policy, "value", None)  # what is on the device is not read for this
    return f"{held.policy}" if value is None else f"{value}"
