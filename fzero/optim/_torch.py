"""`from_torch`: a torch.optim optimizer steps this rank's flat shards of a state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fzero.errors import PhaseError, explain
from fzero.optim._bind import Bound, bind, name_of, require_usable
from fzero.optim._elementwise import not_elementwise
from fzero.optim._masters import as_stepped, copy_back, make_masters, work_tensors
from fzero.optim._optimizer import Piece, copied
from fzero.optim._rules import Scaled
from fzero.optim._step import Unit, makes_state_later, skips, step
from fzero.optim._trial import Kept
from fzero.state._record import record
from fzero.state.layout import Leaf
from fzero.state.setup import ParamGroups, SavedNames

_SAME_RULE = {"adamw": "adam"}  # they differ in options only


@record
class TorchState:
    """What a torch.optim optimizer keeps for this rank's shards, parallel to the list of flats."""

    count: Tensor  # [] int64 on the CPU (with a loss scale, on its device): updates made
    slots: dict[str, tuple[Tensor, ...]]  # by name; of a flat that has no such slot, empty
    counters: dict[str, tuple[Tensor, ...]]  # by name, one for each param group (see `init`)
    masters: tuple[Tensor, ...]  # fp32 copies of 16-bit flats; of others, empty


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchOptimizer:
    """A torch.optim class, factory or instance, used on the flat shards of a state.

    Between updates an instance is as its user left it: its param groups have the user's
    parameters and its `state` is empty. For the time of an update its groups have the shards, so
    that options (which a scheduler may have changed) and step hooks are the instance's own.
    """

    source: Any
    master_weights: bool = True
    paths: tuple[tuple[str, int], ...] = ()  # (path, param group), once bound
    bound: Bound | None = field(default=None, compare=False, repr=False)

    @property
    def instance(self) -> torch.optim.Optimizer:
        """The optimizer itself: for schedulers, hooks and options by param group."""
        return self._bound().instance

    @property
    def elementwise(self) -> bool:
        """Whether it may step a part of a leaf; found out by a trial."""
        return self._bound().elementwise

    def group_of(self, path: str) -> int:
        """Return the param group that has the leaf at `path`, -1 if none has: it is not stepped."""
        return self._bound().group_at.get(path, -1)

    def bind(self, params: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> TorchOptimizer:
        """Return the optimizer of these parameters: {path: tensor}, tied ones at each path.

        A class or a factory has one param group, of all that learn.

        Raises:
            LayoutError: for a parameter of an instance that is not among `params`, or is in two
                groups; for a rule that cannot be tried.
            PhaseError: for an instance that has made steps.
        """
        bound = bind(self.source, dict(params), masters=self.master_weights)
        return replace(self, bound=bound, paths=tuple(bound.group_at.items()))

    def init(self, params: Sequence[Tensor], pieces: Sequence[Piece] = ()) -> TorchState:
        """Return the state for flats [l]: slots as long as the flats, counters, fp32 masters.

        Counters are one for each param group, for all of whose flats they are alike. A rule that
        is not elementwise has one for each leaf.

        Args:
            params: this rank's flats of the groups that learn, each of one param group.
            pieces: which elements belong to which leaf. A flat of padding alone has no pieces, or
                one of no elements, which says of which param group it is.

        Raises:
            LayoutError: for a rule that is not elementwise, and a part of a leaf.
        """
        bound = self._bound()
        groups = self._groups(len(params), pieces)
        masters = make_masters(params, [self.master_weights and g != -1 for g in groups])
        work = work_tensors(params, masters)
        units = self._units(work, pieces)
        of_flat: list[list[Kept]] = [[] for _ in params]
        for unit in units:
            of_flat[unit.index].append(unit.kept)
        for found, g, w in zip(of_flat, groups, work, strict=True):
            if not found and g != -1:  # of padding alone: as the same flat of the other ranks
                found += [
                    k for (n, *_), k in bound.kept.items() if g in (n, None) and k.dtype == w.dtype
                ]
        every = bound.kept.values()
        slots = {
            name: tuple(_slot(name, w, found) for w, found in zip(work, of_flat, strict=True))
            for name in sorted({name for kept in every for name in (*kept.slots, *kept.odd)})
        }
        owners = [unit.kept for unit in units]
        if bound.elementwise:
            some = {group: kept for (group, *_), kept in bound.kept.items()}
            owners = [some.get(g) for g in range(bound.groups)]
        counters = {
            name: tuple(_counter(name, kept) for kept in owners)
            for name in sorted({name for kept in every for name in kept.counters})
        }
        count = torch.zeros((), dtype=torch.int64)
        return TorchState(count=count, slots=slots, counters=counters, masters=masters)

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
    ) -> tuple[list[Tensor], TorchState]:
        """Return (params', state') after one `step()` of the optimizer.

        With `owned`, params and state are overwritten, and what is returned is the same memory;
        else they, and the gradients, stay as they are. `found_inf`, `grad_scale`: see `skips`.

        Raises:
            PhaseError: if the update is to be differentiated, or if the optimizer got param
                groups or state since it was bound.
        """
        if differentiable:
            raise _not_differentiable(self)
        bound = self._ready()
        with torch.no_grad():
            if not owned:
                params, grads = [p.clone() for p in params], [g.clone() for g in grads]
                state = copied(state)
            work = work_tensors(params, state.masters)
            scaled = Scaled(found_inf, grad_scale)
            gs, scaled = as_stepped(grads, work, scaled, owned=True)  # they are, or copies
            units = self._units(work, pieces)
            fresh = makes_state_later(bound) and not int(state.count)
            own = (state.slots, state.counters)
            slots = step(bound, units, work, gs, *own, fresh=fresh, scaled=scaled)
            copy_back(params, state.masters)
        count = state.count + 1
        if found_inf is not None:
            count = state.count.to(found_inf.device) + (1 - found_inf).to(state.count.dtype)
        return list(params), TorchState(
            count=count, slots=slots, counters=state.counters, masters=state.masters
        )

    def skips(self, params: Sequence[Tensor], state: TorchState) -> bool:
        """Whether `step()` takes `found_inf` and `grad_scale`, by attributes of the optimizer."""
        return skips(self._bound(), work_tensors(params, state.masters))

    def describe(self, leaves: Sequence[Leaf], step: Any = None) -> list[str]:
        """What ranks compare: the class, and the options of each param group as they are now.

        A scheduler writes into them, so that they are those of any `step`.
        """
        bound = self._bound()
        sizes = Counter(bound.group_at.get(leaf.path, -1) for leaf in leaves)
        lines = [f"optimizer {self!r}"]
        for number, group in enumerate(bound.instance.param_groups):
            options = {name: _shown(x) for name, x in group.items() if name != "params"}
            shown = ", ".join(f"{name}={x}" for name, x in options.items() if x)
            lines.append(f"param group {number} of {sizes[number]} leaves: {shown}")
        return lines

    def saved_names(self, state: TorchState, leaves: Sequence[Leaf]) -> SavedNames:
        """What a checkpoint calls the class, and by torch.optim's own names its state.

        A counter is one number for all param groups, which may be others when it is loaded.
        """
        name = type(self.instance).__name__.lower()
        learning = {self.group_of(leaf.path) for leaf in leaves if leaf.trainable}
        parts = {f"slots['{slot}']": slot for slot in state.slots}
        idle: set[str] = set()
        for counter, numbers in state.counters.items():
            for group in range(len(numbers)):
                part = f"counters['{counter}'][{group}]"
                parts[part] = counter
                if self.elementwise and group not in learning:
                    idle.add(part)
        rule = _SAME_RULE.get(name, name)
        return SavedNames(rule=rule, parts=parts, idle=frozenset(idle))

    def param_groups(self, leaves: Sequence[Leaf], step: int) -> ParamGroups:
        """Return the instance's own groups, with their options as they are at any `step`."""
        return self._bound().param_groups(leaves)

    def _bound(self) -> Bound:
        if self.bound is None:
            raise PhaseError(
                explain(
                    f"{self!r} is not bound to parameters yet.",
                    cause="its init or advance was called by hand.",
                    fix="call bind({path: tensor}) first, and use what it returns.",
                )
            )
        return self.bound

    def _ready(self) -> Bound:
        bound = self._bound()
        groups = len(bound.instance.param_groups)
        if groups != bound.groups or any(bound.instance.state.values()):
            held = f"{groups} param groups and state for {len(bound.instance.state)} parameters"
            raise PhaseError(
                explain(
                    f"{self!r} has {held}; when the train state was made it had {bound.groups} "
                    "and no state.",
                    cause="add_param_group(), load_state_dict() or step() of the optimizer itself. "
                    "Its state is in the train state, sharded.",
                    fix="give all groups before the state is made; save and load with "
                    "fzero.checkpoint.",
                )
            )
        return bound

    def _groups(self, flats: int, pieces: Sequence[Piece]) -> list[int | None]:
        """The param group of each flat; None if no piece tells."""
        groups: list[int | None] = [None] * flats
        for piece in pieces:
            if groups[piece.index] is None:
                groups[piece.index] = self.group_of(piece.leaf.path)
        return groups

    def _units(self, work: Sequence[Tensor], pieces: Sequence[Piece]) -> list[Unit]:
        bound = self._bound()
        units: list[Unit] = []
        seen: set[int] = set()
        for index, leaf, start, stop in pieces:
            group = bound.group_at.get(leaf.path, -1)
            if group < 0 or start >= stop or (bound.elementwise and index in seen):
                continue
            dtype = work[index].dtype
            if bound.elementwise:
                kept = bound.kept[group, dtype, 1]
                units.append(Unit(index, group, None, (), kept, group))
            elif leaf.numel:
                kept = bound.kept[group, dtype, max(len(leaf.shape), 1)]
                if stop - start < leaf.numel or (kept.odd and index in seen):
                    raise not_elementwise(self)
                span = (start, start + leaf.numel)
                units.append(Unit(index, group, span, leaf.shape, kept, len(units)))
            seen.add(index)
        return units

    def __repr__(self) -> str:
        return f"from_torch({name_of(self.source)})"


