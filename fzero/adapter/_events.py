"""Hooks of an engine's module -> events: a root forward begins, and is over.

What its outputs' gradients and those of the parameters lead to is in `_backwards`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from fzero.adapter._backwards import Backwards, TakesGradients
from fzero.adapter._loading import refuse_load
from fzero.adapter._region import Region
from fzero.adapter._torch_hooks import ModuleHook, in_backward
from fzero.context.modes import for_training, in_transform

_PLAIN = (str, bytes, int, float, complex, bool, type(None), type, nn.Module)


class Reacts(TakesGradients, Protocol):
    """Whoever acts on the forwards and backwards of a module."""

    def forward_begins(self) -> None:
        """A root forward begins."""
        ...

    def forward_ends(self, *, trains: bool, raised: BaseException | None) -> None:
        """A root forward is over; `trains`: a backward may come from its outputs."""
        ...


class _Forward(NamedTuple):
    """A forward of the module that is running."""

    entered: ExitStack
    is_own: bool  # the outermost, no recompute, and not under torch.func
    handled: BaseException | None  # what was being handled when it began


class Events:
    """Registers the hooks of one engine, and takes them off.

    learning: the parameter objects that learn, each with the leaf that it is. region: what a
    forward runs in.
    """

    def __init__(
        self,
        module: nn.Module,
        learning: Sequence[tuple[Tensor, int]],
        region: Region,
        on: Reacts,
    ) -> None:
        self._on, self._region = on, region
        self._running: list[_Forward] = []
        self._calls = 0  # of the module that are under way, its hooks of forwards among them
        self._stands_in = _stands_in(module)
        self._learning = [p for p, _ in learning]
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
        self.backwards = Backwards(learning, on, lambda: bool(self._running))

    def remove(self) -> None:
        """Take every hook off."""
        self._leave_forwards()
        self.backwards.remove()
        for handle in self._handles:
            handle.remove()

    @property
    def in_forward(self) -> bool:
        """Whether a forward of the module runs, or a hook on its end."""
        return self._calls > 0

    def abandon(self) -> None:
        """An exception ended a forward or a backward."""
        self._leave_forwards()
        self.backwards.reset()

    def _leave_forwards(self) -> None:
        self._calls = 0
        while self._running:
            self._running.pop().entered.close()

    def _before_forward(self, module: Any, args: Any) -> None:
        entered, outermost = ExitStack(), not self._running
        self._calls += 1
        if next(reversed(module._forward_hooks)) != self._last.id:  # the user's hooks come before
            module._forward_hooks.move_to_end(self._last.id)
        entered.enter_context(self._region.entered(outermost=outermost))
        is_own = outermost and not (in_transform() or self._stands_in() or in_backward())
        self._running.append(_Forward(entered, is_own, sys.exc_info()[1]))
        if is_own:
            with torch.inference_mode(False), torch.no_grad():  # what waits is for training
                self._on.forward_begins()

    def _after_forward(self, module: Any, args: Any, output: Any) -> None:
        if not self._running:  # the forward raised, and was abandoned before this hook
            return
        forward = self._running.pop()
        forward.entered.close()
        if not forward.is_own:
            return
        trains = torch.is_grad_enabled() and self._watch(tensors_in(output, {}))
        error = sys.exc_info()[1]  # torch calls this hook while it handles what the forward raised
        raised = error if output is None and error is not forward.handled else None
        for_training(self._on.forward_ends, trains=trains, raised=raised)

    def _after_hooks(self, *_: Any) -> None:
        self._calls = max(self._calls - 1, 0)

    def _watch(self, outputs: Iterable[Tensor]) -> bool:
        """Watch the outputs of a root forward: True if a backward can come from them."""
        learns = any(p.requires_grad for p in self._learning)  # not while all of it is frozen
        watched = [x for x in outputs if x.grad_fn is not None] if learns else []
        self.backwards.watch(watched)
        return bool(watched)


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
