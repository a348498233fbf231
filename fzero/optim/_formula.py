"""One update by formulas, which torch.func differentiates, maps and traces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fzero.homes import lent
from fzero.optim._precision import Precision
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
    # A tensor, so that a traced step does not freeze it; fp64, as Python's own numbers are.
    number = (count + 1).double()
    stepped = [precision.stepped(p.dtype) for p in flats.params]

    def here(some: Sequence[Tensor]) -> list[Tensor]:
        pairs = zip(some, stepped, strict=True)
        return [lent(x, device or x.device, dtype) for x, dtype in pairs]

    work = here([flats.steps(i) for i in range(len(flats.params))])
    grads, moments = here(flats.grads), [here(some) for some in flats.slots.values()]
    parts: list[list[tuple[int, Tensor, tuple[Tensor, ...]]]] = [[] for _ in work]
    for options, spans in by_options:
        for i, start, stop in spans:
            every = [work[i], grads[i], *(some[i] for some in moments)]
            if stop - start < work[i].numel():
                every = [x[start:stop] for x in every]
            p, g, *ms = every
            parts[i].append((start, *rule.formula(p, g, tuple(ms), number, options)))
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


def _join(parts: list[tuple[int, Tensor, tuple[Tensor, ...]]]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Put the pieces of one tensor together again, in order."""
    parts = sorted(parts, key=lambda part: part[0])
    if len(parts) == 1:
        return parts[0][1], parts[0][2]
    moments = zip(*(part[2] for part in parts), strict=True)
    return torch.cat([part[1] for part in parts]), tuple(torch.cat(list(m)) for m in moments)
