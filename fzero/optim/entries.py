"""What a rule keeps, as entries of a state: slots, and what owners keep; its counters. Pure.

The state may be any pytree (fzero's own record, optax's or TorchOpt's named tuples); only its
form says what its leaves are:

    a list or tuple with one 1-D tensor    a slot: elements that belong to the elements of the
    for each trainable group, each as      parameters, in the same order and with the same
    long as the group here (or empty)      sharding; an empty tensor holds nothing
    a list with one 0-d tensor for each    one counter that was kept once for each group; all
    trainable group                        must agree
    any other number or 1-element tensor   a counter of its own
    anything else                          refused: it could not be resharded

What owners keep of whole parameters has the elements of its parameter, or any shape: its first
step makes that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from fzero.errors import CheckpointError, LayoutError
from fzero.machine.blocks import Blocks
from fzero.machine.named_shards import leaf_paths
from fzero.machine.owners import owners_of
from fzero.state import NAMESPACE, Form, Placement, Setup, TrainState
from fzero.state.entry import Entry


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """What one leaf of an optimizer state is."""

    name: str  # of the slot or the counter: the same in every layout
    position: int | None = None  # of a slot: which trainable group; None: a counter


RULE = "optimizer/"
"""Before the names of what a rule keeps, as an entry of a state."""


class RuleSlot(NamedTuple):
    """A flat that an optimizer keeps for the elements of one group; an empty one is no slot."""

    name: str  # in a checkpoint: torch.optim's
    group: int  # of the layout
    flat: Tensor  # as this rank holds it
    codec: Blocks | None = None  # what it is encoded by

    @property
    def numbers(self) -> Tensor:
        """Its elements: the flat itself, or what it is decoded to."""
        return self.flat if self.codec is None else self.codec.numbers(self.flat)


def slots_of(state: TrainState) -> list[RuleSlot]:
    """Return all slots of the optimizer of a state, fp32 masters among them.

    They are the same on every rank but for the values. Raises `LayoutError` as `roles_of`.
    """
    trainable = state.setup.layout.trainable
    return [
        _slot(state, role.name, trainable[role.position], leaf)
        for role, leaf in _pairs(state)
        if role.position is not None and leaf.numel()
    ]


def _slot(state: TrainState, name: str, group: int, flat: Tensor) -> RuleSlot:
    return RuleSlot(name, group, flat, codec_in(state.setup, group, name))


def codec_in(setup: Setup, group: int, slot: str) -> Blocks | None:
    """Return what a slot of a group is encoded by; None where it is kept in numbers."""
    return setup.optimizer.codec_of(setup.layout.leaves[setup.layout.groups[group].leaves[0]], slot)


def with_tensors(state: TrainState, new: Mapping[int, Tensor]) -> TrainState:
    """Return the state with other tensors in its optimizer, by the ids of the old ones."""
    made: Any = optree.tree_map(lambda x: new.get(id(x), x), state.optimizer, namespace=NAMESPACE)
    return state.replace(optimizer=made)


def slots_across(states: Sequence[TrainState]) -> Iterator[tuple[str, int, list[Tensor]]]:
    """Yield (name, group, each rank's elements) for every slot of a state, given as its ranks'."""
    for same in zip(*map(slots_of, states), strict=True):
        yield same[0].name, same[0].group, [slot.numbers for slot in same]


def rule_entries(state: TrainState, rank: int) -> list[Entry]:
    """Return all that the rule of a rank's state keeps, but for its counters.

    Raises `LayoutError` as `slots_of`.
    """
    setup, found = state.setup, dict[str, dict[int, RuleSlot]]()
    for slot in slots_of(state):
        found.setdefault(slot.name, {})[slot.group] = slot
    form = Form(placement=setup.optimizer_state)
    even = [
        Entry(
            name=RULE + name,
            form=form,
            values={group: slot.flat for group, slot in some.items()},
            codecs={group: slot.codec for group, slot in some.items() if slot.codec is not None},
        )
        for name, some in found.items()
    ]
    owners, owned = owners_of(setup), list[Entry]()
    if owners is None:
        return even
    rule, names, mine = setup.optimizer, leaf_paths(setup.layout), owners.rank_of(rank)
    form = Form(leaves="named", placement=Placement.OWNER)
    for slot, kept in rule.owned(state.optimizer).items():  # empty on other ranks than the owner's
        values, own = dict[str, Tensor](), set[str]()
        for one, x in zip(owners.leaves, kept, strict=True):
            if slot in rule.made_by_steps(one.leaf) or slot in rule.kept_of(one.leaf):
                values[names[one.index]] = x
                own |= {names[one.index]} if one.owner == mine else set()
        owned.append(Entry(name=RULE + slot, form=form, values=values, owned=frozenset(own)))
    return [*even, *owned]


def with_rule_entries(state: TrainState, entries: Sequence[Entry]) -> Any:
    """Return the optimizer state in which those of its entries have their values."""
    even = {one.name: one.values for one in entries if one.per_leaf}
    owned = {one.name: one.values for one in entries if not one.per_leaf}
    made = optimizer_with(
        state, lambda slot: even.get(RULE + slot.name, {}).get(slot.group, slot.flat)
    )
    owners, rule = owners_of(state.setup), state.setup.optimizer
    if owners is None or not owned:
        return made
    names = leaf_paths(state.setup.layout)
    kept = {
        slot: tuple(
            owned.get(RULE + slot, {}).get(names[one.index], x)
            for one, x in zip(owners.leaves, some, strict=True)
        )
        for slot, some in rule.owned(made).items()
    }
    return rule.with_owned(made, kept)


def slot_facts(state: TrainState) -> dict[str, dict[str, str]]:
    """Return {slot: {name of a leaf: its dtype}} of all that has the elements of its leaf.

    The same at every stage and number of ranks. What the first step makes is not in it.
    """
    setup, layout = state.setup, state.setup.layout
    names, found = leaf_paths(layout), dict[str, dict[str, str]]()
    for slot, group, flat, codec in slots_of(state):
        own = [names[i] for i in layout.groups[group].leaves if layout.leaves[i].numel]
        text = str(flat.dtype if codec is None else codec.codec).replace(" ", "")
        found.setdefault(slot, {}).update(dict.fromkeys(own, text))
    owners = owners_of(setup)
    for slot, some in ({} if owners is None else setup.optimizer.owned(state.optimizer)).items():
        for one, x in zip([] if owners is None else owners.leaves, some, strict=True):
            if slot in setup.optimizer.kept_of(one.leaf):
                found.setdefault(slot, {})[names[one.index]] = str(x.dtype)
    return found


def require_kept(state: TrainState, rank: int) -> None:
    """Raise `LayoutError` where a rank lacks what steps have made of a parameter that it owns."""
    owners, rule = owners_of(state.setup), state.setup.optimizer
    if owners is None or not int(state.optimizer.count):
        return
    fresh, owned = set(rule.unstepped(state.optimizer)), rule.owned(state.optimizer)
    for number, one in enumerate(owners.leaves):
        own = one.owner == owners.rank_of(rank)
        for slot in rule.made_by_steps(one.leaf) if own else ():
            if not owned[slot][number].numel() and one.leaf.path not in fresh:
                name = leaf_paths(state.setup.layout)[one.index]
                raise LayoutError(
                    f"load: there is no {slot} of {name} in the checkpoint.",
                    cause="the state was made with another optimizer than the saved one.",
                    fix="make the state with the optimizer that was saved. Nothing was changed.",
                )


def counters_in(state: TrainState) -> dict[str, int | float | bool]:
    """Return what a foreign state counts. Raises `LayoutError` if two of one name differ."""
    found: dict[str, int | float | bool] = {}
    for role, leaf in _pairs(state):
        if role.position is not None:
            continue
        value = leaf.item() if isinstance(leaf, Tensor) else leaf
        if found.setdefault(role.name, value) != value:
            raise LayoutError(
                f"the optimizer's {role.name} is {found[role.name]} for one group of "
                f"parameters and {value} for another.",
                cause="an optimizer that counts for each tensor, and does not update all.",
                fix="keep one counter: how parameters are grouped depends on the ranks.",
            )
    return found


def optimizer_with(
    state: TrainState,
    made: Callable[[RuleSlot], Tensor],
    counters: Mapping[str, Any] | None = None,
) -> Any:
    """Return the optimizer state with made(slot) for each slot, and a foreign one's counters.

    None: it keeps its own. Raises `CheckpointError` for a counter that the state cannot hold.
    """
    trainable = state.setup.layout.trainable

    def new(role: Role, leaf: Any) -> Any:
        if role.position is not None:
            slot = _slot(state, role.name, trainable[role.position], leaf)
            new = made(slot) if leaf.numel() else leaf.clone()
            codec = slot.codec
            return new if codec is None or new.dtype is torch.uint8 else codec.row_of(new)
        name = f"the optimizer's {role.name}"
        return leaf if counters is None else number_like(name, leaf, counters[role.name])

    rule = state.setup.optimizer
    leaves = [new(role, leaf) for role, leaf in _pairs(state)]
    treespec = optree.tree_structure(_without_owned(state), namespace=NAMESPACE)
    even: Any = optree.tree_unflatten(treespec, leaves)
    return rule.with_owned(even, rule.owned(state.optimizer))


def _without_owned(state: TrainState) -> Any:
    """The optimizer state without what owners keep, which goes with no flat."""
    return state.setup.optimizer.with_owned(state.optimizer, {})


def _pairs(state: TrainState) -> Iterator[tuple[Role, Any]]:
    """Yield (name in a checkpoint, leaf of the optimizer state, its role)."""
    setup, layout = state.setup, state.setup.layout
    if odd := setup.optimizer.odd_slots:
        raise LayoutError(
            f"{setup.optimizer!r} keeps {', '.join(sorted(odd))}, of another shape than their "
            "parameters.",
            cause="a rule that needs all parameters at once, so that none has an owner, with row "
            "means, factors, or a number for each parameter.",
            fix="save fzero.full_params(state) yourself, and begin with a new optimizer; or use "
            "an optimizer whose state is shaped as the parameters.",
        )
    numels = [setup.numel(i, setup.optimizer_state) for i in layout.trainable]
    names = setup.optimizer.saved_names(state.optimizer, layout.leaves)
    kept = _without_owned(state)
    leaves = optree.tree_leaves(kept, namespace=NAMESPACE)
    rows = [
        {x.wire_bytes(numel) for name in {*names.parts.values()} if (x := codec_in(setup, i, name))}
        for i, numel in zip(layout.trainable, numels, strict=True)
    ]
    for role, leaf in zip(roles_of(kept, numels, rows), leaves, strict=True):
        name = names.parts.get(role.name, role.name)
        yield replace(role, name=name), leaf


def roles_of(
    optimizer: Any, numels: Sequence[int], rows: Sequence[Collection[int]] = ()
) -> list[Role]:
    """Return the role of every leaf of `optimizer`, in the order of its leaves.

    numels: of the trainable groups' flat tensors, as the optimizer has them on this rank.
    rows: of each, how many bytes it may have where it is encoded.

    Raises `LayoutError`, naming the place, for a leaf that is neither a slot nor a counter.

    Example:
        >>> import torch
        >>> state = {"mu": [torch.zeros(3), torch.zeros(5)], "count": torch.tensor(7)}
        >>> [(role.name, role.position) for role in roles_of(state, [3, 5])]
        [("['count']", None), ("['mu']", 0), ("['mu']", 1)]
    """
    accessors, leaves, _ = optree.tree_flatten_with_accessor(optimizer, namespace=NAMESPACE)
    found, pairs = list[Role](), zip(accessors, leaves, strict=True)

    def is_flat(leaf: Any, numel: int, encoded: Collection[int]) -> bool:
        size = leaf.numel() if isinstance(leaf, Tensor) and leaf.ndim == 1 else -1
        return size in (0, numel) or (size in encoded and leaf.dtype is torch.uint8)

    def name_of(accessor: Any) -> str:
        """`.moments[0]` as `moments[0]`; the root as `.`."""
        return accessor.codify("").removeprefix(".") or "."

    for parent, some in groupby(pairs, key=lambda pair: pair[0][:-1]):
        node, children = parent(optimizer), list(some)
        own = [leaf for _, leaf in children]
        if type(node) in (list, tuple) and len(node) == len(own) == len(numels):
            name = name_of(parent)
            if all(map(is_flat, own, numels, rows or [()] * len(numels))):
                found += [Role(name=name, position=i) for i in range(len(own))]
                continue
            if type(node) is list and all(isinstance(x, Tensor) and not x.ndim for x in own):
                found += [Role(name=name) for _ in own]
                continue
        for accessor, leaf in children:
            name, is_tensor = name_of(accessor), isinstance(leaf, Tensor)
            single = leaf.numel() == 1 and not leaf.is_complex() if is_tensor else False
            if not (single or isinstance(leaf, int | float)):
                seen = f"a {leaf.dtype} of shape {tuple(leaf.shape)}" if is_tensor else f"{leaf!r}"
                raise LayoutError(
                    f"the optimizer state has {seen} at {name}: neither a number nor in a list of "
                    f"one flat tensor for each of {len(numels)} groups (of {list(numels[:8])} "
                    "elements here).",
                    cause="an optimizer with state that does not go with the elements of the "
                    "parameters (a matrix factor, a history, a random state).",
                    fix="keep such state outside the optimizer, e.g. in save(..., extra=...), or "
                    "save fzero.full_params(state) yourself.",
                )
            found.append(Role(name=name))
    return found


def number_like(name: str, like: Tensor | float, value: float) -> Any:
    """Return `value` as a number of the form of `like`, a 1-element tensor or a number.

    Raises `CheckpointError` if it is none.
    """
    if isinstance(like, Tensor):
        kind: Any = like.dtype
        is_float, is_bool = like.is_floating_point(), like.dtype is torch.bool
    else:
        kind = type(like)
        is_float, is_bool = kind is float, kind is bool
    try:
        if (type(value) is bool) is is_bool and (is_float or type(value) is not float):
            made = float(value) if is_float else value
            return like.new_full(like.shape, made) if isinstance(like, Tensor) else made
    except (RuntimeError, OverflowError):  # a number that the dtype does not hold
        pass
    raise CheckpointError(
        f"load: {name} is {value!r:.80} in the checkpoint, which is no {kind}.",
        cause="a manifest that another program wrote, or another kind of state.",
        fix="use another copy of the checkpoint. Nothing was changed.",
    )
