"""The root module's forward: where a step begins, and which outputs a backward can come from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fzero.adapter._assemble import Parts
from fzero.adapter._pytree import tensors_in
from fzero.errors import LayoutError, explain
from fzero.lazy import PeerFailedError
from fzero.transforms._modes import in_transform


class _Hook:
    """A hook on an engine's module. A copy of the module belongs to no engine: it does nothing."""

    def __init__(self, do: Callable[..., None]) -> None:
        self._do = do

    def __call__(self, *args: Any) -> None:
        self._do(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, (_nothing,)


def _nothing(*_: Any) -> None:
    """What a copied hook does."""


class Forward:
    """Two hooks on the root module; all that an engine does before and after its forward."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._depth = 0
        self._known = _known_parameters(parts)
        self._foreign = False  # this forward uses none of the engine's parameters, or is traced
        self._own = False  # this forward is a root one, no recompute and not inside another
        module = parts.parameters.module
        self._handles = [
            module.register_forward_pre_hook(_Hook(self._before), prepend=True),
            module.register_forward_hook(_Hook(self._after), always_call=True),
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
        self._foreign = in_transform() or self._with_other_tensors()
        with torch.inference_mode(False), torch.no_grad():  # what waits is for training
            self._own = not self._foreign and self._parts.backward.forward_begins()
        if self._own:
            self._require_same()
            self._parts.parameters.follow_all()
            source = self._parts.source
            if source is not None and not source.in_step:
                source.begin_step()

    def _after(self, module: Any, args: Any, output: Any) -> None:
        self._depth -= 1
        if self._depth > 0:
            return
        watches = torch.is_grad_enabled() and not self._foreign
        trains = watches and self._parts.backward.forward_ends(tensors_in(output))
        source = self._parts.source
        if source is not None and self._own:
            source.exchange.finish()
            if not trains:
                source.end_step()

    def _with_other_tensors(self) -> bool:
        """Whether torch.func.functional_call has put tensors in the place of all parameters."""
        now = (held.get(name) for held, name, *_ in self._known)
        return bool(self._known) and not any(isinstance(x, nn.Parameter) for x in now)

    def _require_same(self) -> None:
        """Raise for a parameter that was replaced, or unfrozen: it would not be trained.

        A tensor that is no parameter stands in for one while torch.func.functional_call runs.
        """
        for held, name, p, path, frozen in self._known:
            now = held.get(name)
            if now is not p and (now is None or isinstance(now, nn.Parameter)):
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
