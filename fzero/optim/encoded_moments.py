"""One update of flats that live anywhere, in any dtype or code.

Where everything is as it is stepped, one call steps all of it in place. Else one flat is stepped
after the other, in copies: the next is on its way here, and the one before on its way back.

    row of a flat -> a piece of it, decoded -> the rule's own kernel -> encoded -> the row

Each block of an encoded state is encoded by itself, and in its layout leaves and shards consist of
whole blocks: so the bytes are those of any stage and any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain
from math import lcm
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.machine.blocks import Blocks
from fzero.machine.codecs import rounded
from fzero.machine.offload import CopyStream, is_here, write_back
from fzero.optim.precision import Precision, as_stepped
from fzero.optim.rules import Scaled, noise_of
from fzero.state.layout import BLOCK, Leaf
from fzero.state.stateful_update import Piece

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
    every = [*flats.params, *flats.grads, *flats.masters, *chain(*flats.slots.values())]
    lives_here = device is None or all(is_here(x, device) for x in every if x.numel())
    if not flats.params or (lives_here and not precision.streams):
        work = [flats.steps(i) for i in range(len(flats.params))]
        grads, scaled = as_stepped(flats.grads, work, scaled, owned=owned)
        slots = run(Portion(numbers, work, grads, flats.slots, scaled))
        for i in range(len(work)):
            written_back(flats, i, work[i])
        return slots
    made = {name: list(some) for name, some in flats.slots.items()}
    copies = CopyStream(device or flats.params[0].device)
    for i, work, grad, slots in _lent(flats, precision, copies):
        grads, left = as_stepped([grad], [work], scaled, owned=owned or grad is not flats.grads[i])
        codecs = flats.codecs[i] if flats.codecs else {}
        rows = {name: slots[name] for name in codecs}
        for name, codec in codecs.items():
            slots[name] = codec.decode((rows[name],), work.numel(), work.dtype)
        given = {name: [x] for name, x in slots.items()}
        after = run(Portion([numbers[i]], [work], grads, given, left))
        noise = None
        if precision.stochastic_rounding and flats.params[i].dtype is torch.bfloat16:
            noise = noise_of([p for p in pieces if p.index == numbers[i]], work, count)
        written_back(flats, i, work, noise)
        changed = [(flats.masters[i], work)] if flats.masters[i].numel() else []
        for name, x in slots.items():
            if name in codecs:
                row, skipped = codecs[name].row_of(after[name][0], count), scaled.found_inf
                if skipped is not None:
                    row = torch.where(skipped != 0, rows[name], row)
                changed.append((flats.slots[name][i], row))
            elif after[name][0] is x:
                changed.append((flats.slots[name][i], x))
            else:  # of another shape: it stays on the device
                made[name][i] = after[name][0]
        copies.store(changed)
    copies.end()
    return made


def counted(count: Tensor, found_inf: Tensor | None) -> Tensor:
    """Return the number of updates after one, which `found_inf` may have skipped."""
    if found_inf is None:
        return count + 1
    return count.to(found_inf.device) + (1 - found_inf).to(count.dtype)


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
        work, grad, *slots = coming.pop()()
        if following is not None:
            coming.append(copies.fetch(fetch(following)))
        yield i, work, grad, dict(zip(names, slots, strict=True))


def written_back(flats: Flats, i: int, work: Tensor, noise: Tensor | None = None) -> None:
    """Round what was stepped into the parameters, if it is not the parameters themselves."""
    if work is not flats.params[i] and work.numel():
        write_back(flats.params[i], work if noise is None else rounded(work, noise))


PIECE, PIECE_OF_CPU = 2**22, 2**20
"""Elements that are decoded at once: on a GPU launches cost more, and on a CPU caches are small."""

CodecOf = Callable[[Leaf, str], Blocks | None]
"""(leaf, name of a slot) -> what encodes it."""


def begun(codec: Blocks | None, like: Tensor, fill: float, dtype: torch.dtype) -> Tensor:
    """Return a slot of a flat before the first step: the row of such numbers, or they."""
    if codec is None or not like.numel():
        return torch.full_like(like, fill, dtype=dtype, requires_grad=False)
    row = like.new_empty(codec.wire_bytes(like.numel()), dtype=torch.uint8, requires_grad=False)
    return codec.fill(row, fill)


def leaves_of_flats(params: Sequence[Tensor], pieces: Sequence[Piece]) -> dict[int, Leaf]:
    """Return a leaf of each flat; without pieces a flat is a leaf."""
    if pieces:
        return {piece.index: piece.leaf for piece in pieces}
    return {
        i: Leaf(path=str(i), shape=tuple(p.shape), dtype=p.dtype, trainable=True)
        for i, p in enumerate(params)
    }


def in_portions(
    flats: Flats, pieces: Sequence[Piece], codec_of: CodecOf, unused: Collection[str] = ()
) -> tuple[Flats, list[Piece]]:
    """Return parts of flats, views that are stepped one after the other, and what is in each.

    Of those with encoded slots, at most so many elements, and nothing of leaves that are `unused`:
    their bytes stay. Others are whole.
    """
    leaves, placed = leaves_of_flats(flats.params, pieces), list[Piece]()
    params, grads, masters = list[Tensor](), list[Tensor](), list[Tensor]()
    slots: dict[str, list[Tensor]] = {name: [] for name in flats.slots}
    codecs = list[Mapping[str, Blocks]]()
    for i, p in enumerate(flats.params):
        if i not in leaves:
            continue  # of another rule
        own = [x for x in pieces if x.index == i] or [Piece(i, leaves[i], 0, p.numel())]
        by = {
            name: codec
            for name, some in flats.slots.items()
            if some[i].numel() and (codec := codec_of(leaves[i], name)) is not None
        }
        for start, stop in _spans(p, own, by, unused) if by else [(0, p.numel())]:

            def of(x: Tensor, codec: Blocks | None = None, span: Any = (start, stop)) -> Tensor:
                if not (by and x.numel()):  # noqa: B023 - called here
                    return x
                low, high = span if codec is None else map(codec.wire_bytes, span)
                return x.view(-1)[low:high]

            for one in own:
                low, high = max(one.start, start), min(one.stop, stop)
                if low < high or start == stop:
                    span, first = (low - start, high - start), one.first + low - one.start
                    placed.append(Piece(len(params), one.leaf, *span, first))
            params.append(of(p))
            grads.append(of(flats.grads[i]))
            masters.append(of(flats.masters[i]))
            codecs.append(by)
            for name, some in flats.slots.items():
                slots[name].append(of(some[i], by.get(name)))
    return Flats(params, grads, masters, slots, codecs=codecs), placed


def _spans(
    flat: Tensor, own: Sequence[Piece], codecs: Mapping[str, Blocks], unused: Collection[str]
) -> Iterator[tuple[int, int]]:
    """Yield what of a flat is stepped at once: whole blocks."""
    block = lcm(BLOCK, *(codec.block for codec in codecs.values()))
    size = PIECE_OF_CPU if flat.device.type == "cpu" else PIECE
    step = max(size // block, 1) * block
    runs: list[list[int]] = []
    for piece in own:
        if piece.leaf.path in unused:
            continue
        if runs and runs[-1][1] == piece.start:
            runs[-1][1] = piece.stop
        else:
            runs.append([piece.start, piece.stop])
    for low, high in runs:
        yield from ((start, min(start + step, high)) for start in range(low, high, step))
