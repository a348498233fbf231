"""The parameters that an optimizer factory receives: a list that knows their names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor

from fzero.machine.partition import identity
from fzero.state.layout import learns


class NamedParameters(list[nn.Parameter]):
    """A list of parameters that has a module's methods `named_parameters` and `parameters`.

    Example:
        >>> w, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(1))
        >>> params = NamedParameters({"w": w, "b": b})
        >>> len(params), [name for name, p in params.named_parameters() if p.numel() > 1]
        (2, ['w'])
    """

    def __init__(self, params: Mapping[str, nn.Parameter]) -> None:
        super().__init__(params.values())
        self._names = tuple(params)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield (path, parameter), as `nn.Module.named_parameters`."""
        yield from zip(self._names, self, strict=True)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield each parameter, as `nn.Module.parameters`."""
        yield from self


def given_to(params: Mapping[str, Tensor]) -> NamedParameters:
    """Return the parameters that learn, each once: themselves, or others on their memory."""
    found: dict[object, tuple[str, nn.Parameter]] = {}
    for path, p in params.items():
        if learns(p) and (key := identity(p)) not in found:
            found[key] = path, _as_parameter(p)
    return NamedParameters(dict(found.values()))


def _as_parameter(p: Tensor) -> nn.Parameter:
    if isinstance(p, nn.Parameter):
        return p
    if is_functorch_wrapped_tensor(p):  # inside a transform: only its shape is looked at
        return nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="meta"))
    return nn.Parameter(p.detach())
