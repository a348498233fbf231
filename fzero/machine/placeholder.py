"""A parameter of the full shape without storage: a kernel that reads it gets gathered values.

Autograd saves the placeholder, not the values, so what is gathered for a kernel can go when the
kernel has run, and backward gathers it anew. Who gathers, and when, is its reader, which has

    leaf(group, position)               one full leaf of a group, gathered; it may be rounded
    leaves_of(group), device_of(group)  the leaves of a group, and where their values are
    changes                             how often the values have changed
    begin_write(placeholder, func)      raises if what `func` is about to write would be lost
    end_write(placeholder, values)      it was written: these are its values now
"""

from __future__ import annotations

import functools
import itertools
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple, NoReturn, TypeVar

import optree
import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._python_dispatch import _disable_current_modes

from fzero.context.current_rank import WithoutMemory, in_forward_mode, is_abstract, unseen
from fzero.context.modes import kinds_of_autocast
from fzero.errors import CallError, FzeroError, LayoutError, PhaseError
from fzero.state.codec import Codec

T = TypeVar("T")

ADDRESS, STORAGE, EXPORT = "the address", "the storage", "an export by DLPack"


class Memoryless(WithoutMemory):
    """A tensor with a shape, and with values that are made when somebody reads them."""

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    def values(self) -> Tensor:
        """Return the values, which may be those of another tensor."""
        raise NotImplementedError

    def begin_write(self, func: Any) -> None:
        """Raise if what `func` is about to write to it would be lost."""
        raise NotImplementedError

    def without_memory(self, what: str) -> FzeroError:
        """Return the error for what asked for its memory."""
        raise NotImplementedError

    def data_ptr(self) -> int:
        """Raise: there is no memory, and a kernel would read at address 0."""
        raise self.without_memory(ADDRESS)

    def untyped_storage(self) -> Any:
        """Raise: there is no memory to write to a file, or to share."""
        if torch.compiler.is_compiling():  # which describes it, and writes nothing
            return Tensor.untyped_storage(self)
        raise self.without_memory(STORAGE)

    def storage(self) -> Any:
        """Raise, before torch warns that this is the old name."""
        raise self.without_memory(STORAGE)

    def __dlpack__(self, **_: Any) -> Any:
        """Raise: whoever is given the memory may write to it, and nobody would hear of that."""
        raise self.without_memory(EXPORT)

    def numpy(self, *, force: bool = False) -> Any:
        """Return the values in an array that is not writeable."""
        if self.requires_grad and not force:  # raises as torch does: a gradient would be lost
            torch.zeros(0, requires_grad=True).numpy()
        array = self.values().detach().cpu().clone().numpy(force=force)
        array.flags.writeable = False
        return array

    def tolist(self) -> Any:
        """Return the values as numbers in lists."""
        return self.values().tolist()


def not_for_jit(what: str) -> PhaseError:
    """Return the error for what torch.jit would make a program of."""
    return PhaseError(
        f"torch.jit of {what}.",
        cause="torch.jit.script, trace or onnx.export of a model that an engine has: its hooks are "
        "no TorchScript, and at stage 3 its parameters have no memory to save.",
        fix="engine.close() first; it gives the module back with whole parameters, and a new "
        "Engine goes on. Or give torch.jit a second model, with engine.full_state_dict().",
    )


def memoryless(cls: type[Tensor], like: Tensor, device: torch.device) -> Any:
    """Return a tensor of a class with the shape, strides and dtype of another one."""
    made = Tensor._make_wrapper_subclass(
        cls,
        like.shape,
        strides=like.stride(),
        storage_offset=like.storage_offset(),
        dtype=like.dtype,
        device=device,
    )
    torch._C._set_throw_on_mutable_data_ptr(made)  # else C++ reads at address 0
    _look_into_lists()
    return made


@functools.cache
def _look_into_lists() -> None:
    """Have the collectives of torch that take lists of lists look for memoryless tensors in them.

    Gloo would meet one in a thread of its own, where no error has a name.
    """
    for name in _OF_LISTS if dist.is_available() else ():
        setattr(dist.ProcessGroup, name, _looking(name, getattr(dist.ProcessGroup, name)))


