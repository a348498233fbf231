"""The state of a run that a torch.optim optimizer has when it is bound: it is taken over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fzero.errors import LayoutError
from fzero.machine.partition import identity
from fzero.optim._bind import Bound
from fzero.optim._kept import KeptState
from fzero.state.layout import Leaf, learns

Held = dict[str, dict[str, Any]]
"""{path: {name: value}}: what an instance has for a parameter."""


def kept_by(bound: Bound, params: Mapping[str, Tensor]) -> Held:
    """Return what the instance keeps for its parameters, by path; of frozen ones, all there is.

    Tied paths have the same. Raises `LayoutError` for a state that is not what its rule keeps.
    """
    found: Held = {}
    for path, own in _by_member(bound).items():
        tied = identity(params[path])
        found |= {other: own for other, p in params.items() if identity(p) == tied}
    return found


def _by_member(bound: Bound) -> Held:
    instance, found = bound.instance, Held()
    for group, paths in zip(instance.param_groups, bound.members, strict=True):
        for path, p in zip(paths, group["params"], strict=False):  # a factory's are gone
            state = {k: x for k, x in instance.state.get(p, {}).items() if x is not None}
            if not (state and learns(p)):
                found |= {path: state} if state else {}
                continue
            kept = bound.kept_for(
                Leaf(path=path, shape=tuple(p.shape), dtype=p.dtype, trainable=True)
            )
            assert kept is not None, path
            own = {k: x for k, x in state.items() if k not in kept.unread}
            _require_fit(bound, path, p, own, kept)
            found[path] = own
    return found


def lines_of(held: Held) -> list[str]:
    """Return what ranks compare of it: names, shapes and counts."""
    return [f"the optimizer's state of {path}: {_shown(own)}" for path, own in held.items()]


def _shown(own: Mapping[str, Any]) -> str:
    def text(x: Any) -> str:
        return f"{tuple(x.shape)}" if isinstance(x, Tensor) and x.numel() != 1 else f"{float(x)}"

    return ", ".join(f"{name} {text(own[name])}" for name in sorted(own))


def _require_fit(
    bound: Bound, path: str, p: Tensor, own: Mapping[str, Any], kept: KeptState
) -> None:
    shapes = {
        k: tuple(x.shape) for k, x in own.items() if k in kept.slots and isinstance(x, Tensor)
    }
    cut = [k for k, shape in shapes.items() if shape != tuple(p.shape)]
    if own.keys() != kept.names or cut:
        raise LayoutError(
            f"{type(bound.instance).__name__} has {sorted(own)} for {path}"
            f"{f', {cut[0]} of shape {shapes[cut[0]]}' if cut else ''}; its rule keeps "
            f"{sorted(kept.names)}.",
            cause="a state_dict of a run with other options (momentum, amsgrad) or of another "
            "model, or an optimizer that was changed after its first steps.",
            fix="make the optimizer with the options of that run; or optimizer.state.clear(), to "
            "begin anew.",
        )
