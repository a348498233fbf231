"""`iter_params`: whole parameters one after another, for those who cannot hold them all at once.

    digests of all leaves, once    which of them have changed since the last time
    for each unit with such        a round: does every rank go on?
                                   gather its groups, yield its leaves, free them

A unit is what stage 3 gathers together. All stages have the same ones, so that the order is the
same everywhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple, overload

import optree
import torch
from torch import Tensor
from torch.nn import Parameter

from fzero.collectives import FUNCTIONAL, Performer, performer_of
from fzero.context.current_rank import has_no_values
from fzero.context.modes import in_transform, needs_func
from fzero.errors import AxisError, LayoutError, PhaseError
from fzero.machine.named_shards import all_paths, leaf_paths
from fzero.machine.offload import to_device
from fzero.machine.packing import (
    digest,
    gather_parts,
    leaf_ranges,
    stored_leaves,
    unpack,
    unpack_groups,
)
from fzero.machine.partition import assemble
from fzero.ranks.mesh import Axis
from fzero.state import Layout, Placement, TrainState, buffers
from fzero.transforms.backward_pass import (
    Agreed,
    agree,
    raises_together,
    reduce_agreed,
    require_held,
)
from fzero.transforms.donation import check_alive, without_donation
from fzero.transforms.grad import require_learner
from fzero.transforms.local import anchor_of
from fzero.transforms.loss_scale import without_scale
from fzero.transforms.models import ParamsT, axes_of_loss, call_of_states, flatten_states
from fzero.transforms.recipe import mean_of

# Reading a state: full parameters and full gradients as pytrees, gathered from all ranks.


@overload
def full_params(state: TrainState[ParamsT], *, replica: bool = False) -> ParamsT: ...
@overload
def full_params(state: Any, *, replica: bool = False) -> Any: ...
def full_params(state: Any, *, replica: bool = False) -> Any:
    """Return copies of the parameters, whole on every rank: p = concat_r(p_r).

    They come as the pytree given to `init`. A write to them changes no state, and they stay as they
    are when the state goes on. Frozen floating leaves are parameters that require no grad, so that
    another `init` sees them as frozen too.

    Args:
        state: a `TrainState`, or a pytree of them.
        replica: of a state with local updates (`fzero.local`) the parameters of this rank's
            replica; else the anchors, which are equal on all replicas.

    Returns:
        The pytree of full tensors, in the shapes and dtypes given to `init`; P bytes on each rank.
        For a pytree of states one such pytree for each. A collective at stage 3: every rank must
        call it.

    Raises:
        LayoutError: for what is no state.
        DonatedError: for a state that was used up.
        MismatchError: at stage 3, on every rank, when the ranks make other calls.

    Source: Rajbhandari et al., "ZeRO", arXiv 1910.02054, section 5.3.

    Example:
        >>> import torch, fzero
        >>> state = fzero.init([torch.ones(2)], fzero.optim.sgd(0.1), stage=3)
        >>> full_params(state)
        [tensor([1., 1.])]
    """
    states, treespec = flatten_states("full_params", state)
    for one in states:
        check_alive(one, written=True)  # it shows what is there
    gathered = []
    for one in states:
        at = one.params if replica or one.outer is None else one.outer.anchors
        if Placement.SHARDED in (one.params.placement, at.placement) and one.setup.axis.size > 1:
            gathered.append(one)
    agree(call_of_states("full_params", treespec), gathered)
    made = []
    for one in states:
        layout = one.setup.layout
        groups = whole_groups(one, range(len(layout.groups)), replica=replica)
        found = _leaves_apart(layout, groups)
        for i, leaf in enumerate(layout.leaves if not in_transform() else ()):
            differs = leaf.dtype.is_floating_point or leaf.dtype.is_complex
            if differs and not leaf.trainable:  # it comes back as it came
                found[i] = Parameter(found[i], requires_grad=False)
        made.append(assemble(layout, found))
    return optree.tree_unflatten(treespec, made)


@overload
def gradients(state: TrainState[ParamsT]) -> ParamsT: ...
@overload
def gradients(state: Any) -> Any: ...
def gradients(state: Any) -> Any:
    """Return copies of the mean gradients, whole on every rank: g = (1/W) sum_r g_r.

    They come in the structure of the parameters. A write to them (`clip_grad_norm_`, `mul_`)
    changes no state: `fzero.clip` clips, and `fzero.add_gradients(..., reduced=True)` takes changed
    ones. With `reduce_op="sum"` it is sum_r g_r; after weighted calls sum(w g) / sum(w) of those so
    far.

    What is pending in an open window is reduced for the answer (the state itself keeps it
    pending). Not clipped, and without the loss scale. `full_gradients` is another name of it.

    Args:
        state: a `TrainState`, or a pytree of them.

    Returns:
        The pytree of full tensors, in the shapes of the parameters, in `accumulate_dtype`: by
        default in fp32 for 16-bit ones, else in their dtype. Unused leaves are zero; in the place
        of a frozen one, which has no gradient, stands None. For a pytree of states one such pytree
        for each. A collective: every rank must call it.

    Raises:
        LayoutError: for what is no state, and where no leaf of any state learns.
        PhaseError: if a state holds no gradients.
        DonatedError: for a state that was used up.
        MismatchError: on every rank, when the ranks make other calls.

    Source: Rajbhandari et al., "ZeRO", arXiv 1910.02054, section 5.2.

    Example:
        >>> import torch, fzero
        >>> state = fzero.init({"w": torch.tensor([3.0])}, fzero.optim.sgd(0.1), stage=2)
        >>> state, _ = fzero.grad_and_reduce(lambda p: (p["w"] ** 2).sum(), state)()
        >>> gradients(state)
        {'w': tensor([6.])}
    """
    states, treespec = flatten_states("gradients", state)
    for one in states:
        check_alive(one)
    require_learner(states, "gradients")
    agreed = agree(call_of_states("gradients", treespec), states)
    require_held(agreed, "gradients")
    found = [_gradients(one, of_one) for one, of_one in zip(states, agreed, strict=True)]
    return optree.tree_unflatten(treespec, found)


full_gradients = gradients


def whole_groups(
    state: TrainState, groups: Iterable[int], *, replica: bool = False
) -> dict[int, Tensor]:
    """Return {group: its full flat}, on the device. A collective where any of them is cut."""
    by_placement: dict[Placement, dict[int, Tensor]] = {}
    for index, flat, placement in held_of(state, groups, replica=replica):
        by_placement.setdefault(placement, {})[index] = to_device(flat, state.device)
    whole: dict[int, Tensor] = {}
    while by_placement:
        placement, held = by_placement.popitem()
        full = gather_parts(state.setup, [*held.values()], placement, Placement.REPLICATED)
        whole.update(zip(held, full, strict=True))
    return whole


def held_of(
    state: TrainState, groups: Iterable[int], *, replica: bool = False
) -> list[tuple[int, Tensor, Placement]]:
    """Return (group, what this rank has of its parameters, where ranks have the rest).

    replica: of a state with local updates what its replica has; else the anchors.
    """
    outer, learning = None if replica else state.outer, state.setup.layout.trainable
    return [
        (index, state.params.flats[index], state.params.placement)
        if outer is None or index not in learning
        else (index, anchor_of(state, index), outer.anchors.placement)
        for index in groups
    ]


def placement_of(state: TrainState, index: int) -> Placement:
    """Return the placement that `held_of` gives of a group."""
    outer, learning = state.outer, state.setup.layout.trainable
    held = state.params if outer is None or index not in learning else outer.anchors
    return held.placement


def _leaves_apart(layout: Layout, flats: dict[int, Tensor]) -> dict[int, Tensor]:
    """Return the leaves of full flats: copies, so that what is saved of one is that leaf alone."""
    if in_transform():
        return unpack_groups(layout, flats)
    found: dict[int, Tensor] = {}
    for index in list(flats):  # no flat lives longer than its copy is made
        leaves = unpack(layout, index, flats.pop(index))
        found.update(zip(layout.groups[index].leaves, [x.clone() for x in leaves], strict=True))
    return found


def _gradients(state: TrainState, agreed: Agreed) -> Any:
    setup, layout = state.setup, state.setup.layout
    state = reduce_agreed(without_donation(state), agreed)
    held, mean = buffers.require_reduced(state.gradients), mean_of(state)
    here = [to_device(flat, state.device) for flat in held.flats]
    whole = gather_parts(setup, here, held.placement, Placement.REPLICATED)
    means = {
        i: mean.of(without_scale(state, x)) for i, x in zip(layout.trainable, whole, strict=True)
    }
    del whole
    found = _leaves_apart(layout, means)
    return assemble(layout, found)


def iter_params(state: Any, *, since: Mapping[str, str] | None = None) -> ParamIterator:
    """Iterate over (path, whole tensor) of the parameters, with one unit whole at a time.

    For who takes parameters one by one: an inference engine (`load_weights`), a file, an average.
    Each rank gets all of them, in the order of the parameters, unit by unit: a unit is gathered,
    its tensors are yielded, and it is freed. They are copies: a write changes no state, and what is
    kept stays as it is. In the body of the loop other calls may be made, by all ranks alike.

    The paths are those of `fzero.checkpoint.state_dict(state)`: a tied parameter comes at each of
    its paths, as one tensor. Of a pytree of states they begin with the place of the state:
    "critic.weight". A state on a part of a mesh gives the values of this rank's place. With local
    updates (`fzero.local`) they are the anchors, as in `full_params`.

    It is a collective at every stage: all ranks iterate, also where one alone needs the values. A
    rank that stops early (`break`, an error in the loop, `close()`) ends the iteration of all: the
    others get the rest of the unit that they are in, and then their loops end. `stopped_by` says
    which ranks have stopped; the units that all ranks have finished are in `digests`.

    Args:
        state: a `TrainState`, or a pytree of them; `engine.state` of an engine.
        since: the `digests` of an earlier iteration, the same on every rank. Parameters of which
            the digest is the same are not yielded, and units without another one not gathered.

    Returns:
        An iterator with
        `digests`: {path: digest} of the values that were yielded so far, and of those that were
        left out as unchanged: for `since`. Equal on every rank, and at any stage and number of
        ranks; plain texts, which a checkpoint may have among its `extra`.
        `stopped_by`: the ranks that stopped early; ().
        `close()`: stops. `break` does so by itself; who calls next() closes it.

    Raises:
        LayoutError: for what is no state, and for digests that are none.
        PhaseError: inside of a loss, an evaluation, a transform of torch.func or a trace.
        DonatedError: for a state that was used up, also in the middle of an iteration.
        AxisError: for states on meshes that have nothing to do with each other.
        MismatchError: on every rank, if the ranks make other calls, or have other digests.

    Example:
        >>> import torch, fzero
        >>> params = {"w": torch.ones(2), "scale": torch.tensor(3.0)}
        >>> state = fzero.init(params, fzero.optim.sgd(1.0), stage=3)
        >>> weights = fzero.iter_params(state)
        >>> [path for path, _ in weights]
        ['w', 'scale']
        >>> state, _ = fzero.grad_and_reduce(lambda p: p["w"].sum(), state)()
        >>> state = fzero.apply_gradients(state)
        >>> for path, tensor in fzero.iter_params(state, since=weights.digests):
        ...     print(path, tensor)
        w tensor([0., 0.])
    """
    states, treespec = flatten_states("iter_params", state)
    over = axes_of_loss(states, [one.mesh for one in states])[0]  # all ranks that iterate together
    for one in states:
        if one.mesh.mesh is None and one.mesh.size != over.size:
            raise AxisError(
                f"iter_params: a state on {one.mesh} beside one on {over}.",
                cause="states on meshes that are no parts of one mesh.",
                fix="iterate over one after the other; or make both on one mesh: "
                'mesh = fzero.Mesh(...), mesh["data"].',
            )
    for one in states:
        check_alive(one, written=True)  # it shows what is there
    performer = performer_of(over)
    flats = [flat for one in states for flat in one.params.flats]
    passes = () if performer is None else performer.protocol.inside
    inside = any(number >= FUNCTIONAL for number in passes) or needs_func(flats)
    if inside or any(map(has_no_values, flats)):
        where = "a trace or a plan, where tensors have no values"
        where = "a loss, an evaluation, a transform of torch.func or a trace" if inside else where
        raise PhaseError(
            f"iter_params inside of {where}.",
            cause="it gives values, without a graph: a gradient by them would silently be missing.",
            fix="use the `params` that the function is given; or iterate outside of it.",
        )
    with raises_together(over):
        mark = _mark_of(since)
    if performer is not None:
        at = [f"stage {one.stage}, update {int(one.step)}" for one in states]
        performer.call("\n".join(["iter_params", *at, f"since {mark}"]))
    prefixes = [".".join(map(str, path)) for path in treespec.paths()]
    found = _digests(states, over, performer)
    units, known = list[_Unit](), dict[str, str]()
    for one, prefix, of_leaves in zip(states, prefixes, found, strict=True):
        paths = _paths(one.setup.layout, prefix)
        for leaves in _units(one.setup.layout):
            new = {i: dict.fromkeys(paths[i], of_leaves[i]) for i in leaves}
            same = [i for i in leaves if since is not None and new[i].items() <= since.items()]
            for i in same:
                known |= new.pop(i)
            units += [_Unit(one, new)] if new else []
    return ParamIterator(performer, units, known)


class _Unit(NamedTuple):
    """Leaves that are gathered together: of each its paths, with its digest."""

    state: TrainState
    digests: dict[int, dict[str, str]]


class ParamIterator(Iterator[tuple[str, Tensor]]):
    """What `iter_params` returns: where an iteration is, on all ranks."""

    def __init__(
        self, performer: Performer | None, units: Iterable[_Unit], known: dict[str, str]
    ) -> None:
        self._performer, self._left, self._known = performer, deque(units), known
        self._unit: _Unit | None = None  # of which tensors are yielded now
        self._tensors: Iterator[tuple[str, Tensor]] = iter(())
        self._is_open = True
        self.stopped_by: tuple[int, ...] = ()

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Go on from here; stop on all ranks when the loop over it is left."""
        try:
            while True:
                try:
                    yield next(self)
                except StopIteration:
                    return
        finally:
            self.close()

    def __next__(self) -> tuple[str, Tensor]:
        """Return the next path and its tensor. A collective."""
        try:
            while True:
                for found in self._tensors:
                    return found
                if self._is_open:  # do all ranks go on? They have finished this unit then
                    if self._left:
                        check_alive(self._left[0].state, written=True)
                    self._round(stops=False)
                if not self._is_open:
                    raise StopIteration
                for digests in () if self._unit is None else self._unit.digests.values():
                    self._known |= digests
                self._unit = self._left.popleft() if self._left else None
                self._is_open = self._unit is not None
                if self._unit is None:
                    raise StopIteration
                self._tensors = _tensors(*self._unit)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop, on all ranks. A collective, unless it is over."""
        self._tensors = iter(())
        if self._performer is not None and self._performer.protocol.known:
            self._is_open = False  # all ranks have raised together, in another call
        if self._is_open:
            self._round(stops=True)

    @property
    def digests(self) -> dict[str, str]:
        """{path: digest} of what is unchanged, and of units that all ranks have finished."""
        return dict(self._known)

    def _round(self, *, stops: bool) -> None:
        self._is_open = False  # an error of the round is one of all ranks
        heard = ((int(stops),),)
        if self._performer is not None:
            at = next((path for one in self._left for x in one.digests.values() for path in x), "")
            text = f"iter_params, {f'on to {at}' if at else 'at its end'}"
            heard = self._performer.call_with(text, lambda: [int(stops)])
        self.stopped_by = tuple(rank for rank, (stopped,) in enumerate(heard) if stopped)
        self._is_open = not self.stopped_by


def _tensors(
    state: TrainState, wanted: Mapping[int, Mapping[str, str]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield (path, tensor) of the wanted leaves of one unit: copies. A collective at first."""
    groups, last = state.setup.layout.groups, dict[int, int]()
    for index, group in enumerate(groups):
        if members := [i for i in group.leaves if i in wanted]:
            last[index] = max(members)
    with torch.no_grad():
        flats = whole_groups(state, last)
    for i in wanted:
        check_alive(state, written=True)  # an engine has stepped in the body of the loop
        index = next(index for index in last if i in groups[index].leaves)
        flat = flats.pop(index) if i == last[index] else flats[index]
        tensor = _leaf(state, index, i, flat)
        del flat  # a full flat goes before its last tensor is used
        yield from ((path, tensor) for path in wanted[i])
        del tensor