_OF_LISTS = ("allgather", "gather", "scatter", "reduce_scatter")


def _looking(name: str, collective: Any) -> Any:
    @functools.wraps(collective)
    def looks(group: Any, *of_call: Any, **options: Any) -> Any:
        given: Any = of_call
        if not any(isinstance(x, Memoryless) for x in flat(given)):
            return collective(group, *given, **options)
        for x in flat(given[:1]):  # outputs come first
            if isinstance(x, Memoryless):
                x.begin_write(f"c10d.{name}_")
        return collective(group, *optree.tree_map(_with_values, given), **options)

    return looks


def _with_values(x: Any) -> Any:
    return x.values() if isinstance(x, Memoryless) else x


_View = Callable[[Tensor], Tensor]


class LazyParam(Memoryless):
    """A parameter of the full shape without storage: a leaf of a unit, then some views.

    Any kernel that is given one gets the gathered values; views of it stay lazy.
    """

    reader: Any
    where: tuple[int, int]  # group, position of the leaf in it
    meta: Tensor
    former: list[Tensor]  # what it was before `p.data = x`, of an alias of before; else empty
    assigned: bool  # whether `p.data = x` has written it
    views: tuple[_View, ...]
    read: CompiledRead | None  # how a compiled graph reads it, once one has it

    @staticmethod
    def __new__(
        cls,
        reader: Any,
        where: tuple[int, int],
        meta: Tensor,
        views: tuple[_View, ...] = (),
    ) -> LazyParam:
        """Make the placeholder; `meta` has its shape and strides."""
        made = memoryless(cls, meta, reader.device_of(where[0]))
        made.reader, made.where, made.meta, made.views = reader, where, meta, views
        made.read, made.former, made.assigned = None, [], False
        return made

    def full(self) -> Tensor:
        """Return the values, gathered."""
        x = self.former[0] if self.former else self.reader.leaf(*self.where)
        for view in self.views:
            x = view(x)
        return x.to(self.dtype)

    def _seen(self, meta: Tensor, *more: _Replay) -> LazyParam:
        """A view of it: its values are those of this one, seen through `more` as well."""
        made = type(self)(self.reader, self.where, meta, (*self.views, *more))
        made.former = self.former
        return made

    def __repr__(self) -> str:
        group, position = self.where
        traced = isinstance(self.reader, Traced)
        name = "traced" if traced else self.reader.leaves_of(group)[position].path
        return f"LazyParam({name}, shape={tuple(self.shape)})"

    @property
    def data(self) -> Tensor:
        """As of any tensor: the same values, outside of autograd."""
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: Tensor) -> None:
        """`p.data = value` is a write: what the reader refuses, or keeps.

        As in torch, what was taken of it before, `kept = p.data`, has the values of before then.
        """
        if isinstance(value, LazyParam) and value.where == self.where and not value.views:
            if value.former is self.former:
                return  # module.to() of what it is already
            value = value.full()
        if value.shape != self.shape or value.dtype != self.dtype or value.device != self.device:
            raise LayoutError(
                f"{self!r} ({self.dtype}, {self.device}) was given data of {value.dtype}, "
                f"shape {tuple(value.shape)} on {value.device}.",
                cause="module.half(), .to(...) or a resized embedding of a module of stage 3.",
                fix="convert, move and resize the module first, then make the engine.",
            )
        if isinstance(value, LazyParam):  # of another parameter, or turned
            raise LayoutError(
                f"{self!r} was given the data of {value!r}: two handles on one memory.",
                cause="`p.data = q.data`, or a view of it, to tie two parameters.",
                fix="assign the parameter itself, `b.weight = a.weight`, and transpose it in the "
                "forward; or write its values, p.copy_(q.clone()), where it may be written.",
            )
        with torch.no_grad():
            own = self.full()
            if self.assigned and value.numel() and value.data_ptr() == own.data_ptr():
                raise LayoutError(
                    f"{self!r} was given the tensor that gathered(...) has yielded for it, after "
                    "`p.data = x` had written to that.",
                    cause="a swap whose restore has no copy of what was there.",
                    fix="keep `kept = p.data` or p.detach().clone() before `p.data = x`, and "
                    "restore by `p.data = kept`.",
                )
            before = own.clone()
            self.copy_(value)
        self.former.append(before)
        self.read, self.former, self.assigned = None, [], True

    def __deepcopy__(self, memo: Any) -> LazyParam:
        raise self._not_here("copied")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise self._not_here("pickled")

    values = full

    def begin_write(self, func: Any) -> None:
        """Raise if what `func` is about to write to it would be lost."""
        self.reader.begin_write(self, func)

    def without_memory(self, what: str) -> LayoutError:
        """Return the error for what asked for its memory: this rank has only a shard of it."""
        if what == STORAGE:
            return self._not_here("saved or shared")
        return LayoutError(
            f"{what} of {self!r} was asked for; {self._held}.",
            cause="a kernel that takes an address (Triton, a C++ extension, ctypes), another "
            "library, or a count of parameters by their addresses was given a parameter of stage "
            "3, or an encoded one.",
            fix="give it `p.clone()`, which has gathered values, and gradients go through it; "
            "`p.detach().clone()` if it needs none. To count, take the parameters themselves: "
            "module.parameters() has a tied one once. Write in "
            "`with fzero.adapter.gathered(module, modify=True):`.",
        )

    @property
    def codec(self) -> Codec | None:
        """What its leaf is stored by, if it is encoded."""
        if isinstance(self.reader, Traced):
            return None
        return self.reader.leaves_of(self.where[0])[self.where[1]].codec

    @property
    def _held(self) -> str:
        if self.codec is None:
            return getattr(self.reader, "has", "it is traced")
        return f"it is stored encoded, by {self.codec}"

    def _not_here(self, verb: str) -> LayoutError:
        return LayoutError(
            f"{self!r} is to be {verb}; {self._held}.",
            cause="copy.deepcopy, torch.save, save_pretrained(), torch.distributed.checkpoint, "
            "share_memory(), an averaged copy of a module of stage 3, or of one with encoded "
            "parameters, or a count of parameters by their storages (count them by themselves).",
            fix="engine.full_state_dict() has whole values on every rank, to save; make a copy "
            "before the Engine, and load them into it; or engine.close() first, to export.",
        )

    # What torch.compile makes of it: see fzero/machine/placeholder.py.

    @property
    def token(self) -> Tensor:
        """The tensor that a compiled graph is given in its place."""
        if isinstance(self.reader, Traced):
            return self.reader.token
        if self.read is None:
            # Of another one: a reference to itself would keep the placeholder alive.
            self.read = CompiledRead(self._seen(self.meta).full)
        return self.read.token

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """Return the names of the tensors that it is made of, and what else it needs."""
        return ["token"], (self.dtype, self.reader.device_of(self.where[0]))

    __tensor_unflatten__: ClassVar[Any]  # see `_Unflatten`

    @classmethod
    @torch._disable_dynamo
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Keep views lazy; gather for everything else."""
        kwargs = kwargs or {}
        written = [x for x in written_by(func, args, kwargs) if isinstance(x, cls)]
        for placeholder in written:
            placeholder.begin_write(func)
        # Forward mode insists that a view and its base share storage, so there it must gather.
        is_view = func.is_view or func is torch.ops.aten.detach.default
        if is_view and isinstance(args[0], cls) and not in_forward_mode():
            first, rest = args[0], args[1:]
            # A graph that is traced is not to have its shape and strides.
            modes = _disable_current_modes if isinstance(first.reader, Traced) else unseen
            with modes():
                meta: Any = func(first.meta, *rest, **kwargs)
            if isinstance(meta, list | tuple):  # split, unbind, chunk
                return [first._seen(x, _Replay(func, rest, kwargs, i)) for i, x in enumerate(meta)]
            same = func is torch.ops.aten.detach.default  # of values that have no graph
            func = _PHYSICAL.get(func, func)
            return first._seen(meta, *(() if same else (_Replay(func, rest, kwargs),)))
        lower = autocast_of_call()
        if func is torch.ops.aten._to_copy.default and _by_autocast(args[0], kwargs, lower):
            cast = Cast(args[0].reader, kwargs["dtype"])
            with unseen():
                return args[0]._seen(args[0].meta.to(cast.dtype), cast)
        found: list[tuple[LazyParam, Tensor]] = []
        of_call: Any = (args, kwargs)
        leaves, treespec = optree.tree_flatten(of_call)
        for i, x in enumerate(leaves):
            if isinstance(x, cls):
                leaves[i] = x.full()
                found.append((x, leaves[i]))
        given, options = optree.tree_unflatten(treespec, leaves)
        call = functools.partial(func, *given, **options)
        if lower:
            call = functools.partial(run_as_called, func, given, options, lower)
        result = _watched(func, call, found) if tells_nothing(func) else call()
        for placeholder in written:
            values = next(x for one, x in found if one is placeholder)
            placeholder.reader.end_write(placeholder, values)
        return result


_SEEN: set[Any] = set()
"""Operators that say nothing of what they write, and have written nothing when they were run."""

_PHYSICAL = {
    torch.ops.aten._conj.default: torch.ops.aten._conj_physical.default,
    torch.ops.aten._neg_view.default: torch.ops.aten.neg.default,
}
"""What makes the values that torch would make of a mark, which a kernel does not see from here."""


class _Unflatten:
    """`LazyParam.__tensor_unflatten__`, which is there while torch.compile runs.

    At other times module.to() would take what has it for a parameter that must be swapped.
    """

    def __get__(self, placeholder: Any, cls: Any) -> Callable[..., LazyParam]:
        if not torch.compiler.is_compiling():
            raise AttributeError("__tensor_unflatten__")
        return _traced


LazyParam.__tensor_unflatten__ = _Unflatten()


def _traced(inner: Any, context: Any, shape: Any, stride: Any) -> LazyParam:
    """Return a placeholder whose reads are ops of the graph that is traced."""
    dtype, device = context
    with _disable_current_modes():
        meta = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    return LazyParam(Traced(inner["token"], meta, device), (0, 0), meta)


def _by_autocast(x: Any, options: Any, lower: Mapping[str, torch.dtype]) -> bool:
    """Whether this copy is what autocast makes of a parameter for an operator.

    It stays lazy: autograd saves it for backward, and would keep every unit whole. (A copy in a
    graph of torch.compile is a copy.)
    """
    if not lower or not isinstance(x, LazyParam) or in_forward_mode():
        return False
    return options == {"dtype": lower.get(x.device.type)} and not isinstance(x.reader, Traced)


def _watched(func: Any, call: Callable[[], Any], found: Sequence[tuple[LazyParam, Tensor]]) -> Any:
    """Call an operator that says nothing of what it writes; refuse what it wrote, as any write.

    On a GPU the host would wait for each: there its first call is looked at.
    """
    if func in _SEEN and not all(x.is_cpu for _, x in found):
        return call()
    result, before = run_watched(call, [values for _, values in found])
    after = {i: found[i][1].clone() for i in before}
    for i, x in before.items():
        found[i][1].copy_(x)
    for i, x in after.items():
        placeholder = found[i][0]
        placeholder.begin_write(func)
        values = placeholder.full().copy_(x)
        placeholder.reader.end_write(placeholder, values)
    _SEEN.add(func)
    return result


class _Replay(NamedTuple):
    """A view op with its arguments, to be applied to the gathered values; one view of several."""

    func: Any
    args: Any
    kwargs: Any
    at: int | None = None

    def __call__(self, x: Tensor) -> Tensor:
        seen = self.func(x, *self.args, **self.kwargs)
        return seen if self.at is None else seen[self.at]


def refuse_part(placeholder: LazyParam, func: Any) -> None:
    """Raise `LayoutError` for a write to a part of an encoded leaf, or to a view of it."""
    of_list = isinstance(func, str)  # of a collective, which is not told what it has written
    if placeholder.codec is not None and (placeholder.views or of_list):
        raise LayoutError(
            f"a part or a view of {placeholder!r} is written ({func}); it is stored encoded.",
            cause="p[0].zero_() or p.T.copy_(x) of a frozen parameter; or it is in a list of what "
            "a collective writes.",
            fix="write all of it: x = p.clone(), change x, then p.copy_(x).",
        )


def placeholders(reader: Any, group: int) -> list[LazyParam]:
    """Return a placeholder for each leaf of a group."""
    leaves = reader.leaves_of(group)
    with unseen():
        metas = [torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") for leaf in leaves]
    return [LazyParam(reader, (group, i), meta) for i, meta in enumerate(metas)]


_OF_TORCH = re.compile(
    "aten|prims?|_?quantized|quantization|mkl|mkldnn|mkldnn_prepacked|onednn|sparse|profiler|"
    "inductor|inductor_prims|rngprims|debugprims|_native|export|_dtensor|symm_mem|"
    "c10d|_c10d_functional|_c10d_functional_autograd|torchvision|torchaudio"
)
"""Namespaces whose schemas tell what is written, but for the names below."""

_ONLY_READ = frozenset({"send", "barrier", "monitored_barrier_", "check_for_nan"})
_UNMARKED = {"_c10d_functional::irecv": (0,), "_c10d_functional::batch_p2p_ops": (3,)}


@functools.cache
def positions_written(func: Any) -> tuple[int, ...]:
    """Return which arguments an operator writes to, as far as one knows without running it.

    Example:
        >>> positions_written(torch.ops.aten.add_.Tensor), positions_written(torch.ops.aten.add.out)
        ((0,), (3,))
    """
    schema = func._schema
    space, _, name = schema.name.partition("::")
    if space == "c10d":  # outputs come first, whatever is reduced or received
        return () if name in _ONLY_READ else (0,)
    if schema.name in _UNMARKED:
        return _UNMARKED[schema.name]
    marks = [argument.alias_info for argument in schema.arguments]
    return tuple(i for i, mark in enumerate(marks) if mark is not None and mark.is_write)


@functools.cache
def is_elementwise(func: Any) -> bool:
    """Return whether each element of what an operator gives is computed of those at its place.

    By torch's tag, of the operator or of the functional one of its name: abs_, where.self_out and
    the operators on lists have none of their own.

    Example:
        >>> is_elementwise(torch.ops.aten._foreach_abs_.default)
        True
        >>> is_elementwise(torch.ops.aten.cumsum_.default)
        False
    """
    space, _, name = func._schema.name.partition("::")
    name = name.removeprefix("_foreach_").removesuffix("_")
    if torch.Tag.pointwise in func.tags or space != "aten" or name in ("max", "min"):
        return torch.Tag.pointwise in func.tags
    packet = getattr(torch.ops.aten, name, None)
    overloads = [] if packet is None else [getattr(packet, one) for one in packet.overloads()]
    return name in _UNTAGGED or any(torch.Tag.pointwise in one.tags for one in overloads)


_UNTAGGED = frozenset({"copy", "_to_copy", "fill", "zero", "floor_divide", "hardswish"})


@functools.cache
def tells_nothing(func: Any) -> bool:
    """Return whether an operator may write to what it is given without a word of it.

    That is one of somebody else's without any mark. One with marks has them where it writes.
    """
    space = func._schema.name.partition("::")[0]
    return not _OF_TORCH.fullmatch(space) and not positions_written(func)


def written_by(func: Any, args: Sequence[Any], kwargs: Any) -> list[Any]:
    """Return what an operator is known to write to, of what it is given: lists are flattened."""
    found: list[Any] = []
    for i in positions_written(func):
        value = args[i] if i < len(args) else kwargs.get(func._schema.arguments[i].name)
        found += flat([value])
    return found


def flat(given: Any) -> list[Any]:
    """Return what is in lists of lists."""
    return [x for one in given for x in (flat(one) if isinstance(one, list | tuple) else [one])]


def run_watched(call: Callable[[], Any], values: Sequence[Tensor]) -> tuple[Any, dict[int, Tensor]]:
    """Call; return its result, and what was in those of the `values` that it has written.

    A copy and a comparison of each, for which the host waits.
    """
    if is_abstract() or get_proxy_mode() is not None:  # there are no values
        return call(), {}
    watched = [i for i, x in enumerate(values) if type(x) is Tensor and not x.is_meta]
    before = {i: values[i].clone() for i in watched}
    result = call()
    return result, {i: x for i, x in before.items() if not same_bits(values[i], x)}


def same_bits(x: Tensor, y: Tensor) -> bool:
    """Return whether two tensors of one dtype and shape have equal bits, NaNs too."""
    return torch.equal(*(one.contiguous().reshape(-1).view(torch.uint8) for one in (x, y)))


_C: Any = torch._C

_PARTS = {"aten::_euclidean_dist": "aten::cdist", "aten::_trilinear": "aten::bilinear"}
"""Operators whose kernels call others, and of which composite operator each is a part. Where
autocast has a rule for that one, it runs with all its parts as one operator."""

_OF_TWO = {"aten::linalg_pinv.atol_rtol_tensor": "aten::pinverse"}
"""Such a part that is called by itself as well, and from inside looks the same."""


def autocast_of_call() -> dict[str, torch.dtype]:
    """Inside `__torch_dispatch__`: the dtypes of the autocast around the call, by kind of device.

    There torch itself says that autocast is off, whatever the caller has.
    """
    with _C._RestorePythonTLSSnapshot():
        on = [kind for kind in kinds_of_autocast() if torch.is_autocast_enabled(kind)]
    return {kind: torch.get_autocast_dtype(kind) for kind in on}


@functools.cache
def _meets_autocast(func: Any, kind: str) -> bool | None:
    """Whether operators that a kernel calls see the autocast around it; None: unknown.

    So it is for an operator without a rule of autocast's. One with a rule, and what is part of it,
    casts its arguments, and is then one operator.
    """

    def has_rule(name: str | None) -> bool:
        key = f"Autocast{kind.upper()}"
        return name is not None and _C._dispatch_has_kernel_for_dispatch_key(name, key)

    name = func.name()
    if has_rule(_OF_TWO.get(name)):
        return None
    return not (has_rule(name) or has_rule(_PARTS.get(name)))


@contextmanager
def _under_autocast(kinds: Iterable[str]) -> Iterator[None]:
    """Inside `__torch_dispatch__`: switch autocast on again for the operators in this block."""
    for kind in kinds:
        torch.set_autocast_enabled(kind, True)
    try:
        yield
    finally:
        for kind in kinds:
            torch.set_autocast_enabled(kind, False)


def run_as_called(func: Any, args: Any, kwargs: Any, lower: Mapping[str, torch.dtype]) -> Any:
    """Inside `__torch_dispatch__`: run an operator on values as it runs under the autocast `lower`.

    Raises `LayoutError` for one of which nobody knows.
    """
    met = {kind: _meets_autocast(func, kind) for kind in lower}
    if None in met.values():
        raise LayoutError(
            f"{func.name()} of a parameter of stage 3 under autocast.",
            cause="torch.pinverse or torch.linalg.pinv of a parameter: autocast treats the two "
            "differently, and here they look the same.",
            fix="give it `p.clone()`, or switch autocast off around it.",
        )
    with _under_autocast([kind for kind, meets in met.items() if meets]):
        return func(*args, **kwargs)


class Cast:
    """A cast by autocast, of gathered values that may have been gathered in its dtype."""

    __slots__ = ("_changes", "_reader", "dtype")

    def __init__(self, reader: Any, dtype: torch.dtype) -> None:
        self._reader, self.dtype, self._changes = reader, dtype, reader.changes

    def __call__(self, x: Tensor) -> Tensor:
        """Return the value in the dtype."""
        if self._reader.changes != self._changes:
            raise PhaseError(
                "a graph from before the update is differentiated under autocast.",
                cause="a loss that was made before step(), and backward() after it.",
                fix="run the backward before the update, or the forward again after it.",
            )
        return x.to(self.dtype)


# Placeholders under torch.compile: a gather is one op of the compiled graph.
#
#     token -> fzero::whole -> values
#
# A token is a number in a tensor. It is what a graph is given for each placeholder, so that nothing
# is gathered while a graph is traced or its guards are checked. Where a kernel reads the
# placeholder, in the forward and in the backward, the graph has the op, which gathers when it runs.
# That way every backend (inductor as well) works on ordinary tensors.

DISABLED_FRAMES = 2
"""Frames of torch's between a caller and a function that is `torch._disable_dynamo`."""

