"""`local`: replicas train apart, and an outer update brings them together now and then.

    each update     count it; go on, if nothing is due
    a departure     moved = anchor - value, zeros of a replica that is left out
                    sum over replicas / replicas that count
    an arrival      that -> the rule -> new anchors: at once, or `delay` updates later
                    values := mixing values + (1 - mixing) anchors, on every replica

All of it is on the parts of a rank, as the optimizer has them: what crosses replicas is one sum of
those. The outer rule is asked what it needs, as the inner one is: an element, and each rank steps
its parts of the anchors; or a matrix, which is stepped by the rank of each replica that owns it.
The state's own axis has the ranks of one replica, so all else knows of no other.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fzero.collectives import performer_of, reduce_many, start_all_to_all, start_gather
from fzero.context.current_rank import has_no_values
from fzero.errors import LayoutError, PhaseError, explain
from fzero.errors.check import called_as, require
from fzero.machine.offload import offloaded, to_device, write_back
from fzero.machine.owners import Owners, owners_of
from fzero.machine.packing import cut, gather_parts_in_place
from fzero.optim import Optimizer, Piece, require_real_views, sgd
from fzero.optim.entries import codec_in, with_tensors
from fzero.optim.optimizer import masked
from fzero.optim.precision import masters_of
from fzero.ranks.mesh import Axis, MeshLike, axis_of, mesh_of_replicas, of_replica
from fzero.state import Buffers, Local, Outer, Setup, TrainState, outer
from fzero.state.codec import decoded, encoded, sum_of
from fzero.state.layout import learns
from fzero.state.outer import NAME, with_outer
from fzero.state.points import Builtin, Excludes
from fzero.state.setup import MASTERS
from fzero.transforms.accumulate_grad import not_differentiable
from fzero.transforms.donation import donates
from fzero.transforms.leaf_slices import pieces_of
from fzero.transforms.models import S, map_states
from fzero.transforms.pipeline import Step, Transform, entering, transform, transform_function
from fzero.transforms.points import rule_state, stepped_parts, with_stepped
from fzero.transforms.together import Requested

DEFAULT_OUTER = sgd(0.7, momentum=0.9, nesterov=True)
"""The rule of the outer update: that of DiLoCo."""


@transform_function
@called_as("local(step, every=64)")
def local(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    every: int,
    outer: Optimizer = DEFAULT_OUTER,
    fragments: int = 1,
    delay: int = 0,
    mixing: float = 0.0,
) -> Step[..., Any] | Transform:
    """Let replicas make `every` updates apart, then one outer update together (DiLoCo, local SGD).

    The replicas are those of a mesh of two dims, (replicate, shard); on a mesh of one dim each
    rank is one. All replicas start at the anchors a. Each makes `every` updates by its own
    gradients: means, clips, norms, loss scales and weights are over the ranks of one replica.
    Then, with p_r the parameters of replica r,

        g = (1 / R) sum_r (a - p_r),  a' = a + update of `outer`(g),  p_r' = a'

    so that what crosses replicas is one sum of the parameters for `every` updates. The inner
    optimizer, with its states, is the one that `init` is given; it goes on from the new parameters.

    Each call of `apply_gradients` counts, also one that is skipped (an overflow, a total weight of
    0) on this replica. A replica whose parameters are not finite is left out of the mean, with a
    warning on all: it goes on from the anchors, with optimizer states of zeros. So is one for which
    `leave_out` was called, without a warning.

    With several `fragments` the parameters meet in parts, unit by unit in turn: fragment f of F
    after update (f + 1) every / F of each round, so that less crosses at once. Each has a state of
    the outer rule of its own.

    With a `delay` the outer update of what is exchanged after one update is made that many updates
    later, and a replica keeps a share of what it has become since: p_r' = mixing p_r +
    (1 - mixing) a'. In between g waits in the state (Streaming DiLoCo).

    `fzero.full_params(state)` are the anchors, `full_params(state, replica=True)` this replica's
    parameters, which are also what `evaluate` uses.

    Args:
        fn: the step; `step.init` makes states with local updates.
        every: updates of each replica from one outer update to the next, 1 or more.
        outer: the rule of the outer update, of `fzero.optim`, also `from_torch(...)` and
            `partition(...)`; default SGD with a rate of 0.7 and Nesterov momentum 0.9. It may need
            a matrix, as the inner one may: the ranks of each replica that own it update it.
        fragments: in how many parts the parameters meet, 1 to `every`.
        delay: updates from the exchange of a fragment to its outer update, 0 to `every` - 1.
        mixing: the share of its own parameters that a replica keeps in it, 0 to below 1. With 0
            what it has learned during the delay is lost.

    Returns:
        A step that is called as `fn` is. Without `fn`, a decorator.

    Raises:
        LayoutError: for another `every`, number of fragments, delay or mixing; around `shard`,
            `simulate` or another `local`; in `init`, for `optimizer_over="all"`, for what is no
            rule, and for one that needs all parameters at once.
        PhaseError: in a call, for a state that was made without local updates, or with others.
        MismatchError: in an outer update, on every rank, if a replica makes another call.

    Source: Douillard et al., "DiLoCo", arXiv 2311.08105, algorithm 1; fragments: Douillard et al.,
    "Streaming DiLoCo", arXiv 2501.18512, sections 2.2 and 2.3.

    Example:
        >>> import torch, fzero
        >>> @fzero.simulate(world_size=2)
        ... @fzero.shard(stage=0)
        ... @fzero.local(every=2, outer=fzero.optim.sgd(1.0))
        ... def step(state, x):
        ...     state, _ = fzero.grad_and_reduce(lambda p, x: (p["w"] * x).sum(), state)(x)
        ...     return fzero.apply_gradients(state), fzero.full_params(state, replica=True)["w"]
        >>> state = step.init({"w": torch.zeros(1)}, fzero.optim.sgd(1.0))
        >>> x = torch.tensor([1.0, 3.0])
        >>> for _ in range(3):
        ...     state, before = step(state, x)
        ...     print(before.flatten())
        tensor([0., 0.])
        tensor([-1., -3.])
        tensor([-4., -4.])
    """
    record = Local(every=every, outer=outer, fragments=fragments, delay=delay, mixing=mixing)

    rest = dict(outer=(outer, DEFAULT_OUTER), fragments=(fragments, 1))
    rest |= dict(delay=(delay, 0), mixing=(mixing, 0.0))

    def made_for_it(state: TrainState) -> TrainState:
        now = None if state.outer is None else state.outer.local
        if now != record:
            seen = "made without local updates" if now is None else f"of {now}"
            raise PhaseError(
                f"local: a state {seen} was given to a step of {record}.",
                cause="a state from fzero.init, or from another step.",
                fix="make it with this step's init: fzero.shard(fzero.local(step, ...), "
                "stage=...).init; or give fzero.init local=fzero.Local(every=...).",
            )
        return state

    return transform(
        "local",
        fn,
        entering("local", lambda state: map_states("local", made_for_it, state)),
        never_around=("local", "shard", "simulate"),
        right="fzero.shard(fzero.local(step, every=...), stage=...), with one local",
        options={"every": every} | {k: x for k, (x, usual) in rest.items() if x != usual},
        init_options={"local": record},
    )


def leave_out(state: S) -> S:
    """Return the state of a replica that is left out of the next mean of local updates.

    For a replica that knows that its last updates are not good: a bad batch, data that another
    replica has seen as well. In the next outer update (of each fragment) it contributes nothing,
    and goes on from the anchors that the others make, with its own optimizer state. One rank of a
    replica is enough. No collective. Of an engine, between a step and the next backward:
    `engine.state = fzero.leave_out(engine.state)`.

    Args:
        state: a `TrainState` with local updates, or a pytree of them.

    Returns:
        The state, or the pytree.

    Raises:
        PhaseError: for a state without local updates.
        LayoutError: for what is no state.

    Example:
        >>> import torch, fzero
        >>> local = fzero.Local(every=8)
        >>> state = fzero.init({"w": torch.ones(2)}, fzero.optim.sgd(1.0), stage=0, local=local)
        >>> fzero.leave_out(state).outer.weight
        tensor([0.])
    """

    def one(state: TrainState) -> TrainState:
        held = state.outer
        if held is None:
            raise PhaseError(
                "leave_out: a state without local updates.",
                cause="all ranks have one gradient: nobody can be left out of it.",
                fix="weight= of grad_and_reduce leaves a call out: give 0.",
            )
        return with_outer_record(state, replace(held, weight=torch.zeros_like(held.weight)))

    return map_states("leave_out", one, state)


# A state that has local updates: the ranks of its replica, the outer rule, the anchors.


def mesh_for(mesh: MeshLike, local: object) -> Axis:
    """Return the axis that `mesh` means; for local updates in two dims, those of replicas too."""
    return axis_of(mesh) if local is None else mesh_of_replicas(mesh)


def require_local(local: Any) -> None:
    """Raise `LayoutError` for a bad `local=`. What its rule needs is known when that is bound."""
    if local is None:
        return
    wanted = "fzero.Local(every=...), or None"
    require("local", local, lambda x: isinstance(x, Local), wanted)
    wanted = (
        "a rule of fzero.optim, as fzero.optim.sgd(0.7, momentum=0.9, nesterov=True), or "
        "fzero.optim.from_torch of a class or a factory"
    )
    rule = local.outer or DEFAULT_OUTER
    require("local: outer", rule, lambda x: getattr(x, "counts_by_leaf", False) is True, wanted)


def bound_outer(local: Local | None, named: Mapping[str, Tensor]) -> Any:
    """Return the outer rule of these parameters, {path: tensor}; None without local updates.

    Raises `LayoutError` for one that needs all parameters at once, or does not step them all.
    """
    if local is None:
        return None
    given: Any = DEFAULT_OUTER if local.outer is None else local.outer
    rule = given.bind(named)
    require_real_views(rule, named)
    if not (rule.elementwise or rule.leafwise):
        raise LayoutError(
            f"local: outer={rule!r}, which needs all parameters at once.",
            cause="a norm over all parameters (a clip in the rule, Prodigy), or random numbers; a "
            "replica makes the outer update parameter by parameter.",
            fix="use a rule that needs an element (sgd, adamw) or a matrix (fzero.optim.muon).",
        )
    if rule.block > 1:
        raise LayoutError(
            f"local: outer={rule!r}, with a codec as state_dtype.",
            cause="the rule of the outer update keeps its states in the precision of the anchors.",
            fix="give the codec to the rule of the state, and leave it out of outer=.",
        )
    left = [path for path, p in named.items() if learns(p) and rule.group_of(path) < 0]
    if left or getattr(rule, "held", None):
        seen = f"does not step {left[0]}" if left else "has the state of a run"
        raise LayoutError(
            f"local: outer={rule!r}, which {seen}.",
            cause="an optimizer that was made for a part of the model, or that made steps.",
            fix="give fzero.optim.from_torch a class or a factory.",
        )
    return rule


def as_inner(setup: Setup) -> Setup:
    """Return the setup of a state whose optimizer is the outer rule: its parts are the anchors'."""
    options = setup.layout.options
    layout = replace(setup.layout, options=replace(options, kept=options.outer_kept))
    return replace(setup, optimizer=options.outer, layout=layout)


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
    setup, offload, made = state.setup, state.setup.offload, []
    wide = torch.promote_types
    anchors = [x.to(wide(x.dtype, torch.float32), copy=True) for x in stepped_parts(state)]
    for fragment in range(held.local.fragments):
        numbers = held.local.numbers_in(fragment, len(anchors))
        pieces, owners = _parts_of(setup, numbers)
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
    return with_outer_record(state, fresh)


