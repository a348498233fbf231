"""The cut test: whether a function that is declared to look at single elements looks at more.

    pieces of leaves [n]  ->  of each n elements, of which SIZE are looked at  ->  tried again as

    others   other values in one half: what is returned for the other half keeps its bits, both ways
    chance   another seed of torch's generators: all keeps its bits
    place    in another order: what is returned is in that order
    part     cut in two: what is returned of the parts, joined, is what was returned of the whole

A rank has a part of each leaf, and which one depends on the stage and on the number of ranks. So
only a function of single elements is the same everywhere. Lengths and halves consist of whole
blocks of BLOCK elements, at whose edges no vector kernel has a tail that rounds otherwise: there
bits are compared. Halves and places are also tried element by element, and cuts also at an odd
place: there a few elements may miss, for a kernel may round them otherwise, and a discontinuous
function X without elements, and with a few. What is no piece (a number) must come out equal.

It is tried with the values of the call, and with two draws that scale them: one of them finds the
function on either side of a threshold. Signs, zeros, integers and counts stay. The last two draws
are of one sign each, of which a quarter stays beside others of the other sign, zero, infinite, NaN.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fzero.collectives import Rehearsal, assert_same_everywhere
from fzero.context.rng import seeded
from fzero.errors import LayoutError, explain
from fzero.ranks.mesh import Axis

SIZE = 1024
"""How many elements of a leaf are looked at; of a smaller piece, the same ones several times."""
BLOCK = 64
_SIGNS = {3: 1.0, 4: -1.0}
_DRAWS = 5  # the values of the call, two that scale them, and two of a single sign
_LARGE, _SMALL = 2.0**8, 2.0**-10  # the mean sizes of what is scaled
_FEW = 8  # elements that may miss where a kernel may round otherwise; and those of a small piece
_ULPS = 8

Key = tuple[str, str]
"""(what it is, the path of the leaf that it is parallel to; "" for none: it is not cut)."""
Values = Mapping[Key, Tensor]
Of = dict[str, Tensor]
"""Of each leaf: which elements, by number."""


class Beyond(NamedTuple):
    """What shows that a function looks at more: how it was tried, and where that shows."""

    how: str
    key: Key
    error: Exception | None = None


def sampled(x: Tensor) -> Tensor:
    """Return SIZE elements of a piece, from its first to its last; none of an empty one."""
    x, numel = x.detach().reshape(-1), x.numel()
    places = torch.arange(SIZE if numel else 0, device=x.device)
    return x[places * (numel - 1) // (SIZE - 1) if numel > SIZE else places % max(numel, 1)]


def looks_beyond(
    fn: Callable[[Values], Values], values: Values, got: Values | None = None
) -> Beyond | None:
    """Return what shows that a function looks at more than single elements; None: nothing.

    fn: is called with some elements of each leaf, and returns what it makes of them.
    values: `sampled`, of each leaf the same number of elements.
    got: what the function has returned of all elements, `sampled`.

    Example:
        >>> values = {("g", "w"): sampled(torch.tensor([1.0, 2.0, 3.0]))}
        >>> looks_beyond(lambda some: {key: 2 * x for key, x in some.items()}, values)
        >>> looks_beyond(lambda some: {key: x - x.mean() for key, x in some.items()}, values).how
        'others'
    """
    leaves = sorted({leaf for (_, leaf), x in values.items() if leaf and x.numel()})
    for draw in range(_DRAWS if leaves else 0):
        trial = _Trial(fn, _drawn(values, draw) if draw else values, leaves, draw)
        if (found := trial.beyond(None if draw else got)) is not None:
            return found
    return None


class _Trial:
    """Runs of a function on one draw of the values; `_base` is what it makes of them."""

    def __init__(
        self, fn: Callable[[Values], Values], values: Values, leaves: Sequence[str], draw: int
    ) -> None:
        self._fn, self._values, self._leaves, self._draw = fn, values, leaves, draw
        self._device = next(x.device for (_, leaf), x in values.items() if leaf in leaves)
        self._answers, self._base = Rehearsal(SIZE), dict[Key, Tensor]()

    def beyond(self, got: Values | None) -> Beyond | None:
        """Return what shows it."""
        tried = self._values
        try:
            self._base = dict(self._run(tried))
            for tried, how, key in self._tries(got):  # noqa: B007 - what it has raised with
                if key is not None:
                    again = self._missing(self._run(self._values), 0)
                    return Beyond("chance", again) if again else Beyond(how, key)
        except Exception as error:
            return None if self._draw and not self._base else self._raised(error, tried)
        return None

    def _tries(self, got: Values | None) -> Iterator[tuple[Values, str, Key | None]]:
        """Yield with what it is tried next, how, and where it has missed; before that None."""
        signs, part = self._draw in _SIGNS, SIZE // (4 if self._draw in _SIGNS else 2)
        for fine in (False,) if signs else (False, True):
            orders = self._orders(fine=fine)
            for some in (slice(part), slice(SIZE - part, SIZE)):
                kept = {leaf: order[some] for leaf, order in orders.items()}
                tried = dict[Key, Tensor]()
                for key, x in self._values.items():
                    tried[key] = x
                    if self._is_cut(key, x):
                        tried[key] = _other(key, x, signs=signs)
                        tried[key][kept[key[1]]] = x[kept[key[1]]]
                if made := self._picked(self._run_if_taken(tried), kept):
                    yield tried, "others", self._missing(made, _FEW * fine, kept)
        if signs:
            return
        yield self._values, "chance", self._missing(self._run(self._values, seed=1), 0)
        some = self._leaves[self._draw % 2 :: 2]
        for numel in (0, _FEW):
            orders = self._orders(fine=False)
            orders |= {leaf: orders[leaf][:numel] for leaf in some}
            if made := self._run_if_taken(self._picked(self._values, orders)):
                yield self._values, "part", self._missing(made, numel // 2, orders)
        cut = (3 + 7 * self._draw % 11) * BLOCK
        for fine, how, ends, few in (
            (False, "place", [SIZE], 0),
            (True, "place", [SIZE], _FEW),
            (False, "part", [cut, SIZE], _FEW),
            (False, "part", [cut + 13, SIZE], None),
        ):
            orders, made, start = self._orders(fine=fine), list[Values](), 0
            for end in ends:
                tried = self._picked(self._values, {x: o[start:end] for x, o in orders.items()})
                yield tried, how, None
                made.append(self._run(tried))
                start = end
            for key, base in self._base.items():
                alike = [one[key] for one in made]
                if self._is_cut(key, base):
                    alike = [torch.cat([x.reshape(-1) for x in alike])]
                for x in alike:
                    yield self._values, how, self._missing({key: x}, few, orders)
        if got is not None and not self._answers.asked:  # of all elements, by the ranks' answers
            same = {key: x for key, x in got.items() if x.shape == self._base[key].shape}
            yield self._values, "part", self._missing(same, None)

    def _run(self, values: Values, seed: int = 0) -> Values:
        with seeded(seed, self._device), self._answers.given():
            made = self._fn({key: x.clone() for key, x in values.items()})
        if self._base and made.keys() != self._base.keys():
            raise KeyError("with other values it asks for something else")
        return made

    def _run_if_taken(self, values: Values) -> Values:
        """Run it with values that it may not take; none if it raises."""
        try:
            return self._run(values)
        except KeyError:
            raise
        except Exception:
            return {}

    def _is_cut(self, key: Key, x: Tensor) -> bool:
        return key[1] in self._leaves and x.numel() == SIZE

    def _picked(self, values: Values, places: Of) -> dict[Key, Tensor]:
        """Return these elements of each leaf."""
        return {
            k: x.reshape(-1)[places[k[1]]] if self._is_cut(k, x) else x for k, x in values.items()
        }

    def _missing(self, made: Values, few: int | None, places: Of | None = None) -> Key | None:
        """Return the first of what was made that is not as in the base; None: nothing is.

        few: how many elements may miss; None: many, or one value, on an edge of the function.
        places: of each leaf, which elements of the base these are.
        """
        for key, x in made.items():
            base = self._base[key]
            if is_cut := self._is_cut(key, base):
                base, x = self._picked({key: base}, places)[key] if places else base, x.reshape(-1)
            if base.shape != x.shape:
                return key
            if torch.equal(base, x):
                continue
            off = base[~_alike(base, x, exact=few == 0 or not is_cut)]
            on_edge = few is None and is_cut and len({*off.tolist()}) < 2
            if len(off) > is_cut * (SIZE // 4 if few is None else few) and not on_edge:
                return key
        return None

    def _raised(self, error: Exception, tried: Values) -> Beyond:
        """Return that it has raised: of the first leaf of which it does so beside empty others."""
        for leaf in self._leaves:
            alone = {k: x if k[1] in (leaf, "") else x[:0] for k, x in tried.items()}
            try:
                self._run(alone)
            except Exception:
                return Beyond("raised", ("", leaf), error)
        return Beyond("raised", ("", ", ".join(self._leaves)), error)

    def _orders(self, *, fine: bool) -> Of:
        """Return of each leaf its elements in an order of its own: by whole blocks, unless fine."""
        block, orders = 1 if fine else BLOCK, Of()
        for leaf in self._leaves:
            of = torch.arange(SIZE).view(-1, block)
            order = torch.randperm(len(of), generator=_generator(leaf, self._draw))
            orders[leaf] = of[order].view(-1).to(self._device)
        return orders


def _generator(*of: object) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(repr(of).encode()))


def _uniform(like: Tensor, *of: object) -> Tensor:
    """Return numbers between 0 and 1: [n], of the dtype of real numbers as wide as fp32."""
    drawn = torch.rand(like.shape, generator=_generator(*of), dtype=torch.float64)
    return drawn.to(like.device, torch.promote_types(like.dtype.to_real(), torch.float32))


def _other(key: Key, x: Tensor, *, signs: bool) -> Tensor:
    """Return other values in the place of x: of the same signs, or none of its sign."""
    if not (x.is_floating_point() or x.is_complex()):
        return x.clone()
    by = _uniform(x, key)
    new = x * torch.where(by < 0.5, by + 0.25, 2 * by + 0.5).to(x.dtype)
    for at, value in ((0, torch.nan), (1, torch.inf), (0.5, 0.0)) if signs else ():
        new = new.masked_fill((by - at).abs() < 1 / 16, value)
    return -new if signs else new


def _drawn(values: Values, draw: int) -> dict[Key, Tensor]:
    """Return values of another size, every other name large and the rest small; or of one sign."""
    names, found = sorted({name for name, _ in values}), dict(values)
    for key, x in values.items():
        number = not key[1] and (draw in _SIGNS or not key[0].startswith("ctx."))
        if number or not (x.is_floating_point() or x.is_complex()):
            continue
        sizes = x.abs().to(torch.promote_types(x.dtype.to_real(), torch.float32))
        there = sizes[sizes.isfinite() & (sizes != 0)]
        to = _LARGE if names.index(key[0]) % 2 == draw % 2 else _SMALL
        if draw in _SIGNS:
            found[key] = (_SIGNS[draw] * torch.where(sizes == 0, 1, sizes)).to(x.dtype)
        elif there.numel():
            by = (0.5 + 1.5 * _uniform(x, key, draw)) * (to / there.mean())
            found[key] = (x * by).to(x.dtype)
    return found


def _alike(a: Tensor, b: Tensor, *, exact: bool) -> Tensor:
    """Return which elements are equal, or NaN in both; or, not `exact`, a few ulps apart."""
    same = (a == b) | ((a != a) & (b != b))
    if exact or not (a.is_floating_point() or a.is_complex()):
        return same
    return same | (
        (a - b).abs() <= _ULPS * torch.finfo(a.dtype).eps * torch.maximum(a.abs(), b.abs())
    )


def require_unaccused(lines: Sequence[str], axis: Axis, *, what: str) -> None:
    """Raise `LayoutError` on every rank where any has an accusation. A collective.

    lines: the accusation, "" for none; and what else ranks must have in common.
    """

    def error_in(_: object, *some: str) -> LayoutError | None:
        return next((LayoutError(x[len(_TAG) :]) for x in some if x.startswith(_TAG)), None)

    # The first line that differs is an accusation, where there is one.
    own = [_TAG + lines[0]] if lines[0] else ["no error", *lines[1:]]
    error = error_in(None, own[0])
    assert_same_everywhere(own, axis, what=what, explains=error_in)
    if error is not None:
        raise error


_TAG = "accused: "
_SEEN = {
    "others": "what it made for some elements of {} changed with the values of others",
    "chance": "called again, it made other values for {}",
    "place": "elements of {} at other places got other results",
    "part": "of parts of {} it made something else than of all of it",
    "raised": "given another number of elements of {}, it raised ",
}
_CAUSES = {
    True: "random numbers of torch, or a count that it keeps elsewhere: they would be others at "
    "each stage and on each number of ranks.",
    False: "a mean, a norm, a maximum, a sort, a number of elements (numel) or an index of what "
    "this rank has: that is a part of each leaf, another one at another stage or on other numbers "
    "of ranks; or another leaf, or a tensor of its own.",
}


def accusation(who: str, found: Beyond, ways: str) -> str:
    """Return the text of the error for a function that looks at more than single elements.

    ways: what to do in its place.
    """
    (name, leaf), raised = found.key, found.error
    of = f"{leaf} ({name})" if leaf and name else leaf or name
    seen = _SEEN[found.how].format(of) + (f"{type(raised).__name__}: {raised}" if raised else "")
    cause = _CAUSES[found.how == "chance"]
    return explain(f"{who} looks at more than single elements: {seen}.", cause=cause, fix=ways)
