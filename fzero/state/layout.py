"""Static records of a partition: which leaf lies where in which group. Data, no tensors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import torch
from optree import PyTreeSpec
from torch import Tensor
from torch.nn import Parameter

from fzero.state.codec import Codec, Compress
from fzero.state.encoded import WireForm, as_bytes, form_of, from_bytes

ENCODED = " as "  # what stands before the codec where a leaf says what it is


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """One stored tensor of the parameter pytree (tied leaves are one `Leaf`)."""

    path: str  # the first path it was seen at, dict keys joined by "."
    shape: tuple[int, ...]
    dtype: torch.dtype  # as its user has it: a complex leaf is in a flat by its real view
    trainable: bool
    codec: Codec | None = None
    """What it is encoded by, as one row: a flat has the bytes of that. Of a frozen leaf alone."""

    form: WireForm | None = field(init=False, repr=False, compare=False)
    """Of an encoded leaf: how its bytes lie."""

    stored_shape: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """The shape of its real view, or of its bytes; of another leaf `shape` itself."""

    numel: int = field(init=False, repr=False, compare=False)
    """Number of elements in a flat: two, real and imaginary part, for each complex number."""

    def __post_init__(self) -> None:
        """Note what every step asks for."""
        stored = (*self.shape, 2) if self.dtype.is_complex else self.shape
        form = None if self.codec is None else form_of(self.codec, prod(self.shape))
        if form is not None:
            stored = (form.nbytes,)
        object.__setattr__(self, "form", form)
        object.__setattr__(self, "stored_shape", stored)
        object.__setattr__(self, "numel", prod(stored))

    @property
    def title(self) -> str:
        """What errors call it: its path, unless it is the whole tree."""
        return "the parameter" if self.path == "." else self.path

    @property
    def says(self) -> str:
        """What ranks, and a checkpoint and a state, must have in common of it."""
        encoded = "" if self.codec is None else f"{ENCODED}{self.codec}"
        learns = "trainable" if self.trainable else "frozen"
        return f"{self.shape} {self.dtype} {learns}{encoded}"

    @property
    def stored_dtype(self) -> torch.dtype:
        """The dtype of the flat that it is in."""
        return stored_dtype(self.dtype) if self.codec is None else torch.uint8

    def of(self, part: Tensor) -> Tensor:
        """Return its elements in a flat in its own shape; in the precision of the flat: a view.

        Complex numbers of 16 bits are made in fp32: a copy. So is what is decoded, in its dtype.
        """
        if self.stored_shape is self.shape:
            return part.view(self.shape)
        if self.codec is not None and self.form is not None:
            return from_bytes(self.codec, part, self.form, self.dtype).view(self.shape)
        return as_complex(part).view(self.shape)

    def stored(self, x: Tensor) -> Tensor:
        """Return its values as they are in a flat: 1-D, encoded, or the real view."""
        if self.codec is None:
            return as_real(x).reshape(-1)
        return as_bytes(self.codec, x.detach().to(self.dtype))


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Leaves that travel together in one flat buffer [ranks * shard_numel], all encoded or none.

    `offsets[i]` is where leaf `leaves[i]` starts; what no leaf covers is padding, always zero. It
    is there so that each leaf, and each shard, starts on a multiple of 16 bytes, and of the block
    of `LayoutOptions`; on a mesh of two dims, each replica's part of a shard, too.
    `communication_dtype`: in which its gradients, and at stage 3 its values, cross ranks under
    autocast; None for its own. `codec`: what encodes its values at stage 3, where they are floats.
    """

    name: str  # the unit (stage 3) or bucket it came from
    dtype: torch.dtype
    trainable: bool
    leaves: tuple[int, ...]
    offsets: tuple[int, ...]
    shard_numel: int
    communication_dtype: torch.dtype | None = None
    codec: Codec | None = None
    encoded: bool = False


def learns(p: Tensor) -> bool:
    """Whether a tensor is trained if nobody says otherwise: a frozen `nn.Parameter` is not."""
    differs = p.is_floating_point() or p.is_complex()
    return differs and (p.requires_grad or not isinstance(p, Parameter))


def as_real(x: Tensor) -> Tensor:
    """Return the real view of a complex tensor, [*, 2]; another tensor as it is.

    Example:
        >>> as_real(torch.tensor([1 + 2j]))
        tensor([[1., 2.]])
    """
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def as_complex(part: Tensor) -> Tensor:
    """Return the complex numbers [n] whose real view is `part` [2 n]."""
    wide = part.float() if part.dtype.itemsize < 4 else part  # torch has none of 16 bits
    if not wide.numel():  # a view of nothing may begin in the middle of a number
        wide = wide.clone()
    return torch.view_as_complex(wide.view(-1, 2).contiguous())  # vmap makes others


