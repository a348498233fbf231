"""What users do to parameters after the engine is made: seen, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fzero.adapter import Engine, gathered
from fzero.errors import LayoutError, PhaseError
from tests.adapter.plain import STAGES, engine_of
from tests.ranks import run_ranks

pytestmark = pytest.mark.xdist_group("gloo")


def ones(columns: int = 4) -> nn.Module:
    module = nn.Linear(columns, 3, bias=False, dtype=torch.float64)
    nn.init.ones_(module.weight)
    return module


X = torch.ones(1, 4, dtype=torch.float64)


def train(engine: Engine) -> None:
    engine(X).sum().backward()  # the gradient is 1 everywhere, the rate 0.25
    engine.step()


def written_body(rank: int, world_size: int) -> None:
    """What is written in place, without gradient, is trained on; so is what converts nothing."""
    for stage in STAGES:
        engine = engine_of(ones, stage)
        weight = engine.module.get_parameter("weight")
        label = f"stage {stage}, W={world_size}"
        with gathered(engine.module, modify=True) if stage == 3 else torch.no_grad():
            weight.data.mul_(3.0)
        assert engine.full_parameter("weight").unique().tolist() == [3.0], label
        engine(X).sum().backward()
        engine.module.double().to("cpu")  # what it is already, its gradients too
        engine.step()
        assert engine.full_parameter("weight").unique().tolist() == [2.75], label
        assert weight.detach().clone().unique().tolist() == [2.75], label
        engine.close()


def refused_body(rank: int, world_size: int) -> None:
    """Other memory, or another tensor, would not be trained: step() says so."""

    def assign(module: Any) -> None:
        module.weight.data = module.weight.data * 3

    def convert(module: Any) -> None:
        module.float()

    def replace(module: Any) -> None:
        module.weight = nn.Parameter(torch.ones(3, 4, dtype=torch.float64))

    for stage in STAGES:
        lazy = stage == 3 and world_size > 1
        for change, seen, lazily in (
            (assign, "weight has other memory now", "written in place"),
            (convert, "weight has other memory now", r"given data of torch\.float32"),
            (replace, "weight is another tensor now", None),
        ):
            engine = engine_of(ones, stage)
            if change is not convert:
                engine(X).sum().backward()
            begin = engine.full_parameters()
            if lazy and lazily:
                with pytest.raises(LayoutError, match=lazily):
                    change(engine.module)
                train(engine)
            else:
                change(engine.module)
                with pytest.raises(LayoutError, match=f"(?s){seen}.*Fix: "):
                    engine.step()
                assert int(engine.state.step) == 0
                assert torch.equal(engine.full_parameters()["weight"], begin["weight"])
            engine.close()


def masters_body(rank: int, world_size: int) -> None:
    for stage in (0, 2):
        engine = engine_of(lambda: ones().bfloat16(), stage)
        weight = engine.module.get_parameter("weight")
        with torch.no_grad():
            weight.copy_(torch.full((3, 4), 5.0))
        assert engine.full_parameters()["weight"].unique().tolist() == [5.0]
        assert engine.local_parameter("weight").unique().tolist() == [5.0]
        engine.close()


def views_body(rank: int, world_size: int) -> None:
    """Writes through several views at once are refused as others are."""
    for options in ({}, {"persistence_threshold_numel": 100}):
        engine = engine_of(ones, 3, **options)
        train(engine)
        engine(X)
        weight = engine.module.get_parameter("weight")
        for views in (
            weight.unbind(0),
            weight.split(1),
            weight.data.chunk(3),
            weight.split([1, 2]),
        ):
            assert torch.equal(torch.cat([v.reshape(-1) for v in views]), weight.reshape(-1))
            with pytest.raises(LayoutError, match="written in place"), torch.no_grad():
                views[0].fill_(7.0)
        assert engine.full_parameter("weight").unique().tolist() == [0.75]
        with gathered(engine.module, modify=True), torch.no_grad():
            for row in weight.unbind(0):
                row.fill_(2.0)
        assert engine.full_parameter("weight").unique().tolist() == [2.0]
        engine.close()


class Listed(nn.Module):
    """An LSTM one weight of which is also used through a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(2, 3, dtype=torch.float64)
        self.decayed = [self.cell.get_parameter("weight_ih_l0")]

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x)[0].sum() + self.decayed[0].square().sum()


def references_body(rank: int, world_size: int) -> None:
    torch.manual_seed(7)
    plain, x = Listed(), torch.ones(2, 1, 2, dtype=torch.float64)
    plain(x).backward()
    wanted = plain.cell.get_parameter("weight_ih_l0").grad
    assert wanted is not None
    for stage in STAGES:
        engine = engine_of(Listed, stage)
        engine(x).backward()
        found = engine.full_gradient("cell.weight_ih_l0")
        assert torch.allclose(found, wanted, rtol=1e-12), f"stage {stage}"
        engine.step()
        engine.close()
        module: Any = engine.module  # as an ordinary one again
        assert module.decayed[0] is module.cell.weight_ih_l0, f"stage {stage}"
        module(x).backward()


def wrong_body(rank: int, world_size: int) -> None:
    for stage in (0, 3):
        module = ones()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.25)
        engine = Engine(module, optimizer, stage=stage)
        engine(X).sum().backward()
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
        with pytest.raises(PhaseError, match="add_param_group"):
            engine.step()
        del optimizer.param_groups[1:]
        engine.step()  # the gradient is still there
        assert engine.full_parameter("weight").unique().tolist() == [0.75]
        engine.close()
        for wrong, seen in (
            (nn.Sequential(nn.LazyLinear(2)), "0.weight is not initialized"),
            (nn.Sequential(nn.Embedding(3, 2, sparse=True)), "0 gives sparse gradients"),
        ):
            with pytest.raises(LayoutError, match=seen):
                Engine(wrong, torch.optim.SGD, stage=stage)
        with pytest.raises(PhaseError, match="inference_mode"), torch.inference_mode():
            Engine(ones(), None, stage=stage)


def apart_body(rank: int, world_size: int) -> None:
    """Ranks that come to a read with another number of forwards."""
    engine = engine_of(ones, 3)
    for number in range(3):
        for _ in range(rank + number):
            with torch.no_grad():
                engine(X)
        path = "weight"
        if number == 0:
            assert engine.full_parameters()[path].unique().tolist() == [1.0]
        elif number == 1:
            engine.set_full_parameter(path, torch.full((3, 4), 2.0).double())
        else:
            assert engine.full_state_dict()[path].unique().tolist() == [2.0]
        assert engine.full_optimizer_states() == {path: {}}
    for _ in range(rank):
        engine(X).sum().backward()
    engine.close()


@pytest.mark.parametrize(
    "body", [written_body, refused_body, masters_body, references_body, wrong_body]
)
@pytest.mark.parametrize("world_size", [1, 2])
def test_what_users_do_to_parameters_is_seen_or_refused(body: Any, world_size: int) -> None:
    run_ranks(body, world_size, timeout_s=60)


@pytest.mark.parametrize("body", [views_body, apart_body])
@pytest.mark.parametrize("world_size", [2, 3])
def test_placeholders_of_stage_3_lose_no_write_and_reads_wait_for_all(
    body: Any, world_size: int
) -> None:
    run_ranks(body, world_size, timeout_s=60)
