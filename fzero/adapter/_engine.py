"""The engine: an nn.Module, a torch.optim optimizer and loss.backward(), over many ranks."""

from __future__ import annotations

import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from fzero.adapter._access import Access
from fzero.adapter._events import Events
from fzero.adapter._gradient import Gradients, HeldGradient
from fzero.adapter._guard import Guard
from fzero.adapter._masters import Masters
from fzero.adapter._module import (
    ModuleParameters,
    free_to_swap,
    require_one_device,
    require_plain,
)
from fzero.adapter._options import Options, Updating, require_options
from fzero.adapter._report import MemoryReport, report
from fzero.adapter._scale import LossScale
from fzero.adapter._units import unit_of_leaves
from fzero.collectives import (
    assert_same_everywhere,
    broadcast_from_first,
    channel_of,
    gather_many,
    told_everywhere,
)
from fzero.errors import LayoutError, PhaseError, explain
from fzero.mesh import Axis, axis_of, end_group, own_group
from fzero.optim import NoOptimizer, TorchOptimizer, as_optimizer, from_torch, no_optimizer
from fzero.packing import unpack
from fzero.placeholder import placeholders
from fzero.state import (
    Buffers,
    Gathering,
    HookState,
    Policy,
    Reduction,
    Reshard,
    Setup,
    TrainState,
    buffers,
    progress,
)
from fzero.state.leaf_modules import LeafSpec
from fzero.state.window import CLOSED, open_window
from fzero.transforms._modes import require_autograd
from fzero.transforms._norm import clip_factor
from fzero.transforms._pass import Pass
from fzero.transforms._receive import accumulate, as_buffers, reduced
from fzero.transforms.init import BUCKET_BYTES, COMPARED, check_reshard, check_stage, fill, plan
from fzero.transforms.update import norm_of_state, scaled, share, update

Factory = Callable[[list[nn.Parameter]], Optimizer]

_OWNERS: weakref.WeakValueDictionary[int, Engine] = weakref.WeakValueDictionary()
"""The open engine of each parameter object, by id: a parameter has one at a time."""


