"""One update of flats that live anywhere, in any dtype: stepped where, and in what, they should be.

Where everything is as it is stepped, one call steps all of it in place. Else one flat is stepped
after the other, in copies: the next is on its way here, and the one before on its way back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fzero.machine.offload import CopyStream, is_here, write_back
from fzero.machine.rows import Blocks
from fzero.optim._piece import Piece
from fzero.optim._precision import Precision
from fzero.optim._rounding import noise_of, rounded
from fzero.optim._rules import Scaled
from fzero.optim.masters import as_stepped

Slots = Mapping[str, Sequence[Tensor]]


class Flats(NamedTuple):
    """What one update reads and writes, parallel to the list of flats."""

    params: Sequence[Tensor]
    grads: Sequence[Tensor]
    masters: Sequence[Tensor]  # empty where there is none
    slots: Slots
    numbers: Sequence[int] = ()  # by which pieces know them; (): their places
    codecs: Sequence[Mapping[str, Blocks]] = ()  # of each: what its slots are encoded by, if any is

    def steps(self, i: int) -> Tensor:
        """Return what is stepped of flat `i`: its master, if it has one."""
        return self.masters[i] if self.masters[i].numel() else self.params[i]


class Portion(NamedTuple):
    """Some flats, as a kernel steps them: in place."""

    indices: Sequence[int]  # the numbers of the flats
    work: list[Tensor]
    grads: list[Tensor]
    slots: Slots
    scaled: Scaled


Run = Callable[[Portion], Slots]
"""Steps a portion in place; returns its slots, others where a rule has made them anew."""


def step_flats(
    flats: Flats,
    run: Run,
    *,
    precision: Precision,
    device: torch.device | None,
    scaled: Scaled,
    owned: bool,
    pieces: Sequence[Piece],
    count: Tensor,
) -> Slots:
    """Step all flats in place; return the slots.

    device: where to compute, if anything may live elsewhere; None: all is with the parameters.
    owned: gradients may be written to.
    """
    numbers = flats.numbers or range(len(flats.params))
    if _is_here(flats, precision, device):
        work = [flats.steps(i) for i in range(len(flats.params))]
        grads, scaled = as_stepped(flats.grads, work, scaled, owned=owned)
        slots = run(Portion(numbers, work, grads, flats.slots, scaled))
        for i in range(len(work)):
            written_back(flats, i, work[i])
        return slots
    made = {name: list(some) for name, some in flats.slots.items()}
    copies = CopyStream(device or flats.params[0].device)
    for i, work, grad, slots in _lent(flats, precision, copies):
        grads, told = as_stepped([grad], [work], scaled, owned=owned or grad is not flats.grads[i])
        codecs = flats.codecs[i] if flats.codecs else {}
        rows = {name: slots[name] for name in codecs}
        for name, codec in codecs.items():
            slots[name] = codec.decode((rows[name],), work.numel(), work.dtype)
        given = {name: [x] for name, x in slots.items()}
        after = run(Portion([numbers[i]], [work], grads, given, told))
        noise = None
        if precision.stochastic_rounding and flats.params[i].dtype is torch.bfloat16:
            noise = noise_of([p for p in pieces if p.index == numbers[i]], work, count)
        written_back(flats, i, work, noise)
        changed = [(flats.masters[i], work)] if flats.masters[i].numel() else []
        for name, x in slots.items():
            if name in codecs:
                row = codecs[name].row_of(after[name][0], count)
                changed.append((flats.slots[name][i], _unless(scaled.found_inf, rows[name], row)))
            elif after[name][0] is x:
                changed.append((flats.slots[name][i], x))
            else:  # of another shape: it stays on the device
                made[name][i] = after[name][0]
        copies.store(changed)
    copies.end()
    return made


def _unless(skipped: Tensor | None, before: Tensor, after: Tensor) -> Tensor:
    return after if skipped is None else torch.where(skipped != 0, before, after)


def counted(count: Tensor, found_inf: Tensor | None) -> Tensor:
    """Return the number of updates after one, which `found_inf` may have skipped."""
    if found_inf is None:
        return count + 1
    return count.to(found_inf.device) + (1 - found_inf).to(count.dtype)


def _is_here(flats: Flats, precision: Precision, device: torch.device | None) -> bool:
    """Whether everything is on the device, in memory, and in the dtype in which it is stepped."""
    if precision.streams:
        return not flats.params
    if device is None:
        return True
    slots = [x for some in flats.slots.values() for x in some]
    every = [*flats.params, *flats.grads, *flats.masters, *slots]
    return all(is_here(x, device) for x in every if x.numel())


def _lent(
    flats: Flats, precision: Precision, copies: CopyStream
) -> Iterator[tuple[int, Tensor, Tensor, dict[str, Tensor]]]:
    """Each flat as it is stepped: (its index, what is stepped, its gradient, its slots)."""
    names = list(flats.slots)
    indices = [i for i, p in enumerate(flats.params) if p.numel()]

    def fetch(i: int) -> list[tuple[Tensor, torch.dtype]]:
        stepped = precision.stepped(flats.params[i].dtype)
        slots = [flats.slots[name][i] for name in names]
        dtypes = [stepped if x.dtype is precision.state_dtype else x.dtype for x in slots]
        given = [(flats.steps(i), stepped), (flats.grads[i], flats.grads[i].dtype)]
        return [*given, *zip(slots, dtypes, strict=True)]

    coming = [copies.fetch(fetch(i)) for i in indices[:1]]
    for i, following in zip(indices, [*indices[1:], None], strict=True):
        work, grad, *slots = coming.pop().wait()
        if following is not None:
            coming.append(copies.fetch(fetch(following)))
        yield i, work, grad, dict(zip(names, slots, strict=True))


def written_back(flats: Flats, i: int, work: Tensor, noise: Tensor | None = None) -> None:
    """Round what was stepped into the parameters, if it is not the parameters themselves."""
    if work is not flats.params[i] and work.numel():
        write_back(flats.params[i], work if noise is None else rounded(work, noise))
