"""Losses of an engine times its scale, and the guard against a backward that went around it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from fzero.adapter._torch_hooks import current_graph_task
from fzero.errors import LayoutError, PhaseError, explain
from fzero.state.scale import LossScale, factor_in, multiplier, read_external
from fzero.transforms.pass_events import Pass
from fzero.transforms.points import loss_learned, transforms_of
from fzero.transforms.scaled import with_value
from fzero.transforms.weights import (
    Weight,
    require_no_weights,
    require_weight,
    with_weights,
)

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
_TWO_WEIGHTS = explain(
    "a backward of losses with two weights: all gradients of one backward have one, which counts "
    "once, though two be alike.",
    cause="engine.scale(a, weight=m) + engine.scale(b, weight=n), or another weight given to "
    "engine.backward().",
    fix="run a backward for each weight; or one for their sum, engine.scale(a + b, weight=n).",
)
_BY_ANOTHER = explain(
    "a loss that one engine scaled reached the parameters of another one.",
    cause="one loss of two engines, whose updates divide by scales of their own, or by none.",
    fix="give each engine a loss, and a backward, of its own; or use fzero.grad_and_reduce with a "
    "pytree of states, which have each their scale under one loss.",
)


@dataclass(frozen=True, eq=False)
class _Mark:
    """What a scaled loss carries: its engine, its scale, its weight. Each has one of its own."""

    owner: Losses
    scale: Tensor | None
    weight: Weight | None


class Losses:
    """Scales the losses of one engine. A hook on each product notes which graph task began at it.

    running: the pass whose state has the scale.
    """

    latest: tuple[int, Losses | None] = (-1, None)
    """Of all engines: the graph task that reached a scaled loss last, and whose loss it was."""

    def __init__(self, running: Pass) -> None:
        self._running = running
        # Whether a loss becomes another one before its backward, but for the scale.
        self.acts = bool(transforms_of(running.states[0].setup, "loss"))
        self._roots: set[_Mark | None] | None = None  # of engine.backward(), while it runs
        self._task = -1
        self._mark: _Mark | None = None  # of the loss at which that task began
        self._weight: Weight | None = None  # of engine.backward(), while it runs

    @property
    def multiplier(self) -> LossScale | None:
        """The scale of the state, if losses must be multiplied by it."""
        return multiplier(self._running.states[0].scale)

    @property
    def loss_scale(self) -> float:
        """The scale of the next loss; 1.0 without one. The host waits for the device."""
        held = self._running.states[0].scale
        return 1.0 if held is None else float(read_external(held).scale)

    def scaled(self, loss: Any, weight: Weight | None = None) -> Tensor:
        """Return loss x scale; the loss itself if there is neither a scale nor a weight.

        The weight is not in the value: it multiplies the gradients of a backward that begins here.

        Raises `LayoutError` for what is no floating tensor, `PhaseError` for what was scaled.
        """
        if not isinstance(loss, Tensor) or not loss.is_floating_point():
            raise _no_loss("scale", loss, "; engine.scale_if_loss(x) takes anything")
        self._running.put(0, with_value(self._running.states[0]))
        held = self.multiplier
        if weight is not None:
            _require_constant("engine.scale", weight)
        elif held is None and not self.acts:
            return loss
        if self.is_scaled(loss):
            raise PhaseError(_TWICE)
        made: Any = loss_learned(self._running.states[:1], loss) if self.acts else loss
        made = made.view_as(made) if held is None else made * held.scale
        if made.requires_grad:  # its hook comes before that of any output or parameter
            made.fzero_mark = mark = _Mark(self, None if held is None else held.scale, weight)
            value = loss.detach() if self._running.calls.looks else None
            made.register_hook(lambda _: self._saw(mark, value))
        return made

    def is_scaled(self, x: Any) -> bool:
        """Whether `scaled` has returned it."""
        mark = _mark_of(x)
        return mark is not None and mark.owner is self

    def is_unscaled(self, x: Any) -> bool:
        """Whether it is one floating number that has a graph, and `scaled` has not returned it."""
        number = isinstance(x, Tensor) and x.numel() == 1 and x.is_floating_point()
        return number and x.grad_fn is not None and not self.is_scaled(x)

    def backward(
        self, loss: Any, gradient: Any, *, weight: Weight | None = None, **options: Any
    ) -> None:
        """Call torch.autograd.backward with what is scaled, and scale what is not.

        No other scaled loss may be below these. Raises `LayoutError` for what autograd cannot begin
        at.
        """
        several = isinstance(loss, list | tuple)
        roots = list(loss) if several else [loss]
        for x in roots:
            if not isinstance(x, Tensor | GradientEdge):
                raise _no_loss("backward", x)
        if weight is not None:
            _require_constant("engine.backward", weight)
            with_weights(self._running.states[0], "engine.backward")  # raises before it begins
        if self.multiplier is not None or self.acts:
            roots = [self._as_root(x) for x in roots]
        else:
            for x in roots:
                self._look_at(x, weight)
        self._roots, self._weight = {_mark_of(x) for x in roots}, weight
        try:
            torch.autograd.backward(roots if several else roots[0], gradient, **options)
        finally:
            self._roots = self._weight = None
            self._running.calls.drop_losses()

    def _as_root(self, x: Any) -> Any:
        floating = isinstance(x, Tensor) and x.is_floating_point()
        return self.scaled(x) if floating and not self.is_scaled(x) else x

    def _look_at(self, loss: Any, weight: Weight | None) -> None:
        """Check that a loss is finite, if that is asked for; one of weight 0 need not be."""
        self._running.calls.loss(loss, weight)

    def begin(self, task: int) -> Weight | None:
        """Return the weight of a backward that begins in a graph task; note it in the state.

        Raises `PhaseError` if the gradients of the state have weights and this one has none, or the
        other way round.
        """
        state, weight = self._running.states[0], self._weight
        if self._task == task and self._mark is not None and self._mark.weight is not None:
            weight = self._mark.weight
        if weight is None:
            require_no_weights(state, "a backward")
        else:
            self._running.put(0, with_weights(state, "a backward"))
        return weight

    def require(self, task: int, outer_task: int | None) -> None:
        """Raise `PhaseError` unless the gradient of a parameter comes from a loss scaled here.

        Called for each gradient. A loss that another engine has scaled is refused as well.

        task: the graph task that runs. outer_task: the one that began the backward, in which it
            may run.
        """
        latest, owner = Losses.latest
        if owner is not None and owner is not self and latest in (task, outer_task):
            raise PhaseError(_BY_ANOTHER)
        by = factor_in(self._running.states[0].slots)  # asked for each gradient
        if by is None and not self.acts:
            return
        if self._task not in (task, outer_task):
            held = self.multiplier
            why = "a transform acts at `loss`" if held is None else f"loss_scale={_shown(held)}"
            raise PhaseError(
                f"a backward without engine.scale; {why}.",
                cause="plain loss.backward() where the loss that is differentiated is another one.",
                fix="write engine.scale(loss).backward(), or engine.backward(loss).",
            )
        if self._mark is None or (by is not None and self._mark.scale is not by):
            raise PhaseError(_BEFORE)

    def _saw(self, mark: _Mark, value: Tensor | None) -> None:
        """A backward has reached a scaled loss; `value`: the loss, where it is to be finite."""
        task, inside = current_graph_task(), self._roots is not None and mark not in self._roots
        if inside and task == self._task:
            raise PhaseError(_TWICE)
        own = self._weight if mark.weight is None else mark.weight
        earlier = self._mark if task == self._task else None
        before = own if earlier is None else earlier.weight
        weights = [own, self._weight if before is None else before]
        if self._weight is not None:
            weights.append(self._weight)
        several = earlier is not None and earlier is not mark and mark.weight is not None
        if several or any(one is not own and not _is_same(one, own) for one in weights):
            raise PhaseError(_TWO_WEIGHTS)
        self._task, self._mark = task, mark
        if mark.scale is not None:
            Losses.latest = (task, self)
        if value is not None:
            self._look_at(value, mark.weight if self._weight is None else self._weight)


def _require_constant(name: str, weight: Weight) -> None:
    require_weight(name, weight)
    if isinstance(weight, Tensor) and weight.requires_grad:
        raise LayoutError(
            f"{name}: a weight that requires grad.",
            cause="learned weights of examples: an engine's update has no graph.",
            fix="fzero.grad_and_reduce(fn, state, weight=w) is differentiable in w; here "
            "w.detach().",
        )


def _is_same(one: Weight | None, other: Weight | None) -> bool:
    """Whether two weights are one number; of tensors no value is read."""
    return not isinstance(one, Tensor) and not isinstance(other, Tensor) and one == other


def _mark_of(x: Any) -> _Mark | None:
    return getattr(x, "fzero_mark", None)


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
