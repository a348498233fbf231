"""What each op of a program makes of its operands: joins, reductions, collectives, the update, others."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from math import inf
from typing import Any

import torch
from torch import Tensor

from fzero.tools.prove._elementwise import _only, elementwise, of_function
from fzero.tools.prove._reading import FINITE, Call
from fzero.tools.prove._terms import (
    Piece,
    Sum,
    Value,
    aligned,
    exact,
    joined,
    mapped,
    numel_of,
    of_term,
    whole,
)

Made = Value | list[Value] | None
"""What an op makes; None where a rule does not know this case."""


def evaluate(call: Call) -> Value | list[Value]:
    """Return what an op makes."""
    rule = RULES.get(call.name)
    made = None if rule is None else rule(call)
    if made is None and (is_pointwise(call.node.target) or call.name in ("copy", "fill", "zero")):
        made = elementwise(call, _broadcast(call))
    return opaque(call) if made is None else made


def is_pointwise(target: Any) -> bool:
    """Whether an op works element by element."""
    return torch.Tag.pointwise in target.tags


def _broadcast(call: Call) -> tuple[int, ...]:
    if call.name in ("copy", "fill", "zero"):
        return call.args[0].shape
    return tuple(torch.broadcast_shapes(*(value.shape for value in call.values)))


def opaque(call: Call) -> Value | list[Value]:
    """Return a function of the operands, of which nothing else is known: equal for equal ones."""
    settled = [mapped(v, lambda one: call.reading.settled(call.node, one)) for v in call.values]
    val, terms = call.node.meta.get("val"), call.reading.terms
    drawn = call.kwargs.get(DRAW)
    head = call.name, call.constants
    varies = True if drawn is not None else None
    if isinstance(val, Tensor):
        term = terms.term(head, settled, numel=val.numel(), varies=varies)
        return of_term(term, tuple(val.shape))
    return [
        of_term(terms.term((*head, i), settled, numel=x.numel(), varies=varies), tuple(x.shape))
        for i, x in enumerate(val if isinstance(val, list | tuple) else ())
    ]


DRAW = "draw"
"""The argument by which a reading numbers the ops that draw random numbers."""


def _same(call: Call) -> Made:
    return call.args[0]


def _cast(call: Call) -> Made:
    """Over the reals a cast to a wider kind of number is the identity."""
    source, made = call.node.args[0], call.node.meta["val"]
    before = source.meta["val"] if isinstance(source, torch.fx.Node) else made
    kinds = [_kind(x.dtype) for x in (before, made)]
    return call.args[0] if kinds[0] <= kinds[1] else None


def _kind(dtype: torch.dtype) -> int:
    if dtype is torch.bool:
        return 0
    return 3 if dtype.is_complex else 2 if dtype.is_floating_point else 1


def _filled(call: Call) -> Made:
    number = 1 if "ones" in call.name else 0 if "zeros" in call.name else None
    if number is None:
        at = {"full": 1, "full_like": 1, "new_full": 2, "scalar_tensor": 0}[call.name]
        number = call.args[at]
    if isinstance(number, Value) or number != number or abs(number) == inf:
        return None
    shape = tuple(call.node.meta["val"].shape)
    return Value(shape, joined([Piece(numel_of(shape), call.reading.terms.number(exact(number)))]))


def _unwritten(call: Call) -> Made:
    """Memory that nobody has written to: unlike everything else."""
    val = call.node.meta["val"]
    who = "unwritten", call.reading.one_rank, call.node.name
    return of_term(call.reading.terms.term(who, numel=val.numel(), varies=True), tuple(val.shape))


def _cat(call: Call) -> Made:
    values, dim = call.args[0], (*call.args[1:], 0)[0]
    rows = [value for value in values if value.numel]
    if not rows or any(v.spread for v in rows) or any(numel_of(v.shape[:dim]) != 1 for v in rows) or dim < 0:
        return None
    shape = list(rows[0].shape)
    shape[dim] = sum(value.shape[dim] for value in rows)
    return Value(tuple(shape), joined(piece for value in rows for piece in value.pieces))


def _stack(call: Call) -> Made:
    values, dim = call.args[0], (*call.args[1:], 0)[0]
    if dim or any(value.spread for value in values):
        return None
    shape = (len(values), *values[0].shape)
    return Value(shape, joined(piece for value in values for piece in value.pieces))


def _sum(call: Call) -> Made:
    if len(call.args) > 1:
        return None
    return Value((), _one(call.reading.total(call.args[0])))


def _one(one: Sum) -> tuple[Piece, ...]:
    return (Piece(1, one),)


def _norm(call: Call) -> Made:
    """|x| = root(total(x x)), or the largest |x|: of all elements."""
    value, order = call.args[0], (*call.args[1:], 2)[0]
    if len(call.args) > 2 or call.kwargs.get("dim") is not None or order not in (2, inf):
        return None
    terms = call.reading.terms
    value = mapped(value, lambda one: call.reading.settled(call.node, one))
    flat = value._replace(shape=(value.numel,))
    if order == inf:
        return Value((), _one(whole(terms.term("largest", [flat]))))
    head = "pow", ((None, 2), ())
    squares = [Piece(n, of_function(terms, head, n, sums) if sums[0] else ()) for n, sums in aligned([flat.pieces])]
    total = call.reading.total(flat._replace(pieces=joined(squares)))
    return Value((), _one(whole(terms.term("root", [Value((), _one(total))])) if total else ()))


def _root(call: Call) -> Made:
    value = mapped(call.args[0], lambda one: call.reading.settled(call.node, one))
    if value.numel != 1 or value.spread:
        return None
    one = value.pieces[0].sum
    return Value(value.shape, _one(whole(call.reading.terms.term("root", [Value((), _one(one))])) if one else ()))


def _all(call: Call) -> Made:
    """All numbers of several tests are finite if those of each are."""
    terms = [_only(piece.sum) for piece in call.args[0].pieces]
    if len(call.args) > 1 or any(term is None or term.head not in (FINITE, "one") for term in terms):
        return None
    tested = [value for term in terms if term is not None and term.head == FINITE for value in term.operands]
    return Value((), _one(whole(call.reading.finite(tested))))


def _update(call: Call) -> Made:
    """A rule of `fzero.optim` works element by element: on each flat, with its gradient and slots."""
    rule, options, params, grads, slots, count, *rate = call.args
    number, several, made = len(params), len(slots) // max(len(params), 1), []
    shared = [count, *(one for one in rate if isinstance(one, Value))]
    for output in range(1 + several):
        for i in range(number):
            flat = [params[i], grads[i], *(slots[k * number + i] for k in range(several))]
            spread = any(value.spread for value in flat)
            numel = params[i].numel
            rows = [call.stretched(value, numel, spread=spread) for value in [*flat, *shared]]
            pieces = []
            for n, sums in aligned(rows):
                settled = [call.reading.settled(call.node, one) for one in sums]
                head = "update", rule, options, len(rate) - len(shared) + 1, output
                pieces.append(Piece(n, of_function(call.reading.terms, head, n, settled)))
            made.append(Value(params[i].shape, joined(pieces), spread))
    return made


def _constant(tensor: Any) -> Any:
    if not isinstance(tensor, Tensor) or type(tensor) is not Tensor:
        return None
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(data).hexdigest(), str(tensor.dtype), tuple(tensor.shape)


def constant_of(tensor: Any) -> Any:
    """Return what identifies the values of a constant of a graph; None if it has none."""
    return _constant(tensor)


RULES: dict[str, Callable[[Call], Made]] = {
    "_to_copy": _cast,
    "cat": _cat,
    "stack": _stack,
    "sum": _sum,
    "linalg_vector_norm": _norm,
    "sqrt": _root,
    "all": _all,
    "update": _update,
    **dict.fromkeys(("clone", "contiguous", "lift_fresh_copy"), _same),
    **dict.fromkeys(
        ("zeros", "ones", "full", "new_zeros", "new_ones", "new_full", "zeros_like", "ones_like",
         "full_like", "scalar_tensor"),
        _filled,
    ),
    **dict.fromkeys(("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided"), _unwritten),
}  # fmt: skip
