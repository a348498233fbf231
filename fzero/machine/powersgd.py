"""PowerSGD: the gradient of a matrix crosses ranks as two factors, each of which adds up.

    M_r = G_r + e_r                      [m, n], m <= n, of rank r; Q [n, k]: equal on all ranks
    P   = sum_r M_r Q                    [m, k], an all-reduce
    B   = basis(P)                       orthonormal columns, of the same P on every rank
    Q'  = sum_r M_r^T B                  [n, k], an all-reduce: the Q of the next time
    received = B Q'^T                    the sum of all M_r, projected on B
    e_r = M_r - B (M_r^T B)^T            of each rank what its own projection lacks

The sum of all e_r is the sum of all M_r without what was received, and none of them grows with what
ranks differ by, for each was projected by itself.

Source: Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for
Distributed Optimization", arXiv 1905.13727, algorithms 1 and 2.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fzero.errors.check import is_count, require
from fzero.machine.stacks import check_batch_dims, in_matrices
from fzero.state.codec import Codec, Memory, mixed
from fzero.state.layout import Layout


@dataclass(frozen=True)
class powersgd(Codec):
    """Matrices as two factors of a low rank, with error feedback; what is no matrix as it is.

    For gradients, over all ranks. One whose factors would not be smaller than itself crosses as it
    is, as do vectors and scalars, all in the dtype in which gradients add up, fp32 at least.

    Args:
        rank: the columns of each factor, k: rank k (m + n) numbers cross twice in place of m n.
        batch_dims: of parameters of 3 or more dims, how many of the first count matrices: 1 for a
            stack of experts [E, out, in], each of which has factors of its own; 0 for one matrix of
            the first dim by the others. None: convolutions of torch.nn are one, others raise.
        memory: as of `Codec`, but not False: without error feedback what is not in the factors
            would be lost.

    Example:
        >>> import torch
        >>> codec = powersgd(rank=1)
        >>> codec.wire_bytes_of((100, 50)), codec.wire_bytes_of((50,))
        (600, 200)
        >>> gradient = torch.outer(torch.arange(100.0), torch.arange(50.0))  # of rank 1
        >>> basis = codec.basis(gradient @ codec.start(50, 1))
        >>> received = basis @ (gradient.T @ basis).T
        >>> bool(torch.allclose(received, gradient))
        True
    """

    rank: int = 4
    batch_dims: int | None = field(default=None, kw_only=True)
    memory: Memory = field(default=True, kw_only=True)
    linear: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse what is no rank, and no memory."""
        super().__post_init__()
        require("powersgd: rank", self.rank, is_count, "an int of 1 or more")
        check_batch_dims("powersgd", self.batch_dims)
        wanted = "True or a dtype: what factors do not hold would be lost"
        require("powersgd: memory", self.memory, lambda x: x is not False, wanted)

    # Of a matrix.

    def rank_of(self, shape: tuple[int, ...]) -> int:
        """Return the columns of the factors of a matrix; 0 if it crosses as it is."""
        rows, columns = _as_matrix(shape)
        rank = min(self.rank, rows, columns)
        return rank if rank * (rows + columns) < rows * columns else 0

    def wire_bytes_of(self, shape: tuple[int, ...]) -> int:
        """Return the bytes of a parameter in fp32: of P and Q', or of itself."""
        count, each = in_matrices(shape, self.batch_dims)
        return 4 * count * (self.rank_of(each) * sum(_as_matrix(each)) or prod(each))

    def bound_of(self, matrix: Tensor) -> Tensor:
        """Return the largest |B B^T M - M| of each element: the size of its column, [m, n]."""
        return matrix.square().sum(0).sqrt().expand_as(matrix) * (1 + 2.0**-10)

    @staticmethod
    def start(columns: int, rank: int, device: torch.device | None = None) -> Tensor:
        """Return the first Q, [columns, rank] of fp32: numbers of 8 bits, the same everywhere."""
        return hashed(columns, rank, device)

    @staticmethod
    def basis(p: Tensor) -> Tensor:
        """Return orthonormal columns that span those of P [m, k], by Gram-Schmidt, twice.

        A column that is zero, or that the ones before it span but for rounding, is zero.
        """
        found: list[Tensor] = []
        for column in p.unbind(1):
            largest = column.abs().amax()
            v = column / torch.where(largest == 0, 1.0, largest)
            size = v.square().sum().sqrt()
            for before in found * 2:
                v = v - before * (before * v).sum()
            left = v.square().sum().sqrt()
            # Not `left > ...`: a NaN is in no order, and goes on, so that an overflow is seen.
            spanned = left <= size * torch.finfo(p.dtype).eps ** 0.5
            found.append(torch.where(spanned, 0.0, v / left))
        return torch.stack(found, 1)

    @staticmethod
    def next_start(q: Tensor, before: Tensor) -> Tensor:
        """Return the Q to start from next time: Q' by the size of its columns, where it has any."""
        largest = q.abs().amax(0)
        return torch.where((largest > 0) & largest.isfinite(), q / largest, before)

    # Of what is no matrix.

    def encode(self, x: Tensor) -> tuple[Tensor]:
        """As it is."""
        return (x,)

    def decode(self, parts: tuple[Tensor, ...], numel: int, dtype: torch.dtype) -> Tensor:
        """As it is."""
        return parts[0].to(dtype)

    def wire_bytes(self, numel: int) -> int:
        """Return the bytes of n elements of vectors and scalars, in fp32."""
        return 4 * numel

    def bound(self, x: Tensor) -> Tensor:
        """Nothing is lost."""
        return torch.zeros_like(x)


