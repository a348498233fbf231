"""The engine: an nn.Module, a torch.optim optimizer and loss.backward(), over many ranks.

What users call is here by name, much of it a function of the engine's driver. What events lead to
is in `driver`, what all ranks do together in `engine_step`, reading and writing by path in
`param_access`.
"""

from __future__ import annotations

import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Self, Unpack

import optree
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fzero.adapter import engine_step, param_access
from fzero.adapter.driver import Driver, as_method
from fzero.adapter.full_params import gathered
from fzero.adapter.gradients import as_held
from fzero.adapter.hooks import ModuleHook, in_backward
from fzero.adapter.logical_batches import parts
from fzero.adapter.module import ModuleParameters
from fzero.adapter.optimizer_hooks import TRAINERS
from fzero.adapter.param_access import require_no_anchors
from fzero.adapter.reshard import adopt, begun_state, close, reshard
from fzero.adapter.setup import OLDER, options_of, planned, scale_of
from fzero.context.device import is_device_type
from fzero.context.modes import explains_inference
from fzero.errors import LayoutError
from fzero.errors.check import is_number, require
from fzero.machine.offload import change
from fzero.machine.placeholder import DISABLED_FRAMES, not_for_jit
from fzero.optim import require_ordered
from fzero.optim.precision import masters_of
from fzero.options import EngineOptions, documents, takes
from fzero.ranks.mesh import Axis, MeshLike, refuse_part
from fzero.state import NAMESPACE, HookState, TrainState, progress
from fzero.state.train_state import Weight
from fzero.transforms.backward_pass import Pass
from fzero.transforms.clip import norm_of_state
from fzero.transforms.leaf_slices import clip_factor, scaled
from fzero.transforms.local import mesh_for
from fzero.transforms.loss_scale import next_scale
from fzero.transforms.recipe import mean_of