def from_torch(optimizer: Any, *, master_weights: bool = True) -> TorchOptimizer:
    """torch.optim on shards: p', s' = optimizer.step() on this rank's [l] of each flat [W l].

    The numbers are those of the optimizer on whole parameters, if its rule is elementwise: this
    is tried on a few elements when a state is made. Options are read from the optimizer at each
    update, so a scheduler made for an instance goes on working.

    Args:
        optimizer: a `torch.optim` class; a factory, parameters -> optimizer, such as
            `functools.partial(torch.optim.AdamW, lr=3e-4)`; or an instance made from the
            parameters that the state is made of (a module's own, if they were functionalized),
            in any param groups. A parameter that no group has is not stepped.
        master_weights: keep fp32 copies of 16-bit parameters and step those (4 bytes an element).

    Returns:
        An optimizer for `fzero.init`, `shard(...).init` and `Engine`. An update by it cannot be
        differentiated; those of `fzero.optim.adamw` and its like can.

    Raises:
        LayoutError: for what is no such thing, and for LBFGS and SparseAdam.

    Example:
        >>> import functools, torch
        >>> opt = from_torch(functools.partial(torch.optim.SGD, lr=0.5)).bind({"w": torch.ones(2)})
        >>> leaf = Leaf(path="w", shape=(2,), dtype=torch.float32, trainable=True)
        >>> flats, pieces = [torch.tensor([1.0, 1.0])], [Piece(0, leaf, 0, 2)]
        >>> opt.advance(flats, [torch.tensor([2.0, 4.0])], opt.init(flats, pieces), pieces)[0]
        [tensor([ 0., -1.])]
    """
    require_usable(optimizer)
    return TorchOptimizer(source=optimizer, master_weights=master_weights)


