"""What stands in `p.grad` while an engine holds the gradient: a tensor that asks the engine.

    norm()                    of the whole gradient, over all ranks; of all parameters at once
    mul_, div_, clamp_        done on what each rank holds
    zero_()                   zero_grad(set_to_none=False), on all parameters: the gradients drop
    what reads elements       at stage 0 the values; at stages 1 to 3 it raises
    what else writes          raises

So `torch.nn.utils.clip_grad_norm_` and `clip_grad_value_` do what they do to ordinary gradients. A
step in which nobody touches `p.grad` does nothing of this.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import optree
import torch
from torch import Tensor

from fzero.adapter._life import Life, Serves
from fzero.adapter._torch_hooks import current_graph_task
from fzero.errors import PhaseError
from fzero.machine.memoryless import ADDRESS, EXPORT, STORAGE, Memoryless, memoryless
from fzero.machine.written import flat, run_watched, tells_nothing, written_by

_ATEN = torch.ops.aten
_NORMS = (_ATEN.linalg_vector_norm.default, _ATEN._foreach_norm.Scalar)
_ZERO = (_ATEN.zero_, _ATEN._foreach_zero_)
_BY_NUMBER = {
    _ATEN.mul_: "mul_",
    _ATEN._foreach_mul_: "mul_",
    _ATEN.div_: "div_",
    _ATEN._foreach_div_: "div_",
    _ATEN.clamp_: "clamp_",
    _ATEN.clamp_min_: "clamp_min_",
    _ATEN._foreach_clamp_min_: "clamp_min_",
    _ATEN.clamp_max_: "clamp_max_",
    _ATEN._foreach_clamp_max_: "clamp_max_",
}
"""What may be written, by one number for all elements: then every rank can do it to its part."""

_WAYS = {
    ADDRESS: "engine.full_gradient(path) to have a tensor with memory; count parameters by "
    "themselves, not by addresses",
    STORAGE: "module.share_memory() before the Engine, engine.full_gradient(path) to have one",
    EXPORT: "p.grad.clone() at stage 0, at each stage engine.full_gradient(path), to export a copy",
    "c10d": "p.grad as it is, without a collective: it is the mean over ranks already, and a "
    "division by their number that follows goes, too; another value is written by "
    "engine.set_full_gradient(path, g)",
    "_amp_": "loss_scale= of Engine and engine.scale(loss), in the place of a GradScaler",
    "set_data": "engine.set_full_gradient(path, g) to write values; module.to(...), .half() and "
    "the like before the Engine is made",
}
_READ = (
    "engine.full_gradient(path), a collective, while the engine has it; p.grad.norm() and "
    "clip_grad_norm_ work as they are"
)
_WRITE = "engine.full_gradient(path), engine.set_full_gradient(path, g)"


class HeldGradient(Memoryless):
    """Stands in `p.grad`: it has the parameter's shape, and no values of its own.

    `views`: what was applied to it since: of a view, or of a copy in another dtype.
    """

    path: str
    number: int  # of its parameter, among those that learn
    life: Life
    arrived: Tensor | None = None
    task: int = -1  # the graph task that brought the last one: what writes in it is a user's hook
    views: tuple[Callable[[Tensor], Tensor], ...] = ()
    whole: bool = True  # it has each element of the gradient once
    copied: bool = False  # what is written to it does not reach the gradient

    @staticmethod
    def __new__(cls, like: Tensor, number: int, path: str, life: Life) -> HeldGradient:
        """Make the stand-in for a gradient in the shape of `like`."""
        made = memoryless(cls, like, life.device)
        made.number, made.path, made.life = number, path, life
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Take what a backward adds; else do what can be done with a gradient that ranks share."""
        if func is _ATEN.detach.default:
            return args[0]
        kwargs = kwargs or {}
        held = next(x for x in flat((args, list(kwargs.values()))) if isinstance(x, cls))
        task = current_graph_task()
        if task != -1:
            return held._in_backward(func, args, task)
        if func in _NORMS and (norms := _norms(func, args, kwargs)) is not None:
            return norms
        packet = func._overloadpacket
        if packet in _ZERO and _may_be_written(args[0]):
            return _zeroed(args[0])
        numbers = _are_numbers([*args[1:], *kwargs.values()])
        if packet in _BY_NUMBER and numbers and _may_be_written(args[0]):
            return _written(_BY_NUMBER[packet], args, kwargs)
        moves = kwargs.get("device") not in (None, held.device)
        copies = func is _ATEN._to_copy.default and not held.by.shows and not moves
        if (func.is_view or copies) and isinstance(args[0], cls):
            return held._seen(func, args[1:], kwargs)
        for x in written_by(func, args, kwargs):
            if isinstance(x, cls):
                x.begin_write(func)
        return _run_on_values(func, args, kwargs)

    def stand_for(self, task: int) -> None:
        """Stand for a gradient that graph task `task` has brought."""
        self.task, self.arrived = task, None

    @property
    def by(self) -> Serves:
        """Who has the gradient. Raises `PhaseError` if nobody has it any more."""
        return self.life.by(self.path)

    def _in_backward(self, func: Any, args: Any, task: int) -> Any:
        """What autograd adds is taken. A hook of the user's finds nothing that it may use yet."""
        if task != self.task and args[0] is self:
            if func is _ATEN.add_.Tensor:
                self.arrived = args[1]
                return self
            if func is _ATEN.add.Tensor:  # create_graph
                return args[1]
        raise self.refusal(f"{func}, in a backward", _WRITE)

    def _seen(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A view, or a copy in another dtype: its values are made when somebody reads them."""
        meta = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device="meta")
        kept = {name: x for name, x in kwargs.items() if name not in ("device", "pin_memory")}
        shown = func(meta, *args, **kept)

        def view(like: Tensor, at: int | None) -> HeldGradient:
            made = HeldGradient(like, self.number, self.path, self.life)

            def seen(x: Tensor) -> Tensor:
                found = func(x, *args, **kwargs)
                return found if at is None else found[at]

            made.views = (*self.views, seen)
            same = like.numel() == self.numel() and func is not _ATEN.as_strided.default
            made.whole, made.copied = self.whole and same, self.copied or not func.is_view
            return made

        if isinstance(shown, list | tuple):
            return [view(x, i) for i, x in enumerate(shown)]
        return view(shown, None)

    def values(self) -> Tensor:
        """Return its elements, a copy. Raises `PhaseError` at stages 1 to 3."""
        if current_graph_task() != -1:
            raise self.refusal("its elements, in a backward", _READ)
        by = self.by
        by.require_no_window(f"reading p.grad of {self.path}")
        if not by.shows:
            raise self.refusal(f"its elements, at stage {by.stage}", _READ)
        x = by.values(self)
        for view in self.views:
            x = view(x)
        return x.to(self.dtype)

    def refusal(self, name: str, way: str = _WRITE) -> PhaseError:
        """Return the error for what cannot be done through p.grad."""
        way = next((text for key, text in _WAYS.items() if key in name), way)
        return PhaseError(
            f"the gradient of {self.path} was read or written through p.grad ({name}).",
            cause="code that works on the elements of p.grad: a GradScaler, an optimizer that was "
            "made after the engine or steps in a gradient hook, or an all-reduce by hand. The "
            "engine holds gradients reduced, and from stage 1 on sharded over the ranks.",
            fix=f"use {way}; engine.step() runs the optimizer that the engine was made with, and "
            "a Trainer or an Accelerator is made with fzero.integrations, without an Engine.",
        )

    @property
    def data(self) -> HeldGradient:
        """The same: it has no graph."""
        return self

    @data.setter
    def data(self, value: Any) -> None:
        if value is not self:  # as after p.grad.data *= 0.5
            raise self.refusal("set_data")

    def begin_write(self, func: Any) -> None:
        """Raise `PhaseError`: what is written does not reach the gradient."""
        self.by.require_no_window(f"{func} of p.grad of {self.path}")
        raise self.refusal(str(func), _WRITE)

    def without_memory(self, what: str) -> PhaseError:
        """Return the error for what asked for its memory."""
        return self.refusal(what)

    def __deepcopy__(self, memo: Any) -> Any:
        return self.values()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.values().__reduce_ex__(protocol)

    def __repr__(self, **_: Any) -> str:
        shown = f"shape={tuple(self.shape)}"
        if self.life.at_hand and current_graph_task() == -1:
            shown = repr(self.values())
        return f"HeldGradient({self.path}, {shown})"

    def taken(self) -> Tensor | None:
        """Return what a backward has added, and forget it."""
        arrived, self.arrived = self.arrived, None
        return arrived


def _norms(func: Any, args: Any, kwargs: Any) -> Any:
    """The norms that are asked for, or None if they are of parts of a gradient."""
    given = args[0] if isinstance(args[0], list | tuple) else [args[0]]
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    held = given[0]
    dims = args[2] if len(args) > 2 else kwargs.get("dim")
    keeps = args[3] if len(args) > 3 else kwargs.get("keepdim", False)
    some = dims is not None and len({dim % max(held.ndim, 1) for dim in dims}) < held.ndim
    if some or not _are_whole(given):
        return None
    real = (kwargs.get("dtype") or held.dtype).to_real()
    dtype = real if kwargs.get("dtype") else torch.promote_types(real, torch.float32)
    found = [x.by.norm(x, float(order)).to(dtype) for x in given]
    if given is args[0]:
        return found
    return found[0].reshape([1] * held.ndim) if keeps else found[0]


def _zeroed(held: Any) -> Any:
    for one in flat([held]):
        one.by.zero(one)
    return None if isinstance(held, list | tuple) else held  # an op on a list returns nothing


def _written(name: str, args: Any, kwargs: Any) -> Any:
    """Let each gradient be changed by the numbers: one for all, or one for each."""
    held, *numbers = args
    every = held if isinstance(held, list | tuple) else [held]
    if name.startswith("clamp") and any(x.is_complex() for x in every):
        raise every[0].refusal(f"{name} of complex numbers, which torch has not, either", _WRITE)
    if name == "clamp_":
        low, high = [*numbers, None, None][:2]
        numbers = [kwargs.get("min", low), kwargs.get("max", high)]
    elif not numbers:
        numbers = list(kwargs.values())
    for i, one in enumerate(every):
        own = [x[i] if isinstance(x, list | tuple) else x for x in numbers]
        one.by.write(one, name, own)
    return None if every is held else held  # an op on a list returns nothing


def _are_whole(held: Any) -> bool:
    """Whether they are gradients as they stand in p.grad, or seen whole in another shape."""
    return all(isinstance(x, HeldGradient) and x.whole for x in flat([held]))


def _may_be_written(held: Any) -> bool:
    return _are_whole(held) and not any(x.copied for x in flat([held]))


def _are_numbers(given: Any) -> bool:
    """Whether each of these is a number, or a tensor of one element that is no gradient."""

    def is_number(x: Any) -> bool:
        one = isinstance(x, Tensor) and x.numel() == 1 and not isinstance(x, HeldGradient)
        return one or x is None or isinstance(x, int | float)

    return all(is_number(x) for x in flat(list(given)))


def _run_on_values(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator on the values of gradients. Raises `PhaseError` if it has written to them."""
    found: list[tuple[HeldGradient, Tensor]] = []

    def fill(x: Any) -> Any:
        if not isinstance(x, HeldGradient):
            return x
        found.append((x, x.values()))
        return found[-1][1]

    of_call: Any = (args, kwargs)
    given, options = optree.tree_map(fill, of_call)
    call = partial(func, *given, **options)
    if not tells_nothing(func):
        return call()
    result, before = run_watched(call, [values for _, values in found])
    for i in before:
        raise found[i][0].refusal(str(func), _WRITE)
    return result
