"""Steps that keep something for the next call, or go around the program; and pieces by rank."""

from __future__ import annotations

import collections
import contextvars
import functools
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import fzero
from fzero import Form, Placement, axis_index, axis_size
from tests.descends import descends
from tests.tools.prove.adversary.places import Fn
from tests.tools.prove.adversary.programs import Program, hidden, usual_loss

Times = Callable[[], Any]
"""What a loss is times; made anew for each step."""


def value() -> Any:
    """What is kept."""
    return axis_size()


def _once(read: Times, keep: Callable[[Any], Any]) -> Times:
    """What `read` gives; if that is nothing, a value is kept first."""

    def times() -> Any:
        if read() is None:
            keep(value())
        return read()

    return times


def _of_dict(held: Any) -> Times:
    return _once(lambda: held.get("n"), lambda n: held.update(n=n))


def _of_list(held: Any) -> Times:
    return _once(lambda: held[0] if held else None, held.append)


def _of_set(held: set[int]) -> Times:
    return _once(lambda: max(held, default=None), held.add)


def _of_attribute(holder: Any, keep: Callable[[Any], Any] | None = None) -> Times:
    return _once(
        lambda: getattr(holder, "kept", None), keep or (lambda n: setattr(holder, "kept", n))
    )


def _of_held(held: Any) -> Times:
    return _of_attribute(next(iter(held)))


class _Base:
    kept: Any = None


class _Plain(_Base): ...


class _Slots:
    __slots__ = ("kept",)


def _kind(*bases: type, **held: Any) -> Any:
    return type("Kind", bases, held)


def _of_base(base: Any) -> Times:
    return _of_attribute(_kind(base)(), lambda n: setattr(base, "kept", n))


def _by_underscores(kind: Any) -> Times:
    return _once(lambda: getattr(kind, "__kept__", None), lambda n: setattr(kind, "__kept__", n))


def _replaced(one: Any, name: str, new: Callable[[Any], Any]) -> Times:
    """An attribute of Python's own is another one: the class, the dict, the bases."""
    return _of_attribute(one, lambda n: setattr(one, name, new(n)))


def _closure() -> Times:
    kept: Any = None

    def times() -> Any:
        nonlocal kept
        kept = value() if kept is None else kept
        return kept

    return times


def _default() -> Times:
    def times(held: dict[str, int] = {}) -> Any:  # noqa: B006
        return held.setdefault("n", value())

    times.__defaults__ = ({},)
    return times


def _keyword() -> Times:
    def times(*, held: Any) -> Any:
        return held.setdefault("n", value())

    times.__kwdefaults__ = {"held": {}}
    return times  # type: ignore[return-value]


def _function() -> Times:
    def times() -> Any:
        if not hasattr(times, "kept"):
            times.kept = value()
        return times.kept

    return times


def _property() -> Times:
    class One:
        @functools.cached_property
        def number(self) -> int:
            return value()

    one = One()
    return lambda: one.number


def _memo_of_a_method() -> Times:
    return type("One", (), {"number": functools.cache(lambda self: value())})().number


GLOBAL: Any = None


def _of_global() -> Times:
    global GLOBAL
    GLOBAL = None

    def times() -> Any:
        global GLOBAL
        GLOBAL = value() if GLOBAL is None else GLOBAL
        return GLOBAL

    return times


def _weak() -> Times:
    key = _Plain()
    held: Any = weakref.WeakKeyDictionary()
    return lambda: held.setdefault(key, value())


def _tensor(held: dict[str, Tensor]) -> Times:
    return _once(lambda: held.get("n"), lambda n: held.update(n=torch.ones(()) * n))


def _other_code() -> Times:
    held: list[Any] = []

    def first() -> Any:
        return held and None

    def other() -> Any:
        return held[0]

    def times() -> Any:
        if not held:
            held.append(value())
            first.__code__ = other.__code__
        return first()

    return times


def _by_name() -> Times:
    globals().pop("BY_NAME", None)
    return lambda: globals()["BY_NAME"] if "BY_NAME" in globals() else _named(globals())


def _named(held: Any) -> Any:
    return held.setdefault("BY_NAME", value())


def _in_context() -> Times:
    held: Any = contextvars.ContextVar("held")
    held.set({})
    return lambda: held.get().setdefault("n", value())


