"""What each op makes of its operands: the meanings that the table gives to exact overloads.

Linear ops are computed. An elementwise op commutes with slicing and joining, f(x[a:b]) = f(x)[a:b],
so that it becomes a function of whole leaves. Of an opaque op is known that it gives the same of
the same: the same operands, and all of the same other arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from fractions import Fraction
from typing import Any

import torch

from fzero.tools.prove._call import OpCall
from fzero.tools.prove._dtypes import ADDS, DIVIDES, holds, holds_number
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
    whole,
)
from fzero.tools.prove._terms import scaled as times

Made = Symbolic | list[Symbolic]
Known = Callable[[OpCall, list[Sum]], Sum | None]
"""What is known of some elements of the result, of those of the operands; None for nothing."""


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


def pointwise(known: Known | None = None) -> Callable[[OpCall], Made]:
    """Return the meaning of an elementwise op, of which `known` may know more."""

    def made(call: OpCall) -> Made:
        return _pointwise(call, call.values, known)

    return made


def _pointwise(call: OpCall, operands: Sequence[Symbolic], known: Known | None) -> Made:
    numel = torch.Size(call.shape).numel()
    fits = all(value.numel == numel or value.uniform is not None for value in operands)
    if not fits or not operands:
        return opaque(call)
    head = call.head()

    def of(sums: list[Sum], n: int) -> Sum:
        found = None if known is None else known(call, sums)
        return function(call.terms, head, sums, n) if found is None else found

    return elementwise(call, call.shape, operands, of)


def linear(known: Known, *numbers: str) -> Callable[[OpCall], Made]:
    """Return the meaning of an op that `known` computes, `numbers` being arguments that may be one.

    Where the dtype of the result does not hold the operands it is a function of elements.
    """

    def made(call: OpCall) -> Made:
        dtype: Any = call.dtype
        given = [x for name in numbers if not isinstance(x := call.args[name], Symbolic)]
        held = all(holds(dtype, one) for one in call.dtypes)
        if dtype not in ADDS or not held or not all(holds_number(dtype, x) for x in given):
            return _pointwise(call, call.values, None)
        return _pointwise(call, [as_value(call.terms, call.args[x]) for x in numbers], known)

    return made


def as_value(terms: Terms, x: Any) -> Symbolic:
    """Return a number as a value."""
    return x if isinstance(x, Symbolic) else of_sum(terms.number(exact(x)))


def add(call: OpCall, sums: list[Sum]) -> Sum | None:
    """a + alpha b."""
    return _plus(call, sums, 1)


def subtract(call: OpCall, sums: list[Sum]) -> Sum | None:
    """a - alpha b."""
    return _plus(call, sums, -1)


def subtract_from(call: OpCall, sums: list[Sum]) -> Sum | None:
    """b - alpha a."""
    return _plus(call, [sums[1], sums[0]], -1)


def _plus(call: OpCall, sums: list[Sum], sign: int) -> Sum | None:
    alpha = call.args.get("alpha", 1)
    if not holds_number(call.dtype, alpha):  # type: ignore[arg-type]
        return None
    return added(sums[0], times(sums[1], sign * exact(alpha)))


def negative(call: OpCall, sums: list[Sum]) -> Sum | None:
    """-a."""
    return times(sums[0], Fraction(-1))


def multiply(call: OpCall, sums: list[Sum]) -> Sum | None:
    """A sum times a number."""
    a, b = sums
    numbers = [constant(a), constant(b)]
    if numbers[0] is not None:
        return times(b, numbers[0])
    return None if numbers[1] is None else times(a, numbers[1])


def product(call: OpCall) -> Made:
    """a b; of truth values, both."""
    if call.dtype is torch.bool and set(call.dtypes) == {torch.bool} and len(call.dtypes) == 2:
        return _pointwise(call, call.values, multiply)
    return linear(multiply, "self", "other")(call)


def divide(call: OpCall, sums: list[Sum]) -> Sum | None:
    """A sum by a number that is not 0; 0 by anything else that is not 0."""
    by = constant(sums[1])
    if call.dtype not in DIVIDES or by == 0:
        return None
    return times(sums[0], 1 / by) if by else None if sums[0] else ()


def cast_of(
    call: OpCall, value: Symbolic, shape: Sequence[int], before: torch.dtype, after: torch.dtype
) -> Made:
    """The same numbers if `after` holds them; else an unknown function of each element."""
    same = holds(after, before)
    head = "cast", before, after

    def of(sums: list[Sum], n: int) -> Sum:
        return sums[0] if same else function(call.terms, head, sums, n)

    numel = torch.Size(shape).numel()
    if value.numel != numel and value.uniform is None:
        raise NotImplementedError("it copies to another shape")
    return elementwise(call, shape, [value], of)


def cast(call: OpCall) -> Made:
    """_to_copy: memory and device do not count, the dtype does."""
    after: Any = call.args["dtype"] or call.dtypes[0]
    return cast_of(call, call.args["self"], call.args["self"].shape, call.dtypes[0], after)


def copied(call: OpCall) -> Made:
    """copy_, copy: `src` in the dtype and shape of `self`."""
    into, source = call.args["self"], call.args["src"]
    return cast_of(call, source, into.shape, call.dtypes[1], call.dtypes[0])


def zeroed(call: OpCall) -> Made:
    """zero_."""
    return of_sum((), call.args["self"].shape)


def filled_with(call: OpCall) -> Made:
    """fill_: of a number, or of a tensor of one element."""
    into, number = call.args["self"], call.args["value"]
    if isinstance(number, Symbolic):
        return cast_of(call, number, into.shape, call.dtypes[1], call.dtypes[0])
    return _full(call, into.shape, number, call.dtypes[0])


def _full(call: OpCall, shape: Sequence[int], number: Any, dtype: torch.dtype) -> Symbolic:
    if holds_number(dtype, number):
        return of_sum(call.terms.number(exact(number)), shape)
    head = "full", dtype, type(number).__name__, repr(number)
    return of_sum(whole(call.terms.term(head)), shape)


def filled(number: Any = None) -> Callable[[OpCall], Made]:
    """Return the meaning of an op that makes a tensor of one number: its own, or an argument."""

    def made(call: OpCall) -> Made:
        given = number
        if number is None:
            given = call.args["fill_value"] if "fill_value" in call.args else call.args["s"]
        return _full(call, call.shape, given, call.dtype)  # type: ignore[arg-type]

    return made


def opaque(call: OpCall, *more: Hashable, operands: Sequence[Symbolic] | None = None) -> Made:
    """Return functions of the operands, equal for equal ones: the results."""
    given = call.values if operands is None else operands
    found = []
    for i, (shape, dtype) in enumerate(call.results):
        numel = torch.Size(shape).numel()
        head = call.head(*more, i, shape, dtype)
        varies = True if call.draw else None
        found.append(of_term(call.terms.term(head, given, numel, varies), shape))
    return found if call.several else found[0]


def drawn(call: OpCall) -> Made:
    """Random numbers: each rank's own, by their number among the draws of a program."""
    return opaque(call, "draw", call.draw)


def written(call: OpCall, into: Symbolic, number: int) -> Symbolic:
    """Return what an opaque op writes into an argument."""
    head = call.head("writes", number, into.shape)
    varies = True if call.draw else None
    operands = call.values[1:] if call.draw else call.values  # what was there does not count
    return of_term(call.terms.term(head, operands, into.numel, varies), into.shape)
