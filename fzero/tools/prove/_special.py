"""What more is known of some ops: roots and squares, choices, tests for overflow, sums, joins."""

from __future__ import annotations

import json
from fractions import Fraction
from math import inf
from typing import Any

import torch

from fzero.optim.recorded import SCHEDULES
from fzero.tools.prove._call import OpCall
from fzero.tools.prove._dtypes import ADDS, REALS, holds
from fzero.tools.prove._ops import Made, elementwise, function, opaque, pointwise
from fzero.tools.prove._reading import FINITE, OVER_RANKS
from fzero.tools.prove._schedules import unreadable
from fzero.tools.prove._terms import (
    Stretch,
    Sum,
    Symbolic,
    Term,
    added,
    joined,
    of_sum,
    of_term,
    only,
    whole,
)
from fzero.tools.prove._terms import scaled as times

_ABS = torch.ops.aten.abs.default


def choice(call: OpCall, sums: list[Sum]) -> Sum | None:
    """where(c, a, a) = a."""
    same = sums[1] == sums[2] and all(holds(call.dtype, x) for x in call.dtypes[1:])  # type: ignore
    return sums[1] if same else None


def zero_of_zero(call: OpCall, sums: list[Sum]) -> Sum | None:
    """f(0) = 0."""
    return () if call.dtype in REALS and not sums[0] else None


def power(call: OpCall, sums: list[Sum]) -> Sum | None:
    """0^e = 0, root(x)^2 = x."""
    exponent, (one,) = call.args["exponent"], sums
    if type(exponent) not in (int, float) or exponent <= 0 or call.dtype not in REALS:
        return None
    root = only(one)
    if exponent == 2 and root is not None and root.head == "root":
        return root.operands[0].uniform
    return None if one else ()


def bounded(call: OpCall, sums: list[Sum]) -> Sum | None:
    """clamp(0) = 0 inside of the bounds; min(1, ranks with an overflow) = whether there is one."""
    low, high, (one,) = call.args["min"], call.args["max"], sums
    if call.dtype not in REALS:
        return None
    if not one:
        return () if (low or 0) <= 0 <= (0 if high is None else high) else None
    return _any_rank(call, one) if high == 1 and low in (None, 0) else None


def _any_rank(call: OpCall, one: Sum) -> Sum | None:
    """Return min(1, sum_r (1 - f_r)) = 1 - f, where f_r says if part r is finite, f if all is."""
    number = sum(x.by for x in one if x.term.head == "one")
    rest = [x for x in one if x.term.head != "one"]
    own = [v for x in rest if x.term.head == FINITE for v in x.term.operands]
    if len(rest) == 1 and rest[0].term.head == OVER_RANKS and -rest[0].by == 1:
        inner = rest[0].term.operands[0].pieces[0].sum[0].term
        mixed = any(x.term.varies for value in inner.operands for x in value.addends)
        if number != call.reading.world or inner.head != FINITE or mixed:
            return None
        own = [value._replace(spread=False) for value in inner.operands]
    elif number != -sum(x.by for x in rest) or any(
        x.term.head != FINITE or x.term.varies or x.by > -1 for x in rest
    ):
        return None
    term = call.reading.finite(own)
    return added(call.terms.number(Fraction(1)), times(whole(term), Fraction(-1)))


def equal(call: OpCall, sums: list[Sum]) -> Sum | None:
    """x = x: over the reals nothing is NaN."""
    real = all(x in REALS for x in call.dtypes) and len(set(call.dtypes)) == 1
    return call.terms.number(Fraction(1)) if real and sums[0] == sums[1] else None


def negation(call: OpCall, sums: list[Sum]) -> Sum | None:
    """1 - x, of a truth value."""
    if call.dtypes != (torch.bool,) or call.dtype is not torch.bool:
        return None
    return added(call.terms.number(Fraction(1)), times(sums[0], Fraction(-1)))


def unequal(call: OpCall, sums: list[Sum]) -> Sum | None:
    """|x| != inf: a test for overflow, of one element, or of the largest of some."""
    size = only(sums[0])
    if call.args["other"] != inf or call.dtypes[0] not in REALS or not _is_abs(size):
        return None
    if size is None or size.numel != 1:
        return None  # a test of each element says nothing of all
    largest = only(size.operands[0].uniform or ())
    tested = largest if largest is not None and largest.head == "largest" else size
    return whole(call.reading.finite(tested.operands))


