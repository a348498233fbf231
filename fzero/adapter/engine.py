"""The engine: an nn.Module, a torch.optim optimizer and loss.backward(), over many ranks.

What the user calls is here; what events lead to is in `_driver`, and the calls that all ranks make
together are in `_boundary`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self, Unpack

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fzero.adapter import boundary
from fzero.adapter._adopt import adopt
from fzero.adapter._as_module import AsModule
from fzero.adapter._close import give_back
from fzero.adapter._events import in_backward
from fzero.adapter._losses import Scaling
from fzero.adapter._report import MemoryReport, report
from fzero.adapter.driver import Driver
from fzero.adapter.setup import options_of, planned, scale_of
from fzero.context.modes import explains_inference
from fzero.machine.compiled import DISABLED_FRAMES
from fzero.options import Scale, StateOptions, documents, takes
from fzero.ranks.mesh import Axis, axis_of
from fzero.state import HookState, TrainState, progress
from fzero.state.leaf_modules import LeafSpec
from fzero.state.offload import Offload
from fzero.state.precision import Autocast

_OLDER = {"gradient_accumulation_steps": "micro_batches"}


class EngineOptions(StateOptions, total=False):
    """What `Engine` shares with functional steps, and the older spelling of `micro_batches`."""

    gradient_accumulation_steps: int


@documents
class Engine(AsModule, Scaling):
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

    @takes("Engine", "Engine(module, optimizer, stage=2)", older=_OLDER, of_module=True)
    def __init__(
        self,
        module: nn.Module,
        optimizer: Any = None,
        *,
        stage: int,
        autocast: Autocast | torch.dtype | None = None,
        offload: Offload | None = None,
        leaf_modules: LeafSpec | None = None,
        micro_batches: int = 1,
        average_micro_batches: bool = False,
        max_norm: float | None = None,
        loss_scale: Scale = None,
        check_finite: bool = False,
        master_weights: bool = True,
        state_dtype: torch.dtype | None = None,
        stochastic_rounding: bool = False,
        **options: Unpack[EngineOptions],
    ) -> None:
        self.options = options_of(locals() | options)
        axis = axis_of(options.get("mesh"))
        setup = planned(module, optimizer, stage, axis, self.options)
        self.module, self.stage = module, setup.stage
        self._driver = Driver(module, setup, scale_of(loss_scale, setup), boundary.with_gradients)

    @property
    def axis(self) -> Axis:
        """The ranks: `engine.axis.rank` of `engine.axis.size`."""
        return self._driver.axis

    @property
    def optimizer(self) -> Optimizer | None:
        """The torch.optim optimizer, for its param groups and schedulers; None for a rule."""
        return self._driver.optimizer

    @property
    def closed(self) -> bool:
        """Whether `close()` was called."""
        return self._driver.closed

    @property
    def state(self) -> TrainState:
        """The train state: parameters, gradients, window, optimizer, masters, schedule.

        It is read by `fzero.full_params`, `fzero.checkpoint.save`, `fzero.plot` and all else that
        takes a state. `step()` uses it up: what was taken before raises `DonatedError` afterwards.
        Setting it writes the values of another state into the engine's buffers.
        `fzero.checkpoint.save(path, engine)` and `load(path, engine)` take the engine itself, with
        its module's buffers.
        """
        self._driver.require_not_closed()
        if self._driver.gradients.gone and not in_backward():
            self._driver.drop_if_user_did()
        self._driver.masters.follow(self._driver.state)  # what was written since the last update
        return self._driver.state

    @state.setter
    def state(self, state: TrainState) -> None:
        adopt(self._driver, state)

    @property
    def hooks(self) -> HookState:
        """The record of the gradient hooks: which backward is running, and whether it is over."""
        self._driver.require_not_closed()
        return self._driver.events.hooks

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

    @torch._disable_dynamo
    def backward(self, loss: Any, gradient: Any = None, **options: Any) -> None:
        """`torch.autograd.backward(loss, gradient, **options)`; plain loss.backward() is as good.

        With a `loss_scale` that is not: here losses are scaled, unless `scale` gave them.
        After an error here the other ranks are told at once, and raise as well.
        """
        self._driver.require_not_closed()
        try:
            self._driver.losses.backward(loss, gradient, **options)
        except BaseException as error:
            self._driver.failed(error)
            raise

    # Windows.

    @contextmanager
    def coalesce(self) -> Iterator[None]:
        """Any number of backwards, one reduction, at the end of the block. A collective.

        A block that raises brings nothing, and leaves what was there before.
        """
        with boundary.window(self._driver, "coalesce()"):
            yield
        boundary.reduce_what_waits(self._driver, "the end of coalesce()")

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Like `coalesce`, but the reduction is left to the next backward, or to `step`."""
        with boundary.window(self._driver, "no_sync()"):
            yield

    @torch._disable_dynamo
    def step(self) -> bool:
        """Update the parameters from the gradients, and clear those. A collective.

        What no rank has used since the last update stays as it is, with its optimizer state.

        Returns:
            Whether the update was due: with `micro_batches=n` it is at every n-th
            call. One that an overflow skipped was due as well.

        Raises:
            PhaseError: inside a window or a backward, and for an engine without optimizer;
                everything is then as before.
            LayoutError: when a parameter was replaced, moved or unfrozen, or `p.grad` written.
            MismatchError: on every rank, when the options of the optimizer differ by rank, or some
                ranks have thrown their gradients away. Nothing was changed.
            NonFiniteError: with `check_finite`, on every rank; `zero_grad()` drops what raises it.
        """
        every = self.options.updating.micro_batches
        return boundary.call_step(self._driver, every)

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

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradients so that their global norm is at most `max_norm`; return it before.

        g <- g min(1, max_norm / (|g| + 1e-6)). A collective. `max_norm=` of the engine does the
        same at every update.
        """
        return boundary.clip(self._driver, max_norm)

    def clip_grad_value_(self, clip_value: float) -> None:
        """Bound each element of the reduced gradients: g <- max(-clip_value, min(g, clip_value)).

        What torch.nn.utils.clip_grad_value_ does to the gradients of one process: that works, too.
        """
        boundary.clip_value(self._driver, clip_value)

    def __repr__(self) -> str:
        if self.closed:
            return "Engine(closed)"
        layout, counted = self.state.setup.layout, self.state.progress
        return (
            f"Engine({type(self.module).__name__}, stage={self.stage}, {self.axis}, "
            f"{sum(x.numel for x in layout.leaves):,} parameters in {len(layout.groups)} groups, "
            f"{self.state.setup.optimizer!r}, {int(self.state.step)} updates, "
            f"{counted.backwards} backwards since)"
        )

    def memory_report(self) -> MemoryReport:
        """Bytes that this rank holds now, by kind and dtype. No collective."""
        self._driver.wait()
        return report(self.state, self._driver.running)

    # The end.

    @torch.no_grad()
    def close(self) -> None:
        """Take off every hook, and give module and optimizer back as ordinary ones. A collective.

        Gradients that were not used are lost. Parameters are gathered unit by unit. Closing twice
        is allowed.
        """
        if self.closed:
            return
        self._driver.wait()
        boundary.call(self._driver, "close()")
        give_back(self._driver)

    def __enter__(self) -> Self:
        """`with Engine(...) as engine:`, which is closed when the block ends."""
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        """Close the engine. After an error on several ranks it stays open.

        For `close()` is a collective, to which the other ranks may not come.
        """
        if kind is None or self.axis.size == 1:
            self.close()