def _slot(name: str, work: Tensor, found: Sequence[Kept]) -> Tensor:
    for kept in found:
        if name in kept.slots:
            fill = kept.slots[name]
            return torch.full_like(work, fill.item(), dtype=fill.dtype, requires_grad=False)
    return work.new_empty(0)  # also of another shape: such a slot is made by the first step


def _counter(name: str, kept: Kept | None) -> Tensor:
    """A counter before the first step; 0 for a group that learns nothing, or has none."""
    return kept.counters[name].clone() if kept and name in kept.counters else torch.zeros(())


def _shown(value: Any) -> str:
    """An option that ranks can compare; nothing for one that has no text of its own."""
    if isinstance(value, Tensor) and value.device.type == "cpu":
        return f"tensor({value.tolist()})"
    plain = (bool, int, float, str, tuple, type(None))
    return repr(value) if isinstance(value, plain) else ""


def _not_differentiable(optimizer: TorchOptimizer) -> PhaseError:
    return PhaseError(
        explain(
            f"an update by {optimizer!r} was to be differentiated.",
            cause="torch.func, a trace, or parameters or gradients with a graph, around "
            "apply_gradients; torch.optim writes in place.",
            fix="use fzero.optim.sgd, adam, adamw or lion, which can be differentiated.",
        )
    )