def stored_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a flat has leaves of a dtype: that of their real view.

    Example:
        >>> stored_dtype(torch.complex128), stored_dtype(torch.bfloat16)
        (torch.float64, torch.bfloat16)
    """
    return dtype.to_real() if dtype.is_complex else dtype


def as_bits(indices: Iterable[int]) -> int:
    """Return a number whose bit i says whether i is among the indices.

    Example:
        >>> as_bits([0, 3])
        9
    """
    bits = bytearray()
    for i in indices:
        byte = i >> 3
        if byte >= len(bits):
            bits.extend(bytes(byte + 1 - len(bits)))
        bits[byte] |= 1 << (i & 7)
    return int.from_bytes(bits, "little")


def from_bits(bits: int) -> tuple[int, ...]:
    """Return the indices that `as_bits` has made a number of, in ascending order.

    Example:
        >>> from_bits(9)
        (0, 3)
    """
    return tuple(i for i, bit in enumerate(reversed(f"{bits:b}")) if bit == "1")


BLOCK = 64
"""The block of a layout whose numbers must not depend on where a leaf is cut.

Kernels compute most elements of a tensor with vector instructions, and the few at its end one by
one, which rounds otherwise in some of them. A shard of whole blocks has no such end: the longest
vectors that a kernel of torch takes at once, two of 512 bits, have 64 elements of 16 bits.
"""


class Part(NamedTuple):
    """Part `index` of the `count` equal parts of a flat: what a rank holds of it."""

    count: int  # pyright: ignore[reportIncompatibleMethodOverride]
    index: int  # pyright: ignore[reportIncompatibleMethodOverride]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutOptions:
    """What a user asked of a layout, also what another stage or number of ranks alone would use."""

    bucket_bytes: int | None = None
    compress: Compress | None = None
    units: tuple[str, ...] = ()  # of each leaf: the unit that it is in at stage 3
    # Of each leaf: the names of the classes of each module that owns it, where that is known.
    owners: tuple[tuple[tuple[str, ...], ...], ...] = ()
    kept: tuple[int, ...] = ()  # of each leaf: the elements that its owner keeps, if it has one
    outer_kept: tuple[int, ...] = ()  # the same, of the outer rule
    outer: Any = None  # of local updates: the rule of the outer update, bound to these leaves
    block: int = 1  # leaves and shards consist of whole blocks of so many elements: see `BLOCK`


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a pytree of parameters is stored as groups over `ranks` ranks, those of one replica.

    `slots[i]` is the leaf that the i-th leaf position of the pytree holds: tied positions name
    one leaf twice. Equal on every rank; it rides in the treespec of a state.
    """

    treespec: PyTreeSpec
    slots: tuple[int, ...]
    leaves: tuple[Leaf, ...]
    groups: tuple[Group, ...]
    ranks: int
    options: LayoutOptions = field(default=LayoutOptions(), repr=False, compare=False)

    units: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)
    """The groups of each unit: what is gathered, and reduced, together. By their names."""

    trainable: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """Indices of the groups that have gradients and optimizer state."""

    learning: int = field(init=False, repr=False, compare=False)
    """The leaves in those, bit by bit: bit i is leaf i."""

    names: tuple[str, ...] = field(init=False, repr=False, compare=False)
    """The path of every leaf; one that two leaves share is numbered from the second on."""

    def __post_init__(self) -> None:
        """Note what every step asks for."""
        found: dict[str, list[int]] = {}
        for i, group in enumerate(self.groups):
            found.setdefault(group.name, []).append(i)
        object.__setattr__(self, "units", tuple(map(tuple, found.values())))
        learning = tuple(i for i, group in enumerate(self.groups) if group.trainable)
        object.__setattr__(self, "trainable", learning)
        leaves = (leaf for i in learning for leaf in self.groups[i].leaves)
        object.__setattr__(self, "learning", as_bits(leaves))
        names: dict[str, None] = {}
        for leaf in self.leaves:
            name, number = leaf.path, 1
            while name in names:
                number += 1
                name = f"{leaf.path}#{number}"
            names[name] = None
        object.__setattr__(self, "names", tuple(names))

    def __hash__(self) -> int:
        """Hash a few fields only: every step looks up what was computed of this layout once."""
        return hash((self.slots, len(self.groups), self.ranks))

    def paths(self, indices: Iterable[int]) -> list[tuple[str, ...]]:
        """Return the paths of the leaves of each of these groups that is not empty."""
        groups = [self.groups[i] for i in indices if self.groups[i].shard_numel]
        return [tuple(self.leaves[leaf].path for leaf in group.leaves) for group in groups]

    def full_numel(self, index: int) -> int:
        """Elements of group `index` with its padding."""
        return self.groups[index].shard_numel * self.ranks

    def describe(self) -> list[str]:
        """One line for each leaf and group: what ranks compare before they start."""
        leaves = [f"{leaf.path} {leaf.says}" for leaf in self.leaves]
        groups = [
            f"group {group.name} of {[self.leaves[i].path for i in group.leaves]} "
            f"at {group.offsets}, {group.shard_numel} elements a rank, {group.communication_dtype}"
            for group in self.groups
        ]
        return [*leaves, f"tied positions {self.slots}", *groups, f"{self.ranks} ranks"]
