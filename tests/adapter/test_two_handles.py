"""Memory of a module that has two handles: a tie is kept, anything else is refused by both drivers.

The right value is that of plain PyTorch, which keeps every alias.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
from fzero.adapter import Engine, sharded_init
from fzero.errors import LayoutError
from tests.adapter.nets import F64, Net, linear
from tests.adapter.plain import Draw, Reference, back, engine_of, update


def transposed(m: Any) -> None:
    m.b.weight.data = m.a.weight.data.t()


def sliced(m: Any) -> None:
    m.c.weight.data = m.a.weight.data[:3]


def seen_by_a_buffer(m: Any) -> None:
    m.b.register_buffer("seen", m.a.weight.detach())


def seen_by_an_attribute(m: Any) -> None:
    m.b.seen = m.a.weight.data[1]


def seen_in_a_list(m: Any) -> None:
    m.b.seen = {"rows": [m.a.weight.data[1]]}


def turned_once(m: Any) -> None:
    m.b.seen = m.a.weight.t()


def frozen(m: Any) -> None:
    transposed(m)
    m.requires_grad_(False)
    m.c.requires_grad_(True)


REFUSED: dict[Callable[[Any], None], str] = {
    transposed: r"a\.weight and b\.weight have",
    sliced: r"a\.weight and c\.weight have",
    seen_by_a_buffer: r"a\.weight and b\.seen \(a buffer\)",
    seen_by_an_attribute: r"a\.weight and b\.seen \(an attribute\)",
    seen_in_a_list: r"a\.weight and b\.seen\['rows'\]\[0\] \(an attribute\)",
    turned_once: r"a\.weight and b\.seen \(an attribute\)",
    frozen: r"a\.weight and b\.weight have",
}


def on_ranks(make: Callable[[], Any], world_size: int) -> Any:
    def on_rank(_: Tensor) -> Any:
        return make()

    if world_size == 1:
        return make()
    return fzero.simulate(on_rank, world_size=world_size)(torch.arange(world_size))


@pytest.mark.parametrize("change", REFUSED, ids=lambda f: f.__name__)
@pytest.mark.parametrize(("world_size", "stage"), [(1, 3), (2, 0), (2, 2), (2, 3)])
def test_a_second_handle_on_a_parameter_is_refused_before_anything_changes(
    change: Callable[[Any], None], world_size: int, stage: int
) -> None:
    def make() -> None:
        module = Net()
        change(module)
        before = [(p, p.data_ptr()) for p in module.parameters()]
        with pytest.raises(LayoutError, match=REFUSED[change] + r"(.|\n)*Fix: "):
            Engine(module, torch.optim.SGD, stage=stage)
        with pytest.raises(LayoutError, match=REFUSED[change]):
            fzero.functionalize(module)
        with pytest.raises(LayoutError, match=REFUSED[change]):
            fzero.functionalize(module, buffers=True)
        assert [(p, p.data_ptr()) for p in module.parameters()] == before

    on_ranks(make, world_size)


class SameView(Net):
    """Two parameter objects on one memory."""

    def __init__(self) -> None:
        super().__init__()
        self.d = linear(3, 3)
        self.d.weight.data = self.c.weight.data

    def forward(self, x: Tensor) -> Tensor:
        return self.d(super().forward(x))


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_same_view_twice_is_a_tie(world_size: int, stage: int) -> None:
    """SGD steps twice on one memory in plain PyTorch, by each gradient: so does their sum."""

    def make() -> Tensor:
        rank = fzero.world().rank
        engine, plain = engine_of(SameView, stage), Reference(SameView, world_size)
        for number in range(2):
            wanted = plain.run(back, number)
            back(engine, Draw(rank, number))
            engine.step()
            plain.step(wanted)
        found = engine.full_parameters()
        tied = {path: p for path, p in plain.parameters().items() if path != "d.weight"}
        assert found.keys() == tied.keys()
        for path, p in tied.items():
            torch.testing.assert_close(found[path], p)
        engine.close()
        one, other = (engine.module.get_parameter(f"{name}.weight") for name in "cd")
        assert one.data_ptr() == other.data_ptr()
        return found["c.weight"]

    on_ranks(make, world_size)
    _, params = fzero.functionalize(SameView())
    state = fzero.init(params, fzero.optim.sgd(0.25), stage=stage)
    assert len(state.setup.layout.leaves) == len(params) - 1


def test_one_parameter_twice_in_an_optimizer_is_refused() -> None:
    module = Net()
    with pytest.warns(UserWarning, match="duplicate parameters"):
        twice = torch.optim.SGD([*module.parameters(), module.a.weight], lr=0.1)
    with pytest.raises(LayoutError, match=r"a\.weight is in the optimizer's groups 0 and 0"):
        Engine(module, twice, stage=0)
    both = SameView()
    apart = [{"params": [both.c.weight]}, {"params": [both.d.weight]}]
    with pytest.raises(LayoutError, match=r"c\.weight is in the optimizer's groups 0 and 1"):
        Engine(both, torch.optim.SGD(apart, lr=0.1), stage=0)


class Buffers(Net):
    """A buffer that is a part of another one, which the forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("counts", torch.zeros(4, dtype=F64))
        self.register_buffer("last", self.get_buffer("counts")[3:])
        self.alias = self.get_buffer("counts")

    def forward(self, x: Tensor) -> Tensor:
        self.get_buffer("counts").add_(1.0)
        return super().forward(x) * self.get_buffer("last")


