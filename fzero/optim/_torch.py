"""`TorchOptimizer`: a torch.optim optimizer that steps this rank's flat shards."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from fzero.errors import PhaseError
from fzero.machine.offload import cloned
from fzero.machine.owners import Owners
from fzero.machine.rows import Blocks
from fzero.machine.threads import threads_on
from fzero.optim._base import OfPrecision
from fzero.optim._bind import Bound, bind
from fzero.optim._encoded import require_elements
from fzero.optim._kept import KeptState, as_kept
from fzero.optim._of_matrices import OfMatrices
from fzero.optim._optimizer import copied
from fzero.optim._piece import Piece
from fzero.optim._precision import Precision
from fzero.optim._rules import Scaled
from fzero.optim._shown import shown
from fzero.optim._step import in_order, numbers_of_group, skips
from fzero.optim._stream import Flats
from fzero.optim._torch_state import (
    Held,
    Owned,
    TorchState,
    anew_of,
    as_large,
    counted_in,
    kept_by,
    lines_of,
    new_state,
    recounted_as,
)
from fzero.optim._torch_update import updated
from fzero.optim._usable import Needs, name_of, not_differentiable
from fzero.optim.masters import Place, stay, work_tensors
from fzero.optim.visible import bound_here
from fzero.state.layout import Leaf
from fzero.state.setup import MASTERS, NO_OPTIONS, ParamGroups, SavedNames

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
    needs: Needs = None
    precision: Precision = field(default_factory=Precision)
    paths: tuple[tuple[str, int], ...] = ()  # (path, param group), once bound
    bound: Bound | None = field(default=None, compare=False, repr=False)
    held: Held = field(default_factory=dict, compare=False, repr=False)  # see `taken_over`

    @property
    def instance(self) -> torch.optim.Optimizer:
        """The optimizer itself: for schedulers, hooks and options by param group."""
        return self._bound().instance

    @property
    def elementwise(self) -> bool:
        """Whether it may step a part of a leaf; found out by a trial."""
        return all(self._bound().elementwise)

    @property
    def leafwise(self) -> bool:
        """Whether it may step a leaf without the others; found out by a trial."""
        return self._bound().leafwise

    @property
    def of_torch(self) -> Sequence[Bound]:
        """What is stepped, as one step, by each update."""
        return (self._bound(),)

    def batch_dims_of(self, path: str) -> tuple[str, int | None] | None:
        """Return what a rule of fzero's own for matrices was told of stacks of them."""
        group, instance = self.group_of(path), self._bound().instance
        if group < 0 or not isinstance(instance, OfMatrices):
            return None
        name = type(instance).__name__.lower()
        return name, instance.param_groups[group].get("batch_dims")

    def needs_whole(self, path: str) -> bool:
        """Whether the rule for the leaf at `path` is not elementwise."""
        group = self.group_of(path)
        return group >= 0 and not self._bound().elementwise[group]

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
        if self.precision.encoding is not None:
            require_elements(self, elementwise=all(bound.elementwise))
            if bound.kept:
                self.precision.encoding.require_fits(name_of(self.source), _squares_of(bound))
        bound_here(bound.instance)
        return replace(
            self, bound=bound, paths=tuple(bound.group_at.items()), held=kept_by(bound, named)
        )

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
        return _squares_of(self._bound())

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
        return new_state(self._bound(), params, pieces, place, owners, self.codec_of)

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
        bound = self._ready()
        with torch.no_grad():
            if not owned:
                params, grads = [cloned(p) for p in params], [g.clone() for g in grads]
                state = copied(state)
            after = updated(
                bound,
                Flats(params, grads, state.masters, state.slots),
                state,
                pieces,
                codec_of=None if self.precision.encoding is None else self.codec_of,
                owners=owners,
                unused=unused,
                device=device,
                scaled=Scaled(found_inf, grad_scale),
                threads=threads_on(device or params[0].device) if apart and params else 1,
            )
        return list(params), after

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
        whole = [kept for (group, *_), kept in bound.kept.items() if not bound.elementwise[group]]
        names = {name for kept in whole for name in (*kept.slots, *kept.odd)}
        own = {name: tuple(map(in_order, some)) for name, some in owned.items() if name in names}
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
        """Return about how many elements the owner of a leaf keeps of it.

        As the class says, by `kept_numel(shape, group)`; or by the shapes of what it has kept of a
        small parameter, whose sides are those of this one.
        """
        bound = self._bound()
        kept = bound.kept_for(leaf)
        if kept is None:
            return 0
        says = getattr(bound.instance, "kept_numel", None)
        if says is not None:
            return int(says(leaf.shape, bound.instance.param_groups[bound.group_at[leaf.path]]))
        forms = [torch.as_tensor(kept.sample[name]).shape for name in kept.odd]
        odd = sum(prod(as_large(form, kept.shape, leaf.shape)) for form in forms)
        return leaf.numel * len(kept.slots) + odd

    @property
    def odd_slots(self) -> frozenset[str]:
        """The slots of a rule that needs all leaves, each of which is a flat of its own then."""
        if self.by_owners:
            return frozenset()
        return frozenset(name for kept in self._bound().kept.values() for name in kept.odd)

    def counted(self, state: TorchState, paths: Sequence[str]) -> dict[str, dict[str, Tensor]]:
        """Return {name: {path: counter}} of leaves; among them those of their param groups."""
        return counted_in(self._bound(), state, paths)

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
        """Return the state with these counters. Raises `LayoutError` if a param group has two."""
        made = recounted_as(self._bound(), state, paths, counters, unstepped)
        return made if count is None else replace(made, count=torch.full_like(made.count, count))

    def unstepped(self, state: TorchState) -> Sequence[str]:
        """Return the paths of leaves that took no step yet, where others did."""
        return state.unstepped

    def anew(self, state: TorchState, fresh: TorchState) -> TorchState:
        """Return a state before its first step that has the masters, and counts of param groups."""
        return replace(anew_of(self._bound(), state, fresh), masters=state.masters)

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
        bound = self._bound()
        kept = bound.kept_for(leaf)
        assert kept is not None, leaf.path
        own = kept.names & values.keys()
        return {name: as_kept(kept.numbers, name, values[name]) for name in own}

    def give_numbers(self, state: TorchState) -> None:
        """Write the counters of param groups into the instance, for use without fzero."""
        bound = self._bound()  # which has no numbers of groups that were added since
        for number, group in enumerate(self.instance.param_groups[: len(bound.shared)]):
            group.update(numbers_of_group(bound, state.counters, number))

    def skips(self, params: Sequence[Tensor], state: TorchState) -> bool:
        """Whether `step()` takes `found_inf` and `grad_scale`, by attributes of the optimizer."""
        return self.elementwise and skips(self._bound(), work_tensors(params, state.masters))

    def describe(self, leaves: Sequence[Leaf], step: Any = None) -> list[str]:
        """What ranks compare: the class, and the options of each param group as they are now.

        A scheduler writes into them, so that they are those of any `step`.
        """
        bound = self._bound()
        sizes = Counter(bound.group_at.get(leaf.path, -1) for leaf in leaves)
        lines = [f"optimizer {self!r}"]
        for number, group in enumerate(bound.instance.param_groups):
            options = {name: shown(x) for name, x in group.items() if name not in NO_OPTIONS}
            text = ", ".join(f"{name}={x}" for name, x in options.items())
            of = f" of {sizes[number]} leaves" if leaves else ""
            lines.append(f"param group {number}{of}: {text}")
        return [*lines, *(lines_of(self.held) if leaves else ())]

    def saved_names(self, state: TorchState, leaves: Sequence[Leaf]) -> SavedNames:
        """What a checkpoint calls the class, and by torch.optim's own names its state.

        Counters are saved by leaf: param groups may be others when they are loaded.
        """
        name = type(self.instance).__name__.lower()
        parts = {f"slots['{slot}']": slot for slot in state.slots}
        return SavedNames(rule=_SAME_RULE.get(name, name), parts=parts)

    def param_groups(self, leaves: Sequence[Leaf], step: int) -> ParamGroups:
        """Return the instance's own groups, with their options as they are at any `step`."""
        return self._bound().param_groups(leaves)

    def _bound(self) -> Bound:
        if self.bound is None:
            raise PhaseError(
                f"{self!r} is not bound to parameters yet.",
                cause="its init or advance was called by hand.",
                fix="call bind({path: tensor}) first, and use what it returns.",
            )
        return self.bound

    def _ready(self) -> Bound:
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
        return bound

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
    return {slot: bool((torch.as_tensor(kept.sample[slot]) >= 0).all()) for slot in floats}


def _squares_of(bound: Bound) -> dict[str, bool]:
    """Return the same of all param groups."""
    found = dict[str, bool]()
    for slot, never in (one for kept in bound.kept.values() for one in _squares(kept).items()):
        found[slot] = never and found.get(slot, True)
    return found
