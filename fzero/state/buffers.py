"""Flat buffers and the tag that says what a rank's copy of them means."""

from __future__ import annotations

import dataclasses
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, dataclass_transform

import optree.dataclasses
import torch
import torch.utils._pytree as torch_pytree
from torch import Tensor
from typing_extensions import TypeVar

from fzero.errors import CallError, PhaseError, explain

# `record`: the one decorator for state that carries tensors.

NAMESPACE = "fzero"


def static(**options: Any) -> Any:
    """Return a field that lives in the treespec: compared and hashed, never mapped over."""
    module: Any = optree.dataclasses  # of `field` it knows a part of the types
    return module.field(pytree_node=False, **options)


def _refuse(record: Any, name: str, value: Any = None) -> NoReturn:
    raise dataclasses.FrozenInstanceError(
        explain(
            f"cannot assign to field {name!r} of a {type(record).__name__}, nor delete it.",
            cause="a record taken for an object that changes; what a step, or a function of fzero, "
            "was given stays as it is.",
            fix=f"make another one: state = state.replace({name}=...), where that is right; what "
            "fzero does to states it returns: state = fzero.apply_gradients(state).",
        )
    )


_T = TypeVar("_T")


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(static,))
def record(cls: type[_T]) -> type[_T]:
    """Make `cls` a frozen, slotted, keyword-only dataclass that both pytree libraries know.

    optree (namespace "fzero") is what fzero itself maps with. torch's own registry is needed as
    well because `torch.func` sees no other: without it a record inside `torch.func.grad` fails.
    Fields made with `static()` go into the treespec; every other field is a child.

    Example:
        >>> import torch, optree
        >>> @record
        ... class Pair:
        ...     a: torch.Tensor
        ...     name: str = static()
        >>> p = Pair(a=torch.ones(2), name="x")
        >>> optree.tree_map(lambda t: t + 1, p, namespace="fzero").a
        tensor([2., 2.])
    """
    made: Any = optree.dataclasses.dataclass(
        cls, namespace=NAMESPACE, frozen=True, slots=True, kw_only=True, eq=False
    )
    fields = dataclasses.fields(made)
    children = tuple(f.name for f in fields if f.metadata.get("pytree_node", True))
    statics = tuple(f.name for f in fields if f.name not in children)

    def flatten(value: Any) -> tuple[list[Any], tuple[Any, ...]]:
        # None is no leaf, as in optree; torch would take it for one.
        present = tuple(n for n in children if getattr(value, n) is not None)
        kept = tuple(getattr(value, n) for n in statics)
        return [getattr(value, n) for n in present], (present, kept)

    def unflatten(leaves: Any, context: tuple[Any, ...]) -> Any:
        present, kept = context
        found = dict.fromkeys(children) | dict(zip(present, leaves, strict=True))
        return made(**found, **dict(zip(statics, kept, strict=True)))

    torch_pytree.register_pytree_node(made, flatten, unflatten)
    made.__setattr__ = made.__delattr__ = (
        _refuse  # that of a slotted dataclass fails with a TypeError
    )
    return made


SIXTEEN_BIT = (torch.float16, torch.bfloat16)
"""What is summed in fp32, and has fp32 masters, unless somebody says otherwise."""


class Placement(Enum):
    """What the ranks' copies of a buffer are to each other, with S shards in each of R replicas.

    On a mesh of one dim there is one replica, and S is the number of ranks, W.
    """

    REPLICATED = "replicated"  # [S l]: every rank has the same full values
    SHARDED = "sharded"  # [l]: the s-th rank of each replica has shard s of the full values
    OVER_ALL = "sharded over all ranks"  # [l / R]: replica r has the r-th part of each shard
    BY_RANK = "sharded over all ranks, by their numbers"  # [l / R]: rank r has the r-th part
    PARTIAL = "partial"  # [S l]: the full value is the sum of all ranks' copies
    OWNER = "owner"  # a whole tensor on the rank that owns its leaf, nothing on the others


@record
class Buffers:
    """One flat tensor for each group, all with one placement; without flats: no values.

    Example:
        >>> import torch
        >>> Buffers(flats=(torch.zeros(4),), placement=Placement.PARTIAL).held
        True
    """

    flats: tuple[Tensor, ...] = ()
    placement: Placement = static(default=Placement.REPLICATED)

    @property
    def held(self) -> bool:
        """Whether there are values: whether it is not empty."""
        return bool(self.flats)

    __iter__: ClassVar[None] = None  # else Python would ask __getitem__

    def __getitem__(self, key: Any) -> NoReturn:
        """Raise `CallError`: what is known by path is in flat buffers, a part on each rank."""
        raise CallError(
            f"{key!r} of flat buffers, which have no items.",
            cause="state.params or state.gradients taken for the pytree that a state is made of.",
            fix=f"use fzero.full_params(state)[{key!r}], or fzero.gradients(state)[{key!r}]: at "
            "stage 3, and of gradients from stage 2 on, collectives, which every rank calls.",
        )

    if not TYPE_CHECKING:  # a type checker would take any name for one of the record

        def __getattr__(self, name: str) -> NoReturn:
            """Raise `AttributeError`, which says where names are: hasattr() asks, too."""
            seen = f"flat buffers have no attribute {name!r}."
            if not name.startswith("__"):
                seen = explain(
                    seen,
                    cause="state.params or state.gradients taken for the pytree of them.",
                    fix="fzero.full_params(state) and fzero.gradients(state) return pytrees.",
                )
            raise AttributeError(seen, name=name, obj=self)


def add(old: Buffers, new: Buffers) -> Buffers:
    """Return old + new, elementwise; both must mean the same.

    Raises `PhaseError` for buffers of different placements: the sum would mean nothing.
    """
    if not old.held:
        return new
    if old.placement is not new.placement:
        raise PhaseError(
            f"a {new.placement.value} gradient met a {old.placement.value} one.",
            cause="records were combined by hand.",
            fix="reduce first: fzero.gradients(state) and fzero.apply_gradients do.",
        )
    flats = tuple(a + b for a, b in zip(old.flats, new.flats, strict=True))
    return Buffers(flats=flats, placement=old.placement)


def require_reduced(gradients: Buffers) -> Buffers:
    """Return `gradients`, unless they are PARTIAL: an update from those would be wrong."""
    if gradients.placement is Placement.PARTIAL:
        raise PhaseError(
            "the gradients are partial: each rank holds only what it computed itself.",
            cause="an update was made from a coalescing window's local sum.",
            fix="let fzero.apply_gradients(state) close the window; it reduces first.",
        )
    return gradients
