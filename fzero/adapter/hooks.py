"""Hooks of a module, its outputs and its parameters -> events of an engine.

    a root forward             begins, and is over; its outputs are watched
    an output's gradient       enter_backward, queue_post_backward_callback; the pass begins
    a parameter's gradient     update_hook_state_and_maybe_run_epilogue; it goes into its bucket
    the graph ends             graph_completed -> RunEpilogue: the pass is finished

A record is assigned when its transition has returned; then the effects run. A gradient belongs to
the graph task that brought it: it is committed by that task's own callback, and dropped if that
never comes.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, NamedTuple, ParamSpec

import torch
from torch import Tensor, nn

from fzero.adapter.module import refuse_load
from fzero.context.modes import computed_in, for_training, in_transform, other_autocast
from fzero.machine.placeholder import not_for_jit
from fzero.state import hooks
from fzero.state.effects import DropBackward, QueueCallback, RunEpilogue
from fzero.state.hooks import HookState
from fzero.transforms.autocast import around_message

P = ParamSpec("P")

current_graph_task = torch._C._current_graph_task_id
"""The id of the graph task that runs in this thread; -1 outside of every backward."""


def in_backward() -> bool:
    """Return whether a backward runs in this thread."""
    return current_graph_task() >= 0


def register_first(p: Any, hook: Callable[[Tensor], None]) -> Any:
    """Register a hook of a parameter's gradient before those of the user; return its handle.

    They would otherwise find the rank's own gradient, and an optimizer that steps there would
    make other parameters on each rank.
    """
    users = dict(p._post_accumulate_grad_hooks or {})
    handle = p.register_post_accumulate_grad_hook(hook)
    for number, later in users.items():  # torch calls them in the order in which they came
        del p._post_accumulate_grad_hooks[number]
        p._post_accumulate_grad_hooks[number] = later
    return handle


def weakly(method: Callable[P, None]) -> Callable[P, None]:
    """Return what calls a method of an object for as long as the object is there.

    Autograd holds placeholders where the garbage collector does not look: from them no way may lead
    to an engine, or one that nobody holds any more would never go.
    """
    held = weakref.WeakMethod(method)

    def call(*args: P.args, **kwargs: P.kwargs) -> None:
        if (do := held()) is not None:
            do(*args, **kwargs)

    return call


class ModuleHook:
    """A hook on an engine's module. A copy of the module belongs to no engine: it does nothing."""

    def __init__(self, do: Callable[..., None]) -> None:
        self._do = do

    @torch._disable_dynamo
    def __call__(self, *args: Any) -> None:
        """Do what the hook is for."""
        self._do(*args)

    @property
    def __name__(self) -> str:
        """What torch.jit.script asks for."""
        raise AttributeError(str(not_for_jit("a module with the hooks of an engine")))

    def __reduce__(self) -> tuple[Any, ...]:
        return ModuleHook, (_nothing,)


def _nothing(*_: Any) -> None:
    """What a copied hook does."""


_PLAIN = (str, bytes, int, float, complex, bool, type(None), type, nn.Module)


class _Forward(NamedTuple):
    """A forward of the module that is running."""

    entered: ExitStack
    is_own: bool  # the outermost, no recompute, and not under torch.func
    handled: BaseException | None  # what was being handled when it began


class Events:
    """Registers the hooks of one engine, and takes them off.

    on: the driver, which acts on forwards and backwards. calls: of the module that are under way,
    its hooks of forwards among them.
    """

    def __init__(self, on: Any) -> None:
        self._on, module = on, on.module
        self._autocast, self._device = on.state.setup.policy.autocast, on.state.device
        self._warned = False
        self._running: list[_Forward] = []
        self.calls = 0
        self._stands_in = _stands_in(module)
        self._last = module.register_forward_hook(ModuleHook(self._after_hooks), always_call=True)
        self._handles = [
            self._last,
            module.register_forward_pre_hook(ModuleHook(self._before_forward), prepend=True),
            module.register_forward_hook(ModuleHook(self._after_forward), always_call=True),
            *[
                part.register_load_state_dict_pre_hook(ModuleHook(refuse_load))
                for part in module.modules()
            ],
        ]
        self.backwards = Backwards(on, lambda: bool(self._running))

    def remove(self) -> None:
        """Take every hook off."""
        self._leave_forwards()
        self.backwards.remove()
        for handle in self._handles:
            handle.remove()

    def abandon(self) -> None:
        """An exception ended a forward or a backward."""
        self._leave_forwards()
        self.backwards.reset()

    def _leave_forwards(self) -> None:
        self.calls = 0
        while self._running:
            self._running.pop().entered.close()

    def _before_forward(self, module: Any, args: Any) -> None:
        entered, outermost = ExitStack(), not self._running
        self.calls += 1
        if next(reversed(module._forward_hooks)) != self._last.id:  # the user's hooks come before
            module._forward_hooks.move_to_end(self._last.id)
        if outermost and self._autocast is not None and not self._warned:
            other = other_autocast(self._autocast, self._device)
            if other is not None:
                self._warned = True
                warnings.warn(around_message(self._autocast, other), UserWarning, stacklevel=2)
        # A checkpoint that recomputes a forward in backward comes here, too.
        entered.enter_context(computed_in(self._autocast, self._device))
        is_own = outermost and not (in_transform() or self._stands_in() or in_backward())
        self._running.append(_Forward(entered, is_own, sys.exc_info()[1]))
        if is_own:
            with torch.inference_mode(False), torch.no_grad():  # what waits is for training
                try:
                    self._on.forward_begins()
                except BaseException:  # torch.export calls no hook after it
                    self._leave_forwards()
                    raise

    def _after_forward(self, module: Any, args: Any, output: Any) -> None:
        if not self._running:  # the forward raised, and was abandoned before this hook
            return
        forward = self._running.pop()
        forward.entered.close()
        if not forward.is_own:
            return
        trains = False
        if torch.is_grad_enabled() and any(p.requires_grad for p, _ in self._on.params.learning):
            outputs = [x for x in tensors_in(output, {}) if x.grad_fn is not None]
            self.backwards.watch(outputs)  # a backward can come from them
            trains = bool(outputs)
        error = sys.exc_info()[1]  # torch calls this hook while it handles what the forward raised
        raised = error if output is None and error is not forward.handled else None
        for_training(self._on.forward_ends, trains=trains, raised=raised)

    def _after_hooks(self, *_: Any) -> None:
        self.calls = max(self.calls - 1, 0)


