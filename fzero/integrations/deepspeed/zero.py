"""`zero.Init` of DeepSpeed: modules of which each rank keeps its shard before an engine is made."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from fzero.adapter import sharded_init
from fzero.errors import LayoutError
from fzero.integrations.deepspeed._config import Config, low_dtype, read_config, with_defaults
from fzero.ranks.mesh import MeshLike

_HARMLESS = ("mem_efficient_linear", "pin_memory", "tensor_overrides")
_DEFAULTS = (None, False, "none")


class Init:
    """Shard the modules that are made in the block, or `module` at once: `sharded_init`.

    Args:
        module: one that is made already: when this returns it is as if it had been made in the
            block, at the values of rank 0. Every rank has it.
        config_dict_or_path: of `initialize`; says the dtype, by fp16.enabled or bf16.enabled.
        config: another name of it.
        enabled: False: nothing is done.
        dtype: of floating-point parameters; default what the config says, or their own.
        mesh: as for `Engine`.
        others: arguments of DeepSpeed's that must have their defaults, or have no effect.

    Raises:
        LayoutError: for a `module` that is none, and for others of those arguments.

    Example:
        >>> model = nn.Linear(3, 2)
        >>> _ = Init(module=model, dtype=torch.bfloat16)
        >>> model.weight.dtype
        torch.bfloat16
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        *,
        config_dict_or_path: Config | None = None,
        config: Config | None = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mesh: MeshLike = None,
        **others: Any,
    ) -> None:
        refused = {k: x for k, x in others.items() if k not in _HARMLESS and x not in _DEFAULTS}
        if refused or not isinstance(module, nn.Module | None):
            shown = ", ".join(f"{name}={value!r:.40}" for name, value in refused.items())
            raise LayoutError(
                f"zero.Init got {shown or f'a {type(module).__name__} as its module'}.",
                cause="an argument that fzero has in another place, or no nn.Module.",
                fix="ranks are mesh=; where parameters are, and codecs, are keys of the config.",
            )
        given = config if config_dict_or_path is None else config_dict_or_path
        if dtype is None and given is not None:
            dtype = low_dtype(with_defaults(read_config(given).given))
        self._enabled, self._mesh, self._dtype = enabled, mesh, dtype
        self._stack = ExitStack()
        if module is not None and enabled:
            with self:
                for part in module.modules():
                    for name, p in list(part.named_parameters(recurse=False)):
                        part.register_parameter(name, p)  # as if it were made here

    def __enter__(self) -> Self:
        """Begin a block of `sharded_init`."""
        if self._enabled:
            self._stack.enter_context(sharded_init(self._mesh, dtype=self._dtype))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Shard what was made in the block."""
        self._stack.__exit__(kind, error, trace)
