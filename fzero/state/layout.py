"""Static records of a partition: which leaf lies where in which group. Data, no tensors."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from math import prod
from typing import Any, NamedTuple

import torch
from optree import PyTreeSpec
from torch import Tensor
from torch.nn import Parameter

from fzero.errors import LayoutError, explain
from fzero.errors.check import is_count, require
from fzero.state.codec import Codec, Compress, WireForm, as_bytes, form_of, from_bytes

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
        if self.stored_shape is self.shape:
            return x.reshape(-1)
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

    summary: str = field(init=False, repr=False, compare=False)
    """How large it is, and a digest of it: other models on the same ranks have another one."""

    names: tuple[str, ...] = field(init=False, repr=False, compare=False)
    """The path of every leaf; one that two leaves share is numbered from the second on."""

    def __deepcopy__(self, memo: Any) -> Layout:
        """Return itself: it does not change, and a copied state is one of the same model."""
        return self

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
        digest = zlib.crc32("\n".join(self.describe()).encode())
        numel = sum(leaf.numel for leaf in self.leaves)
        summary = f"{numel} numbers in {len(self.leaves)} leaves ({digest:08x})"
        object.__setattr__(self, "summary", summary)
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


# Leaf modules: subtrees whose parameters are gathered and released as one.
#
# For modules that use other parts of themselves on each rank (a mixture of experts), so that all
# ranks gather the same, and for many small modules whose gathers would cost more than they save.
# Works on a description of the module tree; no module is looked at or marked.

CONTAINERS = ("Sequential", "ModuleList", "ModuleDict", "ParameterList", "ParameterDict")
"""torch's containers, which are no unit of work: by granularity they never become leaves."""

LARGEST_LEAF_NUMEL = 1_000_000_000
"""A larger subtree never becomes a leaf by granularity: all of it would be live at once."""

_CONTAINER_MODULE = "torch.nn.modules.container"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleInfo:
    """One module of the tree, as far as the choice of leaves needs it."""

    name: str  # qualified; "" is the root
    classes: tuple[str, ...]  # its class and that one's bases (the mro), fully qualified
    numel: int  # parameter elements in its subtree, tied ones once
    descendants: int  # modules below it

    @property
    def granularity_numel(self) -> float:
        """Elements for each module of the subtree: numel / (1 + descendants)."""
        return self.numel / (1 + self.descendants)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafSpec:
    """What is to be a leaf. A module that any of the four names is one.

    `classes`: types, or names, bare ("MoE") or fully qualified ("models.moe.MoE"); subclasses
    count. `names`: qualified names of modules. `name_suffixes`: ends of qualified names.
    `granularity_threshold_numel`: modules of fewer elements for each module of their subtree
    than this; 0 is none. A string alone stands for a tuple of one.
    """

    classes: Sequence[str | type] | str | type = ()
    names: Sequence[str] | str = ()
    name_suffixes: Sequence[str] | str = ()
    granularity_threshold_numel: int = 0

    def __post_init__(self) -> None:
        """Refuse what names no module."""
        cause = "a module itself, or a number that is no int."
        kinds = {"classes": (str, type), "names": (str,), "name_suffixes": (str,)}
        for name, allowed in kinds.items():
            value: Any = getattr(self, name)
            several = isinstance(value, Iterable) and not isinstance(value, str | type)
            each: list[Any] = [*getattr(self, name)] if several else [value]
            good = all(isinstance(one, allowed) for one in each)
            wanted = "names" + (" or classes" if type in allowed else "") + ", one or a list"
            require(f"LeafSpec: {name}", value, lambda _, good=good: good, wanted, cause=cause)
        name, numel = "granularity_threshold_numel", self.granularity_threshold_numel
        wanted = "elements for each module, an int; 0 is off"
        require(f"LeafSpec: {name}", numel, lambda x: is_count(x, 0), wanted, cause=cause)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafModules:
    """The leaf modules of a model, of which none is inside another.

    `warnings` are for the user, one text each.
    """

    leaves: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def class_name(cls: type) -> str:
    """The fully qualified name of a class, as `ModuleInfo.classes` has it.

    Example:
        >>> class_name(LeafSpec)
        'fzero.state.layout.LeafSpec'
    """
    return f"{cls.__module__}.{cls.__qualname__}"


