"""What a step reads without being given it: a compiled step follows it as the step itself does."""

from __future__ import annotations

import array
import copy
import dataclasses
import enum
import functools
import operator
import os
import sys
import weakref
from collections import ChainMap, OrderedDict, UserDict, deque
from collections.abc import Callable
from contextvars import ContextVar
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fzero
from fzero.tools.compile.key import MOST
from tests.descends import descends

RULE = fzero.optim.sgd(0.5)
X = torch.tensor([1.0, 2.0])


class Color(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Slotted:
    """An object without a `__dict__`."""

    __slots__ = ("k",)
    k: float


@dataclasses.dataclass
class Config:
    """What users read numbers from."""

    k: float = 1.0
    inner: Any = dataclasses.field(default_factory=lambda: SimpleNamespace(k=1.0, table={"k": 1.0}))
    seen: int = 0

    @property
    def doubled(self) -> float:
        return self.k * 2

    def by_method(self) -> float:
        return self.k

    def __call__(self) -> float:
        return self.k

    def __getitem__(self, name: str) -> float:
        return getattr(self, name)


class Base:
    k = 1.0


class Derived(Base):
    """Reads an attribute of its base."""


class Switch(nn.Module):
    """A module of the user's own, with a plain attribute, in another module."""

    def __init__(self) -> None:
        super().__init__()
        self.k, self.drop = 1.0, nn.Dropout(0.5)
        self.register_buffer("table", torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(x * self.k) * self.table


class Doubles(torch.autograd.Function):
    """A backward that reads what a step holds."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> Tensor:
        return dys[0] * C.inner.k


class Row(NamedTuple):
    k: float


C = Config()
KEPT: dict[str, Any] = {}
VAR: ContextVar[float] = ContextVar("VAR", default=1.0)
GET = operator.attrgetter("k")


def number(cfg: Any) -> float:
    return cfg.k


def nested(cfg: Any) -> float:
    return number(cfg.inner) + number(SimpleNamespace(k=1.0))


def by_default(cfg: Any = C) -> float:
    return cfg.k


def by_import() -> float:
    import config_of_a_test  # type: ignore[import-not-found]

    return config_of_a_test.k


@torch.no_grad()
def decorated(cfg: Any) -> float:
    return number(cfg)


@functools.lru_cache(maxsize=4)
def kept() -> Config:
    return Config()


@functools.lru_cache
def filled(_: int) -> float:
    return C.k


@functools.singledispatch
def dispatched(_: Any) -> float:
    return 1.0


def set_on(x: Any, name: str = "k") -> Callable[[], Any]:
    return lambda: setattr(x, name, 3.0)


def cases() -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """By what a loss reads: the number that it reads, and how that changes."""
    C.__init__()
    Base.k, Color.RED._value_ = 1.0, 1
    os.environ["FZERO_K"] = "1"
    config: Any = ModuleType("config_of_a_test")
    config.k = 1.0
    sys.modules["config_of_a_test"] = config
    KEPT.clear()
    KEPT.update(k=1.0, rows=[Config(), Config()], get=number)
    other, many, frozen, slotted, plain = Config(), [1.0] * 200, (Config(),), Slotted(1.0), Base()
    numbers, raw, values = array.array("d", [1.0]), bytearray(b"\1"), np.ones(2000)
    chain, user, order = ChainMap({}, {"k": 1.0}), UserDict(k=1.0), OrderedDict(a=1.0, b=2.0)
    queue, proxy, ref, holds = deque([1.0]), MappingProxyType(KEPT), weakref.ref(other), [1.0]
    tensor, deep = torch.ones(2), Config(inner=Config(inner=[{"x": (Config(),)}]))
    name, empty, named, template = "k", Base(), SimpleNamespace(fn=number, k=1.0), "{0.k}"
    cell, flag, partial = 1.0, torch.ones(2), functools.partial(number, C)
    kept.cache_clear()
    filled.cache_clear()

    def set_cell() -> None:
        nonlocal cell
        cell = 3.0

    def refill() -> None:
        C.k = 3.0
        filled.cache_clear()

    return {
        "a helper's argument": (lambda: number(C), set_on(C)),
        "closed over": (lambda: number(other), set_on(other)),
        "decorated": (lambda: decorated(other), set_on(other)),
        "dispatched": (
            lambda: float(dispatched(0)),
            lambda: dispatched.register(int, lambda _: 3.0),
        ),
        "patched": (lambda: F.relu(X)[0], lambda: setattr(F, "relu", lambda x: x * 3)),
        "a format": (lambda: float(template.format(C)), set_on(C)),
        "a default": (lambda: by_default(), set_on(C)),
        "two helpers on": (lambda: nested(C), set_on(C.inner)),
        "a cell": (lambda: cell, set_cell),
        "a partial": (lambda: partial(), set_on(C)),
        "a dict": (lambda: KEPT["k"], lambda: KEPT.update(k=3.0)),
        "a function in a dict": (
            lambda: KEPT["get"](C),
            lambda: KEPT.update(get=lambda c: 3.0 * c.k),
        ),
        "a list of objects": (
            lambda: sum(map(number, KEPT["rows"])),
            lambda: set_on(KEPT["rows"][1])(),
        ),
        "a long list": (lambda: many[150], lambda: operator.setitem(many, 150, 3.0)),
        "a length": (lambda: len(holds), lambda: holds.append(1.0)),
        "an order": (lambda: next(iter(order.values())), lambda: order.move_to_end("a")),
        "a tuple": (lambda: frozen[0].k, set_on(frozen[0])),
        "a deque": (lambda: queue[0], lambda: queue.appendleft(3.0)),
        "a proxy": (lambda: proxy["k"], lambda: KEPT.update(k=3.0)),
        "ChainMap": (lambda: chain["k"], lambda: chain.update(k=3.0)),
        "UserDict": (lambda: user["k"], lambda: user.update(k=3.0)),
        "ContextVar": (lambda: VAR.get(), lambda: VAR.set(3.0)),
        "array": (lambda: numbers[0], lambda: operator.setitem(numbers, 0, 3.0)),
        "bytearray": (lambda: raw[0], lambda: operator.setitem(raw, 0, 3)),
        "numpy": (lambda: float(values[1500]), lambda: values.__setitem__(1500, 3.0)),
        "asdict": (lambda: dataclasses.asdict(C)["k"], set_on(C)),
        "asdict, nested": (
            lambda: dataclasses.asdict(deep)["inner"]["inner"][0]["x"][0]["k"],
            lambda: set_on(deep.inner.inner[0]["x"][0])(),
        ),
        "astuple": (lambda: dataclasses.astuple(C)[0], set_on(C)),
        "replace": (lambda: dataclasses.replace(C, seen=3).k, set_on(C)),
        "copy": (lambda: copy.copy(C).k, set_on(C)),
        "attrgetter": (lambda: operator.attrgetter("k")(C), set_on(C)),
        "attrgetter, made before": (lambda: GET(C), set_on(C)),
        "attrgetter, mapped": (
            lambda: sum(map(GET, KEPT["rows"])),
            lambda: set_on(KEPT["rows"][0])(),
        ),
        "getattr": (lambda: getattr(C, "k"), set_on(C)),  # noqa: B009
        "getattr, computed": (lambda: getattr(C, name + ""), set_on(C)),
        "getattr, absent": (lambda: getattr(named, "late", 1.0), set_on(named, "late")),
        "hasattr": (lambda: 1.0 + hasattr(named, "later"), set_on(named, "later")),
        "vars": (lambda: vars(C)["k"], set_on(C)),
        "vars, all of them": (lambda: dict(**vars(other))["k"], set_on(other)),
        "__dict__": (lambda: next(iter(C.__dict__.values())), set_on(C)),
        "globals": (lambda: globals()["C"].k, set_on(C)),
        "a property": (lambda: C.doubled, set_on(C)),
        "a method": (lambda: C.by_method(), set_on(C)),
        "a bound method": ((lambda get: lambda: get())(C.by_method), set_on(C)),
        "called": (lambda: C(), set_on(C)),
        "an item of an object": (lambda: C["k"], set_on(C)),
        "its class": (lambda: Derived().k, set_on(Base)),
        "a class": (lambda: Base.k, set_on(Base)),
        "an object before its class": (lambda: plain.k, set_on(plain)),
        "its class, of an object": (lambda: empty.k, set_on(Base)),
        "a slot": (lambda: slotted.k, set_on(slotted)),
        "a method that is replaced": (
            lambda: named.fn(named),
            lambda: setattr(named, "fn", nested_of),
        ),
        "an enum": (lambda: Color.RED.value, lambda: setattr(Color.RED, "_value_", 3)),
        "a module": (lambda: sys.modules["config_of_a_test"].k, set_on(config)),
        "a module, closed over": (lambda: config.k, set_on(config)),
        "a module, imported there": (by_import, set_on(config)),
        "the environment": (
            lambda: float(os.environ["FZERO_K"]),
            lambda: os.environ.update(FZERO_K="3"),
        ),
        "getenv": (
            lambda: float(os.getenv("FZERO_K", "1")),
            lambda: os.environ.update(FZERO_K="3"),
        ),
        "argv": (lambda: len(sys.argv), lambda: sys.argv.append("one more")),
        "a weak reference": (lambda: ref().k, set_on(other)),
        "a cache that is cleared": (lambda: filled(1), refill),
        "an object that a cache returns": (lambda: number(kept()), lambda: set_on(kept())()),
        "an attribute of a tensor": (lambda: getattr(tensor, "k", 1.0), set_on(tensor)),
        "elements, as numbers": (lambda: tensor.tolist()[0], lambda: tensor.mul_(3)),
        "a flag of a tensor": (lambda: 1.0 + flag.requires_grad, lambda: flag.requires_grad_()),
        "a default dtype": (
            lambda: torch.ones(1).dtype.itemsize,
            lambda: torch.set_default_dtype(torch.float64),
        ),
        "deterministic": (
            lambda: 1.0 + torch.are_deterministic_algorithms_enabled(),
            lambda: torch.use_deterministic_algorithms(mode=True),
        ),
        "grad mode": (
            lambda: 1.0 + torch.is_grad_enabled(),
            lambda: torch.set_default_dtype(torch.float64),
        ),
        "a text": (
            lambda: {"sum": 1.0, "mean": 2.0}[KEPT.get("how", "sum")],
            lambda: KEPT.update(how="mean"),
        ),
        "defaults": (by_default, lambda: setattr(by_default, "__defaults__", (Config(k=3.0),))),
        "a code": (
            lambda: number(C),
            lambda: setattr(number, "__code__", (lambda cfg: 3.0 * cfg.k).__code__),
        ),
    }


def nested_of(_: Any) -> float:
    return 3.0


NAMES = [*cases()]


@pytest.fixture
def put_back() -> Any:
    """Leave torch, this module and the environment as they were."""
    code, defaults, argv = number.__code__, by_default.__defaults__, [*sys.argv]
    relu = F.relu
    yield
    F.relu = relu
    number.__code__, by_default.__defaults__, sys.argv[:] = code, defaults, argv
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(mode=False)
    os.environ.pop("FZERO_K", None)
    sys.modules.pop("config_of_a_test", None)
    VAR.set(1.0)
    cases()


def followed(loss: Callable[..., Tensor], *changes: Callable[[], Any], **options: Any) -> list[Any]:
    """The losses of the step, which those of the compiled step are; before and after changes."""
    step = fzero.shard(descends(loss), stage=2)
    compiled = fzero.compile(step, backend="eager", **options)
    state = step.init({"w": torch.ones(2)}, RULE)
    found = []
    for change in (lambda: None, *changes):
        change()
        # The compiled one first: what the step itself fills is not there yet.
        (new, got), (want, loss_of) = compiled(state, X), step(state, X)
        assert torch.equal(got, loss_of)
        assert torch.equal(*(fzero.full_params(x)["w"] for x in (new, want)))
        found.append(loss_of.item())
    return found


@pytest.mark.parametrize("name", NAMES)
def test_what_a_loss_reads_is_followed(name: str, put_back: Any) -> None:
    read, change = cases()[name]
    found = followed(lambda p, x: (p["w"] * x).sum() * read(), lambda: None, change, max_graphs=2)
    assert found[0] == found[1] and (found[1] != found[2] or name == "grad mode")


def test_what_an_autograd_function_reads_in_its_backward_is_followed(put_back: Any) -> None:
    step = fzero.shard(descends(lambda p, x: (Doubles.apply(p["w"]) * x).sum()), stage=1)
    compiled = fzero.compile(step, backend="eager")
    state = step.init({"w": torch.ones(2)}, RULE)
    for k in (1.0, 3.0):
        C.inner.k = k
        made = [fzero.full_params(one(state, X)[0])["w"] for one in (step, compiled)]
        assert torch.equal(*made) and made[0][0] == 1 - k / 2


def with_hook(net: nn.Module) -> None:
    net.register_forward_hook(lambda *given: given[-1] * 3)


def replaced(net: Any) -> None:
    net.table = torch.full((2,), 3.0)


CHANGED: dict[str, Callable[[Any], Any]] = {
    "an attribute": lambda net: setattr(net, "k", 3.0),
    "a hook": with_hook,
    "a hook inside": lambda net: with_hook(net.drop),
    "a buffer that is written": lambda net: net.table.mul_(3),
    "a buffer that is another": replaced,
    "a module inside": lambda net: setattr(net, "drop", nn.Tanh()),
    "an attribute of it": lambda net: setattr(net.drop, "p", 0.0),
    "its mode": lambda net: net.eval(),
    "the mode of a part": lambda net: net.drop.eval(),
    "its forward": lambda net: setattr(net, "forward", lambda x: x * 3),
}


@pytest.mark.parametrize("name", CHANGED)
def test_modules_that_a_loss_closes_over_are_followed(name: str) -> None:
    net = Switch()

    def loss(p: Any, x: Tensor) -> Tensor:
        torch.manual_seed(4)
        return (net(x.expand(9, 2)) * p["w"]).sum()

    before, same, after = followed(loss, lambda: None, lambda: CHANGED[name](net), max_graphs=2)
    assert before == same != after


def test_hooks_for_all_modules_are_followed() -> None:
    net, handles = Switch().eval(), []
    register = nn.modules.module.register_module_forward_hook

    def hook() -> None:
        handles.append(register(lambda module, args, out: out * 3))

    try:
        before, after = followed(lambda p, x: (net(x) * p["w"]).sum(), hook, max_graphs=2)
    finally:
        handles[0].remove()
    assert before != after


@pytest.mark.parametrize("functionalized", [True, False])
def test_dropout_follows_the_mode_of_the_module(functionalized: bool) -> None:
    net = nn.Sequential(nn.Linear(2, 64), nn.Dropout(0.5), nn.Linear(64, 1))
    apply, params = fzero.functionalize(net)
    frozen = nn.Sequential(nn.Linear(2, 64), nn.Dropout(0.5)).requires_grad_(False)

    def by_apply(p: Any, x: Tensor) -> Tensor:
        return apply(p, x).sum()

    def by_module(p: Any, x: Tensor) -> Tensor:
        return (apply(p, x) * frozen(x)).sum()

    step = fzero.shard(descends(by_apply if functionalized else by_module), stage=2)
    compiled = fzero.compile(step, backend="eager")
    changed = net if functionalized else frozen
    state = step.init(params, RULE)
    found = []
    for mode in (True, False, True):
        if not functionalized:
            net.eval()
        changed.train(mode)
        for one in (step, compiled):
            torch.manual_seed(3)
            found.append(one(state, torch.ones(1, 2))[1].item())
    assert found[0::2] == found[1::2] and found[0] == found[4] != found[2]


class Trainer:
    """A loss that is a method, with what others count on the same object."""

    def __init__(self) -> None:
        self.rate, self.seen, self.options = 1.0, 0, Config()
        self.history: list[float] = []

    def loss(self, p: Any, x: Tensor) -> Tensor:
        return (p["w"] * x).sum() * self.rate * getattr(self.options, "k", 1.0)


def test_what_the_step_does_not_read_is_no_other_graph() -> None:
    trainer = Trainer()

    def count() -> None:
        trainer.seen += 1
        trainer.options.seen += 1
        trainer.history.append(1.0)
        trainer.later = trainer.seen
        KEPT[f"{len(KEPT)}"] = 1

    assert len({*followed(trainer.loss, count, count, max_graphs=1)}) == 1  # warnings are errors


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize(
    ("held", "why"),
    [
        ([1.0] * (MOST + 1), "reads held, a list of over 4096 entries"),
        (np.ones(2**16), "reads held, an array of over 262144 bytes"),
        (torch.ones(2), r"reads the elements of a tensor by numpy\(\)"),
    ],
)
def test_what_cannot_be_followed_is_named_and_the_step_runs(held: Any, why: str) -> None:
    def loss(p: Any, x: Tensor) -> Tensor:
        value = held.numpy()[1] if isinstance(held, Tensor) else held[1]
        return (p["w"] * x).sum() * float(value)

    step = fzero.shard(descends(loss), stage=0)
    compiled = fzero.compile(step, backend="eager")
    state = step.init({"w": torch.ones(2)}, RULE)
    with pytest.warns(UserWarning, match=f"the step itself runs from now on: .*{why}"):
        compiled(state, X)
    held[1] = 3.0
    assert torch.equal(compiled(state, X)[1], step(state, X)[1])  # a warning would be an error


def test_objects_that_the_step_is_given_are_followed() -> None:
    def loss(p: Any, x: Tensor, cfg: Any) -> Tensor:
        return (p["w"] * x).sum() * number(cfg) * (cfg.seen + 1)

    step = fzero.shard(descends(loss), stage=1)
    compiled = fzero.compile(step, backend="eager", max_graphs=3)
    state, cfg = step.init({"w": torch.ones(2)}, RULE), Config()
    for one, k in ((cfg, 1.0), (cfg, 3.0), (Config(inner=cfg.inner), 1.0), (cfg, 1.0)):
        one.k = k
        assert torch.equal(compiled(state, X, one)[1], step(state, X, one)[1])


def test_a_tensor_that_a_loss_closes_over_may_be_given_to_it() -> None:
    held = torch.tensor([1.0, 2.0])
    step = fzero.shard(descends(lambda p, x: (p["w"] * x * held).sum()), stage=1)
    compiled = fzero.compile(step, backend="eager")
    state = step.init({"w": torch.ones(2)}, RULE)
    for x in (held, X + 1, held, X + 2):
        assert torch.equal(compiled(state, x)[1], step(state, x)[1])


class Holder:
    """An object with a value that a property gives."""

    def __init__(self, value: Any) -> None:
        self._value = value

    @property
    def value(self) -> Any:
        return self._value


WAYS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "attribute": (lambda x: SimpleNamespace(k=x), number),
    "entry": (lambda x: {"a": 0, "k": x}, operator.itemgetter("k")),
    "element": (lambda x: [0, x], lambda of: of[-1]),
    "tuple": (lambda x: (x,), lambda of: of[0]),
    "record": (lambda x: Config(inner=x), lambda of: dataclasses.replace(of, seen=1).inner),
    "chain": (lambda x: ChainMap({}, {"k": x}), lambda of: of["k"]),
    "property": (Holder, lambda of: of.value),
    "cell": (lambda x: lambda: x, lambda of: of()),
    "partial": (lambda x: functools.partial(number, SimpleNamespace(k=x)), lambda of: of()),
    "default": (lambda x: lambda x=x: x, lambda of: of()),
    "draw": (lambda x: x, lambda of: of if torch.rand(2).shape else None),
}


@settings(max_examples=12)
@given(
    ways=st.lists(st.sampled_from([*WAYS]), min_size=1, max_size=5),
    around=st.sampled_from(["", "remat", "checkpoint"]),
    calls=st.lists(st.tuples(st.integers(0, 1), st.booleans()), min_size=3, max_size=3),
    stage=st.sampled_from([0, 3]),
)
def test_random_programs_follow_what_they_reach(
    ways: list[str], around: str, calls: list[tuple[int, bool]], stage: int
) -> None:
    """Draws, recomputations, one tensor given twice, and numbers behind structures that change."""
    leaf = SimpleNamespace(k=1.0, t=torch.ones(2))
    held: Any = leaf
    for way in ways:
        held = WAYS[way][0](held)

    def reached(x: Tensor) -> Tensor:
        found = held
        for way in reversed(ways):
            found = WAYS[way][1](found)
        return F.dropout(x * found.k + found.t)

    wraps: Any = {"": lambda fn: fn, "remat": fzero.remat, "checkpoint": checkpointed}
    part = wraps[around](reached)

    def loss(p: Any, x: Tensor, y: Tensor) -> Tensor:
        return (part(p["w"] * x).sin() * y).sum()

    step = fzero.shard(descends(loss), stage=stage)
    compiled = fzero.compile(step, backend="eager")
    state = other = step.init({"w": torch.ones(2)}, RULE)
    for number_of_call, (changed, alike) in enumerate(calls):
        if changed:
            leaf.k, leaf.t = leaf.k + 1, leaf.t * 2
        x = X + number_of_call
        made = []
        for fn, old in ((compiled, other), (step, state)):
            torch.manual_seed(number_of_call)
            made.append(fn(old, x, x if alike else x + 1))
        (other, got), (state, want) = made
        assert torch.equal(got, want)
        assert torch.equal(*(fzero.full_params(one)["w"] for one in (other, state)))


def checkpointed(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x: checkpoint(fn, x, use_reentrant=False)