def tensors_in(value: Any, seen: dict[int, Any]) -> Iterator[Tensor]:
    """Yield the tensors in `value`, each once: in containers, dataclasses and other objects.

    What cannot be looked into is passed over: a backward that comes from there is still seen, when
    the first parameter gets its gradient.

    Example:
        >>> x = torch.ones(1)
        >>> len([*tensors_in({"a": (x, [x]), "b": iter([x])}, {})])
        1
    """
    if isinstance(value, _PLAIN) or id(value) in seen:
        return
    seen[id(value)] = value  # kept, for the id of what is gone may be taken again
    if isinstance(value, Tensor):
        yield value
        return
    if isinstance(value, Mapping):
        parts: Iterable[Any] = value.values()
    elif isinstance(value, tuple | list | set | frozenset):
        parts = value
    elif is_dataclass(value):
        parts = [getattr(value, f.name, None) for f in fields(value)]
    else:
        parts = list(getattr(value, "__dict__", {}).values())
    for part in parts:
        yield from tensors_in(part, seen)


def _stands_in(module: nn.Module) -> Callable[[], bool]:
    """Return whether torch.func.functional_call has put tensors in the places of parameters.

    It replaces all or some of them: the first one tells.
    """
    for owner in module.modules():
        for name, p in owner._parameters.items():
            if p is not None:
                return lambda: not isinstance(owner._parameters.get(name), nn.Parameter)
    return lambda: False


class Backwards:
    """The hooks of an engine's outputs and parameters, and the record of what they have seen.

    on: the driver, which acts on what a backward does. in_forward: whether a root forward is
    running: a backward inside of one begins nothing.
    """

    def __init__(self, on: Any, in_forward: Callable[[], bool]) -> None:
        self._on, self._in_forward = on, in_forward
        self._hooks = HookState()
        self._uncounted = 0  # hooks that the record does not have yet: see `hooks`
        self._own_task: int | None = None  # whose hooks change nothing but counts
        self._has_raised = False  # the backward that is open; nobody has acted on it yet
        self._handles = [register_first(p, self._hook_of(leaf)) for p, leaf in on.params.learning]

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
        task, seen = current_graph_task(), self.hooks
        if not seen.backward_active_depth or task != seen.post_backward_callback_graph_task_id:
            self._enter(task, None)

    def _enter(self, task: int, first: Tensor | None) -> None:
        """A backward begins; one that is still open has raised, and is dropped."""
        self.reset()
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
            return
        if self._has_raised or not (self.hooks.backward_active_depth or self._in_forward()):
            self._enter(task, p)  # it came by another way than an output
        around = self.hooks.post_backward_callback_graph_task_id
        self._on.received(leaf, p, task, around, first=True)
        # The callback decides when the backward is over: nobody asks autograd what it will run.
        # Another task runs inside of that of the callback (reentrant checkpointing).
        self._apply(
            hooks.update_hook_state_and_maybe_run_epilogue,
            expected=self.hooks.hooks_fired_this_backward + 1,
            graph_task_id=task,
        )

    @torch._disable_dynamo
    def _on_completed(self, task: int) -> None:
        self._apply(hooks.graph_completed, graph_task_id=task)

    def _on_gone(self, task: int) -> None:
        """Autograd has let the callback of a graph task go; without a call, if that has raised."""
        self._has_raised |= task == self._hooks.post_backward_callback_graph_task_id

    # What raised.

    def drop_unfinished(self) -> None:
        """Outside of every graph task, a backward that is still open has raised: drop it."""
        if self.hooks.unfinished and not in_backward():
            self.reset()

    def reset(self) -> None:
        """Forget the backward that is open; what it has brought is dropped."""
        self._has_raised = False
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
                    engine: Any = torch.autograd.Variable._execution_engine
                    end = partial(weakly(self._on_completed), task)
                    weakref.finalize(end, weakly(self._on_gone), task)
                    engine.queue_callback(end)
                case RunEpilogue():
                    self._on.backward_ends()
                case DropBackward():
                    # It was a plain one, and no other rank was notified.
                    self._on.running.fail(RuntimeError("a backward that raised"))
