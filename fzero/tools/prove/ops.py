"""What each op makes of its operands: the meanings that the table gives to exact overloads.

Linear ops are computed. An elementwise op commutes with slicing and joining, f(x[a:b]) = f(x)[a:b],
so that it becomes a function of whole leaves. Of an opaque op is known that it gives the same of
the same: the same operands, and all of the same other arguments.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from fractions import Fraction
from functools import partial
from math import inf, isfinite
from typing import Any

import torch
from torch import Tensor

from fzero.optim.recorded import SCHEDULES, schedule
from fzero.tools.prove import names as names
from fzero.tools.prove.terms import (
    FINITE,
    OVER_RANKS,
    UNIFORM,
    Addend,
    OpCall,
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
from fzero.tools.prove.terms import scaled as times
from fzero.tools.trace.program import UPDATE
from fzero.tools.trace.schedules import facts_of

# Marks in a recorded graph: on what autograd makes for a reduction, and where a call begins.


def _mark(name: str) -> Any:
    """Return an op that gives x, and is found again in a graph."""
    op = torch.library.custom_op(
        f"fzero_prove::{name}", Tensor.clone, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    op.register_fake(torch.empty_like)
    return op._opoverload


GRADIENT = _mark("gradient")
"""x: what autograd has made for a leaf, as it is handed to the reduction."""

AGAIN = _mark("again")
"""x: any tensor; what follows is the second of two calls in a row."""


# Which dtypes hold all values of another one, and which numbers a dtype holds.

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_COMPLEX = (torch.complex64, torch.complex128)

_HELD_BY: dict[torch.dtype, tuple[torch.dtype, ...]] = {
    torch.bool: (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, *_FLOATS),
    torch.uint8: (torch.int16, torch.int32, torch.int64, *_FLOATS),
    torch.int8: (torch.int16, torch.int32, torch.int64, *_FLOATS),
    torch.int16: (torch.int32, torch.int64, torch.float32, torch.float64),
    torch.int32: (torch.int64, torch.float64),
    torch.float16: (torch.float32, torch.float64, *_COMPLEX),
    torch.bfloat16: (torch.float32, torch.float64, *_COMPLEX),
    torch.float32: (torch.float64, *_COMPLEX),
    torch.float64: (torch.complex128,),
    torch.complex64: (torch.complex128,),
}

ADDS = frozenset((*_FLOATS, *_COMPLEX, torch.int64))
"""Dtypes whose sums are read as sums of numbers: floats are not rounded, int64 does not overflow.
Narrower integers wrap around."""
DIVIDES = frozenset((*_FLOATS, *_COMPLEX))
REALS = frozenset(_FLOATS)


def holds(after: torch.dtype, before: torch.dtype) -> bool:
    """Whether every value of `before` is one of `after`.

    Example:
        >>> holds(torch.float32, torch.bfloat16), holds(torch.bfloat16, torch.float32)
        (True, False)
    """
    return before is after or after in _HELD_BY.get(before, ())


def holds_number(dtype: torch.dtype, number: object) -> bool:
    """Whether a number of Python is one of a dtype: of a float one, up to its rounding.

    Example:
        >>> holds_number(torch.int64, 0.5), holds_number(torch.float16, 1e6)
        (False, False)
    """
    if type(number) is bool:
        return True
    if not isinstance(number, int | float) or not isfinite(number):
        return False
    if dtype is torch.bool:
        return number in (0, 1)
    if not (dtype.is_floating_point or dtype.is_complex):
        about = torch.iinfo(dtype)
        return number == int(number) and about.min <= number <= about.max
    if dtype not in DIVIDES:
        return False
    limits = torch.finfo(dtype)
    return number == 0 or limits.smallest_normal <= abs(number) <= limits.max


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


def pointwise(
    call: OpCall, known: Known | None = None, operands: Sequence[Symbolic] | None = None
) -> Made:
    """An elementwise op, of which `known` may know more, of all tensors or of these operands."""
    numel, operands = torch.Size(call.shape).numel(), operands or call.values
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
            return pointwise(call)
        values = (call.args[name] for name in numbers)
        some = [
            x if isinstance(x, Symbolic) else of_sum(call.terms.number(exact(x))) for x in values
        ]
        return pointwise(call, known, some)

    return made


def added_as(a: int, b: int, sign: int) -> Known:
    """Return that of the operands of these numbers, a + sign alpha b."""

    def known(call: OpCall, sums: list[Sum]) -> Sum | None:
        dtype, alpha = call.dtype, call.args.get("alpha", 1)
        if dtype is None or not holds_number(dtype, alpha):
            return None
        return added(sums[a], times(sums[b], sign * exact(alpha)))

    return known


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
        return pointwise(call, multiply)
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


def filled(call: OpCall, number: Any = None) -> Made:
    """A tensor of one number: the op's own, or an argument."""
    if number is None:
        number = call.args["fill_value"] if "fill_value" in call.args else call.args["s"]
    return _full(call, call.shape, number, call.dtype)  # type: ignore[arg-type]


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


def written(call: OpCall, into: Symbolic, number: int) -> Symbolic:
    """Return what an opaque op writes into an argument."""
    head = call.head("writes", number, into.shape)
    varies = True if call.draw else None
    operands = call.values[1:] if call.draw else call.values  # what was there does not count
    return of_term(call.terms.term(head, operands, into.numel, varies), into.shape)


