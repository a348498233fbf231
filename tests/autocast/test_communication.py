"""What crosses ranks in the lower dtype, what does not, and what stage 3 holds in it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
from fzero.adapter import Autocast, Engine, gathered
from fzero.errors import PhaseError
from tests.autocast.mixed import (
    DRIVERS,
    LOW,
    LR,
    SAFE,
    STAGES,
    Mixed,
    Projection,
    on_ranks,
)
from tests.live_bytes import LiveBytes
from tests.ranks import run_ranks

SIZES = {path: p.numel() for path, p in Mixed().named_parameters()}
LEARNING = {path for path, p in Mixed().named_parameters() if p.requires_grad}
UNUSED = {"unused.weight", "unused.bias"}


def traffic(driver: Any, stage: int) -> Counter[tuple[str, torch.dtype]]:
    """Elements that rank 0 of 2 sends in one step, by collective and dtype."""
    found: Counter[tuple[str, torch.dtype]] = Counter()
    for steps, sign in ((1, 1), (0, -1)):  # the values at the end are gathered, too
        with fzero.count_collectives() as log:
            on_ranks(driver, 2, stage, steps)
        for event in log.events:
            if event.rank == 0:
                found[event.op, event.dtype] += sign * event.numel
    return found


def is_padded(numel: int, paths: set[str]) -> bool:
    """Whether `numel` are the elements of these parameters, each padded to 16 bytes a rank."""
    wanted = sum(SIZES[path] for path in paths)
    return wanted <= numel <= wanted + 15 * len(paths)


@DRIVERS
@pytest.mark.parametrize("stage", STAGES)
def test_gradients_of_safe_modules_cross_ranks_in_the_lower_dtype(driver: Any, stage: int) -> None:
    op = "reduce_scatter" if stage else "all_reduce"
    found = traffic(driver, stage)
    sent = LEARNING - UNUSED if stage == 3 else LEARNING  # a unit that nobody uses costs nothing
    assert is_padded(found[op, LOW], sent & SAFE)
    assert is_padded(found[op, torch.float32], sent - SAFE)


@DRIVERS
def test_stage_3_gathers_parameters_of_safe_modules_in_the_lower_dtype(driver: Any) -> None:
    found = traffic(driver, 3)
    # With padding: first, frozen, last; then frozen and last, as the data needs no gradient.
    assert found["all_gather", LOW] == (32 + 40 + 24) + (40 + 24)
    assert found["all_gather", torch.float32] == 2 * (32 + 8)  # table and gain, twice


def lowered(safe: Any) -> set[str]:
    """The paths that cross ranks in the lower dtype."""
    _, params = fzero.functionalize(Mixed())
    autocast = Autocast(dtype=LOW, lower_precision_safe_modules=safe)
    layout = fzero.init(params, fzero.optim.sgd(LR), stage=2, autocast=autocast).setup.layout
    groups = [group for group in layout.groups if group.communication_dtype is LOW]
    return {layout.leaves[leaf].path for group in groups for leaf in group.leaves}


@pytest.mark.parametrize(
    ("safe", "wanted"),
    [
        (None, SAFE),
        ([nn.Linear], SAFE),
        (["torch.nn.Linear"], SAFE),
        (["torch.nn.modules.linear.Linear"], SAFE),
        ([Projection], {"last.weight", "last.bias"}),
        (["tests.autocast.mixed.Projection"], {"last.weight", "last.bias"}),
        ([nn.Linear, nn.Embedding], SAFE | {"table.weight"}),
        ([nn.Conv2d], set[str]()),
        ([], set[str]()),
        (lambda path: path == "gain", {"gain"}),
    ],
)
def test_what_is_safe_is_told_by_class_by_name_or_by_path(safe: Any, wanted: set[str]) -> None:
    assert lowered(safe) == wanted
    engine = Engine(
        Mixed(), None, stage=0, autocast=Autocast(dtype=LOW, lower_precision_safe_modules=safe)
    )
    layout = engine.state.setup.layout
    groups = [group for group in layout.groups if group.communication_dtype is LOW]
    assert {layout.leaves[leaf].path for group in groups for leaf in group.leaves} == wanted
    engine.close()


def test_parameters_of_no_known_module_cross_ranks_in_fp32() -> None:
    state = fzero.init({"w": torch.ones(3)}, fzero.optim.sgd(LR), stage=2, autocast=LOW)
    assert [group.communication_dtype for group in state.setup.layout.groups] == [None]


LAYERS, WIDTH = 6, 64
UNIT = 2 * WIDTH * WIDTH


def held_by_graph(rank: int, world_size: int) -> int:
    """Bytes that a forward leaves alive for its backward."""
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    engine = Engine(layers, torch.optim.SGD, stage=3, autocast=LOW)
    for _ in range(2):  # the schedule is recorded
        engine(torch.ones(1, WIDTH)).float().sum().backward()
        engine.step()
    with LiveBytes() as live:
        loss = engine(torch.ones(1, WIDTH)).float().sum()
        held = live.settled(2 * UNIT - 1)
    loss.backward()
    return held


@pytest.mark.xdist_group("gloo")
def test_no_copy_of_a_gathered_parameter_waits_for_the_backward() -> None:
    for held in run_ranks(held_by_graph, 2):
        assert held < 2 * UNIT  # activations, and the unit that the backward begins with


def test_values_between_steps_are_exact_and_may_be_written() -> None:
    def body(rank: int) -> dict[str, Tensor]:
        engine = Engine(nn.Linear(3, 3), torch.optim.SGD, stage=3, autocast=LOW)
        with gathered(engine.module, modify=True) as (weight, _):
            weight.copy_(torch.arange(9.0).reshape(3, 3) / 7)
        engine(torch.ones(1, 3)).float().sum().backward()
        return {"weight": engine.full_parameter("weight")}

    found = on_ranks(body, 2)["weight"]
    assert torch.equal(found, torch.arange(9.0).reshape(3, 3) / 7)


@pytest.mark.parametrize("reshard", [True, False, "window"])
def test_values_that_are_read_outside_of_a_pass_are_exact(reshard: Any) -> None:
    """Also of units that are still here, rounded: kept ones, and small parameters that persist."""
    sevenths = torch.arange(9.0).reshape(3, 3) / 7

    def body(rank: int) -> dict[str, Tensor]:
        layer = nn.Linear(3, 3)
        layer.weight.data, layer.bias.data = sevenths.clone(), sevenths[1].clone()
        engine = Engine(
            nn.Sequential(layer, nn.Linear(3, 3)),
            torch.optim.SGD,
            stage=3,
            autocast=LOW,
            reshard_after_forward=reshard,
            persistence_threshold_numel=3,
        )
        with engine.no_sync():
            y = engine(torch.ones(1, 3))
            between = layer.weight + 0
            y.float().sum().backward()
            saved = engine.full_state_dict()
        again = engine(torch.ones(1, 3))
        assert torch.equal(again, y)
        return {"between": between, "weight": saved["0.weight"], "bias": saved["0.bias"]}

    found = on_ranks(body, 2)
    assert torch.equal(found["between"], sevenths)
    assert torch.equal(found["weight"], sevenths)
    assert torch.equal(found["bias"], sevenths[1])


@pytest.mark.parametrize("options", [{}, {"autocast": LOW}])
def test_parameters_are_not_written_in_a_forward(options: dict[str, Any]) -> None:
    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.map = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            y = self.map(x)
            with gathered(self.map, modify=True):
                return y.float().sum()

    def body(rank: int) -> dict[str, Tensor]:
        engine = Engine(Writing(), torch.optim.SGD, stage=3, **options)
        with pytest.raises(PhaseError, match="between steps"):
            engine(torch.ones(1, 2))
        return {}

    on_ranks(body, 2)


def test_a_graph_from_before_an_update_says_so() -> None:
    def body(rank: int) -> dict[str, Tensor]:
        layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        engine = Engine(layers, torch.optim.SGD, stage=3, autocast=LOW)
        old = engine(torch.ones(1, 2)).float().sum()
        engine(torch.ones(1, 2)).float().sum().backward()
        engine.step()
        with pytest.raises(PhaseError, match="from before the update"):
            engine.backward(old)
        return {}

    on_ranks(body, 2)
