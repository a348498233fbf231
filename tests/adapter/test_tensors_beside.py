"""Tensors of a module that are no parameters: alike on all ranks, rank 0's, or named by `own`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
from fzero.adapter import Engine
from fzero.errors import LayoutError, MismatchError
from tests.adapter.on_ranks import Place, on_ranks, virtually


class Projected(nn.Module):
    """A random tensor, kept in some way; a table that is made of no random numbers."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.table: Any = {"cos": torch.arange(3.0)}
        made = torch.randn(3)
        if kind == "buffer":
            self.register_buffer("made", made)
        elif kind == "not persistent":
            self.register_buffer("made", made, persistent=False)
        elif kind == "attribute":
            self.made: Any = made
        elif kind == "list":
            self.made = [None, (made,)]
        elif kind == "dict":
            self.made = {"a": {1: made}}
        elif kind == "frozen parameter's":
            vars(self.linear.bias)["made"] = made
        elif kind == "integers":
            self.made = torch.randperm(50)
        elif kind == "booleans":
            self.made = torch.rand(50) > 0.5

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.table["cos"]


PATHS = {
    "buffer": "buffer made",
    "not persistent": "buffer made",
    "attribute": "attribute made",
    "list": r"attribute made\[1\]\[0\]",
    "dict": r"attribute made\['a'\]\[1\]",
    "integers": "attribute made",
    "booleans": "attribute made",
}


def built(kind: str, rank: int) -> nn.Module:
    """Each rank has seeded by its number, before it builds."""
    torch.manual_seed(rank)
    return Projected(kind)


def named(path: str) -> Any:
    return pytest.raises(MismatchError, match=f"(?s)the {path} differs on ranks 0 and 1.*own=")


@virtually(2, 3)
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("kind", PATHS)
def test_a_functional_state_of_ranks_that_differ_is_refused_by_name(
    at: Place, stage: int, kind: str
) -> None:
    rule = fzero.optim.sgd(0.1)
    path = PATHS[kind]
    _, params = fzero.functionalize(built(kind, at.rank))
    with named(path):
        fzero.init(params, rule, stage=stage)
    _, params = fzero.functionalize(built(kind, at.rank), own=["made"])
    fzero.init(params, rule, stage=stage)
    _, params = fzero.functionalize(built(kind, 7))
    torch.manual_seed(at.rank)  # after it was built: as it should be
    fzero.init(params, rule, stage=stage)
    if "buffer" in path:
        _, params, _ = fzero.functionalize(built(kind, at.rank), buffers=True)
        with named(path):
            fzero.shard(lambda state: (state, None), stage=stage).init(params, rule)


@virtually(2, 3)
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("kind", [*PATHS, "frozen parameter's"])
def test_an_engine_takes_buffers_of_rank_0_and_refuses_attributes_that_differ(
    at: Place, stage: int, kind: str
) -> None:
    module: Any = built(kind, at.rank)
    if "buffer" in PATHS.get(kind, ""):
        first, mine = (built(kind, rank).get_buffer("made") for rank in (0, at.rank))
        with Engine(module, None, stage=stage):
            assert torch.equal(module.made, first)
        module = built(kind, at.rank)
        with Engine(module, None, stage=stage, own=["made"]):
            assert torch.equal(module.made, mine)
        return
    with named(PATHS.get(kind, "attribute linear.bias.made")):
        Engine(module, None, stage=stage)
    with Engine(module, None, stage=stage, own=["made", "linear"][kind not in PATHS :][:1]):
        pass


@on_ranks(2)
def test_processes_say_so_as_virtual_ranks_do(rank: int) -> None:
    _, params = fzero.functionalize(built("list", rank))
    with named(PATHS["list"]):
        fzero.init(params, fzero.optim.sgd(0.1), stage=2)
    with named(PATHS["dict"]):
        Engine(built("dict", rank), None, stage=2)


class Views(nn.Module):
    """Handles on buffers and parameters, what autograd made, a cache by module."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.utils.weight_norm(nn.Linear(3, 3))
        self.lstm = nn.LSTM(3, 3)
        self.register_buffer("table", torch.randn(4, 3))
        self.rows: Any = list(self.table.unbind())  # pyright: ignore[reportCallIssue]
        self.weights = [self.lstm.weight_ih_l0]
        self.seen = {self.lstm: torch.ones(2), "a set": {torch.ones(1)}}

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.lstm(x)[0])


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@virtually(2)
def test_handles_and_what_is_made_of_parameters_do_not_count(at: Place) -> None:
    torch.manual_seed(at.rank)
    with Engine(Views(), None, stage=2) as engine:
        assert engine.axis.size == 2


def test_a_path_that_names_nothing_is_refused() -> None:
    for own in (["mode"], ["linear.weight"], "made", [1]):
        given: Any = own
        with pytest.raises(LayoutError, match="own"):
            fzero.functionalize(Projected("buffer"), own=given)
        with pytest.raises(LayoutError, match="own"):
            Engine(Projected("buffer"), None, stage=0, own=given)
    fzero.functionalize(Projected("dict"), own=["made", "table['cos']"])
