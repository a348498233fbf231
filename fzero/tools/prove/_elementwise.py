"""What ops do element by element: linear ones are computed, others become functions of their operands.

An elementwise function commutes with slicing, joining and reshaping. So where all operands of some
elements are parts of whole leaves, from the same element on, the result is that part of a function
of the whole leaves: f(x[a:b]) = f(x)[a:b].
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from fractions import Fraction
from math import inf, isfinite
from typing import Any

import torch

from fzero.tools.prove._reading import FINITE, OVER_RANKS, Call
from fzero.tools.prove._terms import (
    UNIFORM,
    Addend,
    Piece,
    Sum,
    Term,
    Terms,
    Value,
    added,
    aligned,
    exact,
    joined,
    moved,
    numel_of,
    scaled,
    whole,
)

LINEAR = frozenset({"add", "sub", "rsub", "neg", "mul", "div", "copy", "fill", "zero"})
KEEPS_ZERO = frozenset({"abs", "sqrt", "sign", "mul", "div"})


def elementwise(call: Call, shape: tuple[int, ...]) -> Value | None:
    """Return the result of an elementwise op; None if its operands are not of one shape."""
    operands = call.values
    numel, spread = numel_of(shape), any(value.spread for value in operands)
    if any(value.numel != numel and value.uniform is None for value in operands):
        return None
    call = call._replace(**_with_numbers(call)) if call.name in LINEAR else call
    rows = [call.stretched(value, numel, spread=spread) for value in call.values]
    constants = call.constants
    if not rows:
        return None
    made = [Piece(n, _of_elements(call, constants, n, sums)) for n, sums in aligned(rows)]
    return Value(shape, joined(made), spread)


def _with_numbers(call: Call) -> dict[str, Any]:
    """Return the arguments of a linear op, with constant values in the place of numbers."""
    args = tuple(_as_value(call.reading.terms, x) for x in call.args)
    return {"args": args, "kwargs": {k: x for k, x in call.kwargs.items() if k in ("alpha", "rounding_mode")}}


def _as_value(terms: Terms, x: Any) -> Any:
    if type(x) in (int, float) and isfinite(x):
        return Value((), (Piece(1, terms.number(exact(x))),))
    return x


def _of_elements(call: Call, constants: Hashable, numel: int, sums: list[Sum]) -> Sum:
    linear = _linear(call, sums) if call.name in LINEAR else None
    if linear is not None:
        return linear
    settled = [call.reading.settled(call.node, one) for one in sums]
    known = _known(call, constants, settled)
    return of_function(call.reading.terms, (call.name, constants), numel, settled) if known is None else known


def of_function(terms: Terms, head: Hashable, numel: int, sums: Sequence[Sum]) -> Sum:
    """Return f(sums), of an f that works element by element: of whole leaves where it can be."""
    starts = {(x.start, x.term.numel) for one in sums for x in one if x.start != UNIFORM}
    if not starts:
        return whole(terms.term(head, [Value((), (Piece(1, one),)) for one in sums]))
    start, full = starts.pop() if len(starts) == 1 else (0, numel)
    by = 0 if starts else -start
    operands = []
    for one in sums:
        same = all(x.start == UNIFORM for x in one)
        operands.append(Value((), (Piece(1, one),)) if same else Value((full,), (Piece(full, moved(one, by)),)))
    term = terms.term(head, operands, numel=full)
    return (Addend(term, UNIFORM if full == 1 else start if by else 0, Fraction(1)),)


def _constant(one: Sum) -> Fraction | None:
    """Return the number that a sum is; None if it is not constant."""
    if not one:
        return Fraction(0)
    return one[0].by if len(one) == 1 and one[0].term.head == "one" else None


def _linear(call: Call, sums: list[Sum]) -> Sum | None:
    """Return a linear combination of the operands; None if the op is none."""
    name, val = call.name, call.node.meta.get("val")
    if name in ("copy", "fill"):
        return sums[-1]
    if name == "zero":
        return ()
    if isinstance(val, torch.Tensor) and val.dtype is torch.bool:
        return None
    if name == "neg":
        return scaled(sums[0], Fraction(-1))
    if name in ("add", "sub", "rsub"):
        a, b = sums[:2] if name != "rsub" else (sums[1], sums[0])
        alpha = _constant(sums[2]) if len(sums) > 2 else exact(call.kwargs.get("alpha", 1))
        return None if alpha is None else added(a, scaled(b, alpha if name == "add" else -alpha))
    if call.kwargs.get("rounding_mode") is not None or len(sums) != 2:
        return None
    a, b = map(_constant, sums)
    if name == "mul":
        if a is not None:
            return scaled(sums[1], a)
        return None if b is None else scaled(sums[0], b)
    return None if not b else scaled(sums[0], 1 / b)


def _known(call: Call, constants: Any, sums: list[Sum]) -> Sum | None:
    """Return what is known of a function that is not linear, without making a term of it."""
    name, terms = call.name, call.reading.terms
    args = constants[0]
    if name == "where" and len(sums) == 3 and sums[1] == sums[2]:
        return sums[1]
    if name == "mul" and () in sums:
        return ()
    if name in KEEPS_ZERO and not sums[0]:
        return ()
    if name == "pow" and len(sums) == 1 and _is_positive(args[1]):
        if not sums[0]:
            return ()
        root = _only(sums[0])
        if args[1] == 2 and root is not None and root.head == "root":
            return root.operands[0].pieces[0].sum if root.operands[0].pieces else ()
    if name == "clamp":
        return _clamped(call, args, sums)
    if name == "eq" and len(sums) == 2 and sums[0] == sums[1]:
        return terms.number(Fraction(1))  # over the reals nothing is NaN
    if name in ("ne", "mul", "bitwise_not"):
        return _flags(call, name, args, sums)
    return None


def _is_positive(x: Any) -> bool:
    return isinstance(x, int | float) and x > 0


def _only(one: Sum) -> Term | None:
    """Return the term that a sum is, if it is one."""
    return one[0].term if len(one) == 1 and one[0].by == 1 else None


def _clamped(call: Call, args: Any, sums: list[Sum]) -> Sum | None:
    """Return min(most, max(least, x)) of zeros, and of how many ranks are not finite."""
    low, high = (*args[1:3], None)[:2] if len(args) > 1 else (None, None)
    if len(sums) != 1:
        return None
    if not sums[0]:
        return () if (low is None or low <= 0) and (high is None or high >= 0) else None
    return any_rank(call, sums[0]) if high == 1 and low in (None, 0) else None


def any_rank(call: Call, one: Sum) -> Sum | None:
    """Return min(1, sum over ranks of (1 - f)) = 1 - min over ranks of f, of `finite` terms f."""
    terms, world = call.reading.terms, call.reading.world
    ones, flags = [x for x in one if x.term.head == "one"], [x for x in one if x.term.head != "one"]
    if len(ones) != 1 or len(flags) != 1:
        return None
    term, by = flags[0].term, flags[0].by
    if term.head == OVER_RANKS and ones[0].by == world and by == -1:
        term = _only(term.operands[0].pieces[0].sum) or term
        found = call.reading.finite_everywhere(term) if term.head == FINITE else None
    else:
        found = term if term.head == FINITE and not term.varies and ones[0].by == -by > 0 else None
    return None if found is None else added(terms.number(Fraction(1)), scaled(whole(found), Fraction(-1)))


def _flags(call: Call, name: str, args: Any, sums: list[Sum]) -> Sum | None:
    """Return what is known of tests whether numbers are finite."""
    terms = call.reading.terms
    if name == "bitwise_not":
        return added(terms.number(Fraction(1)), scaled(sums[0], Fraction(-1))) if is_flag(sums[0]) else None
    if name == "mul":
        numbers = [_constant(one) for one in sums]
        return next((sums[1 - i] for i, x in enumerate(numbers) if x == 1), None)
    if args[1:2] == (0,) and is_flag(sums[0]):
        return sums[0]
    size = _only(sums[0])
    if args[1:2] == (inf,) and size is not None and size.head[:1] == ("abs",):
        inner = size.operands[0]
        largest = _only(inner.pieces[0].sum) if inner.pieces else None
        values = largest.operands if largest is not None and largest.head == "largest" else (inner,)
        return whole(call.reading.finite(values))
    return None


def is_flag(one: Sum) -> bool:
    """Whether a sum is f or 1 - f, of a `finite` term f: 0 or 1."""
    terms = [x for x in one if x.term.head == FINITE]
    rest = [x for x in one if x.term.head != FINITE]
    if len(terms) != 1:
        return not terms and _constant(one) in (0, 1)
    if not rest:
        return terms[0].by == 1
    return terms[0].by == -1 and len(rest) == 1 and rest[0].term.head == "one" and rest[0].by == 1
