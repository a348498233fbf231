"""The ops that a proof knows, each by its exact overload: what is in no entry ends the proof.

kind          what it makes                                          entries
a view        the same elements of the same memory                   VIEWS
a value       what its meaning says, of values in place of tensors   MEANINGS
a write       that, in the memory of its first argument              WRITES
opaque        an unknown function of all arguments, pure and exact   OPAQUE, FUNCTIONS_OF_ELEMENTS
a draw        random numbers, with no generator of their own         DRAWS
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from fzero.optim.recorded import schedule
from fzero.tools.prove import _names as names
from fzero.tools.prove import _ops as ops
from fzero.tools.prove import _special as special
from fzero.tools.prove._call import OpCall
from fzero.tools.prove._gradient import GRADIENT
from fzero.tools.trace.program import UPDATE

Overload = torch._ops.OpOverload
Meaning = Callable[[OpCall], ops.Made]


def overloads(text: str) -> Iterator[Overload]:
    """Yield the overloads of ATen by name, "add.Tensor", that this version of torch has."""
    for name in text.split():
        packet, _, overload = name.partition(".")
        found = getattr(getattr(torch.ops.aten, packet, None), overload, None)
        if found is not None:
            yield found


def _each(text: str, meaning: Meaning) -> dict[Overload, Meaning]:
    return dict.fromkeys(overloads(text), meaning)


_PLUS = ops.linear(ops.add, "self", "other")
_MINUS = ops.linear(ops.subtract, "self", "other")
_OVER = ops.linear(ops.divide, "self", "other")

MEANINGS: dict[Overload, Meaning] = {
    **_each(names.ELEMENTWISE, ops.pointwise()),
    **_each(names.OPAQUE, ops.opaque),
    **_each(names.DRAWS, ops.drawn),
    **_each("add.Tensor add.Scalar", _PLUS),
    **_each("sub.Tensor sub.Scalar", _MINUS),
    **_each("rsub.Tensor rsub.Scalar", ops.linear(ops.subtract_from, "self", "other")),
    **_each("mul.Tensor mul.Scalar", ops.product),
    **_each("div.Tensor div.Scalar", _OVER),
    **_each("neg.default", ops.linear(ops.negative, "self")),
    **_each("where.self", ops.pointwise(special.choice)),
    **_each("abs.default", ops.pointwise(special.zero_of_zero)),
    **_each("pow.Tensor_Scalar", ops.pointwise(special.power)),
    **_each("clamp.default", ops.pointwise(special.bounded)),
    **_each("eq.Tensor", ops.pointwise(special.equal)),
    **_each("ne.Scalar", ops.pointwise(special.unequal)),
    **_each("bitwise_not.default logical_not.default", ops.pointwise(special.negation)),
    **_each("_to_copy.default", ops.cast),
    **_each("clone.default lift_fresh_copy.default", lambda call: call.args["self"]),
    **_each("copy.default", ops.copied),
    **_each("zeros.default zeros_like.default new_zeros.default", ops.filled(0)),
    **_each("ones.default ones_like.default new_ones.default", ops.filled(1)),
    **_each("full.default full_like.default new_full.default scalar_tensor.default", ops.filled()),
    **_each("sum.default", special.total),
    **_each("linalg_vector_norm.default", special.norm),
    **_each("sqrt.default", special.root),
    **_each("all.default", special.every),
    **_each("cat.default", special.catenated),
    **_each("stack.default", special.stacked),
    UPDATE: special.updated,
    schedule._opoverload: special.scheduled,
    GRADIENT: special.gradient,
}
"""What an op that writes nothing makes."""

UNWRITTEN = frozenset(overloads(names.UNWRITTEN))
"""Ops that make memory to which nobody has written."""

VIEWS = frozenset(overloads(names.VIEWS))
"""Views of which elements in a row are followed. They and the next ones share memory."""

MOVES = frozenset(overloads(names.MOVES))
"""Views whose elements are elsewhere: opaque, and never written through."""


def _in_place() -> Iterator[tuple[Overload, tuple[Overload, Meaning]]]:
    for text, meaning in (
        ("copy_.default", ops.copied),
        ("zero_.default", ops.zeroed),
        ("fill_.Scalar fill_.Tensor", ops.filled_with),
    ):
        yield from ((one, (one, meaning)) for one in overloads(text))
    for name in names.IN_PLACE.split():
        for one in overloads(name):
            for apart in overloads(name.replace("_.", ".")):
                yield one, (apart, MEANINGS[apart])


WRITES = dict(_in_place())
"""Ops that write into their first argument what an op out of place makes, in its dtype."""

BATCH_NORM = frozenset(overloads("native_batch_norm.default"))
"""Opaque, and writes statistics if it trains, which its schema does not say."""

WRITES_UNKNOWN = frozenset(overloads(names.WRITES_UNKNOWN))
"""Opaque ops that write into what their schema says."""

DRAWS = frozenset(overloads(f"{names.DRAWS} {names.WRITES_DRAWS}"))
"""Ops that draw random numbers."""

_fzero = torch.ops.fzero
COLLECTIVES: dict[Any, str] = {
    _fzero.all_gather.default: "all_gather",
    _fzero.reduce_scatter.default: "reduce_scatter",
    _fzero.all_reduce.default: "all_reduce",
}
"""The collectives of which an axiom is known."""
