"""fp32 masters between two engines of a module: each rank keeps its part with the parameters.

An engine that is closed leaves 16-bit parameters, which are rounded masters. The next engine of the
same objects, at any stage, with any optimizer, goes on from the masters. An element that was
written in between goes on from what was written, as between two steps.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fzero.adapter._masters import own_part
from fzero.adapter._module import ModuleParameters, first_state
from fzero.collectives import performer_of, reduce_many
from fzero.machine.offload import to_device, write_back
from fzero.machine.packing import cut, leaf_ranges, pack
from fzero.optim.precision import masters_of
from fzero.state import Local, Placement, Setup, TrainState
from fzero.state.scale import ScalePolicy

_NAME = "_fzero_master"

Span = tuple[int, int]
"""From which element of a parameter to which."""


class KeptMaster:
    """Elements `start` to `start + len(values)` of a parameter's master. It is in no pickle."""

    def __init__(self, start: int, values: Tensor) -> None:
        self.start, self.stop, self.values = start, start + values.numel(), values

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[()]]:
        """Leave nothing in a file, which torch.load(weights_only=True) then takes."""
        return OrderedDict, ()


def keep(params: ModuleParameters, state: TrainState, index: int) -> None:
    """Leave this rank's part of the masters of a group with its parameters; no collective."""
    setup = state.setup
    if index not in setup.layout.trainable or not masters_of(state):
        return
    master = masters_of(state)[setup.layout.trainable.index(index)]
    if not master.numel():
        return
    part = setup.part(setup.optimizer_state, setup.axis.rank)
    for one in leaf_ranges(setup.layout, index, part):
        kept = KeptMaster(one.start, to_device(one.of(master), state.device).clone())
        for p in params.objects(one.leaf):
            vars(p)[_NAME] = kept


def begun_state(
    params: ModuleParameters, setup: Setup, local: Local | None, scale: ScalePolicy | None
) -> TrainState:
    """Return the first state of a module, with the masters that an engine before has left.

    A collective, as `first_state` is.
    """
    state = first_state(params, setup, local, scale)
    _take_kept(params, state)
    return state


@torch.no_grad()
def _take_kept(params: ModuleParameters, state: TrainState) -> None:
    """Let new masters go on from those that were kept. A collective.

    Of an element that several ranks have, the value of the first one counts. Replicas that train
    apart begin at their anchors, which are the 16-bit values.
    """
    layout, masters = state.setup.layout, masters_of(state)
    if not masters or state.outer is not None:
        return
    groups = zip(layout.trainable, masters, strict=True)
    mine = _taken(params, [i for index, _ in groups for i in layout.groups[index].leaves])
    performer = performer_of(state.mesh)
    spans = {leaf: (kept.start, kept.stop) for leaf, kept in mine.items()}
    said: list[dict[int, Span]] = [spans] if performer is None else performer.tell(spans)
    known = {leaf for one in said for leaf in one}
    for index, master in zip(layout.trainable, masters, strict=True):
        leaves = layout.groups[index].leaves
        if known.isdisjoint(leaves):
            continue
        made = [_of_leaf(layout.leaves[i].numel, i, said, state, mine.get(i)) for i in leaves]
        flat, has = (pack(layout, index, some) for some in zip(*made, strict=True))
        flat = reduce_many([flat], state.mesh)[0]
        if master.numel():
            setup, whole = state.setup, Placement.REPLICATED
            own, held = (cut(setup, x, whole, setup.optimizer_state) for x in (flat, has))
            _follow(
                master, own.view(torch.float32), held, own_part(state, state.params.flats[index])
            )


def _taken(params: ModuleParameters, leaves: Sequence[int]) -> dict[int, KeptMaster]:
    """Return what this rank has of each of these leaves; nobody else will find it."""
    found: dict[int, KeptMaster] = {}
    for leaf in leaves:
        for p in params.objects(leaf):
            kept: Any = vars(p).pop(_NAME, None)
            if isinstance(kept, KeptMaster) and kept.stop <= params.layout.leaves[leaf].numel:
                found[leaf] = kept
    return found


def _of_leaf(
    numel: int,
    leaf: int,
    said: Sequence[dict[int, Span]],
    state: TrainState,
    kept: KeptMaster | None,
) -> tuple[Tensor, Tensor]:
    """Return the bits of a master that this rank is the first to have, else 0; and who has any.

    Bits are added up as integers: in floats a zero would lose its sign.
    """
    bits = torch.zeros(numel, dtype=torch.int32, device=state.device)
    has = torch.zeros(numel, dtype=torch.bool, device=state.device)
    for rank, spans in enumerate(said):
        start, stop = spans.get(leaf, (0, 0))
        if rank == state.mesh.rank and kept is not None:
            values = to_device(kept.values, state.device).view(torch.int32)
            bits[start:stop] = torch.where(has[start:stop], 0, values)
        has[start:stop] = True
    return bits, has


def _follow(master: Tensor, kept: Tensor, has: Tensor, values: Tensor) -> None:
    """Write what was kept into a master, where the 16-bit values are still what it rounds to."""
    here, now = to_device(values, kept.device), to_device(master, kept.device)
    same = has & (kept.to(here.dtype) == here)
    write_back(master, torch.where(same, kept, now))
