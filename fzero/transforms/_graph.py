"""Autograd's graph below a loss: whether a backward of it runs others, and which leaves it has."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction


def nodes_below(root: Any) -> Iterator[Any]:
    """Every node that `root` leads to, itself included, once each."""
    seen, stack = {root}, [root]
    while stack:
        node = stack.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)


def foreign_functions(loss: Tensor) -> bool:
    """Whether a `torch.autograd.Function` that is not fzero's own is in the graph of `loss`.

    Its backward may run one of its own over tensors that are no inputs of it, as that of
    `torch.utils.checkpoint(..., use_reentrant=True)` does: no edge leads to what it captured.
    """
    return any(
        isinstance(node, BackwardCFunction) and not _is_ours(type(node))
        for node in nodes_below(loss.grad_fn)
    )


@contextmanager
def gradients_kept(loss: Tensor, ours: Collection[Tensor]) -> Iterator[None]:
    """Give every leaf below `loss` but `ours` its `.grad` of before, at the end."""
    known = {id(x) for x in ours}
    found = [getattr(node, "variable", None) for node in nodes_below(loss.grad_fn)]
    leaves = [x for x in found if x is not None and id(x) not in known]
    before = [x.grad for x in leaves]
    try:
        for x in leaves:
            x.grad = None  # what is there would be added to in place
        yield
    finally:
        for x, gradient in zip(leaves, before, strict=True):
            x.grad = gradient


def _is_ours(node: type) -> bool:
    return getattr(node, "_forward_cls", node).__module__.startswith("fzero.")
