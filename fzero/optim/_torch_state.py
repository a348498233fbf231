"""`TorchState`: what a torch.optim optimizer keeps on flats, and of parameters with owners."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from fzero.errors import LayoutError
from fzero.machine.owners import Owners
from fzero.machine.partition import identity
from fzero.optim._apart import Apart, settled
from fzero.optim._bind import Bound
from fzero.optim._encoded import CodecOf, begun, leaves_of_flats
from fzero.optim._kept import KeptState
from fzero.optim._piece import Piece
from fzero.optim._precision import Precision
from fzero.optim._step import makes_state_later
from fzero.optim.masters import Place, make_masters
from fzero.state import record, static
from fzero.state.layout import Leaf, learns

Held = dict[str, dict[str, Any]]
"""{path: {name: value}}: what an instance has for a parameter."""
Counted = Mapping[str, Mapping[str, Tensor]]
"""{name: {path: counter}}."""
Owned = dict[str, tuple[Tensor, ...]]
"""{name: what a rank keeps of each parameter with an owner; empty on those that do not own it}."""


@record
class TorchState:
    """The state of a torch.optim optimizer on this rank, parallel to the list of flats."""

    count: Tensor  # [] int64 on the CPU (with a loss scale, on its device): updates made
    slots: dict[str, tuple[Tensor, ...]]  # by name; of a flat that has no such slot, empty
    # By name, one for each param group, and then those of leaves that are apart.
    counters: dict[str, tuple[Tensor, ...]]
    masters: tuple[Tensor, ...]  # fp32 copies of 16-bit flats; of others, empty
    owned: Owned  # what is kept of parameters that an owner steps whole, parallel to these
    # (path, index of its counters), of leaves that do not count with their group.
    apart: Apart = static(default=())
    # Paths of leaves that took no step yet, where others did; see `KeptState.late`.
    unstepped: tuple[str, ...] = static(default=())


def new_state(
    bound: Bound,
    params: Sequence[Tensor],
    pieces: Sequence[Piece],
    place: Place,
    owners: Owners | None = None,
    codec_of: CodecOf = lambda leaf, name: None,
) -> TorchState:
    """Return the state for flats [l] before the first step; `place` moves each tensor."""
    precision = bound.precision
    of_flat = {index: bound.kept_for(leaf) for index, leaf, *_ in pieces}  # alike in a flat
    flats = [(p, of_flat.get(i)) for i, p in enumerate(params)]
    wanted = [precision.master_weights and kept is not None for _, kept in flats]
    whole = frozenset[int]() if owners is None else owners.positions
    even = [(p, None if i in whole else kept) for i, (p, kept) in enumerate(flats)]
    every = [x for (g, *_), x in bound.kept.items() if owners is None or bound.elementwise[g]]
    leaves = leaves_of_flats(params, pieces)

    def made(name: str, i: int) -> Tensor:
        p, kept = even[i]
        begin = _begin(name, kept, precision, p.dtype)
        if begin is None:
            return p.new_empty(0)  # also of another shape: such a slot is made by the first step
        codec = codec_of(leaves[i], name) if begin[1].is_floating_point else None
        return begun(codec, p, *begin)

    slots = {
        name: tuple(place(made(name, i)) for i in range(len(even)))
        for name in sorted({name for kept in every for name in (*kept.slots, *kept.odd)})
    }
    begin = [bound.begin_of(group) for group in range(len(bound.shared))]
    counters = {  # 0 for a group that learns nothing, or has none
        name: tuple(some[name].clone() if name in some else torch.zeros(()) for some in begin)
        for name in sorted({name for some in begin for name in some})
    }
    masters = make_masters(params, wanted, place)
    count = torch.zeros((), dtype=torch.int64)
    owned = {} if owners is None else owned_slots(bound, owners, params, place)
    return TorchState(count=count, slots=slots, counters=counters, masters=masters, owned=owned)


def _begin(
    name: str, kept: KeptState | None, precision: Precision, dtype: torch.dtype
) -> tuple[float, torch.dtype] | None:
    """With which value, and in which dtype, a slot of a parameter begins; None: it has no such."""
    if kept is None or name not in kept.slots:
        return None
    fill = kept.slots[name]
    return fill.item(), precision.kept(dtype) if fill.dtype == kept.dtype else fill.dtype


def owned_slots(bound: Bound, owners: Owners, params: Sequence[Tensor], place: Place) -> Owned:
    """Return the slots before the first step; one of another shape is made by it."""
    kept = [bound.kept_for(one.leaf) if owners.has(one) else None for one in owners.leaves]
    names = sorted({name for x in kept if x is not None for name in (*x.slots, *x.odd)})
    mine = set(owners.mine)

    def made(name: str, number: int) -> Tensor:
        one = owners.leaves[number]
        flat, size = params[one.position], one.leaf.numel if number in mine else 0
        begin = _begin(name, kept[number], bound.precision, flat.dtype)
        if begin is None:
            return flat.new_empty(0)
        return place(torch.full((size,), begin[0], dtype=begin[1], device=flat.device))

    return {name: tuple(made(name, k) for k in range(len(kept))) for name in names}


def as_large(form: Sequence[int], small: Sequence[int], large: Sequence[int]) -> list[int]:
    """Return the shape that something kept of a small parameter has of a large one.

    A size that is the product of some sides of the small one is that of the same of the large one.

    Example:
        >>> as_large((7, 7), (7, 6), (512, 64)), as_large((12,), (5, 3, 2, 2), (64, 3, 7, 7))
        ([512, 512], [147])
    """
    ends = range(1, len(small) + 1)
    spans = sorted(((i, j) for j in ends for i in range(j)), key=lambda span: span[1] - span[0])

    def of(size: int) -> int:
        found = (prod(large[i:j]) for i, j in spans if size > 1 and prod(small[i:j]) == size)
        return next(found, size)

    return [of(size) for size in form]


def counted_in(bound: Bound, state: TorchState, paths: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the counters of the leaves at `paths` that are stepped: the state's own tensors."""
    numbers, found = dict(state.apart), dict[str, dict[str, Tensor]]()
    begins = [bound.begin_of(group) for group in range(len(bound.shared))]
    for path in paths:
        group = bound.group_at.get(path, -1)
        for name in begins[group] if group >= 0 else ():
            shared = name in bound.shared[group].begin
            number = group if shared else numbers.get(path, group)
            found.setdefault(name, {})[path] = state.counters[name][number]
    return found


