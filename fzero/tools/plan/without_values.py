"""Tensors without values: how they are made, and how they take the code path of a real device.

They are meta tensors, on which ops are fastest. But on the meta device torch computes attention
without fusion, with all scores in memory, [batch, heads, queries, keys]; tensors that a loss
creates without a device (`torch.arange(n)`) must be on the meta device, too; and a model may branch
on small tensors that depend only on sizes: Hugging Face's models test whether positions are of one
sequence or of several packed ones, `nn.TransformerEncoder` whether a mask is causal. `AsOn` sees to
all three.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

import optree
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from fzero.context.current_rank import has_no_values, unseen
from fzero.state import NAMESPACE
from fzero.tools.trace.found import LeftOver, Recorded, RecordMode
from fzero.tools.trace.program import reads_values

Make = Callable[[Tensor], Tensor]
"""A tensor -> one of its shape and dtype, without values."""


def maker(*, autocasts: bool) -> Make:
    """Return a converter to tensors without values: on the meta device, where ops are fastest.

    Autocast has no effect there, so with `autocasts` they are fake CPU tensors, which are slower.
    """
    if not autocasts:
        return lambda x: torch.empty_like(x, device="meta")
    mode = RecordMode("plan")
    here = torch.device("cpu")
    return lambda x: FakeTensor(mode, torch.empty_like(x, device="meta"), here)


class _Emptying(TorchFunctionMode):
    """Context in which copies of tensors have no values; those of small buffers are kept aside."""

    def __init__(self, make: Make) -> None:
        super().__init__()
        self._make = make

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__:
            x, memo = args
            if id(x) not in memo:
                memo[id(x)] = self._make(x)
                _remember(memo[id(x)], x)
            return memo[id(x)]
        return func(*args, **(kwargs or {}))


def emptied(model: nn.Module, make: Make) -> nn.Module:
    """Return a copy of a module whose tensors have no values, without allocating its size."""
    memo: dict[int, Any] = {id(p): _parameter(p, make) for p in model.parameters()}
    with _Emptying(make):
        return copy.deepcopy(model, memo)


def tree_emptied(tree: Any, make: Make) -> Any:
    """Replace the tensors of a pytree by tensors without values; ties are kept."""
    memo: dict[int, Tensor] = {}

    def moved(x: Any) -> Any:
        if isinstance(x, Tensor) and id(x) not in memo:
            memo[id(x)] = _parameter(x, make)
        return memo[id(x)] if isinstance(x, Tensor) else x

    return optree.tree_map(moved, tree, namespace=NAMESPACE)


def _parameter(x: Tensor, make: Make) -> Tensor:
    """Return `x` without values: a parameter if it is one, with its notes."""
    made = make(x.detach())
    if isinstance(x, nn.Parameter):
        made = nn.Parameter(made, requires_grad=x.requires_grad)
    else:
        made.requires_grad_(x.requires_grad)
    vars(made).update(vars(x))  # which modules own it, as `functionalize` notes it
    return made


class AsOn(TorchFunctionMode):
    """Context in which meta tensors behave as on `device`, also in recomputation by a backward.

    New tensors are meta tensors, and `scaled_dot_product_attention` has the memory of a fused
    kernel where torch has one on that device: the result, and one number for each query.
    """

    def __init__(self, device: str) -> None:
        """Set the type of device that meta tensors imitate."""
        super().__init__()
        self._device = device
        self._made = Recorded()

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call `func`, or its equivalent on the device."""
        kwargs = dict(kwargs or {})
        if (composed := _without_dispatch(func)) is not None:
            with self:
                return composed(*args, **kwargs)
        if func in _READERS and args[0].is_meta and not _is_known(args[0]):
            raise reads_values("planned", f"Tensor.{func.__name__}")
        stays = bool(args) and isinstance(args[0], Tensor)  # as_tensor: where the tensor is
        if func in _device_constructors() and kwargs.get("device") is None and not stays:
            kwargs["device"] = "meta"
        if func is not torch.nn.functional.scaled_dot_product_attention:
            return self._noted(_call(func, args, kwargs), args)
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        given = dict(zip(names, args, strict=False)) | kwargs
        return self._noted(_fused(given) if self._fuses(given) else func(*args, **kwargs), args)

    def _noted(self, made: Any, args: tuple[Any, ...]) -> Any:
        return made if any(made is one for one in args) else self._made.note(made)

    def end(self) -> None:
        """The plan is over: whoever computes with a tensor that was made in it raises."""
        for x in self._made.left():
            if type(x) is Tensor and x.is_meta:
                x.__class__ = LeftOver

    def _fuses(self, given: Mapping[str, Any]) -> bool:
        query, mask = given["query"], given.get("attn_mask")
        plain = query.is_meta and query.ndim == 4 and query.numel() > 0
        learned = isinstance(mask, Tensor) and mask.requires_grad
        drops = given.get("dropout_p", 0.0) > 0 and self._device == "cpu"
        wide = query.dtype is torch.float64 and self._device != "cpu"
        return plain and not (learned or drops or wide)


