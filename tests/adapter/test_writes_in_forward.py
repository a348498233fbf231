"""A forward that writes to its own parameters is refused; equal writes between steps are right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
from fzero.adapter import Engine, gathered
from fzero.errors import FzeroError, LayoutError, MismatchError, PeerFailedError, PhaseError
from tests.adapter.nets import F64, linear
from tests.adapter.on_ranks import Place, at_places, each_stage, on_ranks, virtually
from tests.adapter.plain import Draw, Reference, back, engine_of, same, update


class Codes(nn.Module):
    """x [n, 3] -> [n, 3]; `write(code, x)` in each forward."""

    def __init__(self, write: Callable[[Any, Tensor], Any], *, learns: bool = True) -> None:
        super().__init__()
        self.a, self.write = linear(3, 3), write
        self.code = nn.Parameter(torch.ones(3, dtype=F64), requires_grad=learns)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.write(self.code, x)
        return self.a(x) * self.code


def clip(code: Tensor, _: Tensor) -> None:
    code.mul_(0.5)


def move(code: Tensor, x: Tensor) -> None:
    code.detach()[1:].lerp_(x.mean(0)[1:], 0.1)  # a codebook, through a view


def on_rank_1(code: Tensor, _: Tensor) -> None:
    if fzero.world().rank == 1:
        code.add_(1.0)


def nothing(code: Tensor, _: Tensor) -> None:
    """No write."""


@at_places(1, 2)
@pytest.mark.parametrize("learns", [True, False])
def test_a_forward_that_writes_raises_on_every_rank_until_ranks_are_equal_again(
    at: Place, learns: bool
) -> None:
    module: Any = Codes(clip, learns=learns)
    engine = Engine(module, torch.optim.SGD, stage=at.stage)
    lazy = at.is_lazy
    kind, seen = (LayoutError, "code.* is written in place") if lazy else (PhaseError, "to code")
    for call in (engine, module):
        for grad in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            with pytest.raises(kind, match=f"{seen}(.|\n)*Fix: "), grad():
                call(at.draw(0)(2, 3))
    module.write = nothing
    if not lazy:
        engine(at.draw(0)(2, 3)).sum().backward()
        with pytest.raises(PhaseError, match="the forward wrote to code"):
            engine.step()
        with gathered(module, modify=True):
            pass
        assert engine.step()
    engine(at.draw(0)(2, 3)).sum().backward()
    assert engine.step()
    fzero.check_replicas(engine.state)


@virtually(2)
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("window", [False, True])
def test_a_write_on_one_rank_raises_on_all_of_them_and_names_the_parameter(
    stage: int, direct: bool, window: bool
) -> None:
    module = Codes(on_rank_1)
    engine = Engine(module, torch.optim.SGD, stage=stage)
    mine = fzero.world().rank == 1
    expected = ((PhaseError, LayoutError), "code") if mine else (PeerFailedError, r"on rank \[1\]")
    with pytest.raises(expected[0], match=expected[1]):
        step(engine, module if direct else engine, window)


def step(engine: Engine, call: Any, window: bool) -> None:
    x = Draw(fzero.world().rank, 0)(2, 3)
    if window:
        with engine.coalesce():
            call(x).sum().backward()
    else:
        call(x).sum().backward()
    engine.step()


def clamp(module: Any) -> None:
    module.a.weight.clamp_(-0.2, 0.2)


def spread(module: Any) -> None:
    module.a.weight.add_(fzero.world().rank)


def spread_one(module: Any) -> None:
    if fzero.world().rank:
        module.a.weight.data.view(-1)  # a view is no write
        module.a.bias[1] = 7.0


def restored_on_one(module: Any) -> None:
    if fzero.world().rank:  # an average that is evaluated on one rank
        before = module.a.weight.clone()
        module.a.weight.zero_()
        module.a.weight.copy_(before)


@on_ranks(1, 2)
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("write", [clamp, restored_on_one])
def test_writes_between_steps_after_which_ranks_are_equal_are_trained_on(
    rank: int, world_size: int, stage: int, write: Callable[[Any], None]
) -> None:
    engine = engine_of(lambda: Codes(nothing), stage)
    plain = Reference(lambda: Codes(nothing), world_size)
    for number in range(3):
        update(engine, plain, rank, number)
        with torch.no_grad():
            write(engine.module)
            write(plain.module)
        same(engine.full_parameters(), plain.parameters())


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("write", [spread, spread_one])
def test_writes_between_steps_that_differ_raise_on_every_rank_at_the_update(
    rank: int, stage: int, write: Callable[[Any], None]
) -> None:
    engine = engine_of(lambda: Codes(nothing), stage)
    path = "a.weight" if write is spread else "a.bias"
    back(engine, Draw(rank, 0))
    with torch.no_grad():
        write(engine.module)
    for _ in range(2):
        with pytest.raises(MismatchError, match=f"rank 1 has other values of parameter {path}"):
            engine.step()
    with gathered(engine.module, modify=True):
        pass
    assert engine.step() and int(engine.state.step) == 1
    fzero.check_replicas(engine.state)


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 2])
def test_a_part_that_writes_and_is_called_by_itself_is_noticed_at_the_update(
    rank: int, stage: int
) -> None:
    """As `encode` of an autoencoder: no forward of the engine's module runs."""
    module = nn.ModuleDict({"code": Codes(move), "head": linear(3, 3)})
    engine = Engine(module, torch.optim.SGD, stage=stage)
    module["head"](module["code"](Draw(rank, 0)(2, 3))).sum().backward()
    with pytest.raises(MismatchError, match=r"other values of parameter code\.code than rank 0"):
        engine.step()


