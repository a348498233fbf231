"""`carriers="fewer"`: the ranks of a cell are logical ones, which fewer ranks carry."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

import optree
import pytest
import torch
from torch import Tensor, nn

import fzero
from fzero.adapter import Engine
from fzero.errors import LayoutError
from fzero.state import NAMESPACE
from tests.tools.certify.faults import PLAIN

FEW: dict[str, Any] = {
    **PLAIN,
    **{"carriers": "fewer", "worlds": 4, "stages": 2, "micro_batches": 2, "precisions": "fp32"},
    **{"clipping": "on", "windows": "coalesce"},
}


def model() -> Any:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 11), nn.Dropout(0.2), nn.Tanh(), nn.Linear(11, 5), nn.LayerNorm(5)]
    return nn.Sequential(*layers)


def batch(number: int) -> Tensor:
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(number))


def loss(model: Any, x: Tensor) -> Tensor:
    return model(x).sin().square().mean()


def certified(**options: Any) -> Any:
    return fzero.certify(model(), loss, batch, **{**FEW, **options})


@pytest.mark.parametrize("worlds", [2, 3, 4])
def test_nothing_is_found_where_nothing_is_wrong(worlds: int) -> None:
    report = certified(worlds=worlds, stages=(0, 3), windows=("each", "coalesce", "accumulate"))
    assert report, report
    assert {cell.at["drivers"] for cell in report.cells} == {"step", "engine"}


@pytest.mark.slow
def test_nothing_is_found_in_what_else_a_cell_has() -> None:
    report = certified(
        ragged=("off", "on"),
        meshes=("flat", "replicas", "replicas-all"),
        offload=("none", "disk"),
        precisions=("fp32", "bf16", "autocast"),
        rules=("given", "matrix"),
        wires=("own", "predivided", fzero.codecs.cast(torch.bfloat16), "int8"),
        reductions=("mean", "sum"),
        loss_scales=("1", "1024"),
    )
    assert report, report


def looks_at_its_logical_ranks(loss_fn: Any, **options: Any) -> Any:
    def step(state: Any, batches: Sequence[Any]) -> Any:
        real = len(fzero.logical_ranks())
        for one in batches:
            scaled = lambda p, x: loss_fn(p, x) * (1 + (real - 1) * 2.0**-22)  # noqa: E731
            state, _ = fzero.grad_and_reduce(scaled, state)(one)
        return fzero.apply_gradients(state), None

    return step


def draws_from_pythons_generator(loss_fn: Any, **options: Any) -> Any:
    source = random.Random(0)

    def step(state: Any, batches: Sequence[Any]) -> Any:
        for one in batches:
            noisy = lambda p, x: loss_fn(p, x) * (1 + source.random() * 1e-6)  # noqa: E731
            state, _ = fzero.grad_and_reduce(noisy, state)(one)
        return fzero.apply_gradients(state), None

    return step


class Counts(Engine):
    """A loss depends on how many there were on this rank."""

    calls = 0

    def backward(self, loss: Any, gradient: Any = None, **options: Any) -> None:
        self.calls += 1
        super().backward(loss * (1 + self.calls * 2.0**-22), gradient, **options)


class Keeps(Engine):
    """What the optimizer keeps of the last update changes with the carriers, the parameters not."""

    def step(self) -> bool:
        done = super().step()
        if len(self.state.setup.carried(0)) > 1 and int(self.state.step) == 2:
            tree: Any = self.state.optimizer
            kept = [x for x in optree.tree_leaves(tree, namespace=NAMESPACE) if _is_flat(x)]
            kept[0].view(torch.int32)[0] ^= 1
        return done


def _is_flat(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype is torch.float32 and x.ndim == 1


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (
            {"step": looks_at_its_logical_ranks},
            "on 1 rank, .* update 1, rank 0: parameter [0-9]+[.]",
        ),
        ({"step": draws_from_pythons_generator}, "update 1, ranks? .*: parameter [0-9]+[.]"),
        ({"engine": Counts}, "on 1 rank, .* update 1, rank 0: parameter [0-9]+[.]"),
        ({"engine": Keeps}, "on 1 rank, .* update 2, rank 0: the optimizer's"),
    ],
)
def test_what_depends_on_the_carriers_is_found(fault: dict[str, Any], said: str) -> None:
    (cell,) = certified(clipping="off", windows="each", **fault).cells
    assert cell.failed and not any(check.difference for check in cell.checks)
    assert re.search(said, cell.error), cell.error
    assert certified(clipping="off", windows="each", **fault, carriers="all")


def test_meshes_of_names_have_no_logical_ranks() -> None:
    few = {key: value for key, value in FEW.items() if key != "worlds"}
    with pytest.raises(LayoutError, match=r"carriers=.* on a mesh with names"):
        fzero.certify(
            model(), loss, batch, cut={"seq": 1}, **{**few, "meshes": {"data": 2, "seq": 2}}
        )
