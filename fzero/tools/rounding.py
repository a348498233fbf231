"""The model of rounding that `fzero.certify` and `fzero.diff` share: do numbers agree up to it?

A sum of n terms in any order is the exact sum of terms that are each changed by at most (n - 1) u
of themselves (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 4.2). So:

    over ranks and micro-batches    the terms are known: (n + 4) u sum(|terms|)
    inside of a loss                the terms are not known: it is computed a second time with every
                                    parameter and every input changed by 4 u of itself, up or down;
                                    4 times the largest change of a leaf's numbers that this makes
    inside of an update             the same, element by element, with every gradient and slot
                                    changed in four combinations of up and down

u is the spacing of numbers at 1 in the coarsest dtype that a number passes through, and not below
2^-44, so that sums of thousands of terms inside of a loss are covered.

`certify` has all terms and one program, so it needs no change of a first loss: `sum_bound` and
`number_bound` are what n terms may be off. Where every term is a whole multiple of one unit no
order of a sum rounds, and all bits must be equal: `is_exact`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fzero.machine.placeholder import LazyParam
from fzero.state.buffers import SIXTEEN_BIT
from fzero.tools.trees import map_tensors

SMALLEST_UNIT = 2.0**-44
DISTURBANCE = 4.0  # units by which parameters, inputs and gradients are changed
MARGIN = 4.0  # times what that makes of a number
TERMS = 4  # roundings of one number beside its sum: casts, divisions
CORNERS = ((1, 1), (1, -1), (-1, 1), (-1, -1))  # signs with which gradients and slots are changed
WIDE = torch.float64
_SMALLEST_EXPONENT = -1000.0  # below it float64 has fewer bits
_SPARE_BITS = 2  # numbers that use all bits of their dtype were most likely rounded themselves


# Numbers that several ranks have, and where two of them differ.


class Copy(NamedTuple):
    """One rank's part of a flat leaf, elements from `start` on. rank -1: a sum over ranks."""

    rank: int
    start: int
    values: Tensor


class Spread(NamedTuple):
    """A leaf: its shape, and the parts of all ranks."""

    shape: tuple[int, ...]
    copies: tuple[Copy, ...]

    @property
    def full(self) -> Tensor:
        """The flat leaf: each element from the lowest rank that has it, or 0 if none has.

        In its own dtype.
        """
        dtype = self.copies[0].values.dtype if self.copies else WIDE
        found = torch.zeros(torch.Size(self.shape).numel(), dtype=dtype)
        for _, start, values in reversed(self.copies):
            found[start : start + values.numel()] = values
        return found


def whole_leaf(value: Tensor, rank: int = -1) -> Spread:
    """Return the `Spread` of a full leaf, of one rank or summed over ranks."""
    return Spread(tuple(value.shape), (Copy(rank, 0, value.detach().reshape(-1).cpu()),))


def of_ranks(values: Sequence[float]) -> Spread:
    """Return the `Spread` of one number of each rank."""
    numbers = [torch.tensor([float(x)], dtype=WIDE) for x in values]
    return Spread((), tuple(Copy(rank, 0, x) for rank, x in enumerate(numbers)))


class Found(NamedTuple):
    """Where two leaves differ: the ranks, the element that exceeds its bound most, and both."""

    ranks: tuple[int, ...]
    index: tuple[int, ...]
    a: float
    b: float
    bound: float


def first_apart(a: Spread, b: Spread, bound: Tensor | float) -> Found | None:
    """Return where copies in b differ from a, or else where copies in a differ from b.

    A NaN on one side does, whatever the bound; one on both sides does not, nor do infinities.
    bound: of each element, flat, or of all.

    Example:
        >>> a, b = whole_leaf(torch.zeros(2, 2)), whole_leaf(torch.tensor([[0.0, 1.0], [3.0, 0.0]]))
        >>> first_apart(a, b, 1.5)
        Found(ranks=(), index=(1, 0), a=0.0, b=3.0, bound=1.5)
        >>> first_apart(a, b, 3.0) is None
        True
    """
    found = _apart(a.full, b, bound)
    if found is None and (turned := _apart(b.full, a, bound)) is not None:
        found = turned._replace(a=turned.b, b=turned.a)
    return found


def replicas_apart(a: Spread) -> Found | None:
    """Return where copies of one run differ in any bit from that on its lowest rank."""
    return _apart(a.full, a, 0.0)


