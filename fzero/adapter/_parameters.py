"""A module's parameters, moved onto flats or shards, and moved back.

stages 0 to 2   flat [W l] for each group; every parameter is a view of it
stage 3         rows [l] for each group; every parameter is a placeholder
one rank        the parameters stay what they are
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fzero.adapter._plan import Plan
from fzero.collectives import broadcast_from_first
from fzero.errors import LayoutError, explain
from fzero.packing import pack, unpack
from fzero.partition import shard_rows
from fzero.placeholder import LazyParam, in_place_of
from fzero.state import Placement


class Parameters:
    """Where the values of a module's parameters are: `flats` (stages 0 to 2), `rows` (all)."""

    def __init__(self, module: nn.Module, plan: Plan) -> None:
        self.module, self.plan = module, plan
        self.paths = _paths(module, plan)
        self.flats: list[Tensor] = []
        self.rows: list[Tensor] = []
        self._memory: dict[int, list[tuple[Tensor, Tensor, int, str]]] = {}

    @torch.no_grad()
    def take_over(self) -> None:
        """Give every rank the values of rank 0, and leave it only its part of them."""
        plan, axis = self.plan, self.plan.axis
        for buffer in self.module.buffers():
            buffer.copy_(broadcast_from_first([buffer], axis)[0])
        for index in range(len(plan.layout.groups)):
            if axis.size == 1:
                self.rows.append(self.first_of(index, 0).detach())
                continue
            flat = self._whole(index)
            if plan.shards_params:
                self.rows.append(shard_rows(flat, axis.size, axis.rank).clone())
                self._let_go(index)
                continue
            self.flats.append(flat)
            self._show(index, unpack(plan.layout, index, flat))
            whole = plan.placement is Placement.REPLICATED
            self.rows.append(flat if whole else shard_rows(flat, axis.size, axis.rank))
        self._memory = {} if plan.shards_params else self._memory_of_all()

    def follow(self, indices: Iterable[int]) -> None:
        """Take over what was assigned to `p.data` of these groups: the values, not the memory.

        Raises `LayoutError` for another dtype, shape or device; the parameter is then as before.
        """
        for index in indices:
            for p, view, pointer, path in self._memory.get(index, ()):
                if p.data_ptr() != pointer:
                    _take_values(p, view, path)

    def follow_all(self) -> None:
        """`follow` for every group."""
        self.follow(self._memory)

    def _memory_of_all(self) -> dict[int, list[tuple[Tensor, Tensor, int, str]]]:
        """For each group its parameters, where their values are, and their first paths."""
        return {
            index: [
                (p, p.data, p.data_ptr(), self._paths_at(index, position)[0])
                for position in range(len(group.leaves))
                for p in self.objects(index, position)
                if p.numel()
            ]
            for index, group in enumerate(self.plan.layout.groups)
        }

    def first_of(self, index: int, position: int) -> Tensor:
        """The module's parameter at `position` of group `index`, as it is now."""
        return self.at(self._paths_at(index, position)[0])

    def objects(self, index: int, position: int) -> list[Tensor]:
        """Every parameter object that is this leaf: one, or several on the same memory."""
        found = [self.at(path) for path in self._paths_at(index, position)]
        return list({id(p): p for p in found}.values())

    def place(self, index: int, values: Sequence[Tensor]) -> None:
        """Put `values` (placeholders, or whole tensors) where the parameters of a group are."""
        for position, value in enumerate(values):
            made: dict[int, nn.Parameter] = {}
            for path in self._paths_at(index, position):
                old = self.at(path)
                if id(old) not in made:
                    made[id(old)] = in_place_of(old, value)
                self._assign(path, made[id(old)])

    @torch.no_grad()
    def write(self, index: int, position: int, value: Tensor, rows: Tensor) -> None:
        """Make `value` one parameter of a group, of which this rank's new rows are `rows`."""
        if self.plan.shards_params:
            self.rows[index].copy_(rows)
        else:
            self.first_of(index, position).copy_(value)

    @torch.no_grad()
    def give_back(self, wholes: Sequence[Sequence[Tensor]]) -> None:
        """Make every parameter an ordinary one with memory of its own; `wholes` by group."""
        with free_to_swap(self.module):
            for index, values in enumerate(wholes):
                copies = [value.clone() for value in values]
                if self.plan.shards_params:
                    self.place(index, copies)
                elif self.plan.axis.size > 1:
                    self._show(index, copies)

    def _whole(self, index: int) -> Tensor:
        """The flat [W l] of a group, with rank 0's values."""
        layout = self.plan.layout
        group = layout.groups[index]
        values = [self.first_of(index, i).detach() for i in range(len(group.leaves))]
        values = [v.full() if isinstance(v, LazyParam) else v for v in values]
        flat = pack(layout, index, values).detach()
        return broadcast_from_first([flat], self.plan.axis)[0]

    def _let_go(self, index: int) -> None:
        """Free the memory of a group's parameters: placeholders take their places soon.

        Whoever holds one that cannot be swapped then reads NaN, and notices.
        """
        for position in range(len(self.plan.layout.groups[index].leaves)):
            for path in self._paths_at(index, position):
                p = self.at(path)
                if not isinstance(p, LazyParam):
                    nothing = float("nan") if p.is_floating_point() else 0
                    p.data = p.data.new_full((), nothing).expand(p.shape)

    def _show(self, index: int, views: Sequence[Tensor]) -> None:
        """Let a group's parameters have the values (and the memory) of `views`."""
        if isinstance(self.first_of(index, 0), LazyParam):  # made under sharded_init
            self.place(index, views)
            return
        for position, view in enumerate(views):
            for path in self._paths_at(index, position):
                self.at(path).data = view

    def _assign(self, path: str, p: nn.Parameter) -> None:
        owner, _, name = path.rpartition(".")
        module = self.module.get_submodule(owner)
        if getattr(module, name) is not p:
            setattr(module, name, p)

    def at(self, path: str) -> Tensor:
        """The module's parameter at `path`, as it is now."""
        owner, _, name = path.rpartition(".")
        return getattr(self.module.get_submodule(owner), name)

    def _paths_at(self, index: int, position: int) -> list[str]:
        return self.paths[self.plan.layout.groups[index].leaves[position]]


