"""Constants of a program as texts by which they are told apart: tensors and functions by value."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fzero.optim.recorded import SCHEDULES
from fzero.tools.trace._record import short


def number_key(x: float | complex | bool) -> str:
    """Return a text that numbers share if they are equal: 2 and 2.0 do, 0.0 and -0.0 do not.

    In which dtype an op computes is seen in what it gives.

    Example:
        >>> number_key(2) == number_key(2.0), number_key(0.0) == number_key(-0.0)
        (True, False)
    """
    if isinstance(x, int) and not isinstance(x, bool) and abs(x) < 2**53:
        return repr(float(x))
    return repr(x)


def tensor_key(x: Any) -> str:
    """Return the dtype, the shape and a digest of the values of a tensor.

    One without values, on the meta device or fake, has the digest "no values".

    Example:
        >>> tensor_key(torch.ones(2)) == tensor_key(torch.ones(2)), tensor_key(torch.ones(2))[:7]
        (True, 'f32[2] ')
    """
    with torch._C.DisableTorchFunctionSubclass():
        head = f"{short(x.dtype)}[{','.join(map(str, x.shape))}]"
        if isinstance(x, FakeTensor) or x.is_meta:
            return f"{head} no values"
    flat = x.detach().resolve_conj().resolve_neg().contiguous().cpu().view(-1)
    words = flat.view(torch.uint8).numpy() if flat.numel() else b""
    return f"{head} {blake2b(words, digest_size=6).hexdigest()}"


def schedule_key(number: int) -> str:
    """Return the text of a learning rate that is a function of the number of updates."""
    return described(SCHEDULES[number])


def schedule_name(number: int) -> str:
    """Return how people know a schedule."""
    fn = SCHEDULES[number]
    return str(getattr(fn, "__qualname__", type(fn).__name__)).replace("<locals>.", "")


def described(x: Any, above: tuple[int, ...] = ()) -> str:
    """Return what a function or an object is made of: code, constants, what it closes over.

    Two of them with the same text do the same; with other texts they may do so, too.

    Example:
        >>> described(lambda t: 0.1 * t) == described(lambda t: 0.1 * t)
        True
        >>> described(lambda t: 0.1 * t) == described(lambda t: 0.2 * t)
        False
    """
    if isinstance(x, Tensor):
        return tensor_key(x)
    if x is None or isinstance(x, bool | int | float | complex | str | bytes):
        return repr(x)
    if id(x) in above:
        return "itself"
    parts = _parts(x)
    name = getattr(x, "__qualname__", "") if parts is None else ""
    inner = (described(part, (*above, id(x))) for part in parts or ())
    return f"{type(x).__qualname__} {name}({', '.join(inner)})"


def _parts(x: Any) -> Iterable[Any] | None:
    """Return what an object is made of; None for one that its name says all of."""
    if isinstance(x, types.ModuleType | types.BuiltinFunctionType | type):
        return None
    if isinstance(x, types.CodeType):
        return (x.co_code, *x.co_consts, *x.co_names)
    if isinstance(x, types.FunctionType):
        cells = [cell.cell_contents for cell in x.__closure__ or ()]
        around = [x.__globals__[name] for name in x.__code__.co_names if name in x.__globals__]
        return (x.__code__, x.__defaults__, x.__kwdefaults__, *cells, *around)
    if isinstance(x, types.MethodType):
        return (x.__func__, x.__self__)
    if isinstance(x, functools.partial):
        return (x.func, x.args, x.keywords)
    if isinstance(x, Mapping):
        return [item for pair in x.items() for item in pair]
    if isinstance(x, list | tuple | set | frozenset):
        return x if isinstance(x, list | tuple) else sorted(x, key=repr)
    slots = (name for kind in type(x).__mro__ for name in getattr(kind, "__slots__", ()))
    held = {name: getattr(x, name) for name in slots if hasattr(x, name)}
    return (type(x).__call__ if callable(x) else None, held | getattr(x, "__dict__", {}))
