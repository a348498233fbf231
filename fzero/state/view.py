"""How a train state shows itself: as text, as HTML, and as bytes by kind."""

from __future__ import annotations

import html
from math import prod
from typing import Any

import optree
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from fzero.context.here import has_no_values
from fzero.errors import LayoutError
from fzero.state._record import NAMESPACE
from fzero.state.alive import donated
from fzero.state.offload import is_on_disk
from fzero.state.setup import Setup


def state_bytes(state: Any) -> dict[str, int]:
    """Bytes that this rank holds, by kind: parameters, gradients, optimizer, window, total.

    The window has what is not reduced yet, the residual of encoded gradients, and full parameters
    that it keeps; the optimizer also the anchors and the outer momentum of local updates. What
    transforms keep is under the kind that its form says, by default "slots", which a state without
    any has not. Of a state that is offloaded also by place: on device, in host memory, on disk.

    Raises `LayoutError` for what is no state.

    Example:
        >>> import torch, fzero
        >>> state = fzero.init({"w": torch.zeros(3, 4)}, fzero.optim.adam(1e-3), stage=0)
        >>> state_bytes(state)["parameters"], state_bytes(state)["optimizer"]
        (48, 104)
    """
    require_state("state_bytes", state)
    kinds = _kinds(state)
    found = {kind: _tree_bytes(tree) for kind, tree in kinds.items()}
    total = sum(found.values())
    if state.setup.offload.neutral:
        return {**found, "total": total}
    return {**found, "total": total, **_by_home(state, kinds, total)}


def _kinds(state: Any) -> dict[str, Any]:
    """Return {kind: all tensors of that kind}, of which none is in two kinds."""
    found: dict[str, list[Any]] = {
        "parameters": [state.params],
        "gradients": [state.gradients],
        "optimizer": [state.optimizer],
        "window": [state.window],
    }
    for slot in state.slots.values():
        if slot.form.kind != "numbers":
            found.setdefault(slot.form.kind, []).append(slot)
    return found


def require_state(name: str, given: Any) -> None:
    """Raise `LayoutError` for what is no state, where one is wanted."""
    if not isinstance(getattr(given, "setup", None), Setup):
        raise LayoutError(
            f"{name}: expected one TrainState, got a {type(given).__name__}.",
            cause="parameters, a pytree of states, (state, loss), or an engine.",
            fix="pass one TrainState: one call for each state; an engine's is engine.state.",
        )


def _by_home(state: Any, kinds: dict[str, Any], total: int) -> dict[str, int]:
    homes = state.setup.offload.homes
    of = {"parameters": homes["params"]}
    of |= dict.fromkeys(("optimizer", "slots"), homes["optimizer"])
    disk = host = 0
    for kind, tree in kinds.items():
        home = of.get(kind, homes["gradients"])
        for x in optree.tree_leaves(tree, namespace=NAMESPACE):
            if isinstance(x, Tensor) and x.ndim:
                numel_bytes = x.numel() * x.element_size()
                disk += numel_bytes * (is_on_disk(x) or (has_no_values(x) and home == "disk"))
                host += numel_bytes * (home == "cpu")
    return {"on device": total - disk - host, "in host memory": host, "on disk": disk}


def as_text(state: Any) -> str:
    """The lines of `repr(state)`."""
    setup, layout = state.setup, state.setup.layout
    frozen = sum(not leaf.trainable for leaf in layout.leaves)
    numel = sum(prod(leaf.shape) for leaf in layout.leaves)
    head = (
        f"TrainState(stage={setup.stage}, {setup.axis}, step={_step(state)}, "
        f"phase={state.phase.value!r}{', donated' if donated(state) else ''})"
    )
    leaves = f"  {len(layout.leaves)} leaves ({frozen} frozen), {numel:,} elements"
    rows = [f"  {kind:<11}{text}" for kind, text in _rows(state)]
    return "\n".join([head, f"{leaves} in {len(layout.groups)} groups", *rows])


def as_html(state: Any) -> str:
    """A table of the same facts, and one row for each group."""
    lines = as_text(state).splitlines()
    kinds = "".join(
        f"<tr><td>{html.escape(kind)}</td><td>{html.escape(text)}</td></tr>"
        for kind, text in _rows(state)
    )
    layout = state.setup.layout
    groups = "".join(
        f"<tr><td>{html.escape(group.name)}</td><td>{len(group.leaves)}</td>"
        f"<td>{group.shard_numel:,} x {layout.ranks}</td>"
        f"<td>{html.escape(str(group.dtype).removeprefix('torch.'))}</td>"
        f"<td>{'' if group.trainable else 'frozen'}</td></tr>"
        for group in layout.groups
    )
    header = "<tr><th>group</th><th>leaves</th><th>shard x ranks</th><th>dtype</th><th></th></tr>"
    return (
        f"<b>{html.escape(lines[0])}</b><br>{html.escape(lines[1])}"
        f"<table>{kinds}</table><table>{header}{groups}</table>"
    )


def _rows(state: Any) -> list[tuple[str, str]]:
    setup, found = state.setup, state_bytes(state)
    places = {
        "parameters": setup.params.value,
        "gradients": state.gradients.placement.value if state.gradients.held else "none",
        "optimizer": setup.optimizer_state.value,
        "window": f"open, {state.progress.backwards} backwards"
        if state.window.is_open
        else "closed",
    }
    places["window"] += ", with a residual" if "residual" in state.slots else ""
    if (outer := state.outer) is not None:
        places["optimizer"] += f", with anchors, {outer.updates} of {outer.local.every} updates"
    shown = [name for name, slot in state.slots.items() if slot.form.kind == "slots"]
    if shown:
        places["slots"] = ", ".join(dict.fromkeys(name.partition("/")[0] for name in shown))
    return [(kind, f"{place}, {found[kind]:,} bytes") for kind, place in places.items()]


def _tree_bytes(tree: Any) -> int:
    leaves = optree.tree_leaves(tree, namespace=NAMESPACE)
    return sum(x.numel() * x.element_size() for x in leaves if isinstance(x, Tensor))


def _step(state: Any) -> str:
    # Under a torch.func transform, or with a leading rank dim, it is not one number.
    return str(state.step.tolist()) if _is_plain(state.step) else "?"


def _is_plain(x: Any) -> bool:
    return type(x) is Tensor and not is_functorch_wrapped_tensor(x)