def recounted_as(
    bound: Bound,
    state: TorchState,
    paths: Sequence[str],
    counters: Counted,
    unstepped: Collection[str],
) -> TorchState:
    """Return the state with these counters, kept once where leaves of a group have the same."""
    fresh = set(unstepped) if makes_state_later(bound) else set()
    stepped = [path for path in paths if bound.group_at.get(path, -1) >= 0]

    def row(path: str) -> tuple[Any, ...]:
        shared = bound.shared[bound.group_at[path]].begin
        own = [(k, x[path].item()) for k, x in counters.items() if path in x and k not in shared]
        return path in fresh, *own

    groups = len(bound.shared)
    apart, rows = settled({path: row(path) for path in stepped}, bound.group_at.__getitem__, groups)
    home = {number: bound.group_at[path] for path, number in apart}
    of_groups = _of_groups(bound, stepped, counters)
    made: dict[str, tuple[Tensor, ...]] = {}
    for name, held in state.counters.items():
        some = [held[home.get(number, number)].clone() for number in range(groups + len(set(home)))]
        for number, (_, *own) in rows.items():
            some[number].fill_(dict(own).get(name, some[number].item()))
        for group, value in of_groups.get(name, {}).items():
            some[group].fill_(value)
        made[name] = tuple(some)
    kept = tuple(path for path in stepped if path in fresh)
    return replace(state, counters=made, apart=apart, unstepped=kept)


