"""A stack of matrices, as of experts, beside one rule for each of them: the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
from fzero.adapter import Engine
from fzero.errors import LayoutError
from fzero.machine.powersgd import powersgd
from fzero.optim import muon, shampoo, soap

RULES: dict[str, Any] = {
    "muon": lambda **o: muon(0.0625, dtype=torch.float32, **o),
    "muon, split": lambda **o: muon(
        0.0625, dtype=torch.float32, split=lambda leaf: [2, 4] if leaf.path[0] == "w" else None, **o
    ),
    "shampoo": lambda **o: shampoo(0.0625, **o),
    "soap": lambda **o: soap(0.0625, refresh_every=2, **o),
}
SHAPES = {"w": (3, 6, 4), "more": (2, 2, 3, 5), "plain": (5, 3)}


def numbers(seed: int, names: Any = SHAPES) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(seed)
    return {k: torch.randint(-4, 5, SHAPES[k], generator=source).float() for k in names}


def apart(values: dict[str, Tensor], lead: dict[str, int]) -> dict[str, Tensor]:
    """Each matrix by itself."""
    return {
        f"{name}{i}": matrix.clone()
        for name, x in values.items()
        for i, matrix in enumerate(x.flatten(0, lead[name] - 1) if lead[name] else [x])
    }


def trained(rule: Any, params: Any, gradients: Any, stage: int, ranks: int) -> dict[str, Tensor]:
    def step_fn(state: Any, number: Tensor) -> Any:
        grads = gradients(int(number))
        state, out = fzero.grad_and_reduce(
            lambda p: torch.stack([(p[k] * g).sum() for k, g in grads.items()]).sum(), state
        )()
        return fzero.apply_gradients(state), (fzero.full_params(state), out)

    step: Any = fzero.simulate(fzero.shard(step_fn, stage=stage), world_size=ranks)
    state = step.init(params, rule)
    for number in range(4):
        state, (found, _) = step(state, torch.full((ranks,), number))
    return {name: x[0] for name, x in found.items()}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize(("stage", "ranks"), [(0, 1), (1, 2), (2, 3), (3, 2)])
def test_each_matrix_is_stepped_as_by_a_rule_of_its_own(name: str, stage: int, ranks: int) -> None:
    for name_of_stack, batch_dims in ("w", 1), ("more", 2):
        chosen = {name_of_stack: batch_dims, "plain": 0}
        given = numbers(0, chosen)
        stacked = trained(
            RULES[name](batch_dims=batch_dims),
            given,
            lambda k, chosen=chosen: numbers(1 + k, chosen),
            stage,
            ranks,
        )
        alone = trained(
            RULES[name](),
            apart(given, chosen),
            lambda k, chosen=chosen: apart(numbers(1 + k, chosen), chosen),
            stage,
            ranks,
        )
        for path, x in apart(stacked, chosen).items():
            assert torch.allclose(x, alone[path], rtol=0, atol=2.0**-20), path
            if not name.startswith("muon"):  # a batch of products may round otherwise
                assert torch.equal(x, alone[path]), path


def test_without_batch_dims_what_may_be_a_stack_is_refused_and_convolutions_are_not() -> None:
    class Model(nn.Module):
        def __init__(self, kind: str) -> None:
            super().__init__()
            self.a = nn.Conv2d(2, 4, 3, bias=False)
            self.kind = kind
            if kind == "stack":
                self.experts = nn.Parameter(torch.ones(3, 4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x)

    for name, make in RULES.items():
        for stage in (0, 3):
            for build in (
                lambda rule, stage=stage: fzero.init(
                    {"experts": torch.ones(3, 4, 4)}, rule, stage=stage
                ),
                lambda rule, stage=stage: Engine(Model("stack"), rule, stage=stage),
                lambda rule, stage=stage: fzero.init(
                    fzero.functionalize(Model("stack"))[1], rule, stage=stage
                ),
            ):
                said = (
                    rf"{name[:4]}.*experts has the shape \(3, 4, 4\)(.|\n)*batch_dims=1 for a stack"
                )
                with pytest.raises(LayoutError, match=said):
                    build(make())
                with pytest.raises(LayoutError, match="batch_dims=2"):
                    build(make(batch_dims=2))
                build(make(batch_dims=0))
            if "split" not in name:
                Engine(Model("conv"), make(), stage=stage)
                fzero.init(fzero.functionalize(Model("conv"))[1], make(), stage=stage)
        with pytest.raises(LayoutError, match="batch_dims=-1"):
            make(batch_dims=-1)


def test_powersgd_has_factors_of_each_matrix_of_a_stack() -> None:
    chosen = {"w": 1}

    def run(codec: Any, given: Any, gradients: Any) -> Any:
        def step_fn(state: Any, number: Tensor) -> Any:
            rank = fzero.axis_index()
            grads = gradients(10 * int(number) + rank)
            state, _ = fzero.grad_and_reduce(
                lambda p: torch.stack([(p[k] * g).sum() for k, g in grads.items()]).sum(), state
            )()
            return fzero.apply_gradients(state), fzero.full_params(state)

        encoded = fzero.compress(step_fn, gradients=codec)
        step: Any = fzero.simulate(fzero.shard(encoded, stage=2), world_size=2)
        state = step.init(given, fzero.optim.sgd(0.125))
        for number in range(4):
            state, found = step(state, torch.full((2,), number))
        return {name: x[0] for name, x in found.items()}

    given = numbers(0, chosen)
    stacked = run(powersgd(rank=1, batch_dims=1), given, lambda k: numbers(k, chosen))
    alone = run(powersgd(rank=1), apart(given, chosen), lambda k: apart(numbers(k, chosen), chosen))
    for path, x in apart(stacked, chosen).items():
        assert torch.allclose(x, alone[path], rtol=0, atol=2.0**-18), path
    with pytest.raises(LayoutError, match=r"powersgd: w has the shape(.|\n)*batch_dims=1"):
        run(powersgd(rank=1), given, lambda k: numbers(k, chosen))
    assert powersgd(rank=1, batch_dims=1).wire_bytes_of((3, 6, 4)) == 3 * 4 * 10
