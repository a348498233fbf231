"""An op of a program as it is called: every argument by name, with values in place of tensors."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

import torch
from torch import fx

from fzero.tools.prove._reading import Interpretation
from fzero.tools.prove._terms import Symbolic, Terms


class OpCall(NamedTuple):
    """A call of an ATen op.

    target: the exact overload whose meaning counts; of a write in place, the one out of place.
    args: all arguments of the schema, also those that were left out, in its order. dtypes: of the
    tensors among them, in order. results: (shape, dtype) of each. draw: its number among the draws.
    """

    reading: Interpretation
    target: torch._ops.OpOverload
    args: dict[str, Any]
    dtypes: tuple[torch.dtype, ...]
    results: tuple[tuple[tuple[int, ...], torch.dtype | None], ...]
    several: bool = False
    draw: int = 0

    @property
    def terms(self) -> Terms:
        """All terms."""
        return self.reading.terms

    @property
    def values(self) -> list[Symbolic]:
        """The tensors among the arguments, in order."""
        return list(symbols(tuple(self.args.values())))

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of the first result."""
        return self.results[0][1] if self.results else None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the first result."""
        return self.results[0][0]

    def head(self, *more: Hashable) -> tuple[Hashable, ...]:
        """Return what names this function of tensors: the op and all that is no tensor."""
        code = tuple((name, _encoded(name, x)) for name, x in self.args.items())
        name = self.target._schema.name.split("::")[1]
        made = tuple(dtype for _, dtype in self.results)
        return name, self.target, self.dtypes, made, code, *more


def symbols(x: Any) -> Iterator[Symbolic]:
    """Yield the values in an argument."""
    if isinstance(x, Symbolic):
        yield x
    elif isinstance(x, tuple | list):
        for one in x:
            yield from symbols(one)


def _encoded(name: str, x: Any) -> Hashable:
    """Return an argument with its type: 1, 1.0 and True are three, None is no tensor."""
    if isinstance(x, Symbolic):
        return "tensor"
    if isinstance(x, tuple | list):
        return ("list", *(_encoded(name, one) for one in x))
    if isinstance(x, float):
        return "float", x.hex()
    if x is None or isinstance(x, bool | int | str | complex):
        return type(x).__name__, repr(x)
    if isinstance(x, torch.dtype | torch.device | torch.layout | torch.memory_format):
        return type(x).__name__, str(x)
    raise NotImplementedError(f"its argument {name} is a {type(x).__name__}")


def call_of(
    reading: Interpretation,
    node: fx.Node,
    value: Callable[[Any], Any],
    *,
    target: torch._ops.OpOverload | None = None,
) -> OpCall:
    """Return the call that a node is, complete: defaults are filled in by the schema."""
    op: Any = node.target
    arguments = op._schema.arguments
    names = [one.name for one in arguments]
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    if len(node.args) > len(names) or set(given) - set(names):
        raise NotImplementedError(f"{op} has no such arguments")
    missing = [
        one.name for one in arguments if one.name not in given and not one.has_default_value()
    ]
    if missing:
        raise NotImplementedError(f"its argument {missing[0]} is not given")
    full = {one.name: given.get(one.name, one.default_value) for one in arguments}
    val = node.meta.get("val")
    several = isinstance(val, list | tuple)
    made: Any = val if several else [val]
    return OpCall(
        reading=reading,
        target=target or op,
        args={name: value(x) for name, x in full.items()},
        dtypes=tuple(one.meta["val"].dtype for one in _nodes(tuple(full.values()))),
        results=tuple((tuple(getattr(x, "shape", ())), getattr(x, "dtype", None)) for x in made),
        several=several,
    )


def _nodes(x: Any) -> Iterator[fx.Node]:
    if isinstance(x, fx.Node):
        yield x
    elif isinstance(x, tuple | list):
        for one in x:
            yield from _nodes(one)