@documents
class Engine:
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
            is not stepped. `engine.step()` runs it; `optimizer.step()` does the same.
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
        self._goes_on_with(Driver(params, first))
        # No backward of its losses follows: the graphs that it keeps would keep its module.
        weakref.finalize(self, self._driver.losses.end).atexit = False

    def _goes_on_with(self, driver: Driver) -> None:
        self._driver = driver
        if not driver.closed:
            driver.guard.serve(weakref.WeakMethod(self.step))

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
        if driver.stand_ins.are_gone(zeroed=True) and not in_backward():
            driver.drop_if_user_did()
        driver.writes.follow(driver.state)  # what was written since the last update
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

    def scale(self, loss: Tensor, *, weight: Weight | None = None) -> Tensor:
        """Return loss x `loss_scale`: the loss itself without one.

        weight: of the backward that begins here, as in `backward`; the value stays as it is.

        With a scale every backward comes from here, or is made by `backward(loss)`, which scales by
        itself: a plain loss.backward() raises `PhaseError` before any gradient is used. So does
        this for a loss that was scaled already; `LayoutError` for what is no floating tensor.
        """
        self._driver.require_not_closed()
        return self._driver.losses.differentiated(loss, weight)

    def scale_if_loss(self, x: Any) -> Any:
        """Return `scale(x)` of a loss that was not scaled yet; anything else as it is."""
        return self.scale(x) if self._driver.losses.is_plain(x) else x

    def needs_scaler(self) -> bool:
        """Whether a plain loss.backward() raises: whether there is a loss scale but 1."""
        return self._driver.losses.are_others

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

    parts = as_method(parts)
    coalesce = as_method(engine_step.coalesce)
    no_sync = as_method(engine_step.no_sync)
    close = as_method(close)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradients so that their global norm is at most `max_norm`; return it before.

        g <- g min(1, max_norm / (|g| + 1e-6)). A collective. `max_norm=` of the engine does the
        same at every update.
        """
        good = max_norm == float("inf") or (is_number(max_norm) and max_norm >= 0)
        require("clip_grad_norm_(): max_norm", max_norm, lambda _: good, "a number of 0 or more")
        held = self._driver.reduced(f"clip_grad_norm_({max_norm})")
        state = self._driver.state
        norm = mean_of(state).of(norm_of_state(state, state.gradients))
        if held:  # without, as torch.nn.utils.clip_grad_norm_: nothing to scale
            gradients = scaled(state, state.gradients, clip_factor(norm, max_norm))
            self._driver.put(state.replace(gradients=gradients))
            self._driver.stand_ins.gradients.changed()
        return norm

    @torch.no_grad()
    def clip_grad_value_(self, clip_value: float) -> None:
        """Bound each element of the reduced gradients: g <- max(-clip_value, min(g, clip_value)).

        What torch.nn.utils.clip_grad_value_ does to the gradients of one process: that works, too.
        """
        good = is_number(clip_value) and clip_value >= 0
        name = "clip_grad_value_(): clip_value"
        require(name, clip_value, lambda _: good, "a number of 0 or more")
        require_ordered("clip_grad_value_()", self._driver.state.setup.layout.leaves)
        state = self._driver.with_gradients(f"clip_grad_value_({clip_value})")
        for index, flat in zip(state.setup.layout.trainable, state.gradients.flats, strict=True):
            dtype = state.setup.accumulate_dtype(index)
            high = as_held(state, torch.tensor(clip_value, dtype=dtype, device=state.device))
            change(flat, state.device, partial(Tensor.clamp_, min=-high, max=high))
        self._driver.stand_ins.gradients.changed()

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
        self._goes_on_with(reshard(self._driver, stage, mesh))

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
        return engine_step.step(self._driver, self.options.updating.micro_batches, closure)

    @torch._disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Throw away every gradient since the last update. A collective, outside of a window.

        Either `set_to_none`, torch's argument, means the same. With `micro_batches`
        the accumulation starts again, with a warning.
        """
        counted = engine_step.zero_grad(self._driver)
        every = self.options.updating.micro_batches
        if message := progress.thrown_away(counted, every):
            warnings.warn(message, UserWarning, stacklevel=2 + DISABLED_FRAMES)

    # What one calls on a wrapped module, as on DistributedDataParallel: served by the module.

    @property
    def training(self) -> bool:
        """The module's own mode."""
        return self.module.training

    def train(self, mode: bool = True) -> Self:
        """Set the module's mode, as `module.train` does."""
        self.module.train(mode)
        return self

    def eval(self) -> Self:
        """Set the module to evaluation, as `module.eval` does."""
        return self.train(False)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Freeze the module, as `module.requires_grad_` does, or let it learn again."""
        self.module.requires_grad_(requires_grad)
        return self

    def apply(self, fn: Callable[[nn.Module], Any]) -> Self:
        """`module.apply(fn)`, which may write parameters: those of rank 0 count. A collective."""
        driver = self._driver
        require_no_anchors(driver, "apply()")
        with gathered(driver.module, modify=True, mesh=driver.axis):
            driver.module.apply(fn)
        return self

    def __getattr__(self, name: str) -> Any:
        """What else nn.Module has: names of its parts, hooks, conversions."""
        return looked_up(self, name)

    # Reading and writing by path, whole or this rank's: see `param_access`.

    full_gradients = as_method(param_access.full_gradients)
    full_gradient = as_method(param_access.full_gradient)
    set_full_gradient = as_method(param_access.set_full_gradient)
    local_gradient = as_method(param_access.local_gradient)
    set_local_gradient = as_method(param_access.set_local_gradient)
    full_parameters = as_method(param_access.full_parameters)
    full_parameter = as_method(param_access.full_parameter)
    set_full_parameter = as_method(param_access.set_full_parameter)
    local_parameter = as_method(param_access.local_parameter)
    set_local_parameter = as_method(param_access.set_local_parameter)
    full_optimizer_states = as_method(param_access.full_optimizer_states)
    full_optimizer_state = as_method(param_access.full_optimizer_state)
    set_full_optimizer_state = as_method(param_access.set_full_optimizer_state)
    local_optimizer_state = as_method(param_access.local_optimizer_state)
    set_local_optimizer_state = as_method(param_access.set_local_optimizer_state)
    full_state_dict = as_method(param_access.full_state_dict)
    state_dict = as_method(param_access.state_dict)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """`module.load_state_dict` with whole values, at every stage. A collective.

        Parameters take the values that rank 0 has, buffers those of each rank. Masters in fp32
        follow; what the optimizer keeps stays.

        Raises:
            LayoutError: with names or shapes that are not the module's, before anything changes;
                for `assign`, which would put other tensors into the place of the engine's.

        Example:
            >>> import torch
            >>> from fzero.adapter import Engine
            >>> model = torch.nn.Linear(2, 1)
            >>> engine = Engine(model, torch.optim.SGD(model.parameters()), stage=2)
            >>> engine.load_state_dict(torch.nn.Linear(2, 1).state_dict())
            <All keys matched successfully>
        """
        if assign:
            raise LayoutError(
                "engine.load_state_dict(assign=True).",
                cause="a habit of large models, to spare a copy.",
                fix="leave assign out: the values are copied into the engine's own memory.",
            )
        driver = self._driver
        require_no_anchors(driver, "load_state_dict()")
        driver.require_not("load_state_dict()", "forward")
        _require_fit(driver.module, state_dict, strict=strict)
        with gathered(driver.module, modify=True, mesh=driver.axis):
            return driver.module.load_state_dict(state_dict, strict=strict)

    @property
    def global_grad_norm(self) -> Tensor | None:
        """|g|, before clipping, of what an update would use now. A collective.

        Without gradients, that of the last update if `max_norm` was given, else None.
        """
        return param_access.global_grad_norm(self._driver)

    def __repr__(self) -> str:
        if self.closed:
            return "Engine(closed)"
        state, layout = self.state, self.state.setup.layout
        return (
            f"Engine({type(self.module).__name__}, stage={state.stage}, {state.setup.axis}, "
            f"{sum(x.numel for x in layout.leaves):,} parameters in {len(layout.groups)} groups, "
            f"{state.setup.optimizer!r}, {int(state.step)} updates, "
            f"{state.progress.backwards} backwards since)"
        )

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


_DTYPES = {
    "half": torch.float16,
    "float": torch.float32,
    "double": torch.float64,
    "bfloat16": torch.bfloat16,
}
_CONVERT = frozenset({"to", "cpu", "type", "to_empty", "share_memory", *_DTYPES})
_OF_MODULE = (
    "parameters named_parameters modules children named_children named_modules buffers "
    "named_buffers get_parameter get_submodule get_buffer register_forward_hook "
    "register_forward_pre_hook register_full_backward_hook register_full_backward_pre_hook"
)
"""What is as well called on the module."""


_INSTEAD = {
    "ranks may have other numbers of rows: one without any calls engine.backward(loss, weight=0) "
    "until no rank has, and fzero.data.batches gives it empty batches": "join",
    "Engine(..., compress=fzero.Compress(gradients=codec)) encodes what crosses ranks; a function "
    "of your own is transforms=[fzero.transform(...)]": "register_comm_hook",
    "fzero.adapter.gathered(module), or engine.full_state_dict()": "unshard "
    "summon_full_params consolidated_16bit_state_dict save_16bit_model set_state_dict_type",
    "fzero.checkpoint.save(path, engine), fzero.checkpoint.load(path, engine)": "load_checkpoint "
    "save_checkpoint optim_state_dict full_optim_state_dict",
    "engine.no_sync() or engine.coalesce() around all but the last": "set_is_last_backward "
    "set_requires_gradient_sync is_gradient_accumulation_boundary",
}
"""{what to do: the names of DDP, FSDP and DeepSpeed for it}."""


def looked_up(engine: Any, name: str) -> Any:
    """Return what nn.Module has by a name that an engine has not: hooks, parts, conversions.

    Conversions return the engine if there is nothing to convert, else they raise `LayoutError`.
    """
    if "module" not in vars(engine):
        raise AttributeError(name)
    if name in ("__prepare_scriptable__", "_jit_override_qualname"):
        raise not_for_jit("an engine")
    if name.startswith("_"):
        raise AttributeError(
            f"{type(engine).__name__} has no attribute {name!r}: it is no nn.Module, and has one, "
            f"engine.module. {TRAINERS}",
            name=name,
        )
    module = engine.module
    if name in _OF_MODULE.split():
        return getattr(module, name)
    if name not in _CONVERT and not is_device_type(name):
        hint = f"; its module has: engine.module.{name}" if hasattr(module, name) else ""
        for fix, names in _INSTEAD.items():
            hint = f". Fix: {fix}." if name in names.split() else hint
        raise AttributeError(f"{type(engine).__name__} has no attribute {name!r}{hint}", name=name)

    return partial(_converted, engine, name)


def _converted(engine: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    """Return the engine; raise `LayoutError` if module.name(...) would convert or move anything."""
    module = engine.module
    held = [*module.parameters(), *module.buffers()]
    here = {x.device for x in held}
    device, dtype = None, None
    if name == "to":
        parse: Any = vars(torch._C)["_nn"]._parse_to  # as nn.Module.to reads its arguments
        device, dtype, *_ = parse(*args, **kwargs)
    elif name == "cpu":
        device = torch.device("cpu")
    elif is_device_type(name):
        index = args[0] if args else kwargs.get("device")
        device = torch.device(name, index) if isinstance(index, int) else torch.device(name)
    else:
        dtype = _DTYPES.get(name)
    moves = device is not None and any(
        device.type != x.type or (device.index is not None and device.index != x.index)
        for x in here
    )
    casts = dtype is not None and any(x.is_floating_point() and x.dtype != dtype for x in held)
    if (device is not None or dtype is not None) and not moves and not casts:
        return engine
    raise LayoutError(
        f"engine.{name}(): the parameters are {sorted({str(x.dtype) for x in held})} on "
        f"{sorted(map(str, here))}.",
        cause="a module that is moved or converted after the engine was made: its parameters are "
        "in the engine's buffers.",
        fix="call it on the module before Engine(module, ...); or engine.close(), convert, and "
        "make another engine.",
    )


def _require_fit(module: nn.Module, given: Mapping[str, Any], *, strict: bool) -> None:
    """Raise `LayoutError` for a state dict that is not this module's."""
    hooks = (x for part in module.modules() for x in part._load_state_dict_pre_hooks.values())
    if any(not isinstance(getattr(x, "hook", x), ModuleHook) for x in hooks):
        return  # those of a user or a library, which give names and values their form: torch checks
    held = module.state_dict()
    wrong = [f"no {name}" for name in held if name not in given] if strict else []
    wrong += [f"an unknown {name}" for name in given if name not in held] if strict else []
    for name, value in given.items():
        mine = held.get(name)
        if isinstance(mine, Tensor) and isinstance(value, Tensor) and mine.shape != value.shape:
            wrong.append(f"{name} of shape {tuple(value.shape)}, {tuple(mine.shape)} here")
    if wrong:
        more = f" and {len(wrong) - 6} more" if len(wrong) > 6 else ""
        raise LayoutError(
            f"engine.load_state_dict: the state dict has {', '.join(wrong[:6])}{more}.",
            cause="another model; or names of a wrapped one (`module.` of DDP, `_orig_mod.`).",
            fix="load what this model has saved; torch.nn.modules.utils."
            'consume_prefix_in_state_dict_if_present(state_dict, "module.") takes a prefix off; '
            "strict=False takes what fits.",
        )