@torch.no_grad()
def _leaf(state: TrainState, index: int, number: int, flat: Tensor) -> Tensor:
    """Return a leaf of a full flat, decoded, in memory that nobody else has."""
    members = state.setup.layout.groups[index].leaves
    leaf, stored = stored_leaves(state.setup.layout, index, flat.detach())[members.index(number)]
    tensor, is_gathered = leaf.of(stored), state.setup.part(placement_of(state, index), 0).count > 1
    shared = tensor.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
    return tensor.clone() if shared and not (is_gathered and len(members) == 1) else tensor


def _units(layout: Layout) -> list[list[int]]:
    """Return the leaves of each unit of stage 3, in the order of the parameters."""
    found: dict[str, list[int]] = {}
    for i, unit in enumerate(layout.options.units):
        found.setdefault(unit, []).append(i)
    return [*found.values()]


def _paths(layout: Layout, prefix: str) -> list[list[str]]:
    """Return the paths of every leaf, without those that are the name of another one."""
    owner = {name: i for i, name in enumerate(leaf_paths(layout))}
    found = [
        [path for path in dict.fromkeys(paths) if owner.setdefault(path, i) == i]
        for i, paths in enumerate(all_paths(layout))
    ]
    if not prefix:
        return found
    return [[prefix if path == "." else f"{prefix}.{path}" for path in some] for some in found]