def outer_of(state: TrainState) -> Outer:
    """Return what local updates keep in a state that has them."""
    held = state.outer
    assert held is not None
    return held


def with_outer_record(state: TrainState, held: Outer) -> TrainState:
    """Return the state in which local updates keep this."""
    return state.replace(slots=with_outer(state.slots, held))


def outer_state(state: TrainState, fragment: int) -> TrainState:
    """Return the state whose optimizer is the outer rule, with what it keeps of a fragment."""
    return state.replace(
        optimizer=outer_of(state).optimizers[fragment],
        setup=as_inner(state.setup),
        slots=with_outer(state.slots, None),
    )


def _parts_of(setup: Setup, numbers: Sequence[int]) -> tuple[list[Piece], Owners | None]:
    """Return which elements of some flats belong to which leaf, and who owns what of them.

    None: each rank steps its parts.
    """
    own, owners = frozenset(numbers), owners_of(as_inner(setup))
    pieces = [piece for piece in pieces_of(setup) if piece.index in own]
    some = None if owners is None else owners.of(numbers)
    return pieces, some if some is not None and some.positions else None


def anchor_of(state: TrainState, index: int) -> Tensor:
    """Return this rank's part of the anchors of group `index`, in the dtype of the parameters.

    Of a state with local updates, and a group that learns.
    """
    flat = outer_of(state).anchors.flats[state.setup.layout.trainable.index(index)]
    return to_device(flat, state.device, state.params.flats[index].dtype)


