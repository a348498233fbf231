"""Full parameters for a while, to read or to write, at every stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fzero import count_collectives, world
from fzero.adapter import gathered
from fzero.collectives import all_reduce
from fzero.errors import LayoutError, MismatchError, PhaseError
from tests.adapter.nets import Odd, Tied
from tests.adapter.on_ranks import Place, at_places, on_ranks, virtually
from tests.adapter.plain import Draw, Reference, adamw_of, back, engine_of, same, update

each_kind = pytest.mark.parametrize("kind", ["module", "parameter", "list"])


def chosen(module: nn.Module, kind: str) -> tuple[Any, list[str]]:
    """What is given to `gathered`, and the paths that it means."""
    if kind == "module":
        return module.get_submodule("b"), ["b.weight", "b.bias"]
    if kind == "parameter":
        return module.get_parameter("a.weight"), ["a.weight"]
    paths = ["c.weight", "fixed", "a.bias"]
    return [module.get_parameter(path) for path in paths], paths


@at_places(1, 2, 3)
@each_kind
def test_gathered_parameters_are_whole_and_a_write_without_modify_raises(
    at: Place, kind: str
) -> None:
    engine = at.engine(Odd)
    module, begin = engine.module, engine.full_parameters()
    given, paths = chosen(module, kind)
    with gathered(given) as fulls:
        assert len(fulls) == len(paths)
        for full, path in zip(fulls, paths, strict=True):
            assert type(full) is not nn.Parameter and torch.equal(full, begin[path])
        if at.is_lazy:
            with pytest.raises(LayoutError, match="modify=True"), torch.no_grad():
                module.get_parameter(paths[0]).fill_(9.0)
        with gathered(given) as again:  # inside of itself
            assert all(map(torch.equal, again, fulls))
    assert not engine.memory_report().live_parameters
    same(engine.full_parameters(), begin, 0.0)


@at_places(1, 2, 3)
@each_kind
def test_what_rank_0_writes_in_gathered_is_trained_on_by_all(at: Place, kind: str) -> None:
    engine, reference = at.both(Odd, adamw_of)
    update(engine, reference, at.rank, 0, tol=1e-9)
    given, paths = chosen(engine.module, kind)
    with gathered(given, modify=True) as fulls, torch.no_grad():
        fulls[0].add_(1.0 + at.rank)
        engine.module.get_parameter(paths[-1]).mul_(2.0 + at.rank)
    with torch.no_grad():
        reference.module.get_parameter(paths[0]).add_(1.0)
        reference.module.get_parameter(paths[-1]).mul_(2.0)
    same(engine.full_parameters(), reference.parameters(), 1e-9)
    update(engine, reference, at.rank, 1, tol=1e-9)


@at_places(1, 2)
def test_a_gathered_block_that_raises_ends_whole_on_every_rank(at: Place) -> None:
    engine, reference = at.both(Odd)
    weight = engine.module.get_parameter("a.weight")
    with pytest.raises(ZeroDivisionError), gathered([weight], modify=True) as (full,):
        full.fill_(0.5 + at.rank)
        raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError), gathered(engine.module):
        raise ZeroDivisionError
    reference.module.get_parameter("a.weight").data.fill_(0.5)
    update(engine, reference, at.rank, 0)
    wrong: Any
    for wrong, seen in (
        (dict(engine.module.named_parameters()), "expected parameters"),
        (engine, r"engine\.module"),
    ):
        with pytest.raises(LayoutError, match=seen):
            gathered(wrong).__enter__()


@at_places(1, 2)
def test_a_tied_parameter_given_twice_is_one(at: Place) -> None:
    engine = at.engine(Tied)
    tied: Any = engine.module
    with gathered([tied.head.weight, tied.embedding.weight], modify=True) as (one, two):
        one.fill_(0.5)
        assert torch.equal(one, two)
    engine(torch.arange(4)).sum().backward()
    assert engine.full_parameter("embedding.weight").unique().tolist() == [0.5]
    engine.step()


@at_places(1, 2, 3)
def test_blocks_of_gathered_inside_each_other_end_one_by_one(at: Place) -> None:
    last = at.ranks - 1
    engine = at.engine(Odd)
    module = engine.module
    paths = [path for path, _ in module.named_parameters()]
    weight, bias = module.get_parameter("a.weight"), module.get_parameter("a.bias")
    with gathered(weight, modify=True, from_rank=last) as (outer,), torch.no_grad():
        outer.fill_(2.0 + at.rank)
        with gathered(module) as fulls:
            assert torch.equal(fulls[paths.index("a.weight")], outer)
        with gathered(bias, modify=True, from_rank=last) as (inner,):
            inner.fill_(3.0 + at.rank)
        weight.mul_(5.0)  # through the module, after blocks inside have ended
    found = engine.full_parameters()
    assert found["a.weight"].unique().tolist() == [5.0 * (2.0 + last)]
    assert found["a.bias"].unique().tolist() == [3.0 + last]
    if at.is_lazy:
        with gathered(module):
            with gathered(bias, modify=True), pytest.raises(PhaseError, match="same from_rank"):
                gathered(weight, modify=True, from_rank=last).__enter__()
            with pytest.raises(LayoutError, match="modify=True"), torch.no_grad():
                bias.zero_()
    assert not engine.memory_report().live_parameters


def as_many_forwards_as_ranks(engine: Any, rank: int) -> list[torch.Tensor]:
    """What a model that generates does: another number of forwards on each rank."""
    x = torch.ones(2, 3, dtype=torch.float64)
    return [engine.module(x).detach().clone() for _ in range(2 * rank + 1)]


@at_places(1, 2, 3)
@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_in_gathered_ranks_make_other_numbers_of_forwards(
    at: Place, options: dict[str, Any], mode: Any
) -> None:
    engine = at.engine(Odd, adamw_of, **options)
    reference = at.plain(Odd, adamw_of)
    for number in range(3):
        with mode(), gathered(engine.module):
            outputs = as_many_forwards_as_ranks(engine, at.rank)
            ranks = all_reduce(torch.ones(()), world())  # of the user's, between them
        wanted = reference.module(torch.ones(2, 3, dtype=torch.float64))
        assert ranks == at.ranks
        assert all(torch.allclose(x, wanted, rtol=1e-9) for x in outputs)
        assert not engine.memory_report().live_parameters
        update(engine, reference, at.rank, number, tol=1e-9)


@on_ranks(2)
@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}])
def test_backwards_in_gathered_gather_nothing_and_leave_what_it_holds(
    rank: int, world_size: int, options: dict[str, Any]
) -> None:
    engine = engine_of(Odd, 3, adamw_of, **options)
    reference = Reference(Odd, world_size, adamw_of)
    with gathered(engine.module):
        back(engine, Draw(rank, 0))
        with count_collectives() as log:
            back(engine, Draw(rank, 0))
        assert not [e for e in log.of() if e.op == "all_gather"]
    gradients = reference.run(back, 0)
    same(engine.full_gradients(), {path: 2 * g for path, g in gradients.items()}, 1e-9)
    assert not engine.memory_report().live_parameters


class Normed(nn.Module):
    """Its forward reads whole parameters, before and after the layers that have them run."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(3, 3).double() for _ in range(3))
        self.logs: list[float] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        if self.logs is not None:
            with gathered(self.c) as (weight, _):
                h = self.b(h)
                self.logs.append(weight.norm().item())
        else:
            h = self.b(h)
        with gathered([self.a.weight, self.b.weight]) as (before, after):
            h = self.b(h / before.norm()) / after.norm()
        with gathered(self.b) as (weight, _):
            return self.c(self.b(h)) * weight.norm()


