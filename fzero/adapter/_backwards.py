"""Hooks of outputs and parameters -> the pure hook record -> effects: one backward after another.

    an output's gradient       enter_backward, queue_post_backward_callback; the pass begins
    a parameter's gradient     update_hook_state_and_maybe_run_epilogue; it goes into its bucket
    the graph ends             graph_completed -> RunEpilogue: the pass is finished

A record is assigned when its transition has returned; then the effects run. A gradient belongs to
the graph task that brought it: it is committed by that task's own callback, and dropped if that
never comes.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from fzero.adapter._torch_hooks import (
    at_end_of_graph_task,
    current_graph_task,
    in_backward,
    register_first,
)
from fzero.errors import PhaseError
from fzero.state import hooks
from fzero.state.effects import DropBackward, QueueCallback, RunEpilogue
from fzero.state.hooks import HookState


class TakesGradients(Protocol):
    """Whoever acts on what a backward does."""

    def backward_begins(self, first: Tensor | None) -> None:
        """A backward begins; `first`: the parameter that has its gradient, if no output had one."""
        ...

    def received(
        self, leaf: int, p: Any, task: int, around: int | None, *, first: bool = False
    ) -> None:
        """Parameter `p`, which is `leaf`, has its gradient: see `Driver.received`."""
        ...

    def backward_ends(self) -> None:
        """The backward is over, and has not raised."""
        ...

    def drop(self) -> None:
        """The backward has raised: nothing of it counts."""
        ...


class Backwards:
    """The hooks of an engine's outputs and parameters, and the record of what they have seen.

    learning: the parameter objects that learn, each with the leaf that it is. in_forward: whether a
    root forward is running: a backward inside of one begins nothing.
    """

    def __init__(
        self,
        learning: Sequence[tuple[Tensor, int]],
        on: TakesGradients,
        in_forward: Callable[[], bool],
    ) -> None:
        self._on, self._in_forward = on, in_forward
        self._hooks = HookState()
        self._uncounted = 0  # hooks that the record does not have yet: see `hooks`
        self._own_task: int | None = None  # whose hooks change nothing but counts
        self._nested = -1  # a graph task that ran while another one's backward is open
        self._apart = False  # that task ended, and nothing came of the one that is open since
        self._handles = [register_first(p, self._hook_of(leaf)) for p, leaf in learning]

    @property
    def hooks(self) -> HookState:
        """The record of the gradient hooks."""
        if self._uncounted:
            fired, self._uncounted = self._uncounted, 0
            self._hooks, _ = hooks.count_hooks(self._hooks, fired=fired)
        return self._hooks

    def watch(self, outputs: Iterable[Tensor]) -> None:
        """A backward begins as soon as one of these tensors gets its gradient."""
        for x in outputs:
            x.register_hook(self._on_output)

    def remove(self) -> None:
        """Take the hooks of parameters off."""
        for handle in self._handles:
            handle.remove()

    # What hooks see.

    @torch._disable_dynamo
    def _on_output(self, gradient: Tensor) -> None:
        task = current_graph_task()
        if self.hooks.backward_active_depth and task == self._task_of_record:
            return
        self._enter(task, None)

    def _enter(self, task: int, first: Tensor | None) -> None:
        """A backward begins; one that is still open has raised, and is dropped."""
        self._drop_what_raised()
        self._on.backward_begins(first)
        self._apply(hooks.enter_backward)
        self._apply(hooks.queue_post_backward_callback, graph_task_id=task)

    def _hook_of(self, leaf: int) -> Callable[[Tensor], None]:
        # Autograd keeps the hook where the garbage collector does not look: an engine that nobody
        # holds any more would never go, nor would its model.
        held = weakref.ref(self)

        @torch._disable_dynamo
        def on_gradient(p: Tensor) -> None:
            backwards = held()
            if backwards is not None and p.grad is not None:
                backwards._on_gradient(leaf, p)

        return on_gradient

    def _on_gradient(self, leaf: int, p: Tensor) -> None:
        task = current_graph_task()
        if task == self._own_task:  # all but the first hook of a backward, mostly
            self._on.received(leaf, p, task, task)
            self._uncounted += 1
            self._apart = False
            return
        if not self.hooks.backward_active_depth and not self._in_forward():
            self._enter(task, p)  # it came by another way than an output
        self._on.received(leaf, p, task, self._task_of_record, first=True)
        state = self.hooks
        inside = state.backward_active_depth > 0
        if inside and task != self._task_of_record:
            # It runs inside of that one (reentrant checkpointing), or that one has raised.
            if task != self._nested:
                self._nested = task
                at_end_of_graph_task(self._another_completed)
        else:
            self._apart = False
        # The callback decides when the backward is over: nobody asks autograd what it will run.
        self._apply(
            hooks.update_hook_state_and_maybe_run_epilogue,
            expected=state.hooks_fired_this_backward + 1,
            graph_task_id=task,
        )

    def _another_completed(self) -> None:
        self._apart = True

    @torch._disable_dynamo
    def _on_completed(self, task: int) -> None:
        self._nested, self._apart = -1, False
        self._apply(hooks.graph_completed, graph_task_id=task)

    # What raised.

    def drop_unfinished(self) -> None:
        """Outside of every graph task, a backward that is still open has raised: drop it."""
        if self.hooks.unfinished and not in_backward():
            self._drop_what_raised()

    def _drop_what_raised(self) -> None:
        """Start again. Raises `PhaseError` if a whole backward is dropped with one that raised."""
        apart = self._apart
        self.reset()
        if apart:
            raise PhaseError(
                "a backward raised, and before the engine was used again another one ran, "
                "which did not come from the module's outputs. Both were dropped.",
                cause="an exception of loss.backward() that was caught, and then a backward of "
                "a submodule: the engine cannot tell its gradients from those of the first.",
                fix="use engine.backward(loss), which sees the exception, or call "
                "engine.zero_grad() after it; then run the second backward again.",
            )

    def reset(self) -> None:
        """Forget the backward that is open; what it has brought is dropped."""
        self._nested, self._apart = -1, False
        self._apply(hooks.reset_for_new_step)

    # Transitions and effects.

    def _apply(self, transition: Callable[..., Any], **event: Any) -> None:
        self._hooks, effects = transition(self.hooks, **event)
        s = self._hooks
        counts = s.backward_active_depth > 0 and s.hooks_fired_this_backward > 0
        self._own_task = s.post_backward_callback_graph_task_id if counts else None
        for effect in effects:
            match effect:
                case QueueCallback(task):
                    at_end_of_graph_task(functools.partial(self._on_completed, task))
                case RunEpilogue():
                    self._on.backward_ends()
                case DropBackward():
                    self._on.drop()

    @property
    def _task_of_record(self) -> int | None:
        return self.hooks.post_backward_callback_graph_task_id