def find_leaf_modules(tree: Sequence[ModuleInfo], spec: LeafSpec) -> LeafModules:
    """Choose the leaves of `tree` (parents before children) that `spec` names.

    The outermost of nested leaves is the leaf. Raises `LayoutError` for a class, a name or a
    suffix that is nowhere in the tree, naming all of them and what comes near.

    Example:
        >>> tree = [
        ...     ModuleInfo(name="", classes=("gpt.Gpt",), numel=90, descendants=3),
        ...     ModuleInfo(name="h.moe", classes=("gpt.MoE",), numel=60, descendants=1),
        ...     ModuleInfo(name="h.moe.up", classes=("torch.nn.Linear",), numel=60, descendants=0),
        ...     ModuleInfo(name="head", classes=("torch.nn.Linear",), numel=30, descendants=0),
        ... ]
        >>> find_leaf_modules(tree, LeafSpec(classes="MoE")).leaves
        ('h.moe',)
    """
    chosen = _named(tree, spec)
    fine, warnings = _fine_grained(tree, spec.granularity_threshold_numel)
    chosen |= fine
    leaves = tuple(
        info.name
        for info in tree
        if info.name in chosen and not any(up in chosen for up in _path(info.name)[1:])
    )
    return LeafModules(leaves=leaves, warnings=warnings)


def _named(tree: Sequence[ModuleInfo], spec: LeafSpec) -> set[str]:
    """The modules that a class, a name or a suffix of `spec` names."""
    chosen: set[str] = set()
    missing: list[str] = []
    names = [info.name for info in tree]
    classes = dict.fromkeys(full for info in tree for full in info.classes)
    known = [*classes, *dict.fromkeys(_bare(full) for full in classes)]

    def collect(
        kind: str, wanted: str, near: Iterable[str], fits: Callable[[ModuleInfo], bool]
    ) -> None:
        found = {info.name for info in tree if fits(info)}
        chosen.update(found)
        if not found:
            close = get_close_matches(wanted, list(near), n=3, cutoff=0.5)
            missing.append(f"{kind} {wanted!r} (near: {', '.join(close) or 'nothing'})")

    for cls in _listed(spec.classes):
        collect(
            "class",
            cls,
            known,
            lambda info, cls=cls: any(cls in (x, _bare(x)) for x in info.classes),
        )
    for name in _listed(spec.names):
        collect("name", name, names, lambda info, name=name: info.name == name)
    for suffix in _listed(spec.name_suffixes):
        ends = dict.fromkeys(name.rsplit(".", 1)[-1] for name in names)
        collect(
            "suffix", suffix, ends, lambda info, end=suffix: bool(end) and info.name.endswith(end)
        )
    if missing:
        raise LayoutError(
            f"leaf modules: the model has no {'; no '.join(missing)}.",
            cause="a misspelt name, or the name of a module before it was wrapped.",
            fix="take names from `model.named_modules()`; a class by its bare or fully "
            "qualified name, or itself.",
        )
    return chosen


def _fine_grained(
    tree: Sequence[ModuleInfo], threshold_numel: int
) -> tuple[set[str], tuple[str, ...]]:
    """The modules below the threshold, and a warning if that is no module at all."""
    candidates = [info for info in tree if _can_be_fine_grained(info)]
    fine = {info.name for info in candidates if info.granularity_numel < threshold_numel}
    if fine or not threshold_numel:
        return fine, ()
    least = min(candidates, key=lambda info: info.granularity_numel, default=None)
    seen = (
        "no module has parts"
        if least is None
        else (f"the least is {least.granularity_numel:,.0f}, of {least.name or '(root)'!r}")
    )
    return set(), (
        explain(
            f"granularity_threshold_numel={threshold_numel:,} makes no module a leaf: {seen}.",
            cause="a threshold that was chosen for a model of smaller modules.",
            fix="raise it above the least granularity, or leave it out (0).",
        ),
    )


def _can_be_fine_grained(info: ModuleInfo) -> bool:
    container = info.classes[0] in {f"{_CONTAINER_MODULE}.{name}" for name in CONTAINERS}
    return 0 < info.numel <= LARGEST_LEAF_NUMEL and info.descendants > 0 and not container


def _bare(full: str) -> str:
    return full.rpartition(".")[2]


def _path(name: str) -> list[str]:
    """`name`, its parent, and so on up to the root."""
    path = [name]
    while path[-1]:
        path.append(path[-1].rpartition(".")[0])
    return path


def _listed(given: Sequence[str | type] | str | type) -> tuple[str, ...]:
    listed = (given,) if isinstance(given, str | type) else given
    texts = (item if isinstance(item, str) else class_name(item) for item in listed)
    return tuple(dict.fromkeys(texts))
