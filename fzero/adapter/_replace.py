"""Put one parameter in the place of another, also where other code holds a reference to it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fzero.placeholder import LazyParam


def in_place_of(old: Tensor, value: Tensor) -> nn.Parameter:
    """Return a parameter with this value: the object `old` itself, if torch can swap it.

    torch cannot swap a tensor that has weak references, as recurrent modules hold them. A new
    parameter is returned then, so the caller assigns the result in any case. Hooks, attributes and
    the gradient of `old` move to it.
    """
    new = nn.Parameter(value, requires_grad=old.requires_grad)
    taken = _Belongings(old)
    try:
        torch.utils.swap_tensors(old, new)
    except RuntimeError:
        return taken.given_to(new)
    return taken.given_to(old)  # type: ignore[arg-type]


class _Belongings:
    """Hooks, attributes and the gradient of a parameter: taken off it, and put on another one.

    torch.utils.swap_tensors would swap the dict of a hook, and leave what calls it behind.
    """

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