# What has changed.


@torch.no_grad()
def _digests(
    states: Sequence[TrainState], over: Axis, performer: Performer | None
) -> list[list[str]]:
    """Return the digest of every leaf of each state: of its values at all places. A collective."""
    own = [[0] * len(one.setup.layout.leaves) for one in states]  # of what this rank has
    for one, sums in zip(states, own, strict=True):
        setup = one.setup
        for index, flat, placement in held_of(one, range(len(setup.layout.groups))):
            here = to_device(flat, one.device)
            for some in leaf_ranges(setup.layout, index, setup.part(placement, setup.axis.rank)):
                sums[some.leaf] = digest(some.of(here), some.start)
    rows = [own] if performer is None else performer.tell(own)
    found = list[list[str]]()
    for number, one in enumerate(states):
        setup, texts = one.setup, dict[int, str]()
        places = [some for _, some in sorted(setup.axis.parts(rows).items())]
        if one.mesh.size == over.size:  # the replicas of local updates have the same anchors
            places = places[:1]
        for index, group in enumerate(setup.layout.groups):
            ranks = setup.part(placement_of(one, index), 0).count  # that have other elements
            for i in group.leaves:
                leaf = setup.layout.leaves[i]
                sums = [sum(row[number][i] for row in some[:ranks]) % 2**64 for some in places]
                text = f"{leaf.dtype} {leaf.shape} {sums}"
                texts[i] = blake2b(text.encode(), digest_size=8).hexdigest()
        found.append([texts[i] for i in range(len(texts))])
    return found


def _mark_of(since: Any) -> str:
    """Return what ranks compare of the digests of an earlier iteration."""
    if since is None:
        return "the beginning"
    is_text = isinstance(since, Mapping) and all(
        isinstance(x, str) for pair in since.items() for x in pair
    )
    if not is_text:
        raise LayoutError(
            f"iter_params: since is a {type(since).__name__}.",
            cause="the iterator itself, or tensors, in the place of digests.",
            fix="pass what its `digests` returned: {path: digest}.",
        )
    pairs = "\n".join(f"{path} {since[path]}" for path in sorted(since))
    return f"digests {blake2b(pairs.encode(), digest_size=8).hexdigest()}"
