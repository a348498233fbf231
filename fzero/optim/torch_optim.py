"""`from_torch`: a torch.optim optimizer steps this rank's flat shards.

from_torch       what it is, and how precise
TorchOptimizer   bound to parameters: what the state keeps, and its update
an update        even flats where they are, whole parameters by their owners
"""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fzero.context.current_rank import has_no_values
from fzero.context.rng import seeded
from fzero.errors import LayoutError, PhaseError
from fzero.errors.check import called_as, require
from fzero.machine.blocks import Blocks
from fzero.machine.offload import cloned
from fzero.machine.owners import Owners, Wholes
from fzero.machine.partition import identity
from fzero.machine.tree_sum import even_spans, threads_on
from fzero.optim import encoded_moments
from fzero.optim.encoded_moments import Flats, Portion, Slots
from fzero.optim.optimizer import OfPrecision, copied, not_differentiable, shown
from fzero.optim.per_leaf_step_counts import Apart, Parted, parted, settled
from fzero.optim.precision import (
    Place,
    Precision,
    StateDtype,
    make_masters,
    precision_of,
    stay,
    work_tensors,
)
from fzero.optim.rules import Scaled
from fzero.optim.step_hooks import bound_here, rule_step, shown_attributes, swapped
from fzero.optim.torch_probe import (
    Bound,
    KeptState,
    as_kept,
    as_tensor,
    bind,
    fuses,
    has_steps,
    is_of_torch,
    known_needs,
    name_of,
    numbers_of,
    probe_of,
    require_usable,
)
from fzero.state import record, static
from fzero.state.layout import Leaf, as_real, learns
from fzero.state.points import Needs
from fzero.state.setup import MASTERS, NO_OPTIONS, ParamGroups, SavedNames
from fzero.state.stateful_update import Piece


@called_as("from_torch(functools.partial(torch.optim.SGD, lr=0.1))")
def from_torch(
    optimizer: Any,
    *,
    needs: Needs | None = None,
    master_weights: bool = True,
    state_dtype: StateDtype = None,
    stochastic_rounding: bool = False,
) -> TorchOptimizer:
    """torch.optim on shards: p', s' = optimizer.step() on this rank's [l] of each flat [W l].

    The numbers are those of the optimizer on whole parameters. An elementwise rule steps shards.
    One that needs a whole leaf (Muon, LAMB, Adafactor, Shampoo) steps each parameter on the rank
    that owns it, which has what the rule keeps of it, in any shape; all else stays cut evenly.
    Options are read from the optimizer at each update, so a scheduler made for an instance goes on
    working.

    Args:
        optimizer: a `torch.optim` class; a factory, parameters -> optimizer, such as
            `functools.partial(torch.optim.AdamW, lr=3e-4)`; or an instance made from the
            parameters that the state is made of (a module's own, if they were functionalized;
            by `named_parameters()` on the meta device), in any param groups. A parameter that no
            group has is not stepped. A class or factory is given a list of `nn.Parameter`s, which
            also has `named_parameters()`, as a module. What an instance has from a run (it made
            steps, or `load_state_dict`) is taken over when a state is made: training goes on.
        needs: what its rule looks at to update an element: "element", it alone, so that each rank
            steps a part of each parameter; "leaf" (or "matrix", which is the same), its whole
            parameter, which is stepped by the rank that owns it. It is known of torch.optim's
            classes. Of any other None means "element": a few steps of a small copy test that, for
            each param group; one that looks at more goes on as "leaf", with one warning. The test
            sees the branches that it takes: declare a rule that looks at its leaf in some steps
            only. What is declared is tested, too; a rule that looks at an element and at chance
            (stochastic rounding of its own) passes with a warning: its bits are others at each
            stage.
        master_weights: keep fp32 copies of 16-bit parameters and step those (4 bytes an element).
        state_dtype: as in `fzero.optim.adamw`.
        stochastic_rounding: as in `fzero.optim.adamw`.

    Returns:
        An optimizer for `fzero.init`, `shard(...).init` and `Engine`. An update by it cannot be
        differentiated; those of `fzero.optim.adamw` and its like can.

    Raises:
        LayoutError: for what is no such thing, for LBFGS and SparseAdam, for another `needs`; when
            it is bound, for a rule that looks at more than it is said to need.
        CallError: for options of the optimizer: they are given to it.

    Example:
        >>> import functools, torch
        >>> from fzero.optim import Piece
        >>> from fzero.state import Leaf
        >>> opt = from_torch(functools.partial(torch.optim.SGD, lr=0.5)).bind({"w": torch.ones(2)})
        >>> leaf = Leaf(path="w", shape=(2,), dtype=torch.float32, trainable=True)
        >>> flats, pieces = [torch.tensor([1.0, 1.0])], [Piece(0, leaf, 0, 2)]
        >>> opt.advance(flats, [torch.tensor([2.0, 4.0])], opt.init(flats, pieces), pieces)[0]
        [tensor([ 0., -1.])]
    """
    require_usable(optimizer)
    wanted = '"element", "leaf" (or "matrix"), or None (it is known, or tried)'
    require("from_torch: needs", needs, (None, "element", "leaf", "matrix").__contains__, wanted)
    precision = precision_of("from_torch", master_weights, state_dtype, stochastic_rounding)
    return TorchOptimizer(source=optimizer, needs=needs, precision=precision)


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