MADE_FRAMES = DISABLED_FRAMES + 1
"""The same for a function of `without_dynamo`."""

_numbers = itertools.count()
_reads: weakref.WeakValueDictionary[int, CompiledRead] = weakref.WeakValueDictionary()


def without_dynamo(fn: Callable[..., T]) -> Callable[..., T]:
    """Return a function that calls `fn` as it is under torch.compile, too.

    For functions that are made in each call: `torch._disable_dynamo` ties what it wraps into a
    cycle, which keeps all that it closes over, states with their gradients, until the garbage
    collector comes by.

    Example:
        >>> without_dynamo(lambda x: x + 1)(1)
        2
    """
    made = _Made(_run, fn)
    functools.update_wrapper(made, fn)
    return made


class _Made(functools.partial[Any]):
    """What is made in a call, and is called in its turn."""

    def __iter__(self) -> NoReturn:
        """Raise `CallError`: `state, loss = grad_and_reduce(loss_fn, state)` lacks the call."""
        name = getattr(self, "__name__", "it")
        raise CallError(
            f"{name} is a function, and was unpacked like a result.",
            cause="state, loss = fzero.grad_and_reduce(loss_fn, state), without the call.",
            fix="call it on the batch: state, loss = fzero.grad_and_reduce(loss_fn, state)(batch).",
        )