def _apart(full: Tensor, spread: Spread, bound: Tensor | float) -> Found | None:
    wanted = full.double()
    allowed = torch.as_tensor(bound, dtype=WIDE).expand(wanted.shape)
    allowed = allowed.nan_to_num(0.0, posinf=torch.inf)  # of a NaN on both sides
    ranks, first = [], None
    for rank, start, values in spread.copies:
        part = slice(start, start + values.numel())
        mine, theirs, most = values.double(), wanted[part], allowed[part]
        alike = (mine == theirs) | (mine.isnan() & theirs.isnan())  # an infinity, too
        off = (mine - theirs).abs().masked_fill(alike, 0.0)
        if bool((off <= most).all()):
            continue
        k = int((off - most).nan_to_num(torch.inf).argmax())
        at = torch.unravel_index(torch.tensor(start + k), spread.shape) if spread.shape else ()
        index = tuple(int(i) for i in at)
        first = first or Found((), index, float(theirs[k]), float(mine[k]), float(most[k]))
        ranks += [rank] if rank >= 0 else []
    return first and first._replace(ranks=tuple(sorted(ranks)))


# Bounds.


def eps_of(dtype: torch.dtype) -> float:
    """Return the spacing of numbers of a dtype at 1; 0 for integers."""
    return torch.finfo(dtype).eps if dtype.is_floating_point else 0.0


