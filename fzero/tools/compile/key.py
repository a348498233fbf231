"""What a graph is made for: the structure of the arguments, their kinds, and what is one memory."""

from __future__ import annotations

import array
import dataclasses
import dis
import functools
import gc
import operator
import re
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextvars import ContextVar
from numbers import Number
from typing import Any, NamedTuple

import numpy as np
import optree
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from fzero.context.modes import Ambient
from fzero.state import NAMESPACE, TrainState
from fzero.transforms.functionalize import Template

PLAIN = (
    *(Number, str, bytes, type(None), range, slice, type(...), np.generic, np.dtype, torch.dtype),
    *(torch.device, torch.layout, torch.memory_format, torch.Size),
)
"""Values that nothing can change."""


def key_of(arguments: Any) -> Any:
    """Return the cache key of arguments: structure, numbers, metadata and places of tensors.

    And the modes of torch under which ops give other results.
    """
    leaves, treespec = optree.tree_flatten(arguments, namespace=NAMESPACE)
    kinds = [_leaf(x) for x in leaves]
    places = shared_memory([x for x in leaves if isinstance(x, Tensor)])
    return treespec, kinds, places, Ambient.take(), [read() for read in _SWITCHES]


def told_apart(x: Any) -> Any:
    """Return what is equal for values that a step cannot tell apart, and for one object.

    Example:
        >>> [told_apart(x) == told_apart(y) for x, y in ((1, 1), (1, True), (0.0, -0.0), ([], []))]
        [True, False, False, False]
    """
    if isinstance(x, float | complex):
        return type(x), repr(x)
    if isinstance(x, np.ndarray):
        return x.dtype, x.shape, x.tobytes()
    if isinstance(x, PLAIN):
        return type(x), x
    return (type(x), [*map(told_apart, x)]) if isinstance(x, tuple) else _Itself(x)


def _leaf(x: Any) -> Any:
    """Return what an argument is told apart by: records of the same values are alike."""
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        parts: Any = object.__getstate__(x)
        return type(x), [*map(told_apart, optree.tree_leaves(parts, none_is_leaf=True))]
    if isinstance(x, Tensor):
        return tuple(x.shape), x.stride(), x.dtype, x.device
    return told_apart(x)


class _Itself:
    """Equal to the same object alone."""

    def __init__(self, it: Any) -> None:
        self._it = it

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and other._it is self._it

    __hash__ = None  # type: ignore[assignment]


_SWITCHES = (
    *(torch.get_default_dtype, torch.get_num_threads, torch.are_deterministic_algorithms_enabled),
    *(torch.get_float32_matmul_precision, torch.is_autocast_cache_enabled),
    *(torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.math_sdp_enabled),
    *(torch.backends.cuda.mem_efficient_sdp_enabled, torch._C._get_mkldnn_enabled),
    *(torch._C._get_cudnn_enabled, torch._C._get_cudnn_deterministic),
    *(torch._C._get_cudnn_benchmark, torch.backends.mha.get_fastpath_enabled),
)
"""The switches of torch by which ops are chosen while a step is recorded.

For those of attention and CuDNN torch has no other names than those by CUDA.
"""