@torch._disable_dynamo
def _run(fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
    return fn(*args, **kwargs)


class CompiledRead:
    """Reads the values of one placeholder for a compiled graph; lives as long as that."""

    __slots__ = ("__weakref__", "token", "values")

    def __init__(self, values: Callable[[], Tensor]) -> None:
        number = next(_numbers)
        self.values, self.token = values, torch.tensor(number)
        _reads[number] = self


@torch.library.custom_op("fzero::whole", mutates_args=())
def whole(
    token: Tensor, number: int, shape: list[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return a copy of the values of a token: a graph may reuse the memory of what its ops return.

    number: counts the reads in a graph. Two of them are then never one common subexpression, whose
    values would stay from the forward to the backward: each of the two gathers its own.
    """
    return _reads[int(token)].values().detach().clone(memory_format=torch.contiguous_format)


@whole.register_fake
def _(
    token: Tensor, number: int, shape: list[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


class Traced:
    """The gatherer of a placeholder that torch.compile traces: a read is an op of the graph."""

    changes: int = 0

    def __init__(self, token: Tensor, meta: Tensor, device: torch.device) -> None:
        self.token, self._meta, self._device = token, meta, device
        self._reads = itertools.count()

    def leaf(self, group: int, position: int) -> Tensor:
        """Return what the op gives."""
        shape, dtype = list(self._meta.shape), self._meta.dtype
        return whole(self.token, next(self._reads), shape, dtype, self._device)

    def device_of(self, group: int) -> torch.device:
        """Return where the values will be."""
        return self._device

    def leaves_of(self, group: int) -> Any:
        """Nobody asks for them while a graph is traced."""
        return ()

    def begin_write(self, placeholder: Any, func: Any) -> NoReturn:
        """Refuse: the graph would write to a copy."""
        raise LayoutError(
            f"a parameter of stage 3 is written in place inside a compiled function ({func}): "
            f"{placeholder!r}; this rank holds a shard of it.",
            cause="an in-place method (add_, copy_, ...) or an initializer inside torch.compile.",
            fix="in a loss, clone it first: losses are pure. To change a parameter of a "
            "module, use `with fzero.adapter.gathered(module, modify=True)`, outside of what "
            "is compiled.",
        )

    def end_write(self, placeholder: Any, values: Tensor) -> None:
        """Never called: see `begin_write`."""
