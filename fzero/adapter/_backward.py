"""Autograd's hooks -> events -> pure transitions -> effects: everything about one backward.

    forward begins        reset_for_new_step
    an output's gradient  enter_backward, queue_post_backward_callback
    a parameter's         update_hook_state_and_maybe_run_epilogue; buckets.filled -> Launch
    the graph ends        graph_completed -> RunEpilogue

A record is assigned when its transition has returned; then the effects run.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from fzero.adapter._autograd import Callback, autograd_has_callbacks, called_by_autograd_grad
from fzero.adapter._pytree import count_leaves_below
from fzero.adapter._reducer import Reducer
from fzero.errors import AxisError
from fzero.state import accumulation as acc
from fzero.state import buckets as launching
from fzero.state import hooks
from fzero.state.accumulation import Accumulation
from fzero.state.buckets import Buckets
from fzero.state.effects import DropBackward, HookEffects, QueueCallback, RunEpilogue
from fzero.state.hooks import HookState

OF_ENGINE = "of_engine"
"""What an engine's hooks on parameters have set."""

Learning = tuple[Tensor, int, int]
"""A parameter that learns, the number of its bucket, and its position in it."""


class Backward:
    """The records of one engine's backwards, and the hooks that feed them."""

    def __init__(
        self,
        reducer: Reducer,
        learning: Sequence[Learning],
        check: Callable[[int | None], None] | None = None,
    ) -> None:
        self.hooks = HookState()
        self.accumulation = Accumulation()
        self.buckets = Buckets(count=len(reducer.buckets), in_turn=reducer.source is None)
        self._reducer, self._source, self._check = reducer, reducer.source, check
        self._before: tuple[Accumulation, Sequence[Tensor | None]] = self.accumulation, ()
        self._early = reducer.plan.axis.size > 1  # nothing is sent by one rank alone
        self._callbacks = autograd_has_callbacks()
        self._learning = [p for p, _, _ in learning]
        self._nodes = [get_gradient_edge(p).node for p, _, _ in learning]
        self._for_slopes = False  # this backward is one of torch.autograd.grad, on every rank
        self._expected_by_count = 0
        self._failures = 0  # that all ranks knew of when the last backward began
        self._ticket: weakref.ref[Callback] | None = None
        if self._source is not None:
            self._source.exchange.watch(self.settle_abandoned)
        self._handles = [
            p.register_post_accumulate_grad_hook(self._hook_of(number, position))
            for p, number, position in learning
        ]

    def remove(self) -> None:
        """Take every hook off the parameters."""
        for handle in self._handles:
            handle.remove()

    # Events.

    def forward_begins(self) -> bool:
        """A root forward starts: True if it is one of its own, not the recompute of a backward."""
        if self.inside():
            return False
        self.settle_abandoned()
        self.keep_outside()
        self._apply(hooks.reset_for_new_step)
        return True

    def forward_ends(self, outputs: Iterable[Tensor]) -> bool:
        """Watch the outputs of a root forward: True if a backward can come from them."""
        learns = any(p.requires_grad for p in self._learning)  # not while all of it is frozen
        watched = [x for x in outputs if x.grad_fn is not None] if learns else []
        for x in watched:
            x.register_hook(self._on_output)
        if watched and not self._callbacks:
            self._expected_by_count = count_leaves_below(watched, self._nodes)
        return bool(watched)

    def _on_output(self, gradient: Tensor) -> None:
        self.settle_abandoned()
        if self.hooks.backward_active_depth:
            return
        self._reducer.settle()
        if self._source is None:
            self._for_slopes = called_by_autograd_grad()
        else:
            self._source.in_step, self._failures = True, self._source.exchange.failures
        self._apply(hooks.enter_backward)
        self._apply(hooks.queue_post_backward_callback, graph_task_id=self._task())

    def _hook_of(self, number: int, position: int) -> Callable[[Tensor], None]:
        pending = self._reducer.buckets[number].pending

        def on_gradient(p: Tensor) -> None:
            gradient, p.grad = p.grad, None
            if gradient is not None:
                if self._ticket is not None:
                    self.settle_abandoned()
                if self._check is not None:
                    self._check(self.hooks.post_backward_callback_graph_task_id)
                full = pending.put(
                    position, gradient.detach() if gradient.requires_grad else gradient
                )
                self._on_gradient(number, full)

        vars(on_gradient)[OF_ENGINE] = True
        return on_gradient

    def _on_gradient(self, number: int, full: bool) -> None:
        refresh = not self.hooks.hooks_fired_this_backward
        if not self._callbacks and not self.hooks.backward_active_depth:
            refresh = hooks.should_refresh_expected_hook_count(self.hooks)
            self._apply(hooks.reenter_backward_if_needed)
        inside = self.hooks.backward_active_depth > 0
        # What waits from before goes at the end: if this backward raises, it must not be lost.
        if full and inside and self._early and not self.accumulation.keeps:
            self.buckets, launches = launching.filled(self.buckets, number)
            for launch in launches:
                self._reducer.launch(launch.buckets)
        self.hooks, effects = hooks.update_hook_state_and_maybe_run_epilogue(
            self.hooks,
            expected=self._expected() if refresh and inside else self.hooks.max_expected_hooks_seen,
            graph_task_id=self._task(),
        )
        if effects:
            self._run(effects)

    def _on_completed(self, task: int) -> None:
        self._apply(hooks.graph_completed, graph_task_id=task)

    def settle(self) -> None:
        """Wait for what the last backward launched, unless it raised: then forget it."""
        self.settle_abandoned()
        self._reducer.settle()

    def settle_abandoned(self) -> None:
        """If the last backward raised, forget it: its callback died with its graph.

        At stage 3 the others are told now, unless they know: they wait for what it would ask.
        """
        if self._ticket is None or self._ticket() is not None:
            return
        self._ticket = None
        if self.hooks.post_backward_callback_queued:
            try:
                if self._source is not None and self._source.exchange.failures == self._failures:
                    self._source.exchange.fail()
            finally:
                self.abandon()

    def abandon(self) -> None:
        """An exception ended a forward or backward.

        Below stage 3 the buckets that the backward has not launched are, with nothing in them:
        ranks that raised at another place, or not at all, then go on in step.
        """
        running, self._ticket = self.hooks.backward_active_depth > 0, None
        sends = self._early and self._source is None and not self._for_slopes
        if running and sends and not self.accumulation.window:
            self.accumulation = acc.saw_error(self.accumulation)
            with suppress(AxisError):
                for effect in launching.finish(self.buckets)[1]:
                    self._reducer.launch_nothing(effect.buckets)
        self._apply(hooks.reset_for_new_step)
        if running or self._source is not None:  # there, all in flight is of what is abandoned
            self._drop()
        else:
            self._reducer.drop()

    def inside(self) -> bool:
        """Whether a backward is running, in this thread or for this engine."""
        if self._callbacks:
            return torch._C._current_graph_task_id() >= 0
        return self.hooks.backward_active_depth > 0

    # Windows, and what waits.

    def open_window(self, kind: str) -> None:
        """Let gradients wait from here on."""
        self.settle()
        opened = acc.open_window(self.accumulation, kind)
        self.keep_outside()
        self._before = self.accumulation, [bucket.set_aside() for bucket in self._reducer.buckets]
        self.accumulation = replace(opened, waiting=False)
        if self._source is not None:
            self._source.begin_window()

    def close_window(self, *, good: bool) -> None:
        """End the window: with what came in it if it was `good`, else as if it had not been."""
        self.settle_abandoned()
        self.keep_outside()
        accumulation, kept = self._before
        self._before = accumulation, ()
        for bucket, waited in zip(self._reducer.buckets, kept, strict=False):
            bucket.put_back(waited, add=good)
        if good:
            waiting = self.accumulation.waiting or accumulation.waiting
            self.accumulation = replace(acc.close_window(self.accumulation), waiting=waiting)
        else:
            with suppress(AxisError):  # what is in flight is other ranks', who are not in a window
                self._reducer.settle()
            self._drop()
            self.accumulation = accumulation
        if self._source is not None:
            self._source.end_window()

    def flush(self) -> None:
        """Reduce all that waits on this rank. A collective: every rank flushes, or none."""
        waiting = self._reducer.waiting()
        self.buckets, effects = launching.finish(launching.restart(self.buckets), waiting)
        self._launch(effects)
        self.settle()
        self.accumulation = acc.saw_reduction(self.accumulation)

    def clear(self) -> None:
        """Throw every gradient away."""
        self.settle()
        self._reducer.clear()
        self.accumulation = acc.cleared(self.accumulation)
        self._before = acc.cleared(self._before[0]), ()

    # Transitions and effects.

    def _apply(self, transition: Callable[..., Any], **event: Any) -> None:
        self.hooks, effects = transition(self.hooks, **event)
        if effects:
            self._run(effects)

    def _run(self, effects: HookEffects) -> None:
        for effect in effects:
            match effect:
                case QueueCallback(task):
                    callback = Callback(self._on_completed, task)
                    self._ticket = weakref.ref(callback)
                    torch.autograd.Variable._execution_engine.queue_callback(callback)
                case RunEpilogue():
                    if not self._callbacks:
                        self.hooks, _ = hooks.exit_backward(self.hooks)
                    self._epilogue()
                case DropBackward():
                    self._drop()

    def _epilogue(self) -> None:
        """The backward is over: reduce what is left, or let it wait in the window."""
        if self.accumulation.window:
            self.buckets = launching.restart(self.buckets)
            counts = self._reducer.keep()
            self._launch(())
        else:
            fired, waiting = self.hooks.hooks_fired_this_backward > 0, self._reducer.waiting()
            self.buckets, effects = launching.finish(self.buckets, waiting)
            # torch.autograd.grad of an output brings no gradient, and every rank knows that (what
            # waits, on some of them perhaps, goes on waiting); a backward that passes every
            # parameter by may do so on this rank only.
            if self._for_slopes and not fired:
                effects = ()
            counts = self._launch(effects)
            if counts:
                self.accumulation = acc.saw_reduction(self.accumulation)
        if counts:
            self.accumulation = acc.saw_backward(self.accumulation)
        if self._reducer.keep():  # they came after their bucket had gone
            self.accumulation = acc.saw_local(self.accumulation)
        if self._source is not None:
            self._source.end_step()

    def _launch(self, effects: launching.Launches) -> bool:
        """Launch, wait, and say whether anything crossed ranks since the last time."""
        try:
            for effect in effects:
                self._reducer.launch(effect.buckets)
            return self._reducer.finish()
        except BaseException:
            self._drop()
            raise

    def keep_outside(self) -> None:
        """Gradients of a backward that ran outside of any of ours wait for the next one."""
        if self.hooks.hooks_outside_backward and self._reducer.keep():
            self.accumulation = acc.saw_local(self.accumulation)

    def _drop(self) -> None:
        self.buckets = launching.restart(self.buckets)
        self._reducer.abandon()
        self._reducer.drop()
        if self._source is not None:
            self._source.abort()

    def _task(self) -> int | None:
        return torch._C._current_graph_task_id() if self._callbacks else None

    def _expected(self) -> int:
        """The hooks of this backward as far as is known: those that fired, and those to come."""
        if not self._callbacks:
            return self._expected_by_count
        will = torch._C._will_engine_execute_node
        return self.hooks.hooks_fired_this_backward + sum(map(will, self._nodes))
