"""`engine.reshard`: the user's module, hooks and optimizer go on, with the numbers of before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import fzero
from fzero.adapter import Engine
from fzero.checkpoint import load, save
from tests.checkpoint.trainings import Net, make, rows_of, total
from tests.ranks import run_ranks
from tests.strategies import same

MOVES: tuple[dict[int, int], ...] = ({1: 3, 3: 2}, {1: 0, 2: 3, 3: 1}, {2: 2})


class Normed(Net):
    """Uneven sizes, tied, frozen and 16-bit parameters; and buffers that each rank has."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.scalar = nn.BatchNorm1d(3), nn.Parameter(torch.ones(()))
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        self.norm(x)
        return super().forward(x) * self.scalar


def _trained(stage: int, moves: dict[int, int], hidden: bool = False) -> dict[str, Any]:
    """Train; return all that there is at the end. Gradients are whole numbers."""
    module, seen = Normed(), list[int]()
    module.load_state_dict(make(1).state_dict(), strict=False)
    optimizer = torch.optim.SGD(module.parameters(), lr=2.0**-6, momentum=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    module.register_forward_hook(lambda *_: seen.append(1))
    module.first.weight.register_hook(lambda g: seen.append(2))
    engine = Engine(module, optimizer, stage=stage, bucket_bytes=64, loss_scale="dynamic")
    objects = [id(p) for p in module.parameters()]
    for number in range(5):
        if number == 3:  # what waits in a window that is closed is reduced with it
            with engine.no_sync():
                engine.backward(total(engine(rows_of(20))))
        engine.backward(total(engine(rows_of(number))))
        if number in moves:  # between the gradient and the update
            engine.reshard(moves[number])
            assert engine.stage == engine.state.stage == moves[number]
            assert module.first.weight.grad is not None and module.unused.grad is not None
        engine.backward(total(engine(rows_of(number + 10))))
        assert engine.step()
        schedule.step()
    assert objects == [id(p) for p in module.parameters()]
    assert engine.optimizer is optimizer and isinstance(module.tied.weight, nn.Parameter)
    scale = engine.loss_scale
    engine.close()
    assert module.tied.weight is module.first.weight
    momentum = {n: optimizer.state[p] for n, p in module.named_parameters() if p in optimizer.state}
    return {
        "values": {name: x.clone() for name, x in module.state_dict().items()},
        "momentum": {n: s["momentum_buffer"] for n, s in momentum.items() if s},
        "numbers": torch.tensor([scale, optimizer.param_groups[0]["lr"], len(seen)]),
    }


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_training_goes_on_as_if_nothing_had_been(ranks: int, stage: int) -> None:
    def on(moves: dict[int, int]) -> Any:
        return fzero.simulate(lambda: _trained(stage, moves), world_size=ranks)()

    wanted = on({})
    for moves in MOVES:
        same(on(moves), wanted)


def engine_on(mesh: Any, *, stage: int = 1, seed: int = 1) -> Engine:
    module = Normed()
    module.load_state_dict(make(seed).state_dict(), strict=False)
    chosen = torch.optim.AdamW(module.parameters(), lr=0.01 * seed)
    return Engine(module, chosen, stage=stage, mesh=mesh, bucket_bytes=64)


def train(engine: Engine, number: int) -> None:
    rows = rows_of(number)[: 2 + engine.axis.rank]
    engine(rows).sin().mean().backward()
    engine.step()


def everything(engine: Engine) -> dict[str, Any]:
    return {
        "values": engine.full_state_dict(),
        "moments": engine.full_optimizer_states(),
        "numbers": torch.tensor([engine.state.step, engine.optimizer.param_groups[0]["lr"]]),
    }


def _go_and_come(rank: int, size: int, folder: Path) -> Any:
    two = DeviceMesh("cpu", [0, 1])
    engine = engine_on(None)
    train(engine, 0)
    engine.optimizer.param_groups[0]["lr"] = 0.5
    save(folder / "three", engine)
    engine.reshard(stage=3, mesh=two)
    assert engine.closed == (rank == 2)
    if rank == 2:
        values = list(engine.module.parameters())
        assert all(type(p) is nn.Parameter and p.isfinite().all() for p in values)
        engine.optimizer.step()  # an ordinary one again
        engine = engine_on(fzero.Axis(size=1), stage=0, seed=3)  # to come back
    else:
        wanted = load(folder / "three", engine_on(two, stage=3, seed=2), rng=False)
        same(everything(engine), everything(wanted))
        wanted.close()
        train(engine, 1)
        save(folder / "two", engine)
    engine.reshard(2, fzero.world())
    wanted = load(folder / "two", engine_on(None, stage=2, seed=2), rng=False)
    same(everything(engine), everything(wanted))
    train(engine, 2)
    train(wanted, 2)
    same(everything(engine), everything(wanted))
    engine.reshard(3)
    engine.reshard(mesh=DeviceMesh("cpu", [1]))
    if rank != 1:
        assert all(p.isnan().all() for p in engine.module.parameters() if p.is_floating_point())


@pytest.mark.xdist_group("gloo")
def test_ranks_go_and_come_as_by_checkpoints(tmp_path: Path) -> None:
    run_ranks(_go_and_come, 3, tmp_path)


def _refused(rank: int, size: int) -> list[str]:
    one, found = fzero.Axis(size=1), list[str]()
    two = DeviceMesh("cpu", [0, 1])
    engine = engine_on(two if rank < 2 else one, seed=rank // 2 + 1)
    module = nn.Linear(3, 3)
    other = Engine(module, torch.optim.AdamW(module.parameters()), stage=1, mesh=one)
    small = Normed()
    chosen = torch.optim.AdamW(small.parameters(), lr=1.0)
    buckets = Engine(small, chosen, stage=1, mesh=one, bucket_bytes=128)
    for come in (other, buckets):
        with pytest.raises(fzero.FzeroError) as raised:
            (come if rank == 2 else engine).reshard(2, fzero.world())
        found.append(str(raised.value).splitlines()[0])
    train(engine, 3)
    return found


@pytest.mark.xdist_group("gloo")
def test_a_rank_that_comes_with_another_engine_is_refused_on_all() -> None:
    for one, other in run_ranks(_refused, 3):
        assert "the parameters in the state of before are not those of this state" in one
        assert "the ranks disagree about the layout of the parameters" in other


def _with_gradients(rank: int, size: int) -> list[bool]:
    """Rank 2, which leaves, alone has used a parameter."""
    engine = engine_on(None)
    module: Any = engine.module
    out = engine(rows_of(0)).sum()
    engine.backward(out + module.unused.sum() if rank == 2 else out)
    with torch.no_grad():
        module.low.weight.fill_(2.0)  # masters follow
    engine.reshard(mesh=DeviceMesh("cpu", [0, 1]))
    if rank == 2:
        return []
    engine.step()
    stepped, still = engine.full_parameter("unused"), engine.full_parameter("norm.weight")
    written = engine.full_parameter("low.weight")
    return [
        bool((stepped != 1).all()),
        bool((still == 1).all()),
        bool((written - 2).abs().max() < 0.1),
    ]


@pytest.mark.smoke
@pytest.mark.xdist_group("gloo")
def test_gradients_of_a_rank_that_leaves_count() -> None:
    found = run_ranks(_with_gradients, 3)
    assert found == [[True] * 3, [True] * 3, []]


def test_what_cannot_be_leaves_the_engine_as_it_was() -> None:
    module = nn.Linear(2, 2)
    options: dict[str, Any] = {"compress": fzero.Compress(parameters=fzero.codecs.int8())}
    engine = Engine(module, torch.optim.SGD(module.parameters(), lr=0.5), stage=3, **options)
    wrongs: list[dict[str, Any]] = [{"stage": 1}, {"stage": 4}, {"mesh": 2}]
    for wrong in wrongs:
        with pytest.raises(fzero.FzeroError):
            engine.reshard(**wrong)
    with engine.coalesce(), pytest.raises(fzero.PhaseError, match="inside a window"):
        engine.reshard(stage=3)
    with torch.inference_mode():  # as after a validation
        engine.reshard(stage=3)
    engine(torch.ones(1, 2)).sum().backward()
    assert engine.step()


def test_a_forward_from_before_is_not_lost_in_silence() -> None:
    for stage, to, whole in ((1, 3, True), (3, 1, True), (1, 3, False)):
        module = nn.Linear(2, 2)
        engine = Engine(module, torch.optim.SGD(module.parameters(), lr=0.5), stage=stage)
        inner = torch.ones(1, 2, requires_grad=True)
        out = engine(inner) if whole else nn.functional.linear(inner, module.weight)
        loss = out.sum()
        engine.reshard(stage=to)
        with pytest.raises((RuntimeError, fzero.FzeroError)):
            loss.backward()
        engine.zero_grad()
        engine(inner).sum().backward()
        assert engine.step()
