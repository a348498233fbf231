"""What an engine manages: groups of a module's parameters, and who steps each. Data, no tensors."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from fzero.errors import LayoutError, explain
from fzero.mesh import Axis
from fzero.partition import plan_layout, unit_of
from fzero.state.layout import Layout
from fzero.state.leaf_modules import LeafSpec, ModuleInfo, class_name, find_leaf_modules
from fzero.state.setup import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Where each parameter of a module is, over the ranks of an axis.

    `steppers[i]` is the optimizer's parameter group that steps layout group i, -1 for none.
    `param_groups` are the paths in each of the optimizer's groups, as the user listed them.
    """

    stage: int
    axis: Axis
    layout: Layout
    steppers: tuple[int, ...]
    param_groups: tuple[tuple[str, ...], ...]
    device: torch.device

    @property
    def buckets(self) -> tuple[int, ...]:
        """The layout groups that get gradients, in launch order: the last layers come first."""
        return self.layout.trainable[::-1]

    @property
    def placement(self) -> Placement:
        """Where reduced gradients are: a reduce-scatter is all that stages 1 to 3 need."""
        whole = self.stage == 0 or self.axis.size == 1
        return Placement.REPLICATED if whole else Placement.SHARDED

    @property
    def shards_params(self) -> bool:
        """Whether the module's parameters are placeholders (stage 3, several ranks)."""
        return self.stage == 3 and self.axis.size > 1

    def shape_of_rank(self, index: int) -> tuple[int, ...]:
        """The shape of this rank's part of group `index`: flat, or on one rank its leaf's own."""
        layout = self.layout
        if layout.ranks == 1:
            return layout.leaves[layout.groups[index].leaves[0]].shape
        sharded = self.placement is Placement.SHARDED
        return (layout.groups[index].shard_numel if sharded else layout.full_numel(index),)

    def paths_of(self, index: int) -> list[str]:
        """The parameters in group `index`."""
        return [self.layout.leaves[i].path for i in self.layout.groups[index].leaves]

    def find(self, path: str) -> tuple[int, int]:
        """The group of the parameter at `path`, and its position in it."""
        for index in range(len(self.layout.groups)):
            if path in (paths := self.paths_of(index)):
                return index, paths.index(path)
        raise LayoutError(
            explain(
                f"there is no parameter {path!r}.",
                cause="a misspelt path, or the second name of a tied parameter.",
                fix=f"use one of {[leaf.path for leaf in self.layout.leaves][:6]} ...",
            )
        )


def make_plan(
    params: Mapping[str, Tensor],
    param_groups: Sequence[Sequence[Tensor]],
    *,
    stage: int,
    axis: Axis,
    bucket_bytes: int,
    unit: Callable[[str], str] = unit_of,
    small_numel: int = 0,
) -> Plan:
    """Group `params` by what they share: the optimizer's group, dtype, bucket or unit.

    At stage 3 parameters of at most `small_numel` elements are in groups of their own, for these
    may persist.

    Raises `LayoutError` for parameters on several devices, for one that the optimizer has twice
    or that is not the module's.
    """
    device = _one_device(params)
    stepper = _steppers(params, param_groups)

    def kind(path: str) -> tuple[int, bool]:
        small = stage == 3 and params[path].numel() <= small_numel
        return stepper.get(id(params[path]), -1), small

    layout = plan_layout(
        OrderedDict(params),
        ranks=axis.size,
        bucket_bytes=None if stage == 3 else bucket_bytes,
        unit=unit,
        kind=kind,
    )
    first = [layout.leaves[group.leaves[0]].path for group in layout.groups]
    steppers = tuple(
        stepper.get(id(params[path]), -1) if group.trainable else -1
        for path, group in zip(first, layout.groups, strict=True)
    )
    paths = _first_paths(params)
    return Plan(
        stage=stage,
        axis=axis,
        layout=layout,
        steppers=steppers,
        param_groups=tuple(tuple(paths[id(p)] for p in group) for group in param_groups),
        device=device,
    )


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


def _one_device(params: Mapping[str, Tensor]) -> torch.device:
    by_device = {p.device: path for path, p in params.items()}
    if len(by_device) > 1 or any(device.type == "meta" for device in by_device):
        seen = ", ".join(f"{path} on {device}" for device, path in by_device.items())
        raise LayoutError(
            explain(
                f"the module's parameters are spread: {seen}.",
                cause="a part of the module was not moved, or was built on the meta device.",
                fix="call module.to(device) before making the engine; to build a model that no "
                "rank can hold, use fzero.adapter.sharded_init.",
            )
        )
    return next(iter(by_device), torch.device("cpu"))


def _first_paths(params: Mapping[str, Tensor]) -> dict[int, str]:
    """For each parameter, by id, the first of its paths: the one that the layout has."""
    paths: dict[int, str] = {}
    for path, p in params.items():
        paths.setdefault(id(p), path)
    return paths


def _steppers(
    params: Mapping[str, Tensor], param_groups: Sequence[Sequence[Tensor]]
) -> dict[int, int]:
    paths = _first_paths(params)
    found: dict[int, int] = {}
    for number, group in enumerate(param_groups):
        for p in group:
            if id(p) not in paths:
                raise LayoutError(
                    explain(
                        f"the optimizer's group {number} has a parameter of shape "
                        f"{tuple(p.shape)} that is not the module's.",
                        cause="the optimizer was made for another model, or before the module "
                        "was converted or wrapped.",
                        fix="make the optimizer from module.parameters() right before the engine.",
                    )
                )
            if id(p) in found:
                raise LayoutError(
                    explain(
                        f"{paths[id(p)]} is in the optimizer's groups {found[id(p)]} and {number}.",
                        cause="tied weights listed twice, or overlapping group filters.",
                        fix="list every parameter once.",
                    )
                )
            found[id(p)] = number
    return found