class Engine(Access):
    """ZeRO stage 0 to 3 for a module whose loss is made and differentiated in the usual way.

    `loss.backward()` leaves each rank its part of mean_r(g_r), the mean of the ranks' gradients;
    backwards add up until `step()`, as in PyTorch. Elements a rank holds, for P parameters and K
    optimizer slots over W ranks:

        stage   parameters   gradients   optimizer
        0       P            P           K P
        1, 2    P            P / W       K P / W
        3       P / W        P / W       K P / W

    At stage 3 the module's parameters are placeholders; a kernel that reads one gets the full
    values, gathered for its unit and freed again. All numbers are in `engine.state`, the
    `TrainState` that a functional step carries; `engine.step()` uses up a state that was taken from
    it before.

    While the engine holds gradients, `p.grad` is a stand-in that says where they are; `p.grad =
    None` (module.zero_grad(), optimizer.zero_grad()) drops them.

    Args:
        module: any nn.Module; its parameters become views of the engine's buffers. Rank 0's values
            are given to all ranks, buffers too; later each rank's buffers (running statistics) are
            its own.
        optimizer: a torch.optim optimizer of module.parameters(), in any param groups; or its class
            or a factory, called with what learns; or a rule of `fzero.optim`; None for a model that
            is not stepped. `engine.step()` runs it; `optimizer.step()` alone raises.
        stage: 0, 1, 2 or 3.
        mesh: a one-dim DeviceMesh; default the world.
        bucket_bytes: below stage 3, the size up to which parameters share a collective.
        contiguous_gradients: copy each gradient into its bucket as it comes.
        overlap: reduce beside the backward.
        ordered: sum in rank order on every backend.
        accumulate_dtype: in which gradients add up; default fp32 for 16-bit parameters.
        communication_dtype: in which gradients cross ranks; default the parameters'.
        master_weights: fp32 copies of 16-bit parameters.
        max_norm: clip the global gradient norm.
        gradient_accumulation_steps: `step()` updates at every n-th call.
        average_micro_batches: divide the update by the number of step() calls, or of backwards when
            each call updates.
        loss_scale: see `scale`.
        reshard_after_forward: stage 3. True: the full values of a unit go when another unit is
            used, and are gathered again in backward. False: they stay until the backward is over.
            "window": they stay over a window (`coalesce`, `no_sync`).
        prefetch_numel: stage 3, elements gathered early: the next unit, and more while they fit; 0:
            none.
        persistence_threshold_numel: stage 3, parameters of at most so many elements stay whole from
            one update to the next.
        leaf_modules: stage 3, modules whose parameters are one unit.

    Raises:
        LayoutError: for wrong arguments, before the module is touched.
        AxisError: when the ranks' models, optimizers or options differ.

    Source: Rajbhandari et al., "ZeRO", arXiv 1910.02054.

    Example:
        >>> import torch
        >>> from fzero.adapter import Engine
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> _ = torch.nn.init.ones_(model.weight)
        >>> engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.5), stage=2)
        >>> engine(torch.tensor([[1.0, 2.0]])).sum().backward()
        >>> engine.step()
        True
        >>> model.weight.data
        tensor([[0.5000, 0.0000]])
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Any = None,
        *,
        stage: int,
        mesh: DeviceMesh | Axis | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        contiguous_gradients: bool = False,
        overlap: bool = True,
        ordered: bool = False,
        accumulate_dtype: torch.dtype | None = None,
        communication_dtype: torch.dtype | None = None,
        master_weights: bool = True,
        max_norm: float | None = None,
        gradient_accumulation_steps: int = 1,
        average_micro_batches: bool = False,
        loss_scale: float = 1.0,
        reshard_after_forward: Reshard = True,
        prefetch_numel: int = 1,
        persistence_threshold_numel: int = 0,
        leaf_modules: LeafSpec | None = None,
    ) -> None:
        self.options = require_options(
            Options(
                updating=Updating(
                    master_weights=master_weights,
                    max_norm=max_norm,
                    gradient_accumulation_steps=gradient_accumulation_steps,
                    average_micro_batches=average_micro_batches,
                    loss_scale=loss_scale,
                ),
                reduction=Reduction(
                    ordered=ordered,
                    overlap=overlap,
                    contiguous_gradients=contiguous_gradients,
                    accumulate_dtype=accumulate_dtype,
                    communication_dtype=communication_dtype,
                ),
                gathering=Gathering(
                    reshard_after_forward=check_reshard(reshard_after_forward),
                    prefetch_numel=prefetch_numel,
                ),
                bucket_bytes=bucket_bytes,
                persistence_threshold_numel=persistence_threshold_numel,
                leaf_modules=leaf_modules,
            )
        )
        self.module, self.stage = module, check_stage(stage)
        self._norm: Tensor | None = None
        self._closed = False
        self._outside: TrainState | None = None  # inside a window: the state before it
        self._scale = LossScale(loss_scale)
        setup = planned(module, optimizer, self.stage, axis_of(mesh), self.options)
        self._take_over(setup)

    def _take_over(self, setup: Setup) -> None:
        """Everything was checked: move the module's parameters onto the buffers of a state."""
        setup, self._end_group = _with_own_group(self, setup)
        self.axis = setup.axis
        self._sharded = setup.gathers_by_unit
        self._params = params = ModuleParameters(self.module, setup.layout)
        with torch.no_grad():
            for buffer in self.module.buffers():
                buffer.copy_(broadcast_from_first([buffer], self.axis)[0])
            done = (lambda index, _: params.let_go(index)) if self._sharded else params.show
            state = fill(setup, params.values, done)
        channel = channel_of(self.axis)
        self._number = channel.number() if channel is not None else 0
        self._some_wait = False
        self._pass = Pass(
            f"a forward or backward of engine {self._number}",
            [state],
            self.axis,
            number=self._number,
            served=self._sharded,
        )
        if self._sharded:
            with free_to_swap(self.module):
                for index in range(len(setup.layout.groups)):
                    params.place(index, placeholders(self._pass.gatherer, index))
        params.remember()
        self._every = params.all_objects
        learning = [
            (p, leaf)
            for leaf, one in enumerate(setup.layout.leaves)
            if one.trainable
            for p in params.objects(leaf)
        ]
        paths = [leaf.path for leaf in setup.layout.leaves]
        self._gradients = Gradients([(p, paths[leaf]) for p, leaf in learning])
        self._events = Events(self.module, learning, self)
        self._masters = Masters(params, setup)
        self._pass.gatherer.on_written = self._written
        chosen: Any = setup.optimizer
        self.optimizer = chosen.instance if isinstance(chosen, TorchOptimizer) else None
        if isinstance(chosen, TorchOptimizer) and chosen.instance is not chosen.source:
            every = list({id(p): p for p, _ in learning}.values())
            chosen.instance.param_groups[0]["params"] = every  # it was made just now, of none
        self._guard = Guard(self.optimizer) if self.optimizer is not None else None
        _OWNERS.update((id(p), self) for p in self._every)

    # The state.

    @property
    def state(self) -> TrainState:
        """The train state: parameters, gradients, window, optimizer, masters, schedule.

        It is read by `fzero.full_params`, `fzero.checkpoint.save`, `fzero.plot` and all else that
        takes a state. `step()` uses it up: what was taken before raises `DonatedError` afterwards.
        Setting it, to what `fzero.checkpoint.load(path, engine.state)` returned, say, writes its
        values into the engine's buffers.
        """
        self._require_not_closed()
        return self._pass.states[0]

    @state.setter
    def state(self, state: TrainState) -> None:
        self._require_not_closed()
        self._adopt(state)

    @property
    def hooks(self) -> HookState:
        """The record of the gradient hooks: which backward is running, and whether it is over."""
        self._require_not_closed()
        return self._events.hooks

    def _put(self, state: TrainState) -> None:
        self._pass.states[0] = state

    # Forward and backward.

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module. `engine.module(...)` does the same."""
        self._require_not_closed()
        try:
            return self.module(*args, **kwargs)
        except BaseException as error:
            self._failed(error)
            raise

    @torch._disable_dynamo
    def backward(self, loss: Any, gradient: Any = None, **options: Any) -> None:
        """`torch.autograd.backward(loss, gradient, **options)`; plain loss.backward() is as good.

        After an error here the other ranks are told at once, and raise as well.
        """
        self._require_not_closed()
        try:
            torch.autograd.backward(loss, gradient, **options)
        except BaseException as error:
            self._failed(error)
            raise

    def scale(self, loss: Tensor) -> Tensor:
        """Return loss x `loss_scale`; the update divides by it again.

        With a `loss_scale` other than 1 every backward needs it: one without raises before any
        gradient is used.
        """
        return self._scale.apply(loss)

    def _failed(self, error: BaseException) -> None:
        """A forward or a backward raised here; what it is part of comes here as well."""
        if not self._events.inside():
            self._pass.fail(error)
            self._events.abandon()

    # What the events lead to.

    def forward_begins(self) -> None:
        """A root forward starts: at stage 3 its gathers are announced."""
        self._pass.begin_forward()

    def forward_ends(self, *, trains: bool) -> None:
        """A root forward is over."""
        self._pass.end_forward()
        if not trains:
            self._pass.finish_forward()

    def backward_begins(self, first: Tensor | None) -> None:
        """A backward starts."""
        if self._gradients.dropped(first):
            self._gradients.forget()
            self._clear()
        self._pass.begin_backward(silent=True)

    def received(self, leaf: int, p: Tensor) -> None:
        """A parameter got a gradient."""
        if self.options.updating.loss_scale != 1.0:
            self._scale.require(self.hooks.post_backward_callback_graph_task_id)
        if self._pass.silent:
            self._pass.first_gradient()
        if isinstance(p.grad, HeldGradient):
            gradient = p.grad.taken()
            if gradient is not None:
                self._pass.reducer.put(0, leaf, gradient.detach())
        else:
            self._pass.reducer.take(0, leaf, p)
            self._gradients.stand_again(p)  # create_graph=True: autograd put another one there

    def backward_ends(self) -> None:
        """The epilogue: what the backward brought is in the state from here on."""
        if self._pass.reducer.received or self._pass.gathers:
            try:
                self._pass.finish(counts=False)  # torch.autograd.grad may have gathered only
            except BaseException as error:
                self._pass.fail(error)
                raise
        self._pass.silent = False
        self._show_gradients()

    def drop(self) -> None:
        """A backward raised somewhere where nobody could say so: its gradients go."""
        self._pass.fail(RuntimeError("a backward that raised"))

    def _show_gradients(self) -> None:
        """Let `p.grad` say that the engine holds gradients, if it does."""
        state = self._pass.states[0]
        held = state.gradients.held or state.window.pending.held
        self._gradients.stand() if held else self._gradients.drop()

    # Windows.

    @contextmanager
    def coalesce(self) -> Iterator[None]:
        """Any number of backwards, one reduction, at the end of the block. A collective.

        A block that raises brings nothing, and leaves what was there before.
        """
        with self._window("coalesce"):
            yield
        self._reduce_what_waits("the end of coalesce()")

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Like `coalesce`, but the reduction is left to the next backward, or to `step`."""
        with self._window("no_sync"):
            yield

    @contextmanager
    def _window(self, kind: str) -> Iterator[None]:
        self._require_outside(f"{kind}()")
        self._require_no_window(f"{kind}()")
        self._settle()
        before = self.state
        opened = open_window(replace(before.window, pending=CLOSED.pending))
        self._put(before.replace(window=opened))
        self._outside = before
        good = False
        try:
            yield
            good = True
        finally:
            self._settle()
            if good:
                self._drop_if_user_did()
            now, before, self._outside = self.state, self._outside, None
            waited = before.window.pending
            if good and now.progress.backwards < before.progress.backwards:
                waited = CLOSED.pending  # zero_grad() inside
            if good and now.window.pending.held:
                waited = (
                    buffers.add(waited, now.window.pending) if waited.held else now.window.pending
                )
            window = replace(CLOSED, pending=waited)
            counted = now.progress if good else before.progress
            self._put(now.replace(window=window, progress=counted))
            self._show_gradients()
            self._pass.window_ends()

    # The update.

    @torch._disable_dynamo
    def step(self) -> bool:
        """Update the parameters from the gradients, and clear those. A collective.

        Returns:
            Whether the update was due: with `gradient_accumulation_steps=n` it is at every n-th
            call.

        Raises:
            PhaseError: without gradients, inside a window or a backward, and for an engine without
                optimizer; everything is then as before.
            LayoutError: when a parameter was replaced, moved or unfrozen, or `p.grad` written.
        """
        self._require_outside("step()")
        self._require_no_window("step()")
        self._require_optimizer()
        self._settle()
        self._drop_if_user_did()
        counted, due = progress.call_step(
            self.state.progress, self.options.updating.gradient_accumulation_steps
        )
        if due:
            self._update()
            self._gradients.drop()
        else:
            self._put(self.state.replace(progress=counted))
        return due

    def _update(self) -> None:
        self._params.require_same()
        state = self._agree("step()")
        self._masters.follow(state)
        state = self._reduced(state)
        self._put(state)  # if the optimizer raises, this is what the engine has
        with self._stepping():
            new, norm = update(state)
        self._norm = norm
        self._gradients.drop()
        self._put(new)
        self._published()

    def _published(self) -> None:
        """The parameters have new values, for the module too."""
        self._pass.changed()
        # A graph from before the update must not be differentiated with the new values: autograd
        # then says so, as it does for an optimizer that writes to the parameters themselves.
        torch.autograd.graph.increment_version(self._every)
        self._masters.published()

    def _written(self, units: Sequence[int]) -> None:
        """Units of stage 3 were written, by `gathered(modify=True)`."""
        groups = [group for unit in units for group in self._pass.gatherer.units[unit]]
        self._masters.take(self.state, groups)

    @torch._disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Throw away every gradient since the last update. A collective, outside of a window.

        Either `set_to_none`, torch's argument, means the same. With `gradient_accumulation_steps`
        the accumulation starts again, with a warning.
        """
        self._require_not_closed()
        if not self._events.inside():
            self._events.abandon()  # a backward that raised is what is to be thrown away
        self._norm = None
        if not self.state.window.is_open:
            self._call("zero_grad()")
        every = self.options.updating.gradient_accumulation_steps
        if message := progress.thrown_away(self.state.progress, every):
            warnings.warn(message, UserWarning, stacklevel=2)
        self._gradients.drop()
        self._clear()

    def _clear(self) -> None:
        """Forget every gradient, also what an open window adds to."""
        self._put(cleared(self.state))
        self._outside = self._outside and cleared(self._outside)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradients so that their global norm is at most `max_norm`; return it before.

        g <- g min(1, max_norm / (|g| + 1e-6)). A collective. `max_norm=` of the engine does the
        same at every update.
        """
        return self._clip(max_norm)

    # As a module has them.

    def train(self, mode: bool = True) -> Engine:
        """Set the module's mode, as `module.train` does."""
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
        """Set the module to evaluation, as `module.eval` does."""
        return self.train(False)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return `module.parameters()`; at stage 3 they are placeholders."""
        return self.module.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return `module.named_parameters()`."""
        return self.module.named_parameters()

    def state_dict(self) -> dict[str, Any]:
        """Return `full_state_dict()`: whole values, of every rank. A collective at stage 3."""
        return self.full_state_dict()

    def __repr__(self) -> str:
        if self._closed:
            return "Engine(closed)"
        layout, counted = self.state.setup.layout, self.state.progress
        numel = sum(leaf.numel for leaf in layout.leaves)
        return (
            f"Engine({type(self.module).__name__}, stage={self.stage}, {self.axis}, "
            f"{numel:,} parameters in {len(layout.groups)} groups, "
            f"{self.state.setup.optimizer!r}, {int(self.state.step)} updates, "
            f"{counted.backwards} backwards since)"
        )

    def memory_report(self) -> MemoryReport:
        """Bytes that this rank holds now, by kind and dtype. No collective."""
        self._require_not_closed()
        self._settle()
        return report(self.state, self._pass)

    # The end.

    @torch.no_grad()
    def close(self) -> None:
        """Take off every hook, and give module and optimizer back as ordinary ones. A collective.

        Gradients that were not used are lost. Parameters are gathered unit by unit. Closing twice
        is allowed.
        """
        if self._closed:
            return
        self._settle()
        self._call("close()")
        self._events.remove()
        self._gradients.drop()
        state = self.state
        self._pass.changed()
        with free_to_swap(self.module):
            for index, flat in enumerate(state.params.flats):
                whole = gather_many([flat], self.axis)[0] if self._sharded else flat
                leaves = [x.clone() for x in unpack(state.setup.layout, index, whole)]
                (self._params.place if self._sharded else self._params.have)(index, leaves)
        if self._guard is not None and self.optimizer is not None:
            self._guard.remove()
            self._give_states_back(self.optimizer)
        self._pass.close()
        for p in self._every:
            _OWNERS.pop(id(p), None)
        if self._end_group is not None:
            self._end_group()
        self._closed = True

    def _give_states_back(self, optimizer: Optimizer) -> None:
        """The optimizer has its state for whole parameters, as if it had made the steps itself."""
        states = self.full_optimizer_states() if int(self.state.optimizer.count) else {}
        for path, state in states.items():
            p = self._params.at(path)
            if any(p is q for group in optimizer.param_groups for q in group["params"]):
                optimizer.state[p] = {name: _laid_as(p, x) for name, x in state.items()}

    # Agreement with the other ranks.

    def _call(self, name: str, value: int = 0) -> list[int]:
        """Wait until every rank makes this call; return the `value` of each."""
        self._require_not_closed()
        channel = self._pass.channel
        if channel is None:
            return [value]
        values = channel.call(f"{name} of engine {self._number}", value)
        self._take_served()
        return values

    def _take_served(self) -> None:
        """Other ranks were served: what they reduced meanwhile is this rank's gradient, too."""
        self._pass.reducer.land()
        rows = self._pass.reducer.take_rows(0)
        if rows:
            self._put(accumulate(self.state, as_buffers(self.state, rows, partial=False)))

    def _agree(self, name: str) -> TrainState:
        """Agree with all ranks on what is held: gradients of the rank with the most backwards.

        Raises `PhaseError` if no rank holds any.
        """
        state = self.state
        held = int(state.window.pending.held) + 2 * int(state.gradients.held)
        codes = self._call(name, held + 4 * state.progress.backwards)
        if not any(code & 3 for code in codes):
            raise PhaseError(
                explain(
                    f"{name}: there are no gradients; {int(state.step)} updates so far.",
                    cause="no backward ran since the last step() or zero_grad(), or it ran on "
                    "another model, or none of this model's parameters took part in the loss.",
                    fix="run loss.backward() or engine.backward(loss) before it.",
                )
            )
        self._some_wait = any(code & 1 for code in codes)
        backwards = max(max(code >> 2 for code in codes), 1)
        state = self.state
        return state.replace(progress=replace(state.progress, backwards=backwards))

    def _reduced(self, state: TrainState) -> TrainState:
        """Reduce what waits on any rank. Every rank comes here, or none."""
        if not self._some_wait:
            return (
                state
                if state.gradients.held
                else accumulate(state, as_buffers(state, {}, partial=False))
            )
        pending = state.window.pending
        local = dict(zip(state.setup.layout.trainable, pending.flats, strict=False))
        state = state.replace(window=replace(state.window, pending=CLOSED.pending))
        new = as_buffers(state, reduced(state, local), partial=False)
        self._some_wait = False
        return accumulate(state, new)

    def _reduce_what_waits(self, name: str) -> None:
        """Reduce what waits, if there is anything on any rank."""
        self._some_wait = any(self._call(name, int(self.state.window.pending.held)))
        if self._some_wait:
            self._put(self._reduced(self.state))
            self._show_gradients()

    def _clip(self, max_norm: float) -> Tensor:
        state = self._with_gradients("clip_grad_norm_()")
        norm = norm_of_state(state, state.gradients) * share(state)
        gradients = scaled(state, state.gradients, clip_factor(norm, max_norm))
        self._put(state.replace(gradients=gradients))
        return norm

    # Where it stands.

    def _settle(self) -> None:
        """Drop a backward that raised where nobody could say so."""
        self._require_not_closed()
        self._events.settle()
        if not self._events.inside():
            self._pass.put_aside()

    def _drop_if_user_did(self) -> None:
        if self._gradients.dropped():
            self._gradients.drop()
            self._clear()

    @contextmanager
    def _stepping(self) -> Iterator[None]:
        if self._guard is None:
            yield
            return
        with self._guard.stepping():
            yield

    def _require_optimizer(self) -> None:
        if isinstance(self.state.setup.optimizer, NoOptimizer):
            raise no_optimizer()

    def _require_not_closed(self) -> None:
        if self._closed:
            raise PhaseError(
                explain(
                    "a closed engine was used.",
                    cause="engine.close() gave the module and the optimizer back.",
                    fix="use those as ordinary ones, or make a new Engine of the module.",
                )
            )

    def _require_outside(self, name: str) -> None:
        self._require_not_closed()
        if self._events.inside():
            raise PhaseError(
                explain(
                    f"{name} inside a backward.",
                    cause="a hook on a tensor or parameter called it.",
                    fix="call it after loss.backward() has returned.",
                )
            )

    def _require_no_window(self, name: str) -> None:
        if self.state.window.is_open:
            raise PhaseError(
                explain(
                    f"{name} inside a window (coalesce() or no_sync()).",
                    cause="the window was left open around the whole step, or gradients were asked "
                    "for before it has reduced them.",
                    fix="leave the `with engine.coalesce():` block first; its end reduces what it "
                    "collected.",
                )
            )

    @torch.no_grad()
    def _adopt(self, state: TrainState) -> None:
        """Write the values of another state into this engine's buffers."""
        own = self.state
        if state.setup.layout != own.setup.layout or state.stage != own.stage:
            raise LayoutError(
                explain(
                    f"engine.state was set to a state of stage {state.stage} with "
                    f"{len(state.setup.layout.groups)} groups; the engine has stage {own.stage}, "
                    f"{len(own.setup.layout.groups)} groups.",
                    cause="a state of another model, stage or number of ranks.",
                    fix="load it into the engine's form: "
                    "engine.state = fzero.checkpoint.load(path, engine.state).",
                )
            )
        for mine, theirs in zip(own.params.flats, state.params.flats, strict=True):
            if mine is not theirs:
                mine.copy_(theirs)
        self._gradients.drop()
        self._put(state.replace(params=own.params, setup=own.setup))
        self._published()


