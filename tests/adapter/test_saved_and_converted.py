"""A module of an engine is saved, copied, loaded and converted in torch's own ways, or refused."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
from fzero.adapter import Engine, gathered
from fzero.errors import FzeroError, LayoutError
from tests.adapter.nets import Dtypes, Tied
from tests.adapter.on_ranks import on_ranks, virtually


def net() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 3))


def written(value: Any) -> int:
    """The bytes of a file of torch.save."""
    file = io.BytesIO()
    torch.save(value, file)
    return len(file.getvalue())


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("world_size", [1, 2])
def test_below_stage_3_what_is_saved_of_a_module_is_as_large_as_of_a_plain_one(
    stage: int, world_size: int
) -> None:
    def on_rank(_: Tensor) -> int:
        module, plain = net(), net()
        engine = Engine(module, torch.optim.AdamW, stage=stage)
        engine(torch.ones(2, 64)).sum().backward()
        engine.step()
        for path in ("", "2"):
            mine, theirs = module.get_submodule(path), plain.get_submodule(path)
            assert written(mine.state_dict()) == written(theirs.state_dict())
            copied = copy.deepcopy(mine)
            assert written(copied.state_dict()) == written(theirs.state_dict())
            assert all(map(torch.equal, copied.parameters(), mine.parameters()))
        for mine, theirs in zip(module.parameters(), plain.parameters(), strict=True):
            assert mine.untyped_storage().nbytes() == theirs.untyped_storage().nbytes()
            assert torch.equal(pickle.loads(pickle.dumps(mine)), mine)
        return 1

    run = on_rank if world_size == 1 else fzero.simulate(on_rank, world_size=world_size)
    run(torch.arange(world_size))


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_what_the_pages_recommend_saves_what_it_names(stage: int) -> None:
    engine = Engine(net(), torch.optim.AdamW, stage=stage)
    engine(torch.ones(2, 64)).sum().backward()
    of_gradients = engine.full_gradients(), fzero.gradients(engine.state)
    engine.step()
    plain = net().state_dict()
    found = [engine.state_dict(), engine.full_state_dict(), fzero.checkpoint.state_dict(engine)]
    for values in found:
        assert written(dict(values)) == written(dict(plain))
    for values in (*found, *of_gradients, fzero.full_params(engine.state)):
        assert written(values["2.bias"]) == written(plain["2.bias"])


@virtually(2)
@pytest.mark.parametrize("stage", [0, 3])
def test_what_is_tied_is_saved_once(stage: int) -> None:
    engine = Engine(Tied(), torch.optim.SGD, stage=stage)
    values = engine.state_dict()
    assert values["head.weight"] is values["embedding.weight"]
    assert written(dict(values)) <= written(dict(Tied().state_dict()))


@virtually(2)
@pytest.mark.parametrize("stage", [0, 2])
def test_parameters_are_still_the_memory_of_the_state(stage: int) -> None:
    """Of every dtype: they read what an update writes, and their writes are trained on."""
    module = Dtypes()
    engine = Engine(module, torch.optim.SGD, stage=stage)
    engine(torch.ones(5, dtype=torch.float64)).sum().backward()
    engine.step()
    with torch.no_grad():
        for p in module.parameters():
            p.mul_(2)
    wanted = fzero.full_params(engine.state)
    for path, p in module.named_parameters():
        assert torch.equal(p, wanted[path])


def layers() -> nn.Module:
    return nn.Sequential(*[nn.Linear(2, 2) for _ in range(50)], nn.BatchNorm1d(2))


@on_ranks(2)
def test_a_load_at_stage_3_is_one_short_error_and_changes_nothing() -> None:
    module, values = layers(), layers().state_dict()
    engine = Engine(module, torch.optim.SGD, stage=3)
    before = engine.full_state_dict()
    for part, some in ((module, values), (module[3], layers()[3].state_dict())):  # type: ignore[index]
        with pytest.raises(LayoutError, match="parameters of stage 3, the first") as caught:
            part.load_state_dict(some)
        assert len(str(caught.value)) < 500 and str(caught.value).count("\n") == 2
    after = engine.full_state_dict()
    assert all(torch.equal(before[name], x) for name, x in after.items())
    statistics = {"50.running_mean": torch.ones(2)}
    module.load_state_dict(statistics, strict=False)  # no parameter is among them
    assert module.get_buffer("50.running_mean").tolist() == [1.0, 1.0]
    with gathered(module, modify=True):
        module.load_state_dict(values)
    after = engine.full_state_dict()
    assert all(torch.equal(values[name], x) for name, x in after.items())
    engine.close()
    module.load_state_dict(before)


@on_ranks(1, 2)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_load_that_assigns_is_refused_and_one_that_copies_below_stage_3_is_not(
    world_size: int, stage: int
) -> None:
    module, values = net(), {name: x + 1 for name, x in net().state_dict().items()}
    engine = Engine(module, torch.optim.SGD, stage=stage)
    with pytest.raises(LayoutError, match=r"load_state_dict\(assign=True\) of 6 parameters"):
        module.load_state_dict(values, assign=True)
    if stage < 3 or world_size == 1:
        module.load_state_dict(values)
        after = engine.full_state_dict()
        assert all(torch.equal(values[name], x) for name, x in after.items())


CONVERSIONS: dict[str, Callable[[nn.Module], Any]] = {
    "half": lambda m: m.half(),
    "to a dtype": lambda m: m.to(torch.bfloat16),
    "double": lambda m: m.double(),
    "to meta": lambda m: m.to("meta"),
    "to_empty": lambda m: m.to_empty(device="cpu"),
    "a part": lambda m: m.get_submodule("2").half(),
}


@on_ranks(1, 2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", CONVERSIONS)
def test_a_conversion_is_refused_by_the_engine_at_once_or_by_the_next_forward(
    stage: int, name: str
) -> None:
    for holds in (False, True):
        engine = Engine(net(), torch.optim.SGD, stage=stage)
        x = torch.ones(2, 64)
        engine(x).sum().backward()
        if not holds:
            engine.step()
        for forward in (engine, engine.module):
            with pytest.raises(FzeroError, match=r"Fix: (.|\n)*(the engine|the Engine)"):
                CONVERSIONS[name](engine.module)
                forward(x)
        assert engine.hooks.backward_active_depth == 0
        engine.close()


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 3])
def test_a_conversion_to_what_it_is_already_goes_on(stage: int) -> None:
    engine = Engine(net(), torch.optim.SGD, stage=stage)
    for _ in range(2):
        engine.module.float().to("cpu").cpu()
        engine(torch.ones(2, 64)).sum().backward()
        assert engine.step()
