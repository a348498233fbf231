"""Pytree of tensors <-> flat padded groups <-> shards. Pure functions and a recorded layout.

params --plan_layout--> Layout
params --leaves_of, pack--> one flat [W l] for each group --shard_of--> [l]
flats --unpack_groups, assemble--> params
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from enum import Enum, auto
from itertools import groupby
from math import prod
from typing import Any, NamedTuple

import numpy as np
import optree
import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.nn import Module
from torch.nn.parameter import is_lazy
from torch.nn.utils.spectral_norm import SpectralNorm

from fzero.errors import LayoutError
from fzero.machine.packing import ALIGNMENT_BYTES, in_order
from fzero.machine.packing import shard_of as shard_of
from fzero.machine.placeholder import LazyParam, Memoryless
from fzero.options import OPTIONS
from fzero.state import NAMESPACE
from fzero.state.codec import Codec
from fzero.state.layout import Group, Layout, Leaf, learns


def unit_of(path: str) -> str:
    """Return the stage-3 unit of a parameter path: the parameters that are gathered together.

    The prefix through the first integer (a child of a ModuleList, a Sequential or a list); else
    the owner of the parameter; else the parameter itself.

    Example:
        >>> [unit_of(p) for p in ("h.0.attn.weight", "wte.weight", "bias")]
        ['h.0', 'wte', 'bias']
    """
    parts = path.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return ".".join(parts[:-1]) or path


def plan_layout(
    params: Any,
    *,
    ranks: int,
    replicas: int = 1,
    bucket_bytes: int | None = None,
    grouped: bool | None = None,
    unit: Callable[[str], str] = unit_of,
    trainable: Callable[[str], bool] | None = None,
    kind: Callable[[str], Hashable] | None = None,
    lowered: Callable[[str], torch.dtype | None] | None = None,
    frozen: Callable[[str, Tensor], Codec | None] | None = None,
    block: int = 1,
) -> Layout:
    """Decide how `params` is stored over `ranks` ranks, in shards that `replicas` divides.

    Leaves are numbered as they stand in `params`, those of a dict in its own order, in which a
    model uses them more often than in that of the sorted names. Groups hold leaves of one dtype
    and one `kind(path)`, all trainable or all frozen; and of one `lowered(path)`, the dtype in
    which they cross ranks (None for their own). With
    `bucket_bytes` (stages 0 to 2) consecutive leaves share a bucket up to that size; without it
    (stage 3) the leaves of one `unit(path)` share a group. If they are not `grouped` (the default
    on one rank) each leaf is a group of its own: there is no collective to save, and no copy to
    make. Within a group, leaves and shards start on a multiple of 16 bytes, and consist of whole
    blocks of `block` elements.

    A leaf is frozen if it is an `nn.Parameter` that requires no grad, if its dtype is not
    floating, or if `trainable(path)` is false. Leaves that are one tensor are stored once.

    A complex leaf is stored by its real view, in a group without real ones. A frozen floating leaf
    is stored by the bytes that `frozen(path, leaf)` encodes it in, with others of its dtype; None
    leaves it as it is.

    Raises `LayoutError`, naming the path, for a leaf that is not a (dense) tensor, and for leaves
    that are one tensor of which one is frozen.

    Example:
        >>> params = {"a": torch.ones(3), "b": torch.ones(2, 2)}
        >>> layout = plan_layout(params, ranks=2, bucket_bytes=99)
        >>> [(g.offsets, g.shard_numel) for g in layout.groups]
        [((0, 4), 4)]
    """
    OPTIONS["units"].require(unit)
    OPTIONS["trainable"].require(trainable)
    paths, tensors, treespec = named_leaves(params)
    order = _in_order(optree.tree_unflatten(treespec, range(len(paths))))
    leaves, slots = _unique_leaves(paths, tensors, order, trainable, frozen)
    plain = Layout(treespec=treespec, slots=slots, leaves=leaves, groups=(), ranks=ranks)
    return regrouped(
        plain,
        ranks=ranks,
        replicas=replicas,
        bucket_bytes=bucket_bytes,
        grouped=grouped,
        unit=unit,
        kind=kind,
        lowered=lowered,
        block=block,
    )


def regrouped(
    layout: Layout,
    *,
    ranks: int,
    replicas: int = 1,
    bucket_bytes: int | None = None,
    grouped: bool | None = None,
    unit: Callable[[str], str] = unit_of,
    kind: Callable[[str], Hashable] | None = None,
    lowered: Callable[[str], torch.dtype | None] | None = None,
    block: int = 1,
) -> Layout:
    """Return a layout of the same leaves in the groups that `plan_layout` makes of these options.

    Example:
        >>> layout = plan_layout({"a": torch.ones(3), "b": torch.ones(2, 2)}, ranks=1)
        >>> len(layout.groups), len(regrouped(layout, ranks=2, bucket_bytes=99).groups)
        (2, 1)
    """
    leaves = layout.leaves
    lower, sort = lowered or _nothing, kind or _nothing

    def alike(path: str) -> Hashable:
        return lower(path), sort(path)

    if not (ranks > 1 if grouped is None else grouped):
        members = [[i] for i in range(len(leaves))]
        names = [leaf.path for leaf in leaves]
    elif bucket_bytes is None:
        members, names = _by_unit(leaves, unit, alike)
    else:
        members = list(_by_size(leaves, bucket_bytes, alike))
        names = [f"bucket {i}" for i in range(len(members))]
    groups = tuple(
        _group(name, [(i, leaves[i]) for i in ids], (ranks, replicas), lower, block)
        for name, ids in zip(names, members, strict=True)
    )
    asked = replace(layout.options, block=block)
    return replace(layout, groups=groups, ranks=ranks, options=asked)


def _nothing(path: str) -> None:
    """Return False: the default of a rule for leaves."""


def _by_size(
    leaves: Sequence[Leaf], bucket_bytes: int, kind: Callable[[str], Hashable]
) -> Iterator[list[int]]:
    def shared(i: int) -> tuple[Hashable, ...]:
        return *_stored_as(leaves[i]), kind(leaves[i].path)

    order = sorted(range(len(leaves)), key=lambda i: (str(shared(i)), i))
    for _, ids in groupby(order, key=shared):
        bucket: list[int] = []
        held = 0
        for i in ids:
            size = leaves[i].numel * leaves[i].stored_dtype.itemsize
            if bucket and held + size > bucket_bytes:
                yield bucket
                bucket, held = [], 0
            bucket.append(i)
            held += size
        yield bucket


def _by_unit(
    leaves: Sequence[Leaf], unit: Callable[[str], str], kind: Callable[[str], Hashable]
) -> tuple[list[list[int]], list[str]]:
    found: dict[Any, list[int]] = {}
    for i, leaf in enumerate(leaves):
        key = (unit(leaf.path), *_stored_as(leaf), kind(leaf.path))
        found.setdefault(key, []).append(i)
    return list(found.values()), [key[0] for key in found]


def _stored_as(leaf: Leaf) -> tuple[Hashable, ...]:
    """What the leaves of a group have in common."""
    return leaf.dtype, leaf.trainable, leaf.codec is not None


def _group(
    name: str,
    members: Sequence[tuple[int, Leaf]],
    cuts: tuple[int, int],
    lowered: Callable[[str], torch.dtype | None],
    block: int,
) -> Group:
    first = members[0][1]
    dtype, parts, encoded = first.stored_dtype, prod(cuts), first.codec is not None
    alignment = ALIGNMENT_BYTES // dtype.itemsize
    numels = [leaf.numel for _, leaf in members]
    offsets, part_numel = in_order(numels, parts, alignment, block=block)
    return Group(
        name=name,
        dtype=dtype,
        trainable=first.trainable,
        leaves=tuple(i for i, _ in members),
        offsets=offsets,
        shard_numel=part_numel * parts // cuts[0],
        communication_dtype=None if encoded else lowered(first.path),
        encoded=encoded,
    )


def _in_order(tree: Any) -> list[Any]:
    """Return the leaves of a tree, those of a dict in its own order; optree sorts the keys."""
    if optree.tree_is_leaf(tree, namespace=NAMESPACE):
        return [tree]
    children, _, entries, _ = optree.tree_flatten_one_level(tree, namespace=NAMESPACE)
    if isinstance(tree, dict):
        at = dict(zip(entries, children, strict=True))
        children = [at[key] for key in tree]
    return [leaf for child in children for leaf in _in_order(child)]


def _unique_leaves(
    paths: list[str],
    tensors: list[Tensor],
    order: Sequence[int],
    trainable: Callable[[str], bool] | None,
    encodes: Callable[[str, Tensor], Codec | None] | None,
) -> tuple[tuple[Leaf, ...], tuple[int, ...]]:
    seen: dict[Any, int] = {}
    leaves: list[Leaf] = []
    slots = [0] * len(order)
    for position in order:
        path, tensor = paths[position], tensors[position]
        index = seen.setdefault(identity(tensor), len(leaves))
        learning = learns(tensor) and (trainable is None or trainable(path))
        if index == len(leaves):
            # Floats of 8 bits are encoded already, as packed integers are.
            wide = tensor.is_floating_point() and tensor.itemsize > 1
            codec = encodes(path, tensor) if encodes and wide and not learning else None
            shape, dtype = tuple(tensor.shape), tensor.dtype
            leaves.append(
                Leaf(path=path, shape=shape, dtype=dtype, trainable=learning, codec=codec)
            )
        elif leaves[index].trainable != learning:
            frozen, other = (leaves[index].path, path) if learning else (path, leaves[index].path)
            raise LayoutError(
                f"{frozen} is frozen and {other} is not, and they are one tensor.",
                cause="tied weights of which one was frozen, or named by `trainable`, alone.",
                fix="freeze both, or neither.",
            )
        slots[position] = index
    return tuple(leaves), tuple(slots)


def named_leaves(params: Any) -> tuple[list[str], list[Tensor], optree.PyTreeSpec]:
    """Return the path, the tensor of each leaf, and the structure; raise for other leaves."""
    accessors, leaves, treespec = optree.tree_flatten_with_accessor(params, namespace=NAMESPACE)
    paths = [".".join(map(_component, accessor)) or "." for accessor in accessors]
    for path, leaf in zip(paths, leaves, strict=True):
        if (problem := _problem_with(leaf)) is not None:
            what = f"parameter {path} is" if accessors[0] else "the parameters are"
            seen, cause, fix = problem
            raise LayoutError(f"{what} {seen}.", cause=cause, fix=fix)
    return paths, leaves, treespec


def _problem_with(leaf: object) -> tuple[str, str, str] | None:
    """Return what is wrong with a parameter, the usual cause and the fix; None for a good one."""
    cause = "something that is not a dense tensor is among the parameters."
    fix = (
        "give it to the loss as an argument or a closure, or convert it (torch.as_tensor, "
        "view_as_real, to_dense)."
    )
    if isinstance(leaf, Tensor):
        if leaf.layout is not torch.strided:
            return f"a {leaf.layout} tensor", cause, fix
        if is_dtensor(leaf):
            cause = "fully_shard or parallelize_module was called on the module."
            fix = "leave that call out: fzero shards whole parameters; x.full_tensor() makes one."
            return "a DTensor, sharded already", cause, fix
        wrong = leaf.dtype is torch.complex32
        return ("a complex tensor of 16 bits", cause, fix) if wrong else None
    if isinstance(leaf, Module):
        cause = "a module in the place of its parameters."
        fix = "apply, params = fzero.functionalize(module) has its parameters."
    elif isinstance(leaf, Iterator):
        cause = "module.parameters(), or another iterator, which has no names and is used up."
        fix = "params = dict(module.named_parameters()), or fzero.functionalize(module)."
    elif is_dataclass(leaf):
        cause = "a dataclass that no library of pytrees knows: it counts as one leaf."
        fix = (
            'register it with @optree.dataclasses.dataclass(namespace="fzero") in the place of '
            "@dataclass, or give a dict of its fields."
        )
    return f"a {type(leaf).__name__}, not a tensor", cause, fix


def is_dtensor(x: object) -> bool:
    """Whether it is a torch.distributed.tensor.DTensor, without the import of that module.

    Example:
        >>> is_dtensor(torch.ones(2))
        False
    """
    return isinstance(x, Tensor) and hasattr(x, "device_mesh")


def _component(entry: optree.PyTreeEntry) -> str:
    if isinstance(entry, optree.NamedTupleEntry | optree.DataclassEntry):
        return str(entry.field if isinstance(entry, optree.NamedTupleEntry) else entry.name)
    return str(entry.entry)


def leaves_of(layout: Layout, params: Any) -> list[Tensor]:
    """Return the tensor of each leaf of `layout`.

    Raises `LayoutError` when `params` has another structure, shape or dtype than the layout.
    """
    paths, tensors, treespec = named_leaves(params)
    if treespec != layout.treespec:
        raise LayoutError(
            f"the pytree has the structure {treespec}, the layout {layout.treespec}.",
            cause="parameters of another model.",
            fix="pass a pytree of the same structure as the one given to init.",
        )
    first = {leaf: position for position, leaf in reversed(list(enumerate(layout.slots)))}
    by_leaf = []
    for i, leaf in enumerate(layout.leaves):
        tensor = tensors[first[i]]
        if tuple(tensor.shape) != leaf.shape or tensor.dtype != leaf.dtype:
            raise LayoutError(
                f"{paths[first[i]]} is {tuple(tensor.shape)} {tensor.dtype}, the layout "
                f"has {leaf.shape} {leaf.dtype}.",
                cause="parameters of another model or dtype.",
                fix="convert them first, or make a new state with init.",
            )
        by_leaf.append(tensor)
    return by_leaf


def matched(layout: Layout, tree: Any) -> list[tuple[int, Any]] | None:
    """Return (leaf, what stands in its place) of a tree like the parameters: of a tied leaf, each.

    None for a tree of another structure. None in the place of a leaf is what stands there.
    """
    wanted: Any = optree.tree_unflatten(layout.treespec, range(len(layout.slots)))
    numbers, expected = optree.tree_flatten(wanted, none_is_leaf=True, namespace=NAMESPACE)
    found, treespec = optree.tree_flatten(tree, none_is_leaf=True, namespace=NAMESPACE)
    if treespec != expected:
        return None
    return [(layout.slots[n], x) for n, x in zip(numbers, found, strict=True)]


def assemble(layout: Layout, by_leaf: Mapping[int, Any]) -> Any:
    """Return the pytree with `by_leaf[i]` at every place of leaf i, and None where there is none.

    Tied positions share a value.
    """
    return optree.tree_unflatten(layout.treespec, [by_leaf.get(i) for i in layout.slots])


# Find tensors that share memory: tied parameters are kept tied, overlaps are refused.
#
# A state stores each parameter apart from all else. So a parameter whose memory has a second handle
# (a transposed view, a slice, a buffer that is a view of it) would part from it in silence. Memory
# is compared by address: only tensors whose ranges of bytes meet are looked at closely, and
# exactly.

_TORCHS = frozenset(vars(nn.Module()))  # attributes that every module has: tables, and hooks
_FIRST = 4096  # where the memory of a placeholder begins, which has no address


class Holder(Enum):
    """How a module holds a tensor."""

    PARAMETER = auto()
    BUFFER = auto()
    ATTRIBUTE = auto()


@dataclass(frozen=True, slots=True, eq=False)
class HeldTensor:
    """A tensor of a module, its path, and how the module holds it."""

    path: str
    tensor: Tensor
    kind: Holder = Holder.PARAMETER


class _Region(NamedTuple):
    """Where the elements of a tensor are: addresses first <= x < end, in one address space."""

    space: Any
    first: int
    end: int
    held: HeldTensor


def identity(tensor: Tensor) -> Any:
    """Return a key that is equal for tensors that are one parameter: one object, or one memory.

    An int for those that can be known as an object only.

    Example:
        >>> x = torch.ones(2, 3)
        >>> identity(x) == identity(x.detach()), identity(x) == identity(x[:1])
        (True, False)
    """
    if type(tensor) not in (Tensor, nn.Parameter) or not tensor.numel() or tensor.is_meta:
        return id(tensor)
    if is_functorch_wrapped_tensor(tensor):  # it has no memory of its own to compare
        return id(tensor)
    shape = tuple(tensor.shape)
    # The stride of a dim of one element says nothing about where the elements are.
    strides = tuple(s if n > 1 else 0 for n, s in zip(shape, tensor.stride(), strict=True))
    bits = tensor.is_conj(), tensor.is_neg()
    return (tensor.data_ptr(), shape, strides, tensor.dtype, tensor.device, *bits)


def require_apart(
    held: Sequence[HeldTensor], *, buffers: bool = False, attributes: bool = False
) -> None:
    """Raise `LayoutError` if two of these tensors have an element in common.

    The same object, and parameters that are the same view, are one tensor. Pairs of which none is
    a parameter are looked at only if asked for: two `buffers`, a buffer and one of `attributes`.

    Example:
        >>> x = torch.ones(4, 2)
        >>> left, right = HeldTensor("left", x[:, 0]), HeldTensor("right", x[:, 1])
        >>> require_apart([left, right])  # no common element
        >>> require_apart([left, HeldTensor("all", x)])
        Traceback (most recent call last):
        ...
        fzero.errors.LayoutError: left and all have elements in common.
        Usual cause: ...
        Fix: ...
    """
    for one in held:
        if one.tensor.is_inference() and not torch.is_inference_mode_enabled():
            raise LayoutError(
                f"{one.path} was made under torch.inference_mode(): it cannot be trained.",
                cause="a model that was built, loaded or converted inside of such a block.",
                fix="build it outside, or under torch.no_grad().",
            )
    compared = {(Holder.BUFFER, Holder.BUFFER)} if buffers else set()
    if attributes:
        compared |= {(Holder.BUFFER, Holder.ATTRIBUTE), (Holder.ATTRIBUTE, Holder.BUFFER)}
    found = []
    for one, other in _meeting(held):
        if (
            Holder.PARAMETER not in (one.kind, other.kind)
            and (one.kind, other.kind) not in compared
        ):
            continue
        tied = one.kind is other.kind is Holder.PARAMETER
        if tied and identity(one.tensor) == identity(other.tensor):
            continue
        if np.shares_memory(_as_array(one.tensor), _as_array(other.tensor)):
            found.append(sorted((held.index(one), held.index(other))))
    if found:  # the first in the module's order: addresses differ by rank
        one, other = (held[i] for i in min(found))
        kind = "" if other.kind is Holder.PARAMETER else f" (a{_NAMES[other.kind]})"
        raise LayoutError(
            f"{one.path} and {other.path}{kind} have elements in common.",
            cause="p.data = q.data.t() or another view of a parameter's memory; a buffer or an "
            "attribute made by p.detach(), p.data or a slice. In fzero each parameter has memory "
            "of its own: the two would part at the first update.",
            fix="assign the parameter itself (`b.weight = a.weight`) to tie them, and transpose or "
            "slice it in the forward; or take a copy: .detach().clone().",
        )


def require_own_memory(
    module: nn.Module, *, buffers: bool = False, attributes: bool = False
) -> None:
    """Raise `LayoutError` if two tensors of a module have an element in common.

    `buffers`, `attributes`: as in `require_apart`. Attributes are tensors that modules hold
    themselves, or in lists, tuples, sets and dicts.
    """
    held = list(_held(module))
    for one in held:
        x = one.tensor
        if one.kind is not Holder.PARAMETER or not x.requires_grad:
            continue
        if any(n > 1 and s == 0 for n, s in zip(x.shape, x.stride(), strict=True)):
            raise LayoutError(
                f"{one.path}, of shape {tuple(x.shape)} and strides {x.stride()}, has fewer "
                "elements in memory than it shows.",
                cause="a parameter that was made by expand(). torch.optim cannot step it, either.",
                fix="clone it, nn.Parameter(x.expand(...).clone()); or keep the small parameter, "
                "and expand it in the forward.",
            )
    require_apart(held, buffers=buffers, attributes=attributes)


def _held(module: nn.Module) -> Iterator[HeldTensor]:
    """Yield the parameters, buffers and tensor attributes of a module; parameters come first."""
    for path, p in module.named_parameters(remove_duplicate=False):
        yield HeldTensor(path, p, Holder.PARAMETER)
    for path, buffer in module.named_buffers(remove_duplicate=False):
        yield HeldTensor(path, buffer, Holder.BUFFER)
    for path, part in module.named_modules():
        # Until its first forward this is a view of the parameter; each forward makes it anew.
        hooks = part._forward_pre_hooks.values()
        made = {hook.name for hook in hooks if isinstance(hook, SpectralNorm)}
        for name, value in vars(part).items():
            if name not in _TORCHS and name not in made:
                for where, x in _tensors_in(value, f"{path}.{name}".lstrip("."), set()):
                    yield HeldTensor(where, x, Holder.ATTRIBUTE)


def _tensors_in(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in an attribute, with their paths."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, list | tuple | set | frozenset | dict) and id(value) not in seen:
        seen.add(id(value))
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, part in items:
            yield from _tensors_in(part, f"{path}[{key!r}]", seen)


def _meeting(held: Sequence[HeldTensor]) -> Iterator[tuple[HeldTensor, HeldTensor]]:
    """Yield the pairs of different objects whose ranges of addresses meet."""
    seen: dict[int, _Region] = {}
    for one in held:
        if id(one.tensor) not in seen and (found := _region(one)) is not None:
            seen[id(one.tensor)] = found
    spaces: dict[Any, list[_Region]] = {}
    for region in seen.values():
        spaces.setdefault(region.space, []).append(region)
    for regions in spaces.values():
        regions.sort(key=lambda region: region.first)
        reaching: list[_Region] = []  # those before that end after this one begins
        for region in regions:
            reaching = [one for one in reaching if one.end > region.first]
            yield from ((one.held, region.held) for one in reaching)
            reaching.append(region)


def _region(held: HeldTensor) -> _Region | None:
    """Return the addresses of a tensor; None if it has no elements or no address."""
    x = held.tensor
    if isinstance(x, LazyParam):
        place, first = (id(x.reader), x.where), _FIRST + x.storage_offset() * x.element_size()
    elif not _has_memory(x):
        return None
    else:
        place, first = x.device, Tensor.data_ptr(x)
    if not x.numel() or not first:
        return None
    first, last = int(first), sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    return _Region(place, first, first + int(last + 1) * x.element_size(), held)


def _has_memory(x: Tensor) -> bool:
    """Whether a tensor has an address; a fake tensor has its storage on meta."""
    if is_lazy(x) or x.is_nested or x.layout is not torch.strided or is_functorch_wrapped_tensor(x):
        return False
    if isinstance(x, Memoryless):  # the stand-in of a gradient that a module has kept
        return False
    return not x.is_meta and Tensor.untyped_storage(x).device.type != "meta"


def _as_array(x: Tensor) -> Any:
    """Return a NumPy array of the shape, strides and address of `x`; it is never read."""
    size = x.element_size()
    lazy = isinstance(x, LazyParam)
    first = _FIRST + x.storage_offset() * size if lazy else Tensor.data_ptr(x)

    class View:
        __array_interface__ = {  # noqa: RUF012
            "version": 3,
            "typestr": f"|V{size}",
            "shape": tuple(x.shape),
            "strides": tuple(stride * size for stride in x.stride()),
            "data": (first, True),
        }

    return np.asarray(View())


_NAMES = {Holder.BUFFER: " buffer", Holder.ATTRIBUTE: "n attribute"}


# Parameters of classes of their own: a class may say what a module computes, or only hold facts.
#
# A state has plain numbers. Where an engine keeps the objects (stages 0 to 2, or one rank) they
# keep their class. Elsewhere something else stands in their place for a while, or for good, so that
# a class with a rule of its own would be lost without a word: it is refused when the state is made.

_PLAIN: tuple[type, ...] = (LazyParam, FakeTensor, FunctionalTensor, nn.UninitializedParameter)
_MAKING = {"__new__", "__init__", "__init_subclass__", "__class_getitem__"}
_COPYING = {"__copy__", "__deepcopy__", "__reduce__", "__reduce_ex__"}
_COPYING |= {"__getstate__", "__setstate__"}
_PRINTING = {"__repr__", "__str__", "__format__"}
_OF_EACH = {*vars(type("Empty", (), {})), "__annotations__", "__annotate_func__", "__slots__"}
_OF_EACH |= {"__annotations_cache__", "__classcell__", "__orig_bases__", "__parameters__"}
_OF_EACH |= {"__firstlineno__", "__static_attributes__", "__hash__", "__slotnames__"}
_OF_EACH |= {"__abstractmethods__", "_abc_impl"}
_NEUTRAL = _MAKING | _COPYING | _PRINTING | _OF_EACH


def own_names(x: Tensor) -> list[str]:
    """Return what the class of a tensor has beyond `nn.Parameter`, or `Tensor`; [] for most.

    How it is made, copied and printed does not count, nor what was set on the object.

    Example:
        >>> import torch
        >>> class Scaled(nn.Parameter):
        ...     def dequantized(self):
        ...         return self * self.scale
        >>> class Named(nn.Parameter):
        ...     def __repr__(self):
        ...         return "named"
        >>> own_names(Scaled(torch.ones(2))), own_names(Named(torch.ones(2)))
        (['dequantized'], [])
    """
    if isinstance(x, _PLAIN):
        return []
    between = [cls for cls in type(x).__mro__ if cls not in (*nn.Parameter.__mro__,)]
    of_parameter = vars(nn.Parameter).items()  # __torch_function__, off: said once more
    own = {
        name for cls in between for name, x in vars(cls).items() if (name, x) not in of_parameter
    }
    return sorted(own - _NEUTRAL)


def require_classes(named: Mapping[str, Tensor], *, keeps: bool) -> None:
    """Raise `LayoutError`, naming the path, for a class that would be lost.

    keeps: whether the objects stay what they are. A tensor that is made of others, without memory
    of its own (`__torch_dispatch__`), has no place in a state in any case.
    """
    for path, x in named.items():
        if isinstance(x, _PLAIN) or is_dtensor(x):  # the latter is refused as what it is
            continue
        if is_made_of_others(x):
            raise LayoutError(
                f"{path} is a {type(x).__name__}, a tensor that is made of others.",
                cause="quantized weights (torchao), or another subclass with a "
                "__torch_dispatch__: it has no memory that could be cut into shards.",
                fix="keep its parts in buffers (register_buffer), and put them together in the "
                "forward of the module; or train the plain weights: x.dequantize().",
            )
        names = [] if keeps else own_names(x)
        if names:
            raise LayoutError(
                f"{path} is a {type(x).__name__}, whose class has its own {', '.join(names[:4])}"
                f"{', ...' * (len(names) > 4)}.",
                cause="a quantized weight, or another subclass of nn.Parameter that says what the "
                "module computes; at stage 3 on several ranks, and in functional steps, plain "
                "tensors stand in its place.",
                fix="make an Engine at stage 0, 1 or 2, which keeps the object; or keep quantized "
                "values in a buffer (register_buffer), and their rule in the forward of the "
                "module. A class with nothing but attributes of its objects may stay.",
            )


def is_made_of_others(x: Tensor) -> bool:
    """Whether a tensor has no memory of its own, and says by `__torch_dispatch__` what it does."""
    kinds: list[Any] = [type(x), Tensor]
    return len({kind.__torch_dispatch__ for kind in kinds}) > 1
