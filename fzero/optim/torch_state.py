"""`TorchState`: what a torch.optim optimizer keeps on flats, and of parameters with owners.

It begins as the rule says (`torch_probe.KeptState`), or goes on from a run of the optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fzero.errors import LayoutError
from fzero.machine.owners import Owners
from fzero.machine.partition import identity
from fzero.optim.encoded_moments import CodecOf, begun, leaves_of_flats
from fzero.optim.per_leaf_step_counts import Apart
from fzero.optim.precision import Place, make_masters
from fzero.optim.torch_probe import Bound, KeptState
from fzero.state import record, static
from fzero.state.layout import Leaf, learns
from fzero.state.stateful_update import Piece

InstanceState = dict[str, dict[str, Any]]
"""{path: {name: value}}: what an instance has for a parameter."""
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
    owners: Owners | None,
    codec_of: CodecOf,
) -> TorchState:
    """Return the state for flats [l] before the first step; `place` moves each tensor."""
    precision, leaves = bound.precision, leaves_of_flats(params, pieces)
    of_flat = {index: bound.kept_for(leaf) for index, leaf, *_ in pieces}  # alike in a flat
    kept = [of_flat.get(i) for i in range(len(params))]
    whole = frozenset[int]() if owners is None else owners.positions
    owned = [] if owners is None else owners.leaves
    of_owned = [bound.kept_for(x.leaf) if owners and owners.has(x) else None for x in owned]

    def begin(name: str, kept: KeptState | None, p: Tensor) -> tuple[float, torch.dtype] | None:
        """Return value and dtype that a slot begins with; None: no such slot, or made by a step."""
        if kept is None or name not in kept.slots:
            return None
        fill = kept.slots[name]
        return fill.item(), precision.kept(p.dtype) if fill.dtype == kept.dtype else fill.dtype

    def slot(name: str, i: int) -> Tensor:
        first = None if i in whole else begin(name, kept[i], params[i])
        if first is None:
            return params[i].new_empty(0)
        codec = codec_of(leaves[i], name) if first[1].is_floating_point else None
        return begun(codec, params[i], *first)

    def owned_slot(name: str, number: int) -> Tensor:
        flat, mine = params[owned[number].position], owners and number in owners.mine
        first, size = begin(name, of_owned[number], flat), owned[number].leaf.numel if mine else 0
        if first is None:
            return flat.new_empty(0)
        return place(torch.full((size,), first[0], dtype=first[1], device=flat.device))

    def names(some: Sequence[KeptState | None]) -> list[str]:
        return sorted({name for x in some if x is not None for name in (*x.slots, *x.odd)})

    even = [
        kept
        for (group, *_), kept in bound.kept.items()
        if owners is None or bound.needs[group] == "element"
    ]
    counters = [bound.begin_of(group) for group in range(len(bound.shared))]
    return TorchState(
        count=torch.zeros((), dtype=torch.int64),
        slots={k: tuple(place(slot(k, i)) for i in range(len(params))) for k in names(even)},
        counters={  # 0 for a group that learns nothing, or has none
            k: tuple(own[k].clone() if k in own else torch.zeros(()) for own in counters)
            for k in sorted({name for own in counters for name in own})
        },
        masters=make_masters(
            params, [precision.master_weights and one is not None for one in kept], place
        ),
        owned={k: tuple(owned_slot(k, i) for i in range(len(owned))) for k in names(of_owned)},
    )


def kept_by(bound: Bound, params: Mapping[str, Tensor]) -> InstanceState:
    """Return what the instance keeps for its parameters, by path; of frozen ones, all there is.

    Tied paths have the same. Raises `LayoutError` for a state that is not what its rule keeps.
    """
    instance, found = bound.instance, InstanceState()
    for group, paths in zip(instance.param_groups, bound.members, strict=True):
        for path, p in zip(paths, group["params"], strict=False):  # a factory's are gone
            own = {k: x for k, x in instance.state.get(p, {}).items() if x is not None}
            if own and learns(p):
                leaf = Leaf(path=path, shape=tuple(p.shape), dtype=p.dtype, trainable=True)
                kept = bound.kept_for(leaf)
                assert kept is not None, path
                own = {k: x for k, x in own.items() if k not in kept.unread}
                shapes = {k: tuple(torch.as_tensor(own[k]).shape) for k in kept.slots if k in own}
                cut = [k for k, shape in shapes.items() if shape != tuple(p.shape)]
                if own.keys() != kept.names or cut:
                    raise LayoutError(
                        f"{type(instance).__name__} has {sorted(own)} for {path}"
                        f"{f', {cut[0]} of shape {shapes[cut[0]]}' if cut else ''}; its rule keeps "
                        f"{sorted(kept.names)}.",
                        cause="a state_dict of a run with other options (momentum, amsgrad) or of "
                        "another model, or an optimizer that was changed after its first steps.",
                        fix="make the optimizer with the options of that run; or "
                        "optimizer.state.clear(), to begin anew.",
                    )
            tied = [x for x, other in params.items() if identity(other) == identity(params[path])]
            found |= dict.fromkeys(tied, own) if own else {}
    return found
