"""A module that torch.compile has compiled trains under an engine, in one graph at every stage."""

from __future__ import annotations

import functools
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.utils import counters

from fzero.adapter import Engine
from tests.adapter.nets import Odd
from tests.adapter.on_ranks import on_ranks
from tests.adapter.plain import Draw, Reference, back, same, seeded, sgd_of

# The code that describes a placeholder to a graph asks torch.compiler.is_compiling, which torch
# 2.11 answers inside of a graph only. So there a graph breaks at each read of a placeholder.
GRAPHS_HAVE_PLACEHOLDERS = hasattr(torch.compiler, "_compile_session_context")


@contextmanager
def fresh() -> Iterator[None]:
    """Nothing is compiled yet, and nothing stays compiled."""
    torch._dynamo.reset()
    counters.clear()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")  # torch reads it
            yield
    finally:
        torch._dynamo.reset()


@contextmanager
def no_breaks(*, unless: bool = False) -> Iterator[Callable[..., Any]]:
    """Give a torch.compile that counts its graphs; fail if there is none, or if one broke."""
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return aot_eager(graph, inputs)

    with fresh():
        yield functools.partial(torch.compile, backend=backend)
        assert unless or (graphs and not counters["graph_break"]), dict(counters["graph_break"])


def compiled_around(compile_: Any) -> tuple[nn.Module, Any]:
    return compile_(seeded(Odd)), None


def compiled_parts(compile_: Any) -> tuple[nn.Module, Any]:
    module: Any = seeded(Odd)
    module.a, module.c = compile_(module.a), compile_(module.c)
    return module, None


def compiled_in_place(compile_: Any) -> tuple[nn.Module, Any]:
    module = seeded(Odd)
    module.compile(**compile_.keywords)
    return module, None


def compiled_afterwards(compile_: Any) -> tuple[nn.Module, Any]:
    return seeded(Odd), lambda engine: compile_(engine.module)


OTHER_WAYS = (compiled_in_place, compiled_afterwards)


@on_ranks(2, timeout_s=120)
@pytest.mark.parametrize(
    ("way", "stage"),
    # Below stage 3 a graph reads ordinary parameters, however it was made.
    [
        *((compiled_around, stage) for stage in (1, 3)),
        *(pytest.param(compiled_around, stage, marks=pytest.mark.slow) for stage in (0, 2)),
        (compiled_parts, 3),
        *(pytest.param(way, 3, marks=pytest.mark.slow) for way in OTHER_WAYS),
    ],
)
def test_a_compiled_module_is_one_graph_and_trains_as_if_it_were_not_sharded(
    rank: int, world_size: int, stage: int, way: Any
) -> None:
    reference = Reference(Odd, world_size)
    with no_breaks(unless=stage == 3 and not GRAPHS_HAVE_PLACEHOLDERS) as compile_:
        module, called = way(compile_)
        engine = Engine(module, sgd_of(module), stage=stage)
        call = called(engine) if called else engine
        for number in range(3):
            back(call, Draw(rank, number))
            engine.step()
            reference.step(reference.run(back, number))
        with torch.no_grad():
            x = torch.ones(2, 3).double()
            assert torch.allclose(call(x), reference.module(x), rtol=1e-9)
    found = {p.replace("_orig_mod.", ""): value for p, value in engine.full_parameters().items()}
    same(found, reference.parameters())


class Whole(nn.Module):
    """Its first layer is given by the graph's inputs, its second one is read through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(64, 64)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.first) @ self.second.t()


@pytest.mark.skipif(not GRAPHS_HAVE_PLACEHOLDERS, reason="there no graph reads a parameter")
@on_ranks(2)
def test_a_graph_of_stage_3_keeps_no_whole_parameter_for_its_backward() -> None:
    with no_breaks() as compile_:
        engine = Engine(compile_(Whole()), torch.optim.SGD, stage=3)
        for _ in range(2):
            saved: list[Tensor] = []
            with torch.autograd.graph.saved_tensors_hooks(
                lambda x, saved=saved: saved.append(x) or x, lambda x: x
            ):
                out = engine(torch.ones(3, 64))
            assert max(x.numel() for x in saved) == 3 * 64  # activations
            out.sum().backward()
            engine.step()


@on_ranks(2)
@pytest.mark.parametrize("stage", [2, 3])
def test_a_compiled_training_loop_around_an_engine_trains_as_if_it_were_not(
    rank: int, world_size: int, stage: int
) -> None:
    reference, module = Reference(Odd, world_size), seeded(Odd)
    engine = Engine(module, sgd_of(module), stage=stage)

    @torch.compile(backend="eager")
    def train(x: Tensor) -> None:
        engine.backward(engine(x).square().sum())
        engine.step()

    with fresh():
        for number in range(2):
            train(Draw(rank, number)(2, 3))
            reference.step(reference.run(back, number))
    same(engine.full_parameters(), reference.parameters())


class Writes(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.mul_(0.5)
        return super().forward(x)


@on_ranks(2)
def test_a_graph_that_writes_to_a_parameter_of_stage_3_is_refused() -> None:
    module = Writes(2, 2)
    module.compile(backend="eager")
    engine = Engine(module, torch.optim.SGD, stage=3)
    with fresh(), pytest.raises(Exception, match="written in place") as raised:
        engine(torch.ones(1, 2))
    assert "gathered(module, modify=True)" in str(raised.value)


def test_importing_fzero_does_not_import_the_compiler() -> None:
    code = "import sys, fzero; sys.exit('torch._dynamo' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
