"""Track which module each op belongs to, in the forward and in its backward."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook


class Modules:
    """Stacks of modules in their forward, by thread, and the module of each autograd node.

    autograd numbers its nodes as they are created, before the op of the forward runs; in a
    backward the running node has that number.
    """

    def __init__(self) -> None:
        self._inside: dict[int, list[str]] = defaultdict(list)
        self._names: dict[int, str] = {}
        self._roots: list[nn.Module] = []  # references, so that their ids are not used again
        self._of_node: dict[int, str] = {}

    def enter(self, module: nn.Module) -> None:
        """Push a module that begins its forward. Names are paths in the outermost one."""
        inside = self._inside[get_ident()]
        if not inside and id(module) not in self._names:  # False in a recomputation of a checkpoint
            self._roots.append(module)
            self._names.update((id(part), name) for name, part in module.named_modules())
        inside.append(self._names.get(id(module)) or type(module).__name__)

    def leave(self) -> None:
        """Pop a module that ends its forward."""
        inside = self._inside[get_ident()]
        if inside:
            inside.pop()

    def here(self) -> str:
        """Return the name of the module of the next op; "" outside of all modules."""
        inside = self._inside[get_ident()]
        node: Any = torch._C._current_autograd_node()
        if not inside and node is not None:
            return self._of_node.get(node._sequence_nr(), "")
        name = inside[-1] if inside else ""
        self._of_node.setdefault(torch.autograd._get_sequence_nr() - 1, name)
        return name


@contextmanager
def followed_modules() -> Iterator[Modules]:
    """Yield `Modules` that track the module calls in this block."""
    modules = Modules()
    with ExitStack() as stack:
        before = register_module_forward_pre_hook(lambda module, _: modules.enter(module))
        stack.callback(before.remove)
        after = register_module_forward_hook(lambda *_: modules.leave(), always_call=True)
        stack.callback(after.remove)
        yield modules
