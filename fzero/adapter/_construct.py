"""Models that no rank holds whole: sharded as they are made, and gathered for a while."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from fzero._memory import require_own_memory
from fzero.adapter._driver import OWNERS
from fzero.adapter._module import in_place_of
from fzero.collectives import broadcast, channel_of
from fzero.errors import LayoutError, PhaseError
from fzero.gather import Gatherer
from fzero.group_shard import GroupShard
from fzero.mesh import Axis, MeshLike, Runtime, axis_of
from fzero.packing import pack
from fzero.partition import plan_layout, shard_of
from fzero.placeholder import LazyParam, placeholders


class _Unowned(Gatherer):
    """Parameters between their construction and their engine: a unit each, always writable.

    A write (an initializer) gathers the parameter, runs on the full values, and leaves each rank
    its shard of what rank 0 has: the same model that rank 0 alone would have made.
    """

    def __init__(self, axis: Axis) -> None:
        super().__init__([], [])
        self.axis = axis
        self.made: dict[int, nn.Module] = {}  # modules with parameters of the block
        self._written: set[int] = set()  # groups that are gathered for one write

    def take(self, module: nn.Module) -> None:
        """Shard the parameters of a module, and of those in it, that are whole."""
        if any(_is_whole(p) for p in module.parameters()):
            require_own_memory(module)
        for part in module.modules():
            for name, p in list(part._parameters.items()):
                if p is not None and _is_whole(p):
                    setattr(part, name, self._sharded(name, p))

    @torch.no_grad()
    def _sharded(self, name: str, p: Any) -> nn.Parameter:
        shards = self.axis.shards
        layout = plan_layout(OrderedDict({name: p}), ranks=shards.size, bucket_bytes=2**62)
        flat = broadcast([pack(layout, 0, [p.detach()])], self.axis, 0)[0]
        own = shard_of(flat, shards.size, shards.rank).clone()
        self.groups.append(GroupShard(layout, 0, own, own.device))
        # Whoever holds `p` already (`init(p)` follows) then holds the placeholder.
        return in_place_of(p, placeholders(self, self.add(layout, self.axis))[0])

    def leaf(self, group: int, position: int) -> Tensor:
        """Return the full values; they go at once unless they are held."""
        self.fetch(group)
        values = self.held[group].leaves[0][position]
        self.free(group)
        return values

    def begin_write(self, placeholder: LazyParam, func: Any) -> None:
        """Gather the parameter for one write."""
        if not self.writable[placeholder.where[0]]:
            self._written.add(placeholder.where[0])
            self.hold([placeholder.where[0]], 0)

    def end_write(self, placeholder: LazyParam) -> None:
        """Keep this rank's shard of what was written."""
        if placeholder.where[0] in self._written:
            self._written.remove(placeholder.where[0])
            self.let_go([placeholder.where[0]], 0)


def _is_whole(p: Tensor) -> bool:
    """Whether a parameter has all of its values on this rank."""
    return not (isinstance(p, LazyParam | nn.UninitializedParameter) or p.is_meta)


@contextmanager
def sharded_init(mesh: MeshLike = None) -> Iterator[None]:
    """Modules made inside keep only this rank's shard of each parameter.

    A module is sharded when it becomes a part of another one, or at the end of the block. Until
    then its parameters are whole: those of a list of layers that is given to nn.Sequential later,
    for example. So a model may be larger than a rank's memory. The values are those of rank 0.
    Initializers may write to the placeholders, inside and after the block, until an `Engine` takes
    them over. Every rank must run them.
    Parameters that are on the meta device when the block ends are not sharded: call to_empty()
    inside.
    Every rank must make the same modules in the same order. On one rank nothing is different.
    `mesh` is that of the engine: of two dims, the ranks of each replica share a parameter.

    Source: Rajbhandari et al., "ZeRO-Infinity", arXiv 2104.07857, section 7.2.

    Example:
        >>> import torch
        >>> from fzero.adapter import Engine, sharded_init
        >>> with sharded_init():
        ...     model = torch.nn.Linear(3, 2)
        >>> engine = Engine(model, torch.optim.AdamW, stage=3)
    """
    axis = axis_of(mesh)
    if axis.shards.runtime is Runtime.LOCAL:
        yield
        return
    block = _Unowned(axis)
    with _watched(block):
        yield
    for module in list(block.made.values()):
        block.take(module)


_HERE: ContextVar[_Unowned | None] = ContextVar("sharded_init", default=None)
_BLOCKS: list[_Unowned] = []  # of all virtual ranks
_HANDLES: list[Any] = []


