"""Pytree of tensors <-> flat padded groups <-> shards. Pure functions and a recorded layout.

params --plan_layout--> Layout
params --leaves_of, pack--> one flat [W l] for each group --shard_of--> [l]
flats --unpack_groups, assemble--> params
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass, replace
from itertools import groupby
from math import prod
from typing import Any

import optree
import torch
from torch import Tensor
from torch.nn import Module

from fzero.errors import LayoutError
from fzero.machine.memory import identity as identity
from fzero.machine.packing import ALIGNMENT_BYTES, in_order
from fzero.machine.packing import shard_of as shard_of
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


def named_leaves(params: Any) -> tuple[list[str], list[Tensor], optree.PyTreeSpec]:
    """Return the path, the tensor of each leaf, and the structure; raise for other leaves."""
    accessors, leaves, treespec = optree.tree_flatten_with_accessor(params, namespace=NAMESPACE)
    paths = [".".join(map(_component, accessor)) or "." for accessor in accessors]
    for path, leaf in zip(paths, leaves, strict=True):
        problem = _problem_with(leaf)
        if problem:
            what = f"parameter {path} is" if accessors[0] else "the parameters are"
            raise LayoutError(f"{what} {problem}.", cause=_cause_of(leaf), fix=_fix_for(leaf))
    return paths, leaves, treespec


def is_dtensor(x: object) -> bool:
    """Whether it is a torch.distributed.tensor.DTensor, without the import of that module.

    Example:
        >>> is_dtensor(torch.ones(2))
        False
    """
    return isinstance(x, Tensor) and hasattr(x, "device_mesh")


def _cause_of(leaf: object) -> str:
    if isinstance(leaf, Module):
        return "a module in the place of its parameters."
    if isinstance(leaf, Iterator):
        return "module.parameters(), or another iterator, which has no names and is used up."
    if is_dtensor(leaf):
        return "fully_shard or parallelize_module was called on the module."
    if is_dataclass(leaf):
        return "a dataclass that no library of pytrees knows: it counts as one leaf."
    return "something that is not a dense tensor is among the parameters."


def _fix_for(leaf: object) -> str:
    if isinstance(leaf, Module):
        return "apply, params = fzero.functionalize(module) has its parameters."
    if isinstance(leaf, Iterator):
        return "params = dict(module.named_parameters()), or fzero.functionalize(module)."
    if is_dtensor(leaf):
        return "leave that call out: fzero shards whole parameters; x.full_tensor() makes one."
    if is_dataclass(leaf):
        return (
            'register it with @optree.dataclasses.dataclass(namespace="fzero") in the place of '
            "@dataclass, or give a dict of its fields."
        )
    return (
        "give it to the loss as an argument or a closure, or convert it (torch.as_tensor, "
        "view_as_real, to_dense)."
    )


def _component(entry: optree.PyTreeEntry) -> str:
    if isinstance(entry, optree.NamedTupleEntry | optree.DataclassEntry):
        return str(entry.field if isinstance(entry, optree.NamedTupleEntry) else entry.name)
    return str(entry.entry)


def _problem_with(leaf: object) -> str:
    if not isinstance(leaf, Tensor):
        return f"a {type(leaf).__name__}, not a tensor"
    if leaf.layout is not torch.strided:
        return f"a {leaf.layout} tensor"
    if is_dtensor(leaf):
        return "a DTensor, sharded already"
    return "a complex tensor of 16 bits" if leaf.dtype is torch.complex32 else ""


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