def cleared(state: TrainState) -> TrainState:
    """Return the state without any gradient; an open window stays open."""
    window = replace(state.window, pending=CLOSED.pending)
    return state.replace(gradients=Buffers(), window=window, progress=progress.Progress())


def planned(module: nn.Module, optimizer: Any, stage: int, axis: Axis, options: Options) -> Setup:
    """What the engine's state will be, if everything is as it must be. Nothing is touched yet."""
    with told_everywhere(axis, what=COMPARED):  # the next that all ranks compare
        require_autograd("Engine(...)")
        require_plain(module, lambda p: id(p) in _OWNERS)
        require_one_device(module)
        unit, warning = unit_of_leaves(module, options.leaf_modules)
        chosen = _as_optimizer(optimizer, options)
    if warning:
        warnings.warn(warning, UserWarning, stacklevel=4)
    setup = plan(
        OrderedDict(module.named_parameters(remove_duplicate=False)),
        chosen,
        stage=stage,
        axis=axis,
        units=unit,
        trainable=None,
        bucket_bytes=options.bucket_bytes,
        reduction=options.reduction,
        gathering=options.gathering,
        persistence_threshold_numel=options.persistence_threshold_numel,
    )
    assert_same_everywhere([f"{options}"], axis, what="the engine's options")
    updating = options.updating
    steps = updating.gradient_accumulation_steps
    averages = updating.average_micro_batches
    policy = Policy(
        max_norm=updating.max_norm,
        grad_scale=1.0 / steps if averages else 1.0,
        unscale=1.0 / updating.loss_scale,
        averages=averages and steps == 1,
        donate=True,
    )
    return replace(setup, policy=policy)