def named_parameters(module: nn.Module) -> Mapping[str, Tensor]:
    """Every parameter under every name: tied ones several times."""
    return dict(module.named_parameters(remove_duplicate=False))


@contextmanager
def free_to_swap(module: nn.Module) -> Iterator[None]:
    """Recurrent modules drop their weak references to weights, with which none can be swapped."""
    recurrent: list[Any] = [part for part in module.modules() if isinstance(part, nn.RNNBase)]
    for part in recurrent:
        part._flat_weight_refs = []
    try:
        yield
    finally:
        for part in recurrent:
            weights = part._flat_weights
            part._flat_weight_refs = [None if w is None else weakref.ref(w) for w in weights]


@torch.no_grad()
def _take_values(p: Tensor, view: Tensor, path: str) -> None:
    given, p.data = p.data, view
    if given.shape != view.shape or given.dtype != view.dtype or given.device != view.device:
        raise LayoutError(
            explain(
                f"{path} was given data of {given.dtype}, shape {tuple(given.shape)} on "
                f"{given.device}; the engine has {view.dtype}, {tuple(view.shape)}, {view.device}.",
                cause="module.half(), .float() or .to(...) after Engine(...). The parameter is as "
                "before.",
                fix="convert and move the module first, then make the engine.",
            )
        )
    view.copy_(given)


def _paths(module: nn.Module, plan: Plan) -> dict[int, list[str]]:
    """For each leaf of the layout, all paths that it has in the module."""
    found: dict[int, list[str]] = {}
    for path, leaf in zip(named_parameters(module), plan.layout.slots, strict=True):
        found.setdefault(leaf, []).append(path)
    return found
