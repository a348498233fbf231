"""One update out of place: by formulas, which torch.func maps, or recorded as one op."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fzero.homes import lent
from fzero.optim._precision import Precision
from fzero.optim._recorded import is_one_op, update_by_op
from fzero.optim._rules import Rule
from fzero.optim._stream import Flats

Span = tuple[int, int, int]
"""(number of a flat, start, stop)."""

Moments = tuple[tuple[Tensor, ...], ...]


def step_by_formula(
    rule: Rule,
    flats: Flats,
    by_options: Sequence[tuple[dict[str, Any], Sequence[Span]]],
    *,
    precision: Precision,
    device: torch.device | None,
    count: Tensor,
) -> tuple[list[Tensor], Moments, tuple[Tensor, ...]]:
    """Return (params', moments', masters'), each where, and in the dtype in which, it was.

    by_options: the options, and what is updated by them. count: updates before this one.
    """
    stepped = [precision.stepped(p.dtype) for p in flats.params]

    def here(some: Sequence[Tensor]) -> list[Tensor]:
        pairs = zip(some, stepped, strict=True)
        return [lent(x, device or x.device, dtype) for x, dtype in pairs]

    work = here([flats.steps(i) for i in range(len(flats.params))])
    grads, moments = here(flats.grads), [here(some) for some in flats.slots.values()]
    update = update_by_op if is_one_op(rule, [*work, *grads]) else _update_each
    parts: list[list[tuple[int, Tensor, tuple[Tensor, ...]]]] = [[] for _ in work]
    for options, spans in by_options:
        every = (work, grads, *moments)
        ps, gs, *ms = (cut(some, spans) for some in every)
        new_ps, new_ms = update(rule, ps, gs, ms, count, options)
        for k, (i, start, _) in enumerate(spans):
            parts[i].append((start, new_ps[k], tuple(some[k] for some in new_ms)))
    joined = [
        _join(part) if part else (w, tuple(some[i] for some in moments))
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


def cut(flats: Sequence[Tensor], spans: Sequence[Span]) -> list[Tensor]:
    """Return the elements of each span: views, or a flat itself if it is all of it."""
    return [
        flats[i] if stop - start == flats[i].numel() else flats[i].view(-1)[start:stop]
        for i, start, stop in spans
    ]


def _join(parts: list[tuple[int, Tensor, tuple[Tensor, ...]]]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Put the pieces of one tensor together again, in order."""
    parts = sorted(parts, key=lambda part: part[0])
    if len(parts) == 1:
        return parts[0][1], parts[0][2]
    moments = zip(*(part[2] for part in parts), strict=True)
    return torch.cat([part[1] for part in parts]), tuple(torch.cat(list(m)) for m in moments)