def _as_optimizer(optimizer: Any, options: Options) -> Any:
    """An optimizer of a state: torch.optim's through `from_torch`."""
    if optimizer is None:
        return NoOptimizer()
    pair = isinstance(optimizer, tuple) or hasattr(optimizer, "update")
    if pair or isinstance(optimizer, TorchOptimizer):
        return as_optimizer(optimizer)
    return from_torch(optimizer, master_weights=options.updating.master_weights)


def _with_own_group(engine: Engine, setup: Setup) -> tuple[Setup, Callable[[], Any] | None]:
    """A process group of the engine's own, so that engines may come in another order on each rank.

    The engines of stage 3 share that of their channel, where their collectives have one order.
    """
    channel = channel_of(setup.axis)
    if channel is None:
        return setup, None
    if setup.stage == 3:
        return replace(setup, axis=channel.data), None
    axis = own_group(setup.axis)
    return replace(setup, axis=axis), weakref.finalize(engine, end_group, axis)


def _laid_as(p: Tensor, x: Any) -> Any:
    """A state of `p` in the memory format of `p`, as the optimizer itself would make it."""
    if not isinstance(x, Tensor) or x.shape != p.shape:
        return x
    return torch.empty_like(p, dtype=x.dtype, requires_grad=False).copy_(x)
