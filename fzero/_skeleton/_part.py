"""What a module consists of: the names under which its submodules hold tensors."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from fzero.errors import LayoutError, explain


class Part(NamedTuple):
    """One submodule of the user's module, as it was when it was functionalized."""

    path: str
    source: weakref.ref[nn.Module]  # weak: `apply` must not keep the module's parameters alive
    children: list[int]  # ids; every child is a part too, so none is reused unnoticed
    parameters: dict[str, str]  # attribute -> first qualified name of its tensor
    buffers: dict[str, str]
    tracks: bool  # a norm that updates running statistics whenever it trains


def parts_of(module: nn.Module) -> list[Part]:
    """Every submodule, in the order of `module.modules()`."""
    first: dict[int, str] = {}

    def named(path: str, table: Mapping[str, Tensor | None]) -> dict[str, str]:
        kept = [(key, value) for key, value in table.items() if value is not None]
        return {key: first.setdefault(id(value), join(path, key)) for key, value in kept}

    return [
        Part(
            path=path,
            source=weakref.ref(part),
            children=[*map(id, part._modules.values())],
            parameters=named(path, part._parameters),
            buffers=named(path, part._buffers),
            tracks=isinstance(part, _NormBase)
            and part.track_running_stats
            and part.running_mean is not None,
        )
        for path, part in module.named_modules()
    ]


def join(path: str, key: str) -> str:
    """The qualified name of an attribute."""
    return f"{path}.{key}" if path else key


def mode_of(part: Part) -> bool:
    """Read `.training` from the user's submodule, if it still holds what it held."""
    source = part.source()
    if source is not None and part.children == [*map(id, source._modules.values())]:
        kept = [key for key, value in source._parameters.items() if value is not None]
        if kept == [*part.parameters]:
            return source.training
    raise LayoutError(
        explain(
            f"{part.path or 'the module'} gained, lost or replaced submodules or parameters.",
            cause="the module was edited after `functionalize`.",
            fix="call `functionalize(module)` again, and use the new `apply` and `params`.",
        )
    )
