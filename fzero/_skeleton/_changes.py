"""What a forward did to the buffers that it was given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fzero._skeleton._copy import settle
from fzero._skeleton._part import Part, join
from fzero.errors import LayoutError, explain


def update_error(what: str, names: list[str]) -> LayoutError:
    """Say that buffers held as constants would be, or were, updated."""
    listed = ", ".join(name or "the module" for name in names[:8]) + ", ..." * (len(names) > 8)
    return LayoutError(
        explain(
            f"the forward updates {what}: {listed}; here they are constants, and keep their value.",
            cause="BatchNorm, spectral_norm, a counter, or a cache made on first use.",
            fix="`apply, params, buffers = functionalize(module, buffers=True)`, then "
            "`out, buffers = apply(params, *args, buffers=buffers)`; or module.eval() before.",
        )
    )


def _version(value: Tensor | None) -> int:
    """Count the writes to a tensor; inference tensors keep no count."""
    return 0 if value is None or value.is_inference() else value._version


def stamps_of(module: nn.Module) -> dict[str, tuple[Tensor | None, int]]:
    """Say which tensor each buffer is, and how often it was written to."""
    return {key: (value, _version(value)) for key, value in module._buffers.items()}


def changes_of(
    part: Part, module: nn.Module, stamps: dict[str, tuple[Tensor | None, int]]
) -> dict[str, Tensor | None]:
    """Give the buffers that are no longer as stamped, by first name; None for one dropped."""
    now = module._buffers
    found: dict[str, Tensor | None] = {}
    for key in stamps | now:
        value, version = stamps.get(key, (None, 0))
        new = now.get(key)
        if new is not value or _version(new) != version:
            found[part.buffers.get(key, join(part.path, key))] = new
    return found


def rewritten(
    parts: list[Part], clean: Sequence[dict[str, Any]], template: nn.Module
) -> dict[str, Tensor | None]:
    """Give the constants whose bits are not those of the template.

    `F.batch_norm` writes running statistics without counting the write, and torch.func.grad lets
    it: no version tells. Hence this comparison after the first call in each mode.
    """
    settle(template)
    found: dict[str, Tensor | None] = {}
    for part, held, original in zip(parts, clean, template.modules(), strict=True):
        for key, path in part.buffers.items():
            value = held["_buffers"][key]
            # Fake, meta, sparse and quantized tensors have no bits to look at here.
            plain = type(value) is Tensor and value.layout is torch.strided
            if plain and not value.is_meta and not value.is_quantized:
                was = original.get_buffer(key)
                if not torch.equal(_bits(value), _bits(was)):
                    found[path] = value
    return found


def _bits(value: Tensor) -> Tensor:
    return value.reshape(-1).view(torch.uint8)