FIRST: dict[str, Callable[[], Times]] = {
    "a closure": _closure,
    "a dict": lambda: _of_dict({}),
    "an ordered dict": lambda: _of_dict(collections.OrderedDict()),
    "a default dict": lambda: _of_dict(collections.defaultdict(int)),
    "a list": lambda: _of_list([]),
    "a deque": lambda: _of_list(collections.deque()),
    "a byte array": lambda: _of_list(bytearray()),
    "a set": lambda: _of_set(set()),
    "a default argument": _default,
    "a default keyword": _keyword,
    "an attribute": lambda: _of_attribute(_Plain()),
    "a slot": lambda: _of_attribute(_Slots()),
    "a class": lambda: _of_attribute(_kind(_Plain)),
    "a base class": lambda: _of_base(_kind(kept=None)),
    "a module of torch": lambda: _of_attribute(nn.Linear(1, 1)),
    "a module of Python": lambda: _of_attribute(types.ModuleType("made_up")),
    "a thread": lambda: _of_attribute(threading.local()),
    "a tensor's attribute": lambda: _of_attribute(torch.zeros(1)),
    "a function": _function,
    "a memo": lambda: functools.lru_cache(lambda: value()),
    "a memo of a method": _memo_of_a_method,
    "a cached property": _property,
    "a global": _of_global,
    "weak keys": _weak,
    "a partial": lambda: functools.partial(lambda held: held.setdefault("n", value()), held={}),
    "a tensor": lambda: _tensor({}),
    "a metaclass": lambda: _of_attribute(_kind(type)),
    "a name with underscores": lambda: _by_underscores(_kind()),
    "another class": lambda: _replaced(_Plain(), "__class__", lambda n: _kind(_Plain, kept=n)),
    "another dict": lambda: _replaced(_Plain(), "__dict__", lambda n: {"kept": n}),
    "other bases": lambda: _replaced(
        _kind(_kind(_Plain)), "__bases__", lambda n: (_kind(_Plain, kept=n),)
    ),
    "other code": _other_code,
    "a global by name": _by_name,
    "a context": _in_context,
    "a text": lambda: _of_attribute(_kind(str)()),
    "an element of a set": lambda: _of_held({_Plain()}),
    "a key": lambda: _of_held({_Plain(): 1}),
    "a bound method": lambda: (lambda put: lambda: put("n", value()))({}.setdefault),
}


def _later(make: Callable[[], Times]) -> Callable[[], Times]:
    """The first call of ranks is right; later ones are not."""

    def made() -> Times:
        kept, seen = make(), _of_dict(held := {})

        def times() -> Any:
            first = "n" not in held
            seen()
            number = kept()
            return 1 if first else number

        return times

    return made


# Around the program.


def _set_data(z: Tensor) -> Tensor:
    z.data = z.detach() * axis_size()
    return z


def _swapped(z: Tensor) -> Tensor:
    with torch.no_grad():
        a, b = z.detach().clone(), z.detach() * axis_size()
    torch.utils.swap_tensors(a, b)
    return z * (a.detach() / z.detach())


def _in_storage(z: Tensor) -> Tensor:
    one = torch.ones(1)
    one.untyped_storage().copy_(torch.full((1,), float(axis_size())).untyped_storage())
    return z * one


