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
from tests.adapter.unsharded import Odd, Unsharded, loss_of, same_update, seeded
from tests.ranks import run_ranks

gloo = pytest.mark.xdist_group("gloo")
STAGES = pytest.mark.parametrize("stage", range(4))
SGD = functools.partial(torch.optim.SGD, lr=0.25)


def sgd_of(module: nn.Module) -> torch.optim.Optimizer:
    return SGD([p for p in module.parameters() if p.requires_grad])


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
def no_breaks() -> Iterator[Callable[..., Any]]:
    """Give a torch.compile that counts its graphs; fail if there is none, or if one broke."""
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return aot_eager(graph, inputs)

    with fresh():
        yield functools.partial(torch.compile, backend=backend)
        assert graphs and not counters["graph_break"], dict(counters["graph_break"])


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


WAYS = (compiled_around, compiled_parts, compiled_in_place, compiled_afterwards)


def paths(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """By the paths of the module before it was compiled."""
    return {path.replace("_orig_mod.", ""): value for path, value in found.items()}


def trains(rank: int, world_size: int, stage: int) -> None:
    for way in WAYS:
        reference = Unsharded(Odd, sgd_of, world_size)
        with no_breaks() as compile_:
            module, called = way(compile_)
            engine = Engine(module, sgd_of(module), stage=stage)
            call = called(engine) if called else engine
            for number in range(3):
                loss_of(call, rank, number).backward()
                engine.step()
                reference.step(number)
            with torch.no_grad():
                x = torch.ones(2, 3).double()
                assert torch.allclose(call(x), reference.module(x), rtol=1e-9)
        found = paths(engine.full_parameters())
        same_update(way.__name__, found, reference.parameters(), reference.begin)
        engine.close()


@gloo
@STAGES
def test_a_compiled_module_is_one_graph_and_trains_as_if_it_were_not_sharded(stage: int) -> None:
    run_ranks(trains, 2, stage, timeout_s=120)


class Whole(nn.Module):
    """Its first layer is given by the graph's inputs, its second one is read through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(64, 64)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.first) @ self.second.t()


def kept_between(rank: int, world_size: int) -> list[int]:
    with no_breaks() as compile_:
        engine = Engine(compile_(Whole()), SGD, stage=3)
        live = []
        for _ in range(2):
            saved: list[Tensor] = []
            hooks = torch.autograd.graph.saved_tensors_hooks(
                lambda x, saved=saved: saved.append(x) or x, lambda x: x
            )
            with hooks:
                out = engine(torch.ones(3, 64))
            live.append(max(x.numel() for x in saved))
            out.sum().backward()
            engine.step()
    return live


@gloo
def test_a_graph_of_stage_3_keeps_no_whole_parameter_for_its_backward() -> None:
    for live in run_ranks(kept_between, 2):
        assert max(live) == 3 * 64  # activations


def whole_loop(rank: int, world_size: int, stage: int) -> None:
    reference = Unsharded(Odd, sgd_of, world_size)
    module = seeded(Odd)
    engine = Engine(module, sgd_of(module), stage=stage)

    @torch.compile(backend="eager")
    def train(number: int) -> None:
        loss = loss_of(engine, rank, number)
        engine.backward(loss)
        engine.step()

    with fresh():
        for number in range(2):
            train(number)
            reference.step(number)
    same_update("loop", engine.full_parameters(), reference.parameters(), reference.begin)


@gloo
@pytest.mark.parametrize("stage", [2, 3])
def test_a_compiled_training_loop_around_an_engine_trains_as_if_it_were_not(stage: int) -> None:
    run_ranks(whole_loop, 2, stage)


class Writes(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.mul_(0.5)
        return super().forward(x)


def written(rank: int, world_size: int) -> str:
    module = Writes(2, 2)
    module.compile(backend="eager")
    engine = Engine(module, SGD, stage=3)
    with fresh(), pytest.raises(Exception) as raised:
        engine(torch.ones(1, 2))
    return str(raised.value)


@gloo
def test_a_graph_that_writes_to_a_parameter_of_stage_3_is_refused() -> None:
    for text in run_ranks(written, 2):
        assert "written in place" in text and "gathered(module, modify=True)" in text, text


def test_importing_fzero_does_not_import_the_compiler() -> None:
    code = "import sys, fzero; sys.exit('torch._dynamo' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