def shared_memory(tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    """Return which of some tensors overlap, how, and which are one, by their positions.

    Example:
        >>> import torch
        >>> x = torch.ones(4)
        >>> shared_memory([x, torch.ones(4)]), shared_memory([x, x[2:], x])
        ((), (((0, 0, 0), (2, 0, 0), (1, 8, 1)),))
    """
    spans = sorted(
        (start, i, x) for i, x in enumerate(tensors) if x.numel() and (start := x.data_ptr())
    )
    first = {id(x): i for i, x in reversed([*enumerate(tensors)])}
    groups: list[list[tuple[int, int, int]]] = []
    base = end = 0
    for start, i, x in spans:
        if start >= end:
            groups.append([])
            base = start
        groups[-1].append((i, start - base, first[id(x)]))
        reach = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
        end = max(end, start + (1 + reach) * x.itemsize)
    return tuple(tuple(group) for group in groups if len(group) > 1)


# What a step reads besides its arguments: a graph is right as long as all of that is as it was.
#
# Which functions run is noted while a step is recorded. What their code names is then looked up
# from the step on: globals, free variables, defaults, attributes of objects, classes and modules,
# and all entries of containers. What is there becomes a flat list of places; a later call looks at
# each of them again, by identity, and by value where a value cannot change.

MOST = 4096
"""Containers of more entries are not followed: they would cost time in each call."""

MOST_BYTES = 2**18
"""Arrays of more bytes are not followed."""

_MOST_OBJECTS = 50_000
_LIBRARIES = frozenset(
    ["torch", "fzero", "numpy", "optree", "einops", "functorch", "sympy", "triton"]
)
_GENERATED = ("namedtuple_", "typing_extensions")
_READ_BY_TORCH = ("torch.nn.modules", "torch.nn.utils", "torch.nn.parallel")
_QUIET = ("abc", "contextlib", "functools", "importlib", "logging", "re", "threading", "typing")
"""Modules of Python with caches of their own, that read nothing of what they are given."""

_ANY_NAME = frozenset(
    ("vars", "globals", "locals", "eval", "exec", "dumps", "attrgetter", "methodcaller", "__dict__")
) | {"__getstate__", "__reduce_ex__", "__getattribute__", "format", "format_map"}
"""Code with such a name may read what it does not name."""

_TELLING = frozenset(("getattr", "hasattr", "tolist", "numpy", "__dlpack__"))
"""Functions of C whose calls are looked at: by names, or of the elements of a tensor."""

_ATOMS = (
    *PLAIN,
    torch.Generator,
    TrainState,
    torch._ops.OpOverload,
    types.CodeType,
    types.FrameType,
)
_CONTAINERS = (dict, list, tuple, set, frozenset, deque, types.MappingProxyType)
_ARRAYS = (np.ndarray, bytearray, array.array, memoryview)
_BY_VALUE = (torch.Size, torch.device, int, str, bytes)
_MEMO = type(functools.lru_cache(len))
_ABSENT = object()
Read = Callable[[], Sequence[Any]]


@functools.lru_cache(maxsize=4096)
def _whose(module: Any) -> str:
    """Return whose a module is: "user", "python", "quiet", "library", or "modules" of torch."""
    root = module.partition(".")[0] if isinstance(module, str) else "builtins"
    if root != "__main__" and (root in sys.stdlib_module_names or root.startswith(_GENERATED)):
        return "quiet" if root in _QUIET else "python"
    if root in _LIBRARIES:
        return "modules" if module.startswith(_READ_BY_TORCH) else "library"
    return "user"


class _Code(NamedTuple):
    code: types.CodeType
    whose: str
    variables: dict[str, Any]


class FunctionsRun:
    """Notes in its block which functions run: the user's, what they call of Python's, modules'."""

    def __init__(self) -> None:
        self.codes = dict[int, _Code]()
        # Not the step calls these, but the collector of garbage, in the middle of it (Hypothesis).
        codes = (getattr(one, "__code__", None) for one in gc.callbacks)
        self._others = {id(code): code for code in codes if isinstance(code, types.CodeType)}
        self.computes = False  # the user's code reads attributes by names that it computes
        self.handed = dict[int, Any]()  # what code of Python's reads by such names
        self.counted = list[Tensor]()  # of which Python reads the elements
        self.met = dict[int, Any]()  # weak references to objects that functions were given
        self.lacks = ""

    def note_computed(self) -> None:
        """Note that the user's code reads attributes by names that it computes."""
        self.computes = True

    def __enter__(self) -> FunctionsRun:
        self._before: Any = sys.getprofile()
        sys.setprofile(self._note)
        return self

    def __exit__(self, *error: Any) -> None:
        is_c = hasattr(self._before, "enable")  # cProfile's
        sys.setprofile(None if is_c else self._before)
        if is_c:
            self._before.enable()

    def _note(self, frame: types.FrameType, event: str, arg: Any) -> None:
        if event == "call":  # mostly of a library: the shortest way for those
            if id(frame.f_code) not in self._others:
                self._call(frame, frame.f_code)
        elif event == "c_call" and arg.__name__ in _TELLING:
            known = self.codes.get(id(frame.f_code))
            if arg is getattr or arg is hasattr:
                if known is not None and known.whose == "user":
                    self.computes |= _is_computed(frame.f_code, frame.f_lasti)
            elif isinstance(arg.__self__, Tensor):
                self.counted.append(arg.__self__)
                if arg.__name__ != "tolist":
                    self.lacks = f"it reads the elements of a tensor by {arg.__name__}()"

    def _call(self, frame: types.FrameType, code: types.CodeType) -> None:
        whose = _whose(frame.f_globals.get("__name__"))
        if whose in ("library", "quiet") or code.co_name == "<module>":
            self._others[id(code)] = code
        elif self._is_of_step(frame, whose):
            self.codes.setdefault(id(code), _Code(code, whose, frame.f_globals))
            if whose == "user":
                for x in frame.f_locals.values():
                    own = _whose(type(x).__module__) == "user" and type(x).__weakrefoffset__
                    if own and not isinstance(x, Tensor | nn.Module):
                        self.met[id(x)] = weakref.ref(x)
            elif whose == "python" and names_of(code) & (_ANY_NAME | {"getattr"}):
                self.handed.update((id(x), x) for x in frame.f_locals.values())

    def _is_of_step(self, frame: types.FrameType, whose: str) -> bool:
        """Return whether the step calls a function, and not a library or an import."""
        caller = frame.f_back
        if whose == "modules" or (caller is not None and id(caller.f_code) in self.codes):
            return True
        if whose == "python" or "site-packages" not in frame.f_code.co_filename:
            return whose == "user"
        return caller is not None and _whose(caller.f_globals.get("__name__")) == "library"

    def add(self, fn: Any) -> None:
        """Take a function for one that ran."""
        if isinstance(fn, types.FunctionType) and _whose(fn.__module__) == "user":
            code = _Code(fn.__code__, "user", fn.__globals__)
            self.codes.setdefault(id(code.code), code)

    def names(self) -> tuple[frozenset[str], bool]:
        """Return the names by which attributes are read, and whether others may be, too."""
        own = (names_of(x.code) for x in self.codes.values() if x.whose == "user")
        computes = self.computes or any(_ANY_NAME & names for names in own)
        return frozenset().union(*(names_of(x.code) for x in self.codes.values())), computes


@functools.lru_cache(maxsize=4096)
def names_of(code: types.CodeType) -> frozenset[str]:
    """Return the names, and the words of texts, in a function and its inner functions."""
    return frozenset(code.co_names).union(*map(_words, code.co_consts))


def _words(x: Any) -> Iterable[str]:
    if isinstance(x, str):
        return re.findall(r"\w+", x)
    if isinstance(x, types.CodeType):
        return names_of(x)
    return [word for part in x for word in _words(part)] if isinstance(x, tuple | frozenset) else []


@functools.lru_cache(maxsize=4096)
def _variables_of(code: types.CodeType) -> frozenset[str]:
    """Return the names of globals, and of modules that it imports, in a function."""
    if names_of(code) & {"globals", "eval", "exec", "import_module", "modules", "__import__"}:
        return names_of(code).union(x for x in code.co_consts if isinstance(x, str))
    loads = ("LOAD_GLOBAL", "LOAD_NAME", "IMPORT_NAME")
    own = (one.argval for one in dis.get_instructions(code) if one.opname in loads)
    inside = (_variables_of(one) for one in code.co_consts if isinstance(one, types.CodeType))
    return frozenset(own).union(*inside)


@functools.lru_cache(maxsize=4096)
def _is_computed(code: types.CodeType, at: int) -> bool:
    """Return whether the name that `getattr` is called with, at this place, is no text there."""
    *before, call = (one for one in dis.get_instructions(code) if one.offset <= at)
    while before[-1].opname in ("PRECALL", "KW_NAMES", "CACHE"):
        before.pop()
    with_default = call.arg == 3 and before.pop().opname.startswith("LOAD_")
    is_text = before[-1].opname == "LOAD_CONST" and isinstance(before[-1].argval, str)
    return not (is_text and (with_default or call.arg == 2))


class Surroundings:
    """What functions that ran read, from some roots on, and which tensors of it are arguments.

    lacks: what of it cannot be followed, as a sentence; "" for nothing.
    """

    def __init__(self, ran: FunctionsRun, roots: Sequence[Any], tensors: Sequence[Tensor]) -> None:
        known = walk = None
        while walk is None or known != (len(ran.codes), ran.computes):  # the way tells of more
            known, walk = (len(ran.codes), ran.computes), _Walk(ran)
            walk.run(roots)
        self.lacks, self._places, self._tensors = walk.lacks, walk.places, walk.tensors
        self._given = self._among(tensors)

    def are_as_before(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether all is as it was, and the same of it is among the arguments' tensors."""
        for read, held in self._places:
            now = read()
            if len(now) != len(held):
                return False
            if not all(map(operator.is_, now, held)) and not all(map(_same, now, held)):
                return False
        return self._among(tensors) == self._given

    def _among(self, tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
        return [(i, id(x)) for i, x in enumerate(tensors) if id(x) in self._tensors]


def _same(a: Any, b: Any) -> bool:
    if type(a) is type(b) and type(a) in _BY_VALUE:
        return bool(a == b)
    return a is b or bool(told_apart(a) == told_apart(b))


class _Walk:
    """From object to object, along what may be read."""

    def __init__(self, ran: FunctionsRun) -> None:
        self.places, self.tensors, self.lacks = [], dict[int, Tensor](), ran.lacks
        self._ran = ran
        self._names, self._any_name = ran.names()
        self._counted = {id(x) for x in ran.counted}
        self._rest = deque[tuple[str, Any, bool, bool]]()
        self._empty = list[Any]()  # containers: those of a module's hooks, mostly
        self._seen = dict[tuple[int, bool, bool], Any]()  # references: no id is used again

    def run(self, roots: Sequence[Any]) -> None:
        self._push("an argument", *roots, *(one() for one in self._ran.met.values()))
        by_module = dict[int, tuple[dict[str, Any], set[str]]]()
        for code, _, held in self._ran.codes.values():
            by_module.setdefault(id(held), (held, set()))[1].update(_variables_of(code))
        for held, names in by_module.values():
            self._named("", held, names)
            modules = sorted(names & sys.modules.keys())
            self._push("", *self._watch(lambda modules=modules: [*map(sys.modules.get, modules)]))
        while self._rest and not self.lacks:
            path, x, fixed, whole = self._rest.popleft()
            key = id(x), fixed, whole or id(x) in self._ran.handed
            if key not in self._seen and not isinstance(x, (*_ATOMS, FakeTensor)):
                self._seen[key] = x
                self._visit(path, x, fixed, key[2])
            if len(self._seen) > _MOST_OBJECTS:
                self.lacks = f"{path} leads to over {_MOST_OBJECTS} objects that it may read"
        empty = self._empty
        self._watch(lambda: [*map(len, empty)])

    def _push(self, path: str, *xs: Any, fixed: bool = False, whole: bool = False) -> None:
        """Go on to objects. fixed: containers of a library's. whole: with all that is in them."""
        self._rest.extend((path, x, fixed, whole) for x in xs)

    def _watch(self, read: Read) -> Sequence[Any]:
        self.places.append((read, read()))
        return self.places[-1][1]

    def _named(
        self, path: str, held: Mapping[str, Any], names: Collection[str] | None, owner: Any = None
    ) -> None:
        """Watch what some names have in variables, or attributes of `owner`; None for all names."""
        keys: tuple[str, ...] = ()
        size = -1

        def read() -> Sequence[Any]:
            nonlocal keys, size
            if len(held) != size:  # names came or went
                size = len(held)
                keys = tuple(key for key in held if names is None or key in names)
            return [owner.__class__, keys, *map(held.get, keys)]

        found = self._watch(read)
        for key, x in zip(found[1], found[2:], strict=True):
            self._push(f"{path}.{key}".lstrip("."), x, whole=names is None and not self._any_name)

    def _visit(self, path: str, x: Any, fixed: bool, whole: bool) -> None:
        kind = type(x)
        module = kind.__module__
        if isinstance(x, Tensor):
            self._tensor(path, x)
        elif x is sys.modules:
            return  # `run` has those whose names a function has
        elif isinstance(x, types.FunctionType):
            whose = _whose(x.__globals__.get("__name__"))  # of a wrapper, not what it wraps
            if whose != "user" or id(x.__code__) in self._ran.codes:
                self._function(path, x, fixed=whose in ("library", "modules"))
        elif isinstance(x, types.ModuleType):
            self._module(path, x)
        elif isinstance(x, type):
            self._class(x)
        elif isinstance(x, _ARRAYS):
            self._array(path, x)
        elif kind in _READ:
            self._push(path, *self._watch(lambda: _READ[kind](x)), fixed=fixed, whole=whole)
        elif isinstance(x, _MEMO):  # what it returns may be of an earlier call
            self._ran.add(x.__wrapped__)
            known = x.cache_info().misses
            self._watch(lambda: [x.cache_info().misses >= known])  # else it was cleared
            self._push(path, *gc.get_referents(x), fixed=True)
        elif isinstance(x, operator.attrgetter | operator.methodcaller):
            self._ran.note_computed()
        elif isinstance(x, Template):
            self._watch(x.modes)
            for part in x.module.modules():
                self._push(path, type(part), *filter(callable, vars(part).values()))
        elif isinstance(x, _CONTAINERS):
            self._container(path, x, fixed, whole)
        elif module.startswith("fzero."):
            self._push(path, *getattr(x, "__dict__", {}).values(), fixed=True)
            self._push(path, *(getattr(x, name, None) for name in _slots(kind)), fixed=True)
        elif module == "functools" or not (_whose(module) == "user" or _has_attributes(x)):
            # A partial, a bound method, a property, a view of a dict.
            self._push(path, *gc.get_referents(x), fixed=fixed, whole=whole)
        elif module != "logging":  # which has caches of its own, and all handlers
            self._object(path, x, whole)

    def _object(self, path: str, x: Any, whole: bool) -> None:
        names = None if whole or self._any_name else self._names
        self._named(path, vars(x) if _has_attributes(x) else {}, names, x)
        if slots := [k for k in _slots(type(x)) if names is None or k in names]:
            found = self._watch(lambda: [getattr(x, k, _ABSENT) for k in slots])
            self._push(path, *found, whole=whole)
        self._push(path, type(x))

    def _container(self, path: str, x: Any, fixed: bool, whole: bool) -> None:
        if len(x) > MOST:
            self.lacks = f"it reads {path}, a {type(x).__name__} of over {MOST} entries"
            return
        paired = isinstance(x, dict | types.MappingProxyType)
        read: Read = (lambda: [*x, *x.values()]) if paired else (lambda: [*x])
        if not x and not fixed:
            self._empty.append(x)
        found = read() if fixed or not x or isinstance(x, tuple) else self._watch(read)
        self._push(path, *found, getattr(x, "default_factory", 0), fixed=fixed, whole=whole)
        if _whose(type(x).__module__) == "user":
            self._object(path, x, whole)

    def _array(self, path: str, x: Any) -> None:
        is_numpy = isinstance(x, np.ndarray)
        if is_numpy and x.dtype.hasobject:
            self._push(path, *self._watch(lambda: [*x.flat]))
        elif (x if is_numpy else memoryview(x)).nbytes > MOST_BYTES:
            self.lacks = f"it reads {path}, an array of over {MOST_BYTES} bytes"
        else:
            self._watch(lambda: told_apart(x) if is_numpy else [bytes(x)])

    def _tensor(self, path: str, x: Tensor) -> None:
        self.tensors[id(x)] = x
        size, own = torch.Size, vars(x)

        def read() -> Sequence[Any]:
            return [x.shape, size(x.stride()), x.dtype, x.device, x.requires_grad, *own.values()]

        self._watch(read)
        self._push(path, *own.values())
        if id(x) in self._counted:
            if x.nbytes > MOST_BYTES:
                self.lacks = f"Python reads the elements of {path}, of over {MOST_BYTES} bytes"
            self._watch(lambda: [repr(x.tolist())])
        if x.is_leaf and (self._any_name or "grad" in self._names):
            self._push(path, *self._watch(lambda: [x.grad]))

    def _function(self, path: str, fn: types.FunctionType, *, fixed: bool) -> None:
        if not fixed:
            self._watch(lambda: [fn.__code__, fn.__defaults__, fn.__kwdefaults__])
            self._named(path, vars(fn), {*self._names, "__wrapped__"})
        self._push(path, fn.__defaults__, fn.__kwdefaults__, fixed=fixed)
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            self._push(name, *(_content(cell) if fixed else [cell]), fixed=fixed)
        self._push(path, vars(fn).get("__wrapped__"))

    def _module(self, path: str, module: types.ModuleType) -> None:
        held, whose = vars(module), _whose(module.__name__)
        if whose == "user" or whose == "python":
            values = {
                k for k, x in held.items() if not callable(x) and type(x) is not types.ModuleType
            }
            names = self._names | values if self._any_name else self._names
            self._named(path, held, names if whose == "user" else self._names & values)
        elif not module.__name__.startswith("fzero"):
            known = self._names & held.keys()
            self._watch(lambda: [*map(held.get, known)])

    def _class(self, kind: type) -> None:
        for one in kind.__mro__:
            if _whose(one.__module__) == "user":
                held = vars(one)
                implicit = {k for k, x in held.items() if k[:2] == "__" and callable(x)}
                names = None if self._any_name else self._names | implicit
                self._named(one.__qualname__, held, names)
                if issubclass(one, torch.autograd.Function):  # whose backward has its own thread
                    for fn in held.values():
                        self._ran.add(getattr(fn, "__func__", fn))
        if type(kind) is not type:
            self._push(kind.__qualname__, type(kind))


def _content(cell: types.CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # not assigned yet
        return []


_READ: dict[type, Callable[[Any], Sequence[Any]]] = {
    types.CellType: _content,
    ContextVar: lambda x: [x.get(_ABSENT)],
    weakref.ref: lambda x: [x()],
}


def _has_attributes(x: Any) -> bool:
    return isinstance(getattr(x, "__dict__", None), dict)


def _slots(kind: type) -> list[str]:
    found = (pair for one in kind.__mro__ for pair in vars(one).items())
    return [name for name, x in found if isinstance(x, types.MemberDescriptorType)]
