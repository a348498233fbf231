"""What stands in `p.grad` while an engine holds the gradient: a tensor that asks the engine.

    norm()                    of the whole gradient, over all ranks; of all parameters at once
    elementwise operators     done on what each rank holds, operands of its shape cut with it
    zero_()                   zero_grad(set_to_none=False), on all parameters: the gradients drop
    what reads elements       at stage 0 the values; at stages 1 to 3 it raises
    what else writes          raises

So `torch.nn.utils.clip_grad_norm_`, masks and noise do what they do to ordinary gradients. A step
in which nobody touches `p.grad` does nothing of this.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from fzero.adapter.hooks import current_graph_task
from fzero.errors import PhaseError
from fzero.machine.placeholder import (
    ADDRESS,
    EXPORT,
    STORAGE,
    Memoryless,
    flat,
    is_elementwise,
    memoryless,
    run_watched,
    tells_nothing,
    written_by,
)

_ATEN = torch.ops.aten
_NORMS = (_ATEN.linalg_vector_norm.default, _ATEN._foreach_norm.Scalar)
_ZERO = (_ATEN.zero_, _ATEN._foreach_zero_)
_WAYS = {
    ADDRESS: "engine.full_gradient(path) to have a tensor with memory; count parameters by "
    "themselves, not by addresses",
    STORAGE: "module.share_memory() before the Engine, engine.full_gradient(path) to have one",
    EXPORT: "p.grad.clone() at stage 0, at each stage engine.full_gradient(path), to export a copy",
    "c10d": "p.grad as it is, without a collective: it is the mean over ranks already, and a "
    "division by their number that follows goes, too; another value is written by "
    "engine.set_full_gradient(path, g)",
    "_amp_": "loss_scale= of Engine and engine.scale(loss), in the place of a GradScaler",
}
_READ = (
    "engine.full_gradient(path), a collective, while the engine has it; p.grad.norm(), "
    "clip_grad_norm_ and elementwise operators work as they are"
)
_WRITE = (
    "engine.full_gradient(path), engine.set_full_gradient(path, g); elementwise operators work as "
    "they are (p.grad.mul_(mask), add_(torch.randn_like(p.grad)), copy_(g), p.grad[0] = 0)"
)


class _View(NamedTuple):
    """A view operator with its arguments; one view of several."""

    func: Any
    args: tuple[Any, ...]
    kwargs: Any
    at: int | None

    def __call__(self, x: Tensor) -> Tensor:
        seen = self.func(x, *self.args, **self.kwargs)
        return seen if self.at is None else seen[self.at]


class ShardedGrad(Memoryless):
    """Stands in `p.grad`: it has the parameter's shape, and no values of its own.

    leaf_shape: of the parameter. views: what it is a view of that by. own: if it was computed of
    gradients at stages 1 to 3, this rank's elements of it, [n] in the order of the leaf. compared:
    what ranks compare of the operands that it was computed with. edits: `GradGeneration.edits` when
    it was copied; -1 if it is no copy.
    """

    path: str
    number: int  # of its parameter, among those that learn
    generation: Any  # the `GradGeneration` whose gradient it is
    leaf_shape: torch.Size
    task: int = -1  # the graph task that brought the last one: what writes in it is a user's hook
    arrived: Tensor | None = None  # what a backward has added since
    views: tuple[_View, ...] = ()
    whole: bool = True  # it has each element of the gradient once
    own: Tensor | None = None
    compared: tuple[Any, ...] = ()
    edits: int = -1

    @staticmethod
    def __new__(cls, like: Tensor, number: int, path: str, generation: Any) -> ShardedGrad:
        """Make the stand-in for a gradient in the shape of `like`."""
        made = memoryless(cls, like, generation.device)
        made.number, made.path, made.leaf_shape = number, path, like.shape
        made.generation = generation
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Take what a backward adds; else do what can be done with a gradient that ranks share."""
        if func is _ATEN.detach.default:
            return args[0].beside(args[0]) if args[0].requires_grad else args[0]
        kwargs = kwargs or {}
        held = next(x for x in flat((args, list(kwargs.values()))) if isinstance(x, cls))
        task = current_graph_task()
        if task != -1:
            return held._in_backward(func, args, task)
        if func in _NORMS and (norms := _norms(func, args, kwargs)) is not None:
            return norms
        if func._overloadpacket in _ZERO and all(
            isinstance(x, cls) and x.whole and x.own is None for x in flat([args[0]])
        ):  # as they stand in p.grad, or seen whole in another shape
            for x in flat([args[0]]):
                x.by.zero(x)
            return None if isinstance(args[0], list | tuple) else args[0]
        if func.is_view and isinstance(args[0], cls):
            return held._seen(func, args[1:], kwargs)
        name = func._schema.name
        if name.endswith("_like") or name.startswith("aten::new_"):  # reads no element
            like = torch.empty((), dtype=held.dtype, device=held.device).expand(held.shape)
            return func(like, *args[1:], **kwargs)
        written = written_by(func, args, kwargs)
        edits = written and all(isinstance(x, cls) for x in written)
        derives = not written and not held.by.shows and kwargs.get("device") in (None, held.device)
        if (edits or derives) and is_elementwise(func):
            return _each(func, args, kwargs)
        for x in written:
            if isinstance(x, cls):
                x.begin_write(func)
        return _run_on_values(func, args, kwargs)

    @property
    def by(self) -> Any:
        """The generation that has the gradient. Raises `PhaseError` if that has it no more."""
        return self.generation.current(self.path)

    def _in_backward(self, func: Any, args: Any, task: int) -> Any:
        """What autograd adds is taken. A hook of the user's finds nothing that it may use yet."""
        if task != self.task and args[0] is self:
            if func is _ATEN.add_.Tensor:
                self.arrived = args[1]
                return self
            if func is _ATEN.add.Tensor:  # create_graph
                return args[1]
        raise without_graph() if self.requires_grad else self.refusal(f"{func}, in a backward")

    def _seen(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A view: its values are made when somebody reads them."""
        meta = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device="meta")
        shown = func(meta, *args, **kwargs)

        def view(like: Tensor, at: int | None) -> ShardedGrad:
            made = self.beside(like)
            made.views = (*self.views, _View(func, args, kwargs, at))
            same = like.numel() == self.numel() and func is not _ATEN.as_strided.default
            made.whole = self.whole and same
            return made

        if isinstance(shown, list | tuple):
            return [view(x, i) for i, x in enumerate(shown)]
        return view(shown, None)

    def beside(self, like: Tensor) -> ShardedGrad:
        """Another one of the same elements, as it is seen in `like`."""
        made = ShardedGrad(like, self.number, self.path, self.generation)
        made.leaf_shape, made.views, made.whole = self.leaf_shape, self.views, self.whole
        made.own, made.compared, made.edits = self.own, self.compared, self.edits
        return made

    def stand_for(self, task: int) -> None:
        """Stand for a gradient that graph task `task` has brought."""
        self.task, self.arrived = task, None

    def note_operands(self, operands: list[Any]) -> None:
        """Note operands of an edit of what it holds itself, which ranks compare."""
        self.compared, self.edits = (*self.compared, *operands), -1

    def seen_in(self, whole: Tensor) -> Tensor:
        """Return what this is of a tensor in the shape of its leaf: a view."""
        for view in self.views:
            whole = view(whole)
        return whole

    def values(self) -> Tensor:
        """Return its elements, a copy. Raises `PhaseError` at stages 1 to 3."""
        if current_graph_task() != -1:
            raise self.refusal("its elements, in a backward", _READ)
        by = self.by
        by.require_no_window(f"reading p.grad of {self.path}")
        if not by.shows:
            raise self.refusal(f"its elements, at stage {by.stage}", _READ)
        return self.seen_in(by.values(self)).to(self.dtype)

    def refusal(self, name: str, way: str = _WRITE) -> PhaseError:
        """Return the error for what cannot be done through p.grad."""
        way = next((text for key, text in _WAYS.items() if key in name), way)
        if self.requires_grad:
            way += (
                "; for a second loss grads = torch.autograd.grad(loss, params, create_graph=True)"
            )
        return PhaseError(
            f"the gradient of {self.path} was read or written through p.grad ({name}).",
            cause="code that works on the elements of p.grad: a GradScaler, an optimizer that was "
            "made after the engine or steps in a gradient hook, or an all-reduce by hand. The "
            "engine holds gradients reduced, and from stage 1 on sharded over the ranks.",
            fix=f"use {way}; engine.step() runs the optimizer that the engine was made with, and "
            "a Trainer or an Accelerator is made with fzero.integrations, without an Engine.",
        )

    @property
    def data(self) -> Tensor:
        """The same without a graph."""
        return self.detach()

    @data.setter
    def data(self, value: Any) -> None:
        if value is not self:  # as after p.grad.data *= 0.5
            self.copy_(value)

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
        if self.generation.at_hand and current_graph_task() == -1:
            shown = repr(self.values())
        return f"ShardedGrad({self.path}, {shown})"


def _norms(func: Any, args: Any, kwargs: Any) -> Any:
    """The norms that are asked for, or None if they are of parts of a gradient."""
    given = args[0] if isinstance(args[0], list | tuple) else [args[0]]
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    held = given[0]
    dims = args[2] if len(args) > 2 else kwargs.get("dim")
    keeps = args[3] if len(args) > 3 else kwargs.get("keepdim", False)
    some = dims is not None and len({dim % max(held.ndim, 1) for dim in dims}) < held.ndim
    if some or not all(x.whole and (x.own is None or x.edits == x.by.edits) for x in given):
        return None
    real = (kwargs.get("dtype") or held.dtype).to_real()
    dtype = real if kwargs.get("dtype") else torch.promote_types(real, torch.float32)
    found = [x.by.norm(x, float(order)).to(dtype) for x in given]
    if given is args[0]:
        return found
    return found[0].reshape([1] * held.ndim) if keeps else found[0]


def without_graph() -> PhaseError:
    """Return the error for gradients that are differentiated."""
    return PhaseError(
        "a loss of p.grad was to be differentiated: the engine's gradients have no graph.",
        cause="loss.backward(create_graph=True), and then a second loss of p.grad.",
        fix="make it of grads = torch.autograd.grad(loss, [*module.parameters()], "
        "create_graph=True), and run its backward; p.grad.detach() to look at it.",
    )


# Elementwise operators.


def _each(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an elementwise operator; one on lists (_foreach_add_) for each of what they hold."""
    if "::_foreach_" not in func._schema.name:
        return _elementwise(func, args, kwargs)
    found: list[Any] = []
    if isinstance(args[-1], Tensor) and args[-1].ndim:  # a number for each
        func = func._overloadpacket.ScalarList
        args = [*args[:-1], args[-1].tolist()]
    for i in range(len(args[0])):

        def one(x: Any, i: int = i) -> Any:
            return x[i : i + 1] if isinstance(x, list | tuple) else x

        one_of: Any = [one(x) for x in args], {name: one(x) for name, x in kwargs.items()}
        found.append(_elementwise(func, *one_of))
    return None if written_by(func, args, kwargs) else found


def _elementwise(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an elementwise operator on what this rank holds of gradients, and of what goes with them.

    Errors of shapes and dtypes are torch's own, and come before anything is changed.
    """
    of_call: Any = (args, {k: x for k, x in kwargs.items() if k not in ("device", "pin_memory")})
    every, written = flat((args, [*kwargs.values()])), written_by(func, args, kwargs)
    held: ShardedGrad = next(x for x in written or every if isinstance(x, ShardedGrad))
    metas: Any = optree.tree_map(_as_meta, of_call)
    shown = flat([func(*metas[0], **metas[1])])
    shown = written_by(func, *metas) if written else shown
    if len(shown) != 1 or shown[0].shape != held.shape:
        raise held.refusal(f"{func}", _WRITE if written else _READ)
    by, name = held.by, func._schema.name.partition("::")[2]
    start, stop = by.range(held)

    def part(x: Any, own: Tensor | None) -> Any:
        """Return this rank's elements of an operand; `own` is what is written."""
        if isinstance(x, list | tuple):
            return [part(one, own) for one in x]
        if own is not None and x is held:
            return own
        if isinstance(x, ShardedGrad) and not x.by.shows:
            if (x.number, x.views) != (held.number, held.views):
                raise x.refusal(f"{func}, with the gradient of {held.path}", _READ)
            return (x.by.piece(x, name) if x.own is None else x.own).to(x.dtype)
        x = x.values() if isinstance(x, Memoryless) else x
        if not isinstance(x, Tensor) or not x.ndim:
            return x
        if own is not None and x.dtype == held.dtype:
            x = x.to(own.dtype)
        return _cut(held, x, start, stop)

    def run(own: Tensor | None) -> Any:
        """Return this rank's elements of the result, of those of what is written."""
        changed = own.clone() if own is not None and held.views else own
        given: Any = [part(x, changed) for x in of_call[0]]
        try:
            result = func(*given, **{k: part(x, changed) for k, x in of_call[1].items()})
        except NotImplementedError as error:  # of this dtype, which a meta tensor does not say
            raise held.refusal(f"{func}: {error}") from error
        if own is None or changed is own:
            return flat([result])[0] if own is None else own
        inside = torch.ones((), dtype=torch.bool, device=held.device).expand(held.shape)
        return own.copy_(torch.where(_cut(held, inside, start, stop), changed, own))  # type: ignore

    operands = [x for x in every if x is not None and all(x is not one for one in written)]
    with torch.inference_mode(False), torch.no_grad():
        operands = by.compared(operands)
        if written and held.own is None:
            by.write(held, name, operands, run)
        elif written:
            run(held.own)
            held.note_operands(operands)
        else:
            made = held.beside(shown[0])
            copies = held.own is None and name in ("clone", "_to_copy")
            made.edits = by.edits if copies else -1
            made.own, made.compared = run(None).to(made.dtype), tuple(operands)
            return made
    return written[0]


def _as_meta(x: Any) -> Any:
    """The shape and the dtype of a tensor."""
    if not isinstance(x, Tensor):
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _cut(held: ShardedGrad, x: Tensor, start: int, stop: int) -> Tensor:
    """[..] -> [n]: elements `start` to `stop` of a leaf, of what has the shape of a gradient of it.

    Where that is a view, the others are 0. What is broadcast is made for the rows in question.
    """
    if held.views:
        whole = x.new_zeros(held.leaf_shape)
        held.seen_in(whole).copy_(x)
        x = whole
    x = x.expand(held.leaf_shape)
    if x.ndim > 1 and not x.is_contiguous() and x.numel():
        row = x[0].numel()
        first = start // row
        x = x[first : -(-stop // row)]
        start, stop = start - first * row, stop - first * row
    return x.reshape(-1)[start:stop]


def _run_on_values(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator on the values of gradients. Raises `PhaseError` if it has written to them."""
    found: list[tuple[ShardedGrad, Tensor]] = []

    def fill(x: Any) -> Any:
        if not isinstance(x, ShardedGrad):
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
