"""Reading and writing gradients, parameters and optimizer state by path, whole or this rank's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fzero.adapter._assemble import Parts, divided
from fzero.adapter._bucket import Bucket
from fzero.adapter._options import Options
from fzero.collectives import gather_many
from fzero.errors import LayoutError, PhaseError, explain
from fzero.lazy import PeerFailedError
from fzero.mesh import Axis
from fzero.packing import unpack
from fzero.partition import shard_rows
from fzero.placeholder import LazyParam
from fzero.state import Placement
from fzero.state import accumulation as acc
from fzero.state.accumulation import Accumulation


class Access:
    """The part of an engine that reads and writes what it holds.

    Paths are those of module.named_parameters(). What says `full` is a collective, which every
    rank calls; the other calls are not. Gradients are those that an update would use: divided by
    the number of ranks, the loss scale and the micro-batches, before clipping.
    """

    _parts: Parts
    options: Options
    axis: Axis

    # Gradients.

    def full_gradients(self) -> dict[str, Tensor]:
        """{path: mean_r(g_r)} of every parameter that learns, in the accumulation dtype.

        Reduces what waits first; zeros for a parameter that got none. Raises `PhaseError` when
        there are no gradients at all, and inside a window (which they would break up).
        """
        self._require_reduced("full_gradients()")
        plan, share = self._parts.plan, self._share()
        found: dict[str, Tensor] = {}
        for bucket in self._parts.buckets:
            leaves = self._leaves(bucket.index, self._reduced(bucket) * share)
            found.update(zip(plan.paths_of(bucket.index), leaves, strict=True))
        return {path: found[path] for path in self._learning_paths()}

    def full_gradient(self, path: str) -> Tensor:
        """`full_gradients()[path]`, gathering only its bucket."""
        self._require_reduced("full_gradient()")
        bucket, position = self._bucket_of(path)
        return self._leaves(bucket.index, self._reduced(bucket) * self._share())[position]

    def set_full_gradient(self, path: str, value: Tensor) -> None:
        """Make `value` (the same on every rank) the gradient that the update will use."""
        self._require_reduced("set_full_gradient()")
        bucket, position = self._bucket_of(path)
        scaled = value / self._share()
        bucket.reduced = self._written(bucket.index, position, self._reduced(bucket), scaled, path)

    def local_gradient(self, path: str) -> Tensor:
        """This rank's piece of the gradient: 1-D, empty if the rank has none of it.

        At stage 0 that is all of it. No collective, so only what has been reduced already.
        """
        self._parts.backward.settle()
        bucket, position = self._bucket_of(path)
        return self._piece(bucket.index, position, self._reduced(bucket)) * self._share()

    # Parameters.

    def full_parameters(self) -> dict[str, Tensor]:
        """{path: values} of all parameters, frozen ones too: copies, masters where there are."""
        self._meet()
        plan = self._parts.plan
        found: dict[str, Tensor] = {}
        for index in range(len(plan.layout.groups)):
            leaves = self._leaves(index, self._stepped(index))
            found.update(zip(plan.paths_of(index), [x.clone() for x in leaves], strict=True))
        return {leaf.path: found[leaf.path] for leaf in plan.layout.leaves}

    def full_state_dict(self) -> dict[str, Any]:
        """module.state_dict() with whole values, buffers too: copies, to save or to load.

        At stage 3 `with fzero.adapter.gathered(module, modify=True)` is for loading it.
        """
        self._meet()
        held = self._parts.parameters.module.state_dict()
        return {name: _whole_copy(value) for name, value in held.items()}

    def full_parameter(self, path: str) -> Tensor:
        """`full_parameters()[path]`, gathering only its group."""
        self._meet()
        index, position = self._parts.plan.find(path)
        return self._leaves(index, self._stepped(index))[position].clone()

    @torch.no_grad()
    def set_full_parameter(self, path: str, value: Tensor) -> None:
        """Make `value` (the same on every rank) the parameter, and that of its master copy."""
        self._meet()
        parts, (index, position) = self._parts, self._parts.plan.find(path)
        mine = self._written(index, position, self._stepped(index), value, path)
        if index in parts.rows.of:
            parts.rows.of[index].copy_(mine)
        parts.parameters.write(index, position, value, mine)
        if parts.source is not None:
            parts.source.updated([index])

    def local_parameter(self, path: str) -> Tensor:
        """This rank's piece of the parameter, as the optimizer steps it: 1-D. No collective."""
        index, position = self._parts.plan.find(path)
        return self._piece(index, position, self._stepped(index)).clone()

    # Optimizer state.

    def full_optimizer_state(self, path: str, name: str) -> Tensor:
        """State `name` ("exp_avg", ...) of the parameter at `path`; a scalar ("step") as it is."""
        self._meet()
        index, position, state = self._state_of(path)
        if name not in state:
            raise LayoutError(
                explain(
                    f"the optimizer has no state {name!r} for {path}; it has {sorted(state)}.",
                    cause="a misspelt name, or no step() has been made yet.",
                    fix="ask after the first step(), for one of those.",
                )
            )
        return self._unpacked(index, position, state[name])

    def full_optimizer_states(self) -> dict[str, dict[str, Any]]:
        """{path: {name: value}} of every parameter that the optimizer steps."""
        self._meet()
        plan, rows = self._parts.plan, self._parts.rows
        found: dict[str, dict[str, Any]] = {}
        for index in rows.stepped:
            for position, path in enumerate(plan.paths_of(index)):
                state = self._state_of(path)[2]
                found[path] = {n: self._unpacked(index, position, x) for n, x in state.items()}
        return found

    @torch.no_grad()
    def set_full_optimizer_state(self, path: str, name: str, value: Tensor | float) -> None:
        """Make `value` (the same on every rank) state `name` of the parameter at `path`.

        A scalar state is one for all parameters of a bucket. Before the first step() there is no
        state to write to: the parameter's is then made.
        """
        self._meet()
        index, position, state = self._state_of(path)
        rows = self._parts.rows.of[index]
        if not isinstance(value, Tensor) or not value.ndim:
            state[name] = value
            return
        held = state.get(name)
        if held is None:
            held = torch.zeros_like(rows)
        state[name] = self._written(index, position, held, value, path)

    # Stage 3.

    def register_external(self, module: nn.Module, parameter: Tensor) -> None:
        """Gather `parameter` together with the parameters of `module`, which uses it as well.

        Never needed for right values: a foreign parameter is found when it is read. It saves the
        wait, as it is then gathered with the module's own. Nothing to do below stage 3.
        """
        if self._parts.source is None:
            return
        own = [p for p in module.parameters() if isinstance(p, LazyParam)]
        if not own or not isinstance(parameter, LazyParam):
            raise LayoutError(
                explain(
                    "register_external: "
                    + ("the parameter is not this engine's." if own else "the module has none."),
                    cause="a module without parameters, or a tensor of another model.",
                    fix="name a module that has parameters, and a parameter of engine.module.",
                )
            )
        self._parts.source.register_external(own[0].where[0], parameter.where[0])

    # How.

    def _reduce_what_waits(self) -> Accumulation:
        """Reduce what waits on any rank; return what is held then. A collective."""
        backward = self._parts.backward
        backward.settle()
        backward.keep_outside()
        codes = self._met(backward.accumulation.code)
        backward.accumulation = acc.agree(backward.accumulation, codes)
        if backward.accumulation.waiting:
            backward.flush()
        return backward.accumulation

    def _meet(self) -> None:
        """At stage 3, serve the other ranks until all have come here."""
        if self._parts.source is not None:
            self._met(0)

    def _met(self, value: int) -> list[int]:
        backward = self._parts.backward
        backward.settle()
        try:
            values = self._parts.reducer.meet(value)
        except PeerFailedError:
            backward.abandon()
            raise
        backward.settle()
        return values

    def _require_reduced(self, name: str) -> None:
        self._require_no_window(name)
        acc.require_gradients(self._reduce_what_waits(), name)

    def _require_no_window(self, name: str) -> None:
        window = self._parts.backward.accumulation.window
        if window:
            raise PhaseError(
                explain(
                    f"{name} inside {window}().",
                    cause="gradients were asked for before the window has reduced them.",
                    fix=f"ask after the `with engine.{window}():` block.",
                )
            )

    def _share(self) -> float:
        return divided(self._parts.backward.accumulation, self.options)

    def _bucket_of(self, path: str) -> tuple[Bucket, int]:
        index, position = self._parts.plan.find(path)
        for bucket in self._parts.buckets:
            if bucket.index == index:
                return bucket, position
        raise PhaseError(
            explain(
                f"{path} has no gradient: it did not require grad when the engine was made.",
                cause="a frozen parameter.",
                fix="ask for a parameter that learns.",
            )
        )

    def _learning_paths(self) -> list[str]:
        return [leaf.path for leaf in self._parts.plan.layout.leaves if leaf.trainable]

    def _reduced(self, bucket: Bucket) -> Tensor:
        if bucket.reduced is not None:
            return bucket.reduced
        shape = self._parts.plan.shape_of_rank(bucket.index)
        return torch.zeros(shape, dtype=bucket.accumulate, device=bucket.device)

    def _stepped(self, index: int) -> Tensor:
        parts = self._parts
        parts.parameters.follow([index])
        parts.rows.take_written([index])
        return (
            parts.rows.of[index].detach()
            if index in parts.rows.of
            else parts.parameters.rows[index]
        )

    def _state_of(self, path: str) -> tuple[int, int, dict[str, Any]]:
        index, position = self._parts.plan.find(path)
        optimizer = self._parts.optimizer
        if optimizer is None or index not in self._parts.rows.of:
            raise PhaseError(
                explain(
                    f"no optimizer steps {path}.",
                    cause="the parameter is frozen, or was not given to the optimizer.",
                    fix="ask for a parameter that the optimizer steps.",
                )
            )
        return index, position, optimizer.state[self._parts.rows.of[index]]

    def _whole(self, rows: Tensor) -> Tensor:
        """The flat [W l] of a group of which this rank has `rows`."""
        plan, flat = self._parts.plan, rows.detach().reshape(-1)
        return gather_many([flat], plan.axis)[0] if plan.placement is Placement.SHARDED else flat

    def _leaves(self, index: int, rows: Tensor) -> list[Tensor]:
        """The full leaves of a group of which this rank has `rows`."""
        return unpack(self._parts.plan.layout, index, self._whole(rows))

    def _written(self, index: int, position: int, rows: Tensor, value: Tensor, path: str) -> Tensor:
        """This rank's new rows of a group: those of `rows`, but for `value` at one leaf."""
        plan, whole = self._parts.plan, self._whole(rows).clone()
        leaf = unpack(plan.layout, index, whole)[position]
        _require_shape(leaf, value, path)
        leaf.copy_(value)
        if plan.placement is Placement.SHARDED:
            whole = shard_rows(whole, plan.axis.size, plan.axis.rank).clone()
        return torch.empty_like(rows, requires_grad=False).copy_(whole.view(rows.shape))

    def _piece(self, index: int, position: int, rows: Tensor) -> Tensor:
        """What this rank's rows of a group have of one leaf."""
        plan = self._parts.plan
        group = plan.layout.groups[index]
        begin = group.offsets[position]
        end = begin + plan.layout.leaves[group.leaves[position]].numel
        first = plan.axis.rank * group.shard_numel if plan.placement is Placement.SHARDED else 0
        flat = rows.detach().reshape(-1)
        return flat[max(begin - first, 0) : max(end - first, 0)]

    def _unpacked(self, index: int, position: int, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.ndim:
            return value.clone() if isinstance(value, Tensor) else value
        return self._leaves(index, value)[position].clone()


def _whole_copy(value: Any) -> Any:
    if isinstance(value, LazyParam):
        value = value.full()
    return value.detach().clone() if isinstance(value, Tensor) else value


def _require_shape(held: Tensor, value: Any, path: str) -> None:
    shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
    if shape != tuple(held.shape):
        raise LayoutError(
            explain(
                f"{path} has the shape {tuple(held.shape)}, the new value {shape}.",
                cause="a flattened or transposed value.",
                fix="give the full value, in the shape of the parameter.",
            )
        )