# An update.


def after_local_update(state: TrainState, *, general: bool) -> TrainState:
    """Return the state after an update of the replica, and the outer one if it is due.

    general: whether the update is differentiated, mapped or traced. A collective of all replicas
    if it is due.
    """
    held = state.outer
    if held is None:
        return state
    held, due = outer.saw_update(held)
    state = with_outer_record(state, held)
    with torch.set_grad_enabled(general and torch.is_grad_enabled()):
        for one in due:
            does = _departed if isinstance(one, outer.Departure) else _arrived
            state = does(state, one.fragment, general)
    return state


_FINITE, _COUNTS = 1, 2  # bits of what a replica tells the others


def _departed(state: TrainState, due: int, general: bool) -> TrainState:
    """Return the state with the mean move of a fragment, which comes. A collective.

    In the mean are replicas of finite values that want to be: of that the host reads one number.
    Under a transform, in a trace and without values all are.
    """
    held, setup = outer_of(state), state.setup
    stepped = [to_device(x, state.device) for x in stepped_parts(state)]
    numbers = held.local.numbers_in(due, len(stepped))
    anchors, coming = held.anchors.flats, list(held.coming)
    size, shards = held.mesh.replicas.size, held.mesh.size // held.mesh.replicas.size
    finite = counts = [True] * size  # of each replica
    if not general:
        flag = _FINITE | _COUNTS
        if not any(map(has_no_values, stepped)):
            good = [torch.isfinite(x).all() for x in stepped if x.numel()]
            *fine, weight = torch.stack([*good, held.weight[due].bool()]).tolist()  # one read
            flag = _FINITE * all(fine) + _COUNTS * weight
        performer, name = performer_of(held.mesh), f"the outer update of fragment {due}"
        rows = [[flag]] if performer is None else performer.call_with(name, lambda: [flag])
        flags = [[x for (x,) in rows[i : i + shards]] for i in range(0, len(rows), shards)]
        finite = [all(x & _FINITE for x in some) for some in flags]
        counts = [all(x == _FINITE | _COUNTS for x in some) for some in flags]
    if bad := [i for i, x in enumerate(finite) if not x]:
        rest = "the mean is that of the others" if len(bad) < size else "the anchors stay"
        text = explain(
            f"replicas {bad} of {size} have parameters that are not finite: {rest}. They go on "
            "from the anchors, with optimizer states of zeros.",
            cause="a learning rate that is too large, or an overflow without a loss scale.",
            fix="lower the rate, or clip (fzero.clip); fzero.check_finite raises at once.",
        )
        warnings.warn(text, UserWarning, stacklevel=2)
    own, count = held.mesh.rank // shards, sum(counts)
    if count:
        pairs = ((to_device(anchors[k], state.device), stepped[k]) for k in numbers)
        moved = [a - x.to(a.dtype) if counts[own] else torch.zeros_like(a) for a, x in pairs]
        if general and setup.reduction.codec is not None:
            raise not_differentiable("gradients", setup.reduction.codec)
        sums = sum_over_replicas(setup, moved, held.mesh.replicas)
        coming[due] = replace(coming[due], flats=tuple(x / count for x in sums))
    weight = held.weight.clone()
    weight[due] = 1.0
    state = with_outer_record(state, replace(held, weight=weight, coming=tuple(coming)))
    values = {} if count else {k: anchors[k] for k in numbers}  # nobody has moved: back
    if bad:  # all replicas write, for virtual ranks make the same collectives
        values = dict(enumerate(stepped if finite[own] else anchors)) | values
    if not finite[own]:  # other fragments are not either, or would not be after the next update
        state = with_new_slots(state, stepped_parts(state))
    owned = donates(state) and not general
    return _written(state, values, owned=owned) if values else state


