"""What one calls on a wrapped module, as on DistributedDataParallel: served by the module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from fzero.adapter._gathered import gathered
from fzero.adapter._guard import TRAINERS
from fzero.adapter._torch_hooks import ModuleHook
from fzero.adapter.boundary import require_no_forward
from fzero.adapter.driver import Driver
from fzero.adapter.parts import require_no_anchors
from fzero.errors import LayoutError
from fzero.machine.placeholder import not_for_jit

_DTYPES = {
    "half": torch.float16,
    "float": torch.float32,
    "double": torch.float64,
    "bfloat16": torch.bfloat16,
}
_CONVERT = frozenset({"to", "cuda", "cpu", "xpu", "type", "to_empty", "share_memory", *_DTYPES})
_OF_MODULE = frozenset(
    {
        "parameters",
        "named_parameters",
        "modules",
        "children",
        "named_children",
        "named_modules",
        "buffers",
        "named_buffers",
        "get_parameter",
        "get_submodule",
        "get_buffer",
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
    }
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


class NamesOfModule:
    """The names of nn.Module that an engine has, too."""

    module: nn.Module
    _driver: Driver

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


def load_state_dict(
    driver: Driver, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
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
    require_no_anchors(driver, "load_state_dict()")
    require_no_forward(driver, "load_state_dict()")
    _require_fit(driver.module, state_dict, strict=strict)
    with gathered(driver.module, modify=True, mesh=driver.axis):
        return driver.module.load_state_dict(state_dict, strict=strict)


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
    if name in _OF_MODULE:
        return getattr(module, name)
    if name not in _CONVERT:
        hint = f"; its module has: engine.module.{name}" if hasattr(module, name) else ""
        for fix, names in _INSTEAD.items():
            hint = f". Fix: {fix}." if name in names.split() else hint
        raise AttributeError(f"{type(engine).__name__} has no attribute {name!r}{hint}", name=name)

    def convert(*args: Any, **kwargs: Any) -> Any:
        _require_converted(module, name, args, kwargs)
        return engine

    return convert


def _require_converted(module: nn.Module, name: str, args: Any, kwargs: Any) -> None:
    """Raise `LayoutError` if module.name(*args, **kwargs) would convert or move anything."""
    held = [*module.parameters(), *module.buffers()]
    here = {x.device for x in held}
    device, dtype = None, None
    if name == "to":
        parse: Any = vars(torch._C)["_nn"]._parse_to  # as nn.Module.to reads its arguments
        device, dtype, *_ = parse(*args, **kwargs)
    elif name == "cpu":
        device = torch.device("cpu")
    elif name == "cuda":
        index = args[0] if args else kwargs.get("device")
        device = torch.device("cuda", index) if isinstance(index, int) else torch.device("cuda")
    else:
        dtype = _DTYPES.get(name)
    moves = device is not None and any(_is_elsewhere(device, x) for x in here)
    casts = dtype is not None and any(x.is_floating_point() and x.dtype != dtype for x in held)
    if (device is not None or dtype is not None) and not moves and not casts:
        return
    raise LayoutError(
        f"engine.{name}(): the parameters are {sorted({str(x.dtype) for x in held})} on "
        f"{sorted(map(str, here))}.",
        cause="a module that is moved or converted after the engine was made: its parameters are "
        "in the engine's buffers.",
        fix="call it on the module before Engine(module, ...); or engine.close(), convert, and "
        "make another engine.",
    )


def _is_elsewhere(device: torch.device, held: torch.device) -> bool:
    return device.type != held.type or (device.index is not None and device.index != held.index)


def _has_load_hooks(module: nn.Module) -> bool:
    """Whether a user, or a library, has hooks on what a module loads, beside the engine's own."""
    hooks = (x for part in module.modules() for x in part._load_state_dict_pre_hooks.values())
    return any(not isinstance(getattr(x, "hook", x), ModuleHook) for x in hooks)


def _require_fit(module: nn.Module, given: Mapping[str, Any], *, strict: bool) -> None:
    """Raise `LayoutError` for a state dict that is not this module's."""
    if _has_load_hooks(module):
        return  # they give names and values their form: torch checks them then
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
