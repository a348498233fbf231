"""Run operators on placeholders under the autocast state that they would see on plain tensors.

torch.autocast has rules for some operators: they cast their arguments, and run without autocast
then. Any other one passes it by, and what its kernel calls meets it. A placeholder's operators come
to `__torch_dispatch__` behind autocast, where torch has it switched off for all that follows.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fzero.context.ambient import kinds_of_autocast
from fzero.errors import LayoutError, PhaseError

_C: Any = torch._C

_PARTS = {"aten::_euclidean_dist": "aten::cdist", "aten::_trilinear": "aten::bilinear"}
"""Operators whose kernels call others, and of which composite operator each is a part. Where
autocast has a rule for that one, it runs with all its parts as one operator."""

_OF_TWO = {"aten::linalg_pinv.atol_rtol_tensor": "aten::pinverse"}
"""Such a part that is called by itself as well, and from inside looks the same."""


def autocast_of_call() -> dict[str, torch.dtype]:
    """Inside `__torch_dispatch__`: the dtypes of the autocast around the call, by kind of device.

    There torch itself says that autocast is off, whatever the caller has.
    """
    with _C._RestorePythonTLSSnapshot():
        on = [kind for kind in kinds_of_autocast() if torch.is_autocast_enabled(kind)]
    return {kind: torch.get_autocast_dtype(kind) for kind in on}


@functools.cache
def _meets_autocast(func: Any, kind: str) -> bool | None:
    """Whether operators that a kernel calls see the autocast around it; None: unknown.

    So it is for an operator without a rule of autocast's. One with a rule, and what is part of it,
    casts its arguments, and is then one operator.
    """

    def has_rule(name: str | None) -> bool:
        key = f"Autocast{kind.upper()}"
        return name is not None and _C._dispatch_has_kernel_for_dispatch_key(name, key)

    name = func.name()
    if has_rule(_OF_TWO.get(name)):
        return None
    return not (has_rule(name) or has_rule(_PARTS.get(name)))


@contextmanager
def _under_autocast(kinds: Iterable[str]) -> Iterator[None]:
    """Inside `__torch_dispatch__`: switch autocast on again for the operators in this block."""
    for kind in kinds:
        torch.set_autocast_enabled(kind, True)
    try:
        yield
    finally:
        for kind in kinds:
            torch.set_autocast_enabled(kind, False)


def run_as_called(func: Any, args: Any, kwargs: Any, lower: Mapping[str, torch.dtype]) -> Any:
    """Inside `__torch_dispatch__`: run an operator on values as it runs under the autocast `lower`.

    Raises `LayoutError` for one of which nobody knows.
    """
    met = {kind: _meets_autocast(func, kind) for kind in lower}
    if None in met.values():
        raise LayoutError(
            f"{func.name()} of a parameter of stage 3 under autocast.",
            cause="torch.pinverse or torch.linalg.pinv of a parameter: autocast treats the two "
            "differently, and here they look the same.",
            fix="give it `p.clone()`, or switch autocast off around it.",
        )
    with _under_autocast([kind for kind, meets in met.items() if meets]):
        return func(*args, **kwargs)


class Cast:
    """A cast by autocast, of gathered values that may have been gathered in its dtype."""

    __slots__ = ("_changes", "_reader", "dtype")

    def __init__(self, reader: Any, dtype: torch.dtype) -> None:
        self._reader, self.dtype, self._changes = reader, dtype, reader.changes

    def __call__(self, x: Tensor) -> Tensor:
        if self._reader.changes != self._changes:
            raise PhaseError(
                "a graph from before the update is differentiated under autocast.",
                cause="a loss that was made before step(), and backward() after it.",
                fix="run the backward before the update, or the forward again after it.",
            )
        return x.to(self.dtype)
