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

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import optree
import torch
from torch import Tensor

from fzero.adapter.hooks import current_graph_task
from fzero.collectives import gather_many
from fzero.errors import PhaseError
from fzero.machine.packing import LeafRange, hashed, leaf_ranges
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
from fzero.state import Buffers, Setup, TrainState
from fzero.state.layout import as_complex, stored_dtype
from fzero.transforms.loss_scale import without_scale
from fzero.transforms.weights import averaged

# One life of an engine's gradients: from the backward that brings the first to what drops them.
#
# A stand-in that somebody keeps belongs to its life. When that is over, it shows what it showed
# last,
# as a gradient of torch does after `zero_grad()`, or raises: never the next gradient.


class Serves(Protocol):
    """Whoever has the gradients that stand-ins stand for.

    device: where they are. stage: of the engine. shows: whether every rank has all of them.
    at_hand: whether it shows them now without a collective. edits: how often they have changed.
    """

    device: torch.device
    stage: int
    shows: bool
    edits: int

    @property
    def at_hand(self) -> bool:
        """Whether this rank has the gradient."""
        ...

    def norm(self, held: Any, order: float) -> Tensor:
        """Return the norm of a whole gradient. A collective."""
        ...

    def range(self, held: Any) -> tuple[int, int]:
        """Return which elements of a gradient this rank has: the first, and the one behind."""
        ...

    def piece(self, held: Any, name: str) -> Tensor:
        """Return those, as an update would use them: [n], a copy. A collective."""
        ...

    def told(self, operands: Sequence[Any]) -> list[Any]:
        """Return what ranks compare of the operands of an operator."""
        ...

    def write(
        self, held: Any, name: str, told: Sequence[Any], run: Callable[[Tensor], Tensor]
    ) -> None:
        """Make this rank's elements of a gradient what `run` makes of them. A collective."""
        ...

    def zero(self, held: Any) -> None:
        """Set a gradient to zero."""
        ...

    def values(self, held: Any) -> Tensor:
        """Return the elements of a gradient, a copy. Only where this `shows` them."""
        ...

    def require_no_window(self, name: str) -> None:
        """Raise `PhaseError` inside of a window, where they are not reduced."""
        ...


class HoldsState(Protocol):
    """Whoever has the state that the gradients are in."""

    @property
    def state(self) -> TrainState:
        """The state now."""
        ...

    @property
    def closed(self) -> bool:
        """Whether it is used no more."""
        ...

    @property
    def user_dropped(self) -> bool:
        """Whether the user has set every `p.grad` to None since."""
        ...

    def drop_if_user_did(self) -> None:
        """Forget the gradients if so."""
        ...

    def require_not_closed(self) -> None:
        """Raise `PhaseError` if it is used no more."""
        ...

    def require_no_window(self, name: str) -> None:
        """Raise `PhaseError` inside a window."""
        ...

    def call(self, name: str) -> None:
        """Wait until every rank makes this call."""
        ...

    def with_gradients(self, name: str) -> TrainState:
        """Return the state with all gradients reduced, for a call of this name. A collective."""
        ...

    def put_each(self, change: Callable[[TrainState], TrainState]) -> None:
        """Change the state, and that from before a window."""
        ...


class Lives(Serves, Protocol):
    """Whoever has them now."""

    def notice(self) -> None:
        """Drop them if the user has dropped them."""
        ...


class Life:
    """One life of gradients. `end` ends it, and says who has them from then on, if anybody has."""

    def __init__(self, by: Lives) -> None:
        self._by = weakref.ref(by)  # weak: the garbage collector does not look into p.grad
        self.device = by.device
        self._over = False
        self._left: Serves | None = None

    def end(self, left: Serves | None) -> None:
        """They are dropped; `left` has what they were."""
        self._over, self._left = True, left

    def by(self, path: str) -> Serves:
        """Return who has the gradients of this life. Raises `PhaseError` if nobody has."""
        by = self._by()
        if by is not None and not self._over:
            by.notice()
        if self._left is not None:
            return self._left
        if self._over:
            raise PhaseError(
                f"a gradient of {path} from before it was dropped or used.",
                cause="a p.grad that was kept over zero_grad() or step(). It was never reduced, as "
                "in a window; or the update has scaled it in place (max_norm, a loss scale).",
                fix="take a copy while it is there: engine.full_gradient(path), or p.grad.clone() "
                "at stage 0.",
            )
        if by is None:
            raise PhaseError(
                "p.grad is the stand-in of an engine that is gone.",
                cause="the engine was made in a function, and nothing holds it any more.",
                fix="keep the engine for as long as its module is used, or close() it.",
            )
        return by

    @property
    def at_hand(self) -> bool:
        """Whether elements are there without a collective."""
        by = self._left if self._over else self._by()
        return by is not None and by.at_hand


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