def _is_abs(term: Term | None) -> bool:
    return term is not None and isinstance(term.head, tuple) and term.head[1:2] == (_ABS,)


def total(call: OpCall) -> Made:
    """sum(x), where the dtype of the result holds the elements and adds them."""
    dtype: Any = call.dtype
    known = holds(dtype, call.dtypes[0]) and dtype in ADDS
    return of_sum(call.reading.total(call.args["self"])) if known else opaque(call)


def norm(call: OpCall) -> Made:
    """|x| = root(total(x x)), or the largest |x|: of all elements."""
    order, dtype, before = call.args["ord"], call.args["dtype"], call.dtypes[0]
    options = call.args["dim"] is not None or call.args["keepdim"]
    if options or order not in (2, inf) or before not in REALS:
        return opaque(call)
    if dtype is not None and (dtype not in REALS or not holds(dtype, before)):
        return opaque(call)
    value = call.args["self"]
    value = value._replace(shape=(value.numel,))
    if order == inf:
        return of_term(call.terms.term("largest", [value]), ())
    squares = value.on(
        Stretch(n, function(call.terms, ("square", before), [one], n) if one else ())
        for n, one in value.pieces
    )
    return _root_of(call, call.reading.total(squares))


def root(call: OpCall) -> Made:
    """sqrt: of a scalar a root, whose square is known."""
    one = call.args["self"].uniform
    if one is None or call.shape or call.dtype not in REALS or call.dtypes[0] not in REALS:
        return pointwise(zero_of_zero)(call)
    return _root_of(call, one)


def _root_of(call: OpCall, one: Sum) -> Symbolic:
    return of_sum(whole(call.terms.term("root", [of_sum(one)])) if one else ())


def every(call: OpCall) -> Made:
    """All of several tests hold if all that they look at is finite."""
    terms = [only(piece.sum) for piece in call.args["self"].pieces]
    known = call.dtypes == (torch.bool,) and call.dtype is torch.bool
    if not known or any(x is None or x.head not in (FINITE, "one") for x in terms):
        return opaque(call)
    return of_term(call.reading.finite(v for x in terms if x is not None for v in x.operands), ())


def catenated(call: OpCall) -> Made:
    """cat: of elements in a row."""
    return _joined(call, stacks=False)


def stacked(call: OpCall) -> Made:
    """stack: of elements in a row."""
    return _joined(call, stacks=True)


def _joined(call: OpCall, *, stacks: bool) -> Made:
    values, dim = call.args["tensors"], call.args["dim"]
    rows = [value for value in values if value.numel or stacks]
    outer = {torch.Size(value.shape[:dim]).numel() for value in rows}
    other = any(one is not call.dtype for one in call.dtypes)
    if other or any(value.spread for value in rows) or outer != {1} or dim < 0:
        return opaque(call)
    return Symbolic(call.shape, joined(piece for value in rows for piece in value.pieces))


def updated(call: OpCall) -> Made:
    """A rule of `fzero.optim` works element by element: on a flat, its gradient, its slots."""
    args, terms = call.args, call.terms
    if not isinstance(json.loads(args["options"]), dict):
        raise NotImplementedError("its options are no numbers")
    params, grads, slots = args["params"], args["grads"], args["moments"]
    shared = [x for x in (args["count"], args["lr"]) if x is not None]
    count, made = len(params), list[Symbolic]()
    for output in range(1 + len(slots) // count if count else 0):
        for i in range(count):
            # Of this flat: the dtypes of its parameter, its gradient and each of its moments.
            own = call.dtypes[i : 2 * count + len(slots) : count]
            head = "update", args["rule"], args["options"], own, args["lr"] is not None, output
            flats = [params[i], grads[i], *slots[i::count], *shared]

            def fn(sums: list[Sum], n: int, head: Any = head) -> Sum:
                return function(terms, head, sums, n)

            made.append(elementwise(call, params[i].shape, flats, fn))
    return made


def scheduled(call: OpCall) -> Made:
    """A schedule is a function of the number of updates, if its code has nothing else in it."""
    schedule = SCHEDULES[call.args["number"]]
    if why := unreadable(schedule):
        raise NotImplementedError(f"the option lr is {why}")
    return opaque(call)


def gradient(call: OpCall) -> Made:
    """What a rank hands to the reduction: in the program of one rank the mean over the ranks."""
    value = call.args["x"]
    if not call.reading.one_rank:
        return value
    return value.on(Stretch(p.numel, call.reading.mean(p.sum)) for p in value.pieces)
