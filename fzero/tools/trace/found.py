"""The program as it was found: what a record of a step leaves changed is put back.

A record runs the Python of a step, and with it what a step keeps for its next call: a table that is
made once, a cache, a counter. Its tensors have no values, and a real call must not meet them. So
every recorder enters `AsFound`: it looks at what the step reaches before the first record, and puts
it back after each one. What it does not reach is told by name where it is met: see `RecordMode`.

Looked at are variables of enclosing functions, globals that code names, default arguments,
attributes of objects, classes and modules, elements of containers, small tensors and arrays, memo
caches, generators of random numbers and iterators, from the step on. Objects of fzero and torch are
passed through for what of the user's is in them; what they keep for themselves is not looked at.
"""

from __future__ import annotations

import array
import contextvars
import copy
import functools
import gc
import pickle
import random
import sys
import types
import warnings
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, Self

import optree
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fzero.context.device import accelerator_in_use, generators_on
from fzero.context.modes import LEFT
from fzero.errors import FzeroError, PhaseError
from fzero.state import NAMESPACE, TrainState
from fzero.transforms.functionalize import Template

MOST = 100_000
"""Of so many objects it is known what they were."""
_SMALL = 4096
_PASSED_BY = ("fzero.", "torch._", "torch.fx", "torch.utils._", "threading", "logging")
_LOOKED_INTO = ("fzero.optim", "fzero.state.points", "fzero.state.codec")
_LOOKED_INTO += ("fzero.transforms.pipeline", "fzero.transforms.functionalize")
_PLAIN = (int, float, complex, bool, str, bytes, type(None))
_OF_PYTHON = {"__dict__", "__weakref__", "__slotnames__", "__doc__", "__module__"}
_LIBRARIES = {"fzero", "torch", "numpy", "optree", *sys.stdlib_module_names}
_MEMO = type(functools.lru_cache(len))


