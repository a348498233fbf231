"""What encoding has lost of gradients so far, the residual, in a checkpoint.

    residual/<n>    e_n of the whole gradient: of rank n, or of replica n, a shard on each rank
    residual/back   what was lost of sums on their way back, of which each rank has its part
    start/<leaf>    where the factors of a matrix start from: the same on all ranks

Updates depend only on the sum of all residuals. A load for as many of them as saved gives each its
own, so training goes on with the same bits. Else each rank gets its part of the sum, and zeros.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fzero.checkpoint._pieces import BLOCK_NUMEL, OwnShard, TensorPiece, blocks, leaf_names
from fzero.checkpoint.manifest import Manifest
from fzero.machine.packing import part_of
from fzero.machine.residual import held_part, memories_of, residual_of, start_slots, unpacked
from fzero.state import Part, Placement, TrainState

Sums = list[tuple[Tensor, Tensor]]  # what is read is added to the first of each two


def residual_shards(state: TrainState, rank: int) -> list[OwnShard]:
    """Return all of a rank's residual: a whole flat as its parts, or the part that it has."""
    shards = []
    memories = memories_of(state.setup) if state.window.residual.held else []
    for memory, kept in zip(memories, state.window.residual.flats, strict=False):
        (index, back, _), flat = memory, unpacked(memory, kept)
        name, held = held_part(state.setup, rank, back=back)
        ranks = state.setup.layout.ranks
        parts = [Part(ranks, r) for r in range(ranks)] if held.count == 1 else [held]
        for part in parts:
            shards.append(OwnShard(f"residual/{name}", index, part, part_of(flat, held, part)))
    return shards


def with_residual(
    state: TrainState, saved: Manifest, rank: int
) -> tuple[TrainState, list[OwnShard], Sums]:
    """Return the state with an allocated residual, the tensors to read, what to add then."""
    residual, setup = residual_of(state), state.setup
    flats = [unpacked(*pair) for pair in zip(memories_of(setup), residual.flats, strict=False)]
    starts = residual.flats[len(flats) :]
    residual = replace(residual, flats=(*flats, *starts))  # to read into: packed when it is used
    state = state.replace(window=replace(state.window, residual=residual))
    names = {name.split("/")[1] for name in saved.tensors if name.startswith("residual/")}
    own = setup.axis.size if setup.reduction.over == "all" else setup.replicas
    same = names - {"back"} == set(map(str, range(own)))
    shards: list[OwnShard] = []
    sums: Sums = []
    for shard in residual_shards(state, rank):
        if shard.prefix.split("/")[1] in (names if same else {"back"} & names):
            shards.append(shard)
    added = set[str]() if same else names - {"back"}
    if not any(memory.back for memory in memories_of(setup)):
        added |= names & {"back"}
    there = [memory for memory in memories_of(setup) if not memory.back]
    for (index, _, _), flat in zip(there, residual.flats, strict=False):
        held, part = held_part(setup, rank, back=False)[1], setup.part(Placement.OVER_ALL, rank)
        mine = part_of(flat, held, part)
        for name in sorted(added):
            read = torch.zeros_like(mine)
            shards.append(OwnShard(f"residual/{name}", index, part, read))
            sums.append((mine, read))
    return state, shards, sums


def start_pieces(state: TrainState, saved: Manifest | None = None) -> list[TensorPiece]:
    """Return the starts of a state's factors, to be saved; or to be read where they were `saved`.

    Those that were not, or for another rank of factors, stay as they are: of a new state.
    """
    names, found = leaf_names(state.setup.layout), list[TensorPiece]()
    for leaf, values in start_slots(state):
        name, numel = f"start/{names[leaf]}", values.numel()
        if saved is not None:
            entry = saved.tensors.get(name, {"dtype": "", "chunks": []})
            there = entry["dtype"], sum(chunk[1] for chunk in entry["chunks"])
            if there != (str(values.dtype), numel):
                continue
        for start, stop in blocks(0, numel, BLOCK_NUMEL):
            piece = values[start:stop]
            found.append(TensorPiece(name=name, start=start, numel=numel, values=piece))
    return found