@at_places(1, 2, 3)
@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}])
def test_a_forward_that_reads_in_gathered_trains_as_a_plain_module(
    at: Place, options: dict[str, Any]
) -> None:
    engine = at.engine(Normed, adamw_of, **options)
    reference = at.plain(Normed, adamw_of)
    module, norms = engine.module, []
    assert isinstance(module, Normed)
    for number in range(4):
        if number == 2:  # the order of the others is known by now
            module.logs = [] if at.rank == 0 else None
        norms.append(reference.module.get_parameter("c.weight").norm().item())
        update(engine, reference, at.rank, number, tol=1e-9)
        assert not engine.memory_report().live_parameters
    assert module.logs == (pytest.approx(norms[2:]) if at.rank == 0 else None)


@on_ranks(2)
@pytest.mark.parametrize("stage", range(3))
def test_a_write_on_one_rank_alone_raises_on_all(rank: int, stage: int) -> None:
    engine = engine_of(Odd, stage)
    begin = engine.full_parameters()
    with pytest.raises(MismatchError, match="rank 1 gathered"):
        if rank == 1:
            gathered(engine.module.b.bias, modify=True, from_rank=1).__enter__()
        engine.full_gradients()
    same(engine.full_parameters(), begin, 0.0)


def swaps(module: Any, new: torch.Tensor, kind: str) -> Any:
    """What puts `new` into a weight, by `p.data = new`; returns what puts back what was there."""
    p = module.get_parameter("a.weight")
    kept = {"p.data": lambda: p.data, "detach": p.detach, "clone": lambda: p.data.clone()}[kind]()

    def restore() -> None:
        p.data = kept

    p.data = new.clone()
    assert torch.equal(p, new)
    return restore


@virtually(1, 2)
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_swap_by_p_data_is_seen_and_its_restore_brings_back_what_was_there(stage: int) -> None:
    for kind in ("p.data", "detach", "clone"):
        engine, reference = engine_of(Odd, stage, adamw_of), Reference(Odd, world().size, adamw_of)
        module, before = engine.module, engine.full_parameters()
        new = torch.full_like(before["a.weight"], 7.0)
        swapped = {**before, "a.weight": new}
        with gathered(module, modify=True):
            swaps(module, new, kind)()
        same(engine.full_parameters(), before, 0.0)
        with gathered(module, modify=True):
            restore = swaps(module, new, kind)
        same(engine.full_parameters(), swapped, 0.0)
        x = Draw(0, 5)(2, 3)
        found = torch.func.functional_call(reference.module, swapped, (x,))
        assert torch.equal(engine(x), found)
        with gathered(module, modify=True):
            restore()
        same(engine.full_parameters(), before, 0.0)
        update(engine, reference, world().rank, 0, tol=1e-9)
        engine.close()


@virtually(2)
def test_a_restore_of_the_yielded_tensor_that_was_written_since_is_refused() -> None:
    engine = engine_of(Odd, 3)
    p = engine.module.get_parameter("a.weight")
    with gathered(p, modify=True) as fulls:
        p.data = fulls[0]  # what it is already
        p.data = torch.ones_like(fulls[0])
        with pytest.raises(LayoutError, match=r"that gathered.* has yielded"):
            p.data = fulls[0]