# What more is known of some ops: roots and squares, choices, tests for overflow, sums, joins.

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
    if call.args["other"] != inf or call.dtypes[0] not in REALS or size is None:
        return None
    is_abs = isinstance(size.head, tuple) and size.head[1:2] == (_ABS,)
    if not is_abs or size.numel != 1:
        return None  # a test of each element says nothing of all
    largest = only(size.operands[0].uniform or ())
    tested = largest if largest is not None and largest.head == "largest" else size
    return whole(call.reading.finite(tested.operands))


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
        return pointwise(call, zero_of_zero)
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


def catenated(call: OpCall, *, stacks: bool = False) -> Made:
    """cat, stack: of elements in a row."""
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
            made.append(elementwise(call, params[i].shape, flats, partial(function, terms, head)))
    return made


def scheduled(call: OpCall) -> Made:
    """A schedule is a function of the number of updates, if its code has nothing else in it."""
    schedule = SCHEDULES[call.args["number"]]
    if why := facts_of(schedule)[0]:
        raise NotImplementedError(f"the option lr is {why}")
    return opaque(call)


def gradient(call: OpCall) -> Made:
    """What a rank hands to the reduction: in the program of one rank the mean over the ranks."""
    value = call.args["x"]
    if not call.reading.one_rank:
        return value
    return value.on(Stretch(p.numel, call.reading.mean(p.sum)) for p in value.pieces)


# The ops that a proof knows, each by its exact overload: what is in no entry ends the proof.
#
# kind          what it makes                                          entries
# a view        the same elements of the same memory                   VIEWS
# a value       what its meaning says, of values in place of tensors   MEANINGS
# a write       that, in the memory of its first argument              WRITES
# opaque        an unknown function of all arguments, pure and exact   OPAQUE, FUNCTIONS_OF_ELEMENTS
# a draw        random numbers, with no generator of their own         DRAWS

Overload = torch._ops.OpOverload
Meaning = Callable[[OpCall], Made]


def overloads(text: str) -> Iterator[Overload]:
    """Yield the overloads of ATen by name, "add.Tensor", that this version of torch has.

    A name alone, "mm", is that of the overload without one, "mm.default".
    """
    for name in text.split():
        packet, _, overload = name.partition(".")
        found = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
        if found is not None:
            yield found


def _each(text: str, meaning: Meaning) -> dict[Overload, Meaning]:
    return dict.fromkeys(overloads(text), meaning)


MEANINGS: dict[Overload, Meaning] = {
    **_each(names.ELEMENTWISE, pointwise),
    **_each(names.OPAQUE, opaque),
    **_each(names.DRAWS, lambda call: opaque(call, "draw", call.draw)),
    **_each("add.Tensor add.Scalar", linear(added_as(0, 1, 1), "self", "other")),
    **_each("sub.Tensor sub.Scalar", linear(added_as(0, 1, -1), "self", "other")),
    **_each("rsub.Tensor rsub.Scalar", linear(added_as(1, 0, -1), "self", "other")),
    **_each("mul.Tensor mul.Scalar", product),
    **_each("div.Tensor div.Scalar", linear(divide, "self", "other")),
    **_each("neg", linear(lambda _, sums: times(sums[0], Fraction(-1)), "self")),
    **_each("where.self", partial(pointwise, known=choice)),
    **_each("abs", partial(pointwise, known=zero_of_zero)),
    **_each("pow.Tensor_Scalar", partial(pointwise, known=power)),
    **_each("clamp", partial(pointwise, known=bounded)),
    **_each("eq.Tensor", partial(pointwise, known=equal)),
    **_each("ne.Scalar", partial(pointwise, known=unequal)),
    **_each("bitwise_not logical_not", partial(pointwise, known=negation)),
    **_each("_to_copy", cast),
    **_each("clone lift_fresh_copy", lambda call: call.args["self"]),
    **_each("copy", copied),
    **_each("zeros zeros_like new_zeros", partial(filled, number=0)),
    **_each("ones ones_like new_ones", partial(filled, number=1)),
    **_each("full full_like new_full scalar_tensor", filled),
    **_each("sum", total),
    **_each("linalg_vector_norm", norm),
    **_each("sqrt", root),
    **_each("all", every),
    **_each("cat", catenated),
    **_each("stack", partial(catenated, stacks=True)),
    UPDATE: updated,
    schedule._opoverload: scheduled,
    GRADIENT: gradient,
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
        ("copy_", copied),
        ("zero_", lambda call: of_sum((), call.args["self"].shape)),
        ("fill_.Scalar fill_.Tensor", filled_with),
    ):
        yield from ((one, (one, meaning)) for one in overloads(text))
    for name in names.IN_PLACE.split():
        for one in overloads(name):
            for apart in overloads(re.sub(r"_(\.|$)", r"\1", name)):
                yield one, (apart, MEANINGS[apart])


WRITES = dict(_in_place())
"""Ops that write into their first argument what an op out of place makes, in its dtype."""

BATCH_NORM = frozenset(overloads("native_batch_norm"))
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