@contextmanager
def _watched(block: _Unowned) -> Iterator[None]:
    """Tell the block of each module and parameter that is registered on this rank.

    torch has these hooks for the process. A virtual rank pauses inside of one, so they are there
    from the first block that begins to the last one that ends, and act for the rank that runs.
    """
    if not _BLOCKS:
        _HANDLES.append(register_module_parameter_registration_hook(_on_parameter))
        _HANDLES.append(register_module_module_registration_hook(_on_module))
    _BLOCKS.append(block)
    before = _HERE.set(block)
    try:
        yield
    finally:
        _HERE.reset(before)
        _BLOCKS.remove(block)
        while _HANDLES and not _BLOCKS:
            _HANDLES.pop().remove()


def _on_parameter(module: nn.Module, name: str, param: Any) -> None:
    block = _HERE.get()
    if block is not None:
        block.made[id(module)] = module


def _on_module(module: nn.Module, name: str, child: Any) -> None:
    block = _HERE.get()
    if block is not None and isinstance(child, nn.Module):
        block.take(child)


@contextmanager
def gathered(
    params: nn.Module | Tensor | Iterable[Tensor],
    *,
    modify: bool = False,
    from_rank: int = 0,
    mesh: MeshLike = None,
) -> Iterator[list[Tensor]]:
    """Full parameters for a while, at every stage: yields them, in the order given. A collective.

    Args:
        params: a module (all of its parameters), a parameter, or several.
        modify: they may be written, in the yielded tensors or through the module; when the block
            ends, the values of rank `from_rank` become those of all ranks, also if the block
            raises.
        from_rank: whose values count.
        mesh: whose ranks, for parameters that are whole (stages 0 to 2); default the world.

    Raises:
        PhaseError: at the end of the block, if a parameter was written without `modify`; for a
            block inside another one that has other values of `from_rank` for one unit (stage 3).
        MismatchError: on every rank, if some make another call instead.
        LayoutError: for what is no parameter, or a rank that is not there.

    Example:
        >>> import torch
        >>> from fzero.adapter import gathered
        >>> model = torch.nn.Linear(2, 1)
        >>> with gathered(model, modify=True) as (weight, bias):
        ...     _ = weight.fill_(1.0)
        >>> model.weight.data
        tensor([[1., 1.]])
    """
    wanted = _listed(params)
    axis = axis_of(mesh)
    if not 0 <= from_rank < axis.size:
        raise LayoutError(
            f"gathered: from_rank={from_rank}, and there are {axis.size} ranks.",
            cause="a global rank, or one of another mesh.",
            fix=f"give a rank of the mesh, in range({axis.size}).",
        )
    whole = [p for p in wanted if not isinstance(p, LazyParam)]
    channel = channel_of(axis) if modify and whole else None
    if channel is not None:
        channel.call(f"gathered(modify=True, from_rank={from_rank}) of {len(whole)} parameters")
    source = from_rank if modify else None
    held = _hold([p for p in wanted if isinstance(p, LazyParam)], source)
    full = [p.full() if isinstance(p, LazyParam) else p.detach() for p in wanted]
    before = [x._version for x in full]
    try:
        yield full
    finally:
        written = [i for i, x in enumerate(full) if x._version != before[i]]
        for owner, units in held:
            owner.let_go(units, source)
        if modify and whole:
            with torch.no_grad():  # `copy_` tells the engine that they were written
                for p, value in zip(whole, broadcast(whole, axis, from_rank), strict=True):
                    p.copy_(value)
            for p in whole:
                if (driver := OWNERS.get(id(p))) is not None:
                    driver.writes.agree([p])
    if written and not modify:
        raise PhaseError(
            f"gathered: parameter {written[0]} of {len(full)} was written, without modify.",
            cause="an initializer or a load inside `with gathered(params):`.",
            fix="write `with gathered(params, modify=True):`; what was written here is lost at "
            "stage 3, and is on this rank alone below.",
        )


def _hold(lazy: Sequence[LazyParam], source: int | None) -> list[tuple[Any, Sequence[int]]]:
    """Gather the units of placeholders; return those that are held, by their gatherers."""
    units: dict[int, tuple[Any, list[int]]] = {}
    for p in lazy:
        owner, ids = units.setdefault(id(p.gatherer), (p.gatherer, []))
        unit = owner.unit_of(p.where[0])
        if unit not in ids:
            ids.append(unit)
    return [(owner, owner.hold(ids, source)) for owner, ids in units.values()]


def _listed(params: nn.Module | Tensor | Iterable[Tensor]) -> list[Tensor]:
    if isinstance(params, nn.Module):
        return list(params.parameters())
    several = isinstance(params, Iterable) and not isinstance(params, Tensor)
    listed: list[Any] = list(params) if several else [params]
    for p in listed:
        if not isinstance(p, Tensor):
            raise LayoutError(
                f"gathered: expected parameters, got a {type(p).__name__}.",
                cause="names, named_parameters(), which has pairs, or an engine.",
                fix="pass a module (engine.module), a parameter, or a list of parameters.",
            )
    return listed