class HeldGradient(Memoryless):
    """Stands in `p.grad`: it has the parameter's shape, and no values of its own.

    leaf_shape: of the parameter. views: what it is a view of that by. own: if it was computed of
    gradients at stages 1 to 3, this rank's elements of it, [n] in the order of the leaf. told: what
    ranks compare of the operands that it was computed with. edits: `Serves.edits` when it was
    copied; -1 if it is no copy.
    """

    path: str
    number: int  # of its parameter, among those that learn
    life: Life
    leaf_shape: torch.Size
    arrived: Tensor | None = None
    task: int = -1  # the graph task that brought the last one: what writes in it is a user's hook
    views: tuple[_View, ...] = ()
    whole: bool = True  # it has each element of the gradient once
    own: Tensor | None = None
    told: tuple[Any, ...] = ()
    edits: int = -1

    @staticmethod
    def __new__(cls, like: Tensor, number: int, path: str, life: Life) -> HeldGradient:
        """Make the stand-in for a gradient in the shape of `like`."""
        made = memoryless(cls, like, life.device)
        made.number, made.path, made.life, made.leaf_shape = number, path, life, like.shape
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
        if func._overloadpacket in _ZERO and _are_in_place(args[0]):
            return _zeroed(args[0])
        if func.is_view and isinstance(args[0], cls):
            return held._seen(func, args[1:], kwargs)
        if _reads_nothing(func):
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
        raise without_graph() if self.requires_grad else self.refusal(f"{func}, in a backward")

    def _seen(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A view: its values are made when somebody reads them."""
        meta = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device="meta")
        shown = func(meta, *args, **kwargs)

        def view(like: Tensor, at: int | None) -> HeldGradient:
            made = self.beside(like)
            made.views = (*self.views, _View(func, args, kwargs, at))
            same = like.numel() == self.numel() and func is not _ATEN.as_strided.default
            made.whole = self.whole and same
            return made

        if isinstance(shown, list | tuple):
            return [view(x, i) for i, x in enumerate(shown)]
        return view(shown, None)

    def beside(self, like: Tensor) -> HeldGradient:
        """Another one of the same elements, as it is seen in `like`."""
        made = HeldGradient(like, self.number, self.path, self.life)
        made.leaf_shape, made.views, made.whole = self.leaf_shape, self.views, self.whole
        made.own, made.told, made.edits = self.own, self.told, self.edits
        return made

    def also_tell(self, operands: Sequence[Any]) -> None:
        """Note operands of an edit of what it holds itself, which ranks compare."""
        self.told, self.edits = (*self.told, *operands), -1

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
    if some or not all(x.whole and (x.own is None or x.edits == x.by.edits) for x in given):
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


def _are_in_place(held: Any) -> bool:
    """Whether they are gradients as they stand in p.grad, or seen whole in another shape."""
    return all(isinstance(x, HeldGradient) and x.whole and x.own is None for x in flat([held]))


def _reads_nothing(func: Any) -> bool:
    """Whether an operator makes a tensor in the shape or the dtype of its first argument."""
    name = func._schema.name
    return name.endswith("_like") or name.startswith("aten::new_")


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
    held: HeldGradient = next(x for x in written or every if isinstance(x, HeldGradient))
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
        if isinstance(x, HeldGradient) and not x.by.shows:
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
        told = by.told(operands)
        if written and held.own is None:
            by.write(held, name, told, run)
        elif written:
            run(held.own)
            held.also_tell(told)
        else:
            made = held.beside(shown[0])
            copies = held.own is None and name in ("clone", "_to_copy")
            made.edits = by.edits if copies else -1
            made.own, made.told = run(None).to(made.dtype), tuple(told)
            return made
    return written[0]


def _as_meta(x: Any) -> Any:
    """The shape and the dtype of a tensor."""
    if not isinstance(x, Tensor):
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _cut(held: HeldGradient, x: Tensor, start: int, stop: int) -> Tensor:
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


# Where the gradient of each parameter is in a state: its elements, and the norms of all.


class GradientAddress(NamedTuple):
    """Where the gradient of one parameter object is in a state."""

    leads: bool  # of several objects on one memory, which are one leaf, the first has its gradient
    number: int  # of its group among those that learn
    index: int  # of its group
    here: LeafRange  # what this rank's part has of it

    def norm(self, norms: Mapping[int, Tensor]) -> Tensor:
        """Its own of the norms by leaf."""
        norm = norms[self.here.leaf].clone()
        return norm if self.leads else torch.zeros_like(norm)

    def range(self, state: TrainState) -> tuple[int, int]:
        """Which of its elements this rank has, of a state with gradients."""
        by = 2 if state.setup.layout.leaves[self.here.leaf].dtype.is_complex else 1
        return self.here.start // by, self.here.stop // by

    def flat(self, state: TrainState) -> Tensor:
        """What this rank holds of it: a view."""
        return self.here.of(state.gradients.flats[self.number])

    def piece(self, state: TrainState) -> Tensor:
        """This rank's elements of it as an update would use them: [n], a copy."""
        found = averaged(state, without_scale(state, self.flat(state)))
        found = found if self.leads else torch.zeros_like(found)
        is_complex = state.setup.layout.leaves[self.here.leaf].dtype.is_complex
        return as_complex(found) if is_complex else found

    def values(self, state: TrainState) -> Tensor:
        """All of its elements, of a state that has them on each rank."""
        return self.piece(state).view(state.setup.layout.leaves[self.here.leaf].shape)


def addresses_of(setup: Setup, learning: Sequence[int]) -> list[GradientAddress]:
    """Return where the gradients of these leaves are, one for each parameter object."""
    layout, part = setup.layout, setup.part(setup.gradients, setup.axis.rank)
    first = {leaf: i for i, leaf in reversed([*enumerate(learning)])}
    where: dict[int, tuple[int, int, LeafRange]] = {}
    for number, index in enumerate(layout.trainable):
        here = {one.leaf: one for one in leaf_ranges(layout, index, part)}
        for position, leaf in enumerate(layout.groups[index].leaves):
            nothing = LeafRange(position, leaf, 0, 0, 0)
            where[leaf] = number, index, here.get(leaf, nothing)
    return [GradientAddress(first[leaf] == i, *where[leaf]) for i, leaf in enumerate(learning)]


def pieces_of(state: TrainState, address: GradientAddress) -> Iterator[Tensor]:
    """What this rank holds of a gradient: reduced, and not yet."""
    if state.gradients.held:
        yield address.here.of(state.gradients.flats[address.number])
    pending, layout = state.window.pending, state.setup.layout
    if pending.held:
        begin = layout.groups[address.index].offsets[address.here.position]
        yield pending.flats[address.number][begin : begin + layout.leaves[address.here.leaf].numel]


def norms_of(state: TrainState, order: float) -> dict[int, Tensor]:
    """Return the norm of the gradient of every leaf that learns, on every rank. One collective."""
    setup, layout = state.setup, state.setup.layout
    found: dict[int, Tensor] = {}
    for number, index in enumerate(layout.trainable):
        flat = without_scale(state, state.gradients.flats[number])
        wide = flat.to(torch.promote_types(flat.dtype, torch.float32))
        for one in leaf_ranges(layout, index, setup.part(setup.gradients, setup.axis.rank)):
            own = one.of(wide)
            own = as_complex(own) if layout.leaves[one.leaf].dtype.is_complex else own
            found[one.leaf] = torch.linalg.vector_norm(own, order)
    nothing = torch.tensor(0.0 if order >= 0 else float("inf"), device=state.device)
    learning = [leaf for index in layout.trainable for leaf in layout.groups[index].leaves]
    row = torch.stack([found.get(leaf, nothing).double() for leaf in learning])
    rows = gather_many([row], setup.over(setup.gradients))[0].view(-1, len(learning))
    total = row
    if len(rows) > 1:
        total = rows.sum(0) if order == 0 else torch.linalg.vector_norm(rows, order, dim=0)
    if order != 0:
        total = averaged(state, total)
    stored = [stored_dtype(layout.leaves[i].dtype) for i in learning]
    dtypes = [torch.promote_types(dtype, torch.float32) for dtype in stored]
    return {leaf: norm.to(dtype) for leaf, norm, dtype in zip(learning, total, dtypes, strict=True)}


def notes_of(operands: Iterable[Any], *, alone: bool) -> list[Any]:
    """Return what ranks compare of the operands of an operator on gradients: numbers, and digests.

    alone: there are no other ranks.
    """
    found: list[Any] = []
    for x in () if alone else operands:
        large = isinstance(x, Tensor) and x.numel() != 1
        if not isinstance(x, Memoryless):
            found.append(hashed(x) if large else x)
    return found


def require_unweighted(state: TrainState) -> None:
    """Raise `PhaseError` where all ranks must be asked for what a gradient is divided by."""
    setup = state.setup
    if setup.reduction.weighted and setup.axis.size > 1:
        raise PhaseError(
            "p.grad was read; the gradients are sums of w g, and their total weight is known "
            "when all ranks are asked.",
            cause="engine.backward(loss, weight=), and code that looks at p.grad.",
            fix="engine.full_gradient(path), on every rank, divides by the total.",
        )


# Gradients of an engine that were dropped, for the stand-ins that somebody has kept.


class Earlier:
    """Gradients that were dropped, as they were then: their values and norms, to read."""

    def __init__(
        self,
        holder: HoldsState,
        state: TrainState,
        addresses: Sequence[GradientAddress],
        edits: int,
    ) -> None:
        self._holder, self.edits = weakref.ref(holder), edits
        self.device, self.stage = state.device, state.stage
        self.shows = self.stage == 0
        nothing = Buffers(flats=(torch.empty(0, device=state.device),))
        self._state, self._addresses = state.replace(params=nothing, optimizer=()), addresses
        self._norms: dict[float, dict[int, Tensor]] = {}

    @property
    def at_hand(self) -> bool:
        """Whether this rank has all of them."""
        holder = self._holder()
        return self.shows and holder is not None and not holder.closed

    def norm(self, held: HeldGradient, order: float) -> Tensor:
        """Return the norm of one of them. A collective for the first one."""
        if order not in self._norms:
            with torch.inference_mode(False), torch.no_grad():
                self._open().call(f"p.grad.norm({order:g}) of an earlier gradient")
                self._norms[order] = norms_of(self._state, order)
        return self._addresses[held.number].norm(self._norms[order])

    def values(self, held: HeldGradient) -> Tensor:
        """Return the elements of one of them."""
        self._open()
        require_unweighted(self._state)
        with torch.inference_mode(False), torch.no_grad():
            return self._addresses[held.number].values(self._state).to(held.dtype)

    def range(self, held: HeldGradient) -> tuple[int, int]:
        """Return which elements of one of them this rank has."""
        return self._addresses[held.number].range(self._state)

    def piece(self, held: HeldGradient, name: str) -> Tensor:
        """Return this rank's elements of one of them."""
        self._open()
        return self._addresses[held.number].piece(self._state)

    def told(self, operands: Sequence[Any]) -> list[Any]:
        """Return what ranks compare of operands."""
        return notes_of(operands, alone=self._state.setup.axis.size == 1)

    def write(
        self, held: HeldGradient, name: str, told: Sequence[Any], run: Callable[[Tensor], Tensor]
    ) -> None:
        """Raise `PhaseError`: the engine has them no more."""
        raise PhaseError(
            f"p.grad.{name} of an earlier gradient of {held.path}, which was dropped since.",
            cause="a p.grad that was kept over zero_grad() or step(); p.grad is another one now.",
            fix="write to p.grad as it is now, or to a copy: at stage 0 g.clone(), at each stage "
            "engine.full_gradient(path) while the engine has it.",
        )

    def zero(self, held: HeldGradient) -> None:
        """Raise `PhaseError`, as any write."""
        self.write(held, "zero_", (), torch.zero_)

    def require_no_window(self, name: str) -> None:
        """They were reduced."""

    def _open(self) -> HoldsState:
        holder = self._holder()
        if holder is None:
            raise PhaseError(
                "an earlier gradient of an engine that is gone.",
                cause="a p.grad that was kept, and nothing holds the engine any more.",
                fix="keep the engine for as long as its gradients are used, or copies of them.",
            )
        holder.require_not_closed()
        return holder


def is_used_up(state: TrainState) -> bool:
    """Whether an update has scaled the gradients in place, and taken them from the state."""
    layout = state.setup.layout
    pairs = zip(layout.trainable, state.gradients.flats, strict=True)
    return any(layout.groups[index].shard_numel and not flat.numel() for index, flat in pairs)