def sum_over_replicas(setup: Setup, moved: Sequence[Tensor], replicas: Axis) -> list[Tensor]:
    """sum_r(moved_r), on every replica: [n] -> [n] each. A collective.

        linear codec    x [n] -> encode -> reduced as it is -> decode
        another one     x [n] -> rows [R, m] -> encode -> all-to-all -> decode, sum [m]
                        sum [m] -> encode -> all-gather -> decode [R m] -> [n]

    All replicas decode the same, so their anchors stay equal, bit for bit. Nothing is kept of what
    encoding loses: the next outer update starts from the anchors that were made of it.
    """
    codec, ordered = setup.reduction.codec, setup.reduction.ordered
    if codec is None or replicas.size == 1:
        return reduce_many(moved, replicas, ordered=ordered)

    def add(x: Tensor) -> Tensor:
        if codec.linear:
            buffer, form = encoded(codec, x.view(1, -1))
            total = reduce_many([buffer], replicas, ordered=ordered)[0]
            return decoded(codec, total, form, x.dtype).reshape(-1)
        rows = torch.nn.functional.pad(x, (0, -x.numel() % replicas.size)).view(replicas.size, -1)
        buffer, form = encoded(codec, rows)
        (received,) = start_all_to_all([buffer.reshape(-1)], replicas).wait()
        own = sum_of(codec, form.rows_of(received), form, x.dtype)
        buffer, form = encoded(codec, own.view(1, -1))
        (received,) = start_gather([buffer.reshape(-1)], replicas).wait()
        return decoded(codec, form.rows_of(received), form, x.dtype).reshape(-1)[: x.numel()]

    return [add(x) for x in moved]


