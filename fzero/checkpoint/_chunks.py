"""From a manifest to values: which chunks have the elements of a piece, and reading them.

A chunk is what one rank wrote of one tensor. A rank reads those that its own pieces touch, each
once, and one at a time.
"""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fzero.checkpoint._pieces import TensorPiece
from fzero.checkpoint.disk import regular
from fzero.checkpoint.manifest import Manifest


class Chunk(NamedTuple):
    """A range of a tensor, and where its bytes are: as a manifest has it."""

    start: int
    numel: int
    file: str
    offset: int
    length: int


def chunks_of(saved: Manifest, piece: TensorPiece) -> Iterator[tuple[Chunk, Tensor, int]]:
    """Yield (chunk, the part of the piece that it has, where that begins in it), in elements."""
    first, last = piece.start, piece.start + piece.values.numel()
    for chunk in map(Chunk._make, saved.tensors[piece.name]["chunks"]):
        low, high = max(first, chunk.start), min(last, chunk.start + chunk.numel)
        if low < high:
            yield chunk, piece.values[low - first : high - first], low - chunk.start


def read_pieces(pieces: Sequence[TensorPiece], folder: Path, saved: Manifest) -> None:
    """Fill the values of pieces from the files of a folder, in which `torch.save` wrote chunks."""
    wanted: dict[Chunk, list[tuple[Tensor, int]]] = defaultdict(list)
    for piece in pieces:
        for chunk, target, at in chunks_of(saved, piece):
            wanted[chunk].append((target, at))
    in_order = sorted(wanted, key=lambda chunk: (chunk.file, chunk.offset))
    for file, chunks in groupby(in_order, key=lambda chunk: chunk.file):
        with open(folder / file, "rb", opener=regular) as stream:
            for chunk in chunks:
                stream.seek(chunk.offset)
                data = io.BytesIO(stream.read(chunk.length))
                values = torch.load(data, map_location="cpu", weights_only=True)
                for target, at in wanted[chunk]:
                    target.copy_(values.narrow(0, at, target.numel()))
