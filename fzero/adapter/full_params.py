"""`gathered`: full parameters for a while, to read or to write, at every stage."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from fzero.adapter.driver import OWNERS
from fzero.collectives import Performer, broadcast, performer_of
from fzero.errors import AxisError, LayoutError, PhaseError
from fzero.machine.packing import checksums
from fzero.machine.placeholder import LazyParam
from fzero.ranks.mesh import Axis, MeshLike, axis_of


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
        modify: they may be written, in the yielded tensors or through the module; the block runs
            under torch.no_grad(). When it ends, the values of rank `from_rank` become those of all
            ranks, also if it raises.
        from_rank: whose values count.
        mesh: whose ranks, for parameters that are whole (stages 0 to 2); default the world.

    Raises:
        PhaseError: at the end of the block, on every rank, if a parameter was written without
            `modify` on any of them (in a forward or backward on this one; the others hear of it as
            of any error there); for a block inside another one that has other values of `from_rank`
            for one unit (stage 3).
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
    with _written(wanted, axis, from_rank) if modify else _read(wanted, axis) as full:
        yield full


@contextmanager
def _written(wanted: Sequence[Tensor], axis: Axis, source: int) -> Iterator[list[Tensor]]:
    """Full parameters that may be written; the values of rank `source` become those of all."""
    whole = [p for p in wanted if not isinstance(p, LazyParam)]
    performer = performer_of(axis) if whole else None
    if performer is not None:
        performer.call(f"gathered(modify=True, from_rank={source}) of {len(whole)} parameters")
    held = _hold(wanted, source)
    try:
        with torch.no_grad():  # else torch refuses a write to a parameter that learns
            # What is written into an encoded one must be encoded: its placeholder sees to that.
            yield [
                p.full() if isinstance(p, LazyParam) and p.codec is None else p.detach()
                for p in wanted
            ]
    finally:
        for owner, units in held:
            owner.let_go(units, source)
        if whole:
            values = broadcast([p.detach() for p in whole], axis, source)
            found = (OWNERS.get(id(p)) for p in whole)
            drivers = {id(one): one for one in found if one is not None}.values()
            for driver in drivers:
                driver.take_back()
            with torch.no_grad():  # `copy_` tells the engine that they were written
                for p, value in zip(whole, values, strict=True):
                    p.copy_(value)
            for driver in drivers:
                driver.writes.agree(whole)


@contextmanager
def _read(wanted: Sequence[Tensor], axis: Axis) -> Iterator[list[Tensor]]:
    """Full parameters that nobody may write: at the end all ranks raise if one of them did."""
    held = _hold(wanted, None)
    readers: list[Any] = [p.reader for p in wanted if isinstance(p, LazyParam)]
    owners = list({id(one): one for one in readers}.values())
    known = (OWNERS.get(id(p)) for p in wanted)
    drivers = list({id(one): one for one in known if one is not None}.values())
    inside = any(driver.running.phase.runs for driver in drivers)  # of a forward or a backward
    full = [p.full() if isinstance(p, LazyParam) else p.detach() for p in wanted]
    before, refused = _seen(full, sums=not inside), sum(owner.refused for owner in owners)
    error: BaseException | None = None
    try:
        yield full
    except BaseException as raised:
        error = raised
        raise
    finally:
        wrote = _seen(full, sums=not inside) != before
        if error is not None:  # of a write that a placeholder has refused; not one that was caught
            wrote = wrote or sum(owner.refused for owner in owners) != refused
        for owner, units in held:
            owner.let_go(units, None)
        ranks = [0] if wrote else []
        if not inside and not isinstance(error, AxisError):
            with suppress(*[AxisError] if error is not None else []):
                ranks = _ranks_that_wrote(wanted, axis, wrote)
        kept = any(owner.writable[unit] for owner, units in held for unit in units)
        if ranks and not (inside or kept):  # what was gathered is dropped, on every rank
            for owner in owners:
                owner.drop()
            for driver in drivers:
                driver.running.changed()
    if ranks:
        raise PhaseError(
            f"gathered, of {len(full)} parameters: one was written without modify, on ranks "
            f"{ranks}.",
            cause="an initializer or a load inside `with gathered(params):`.",
            fix="write `with gathered(params, modify=True):`. What was written here is lost where "
            "parameters are sharded; elsewhere it is in the parameters of those ranks, and such a "
            "block gives them rank 0's again.",
        )


def _ranks_that_wrote(wanted: Sequence[Tensor], axis: Axis, wrote: bool) -> list[int]:
    """Return which ranks wrote, the same on every one of them. A collective, in one order."""
    performers: dict[int, Performer] = {}
    for p in wanted:
        driver = OWNERS.get(id(p))
        if driver is not None:
            performer = driver.running.performer
        else:  # between `sharded_init` and an engine, or before there is any
            own = getattr(p.reader, "axis", axis) if isinstance(p, LazyParam) else axis
            performer = performer_of(own)
        if performer is not None:
            performers.setdefault(id(performer), performer)
    found = set[int]()
    for performer in performers.values():
        mine = 1 + performer.axis.rank if wrote else 0
        found |= {rank - 1 for rank in performer.call("the end of gathered(...)", mine) if rank}
    return sorted(found) if performers else [0] * wrote


def _seen(full: Sequence[Tensor], *, sums: bool) -> list[int]:
    """What changes if one of these tensors is written.

    sums: also through `.data` or NumPy, which torch does not count.
    """
    counts = [0 if x.is_inference() else x._version for x in full]
    bits = checksums([x for x in full if not x.is_meta]) if sums else []
    return [*counts, *bits]


def _hold(wanted: Sequence[Tensor], source: int | None) -> list[tuple[Any, Sequence[int]]]:
    """Gather the units of placeholders; return those that are held, by their gatherers."""
    units: dict[int, tuple[Any, list[int]]] = {}
    for p in (p for p in wanted if isinstance(p, LazyParam)):
        owner, ids = units.setdefault(id(p.reader), (p.reader, []))
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
