"""One update out of place: by formulas, which torch.func maps, or recorded as one op."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.machine.offload import to_device
from fzero.optim._precision import Precision
from fzero.optim._rules import Rule
from fzero.optim._stream import Flats
from fzero.optim.recorded import is_one_op, update_by_op

Span = tuple[int, int, int]
"""(number of a flat, start, stop)."""


class Chosen(NamedTuple):
    """What is updated by the same options."""

    options: dict[str, Any]
    spans: list[Span]
    counted_by: list[int]  # of each span: the number of its counter


Moments = tuple[tuple[Tensor, ...], ...]

_Part = tuple[int, Tensor, tuple[Tensor, ...]]
"""(start, values, those of each moment): of one flat."""


def step_by_formula(
    rule: Rule,
    flats: Flats,
    by_options: Sequence[Chosen],
    *,
    precision: Precision,
    device: torch.device | None,
    counts: Sequence[Tensor],
) -> tuple[list[Tensor], Moments, tuple[Tensor, ...]]:
    """Return (params', moments', masters'), each where, and in the dtype in which, it was.

    by_options: what is updated; all else stays. counts: by number, the updates before this one.
    """
    stepped = [precision.stepped(p.dtype) for p in flats.params]

    def here(some: Sequence[Tensor]) -> list[Tensor]:
        pairs = zip(some, stepped, strict=True)
        return [to_device(x, device or x.device, dtype) for x, dtype in pairs]

    work = here([flats.steps(i) for i in range(len(flats.params))])
    grads, moments = here(flats.grads), [here(some) for some in flats.slots.values()]
    update = update_by_op if is_one_op(rule, [*work, *grads]) else _update_each
    parts: list[list[_Part]] = [[] for _ in work]
    for options, spans, counted_by in by_options:
        for number in dict.fromkeys(counted_by):
            own = [span for span, k in zip(spans, counted_by, strict=True) if k == number]
            ps, gs, *ms = (elements_of(some, own) for some in (work, grads, *moments))
            new_ps, new_ms = update(rule, ps, gs, ms, counts[number], options)
            for k, (i, start, _) in enumerate(own):
                parts[i].append((start, new_ps[k], tuple(some[k] for some in new_ms)))
    joined = [
        _join(_filled(part, w, [some[i] for some in moments]))
        for i, (part, w) in enumerate(zip(parts, work, strict=True))
    ]
    new = [n.to(p.device, p.dtype) for p, (n, _) in zip(flats.params, joined, strict=True)]
    after = tuple(
        tuple(n[k].to(m.device, m.dtype) for (_, n), m in zip(joined, some, strict=True))
        for k, some in enumerate(flats.slots.values())
    )
    masters = tuple(
        n.to(m.device) if m.numel() else m for (n, _), m in zip(joined, flats.masters, strict=True)
    )
    return new, after, masters


def _update_each(
    rule: Rule,
    params: list[Tensor],
    grads: list[Tensor],
    moments: Sequence[list[Tensor]],
    count: Tensor,
    options: dict[str, Any],
) -> tuple[list[Tensor], list[list[Tensor]]]:
    # A tensor, so that a traced step does not freeze it; fp64, as Python's own numbers are.
    number = (count + 1).double()
    made = [
        rule.formula(p, g, tuple(ms), number, options)
        for p, g, *ms in zip(params, grads, *moments, strict=True)
    ]
    return [p for p, _ in made], [[ms[k] for _, ms in made] for k in range(len(moments))]


def elements_of(flats: Sequence[Tensor], spans: Sequence[Span]) -> list[Tensor]:
    """Return the elements of each span: views, or a flat itself if it is all of it."""
    return [
        flats[i] if stop - start == flats[i].numel() else flats[i].view(-1)[start:stop]
        for i, start, stop in spans
    ]


def _filled(parts: list[_Part], work: Tensor, moments: Sequence[Tensor]) -> list[_Part]:
    """Return the parts of one flat in order, with what this update leaves as it is."""
    if not parts:
        return [(0, work, tuple(moments))]

    def kept(start: int, stop: int) -> _Part:
        held, *more = (x.view(-1)[start:stop] for x in (work, *moments))
        return start, held, tuple(more)

    found: list[_Part] = []
    at = 0
    for part in sorted(parts, key=lambda part: part[0]):
        found += [kept(at, part[0])] if at < part[0] else []
        found.append(part)
        at = part[0] + part[1].numel()
    return [*found, kept(at, work.numel())] if at < work.numel() else found


def _join(parts: list[_Part]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Put the pieces of one tensor together again."""
    if len(parts) == 1:
        return parts[0][1], parts[0][2]
    moments = zip(*(part[2] for part in parts), strict=True)
    return torch.cat([part[1] for part in parts]), tuple(torch.cat(list(m)) for m in moments)
