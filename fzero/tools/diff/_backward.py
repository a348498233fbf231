"""Compare a forward and a backward of two runs: gathered values, losses, gradients."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fzero.machine.by_path import leaf_paths
from fzero.tools.compare import TERMS, Copy, Found, Spread, disturbed_bound, first_apart, whole_leaf
from fzero.tools.diff._difference import GATHER, GRADIENT, LOSS, MODULE
from fzero.tools.diff._modules import Divergence, first_difference
from fzero.tools.diff._pair import SidePair
from fzero.tools.diff._side import Apart, Beside, Side, summed


def gathers(pair: SidePair) -> Iterator[Apart]:
    """Compare the full values that a rank gathered with the shards of the same run."""
    for side in (pair.b, pair.a):
        for apart in _gathers(side, pair.units.passes):
            found = apart.found
            turned = found._replace(a=found.b, b=found.a) if side is pair.a else found
            yield apart._replace(found=turned)


def _gathers(side: Side, unit: float) -> Iterator[Apart]:
    held = side.params[0]
    layout, names = side.setup.layout, leaf_paths(side.setup.layout)
    for rank, seen in enumerate(side.seen):
        for backward, index, flat in seen.gathered:
            group = layout.groups[index]
            for leaf, offset in zip(group.leaves, group.offsets, strict=True):
                if not layout.leaves[leaf].numel:
                    continue
                own = Copy(rank, 0, flat[offset : offset + layout.leaves[leaf].numel].cpu())
                read = Spread(shape=layout.leaves[leaf].stored_shape, copies=(own,))
                wanted = held[names[leaf]]
                bound = TERMS * unit * wanted.full.double().abs().max()
                found = first_apart(wanted, read, bound)
                if found is not None:
                    yield Apart(GATHER, names[leaf], found._replace(ranks=(rank,)), backward + 1)


def losses(pair: SidePair) -> Iterator[Apart]:
    """Compare the sums of the losses that are differentiated."""
    made = [one for side in (pair.a, pair.b) for seen in side.seen for one in seen.backwards]
    if any(one.loss is None for one in made):  # gradients by hand: they are compared alone
        return
    mine, other, twin = (side.loss_terms() for side in pair.sides)
    a, b, c = (summed(terms, ()) for terms in (mine, other, twin))
    found = first_apart(
        whole_leaf(a), whole_leaf(b), disturbed_bound(a, c) + pair.of_terms([*mine, *other], ())
    )
    if found is not None:
        yield _blamed(pair, LOSS, "", found)


def summed_gradients(pair: SidePair) -> Iterator[Apart]:
    """Compare the sums of the ranks' local gradients, leaf by leaf."""
    found = list(_gradients_apart(pair))
    if found:
        differ = tuple(one.path for one in found)
        agree = tuple(path for path in pair.in_backward() if path not in differ)
        blamed = _blamed(pair, GRADIENT, found[0].path, found[0].found)
        is_forward = blamed.kind == MODULE
        yield blamed if is_forward else blamed._replace(beside=Beside(agree, differ))


def _gradients_apart(pair: SidePair) -> Iterator[Apart]:
    mine, other, twin = (side.gradient_terms for side in pair.sides)
    for path, shape in pair.in_backward().items():
        numel = torch.Size(shape).numel()
        a, b, c = (summed(some.get(path, []), (numel,)) for some in (mine, other, twin))
        bound = disturbed_bound(a, c) + pair.of_sum(path, (numel,))
        found = first_apart(whole_leaf(a.view(shape)), whole_leaf(b.view(shape)), bound)
        if found is not None:
            yield Apart(GRADIENT, path, found)


def _blamed(pair: SidePair, operation: str, path: str, found: Found) -> Apart:
    """Return the difference with module, backward and ranks, if both runs have the same ones."""
    apart = _on_ranks(pair, operation, path, found)
    return _module(pair, apart) or apart


def _on_ranks(pair: SidePair, operation: str, path: str, found: Found) -> Apart:
    counts = [[len(seen.backwards) for seen in side.seen] for side in (pair.a, pair.b)]
    if len(counts[0]) != len(counts[1]) or pair.a.divisor != pair.b.divisor:
        return Apart(operation, path, found)
    both = [min(two) for two in zip(*counts, strict=True)]
    for backward in range(max(map(max, counts))):
        terms = [_terms_at(side, path, backward) for side in pair.sides]
        some = []
        for rank, (a, b, c) in enumerate(zip(*terms, strict=True)):
            bound = disturbed_bound(a, c) + pair.of_terms([a, b], a.shape).reshape(-1)
            apart = first_apart(whole_leaf(a), whole_leaf(b), bound)
            if apart is not None:
                some.append((rank, apart))
        if some and counts[0] != counts[1] and backward < both[some[0][0]]:
            break  # they go through the data in other parts
        if some:
            ranks = tuple(rank for rank, _ in some)
            return Apart(operation, path, some[0][1]._replace(ranks=ranks), backward + 1)
    return Apart(operation, path, found)


def _module(pair: SidePair, apart: Apart) -> Apart | None:
    """Return the first module whose output differs, if a loss or a gradient differs."""
    number = apart.backward
    if number is None:
        return None
    found: list[tuple[int, Divergence]] = []
    for rank in apart.found.ranks:
        backwards = [side.seen[rank].backwards for side in pair.sides]
        if all(len(some) >= number for some in backwards):
            trails = [some[number - 1].trail for some in backwards]
            one = first_difference(*trails, unit=pair.units.passes)
            found += [(rank, one)] if one else []
    if not found:
        return None
    first = min((one for _, one in found), key=lambda one: one.place)
    ranks = tuple(rank for rank, one in found if one.place == first.place)
    operation = MODULE if first.into is None else f"{MODULE}, where it calls {first.into}"
    return Apart(operation, first.path, first.found._replace(ranks=ranks), number)


def _terms_at(side: Side, path: str, backward: int) -> list[Tensor]:
    """Return each rank's term of the loss, or of a leaf's gradient; 0 if it has none."""
    layout = side.setup.layout
    leaf = leaf_paths(layout).index(path) if path else -1
    zeros = torch.zeros(layout.leaves[leaf].stored_shape if path else (), dtype=torch.float64)
    found = []
    for seen in side.seen:
        one = seen.backwards[backward] if backward < len(seen.backwards) else None
        term = None
        if one is not None and path:
            term = one.gradients.get(leaf)
        elif one is not None and one.loss is not None:
            term = one.loss * one.weight
        found.append(zeros if term is None else term)
    return found