# What an engine holds, in bytes.


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """Bytes of one rank, each {dtype: bytes}; nothing is counted twice.

    `parameters`: the module's own (stages 0 to 2), or this rank's shards (stage 3).
    `live_parameters`: full parameters that are gathered now (stage 3). `gradients`: those that
    wait, those that are reduced, and what encoding has lost. `masters`: fp32 copies.
    `optimizer`: its state. `slots`: what transforms keep.
    """

    parameters: dict[torch.dtype, int]
    live_parameters: dict[torch.dtype, int]
    gradients: dict[torch.dtype, int]
    masters: dict[torch.dtype, int]
    optimizer: dict[torch.dtype, int]
    slots: dict[torch.dtype, int] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return sum(sum(getattr(self, one.name).values()) for one in fields(self))

    def __str__(self) -> str:
        """One line for each kind."""
        lines = []
        for name in (one.name for one in fields(self)):
            held = getattr(self, name).items()
            text = ", ".join(f"{str(d).removeprefix('torch.')} {n:,}" for d, n in held)
            if held or name != "slots":
                lines.append(f"{name.replace('_', ' '):<16}{text or 'nothing'}")
        return "\n".join([*lines, f"{'total':<16}{self.total_bytes:,} bytes"])


def report(state: TrainState, running: Pass) -> MemoryReport:
    """Add up what a state, and the gatherer of a pass, hold."""
    masters = masters_of(state)
    apart = set(map(id, masters))

    def slots(kind: str) -> list[Any]:
        held: Any = [slot for slot in state.slots.values() if slot.form.kind == kind]
        return optree.tree_leaves(held, namespace=NAMESPACE)

    kept = [*optree.tree_leaves(state.optimizer, namespace=NAMESPACE), *slots("optimizer")]
    gradients = [*state.gradients.flats, *state.window.pending.flats]
    return MemoryReport(
        parameters=_bytes(state.params.flats),
        live_parameters=_bytes(x for full in running.gatherer.held.values() for x in full.flats),
        gradients=_bytes([*gradients, *slots("gradients"), *slots("window")]),
        masters=_bytes(masters),
        optimizer=_bytes(x for x in kept if id(x) not in apart),
        slots=_bytes(slots("slots")),
    )


def _bytes(values: Iterable[Any]) -> dict[torch.dtype, int]:
    found: Counter[torch.dtype] = Counter()
    for x in values:
        if isinstance(x, Tensor) and x.numel():
            found[x.dtype] += x.numel() * x.element_size()
    return dict(found)
