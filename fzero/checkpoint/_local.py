"""States with local updates in a checkpoint: that of the anchors, and each replica's own.

    params, optimizer/<slot>         as of a state without local updates that is at the anchors,
                                     with the optimizer state of replica 0
    replica/<r>/params, .../<slot>   what replica r trains
    outer/anchors, outer/<slot>      the anchors in fp32 or wider, the state of the outer rule
    outer/coming                     mean moves of the fragments whose outer update is to come
    outer/optimizer/<slot>           what owners keep for the outer rule

So a state without local updates, or of another number of replicas, starts at the anchors.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fzero.checkpoint._counters import counters_of
from fzero.checkpoint._held import Held
from fzero.checkpoint._outer import RULE, coming_in, named, outer_room, outer_slots, rule_states
from fzero.checkpoint._owned import with_room_owned
from fzero.checkpoint._pieces import OwnShard, shards_of
from fzero.checkpoint._room import make_parts_whole, make_whole
from fzero.checkpoint.manifest import Manifest, facts_of_state
from fzero.errors import LayoutError, explain
from fzero.machine.packing import part_of
from fzero.ranks.mesh import axis_index
from fzero.state import Outer, Placement, TrainState
from fzero.state.setup import MASTERS
from fzero.transforms.outer import anchored
from fzero.transforms.simulate import simulate

_MASTERS = f"optimizer/{MASTERS}"


def all_shards_of(
    state: TrainState, rank: int, *, frozen: bool = True, shared: bool = False
) -> list[OwnShard]:
    """Return all that a rank of the mesh writes of a state; or all that it holds, if `shared`."""
    held = state.window.outer
    if held is None:
        return shards_of(state, rank, frozen=frozen, shared=shared)
    replica, shard = divmod(rank, state.setup.layout.ranks)
    own = [x for x in _own(state, replica, shard, shared) if x.prefix.startswith("replica/")]
    if replica:
        return own
    anchors = dict(zip(state.setup.layout.trainable, held.anchors.flats, strict=True))

    def at_anchor(x: OwnShard) -> OwnShard:
        if x.prefix not in ("params", _MASTERS) or x.group not in anchors:
            return x
        part = _part(state, anchors[x.group], shard)
        return x._replace(part=own_part, values=part.to(x.values.dtype))

    own_part = state.setup.part(Placement.OVER_ALL, shard)
    base = [at_anchor(x) for x in shards_of(state, shard, frozen=frozen, shared=shared)]
    return [*base, *own, *_outer_shards(state, held, shard, shared)]


def facts_of_replicas(held: Held) -> dict[str, Any]:
    """Return what a manifest says of the replicas; {} without local updates. A collective."""
    outer, shards = held.states[0].window.outer, held.setup.layout.ranks
    if outer is None:
        return {}
    own = [
        {"counters": facts_of_state(one).counters, "counts": _counts(one.window.outer)}
        for one in held.states
    ]
    coming, rule = coming_in(outer), [counters_of(one) for one in rule_states(held.states[0])]
    told = own if held.is_stack else [one for some in held.processes.tell(own) for one in some]
    return {
        "local": {
            "replicas": told[::shards],
            "updates": outer.updates,
            "outer_updates": [int(one.count) for one in outer.optimizers],
            "outer_counters": rule,
            "outer": named(held.states[0]),
            **({"coming": {"fragments": coming, "timing": _timing(outer)}} if coming else {}),
        }
    }


def room_for(
    state: TrainState,
    saved: Manifest,
    rank: int,
    make: Callable[[TrainState, Mapping[str, Any]], TrainState],
    zeros: Callable[[Tensor], Tensor],
    *,
    frozen: bool = True,
    shared: bool = False,
) -> tuple[TrainState, list[OwnShard]]:
    """Return a new state to be filled, and the tensors of it that a rank of the mesh reads.

    Without saved anchors its `window.outer` is None: see `completed`.

    make: (state, the counters of a manifest) -> the new state. zeros: a buffer -> one for the new.
    shared: it reads all that it holds, and not only its own part of it.
    """
    outer, shards = state.window.outer, state.setup.layout.ranks
    local = saved.origin.get("local")
    if outer is None or local is None:
        own = rank if outer is None else rank % shards
        new = make(state, saved.counters)
        return new, shards_of(new, own, frozen=frozen, shared=shared)
    replica, shard = divmod(rank, shards)
    replicas = local["replicas"]
    same = len(replicas) == outer.mesh.replicas.size
    counters = replicas[replica]["counters"] if same else saved.counters
    new = make(state, counters)
    made = outer_room(state, local, _comes(local) if same else [], zeros)
    rules = rule_states(new.replace(window=replace(new.window, outer=made)))
    filled = (with_room_owned(one, rank, saved.slots, saved.tensors, RULE) for one in rules)
    made = replace(made, optimizers=tuple(one.optimizer for one in filled))
    if same:
        weight = torch.full_like(outer.weight, float(replicas[replica]["counts"]))
        made = replace(made, updates=local["updates"] % outer.local.every, weight=weight)
    new = new.replace(window=replace(new.window, outer=made))
    base = shards_of(new, shard, frozen=frozen, shared=shared)
    learning = state.setup.layout.trainable
    if same:
        base = [x for x in base if x.prefix == "params" and x.group not in learning]
        base += _own(new, replica, shard, shared)
    return new, [*base, *_outer_shards(new, made, shard, shared)]


def completed(held: Held, new: Sequence[TrainState]) -> list[TrainState]:
    """Return the states that were read, made whole: of each replica by itself. A collective."""
    states, outer = list(new), held.states[0].window.outer
    if outer is None:
        make_whole(held, states)
        return states
    shards = held.setup.layout.ranks if held.is_stack else 1
    for begin in range(0, len(states), shards):
        some = states[begin : begin + shards]
        make_whole(held, some)
        for flats in _outer_across(some):
            make_parts_whole(held, held.setup, held.setup.optimizer_state, flats)
    if not held.is_stack:
        return [with_anchors(*pair) for pair in zip(states, held.states, strict=True)]
    return on_ranks(len(states), lambda rank: with_anchors(states[rank], held.states[rank]))


def with_anchors(state: TrainState, like: TrainState) -> TrainState:
    """Return a state that was read with anchors, as `like` has them: at its values, if none were.

    Of virtual ranks, on each of them.
    """
    anew = None if state.window.outer is not None else like.window.outer
    return state if anew is None else anchored(state, anew)


def on_ranks(size: int, do: Callable[[int], Any]) -> list[Any]:
    """Return what `do(rank)` returns on each of so many virtual ranks."""
    found: list[Any] = [None] * size

    def body() -> None:
        found[axis_index()] = do(axis_index())

    simulate(body, world_size=size)()
    return found


def check_replicas_saved(
    state: TrainState, saved: Manifest, where: object, name: str = "load"
) -> None:
    """Warn where replicas do not go on as they were; raise `LayoutError` for another outer rule.

    where: what is saved is. name: of the call.
    """
    local, outer = saved.origin.get("local"), state.window.outer
    if local is None:
        return
    if outer is not None and local["outer"] != named(state):
        raise LayoutError(
            f"load: the outer rule of {where} keeps {local['outer']}, that of this state "
            f"{named(state)}.",
            cause="the state was made with another `outer` than the saved one.",
            fix="make it with the one that was saved; to go on with another one, load into a state "
            "without local updates, and make one of its fzero.full_params. Nothing was changed.",
        )
    there, here = len(local["replicas"]), 1 if outer is None else outer.mesh.replicas.size
    coming = _comes(local)
    if outer is not None and there == here and coming and not _fits(outer, local):
        raise LayoutError(
            f"load: in {where} fragments {coming} are to arrive, with {local['coming']['timing']}; "
            f"this state has {_timing(outer)}.",
            cause="the state was made with other options of fzero.local than the saved one.",
            fix="make it with those; or save where nothing is to arrive. Nothing was changed.",
        )
    if outer is None or there != here:
        now = "a state without local updates" if outer is None else f"{here} replicas"
        text = explain(
            f"{name}: {where} has {there} replicas, {local['updates']} updates after their last "
            f"outer update, and goes on in {now}: training starts at the anchors, with the "
            "optimizer state of replica 0.",
            cause="another mesh than the one of before.",
            fix=f"nothing, if that is meant; {name} on as many replicas to go on with theirs.",
        )
        warnings.warn(text, UserWarning, stacklevel=2)


def _own(state: TrainState, replica: int, shard: int, shared: bool) -> list[OwnShard]:
    """What a replica trains, under its names: for replica 0 the base has most of its slots."""

    def named(x: OwnShard) -> OwnShard:
        shared = replica == 0 and x.prefix not in ("params", _MASTERS)
        return x if shared else x._replace(prefix=f"replica/{replica}/{x.prefix}")

    return [named(x) for x in shards_of(state, shard, frozen=False, shared=shared)]


def _outer_shards(state: TrainState, held: Outer, shard: int, shared: bool) -> list[OwnShard]:
    setup = state.setup
    own = setup.part(setup.optimizer_state if shared else Placement.OVER_ALL, shard)
    learning = setup.layout.trainable
    return [
        OwnShard(f"outer/{name}", learning[k], own, flat if shared else _part(state, flat, shard))
        for name, flats in outer_slots(state, held)
        for k, flat in flats.items()
    ]


def _part(state: TrainState, flat: Tensor, shard: int) -> Tensor:
    setup = state.setup
    own = setup.part(Placement.OVER_ALL, shard)
    return part_of(flat, setup.part(setup.optimizer_state, shard), own)


def _outer_across(states: Sequence[TrainState]) -> Iterator[list[Tensor]]:
    """Yield what each rank of a replica has of a flat, for all flats of its outer state."""
    pairs = [(one, one.window.outer) for one in states]
    slots = [list(outer_slots(one, outer)) for one, outer in pairs if outer is not None]
    for same in zip(*slots, strict=True):
        yield from ([flats[k] for _, flats in same] for k in same[0][1])


def _comes(local: dict[str, Any]) -> list[int]:
    """Return those of a checkpoint."""
    return local.get("coming", {"fragments": []})["fragments"]


def _fits(outer: Outer, local: dict[str, Any]) -> bool:
    """Whether the fragments that are to arrive do so in this state, at the same updates."""
    same = local["coming"]["timing"] == _timing(outer)
    return same and max(_comes(local)) < outer.local.fragments


def _timing(outer: Outer) -> str:
    local = outer.local
    return f"every={local.every}, fragments={local.fragments}, delay={local.delay}"


def _counts(outer: Outer | None) -> bool:
    return outer is None or bool(outer.weight.all())