def _arrived(state: TrainState, due: int, general: bool) -> TrainState:
    """Make the outer update of a fragment by the mean move that has come, if any has."""
    held, setup, offload = outer_of(state), state.setup, state.setup.offload
    if not held.coming[due].held:
        return state
    means = [to_device(x, state.device) for x in held.coming[due].flats]
    numbers = held.local.numbers_in(due, len(held.anchors.flats))
    anchors, rules, coming = list(held.anchors.flats), list(held.optimizers), list(held.coming)
    options: dict[str, Any] = {"differentiable": general}
    if not offload.neutral:
        options["device"] = state.device
    pieces, owners = _parts_of(setup, numbers)
    if owners is not None:
        options["owners"] = owners.at((), state.device)
    given = dict(zip(numbers, means, strict=True))
    new, rules[due] = setup.layout.options.outer.advance(
        masked(anchors, numbers),
        [given.get(k, x.new_empty(0)) for k, x in enumerate(anchors)],
        rules[due],
        pieces,
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
        for k, anchor in values.items():
            x = to_device(anchor, state.device)
            own = to_device(stepped[k], state.device, x.dtype)
            values[k] = share * own + (1 - share) * x
    return _written(with_outer_record(state, after), values, owned=donates(state) and not general)


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


def with_new_slots(state: TrainState, stepped: Sequence[Tensor]) -> TrainState:
    """Return the state with zeros for what its optimizer keeps, but for masters and counters.

    A rule of which owners keep something begins as before its first step, counters too: a basis of
    zeros is none. stepped: what the optimizer steps, this rank's part.
    """
    slots = state.setup.optimizer.slots(state.optimizer)
    new: dict[int, Tensor] = {}
    for name in (name for name in slots if name != MASTERS):
        for group, x in zip(state.setup.layout.trainable, slots[name], strict=True):
            codec, zeros = codec_in(state.setup, group, name), torch.zeros_like(x)
            new[id(x)] = zeros if codec is None or not x.numel() else codec.fill(zeros)
    state = with_tensors(state, new)
    if owners_of(state.setup) is None:
        return state
    rule: Any = state.setup.optimizer
    return state.replace(
        optimizer=rule.restarted(state.optimizer, rule_state(state.setup, stepped))
    )


# What does not go with it.


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
        seen=lambda options: (
            f"optimizer_over={options.optimizer_over!r} with local updates."
            if options.local is not None and options.optimizer_over != "shard"
            else ""
        ),
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
