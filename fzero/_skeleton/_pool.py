"""Skeletons: private copies of a module that `apply` binds tensors to, runs and wipes.

The user's module is never run and never written to. A skeleton has placeholders without memory for
parameters, and serves one call at a time; a `Pool` lends skeletons to threads.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple, final

from torch import Tensor, nn

from fzero._skeleton._changes import changes_of, rewritten, stamps_of, update_error
from fzero._skeleton._copy import containers_of, copy_of, fresh, in_new_thread
from fzero._skeleton._part import Part, mode_of, parts_of


class _Skeleton(NamedTuple):
    """A runnable copy of the module: its submodules, and the `vars` of each before any call.

    `references` counts those to each submodule then, and only compares.
    """

    modules: tuple[nn.Module, ...]
    clean: tuple[dict[str, Any], ...]
    containers: tuple[tuple[str, ...], ...]
    references: tuple[int, ...]

    def in_use(self) -> bool:
        """Whether somebody will run it again: a checkpoint does, in backward.

        It then stays bound, for as long as the graph holds what the checkpoint was given.
        """
        now = _counts(self.modules)
        return any(n > before for n, before in zip(now, self.references, strict=True))

    def bind(
        self, parts: list[Part], params: Mapping[str, Tensor], buffers: Mapping[str, Tensor]
    ) -> None:
        """Put tensors in place of the placeholders: dict writes only, no tensor is touched.

        What `torch.func.functional_call` does, without its search for names and ties in each call.
        """
        for part, module, clean in zip(parts, self.modules, self.clean, strict=True):
            weights = {key: params[path] for key, path in part.parameters.items()}
            values = {key: buffers[path] for key, path in part.buffers.items() if path in buffers}
            vars(module)["_parameters"] = clean["_parameters"] | weights
            vars(module)["_buffers"] = clean["_buffers"] | values

    def train(self, modes: list[bool]) -> None:
        """Set what `.training` is of each."""
        for module, mode in zip(self.modules, modes, strict=True):
            vars(module)["training"] = mode

    def changes(self, parts: list[Part], before: list[Any]) -> dict[str, Any]:
        """Give the buffers that are not as stamped `before`, by name."""
        changed: dict[str, Any] = {}
        for part, module, stamps in zip(parts, self.modules, before, strict=True):
            changed.update(changes_of(part, module, stamps))
        return changed

    def wipe(self) -> None:
        """Forget all that a call bound or its forward stored.

        It would outlive the call: gathered parameters (an RNN keeps a list of its weights),
        activations, tensors of a `torch.func` level that has ended.
        """
        for module, clean, names in zip(self.modules, self.clean, self.containers, strict=True):
            vars(module).clear()
            vars(module).update(clean)
            for name in names:  # what is in `clean` is never handed out
                vars(module)[name] = fresh(clean[name])


@final
class Pool:
    """Lends skeletons, so that `apply` may be entered while another call of it still runs.

    A cache only: all skeletons behave alike, so which of them serves a call cannot be seen.

    Args:
        module: the user's module.
        stateful: each call brings the buffers; otherwise they are constants, cloned here.
    """

    def __init__(self, module: nn.Module, *, stateful: bool) -> None:
        self._parts = parts_of(module)
        self._modes = [part.training for part in module.modules()]
        self._stateful = stateful
        self._refuse_tracking(self._modes)
        self._template = copy_of(module, stateful=stateful)
        self._kept: set[tuple[bool, ...]] = set()  # modes whose first call kept the constants
        self._lock = threading.Lock()
        self._free = [self._make()]

    def call(
        self, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], args: Any, kwargs: Any
    ) -> tuple[Any, dict[str, Any]]:
        """Run a skeleton; its output, and the buffers that its forward replaced or changed."""
        modes = self._follow()
        self._refuse_tracking(modes)
        with self._lock:
            skeleton = self._free.pop() if self._free else None
        skeleton = skeleton or self._make()
        skeleton.bind(self._parts, params, buffers)
        skeleton.train(modes)
        before = [stamps_of(module) for module in skeleton.modules]
        # A skeleton whose forward raises is dropped, whatever it was in the middle of.
        out = skeleton.modules[0](*args, **kwargs)
        changed = skeleton.changes(self._parts, before)
        if not self._stateful and tuple(modes) not in self._kept:
            changed.update(in_new_thread(rewritten, self._parts, skeleton.clean, self._template))
        if skeleton.in_use():
            return out, changed
        skeleton.wipe()
        # One with a changed constant too: the next has it from the template, which never runs.
        if self._stateful or not changed:
            with self._lock:
                self._kept.add(tuple(modes))
                self._free.append(skeleton)
        return out, changed

    def _make(self) -> _Skeleton:
        root = copy_of(self._template, stateful=self._stateful)
        for module in root.modules():
            if isinstance(module, nn.RNNBase):
                # On CUDA it moves the weights it is given, the caller's, into one block in place.
                vars(module)["flatten_parameters"] = _leave_as_they_are
        modules = tuple(root.modules())
        containers = tuple(map(containers_of, modules))
        clean = tuple(
            vars(m) | {name: fresh(vars(m)[name]) for name in names}
            for m, names in zip(modules, containers, strict=True)
        )
        del root, module
        return _Skeleton(modules, clean, containers, _counts(modules))

    def _follow(self) -> list[bool]:
        """Read `.training` of the user's submodules; as last seen once the module is gone."""
        if self._parts[0].source() is not None:
            self._modes = [mode_of(part) for part in self._parts]
        return self._modes

    def _refuse_tracking(self, modes: list[bool]) -> None:
        pairs = zip(self._parts, modes, strict=True)
        tracking = [part.path for part, mode in pairs if part.tracks and mode]
        if tracking and not self._stateful:
            raise update_error("running statistics, being in train mode", tracking)


def _counts(modules: tuple[nn.Module, ...]) -> tuple[int, ...]:
    return tuple(map(sys.getrefcount, modules))


def _leave_as_they_are() -> None:
    """Stand in for `RNNBase.flatten_parameters`."""