class RecordMode(FakeTensorMode):
    """The mode of the tensors of a record, which a call after it must not meet."""

    def __init__(self, tool: str) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.tool, self.is_over, self.made = tool, False, Recorded()

    def end(self) -> None:
        """The record is over: whoever computes with a tensor of it raises."""
        self.is_over = True
        self.made.left()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func` on tensors without values; raise `PhaseError` for those of former records."""
        try:
            if not self.is_over:
                return self.made.note(super().__torch_dispatch__(func, types, args, kwargs))
        except AssertionError:  # modes are mixed
            require_no_left(func, (args, kwargs))
            raise
        require_no_left(func, (args, kwargs))


class LeftOver(Tensor):
    """A tensor of a plan, on the meta device, once the plan is over."""

    tool = "plan"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raise `PhaseError`."""
        require_no_left(func, (args, kwargs))


class Recorded:
    """The tensors that a record makes, for as long as somebody holds them."""

    def __init__(self) -> None:
        self._refs: dict[int, weakref.ref[Tensor]] = {}

    def note(self, made: Any) -> Any:
        """Return what a function has made, which is one of them now, or several."""
        some = made if isinstance(made, tuple | list) else (made,)
        self._refs |= {id(x): weakref.ref(x) for x in some if isinstance(x, Tensor)}
        return made

    def left(self) -> list[Tensor]:
        """Return those that are held when the record is over: calls of steps look out for them."""
        found = [x for ref in self._refs.values() if (x := ref()) is not None]
        for x in found:
            gone = functools.partial(LEFT.pop, id(x))
            LEFT[id(x)] = functools.partial(_judge, weakref.ref(x, gone))
        return found


def _judge(ref: weakref.ref[Tensor], outcome: Any) -> None:
    """Raise if what a step returns was left by a record; if it raises, say what was left."""
    if not isinstance(outcome, Exception):
        require_no_left("the end of the step", outcome)
    elif isinstance(outcome, FzeroError):
        return
    elif (x := ref()) is not None and (holder := _holder(x)):
        tool = getattr(x, "fake_mode", LeftOver).tool
        outcome.add_note(f"(fzero.{tool} left a tensor without values in {holder})")


def require_no_left(func: Any, tree: Any) -> None:
    """Raise `PhaseError` if a tensor that a record has left is in a tree."""
    for x in optree.tree_leaves(tree, namespace=NAMESPACE):
        of: Any = x if isinstance(x, LeftOver) else getattr(x, "fake_mode", None)
        if not isinstance(of, LeftOver) and not getattr(of, "is_over", False):
            continue
        with torch._C.DisableTorchFunctionSubclass():
            seen = f"a {x.dtype} tensor of shape {tuple(x.shape)}"
        raise PhaseError(
            f"{func} met {seen} without values, which fzero.{of.tool} left in "
            f"{_holder(x) or 'what the step keeps'}.",
            cause=f"the step made it while fzero.{of.tool} recorded it, and kept it where fzero "
            "does not look: in an object of a library, a generator, another thread.",
            fix=f"delete it there; make it before fzero.{of.tool} is called, or keep it in an "
            "attribute, a container or a functools.lru_cache of your own.",
        )


_NAMELESS = (dict, list, tuple, set, frozenset, deque, types.CellType, types.GeneratorType)


def _holder(x: Any) -> str:
    """Return where a tensor is held, for an error: by the first that has a name, or ""."""
    gc.collect()  # the graph of a record that is over, and other garbage, say nothing
    rest, seen = deque([(x, "")]), {id(x)}
    while rest and len(seen) < 500:
        of, path = rest.popleft()
        for one in reversed(gc.get_referrers(of)):  # what is held for long is older
            passing = isinstance(one, types.FrameType | torch.fx.Node | weakref.ref)
            passing |= isinstance(one, types.BuiltinMethodType)  # which is being called
            passing |= _is_iterator(one) and not isinstance(one, types.GeneratorType)
            if id(one) in seen or passing or type(one).__module__ == "contextlib":
                continue
            seen.add(id(one))
            key = _key_of(of, one)
            if isinstance(one, dict) and "__spec__" in one:
                return f"{one['__name__']}{key}{path}"
            if not isinstance(one, _NAMELESS):
                is_named = hasattr(one, "__qualname__") and hasattr(one, "__module__")
                named: Any = one if is_named else type(one)
                return f"{named.__module__}.{named.__qualname__}{key}{path}"
            rest.append((one, f"{key}{path}"))
    return ""


def _key_of(x: Any, holder: Any) -> str:
    """Return by what name an object holds another one; "" for none that is known."""
    held = [*getattr(holder, "__dict__", {}).items()]
    if not isinstance(holder, types.ModuleType):
        held += [pair for kind, of in _kinds_of(holder) for pair in kind.read(of).items()]
    named = (_name(key) for key, one in [*held, *_inside(holder)] if one is x)
    return next(filter(None, named), "")


class _Kind(NamedTuple):
    """What can be read of an object, by names, and put back."""

    read: Callable[[Any], dict[Any, Any]]
    write: Callable[[Any, dict[Any, Any]], Any]


class _Place(NamedTuple):
    path: str
    kind: _Kind
    of: Any
    held: dict[Any, Any]

    def is_changed(self) -> bool:
        now = self.kind.read(self.of)
        return [*now] != [*self.held] or not all(map(_same, now.values(), self.held.values()))


class AsFound:
    """What the roots reach, as it is when this context is entered.

    tool: who records, by its name in fzero. However the context ends, all is put back, and the
    tensors of its `mode`s are of no use.
    """

    def __init__(self, tool: str, *roots: Any) -> None:
        self.tool, self.roots, self._modes = tool, roots, list[Any]()
        self._places = list[_Place]()
        self.left = ""  # what the last record changed, first of all such places

    def mode(self) -> RecordMode:
        """Return a mode for the tensors of a record."""
        return self.ends(RecordMode(self.tool))

    def ends(self, mode: Any) -> Any:
        """Return a mode whose tensors are of no use once the program is put back: it is told."""
        self._modes.append(mode)
        return mode

    def look(self) -> None:
        """Take what is there now for what was found."""
        self._places = [*_places(self.roots)]

    def __enter__(self) -> Self:
        self.look()
        return self

    def __exit__(self, *error: Any) -> None:
        self.put_back()
        for one in self._modes:
            one.end()

    @contextmanager
    def record(self) -> Iterator[None]:
        """Context of one record, which begins and ends with the program as it was found."""
        for one in self._places:
            if any(map(_is_iterator, one.held.values())):  # the record advances copies
                one.kind.write(one.of, {key: _copied(x) for key, x in one.held.items()})
        try:
            yield
        finally:
            self.left = self.changed()
            self.put_back()

    def changed(self) -> str:
        """Return where something is not as it was found, first of all such places; "" for none."""
        return next((one.path or ".step" for one in self._places if one.is_changed()), "")

    def generators(self) -> list[torch.Generator]:
        """Return the generators of random numbers that were found."""
        return [one.of for one in self._places if isinstance(one.of, torch.Generator)]

    def put_back(self) -> None:
        """Make all as it was found."""
        for i, one in enumerate(self._places):
            if one.is_changed() or any(map(_is_iterator, one.held.values())):
                one.kind.write(one.of, one.held)
                self._places[i] = one._replace(held=one.kind.read(one.of))


def _places(roots: tuple[Any, ...]) -> Iterator[_Place]:
    """Yield what can be changed in all that the roots reach."""
    for path, kind, of in _ambient():
        yield _Place(path, kind, of, kind.read(of))
    rest = deque(("", x) for x in roots)
    rest.extend((".context", x) for x in contextvars.copy_context().values())
    seen, kept = set[Hashable](), list[Any]()
    while rest and len(seen) < MOST:
        path, x = rest.popleft()
        if type(x) in _PLAIN or id(x) in seen:
            continue
        seen.add(id(x))
        kept.append(x)  # else another object could get its id
        for kind, of in _kinds_of(x):
            place = _Place(path, kind, of, kind.read(of))
            yield place
            rest.extend(
                (f"{path}{_name(key)}", y) for key, one in place.held.items() for y in (key, one)
            )
        rest.extend((f"{path}{_name(key)}", one) for key, one in _inside(x))


def _name(key: Any) -> str:
    if key in ("", "__dict__"):
        return ""
    plain = isinstance(key, str) and key.isidentifier()
    return f".{key}" if plain else f"[{key!r}]" if isinstance(key, _PLAIN) else "[...]"


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if isinstance(a, _PLAIN):
        return type(a) is type(b) and (a == b or (a != a and b != b))
    return _is_iterator(a) and type(a) is type(b) and _position(a) == _position(b)


# What is put back, by kind.


def _write_dict(x: dict[Any, Any], held: dict[Any, Any]) -> None:
    kind: Any = OrderedDict if isinstance(x, OrderedDict) else dict
    kind.clear(x)
    kind.update(x, held)


def _write_names(of: Any, held: dict[str, Any]) -> None:
    """Set variables of a module; others of those names go."""
    names, variables = of
    for name in names:
        variables.pop(name, None)
    variables.update(held)


def _read_cell(x: types.CellType) -> dict[str, Any]:
    try:
        return {"": x.cell_contents}
    except ValueError:
        return {}


def _write_cell(x: types.CellType, held: dict[str, Any]) -> None:
    if held:
        x.cell_contents = held[""]
    else:
        del x.cell_contents


def _read_slots(x: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in type(x).__mro__:
        for name, one in vars(kind).items() if "__slots__" in vars(kind) else ():
            if isinstance(one, types.MemberDescriptorType):
                with suppress(AttributeError):  # it has no value yet
                    found[name] = one.__get__(x)
    return found


def _read_tensor(x: Tensor) -> dict[str, Any]:
    known = x.numel() <= _SMALL and x.device.type == "cpu" and x.layout == torch.strided
    version = 0 if x.is_inference() else x._version
    grad = x.grad if x.is_leaf else None
    return {"grad": grad, "version": version, "values": bytes_of(x) if known else None}


def _memory_of(x: Tensor) -> _Kind:
    """Return the kind of a tensor that may come to lie in other memory: by `.data`, `resize_`."""
    before = x.detach()

    def read(x: Tensor) -> Any:
        if x.layout != torch.strided:
            return None
        where = x.device, tuple(x.shape), x.stride(), x.storage_offset()
        return repr((where, x.untyped_storage()._cdata))

    return _at(read, lambda x, _: setattr(x, "data", before))


def _write_tensor(x: Tensor, held: dict[str, Any]) -> None:
    if x.is_leaf and x.grad is not held["grad"]:
        x.grad = held["grad"]
    if held["values"] and bytes_of(x) != held["values"]:
        row = torch.frombuffer(bytearray(held["values"]), dtype=torch.uint8).view(x.dtype)
        x.data.copy_(row.view(x.shape))


def _read_bytes(x: Any) -> bytes:
    return bytes(memoryview(x).cast("B")) if memoryview(x).nbytes <= _SMALL * 8 else b""


def _write_bytes(x: Any, held: bytes) -> None:
    if isinstance(x, bytearray):
        x[:] = held
    elif isinstance(x, array.array):
        x[:] = array.array(x.typecode, held)
    elif held:
        memoryview(x).cast("B")[:] = held


def bytes_of(x: Tensor) -> bytes:
    """Return the elements of a tensor, whatever its strides and the bits that it waits to apply."""
    row = x.detach().resolve_conj().resolve_neg().cpu().reshape(-1)
    made = torch.empty(row.shape, dtype=row.dtype).copy_(row)
    return made.view(torch.uint8).numpy().tobytes()


def _at(read: Callable[[Any], Any], write: Callable[[Any, Any], Any]) -> _Kind:
    """Return the kind of an object with one number or text that says where it stands."""
    return _Kind(lambda x: {"": read(x)}, lambda x, held: write(x, held[""]))


def _named(read: Callable[[Any], dict[str, Any]]) -> _Kind:
    """Return the kind of an object or a class with some attributes, whatever its own setters do."""

    def write(x: Any, held: dict[str, Any]) -> None:
        now, kind = read(x), type if isinstance(x, type) else object
        for name in now.keys() - held.keys():
            kind.__delattr__(x, name)
        for name, one in held.items():
            if name not in now or now[name] is not one:
                kind.__setattr__(x, name, one)

    return _Kind(read, write)


def _attributes(*names: str) -> _Kind:
    """Return the kind of an object with attributes of Python's own."""
    return _named(lambda x: {name: getattr(x, name) for name in names if hasattr(x, name)})


def _pickled(of: Callable[[Any], Any]) -> Callable[[Any], bytes]:
    return lambda x: pickle.dumps(of(x))


_DICT = _Kind(lambda x: dict(dict.items(x)), _write_dict)
_LIST = _Kind(
    lambda x: dict(enumerate(x)), lambda x, held: x.__setitem__(slice(None), [*held.values()])
)
_DEQUE = _Kind(lambda x: dict(enumerate(x)), lambda x, held: (x.clear(), x.extend(held.values())))
_SET = _Kind(lambda x: dict.fromkeys(x), lambda x, held: (x.clear(), x.update(held)))
_NAMES = _Kind(lambda of: {n: of[1][n] for n in of[0] if n in of[1]}, _write_names)
_CELL, _TENSOR = _Kind(_read_cell, _write_cell), _Kind(_read_tensor, _write_tensor)
_CLASS = _named(lambda x: {n: one for n, one in vars(x).items() if n not in _OF_PYTHON})
_SLOTS = _named(_read_slots)
_BYTES = _at(_read_bytes, _write_bytes)
_FUNCTION = _attributes("__code__", "__defaults__", "__kwdefaults__", "__dict__")
_OBJECT = _attributes("__class__", "__dict__")
_BASES = _attributes("__class__", "__bases__")
_MADE = _at(lambda memo: memo.cache_info().misses, lambda memo, _: memo.cache_clear())
_PYTHON = _at(_pickled(lambda x: x.getstate()), lambda x, held: x.setstate(pickle.loads(held)))
_TORCH = _at(
    lambda x: bytes_of(x.get_state()),
    lambda x, held: x.set_state(torch.frombuffer(bytearray(held), dtype=torch.uint8)),
)
_NUMPY = _at(_pickled(lambda x: x.state), lambda x, held: setattr(x, "state", pickle.loads(held)))


def _ambient() -> Iterator[tuple[str, _Kind, Any]]:
    yield "random", _PYTHON, random._inst
    yield "torch.default_generator", _TORCH, torch.default_generator
    if (kind := accelerator_in_use()) is not None:
        yield from ((f"torch.{kind}", _TORCH, one) for one in generators_on(kind))
    if (numpy := sys.modules.get("numpy")) is not None:
        yield "numpy.random", _NUMPY, numpy.random.mtrand._rand._bit_generator


_BY_TYPE: tuple[tuple[Any, _Kind], ...] = (
    (dict, _DICT),
    (list, _LIST),
    (deque, _DEQUE),
    (set, _SET),
    (types.CellType, _CELL),
    (bytearray, _BYTES),
    (array.array, _BYTES),
    (_MEMO, _MADE),
    (random.Random, _PYTHON),
    (torch.Generator, _TORCH),
)


def _kinds_of(x: Any) -> Iterator[tuple[_Kind, Any]]:
    """Yield (kind, of what) of all that can be changed in an object."""
    numpy: Any = sys.modules.get("numpy")
    if not isinstance(x, _MEMO) or not _is_library(x.__module__):
        yield from ((kind, x) for of, kind in _BY_TYPE if isinstance(x, of))
    if isinstance(x, types.FunctionType):
        if not _is_library(x.__module__):
            yield _FUNCTION, x
            yield from ((_NAMES, of) for of in _variables(x))
        elif "__wrapped__" in vars(x):
            yield _DICT, vars(x)
    elif isinstance(x, type):
        if not _is_library(x.__module__):
            yield from ((_BASES, x), (_CLASS, x))
    elif isinstance(x, Tensor):
        yield _DICT, vars(x)
        if type(x) in (Tensor, nn.Parameter):
            yield from ((_memory_of(x), x), (_TENSOR, x))
    elif numpy is not None and isinstance(x, numpy.ndarray):
        array: Any = x
        if array.flags.c_contiguous and array.flags.writeable and not array.dtype.hasobject:
            yield _BYTES, x
    elif numpy is not None and isinstance(x, numpy.random.BitGenerator):
        yield _NUMPY, x
    elif _is_iterator(x):
        yield _at(lambda x: repr(_position(x)), lambda *_: None), x
    elif not isinstance(x, types.ModuleType | torch._ops.OpOverload) and not _is_passed_by(x):
        if isinstance(getattr(x, "__dict__", None), dict):
            yield _OBJECT, x
        yield _SLOTS, x


_HOLDS: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (types.MethodType, ("__self__", "__func__")),
    (types.BuiltinMethodType, ("__self__",)),
    (functools.partial, ("func", "args", "keywords")),
    ((staticmethod, classmethod), ("__func__",)),
    (property, ("fget", "fset", "fdel")),
    (memoryview, ("obj",)),
)


def _inside(x: Any) -> Iterable[tuple[Any, Any]]:
    """Return (name or number, what) of what an object holds for good."""
    if isinstance(x, types.FunctionType):
        return zip(x.__code__.co_freevars, x.__closure__ or (), strict=False)
    if names := next((some for kind, some in _HOLDS if isinstance(x, kind)), ()):
        return [(name, getattr(x, name)) for name in names]
    if isinstance(x, types.GeneratorType):
        return x.gi_frame.f_locals.items() if x.gi_frame else ()
    if isinstance(x, tuple | frozenset):
        return enumerate(x)
    if isinstance(x, Template):  # which notes modes in each call
        return vars(x).items()
    if isinstance(x, TrainState):
        return ("optimizer", x.setup.optimizer), ("transforms", x.setup.transforms)
    if type(x).__name__ == "Generator" and hasattr(x, "bit_generator"):  # of NumPy
        return (("bit_generator", x.bit_generator),)
    return ()


def _variables(fn: types.FunctionType) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Yield (names, variables) of each module of which the code of a function names variables."""
    names = tuple(dict.fromkeys(_names_in(fn.__code__)))
    closed = (one for c in fn.__closure__ or () for one in _read_cell(c).values())
    rest = [fn.__globals__, *(vars(x) for x in closed if isinstance(x, types.ModuleType))]
    seen = set[int]()
    while rest:
        held = rest.pop()
        if id(held) not in seen:
            seen.add(id(held))
            yield names, held
            modules = (one for n in names if isinstance(one := held.get(n), types.ModuleType))
            rest += [vars(one) for one in modules if not _is_library(one.__name__)]


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for one in code.co_consts:
        if isinstance(one, str):
            yield one  # globals()["t"], setattr(module, "t", x)
        elif isinstance(one, types.CodeType):
            yield from _names_in(one)


def _is_iterator(x: Any) -> bool:
    builtin = type(x).__module__ in ("builtins", "itertools")
    return builtin and not isinstance(x, type) and hasattr(x, "__next__")


def _position(x: Any) -> Any:
    """Return where an iterator or a generator of Python is."""
    if isinstance(x, types.GeneratorType):
        return x.gi_frame and x.gi_frame.f_lasti
    if isinstance(x, tuple):
        return tuple(map(_position, x))
    if not _is_iterator(x):
        return x if isinstance(x, _PLAIN) else None
    # itertools' are to lose it, and copies, in Python 3.14
    with warnings.catch_warnings(action="ignore"), suppress(TypeError):
        return _position(x.__reduce__()[1:])


def _copied(x: Any) -> Any:
    """Return a copy of an iterator, if it has one; else what it is given."""
    with warnings.catch_warnings(action="ignore"), suppress(TypeError):
        return copy.copy(x) if _is_iterator(x) else x
    return x


def _is_passed_by(x: Any) -> bool:
    module = f"{type(x).__module__}"
    looked_into = module.startswith(_LOOKED_INTO) and not isinstance(x, Template)
    return module.startswith(_PASSED_BY) and not looked_into


def _is_library(module: Any) -> bool:
    """Return whether a module is one of a library; classes in C may have a descriptor for it."""
    return module.split(".")[0] in _LIBRARIES if type(module) is str else bool(module)
