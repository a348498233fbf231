"""One parameter in the place of another, for everybody who holds that one."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fzero.placeholder import LazyParam


def in_place_of(old: Tensor, value: Tensor) -> nn.Parameter:
    """Return a parameter of `value` that is `old` for everybody who holds it, if it can be.

    It cannot where somebody has a weak reference to `old`, as recurrent modules do: assign what
    is returned, in any case. Hooks, attributes and a gradient that `old` has go over to it.
    """
    new = nn.Parameter(value, requires_grad=old.requires_grad)
    taken = _Belongings(old)
    try:
        torch.utils.swap_tensors(old, new)
    except RuntimeError:
        return taken.given_to(new)
    return taken.given_to(old)  # type: ignore[arg-type]


class _Belongings:
    """What users put on a parameter. torch would swap half of a hook: its dict, not its caller."""

    def __init__(self, p: Tensor) -> None:
        own = (*LazyParam.__annotations__, "_is_param")
        self.attributes = {name: x for name, x in vars(p).items() if name not in own}
        self.gradient = p.grad
        self.hooks = p._backward_hooks, p._post_accumulate_grad_hooks
        p._backward_hooks = p.grad = None
        p._post_accumulate_grad_hooks = None  # type: ignore[assignment]

    def given_to(self, p: nn.Parameter) -> nn.Parameter:
        """Put them on `p`; the dicts stay the same ones, so handles of hooks go on working."""
        vars(p).update(self.attributes)
        p.grad = self.gradient
        p._backward_hooks, p._post_accumulate_grad_hooks = self.hooks
        return p
