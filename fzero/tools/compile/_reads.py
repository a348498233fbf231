"""What a step reads besides its arguments: a graph is right as long as all of that is as it was.

Which functions run is noted while a step is recorded. What their code names is then looked up from
the step on: globals, free variables, defaults, attributes of objects, classes and modules, and all
entries of containers. What is there becomes a flat list of places; a later call looks at each of
them again, by identity, and by value where a value cannot change.
"""

from __future__ import annotations

import array
import dis
import functools
import gc
import operator
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from types import (
    CellType,
    CodeType,
    FrameType,
    FunctionType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from fzero.state import TrainState
from fzero.tools.compile._key import PLAIN, told_apart
from fzero.transforms.module_copy import Template

MOST = 4096
"""Containers of more entries are not followed: they would cost time in each call."""

MOST_BYTES = 2**18
"""Arrays of more bytes are not followed."""

_MOST_OBJECTS = 50_000
_LIBRARIES = ("torch", "fzero", "numpy", "optree", "einops", "functorch", "sympy", "mpmath")
_LIBRARIES = (*_LIBRARIES, "triton", "typing_extensions")
_READ_BY_TORCH = ("torch.nn.modules", "torch.nn.utils", "torch.nn.parallel")
_OF_PYTHON = frozenset(sys.stdlib_module_names) - {"__main__"}
_QUIET = ("abc", "contextlib", "functools", "importlib", "logging", "re", "threading", "typing")
"""Modules of Python with caches of their own, that read nothing of what they are given."""

_ANY_NAME = frozenset(
    ("vars", "globals", "locals", "eval", "exec", "dumps", "attrgetter", "methodcaller", "__dict__")
) | {"__getstate__", "__reduce_ex__", "__getattribute__"}
"""Code with such a name may read what it does not name."""

_ATOMS = (*PLAIN, torch.Generator, TrainState, torch._ops.OpOverload, CodeType, FrameType)
_CONTAINERS = (dict, list, tuple, set, frozenset, deque, MappingProxyType)
_ARRAYS = (np.ndarray, bytearray, array.array, memoryview)
_BY_VALUE = (int, bool, str, bytes, torch.Size, torch.dtype, torch.device)
_MEMO = type(functools.lru_cache(len))
_ABSENT = object()


def _whose(module: Any) -> str:
    """Return whose a module is: "user", "python", "quiet", "library", or "modules" of torch."""
    root = module.partition(".")[0] if isinstance(module, str) else "builtins"
    if root in _OF_PYTHON or root.startswith("namedtuple_"):
        return "quiet" if root in _QUIET else "python"
    if root in _LIBRARIES:
        return "modules" if module.startswith(_READ_BY_TORCH) else "library"
    return "user"


class _Code(NamedTuple):
    code: CodeType
    whose: str
    variables: dict[str, Any]


class Ran:
    """Notes in its block which functions run: the user's, and what they call of Python's.

    The code of torch's modules, which reads what users set, is like that of Python.
    """

    def __init__(self) -> None:
        self.codes = dict[int, _Code]()
        self._others = dict[int, CodeType]()
        self.computes = False  # the user's code reads attributes by names that it computes
        self.handed = dict[int, Any]()  # what code of Python's reads by such names
        self.counted = list[Tensor]()  # of which Python reads the elements
        self.lacks = ""
        self.met = dict[int, Any]()  # weak references to objects that functions were given

    def __enter__(self) -> Ran:
        self._before: Any = sys.getprofile()
        sys.setprofile(self._note)
        return self

    def __exit__(self, *error: Any) -> None:
        is_c = hasattr(self._before, "enable")  # cProfile's
        sys.setprofile(None if is_c else self._before)
        if is_c:
            self._before.enable()

    def _note(self, frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if event == "c_call":
            if arg is getattr or arg is hasattr:
                known = self.codes.get(id(code))
                is_users = known is not None and known.whose == "user"
                self.computes |= is_users and _is_computed(code, frame.f_lasti)
            elif arg.__name__ in ("tolist", "numpy", "__dlpack__") and isinstance(
                arg.__self__, Tensor
            ):
                self.counted.append(arg.__self__)
                if arg.__name__ != "tolist":
                    self.lacks = f"it reads the elements of a tensor by {arg.__name__}()"
        elif event == "call" and id(code) not in self._others and code.co_name != "<module>":
            whose = _whose(frame.f_globals.get("__name__"))
            if whose in ("library", "quiet"):
                self._others[id(code)] = code
            elif self._is_ours(frame, whose):
                self.codes.setdefault(id(code), _Code(code, whose, frame.f_globals))
                if whose == "user":
                    self._meet(frame)
                elif whose == "python" and names_of(code) & (_ANY_NAME | {"getattr"}):
                    self.handed.update((id(x), x) for x in frame.f_locals.values())

    def _is_ours(self, frame: FrameType, whose: str) -> bool:
        """Return whether a function is one of the step: what is imported runs others."""
        caller = frame.f_back
        if whose == "modules" or (caller is not None and id(caller.f_code) in self.codes):
            return True
        if whose == "python" or "site-packages" not in frame.f_code.co_filename:
            return whose == "user"
        return caller is not None and _whose(caller.f_globals.get("__name__")) == "library"

    def _meet(self, frame: FrameType) -> None:
        for x in frame.f_locals.values():
            is_users = _whose(type(x).__module__) == "user" and type(x).__weakrefoffset__
            if is_users and not isinstance(x, Tensor | nn.Module):
                self.met[id(x)] = weakref.ref(x)

    def add(self, fn: FunctionType) -> None:
        """Take a function for one that ran."""
        code = _Code(fn.__code__, _whose(fn.__module__), fn.__globals__)
        self.codes.setdefault(id(code.code), code)

    def names(self) -> tuple[frozenset[str], bool]:
        """Return the names by which attributes are read, and whether others may be, too."""
        own = (names_of(x.code) for x in self.codes.values() if x.whose == "user")
        computes = self.computes or any(_ANY_NAME & names for names in own)
        return frozenset().union(*(names_of(x.code) for x in self.codes.values())), computes


@functools.lru_cache(maxsize=4096)
def names_of(code: CodeType) -> frozenset[str]:
    """Return the names and the texts in a function and its inner functions."""
    return frozenset(code.co_names).union(*map(_texts, code.co_consts))


@functools.lru_cache(maxsize=4096)
def _variables_of(code: CodeType) -> frozenset[str]:
    """Return the names of globals, and of modules that it imports, in a function."""
    if names_of(code) & {"globals", "eval", "exec", "import_module", "modules", "__import__"}:
        return names_of(code)
    loads = ("LOAD_GLOBAL", "LOAD_NAME", "IMPORT_NAME")
    own = (one.argval for one in dis.get_instructions(code) if one.opname in loads)
    inside = (_variables_of(one) for one in code.co_consts if isinstance(one, CodeType))
    return frozenset(own).union(*inside)


def _texts(x: Any) -> Iterable[str]:
    if isinstance(x, str):
        return x.split(".")
    if isinstance(x, CodeType):
        return names_of(x)
    return [text for part in x for text in _texts(part)] if isinstance(x, tuple | frozenset) else []


@functools.lru_cache(maxsize=4096)
def _is_computed(code: CodeType, at: int) -> bool:
    """Return whether the name that `getattr` is called with, at this place, is no text there."""
    *before, call = (one for one in dis.get_instructions(code) if one.offset <= at)
    while before[-1].opname in ("PRECALL", "KW_NAMES", "CACHE"):
        before.pop()
    with_default = call.arg == 3 and before.pop().opname.startswith("LOAD_")
    name = before[-1]
    is_text = name.opname == "LOAD_CONST" and isinstance(name.argval, str)
    return not (is_text and (with_default or call.arg == 2))


class _Place:
    """What is read in each call: how, and what was there."""

    __slots__ = ("held", "path", "read")

    def __init__(self, path: str, read: Callable[[], Sequence[Any]]) -> None:
        self.path, self.read, self.held = path, read, read()

    def is_changed(self) -> bool:
        now, held = self.read(), self.held
        if len(now) != len(held):
            return True
        return not all(map(operator.is_, now, held)) and not all(map(_same, now, held))


def _same(a: Any, b: Any) -> bool:
    if type(a) is type(b) and type(a) in _BY_VALUE:
        return bool(a == b)
    return a is b or bool(told_apart(a) == told_apart(b))


class Reads:
    """What functions that ran read, from some roots on.

    lacks: what of it cannot be followed, as a sentence; "" for nothing.
    """

    def __init__(self, ran: Ran, roots: Sequence[Any], tensors: Sequence[Tensor]) -> None:
        self.lacks = ""
        self._tensors = dict[int, Tensor]()
        known: Any = None
        while known != (len(ran.codes), ran.computes):  # what is met on the way tells of more
            known = len(ran.codes), ran.computes
            self._places = self._looked_up(ran, roots)
        self._given = self._among(tensors)

    def are_as_before(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether all is as it was, and the same of it is among the arguments' tensors."""
        same = not any(one.is_changed() for one in self._places)
        return same and self._among(tensors) == self._given

    def _among(self, tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
        return [(i, id(x)) for i, x in enumerate(tensors) if id(x) in self._tensors]

    def _looked_up(self, ran: Ran, roots: Sequence[Any]) -> list[_Place]:
        walk = _Walk(ran)
        for x in (*roots, *(one() for one in ran.met.values())):
            walk.push("an argument", x)
        by_module = dict[int, tuple[dict[str, Any], set[str]]]()
        for code, _, variables in ran.codes.values():
            by_module.setdefault(id(variables), (variables, set()))[1].update(_variables_of(code))
        for variables, names in by_module.values():
            walk.named(variables.get("__name__", ""), variables, names)
            for name in names & sys.modules.keys():
                walk.push(name, sys.modules[name])
        walk.run()
        self.lacks, self._tensors = walk.lacks, walk.tensors
        return walk.places


class _Walk:
    """From object to object, along what may be read."""

    def __init__(self, ran: Ran) -> None:
        self.places, self.tensors, self.lacks = list[_Place](), dict[int, Tensor](), ran.lacks
        self._ran = ran
        self._names, self._any_name = ran.names()
        self._counted = {id(x) for x in ran.counted}
        self._rest = deque[tuple[str, Any, bool, bool]]()
        self._seen = dict[tuple[int, bool, bool], Any]()  # references: no id is used again

    def run(self) -> None:
        while self._rest and not self.lacks:
            path, x, fixed, whole = self._rest.popleft()
            key = id(x), fixed, whole or id(x) in self._ran.handed
            if key not in self._seen and not isinstance(x, (*_ATOMS, FakeTensor)):
                self._seen[key] = x
                self._visit(path, x, fixed, key[2])
            if len(self._seen) > _MOST_OBJECTS:
                self.lacks = f"{path} leads to over {_MOST_OBJECTS} objects that it may read"

    def push(self, path: str, *xs: Any, fixed: bool = False, whole: bool = False) -> None:
        """Go on to objects. fixed: such of a library's. whole: with all that is in them."""
        self._rest.extend((path, x, fixed, whole) for x in xs)

    def _watch(self, path: str, read: Callable[[], Sequence[Any]]) -> Sequence[Any]:
        self.places.append(_Place(path, read))
        return self.places[-1].held

    def named(self, path: str, held: Mapping[str, Any], names: Any, *, whole: bool = False) -> None:
        """Watch what some names have in variables or attributes; all of them if whole."""
        keys: tuple[str, ...] = ()
        size = -1

        def read() -> Sequence[Any]:
            nonlocal keys, size
            if len(held) != size:  # names came or went
                size = len(held)
                keys = tuple(key for key in held if whole or key in names)
            return [keys, *map(held.get, keys)]

        found = self._watch(path, read)
        for key, x in zip(found[0], found[1:], strict=True):
            self.push(f"{path}.{key}", x, whole=whole)

    def _visit(self, path: str, x: Any, fixed: bool, whole: bool) -> None:
        kind = type(x)
        if isinstance(x, Tensor):
            self._tensor(path, x)
        elif isinstance(x, FunctionType):
            if id(x.__code__) in self._ran.codes or _whose(x.__module__) != "user":
                self._function(path, x)
        elif isinstance(x, MethodType):
            self.push(path, x.__func__, x.__self__, whole=whole)
        elif isinstance(x, ModuleType):
            self._module(path, x, whole)
        elif isinstance(x, type):
            self._class(x)
        elif isinstance(x, _ARRAYS):
            self._array(path, x)
        elif isinstance(x, CellType):
            self.push(path, *self._watch(path, lambda: _content(x)), whole=whole)
        elif isinstance(x, ContextVar):
            self.push(path, *self._watch(path, lambda: [x.get(_ABSENT)]), whole=whole)
        elif isinstance(x, weakref.ref):
            self.push(path, *self._watch(path, lambda: [x()]), whole=whole)
        elif isinstance(x, _MEMO):
            self._memo(path, x)
        elif isinstance(x, operator.attrgetter | operator.methodcaller):
            self._ran.computes = True
        elif isinstance(x, Template):
            self._watch(path, x.modes)
            for part in x.module.modules():
                self.push(path, type(part), *filter(callable, vars(part).values()))
        elif isinstance(x, _CONTAINERS):
            self._container(path, x, fixed, whole)
        elif kind.__module__.startswith("fzero."):
            self.push(path, *getattr(x, "__dict__", {}).values(), *_slots(x), fixed=True)
        elif kind.__module__ == "logging":
            pass  # with caches of its own, and all handlers
        elif kind.__module__ == "functools" or not (
            _whose(kind.__module__) == "user" or isinstance(getattr(x, "__dict__", None), dict)
        ):  # a partial, a property, a view of a dict
            self.push(path, *gc.get_referents(x), fixed=fixed, whole=whole)
        else:
            self._object(path, x, whole)

    def _object(self, path: str, x: Any, whole: bool) -> None:
        whole = whole or self._any_name
        self._watch(path, lambda: [x.__class__])
        if isinstance(attributes := getattr(x, "__dict__", None), dict):
            self.named(path, attributes, self._names, whole=whole)
        if slots := [k for k in _slot_names(type(x)) if whole or k in self._names]:
            found = self._watch(path, lambda: [getattr(x, k, _ABSENT) for k in slots])
            self.push(path, *found, whole=whole)
        self.push(path, type(x))

    def _container(self, path: str, x: Any, fixed: bool, whole: bool) -> None:
        if len(x) > MOST:
            self.lacks = f"it reads {path}, a {type(x).__name__} of over {MOST} entries"
            return
        paired = isinstance(x, dict | MappingProxyType)
        read = (lambda: [*x, *x.values()]) if paired else (lambda: [*x])
        found = read() if fixed or isinstance(x, tuple) else self._watch(path, read)
        self.push(path, *found, fixed=fixed, whole=whole)
        self.push(path, getattr(x, "default_factory", None))
        if _whose(type(x).__module__) == "user":
            self._object(path, x, whole)

    def _array(self, path: str, x: Any) -> None:
        is_numpy = isinstance(x, np.ndarray)
        if is_numpy and x.dtype.hasobject:
            self.push(path, *self._watch(path, lambda: [*x.flat]))
        elif (x if is_numpy else memoryview(x)).nbytes > MOST_BYTES:
            self.lacks = f"it reads {path}, an array of over {MOST_BYTES} bytes"
        elif is_numpy:
            self._watch(path, lambda: [x.dtype, x.shape, x.tobytes()])
        else:
            self._watch(path, lambda: [bytes(x)])

    def _tensor(self, path: str, x: Tensor) -> None:
        self.tensors[id(x)] = x
        self._watch(
            path, lambda: [x.shape, torch.Size(x.stride()), x.dtype, x.device, x.requires_grad]
        )
        if id(x) in self._counted:
            if x.nbytes > MOST_BYTES:
                self.lacks = f"Python reads the elements of {path}, of over {MOST_BYTES} bytes"
            else:
                self._watch(path, lambda: [repr(x.tolist())])
        if x.is_leaf and (self._any_name or "grad" in self._names):
            self.push(path, *self._watch(path, lambda: [x.grad]))
        self.named(path, vars(x), self._names, whole=self._any_name)

    def _function(self, path: str, fn: FunctionType) -> None:
        cells = zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True)
        self.push(path, vars(fn).get("__wrapped__"))
        if _whose(fn.__module__) != "user":
            kept = (x for cell in fn.__closure__ or () for x in _content(cell))
            self.push(path, *kept, fn.__defaults__, fn.__kwdefaults__, fixed=True)
            return
        self._watch(path, lambda: [fn.__code__, fn.__defaults__, fn.__kwdefaults__])
        self.push(path, fn.__defaults__, fn.__kwdefaults__)
        for name, cell in cells:
            self.push(name, cell)
        if vars(fn):
            self.named(path, vars(fn), self._names, whole=self._any_name)

    def _memo(self, path: str, memo: Any) -> None:
        """What a cache returns may be of an earlier call: its function counts as one that ran."""
        fn = memo.__wrapped__
        if isinstance(fn, FunctionType) and _whose(fn.__module__) == "user":
            self._ran.add(fn)
            known = memo.cache_info().misses
            self._watch(path, lambda: [memo.cache_info().misses >= known])  # else it was cleared
            self.push(path, *gc.get_referents(memo), fixed=True)

    def _module(self, path: str, module: ModuleType, whole: bool) -> None:
        held, names = vars(module), self._names
        is_users = _whose(module.__name__) == "user"
        if is_users or _whose(module.__name__) == "python":
            values = {k for k, x in held.items() if not (callable(x) or isinstance(x, ModuleType))}
            names = names if is_users else names & values
            names = names | values if is_users and (whole or self._any_name) else names
            self.named(path, held, names)

    def _class(self, kind: type) -> None:
        for one in kind.__mro__:
            if _whose(one.__module__) != "user":
                continue
            held = vars(one)
            implicit = {k for k, x in held.items() if k[:2] == "__" and isinstance(x, FunctionType)}
            self.named(one.__qualname__, held, self._names | implicit, whole=self._any_name)
            if issubclass(one, torch.autograd.Function):  # backward may run in another thread
                functions = (getattr(x, "__func__", x) for x in held.values())
                for fn in functions:
                    if isinstance(fn, FunctionType):
                        self._ran.add(fn)
        self.push(kind.__qualname__, *(() if type(kind) is type else (type(kind),)))


def _content(cell: CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # not assigned yet
        return []


def _slot_names(kind: type) -> list[str]:
    found = (pair for one in kind.__mro__ for pair in vars(one).items())
    return [name for name, x in found if isinstance(x, MemberDescriptorType)]


def _slots(x: Any) -> list[Any]:
    return [getattr(x, name, None) for name in _slot_names(type(x))]
