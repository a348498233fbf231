"""What each op makes of its operands.

Linear ops are computed. An elementwise op commutes with slicing and joining, f(x[a:b]) = f(x)[a:b],
so that it becomes a function of whole leaves. Of other ops is known that they give the same of the
same.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from fractions import Fraction
from math import inf, isfinite
from typing import Any

import torch

from fzero.tools.prove._reading import FINITE, OVER_RANKS, OpCall
from fzero.tools.prove._terms import (
    UNIFORM,
    Addend,
    Stretch,
    Sum,
    Symbolic,
    Terms,
    added,
    aligned,
    constant,
    exact,
    joined,
    moved,
    of_sum,
    of_term,
    only,
    whole,
)
from fzero.tools.prove._terms import scaled as times

Made = Symbolic | list[Symbolic] | None
"""What an op makes; None where a rule does not know this case."""

WRITES = ("copy", "fill", "zero")
_LINEAR = (*WRITES, "add", "sub", "rsub", "neg", "mul", "div")
_MOVES = ("t", "transpose", "permute", "view_as_real", "view_as_complex")
_KEEPS_ZERO = ("abs", "sqrt", "div")


def evaluate(call: OpCall) -> Symbolic | list[Symbolic]:
    """Return what an op makes."""
    rule, target = RULES.get(call.name), call.node.target
    made = rule(call) if rule is not None else None
    if made is None and (torch.Tag.pointwise in target.tags or call.name in WRITES):  # type: ignore
        shapes = [value.shape for value in call.values]
        shape = shapes[0] if call.name in WRITES else tuple(torch.broadcast_shapes(*shapes))
        numel, args = torch.Size(shape).numel(), call.args
        if all(value.numel == numel or value.uniform is not None for value in call.values):
            if call.name in _LINEAR:
                args = tuple(_as_value(call.reading.terms, x) for x in args)
            call = call._replace(args=args)
            head = call.name, call.constants
            made = elementwise(
                call, shape, call.values, lambda sums, n: _known(call, head, sums, n)
            )
    return opaque(call) if made is None else made


def elementwise(
    call: OpCall,
    shape: Sequence[int],
    operands: Sequence[Symbolic],
    fn: Callable[[list[Sum], int], Sum],
) -> Symbolic:
    """Return fn(sums of the operands, numel) where none of these changes."""
    spread = any(value.spread for value in operands)
    world = call.reading.world if spread else 1
    total, rows = torch.Size(shape).numel() * world, []
    for value in operands:
        one = value.uniform
        same = value.pieces if value.spread else value.pieces * world
        rows.append(same if one is None else joined([Stretch(total, one)]))
    pieces = joined(Stretch(n, fn(sums, n)) for n, sums in aligned(rows))
    return Symbolic(tuple(shape), pieces, spread)


def _as_value(terms: Terms, x: Any) -> Any:
    return of_sum(terms.number(exact(x))) if type(x) in (int, float) and isfinite(x) else x


def function(terms: Terms, head: Hashable, sums: Sequence[Sum], numel: int) -> Sum:
    """Return f(sums) of an elementwise f: of whole leaves, if all start at one element of them."""
    starts = {(x.start, x.term.numel) for one in sums for x in one if x.start != UNIFORM}
    if not starts:
        return whole(terms.term(head, map(of_sum, sums)))
    start, full = starts.pop() if len(starts) == 1 else (0, numel)
    by = 0 if starts else start
    shapes = [() if all(x.start == UNIFORM for x in one) else (full,) for one in sums]
    parts = [of_sum(moved(one, -by), shape) for one, shape in zip(sums, shapes, strict=True)]
    return (Addend(terms.term(head, parts, full), by, Fraction(1)),)


def _known(call: OpCall, head: Any, sums: list[Sum], numel: int) -> Sum:
    """Return the result for some elements: by what is known of the op, or as a function."""
    found = _linear(call, sums) if call.name in _LINEAR else None
    if found is None:
        sums = [call.reading.settled(call.node, one) for one in sums]
        found = _special(call, head[1][0], sums)
    return function(call.reading.terms, head, sums, numel) if found is None else found


def _linear(call: OpCall, sums: list[Sum]) -> Sum | None:
    """Return a linear combination of the operands; None if the op is none."""
    name, (a, b) = call.name, (sums[0], sums[-1])
    if name in WRITES:
        return () if name == "zero" else b
    if name in ("mul", "div") and len(sums) == 2 and not call.kwargs.get("rounding_mode"):
        numbers = [constant(a), constant(b)]
        if name == "mul" and numbers[0] is not None:
            return times(b, numbers[0])
        by = numbers[1] if name == "mul" or not numbers[1] else 1 / numbers[1]
        return None if by is None or (name == "div" and not numbers[1]) else times(a, by)
    if call.node.meta["val"].dtype is torch.bool or name in ("mul", "div"):
        return None
    if name == "neg":
        return times(a, Fraction(-1))
    a, b = (sums[1], sums[0]) if name == "rsub" else (sums[0], sums[1])
    alpha = constant(sums[2]) if len(sums) > 2 else exact(call.kwargs.get("alpha", 1))
    return None if alpha is None else added(a, times(b, alpha if name == "add" else -alpha))


def _special(call: OpCall, args: Any, sums: list[Sum]) -> Sum | None:
    """Return what is known of an op that is not linear; None for nothing."""
    name, one, terms = call.name, sums[0], call.reading.terms
    bound = (*args, None, None, None)[1:3]
    if name == "where" and sums[1:2] == sums[2:]:
        return sums[1]
    if (name == "mul" and () in sums) or (name in _KEEPS_ZERO and not one):
        return ()
    if name == "pow" and len(sums) == 1 and isinstance(bound[0], int | float) and bound[0] > 0:
        root = only(one)
        squared = bound[0] == 2 and root is not None and root.head == "root"
        return root.operands[0].uniform if squared and root else None if one else ()
    if name == "clamp" and len(sums) == 1:
        low, high = bound
        if not one:
            return () if (low or 0) <= 0 <= (0 if high is None else high) else None
        return _any_rank(call, one) if high == 1 and low in (None, 0) else None
    if name == "eq" and len(sums) == 2 and one == sums[1]:
        return terms.number(Fraction(1))  # over the reals nothing is NaN
    if name == "bitwise_not" and call.node.meta["val"].dtype is torch.bool:
        return added(terms.number(Fraction(1)), times(one, Fraction(-1)))
    size = only(one)
    if name == "ne" and bound[0] == inf and size is not None and size.name == "abs":
        largest = only(size.operands[0].uniform or ())
        tested = largest if largest is not None and largest.head == "largest" else size
        return whole(call.reading.finite(tested.operands))
    return None


def _any_rank(call: OpCall, one: Sum) -> Sum | None:
    """Return min(1, sum_r (1 - f_r)) = 1 - f, where f_r says if part r is finite, f if all is."""
    number = sum(x.by for x in one if x.term.head == "one")
    rest = [x for x in one if x.term.head != "one"]
    if len(rest) != 1:
        return None
    term, by = rest[0].term, rest[0].by
    if term.head == OVER_RANKS and number == call.reading.world == -number * by:
        term = term.operands[0].pieces[0].sum[0].term
        mixed = any(x.term.varies for value in term.operands for x in value.addends)
        if term.head != FINITE or mixed:
            return None
        term = call.reading.finite(value._replace(spread=False) for value in term.operands)
    elif term.head != FINITE or term.varies or not number == -by >= 1:
        return None
    return added(call.reading.terms.number(Fraction(1)), times(whole(term), Fraction(-1)))


def opaque(call: OpCall, like: Sequence[Any] | None = None) -> Any:
    """Return functions of the operands, equal for equal ones: the results, or of some shapes."""
    # The mean over ranks of what moves elements around is that of what it moves.
    settled = call.values if call.name in _MOVES else list(map(call.settled, call.values))
    val = call.node.meta.get("val")
    made = like if like is not None else val if isinstance(val, list | tuple) else [val]
    varies = True if DRAW in call.kwargs else None
    found = []
    for i, x in enumerate(made):
        shape = getattr(x, "shape", ())  # None: a gradient that nobody asked for
        numel, head = torch.Size(shape).numel(), (call.name, i, like is None, call.constants)
        found.append(of_term(call.reading.terms.term(head, settled, numel, varies), shape))
    return found if made is val or like is not None else found[0]


DRAW = "draw"
"""The argument with the number of an op that draws random numbers."""


def _cast(call: OpCall) -> Made:
    """Over the reals a cast to numbers among which the old ones are is the identity."""
    before: Any = call.node.args[0].meta["val"].dtype  # type: ignore
    after: Any = call.node.kwargs.get("dtype") or before
    kinds = [
        0 if x is torch.bool else 3 if x.is_complex else 2 if x.is_floating_point else 1
        for x in (before, after)
    ]
    return call.args[0] if kinds[0] <= kinds[1] else None


def _filled(call: OpCall) -> Made:
    """A tensor of one number; or of memory that nobody has written to, unlike all else."""
    at = 1 if call.name.startswith("new_") else 0
    like = call.name.endswith("_like")
    shape = call.args[0].shape if like else () if call.name == "scalar_tensor" else call.args[at]
    terms = call.reading.terms
    if "empty" in call.name:
        head = "unwritten", call.reading.one_rank, call.node.name
        return of_term(terms.term(head, (), torch.Size(shape).numel(), varies=True), shape)
    rest = call.args[0 if call.name == "scalar_tensor" else at + 1 :]
    number = 1 if "ones" in call.name else 0 if "zeros" in call.name else rest[0]
    known = type(number) in (int, float, bool) and isfinite(number)
    return of_sum(terms.number(exact(number)), shape) if known else None


def _joined(call: OpCall) -> Made:
    """cat, stack: of elements in a row."""
    values, dim = call.args[0], (*call.args[1:], 0)[0]
    rows = [value for value in values if value.numel or call.name == "stack"]
    outer = {torch.Size(value.shape[:dim]).numel() for value in rows}
    if any(value.spread for value in rows) or outer != {1} or dim < 0:
        return None
    shape = list(rows[0].shape)
    if call.name == "stack":
        shape.insert(dim, len(rows))
    else:
        shape[dim] = sum(value.shape[dim] for value in rows)
    return Symbolic(tuple(shape), joined(piece for value in rows for piece in value.pieces))


def _sum(call: OpCall) -> Made:
    return of_sum(call.reading.total(call.args[0])) if len(call.args) == 1 else None


def _norm(call: OpCall) -> Made:
    """|x| = root(total(x x)), or the largest |x|: of all elements."""
    of, *options = call.args
    order: Any = options[0] if options else 2
    terms = call.reading.terms
    if len(options) > 1 or call.kwargs.get("dim") is not None or order not in (2, inf):
        return None
    value = call.settled(of)
    value = value._replace(shape=(value.numel,))
    if order == inf:
        return of_term(terms.term("largest", [value]), ())
    head = "pow", ((None, 2), ())
    squares = value.on(
        Stretch(n, function(terms, head, [one], n) if one else ()) for n, one in value.pieces
    )
    return _root_of(call, call.reading.total(squares))


def _root(call: OpCall) -> Made:
    one = call.args[0].uniform
    return (
        None
        if one is None or call.args[0].shape
        else _root_of(call, call.settled(call.args[0]).uniform or ())
    )


def _root_of(call: OpCall, one: Sum) -> Symbolic:
    return of_sum(whole(call.reading.terms.term("root", [of_sum(one)])) if one else ())


def _all(call: OpCall) -> Made:
    """All of several tests hold if all that they look at is finite."""
    terms = [only(piece.sum) for piece in call.args[0].pieces]
    if len(call.args) > 1 or any(x is None or x.head not in (FINITE, "one") for x in terms):
        return None
    return of_term(call.reading.finite(v for x in terms if x is not None for v in x.operands), ())


def _update(call: OpCall) -> Made:
    """A rule of `fzero.optim` works element by element: on a flat, its gradient, its slots."""
    rule, options, params, grads, slots, *numbers = call.args
    shared = [x for x in numbers if isinstance(x, Symbolic)]
    count, made = len(params), list[Symbolic]()
    for output in range(1 + len(slots) // count if count else 0):
        head = "update", rule, options, len(shared), output
        for i in range(count):
            flats = [params[i], grads[i], *slots[i::count], *shared]

            def fn(sums: list[Sum], n: int, head: Any = head) -> Sum:
                settled = [call.reading.settled(call.node, one) for one in sums]
                return function(call.reading.terms, head, settled, n)

            made.append(elementwise(call, params[i].shape, flats, fn))
    return made


_FILLS = ("zeros", "ones", "full", "empty")
RULES: dict[str, Callable[[OpCall], Made]] = {
    **{f"{a}{x}{b}": _filled for x in _FILLS for a, b in (("", ""), ("new_", ""), ("", "_like"))},
    **dict.fromkeys(("clone", "lift_fresh_copy"), lambda call: call.args[0]),
    **{"scalar_tensor": _filled, "_to_copy": _cast, "cat": _joined, "stack": _joined},
    **{"sum": _sum, "linalg_vector_norm": _norm, "sqrt": _root, "all": _all, "update": _update},
}
