"""How leaves are called outside of a state: in checkpoints, messages and files."""

from __future__ import annotations

import optree
import torch

from fzero.machine.partition import named_leaves
from fzero.state import Layout


def leaf_names(layout: Layout) -> list[str]:
    """Return the path of every leaf; one that two leaves share is numbered from the second on.

    Example:
        >>> import torch
        >>> from fzero.machine.partition import plan_layout
        >>> leaf_names(plan_layout({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}, ranks=1))
        ['a.b', 'a.b#2']
    """
    names: dict[str, None] = {}
    for leaf in layout.leaves:
        name, number = leaf.path, 1
        while name in names:
            number += 1
            name = f"{leaf.path}#{number}"
        names[name] = None
    return list(names)


def paths_of(layout: Layout) -> list[list[str]]:
    """Return the paths of every leaf: its name in a checkpoint first; several of a tied one."""
    found: list[list[str]] = [[name] for name in leaf_names(layout)]
    marks = [torch.empty(0, device="meta") for _ in layout.slots]
    paths = named_leaves(optree.tree_unflatten(layout.treespec, marks))[0]
    for path, leaf in zip(paths, layout.slots, strict=True):
        found[leaf].append(path)
    return found
