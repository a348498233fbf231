"""What torch keeps for the process is each virtual rank's own, also across a gather or a sum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import allow_mutation_on_saved_tensors
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import set_checkpoint_early_stop

import fzero
from fzero.adapter import Engine
from tests.covering import covered
from tests.oracle import mean_gradient

WORLD = 3


class Net(nn.Module):
    """Two maps with one weight norm each: their weights are computed when they are read."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        make: Any = parametrizations.weight_norm
        self.a, self.b = make(nn.Linear(4, 4)), make(nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        with parametrize.cached():
            return self.b(self.a(self.a(self.b(x)))).square().sum()


def data(rank: int) -> Tensor:
    return torch.arange(8.0).reshape(2, 4) / (rank + 2)


def plain(world: int) -> dict[str, Tensor]:
    def loss(params: Any, x: Tensor) -> Tensor:
        return functional_call(Net().double(), params, (x,))

    batches = [data(rank).double() for rank in range(world)]
    return mean_gradient(loss, dict(Net().double().named_parameters()), batches)


def by_function(stage: int, around: Callable[[], Any]) -> dict[str, Tensor]:
    apply, params = fzero.functionalize(Net().double())
    state = fzero.init(params, fzero.optim.sgd(1.0), stage=stage)

    def loss_fn(p: Any, x: Tensor) -> Tensor:
        with around():
            return apply(p, x)

    for _ in range(2):  # the second one follows a plan
        state = fzero.init(params, fzero.optim.sgd(1.0), stage=stage).replace(
            schedule=state.schedule
        )
        x = data(fzero.axis_index()).double()
        state, _ = fzero.grad_and_reduce(loss_fn, state)(x)
    return fzero.gradients(state)


def by_engine(stage: int, around: Callable[[], Any]) -> dict[str, Tensor]:
    net = Net().double()
    before = {path: p.detach().clone() for path, p in net.named_parameters()}
    engine = Engine(net, torch.optim.SGD, stage=stage)
    with around():
        loss = engine(data(fzero.axis_index()).double())
    loss.backward()
    engine.step()
    after = engine.full_parameters()
    return {path: (before[path] - after[path]) / 1e-3 for path in before}


@covered(driver=[by_function, by_engine], stage=[0, 3])
def test_cached_parametrizations_are_those_of_the_call(driver: Any, stage: int) -> None:
    wanted = plain(WORLD)
    run = fzero.simulate(lambda _: driver(stage, parametrize.cached), world_size=WORLD)
    for path, value in run(torch.zeros(WORLD)).items():
        torch.testing.assert_close(value[0], wanted[path], rtol=1e-9, atol=1e-9)
    assert parametrize._cache_enabled == 0 and parametrize._cache == {}


def test_calls_of_one_module_under_one_cache_have_their_own_weights() -> None:
    apply, params = fzero.functionalize(Net())
    other = {path: 2 * value for path, value in params.items()}
    alone = [apply(given, data(0)).item() for given in (params, other, params)]
    with parametrize.cached():
        cached = [apply(given, data(0)).item() for given in (params, other, params)]
    assert cached == alone and alone[0] != alone[1]


def modes() -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """By name: what enters a mode of the process, and what reads it."""
    from torch.autograd import graph
    from torch.utils import checkpoint

    class Default:
        def __enter__(self) -> None:
            torch.set_default_dtype(torch.float64)

        def __exit__(self, *_: Any) -> None:
            torch.set_default_dtype(torch.float32)

    class Hooked:
        def __enter__(self) -> None:
            self.handle = register_module_forward_hook(lambda *_: None)

        def __exit__(self, *_: Any) -> None:
            self.handle.remove()

    return {
        "sdpa": (
            lambda: sdpa_kernel(SDPBackend.MATH),
            lambda: torch.backends.cuda.flash_sdp_enabled(),
        ),
        "early stop": (
            lambda: set_checkpoint_early_stop(False),
            lambda: checkpoint._enable_checkpoint_early_stop,
        ),
        "mutation": (
            allow_mutation_on_saved_tensors,
            lambda: graph._allow_mutation_on_saved_tensors_enabled,
        ),
        "anomaly": (
            lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
            torch.is_anomaly_enabled,
        ),
        "default dtype": (Default, torch.get_default_dtype),
        "module hooks": (Hooked, lambda: len(nn.modules.module._global_forward_hooks)),
    }


@pytest.mark.parametrize("name", modes())
def test_a_mode_of_the_process_is_that_of_the_rank(name: str) -> None:
    enter, read = modes()[name]
    outside = read()
    seen: dict[int, list[Any]] = {}

    def run(x: Tensor) -> Tensor:
        rank = fzero.axis_index()
        found = seen[rank] = [read()]
        if rank == 1:
            x = fzero.psum(x)
        with enter():
            found.append(read())
            x = fzero.psum(x)
            found.append(read())
            if rank != 1:  # that one is out before
                x = fzero.psum(x)
            found.append(read())
        return x

    fzero.simulate(run, world_size=WORLD)(torch.ones(WORLD))
    inside = seen[0][1]
    assert inside != outside and read() == outside
    assert all(found == [outside, inside, inside, inside] for found in seen.values())