@functools.cache
def _without_dispatch(func: Any) -> Callable[..., Any] | None:
    """Return a copy of a Python function of torch that does not dispatch; None for others.

    Such a function hands itself to the mode and then runs without it, so that the mode does not
    see its calls: attention in `nn.MultiheadAttention`, recomputation of a checkpoint. The copy
    runs in the mode. (Methods are excluded: one may call that of its base class, which hands
    itself to the mode under the same name.)
    """
    if not isinstance(func, FunctionType) or func.__qualname__ != func.__name__:
        return None
    if not _ASKS.intersection(func.__code__.co_names, func.__globals__):
        return None
    around = func.__globals__ | dict.fromkeys(_ASKS, lambda *_: False)
    made = FunctionType(func.__code__, around, func.__name__, func.__defaults__, func.__closure__)
    made.__kwdefaults__ = func.__kwdefaults__
    return made


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Write in place, where there are no values: nothing."""


_FUSED = torch.library.Library("aten", "IMPL", "Meta")
"""Fused updates that torch has on a device and not for tensors without values: no temporaries."""

for _name in ("_fused_sgd_", "_fused_adagrad_"):
    if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{_name}", "Meta"):
        _FUSED.impl(_name, _nothing)

_ASKS = {"has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"}


def _fused(given: Mapping[str, Any]) -> Tensor:
    query, mask = given["query"], given.get("attn_mask")
    if isinstance(mask, Tensor) and mask.dtype is torch.bool:
        mask = torch.empty_like(mask, dtype=query.dtype)  # as torch makes a mask to add
    out, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query,
        given["key"],
        given["value"],
        given.get("dropout_p", 0.0),
        given.get("is_causal", False),
        attn_mask=mask,
        scale=given.get("scale"),
    )
    return out


# Constant propagation: small tensors that depend only on sizes keep their values.

_MOST = 2**22  # elements: a mask of 2048 tokens
_KNOWN = "known_values"
_RANDOM = ("rand", "empty", "new_empty", "bernoulli", "dropout", "normal", "uniform")
"""Prefixes of the names of functions whose results are not a function of their arguments."""

_READS = (
    Tensor.__bool__,
    Tensor.__int__,
    Tensor.__index__,
    Tensor.__float__,
    Tensor.item,
    Tensor.tolist,
    torch.equal,
)


def _call(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call a function of torch on meta tensors, and on their known values if all are known."""
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    known = all(map(_is_known, tensors))
    # Also what writes numbers that are known into a tensor with values, as a counter is.
    if known and (func in _READS or (func is Tensor.copy_ and not tensors[0].is_meta)):
        return func(*_values((args, kwargs))[0], **_values((args, kwargs))[1])
    out = func(*args, **kwargs)
    name = getattr(func, "__name__", "")
    writes = bool(tensors) and (out is tensors[0] or name == "__setitem__")
    target = tensors[0] if writes else out
    known = known and (bool(tensors) or func in _device_constructors())
    if known and _is_small(target) and not name.startswith(_RANDOM):
        with unseen():
            arguments, keywords = _values((args, kwargs))
            value = func(*arguments, **keywords)
            vars(target)[_KNOWN] = arguments[0] if value is None else value
    elif writes:
        vars(target).pop(_KNOWN, None)
    return out


def _remember(made: Tensor, x: Tensor) -> None:
    """Attach the values of a small tensor `x` to `made`, the meta tensor that replaces it."""
    if _is_small(made) and not x.is_meta and type(x) is Tensor and not x.requires_grad:
        vars(made)[_KNOWN] = x.detach().cpu().clone()


def _is_small(x: Any) -> bool:
    """Return whether values are kept for `x`: a plain meta tensor with few elements."""
    return type(x) is Tensor and x.is_meta and x.numel() <= _MOST


def _is_known(x: Tensor) -> bool:
    """Return whether a tensor has values, or known ones are attached to it."""
    return _KNOWN in vars(x) or (not x.is_meta and type(x) is Tensor)


def _values(tree: Any) -> Any:
    """Replace meta tensors in a pytree by their known values."""

    def of(x: Any) -> Any:
        if isinstance(x, Tensor):
            return vars(x).get(_KNOWN, x)
        on_meta = (isinstance(x, torch.device) and x.type == "meta") or x == "meta"
        return "cpu" if on_meta else x

    return tree_map(of, tree)


# What needs values, and raises.

_READERS = {torch.Tensor.numpy, torch.Tensor.__array__}
"""Functions that read values without calling an ATen op."""

_aten = torch.ops.aten
_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_COPIES = (_aten._to_copy.default, _aten.copy_.default, _aten.copy.default)


class NoValues(TorchDispatchMode):
    """Context in which an operation that needs the values of meta tensors raises `PhaseError`."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call `func`; raise `PhaseError` if it needs values."""
        kwargs = kwargs or {}
        if func in _COPIES or func is _aten.equal.default or not _TAGS.isdisjoint(func.tags):
            given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            if any(map(has_no_values, given)) and _needs_values(func, args, kwargs):
                raise reads_values("planned", func)
        return func(*args, **kwargs)


def _needs_values(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    if func is _aten._to_copy.default:
        device = kwargs.get("device")
        return args[0].is_meta and device is not None and torch.device(device).type != "meta"
    if func in _COPIES:
        return args[1].is_meta and not args[0].is_meta
    if func is _aten.index.Tensor:
        return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
    if func is _aten.repeat_interleave.Tensor:
        return kwargs.get("output_size") is None
    return not func._can_decompose()  # a composite op is checked at its parts
