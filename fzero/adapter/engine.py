"""The engine: an nn.Module, a torch.optim optimizer and loss.backward(), over many ranks.

What users call is here by name, much of it a function of the engine's driver. What events lead to
is in `driver`, what all ranks do together in `boundary`, reading and writing by path in `access`.
"""

from __future__ import annotations

import warnings
import weakref
from typing import Any, Self, Unpack

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fzero.adapter import _as_module, _clipping, _scaling, access, boundary
from fzero.adapter._adopt import adopt
from fzero.adapter._close import close
from fzero.adapter._kept_masters import begun_state
from fzero.adapter._module import ModuleParameters
from fzero.adapter._of_driver import of_driver
from fzero.adapter._parts import parts
from fzero.adapter._report import MemoryReport, described, report
from fzero.adapter._reshard import reshard
from fzero.adapter._torch_hooks import in_backward
from fzero.adapter.driver import Driver
from fzero.adapter.setup import OLDER, options_of, planned, scale_of
from fzero.context.modes import explains_inference
from fzero.machine.placeholder import DISABLED_FRAMES
from fzero.options import EngineOptions, documents, takes
from fzero.ranks.mesh import Axis, MeshLike, refuse_part
from fzero.state import HookState, TrainState, progress
from fzero.state.train_state import Weight
from fzero.transforms.local import mesh_for
from fzero.transforms.loss_scale import next_scale


