"""`record`: the one decorator for state that carries tensors."""

from __future__ import annotations

import dataclasses
from typing import Any, NoReturn, TypeVar, dataclass_transform

import optree.dataclasses
import torch.utils._pytree as torch_pytree

from fzero.errors import explain

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
