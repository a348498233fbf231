"""Which rank computes the update of which whole parameter, and the exchange with the even shards.

    shards [l] of each rank  - one all-to-all for a batch ->  whole parameters of their owners
                                                                  | the owners compute
    shards [l] of each rank  <- one all-to-all for a batch -  whole results of the owners

Owners are a pure function of the layout, and of how much the rule keeps of each parameter; they are
balanced by what they compute and by what they keep. Parameters, gradients and what is elementwise
stay in flats that are cut evenly; the exchange of the next batch runs beside the computation of
this one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from fzero.collectives import InFlight, start_uneven_all_to_all
from fzero.machine.offload import to_device, write_back
from fzero.ranks.mesh import Axis
from fzero.state import Layout, Placement, Setup
from fzero.state.layout import Leaf

# Which rank owns which parameter, and which are exchanged together: pure functions of sizes.

BATCH_NUMEL = 2**23
"""Elements that a rank gets whole at once, unless a parameter alone is larger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedLeaf:
    """A parameter whose update is computed whole, by one rank."""

    leaf: Leaf
    index: int  # of the leaf in the layout
    position: int  # of its flat, among those that learn
    offset: int  # of its first element in the full flat
    owner: int  # a rank of the axis over which flats are cut


def cost_of(shape: Sequence[int]) -> int:
    """Return what a Newton-Schulz iteration costs: min^2 max, of a parameter as a matrix.

    Example:
        >>> cost_of((3, 2, 2)), cost_of((5,))
        (36, 5)
    """
    rows, columns = (shape[0], prod(shape[1:])) if shape else (1, 1)
    return min(rows, columns) ** 2 * max(rows, columns)


def assign(costs: Sequence[int], ranks: int, kept: Sequence[int] = ()) -> list[int]:
    """Return the owner of each parameter: the largest first, to the rank that has least.

    What a rank has is the larger of its shares of all that is computed and of all that is kept.
    Without `kept` no rank computes more than the mean and (1 - 1 / ranks) of the largest cost.

    Args:
        costs: what the update of each parameter costs.
        ranks: how many there are.
        kept: elements that its owner keeps of each parameter; () for none.

    Example:
        >>> assign([4, 9, 5], 2)
        [1, 0, 1]
        >>> assign([4, 4, 4, 4], 2, [9, 9, 1, 1]), assign([9, 9, 1, 1], 2, [4, 4, 4, 4])
        ([0, 1, 0, 1], [0, 1, 0, 1])
    """
    kept = kept or [0] * len(costs)
    # As whole numbers: shares of two sums, times both sums.
    computed, held = sum(costs) or 1, sum(kept) or 1
    sizes = [(c * held, k * computed) for c, k in zip(costs, kept, strict=True)]
    load, owners = [(0, 0)] * ranks, [0] * len(costs)

    def with_one(rank: int, i: int) -> tuple[int, int]:
        return load[rank][0] + sizes[i][0], load[rank][1] + sizes[i][1]

    for i in sorted(range(len(costs)), key=lambda i: (-max(sizes[i]), -sum(sizes[i]))):
        owners[i] = min(range(ranks), key=lambda rank: (max(with_one(rank, i)), sum(load[rank])))
        load[owners[i]] = with_one(owners[i], i)
    return owners


