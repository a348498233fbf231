"""The root module's forward: where a step begins, and which outputs a backward can come from."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fzero.adapter._assemble import Parts
from fzero.adapter._pytree import tensors_in
from fzero.errors import LayoutError, explain
from fzero.lazy import PeerFailedError


class Forward:
    """Two hooks on the root module; all that an engine does before and after its forward."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._depth = 0
        self._known = _known_parameters(parts)
        self._own = False  # this forward is a root one, no recompute and not inside another
        module = parts.parameters.module
        self._handles = [
            module.register_forward_pre_hook(self._before, prepend=True),
            module.register_forward_hook(self._after, always_call=True),
        ]

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def failed(self, error: BaseException) -> None:
        """A forward or backward raised: forget what it left, and tell the other ranks."""
        parts = self._parts
        self._depth, self._own = 0, False
        if parts.backward.inside():  # a recompute: the backward that it is part of comes here, too
            return
        try:
            if parts.source is not None and not isinstance(error, PeerFailedError):
                parts.source.exchange.fail()
        finally:
            parts.backward.abandon()

    def _before(self, module: Any, args: Any) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        self._own = self._parts.backward.forward_begins()
        if self._own:
            self._require_same()
            source = self._parts.source
            if source is not None and not source.in_step:
                source.begin_step()

    def _after(self, module: Any, args: Any, output: Any) -> None:
        self._depth -= 1
        if self._depth > 0:
            return
        trains = torch.is_grad_enabled() and self._parts.backward.forward_ends(tensors_in(output))
        source = self._parts.source
        if source is not None and self._own:
            source.exchange.finish()
            if not trains:
                source.end_step()

    def _require_same(self) -> None:
        """Raise for a parameter that was replaced, or unfrozen: it would not be trained."""
        for held, name, p, path, frozen in self._known:
            if held.get(name) is not p:
                seen, cause = "is another tensor now than", "an assignment after Engine(...)"
            elif frozen and p.requires_grad:
                seen, cause = "requires grad now, unlike", "requires_grad_(True) after Engine(...)"
            else:
                continue
            raise LayoutError(
                explain(
                    f"{path} {seen} when the engine was made.",
                    cause=f"{cause}: it has no bucket and no optimizer state.",
                    fix="make the engine when the module is as it will be; freeze parts with "
                    "requires_grad_(False), and write values with fzero.adapter.gathered.",
                )
            )


def _known_parameters(parts: Parts) -> list[tuple[dict[str, Any], str, Tensor, str, bool]]:
    """(its module's dict, name, parameter, path, whether it was frozen) of all parameters."""
    return [
        (owner._parameters, name, p, f"{prefix}.{name}".lstrip("."), not p.requires_grad)
        for prefix, owner in parts.parameters.module.named_modules()
        for name, p in owner._parameters.items()
        if p is not None
    ]