@documents
class Engine(_as_module.NamesOfModule):
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

    A parameter that no rank has used since the last update is not stepped, as in PyTorch, where its
    gradient is None; a gradient of zero that a backward brought is one.

    While the engine holds gradients, `p.grad` stands for them: clipping and norms by torch's own
    functions work, and `p.grad = None` (module.zero_grad(), optimizer.zero_grad()) drops them.

    Args:
        module: any nn.Module; its parameters become views of the engine's buffers. All ranks get
            rank 0's values, buffers too; later each rank's buffers are its own.
        optimizer: a torch.optim optimizer of module.parameters(), in any param groups; or its class
            or a factory, called with what learns; or a rule of `fzero.optim`; None for a model that
            is not stepped. `engine.step()` runs it; `optimizer.step()` alone raises.
        {options}

    Raises:
        LayoutError: for wrong arguments, for a module with `max_norm` or a second handle on the
            memory of a parameter, before the module is touched.
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

    @takes("Engine", "Engine(module, optimizer, stage=2)", older=OLDER, of_module=True)
    def __init__(
        self,
        module: nn.Module,
        optimizer: Any = None,
        *,
        stage: int,
        **options: Unpack[EngineOptions],
    ) -> None:
        self.options = options_of(options)
        local = self.options.local
        refuse_part(options.get("mesh"), "Engine")
        axis = mesh_for(options.get("mesh"), local)
        initializer = options.get("initializer")
        setup = planned(module, optimizer, stage, axis, self.options, made=initializer is not None)
        self.module = module
        params = ModuleParameters(module, setup.layout, self.options.module.own, initializer)
        first = begun_state(params, setup, local, scale_of(self.options.updating.loss_scale, setup))
        self._driver = Driver(params, first)
        # No backward of its losses follows: the graphs that it keeps would keep its module.
        weakref.finalize(self, self._driver.losses.end).atexit = False

    @property
    def stage(self) -> int:
        """The ZeRO stage, 0 to 3."""
        return self._driver.state.stage

    @property
    def axis(self) -> Axis:
        """The ranks: `engine.axis.rank` of `engine.axis.size`; with `local` of all replicas."""
        return self._driver.state.mesh

    @property
    def optimizer(self) -> Optimizer | None:
        """The torch.optim optimizer, for its param groups and schedulers; None for a rule."""
        return self._driver.guard.optimizer

    @property
    def closed(self) -> bool:
        """Whether `close()` was called."""
        return self._driver.closed

    @property
    def state(self) -> TrainState:
        """The train state: parameters, gradients, window, optimizer, masters, schedule.

        It is read by `fzero.full_params`, `fzero.checkpoint.save`, `fzero.plot` and all else that
        takes a state. `step()` uses it up: what was taken before raises `DonatedError` afterwards.
        A `copy.deepcopy`, or what pickle and `torch.save` make of it, is a functional state of its
        own, with an optimizer that has the options of this one. Setting it writes another state's
        values into the engine's buffers, and uses that up. `fzero.checkpoint.save` and `load` take
        the engine itself, with its module's buffers.
        """
        driver = self._driver
        driver.require_not_closed()
        if driver.stand_ins.gone and not in_backward():
            driver.drop_if_user_did()
        driver.writes.masters.follow(driver.state)  # what was written since the last update
        return driver.state

    @state.setter
    def state(self, state: TrainState) -> None:
        adopt(self._driver, state)

    @property
    def hooks(self) -> HookState:
        """The record of the gradient hooks: which backward is running, and whether it is over."""
        self._driver.require_not_closed()
        return self._driver.events.backwards.hooks

    # Forward and backward.

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module. `engine.module(...)` does the same."""
        self._driver.require_not_closed()
        try:
            with explains_inference((args, kwargs)):
                return self.module(*args, **kwargs)
        except BaseException as error:
            self._driver.failed(error)
            raise

    forward = __call__

    @torch._disable_dynamo
    def backward(
        self, loss: Any, gradient: Any = None, *, weight: Weight | None = None, **options: Any
    ) -> None:
        """`torch.autograd.backward(loss, gradient, **options)`; plain loss.backward() is as good.

        weight: of this backward on this rank, such as its number of tokens. The update then uses
        sum(w g) / sum(w) over all backwards and ranks: see `fzero.grad_and_reduce`.

        With a `loss_scale` that is not: here losses are scaled, unless `scale` gave them.
        After an error here the other ranks are told at once, and raise as well.
        """
        self._driver.require_not_closed()
        try:
            self._driver.losses.backward(loss, gradient, weight=weight, **options)
        except BaseException as error:
            self._driver.failed(error)
            raise

    scale = of_driver(_scaling.scale)
    scale_if_loss = of_driver(_scaling.scale_if_loss)
    needs_scaler = of_driver(_scaling.needs_scaler)

    @property
    def loss_scale(self) -> float:
        """The scale of the next loss; 1.0 without one. The host waits for the device.

        `engine.state.scale.scale` is the tensor, for which it does not wait.
        """
        return next_scale(self._driver.state)

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last update found an overflow, or a total weight of 0.

        The host waits for the device.
        """
        if self._driver.guard.was_empty:
            return True
        held = self._driver.state.scale
        return held is not None and bool(held.overflowed)

    # Windows, updates, and the end.

    parts = of_driver(parts)
    coalesce = of_driver(boundary.coalesce)
    no_sync = of_driver(boundary.no_sync)
    clip_grad_norm_ = of_driver(_clipping.clip_grad_norm_)
    clip_grad_value_ = of_driver(_clipping.clip_grad_value_)
    close = of_driver(close)

    @torch._disable_dynamo
    def reshard(self, stage: int | None = None, mesh: MeshLike = None) -> None:
        """Go on at another stage, or on other ranks: see `fzero.reshard`. A collective of both.

        Module, hooks, parameter objects and optimizer stay; gradients are reduced, and stay. Where
        the number of ranks changes, all get rank 0's buffers.

        A rank that comes calls it on an engine of the same model, made on this rank alone
        (mesh=fzero.Axis(size=1)), whose values do not matter. A rank that leaves has its engine
        closed, and its parameters stay: at stage 3 NaN.

        Args:
            stage: 0 to 3; None: as it is.
            mesh: as for `Engine`; None: as it is.

        Raises:
            PhaseError: inside a window, a forward or a backward.
            LayoutError, AxisError: as `fzero.reshard`. Nothing was changed.
        """
        self._driver = reshard(self._driver, stage, mesh)

    @torch._disable_dynamo
    def step(self, closure: None = None) -> bool:
        """Update the parameters from the gradients, and clear those. A collective.

        What no rank has used since the last update stays as it is, with its optimizer state.

        Returns:
            Whether the update was due (every n-th call, with `micro_batches=n`), skipped or not.

        Raises:
            PhaseError, CallError: inside a window, a forward or a backward, without optimizer, for
                a closure (run its forward and backward before); everything is then as before.
            LayoutError: when a parameter was replaced, moved or unfrozen, or `p.grad` written.
            MismatchError: on every rank, when the options of the optimizer differ by rank, or some
                ranks have thrown their gradients away. Nothing was changed.
            NonFiniteError: with `check_finite`, on every rank; `zero_grad()` drops what raises it.
        """
        boundary.require_no_closure(closure)
        return boundary.call_step(self._driver, self.options.updating.micro_batches)

    @torch._disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Throw away every gradient since the last update. A collective, outside of a window.

        Either `set_to_none`, torch's argument, means the same. With `micro_batches`
        the accumulation starts again, with a warning.
        """
        counted = boundary.zero_grad(self._driver)
        every = self.options.updating.micro_batches
        if message := progress.thrown_away(counted, every):
            warnings.warn(message, UserWarning, stacklevel=2 + DISABLED_FRAMES)

    # Reading and writing by path, whole or this rank's: see `access`.

    full_gradients = of_driver(access.full_gradients)
    full_gradient = of_driver(access.full_gradient)
    set_full_gradient = of_driver(access.set_full_gradient)
    local_gradient = of_driver(access.local_gradient)
    set_local_gradient = of_driver(access.set_local_gradient)
    full_parameters = of_driver(access.full_parameters)
    full_parameter = of_driver(access.full_parameter)
    set_full_parameter = of_driver(access.set_full_parameter)
    local_parameter = of_driver(access.local_parameter)
    set_local_parameter = of_driver(access.set_local_parameter)
    full_optimizer_states = of_driver(access.full_optimizer_states)
    full_optimizer_state = of_driver(access.full_optimizer_state)
    set_full_optimizer_state = of_driver(access.set_full_optimizer_state)
    local_optimizer_state = of_driver(access.local_optimizer_state)
    set_local_optimizer_state = of_driver(access.set_local_optimizer_state)
    full_state_dict = of_driver(access.full_state_dict)
    state_dict = of_driver(access.state_dict)
    load_state_dict = of_driver(_as_module.load_state_dict)

    @property
    def global_grad_norm(self) -> Tensor | None:
        """|g|, before clipping, of what an update would use now. A collective.

        Without gradients, that of the last update if `max_norm` was given, else None.
        """
        return access.global_grad_norm(self._driver)

    def __repr__(self) -> str:
        return "Engine(closed)" if self.closed else described(self.module, self.state)

    def memory_report(self) -> MemoryReport:
        """Bytes that this rank holds now, by kind and dtype. No collective."""
        self._driver.wait()
        return report(self.state, self._driver.running)

    def __enter__(self) -> Self:
        """`with Engine(...) as engine:`, which is closed when the block ends."""
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        """Close the engine: a collective. After an error on several ranks it stays open."""
        if kind is None or self.axis.size == 1:
            self.close()
