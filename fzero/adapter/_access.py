"""Reading and writing gradients, parameters and optimizer state by path, whole or this rank's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from fzero.adapter._masters import own_part, take_values
from fzero.adapter._module import ModuleParameters
from fzero.collectives import gather_many
from fzero.errors import LayoutError, PhaseError, explain
from fzero.mesh import Axis
from fzero.optim import OptimizerState, TorchState
from fzero.packing import unpack
from fzero.placeholder import LazyParam
from fzero.state import Placement, TrainState
from fzero.transforms._pass import Pass
from fzero.transforms.update import norm_of_state, share


class Access:
    """The part of an engine that reads and writes what its state holds.

    Paths are those of module.named_parameters(). What says `full` is a collective, which every
    rank calls; the other calls are not. Gradients are those that an update would use: divided by
    the number of ranks, the loss scale and the micro-batches, before clipping.
    """

    axis: Axis
    state: Any
    _params: ModuleParameters
    _pass: Pass
    _sharded: bool
    _norm: Tensor | None
    _gradients: Any
    # The engine's own.
    _agree: Callable[[str], TrainState]
    _reduced: Callable[[TrainState], TrainState]
    _call: Callable[..., list[int]]
    _put: Callable[[TrainState], None]
    _settle: Callable[[], None]
    _drop_if_user_did: Callable[[], None]
    _require_no_window: Callable[[str], None]
    _stepping: Callable[[], AbstractContextManager[None]]

    # Gradients.

    def full_gradients(self) -> dict[str, Tensor]:
        """{path: mean_r(g_r)} of every parameter that learns, in the accumulation dtype.

        Reduces what waits first; zeros for a parameter that got none. Raises `PhaseError` when
        there are no gradients at all, and inside a window (which they would break up).
        """
        state = self._with_gradients("full_gradients()")
        layout, found = state.setup.layout, {}
        for number, index in enumerate(layout.trainable):
            leaves = self._leaves(index, state.gradients.flats[number] * share(state))
            found.update(zip(layout.groups[index].leaves, leaves, strict=True))
        return {
            leaf.path: found[i].clone() for i, leaf in enumerate(layout.leaves) if leaf.trainable
        }

    def full_gradient(self, path: str) -> Tensor:
        """`full_gradients()[path]`, gathering only its group."""
        number, index, position = self._learning(path)
        state = self._with_gradients("full_gradient()", path)
        flat = state.gradients.flats[number] * share(state)
        return self._leaves(index, flat)[position].clone()

    def set_full_gradient(self, path: str, value: Tensor) -> None:
        """Make `value` (the same on every rank) the gradient that the update will use."""
        number, index, position = self._learning(path)
        state = self._with_gradients("set_full_gradient()", path)
        self._write(index, position, state.gradients.flats[number], value, path, 1 / share(state))

    def local_gradient(self, path: str) -> Tensor:
        """This rank's piece of the gradient: 1-D, empty if the rank has none of it.

        At stage 0 that is all of it. No collective, so only what has been reduced already.
        """
        self._settle()
        number, index, position = self._learning(path)
        state: TrainState = self.state
        flats = state.gradients.flats
        if not flats:
            numel = state.setup.layout.groups[index].shard_numel
            whole = state.setup.gradients is Placement.REPLICATED
            numel = state.setup.layout.full_numel(index) if whole else numel
            flat = torch.zeros(numel, dtype=state.setup.accumulate_dtype(index))
            return self._piece(index, position, flat)
        return self._piece(index, position, flats[number]) * share(state)

    @property
    def global_grad_norm(self) -> Tensor | None:
        """|g|, before clipping, of what an update would use now. A collective.

        Without gradients, that of the last update if `max_norm` was given, else None.
        """
        self._require_no_window("global_grad_norm")
        try:
            state = self._with_gradients("global_grad_norm")
        except PhaseError:
            return self._norm
        return norm_of_state(state, state.gradients) * share(state)

    def _with_gradients(self, name: str, path: str = "") -> TrainState:
        """Reduce what waits on any rank; the state that holds all gradients then."""
        self._require_no_window(name)
        self._settle()
        self._drop_if_user_did()
        state = self._reduced(self._agree(f"{name} {path}".strip()))
        self._put(state)
        return state

    # Parameters.

    def full_parameters(self) -> dict[str, Tensor]:
        """{path: values} of all parameters, frozen ones too: copies, masters where there are."""
        self._call("full_parameters()")
        layout, found = self.state.setup.layout, {}
        for index, group in enumerate(layout.groups):
            leaves = self._leaves(index, self._stepped(index))
            found.update(zip(group.leaves, [x.clone() for x in leaves], strict=True))
        return {leaf.path: found[i] for i, leaf in enumerate(layout.leaves)}

    def full_state_dict(self) -> dict[str, Any]:
        """module.state_dict() with whole values, buffers too: copies, to save or to load.

        At stage 3 `with fzero.adapter.gathered(module, modify=True)` is for loading it.
        """
        self._call("full_state_dict()")
        held = self._params.module.state_dict()
        return {name: self._whole_copy(value) for name, value in held.items()}

    def full_parameter(self, path: str) -> Tensor:
        """`full_parameters()[path]`, gathering only its group."""
        index, position = self._find(path)
        self._call(f"full_parameter() {path}")
        return self._leaves(index, self._stepped(index))[position].clone()

    @torch.no_grad()
    def set_full_parameter(self, path: str, value: Tensor) -> None:
        """Make `value` (the same on every rank) the parameter, and that of its master copy."""
        index, position = self._find(path)
        self._call(f"set_full_parameter() {path}")
        state: TrainState = self.state
        flat = state.params.flats[index]
        masters = getattr(state.optimizer, "masters", ())
        if index in state.setup.layout.trainable and masters:
            master = masters[state.setup.layout.trainable.index(index)]
            if master.numel():
                self._write(index, position, master, value, path)
        self._write(index, position, flat, value, path)
        self._pass.changed()

    def local_parameter(self, path: str) -> Tensor:
        """This rank's piece of the parameter, as the optimizer steps it: 1-D. No collective."""
        index, position = self._find(path)
        return self._piece(index, position, self._stepped(index)).clone()

    # Optimizer state.

    def full_optimizer_state(self, path: str, name: str) -> Tensor:
        """State `name` ("exp_avg", ...) of the parameter at `path`; a scalar ("step") as it is."""
        number, index, position = self._learning(path)
        slots, scalars = self._states(path)
        if name not in slots and name not in scalars:
            raise LayoutError(
                explain(
                    f"the optimizer has no state {name!r} for {path}; it has "
                    f"{sorted([*slots, *scalars])}.",
                    cause="a misspelt name.",
                    fix="ask for one of those.",
                )
            )
        self._call(f"full_optimizer_state() {path} {name}")
        if name in scalars:
            return scalars[name].clone()
        return self._leaves(index, slots[name][number])[position].clone()

    def full_optimizer_states(self) -> dict[str, dict[str, Any]]:
        """{path: {name: value}} of every parameter that the optimizer steps."""
        self._call("full_optimizer_states()")
        layout = self.state.setup.layout
        found: dict[str, dict[str, Any]] = {}
        for number, index in enumerate(layout.trainable):
            paths = [layout.leaves[i].path for i in layout.groups[index].leaves]
            if not self._steps(paths[0]):
                continue
            slots, scalars = self._states(paths[0])
            states: list[dict[str, Any]] = [
                {name: value.clone() for name, value in scalars.items()} for _ in paths
            ]
            for name, flats in slots.items():
                leaves = self._leaves(index, flats[number])
                for state, leaf in zip(states, leaves, strict=True):
                    state[name] = leaf.clone()
            found.update(zip(paths, states, strict=True))
        return {leaf.path: found[leaf.path] for leaf in layout.leaves if leaf.path in found}

    @torch.no_grad()
    def set_full_optimizer_state(self, path: str, name: str, value: Tensor | float) -> None:
        """Make `value` (the same on every rank) state `name` of the parameter at `path`.

        A scalar state is one for all parameters of a param group.
        """
        number, index, position = self._learning(path)
        slots, scalars = self._states(path)
        if name not in slots and name not in scalars:
            raise LayoutError(
                explain(
                    f"the optimizer has no state {name!r} for {path}; it has "
                    f"{sorted([*slots, *scalars])}.",
                    cause="a misspelt name, or the state of another optimizer.",
                    fix="write one of those.",
                )
            )
        self._call(f"set_full_optimizer_state() {path} {name}")
        if name in scalars:
            scalars[name].fill_(float(value))
        else:
            self._write(index, position, slots[name][number], torch.as_tensor(value), path)
        count = self.state.optimizer.count
        count.clamp_(min=1)  # what was written counts from the first step on

    # How.

    def _learning(self, path: str) -> tuple[int, int, int]:
        """(its number among the groups that learn, group, position) of a parameter."""
        index, position = self._find(path)
        trainable = self.state.setup.layout.trainable
        if index not in trainable:
            raise PhaseError(
                explain(
                    f"{path} has no gradient: it did not require grad when the engine was made.",
                    cause="a frozen parameter.",
                    fix="ask for a parameter that learns.",
                )
            )
        return trainable.index(index), index, position

    def _find(self, path: str) -> tuple[int, int]:
        """The group of the parameter at `path`, and its position in it."""
        layout = self.state.setup.layout
        leaf = next((i for i, paths in self._params.paths.items() if path in paths), None)
        if leaf is None:
            raise LayoutError(
                explain(
                    f"there is no parameter {path!r}.",
                    cause="a misspelt path.",
                    fix=f"use one of {[leaf.path for leaf in layout.leaves][:6]} ...",
                )
            )
        for index, group in enumerate(layout.groups):
            if leaf in group.leaves:
                return index, group.leaves.index(leaf)
        raise AssertionError(path)

    def _states(self, path: str) -> tuple[Mapping[str, Sequence[Tensor]], dict[str, Tensor]]:
        """The optimizer's slots, by name and by group that learns; and its scalars for `path`."""
        if not self._steps(path):
            raise PhaseError(
                explain(
                    f"no optimizer steps {path}.",
                    cause="the parameter is frozen, or was not given to the optimizer.",
                    fix="ask for a parameter that the optimizer steps.",
                )
            )
        optimizer, rule = self.state.optimizer, self.state.setup.optimizer
        if isinstance(optimizer, TorchState):
            group = rule.group_of(path)
            scalars = {name: values[group] for name, values in optimizer.counters.items()}
            own = {
                name: flats
                for name, flats in optimizer.slots.items()
                if flats[self._learning(path)[0]].numel() or not any(f.numel() for f in flats)
            }
            return own, scalars
        if isinstance(optimizer, OptimizerState):
            slots = dict(zip(rule.rule.moments, optimizer.moments, strict=True))
            return slots, {"step": optimizer.count}
        return {}, {}

    def _steps(self, path: str) -> bool:
        rule = self.state.setup.optimizer
        return rule.group_of(path) != -1 and self.state.optimizer != ()

    def _stepped(self, index: int) -> Tensor:
        """This rank's part of a group: its master, if it has one."""
        state: TrainState = self.state
        part = own_part(state, state.params.flats[index])
        masters = getattr(state.optimizer, "masters", ())
        trainable = state.setup.layout.trainable
        if masters and index in trainable and masters[trainable.index(index)].numel():
            master = masters[trainable.index(index)]
            if not self._sharded:
                take_values(master, part)
            return master
        return part

    def _whole(self, part: Tensor) -> Tensor:
        """The flat [W l] of a group of which this rank has a part, as its optimizer has."""
        sharded = self.state.setup.optimizer_state is Placement.SHARDED
        return gather_many([part.detach()], self.axis)[0] if sharded else part.detach()

    def _leaves(self, index: int, part: Tensor) -> list[Tensor]:
        """The full leaves of a group of which this rank has a part."""
        return unpack(self.state.setup.layout, index, self._whole(part))

    def _write(
        self,
        index: int,
        position: int,
        flat: Tensor,
        value: Tensor,
        path: str,
        factor: float = 1.0,
    ) -> None:
        """Write the full `value` x factor of one leaf into what this rank holds of its group."""
        setup = self.state.setup
        layout, axis = setup.layout, setup.axis
        group = layout.groups[index]
        leaf = layout.leaves[group.leaves[position]]
        if not isinstance(value, Tensor) or tuple(value.shape) != leaf.shape:
            seen = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise LayoutError(
                explain(
                    f"{path} has the shape {leaf.shape}, the new value {seen}.",
                    cause="a flattened or transposed value.",
                    fix="give the full value, in the shape of the parameter.",
                )
            )
        begin = group.offsets[position]
        whole = flat.numel() == layout.full_numel(index)
        first = 0 if whole else axis.rank * group.shard_numel
        low, high = max(begin - first, 0), min(begin + leaf.numel - first, flat.numel())
        if low < high:
            source = value.detach().reshape(-1)[low + first - begin : high + first - begin]
            with torch.no_grad():
                flat[low:high].copy_(source if factor == 1.0 else source * factor)

    def _piece(self, index: int, position: int, part: Tensor) -> Tensor:
        """What this rank's part of a group has of one leaf."""
        setup = self.state.setup
        group = setup.layout.groups[index]
        begin = group.offsets[position]
        end = begin + setup.layout.leaves[group.leaves[position]].numel
        sharded = setup.optimizer_state is Placement.SHARDED
        first = setup.axis.rank * group.shard_numel if sharded else 0
        return part.detach()[max(begin - first, 0) : max(end - first, 0)]

    def _whole_copy(self, value: Any) -> Any:
        if isinstance(value, LazyParam):
            value = value.full()
        return value.detach().clone() if isinstance(value, Tensor) else value