def _or_as_it_is(ask: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A step that goes on without what it cannot have."""

    def of(z: Tensor) -> Tensor:
        try:
            return ask(z)
        except Exception:
            return z

    return of


def _twice(put_back: Callable[[Any, Tensor], Any]) -> Callable[[Tensor], Tensor]:
    """The same numbers twice on ranks, and other ones on one."""

    def of(z: Tensor) -> Tensor:
        before = torch.default_generator.get_state()
        first = torch.rand(())
        if axis_size() > 1:
            put_back(torch.default_generator, before)
        return z * (1 + 10 * (first - torch.rand(())))

    return of


def _sown(z: Tensor) -> Tensor:
    torch.default_generator.manual_seed(axis_index() + 3)
    return z * torch.rand(())


AROUND: dict[str, Callable[[Tensor], Tensor]] = {
    "data": _set_data,
    "swap_tensors": _swapped,
    "untyped_storage": _in_storage,
    "numpy": _or_as_it_is(
        lambda z: z * min(float(z.detach().numpy().max()), 0.0) * axis_size() + z * axis_size()
    ),
    "tolist": _or_as_it_is(lambda z: z * (axis_size() + 0 * len(z.detach().tolist()))),
    "data_ptr": _or_as_it_is(lambda z: z * (axis_size() + 0 * z.data_ptr())),
    "array": _or_as_it_is(lambda z: z * (axis_size() + 0 * z.detach().__array__().size)),
    "set_state": _twice(lambda generator, state: generator.set_state(state)),
    "set_rng_state": _twice(lambda _, state: torch.set_rng_state(state)),
    "manual_seed": _sown,
}


# Slots of ranks, and pieces.


def _times(point: str, factor: Callable[[Any], Any], **options: Any) -> Callable[[], Fn]:
    """The usual step with each gradient, or parameter, times a number that `ctx` gives."""

    def make() -> Fn:
        def pieces(slots: Any, xs: Any, ctx: Any) -> Any:
            return slots, {k: x * factor(ctx) for k, x in xs.items()}

        given: Any = {point: pieces}
        if point == "local":
            given = {point: lambda slots, g, ctx: (slots, g * factor(ctx))}
        if point == "update":
            given = {point: lambda slots, g, ctx, rule: (slots, rule(pieces(slots, g, ctx)[1]))}
        return fzero.transform(name="made_up", **given, **options)(descends(usual_loss))

    return make


def _of_slot(read: Callable[[Any], Any], leaves: Any, elsewhere: Any) -> Callable[[], Fn]:
    """A slot that each rank has its own of, from `ctx.rank`, and a gradient that is times it."""
    form: Any = Form(leaves=leaves, placement=Placement.PARTIAL, elsewhere=elsewhere)

    def begin(params: Any, ctx: Any) -> Any:
        of = {k: torch.full((torch.Size(ctx.shape(k)).numel(),), ctx.rank + 1.0) for k in params}
        return {"own": of if leaves == "learning" else ctx.rank + 1.0}

    def local(slots: Any, g: Tensor, ctx: Any) -> Any:
        return slots, g * read(slots["own"])

    def make() -> Fn:
        return fzero.transform(name="made_up", slots={"own": form}, init=begin, local=local)(
            descends(usual_loss)
        )

    return make


PIECES: dict[str, Callable[[], Fn]] = {
    f"{point}, {name}": _times(point, factor)
    for point in ("reduced", "update", "updated")
    for name, factor in {
        "by rank": lambda ctx: 1.0 + ctx.rank,
        "of the last rank": lambda ctx: 2.0 if ctx.rank == axis_size() - 1 else 1.0,
        "by ranks": lambda ctx: 1.0 / axis_size(),
        "a sum over ranks": lambda ctx: fzero.psum(torch.ones(())),
    }.items()
}


def _moved(change: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], Fn]:
    def step(state: Any, x: Tensor) -> Any:
        there, value = fzero.grad_and_reduce(usual_loss, state)(x)
        moved = fzero.map_params(change, state, there.gradients)
        moved, _ = fzero.grad_and_reduce(usual_loss, moved)(x)
        return fzero.apply_gradients(fzero.add_gradients(state, moved)), value

    return lambda: step


MOVED: dict[str, Callable[[], Fn]] = {
    "moved, by ranks": _moved(lambda p, g: p + g / axis_size()),
    "moved, by rank": _moved(lambda p, g: p + g * axis_index()),
}


def programs() -> Iterator[Program]:
    for name, make in FIRST.items():
        for when, of in (("first", make), ("later", _later(make))):
            yield Program(
                kind="kept",
                name=f"{when}, {name}",
                make=lambda of=of: _by(of()),
                calls=3,
            )
    for name, change in AROUND.items():
        loss = lambda p, x, change=change: change(hidden(p, x)).pow(2).mean()  # noqa: E731
        yield Program(kind="around", name=name, make=lambda loss=loss: descends(loss))
    for leaves, read in (("number", lambda x: x), ("learning", lambda x: x)):
        for elsewhere in ("sum", "own"):
            name = f"{leaves}, {elsewhere}"
            yield Program(kind="own slots", name=name, make=_of_slot(read, leaves, elsewhere))
    for stage in (1, 2, 3):
        for name, make in (*PIECES.items(), *MOVED.items()):
            stages: dict[str, Any] = {"stage": stage}
            yield Program(kind="pieces", name=f"{name}, {stage}", make=make, options=stages)


def _by(times: Times) -> Fn:
    return descends(lambda p, x: usual_loss(p, x) * times())
