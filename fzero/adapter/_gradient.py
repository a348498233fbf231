"""What stands in `p.grad` while an engine holds the gradient: a tensor that says where it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fzero.adapter._events import current_graph_task
from fzero.errors import LayoutError, PhaseError

_WAYS = {
    "norm": "engine.clip_grad_norm_(max_norm), or max_norm= of Engine; the norm is "
    "engine.global_grad_norm",
    "_amp_": "loss_scale= of Engine and engine.scale(loss), in the place of a GradScaler",
    "clamp": "a hook on the parameter, p.register_hook(lambda g: g.clamp(-1, 1)), which runs "
    "before the gradient is reduced",
    "_to_copy": "module.to(...), .half() and the like before the Engine is made",
    "zero_": "engine.zero_grad(), or module.zero_grad()",
}


class HeldGradient(Tensor):
    """Stands in `p.grad`: it has the parameter's shape, and no values of its own."""

    path: str
    arrived: Tensor | None
    task: int  # the graph task that brought the last gradient: what writes in it is a user's hook

    @staticmethod
    def __new__(cls, p: Tensor, path: str) -> HeldGradient:
        """Make the stand-in for the gradient of `p`."""
        made = Tensor._make_wrapper_subclass(cls, p.shape, dtype=p.dtype, device=p.device)
        made.path, made.arrived, made.task = path, None, -1
        return made

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Take what a backward adds; refuse everything else, with the engine's way."""
        if func is torch.ops.aten.detach.default:
            return args[0]
        held = next(x for x in _flat(args) if isinstance(x, HeldGradient))
        comes = current_graph_task() not in (-1, held.task)
        if func is torch.ops.aten.add_.Tensor and args[0] is held and comes:
            held.arrived = args[1]
            return held
        if func is torch.ops.aten.add.Tensor and args[0] is held and comes:  # create_graph
            return args[1]
        raise held._refusal(str(func))

    def _refusal(self, name: str) -> PhaseError:
        way = next((text for key, text in _WAYS.items() if key in name), "")
        return PhaseError(
            f"the gradient of {self.path} was read or written through p.grad ({name}).",
            cause="code that works on p.grad: clipping, a GradScaler, an optimizer that was "
            "made after the engine or steps in a gradient hook, or an all-reduce by hand. The "
            "engine holds gradients reduced, and sharded over the ranks.",
            fix=f"use {way or 'engine.full_gradient(path), engine.set_full_gradient(path, g)'}"
            "; engine.step() runs the optimizer that the engine was made with.",
        )

    def tolist(self) -> Any:
        """Raise `PhaseError`: there are no values here."""
        raise self._refusal("tolist")

    def numpy(self, **_: Any) -> Any:
        """Raise `PhaseError`: there are no values here."""
        raise self._refusal("numpy")

    def __repr__(self) -> str:
        return f"HeldGradient({self.path}, shape={tuple(self.shape)})"

    def taken(self) -> Tensor | None:
        """Return what a backward has added, and forget it."""
        arrived, self.arrived = self.arrived, None
        return arrived


class Gradients:
    """The stand-ins of an engine's parameters, and whether somebody touched `p.grad`.

    A stand-in stays in `p.grad` while a backward runs: autograd adds the new gradient to it, and
    the engine takes that. So it is still there after a backward that raised, and zero_grad() then
    drops the gradients that the engine held before.
    """

    def __init__(self, learning: Sequence[tuple[Tensor, str]]) -> None:
        self._learning = [(p, HeldGradient(p, path)) for p, path in learning]
        self._of = {id(p): held for p, held in self._learning}
        self._standing = False

    def dropped(self, first: Tensor | None = None) -> bool:
        """Whether the user has set every `p.grad` to None.

        `first` is a parameter that autograd has written to since: it counts as one set to None.
        Raises `LayoutError`, until that is mended, if some were replaced (a gradient written by
        hand would be lost) or set to None.
        """
        if not self._standing:
            return False
        others = [(p, p.grad, held) for p, held in self._learning if p.grad is not held]
        for p, gradient, held in others:
            if gradient is not None and p is not first:
                raise LayoutError(
                    f"p.grad of {held.path} was replaced by a tensor.",
                    cause="a gradient written by hand, or by another backward engine.",
                    fix="write engine.set_full_gradient(path, value), the same on every rank; "
                    "engine.zero_grad() throws all gradients away, this one, too.",
                )
        if others and len(others) < len(self._learning):
            raise LayoutError(
                f"p.grad of {others[0][2].path} was set to None, and those of other parameters "
                "were not.",
                cause="an optimizer's zero_grad() of some of the parameters.",
                fix="drop all of them with engine.zero_grad(), or freeze a part with "
                "requires_grad_(False) before the backward.",
            )
        return bool(others)

    def require_taken(self) -> None:
        """Raise `LayoutError` for a `p.grad` that no backward has brought: it would be lost."""
        for p, held in () if self._standing else self._learning:
            if p.grad is not None and p.grad is not held:
                raise LayoutError(
                    f"p.grad of {held.path} is a tensor that the engine has not got by a backward.",
                    cause="a gradient written by hand, or one from before the engine was made.",
                    fix="write engine.set_full_gradient(path, value) after a backward, the same on "
                    "every rank; engine.zero_grad() throws this one away.",
                )

    @property
    def gone(self) -> bool:
        """Whether every `p.grad` is None where stand-ins were."""
        return self._standing and all(p.grad is None for p, _ in self._learning)

    def drop(self) -> None:
        """Take the stand-ins away, whatever is there."""
        self.forget()
        for p, _ in self._learning:
            p.grad = None

    def forget(self) -> None:
        """The user has taken the stand-ins away."""
        self._standing = False

    def stand_for(self, p: Tensor, task: int) -> None:
        """Put the stand-in of one parameter in its place: its gradient was taken, or refused.

        task: the graph task that brought it.
        """
        p.grad = held = self._of[id(p)]
        held.task, held.arrived = task, None

    def stand(self) -> None:
        """Put the stand-ins in their places: the engine holds gradients now."""
        self._standing = True
        for p, held in self._learning:
            p.grad = held


def _flat(args: Any) -> list[Any]:
    return [x for arg in args for x in (arg if isinstance(arg, list | tuple) else (arg,))]
