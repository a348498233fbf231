"""Parameters of classes of their own: a class may say what a module computes, or only hold facts.

A state has plain numbers. Where an engine keeps the objects (stages 0 to 2, or one rank) they
keep their class. Elsewhere something else stands in their place for a while, or for good, so that
a class with a rule of its own would be lost without a word: it is refused when the state is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from fzero.errors import LayoutError
from fzero.machine.partition import is_dtensor
from fzero.machine.placeholder import LazyParam

_PLAIN: tuple[type, ...] = (LazyParam, FakeTensor, FunctionalTensor, nn.UninitializedParameter)
_MAKING = {"__new__", "__init__", "__init_subclass__", "__class_getitem__"}
_COPYING = {"__copy__", "__deepcopy__", "__reduce__", "__reduce_ex__"}
_COPYING |= {"__getstate__", "__setstate__"}
_PRINTING = {"__repr__", "__str__", "__format__"}
_OF_EACH = {*vars(type("Empty", (), {})), "__annotations__", "__annotate_func__", "__slots__"}
_OF_EACH |= {"__annotations_cache__", "__classcell__", "__orig_bases__", "__parameters__"}
_OF_EACH |= {"__firstlineno__", "__static_attributes__", "__hash__", "__slotnames__"}
_OF_EACH |= {"__abstractmethods__", "_abc_impl"}
_NEUTRAL = _MAKING | _COPYING | _PRINTING | _OF_EACH


def own_names(x: Tensor) -> list[str]:
    """Return what the class of a tensor has beyond `nn.Parameter`, or `Tensor`; [] for most.

    How it is made, copied and printed does not count, nor what was set on the object.

    Example:
        >>> import torch
        >>> class Scaled(nn.Parameter):
        ...     def dequantized(self):
        ...         return self * self.scale
        >>> class Named(nn.Parameter):
        ...     def __repr__(self):
        ...         return "named"
        >>> own_names(Scaled(torch.ones(2))), own_names(Named(torch.ones(2)))
        (['dequantized'], [])
    """
    if isinstance(x, _PLAIN):
        return []
    between = [cls for cls in type(x).__mro__ if cls not in (*nn.Parameter.__mro__,)]
    of_parameter = vars(nn.Parameter).items()  # __torch_function__, off: said once more
    own = {
        name for cls in between for name, x in vars(cls).items() if (name, x) not in of_parameter
    }
    return sorted(own - _NEUTRAL)


def require_classes(named: Mapping[str, Tensor], *, keeps: bool) -> None:
    """Raise `LayoutError`, naming the path, for a class that would be lost.

    keeps: whether the objects stay what they are. A tensor that is made of others, without memory
    of its own (`__torch_dispatch__`), has no place in a state in any case.
    """
    for path, x in named.items():
        if isinstance(x, _PLAIN) or is_dtensor(x):  # the latter is refused as what it is
            continue
        if is_made_of_others(x):
            raise LayoutError(
                f"{path} is a {type(x).__name__}, a tensor that is made of others.",
                cause="quantized weights (torchao), or another subclass with a "
                "__torch_dispatch__: it has no memory that could be cut into shards.",
                fix="keep its parts in buffers (register_buffer), and put them together in the "
                "forward of the module; or train the plain weights: x.dequantize().",
            )
        names = [] if keeps else own_names(x)
        if names:
            raise LayoutError(
                f"{path} is a {type(x).__name__}, whose class has its own {', '.join(names[:4])}"
                f"{', ...' * (len(names) > 4)}.",
                cause="a quantized weight, or another subclass of nn.Parameter that says what the "
                "module computes; at stage 3 on several ranks, and in functional steps, plain "
                "tensors stand in its place.",
                fix="make an Engine at stage 0, 1 or 2, which keeps the object; or keep quantized "
                "values in a buffer (register_buffer), and their rule in the forward of the "
                "module. A class with nothing but attributes of its objects may stay.",
            )


def is_made_of_others(x: Tensor) -> bool:
    """Whether a tensor has no memory of its own, and says by `__torch_dispatch__` what it does."""
    kinds: list[Any] = [type(x), Tensor]
    return len({kind.__torch_dispatch__ for kind in kinds}) > 1