def hashed(rows: int, columns: int, device: torch.device | None = None) -> Tensor:
    """Return numbers in (-1, 1) of 8 bits, [rows, columns] of fp32, by a hash of their places."""
    places = torch.arange(rows * columns, dtype=torch.int32, device=device)
    odd = (mixed(places + 1) & 0xFF) * 2 - 0xFF
    return (odd.to(torch.float32) / 256).view(columns, rows).T


class Matrix(NamedTuple):
    """Where a matrix lies in the flat of its group, with factors of a rank.

    Transposed if that has fewer rows: B is of vectors of that size, and soon has had all of them.
    So what one rank alone has of a matrix does not wait for ever.
    """

    leaf: int
    offset: int
    rows: int
    columns: int
    rank: int
    transposed: bool

    @property
    def start_numel(self) -> int:
        """Elements of Q."""
        return self.columns * self.rank

    def of(self, flat: Tensor) -> Tensor:
        """Return it, [rows, columns]: a view of the flat."""
        values = flat[self.offset :][: self.rows * self.columns]
        if self.transposed:
            return values.view(self.columns, self.rows).T
        return values.view(self.rows, self.columns)


def matrices_of(codec: powersgd, layout: Layout, index: int) -> list[Matrix]:
    """Return the leaves of group `index` that cross ranks as factors; complex ones as real."""
    group, found = layout.groups[index], []
    for number, offset in zip(group.leaves, group.offsets, strict=True):
        leaf = layout.leaves[number]
        _, shape = in_matrices(leaf.shape, codec.batch_dims)
        each = leaf.stored_shape[len(leaf.shape) - len(shape) :]
        rank = codec.rank_of(each) if len(leaf.shape) > 1 else 0
        for at in range(offset, offset + leaf.numel, prod(each)) if rank else ():
            first, others = _as_matrix(each)
            sizes = min(first, others), max(first, others)
            found.append(Matrix(number, at, *sizes, rank, transposed=first > others))
    return found


def _as_matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the rows and columns of a parameter; a vector is one of no columns."""
    return (shape[0], prod(shape[1:])) if len(shape) > 1 else (prod(shape), 0)