_DIVISORS = {"exp_avg_sq", "square_avg", "sum", "exp_inf"}
_SAME_RULE = {"adamw": "adam"}  # they differ in options only


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchOptimizer(OfPrecision):
    """A torch.optim class, factory or instance, used on the flat shards of a state.

    Between updates an instance is as its user left it: its param groups have the user's
    parameters and its `state` is empty; so its step hooks see it. While an update computes, its
    groups have the shards, so that options (which a scheduler may have changed) are its own.
    """

    counts_by_leaf = True

    source: Any
    needs: Needs | None = None
    precision: Precision = field(default_factory=Precision)
    paths: tuple[tuple[str, int], ...] = ()  # (path, param group), once bound
    bound: Bound | None = field(default=None, compare=False, repr=False)
    held: InstanceState = field(default_factory=dict, compare=False, repr=False)  # see `taken_over`

    @property
    def instance(self) -> torch.optim.Optimizer:
        """The optimizer itself: for schedulers, hooks and options by param group."""
        return self._bound().instance

    @property
    def elementwise(self) -> bool:
        """Whether it may step a part of a leaf."""
        return all(need == "element" for need in self._bound().needs)

    @property
    def leafwise(self) -> bool:
        """Whether it may step a leaf without the others."""
        return "all" not in self._bound().needs

    @property
    def of_torch(self) -> Sequence[Bound]:
        """What is stepped, as one step, by each update."""
        return (self._bound(),)

    def batch_dims_of(self, path: str) -> tuple[str, int | None] | None:
        """Return what a rule of fzero's own for matrices was told of stacks of them."""
        group, instance = self.group_of(path), self._bound().instance
        if group < 0 or not type(instance).__module__.startswith("fzero.optim."):
            return None
        name = type(instance).__name__.lower()
        return name, instance.param_groups[group].get("batch_dims")

    def needs_whole(self, path: str) -> bool:
        """Whether the rule for the leaf at `path` is not elementwise."""
        group = self.group_of(path)
        return group >= 0 and self._bound().needs[group] != "element"

    def group_of(self, path: str) -> int:
        """Return the param group that has the leaf at `path`, -1 if none has: it is not stepped."""
        return self._bound().group_at.get(path, -1)

    @property
    def members(self) -> Sequence[Sequence[str]]:
        """The paths of the parameters of each param group, in its order."""
        return self._bound().members

    def bind(self, params: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> TorchOptimizer:
        """Return the optimizer of these parameters: {path: tensor}, tied ones at each path.

        A class or a factory is called with those that learn, as `nn.Parameter`s, in a list that
        also has `named_parameters()`; its param groups are kept.

        Raises:
            LayoutError: for a parameter of the optimizer that is not among `params`, or is in two
                groups; for a rule that cannot be tried.
        """
        named = dict(params)
        bound = bind(self.source, named, precision=self.precision, needs=self.needs)
        paths = tuple(bound.group_at.items())
        made = replace(self, bound=bound, paths=paths, held=_kept_by(bound, named))
        if self.precision.encoding is not None:
            if not made.elementwise:
                raise LayoutError(
                    f"{made!r} with a codec as state_dtype.",
                    cause="a rule that needs whole parameters: owners keep what it has, in any "
                    "shape.",
                    fix="use fzero.optim.partition: this rule without it for the matrices, and "
                    "fzero.optim.adamw(lr, state_dtype=codec) for the rest.",
                )
            if bound.kept:
                self.precision.encoding.require_fits(name_of(self.source), made.squares)
        bound_here(bound.instance)
        return made

    def begin(self, leaf: Leaf, name: str, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return with what a slot of a leaf begins: what the instance has, or its first values."""
        kept = self._bound().kept_for(leaf)
        if leaf.path in self.held:
            return self.held[leaf.path][name].detach().to(device, dtype)
        fill = 0.0 if kept is None or name not in kept.slots else kept.slots[name].item()
        return torch.full(leaf.shape, fill, dtype=dtype, device=device)

    def let_go(self, paths: Sequence[str]) -> None:
        """Forget what the instance had for these parameters: a train state has it now."""
        taken = [self.held[path] for path in paths if path in self.held]
        for path in [path for path, own in self.held.items() if any(own is x for x in taken)]:
            del self.held[path]
        self.instance.state.clear()

    @property
    def divides(self) -> bool:
        """Whether it divides by a state: by squared gradients, as torch.optim names them."""
        return any(not _DIVISORS.isdisjoint(kept.slots) for kept in self._bound().kept.values())

    @property
    def squares(self) -> Mapping[str, bool]:
        """Return {slot of floats: whether it is never negative}."""
        found = dict[str, bool]()
        for kept in self._bound().kept.values():
            for slot, never in _squares(kept).items():
                found[slot] = never and found.get(slot, True)
        return found

    def codec_of(self, leaf: Leaf, slot: str) -> Blocks | None:
        """Return what a slot of a leaf is encoded by; None where it is kept in numbers."""
        kept = None if self.precision.encoding is None else self._bound().kept_for(leaf)
        if kept is None or slot not in _squares(kept):
            return None
        return self.precision.codec_of(leaf, slot, squares=_squares(kept)[slot])

    def init(
        self,
        params: Sequence[Tensor],
        pieces: Sequence[Piece] = (),
        *,
        place: Place = stay,
        owners: Owners | None = None,
    ) -> TorchState:
        """Return the state for flats [l]: slots as long as the flats, counters, fp32 masters.

        Counters are one for each param group: all its leaves count alike, as long as no update
        leaves one out.

        Args:
            params: this rank's flats of the groups that learn, each of one param group.
            pieces: which elements belong to which leaf. A flat of padding alone has one of no
                elements, which says of which param group it is.
            place: takes each slot and master, as soon as it is made, to where it is to live.
            owners: which rank steps which parameter whole, and keeps what is kept of it.
        """
        bound = self._bound()
        precision, leaves = bound.precision, encoded_moments.leaves_of_flats(params, pieces)
        of_flat = {index: bound.kept_for(leaf) for index, leaf, *_ in pieces}  # alike in a flat
        kept = [of_flat.get(i) for i in range(len(params))]
        whole = frozenset[int]() if owners is None else owners.positions
        owned = [] if owners is None else owners.leaves
        of_owned = [bound.kept_for(x.leaf) if owners and owners.has(x) else None for x in owned]

        def first_of(name: str, kept: KeptState | None, p: Tensor) -> tuple[float, Any] | None:
            """Return value and dtype that a slot begins with; None: none, or one made by a step."""
            if kept is None or name not in kept.slots:
                return None
            fill = kept.slots[name]
            return fill.item(), precision.kept(p.dtype) if fill.dtype == kept.dtype else fill.dtype

        def slot(name: str, i: int) -> Tensor:
            first = None if i in whole else first_of(name, kept[i], params[i])
            if first is None:
                return params[i].new_empty(0)
            codec = self.codec_of(leaves[i], name) if first[1].is_floating_point else None
            return encoded_moments.begun(codec, params[i], *first)

        def owned_slot(name: str, number: int) -> Tensor:
            flat, mine = params[owned[number].position], owners and number in owners.mine
            if (first := first_of(name, of_owned[number], flat)) is None:
                return flat.new_empty(0)
            numel = owned[number].leaf.numel if mine else 0
            return place(torch.full((numel,), first[0], dtype=first[1], device=flat.device))

        def names(some: Sequence[KeptState | None]) -> list[str]:
            return sorted({name for x in some if x is not None for name in (*x.slots, *x.odd)})

        by_element = [need == "element" or owners is None for need in bound.needs]
        even = [kept for (group, *_), kept in bound.kept.items() if by_element[group]]
        mastered = [precision.master_weights and one is not None for one in kept]
        counters = [bound.begin_of(group) for group in range(len(bound.shared))]
        return TorchState(
            count=torch.zeros((), dtype=torch.int64),
            slots={k: tuple(place(slot(k, i)) for i in range(len(params))) for k in names(even)},
            counters={  # 0 for a group that learns nothing, or has none
                k: tuple(own[k].clone() if k in own else torch.zeros(()) for own in counters)
                for k in sorted({name for own in counters for name in own})
            },
            masters=make_masters(params, mastered, place),
            owned={k: tuple(owned_slot(k, i) for i in range(len(owned))) for k in names(of_owned)},
        )

    def advance(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        state: TorchState,
        pieces: Sequence[Piece],
        *,
        differentiable: bool = False,
        owned: bool = False,
        found_inf: Tensor | None = None,
        grad_scale: Tensor | None = None,
        device: torch.device | None = None,
        unused: frozenset[str] = frozenset(),
        owners: Owners | None = None,
        apart: bool = False,
    ) -> tuple[list[Tensor], TorchState]:
        """Return (params', state') after one step of the rule; see `as_one_step` for its hooks.

        With `owned`, params and state are overwritten, and what is returned is the same memory;
        else they, and the gradients, stay as they are. `found_inf`, `grad_scale`: see `skips`.
        `device`: where to compute, by default where the parameters are. What lives elsewhere, or
        in other dtypes than it is stepped in, takes one step of the rule for each flat.
        `unused`: paths of leaves that stay as they are, with all that is kept for them. `owners`:
        who steps which parameter whole. `apart`: flats are whole blocks, and what is made of a
        block depends on nothing else.

        Raises:
            PhaseError: if the update is to be differentiated, or if the optimizer got param
                groups or state since it was bound.
        """
        if differentiable:
            raise not_differentiable(self, "torch.optim writes in place")
        bound = self._bound()
        groups, before = len(bound.instance.param_groups), len(bound.shared)
        if groups != before or any(bound.instance.state.values()):
            held = f"{groups} param groups and state for {len(bound.instance.state)} parameters"
            raise PhaseError(
                f"{self!r} has {held}; when the train state was made it had {before} and no state.",
                cause="add_param_group(), load_state_dict() or step() of the optimizer itself. "
                "Its state is in the train state, sharded.",
                fix="give all groups before the state is made; save and load with "
                "fzero.checkpoint.",
            )
        with torch.no_grad():
            if not owned:
                copy = partial(cloned, device=device)
                params, grads = [copy(p) for p in params], [copy(g) for g in grads]
                state = copied(state, copy)
            flats = Flats(params, grads, state.masters, state.slots)
            if encodes := self.precision.encoding is not None:
                flats, pieces = encoded_moments.in_portions(flats, pieces, self.codec_of, unused)
            # Parameters that this rank owns are numbered behind the flats.
            count = len(flats.params)
            whole = frozenset[int]() if owners is None else owners.positions
            even = [i for i in range(count) if i not in whole]
            mine = [] if owners is None else [(k, owners.leaves[k].leaf) for k in owners.mine]
            own = [Piece(count + k, leaf, 0, leaf.numel) for k, leaf in mine]
            # Which leaves are stepped together, and of a rule that makes its state in its first
            # step the numbers of those that take it now, and the paths of those without one yet.
            left = frozenset(path for path in unused if self.group_of(path) >= 0)
            size = 1 + max((len(bound.shared) - 1, *(number for _, number in state.apart)))
            now = parted(state.apart, left, self.group_of, size)
            first, numbers = bound.late and not int(state.count), dict(now.apart)
            fresh = {numbers.get(path, self.group_of(path)) for path in state.unstepped}
            unstepped = sorted(left) if first else [x for x in state.unstepped if x in left]
            threads = threads_on(device or params[0].device) if apart and params else 1
            cut = [piece for piece in pieces if piece.index not in whole]
            units = _units_of(bound, [*cut, *own], now, threads)
            idle = _idle(bound, units, now)  # stepped with the first portion
            before = {
                name: (*some, *(some[source] for source in now.sources))
                for name, some in state.counters.items()
            }
            # Flats share the counters of their group: each portion counts on from those before.
            counters = {name: tuple(x.clone() for x in some) for name, some in before.items()}

            def run(portion: Portion) -> Slots:
                nonlocal idle
                if len(portion.indices) < count and not self.leafwise:
                    raise LayoutError(
                        f"{type(bound.instance).__name__} is stepped one bucket at a time here, "
                        "and does not update each parameter alone.",
                        cause="a rule that looks at all parameters (a clip in it, Prodigy), with "
                        "offload, a state_dtype or stochastic_rounding.",
                        fix="leave these out; clip with fzero.clip or max_norm, and not inside of "
                        "the optimizer.",
                    )
                place = {index: k for k, index in enumerate(portion.indices)}
                here = [u._replace(index=place[u.index]) for u in units if u.index in place]
                here, idle = [*here, *idle], []
                late = {u.number for u in here} if first else fresh
                return _step_units(bound, here, portion, before, counters, late, fresh=first)

            step = partial(
                encoded_moments.step_flats,
                run=run,
                precision=bound.precision,
                device=device,
                scaled=Scaled(found_inf, grad_scale),
                owned=True,  # they are, or copies
                pieces=[*pieces, *own],
                count=state.count,
            )

            def some_of(flats: Sequence[Tensor]) -> list[Tensor]:
                return [flats[i] for i in even]

            made = step(
                Flats(
                    some_of(flats.params),
                    some_of(flats.grads),
                    some_of(flats.masters),
                    {name: some_of(slots) for name, slots in flats.slots.items()},
                    even,
                    [flats.codecs[i] for i in even] if flats.codecs else (),
                )
            )
            slots = {name: list(flats) for name, flats in state.slots.items()}
            for name in made if not encodes else ():  # portions are written in place
                for i, x in zip(even, made[name], strict=True):
                    slots[name][i] = x
            kept = state.owned if owners is None else _step_owned(step, owners, flats, state.owned)
        return list(params), TorchState(
            count=encoded_moments.counted(state.count, found_inf),
            slots={name: tuple(flats) for name, flats in slots.items()},
            counters=counters,
            masters=state.masters,
            owned=kept,
            apart=now.apart,
            unstepped=tuple(unstepped),
        )

    def slots(self, state: TorchState) -> Mapping[str, Sequence[Tensor]]:
        """Return the slots by the names that the class has for them, and the masters."""
        return {**state.slots, MASTERS: state.masters}

    def owned(self, state: TorchState) -> Owned:
        """Return what is kept of parameters with owners."""
        return state.owned

    def with_owned(self, state: TorchState, owned: Mapping[str, Sequence[Tensor]]) -> TorchState:
        """Return the state with something else kept of parameters with owners.

        Of other rules of a partition there may be names that this one does not keep.
        """
        bound = self._bound()
        whole = [kept for (g, *_), kept in bound.kept.items() if bound.needs[g] != "element"]
        names = {name for kept in whole for name in (*kept.slots, *kept.odd)}
        own = {name: tuple(map(_in_order, some)) for name, some in owned.items() if name in names}
        return replace(state, owned=own)

    def kept_of(self, leaf: Leaf) -> Collection[str]:
        """Return the slots of a leaf with an owner that have an element for each of its own."""
        kept = self._bound().kept_for(leaf)
        return () if kept is None else kept.slots.keys()

    def made_by_steps(self, leaf: Leaf) -> Collection[str]:
        """Return the slots of a leaf with an owner that its first step makes, in any shape."""
        kept = self._bound().kept_for(leaf)
        return () if kept is None else kept.odd

    def kept_numel(self, leaf: Leaf) -> int:
        """Return about how many elements the owner of a leaf keeps of it."""
        kept = self._bound().kept_for(leaf)
        return 0 if kept is None else leaf.numel * len(kept.slots) + sum(kept.odd.values())

    @property
    def odd_slots(self) -> frozenset[str]:
        """The slots of a rule that needs all leaves, each of which is a flat of its own then."""
        if self.by_owners:
            return frozenset()
        return frozenset(name for kept in self._bound().kept.values() for name in kept.odd)

    def counted(self, state: TorchState, paths: Sequence[str]) -> dict[str, dict[str, Tensor]]:
        """Return {name: {path: counter}} of leaves; among them those of their param groups."""
        bound, numbers, found = self._bound(), dict(state.apart), dict[str, dict[str, Tensor]]()
        begins = [bound.begin_of(group) for group in range(len(bound.shared))]
        for path in paths:
            group = self.group_of(path)
            for name in begins[group] if group >= 0 else ():
                number = group if self.shares(path, name) else numbers.get(path, group)
                found.setdefault(name, {})[path] = state.counters[name][number]
        return found

    def shares(self, path: str, name: str) -> bool:
        """Whether the rule keeps a counter in the param group of the leaf at `path`."""
        return name in self._bound().shared[self.group_of(path)].begin

    def recounted(
        self,
        state: TorchState,
        paths: Sequence[str],
        counters: Mapping[str, Mapping[str, Tensor]],
        *,
        count: int | None = None,
        unstepped: Collection[str] = (),
    ) -> TorchState:
        """Return the state with these counters, kept once where leaves of a group have the same.

        Raises `LayoutError` if a param group has two.
        """
        bound = self._bound()
        fresh = set(unstepped) if bound.late else set[str]()
        stepped, groups = [path for path in paths if self.group_of(path) >= 0], len(bound.shared)

        def row(path: str) -> tuple[Any, ...]:
            own = [k for k, some in counters.items() if path in some and not self.shares(path, k)]
            return path in fresh, *((k, counters[k][path].item()) for k in own)

        apart, rows = settled({path: row(path) for path in stepped}, self.group_of, groups)
        home = {number: self.group_of(path) for path, number in apart}
        of_groups: dict[tuple[str, int], float] = {}
        for path in stepped:
            group = self.group_of(path)
            for name in bound.shared[group].begin.keys() & counters.keys():
                value = counters[name][path].item()
                other = of_groups.setdefault((name, group), value)
                if other != value:
                    raise LayoutError(
                        f"param group {group} of {type(bound.instance).__name__} has {name} = "
                        f"{other} for one of its parameters, and {value} for {path}.",
                        cause="param groups that are others than those of the run that was saved.",
                        fix="make the optimizer with the param groups of that run.",
                    )
        made: dict[str, tuple[Tensor, ...]] = {}
        for name, held in state.counters.items():
            numbers = range(groups + len(set(home)))
            some = [held[home.get(number, number)].clone() for number in numbers]
            for number, (_, *own) in rows.items():
                some[number].fill_(dict(own).get(name, some[number].item()))
            for group in range(groups):
                some[group].fill_(of_groups.get((name, group), some[group].item()))
            made[name] = tuple(some)
        return replace(
            state,
            counters=made,
            apart=apart,
            unstepped=tuple(path for path in stepped if path in fresh),
            count=state.count if count is None else torch.full_like(state.count, count),
        )

    def unstepped(self, state: TorchState) -> Sequence[str]:
        """Return the paths of leaves that took no step yet, where others did."""
        return state.unstepped

    def anew(self, state: TorchState, fresh: TorchState) -> TorchState:
        """Return a state before its first step that has the masters, and counts of param groups."""
        counters = {
            name: tuple(
                state.counters[name][group] if name in shared.begin else some[group]
                for group, shared in enumerate(self._bound().shared)
            )
            for name, some in fresh.counters.items()
        }
        return replace(fresh, counters=counters, masters=state.masters)

    def restarted(self, state: TorchState, fresh: TorchState) -> TorchState:
        """Return the new state, if owners keep something; masters stay."""
        return self.anew(state, fresh) if state.owned else state

    def begun(self, state: TorchState, paths: Sequence[str], path: str) -> TorchState:
        """Return the state in which the leaf at `path` took a step, and so the whole state did."""
        count = int(state.count)
        if count and path not in state.unstepped:
            return state
        before = state.unstepped if count else paths
        left = [other for other in before if other != path]
        counters = self.counted(state, paths)
        return self.recounted(state, paths, counters, count=max(count, 1), unstepped=left)

    def own_state(self, leaf: Leaf, values: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return whole slots and counters of a leaf as the instance itself keeps them."""
        kept = self._bound().kept_for(leaf)
        assert kept is not None, leaf.path
        own = kept.names & values.keys()
        return {name: as_kept(kept.numbers, name, values[name]) for name in own}

    def give_numbers(self, state: TorchState) -> None:
        """Write the counters of param groups into the instance, for use without fzero."""
        bound = self._bound()  # which has no numbers of groups that were added since
        for number, group in enumerate(self.instance.param_groups[: len(bound.shared)]):
            group.update(_numbers_of_group(bound, state.counters, number))

    def skips(self, params: Sequence[Tensor], state: TorchState) -> bool:
        """Whether `step()` takes `found_inf` and `grad_scale`, by attributes of the optimizer."""
        bound, work = self._bound(), work_tensors(params, state.masters)
        # One of torch.optim does if it is fused. It must not have state to make in that step: fused
        # SGD leaves a momentum that a skipped first step has made as the memory was.
        if not self.elementwise or bound.late or not is_of_torch(bound.instance):
            return False
        groups = bound.instance.param_groups
        return all(bool(g.get("fused")) or fuses(bound.instance, g, work) for g in groups)

    def describe(self, leaves: Sequence[Leaf], step: Any = None) -> list[str]:
        """What ranks compare: the class, and the options of each param group as they are now.

        A scheduler writes into them, so that they are those of any `step`.
        """
        bound = self._bound()
        sizes = Counter(bound.group_at.get(leaf.path, -1) for leaf in leaves)
        lines = [f"optimizer {self!r}"]
        for number, group in enumerate(bound.instance.param_groups):
            text = ", ".join(f"{k}={shown(x)}" for k, x in group.items() if k not in NO_OPTIONS)
            of = f" of {sizes[number]} leaves" if leaves else ""
            lines.append(f"param group {number}{of}: {text}")

        def size(x: Any) -> str:
            several = isinstance(x, Tensor) and x.numel() != 1
            return f"{tuple(x.shape)}" if several else f"{float(x)}"

        for path, own in self.held.items() if leaves else ():
            kept = ", ".join(f"{name} {size(own[name])}" for name in sorted(own))
            lines.append(f"the optimizer's state of {path}: {kept}")
        return lines

    def saved_names(self, state: TorchState, leaves: Sequence[Leaf]) -> SavedNames:
        """What a checkpoint calls the class, and by torch.optim's own names its state.

        Counters are saved by leaf: param groups may be others when they are loaded.
        """
        name = type(self.instance).__name__.lower()
        parts = {f"slots['{slot}']": slot for slot in state.slots}
        return SavedNames(rule=_SAME_RULE.get(name, name), parts=parts)

    def param_groups(self, leaves: Sequence[Leaf], step: int) -> ParamGroups:
        """Return the instance's own groups, with their options as they are at any `step`."""
        groups, shared = self.instance.param_groups, self._bound().shared
        return ParamGroups(
            of_leaf=tuple(self.group_of(x.path) if x.trainable else -1 for x in leaves),
            options=tuple(
                {k: one[k] for k in one if k not in {*NO_OPTIONS, *own.begin}}
                for one, own in zip(groups, shared, strict=True)
            ),
            instance=self.instance,
        )

    def _bound(self) -> Bound:
        if self.bound is None:
            raise PhaseError(
                f"{self!r} is not bound to parameters yet.",
                cause="its init or advance was called by hand.",
                fix="call bind({path: tensor}) first, and use what it returns.",
            )
        return self.bound

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy, or pickle, with an optimizer of its own, which has the options of this one.

        It has no parameters, and neither hooks nor the `step` that a scheduler has wrapped.
        """
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        if self.bound is None:
            return _made_again, (values, None, {})
        instance = self.bound.instance
        values["bound"] = {one.name: getattr(self.bound, one.name) for one in fields(Bound)}
        del values["bound"]["instance"]
        if self.source is instance:
            del values["source"]
        own = {k: x for k, x in vars(instance).items() if not (k[0] == "_" or callable(x))}
        groups = [{**group, "params": []} for group in instance.param_groups]
        own |= {"param_groups": groups, "state": defaultdict(dict)}
        return _made_again, (values, type(instance), own)

    def __repr__(self) -> str:
        return f"from_torch({name_of(self.source)})"


def _kept_by(bound: Bound, params: Mapping[str, Tensor]) -> InstanceState:
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


def _made_again(values: dict[str, Any], kind: Any, own: dict[str, Any]) -> TorchOptimizer:
    """Return the copy of an optimizer. kind, own: the class and the attributes of its instance."""
    if kind is None:
        return TorchOptimizer(**values)
    instance = kind.__new__(kind)
    instance.__setstate__(own)
    bound = Bound(instance=instance, **values["bound"])
    return TorchOptimizer(**{"source": instance, **values, "bound": bound})


def _squares(kept: KeptState) -> dict[str, bool]:
    """Return {slot of floats: whether it was never negative, with gradients of both signs}."""
    floats = [slot for slot, begin in kept.slots.items() if begin.is_floating_point()]
    return {slot: bool((torch.as_tensor(kept.sample[1][slot]) >= 0).all()) for slot in floats}


# One update steps a portion after the other: flats of this rank, or parameters that it owns. What
# the rule steps of a portion are units, which are its parameters for this step only.


class Unit(NamedTuple):
    """One parameter of the optimizer during a step: a flat, or a whole leaf in a flat."""

    index: int  # of the flat; -1: of none, see `_idle`
    group: int  # the param group
    number: int  # of its counters, which it shares with all units of this number
    span: tuple[int, int] | None  # None: all of the flat
    shape: tuple[int, ...]
    kept: KeptState

    def of(self, flat: Tensor) -> Tensor:
        """Return its part of a tensor that is as long as its flat."""
        return flat if self.span is None else flat[slice(*self.span)].view(self.shape)


def _units_of(bound: Bound, pieces: Sequence[Piece], now: Parted, threads: int) -> list[Unit]:
    """Return the units of a step, each one parameter to the optimizer: a flat, or a leaf in it.

    A flat with leaves that count apart from each other, or are not stepped, is cut at them; and so
    that each of several threads steps whole blocks.
    """
    units, seen, numbers = list[Unit](), set[int](), dict(now.apart)
    ends = {piece.index: piece.stop for piece in pieces}  # the last one ends with the flat
    counted_by = defaultdict[int, set[int]](set)
    for piece in pieces if now.apart else ():
        counted_by[piece.index].add(numbers.get(piece.leaf.path, -1))
    cuts = {index for index, some in counted_by.items() if len(some) > 1}
    for index, leaf, start, stop, first in pieces:
        kept = bound.kept_for(leaf)
        if kept is None or start >= stop:
            continue
        group = bound.group_at[leaf.path]
        number = numbers.get(leaf.path, group)
        if number in now.still:
            continue
        if bound.needs[group] != "element":
            if first < leaf.numel:  # else it is padding behind the leaf
                span = (start, start + leaf.numel)
                units.append(Unit(index, group, number, span, leaf.shape, kept))
        elif index in cuts or (index not in seen and threads > 1):
            whole = (start, stop) if index in cuts else (0, ends[index])
            for span in even_spans(*whole, threads):
                units.append(Unit(index, group, number, span, (span[1] - span[0],), kept))
        elif index not in seen:
            units.append(Unit(index, group, number, None, (), kept))
        seen.add(index)
    return units


def _idle(bound: Bound, units: Sequence[Unit], now: Parted) -> list[Unit]:
    """Return a unit of one element for each counter without a unit on this rank, to advance it."""
    here = {unit.number for unit in units}
    counting = {unit.number for unit in units if unit.kept.counters}
    apart = {bound.group_at[path]: set[int]() for path, _ in now.apart}
    for path, number in now.apart:
        apart[bound.group_at[path]].add(number)
    found: dict[int, Unit] = {}
    for (group, *_), kept in bound.kept.items():
        if not bound.begin_of(group):
            continue
        for number in {group} | apart.get(group, set()) - now.still:
            if number not in (counting if kept.counters else here):
                found[number] = Unit(-1, group, number, None, kept.sample[0], kept)
    return list(found.values())


def _step_owned(
    step: Callable[[Flats], Slots], owners: Owners, flats: Flats, owned: Owned
) -> Owned:
    """Step the parameters that have owners, numbered behind the flats; return the new slots.

    step: steps flats in place. flats: this rank's shards, which get the new parameters.
    """
    made = {name: list(some) for name, some in owned.items()}
    work, first = work_tensors(flats.params, flats.masters), len(flats.params)

    def compute(mine: list[int], wholes: Wholes) -> Mapping[int, Tensor]:
        if not mine:
            return {}
        params, grads = ([wholes[k][j] for k in mine] for j in (0, 1))
        slots = {name: [some[k] for k in mine] for name, some in made.items()}
        none = [p.new_empty(0) for p in params]
        after = step(Flats(params, grads, none, slots, [first + k for k in mine]))
        for name, some in after.items():
            for k, x in zip(mine, some, strict=True):
                made[name][k] = x
        return dict(zip(mine, params, strict=True))

    owners.run([work, flats.grads], compute, work)
    for position in owners.positions:
        encoded_moments.written_back(flats, position, work[position])
    mine = set(owners.mine)
    return {
        name: tuple(x if k in mine else x.new_empty(0) for k, x in enumerate(some))
        for name, some in made.items()
    }


Counters = Mapping[str, tuple[Tensor, ...]]


def _step_units(
    bound: Bound,
    units: Sequence[Unit],
    portion: Portion,
    before: Counters,
    counters: Counters,
    late: Collection[int],
    *,
    fresh: bool,
) -> dict[str, tuple[Tensor, ...]]:
    """Step some units by the rule; return the slots of their portion.

    Parameters, slots and counters that the step replaced are copied into the state's tensors.

    before: the counters before the update. counters: those after it, which are written.
    late: the numbers of units that make their state themselves, if their rule does so at all.
    fresh: whether the rule also makes the counters that it keeps in its param groups.
    """
    instance: Any = bound.instance
    lent, states = list[tuple[Unit, Tensor, nn.Parameter]](), dict[nn.Parameter, dict[str, Any]]()
    for unit in units:
        kept, at = unit.kept, unit.index
        if at >= 0:
            values, gradient = unit.of(portion.work[at]), unit.of(portion.grads[at])
            own = {name: unit.of(portion.slots[name][at]) for name in kept.slots}
            odd = {name: portion.slots[name][at] for name in kept.odd}
        else:
            values = torch.zeros(unit.shape, dtype=kept.dtype, device=bound.devices[unit.group])
            gradient, own, odd = torch.zeros_like(values), copy.deepcopy(kept.sample[1]), {}
        parameter = nn.Parameter(values)
        parameter.grad = gradient
        lent.append((unit, values, parameter))
        if not (kept.late and unit.number in late):
            odd |= {name: before[name][unit.number].clone() for name in kept.counters}  # in place
            states[parameter] = own | {k: as_kept(kept.numbers, k, x) for k, x in odd.items()}
    slots = {name: list(flats) for name, flats in portion.slots.items()}
    groups = zip(instance.param_groups, bound.shared, strict=True)
    with ExitStack() as stack:
        for number, (group, shared) in enumerate(groups):
            params = [p for unit, _, p in lent if unit.group == number]
            given: dict[str, Any] = {"params": params}
            # The fused SGD takes no list of which some have a momentum already, and others do not.
            alike = len({bool(states.get(p)) for p in params}) < 2
            if alike and fuses(instance, group, params):
                given["fused"] = True
                # Which devices are right was asked above, also of a device that is planned for.
                instance._need_device_dtype_check_for_fused = False
            if not fresh:
                given |= _numbers_of_group(bound, before, number)
            stack.enter_context(swapped(group, given, shared.begin))
        stack.callback(instance.state.clear)
        stack.enter_context(shown_attributes(instance, **portion.scaled._asdict()))
        instance.state.update({p: own for p, own in states.items() if own})
        if lent:  # many rules take no empty list
            rule_step(instance)
        for number in {unit.group for unit in units}:
            for name in bound.shared[number].begin:
                _write(counters[name][number], instance.param_groups[number][name])
        written = set[tuple[int, str]]()
        for unit, values, parameter in lent:
            kept, after = unit.kept, instance.state.get(parameter, {})
            if unit.index >= 0 and after.keys() - kept.unread != kept.names:
                raise LayoutError(
                    f"{type(instance).__name__} now keeps {sorted(after)} for a parameter; when "
                    f"the state was made it kept {sorted(kept.names)}.",
                    cause="an option that adds state (momentum, amsgrad) was set later, or a rule "
                    "that begins to keep something after some steps.",
                    fix="set the option before the state is made; leave out what works every k "
                    "steps (Lookahead), or do it in your own step.",
                )
            for name in kept.counters:
                if (unit.number, name) not in written:
                    written.add((unit.number, name))
                    _write(counters[name][unit.number], after[name])
            if unit.index < 0:
                continue
            if parameter.untyped_storage() is not values.untyped_storage():  # `p.data = ...` in it
                values.copy_(parameter.detach())
            for name in kept.slots:
                home, made = unit.of(slots[name][unit.index]), after[name]
                if made is not home and not _is_at(made, home):
                    home.copy_(made)
            for name in kept.odd:
                slots[name][unit.index] = _in_order(as_tensor(after[name]))
    return {name: tuple(flats) for name, flats in slots.items()}


def _numbers_of_group(bound: Bound, counters: Counters, number: int) -> dict[str, Any]:
    """Return the rule's own numbers of a param group, as it has them among its options."""
    shared = bound.shared[number]
    own = ((name, counters[name][number].clone()) for name in shared.begin)
    return {name: as_kept(shared.numbers, name, counter) for name, counter in own}


def _in_order(x: Tensor) -> Tensor:
    """Return a tensor in the order of its dims: itself, if it is alone in its memory like that.

    Products of the same numbers in another order have other bits, and what is read from a file, or
    sent, has this order. So a run that goes on from a checkpoint has the bits of one that was not
    cut off.
    """
    plain = torch.empty(x.shape, device="meta").stride()
    if x.stride() == plain and not x.storage_offset():
        return x
    return x.clone(memory_format=torch.contiguous_format).view(-1).view(x.shape)


def _is_at(x: Tensor, home: Tensor) -> bool:
    """Whether a tensor is the memory of another, so that nothing is to be copied."""
    if has_no_values(x) or x.dtype is not home.dtype or x.shape != home.shape:
        return False
    return x.data_ptr() == home.data_ptr() and x.stride() == home.stride()


def _write(home: Tensor, value: Any) -> None:
    if isinstance(value, Tensor):
        if not has_no_values(value) or has_no_values(home):  # a plan does not count
            home.copy_(value)
    else:
        home.fill_(value)


# Complex parameters


def require_real_views(optimizer: Any, named: Mapping[str, Tensor]) -> None:
    """Raise `LayoutError` if a rule would not step complex parameters by their real views.

    torch.optim's rules for single elements do: they take each part of a complex number for an
    element (`torch.view_as_real`). What a rule for matrices, or one that squares complex numbers,
    does to them is another thing. Rules of `fzero.optim` and foreign (init, update) pairs are
    given real views, whatever they would do to complex numbers.

    Args:
        optimizer: of any kind that `as_optimizer` gives, bound to its parameters.
        named: {path: tensor}.

    Raises:
        LayoutError: naming the parameter, for a rule that does something else.

    Example:
        >>> from fzero.optim import from_torch
        >>> named = {"w": torch.ones(2, 3, dtype=torch.complex64)}
        >>> require_real_views(from_torch(torch.optim.AdamW).bind(named), named)
        >>> require_real_views(from_torch(torch.optim.Adafactor).bind(named), named)
        Traceback (most recent call last):
        fzero.errors.LayoutError: w is complex, and from_torch(Adafactor) needs whole ...
    """
    for path, p in named.items():
        group = optimizer.group_of(path) if p.is_complex() and learns(p) else -1
        if group < 0:
            continue
        seen = ""
        if optimizer.needs_whole(path):
            seen = "needs whole parameters in their own shape"
        elif isinstance(optimizer, TorchOptimizer) and not known_needs(type(optimizer.instance)):
            seen = _otherwise(optimizer, group, p.device)
        if seen:
            raise LayoutError(
                f"{path} is complex, and {optimizer!r} {seen}.",
                cause="a rule for matrices (Muon, Shampoo), with a norm (LAMB), that squares "
                "complex numbers, or that torch refuses for them (Adafactor).",
                fix="use an elementwise rule of torch.optim or fzero.optim (SGD, Adam, AdamW, "
                "...); or make the parameter real, [*, 2], and use torch.view_as_complex(p) in "
                "the forward.",
            )


def _otherwise(optimizer: TorchOptimizer, group: int, device: torch.device) -> str:
    """What a rule does to complex parameters that it does not to their real views; "" if none."""
    here = torch.device("cpu") if device.type == "meta" else device
    instance = optimizer.instance
    rule = probe_of(instance, group, here, used=has_steps(instance)).changes
    x, *gs = (size * numbers_of((6, 2), k).to(here) for k, size in enumerate((1.0, 1.0, 8.0, 0.1)))
    try:
        with seeded(0, here):
            (by_parts,), _ = rule([x], [[g] for g in gs])
        with seeded(0, here):
            (whole,), _ = rule([torch.view_as_complex(x)], [[torch.view_as_complex(g)] for g in gs])
    except Exception as error:
        return f"raises for a complex parameter: {str(error).splitlines()[0]!r}"
    same = torch.allclose(as_real(whole), by_parts, rtol=1e-6, atol=1e-9, equal_nan=True)
    return "" if same else "makes another update of a complex parameter than of its real view"
