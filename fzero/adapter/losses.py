"""Losses of an engine as they are differentiated, and the guard against a backward of others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from fzero.adapter.hooks import current_graph_task
from fzero.collectives import Scope, close_scope, of_an_edge, open_scope, shared, tied_to
from fzero.errors import LayoutError, PhaseError, explain
from fzero.state.train_state import GivenCall, Weighed, Weight, weighed, with_weight
from fzero.transforms.backward_pass import Pass
from fzero.transforms.recipe import begun, called, factor_of, facts, loss_learned, recipe_of

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
_UNLIKE = explain(
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
    """What is left on a loss that `Losses` has made: its engine, and what gradients have of it."""

    owner: Losses
    factor: Tensor | None
    weight: Weight | None
    connects: bool  # whether the losses of ranks are connected by collectives


class _Given(NamedTuple):
    """What `engine.backward()` was given, while it runs."""

    roots: set[_Mark | None]
    weight: Weight | None
    connects: bool


class Losses:
    """Makes the losses that one engine differentiates; notes which graph task began at which.

    running: the pass of the state that learns. watch: lets a backward begin where one of these
    tensors gets its gradient. acts: whether a loss becomes another one before its backward, but for
    a factor. task_of_all: of the latest backward that is made on all ranks alike.
    """

    latest: tuple[int, Losses | None] = (-1, None)
    """Of all engines: the graph task that reached a multiplied loss last, and whose it was."""

    def __init__(self, running: Pass, watch: Callable[[list[Tensor]], None]) -> None:
        self._running, self._watch = running, watch
        self.acts = bool(recipe_of(running.states[0]).loss)
        self._given: _Given | None = None
        self._task = self.task_of_all = -1
        self._mark: _Mark | None = None  # of the loss at which the task began
        self._weighed: Weighed | None = None  # its weight, or that of engine.backward()
        self.calls = Scope()
        if running.states[0].setup.layout.trainable:
            open_scope(self.calls)

    @property
    def are_others(self) -> bool:
        """Whether the losses that are differentiated are others than those of the user."""
        return self.acts or factor_of(self._running.states[0]) is not None

    def end(self) -> None:
        """No backward will follow."""
        close_scope(self.calls)

    def differentiated(self, loss: Any, weight: Weight | None = None) -> Tensor:
        """Return the loss that is differentiated, in a backward made on all ranks alike.

        A call of all ranks if collectives were called that connect their losses.
        """
        _require_loss(loss)
        same = shared([loss], self.calls.tokens)
        if same.connects:
            loss = self._begun_by_all(loss, same.ties)
        return self._learned(loss, weight, connects=same.connects and weight is not None)

    def _begun_by_all(self, loss: Tensor, tokens: Sequence[Tensor]) -> Tensor:
        """Return a loss of which the backward begins, and ends, on every rank."""
        if self.is_learned(loss):
            return loss

        def begins(_: Tensor) -> None:
            self.task_of_all = current_graph_task()

        made = tied_to(loss, tokens)
        made.register_hook(begins)
        self._watch([made])
        return made

    def _learned(self, loss: Any, weight: Weight | None, *, connects: bool) -> Tensor:
        """Return the loss that is differentiated; that of the user if nothing makes another of it.

        The weight is not in the value: it multiplies the gradients of a backward that begins here.

        Raises `LayoutError` for what is no floating tensor, `PhaseError` for what it has returned.
        """
        _require_loss(loss)
        self._running.put(0, begun(self._running.states[0]))
        by = factor_of(self._running.states[0])
        if weight is not None:
            _require_constant("engine.scale", weight)
        elif by is None and not self.acts and not connects:
            return loss
        if self.is_learned(loss):
            raise PhaseError(_TWICE)
        made: Any = loss_learned(self._running.states[:1], loss) if self.acts else loss
        made = made.view_as(made) if by is None else made * by
        if made.requires_grad:  # its hook comes before that of any output or parameter
            made.fzero_mark = mark = _Mark(self, by, weight, connects)
            made.register_hook(lambda gradient: self._saw(mark, loss, gradient))
        return made

    def is_learned(self, x: Any) -> bool:
        """Whether it is a loss that is differentiated, made of one of the user's."""
        mark = _mark_of(x)
        return mark is not None and mark.owner is self

    def is_plain(self, x: Any) -> bool:
        """Whether it is one floating number that has a graph, and no loss of `scaled`."""
        number = isinstance(x, Tensor) and x.numel() == 1 and x.is_floating_point()
        return number and x.grad_fn is not None and not self.is_learned(x)

    def backward(
        self, loss: Any, gradient: Any, *, weight: Weight | None = None, **options: Any
    ) -> None:
        """Call torch.autograd.backward with the losses that are differentiated.

        No other such loss may be below these. Raises `LayoutError` for what autograd cannot begin
        at.
        """
        several = isinstance(loss, list | tuple)
        roots = list(loss) if several else [loss]
        for x in roots:
            if not isinstance(x, Tensor | GradientEdge):
                raise _no_loss("backward", x)
        if weight is not None:
            _require_constant("engine.backward", weight)
            call = GivenCall("engine.backward", weight)
            called(self._running.states[0], call)  # raises, if it does
        mark, *_ = marks = [_mark_of(x) for x in roots]
        weighs = weight is not None or any(one and one.weight is not None for one in marks)
        tensors = [x for x in roots if isinstance(x, Tensor)]
        inputs = options.get("inputs") or ()
        inputs = [inputs] if isinstance(inputs, Tensor | GradientEdge) else [*inputs]
        tokens, edges, connects = shared(tensors, self.calls.tokens, inputs)
        if edges:
            options["inputs"] = [*inputs, *edges]
        if connects and len(tensors) < len(roots):
            raise of_an_edge("engine.backward")
        if connects and mark is None:
            roots[0] = self._begun_by_all(roots[0], tokens)
        parts = self._running.parts.values()
        if self.are_others or (connects and weighs):
            for i, x in enumerate(roots):
                floating = isinstance(x, Tensor) and x.is_floating_point()
                if floating and not self.is_learned(x):
                    roots[i] = self._learned(x, None, connects=connects and weighs)
        else:
            for part in parts:  # is it finite, if that is asked for; one of weight 0 need not be
                for x in roots:
                    part.loss(x, weight)
        self._given = _Given({_mark_of(x) for x in roots}, weight, connects and weighs)
        if tokens and mark is not None:  # it began before
            roots[0] = tied_to(roots[0], tokens)
        try:
            torch.autograd.backward(roots if several else roots[0], gradient, **options)
        finally:
            self._given = None
            for part in parts:
                part.drop_losses()

    def begin(self, task: int) -> Weighed | None:
        """Return the weight of a backward that begins in a graph task; note it in the state.

        Raises `PhaseError` if the gradients of the state have weights and this one has none, or the
        other way round.
        """
        given = self._given and self._given.weight
        how = None if given is None else Weighed(given)
        if self._task == task and self._weighed is not None:
            how = self._weighed
        call = GivenCall("a backward", how and how.weight)
        self._running.put(0, called(self._running.states[0], call))
        return how

    def require(self, task: int, around: int | None) -> None:
        """Raise `PhaseError` unless the gradient of a parameter comes from a loss made here.

        Called for each gradient. A loss that another engine has multiplied is refused as well.

        task: the graph task that runs. around: the one that began the backward, in which it
            may run.
        """
        latest, owner = Losses.latest
        if owner is not None and owner is not self and latest in (task, around):
            raise PhaseError(_BY_ANOTHER)
        by = factor_of(self._running.states[0])
        if by is None and not self.acts:
            return
        if self._task not in (task, around):
            why = "a transform acts at `loss`"
            if by is not None:  # what is on the device is not read for this
                why = "; ".join(facts(self._running.states[0], "call"))
            raise PhaseError(
                f"a backward without engine.scale; {why}.",
                cause="plain loss.backward() where the loss that is differentiated is another one.",
                fix="write engine.scale(loss).backward(), or engine.backward(loss).",
            )
        if self._mark is None or (by is not None and self._mark.factor is not by):
            raise PhaseError(_BEFORE)

    def _saw(self, mark: _Mark, loss: Tensor, gradient: Tensor) -> Tensor | None:
        """A backward has reached a loss that was made here: return another gradient of it."""
        task, given = current_graph_task(), self._given
        if given is not None and mark not in given.roots and task == self._task:
            raise PhaseError(_TWICE)
        of_call = None if given is None else given.weight
        own = of_call if mark.weight is None else mark.weight
        earlier = self._mark if task == self._task else None
        before = own if earlier is None else earlier.weight
        given_too = [own, of_call if before is None else before]
        if of_call is not None:
            given_too.append(of_call)
        several = earlier is not None and earlier is not mark and mark.weight is not None
        if several or any(one is not own and not _is_same(one, own) for one in given_too):
            raise PhaseError(_UNLIKE)
        self._task, self._mark = task, mark
        if mark.factor is not None:
            Losses.latest = (task, self)
        parts = self._running.parts.values()
        if any(part.looks for part in parts):
            for part in parts:
                part.loss(loss.detach(), own)
        connected = mark.connects or (given is not None and given.connects)
        self._weighed = weighed(loss, own, connected=connected)
        by = with_weight(None, self._weighed)
        return None if by is None else gradient * by


def _require_constant(name: str, weight: Weight) -> None:
    GivenCall(name, weight)  # checks it
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


def _require_loss(loss: Any) -> None:
    if not isinstance(loss, Tensor) or not loss.is_floating_point():
        raise _no_loss("scale", loss, "; engine.scale_if_loss(x) takes anything")


def _no_loss(name: str, x: Any, more: str = "") -> LayoutError:
    seen = f"a {x.dtype} tensor" if isinstance(x, Tensor) else f"{x!r:.80}"
    return LayoutError(
        f"engine.{name} got {seen}.",
        cause="loss.item(), the whole output of a model, or the loss of one without labels.",
        fix=f"pass the loss tensor{more}.",
    )