def coarser(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    """Return the dtype with the larger eps."""
    return b if eps_of(b) > eps_of(a) else a


def largest(tensors: Sequence[Tensor]) -> float:
    """Return the largest absolute value of any element."""
    return max((float(x.abs().max()) for x in tensors if x.numel()), default=0.0)


def shift(a: Tensor, twin: Tensor) -> Tensor:
    """Return |twin - a|: by how much a change of what it is made of changed each element."""
    return (a.double() - twin.double()).abs().nan_to_num(0.0, posinf=0.0)


def disturbed_bound(a: Tensor, twin: Tensor) -> float:
    """Return the bound of a leaf: the margin times its largest change by the perturbation."""
    return MARGIN * largest([shift(a, twin)])


def of_terms(sizes: Tensor | float, count: int, unit: float) -> Any:
    """Return (n + 4) u sizes, the bound for another order of a sum; `sizes` is sum(|terms|)."""
    return (count + TERMS) * unit * sizes


def sum_bound(low: torch.dtype, count: int, *, divides: bool) -> float:
    """Return what a gradient of so many terms may be off, relative to sum(|terms|).

    divides: the losses are divided by other than a power of two, before their backward.
    """
    if low not in SIXTEEN_BIT:  # each sum rounds
        return eps_of(low) * 16 * count
    # a term is rounded once or twice on its way; divided by 3, its whole backward rounds otherwise
    return eps_of(low) * (4 if divides else 2)


def number_bound(low: torch.dtype, count: int) -> float:
    """Return what one number of so many terms, a loss or a norm, may be off, relative to itself."""
    return eps_of(low) * (4 if low in SIXTEEN_BIT else 64 * count)


def is_exact(terms: Sequence[Tensor], divisor: int, dtype: torch.dtype) -> bool:
    """Whether sum(terms) / divisor is exact in `dtype`, in any order, elementwise.

    x = k 2^e with an odd integer k. With the smallest e of the terms, u = 2^e, every partial sum is
    a multiple of u of at most sum(|x|): it is exact if sum(|x|) / u fits into the significand. The
    quotient is if the odd part of the divisor divides every x / u.

    Args:
        terms: of one shape [*t], any dtype; compared in float64.
        divisor: what the sum, or any part of it, is divided by; at least 1.
        dtype: in which it is added up.

    Example:
        >>> thirds = [torch.tensor([3.0, 0.75]), torch.tensor([6.0, 1.5])]
        >>> is_exact(thirds, 3, torch.float32), is_exact(thirds, 5, torch.float32)
        (True, False)
        >>> is_exact([torch.tensor([1e8]), torch.tensor([0.5])], 1, torch.float32)
        False
    """
    values = torch.stack([term.detach().double().flatten() for term in terms])
    if not values.isfinite().all():
        return False
    mantissa, exponent = torch.frexp(values)
    whole = (mantissa * 2.0**53).to(torch.int64)
    lowest = whole & -whole  # the bit that is set last; 0 for 0
    low = exponent.double() + torch.log2(lowest.double()) - 53
    low = torch.where(whole == 0, torch.inf, low).amin(0)  # [numel]: log2(u)
    bits = torch.log2(values.abs().sum(0)) - low
    room = 1 - int(torch.log2(torch.tensor(torch.finfo(dtype).eps))) - _SPARE_BITS
    some = low.isfinite()
    if not bool(((bits[some] < room) & (low[some] > _SMALLEST_EXPONENT)).all()):
        return False
    units = (values[:, some] * torch.exp2(-low[some])).to(torch.int64)
    return not bool((units % (divisor // (divisor & -divisor))).any())


# Small changes of numbers.


def signs_like(x: Tensor, source: torch.Generator) -> Tensor:
    """Return +1 or -1 for each element, at random, on the CPU."""
    return torch.randint(0, 2, x.shape, generator=source).double() * 2 - 1


def perturbed(x: Tensor, size: float, signs: Tensor) -> Tensor:
    """Return x (1 + size signs), for a floating tensor."""
    if not x.is_floating_point():
        return x
    return (x.double() * (1 + size * signs.to(x.device))).to(x.dtype)


def disturbed_tree(tree: Any, size: float) -> Any:
    """Return a pytree with each element of its floating tensors changed by `size` of itself."""
    source = torch.Generator().manual_seed(0)
    return map_tensors(
        lambda x: perturbed(x, size, signs_like(x, source)) if x.is_floating_point() else x, tree
    )


# The dtypes that a computation passes through.


class Coarsest(TorchFunctionMode):
    """Context that records the coarsest floating dtype that functions of torch return.

    of_parameters: look only at what requires grad. Constants are the same in each run.
    looks: whether what is computed now counts.
    """

    def __init__(
        self, *, of_parameters: bool = False, looks: Callable[[], bool] = lambda: True
    ) -> None:
        super().__init__()
        self._of_parameters, self._looks = of_parameters, looks
        self.dtype = WIDE

    @property
    def unit(self) -> float:
        """The spacing of numbers at 1 in it."""
        return eps_of(self.dtype)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at what a function returns."""
        out = func(*args, **(kwargs or {}))
        if self._looks():
            for x in out if isinstance(out, list | tuple) else (out,):
                if isinstance(x, Tensor) and (x.requires_grad or not self._of_parameters):
                    self.dtype = coarser(self.dtype, x.dtype)
        return out


class Widened(TorchDispatchMode):
    """Context in which ops that are asked for another dtype of floats give float64.

    So `x.float()`, `x.to(torch.bfloat16)` and `softmax(x, -1, dtype=torch.float32)` do not round,
    in forwards, backwards and what a backward computes again; complex numbers are complex128.
    Beside a tensor of float64 a narrower one is cast, which a matrix product would refuse. What is
    written in place keeps its dtype, and how bits are read is left alone.

    looks: whether what is computed now is to be wide.

    Example:
        >>> x = torch.ones(2, dtype=torch.float64) / 3
        >>> with Widened():
        ...     y = x.bfloat16().float()
        >>> torch.equal(x, y)
        True
    """

    def __init__(self, looks: Callable[[], bool] = lambda: True) -> None:
        super().__init__()
        self._looks = looks

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the op with wide dtypes and tensors."""
        if any(issubclass(kind, LazyParam) for kind in types):
            return NotImplemented  # a placeholder handles it first; the ops it calls come back
        if not self._looks() or func is torch.ops.aten.view.dtype:
            return func(*args, **(kwargs or {}))
        named = {key: _wide_dtype(x) for key, x in (kwargs or {}).items()}
        asked = [_wide_dtype(x) for x in args]
        flat = [y for x in args for y in (x if isinstance(x, list | tuple) else (x,))]
        if any(isinstance(x, Tensor) and x.dtype is WIDE for x in flat):
            schema = func._schema.arguments
            writes = [one.alias_info is not None and one.alias_info.is_write for one in schema]
            asked = [x if w else _wide(x) for x, w in zip(asked, writes, strict=False)]
        return func(*asked, **named)


def _wide_dtype(x: Any) -> Any:
    """Return the wide dtype for one of floats or complex numbers; anything else as it is."""
    if not isinstance(x, torch.dtype):
        return x
    return WIDE if x.is_floating_point else torch.complex128 if x.is_complex else x


def _wide(x: Any) -> Any:
    if isinstance(x, list | tuple):
        return [_wide(y) for y in x]
    narrow = isinstance(x, Tensor) and x.is_floating_point() and x.dtype is not WIDE
    return torch.ops.aten._to_copy.default(x, dtype=WIDE) if narrow else x