def nearest(
    owners: Sequence[int], places: Sequence[tuple[int, int, int]], parts: Sequence[int]
) -> list[int]:
    """Return the owners with all ranks moved on by one number, so that they hold the most.

    Over all such numbers they hold 1 / W of the elements, in the mean: at the best one no less. So
    at most (W - 1) / W of the elements cross ranks to their owners.

    Args:
        owners: of each parameter.
        places: of each: where it begins in its flat, its elements, those of a part of the flat.
        parts: which part each rank has; () if each has everything.

    Example:
        >>> nearest([0, 1], [(0, 4, 4), (4, 4, 4)], [1, 0])  # rank 0 has the second part
        [1, 0]
    """
    held, rank_of = [0] * (len(parts) or 1), {part: rank for rank, part in enumerate(parts)}
    for owner, (offset, numel, length) in zip(owners, places, strict=True) if parts else ():
        for part in range(offset // length, (offset + numel - 1) // length + 1):
            here = min(offset + numel, (part + 1) * length) - max(offset, part * length)
            held[(rank_of[part] - owner) % len(parts)] += here
    on = held.index(max(held))
    return [(owner + on) % len(parts) if parts else owner for owner in owners]


def batches_of(leaves: Sequence[OwnedLeaf], ranks: int) -> Iterator[tuple[int, ...]]:
    """Yield batches in which every owner has something to compute, as long as it can."""
    left = [[k for k, one in enumerate(leaves) if one.owner == rank] for rank in range(ranks)]
    batch: list[int] = []
    held = [0] * ranks
    for turn in range(max(map(len, left), default=0)):
        taken = [(rank, own[turn]) for rank, own in enumerate(left) if turn < len(own)]
        if batch and any(held[r] + leaves[k].leaf.numel > BATCH_NUMEL for r, k in taken):
            yield tuple(sorted(batch))
            batch, held = [], [0] * ranks
        for rank, k in taken:
            batch.append(k)
            held[rank] += leaves[k].leaf.numel
    if batch:
        yield tuple(sorted(batch))


Item = tuple[int, int]
"""(number of a parameter, number of a list of flats)."""
Wholes = Mapping[int, list[Tensor]]
"""{number of a parameter: the whole of it, flat, from each list of flats}."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owners:
    """Who owns what, the same on every rank.

    fulls: the whole parameters that this rank has, where it has them: these cross no rank.
    """

    axis: Axis  # the ranks that have different parts, or all of them where each has everything
    leaves: tuple[OwnedLeaf, ...]
    batches: tuple[tuple[int, ...], ...]  # numbers of leaves that are exchanged together
    parts: tuple[int, ...]  # which part of a flat each rank of the axis has; () if all of it
    lengths: tuple[int, ...]  # elements that a rank has of each flat
    fulls: Sequence[Tensor] = ()
    device: torch.device | None = None  # where owners compute; None: where the shards are
    only: frozenset[int] | None = None  # the flats of one rule of several; None: all of them
    kept: tuple[int, ...] = ()  # elements that is kept of each parameter by its owner

    def loads(self) -> list[tuple[int, int]]:
        """Return of each rank of the axis what its updates cost, and the elements that it keeps."""
        found = [(0, 0)] * self.axis.size
        for one, kept in zip(self.leaves, self.kept, strict=True):
            cost, held = found[one.owner]
            found[one.owner] = cost + cost_of(one.leaf.shape), held + kept
        return found

    @property
    def positions(self) -> frozenset[int]:
        """The flats whose parameters are updated by owners."""
        every = frozenset(one.position for one in self.leaves)
        return every if self.only is None else every & self.only

    @property
    def mine(self) -> list[int]:
        """The numbers of the parameters that this rank owns."""
        rank = self.axis.rank
        return [k for k, one in enumerate(self.leaves) if one.owner == rank and self.has(one)]

    def has(self, one: OwnedLeaf) -> bool:
        """Whether a parameter is among those of these flats."""
        return self.only is None or one.position in self.only

    def of(self, positions: Iterable[int]) -> Owners:
        """Return the owners of the parameters in some flats; all keep their numbers."""
        own = frozenset(positions)
        kept = ([k for k in b if self.leaves[k].position in own] for b in self.batches)
        return replace(self, only=own, batches=tuple(tuple(batch) for batch in kept if batch))

    def at(self, fulls: Sequence[Tensor], device: torch.device) -> Owners:
        """Return the owners for an update on a device, in which this rank has `fulls` whole."""
        return replace(self, fulls=fulls, device=device)

    def rank_of(self, rank: int) -> int:
        """Return the place on the axis of owners of a rank, among all ranks of the mesh."""
        return rank // self.axis.stride % self.axis.size

    def span(self, number: int, rank: int) -> tuple[int, int]:
        """Return which elements of a parameter a rank of the axis has in its shard."""
        one = self.leaves[number]
        if not self.parts:
            return 0, one.leaf.numel
        length = self.lengths[one.position]
        low = self.parts[rank] * length - one.offset
        start, stop = max(low, 0), min(low + length, one.leaf.numel)
        return (start, stop) if start < stop else (0, 0)

    def own_part(self, number: int, flat: Tensor) -> Tensor:
        """Return what this rank has of a parameter in its shard of the flat: a view."""
        one, rank = self.leaves[number], self.axis.rank
        start, stop = self.span(number, rank)
        begin = self.parts[rank] * self.lengths[one.position] if self.parts else 0
        at = one.offset - begin + start if start < stop else 0
        return flat[at : at + stop - start]

    def run(
        self,
        inputs: Sequence[Sequence[Tensor]],
        compute: Callable[[list[int], Wholes], Mapping[int, Tensor]],
        outs: Sequence[Tensor],
    ) -> None:
        """Give each owner its whole parameters, batch by batch; write what it makes into shards.

        A collective. Every rank computes for each batch, also for one of which it owns nothing.

        Args:
            inputs: lists of this rank's shards, each parallel to the flats that learn.
            compute: (numbers of parameters that this rank owns, their wholes) -> {number: the
                result, as long as the parameter}. It may write into the wholes.
            outs: shards that the results are written to.
        """
        coming = self._gather(self.batches[0], inputs) if self.batches else None
        going: Callable[[], None] | None = None
        for number, batch in enumerate(self.batches):
            assert coming is not None
            wholes = coming()
            following = self.batches[number + 1 : number + 2]
            coming = self._gather(following[0], inputs) if following else None
            made = compute([k for k in batch if k in wholes], wholes)
            if going is not None:
                going()
            going = self._spread(batch, made, outs)
        if going is not None:
            going()

    def _gather(
        self, batch: Sequence[int], inputs: Sequence[Sequence[Tensor]]
    ) -> Callable[[], Wholes]:
        """Start to give owners the wholes of a batch; what is returned waits for them."""
        mine = [k for k in batch if self.leaves[k].owner == self.axis.rank]
        if not self.parts or self.axis.size == 1:  # an owner has all of it
            return lambda: {k: [self._at(k, flats) for flats in inputs] for k in mine}
        here = set[Item]()  # what each rank has whole, of which `inputs` have the shards
        for k in batch if inputs and self.fulls else ():
            at = self.leaves[k].position
            here |= {(k, 0)} if inputs[0][at].dtype is self.fulls[at].dtype else set()
        items = [(k, j) for k in batch for j in range(len(inputs)) if (k, j) not in here]
        flights = [
            (some, self._gather_of(some, inputs))
            for some in _by_dtype(items, lambda k, j: inputs[j][self.leaves[k].position].dtype)
        ]

        def wait() -> Wholes:
            found = {
                (k, 0): self._here(self._at(k, self.fulls)).clone() for k in mine if (k, 0) in here
            }
            for some, flight in flights:
                found |= self._joined([x for x in some if x[0] in mine], flight.wait())
            return {k: [found[k, j] for j in range(len(inputs))] for k in mine}

        return wait

    def _here(self, x: Tensor) -> Tensor:
        return x if self.device is None else to_device(x, self.device)

    def _at(self, number: int, flats: Sequence[Tensor]) -> Tensor:
        one = self.leaves[number]
        return flats[one.position][one.offset : one.offset + one.leaf.numel]

    def _gather_of(self, items: Sequence[Item], inputs: Sequence[Sequence[Tensor]]) -> InFlight:
        flats = [inputs[j][self.leaves[k].position] for k, j in items]
        like = self._here(flats[0][:0])
        parts = [
            (k, self._here(self.own_part(k, flat)))
            for (k, _), flat in zip(items, flats, strict=True)
        ]
        sent = [
            _cat([part for k, part in parts if self.leaves[k].owner == r], like)
            for r in range(self.axis.size)
        ]
        mine = [k for k, _ in items if self.leaves[k].owner == self.axis.rank]
        sizes = [sum(self._length(k, r) for k in mine) for r in range(self.axis.size)]
        return start_uneven_all_to_all(sent, sizes, self.axis, total=self._crossing(items))

    def _joined(self, items: Sequence[Item], received: Sequence[Tensor]) -> dict[Item, Tensor]:
        """Join what an owner received from each rank into wholes."""
        pieces: dict[Item, dict[int, Tensor]] = {item: {} for item in items}
        for r, chunk in enumerate(received if items else ()):
            parts = chunk.split([self._length(k, r) for k, _ in items])
            for (k, j), part in zip(items, parts, strict=True):
                if part.numel():
                    pieces[k, j][self.span(k, r)[0]] = part
        return {x: torch.cat([some[at] for at in sorted(some)]) for x, some in pieces.items()}

    def _spread(
        self, batch: Sequence[int], made: Mapping[int, Tensor], outs: Sequence[Tensor]
    ) -> Callable[[], None]:
        """Start to give every rank its part of the results; what is returned writes them."""
        rank = self.axis.rank
        for k in (k for k in batch if self.leaves[k].owner == rank):
            start, stop = self.span(k, rank)
            _write(self.own_part(k, outs[self.leaves[k].position]), made[k][start:stop])
        if self.axis.size == 1:
            return lambda: None
        flights = [
            (some, self._spread_of(some, made, outs))
            for some in _by_dtype(
                [(k, 0) for k in batch], lambda k, _: outs[self.leaves[k].position].dtype
            )
        ]

        def wait() -> None:
            for some, flight in flights:
                for r, chunk in enumerate(flight.wait()):
                    theirs = [k for k, _ in some if self.leaves[k].owner == r != rank]
                    parts = chunk.split([self._length(k, rank) for k in theirs]) if theirs else ()
                    for k, part in zip(theirs, parts, strict=True):
                        _write(self.own_part(k, outs[self.leaves[k].position]), part)

        return wait

    def _spread_of(
        self, items: Sequence[Item], made: Mapping[int, Tensor], outs: Sequence[Tensor]
    ) -> InFlight:
        ranks, rank = range(self.axis.size), self.axis.rank
        like = self._here(outs[self.leaves[items[0][0]].position][:0])
        mine = [k for k, _ in items if self.leaves[k].owner == rank]

        def part_for(r: int) -> Tensor:
            return _cat([made[k][slice(*self.span(k, r))].to(like.dtype) for k in mine], like)

        alike = None if self.parts else part_for(rank)  # each rank gets the same
        nothing = like.new_empty(0)
        sent = [nothing if r == rank else part_for(r) if alike is None else alike for r in ranks]
        theirs = [[k for k, _ in items if self.leaves[k].owner == r != rank] for r in ranks]
        sizes = [sum(self._length(k, rank) for k in some) for some in theirs]
        return start_uneven_all_to_all(sent, sizes, self.axis, total=self._crossing(items))

    def _crossing(self, items: Sequence[Item]) -> int:
        """Return how many elements cross ranks: none where an owner alone has all of them."""
        ranks = range(self.axis.size)
        return sum(self._length(k, r) for k, _ in items for r in ranks if r != self.leaves[k].owner)

    def _length(self, number: int, rank: int) -> int:
        start, stop = self.span(number, rank)
        return stop - start


def owners_of(setup: Setup) -> Owners | None:
    """Return who owns what in a state; None for an optimizer whose rules are elementwise."""
    optimizer, layout = setup.optimizer, setup.layout
    if not optimizer.by_owners:
        return None
    first = (layout.leaves[layout.groups[i].leaves[0]].path for i in layout.trainable)
    whole = tuple(n for n, path in enumerate(first) if optimizer.needs_whole(path))
    if not whole:
        return None
    return _of_groups(setup, whole, layout.options.kept)


def every_leaf_owned(setup: Setup) -> Owners:
    """Return an owner for every leaf that learns, whatever the optimizer needs."""
    return _of_groups(setup, tuple(range(len(setup.layout.trainable))), ())


def _of_groups(setup: Setup, whole: tuple[int, ...], kept: tuple[int, ...]) -> Owners:
    """Return who owns the leaves of some of the groups that learn."""
    layout, placement = setup.layout, setup.optimizer_state
    if placement is Placement.REPLICATED:
        return _owners(layout, setup.axis, (), whole, kept)
    axis = setup.over(placement)
    parts = tuple(setup.part(placement, rank).index for rank in range(axis.size))
    return _owners(layout, axis, parts, whole, kept)


@lru_cache(maxsize=64)  # every step asks for the same ones
def _owners(
    layout: Layout,
    axis: Axis,
    parts: tuple[int, ...],
    whole: tuple[int, ...],
    kept: tuple[int, ...],
) -> Owners:
    count = len(parts) or 1
    found = [
        (leaf, position, offset)
        for position in whole
        for leaf, offset in zip(
            layout.groups[layout.trainable[position]].leaves,
            layout.groups[layout.trainable[position]].offsets,
            strict=True,
        )
        if layout.leaves[leaf].numel
    ]
    own = tuple(kept[leaf] if kept else 0 for leaf, *_ in found)
    costs = [cost_of(layout.leaves[leaf].shape) for leaf, *_ in found]
    owner = assign(costs, axis.size, own)
    lengths = tuple(layout.full_numel(i) // count for i in layout.trainable)
    places = [(offset, layout.leaves[i].numel, lengths[at]) for i, at, offset in found]
    owner = nearest(owner, places, parts)
    leaves = tuple(
        OwnedLeaf(
            leaf=layout.leaves[leaf], index=leaf, position=position, offset=offset, owner=rank
        )
        for (leaf, position, offset), rank in zip(found, owner, strict=True)
    )
    return Owners(
        axis=axis,
        leaves=leaves,
        batches=tuple(batches_of(leaves, axis.size)),
        parts=parts,
        lengths=lengths,
        kept=own,
    )


def _by_dtype(
    items: Sequence[Item], dtype_of: Callable[[int, int], torch.dtype]
) -> list[list[Item]]:
    """Return the items whose tensors have one dtype together: they are sent as one."""
    found: dict[torch.dtype, list[Item]] = {}
    for k, j in items:
        found.setdefault(dtype_of(k, j), []).append((k, j))
    return list(found.values())


def _cat(pieces: list[Tensor], like: Tensor) -> Tensor:
    return torch.cat(pieces) if pieces else like.new_empty(0)


def _write(home: Tensor, value: Tensor) -> None:
    if home.is_meta or home.data_ptr() != value.data_ptr() or home.dtype is not value.dtype:
        write_back(home, value)