@pytest.mark.parametrize(("world_size", "stage"), [(1, 0), (2, 0), (2, 2), (2, 3)])
def test_an_engine_keeps_the_aliases_of_buffers_which_it_does_not_move(
    world_size: int, stage: int
) -> None:
    def make() -> None:
        engine, plain = engine_of(Buffers, stage), Reference(Buffers, world_size)
        for number in range(2):
            plain.module.get_buffer("counts").fill_(float(number))
            update(engine, plain, fzero.world().rank, number, counted_back)

    on_ranks(make, world_size)
    with pytest.raises(LayoutError, match=r"counts and last \(a buffer\) have"):
        fzero.functionalize(Buffers(), buffers=True)


def counted_back(e: Any, draw: Draw) -> None:
    """Each rank has buffers of its own; the reference has one module for all of them."""
    counts = e.module.get_buffer("counts")
    before = counts.clone()
    back(e, draw)
    if not isinstance(e, Engine):
        counts.copy_(before)


def test_a_tensor_that_is_a_view_of_a_buffer_is_refused_where_buffers_are_cloned() -> None:
    class Module(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.ones(4))
            self.head = self.get_buffer("table")[:2]

    seen = r"table and head \(an attribute\) have"
    for buffers in (False, True):
        with pytest.raises(LayoutError, match=seen):
            fzero.functionalize(Module(), buffers=buffers)
    Engine(Module(), torch.optim.SGD, stage=0).close()


def spectral(m: Any) -> None:
    m.a = nn.utils.spectral_norm(m.a)


def weight(m: Any) -> None:
    m.a = nn.utils.parametrizations.weight_norm(m.a)


def orthogonal(m: Any) -> None:
    m.c = nn.utils.parametrizations.orthogonal(m.c)


def recurrent(m: Any) -> None:
    m.d = nn.LSTM(3, 3, 2, dtype=F64)
    flat = torch.randn(sum(p.numel() for p in m.d.parameters()), dtype=F64)
    for p, part in zip(
        m.d.parameters(), flat.split([p.numel() for p in m.d.parameters()]), strict=True
    ):
        p.data = part.view(p.shape)  # as cuDNN flattens them


def listed(m: Any) -> None:
    m.decayed = [m.a.weight, {"b": m.b.weight}]


def expanded_constants(m: Any) -> None:
    m.register_buffer("positions", torch.arange(4).expand(1, 4))


@pytest.mark.parametrize(
    "change", [spectral, weight, orthogonal, recurrent, listed, expanded_constants]
)
def test_what_modules_of_torch_hold_themselves_is_taken(change: Callable[[Any], None]) -> None:
    module = Net()
    change(module)
    module.train(False)
    fzero.functionalize(module)
    Engine(module, torch.optim.SGD, stage=2).close()


def test_a_parameter_with_fewer_elements_than_it_shows_is_refused_if_it_learns() -> None:
    module = linear(3, 3)
    module.weight.data = torch.ones(1, 1, dtype=F64).expand(3, 3)
    with pytest.raises(LayoutError, match=r"weight, of shape \(3, 3\) and strides \(0, 0\)"):
        Engine(module, torch.optim.SGD, stage=0)
    module.weight.requires_grad_(False)
    Engine(module, torch.optim.SGD, stage=0).close()


class AsMade(nn.Module):
    def __init__(self, change: Callable[[Any], None]) -> None:
        super().__init__()
        self.a, self.b = linear(3, 3), linear(3, 3)
        self.own = nn.Parameter(torch.ones(3))
        change(self)


def own_seen(m: Any) -> None:
    m.register_buffer("seen", m.own.detach())


def made_of_another(m: Any) -> None:
    m.b.weight = nn.Parameter(m.a.weight.detach().t())


@pytest.mark.parametrize(
    "change", [transposed, seen_by_a_buffer, seen_by_an_attribute, own_seen, made_of_another]
)
def test_a_second_handle_on_a_parameter_that_is_sharded_as_it_is_made_is_refused(
    change: Callable[[Any], None],
) -> None:
    def make() -> None:
        seen = r"have elements in common|was given the data of"
        with pytest.raises(LayoutError, match=seen):
            with sharded_init():
                module = AsMade(change)
            Engine(module, torch.optim.SGD, stage=3)

    on_ranks(make, 2)
