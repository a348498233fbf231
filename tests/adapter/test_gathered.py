"""Full parameters for a while, to read or to write, at every stage."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fzero.adapter import Engine, gathered
from fzero.errors import LayoutError, PhaseError
from tests.adapter.nets import Tied
from tests.adapter.plain import STAGES
from tests.adapter.unsharded import Odd, Unsharded, loss_of, same_update, seeded
from tests.ranks import run_ranks

pytestmark = pytest.mark.xdist_group("gloo")

ADAM = functools.partial(torch.optim.AdamW, lr=0.05)


def adam_of(module: nn.Module) -> torch.optim.Optimizer:
    return ADAM([p for p in module.parameters() if p.requires_grad])


def chosen(module: nn.Module, kind: str) -> tuple[Any, list[str]]:
    """What is given to `gathered`, and the paths that it means."""
    if kind == "module":
        return module.get_submodule("b"), ["b.weight", "b.bias"]
    if kind == "parameter":
        return module.get_parameter("a.weight"), ["a.weight"]
    paths = ["c.weight", "fixed", "a.bias"]
    return [module.get_parameter(path) for path in paths], paths


def read_body(rank: int, world_size: int) -> None:
    for stage in STAGES:
        engine = Engine(seeded(Odd), ADAM, stage=stage)
        module, begin = engine.module, engine.full_parameters()
        for kind in ("module", "parameter", "list"):
            given, paths = chosen(module, kind)
            label = f"stage {stage}, W={world_size}, {kind}"
            with gathered(given) as fulls:
                assert len(fulls) == len(paths), label
                for full, path in zip(fulls, paths, strict=True):
                    assert type(full) is not nn.Parameter and torch.equal(full, begin[path])
                if stage == 3 and world_size > 1:
                    with pytest.raises(LayoutError, match="modify=True"), torch.no_grad():
                        module.get_parameter(paths[0]).fill_(9.0)
                with gathered(given) as again:  # inside of itself
                    assert all(map(torch.equal, again, fulls))
            assert not engine.memory_report().live_parameters, label
        assert all(map(torch.equal, begin.values(), engine.full_parameters().values()))
        engine.close()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_gathered_parameters_are_whole_and_a_write_without_modify_raises(world_size: int) -> None:
    run_ranks(read_body, world_size)


def write_body(rank: int, world_size: int) -> None:
    for stage in STAGES:
        for kind in ("module", "parameter", "list"):
            label = f"stage {stage}, W={world_size}, {kind}"
            reference = Unsharded(Odd, adam_of, world_size)
            engine = Engine(seeded(Odd), ADAM, stage=stage)
            loss_of(engine, rank, 0).backward()
            engine.step()
            reference.step(0)
            given, paths = chosen(engine.module, kind)
            with gathered(given, modify=True) as fulls, torch.no_grad():
                fulls[0].add_(1.0 + rank)  # rank 0's values win
                engine.module.get_parameter(paths[-1]).mul_(2.0 + rank)
            with torch.no_grad():
                reference.module.get_parameter(paths[0]).add_(1.0)
                reference.module.get_parameter(paths[-1]).mul_(2.0)
            begin = reference.parameters()
            for path, value in begin.items():
                found = engine.full_parameter(path)
                assert torch.allclose(found, value, rtol=1e-12, atol=1e-13), f"{label}: {path}"
            loss_of(engine, rank, 1).backward()
            engine.step()
            reference.step(1)
            found, wanted = engine.full_parameters(), reference.parameters()
            same_update(label, found, wanted, begin, rtol=1e-6)
            engine.close()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_what_rank_0_writes_in_gathered_is_trained_on_by_all_at_every_stage(
    world_size: int,
) -> None:
    run_ranks(write_body, world_size)


class Low(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(7, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        return (self.w * x).sum()


def masters_body(rank: int, world_size: int) -> None:
    lr, ones = 2.0**-10, torch.ones(7, dtype=torch.bfloat16)
    for stage in STAGES:
        sgd = functools.partial(torch.optim.SGD, lr=lr)
        engine = Engine(Low(), sgd, stage=stage)
        for number in range(3):
            if number == 1:
                with gathered(engine.module, modify=True) as (w,):
                    w[2] = 5.0 + rank
            engine(ones).backward()
            engine.step()
        wanted = torch.full((7,), 1.0 - 3 * lr)  # not lost by what was written to another one
        wanted[2] = 5.0 - 2 * lr
        found = engine.full_parameter("w")
        assert torch.equal(found, wanted), f"stage {stage}, W={world_size}: {found.tolist()}"
        engine.close()


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_master_of_what_was_written_follows_and_the_others_keep_their_low_bits(
    world_size: int,
) -> None:
    run_ranks(masters_body, world_size)


def raising_body(rank: int, world_size: int) -> None:
    for stage in STAGES:
        label = f"stage {stage}, W={world_size}"
        engine = Engine(seeded(Odd), ADAM, stage=stage)
        reference = Unsharded(Odd, adam_of, world_size)
        with pytest.raises(ZeroDivisionError), gathered(engine.module, modify=True) as fulls:
            paths = [path for path, _ in engine.module.named_parameters()]
            fulls[paths.index("a.weight")].fill_(0.5 + rank)
            raise ZeroDivisionError
        with pytest.raises(ZeroDivisionError), gathered(engine.module):
            raise ZeroDivisionError
        with torch.no_grad():
            reference.module.get_parameter("a.weight").fill_(0.5)
        begin = reference.parameters()
        loss_of(engine, rank, 0).backward()
        engine.step()
        reference.step(0)
        same_update(label, engine.full_parameters(), reference.parameters(), begin, rtol=1e-7)
        with pytest.raises(LayoutError, match="expected parameters"):
            gathered(dict(engine.module.named_parameters())).__enter__()  # type: ignore[arg-type]
        with pytest.raises(LayoutError, match=r"engine\.module"):
            gathered(engine).__enter__()  # type: ignore[arg-type]
        engine.close()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_gathered_block_that_raises_ends_whole_on_every_rank(world_size: int) -> None:
    run_ranks(raising_body, world_size)


def tied_body(rank: int, world_size: int) -> None:
    for stage in STAGES:
        engine = Engine(seeded(Tied), ADAM, stage=stage)
        tied: Any = engine.module
        with gathered([tied.head.weight, tied.embedding.weight], modify=True) as (one, two):
            one.fill_(0.5)
            assert torch.equal(one, two)
        out = engine(torch.arange(4))
        assert torch.equal(
            engine.full_parameter("embedding.weight"), torch.full((7, 3), 0.5).double()
        )
        out.sum().backward()
        engine.step()
        engine.close()


def test_a_tied_parameter_given_twice_is_one() -> None:
    run_ranks(tied_body, 1)
    run_ranks(tied_body, 2)


def nested_body(rank: int, world_size: int) -> None:
    last = world_size - 1
    for stage in STAGES:
        engine = Engine(seeded(Odd), ADAM, stage=stage)
        module = engine.module
        weight, bias = module.get_parameter("a.weight"), module.get_parameter("a.bias")
        with gathered(weight, modify=True, from_rank=last) as (outer,), torch.no_grad():
            outer.fill_(2.0 + rank)
            with gathered(module) as fulls:
                paths = [path for path, _ in module.named_parameters()]
                assert torch.equal(fulls[paths.index("a.weight")], outer)
            with gathered(bias, modify=True, from_rank=last) as (inner,):
                inner.fill_(3.0 + rank)
            weight.mul_(5.0)  # through the module, after blocks inside have ended
        found = engine.full_parameters()
        assert found["a.weight"].unique().tolist() == [5.0 * (2.0 + last)], f"stage {stage}"
        assert found["a.bias"].unique().tolist() == [3.0 + last], f"stage {stage}"
        if stage == 3 and world_size > 1:
            with gathered(module):
                with gathered(bias, modify=True), pytest.raises(PhaseError, match="same from_rank"):
                    gathered(weight, modify=True, from_rank=last).__enter__()
                with pytest.raises(LayoutError, match="modify=True"), torch.no_grad():
                    bias.zero_()
        assert not engine.memory_report().live_parameters
        engine.close()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_blocks_of_gathered_inside_each_other_end_one_by_one(world_size: int) -> None:
    run_ranks(nested_body, world_size)