def anew_of(bound: Bound, state: TorchState, fresh: TorchState) -> TorchState:
    """Return `fresh`, a new state, with the counters that `state` has for whole param groups."""
    counters = {
        name: tuple(
            state.counters[name][group] if name in shared.begin else some[group]
            for group, shared in enumerate(bound.shared)
        )
        for name, some in fresh.counters.items()
    }
    return replace(fresh, counters=counters)


def _of_groups(
    bound: Bound, paths: Sequence[str], counters: Counted
) -> dict[str, dict[int, float]]:
    """Return {name: {param group: its counter}}; raise `LayoutError` if two leaves disagree."""
    found: dict[str, dict[int, float]] = {}
    for path in paths:
        group = bound.group_at[path]
        for name in bound.shared[group].begin.keys() & counters.keys():
            value = counters[name][path].item()
            other = found.setdefault(name, {}).setdefault(group, value)
            if other != value:
                raise LayoutError(
                    f"param group {group} of {type(bound.instance).__name__} has {name} = {other} "
                    f"for one of its parameters, and {value} for {path}.",
                    cause="param groups that are others than those of the run that was saved.",
                    fix="make the optimizer with the param groups of that run.",
                )
    return found


def kept_by(bound: Bound, params: Mapping[str, Tensor]) -> Held:
    """Return what the instance keeps for its parameters, by path; of frozen ones, all there is.

    Tied paths have the same. Raises `LayoutError` for a state that is not what its rule keeps.
    """
    found: Held = {}
    for path, own in _by_member(bound).items():
        tied = identity(params[path])
        found |= {other: own for other, p in params.items() if identity(p) == tied}
    return found


def _by_member(bound: Bound) -> Held:
    instance, found = bound.instance, Held()
    for group, paths in zip(instance.param_groups, bound.members, strict=True):
        for path, p in zip(paths, group["params"], strict=False):  # a factory's are gone
            state = {k: x for k, x in instance.state.get(p, {}).items() if x is not None}
            if not (state and learns(p)):
                found |= {path: state} if state else {}
                continue
            kept = bound.kept_for(
                Leaf(path=path, shape=tuple(p.shape), dtype=p.dtype, trainable=True)
            )
            assert kept is not None, path
            own = {k: x for k, x in state.items() if k not in kept.unread}
            _require_fit(bound, path, p, own, kept)
            found[path] = own
    return found


def lines_of(held: Held) -> list[str]:
    """Return what ranks compare of it: names, shapes and counts."""
    return [f"the optimizer's state of {path}: {_shown(own)}" for path, own in held.items()]


def _shown(own: Mapping[str, Any]) -> str:
    def text(x: Any) -> str:
        return f"{tuple(x.shape)}" if isinstance(x, Tensor) and x.numel() != 1 else f"{float(x)}"

    return ", ".join(f"{name} {text(own[name])}" for name in sorted(own))


def _require_fit(
    bound: Bound, path: str, p: Tensor, own: Mapping[str, Any], kept: KeptState
) -> None:
    shapes = {
        k: tuple(x.shape) for k, x in own.items() if k in kept.slots and isinstance(x, Tensor)
    }
    cut = [k for k, shape in shapes.items() if shape != tuple(p.shape)]
    if own.keys() != kept.names or cut:
        raise LayoutError(
            f"{type(bound.instance).__name__} has {sorted(own)} for {path}"
            f"{f', {cut[0]} of shape {shapes[cut[0]]}' if cut else ''}; its rule keeps "
            f"{sorted(kept.names)}.",
            cause="a state_dict of a run with other options (momentum, amsgrad) or of another "
            "model, or an optimizer that was changed after its first steps.",
            fix="make the optimizer with the options of that run; or optimizer.state.clear(), to "
            "begin anew.",
        )