@each_stage
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_modules_that_are_known_to_write_are_refused_when_the_engine_is_made(
    stage: int, kind: Any
) -> None:
    def make() -> int:
        for frozen in (False, True):
            module = nn.Sequential(kind(4, 3, max_norm=1.0), linear(3, 3))
            module.requires_grad_(not frozen)
            seen = r"0 has max_norm=1\.0: its forward writes(.|\n)*Fix: leave max_norm out"
            with pytest.raises(LayoutError, match=seen):
                Engine(module, torch.optim.SGD, stage=stage)
            assert not module._forward_hooks
        return 1

    make()
    assert fzero.simulate(make, world_size=2)().tolist() == [1, 1]


class Shortens(nn.Module):
    """What nn.Embedding does with max_norm, by the function."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.full((4, 3), 2.0))

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.embedding(ids, self.table, max_norm=1.0)


@virtually(2)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_functions_behind_them_are_noticed_in_both_drivers(stage: int) -> None:
    ids = torch.arange(2)
    with pytest.raises(FzeroError, match="table"):
        Engine(Shortens(), torch.optim.SGD, stage=stage)(ids)
    apply, params = fzero.functionalize(Shortens())
    state = fzero.init(params, fzero.optim.sgd(0.1), stage=stage)
    with pytest.raises(FzeroError, match=r"wrote to a parameter|written in place"):
        fzero.grad_and_reduce(lambda p: apply(p, ids).sum(), state)()


@virtually(2)
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("trainable", [True, False])
def test_a_loss_that_writes_is_refused_where_it_is_differentiated_again(
    stage: int, trainable: bool
) -> None:
    """An argument that requires grad has torch.func differentiate: all is gathered first."""
    params = {"w": nn.Parameter(torch.ones(3), trainable), "v": torch.ones(3)}
    state = fzero.init(params, fzero.optim.sgd(0.1), stage=stage)

    def loss(p: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            p["w"].mul_(0.5)
        return (p["w"] * p["v"] * x).sum()

    # torch itself refuses to write to what the function has captured: what is frozen.
    seen = "wrote to a parameter" if trainable else "wrote to a param|mutate a captured Tensor"
    with pytest.raises(RuntimeError, match=seen):
        fzero.grad_and_reduce(loss, state)(torch.ones(3, requires_grad=True))


class Normed(nn.Module):
    """Its forward writes buffers, and no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.utils.parametrizations.spectral_norm(linear(3, 3))
        self.norm = nn.BatchNorm1d(3, dtype=F64)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.a(x))


@pytest.mark.parametrize("stage", [0, 2])
def test_buffers_may_be_written_in_a_forward(stage: int) -> None:
    def train() -> int:
        engine = engine_of(Normed, stage)
        for number in range(2):
            back(engine, Draw(fzero.world().rank, number))
            engine.step()
        return int(engine.state.step)

    assert fzero.simulate(train, world_size=2)().tolist() == [2, 2]


def uncounted(code: Any, x: Tensor) -> None:
    code.data.add_(x.sum())


@virtually(2)
@pytest.mark.parametrize(("stage", "mesh"), [(0, None), (1, None), (3, (2, 1))])
def test_check_replicas_finds_what_torch_does_not_count(stage: int, mesh: Any) -> None:
    engine = Engine(Codes(uncounted), torch.optim.SGD, stage=stage, mesh=mesh)
    fzero.check_replicas(engine.state)
    engine(Draw(fzero.world().rank, 0)(2, 3)).sum().backward()
    with pytest.raises(MismatchError, match="rank 1 has other values of parameter code than"):
        fzero.check_replicas(engine.state)


@virtually(4)
@pytest.mark.parametrize(("stage", "mesh"), [(0, None), (2, (2, 2)), (3, (2, 2)), (3, None)])
def test_check_replicas_is_silent_where_replicas_are_equal(stage: int, mesh: Any) -> None:
    rule = fzero.optim.adamw(0.1)
    params = {"w": torch.arange(9.0), "h": torch.ones(5, dtype=torch.bfloat16)}
    state = fzero.init(params, rule, stage=stage, mesh=mesh)
    for _ in range(2):
        loss = lambda p, x: (p["w"] * x).sum() + p["h"].sum()  # noqa: E731
        state, _ = fzero.grad_and_reduce(loss, state)(float(fzero.axis_index()))
        state = fzero.apply_gradients(state)
        fzero.check_replicas(state)
    if fzero.axis_index() == 3 and mesh is not None:  # rank 1 has the same shard
        rule.slots(state.optimizer)["exp_avg"][0].data.add_(1.0)
    if mesh is not None:
        seen = "rank 3 has other values of the optimizer's exp_avg of . than rank 1"
        with pytest.raises(MismatchError, match=seen):
            fzero.check_replicas(state)


def overwritten(code: Any, x: Tensor) -> None:
    """The loss of a batch is the same whenever it is computed."""
    code.data.copy_(x.mean(0))


@pytest.mark.parametrize("driver", ["engine", pytest.param("step", marks=pytest.mark.slow)])
def test_certify_says_that_replicas_part(driver: str) -> None:
    report = fzero.certify(
        Codes(overwritten),
        lambda module, x: module(x).square().sum(),
        [Draw(0, number)(2, 3) for number in range(8)],
        drivers=driver,
        stages=0,
        worlds=2,
        micro_batches=1,
        windows="each",
        precisions="fp64",
    )
    assert not report
    assert "rank 1 has other values of parameter code than rank 0" in str(report)
