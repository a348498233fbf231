"""The outer update of replicas that train apart: their mean move away from the anchors is a step.

    each update         count it; go on, if nothing is due
    a departure         moved = anchor - value, zeros of a replica that is left out
                        sum over replicas / replicas that count
    an arrival          that -> the rule -> new anchors: at once, or `delay` updates later
                        values := mixing values + (1 - mixing) anchors, on every replica

All of it is on the parts of a rank, as the optimizer has them: what crosses replicas is one sum of
those. A rule that needs whole matrices has owners in each replica. The state's own axis has the
ranks of one replica, so all else knows of no other.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fzero.errors.check import require
from fzero.machine.offload import offloaded, to_device, write_back
from fzero.machine.packing import cut, gather_parts_in_place
from fzero.optim.precision import masters_of
from fzero.ranks.mesh import Axis, MeshLike, axis_of, mesh_of_replicas, of_replica
from fzero.state import Buffers, Local, Outer, Setup, TrainState, outer
from fzero.state.outer import NAME, with_outer
from fzero.state.points import Builtin, Excludes
from fzero.transforms._anew import with_new_slots
from fzero.transforms.donation import donates
from fzero.transforms.outer_count import agreed
from fzero.transforms.outer_rule import DEFAULT_OUTER as DEFAULT_OUTER
from fzero.transforms.outer_rule import masked, outer_owners, outer_pieces, require_outer
from fzero.transforms.outer_sum import sum_over_replicas
from fzero.transforms.points import stepped_parts, with_stepped
from fzero.transforms.receive import not_differentiable
from fzero.transforms.together import Requested


def mesh_for(mesh: MeshLike, local: object) -> Axis:
    """Return the axis that `mesh` means; for local updates in two dims, those of replicas too."""
    return axis_of(mesh) if local is None else mesh_of_replicas(mesh)


def require_local(local: Any) -> None:
    """Raise `LayoutError` for a bad `local=`."""
    if local is None:
        return
    wanted = "fzero.Local(every=...), or None"
    require("local", local, lambda x: isinstance(x, Local), wanted)
    if local.outer is not None:
        require_outer(local.outer)


def on_replica(setup: Setup, local: Local | None) -> Setup:
    """Return the setup of a state with local updates: that of the ranks of this replica.

    A collective at first.
    """
    return setup if local is None else replace(setup, axis=of_replica(setup.axis))


def begun(state: TrainState, local: Local | None, mesh: Axis) -> TrainState:
    """Return a new state of a replica with anchors, where it has local updates.

    mesh: of all replicas.
    """
    if local is None:
        return state
    local = replace(local, outer=local.outer or DEFAULT_OUTER)
    empty = Buffers(placement=state.setup.optimizer_state)
    weight = torch.ones(local.fragments, device=state.device)
    return anchored(
        state, Outer(anchors=empty, optimizers=(), weight=weight, local=local, mesh=mesh)
    )


def anchored(state: TrainState, held: Outer) -> TrainState:
    """Return a state whose anchors are at its parameters, with an outer rule that begins anew."""
    offload = state.setup.offload
    setup = state.setup
    anchors, made = [x.to(_wide(x.dtype), copy=True) for x in stepped_parts(state)], []
    for fragment in range(held.local.fragments):
        numbers = held.local.numbers_in(fragment, len(anchors))
        owners, pieces = outer_owners(setup, numbers), outer_pieces(setup, numbers)
        given = {} if owners is None else {"owners": owners}
        made.append(setup.layout.options.outer.init(masked(anchors, numbers), pieces, **given))
    flats = tuple(offloaded(offload.optimizer, x, offload) for x in anchors)
    fresh = replace(
        held,
        anchors=replace(held.anchors, flats=flats),
        optimizers=tuple(made),
        weight=torch.ones_like(held.weight),
        coming=(replace(held.anchors, flats=()),) * held.local.fragments,
        updates=0,
    )
    return _with(state, fresh)


def anchor_of(state: TrainState, index: int) -> Tensor:
    """Return this rank's part of the anchors of group `index`, in the dtype of the parameters.

    Of a state with local updates, and a group that learns.
    """
    flat = _held(state).anchors.flats[state.setup.layout.trainable.index(index)]
    return to_device(flat, state.device, state.params.flats[index].dtype)


def after_local_update(state: TrainState, *, general: bool) -> TrainState:
    """Return the state after an update of the replica, and the outer one if it is due.

    general: whether the update is differentiated, mapped or traced. A collective of all replicas
    if it is due.
    """
    held = state.outer
    if held is None:
        return state
    held, due = outer.saw_update(held)
    state = _with(state, held)
    with torch.set_grad_enabled(general and torch.is_grad_enabled()):
        for one in due:
            does = _departed if isinstance(one, outer.Departure) else _arrived
            state = does(state, one.fragment, general)
    return state


def _departed(state: TrainState, due: int, general: bool) -> TrainState:
    """Return the state with the mean move of a fragment, which comes. A collective."""
    held, setup = _held(state), state.setup
    stepped = [to_device(x, state.device) for x in stepped_parts(state)]
    said = agreed(held, due, stepped, general=general)
    numbers = held.local.numbers_in(due, len(stepped))
    anchors, coming = held.anchors.flats, list(held.coming)
    if said.count:
        moved = [
            _moved(to_device(anchors[k], state.device), stepped[k], counts=said.own)
            for k in numbers
        ]
        if general and setup.reduction.codec is not None:
            raise not_differentiable("gradients", setup.reduction.codec)
        sums = sum_over_replicas(setup, moved, held.mesh.replicas)
        coming[due] = replace(coming[due], flats=tuple(x / said.count for x in sums))
    weight = held.weight.clone()
    weight[due] = 1.0
    state = _with(state, replace(held, weight=weight, coming=tuple(coming)))
    values = {} if said.count else {k: anchors[k] for k in numbers}  # nobody has moved: back
    if not said.all_finite:  # all replicas write, for virtual ranks make the same collectives
        values = dict(enumerate(stepped if said.finite else anchors)) | values
    if not said.finite:  # other fragments are not either, or would not be after the next update
        state = with_new_slots(state, stepped_parts(state))
    owned = donates(state) and not general
    return _written(state, values, owned=owned) if values else state


def _arrived(state: TrainState, due: int, general: bool) -> TrainState:
    """Make the outer update of a fragment by the mean move that has come, if any has."""
    held, setup, offload = _held(state), state.setup, state.setup.offload
    if not held.coming[due].held:
        return state
    means = [to_device(x, state.device) for x in held.coming[due].flats]
    numbers = held.local.numbers_in(due, len(held.anchors.flats))
    anchors, rules, coming = list(held.anchors.flats), list(held.optimizers), list(held.coming)
    options: dict[str, Any] = {"differentiable": general}
    if not offload.neutral:
        options["device"] = state.device
    if (owners := outer_owners(setup, numbers)) is not None:
        options["owners"] = owners.at((), state.device)
    given = {k: x for k, x in zip(numbers, means, strict=True)}
    new, rules[due] = setup.layout.options.outer.advance(
        masked(anchors, numbers),
        [given.get(k, x.new_empty(0)) for k, x in enumerate(anchors)],
        rules[due],
        outer_pieces(setup, numbers),
        **options,
    )
    home = None if general else offload.optimizer
    for k in numbers:
        anchors[k] = offloaded(home, new[k], offload)
    coming[due] = replace(coming[due], flats=())
    after = replace(
        held,
        anchors=replace(held.anchors, flats=tuple(anchors)),
        optimizers=tuple(rules),
        coming=tuple(coming),
    )
    values = {k: anchors[k] for k in numbers}
    if share := held.local.mixing:
        stepped = stepped_parts(state)
        values = {k: _mixed(state, stepped[k], x, share) for k, x in values.items()}
    return _written(_with(state, after), values, owned=donates(state) and not general)


def _mixed(state: TrainState, own: Tensor, anchor: Tensor, share: float) -> Tensor:
    """Return share own + (1 - share) anchor, in the dtype of the anchor."""
    x = to_device(anchor, state.device)
    return share * to_device(own, state.device, x.dtype) + (1 - share) * x


def _held(state: TrainState) -> Outer:
    held = state.outer
    assert held is not None
    return held


def _moved(anchor: Tensor, value: Tensor, *, counts: bool) -> Tensor:
    return anchor - value.to(anchor.dtype) if counts else torch.zeros_like(anchor)


# What is read and written.


def _with(state: TrainState, held: Outer) -> TrainState:
    return state.replace(slots=with_outer(state.slots, held))


def _written(state: TrainState, values: dict[int, Tensor], *, owned: bool) -> TrainState:
    """Return the state whose parameters and masters have these values: of an `owned` one in place.

    values: {number of a group among those that learn: this rank's part}. A collective of the
    replica where its ranks hold parameters of each other.
    """
    setup, learning = state.setup, state.setup.layout.trainable
    part, whole = setup.optimizer_state, setup.params
    if not owned:
        new = {k: to_device(x, state.device).clone() for k, x in values.items()}
        return with_stepped(state, new, part)
    for k, master in enumerate(masters_of(state)):
        if k in values and master.numel():
            write_back(master, to_device(values[k], state.device, master.dtype))
    fulls = [state.params.flats[learning[k]] for k in values]
    for full, x in zip(fulls, values.values(), strict=True):
        own = cut(setup, full, whole, part)
        write_back(own, to_device(x, state.device, own.dtype))
    if part is not whole and setup.axis.size > 1:
        gather_parts_in_place(setup, [full for full in fulls if full.numel()], part, whole)
    return state


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _over_all(options: Any) -> str:
    there = options.local is not None and options.optimizer_over != "shard"
    return f"optimizer_over={options.optimizer_over!r} with local updates." if there else ""


def _codec_in_a_replica(asked: Requested) -> str:
    codec, over = _codec_of(asked)
    there = codec is not None and over != "replicas"
    return f"compress: gradients={codec}, over={over!r} with local updates." if there else ""


def _codec_with_memory(asked: Requested) -> str:
    codec = _codec_of(asked)[0]
    there = codec is not None and codec.memory is not False
    return f"compress: gradients={codec}, with a memory, with local updates." if there else ""


def _codec_of(asked: Requested) -> tuple[Any, str]:
    """Return the codec of gradients beside local updates, and for which ranks; None for none."""
    options = asked.options
    if options.local is None or options.compress is None:
        return None, "all"
    return options.compress.gradients, options.compress.over


def _rule_of_all(known: tuple[Any, Any]) -> str:
    rule, options = known
    there = options.local is not None and not (rule.elementwise or rule.leafwise)
    return f"local updates with {rule!r}, which needs all parameters at once." if there else ""


NO_WRITES = Excludes(
    beside="a write of a parameter of an engine",
    when="write",
    seen=lambda _: " of an engine with local updates.",
    cause="new values for a model that replicas train apart: the next outer update would "
    "take them for a move away from the anchors, which stay as they are.",
    fix="write into the module before Engine(...), or load a checkpoint of "
    "fzero.checkpoint.save into the engine: both are where all replicas start.",
)
"""Of writes after which anchors and parameters would be of two models."""

_EXCLUDES = (
    NO_WRITES,
    Excludes(
        beside='optimizer_over="all"',
        when="options",
        seen=_over_all,
        cause="replicas that train apart have optimizer states of their own, which no other "
        "replica can hold a part of.",
        fix="leave optimizer_over out: the ranks of each replica share its optimizer state.",
    ),
    Excludes(
        beside='a codec of gradients with over="all"',
        when="ranks",
        seen=_codec_in_a_replica,
        cause="what crosses replicas is how far they have moved; gradients stay in a replica.",
        fix='give over="replicas": the codec then encodes what crosses them.',
    ),
    Excludes(
        beside="a codec of gradients with a memory",
        when="ranks",
        seen=_codec_with_memory,
        cause="error feedback is for gradients; a replica that has met the others starts anew "
        "from the anchors.",
        fix="give the codec memory=False.",
    ),
    Excludes(
        beside="a rule that needs all parameters",
        when="rule",
        seen=_rule_of_all,
        cause="a norm over all parameters (a clip in the rule, Prodigy), random numbers, or a "
        "foreign (init, update) pair that is not elementwise: what it keeps belongs to no "
        "parameter, and is not kept by replica.",
        fix="use a rule that needs an element (AdamW) or a matrix (fzero.optim.muon, soap, "
        "from_torch(..., needs='matrix')), or leave local updates out.",
    ),
)

LOCAL = Builtin(
    name=NAME,
    slots=tuple((slot.removeprefix(f"{NAME}/"), form) for slot, form in outer.FORMS.items()),
    acts=lambda state: outer.ANCHORS in state.slots,
    updated=lambda running, new: after_local_update(new, general=running.general),
    excludes=_EXCLUDES,
)
"""Local updates, at the points of a step."""
