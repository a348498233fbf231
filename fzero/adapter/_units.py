"""Which parameters stage 3 gathers together, where the user names leaf modules."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from torch import nn

from fzero.partition import unit_of
from fzero.state.leaf_modules import LeafSpec, ModuleInfo, class_name, find_leaf_modules


def unit_of_leaves(module: nn.Module, spec: LeafSpec | None) -> tuple[Callable[[str], str], str]:
    """Return path -> unit, where a leaf module is one unit; and what to warn about."""
    if spec is None:
        return unit_of, ""
    found = find_leaf_modules(_tree(module), spec)

    def unit(path: str) -> str:
        inside = [leaf for leaf in found.leaves if path.startswith(leaf + ".") or not leaf]
        return inside[0] or "(root)" if inside else unit_of(path)

    return unit, "\n".join(found.warnings)


def _tree(module: nn.Module) -> list[ModuleInfo]:
    tree = []
    for name, part in module.named_modules():
        numel = sum(prod(p.shape) for p in part.parameters())
        below = sum(1 for _ in part.modules()) - 1
        classes = tuple(class_name(cls) for cls in type(part).__mro__)
        tree.append(ModuleInfo(name=name, classes=classes, numel=numel, descendants=below))
    return tree
